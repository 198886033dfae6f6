"""Grouped GEMMs whose operands are quantized: rows sorted by expert against weights, and their weight gradients.

    multiply_rows(x, w, offsets)      y_PO[p]   = w[e] @ x[p]                for the expert e that owns row p
    multiply_columns(dy, x, offsets)  dw_EOI[e] = dy @ x^T over the rows of e   operands are transposed: (O, Q), (I, Q)

Operands are `Quantized`, scales running along the contracted dim; results are bf16. Each function here is one of the
two; a recipe (moe/recipes.py) names those that its hardware runs, so a faster kernel is one more function.

`exact_*` decode to bf16 and multiply with the bf16 GEMM, fp32 sums. A decoded e4m3 value times a power of two is a bf16
number (but for scales below 2^-124 or from 2^120 on: comms/kernels/codec.py), so every product is the one that a
block-scaled tensor core forms; only the order of the fp32 sums is another.

`native_*` give MXFP8 operands to `torch.nn.functional.scaled_grouped_mm` as it wants them on SM100: every expert's rows
padded to 32, values beside scales in swizzled tiles (moe/quantize.py). It does not refuse other cards but destroys
their CUDA context, so nothing but `moe.recipes.resolve_recipe` may choose it.

`fp8_rows` multiplies 1 x 128 by 128 x 128 blocks on SM90's fp8 tensor cores (moe/kernels/fp8_gemm.py), and `fp8_gated`
forms the experts' activation in the same kernel.

Shape suffixes: P rows sorted by expert, Q places (rows padded for each expert), E experts, O and I out- and
in-features.
"""

from collections.abc import Callable
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from moe.grouped_gemm import grouped_mm, weight_gradient
from moe.kernels.fp8_gemm import fp8_gated_gemm, fp8_rows_gemm
from moe.kernels.quantize import BLOCK, pad_groups
from moe.kernels.zero_fill import zero_empty_groups_
from moe.quantize import Quantized, places_of_rows, swizzle, swizzle_column_groups, swizzle_row_groups

# (first operand, second operand, int32 ends of each expert's rows) -> bf16 result.
QuantizedGemm = Callable[[Quantized, Quantized, Tensor], Tensor]
# (rows, weights of gate and up, int32 ends, weight of each row, activation) -> h in bf16, weighted activation.
GatedGemm = Callable[[Quantized, Quantized, Tensor, Tensor, str], tuple[Tensor, Quantized]]


def exact_rows(x_PI: Quantized, weight_EOI: Quantized, offsets_E: Tensor) -> Tensor:
    """y_PO in bf16; rows past the last offset are undefined."""
    return grouped_mm(x_PI.dequantize(), weight_EOI.dequantize().transpose(-2, -1), offsets_E)


def exact_columns(dy_OQ: Quantized, x_IQ: Quantized, offsets_E: Tensor) -> Tensor:
    """dw_EOI in bf16; exactly zero for an expert without rows."""
    return weight_gradient(dy_OQ.dequantize(), x_IQ.dequantize().t(), offsets_E)


def fp8_rows(x_PI: Quantized, weight_EOI: Quantized, offsets_E: Tensor) -> Tensor:
    """`exact_rows` of `fp8_blockwise` operands on fp8 tensor cores, whose sums of 128 products keep fewer bits."""
    return fp8_rows_gemm(x_PI.values, x_PI.scales, weight_EOI.values, weight_EOI.scales, offsets_E)


def fp8_gated(
    x_PI: Quantized, weight_EHI: Quantized, offsets_E: Tensor, weights_P: Tensor, activation: str
) -> tuple[Tensor, Quantized]:
    """h = `fp8_rows`, gate first, and w[p] act(h[p]) quantized, both by one kernel. 128 divides the hidden units."""
    operands = x_PI.values, x_PI.scales, weight_EHI.values, weight_EHI.scales, offsets_E
    h_PH, values_PF, scales_PS = fp8_gated_gemm(*operands, weights_P, activation)
    return h_PH, Quantized(values_PF, scales_PS, 1, 128)


def native_rows(x_PI: Quantized, weight_EOI: Quantized, offsets_E: Tensor) -> Tensor:
    """`exact_rows` of MXFP8 operands on block-scaled tensor cores."""
    num_rows = x_PI.values.shape[0]
    if num_rows == 0:
        return x_PI.values.new_empty(0, weight_EOI.values.shape[1], dtype=torch.bfloat16)
    row_P = torch.arange(num_rows, dtype=torch.int32, device=offsets_E.device)
    places_Q, padded_E = pad_groups(row_P, offsets_E, BLOCK)
    # Quantized first and moved then: fewer bytes move, and the bytes are the same.
    x_QI = x_PI.gather(places_Q)
    y_QO = _scaled_grouped_mm(
        x_QI.values,
        weight_EOI.values.transpose(-2, -1),
        swizzle_row_groups(x_QI.scales, padded_E),
        swizzle(weight_EOI.scales),
        padded_E,
    )
    return y_QO[places_of_rows(num_rows, offsets_E, BLOCK)]


def native_columns(dy_OQ: Quantized, x_IQ: Quantized, offsets_E: Tensor) -> Tensor:
    """`exact_columns` of MXFP8 operands on block-scaled tensor cores; offsets are multiples of 32."""
    out_features, in_features = dy_OQ.values.shape[0], x_IQ.values.shape[0]
    if dy_OQ.values.numel() == 0:
        return dy_OQ.values.new_zeros(offsets_E.shape[0], out_features, in_features, dtype=torch.bfloat16)
    scale_offsets_E = offsets_E // BLOCK
    dw_EOI = _scaled_grouped_mm(
        dy_OQ.values,
        x_IQ.values.t(),
        swizzle_column_groups(dy_OQ.scales, scale_offsets_E),
        swizzle_column_groups(x_IQ.scales, scale_offsets_E),
        offsets_E,
    )
    zero_empty_groups_(dw_EOI, offsets_E)
    return dw_EOI


def _scaled_grouped_mm(a: Tensor, b: Tensor, scales_a: Tensor, scales_b: Tensor, offsets_E: Tensor) -> Tensor:
    """The one call that only SM100 can make. Everything by keyword: the order has changed between versions."""
    multiply = cast(Callable[..., Tensor], F.scaled_grouped_mm)  # pyright: ignore
    return multiply(
        mat_a=a,
        mat_b=b,
        scale_a=scales_a.view(torch.float8_e8m0fnu),
        scale_recipe_a=F.ScalingType.BlockWise1x32,
        scale_b=scales_b.view(torch.float8_e8m0fnu),
        scale_recipe_b=F.ScalingType.BlockWise1x32,
        swizzle_a=F.SwizzleType.SWIZZLE_32_4_4,
        swizzle_b=F.SwizzleType.SWIZZLE_32_4_4,
        offs=offsets_E,
        output_dtype=torch.bfloat16,
    )
