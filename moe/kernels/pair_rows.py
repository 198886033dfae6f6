"""Move rows, and numbers of rows, to the order of (row, expert) pairs and back; tables as in moe/kernels/sort_pairs.py.

    expand_rows    out[slots[r, k]] = x[r]: every row read once and written to each of its pairs
    gather_rows    out[p] = x[rows[p]]: the same by reading; a row is read again for each of its pairs
    gather_sums    out[i] = sum of values[index[i]]: the few numbers of a pair, e.g. the parts of a dot product

`expand_chunks` and `sum_chunk` do as much for chunks of rows whose numbers the device alone knows.

An expansion is a copy: its time is the bytes moved. With K pairs per row of B bytes `expand_rows` moves (1 + K) B per
row and `gather_rows` 2 K B, unless the cache still has the row, which it has not when experts are many. Rows move as
they are, in vectors of 16 bytes where the width allows.

Worked example: slots = [[2, 0], [-1, 1]], rows = [0, 1, 0] and x = [[5], [7]] give [[5], [7], [5]].

Shape suffixes: R rows, K slots per row, P pairs, D row width, C chunks, N numbers asked for, V values of each.
"""

# Kernels are written in Triton's language, which has no types: nor have the arguments of a launch.
# pyright: basic, reportArgumentType=false
# ruff: noqa: ANN001, ANN202

import os
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from comms.operators import operator, register_fake

# Most columns of one program of an expansion: two vectors of 16 bytes for each of 128 threads, in 16-bit types.
COLUMNS = 2048
# Numbers of one program of `gather_sums`.
NUMBERS = 256


class Part(NamedTuple):
    """Some experts in a row."""

    # int32; where each expert's pairs end.
    ends_E: Tensor
    first: int
    num_experts: int


@operator("expand_rows")
def expand_rows(x_RD: Tensor, slots_RK: Tensor, num_pairs: int) -> Tensor:
    """x_PD[slots_RK[r, k]] = x_RD[r], skipping slots of -1. No autograd: callers state their backward.

    Args:
        slots_RK: int32 or int64, each number at most once but -1. A row of the result that no slot names is undefined.
    """
    x_RD = x_RD.contiguous()
    if not _on_triton(x_RD):
        return expand_rows_reference(x_RD, slots_RK, num_pairs)
    out_PD = x_RD.new_empty(num_pairs, x_RD.shape[1])
    launch_expand(x_RD, slots_RK.contiguous(), out_PD)
    return out_PD


def launch_expand(x_RD: Tensor, slots_RK: Tensor, out_PD: Tensor, part: Part | None = None) -> None:
    """`expand_rows` into memory that is there, all of it contiguous; always by the kernel.

    Args:
        part: only the pairs of these experts. Each part reads x anew.
    """
    (num_rows, num_slots), width = slots_RK.shape, x_RD.shape[1]
    if out_PD.numel() == 0:
        return
    block = min(triton.next_power_of_2(width), COLUMNS)
    which = part or (None, 0, 0)
    with torch.cuda.device(x_RD.device) if x_RD.is_cuda else torch.no_grad():
        _expand_kernel[(num_rows * triton.cdiv(width, block),)](
            *(x_RD, slots_RK, out_PD, None, width, None, 0, 0, *which), SLOTS=num_slots, BLOCK=block, KEEPS=False
        )


@register_fake(expand_rows)
def _(x_RD: Tensor, slots_RK: Tensor, num_pairs: int) -> Tensor:
    return x_RD.new_empty(num_pairs, x_RD.shape[1])


def expand_rows_reference(x_RD: Tensor, slots_RK: Tensor, num_pairs: int) -> Tensor:
    """`expand_rows` in plain PyTorch."""
    row, k = (slots_RK >= 0).nonzero(as_tuple=True)
    rows_P = row.new_zeros(num_pairs).scatter_(0, slots_RK[row, k].long(), row)
    return x_RD[rows_P]


