"""The kernel that says where an exchange's rows and items are kept until backward (comms/saved_arena.py).

`ends` (entries, 2) has the ends of what is kept, rows and items, one behind the other: entry n begins where n - 1 ends.
What would go beyond the room gets the last place that holds it whole, over what others have there, and is noted. `base`
says where an entry's rows and items begin, and how many rows it has: indices that others wrote over stay below that.

Worked example, room for 10 rows: entries of 4, 3 and 5 rows end at 4, 7 and 12 and begin at 0, 4 and 5 (not 7), and a
need of 12 is noted.
"""

# Kernels are written in Triton's language, which has no types: nor have the arguments of a launch.
# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# ruff: noqa: ANN001, ANN202

import os

import torch
import triton
import triton.language as tl
from torch import Tensor

from comms.kernels.routes import note_overflow


def launch_reserve(
    ends: Tensor, totals: Tensor, base: Tensor, overflow: Tensor, depth: int, item_bound: int, room: tuple[int, int],
    tag: int,
) -> None:  # fmt: skip
    """Write where entry `depth` begins into `base`, and a need beyond the room into `overflow`.

    Args:
        totals: of a plan: where the rows of each chunk end, then all items.
        item_bound: of them no more are worked on.
        room: for rows and items.
    """
    assert base.is_cuda or os.environ.get("TRITON_INTERPRET") == "1"
    with torch.cuda.device(base.device) if base.is_cuda else torch.no_grad():
        _reserve_kernel[(1,)](
            ends, totals, base, overflow, depth, totals.shape[0] - 1, item_bound, *room, tag, num_warps=1
        )


@triton.jit
def _reserve(ends, base, overflow, depth, count, room, tag):
    """Two columns are beside each other in `ends`."""
    start = tl.load(ends + 2 * depth - 2, mask=depth > 0, other=0)
    end = start + count
    tl.store(ends + 2 * depth, end)
    tl.store(base, tl.minimum(start, room - count))
    note_overflow(overflow, end.to(tl.int32), room, tag)


@triton.jit(do_not_specialize=["depth", "chunks", "item_bound", "row_room", "item_room", "tag"])
def _reserve_kernel(ends, totals, base, overflow, depth, chunks, item_bound, row_room, item_room, tag):
    """One program: entry `depth` gets the rows and items that `totals` says will come."""
    rows, items = tl.load(totals + chunks - 1), tl.minimum(tl.load(totals + chunks), item_bound)
    _reserve(ends, base, overflow, depth, rows.to(tl.int64), row_room, tag)
    tl.store(base + 2, rows.to(tl.int64))
    _reserve(ends + 1, base + 1, overflow + 3, depth, items.to(tl.int64), item_room, tag)
