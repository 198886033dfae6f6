"""Rows and their side columns to records and back, where the counts are on the device.

A record is a row's words, then those of its side columns, then whatever makes its length round:

    pack_records     record[slots[t, n]] = row t and its side columns: every row read once, written once per slot
    unpack_records   rows and side columns of the first `num` records, as fresh memory
    make_routes      who sends how many rows to whom, from everybody's counts

Worked example: slots = [[2, -1], [0, 1]], rows [[5], [7]] and side columns [[8], [9]] give records [[7, 9], [7, 9],
[5, 8]]; unpacked with num = 2 and room for 3 rows: rows [[7], [7], anything], side columns [[9], [9], a filling].

Shape suffixes: T rows to pack, N slots per row, S records, R unpacked rows, W words of a row, K words of side columns,
B bytes of a record.
"""

# Kernels are written in Triton's language, which has no types: nor have the arguments of a launch.
# pyright: basic, reportArgumentType=false, reportCallIssue=false
# ruff: noqa: ANN001, ANN202

import os

import torch
import triton
import triton.language as tl
from torch import Tensor

from comms.kernels.routes import note_overflow

# Most words of one program.
WORDS = 2048


def pack_records(record_SB: Tensor, rows_TW: Tensor, side_TK: Tensor, slots_TN: Tensor) -> None:
    """Write rows and side columns (int32 words) into the records of their slots; -1 is no slot."""
    words_SX = record_SB.view(torch.int32)
    (num_rows, width), side_width = rows_TW.shape, side_TK.shape[1]
    assert width + side_width <= words_SX.shape[1] and record_SB.is_contiguous()
    if not on_triton(rows_TW):
        row, n = (slots_TN >= 0).nonzero(as_tuple=True)
        words_SX[slots_TN[row, n].long(), : width + side_width] = torch.cat([rows_TW, side_TK], 1)[row]
        return
    if num_rows == 0:
        return
    block = min(triton.next_power_of_2(width), WORDS)
    with torch.cuda.device(rows_TW.device) if rows_TW.is_cuda else torch.no_grad():
        _pack_kernel[(num_rows, triton.cdiv(width, block))](
            rows_TW.contiguous(), side_TK.contiguous(), slots_TN.contiguous(), words_SX,
            SLOTS=slots_TN.shape[1], WIDTH=width, SIDE=side_width, STRIDE=words_SX.shape[1],
            BLOCK=block, SIDE_BLOCK=triton.next_power_of_2(max(side_width, 1)),
        )  # fmt: skip


def unpack_records(record_SB: Tensor, out_RW: Tensor, side_RK: Tensor, num: Tensor, zeros: int) -> None:
    """Fill `out` and `side` (int32 words) from the first `num` records (int32, on the device).

    Behind them `out` stays as it is; of `side` the first `zeros` columns become 0 and the rest -1.
    """
    words_SX = record_SB.view(torch.int32)
    (room, width), side_width = out_RW.shape, side_RK.shape[1]
    assert room <= words_SX.shape[0] and record_SB.is_contiguous() and out_RW.is_contiguous()
    if not on_triton(out_RW):
        count = int(num)
        out_RW[:count] = words_SX[:count, :width]
        side_RK[:count] = words_SX[:count, width : width + side_width]
        side_RK[count:, :zeros], side_RK[count:, zeros:] = 0, -1
        return
    if room == 0:
        return
    block = min(triton.next_power_of_2(max(width, 1)), WORDS)
    with torch.cuda.device(out_RW.device) if out_RW.is_cuda else torch.no_grad():
        _unpack_kernel[(room, max(triton.cdiv(width, block), 1))](
            words_SX, out_RW, side_RK, num, zeros,
            WIDTH=width, SIDE=side_width, STRIDE=words_SX.shape[1],
            BLOCK=block, SIDE_BLOCK=triton.next_power_of_2(max(side_width, 1)),
        )  # fmt: skip


def make_routes(
    table: Tensor, overflow: Tensor, me: int, tag: int, row_bound: int, item_bound: int
) -> tuple[Tensor, Tensor]:
    """(routes, totals) of everybody's counts: int32 (N, 2N), rows for each rank, then items; notes an overflow."""
    num_ranks = table.shape[0]
    if not on_triton(table):
        return _make_routes_reference(table, overflow, me, tag, row_bound, item_bound)
    routes, totals = table.new_empty(3, num_ranks, num_ranks), table.new_empty(2)
    with torch.cuda.device(table.device) if table.is_cuda else torch.no_grad():
        _routes_kernel[(1,)](
            table.contiguous(), overflow, routes, totals, me, tag, row_bound, item_bound,
            NUM_RANKS=num_ranks, RANKS=triton.next_power_of_2(num_ranks), num_warps=1,
        )  # fmt: skip
    return routes, totals


