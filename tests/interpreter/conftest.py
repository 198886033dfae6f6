"""Kernels are interpreted when TRITON_INTERPRET=1 is set before triton is imported: tests/unit/conftest.py starts
a process of its own with it. Elsewhere there is nothing here to run.
"""

import os
from collections.abc import Iterator

import pytest
import torch

from tests.interpreter.quick import hasten

collect_ignore_glob = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["test_*.py"]


@pytest.fixture(autouse=True, scope="session")
def _quick() -> None:
    hasten()


@pytest.fixture(autouse=True)
def _memory_starts_poisoned() -> Iterator[None]:
    """What a kernel forgets to write stays NaN, or 255 in bytes."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
