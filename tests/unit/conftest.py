"""tests/interpreter needs a process whose Triton interprets: the choice is made when triton is imported. That process
runs beside the other tests; the one that reads its result comes last of all, so that nothing waits for it.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
READER = "test_kernels_under_the_interpreter"


class Interpreted(NamedTuple):
    """The process, and where it writes."""

    process: subprocess.Popen[bytes]
    output: Path


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the reader behind all others."""
    items.sort(key=lambda item: item.name == READER)


@pytest.fixture(scope="session", autouse=True)
def interpreted(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Interpreted | None]:
    """Starts with the first unit test, if the reader was selected."""
    if all(item.name != READER for item in request.session.items):
        yield None
        return
    output = tmp_path_factory.mktemp("interpreted") / "output.txt"
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "pytest", "tests/interpreter", "-q", "-p", "no:cacheprovider", "--durations=10"]
    with output.open("wb") as file:
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT)
    try:
        yield Interpreted(process, output)
    finally:
        process.kill()
        process.wait()
