"""The MoE layer on one process against the whole-layer oracle in moe/reference.py.

fp64 goes through the reference experts: 1e-12. fp32 goes through grouped_mm: 1e-5 of the largest value per tensor.
"""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import moe.layer
from comms.all_to_all import DispatchPlan, plan_dispatch
from moe.config import MoEConfig
from moe.layer import BalanceScale, MoE
from moe.reference import reference_moe
from moe.router import expert_capacity, most_pairs

DIM, SEQ, BATCH = 16, 12, 3
SOFTMAX = MoEConfig(num_experts=8, top_k=2, expert_dim=8, aux_loss=0.3, z_loss=0.2)
SIGMOID = MoEConfig(
    num_experts=8,
    top_k=3,
    expert_dim=8,
    score_function="sigmoid",
    route_scale=2.5,
    num_groups=4,
    top_groups=2,
    shared_expert_dim=12,
    expert_bias=True,
    aux_loss=0.3,
    aux_loss_level="sequence",
)
BIASED = MoEConfig(
    num_experts=8, top_k=2, expert_dim=8, router_bias=True, linear_bias=True, activation="clamped_swiglu"
)
CONFIGS = {
    "softmax": SOFTMAX,
    "sigmoid": SIGMOID,
    "biased": BIASED,
    "capacity": replace(SOFTMAX, capacity_factor=0.7),
    "forced": replace(SOFTMAX, force_balance=True),
    "scores_before": replace(SOFTMAX, scores_before_experts=True),
}
TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5}


def build(config: MoEConfig, dtype: torch.dtype = torch.float64) -> MoE:
    layer = MoE(config, DIM).to(dtype)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for tensor in [*layer.parameters(), *layer.buffers()]:
            tensor.copy_(torch.randn(tensor.shape, generator=generator, dtype=torch.float64) * 0.4)
    return layer


