"""Grouped GEMM of e4m3 operands with power-of-two scales, 1 x 128 for rows and 128 x 128 for weights, on SM90.

    y[p] = sum over blocks k of  2^sa[p, k] 2^sb[e, o / 128, k] <a[p, k], b[e, o, k]>

Tensor cores sum the products of one block of 128, and that sum is scaled and added in fp32 outside them: their own sums
of fp8 products keep too few bits for long ones (DeepSeek-V3, arXiv:2412.19437, section 3.3.2). Both operands have the
contracted dim innermost, as fp8 products want it. Two scales whose product is below 2^-149 make zero: their sums would
be below 2^-124.

Persistent like the kernels in moe/kernels/fused_experts.py, whose schedule of tiles this is.

Shape suffixes: P rows sorted by expert, E experts, I and O in- and out-features.
"""

# Kernels are written in Triton's language, which has no types.
# pyright: basic, reportGeneralTypeIssues=false, reportArgumentType=false, reportCallIssue=false
# ruff: noqa: ANN001, ANN202

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from comms.operators import operator, register_fake
from moe.kernels.fused_experts import _schedule, _tile

BLOCK = 128
# Rows of a tile (its columns are two blocks), warps, loads in flight, tiles of rows that share weights in the cache.
TILE_M, WARPS, STAGES, GROUP = 128, 8, 3, 8


@operator("fp8_rows_gemm")
def fp8_rows_gemm(
    values_PI: Tensor, scales_PK: Tensor, weights_EOI: Tensor, weight_scales_EBK: Tensor, offsets_E: Tensor
) -> Tensor:
    """y_PO in bf16; rows past the last offset are undefined. No autograd.

    Args:
        values_PI: e4m3 rows sorted by expert, I a multiple of 16.
        scales_PK: e8m0 bytes, K = ceil(I / 128).
        weights_EOI: e4m3, contiguous.
        weight_scales_EBK: e8m0 bytes, B = ceil(O / 128).
    """
    (P, inner), (E, width, _) = values_PI.shape, weights_EOI.shape
    out_PO = values_PI.new_empty(P, width, dtype=torch.bfloat16)
    if P == 0:
        return out_PO
    cuda = values_PI.is_cuda
    programs = torch.cuda.get_device_properties(values_PI.device).multi_processor_count if cuda else 3
    a_desc = TensorDescriptor.from_tensor(values_PI.contiguous(), [TILE_M, BLOCK])
    b_desc = TensorDescriptor.from_tensor(weights_EOI.contiguous().view(E * width, inner), [BLOCK, BLOCK])
    # The scales of a tile's rows side by side: each step along K reads one line of them.
    scales_KP = scales_PK.t().contiguous()
    with torch.cuda.device(values_PI.device) if cuda else torch.no_grad():
        _fp8_rows_kernel[(programs,)](
            a_desc, scales_KP, b_desc, weight_scales_EBK.contiguous(), offsets_E, out_PO, P, inner, width, E,
            PROGRAMS=programs, EXPERTS=triton.next_power_of_2(E), BLOCK_M=TILE_M, BLOCK=BLOCK, GROUP=GROUP,
            num_warps=WARPS, num_stages=STAGES,
        )  # fmt: skip
    return out_PO


@register_fake(fp8_rows_gemm)
def _(
    values_PI: Tensor, scales_PK: Tensor, weights_EOI: Tensor, weight_scales_EBK: Tensor, offsets_E: Tensor
) -> Tensor:
    return values_PI.new_empty(values_PI.shape[0], weights_EOI.shape[1], dtype=torch.bfloat16)


@triton.jit
def _power(byte):
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
            scale = _power(tl.load(at_a, mask=valid, other=0))
            at_a += num_rows
            left_scale, right_scale = _power(tl.load(at_b + k)), _power(tl.load(at_b + right + k))
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
