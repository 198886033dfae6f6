"""The routed experts of one rank by fused kernels (moe/kernels/fused_experts.py), with autograd.

Forward keeps the received rows, h (what the activation takes) and indices; the rest is worked out again:

    forward    h, a = up(rows);  y = down(a);  out[r] = sum of y over the pairs of row r
    backward   dh, a, dots = act_grad(dout, h);  d(routing weight) = dots (+ <dout, down bias>)
               dW_down = dout^T a;  d rows[r] = sum of up_grad(dh) over the pairs of r;  dW_gate_up = dh^T rows

A pair's output is linear in its weighted activation, so the gradient of its routing weight is <da, act(h)>, and y need
not be kept (the identity is SonicMoE's, arXiv:2512.14080).

Forward reads rows by index. Backward copies dout and the rows once per pair, each for as long as two and one products
take: there the indices would stand in the innermost loop (450 against 665 TFLOP/s on an H200).

Shape suffixes: R rows, K slots per row, P pairs sorted by expert, D model dim, F hidden units of one expert, H = 2 F,
E experts.
"""

# Kernels are written in Triton's language, which has no types: nor have the arguments of a launch.
# pyright: basic, reportArgumentType=false

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from comms.kernels.gather_sum import gather_sum
from moe.kernels.fused_experts import act_grad_kernel, rows_kernel, up_kernel, weight_grad_kernel
from moe.reference import CLAMP_LIMIT, CLAMP_SLOPE


class Tile(NamedTuple):
    """How a kernel cuts its work: rows, columns and depth of a block, warps, loads in flight."""

    m: int
    n: int
    k: int
    warps: int
    stages: int
    # Tiles of M next to each other in time, which share blocks of B in L2.
    group: int = 4
    # Parts of the columns that an epilogue takes one after the other, to stay within the registers.
    parts: int = 1


# The best of a handful on an H200 (docs/LOG.md). Under the interpreter the tests put small ones in their place.
TILES = {
    "up": Tile(128, 128, 64, 8, 3, parts=2),
    "down": Tile(128, 256, 64, 8, 3),
    "act_grad": Tile(128, 256, 64, 8, 3, parts=4),
    "up_grad": Tile(128, 256, 64, 8, 3),
    "weight_grad": Tile(128, 256, 32, 8, 5),
}


class FusedPairs(NamedTuple):
    """(row, expert) pairs sorted by expert, as the kernels want them; see moe.experts.Pairs."""

    # int32
    rows_P: Tensor
    order_P: Tensor
    slots_RK: Tensor
    # int32
    offsets_E: Tensor


def fused_experts(
    rows_RD: Tensor,
    weights_RK: Tensor,
    w_gate_up_E2FD: Tensor,
    w_down_EDF: Tensor,
    b_gate_up_E2F: Tensor | None,
    b_down_ED: Tensor | None,
    pairs: FusedPairs,
    activation: str,
) -> Tensor:
    """(R, D): the weighted sum over each row's experts, in the rows' dtype; rows without pairs get zero."""
    return _FusedExperts.apply(  # type: ignore[no-any-return]
        rows_RD, weights_RK, w_gate_up_E2FD, w_down_EDF, b_gate_up_E2F, b_down_ED, pairs, activation
    )


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
        pairs: FusedPairs,
        activation: str,
    ) -> Tensor:
        rows_RD = rows_RD.contiguous()
        weights_P = weights_RK.reshape(-1).gather(0, pairs.order_P).float()
        h_PH, a_PF = up(rows_RD, pairs.rows_P, weights_P, w_gate_up_E2FD, b_gate_up_E2F, pairs.offsets_E, activation)
        y_PD = down(a_PF, w_down_EDF, b_down_ED, weights_P, pairs.offsets_E)
        ctx.save_for_backward(rows_RD, weights_P, h_PH, w_gate_up_E2FD, w_down_EDF, b_gate_up_E2F, b_down_ED, *pairs)
        ctx.activation, ctx.weights_like = activation, (weights_RK.shape, weights_RK.dtype)
        return gather_sum(y_PD, pairs.slots_RK)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        rows_RD, weights_P, h_PH, w_gate_up_E2FD, w_down_EDF, b_gate_up_E2F, b_down_ED, *indices = ctx.saved_tensors
        pairs = FusedPairs(*indices)
        dout_RD = grads[0].contiguous()
        dout_PD = gather_sum(dout_RD, pairs.rows_P[:, None])
        dh_PH, a_PF, dots_P = act_grad(dout_PD, weights_P, w_down_EDF, pairs.offsets_E, h_PH, ctx.activation)
        dw_down_EDF = weight_grad(dout_PD, a_PF, pairs.offsets_E)
        db_gate_up_E2F = db_down_ED = None
        if b_gate_up_E2F is not None or b_down_ED is not None:
            # As products with a one-hot matrix: no atomics.
            of_expert_PE = _one_hot(pairs.offsets_E, dout_PD)
            if b_down_ED is not None:
                dots_P = dots_P + ((dout_PD @ b_down_ED.T) * of_expert_PE).sum(1)
                db_down_ED = (of_expert_PE * weights_P[:, None]).to(dout_PD.dtype).T @ dout_PD
            if b_gate_up_E2F is not None:
                # Behind the last pair dh is undefined.
                dh_or_0_PH = torch.where(of_expert_PE.any(1, keepdim=True), dh_PH, 0)
                db_gate_up_E2F = (of_expert_PE.T @ dh_or_0_PH).view_as(b_gate_up_E2F)
        del dout_PD, a_PF
        d_rows_RD = gather_sum(up_grad(dh_PH, w_gate_up_E2FD, pairs.offsets_E), pairs.slots_RK)
        rows_PD = gather_sum(rows_RD, pairs.rows_P[:, None])
        dw_gate_up_E2FD = weight_grad(dh_PH, rows_PD, pairs.offsets_E).view_as(w_gate_up_E2FD)
        shape, dtype = ctx.weights_like
        d_weights = torch.zeros(shape.numel(), dtype=dtype, device=rows_RD.device)
        d_weights = d_weights.scatter_(0, pairs.order_P, dots_P.to(dtype)).view(shape)
        return d_rows_RD, d_weights, dw_gate_up_E2FD, dw_down_EDF, db_gate_up_E2F, db_down_ED, None, None


