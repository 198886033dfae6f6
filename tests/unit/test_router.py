"""route(): against a loop over tokens in plain Python, and against the routers of transformers.

Names: T tokens, D model dim, E experts, K experts per token, as in moe/router.py. Chosen ids are compared exactly.
"""

import math
from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe.config import MoEConfig
from moe.router import NO_EXPERT, Routing, expert_capacity, route, router_scores, validate_routing

# Router arithmetic is a handful of fp64 operations per entry.
FP64_TOLERANCE = 1e-14
# fp32: two roundings of softmax and division, taken in another order by transformers.
FP32_TOLERANCE = 1e-6


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@st.composite
def routing_cases(draw: st.DrawFn) -> tuple[MoEConfig, torch.Tensor, torch.Tensor | None, torch.Tensor, int]:
    """A config, logits with many ties, an expert bias, a token mask and seq_len."""
    num_groups = draw(st.sampled_from([1, 2, 3]))
    num_experts = num_groups * draw(st.integers(1, 4))
    top_groups = draw(st.integers(1, num_groups))
    config = MoEConfig(
        num_experts=num_experts,
        top_k=draw(st.integers(1, top_groups * (num_experts // num_groups))),
        score_function=draw(st.sampled_from(["softmax", "sigmoid"])),
        normalize_topk=draw(st.booleans()),
        route_scale=draw(st.sampled_from([1.0, 2.5])),
        num_groups=num_groups,
        top_groups=top_groups,
        group_score=draw(st.sampled_from(["max", "top2_sum"])),
        capacity_factor=draw(st.sampled_from([None, 0.3, 1.0, 1.25, 100.0])),
    )
    seq_len, num_sequences = draw(st.integers(1, 6)), draw(st.integers(1, 3))
    seed = draw(st.integers(0, 2**31))
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randint(-2, 3, (num_sequences * seq_len, num_experts), generator=generator).double()
    # Multiples of 1/4, so that biased scores differ by more than rounding or not at all.
    bias = torch.randint(-2, 3, (num_experts,), generator=generator).double() / 4 if draw(st.booleans()) else None
    mask = torch.rand(len(logits), generator=generator) < 0.7
    return config, logits, bias, mask, seq_len


def route_by_hand(routing: Routing, config: MoEConfig, bias: torch.Tensor | None, mask: torch.Tensor, seq_len: int):
    """Ids, weights and the number dropped, token by token, from the scores alone."""
    E, K = config.num_experts, config.top_k
    per_group = E // config.num_groups
    ids, weights, dropped = [], [], 0
    scores_TE = router_scores(routing.logits_TE, config)
    for t, (scores, logits) in enumerate(zip(scores_TE.tolist(), routing.logits_TE.tolist(), strict=True)):
        if t % seq_len == 0:
            load: Counter[int] = Counter()
        choice = [s + (0.0 if bias is None else float(bias[e])) for e, s in enumerate(scores)]
        if bias is None and config.num_groups == 1:
            choice = logits
        groups = [sorted(choice[g * per_group : (g + 1) * per_group], reverse=True) for g in range(config.num_groups)]
        value = [group[0] if config.group_score == "max" else sum(group[:2]) for group in groups]
        best = sorted(range(config.num_groups), key=lambda g: (-value[g], g))[: config.top_groups]
        eligible = [e for e in range(E) if e // per_group in best]
        chosen = sorted(eligible, key=lambda e: (-choice[e], e))[:K]
        total = sum(scores[e] for e in chosen) if config.normalize_topk else 1.0
        token_ids, token_weights = [], []
        for e in chosen:
            load[e] += bool(mask[t])
            fits = config.capacity_factor is None or load[e] <= expert_capacity(config, seq_len)
            kept = bool(mask[t]) and fits
            dropped += bool(mask[t]) and not fits
            token_ids.append(e if kept else NO_EXPERT)
            token_weights.append(scores[e] / total * config.route_scale if kept else 0.0)
        ids.append(token_ids), weights.append(token_weights)
    return torch.tensor(ids), torch.tensor(weights, dtype=torch.float64), dropped


@settings(max_examples=150, deadline=None)
@given(routing_cases())
def test_equals_a_loop_over_tokens(case) -> None:
    config, logits, bias, mask, seq_len = case
    validate_routing(config)
    identity = torch.eye(config.num_experts, dtype=torch.float64)
    routing = route(logits, identity, None, config, expert_bias_E=bias, token_mask_T=mask, seq_len=seq_len)
    ids, weights, dropped = route_by_hand(routing, config, bias, mask, seq_len)
    assert torch.equal(routing.topk_ids_TK, ids)
    torch.testing.assert_close(routing.topk_weights_TK, weights, rtol=FP64_TOLERANCE, atol=FP64_TOLERANCE)
    assert routing.dropped.item() == dropped
    assert (routing.chosen_ids_TK >= 0).sum() == mask.sum() * config.top_k


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**31), st.sampled_from([0.1, 0.5, 1.0, 1.1, 2.0]), st.integers(1, 7), st.integers(1, 4))
def test_dropped_pairs_are_exactly_those_above_capacity(seed: int, factor: float, seq_len: int, top_k: int) -> None:
    config = MoEConfig(num_experts=4, top_k=top_k, capacity_factor=factor)
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(3 * seq_len, 5, generator=generator)
    routing = route(x, torch.randn(4, 5, generator=generator), None, config, seq_len=seq_len)
    capacity = expert_capacity(config, seq_len)
    excess = 0
    for ids, kept in zip(routing.chosen_ids_TK.split(seq_len), routing.topk_ids_TK.split(seq_len), strict=True):
        for e in range(4):
            wanted, got = (ids == e).any(dim=1), (kept == e).any(dim=1)
            excess += max(0, int(wanted.sum()) - capacity)
            # The earliest tokens that wanted the expert got it.
            assert torch.equal(got.nonzero()[:, 0], wanted.nonzero()[:capacity, 0])
    assert routing.dropped.item() == excess
    assert (routing.topk_weights_TK[routing.topk_ids_TK < 0] == 0).all()


def test_capacity_is_not_raised_by_binary_rounding() -> None:
    # 1.1 * 50 is 55.00000000000001 in binary.
    assert expert_capacity(MoEConfig(num_experts=2, top_k=2, capacity_factor=1.1), seq_len=50) == 55
    assert expert_capacity(MoEConfig(num_experts=8, top_k=1, capacity_factor=0.01), seq_len=4) == 1
    # There are no more pairs; the product would not fit a tensor's integer.
    assert expert_capacity(MoEConfig(num_experts=8, top_k=2, capacity_factor=1e300), seq_len=4) == 8


def test_capacity_above_the_number_of_tokens_drops_nothing() -> None:
    config = MoEConfig(num_experts=4, top_k=2, capacity_factor=64.0)
    x, weight = torch.randn(6, 3), torch.zeros(4, 3)
    routing = route(x, weight, None, config, seq_len=3)
    assert routing.dropped.item() == 0
    assert torch.equal(routing.topk_ids_TK, routing.chosen_ids_TK)


def test_what_a_sequence_drops_does_not_depend_on_its_neighbours() -> None:
    config = MoEConfig(num_experts=4, top_k=2, capacity_factor=0.7)
    x, weight = torch.randn(20, 6), torch.randn(4, 6)
    together = route(x, weight, None, config, seq_len=5)
    apart = [route(part, weight, None, config, seq_len=5) for part in x.split(5)]
    assert together.dropped.item() == sum(r.dropped.item() for r in apart) > 0
    assert torch.equal(together.topk_ids_TK, torch.cat([r.topk_ids_TK for r in apart]))


def test_ties_go_to_the_lowest_id() -> None:
    routing = route(torch.ones(3, 4), torch.zeros(16, 4), None, MoEConfig(num_experts=16, top_k=3), seq_len=3)
    assert routing.topk_ids_TK.tolist() == [[0, 1, 2]] * 3
    torch.testing.assert_close(routing.topk_weights_TK, torch.full((3, 3), 1 / 3))


@pytest.mark.parametrize(("score_function", "offset"), [("sigmoid", 50.0), ("softmax", -500.0)])
def test_saturated_scores_are_still_told_apart(score_function: str, offset: float) -> None:
    """The scores are all 1 (sigmoid) or 0 (softmax, under the first expert's 1) in fp32; the logits are not."""
    config = MoEConfig(num_experts=4, top_k=2, score_function=score_function)
    logits = torch.tensor([0.0, offset, offset + 2, offset + 1])
    routing = route(torch.zeros(1, 3), torch.zeros(4, 3), logits, config, seq_len=1)
    assert routing.topk_ids_TK.tolist() == [[2, 3] if score_function == "sigmoid" else [0, 2]]


def test_no_token_at_all() -> None:
    config = MoEConfig(num_experts=4, top_k=2, capacity_factor=1.0)
    routing = route(torch.ones(0, 4), torch.zeros(4, 4), None, config, seq_len=8)
    assert routing.topk_ids_TK.shape == (0, 2) and routing.dropped.item() == 0


def test_expert_bias_moves_the_choice_but_not_the_weights() -> None:
    """Case 30: weights come from unbiased scores."""
    config = MoEConfig(num_experts=6, top_k=2, score_function="sigmoid", normalize_topk=False)
    x, weight = torch.randn(8, 5), torch.randn(6, 5)
    bias = torch.tensor([0.0, 0.0, 10.0, 0.0, 0.0, 9.0], requires_grad=True)
    routing = route(x, weight, None, config, expert_bias_E=bias, seq_len=8)
    assert routing.topk_ids_TK.tolist() == [[2, 5]] * 8
    assert torch.equal(routing.topk_weights_TK, torch.sigmoid(x @ weight.T)[:, [2, 5]])
    assert not routing.topk_weights_TK.requires_grad, "the balancing bias takes no gradient"


def test_padding_changes_nothing_for_the_others() -> None:
    """Case 24: a padded batch routes like the unpadded one, whatever lies in the padding (here NaN)."""
    config = MoEConfig(num_experts=6, top_k=2, capacity_factor=100.0)
    x, weight = torch.randn(6, 5, dtype=torch.float64), torch.randn(6, 5, dtype=torch.float64, requires_grad=True)
    padded = torch.full((2, 5, 5), torch.nan, dtype=torch.float64)
    padded[:, :3] = x.view(2, 3, 5)
    mask = torch.arange(5).lt(3).repeat(2)
    plain = route(x, weight, None, config, seq_len=3)
    masked = route(padded.view(10, 5), weight, None, config, token_mask_T=mask, seq_len=5)
    assert torch.equal(masked.topk_ids_TK[mask], plain.topk_ids_TK)
    assert torch.equal(masked.topk_weights_TK[mask], plain.topk_weights_TK)
    assert (masked.topk_ids_TK[~mask] == NO_EXPERT).all() and (masked.topk_weights_TK[~mask] == 0).all()
    probe = torch.randn(6, 2, dtype=torch.float64)
    gradients = [
        torch.autograd.grad((r.topk_weights_TK[m] * probe).sum(), weight)[0]
        for r, m in ((plain, slice(None)), (masked, mask))
    ]
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-13, atol=1e-15)


@pytest.mark.parametrize("score_function", ["softmax", "sigmoid"])
@pytest.mark.parametrize("logit", [0.0, -500.0, 500.0])
def test_extreme_and_equal_scores_stay_finite(score_function: str, logit: float) -> None:
    config = MoEConfig(num_experts=4, top_k=2, score_function=score_function)
    bias = torch.tensor([0.0, -3000.0, -3000.0, -3000.0]) + logit
    bias.requires_grad_()
    routing = route(torch.zeros(2, 3), torch.zeros(4, 3), bias, config, seq_len=2)
    routing.topk_weights_TK.square().sum().backward()
    assert routing.topk_weights_TK.isfinite().all() and bias.grad is not None and bias.grad.isfinite().all()


def test_half_precision_input_is_routed_in_fp32() -> None:
    config = MoEConfig(num_experts=8, top_k=2)
    x, weight = torch.randn(16, 4).bfloat16(), torch.randn(8, 4).bfloat16()
    low, full = (route(a, b, None, config, seq_len=16) for a, b in ((x, weight), (x.float(), weight.float())))
    assert low.topk_weights_TK.dtype == low.logits_TE.dtype == torch.float32
    assert torch.equal(low.topk_weights_TK, full.topk_weights_TK) and torch.equal(low.topk_ids_TK, full.topk_ids_TK)


@pytest.mark.parametrize("normalize_topk", [True, False])
@pytest.mark.parametrize("score_function", ["softmax", "sigmoid"])
def test_gradients(score_function: str, normalize_topk: bool) -> None:
    config = MoEConfig(
        num_experts=5, top_k=3, score_function=score_function, normalize_topk=normalize_topk, route_scale=1.5
    )
    x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(5, dtype=torch.float64, requires_grad=True)

    def outputs(*inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return route(*inputs, config, seq_len=4)[1:4]

    assert torch.autograd.gradcheck(outputs, (x, weight, bias))


@pytest.mark.parametrize(("normalize_topk", "expected"), [(True, False), (False, True)])
def test_scores_that_only_choose_are_not_kept_for_backward(normalize_topk: bool, expected: bool) -> None:
    config = MoEConfig(num_experts=8, top_k=2, normalize_topk=normalize_topk)
    x, weight = torch.randn(4, 16, requires_grad=True), torch.randn(8, 16)
    kept = []
    # Compiled, as in training: a plain gather keeps what it reads from, for its size.
    compiled = torch.compile(route, backend="aot_eager")
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor.shape) or tensor, lambda t: t):
        found = compiled(x, weight, None, config, seq_len=4)
    assert ((4, 8) in kept) is expected
    (dx,) = torch.autograd.grad(found.topk_weights_TK.square().sum(), x)
    assert dx.norm() > 0