def on_triton(x: Tensor) -> bool:
    """Whether kernels run on this tensor's device."""
    return x.is_cuda or os.environ.get("TRITON_INTERPRET") == "1"


def _make_routes_reference(
    table: Tensor, overflow: Tensor, me: int, tag: int, row_bound: int, item_bound: int
) -> tuple[Tensor, Tensor]:
    asked, items = table.chunk(2, dim=1)
    first = (asked.cumsum(0) - asked).clamp(max=row_bound)
    count = torch.minimum(asked, row_bound - first)
    routes = torch.stack([count, first, count.cumsum(1) - count]).int()
    needs = int(asked[:, me].sum()), int(items[:, me].sum())
    for noted, need, bound in zip(overflow.split(3), needs, (row_bound, item_bound), strict=True):
        if need > max(bound, int(noted[0])):
            noted.copy_(torch.tensor([need, bound, tag]))
    return routes, table.new_tensor([min(needs[0], row_bound), needs[1]])


@triton.jit
def _pack_kernel(
    rows, side, slots, records,
    SLOTS: tl.constexpr, WIDTH: tl.constexpr, SIDE: tl.constexpr, STRIDE: tl.constexpr,
    BLOCK: tl.constexpr, SIDE_BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: one row, one block of words; the first block's also the side columns."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    word = tl.load(rows + row * WIDTH + column, mask=column < WIDTH, other=0)
    beside = tl.arange(0, SIDE_BLOCK)
    side_word = tl.load(side + row * SIDE + beside, mask=beside < SIDE, other=0)
    for n in range(SLOTS):
        slot = tl.load(slots + row * SLOTS + n).to(tl.int64)
        if slot >= 0:
            tl.store(records + slot * STRIDE + column, word, mask=column < WIDTH)
            if tl.program_id(1) == 0:
                tl.store(records + slot * STRIDE + WIDTH + beside, side_word, mask=beside < SIDE)


@triton.jit(do_not_specialize=["zeros"])
def _unpack_kernel(
    records, out, side, num, zeros,
    WIDTH: tl.constexpr, SIDE: tl.constexpr, STRIDE: tl.constexpr, BLOCK: tl.constexpr, SIDE_BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: one row, one block of words; the first block's also the side columns."""
    row = tl.program_id(0).to(tl.int64)
    is_row = row < tl.load(num)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if is_row:
        word = tl.load(records + row * STRIDE + column, mask=column < WIDTH)
        tl.store(out + row * WIDTH + column, word, mask=column < WIDTH)
    if tl.program_id(1) == 0:
        beside = tl.arange(0, SIDE_BLOCK)
        side_word = tl.load(records + row * STRIDE + WIDTH + beside, mask=is_row & (beside < SIDE), other=0)
        filling = tl.where(beside < zeros, 0, -1)
        tl.store(side + row * SIDE + beside, tl.where(is_row, side_word, filling), mask=beside < SIDE)


@triton.jit(do_not_specialize=["me", "tag", "row_bound", "item_bound"])
def _routes_kernel(
    table, overflow, routes, totals, me, tag, row_bound, item_bound, NUM_RANKS: tl.constexpr, RANKS: tl.constexpr
):
    """One program. As comms/kernels/routes.py has it for one chunk, but results come back to places without gaps."""
    sender = tl.arange(0, RANKS)[:, None]
    receiver = tl.arange(0, RANKS)[None, :]
    inside = (sender < NUM_RANKS) & (receiver < NUM_RANKS)
    asked = tl.load(table + sender * 2 * NUM_RANKS + receiver, mask=inside, other=0)
    items = tl.load(table + sender * 2 * NUM_RANKS + NUM_RANKS + receiver, mask=inside, other=0)
    first = tl.minimum(tl.cumsum(asked, axis=0) - asked, row_bound)
    count = tl.minimum(asked, row_bound - first)
    place = routes + sender * NUM_RANKS + receiver
    tl.store(place, count, mask=inside)
    tl.store(place + NUM_RANKS * NUM_RANKS, first, mask=inside)
    tl.store(place + 2 * NUM_RANKS * NUM_RANKS, tl.cumsum(count, axis=1) - count, mask=inside)
    ours = inside & (receiver == me)
    rows_asked = tl.sum(tl.sum(tl.where(ours, asked, 0), axis=1), axis=0)
    items_asked = tl.sum(tl.sum(tl.where(ours, items, 0), axis=1), axis=0)
    tl.store(totals, tl.minimum(rows_asked, row_bound))
    tl.store(totals + 1, items_asked)
    note_overflow(overflow, rows_asked, row_bound, tag)
    note_overflow(overflow + 3, items_asked, item_bound, tag)
