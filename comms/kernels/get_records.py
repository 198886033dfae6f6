"""Gets records out of the other ranks' symmetric memory, where the device alone knows which.

    table (3, N)    from each rank: how many records, the first one's place there, its place here

Worked example, of rank 0 of 2: [[2, 1], [0, 2], [0, 2]] reads its own records 0 and 1 to places 0 and 1, and record 2
of rank 1 to place 2.

Every rank has put its records in place when this begins, and leaves them there until all have got theirs: whoever
launches it sees to both.

Shape suffixes: N ranks.
"""

# Kernels are written in Triton's language, which has no types: nor have the arguments of a launch.
# pyright: basic, reportArgumentType=false, reportCallIssue=false
# ruff: noqa: ANN001, ANN201

from collections.abc import Generator
from contextlib import contextmanager
from functools import cache
from typing import Any

import triton
import triton.language as tl
from torch import Tensor
from triton import knobs

from comms.kernels.codec import RECORD_ALIGNMENT

# Programs of one launch, divided by the ranks: enough for NVLink, and few messages of a network. Their warps.
PROGRAMS, WARPS = 64, 16


def get_records(inputs_SB: Tensor, output_SB: Tensor, table_3N: Tensor, ranks_N: Tensor, me: int) -> None:
    """Read what this rank is to get out of the others' `inputs`, which are symmetric, into `output`.

    Args:
        inputs_SB: uint8, of all ranks alike: records of B bytes, a multiple of 16.
        table_3N: int32; see the module.
        ranks_N: int32, the numbers that NVSHMEM knows the ranks by.
        me: this rank's own number among the N.
    """
    num_ranks = table_3N.shape[1]
    parts = max(PROGRAMS // num_ranks, 1)
    kernel, hook = _kernel_of_nvshmem()
    with _hooked(hook):
        kernel[(num_ranks * parts,)](
            inputs_SB, output_SB, table_3N.contiguous(), ranks_N, me, inputs_SB.shape[1],
            NUM_RANKS=num_ranks, PARTS=parts, UNIT=RECORD_ALIGNMENT, num_warps=WARPS,
        )  # fmt: skip


def why_not() -> str:
    """What Triton kernels lack to call NVSHMEM, or nothing."""
    try:
        _kernel_of_nvshmem()
    except (ImportError, AttributeError) as error:
        import torch

        return f"torch {torch.__version__} has no NVSHMEM for Triton's kernels ({error})"
    except TypeError:
        return "TRITON_INTERPRET=1 leaves no kernel to link with NVSHMEM: unset it"
    except (RuntimeError, OSError) as error:
        # What looks for the library runs `readelf`, which may not be there either.
        reason = str(error).splitlines()[0].rstrip(".")
        return f"{reason}; pip install 'sluicegate[nvshmem]', or set NVSHMEM_LIB_DIR to the folder of the library"
    return ""


@cache
def _kernel_of_nvshmem() -> tuple[Any, Any]:
    """The kernel, linked with NVSHMEM's device library, and what Triton is to call when it has compiled it."""
    global get
    import torch.distributed._symmetric_memory._nvshmem_triton as nvshmem

    # Of those that there are, it is the one that a block does together, and that returns when the bytes are there.
    get = nvshmem.get
    with _hooked(None):
        kernel = nvshmem.requires_nvshmem(get_records_kernel)
        return kernel, knobs.runtime.jit_post_compile_hook


@contextmanager
def _hooked(hook: Any) -> Generator[None]:
    """With this hook, which torch leaves in place: with it Triton writes every kernel's arguments as JSON, or fails."""
    before = knobs.runtime.jit_post_compile_hook
    knobs.runtime.jit_post_compile_hook = hook
    try:
        yield
    finally:
        knobs.runtime.jit_post_compile_hook = before


# get(here, there, bytes, rank), where `there` is an address of this rank's own memory. It is no argument of the kernel:
# see _hooked.
get: Any = None


@triton.jit(do_not_specialize=["me"])
def get_records_kernel(
    inputs, output, table, ranks, me, record,
    NUM_RANKS: tl.constexpr, PARTS: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """One program: one of PARTS equal parts of what one rank has for this one."""
    rank, part = (me + tl.program_id(0) // PARTS) % NUM_RANKS, tl.program_id(0) % PARTS
    num_bytes = tl.load(table + rank).to(tl.int64) * record
    theirs = tl.load(table + NUM_RANKS + rank).to(tl.int64) * record
    ours = tl.load(table + 2 * NUM_RANKS + rank).to(tl.int64) * record
    # Parts begin where 16 bytes do, so that they are read in such.
    size = tl.cdiv(num_bytes, PARTS * UNIT) * UNIT
    begin = part * size
    size = tl.minimum(size, num_bytes - begin)
    if size > 0:
        get(output + ours + begin, inputs + theirs + begin, size, tl.load(ranks + rank))