def sample(dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(BATCH, SEQ, DIM, generator=torch.Generator().manual_seed(2), dtype=torch.float64).to(dtype)


def whole_batch(mask_BS: Tensor | None = None) -> BalanceScale:
    return BalanceScale(BATCH * SEQ if mask_BS is None else mask_BS.sum(), BATCH, 1)


def padding_mask() -> Tensor:
    return torch.arange(SEQ) < torch.tensor([[SEQ], [7], [3]])


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", CONFIGS)
def test_equals_the_oracle(name: str, padded: bool, dtype: torch.dtype) -> None:
    config = CONFIGS[name]
    layer, x_BSD = build(config, dtype), sample(dtype).requires_grad_()
    mask_BS = padding_mask() if padded else None
    y_BSD, stats = layer(x_BSD, mask_BS, whole_batch(mask_BS))
    leaves = [x_BSD, *layer.parameters()]
    ours = torch.autograd.grad(y_BSD.square().mean() + stats.aux_loss + stats.z_loss, leaves)

    x_oracle = x_BSD.detach().double().requires_grad_()
    state = {name: tensor.detach().double() for name, tensor in layer.state_dict().items()}
    copies = {name: state[name].requires_grad_() for name, _ in layer.named_parameters()}
    expected = reference_moe(x_oracle, {**state, **copies}, config, mask_BS)
    loss = expected.y_BSD.square().mean() + config.aux_loss * expected.aux_loss + config.z_loss * expected.z_loss
    oracle = torch.autograd.grad(loss, [x_oracle, *copies.values()], allow_unused=True)

    assert torch.equal(stats.tokens_per_expert_E, expected.tokens_per_expert_E)
    assert int(stats.dropped) == int(expected.dropped) and (int(stats.dropped) > 0) == (name == "capacity")
    assert stats.aux_loss.item() == pytest.approx(config.aux_loss * expected.aux_loss.item(), rel=TOLERANCES[dtype])
    assert stats.z_loss.item() == pytest.approx(config.z_loss * expected.z_loss.item(), rel=TOLERANCES[dtype])
    names = ["x", *copies]
    for label, a, b in zip(["y", *names], (y_BSD, *ours), (expected.y_BSD, *oracle), strict=True):
        error = float((a.double() - b).detach().abs().max()) / max(float(b.detach().abs().max()), 1e-3)
        assert error <= TOLERANCES[dtype] * 10, (label, error)


def test_evaluation_computes_no_auxiliary_loss() -> None:
    _, stats = build(SOFTMAX)(sample())
    assert float(stats.aux_loss) == 0 and float(stats.z_loss) == 0
    assert int(stats.tokens_per_expert_E.sum()) == BATCH * SEQ * SOFTMAX.top_k


def test_micro_steps_add_up_to_the_whole_batch() -> None:
    """Sequence-level and z-loss contributions of single sequences sum to those of the batch."""
    config = replace(SOFTMAX, aux_loss_level="sequence")
    layer, x_BSD = build(config), sample()
    _, whole = layer(x_BSD, None, whole_batch())
    scale = BalanceScale(BATCH * SEQ, BATCH, BATCH)
    parts = [layer(x_BSD[row : row + 1], None, scale)[1] for row in range(BATCH)]
    assert sum(part.aux_loss.item() for part in parts) == pytest.approx(whole.aux_loss.item(), rel=1e-12)
    assert sum(part.z_loss.item() for part in parts) == pytest.approx(whole.z_loss.item(), rel=1e-12)
    assert torch.equal(sum(part.tokens_per_expert_E for part in parts), whole.tokens_per_expert_E)


def router_gradient(layer: MoE, loss: Tensor) -> Tensor:
    return torch.autograd.grad(loss, layer.router.weight, retain_graph=True)[0]


@pytest.mark.parametrize("name", ["softmax", "sigmoid", "biased"])
def test_case_10_the_router_gradient_flows_through_the_output(name: str) -> None:
    """Moving the router along its gradient changes the loss as the gradient says (central difference in fp64: 1e-5)."""
    layer, x_BSD = build(CONFIGS[name]), sample()
    loss = layer(x_BSD)[0].square().mean()
    gradient = router_gradient(layer, loss)
    assert float(gradient.norm()) > 1e-6
    step = 1e-6 * gradient / gradient.norm()
    values = []
    for sign in (1, -1):
        with torch.no_grad():
            layer.router.weight += sign * step
            values.append(float(layer(x_BSD)[0].square().mean()))
            layer.router.weight -= sign * step
    assert (values[0] - values[1]) / 2e-6 == pytest.approx(float(gradient.norm()), rel=1e-5)


@pytest.mark.parametrize("name", ["softmax", "sigmoid"])
def test_case_25_the_router_gradient_is_that_of_the_loss_plus_the_auxiliary_one(name: str) -> None:
    layer, x_BSD = build(CONFIGS[name]), sample()
    y_BSD, stats = layer(x_BSD, None, whole_batch())
    both = router_gradient(layer, y_BSD.square().mean() + stats.aux_loss)
    plain, auxiliary = router_gradient(layer, y_BSD.square().mean()), router_gradient(layer, stats.aux_loss)
    assert float(auxiliary.norm()) > 1e-6
    torch.testing.assert_close(both, plain + auxiliary, rtol=1e-12, atol=1e-15)
    # The coefficient scales it, exactly linearly.
    tripled = build(replace(CONFIGS[name], aux_loss=3 * CONFIGS[name].aux_loss))
    stats = tripled(x_BSD, None, whole_batch())[1]
    torch.testing.assert_close(router_gradient(tripled, stats.aux_loss), 3 * auxiliary, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("name", [name for name in CONFIGS if name != "capacity"])
def test_case_24_a_padded_sequence_is_the_unpadded_one(name: str) -> None:
    """Same outputs, counts and gradients, whatever the padding holds (NaN). Capacity goes by the padded length."""
    config = replace(CONFIGS[name], shared_expert_dim=0)
    layer, x_BSD, length = build(config), sample()[:1], 7
    short = layer(x_BSD[:, :length], None, BalanceScale(length, 1, 1))
    mask_BS = torch.arange(SEQ)[None] < length
    # The forced assignment goes by position, and padding comes last.
    padded_BSD = torch.where(mask_BS[..., None], x_BSD, float("nan")).requires_grad_()
    padded = layer(padded_BSD, mask_BS, BalanceScale(length, 1, 1))
    assert torch.equal(padded[1].tokens_per_expert_E, short[1].tokens_per_expert_E)
    assert int(padded[1].tokens_per_expert_E.sum()) == length * config.top_k
    torch.testing.assert_close(padded[0][:, :length], short[0], rtol=1e-12, atol=1e-14)
    assert bool((padded[0][:, length:] == 0).all())
    grads = [
        torch.autograd.grad(y[:, :length].square().sum() + stats.aux_loss + stats.z_loss, list(layer.parameters()))
        for y, stats in (padded, short)
    ]
    for ours, expected in zip(*grads, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("score_function", ["softmax", "sigmoid"])
def test_case_28_a_perfectly_balanced_layer_is_finite(score_function: str) -> None:
    """Equal scores everywhere (a zero router) and forced balance: the point where variances and ratios are 0 / 0."""
    config = replace(SOFTMAX, score_function=score_function, force_balance=True)
    layer = build(config)
    with torch.no_grad():
        layer.router.weight.zero_()
    y_BSD, stats = layer(sample(), None, whole_batch())
    assert len(set(stats.tokens_per_expert_E.tolist())) == 1
    assert stats.aux_loss.item() == pytest.approx(config.aux_loss, rel=1e-12)
    (y_BSD.square().mean() + stats.aux_loss + stats.z_loss).backward()
    assert all(bool(torch.isfinite(parameter.grad).all()) for parameter in layer.parameters())


@pytest.mark.parametrize("name", ["softmax", "sigmoid"])
def test_case_30_the_balancing_bias_does_not_leak_into_the_output(name: str) -> None:
    """A bias that moves no choice changes no bit of the output; one that does changes the experts, not their scores."""
    layer = build(replace(CONFIGS[name], expert_bias=True))
    layer.expert_bias.zero_()
    before, _ = layer(sample())
    layer.expert_bias.fill_(5.0)
    shifted, stats = layer(sample())
    assert torch.equal(before, shifted)
    layer.expert_bias.zero_()
    layer.expert_bias[:2] = 5.0
    moved, moved_stats = layer(sample())
    assert not torch.equal(moved_stats.tokens_per_expert_E, stats.tokens_per_expert_E)
    assert not torch.equal(moved, before)


def test_the_balancing_bias_takes_no_gradient_and_is_saved() -> None:
    layer = build(SIGMOID)
    assert "expert_bias" in layer.state_dict() and not layer.expert_bias.requires_grad
    assert "expert_bias" not in dict(layer.named_parameters())
    assert "expert_bias" not in build(SOFTMAX).state_dict()


@pytest.mark.parametrize("factor", [0.5, 1.0, 1000.0])
def test_case_34_dropped_counts_are_exact(factor: float) -> None:
    """Each expert keeps its first ceil(factor * S * K / E) pairs of a sequence; far too much capacity drops nothing."""
    layer = build(replace(SOFTMAX, capacity_factor=factor))
    x_BSD = sample()
    _, stats = layer(x_BSD)
    capacity = -(-int(factor * SEQ * SOFTMAX.top_k) // SOFTMAX.num_experts)
    expected = 0
    for row in range(BATCH):
        counts = layer(x_BSD[row : row + 1])[1].tokens_per_expert_E
        expected += int((counts - capacity).clamp(min=0).sum())
    assert int(stats.dropped) == expected
    assert (expected > 0) == (factor <= 1)
    # Counts tell the choice, dropped or not: balancing needs the demand.
    assert int(stats.tokens_per_expert_E.sum()) == BATCH * SEQ * SOFTMAX.top_k


def test_a_token_whose_pairs_are_all_dropped_gets_zero() -> None:
    """All tokens choose the same experts; capacity 1 keeps the first token of each sequence."""
    config = replace(SOFTMAX, capacity_factor=SOFTMAX.num_experts / (SEQ * SOFTMAX.top_k))
    layer = build(config)
    x_BSD = sample()[:, :1].expand(-1, SEQ, -1)
    y_BSD, stats = layer(x_BSD)
    assert int(stats.dropped) == BATCH * (SEQ - 1) * config.top_k
    assert bool((y_BSD[:, 1:] == 0).all()) and y_BSD[:, 0].norm().item() > 0


@pytest.mark.parametrize("name", CONFIGS)
def test_a_bound_on_the_pairs_is_as_good_as_their_number(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU only the device knows how many tokens are real, or within capacity; on a CPU it is said here."""
    layer, mask_BS = build(CONFIGS[name]), padding_mask()

    def run() -> list[Tensor]:
        x_BSD = sample().requires_grad_()
        y_BSD, _ = layer(x_BSD, mask_BS)
        return [y_BSD, *torch.autograd.grad(y_BSD.square().mean(), [x_BSD, *layer.parameters()])]

    exact = run()
    bounds: list[int] = []

    def bounded(items_TN: Tensor, group: None, num_items: int | None, is_exact: bool) -> DispatchPlan:
        assert num_items is None and not is_exact
        bounds.append(BATCH * SEQ * layer.config.top_k)
        return plan_dispatch(items_TN, group, bounds[-1], is_exact=False)

    monkeypatch.setattr(moe.layer, "plan_dispatch", bounded)
    assert all(torch.equal(a, b) for a, b in zip(run(), exact, strict=True)) and bounds


@pytest.mark.parametrize("factor", [0.1, 0.5, 1.0, 3.0, None])
def test_the_most_that_a_capacity_leaves_is_left_when_all_choose_alike(factor: float | None) -> None:
    config = replace(SOFTMAX, capacity_factor=factor)
    routing = build(config).route(
        sample()[:, :1].expand(-1, SEQ, -1).flatten(0, 1), torch.zeros(config.num_experts, DIM).double(), None, config,
        seq_len=SEQ,
    )  # fmt: skip
    kept, most = int((routing.topk_ids_TK >= 0).sum()), most_pairs(config, BATCH * SEQ, SEQ)
    full = BATCH * SEQ * config.top_k
    assert kept <= most <= full and (most == full) == (factor is None or factor >= 1)
    if factor is not None and factor < 1:
        capacity = expert_capacity(config, SEQ)
        assert most == BATCH * config.num_experts * capacity and kept == BATCH * config.top_k * capacity


def test_single_expert_and_zero_tokens() -> None:
    layer = build(MoEConfig(num_experts=1, top_k=1, expert_dim=8))
    x_BSD = sample()
    # The only expert's weight is 1.
    state = layer.state_dict()
    expected = reference_moe(x_BSD, state, layer.config).y_BSD
    torch.testing.assert_close(layer(x_BSD)[0], expected, rtol=1e-12, atol=1e-14)
    y_BSD, stats = layer(x_BSD[:0])
    assert y_BSD.shape == (0, SEQ, DIM) and int(stats.tokens_per_expert_E.sum()) == 0


def test_impossible_settings_are_refused_when_the_layer_is_built() -> None:
    with pytest.raises(ValueError, match=r"model\.moe\.top_k=9"):
        MoE(replace(SOFTMAX, top_k=9), DIM)
