"""Rows that are made where they are needed: sums of parts, which another program would have written, and these read.

A row has up to SLOTS parts, at slots[r, k] of a table; -1 is none. They are added in fp32 in the order of k and rounded
once, as comms/kernels/gather_sum.py has it.

Worked example: parts [[1], [2], [4]] and slots [[2, 0], [-1, 1]] are the rows [[5], [2]].
"""

# Kernels are written in Triton's language, which has no types.
# pyright: basic, reportGeneralTypeIssues=false, reportOperatorIssue=false
# ruff: noqa: ANN001, ANN201

import triton
import triton.language as tl

from comms.kernels.pieces import code_numbers, records_at


@triton.jit
def sum_parts(parts, slots, row, valid, column, WIDTH: tl.constexpr, SLOTS: tl.constexpr):
    """Sums in fp32, of the shape that rows and columns have together; 0 where a row is not valid."""
    total = tl.zeros((row + column).shape, dtype=tl.float32)
    for k in tl.static_range(SLOTS):
        slot = tl.load(slots + row * SLOTS + k, mask=valid, other=-1).to(tl.int64)
        total += tl.load(parts + (slot * WIDTH + column), mask=(slot >= 0) & (column < WIDTH), other=0.0).to(tl.float32)
    return total


@triton.jit
def put_sums(
    parts, slots, first, address, num_rows,
    WIDTH: tl.constexpr, COLUMNS: tl.constexpr, SLOTS: tl.constexpr, TILE: tl.constexpr,
    RECORD: tl.constexpr, CODE_BLOCK: tl.constexpr, CAST: tl.constexpr,
):  # fmt: skip
    """Rows from `first` on to an address of rows, or of records (CODE_BLOCK > 0), TILE of them at a time."""
    for start in range(0, num_rows, TILE):
        nth = (start + tl.arange(0, TILE)).to(tl.int64)[:, None]
        for begin in tl.static_range(0, WIDTH, COLUMNS):
            column = (begin + tl.arange(0, COLUMNS))[None, :]
            mask = (nth < num_rows) & (column < WIDTH)
            total = sum_parts(parts, slots, first + nth, nth < num_rows, column, WIDTH, SLOTS)
            total = total.to(parts.dtype.element_ty)
            if CODE_BLOCK == 0:
                target = tl.multiple_of(address.to(parts.dtype), 16)
                tl.store(target + (nth * WIDTH + column), total, mask=mask)
            else:
                records = records_at(address) + nth * RECORD
                code, scale = code_numbers(total, COLUMNS, CODE_BLOCK, TILE, CAST)
                tl.store(records + column, tl.reshape(code, [TILE, COLUMNS]), mask=mask)
                block = (begin // CODE_BLOCK + tl.arange(0, COLUMNS // CODE_BLOCK))[None, :]
                mask = (nth < num_rows) & (block * CODE_BLOCK < WIDTH)
                tl.store(records + WIDTH + block, scale.to(tl.uint8), mask=mask)
