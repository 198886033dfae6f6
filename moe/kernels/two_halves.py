"""A matrix of fp32 as two of bf16 that add up to it: what bf16 has of each number, and what bf16 has of the rest.

Tensor cores multiply bf16 and add in fp32, so a product with both halves keeps 16 bits of each number. They stand side
by side, [high | low], as the left operand of one product.

Shape suffixes: T rows, E columns.
"""

# Kernels are written in Triton's language, which has no types.
# pyright: basic, reportArgumentType=false
# ruff: noqa: ANN001, ANN202

import torch
import triton
import triton.language as tl
from torch import Tensor

# Numbers of one program.
BLOCK = 2048


def two_halves(x_TE: Tensor) -> Tensor:
    """(T, 2E) bf16: of each row its high halves, then its low ones. Always by the kernel; no autograd."""
    x_TE = x_TE.contiguous()
    (T, E), size = x_TE.shape, x_TE.numel()
    both = torch.empty(T, 2 * E, dtype=torch.bfloat16, device=x_TE.device)
    if size:
        with torch.cuda.device(x_TE.device) if x_TE.is_cuda else torch.no_grad():
            _two_halves_kernel[(triton.cdiv(size, BLOCK),)](x_TE, both, size, E, BLOCK=BLOCK)
    return both


@triton.jit
def _two_halves_kernel(x, both, size, width, BLOCK: tl.constexpr):
    """One program: one block of numbers."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    number = tl.load(x + at, mask=at < size, other=0.0)
    high = number.to(tl.bfloat16)
    place = at // width * (2 * width) + at % width
    tl.store(both + place, high, mask=at < size)
    tl.store(both + place + width, (number - high.to(tl.float32)).to(tl.bfloat16), mask=at < size)
