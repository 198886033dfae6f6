"""The routed experts of one rank by fused kernels (moe/kernels/fused_experts.py), with autograd.

Forward keeps the received rows, h (what the activation takes) and indices; the rest is worked out again:

    forward    h, a = up(rows);  y = down(a);  out[r] = sum of y over the pairs of row r
    backward   dh, dots, dW_down = down_backward(dout, h);  d(routing weight) = dots (+ <dout, down bias>)
               d rows[r] = sum of up_grad(dh) over the pairs of r;  dW_gate_up = dh^T rows

A pair's output is linear in its weighted activation, so the gradient of its routing weight is <da, act(h)>, and y need
not be kept (the identity is SonicMoE's, arXiv:2512.14080).

Forward reads rows by index. Backward copies dout and the rows once per pair and lets them go again: there the indices
would stand in the innermost loop (450 against 665 TFLOP/s on an H200). Copies of rows, sums of their gradients and the
activation's gradient run beside products where there is one that does not need them (`Lanes`, `launch_down_backward`).

Shape suffixes: R rows, K slots per row, P pairs sorted by expert, D model dim, F hidden units of one expert, H = 2 F,
E experts.
"""

# Kernels are written in Triton's language, which has no types: nor have the arguments of a launch.
# pyright: basic, reportArgumentType=false

import functools
import hashlib
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor

from comms.kernels.e4m3 import can_cast
from comms.kernels.gather_sum import gather_sum, launch_gather_sum
from comms.operators import operator, register_fake
from moe.fused_launches import (
    ACT_COLUMNS,
    ACT_ROWS,
    Lanes,
    activation_of,
    empty_coded,
    launch_act_grad,
    launch_down_backward,
    launch_rows,
    launch_up,
    launch_weight_grad,
)
from moe.grouped_gemm import clear_tail_
from moe.kernels import fused_experts as kernels
from moe.kernels.fused_experts import act_kernel
from moe.kernels.pair_rows import gather_sums
from moe.kernels.sort_pairs import Pairs
from moe.tiles import Shape, Tile, Work, choose_tiles


def fused_experts(
    rows_RD: Tensor,
    weights_RK: Tensor,
    w_gate_up_E2FD: Tensor,
    w_down_EDF: Tensor,
    b_gate_up_E2F: Tensor | None,
    b_down_ED: Tensor | None,
    pairs: Pairs,
    activation: str,
) -> Tensor:
    """(R, D): the weighted sum over each row's experts, in the rows' dtype; rows without pairs get zero."""
    return _FusedExperts.apply(  # type: ignore[no-any-return]
        rows_RD, weights_RK, w_gate_up_E2FD, w_down_EDF, b_gate_up_E2F, b_down_ED, pairs, activation
    )


def tune(
    num_pairs: int, num_experts: int, dim: int, hidden: int, device: torch.device
) -> dict[tuple[str, Shape], Tile]:
    """Choose the kernels' tiles for experts of this size by measuring (moe/tiles.py); seconds, once per card.

    Args:
        num_pairs: (row, expert) pairs that a step is expected to have, spread evenly.
    """
    files = sorted(Path(kernels.__file__).parent.glob("*.py"))
    source = hashlib.blake2b(b"".join(file.read_bytes() for file in files), digest_size=4).hexdigest()
    card = f"{torch.cuda.get_device_name(device)}, triton {triton.__version__}, kernels {source}"
    return choose_tiles(_works(num_pairs, num_experts, dim, hidden, device), card)


