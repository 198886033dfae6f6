"""The readable oracle: a loop over experts in plain PyTorch, for any dtype and device, as slow as it needs to be.

Every faster path (grouped GEMM, fused kernels, expert parallelism) is tested against it. One row x sent to expert e
with weight w contributes

    w * (W_down[e] act(W_gate[e] x + b_gate[e], W_up[e] x + b_up[e]) + b_down[e])

and a row's contributions are added in fp32 (fp64 for fp64 rows) in ascending order of its slots k.

Shapes: T tokens of a batch (B sequences of S), R rows, D model dim, F expert hidden dim, E experts, K slots per row.
`w_gate_up` is (E, 2, F, D), gate first; `w_down` is (E, D, F): each matrix is (out, in), as in `nn.Linear`.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear, silu

from moe.config import MoEConfig
from moe.load_balance import batch_aux_loss, count_tokens, sequence_aux_loss, z_loss
from moe.router import route, router_scores

# gpt-oss: bound of the clamped activation, and the slope of its sigmoid.
CLAMP_LIMIT = 7.0
CLAMP_SLOPE = 1.702


class ReferenceOutput(NamedTuple):
    """What `reference_moe` returns. Losses are means over the batch, without their coefficients."""

    y_BSD: Tensor
    aux_loss: Tensor
    z_loss: Tensor
    # (E,) int64, before capacity
    tokens_per_expert_E: Tensor
    # int64 scalar: pairs dropped by capacity
    dropped: Tensor


def expert_activation(gate: Tensor, up: Tensor, name: str) -> Tensor:
    """`swiglu`: silu(gate) * up. `clamped_swiglu` (gpt-oss): (up + 1) * gate * sigmoid(1.702 gate), both clamped.

    Raises:
        ValueError: another name.
    """
    if name == "swiglu":
        return silu(gate) * up
    if name == "clamped_swiglu":
        gate = gate.clamp(max=CLAMP_LIMIT)
        up = up.clamp(-CLAMP_LIMIT, CLAMP_LIMIT)
        return (up + 1) * gate * torch.sigmoid(CLAMP_SLOPE * gate)
    raise ValueError(f"model.moe.activation={name} must be swiglu or clamped_swiglu")


def reference_experts(
    x_RD: Tensor,
    local_ids_RK: Tensor,
    weights_RK: Tensor,
    w_gate_up_E2FD: Tensor,
    w_down_EDF: Tensor,
    b_gate_up_E2F: Tensor | None,
    b_down_ED: Tensor | None,
    config: MoEConfig,
) -> Tensor:
    """(R, D) weighted sum over each row's experts, in the dtype of x; negative ids are slots without expert.

    Rows and weights behind negative ids are never read, whatever they hold. An expert without rows gets a gradient
    of exactly zero.
    """
    accumulate = torch.float64 if x_RD.dtype == torch.float64 else torch.float32
    places: list[tuple[Tensor, ...]] = []
    outputs: list[Tensor] = []
    for e in range(w_down_EDF.shape[0]):
        rows, slots = torch.where(local_ids_RK == e)
        x, weights = x_RD[rows], weights_RK[rows, slots, None]
        if config.scores_before_experts:
            x, weights = (x * weights).to(x.dtype), torch.ones_like(weights)
        b_gate_up = None if b_gate_up_E2F is None else b_gate_up_E2F[e].flatten()
        gate, up = linear(x, w_gate_up_E2FD[e].flatten(0, 1), b_gate_up).chunk(2, dim=-1)
        hidden = expert_activation(gate, up, config.activation)
        y = linear(hidden, w_down_EDF[e], None if b_down_ED is None else b_down_ED[e])
        places.append((rows, slots))
        outputs.append(y.to(accumulate) * weights.to(accumulate))
    rows, slots = (torch.cat(indices) for indices in zip(*places, strict=True))
    pairs_RKD = x_RD.new_zeros(*local_ids_RK.shape, x_RD.shape[1], dtype=accumulate)
    pairs_RKD = pairs_RKD.index_put((rows, slots), torch.cat(outputs))
    # A copy: what leaves a module that FSDP wraps must not be a view.
    out_RD = pairs_RKD[:, 0].clone()
    for k in range(1, local_ids_RK.shape[1]):
        out_RD = out_RD + pairs_RKD[:, k]
    return out_RD.to(x_RD.dtype)


def reference_moe(
    x_BSD: Tensor, parameters: Mapping[str, Tensor], config: MoEConfig, token_mask_BS: Tensor | None = None
) -> ReferenceOutput:
    """A whole MoE layer on one process: route, experts, shared expert, auxiliary losses.

    `parameters` has the names of the layer's state dict: `router.weight`, `experts.w_gate_up`, `experts.w_down`, and
    where the config has them `router.bias`, `expert_bias`, `experts.b_gate_up`, `experts.b_down`,
    `shared.{w_gate,w_up,w_down}.weight`.
    """
    x_TD = x_BSD.flatten(0, 1)
    num_sequences, seq_len = x_BSD.shape[:2]
    mask_T = None if token_mask_BS is None else token_mask_BS.flatten()
    routing = route(
        x_TD,
        parameters["router.weight"],
        parameters.get("router.bias"),
        config,
        expert_bias_E=parameters.get("expert_bias"),
        token_mask_T=mask_T,
        seq_len=seq_len,
    )
    y_TD = reference_experts(
        x_TD,
        routing.topk_ids_TK,
        routing.topk_weights_TK,
        parameters["experts.w_gate_up"],
        parameters["experts.w_down"],
        parameters.get("experts.b_gate_up"),
        parameters.get("experts.b_down"),
        config,
    )
    y_TD = y_TD + _shared_expert(x_TD, parameters)
    counts_E = count_tokens(routing.chosen_ids_TK, config.num_experts)
    num_valid = x_TD.shape[0] if mask_T is None else mask_T.sum()
    # Whether or not the config has that loss.
    scores_TE = router_scores(routing.logits_TE, config)
    if config.aux_loss_level == "sequence":
        aux = sequence_aux_loss(scores_TE, routing.chosen_ids_TK, mask_T, seq_len, num_sequences)
    else:
        aux = batch_aux_loss(scores_TE, mask_T, counts_E, num_valid, config.top_k)
    z = z_loss(routing.logits_TE, mask_T, num_valid)
    return ReferenceOutput(y_TD.view_as(x_BSD), aux, z, counts_E, routing.dropped)


def _shared_expert(x_TD: Tensor, parameters: Mapping[str, Tensor]) -> Tensor:
    if "shared.w_gate.weight" not in parameters:
        return torch.zeros_like(x_TD)
    gate = linear(x_TD, parameters["shared.w_gate.weight"])
    up = linear(x_TD, parameters["shared.w_up.weight"])
    return linear(silu(gate) * up, parameters["shared.w_down.weight"])