@operator("gather_rows")
def gather_rows(x_RD: Tensor, rows_P: Tensor) -> Tensor:
    """x_PD[p] = x_RD[rows_P[p]]. No autograd: callers state their backward."""
    x_RD = x_RD.contiguous()
    if not _on_triton(x_RD):
        return x_RD[rows_P]
    num_pairs, width = rows_P.shape[0], x_RD.shape[1]
    out_PD = x_RD.new_empty(num_pairs, width)
    if out_PD.numel():
        block = min(triton.next_power_of_2(width), COLUMNS)
        # As many rows as fill a program: narrow rows alone would not.
        rows = max(1, COLUMNS // block)
        with torch.cuda.device(x_RD.device) if x_RD.is_cuda else torch.no_grad():
            _gather_kernel[(triton.cdiv(num_pairs, rows) * triton.cdiv(width, block),)](
                *(x_RD, rows_P.contiguous(), out_PD, num_pairs, width), ROWS=rows, BLOCK=block
            )
    return out_PD


@register_fake(gather_rows)
def _(x_RD: Tensor, rows_P: Tensor) -> Tensor:
    return x_RD.new_empty(rows_P.shape[0], x_RD.shape[1])


@operator("gather_sums")
def gather_sums(values_PV: Tensor, index_N: Tensor) -> Tensor:
    """sums_N[n] = sum over v of values_PV[index_N[n], v] in fp32, 0 where the index is -1. No autograd."""
    if not _on_triton(values_PV):
        if values_PV.shape[0] == 0:
            return torch.zeros(index_N.shape, dtype=torch.float32, device=values_PV.device)
        return torch.where(index_N >= 0, values_PV.float().sum(1)[index_N.clamp(min=0)], 0.0)
    out_N = torch.empty(index_N.shape, dtype=torch.float32, device=values_PV.device)
    size = out_N.numel()
    if size:
        with torch.cuda.device(values_PV.device) if values_PV.is_cuda else torch.no_grad():
            _sums_kernel[(triton.cdiv(size, NUMBERS),)](
                *(values_PV.contiguous(), index_N.contiguous(), out_N, size, values_PV.shape[1]), BLOCK=NUMBERS
            )
    return out_N


@register_fake(gather_sums)
def _(values_PV: Tensor, index_N: Tensor) -> Tensor:
    return torch.empty(index_N.shape, dtype=torch.float32, device=values_PV.device)


def expand_chunks(
    x_RD: Tensor, slots_RK: Tensor, row_ends_C: Tensor, chunks: tuple[int, int], num_rows: int, out_PD: Tensor,
    kept: Tensor | None = None, keeps_x: bool = False,
) -> None:  # fmt: skip
    """out_PD[slots_RK[r, k]] = x_RD[r] for the rows of some chunks, skipping slots of -1. Always by the kernel.

    Args:
        row_ends_C: int32; where each chunk's rows end.
        chunks: the first one and the last one.
        num_rows: the most rows that they have together.
        kept: the base of slots and (`keeps_x`) x, if they are in an arena (comms/saved_arena.py).
    """
    width = x_RD.shape[1]
    block = min(triton.next_power_of_2(width), COLUMNS)
    _expand_kernel[(num_rows * triton.cdiv(width, block),)](
        x_RD, slots_RK, out_PD, kept, width, row_ends_C, *chunks, None, 0, 0,
        SLOTS=slots_RK.shape[1], BLOCK=block, KEEPS=keeps_x and kept is not None,
    )  # fmt: skip


def sum_chunk(
    y_PD: Tensor, slots_RK: Tensor, row_ends_C: Tensor, chunk: int, num_rows: int, out_RD: Tensor,
    dots_P: Tensor | None = None, out_RK: Tensor | None = None, kept: Tensor | None = None,
) -> None:  # fmt: skip
    """out_RD[r] = sum over k of y_PD[slots_RK[r, k]] as in comms/kernels/gather_sum.py, for the rows of one chunk.

    Args:
        dots_P: a number of each pair; out_RK[r, k] = dots_P[slots_RK[r, k]], 0 where there is none.
        kept: the base of slots, if they are in an arena (comms/saved_arena.py).
    """
    width = y_PD.shape[1]
    block = min(triton.next_power_of_2(width), COLUMNS)
    _sum_kernel[(num_rows * triton.cdiv(width, block),)](
        y_PD, dots_P, slots_RK, out_RD, out_RK, kept, width, row_ends_C, chunk, SLOTS=slots_RK.shape[1], BLOCK=block
    )


def _on_triton(x: Tensor) -> bool:
    return x.is_cuda or os.environ.get("TRITON_INTERPRET") == "1"


@triton.jit
def _row_range(row_ends, first_chunk, last_chunk):
    """First row of some chunks, and their end."""
    return tl.load(row_ends + first_chunk - 1, mask=first_chunk > 0, other=0), tl.load(row_ends + last_chunk)


@triton.jit(do_not_specialize=["first_chunk", "last_chunk", "first_expert"])
def _expand_kernel(
    x, slots, out, kept, width, row_ends, first_chunk, last_chunk, ends, first_expert, num_experts,
    SLOTS: tl.constexpr, BLOCK: tl.constexpr, KEEPS: tl.constexpr,
):  # fmt: skip
    """One program: one block of columns of one row; neighbours have the same row.

    row_ends: only rows of these chunks. ends: only pairs of these experts.
    """
    if kept is not None:
        slots += tl.load(kept) * SLOTS
        if KEEPS:
            x += tl.load(kept) * width
    blocks = tl.cdiv(width, BLOCK)
    row = tl.program_id(0) // blocks
    column = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    if row_ends is not None:
        first, end = _row_range(row_ends, first_chunk, last_chunk)
        row += first
        inside = inside & (row < end)
    if ends is not None:
        first_slot = tl.load(ends + first_expert - 1, mask=first_expert > 0, other=0)
        end_slot = tl.load(ends + first_expert + num_experts - 1)
    values = tl.load(x + row.to(tl.int64) * width + column, mask=inside)
    # Unrolled: the first read brings the cache line that has the row's other slots.
    for k in tl.static_range(SLOTS):
        if row_ends is not None:
            slot = tl.load(slots + row * SLOTS + k, mask=row < end, other=-1).to(tl.int64)
        else:
            slot = tl.load(slots + row * SLOTS + k).to(tl.int64)
        named = slot >= 0
        if ends is not None:
            named = (slot >= first_slot) & (slot < end_slot)
        tl.store(out + slot * width + column, values, mask=inside & named)


@triton.jit(do_not_specialize=["chunk"])
def _sum_kernel(
    y, dots, slots, out, out_dots, kept, width, row_ends, chunk, SLOTS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """One program: one block of columns of one row of the chunk."""
    if kept is not None:
        slots += tl.load(kept) * SLOTS
    blocks = tl.cdiv(width, BLOCK)
    part = tl.program_id(0) % blocks
    first, end = _row_range(row_ends, chunk, chunk)
    row = first + tl.program_id(0) // blocks
    column = part * BLOCK + tl.arange(0, BLOCK)
    inside = (column < width) & (row < end)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for k in tl.static_range(SLOTS):
        slot = tl.load(slots + row * SLOTS + k, mask=row < end, other=-1).to(tl.int64)
        total += tl.load(y + slot * width + column, mask=inside & (slot >= 0), other=0.0).to(tl.float32)
        if dots is not None:
            dot = tl.load(dots + slot, mask=slot >= 0, other=0.0)
            tl.store(out_dots + row * SLOTS + k, dot.to(out_dots.dtype.element_ty), mask=(part == 0) & (row < end))
    tl.store(out + row.to(tl.int64) * width + column, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _gather_kernel(x, rows, out, num_pairs, width, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """One program: one block of columns of some pairs."""
    blocks = tl.cdiv(width, BLOCK)
    pair = tl.program_id(0) // blocks * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(rows + pair, mask=pair < num_pairs, other=0).to(tl.int64)
    inside = (pair < num_pairs)[:, None] & (column < width)[None, :]
    values = tl.load(x + row[:, None] * width + column[None, :], mask=inside)
    tl.store(out + pair.to(tl.int64)[:, None] * width + column[None, :], values, mask=inside)


@triton.jit
def _sums_kernel(values, index, out, size, width, BLOCK: tl.constexpr):
    """One program: some of the numbers."""
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    pair = tl.load(index + n, mask=n < size, other=-1).to(tl.int64)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for v in range(width):
        total += tl.load(values + pair * width + v, mask=pair >= 0, other=0.0).to(tl.float32)
    tl.store(out + n, total, mask=n < size)
