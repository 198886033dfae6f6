"""Write zeros into the matrices of experts that got no rows, and touch nothing else.

A grouped GEMM that contracts over the rows has nothing to do for such an expert and may leave its output untouched.
Asking the device which experts these are would stall the host, so a kernel looks and writes by itself.

Worked example: offsets = [2, 2, 5] means that expert 1 is empty: only matrices[1] becomes zero.
"""

# Kernels are written in Triton's language, which has no types.
# pyright: basic
# ruff: noqa: ANN001, ANN202

import os

import torch
import triton
import triton.language as tl
from torch import Tensor

from comms.operators import operator

BLOCK = 4096


@operator("zero_empty_groups_", mutates_args=("matrices_EOI",))
def zero_empty_groups_(matrices_EOI: Tensor, offsets_E: Tensor) -> None:
    """Zero matrices[e], in place, wherever offsets[e] equals the offset before it."""
    if not matrices_EOI.is_cuda and os.environ.get("TRITON_INTERPRET") != "1":
        counts = offsets_E.diff(prepend=offsets_E.new_zeros(1))
        matrices_EOI[counts == 0] = 0
        return
    assert matrices_EOI.is_contiguous()
    num_experts, size = matrices_EOI.shape[0], matrices_EOI[0].numel()
    with torch.cuda.device(matrices_EOI.device) if matrices_EOI.is_cuda else torch.no_grad():
        grid = (num_experts, min(triton.cdiv(size, BLOCK), 64))
        _zero_kernel[grid](matrices_EOI, offsets_E, size, BLOCK=BLOCK)  # type: ignore[arg-type]


@triton.jit
def _zero_kernel(matrices, offsets, size, BLOCK: tl.constexpr):
    """Programs (e, i): the i-th part of expert e's matrix, in strides of the grid."""
    expert = tl.program_id(0)
    start = tl.load(offsets + expert - 1, mask=expert > 0, other=0)
    if tl.load(offsets + expert) == start:
        base = matrices + expert.to(tl.int64) * size
        for first in range(tl.program_id(1) * BLOCK, size, tl.num_programs(1) * BLOCK):
            index = first + tl.arange(0, BLOCK)
            tl.store(base + index, tl.zeros([BLOCK], dtype=matrices.dtype.element_ty), mask=index < size)
