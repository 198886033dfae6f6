"""The router: which experts each token goes to, and with what weight. One pure function, `route`.

    logits = x W^T + b                       in fp32 at least, whatever the dtype of x
    scores = softmax(logits) | sigmoid(logits)
    choice = top-k of (scores + expert_bias), inside the best groups if routing is group-limited
    weight = scores[choice], optionally divided by their sum, times route_scale

The expert bias moves the choice and nothing else: the weights come from the unbiased scores. Ties go to the lowest
expert id, so equal scores give equal routing on every device. Tokens that are padding, and pairs above the capacity,
have id -1 and weight 0: no later step needs to know why.

Shapes: T tokens on this rank (B sequences of S tokens, row-major), D model dim, E experts, K experts per token,
G expert groups.
"""

import math
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from comms.operators import operator, register_fake
from comms.split_sequence import SplitSequence
from moe.config import MoEConfig
from moe.kernels.choose import stable_topk
from moe.kernels.two_halves import two_halves

NO_EXPERT = -1
# Keeps a sum of sigmoid scores that all underflowed to zero from dividing zero by zero.
SIGMOID_EPS = 1e-20


class Routing(NamedTuple):
    """The result of `route`. Floating tensors are fp32 (fp64 for fp64 input) and differentiable."""

    # (T, K) int64; NO_EXPERT for padding tokens and for pairs dropped by capacity.
    topk_ids_TK: Tensor
    # (T, K) combine weights; 0 where the id is NO_EXPERT.
    topk_weights_TK: Tensor
    # (T, E)
    logits_TE: Tensor
    # int64 scalar: pairs dropped by capacity.
    dropped: Tensor
    # (T, K) int64, the choice before capacity (padding is NO_EXPERT): what balancing must count, because counts cut
    # at the capacity no longer tell how overloaded an expert is. The same tensor as topk_ids_TK when dropless.
    chosen_ids_TK: Tensor
    # (T, E) `router_scores` of the logits; None if neither weights nor an auxiliary loss come from them.
    scores_TE: Tensor | None


