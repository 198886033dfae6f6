"""Counts, auxiliary losses and the balancing bias against their formulas written out as loops, in fp64.

Names: T tokens, E experts, K experts per token, S tokens per sequence, as in moe/load_balance.py.
"""

import math

import pytest
import torch

from moe.config import MoEConfig
from moe.load_balance import (
    batch_aux_loss,
    count_tokens,
    layer_loads,
    load_stats,
    sequence_aux_loss,
    update_expert_bias,
    z_loss,
)
from moe.router import route

T, E, K, S = 12, 5, 2, 4
# A few dozen fp64 additions in another order.
TOLERANCE = {"rtol": 1e-13, "atol": 1e-15}


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def make_batch(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Scores (softmax of random logits), the top K ids with -1 at padding, and the mask."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(T, E, dtype=torch.float64, generator=generator).softmax(-1)
    mask = torch.tensor([True, True, True, True, True, False, False, False, True, True, True, False])
    ids = scores.topk(K, dim=-1).indices.masked_fill(~mask[:, None], -1)
    return scores, ids, mask


def test_counts_ignore_pairs_without_expert() -> None:
    ids = torch.tensor([[0, 3], [-1, 3], [-1, -1], [4, 0]])
    counts = count_tokens(ids, E)
    assert counts.tolist() == [2, 0, 0, 2, 1] and counts.dtype == torch.int64
    assert count_tokens(torch.empty(0, K, dtype=torch.int64), E).tolist() == [0] * E


def test_batch_loss_is_the_formula() -> None:
    scores, ids, mask = make_batch()
    expected, valid = 0.0, int(mask.sum())
    for e in range(E):
        load = sum(int((ids[t] == e).sum()) for t in range(T)) / valid
        expected += load * sum(float(scores[t, e]) for t in range(T) if mask[t]) / valid
    loss = batch_aux_loss(scores, mask, count_tokens(ids, E), mask.sum(), K)
    assert math.isclose(loss.item(), expected * E / K, rel_tol=1e-13)


def test_batch_loss_is_that_of_transformers() -> None:
    """Theirs is not divided by K, and is fp32: 1e-6."""
    from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

    logits = torch.randn(T, E)
    _, _, mask = make_batch()
    ids = logits.topk(K, dim=-1).indices.masked_fill(~mask[:, None], -1)
    loss = batch_aux_loss(logits.softmax(-1), mask, count_tokens(ids, E), mask.sum(), K)
    theirs = load_balancing_loss_func((logits,), E, K, attention_mask=mask.view(3, S))
    torch.testing.assert_close(loss * K, theirs, rtol=1e-6, atol=0)


def test_sequence_loss_is_the_formula() -> None:
    scores, ids, mask = make_batch()
    expected = 0.0
    for start in range(0, T, S):
        tokens = [t for t in range(start, start + S) if mask[t]]
        for e in range(E):
            load = sum(int((ids[t] == e).sum()) for t in tokens) * E / (K * len(tokens))
            expected += load * sum(float(scores[t, e]) for t in tokens) / len(tokens)
    loss = sequence_aux_loss(scores, ids, mask, S, T // S)
    assert math.isclose(loss.item(), expected / (T // S), rel_tol=1e-13)


def test_both_losses_are_one_when_balanced_and_e_over_k_when_collapsed() -> None:
    even = torch.full((10, E), 1 / E, dtype=torch.float64)
    balanced = (torch.arange(20) % E).view(10, 2)
    collapsed_scores = torch.zeros(10, E, dtype=torch.float64).index_fill(1, torch.tensor([0, 1]), 0.5)
    collapsed = torch.tensor([[0, 1]]).expand(10, 2)
    for scores, ids, value in ((even, balanced, 1.0), (collapsed_scores, collapsed, E / 2)):
        assert math.isclose(batch_aux_loss(scores, None, count_tokens(ids, E), 10, 2).item(), value, rel_tol=1e-13)
        assert math.isclose(sequence_aux_loss(scores, ids, None, 5, 2).item(), value, rel_tol=1e-13)


@pytest.mark.parametrize("name", ["batch", "sequence", "z"])
def test_parts_of_ranks_add_up_to_the_whole(name: str) -> None:
    """Case 26: invariant, value and gradient, to how the batch's tokens are spread (here unevenly valid)."""
    scores, ids, mask = make_batch()
    counts, valid = count_tokens(ids, E), mask.sum()

    def part(scores: torch.Tensor, tokens: slice) -> torch.Tensor:
        if name == "batch":
            return batch_aux_loss(scores[tokens], mask[tokens], counts, valid, K)
        if name == "sequence":
            return sequence_aux_loss(scores[tokens], ids[tokens], mask[tokens], S, T // S)
        return z_loss(scores[tokens], mask[tokens], valid)

    whole_scores, split_scores = scores.clone().requires_grad_(), scores.clone().requires_grad_()
    whole = part(whole_scores, slice(0, T))
    split = part(split_scores, slice(0, S)) + part(split_scores, slice(S, T))
    whole.backward()
    split.backward()
    torch.testing.assert_close(split, whole, **TOLERANCE)
    torch.testing.assert_close(split_scores.grad, whole_scores.grad, **TOLERANCE)
    assert whole_scores.grad is not None and whole_scores.grad.norm() > 0


def test_z_loss_is_the_formula() -> None:
    logits, _, mask = make_batch()
    expected = sum(math.log(sum(math.exp(v) for v in logits[t].tolist())) ** 2 for t in range(T) if mask[t])
    assert math.isclose(z_loss(logits, mask, 7).item(), expected / 7, rel_tol=1e-13)


@pytest.mark.parametrize("score_function", [torch.sigmoid, lambda logits: logits.softmax(-1)])
def test_gradients(score_function) -> None:
    logits, ids, mask = make_batch()
    counts = count_tokens(ids, E)

    def losses(logits: torch.Tensor) -> tuple[torch.Tensor, ...]:
        scores = score_function(logits)
        return (
            batch_aux_loss(scores, mask, counts, mask.sum(), K),
            sequence_aux_loss(scores, ids, mask, S, 3),
            z_loss(logits, mask, mask.sum()),
        )

    assert torch.autograd.gradcheck(losses, logits.clone().requires_grad_())


def test_nan_in_padding_reaches_no_loss_and_no_gradient() -> None:
    scores, ids, mask = make_batch()
    poisoned = scores.masked_fill(~mask[:, None], torch.nan).requires_grad_()
    counts, valid = count_tokens(ids, E), mask.sum()
    for loss, clean in (
        (batch_aux_loss(poisoned, mask, counts, valid, K), batch_aux_loss(scores, mask, counts, valid, K)),
        (z_loss(poisoned, mask, valid), z_loss(scores, mask, valid)),
    ):
        assert loss.item() == clean.item()
    z_loss(poisoned, mask, valid).backward()
    assert poisoned.grad is not None and poisoned.grad[mask].isfinite().all() and (poisoned.grad[~mask] == 0).all()


def test_a_batch_of_padding_has_loss_zero() -> None:
    scores, ids, _ = make_batch()
    nothing = torch.zeros(T, dtype=torch.bool)
    none = torch.full_like(ids, -1)
    scores.requires_grad_()
    losses = [
        batch_aux_loss(scores, nothing, count_tokens(none, E), nothing.sum(), K),
        sequence_aux_loss(scores, none, nothing, S, 3),
        z_loss(scores, nothing, nothing.sum()),
    ]
    sum(losses).backward()
    assert [loss.item() for loss in losses] == [0.0, 0.0, 0.0]
    assert scores.grad is not None and (scores.grad == 0).all()


def test_scores_that_all_underflow_stay_finite() -> None:
    scores = torch.zeros(4, E, requires_grad=True)
    ids = torch.zeros(4, 1, dtype=torch.int64)
    loss = batch_aux_loss(scores, None, count_tokens(ids, E), 4, 1) + sequence_aux_loss(scores, ids, None, 2, 2)
    loss.backward()
    assert loss.item() == 0.0 and scores.grad is not None and scores.grad.isfinite().all()


def test_the_bias_rises_where_the_load_is_low() -> None:
    bias = torch.tensor([0.5, 0.0, -0.5, 0.0])
    moved = update_expert_bias(bias, torch.tensor([10, 0, 5, 5]), rate=0.25)
    assert moved.tolist() == [0.25, 0.25, -0.5, 0.0]


def test_a_balanced_load_leaves_the_bias_finite_and_where_it_was() -> None:
    """Case 28. An fp32 mean of seven counts of 2400377 is not 2400377, and would move every expert."""
    bias = torch.linspace(-1, 1, 7)
    for count in (0, 3, 2_400_377):
        assert torch.equal(update_expert_bias(bias, torch.full((7,), count), rate=0.001), bias)


def test_the_bias_of_all_layers_moves_at_once() -> None:
    counts = torch.tensor([[3, 1, 2], [0, 0, 9]])
    bias = torch.zeros(2, 3)
    together = update_expert_bias(bias, counts, 0.5)
    assert torch.equal(together, torch.stack([update_expert_bias(bias[0], row, 0.5) for row in counts]))


def test_load_statistics_are_those_of_the_worst_layer() -> None:
    counts = torch.tensor([[4, 4, 4, 4], [16, 0, 0, 0], [8, 8, 0, 0]])
    max_over_mean, entropy = layer_loads(counts)
    torch.testing.assert_close(max_over_mean, torch.tensor([1.0, 4.0, 2.0], dtype=torch.float64))
    torch.testing.assert_close(entropy, torch.tensor([1.0, 0.0, 0.5], dtype=torch.float64), rtol=0, atol=1e-15)
    assert load_stats(counts) == {"load_max_over_mean": 4.0, "load_entropy": 0.0}


def test_load_statistics_without_tokens_and_with_one_expert() -> None:
    empty = load_stats(torch.zeros(2, 4, dtype=torch.int64))
    assert empty["load_max_over_mean"] == 1.0 and math.isclose(empty["load_entropy"], 1.0)
    assert load_stats(torch.tensor([[7]])) == {"load_max_over_mean": 1.0, "load_entropy": 1.0}


def test_forced_balance_is_balanced_and_keeps_the_gradient() -> None:
    config = MoEConfig(num_experts=4, top_k=2, force_balance=True)
    weight = torch.randn(4, 3, requires_grad=True)
    routing = route(torch.randn(6, 3), weight, None, config, seq_len=6)
    assert routing.topk_ids_TK.flatten().tolist() == [0, 1, 2, 3] * 3
    routing.topk_weights_TK[:, 0].sum().backward()
    assert weight.grad is not None and weight.grad.norm() > 0


def test_forced_balance_does_not_depend_on_which_sequences_are_here() -> None:
    """Three experts do not divide the ten pairs of a sequence."""
    config, weight = MoEConfig(num_experts=3, top_k=2, force_balance=True), torch.randn(3, 4)
    both = route(torch.randn(10, 4), weight, None, config, seq_len=5).topk_ids_TK
    assert torch.equal(both[:5], both[5:])
    assert torch.equal(route(torch.randn(5, 4), weight, None, config, seq_len=5).topk_ids_TK, both[5:])
