"""The grouped fp8 products of moe/kernels/fp8_gemm.py in plain Triton, for its interpreter, and as a twin to compare.

Persistent like the kernels in moe/kernels/fused_experts.py, whose schedule of tiles this is.

Shape suffixes: P rows sorted by expert, E experts, I and O in- and out-features, K = ceil(I / 128), B = ceil(O / 128).
"""

# Kernels are written in Triton's language, which has no types.
# pyright: basic, reportGeneralTypeIssues=false, reportArgumentType=false, reportCallIssue=false
# ruff: noqa: ANN001, ANN201, ANN202

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from moe.kernels.fused_experts import _schedule, _tile

BLOCK = 128
# Rows of a tile (its columns are two blocks), warps, loads in flight, tiles of rows that share weights in the cache.
TILE_M, WARPS, STAGES, GROUP = 128, 8, 3, 8


def launch_rows(
    values_PI: Tensor, scales_KP: Tensor, weights_EOI: Tensor, weight_scales_EBK: Tensor, offsets_E: Tensor,
    out_PO: Tensor,
) -> None:  # fmt: skip
    """`fp8_rows_gemm` into memory that is there; operands are contiguous, and there is a row."""
    (P, inner), (E, width, _) = values_PI.shape, weights_EOI.shape
    cuda = values_PI.is_cuda
    programs = torch.cuda.get_device_properties(values_PI.device).multi_processor_count if cuda else 3
    a_desc = TensorDescriptor.from_tensor(values_PI, [TILE_M, BLOCK])
    b_desc = TensorDescriptor.from_tensor(weights_EOI.view(E * width, inner), [BLOCK, BLOCK])
    with torch.cuda.device(values_PI.device) if cuda else torch.no_grad():
        _fp8_rows_kernel[(programs,)](
            a_desc, scales_KP, b_desc, weight_scales_EBK, offsets_E, out_PO, P, inner, width, E,
            PROGRAMS=programs, EXPERTS=triton.next_power_of_2(E), BLOCK_M=TILE_M, BLOCK=BLOCK, GROUP=GROUP,
            num_warps=WARPS, num_stages=STAGES,
        )  # fmt: skip


@triton.jit
def power(byte):
    """2^(byte - 127) in fp32; 2^-127 is a subnormal number, 255 NaN."""
    exponent = byte.to(tl.int32)
    bits = tl.where(exponent == 0, 1 << 22, exponent << 23)
    return tl.where(exponent == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True)


@triton.jit
def _fp8_rows_kernel(
    a_desc, a_scales, b_desc, b_scales, offsets, out,
    num_rows, inner, width, num_experts,
    PROGRAMS: tl.constexpr, EXPERTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """A tile is two blocks of weights wide: each has its own product, so that one is scaled while the other runs."""
    _, num_tiles, _ = _schedule(offsets, num_experts, width, EXPERTS, BLOCK_M, 2 * BLOCK)
    blocks_k, blocks_n = tl.cdiv(inner, BLOCK), tl.cdiv(width, BLOCK)
    for tile in range(tl.program_id(0), num_tiles, PROGRAMS):
        # Anew for each tile: kept, it would take registers that two products and two sums need (255 of 255).
        tile_ends, _, tiles_n = _schedule(offsets, num_experts, width, EXPERTS, BLOCK_M, 2 * BLOCK)
        expert, start, count, m, n = _tile(offsets, tile, tile_ends, tiles_n, num_experts, EXPERTS, BLOCK_M, GROUP)
        first = start + m * BLOCK_M
        pair = (first + tl.arange(0, BLOCK_M)).to(tl.int64)
        valid = pair < start + count
        at_a = a_scales + pair
        at_b = b_scales + (expert.to(tl.int64) * blocks_n + 2 * n) * blocks_k
        # There is no right half if the width is an odd number of blocks; what is computed for it is not stored.
        right = tl.where(2 * n + 1 < blocks_n, blocks_k, 0)
        row_of_b = expert * width + 2 * n * BLOCK
        left_total = tl.zeros([BLOCK_M, BLOCK], dtype=tl.float32)
        right_total = tl.zeros([BLOCK_M, BLOCK], dtype=tl.float32)
        for k in range(blocks_k):
            a = a_desc.load([first, k * BLOCK])
            left_b = b_desc.load([row_of_b, k * BLOCK])
            right_b = b_desc.load([row_of_b + BLOCK, k * BLOCK])
            scale = power(tl.load(at_a, mask=valid, other=0))
            at_a += num_rows
            left_scale, right_scale = power(tl.load(at_b + k)), power(tl.load(at_b + right + k))
            left_product = tl.dot(a, left_b.T)
            right_product = tl.dot(a, right_b.T)
            left_total += left_product * (scale * left_scale)[:, None]
            right_total += right_product * (scale * right_scale)[:, None]
        column = 2 * n * BLOCK + tl.arange(0, BLOCK)
        pointers = out + pair[:, None] * width + column[None, :]
        inside = valid[:, None] & (column < width)[None, :]
        tl.store(pointers, left_total.to(out.dtype.element_ty), mask=inside)
        inside = valid[:, None] & (column + BLOCK < width)[None, :]
        tl.store(pointers + BLOCK, right_total.to(out.dtype.element_ty), mask=inside)