def test_compiles_into_one_graph() -> None:
    config = MoEConfig(num_experts=8, top_k=2, num_groups=2, top_groups=1, capacity_factor=1.0)
    x, weight, mask = torch.randn(8, 4), torch.randn(8, 4), torch.arange(8) < 6

    def step(x: torch.Tensor) -> Routing:
        return route(x, weight, None, config, expert_bias_E=torch.zeros(8), token_mask_T=mask, seq_len=4)

    compiled = torch.compile(step, fullgraph=True, backend="eager")(x)
    for ours, eager in zip(compiled, step(x), strict=True):
        assert (ours is eager is None) or torch.equal(ours, eager)


def _assert_same_choice(routing: Routing, ids: torch.Tensor, weights: torch.Tensor) -> None:
    """Equal sets of experts with equal weights; transformers leaves their order open."""
    ours, theirs = routing.topk_ids_TK.sort(dim=1), ids.sort(dim=1)
    assert torch.equal(ours.values, theirs.values)
    torch.testing.assert_close(
        routing.topk_weights_TK.gather(1, ours.indices),
        weights.gather(1, theirs.indices),
        rtol=FP32_TOLERANCE,
        atol=FP32_TOLERANCE,
    )


@pytest.mark.parametrize("normalize_topk", [True, False])
def test_equals_qwen3_moe(normalize_topk: bool) -> None:
    from transformers.models.qwen3_moe.configuration_qwen3_moe import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

    theirs = Qwen3MoeTopKRouter(
        Qwen3MoeConfig(num_experts=16, num_experts_per_tok=4, hidden_size=12, norm_topk_prob=normalize_topk)
    )
    torch.nn.init.normal_(theirs.weight)
    x = torch.randn(64, 12)
    _, weights, ids = theirs(x)
    config = MoEConfig(num_experts=16, top_k=4, normalize_topk=normalize_topk)
    _assert_same_choice(route(x, theirs.weight, None, config, seq_len=64), ids, weights)


