"""Sort (row, expert) pairs by expert, stable in the order of rows, without asking the device for sizes.

A counting sort in three launches; pairs are taken in blocks of BLOCK in the order of the flattened (R, K) table:

    count    how many pairs of each block every expert has: a table (expert, block)
    scan     each expert's counts, summed over the blocks before: where a block's pairs begin among its expert's
    place    a block sorts its own pairs by (expert, index), adds where they begin, and writes all tables

Keys of a block are expert * BLOCK + index, all different, so the order is that of rows whatever sorts them, and there
are no atomics whose order could show. `place` takes an expert's first pair from the totals: offsets need no launch.

Worked example, 2 experts: ids = [[1, 0], [-1, 1], [0, 1]] gives rows = [0, 2, 0, 1, 2], order = [1, 4, 0, 3, 5],
slots = [[2, 0], [-1, 3], [1, 4]], offsets = [2, 5].

`sort_chunk` does the same for one of several chunks of rows whose numbers the device alone knows, and also writes each
pair's weight: pairs of a chunk follow those of the one before, and so do the ends of its experts.

Shape suffixes: R rows, K experts per row, P pairs, E experts, C chunks, S = C * E.
"""

# Kernels are written in Triton's language, which has no types: nor have the arguments of a launch.
# pyright: basic, reportArgumentType=false, reportGeneralTypeIssues=false
# ruff: noqa: ANN001, ANN202

import os
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from comms.operators import operator, register_fake

BLOCK = 1024
# Blocks that `scan` takes at a time.
SCAN = 1024


class Pairs(NamedTuple):
    """(row, expert) pairs sorted by expert, stable in the order of rows. All int32."""

    # Row of each pair.
    rows_P: Tensor
    # Index of each pair in the flattened (R, K) table of ids.
    order_P: Tensor
    # Where pair (r, k) stands in the sorted order, -1 for none.
    slots_RK: Tensor
    # End of each expert's pairs.
    offsets_E: Tensor


def sort_pairs(ids_RK: Tensor, num_experts: int, num_pairs: int) -> Pairs:
    """Sort pairs by expert.

    Args:
        ids_RK: integer; expert of each pair, -1 for none.
        num_pairs: how many ids are not -1; known to the plan.
    """
    return Pairs(*_sort_pairs(ids_RK, num_experts, num_pairs))