@torch.library.custom_op("sluicegate::experts_up", mutates_args=())
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
    (E, _, F, D), P, tile = w_E2FD.shape, rows_P.shape[0], TILES["up"]
    h_PH, a_PF = rows_RD.new_empty(P, 2 * F), rows_RD.new_empty(P, F)
    if P:
        w_desc = TensorDescriptor.from_tensor(w_E2FD.view(E * 2 * F, D), [tile.n, tile.k])
        up_kernel[_grid(rows_RD)](
            rows_RD, rows_P, weights_P, w_desc, b_E2F, offsets_E, h_PH, a_PF, D, F, E,
            EXPERTS=triton.next_power_of_2(E), HAS_BIAS=b_E2F is not None, EVEN_K=D % tile.k == 0, PARTS=tile.parts,
            **_activation(activation), **_launch(rows_RD, tile),
        )  # fmt: skip
    return h_PH, a_PF


@up.register_fake  # pyright: ignore[reportUnknownMemberType]
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


@torch.library.custom_op("sluicegate::experts_down", mutates_args=())
def down(a_PF: Tensor, w_EDF: Tensor, b_ED: Tensor | None, weights_P: Tensor, offsets_E: Tensor) -> Tensor:
    """(P, D): W[e] a[p] + w[p] b[e]."""
    return _rows_times(a_PF, w_EDF, offsets_E, TILES["down"], False, b_ED, weights_P)


@down.register_fake  # pyright: ignore[reportUnknownMemberType]
def _(a_PF: Tensor, w_EDF: Tensor, b_ED: Tensor | None, weights_P: Tensor, offsets_E: Tensor) -> Tensor:
    return a_PF.new_empty(a_PF.shape[0], w_EDF.shape[1])


@torch.library.custom_op("sluicegate::experts_up_grad", mutates_args=())
def up_grad(dh_PH: Tensor, w_E2FD: Tensor, offsets_E: Tensor) -> Tensor:
    """(P, D): W[e]^T dh[p]."""
    return _rows_times(dh_PH, w_E2FD.flatten(1, 2), offsets_E, TILES["up_grad"], True)


@up_grad.register_fake  # pyright: ignore[reportUnknownMemberType]
def _(dh_PH: Tensor, w_E2FD: Tensor, offsets_E: Tensor) -> Tensor:
    return dh_PH.new_empty(dh_PH.shape[0], w_E2FD.shape[3])


@torch.library.custom_op("sluicegate::experts_act_grad", mutates_args=())
def act_grad(
    dout_PD: Tensor, weights_P: Tensor, w_EDF: Tensor, offsets_E: Tensor, h_PH: Tensor, activation: str
) -> tuple[Tensor, Tensor, Tensor]:
    """dh (P, 2F), w[p] * act(h[p]) (P, F), and <da, act(h)> (P,) in fp32, where da[p] = W[e]^T dout[p]."""
    (E, D, F), P, tile = w_EDF.shape, h_PH.shape[0], TILES["act_grad"]
    dh_PH, a_PF = torch.empty_like(h_PH), h_PH.new_empty(P, F)
    dots = torch.empty(P, triton.cdiv(F, tile.n), dtype=torch.float32, device=h_PH.device)
    if P:
        dout_desc = TensorDescriptor.from_tensor(dout_PD, [tile.m, tile.k])
        w_desc = TensorDescriptor.from_tensor(w_EDF.view(E * D, F), [tile.k, tile.n])
        act_grad_kernel[_grid(dout_PD)](
            dout_desc, weights_P, w_desc, offsets_E, h_PH, dh_PH, a_PF, dots, D, F, E,
            EXPERTS=triton.next_power_of_2(E), EVEN_K=D % tile.k == 0, PARTS=tile.parts,
            **_activation(activation), **_launch(dout_PD, tile),
        )  # fmt: skip
    return dh_PH, a_PF, dots.sum(1)