@pytest.mark.parametrize("normalize_topk", [True, False])
def test_equals_deepseek_v3(normalize_topk: bool) -> None:
    from transformers.models.deepseek_v3.configuration_deepseek_v3 import DeepseekV3Config
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

    theirs = DeepseekV3TopkRouter(
        DeepseekV3Config(
            num_local_experts=16,
            num_experts_per_tok=4,
            hidden_size=12,
            n_group=4,
            topk_group=2,
            routed_scaling_factor=2.5,
            norm_topk_prob=normalize_topk,
        )
    )
    torch.nn.init.normal_(theirs.weight)
    theirs.e_score_correction_bias.normal_(std=0.3)
    x = torch.randn(64, 12)
    _, weights, ids = theirs(x)
    config = MoEConfig(
        num_experts=16,
        top_k=4,
        score_function="sigmoid",
        normalize_topk=normalize_topk,
        route_scale=2.5,
        num_groups=4,
        top_groups=2,
        group_score="top2_sum",
    )
    bias = theirs.e_score_correction_bias
    routing = route(x, theirs.weight, None, config, expert_bias_E=bias, seq_len=64)
    _assert_same_choice(routing, ids, weights)
    ungrouped = route(x, theirs.weight, None, replace(config, num_groups=1, top_groups=1), seq_len=64)
    assert not torch.equal(ungrouped.topk_ids_TK, routing.topk_ids_TK), "the case must exercise groups and bias"