def validate_routing(config: MoEConfig) -> None:
    """Raises ValueError, naming field and value, for settings that no router can follow."""
    E, K, G = config.num_experts, config.top_k, config.num_groups
    if not 1 <= K <= E:
        raise ValueError(f"model.moe.top_k={K} must be between 1 and model.moe.num_experts={E}")
    if G < 1 or E % G != 0:
        raise ValueError(f"model.moe.num_groups={G} must divide model.moe.num_experts={E}")
    if not 1 <= config.top_groups <= G:
        raise ValueError(f"model.moe.top_groups={config.top_groups} must be between 1 and model.moe.num_groups={G}")
    if config.top_groups * (E // G) < K:
        raise ValueError(
            f"model.moe.top_groups={config.top_groups} groups of {E // G} experts hold fewer than "
            f"model.moe.top_k={K} experts; raise top_groups to at least {-(-K * G // E)}"
        )
    if config.capacity_factor is not None and not config.capacity_factor > 0:
        raise ValueError(f"model.moe.capacity_factor={config.capacity_factor} must be above 0, or null for dropless")
    _check_choice("score_function", config.score_function, ("softmax", "sigmoid"))
    _check_choice("group_score", config.group_score, ("max", "top2_sum"))


def route(
    x_TD: Tensor,
    weight_ED: Tensor,
    bias_E: Tensor | None,
    config: MoEConfig,
    *,
    expert_bias_E: Tensor | None = None,
    token_mask_T: Tensor | None = None,
    seq_len: int,
    sequence: SplitSequence | None = None,
) -> Routing:
    """Chooses `config.top_k` experts for each of T tokens.

    `bias_E` is a learned term of the linear map; `expert_bias_E` is the balancing bias, used for the choice alone.
    `token_mask_T` is False at padding. Capacity is counted within each sequence of `seq_len` tokens, so what a
    sequence drops does not depend on its neighbours in the batch or on the layout. Where ranks have parts of sequences,
    `seq_len` is a part's and `sequence` tells who has which.

    Raises:
        ValueError: T is not a multiple of `seq_len`.
    """
    if x_TD.shape[0] % seq_len != 0:
        raise ValueError(f"{x_TD.shape[0]} tokens are not a whole number of sequences of seq_len={seq_len}")
    logits_TE = _router_logits(x_TD, weight_ED, bias_E, token_mask_T)
    from_logits = config.score_function == "softmax" and config.normalize_topk
    only_choose = from_logits and config.aux_loss == 0
    # Backward need not keep scores that only choose.
    scores_TE = router_scores(logits_TE.detach() if only_choose else logits_TE, config)
    with torch.no_grad():
        ids_TK = keep_choice(_choose(logits_TE, scores_TE, expert_bias_E, config, seq_len, sequence))
        chosen_ids_TK = ids_TK if token_mask_T is None else ids_TK.masked_fill(~token_mask_T[:, None], NO_EXPERT)
        kept_ids_TK = _drop_above_capacity(chosen_ids_TK, seq_len, config, sequence)
        dropped = ids_TK.new_zeros(())
        if config.capacity_factor is not None:
            dropped = ((chosen_ids_TK >= 0) & (kept_ids_TK < 0)).sum()
    # ids_TK, not kept_ids_TK: a gather needs legal ids, and dropping a pair does not raise the others' weights.
    weights_TK = _combine_weights(logits_TE, scores_TE, ids_TK, config)
    if config.capacity_factor is not None or token_mask_T is not None:
        weights_TK = torch.where(kept_ids_TK >= 0, weights_TK, 0.0)
    return Routing(kept_ids_TK, weights_TK, logits_TE, dropped, chosen_ids_TK, None if only_choose else scores_TE)


def router_scores(logits_TE: Tensor, config: MoEConfig) -> Tensor:
    """(T, E) probabilities: each row adds up to 1 (softmax), or each entry is in (0, 1) (sigmoid)."""
    return torch.softmax(logits_TE, dim=-1) if config.score_function == "softmax" else torch.sigmoid(logits_TE)


@operator("keep_choice")
def keep_choice(ids_TK: Tensor) -> Tensor:
    """The ids themselves, as an operator that activation checkpointing can recognise and keep.

    When a block is recomputed in backward, its logits may come out with another rounding; the experts must not.
    """
    return ids_TK.clone()


@register_fake(keep_choice)
def _(ids_TK: Tensor) -> Tensor:
    return torch.empty_like(ids_TK)


def expert_capacity(config: MoEConfig, seq_len: int) -> int:
    """Pairs of one sequence that one expert takes: ceil(capacity_factor * seq_len * K / E), at most all pairs."""
    assert config.capacity_factor is not None
    pairs = seq_len * config.top_k
    share = min(config.capacity_factor * pairs / config.num_experts, float(pairs))
    # Rounded first: in binary 1.1 * 10 is a little above 11, and its ceiling would be 12.
    return math.ceil(round(share, 6))


def most_pairs(config: MoEConfig, num_tokens: int, seq_len: int) -> int:
    """How many pairs `route` can leave of so many tokens, in whole sequences of that length."""
    pairs = num_tokens * config.top_k
    if config.capacity_factor is None:
        return pairs
    return min(pairs, num_tokens // seq_len * config.num_experts * expert_capacity(config, seq_len))


def _router_logits(x_TD: Tensor, weight_ED: Tensor, bias_E: Tensor | None, token_mask_T: Tensor | None) -> Tensor:
    if token_mask_T is not None:
        # Whatever padding rows hold (NaN even), they must reach neither the scores nor the gradient of the weight.
        x_TD = torch.where(token_mask_T[:, None], x_TD, 0.0)
    dtype = torch.float64 if x_TD.dtype == torch.float64 else torch.float32
    bias_E = None if bias_E is None else bias_E.to(dtype)
    if x_TD.is_cuda and x_TD.dtype == weight_ED.dtype == torch.bfloat16:
        logits_TE = wide_linear(x_TD, weight_ED)
        return logits_TE if bias_E is None else logits_TE + bias_E
    return torch.nn.functional.linear(x_TD.to(dtype), weight_ED.to(dtype), bias_E)


# An operator, because the result's dtype is one that autograd does not know of a product of two bf16 matrices.


@torch.library.custom_op("sluicegate::wide_linear", mutates_args=())
def wide_linear(x_TD: Tensor, weight_ED: Tensor) -> Tensor:
    """x W^T of bf16 operands on a GPU in fp32: products of bf16 are exact in fp32, so tensor cores lose nothing."""
    return torch.mm(x_TD, weight_ED.t(), out_dtype=torch.float32)


@operator("wide_linear_grad")
def wide_linear_grad(d_logits_TE: Tensor, x_TD: Tensor, weight_ED: Tensor) -> tuple[Tensor, Tensor]:
    """dx and dW in bf16. The gradient of the logits enters as two bf16 numbers, which hold 16 bits of it."""
    both = two_halves(d_logits_TE)
    dx_TD = both @ weight_ED.repeat(2, 1)
    dw_high_ED, dw_low_ED = torch.mm(both.t(), x_TD, out_dtype=torch.float32).chunk(2)
    return dx_TD, (dw_high_ED + dw_low_ED).bfloat16()


@wide_linear.register_fake  # pyright: ignore[reportUnknownMemberType]
def _(x_TD: Tensor, weight_ED: Tensor) -> Tensor:
    return x_TD.new_empty(x_TD.shape[0], weight_ED.shape[0], dtype=torch.float32)


@register_fake(wide_linear_grad)
def _(d_logits_TE: Tensor, x_TD: Tensor, weight_ED: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x_TD), torch.empty_like(weight_ED)


def _wide_linear_setup(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _wide_linear_backward(ctx: Any, d_logits_TE: Tensor) -> tuple[Tensor, Tensor]:
    return wide_linear_grad(d_logits_TE, *ctx.saved_tensors)


wide_linear.register_autograd(_wide_linear_backward, setup_context=_wide_linear_setup)  # pyright: ignore[reportUnknownMemberType]


def _choose(
    logits_TE: Tensor,
    scores_TE: Tensor,
    expert_bias_E: Tensor | None,
    config: MoEConfig,
    seq_len: int,
    sequence: SplitSequence | None,
) -> Tensor:
    """(T, K) expert ids, best first."""
    if config.force_balance:
        return _balanced_ids(logits_TE.shape[0], config, logits_TE.device, seq_len, sequence)
    if expert_bias_E is not None:
        scores_TE = scores_TE + expert_bias_E.to(scores_TE.dtype)
    elif config.num_groups == 1:
        # Same order as the scores, without the ties of scores that underflowed or saturated.
        scores_TE = logits_TE
    if config.num_groups > 1:
        scores_TE = _mask_other_groups(scores_TE, config)
    return stable_topk(scores_TE, config.top_k)


def _balanced_ids(
    num_tokens: int, config: MoEConfig, device: torch.device, seq_len: int, sequence: SplitSequence | None
) -> Tensor:
    """By the place of a token in its whole sequence: neither its parts nor which sequences are here change that."""
    places_1S = torch.arange(seq_len * (1 if sequence is None else sequence.num_parts), device=device)[None]
    index_T = (places_1S if sequence is None else sequence.part(places_1S)).repeat(1, num_tokens // seq_len)[0]
    return (index_T[:, None] * config.top_k + torch.arange(config.top_k, device=device)) % config.num_experts


def _mask_other_groups(scores_TE: Tensor, config: MoEConfig) -> Tensor:
    """Sets the scores outside each token's best `top_groups` groups to -inf."""
    T, E = scores_TE.shape
    G = config.num_groups
    grouped = scores_TE.view(T, G, E // G)
    num_best = 1 if config.group_score == "max" else min(2, E // G)
    group_scores_TG = grouped.topk(num_best, dim=-1).values.sum(dim=-1)
    best = stable_topk(group_scores_TG, config.top_groups)
    eligible_TG = torch.zeros_like(group_scores_TG, dtype=torch.bool).scatter(1, best, True)
    return grouped.masked_fill(~eligible_TG[:, :, None], -math.inf).view(T, E)


def _combine_weights(logits_TE: Tensor, scores_TE: Tensor, ids_TK: Tensor, config: MoEConfig) -> Tensor:
    if config.score_function == "softmax" and config.normalize_topk:
        # p_i / sum(p) over the chosen, from the logits: no division, and no 0 / 0 when the chosen scores underflow.
        chosen_TK = cast(Tensor, _Chosen.apply(logits_TE, ids_TK))  # pyright: ignore
        return torch.softmax(chosen_TK, dim=-1) * config.route_scale
    weights_TK = scores_TE.gather(1, ids_TK)
    if config.normalize_topk:
        weights_TK = weights_TK / (weights_TK.sum(dim=-1, keepdim=True) + SIGMOID_EPS)
    return weights_TK * config.route_scale


class _Chosen(torch.autograd.Function):
    """logits[t, ids[t, k]], the ids of a row being different. `gather` would keep (T, E) for the sake of its shape."""

    @staticmethod
    def forward(ctx: Any, logits_TE: Tensor, ids_TK: Tensor) -> Tensor:
        ctx.save_for_backward(ids_TK)
        ctx.num_experts = logits_TE.shape[1]
        return logits_TE.gather(1, ids_TK)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (ids_TK,) = ctx.saved_tensors
        return grads[0].new_zeros(ids_TK.shape[0], ctx.num_experts).scatter(1, ids_TK, grads[0]), None


def _drop_above_capacity(
    ids_TK: Tensor, seq_len: int, config: MoEConfig, sequence: SplitSequence | None = None
) -> Tensor:
    """Replaces by NO_EXPERT each pair that finds its expert full; earlier tokens of the sequence come first."""
    if config.capacity_factor is None:
        return ids_TK
    if sequence is not None:
        # A few bytes per token: every rank counts whole sequences and keeps its part of the answer.
        whole_BSK = sequence.whole(ids_TK.view(-1, seq_len, ids_TK.shape[1]))
        kept = _drop_above_capacity(whole_BSK.flatten(0, 1), whole_BSK.shape[1], config)
        return sequence.part(kept.view_as(whole_BSK)).flatten(0, 1)
    T, E = ids_TK.shape[0], config.num_experts
    # Column E collects the pairs without expert.
    slot_TK = torch.where(ids_TK >= 0, ids_TK, E)
    taken = torch.zeros(T, E + 1, dtype=torch.int64, device=ids_TK.device).scatter(1, slot_TK, 1)
    position = taken.view(-1, seq_len, E + 1).cumsum(dim=1).view(T, E + 1)
    fits_TK = position.gather(1, slot_TK) <= expert_capacity(config, seq_len)
    return torch.where(fits_TK, ids_TK, NO_EXPERT)


def _check_choice(field: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"model.moe.{field}={value} must be one of {', '.join(choices)}")