def _works(P: int, E: int, D: int, F: int, device: torch.device) -> dict[tuple[str, Shape], Work]:
    """A launch of every kernel on random numbers, which are drawn at its first call: few kernels are measured."""

    @functools.cache
    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, dtype=torch.bfloat16)

    rows_P, weights_P = torch.arange(P, dtype=torch.int32, device=device), torch.rand(P, device=device)
    offsets_E = (torch.arange(1, E + 1, device=device) * P // E).int()
    x, h, a = partial(drawn, P, D), partial(drawn, P, 2 * F), partial(drawn, P, F)
    w_up, w_down = partial(drawn, E, 2, F, D), partial(drawn, E, D, F)
    return {
        ("up", (E, D, F)): lambda: up(x(), rows_P, weights_P, w_up(), None, offsets_E, "swiglu"),
        ("down", (E, F, D)): lambda: down(a(), w_down(), None, weights_P, offsets_E),
        ("act_grad", (E, D, F)): lambda: launch_rows("act_grad", x(), w_down(), offsets_E, a(), True),
        ("up_grad", (E, 2 * F, D)): lambda: up_grad(h(), w_up(), offsets_E),
        ("weight_grad", (E, D, F)): lambda: weight_grad(x(), a(), offsets_E),
        ("weight_grad", (E, 2 * F, D)): lambda: weight_grad(h(), x(), offsets_E),
    }


class _FusedExperts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows_RD: Tensor,
        weights_RK: Tensor,
        w_gate_up_E2FD: Tensor,
        w_down_EDF: Tensor,
        b_gate_up_E2F: Tensor | None,
        b_down_ED: Tensor | None,
        pairs: Pairs,
        activation: str,
    ) -> Tensor:
        rows_RD = rows_RD.contiguous()
        weights_P = gather_sums(weights_RK.reshape(-1, 1), pairs.order_P)
        h_PH, a_PF = up(rows_RD, pairs.rows_P, weights_P, w_gate_up_E2FD, b_gate_up_E2F, pairs.offsets_E, activation)
        y_PD = down(a_PF, w_down_EDF, b_down_ED, weights_P, pairs.offsets_E)
        weights = w_gate_up_E2FD, w_down_EDF, b_gate_up_E2F, b_down_ED
        ctx.save_for_backward(rows_RD, weights_P, h_PH, *weights, pairs.slots_RK, pairs.offsets_E)
        ctx.activation, ctx.weights_dtype = activation, weights_RK.dtype
        return gather_sum(y_PD, pairs.slots_RK)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        rows_RD, weights_P, h_PH, *weights, slots_RK, offsets_E = ctx.saved_tensors
        w_gate_up_E2FD, w_down_EDF, b_gate_up_E2F, b_down_ED = weights
        given = grads[0], rows_RD, slots_RK, weights_P, w_down_EDF, offsets_E, h_PH
        dh_PH, dots_P, dw_down_EDF, dout_PD, rows_PD = down_backward(*given, ctx.activation)
        db_gate_up_E2F = db_down_ED = None
        if b_gate_up_E2F is not None or b_down_ED is not None:
            # As products with a one-hot matrix: no atomics.
            of_expert_PE = _one_hot(offsets_E, dout_PD)
            if b_down_ED is not None:
                known_PD = clear_tail_(dout_PD, offsets_E)
                dots_P = dots_P + ((known_PD @ b_down_ED.T) * of_expert_PE).sum(1)
                db_down_ED = (of_expert_PE * weights_P[:, None]).to(known_PD.dtype).T @ known_PD
            if b_gate_up_E2F is not None:
                db_gate_up_E2F = (of_expert_PE.T @ clear_tail_(dh_PH, offsets_E)).view_as(b_gate_up_E2F)
        del dout_PD
        d_PD = up_grad(dh_PH, w_gate_up_E2FD, offsets_E)
        dw_gate_up_EHD, d_rows_RD = weight_grad_and_sums(dh_PH, rows_PD, offsets_E, d_PD, slots_RK)
        d_weights_RK = gather_sums(dots_P[:, None], slots_RK).to(ctx.weights_dtype)
        dw_gate_up_E2FD = dw_gate_up_EHD.view_as(w_gate_up_E2FD)
        return d_rows_RD, d_weights_RK, dw_gate_up_E2FD, dw_down_EDF, db_gate_up_E2F, db_down_ED, None, None


@operator("experts_up")
def up(
    rows_RD: Tensor,
    rows_P: Tensor,
    weights_P: Tensor,
    w_E2FD: Tensor,
    b_E2F: Tensor | None,
    offsets_E: Tensor,
    activation: str,
) -> tuple[Tensor, Tensor]:
    """h (P, 2F), gate first, and w[p] * act(h[p]) (P, F)."""
    P, F = rows_P.shape[0], w_E2FD.shape[2]
    h_PH, a_PF = rows_RD.new_empty(P, 2 * F), rows_RD.new_empty(P, F)
    launch_up(rows_RD, rows_P, weights_P, w_E2FD, b_E2F, offsets_E, h_PH, a_PF, activation)
    return h_PH, a_PF


@register_fake(up)
def _(
    rows_RD: Tensor,
    rows_P: Tensor,
    weights_P: Tensor,
    w_E2FD: Tensor,
    b_E2F: Tensor | None,
    offsets_E: Tensor,
    activation: str,
) -> tuple[Tensor, Tensor]:
    P, F = rows_P.shape[0], w_E2FD.shape[2]
    return rows_RD.new_empty(P, 2 * F), rows_RD.new_empty(P, F)


@operator("experts_down")
def down(a_PF: Tensor, w_EDF: Tensor, b_ED: Tensor | None, weights_P: Tensor, offsets_E: Tensor) -> Tensor:
    """(P, D): W[e] a[p] + w[p] b[e]."""
    return _rows_times("down", a_PF, w_EDF, offsets_E, False, b_ED, weights_P)


