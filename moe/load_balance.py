"""Balancing of the expert load: counts, auxiliary losses, and the bias that needs no loss. Pure functions.

The auxiliary losses (Switch Transformer, arXiv:2101.03961, eq. 4-6; per sequence: DeepSeek-V3, arXiv:2412.19437,
eq. 17-20) are

    E / K * sum_e f_e * P_e       f_e = pairs of expert e / valid tokens,   P_e = mean over valid tokens of scores

which is 1 for a balanced load and grows to E / K. `f` is a count and carries no gradient. Every loss here is a *local
contribution*: the sum over data ranks is the loss of the global batch. That makes it independent of the layout, given
global counts (products of per-rank means are not the product of the global means).

Shapes: T tokens on this rank, E experts, K experts per token, L layers.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from moe.kernels.choose import count_ids

# Keeps a token whose sigmoid scores all underflowed to zero from dividing zero by zero.
SCORE_EPS = 1e-20


def count_tokens(topk_ids_TK: Tensor, num_experts: int) -> Tensor:
    """(E,) int64: pairs of each expert; negative ids count nowhere. Does not wait for the device."""
    return count_ids(topk_ids_TK, num_experts)


def batch_aux_loss(
    scores_TE: Tensor,
    token_mask_T: Tensor | None,
    counts_E_global: Tensor,
    num_valid_tokens_global: Tensor | int,
    top_k: int,
) -> Tensor:
    """This rank's part of the batch-level auxiliary loss (a scalar of the scores' dtype).

    `counts_E_global` and `num_valid_tokens_global` are summed over all ranks that share the micro-step's batch.
    """
    num_experts = scores_TE.shape[1]
    num_tokens = _at_least_one(num_valid_tokens_global)
    load_E = counts_E_global.to(scores_TE.dtype) / num_tokens
    probability_E = _token_shares(scores_TE, token_mask_T).sum(dim=0) / num_tokens
    return (load_E * probability_E).sum() * (num_experts / top_k)


def sequence_aux_loss(
    scores_TE: Tensor,
    topk_ids_TK: Tensor,
    token_mask_T: Tensor | None,
    seq_len: int,
    num_sequences_global: Tensor | int,
    sum_over_ranks: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """This rank's part of the mean, over the global batch's sequences, of each sequence's auxiliary loss.

    A sequence that is all padding adds 0 (and is still counted by `num_sequences_global` if the caller counts it).
    Where ranks have parts of sequences, `seq_len` is a part's, and `sum_over_ranks` adds up counts of whole sequences.
    """
    (num_tokens, num_experts), top_k = scores_TE.shape, topk_ids_TK.shape[1]
    num_sequences = num_tokens // seq_len
    if token_mask_T is None:
        valid_B = torch.full((num_sequences,), seq_len, dtype=scores_TE.dtype, device=scores_TE.device)
    else:
        valid_B = token_mask_T.view(num_sequences, seq_len).sum(dim=1).to(scores_TE.dtype)
    probability_BE = _token_shares(scores_TE, token_mask_T).view(num_sequences, seq_len, num_experts).sum(dim=1)
    counts_BE = _count_per_sequence(topk_ids_TK, num_sequences, num_experts).to(scores_TE.dtype)
    if sum_over_ranks is not None:
        totals = sum_over_ranks(torch.cat([counts_BE, valid_B.unsqueeze(1)], dim=1))
        counts_BE, valid_B = totals[:, :num_experts], totals[:, num_experts]
    loss_B = (counts_BE * probability_BE).sum(dim=1) / valid_B.clamp_min(1).square() * (num_experts / top_k)
    return loss_B.sum() / _at_least_one(num_sequences_global)


def z_loss(logits_TE: Tensor, token_mask_T: Tensor | None, num_valid_tokens_global: Tensor | int) -> Tensor:
    """This rank's part of the mean over valid tokens of logsumexp(logits)^2 (ST-MoE, arXiv:2202.08906, eq. 5)."""
    if token_mask_T is not None:
        logits_TE = torch.where(token_mask_T[:, None], logits_TE, 0.0)
    squares_T = torch.logsumexp(logits_TE, dim=-1).square()
    if token_mask_T is not None:
        squares_T = torch.where(token_mask_T, squares_T, 0.0)
    return squares_T.sum() / _at_least_one(num_valid_tokens_global)


def update_expert_bias(bias_E: Tensor, counts_E_global: Tensor, rate: float) -> Tensor:
    """The balancing bias after one optimizer step: up by `rate` where the load is below the mean, down where above.

    Counts are summed over every rank and every accumulation step. Leading dims (layers) are allowed.
    """
    # mean - count, times E to stay in integers: an expert exactly at the mean must not move.
    deficit = counts_E_global.sum(dim=-1, keepdim=True) - counts_E_global * counts_E_global.shape[-1]
    return bias_E + rate * torch.sign(deficit).to(bias_E.dtype)


def layer_loads(counts_LE: Tensor) -> tuple[Tensor, Tensor]:
    """Per layer, (L,) fp64 each: largest load over mean load (1 is balanced), and the load's entropy over log E.

    A layer that received nothing counts as balanced.
    """
    num_experts = counts_LE.shape[-1]
    total_L1 = counts_LE.sum(dim=-1, keepdim=True)
    shares_LE = torch.where(total_L1 > 0, counts_LE.double() / total_L1.clamp_min(1), 1.0 / num_experts)
    if num_experts == 1:
        return shares_LE[:, 0], torch.ones_like(shares_LE[:, 0])
    entropy_L = -torch.xlogy(shares_LE, shares_LE).sum(dim=-1) / math.log(num_experts)
    return shares_LE.amax(dim=-1) * num_experts, entropy_L


def load_stats(counts_LE: Tensor) -> dict[str, float]:
    """`load_max_over_mean` and `load_entropy` of the worst layer. Waits for the device."""
    max_over_mean_L, entropy_L = layer_loads(counts_LE)
    return {"load_max_over_mean": float(max_over_mean_L.max()), "load_entropy": float(entropy_L.min())}


def _token_shares(scores_TE: Tensor, token_mask_T: Tensor | None) -> Tensor:
    """Scores scaled so that each valid token's add up to 1; 0 at padding."""
    shares_TE = scores_TE / (scores_TE.sum(dim=-1, keepdim=True) + SCORE_EPS)
    return shares_TE if token_mask_T is None else torch.where(token_mask_T[:, None], shares_TE, 0.0)


def _count_per_sequence(ids_TK: Tensor, num_sequences: int, num_experts: int) -> Tensor:
    ids = ids_TK.reshape(num_sequences, -1)
    slots = torch.where(ids >= 0, ids, num_experts)
    counts = torch.zeros(num_sequences, num_experts + 1, dtype=torch.int64, device=ids.device)
    return counts.scatter_add(1, slots, torch.ones_like(slots))[:, :num_experts]


def _at_least_one(count: Tensor | int) -> Tensor | int:
    # A batch of padding alone has loss 0, not 0 / 0.
    return count.clamp_min(1) if isinstance(count, Tensor) else max(count, 1)
