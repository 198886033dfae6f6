"""The routed experts of one rank by fused kernels, their products by a low-precision recipe; weight gradients in bf16.

What `moe/fused_experts.py` does, with the same things kept for backward, and each product of rows between quantized
operands. Received rows, and the gradients that come for them, are quantized once per row; their bytes are what is
copied once per pair.

    forward    h = up(q(rows)), a = q(w act(h)) (in one kernel where it can be);  y = down(a)
               out[r] = sum of y over the pairs of row r
    backward   da = down^T(q(dout));  dh, a, dots = act_grad(da, h);  d(routing weight) = dots
               dW_down = dout^T a;  d rows[r] = sum of up^T(q(dh)) over the pairs of r;  dW_gate_up = dh^T rows

Shape suffixes: R rows, K slots per row, P pairs sorted by expert, D model dim, F hidden units of one expert, H = 2 F,
E experts.
"""

from typing import Any, cast

import torch
from torch import Tensor

from comms.kernels.gather_sum import gather_sum
from moe.fused_experts import act_grad_, coded_act, coded_act_grad_, weight_grad
from moe.kernels.pair_rows import expand_rows, gather_sums
from moe.kernels.sort_pairs import Pairs
from moe.quantize import Quantized
from moe.recipes import Recipe


def low_precision_experts(
    rows_RD: Tensor,
    weights_RK: Tensor,
    w_gate_up_E2FD: Tensor,
    w_down_EDF: Tensor,
    pairs: Pairs,
    activation: str,
    recipe: Recipe,
) -> Tensor:
    """(R, D): the weighted sum over each row's experts, in bf16; rows without pairs get zero.

    Raises:
        ValueError: rows or weights are not bf16.
    """
    if rows_RD.dtype != torch.bfloat16 or w_down_EDF.dtype != torch.bfloat16:
        raise ValueError(f"{recipe.name} computes from bf16: rows are {rows_RD.dtype}, weights {w_down_EDF.dtype}")
    found = _LowPrecisionExperts.apply(  # pyright: ignore
        rows_RD, weights_RK, w_gate_up_E2FD, w_down_EDF, pairs, activation, recipe
    )
    return cast(Tensor, found)


class _LowPrecisionExperts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows_RD: Tensor,
        weights_RK: Tensor,
        w_gate_up_E2FD: Tensor,
        w_down_EDF: Tensor,
        pairs: Pairs,
        activation: str,
        recipe: Recipe,
    ) -> Tensor:
        rows_RD, offsets_E = rows_RD.contiguous(), pairs.offsets_E
        weights_P = gather_sums(weights_RK.reshape(-1, 1), pairs.order_P)
        x_PD = _per_pair(recipe.rows(rows_RD), pairs.slots_RK, weights_P.shape[0])
        w_EHD = recipe.weight(w_gate_up_E2FD.flatten(1, 2))
        h_PH, a_PF = _gated(recipe, x_PD, w_EHD, offsets_E, weights_P, activation)
        y_PD = recipe.multiply_rows(a_PF, recipe.weight(w_down_EDF), offsets_E)
        ctx.save_for_backward(rows_RD, weights_P, h_PH, w_gate_up_E2FD, w_down_EDF, pairs.slots_RK, offsets_E)
        ctx.activation, ctx.recipe, ctx.weights_dtype = activation, recipe, weights_RK.dtype
        return gather_sum(y_PD, pairs.slots_RK)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        rows_RD, weights_P, h_PH, w_gate_up_E2FD, w_down_EDF, slots_RK, offsets_E = ctx.saved_tensors
        recipe, dout_RD, P = ctx.recipe, grads[0].contiguous(), weights_P.shape[0]
        coded_PD = _per_pair(recipe.rows(dout_RD), slots_RK, P)
        # The gradient of the activation, then the activation itself.
        a_PF = recipe.multiply_rows(coded_PD, recipe.weight_transposed(w_down_EDF), offsets_E)
        given = a_PF, h_PH, weights_P, offsets_E, ctx.activation
        if a_PF.shape[1] % 128 == 0:
            dh_PH, dots_P, values_PH, scales_PS = coded_act_grad_(*given)
            coded_PH = Quantized(values_PH, scales_PS, 1, 128)
        else:
            # A block would lie across gate and up.
            dh_PH, dots_P = act_grad_(*given)
            coded_PH = recipe.rows(dh_PH)
        del coded_PD, given
        dw_down_EDF = weight_grad(expand_rows(dout_RD, slots_RK, P), a_PF, offsets_E)
        del a_PF
        w_EHD = recipe.weight_transposed(w_gate_up_E2FD.flatten(1, 2))
        d_rows_RD = gather_sum(recipe.multiply_rows(coded_PH, w_EHD, offsets_E), slots_RK)
        dw_gate_up_E2FD = weight_grad(dh_PH, expand_rows(rows_RD, slots_RK, P), offsets_E).view_as(w_gate_up_E2FD)
        d_weights_RK = gather_sums(dots_P[:, None], slots_RK).to(ctx.weights_dtype)
        return d_rows_RD, d_weights_RK, dw_gate_up_E2FD, dw_down_EDF, None, None, None


def _gated(
    recipe: Recipe, x_PD: Quantized, w_EHD: Quantized, offsets_E: Tensor, weights_P: Tensor, activation: str
) -> tuple[Tensor, Quantized]:
    """h, and w[p] act(h[p]) in e4m3."""
    if recipe.multiply_gated is not None and w_EHD.values.shape[1] % 256 == 0:
        return recipe.multiply_gated(x_PD, w_EHD, offsets_E, weights_P, activation)
    h_PH = recipe.multiply_rows(x_PD, w_EHD, offsets_E)
    values_PF, scales_PS = coded_act(h_PH, weights_P, offsets_E, activation)
    return h_PH, Quantized(values_PF, scales_PS, 1, 128)


def _per_pair(x_RD: Quantized, slots_RK: Tensor, num_pairs: int) -> Quantized:
    """The row of each pair; nothing is rounded again."""
    values, scales = (expand_rows(part, slots_RK, num_pairs) for part in (x_RD.values.view(torch.uint8), x_RD.scales))
    return x_RD._replace(values=values.view(x_RD.values.dtype), scales=scales)
