"""Sum rows that belong together: out[t] = sum over n of rows[slots[t, n]], in ascending n, rounded once.

The sum runs in fp32 (fp64 for fp64 rows) without atomics, so the result does not depend on scheduling. A slot of -1
contributes nothing and its memory is never read, so poisoned or missing rows are harmless.

Worked example: rows = [[1], [2], [4]], slots = [[0, 2], [-1, 1], [-1, -1]] gives out = [[5], [2], [0]].

Shape suffixes: T output rows, S input rows, N terms per output row, D row width.
"""

# Kernels are written in Triton's language, which has no types.
# pyright: basic
# ruff: noqa: ANN001, ANN202

import os

import torch
import triton
import triton.language as tl
from torch import Tensor

from comms.operators import operator, register_fake


@operator("gather_sum")
def gather_sum(rows_SD: Tensor, slots_TN: Tensor) -> Tensor:
    """out_TD[t] = sum_n rows_SD[slots_TN[t, n]], skipping slots of -1. No autograd: callers state their backward."""
    rows_SD = rows_SD.contiguous()
    if rows_SD.is_cuda or os.environ.get("TRITON_INTERPRET") == "1":
        out_TD = rows_SD.new_empty(slots_TN.shape[0], rows_SD.shape[1])
        launch_gather_sum(rows_SD, slots_TN.contiguous(), out_TD)
        return out_TD
    return gather_sum_reference(rows_SD, slots_TN)


@register_fake(gather_sum)
def _(rows_SD: Tensor, slots_TN: Tensor) -> Tensor:
    return rows_SD.new_empty(slots_TN.shape[0], rows_SD.shape[1])


def gather_sum_reference(rows_SD: Tensor, slots_TN: Tensor) -> Tensor:
    """The same in plain PyTorch."""
    wide = torch.promote_types(rows_SD.dtype, torch.float32)
    total = torch.zeros(slots_TN.shape[0], rows_SD.shape[1], dtype=wide, device=rows_SD.device)
    if rows_SD.shape[0] == 0:
        return total.to(rows_SD.dtype)
    for slots_T in slots_TN.unbind(1):
        term = rows_SD[slots_T.clamp(min=0)].to(wide)
        total += torch.where((slots_T >= 0)[:, None], term, 0)
    return total.to(rows_SD.dtype)


def launch_gather_sum(rows_SD: Tensor, slots_TN: Tensor, out_TD: Tensor) -> None:
    """`gather_sum` into memory that is there, all of it contiguous; always by the kernel."""
    num_out, num_terms = slots_TN.shape
    width = rows_SD.shape[1]
    if out_TD.numel() == 0:
        return
    block = min(triton.next_power_of_2(width), 2048)
    grid = (num_out, triton.cdiv(width, block))
    wide = tl.float64 if rows_SD.dtype == torch.float64 else tl.float32
    with torch.cuda.device(rows_SD.device) if rows_SD.is_cuda else torch.no_grad():
        _gather_sum_kernel[grid](rows_SD, slots_TN, out_TD, width, num_terms, WIDE=wide, BLOCK=block)  # type: ignore[arg-type]


@triton.jit
def _gather_sum_kernel(rows, slots, out, width, num_terms, WIDE: tl.constexpr, BLOCK: tl.constexpr):
    """One program: one output row, one block of columns."""
    t = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    total = tl.zeros([BLOCK], dtype=WIDE)
    for n in range(num_terms):
        slot = tl.load(slots + t * num_terms + n).to(tl.int64)
        total += tl.load(rows + slot * width + columns, mask=inside & (slot >= 0), other=0.0).to(WIDE)
    tl.store(out + t * width + columns, total.to(out.dtype.element_ty), mask=inside)