def test_equals_deepseek_v2_group_limited_greedy() -> None:
    from transformers.models.deepseek_v2.configuration_deepseek_v2 import DeepseekV2Config
    from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter

    theirs = DeepseekV2TopkRouter(
        DeepseekV2Config(
            n_routed_experts=16,
            num_experts_per_tok=4,
            hidden_size=12,
            num_attention_heads=4,
            n_group=4,
            topk_group=2,
            topk_method="group_limited_greedy",
            routed_scaling_factor=16.0,
        )
    )
    torch.nn.init.normal_(theirs.weight)
    x = torch.randn(64, 12)
    _, weights, ids = theirs(x)
    config = MoEConfig(
        num_experts=16,
        top_k=4,
        normalize_topk=False,
        route_scale=16.0,
        num_groups=4,
        top_groups=2,
        group_score="max",
    )
    _assert_same_choice(route(x, theirs.weight, None, config, seq_len=64), ids, weights)


def test_equals_gpt_oss() -> None:
    from transformers.models.gpt_oss.configuration_gpt_oss import GptOssConfig
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssTopKRouter

    theirs = GptOssTopKRouter(GptOssConfig(num_local_experts=16, num_experts_per_tok=4, hidden_size=12))
    torch.nn.init.normal_(theirs.weight)
    torch.nn.init.normal_(theirs.bias)
    x = torch.randn(64, 12)
    _, weights, ids = theirs(x)
    config = MoEConfig(num_experts=16, top_k=4, router_bias=True)
    _assert_same_choice(route(x, theirs.weight, theirs.bias, config, seq_len=64), ids, weights)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("top_k", 0),
        ("top_k", 9),
        ("num_groups", 3),
        ("top_groups", 2),
        ("capacity_factor", 0.0),
        ("capacity_factor", math.nan),
        ("score_function", "tanh"),
        ("group_score", "mean"),
    ],
)
def test_impossible_settings_are_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=rf"model\.moe\.{field}={value}"):
        validate_routing(replace(MoEConfig(num_experts=8, top_k=2), **{field: value}))


def test_groups_too_small_for_top_k_are_refused() -> None:
    with pytest.raises(ValueError, match="raise top_groups to at least 2"):
        validate_routing(MoEConfig(num_experts=8, num_groups=4, top_groups=1, top_k=3))


def test_a_broken_sequence_is_refused() -> None:
    with pytest.raises(ValueError, match="seq_len=4"):
        route(torch.ones(6, 3), torch.ones(4, 3), None, MoEConfig(num_experts=4), seq_len=4)