@operator("sort_pairs")
def _sort_pairs(ids_RK: Tensor, num_experts: int, num_pairs: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if not (ids_RK.is_cuda or os.environ.get("TRITON_INTERPRET") == "1"):
        return sort_pairs_reference(ids_RK, num_experts, num_pairs)
    tables = _empty_tables(ids_RK, num_experts, num_pairs)
    if ids_RK.numel() == 0:
        tables[3].zero_()
        return tables
    with torch.cuda.device(ids_RK.device) if ids_RK.is_cuda else torch.no_grad():
        _launch(ids_RK.contiguous(), tables)
    return tables


@register_fake(_sort_pairs)
def _empty_tables(ids_RK: Tensor, num_experts: int, num_pairs: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    def empty(*shape: int) -> Tensor:
        return ids_RK.new_empty(shape, dtype=torch.int32)

    return empty(num_pairs), empty(num_pairs), empty(*ids_RK.shape), empty(num_experts)


def sort_pairs_reference(
    ids_RK: Tensor, num_experts: int, num_pairs: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """`sort_pairs` in plain PyTorch, as a tuple."""
    keys = torch.where(ids_RK >= 0, ids_RK, num_experts).reshape(-1)
    sorted_keys, order = keys.sort(stable=True)
    order_P = order[:num_pairs]
    slots = torch.full_like(order, -1).scatter_(0, order_P, torch.arange(num_pairs, device=keys.device))
    experts = torch.arange(num_experts, device=keys.device, dtype=keys.dtype)
    offsets_E = torch.searchsorted(sorted_keys, experts, right=True)
    rows_P = order_P // max(ids_RK.shape[1], 1)
    return rows_P.int(), order_P.int(), slots.view_as(ids_RK).int(), offsets_E.int()


def _launch(ids_RK: Tensor, tables: tuple[Tensor, Tensor, Tensor, Tensor]) -> None:
    rows_P, order_P, slots_RK, offsets_E = tables
    size, num_experts, num_pairs = ids_RK.numel(), offsets_E.shape[0], rows_P.shape[0]
    num_blocks, experts = triton.cdiv(size, BLOCK), triton.next_power_of_2(num_experts)
    # Behind each expert's counts its total.
    counts = offsets_E.new_empty(num_experts, num_blocks + 1)
    sizes = {"SLOTS": ids_RK.shape[1], "EXPERTS": experts, "BLOCK": BLOCK}
    _count_kernel[(num_blocks,)](ids_RK, counts, size, num_experts, None, 0, 0, **sizes)
    _scan_kernel[(num_experts,)](counts, num_blocks, BLOCKS=min(triton.next_power_of_2(num_blocks), SCAN))
    _place_kernel[(num_blocks,)](
        ids_RK, counts, rows_P, order_P, slots_RK, offsets_E, None, None, size, num_experts, num_pairs, None, 0, 0,
        None, **sizes,
    )  # fmt: skip


class ChunkedPairs(NamedTuple):
    """(row, expert) pairs sorted by chunk of rows, then expert, then row; undefined where there is no row or pair."""

    # int32: row of each pair.
    rows_P: Tensor
    # fp32: its weight.
    weights_P: Tensor
    # int32: where pair (r, k) stands in the sorted order, -1 for none.
    slots_RK: Tensor
    # int32: end of each expert's pairs in each chunk.
    ends_S: Tensor


def sort_chunk(
    ids_RK: Tensor, weights_RK: Tensor, row_ends_C: Tensor, chunk: int, num_rows: int, first_id: int, num_experts: int,
    out: ChunkedPairs, kept: Tensor | None = None,
) -> None:  # fmt: skip
    """Sort the pairs of the next chunk of rows into `out`. No autograd, and always by the kernels.

    Args:
        ids_RK: int64; those from `first_id` to before `first_id` + `num_experts` are experts here, others none.
        row_ends_C: int32; where each chunk's rows end.
        num_rows: the most rows of a chunk.
        kept: the base of rows, weights and slots of `out`, if they are in an arena (comms/saved_arena.py).
    """
    size = num_rows * ids_RK.shape[1]
    num_blocks, experts = triton.cdiv(size, BLOCK), triton.next_power_of_2(num_experts)
    counts = out.ends_S.new_empty(num_experts, num_blocks + 1)
    where = row_ends_C, chunk, first_id
    sizes = {"SLOTS": ids_RK.shape[1], "EXPERTS": experts, "BLOCK": BLOCK}
    _count_kernel[(num_blocks,)](ids_RK, counts, size, num_experts, *where, **sizes)
    _scan_kernel[(num_experts,)](counts, num_blocks, BLOCKS=min(triton.next_power_of_2(num_blocks), SCAN))
    _place_kernel[(num_blocks,)](
        ids_RK, counts, out.rows_P, None, out.slots_RK, out.ends_S, weights_RK, out.weights_P,
        size, num_experts, out.rows_P.shape[0], *where, kept, **sizes,
    )  # fmt: skip


@triton.jit
def _pair_range(row_ends, chunk, size, SLOTS: tl.constexpr):
    """First pair of the table that counts and the end: all of them, or those of a chunk of rows."""
    if row_ends is None:
        return chunk * 0, size
    else:
        first = tl.load(row_ends + chunk - 1, mask=chunk > 0, other=0)
        return first * SLOTS, tl.load(row_ends + chunk) * SLOTS


@triton.jit
def _load_ids(ids, index, end, first_id, num_experts):
    """Expert of each pair of this block; -1 for none."""
    id = tl.load(ids + index, mask=index < end, other=-1).to(tl.int32) - first_id
    return tl.where((id >= 0) & (id < num_experts), id, -1)


@triton.jit(do_not_specialize=["chunk", "first_id"])
def _count_kernel(
    ids, counts, size, num_experts, row_ends, chunk, first_id,
    SLOTS: tl.constexpr, EXPERTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: one block of pairs."""
    block = tl.program_id(0)
    first, end = _pair_range(row_ends, chunk, size, SLOTS)
    id = _load_ids(ids, first + block * BLOCK + tl.arange(0, BLOCK), end, first_id, num_experts)
    count = tl.histogram(tl.maximum(id, 0), EXPERTS, mask=id >= 0)
    expert = tl.arange(0, EXPERTS)
    tl.store(counts + expert * (tl.num_programs(0) + 1) + block, count, mask=expert < num_experts)


@triton.jit
def _scan_kernel(counts, num_blocks, BLOCKS: tl.constexpr):
    """One program: one expert's counts, replaced by the sums of those before; their total goes behind."""
    base = counts + tl.program_id(0) * (num_blocks + 1)
    before = 0
    for first in range(0, num_blocks, BLOCKS):
        block = first + tl.arange(0, BLOCKS)
        count = tl.load(base + block, mask=block < num_blocks, other=0)
        tl.store(base + block, before + tl.cumsum(count, 0) - count, mask=block < num_blocks)
        before += tl.sum(count)
    tl.store(base + num_blocks, before)


@triton.jit(do_not_specialize=["chunk", "first_id"])
def _place_kernel(
    ids, before, rows, order, slots, offsets, weights, pair_weights, size, num_experts, num_pairs,
    row_ends, chunk, first_id, kept,
    SLOTS: tl.constexpr, EXPERTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: one block of pairs. kept: where slots (rows), and rows and pair_weights begin in their arena."""
    if kept is not None:
        slots += tl.load(kept) * SLOTS
        rows += tl.load(kept + 1)
        pair_weights += tl.load(kept + 1)
    num_blocks = tl.num_programs(0)
    block = tl.program_id(0)
    place = tl.arange(0, BLOCK)
    first, last = _pair_range(row_ends, chunk, size, SLOTS)
    id = _load_ids(ids, first + block * BLOCK + place, last, first_id, num_experts)
    count = tl.histogram(tl.maximum(id, 0), EXPERTS, mask=id >= 0)
    expert = tl.arange(0, EXPERTS)
    at = before + expert * (num_blocks + 1)
    total = tl.load(at + num_blocks, mask=expert < num_experts, other=0)
    end = tl.cumsum(total, 0)
    if row_ends is not None:
        segment = chunk * num_experts
        end += tl.load(offsets + segment - 1, mask=segment > 0, other=0)
        if block == 0:
            # Where there is no room nothing is worked on.
            tl.store(offsets + segment + expert, tl.minimum(end, num_pairs), mask=expert < num_experts)
    else:
        if block == 0:
            tl.store(offsets + expert, end, mask=expert < num_experts)
    # From a pair's place among the sorted pairs of the block to its place among all.
    shift = end - total + tl.load(at + block, mask=expert < num_experts, other=0) - (tl.cumsum(count, 0) - count)
    # Pairs without expert come last.
    key = tl.sort(tl.where(id >= 0, id, EXPERTS) * BLOCK + place)
    id = key // BLOCK
    pair = first + block * BLOCK + key % BLOCK
    slot = place + tl.gather(shift, tl.minimum(id, EXPERTS - 1), 0)
    # More pairs than the caller knows of find no room.
    valid = (id < EXPERTS) & (slot < num_pairs)
    if order is not None:
        tl.store(order + slot, pair, mask=valid)
    if weights is not None:
        weight = tl.load(weights + pair, mask=valid, other=0.0)
        tl.store(pair_weights + slot, weight.to(pair_weights.dtype.element_ty), mask=valid)
    tl.store(rows + slot, pair // SLOTS, mask=valid)
    tl.store(slots + pair, tl.where(valid, slot, -1), mask=pair < last)