@act_grad.register_fake  # pyright: ignore[reportUnknownMemberType]
def _(
    dout_PD: Tensor, weights_P: Tensor, w_EDF: Tensor, offsets_E: Tensor, h_PH: Tensor, activation: str
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(h_PH), h_PH.new_empty(h_PH.shape[0], w_EDF.shape[2]), torch.empty_like(weights_P)


@torch.library.custom_op("sluicegate::experts_weight_grad", mutates_args=())
def weight_grad(left_PM: Tensor, right_PN: Tensor, offsets_E: Tensor) -> Tensor:
    """(E, M, N): the sum over each expert's pairs of left[p] right[p]^T; exactly zero for an expert without pairs."""
    E, tile = offsets_E.shape[0], TILES["weight_grad"]
    out_EMN = left_PM.new_empty(E, left_PM.shape[1], right_PN.shape[1])
    if left_PM.shape[0] == 0:
        return out_EMN.zero_()
    left_desc = TensorDescriptor.from_tensor(left_PM, [tile.k, tile.m])
    right_desc = TensorDescriptor.from_tensor(right_PN, [tile.k, tile.n])
    weight_grad_kernel[_grid(left_PM)](
        left_desc, right_desc, left_PM, right_PN, offsets_E, out_EMN, left_PM.shape[1], right_PN.shape[1], E,
        **_launch(left_PM, tile),
    )  # fmt: skip
    return out_EMN


@weight_grad.register_fake  # pyright: ignore[reportUnknownMemberType]
def _(left_PM: Tensor, right_PN: Tensor, offsets_E: Tensor) -> Tensor:
    return left_PM.new_empty(offsets_E.shape[0], left_PM.shape[1], right_PN.shape[1])


def _rows_times(
    a_PI: Tensor,
    w_E: Tensor,
    offsets_E: Tensor,
    tile: Tile,
    transposed: bool,
    bias_EO: Tensor | None = None,
    weights_P: Tensor | None = None,
) -> Tensor:
    """w[e] a[p] with w (E, O, I); or, transposed, w[e]^T a[p] with w (E, I, O)."""
    inner, width = a_PI.shape[1], w_E.shape[2 if transposed else 1]
    out_PO = a_PI.new_empty(a_PI.shape[0], width)
    if a_PI.shape[0] == 0:
        return out_PO
    a_desc = TensorDescriptor.from_tensor(a_PI, [tile.m, tile.k])
    block = [tile.k, tile.n] if transposed else [tile.n, tile.k]
    b_desc = TensorDescriptor.from_tensor(w_E.view(-1, w_E.shape[2]), block)
    rows_kernel[_grid(a_PI)](
        a_desc, b_desc, bias_EO, weights_P, offsets_E, out_PO, inner, width, w_E.shape[0],
        EXPERTS=triton.next_power_of_2(w_E.shape[0]), HAS_BIAS=bias_EO is not None, TRANSPOSED=transposed,
        EVEN_K=inner % tile.k == 0, **_launch(a_PI, tile),
    )  # fmt: skip
    return out_PO


def _grid(tensor: Tensor) -> tuple[int]:
    """One program per multiprocessor; a few under the interpreter."""
    return (torch.cuda.get_device_properties(tensor.device).multi_processor_count if tensor.is_cuda else 3,)


def _activation(name: str) -> dict[str, Any]:
    return {"CLAMPED": name == "clamped_swiglu", "LIMIT": CLAMP_LIMIT, "SLOPE": CLAMP_SLOPE}


def _launch(tensor: Tensor, tile: Tile) -> dict[str, Any]:
    return {
        "BLOCK_M": tile.m,
        "BLOCK_N": tile.n,
        "BLOCK_K": tile.k,
        "GROUP": tile.group,
        # Of products of fp32; others are exact anyway.
        "PRECISION": "ieee",
        "PROGRAMS": _grid(tensor)[0],
        "num_warps": tile.warps,
        "num_stages": tile.stages,
    }


def _one_hot(offsets_E: Tensor, like_PX: Tensor) -> Tensor:
    """(P, E): 1 at the expert of each pair, none behind the last pair."""
    pair = torch.arange(like_PX.shape[0], device=like_PX.device)
    expert_P = torch.searchsorted(offsets_E, pair, right=True)
    return (expert_P[:, None] == torch.arange(offsets_E.shape[0], device=like_PX.device)).to(like_PX.dtype)
