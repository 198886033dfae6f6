"""What is said where Triton's kernels cannot call NVSHMEM; what the kernel reads is tested in the interpreter."""

import re
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed._symmetric_memory as symmetric
from triton import knobs

from comms.kernels import get_records
from comms.kernels.get_records import why_not

NAME = "torch.distributed._symmetric_memory._nvshmem_triton"


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """What a test found is not known to others."""
    get_records._kernel_of_nvshmem.cache_clear()
    yield
    get_records._kernel_of_nvshmem.cache_clear()


def give(monkeypatch: pytest.MonkeyPatch, requires_nvshmem: Callable[[Any], Any]) -> None:
    """Instead of torch's own."""
    module = SimpleNamespace(get=None, requires_nvshmem=requires_nvshmem)
    monkeypatch.setattr(get_records, "get", None)
    monkeypatch.setattr(symmetric, "_nvshmem_triton", module, raising=False)
    monkeypatch.setitem(sys.modules, NAME, module)


def fails(error: Exception) -> Callable[[Any], Any]:
    def requires_nvshmem(kernel: Any) -> Any:
        raise error

    return requires_nvshmem


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (RuntimeError("NVSHMEM device library not found. Searched: []"), "device library not found.* NVSHMEM_LIB_DIR"),
        (FileNotFoundError(2, "No such file or directory", "readelf"), "readelf.*; pip install"),
        (TypeError("Expected a JITFunction"), "TRITON_INTERPRET=1 .* unset it"),
        (AttributeError("no requires_nvshmem"), "has no NVSHMEM for Triton's kernels"),
        (ImportError("no such module"), "has no NVSHMEM for Triton's kernels"),
    ],
)
def test_what_is_missing_is_a_reason(error: Exception, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An exception would leave the other ranks waiting for this one's answer."""
    give(monkeypatch, fails(error))
    reason = why_not()
    assert re.search(words, reason), reason


def test_the_hook_is_there_for_own_launches_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch sets it for the whole process."""

    def hook(**_: Any) -> None: ...

    def requires_nvshmem(kernel: Any) -> Any:
        knobs.runtime.jit_post_compile_hook = hook
        return kernel

    give(monkeypatch, requires_nvshmem)
    monkeypatch.setattr(knobs.runtime, "jit_post_compile_hook", None)
    assert why_not() == "" and knobs.runtime.jit_post_compile_hook is None
    kernel, kept = get_records._kernel_of_nvshmem()
    assert kernel is get_records.get_records_kernel and kept is hook
    with pytest.raises(ZeroDivisionError), get_records._hooked(kept):
        assert knobs.runtime.jit_post_compile_hook is hook
        raise ZeroDivisionError
    assert knobs.runtime.jit_post_compile_hook is None