@register_fake(down)
def _(a_PF: Tensor, w_EDF: Tensor, b_ED: Tensor | None, weights_P: Tensor, offsets_E: Tensor) -> Tensor:
    return a_PF.new_empty(a_PF.shape[0], w_EDF.shape[1])


@operator("experts_up_grad")
def up_grad(dh_PH: Tensor, w_E2FD: Tensor, offsets_E: Tensor) -> Tensor:
    """(P, D): W[e]^T dh[p]."""
    return _rows_times("up_grad", dh_PH, w_E2FD.flatten(1, 2), offsets_E, True)


@register_fake(up_grad)
def _(dh_PH: Tensor, w_E2FD: Tensor, offsets_E: Tensor) -> Tensor:
    return dh_PH.new_empty(dh_PH.shape[0], w_E2FD.shape[3])


@operator("experts_coded_act")
def coded_act(h_PH: Tensor, weights_P: Tensor, offsets_E: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """w[p] * act(h[p]), rounded to bf16 and then to e4m3 (P, F), and its scales for 1 x 128 (P, ceil(F / 128))."""
    P, F = h_PH.shape[0], h_PH.shape[1] // 2
    values_PF, scales_PS = empty_coded(h_PH, F)
    if P:
        act_kernel[(triton.cdiv(P, ACT_ROWS) * triton.cdiv(F, ACT_COLUMNS),)](
            h_PH, weights_P, offsets_E, values_PF.view(torch.uint8), scales_PS, F, offsets_E.shape[0], P,
            ROWS=ACT_ROWS, BLOCK=ACT_COLUMNS, CAST=can_cast(h_PH), **activation_of(activation, h_PH),
        )  # fmt: skip
    return values_PF, scales_PS


@register_fake(coded_act)
def _(h_PH: Tensor, weights_P: Tensor, offsets_E: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    return empty_coded(h_PH, h_PH.shape[1] // 2)


@operator("experts_act_grad_", mutates_args=("da_PF",))
def act_grad_(
    da_PF: Tensor, h_PH: Tensor, weights_P: Tensor, offsets_E: Tensor, activation: str
) -> tuple[Tensor, Tensor]:
    """dh (P, 2F) and <da, act(h)> (P,) in fp32; in the place of da stands w[p] * act(h[p]) (P, F)."""
    return _act_grad(da_PF, h_PH, weights_P, offsets_E, activation, None)


@register_fake(act_grad_)
def _(
    da_PF: Tensor, h_PH: Tensor, weights_P: Tensor, offsets_E: Tensor, activation: str
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return torch.empty_like(h_PH), h_PH.new_empty(h_PH.shape[0], dtype=torch.float32)


@operator("experts_coded_act_grad_", mutates_args=("da_PF",))
def coded_act_grad_(
    da_PF: Tensor, h_PH: Tensor, weights_P: Tensor, offsets_E: Tensor, activation: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`act_grad_`; and dh in e4m3 with its scales for 1 x 128. F is a multiple of 128."""
    values_PH, scales_PS = empty_coded(h_PH, h_PH.shape[1])
    found = _act_grad(da_PF, h_PH, weights_P, offsets_E, activation, (values_PH, scales_PS))
    return *found, values_PH, scales_PS


@register_fake(coded_act_grad_)
def _(
    da_PF: Tensor, h_PH: Tensor, weights_P: Tensor, offsets_E: Tensor, activation: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dots_P = h_PH.new_empty(h_PH.shape[0], dtype=torch.float32)
    return torch.empty_like(h_PH), dots_P, *empty_coded(h_PH, h_PH.shape[1])


def _act_grad(
    da_PF: Tensor,
    h_PH: Tensor,
    weights_P: Tensor,
    offsets_E: Tensor,
    activation: str,
    coded: tuple[Tensor, Tensor] | None,
) -> tuple[Tensor, Tensor]:
    P, F = da_PF.shape
    assert coded is None or F % 128 == 0, F
    dh_PH, dots_P = torch.empty_like(h_PH), torch.empty(P, dtype=torch.float32, device=h_PH.device)
    bytes_and_scales = None if coded is None else (coded[0].view(torch.uint8), coded[1])
    E = offsets_E.shape[0]
    launch_act_grad(da_PF, h_PH, weights_P, offsets_E, dh_PH, dots_P, activation, E, bytes_and_scales)
    return dh_PH, dots_P


@operator("experts_down_backward")
def down_backward(
    dout_RD: Tensor,
    rows_RD: Tensor,
    slots_RK: Tensor,
    weights_P: Tensor,
    w_EDF: Tensor,
    offsets_E: Tensor,
    h_PH: Tensor,
    activation: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """dh (P, 2F); <da, act(h)> (P,) in fp32, where da[p] = W[e]^T dout[p]; dW (E, D, F) = dout^T (w[p] act(h)); and
    dout and the row of each pair (P, D)."""
    P, D, F = h_PH.shape[0], *w_EDF.shape[1:]
    dout_PD, rows_PD, a_PF, dh_PH = (h_PH.new_empty(P, width) for width in (D, D, F, 2 * F))
    dots_P, dw_EDF = h_PH.new_empty(P, dtype=torch.float32), h_PH.new_empty(w_EDF.shape)
    given = dout_RD.contiguous(), rows_RD.contiguous(), slots_RK.contiguous(), weights_P, w_EDF, offsets_E, h_PH
    made = {"dout_PD": dout_PD, "rows_PD": rows_PD, "a_PF": a_PF, "dh_PH": dh_PH, "dots_P": dots_P, "dw_EDF": dw_EDF}
    launch_down_backward(*given, activation, **made)
    return dh_PH, dots_P, dw_EDF, dout_PD, rows_PD


@register_fake(down_backward)
def _(
    dout_RD: Tensor,
    rows_RD: Tensor,
    slots_RK: Tensor,
    weights_P: Tensor,
    w_EDF: Tensor,
    offsets_E: Tensor,
    h_PH: Tensor,
    activation: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    P, D, F = h_PH.shape[0], *w_EDF.shape[1:]
    dots_P = h_PH.new_empty(P, dtype=torch.float32)
    return h_PH.new_empty(P, 2 * F), dots_P, h_PH.new_empty(w_EDF.shape), h_PH.new_empty(P, D), h_PH.new_empty(P, D)


@operator("experts_weight_grad")
def weight_grad(left_PM: Tensor, right_PN: Tensor, offsets_E: Tensor) -> Tensor:
    """(E, M, N): the sum over each expert's pairs of left[p] right[p]^T; exactly zero for an expert without pairs."""
    out_EMN = left_PM.new_empty(offsets_E.shape[0], left_PM.shape[1], right_PN.shape[1])
    launch_weight_grad(left_PM, right_PN, offsets_E, out_EMN)
    return out_EMN


@register_fake(weight_grad)
def _(left_PM: Tensor, right_PN: Tensor, offsets_E: Tensor) -> Tensor:
    return left_PM.new_empty(offsets_E.shape[0], left_PM.shape[1], right_PN.shape[1])


@operator("experts_weight_grad_and_sums")
def weight_grad_and_sums(
    left_PM: Tensor, right_PN: Tensor, offsets_E: Tensor, y_PD: Tensor, slots_RK: Tensor
) -> tuple[Tensor, Tensor]:
    """`weight_grad`, and beside it sums of the pairs of each row (R, D), as `gather_sum` has them."""
    y_PD, slots_RK = y_PD.contiguous(), slots_RK.contiguous()
    out_EMN = left_PM.new_empty(offsets_E.shape[0], left_PM.shape[1], right_PN.shape[1])
    out_RD = y_PD.new_empty(slots_RK.shape[0], y_PD.shape[1])
    with Lanes(left_PM) as lanes:
        lanes.product(lambda: launch_weight_grad(left_PM, right_PN, offsets_E, out_EMN))
        lanes.beside(lambda: launch_gather_sum(y_PD, slots_RK, out_RD))
    return out_EMN, out_RD


@register_fake(weight_grad_and_sums)
def _(left_PM: Tensor, right_PN: Tensor, offsets_E: Tensor, y_PD: Tensor, slots_RK: Tensor) -> tuple[Tensor, Tensor]:
    out_EMN = left_PM.new_empty(offsets_E.shape[0], left_PM.shape[1], right_PN.shape[1])
    return out_EMN, y_PD.new_empty(slots_RK.shape[0], y_PD.shape[1])


def _rows_times(
    kernel: str,
    a_PI: Tensor,
    w_E: Tensor,
    offsets_E: Tensor,
    transposed: bool,
    bias_EO: Tensor | None = None,
    weights_P: Tensor | None = None,
) -> Tensor:
    out_PO = a_PI.new_empty(a_PI.shape[0], w_E.shape[2 if transposed else 1])
    launch_rows(kernel, a_PI, w_E, offsets_E, out_PO, transposed, bias_EO, weights_P)
    return out_PO


def _one_hot(offsets_E: Tensor, like_PX: Tensor) -> Tensor:
    """(P, E): 1 at the expert of each pair, none behind the last pair."""
    pair = torch.arange(like_PX.shape[0], device=like_PX.device)
    expert_P = torch.searchsorted(offsets_E, pair, right=True)
    return (expert_P[:, None] == torch.arange(offsets_E.shape[0], device=like_PX.device)).to(like_PX.dtype)
