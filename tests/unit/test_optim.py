"""Parameter groups, the schedule, missing gradients, clipping, and an optimizer state that survives saving."""

import io
import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from trainer.config import OptimConfig
from trainer.optim import (
    SCHEDULES,
    build_optimizer,
    clip_grad_norm,
    ensure_gradients,
    is_decayed,
    learning_rate,
    parameter_groups,
    set_learning_rate,
    update,
)


class TinyModel(nn.Module):
    """One of each kind of parameter: a matrix, a norm, stacked experts and their stacked biases."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(shape, generator=generator))

        self.weight = parameter(4, 3)
        self.norm = parameter(3)
        self.w_down = parameter(2, 3, 4)
        self.b_down = parameter(2, 3)
        self.frozen = nn.Parameter(torch.ones(2, 2), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = (x * self.norm) @ self.weight.T
        return sum((hidden @ self.w_down[e].T + self.b_down[e]).square().mean() for e in range(2))  # type: ignore[return-value]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range, config: OptimConfig) -> None:
    for step in steps:
        x = torch.randn(5, 3, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        model(x).backward()
        set_learning_rate(optimizer, learning_rate(step, config, total_steps=20))
        optimizer.step()


def test_only_matrices_decay() -> None:
    model = TinyModel()
    optimizer = build_optimizer(model, OptimConfig(weight_decay=0.1))
    decays = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    named = {name: decays.get(id(p)) for name, p in model.named_parameters()}
    assert named == {"weight": 0.1, "norm": 0.0, "w_down": 0.1, "b_down": 0.0, "frozen": None}
    assert len(optimizer.param_groups) == 2


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        ("layers.0.moe.experts.b_gate_up", (4, 2, 8), False),
        ("layers.0.moe.experts.w_gate_up", (4, 2, 8, 8), True),
        ("layers.0.attention.sinks", (4,), False),
        ("layers.0.b_side.weight", (4, 4), True),
        ("norm.weight", (8,), False),
    ],
)
def test_what_decays_is_told_by_dims_and_name(name: str, shape: tuple[int, ...], expected: bool) -> None:
    assert is_decayed(name, torch.empty(shape)) is expected


def test_groups_keep_the_order_of_the_model() -> None:
    model = TinyModel()
    groups = parameter_groups(model.named_parameters(), 0.1)
    members = [[id(p) for p in group["params"]] for group in groups]  # type: ignore[attr-defined]
    assert members == [[id(model.weight), id(model.w_down)], [id(model.norm), id(model.b_down)]]


def test_adamw_takes_the_step_of_its_formula() -> None:
    config = OptimConfig(lr=0.1, betas=[0.9, 0.95], eps=1e-8, weight_decay=0.5)
    model = TinyModel()
    before, norm_before = model.weight.detach().clone(), model.norm.detach().clone()
    optimizer = build_optimizer(model, config)
    model(torch.ones(1, 3)).backward()
    optimizer.step()
    # First step: both moments, corrected for their bias, are the gradient and its square.
    for parameter, start, decay in ((model.weight, before, 0.5), (model.norm, norm_before, 0.0)):
        grad = parameter.grad
        assert grad is not None
        expected = start * (1 - 0.1 * decay) - 0.1 * grad / (grad.abs() + 1e-8)
        torch.testing.assert_close(parameter.detach(), expected, rtol=1e-5, atol=1e-6)


def test_sgd_is_plain() -> None:
    model = TinyModel()
    before = model.weight.detach().clone()
    optimizer = build_optimizer(model, OptimConfig(name="sgd", lr=0.5, weight_decay=0.0))
    model(torch.ones(1, 3)).backward()
    optimizer.step()
    assert model.weight.grad is not None
    torch.testing.assert_close(model.weight.detach(), before - 0.5 * model.weight.grad, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_saved_and_loaded_state_goes_on_bit_for_bit(name: str) -> None:
    """Case 43 without a checkpointer: 6 steps = 3 steps, save, load, 3 steps; moments and step counts included."""
    config = OptimConfig(name=name, lr=0.01, warmup_steps=2)
    straight = TinyModel()
    straight_optimizer = build_optimizer(straight, config)
    train(straight, straight_optimizer, range(6), config)

    first = TinyModel()
    first_optimizer = build_optimizer(first, config)
    train(first, first_optimizer, range(3), config)
    file = io.BytesIO()
    torch.save({"model": first.state_dict(), "optimizer": first_optimizer.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    resumed = TinyModel()
    resumed.load_state_dict(saved["model"])
    resumed_optimizer = build_optimizer(resumed, config)
    resumed_optimizer.load_state_dict(saved["optimizer"])
    train(resumed, resumed_optimizer, range(3, 6), config)

    for (key, ours), theirs in zip(resumed.state_dict().items(), straight.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs), key
    ours, theirs = resumed_optimizer.state_dict(), straight_optimizer.state_dict()
    assert ours["param_groups"] == theirs["param_groups"]
    assert ours["state"].keys() == theirs["state"].keys()
    for index, state in theirs["state"].items():
        for key, value in state.items():
            assert value is None or torch.equal(ours["state"][index][key], value), (index, key)


def test_a_parameter_without_gradient_still_takes_its_step() -> None:
    """Case 11: the gradient is exactly zero and every step count is equal."""
    model = TinyModel()
    optimizer = build_optimizer(model, OptimConfig())
    for step in range(3):
        optimizer.zero_grad()
        (model.weight.square().sum() if step else model(torch.ones(1, 3))).backward()
        ensure_gradients(model)
        assert not step or (model.w_down.grad is not None and (model.w_down.grad == 0).all())
        optimizer.step()
    assert [state["step"].item() for state in optimizer.state.values()] == [3.0] * 4
    assert model.frozen.grad is None


def test_existing_gradients_are_left_alone() -> None:
    model = TinyModel()
    model.weight.grad = torch.full_like(model.weight, 2.0)
    ensure_gradients(model)
    assert (model.weight.grad == 2).all()


def test_cosine_passes_through_its_landmarks() -> None:
    config = OptimConfig(lr=1.0, warmup_steps=10, min_lr_ratio=0.1, schedule="cosine")
    rates = [learning_rate(step, config, total_steps=110) for step in range(110)]
    assert rates[:10] == [(step + 1) / 10 for step in range(10)]
    assert math.isclose(rates[59], 0.55)
    assert rates[109] == pytest.approx(0.1, abs=1e-15)
    assert all(a > b for a, b in itertools.pairwise(rates[9:]))


def test_linear_falls_by_equal_amounts() -> None:
    config = OptimConfig(lr=1.0, warmup_steps=0, min_lr_ratio=0.0, schedule="linear")
    rates = [learning_rate(step, config, total_steps=4) for step in range(4)]
    assert rates == [0.75, 0.5, 0.25, 0.0]


def test_wsd_is_stable_and_then_falls() -> None:
    config = OptimConfig(lr=1.0, warmup_steps=2, min_lr_ratio=0.5, schedule="wsd", decay_ratio=0.2)
    rates = [learning_rate(step, config, total_steps=20) for step in range(20)]
    assert rates == pytest.approx([0.5] + [1.0] * 15 + [0.875, 0.75, 0.625, 0.5], abs=1e-15)


def test_constant_stays() -> None:
    config = OptimConfig(lr=0.3, warmup_steps=1, schedule="constant")
    assert {learning_rate(step, config, 5) for step in range(9)} == {0.3}


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(SCHEDULES), st.integers(0, 50), st.integers(1, 50), st.integers(0, 120), st.floats(0, 1))
def test_rates_stay_between_their_bounds(schedule: str, warmup: int, total: int, step: int, ratio: float) -> None:
    """Also where warm-up is longer than the run, and past its end."""
    config = OptimConfig(lr=2.0, warmup_steps=warmup, schedule=schedule, min_lr_ratio=ratio)
    rate = learning_rate(step, config, total)
    assert 0 <= rate <= 2.0 * (1 + 1e-15)
    if step >= warmup:
        assert rate >= 2.0 * ratio * (1 - 1e-15)
    if step >= max(warmup, total - 1) and schedule != "constant" and warmup < total:
        assert rate == pytest.approx(2.0 * ratio, abs=1e-14)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_resumed_run_has_the_same_rates_to_the_last_digit(schedule: str) -> None:
    """Case 52: the rate is a function of the step alone, whatever the optimizer's state held."""
    config = OptimConfig(lr=3e-4, warmup_steps=7, schedule=schedule)
    straight = [learning_rate(step, config, 100) for step in range(100)]
    model = TinyModel()
    optimizer = build_optimizer(model, config)
    set_learning_rate(optimizer, straight[49])
    resumed = build_optimizer(model, config)
    resumed.load_state_dict(optimizer.state_dict())
    for step in range(50, 100):
        set_learning_rate(resumed, learning_rate(step, config, 100))
        assert [group["lr"] for group in resumed.param_groups] == [straight[step]] * 2


