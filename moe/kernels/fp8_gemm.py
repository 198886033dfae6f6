"""Grouped GEMMs of e4m3 operands with power-of-two scales, 1 x 128 for rows and 128 x 128 for weights, on SM90.

    y[p] = sum over blocks k of  2^sa[p, k] 2^sb[e, o / 128, k] <a[p, k], b[e, o, k]>

Tensor cores sum the products of one block of 128, and that sum is scaled and added in fp32 outside them: their own sums
of fp8 products keep too few bits for long ones (DeepSeek-V3, arXiv:2412.19437, section 3.3.2). Both operands have the
contracted dim innermost, as fp8 products want it. Two scales whose product is below 2^-149 make zero: their sums would
be below 2^-124.

    fp8_gemm_sm90.py      warps with one thing to do each, for the card
    fp8_gemm_portable.py  the same in plain Triton, for its interpreter

Shape suffixes: P rows sorted by expert, E experts, I and O in- and out-features, F hidden units of one expert, H = 2 F,
K = ceil(I / 128), B = ceil(O / 128), S = F / 128.
"""

import os

import torch
from torch import Tensor

from comms.operators import operator, register_fake
from moe.fused_launches import activation_of, empty_coded
from moe.kernels import fp8_gemm_portable, fp8_gemm_sm90

Operands = tuple[Tensor, Tensor, Tensor, Tensor]


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
    out_PO = values_PI.new_empty(values_PI.shape[0], weights_EOI.shape[1], dtype=torch.bfloat16)
    if out_PO.numel():
        kernel = fp8_gemm_portable if os.environ.get("TRITON_INTERPRET") == "1" else fp8_gemm_sm90
        kernel.launch_rows(*_laid_out(values_PI, scales_PK, weights_EOI, weight_scales_EBK), offsets_E, out_PO)
    return out_PO


@register_fake(fp8_rows_gemm)
def _(
    values_PI: Tensor, scales_PK: Tensor, weights_EOI: Tensor, weight_scales_EBK: Tensor, offsets_E: Tensor
) -> Tensor:
    return values_PI.new_empty(values_PI.shape[0], weights_EOI.shape[1], dtype=torch.bfloat16)


@operator("fp8_gated_gemm")
def fp8_gated_gemm(
    values_PI: Tensor,
    scales_PK: Tensor,
    weights_EHI: Tensor,
    weight_scales_EBK: Tensor,
    offsets_E: Tensor,
    weights_P: Tensor,
    activation: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """h_PH as `fp8_rows_gemm` has it, gate first; w[p] act(h[p]) in e4m3 (P, F) and its scales for 1 x 128 (P, S).

    For a card alone, and for F a multiple of 128: a block of scales has gate or up, and not both.

    Args:
        weights_P: fp32, each row's factor of its activation.
    """
    P, H = values_PI.shape[0], weights_EHI.shape[1]
    assert H % 256 == 0, H
    h_PH = values_PI.new_empty(P, H, dtype=torch.bfloat16)
    act_PF, act_scales_PS = empty_coded(h_PH, H // 2)
    if P:
        operands = _laid_out(values_PI, scales_PK, weights_EHI, weight_scales_EBK)
        fp8_gemm_sm90.launch_gated(
            *operands, offsets_E, weights_P, h_PH, act_PF.view(torch.uint8), act_scales_PS.t(),
            activation_of(activation, h_PH),
        )  # fmt: skip
    return h_PH, act_PF, act_scales_PS


@register_fake(fp8_gated_gemm)
def _(
    values_PI: Tensor,
    scales_PK: Tensor,
    weights_EHI: Tensor,
    weight_scales_EBK: Tensor,
    offsets_E: Tensor,
    weights_P: Tensor,
    activation: str,
) -> tuple[Tensor, Tensor, Tensor]:
    h_PH = values_PI.new_empty(values_PI.shape[0], weights_EHI.shape[1], dtype=torch.bfloat16)
    return h_PH, *empty_coded(h_PH, h_PH.shape[1] // 2)


def _laid_out(values: Tensor, scales_PK: Tensor, weights: Tensor, weight_scales: Tensor) -> Operands:
    """Contiguous, and the scales of a step's rows side by side."""
    return values.contiguous(), scales_PK.t().contiguous(), weights.contiguous(), weight_scales.contiguous()