def test_clipping_scales_to_the_bound_and_returns_the_norm_before() -> None:
    model = TinyModel()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter) if parameter.requires_grad else None
    numel = 12 + 3 + 24 + 6
    norm = clip_grad_norm(model, max_norm=1.0)
    assert norm.item() == pytest.approx(math.sqrt(numel), rel=1e-6)
    clipped = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    # torch divides by norm + 1e-6.
    assert clipped.norm().item() == pytest.approx(1.0, rel=1e-5)


@pytest.mark.parametrize("max_norm", [0.0, -1.0, 1e9])
def test_small_gradients_and_measuring_leave_gradients_as_they_are(max_norm: float) -> None:
    model = TinyModel()
    model(torch.ones(2, 3)).backward()
    before = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    norm = clip_grad_norm(model, max_norm)
    assert norm > 0
    assert all(torch.equal(p.grad, before[name]) for name, p in model.named_parameters() if p.grad is not None)


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_an_update_that_the_device_is_to_skip_changes_nothing(name: str) -> None:
    """Neither weights nor moments nor step counts; and with the flag at 0 it is the same update to the bit."""
    states = []
    for skips in ((None, None), (0.0, 0.0), (0.0, 1.0, 0.0)):
        torch.manual_seed(0)
        model = TinyModel()
        optimizer = build_optimizer(model, OptimConfig(name=name, lr=0.1))
        for skip in skips:
            optimizer.zero_grad()
            model(torch.ones(2, 3)).square().sum().backward()
            if skip == 1:
                for parameter in model.parameters():
                    parameter.grad = None if parameter.grad is None else torch.full_like(parameter.grad, math.nan)
            update(optimizer, None if skip is None else torch.tensor(skip))
        moments = [value for state in optimizer.state.values() for value in state.values()]
        states.append([*model.parameters(), *(value for value in moments if value is not None)])
    for plain, flagged, skipped in zip(*states, strict=True):
        assert torch.equal(plain, flagged) and torch.equal(plain, skipped)


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ValueError, match=r"optim\.name=lion must be adamw or sgd"):
        build_optimizer(TinyModel(), OptimConfig(name="lion"))
    with pytest.raises(ValueError, match=r"optim\.schedule=step"):
        learning_rate(0, OptimConfig(schedule="step"), 10)
