"""Initial weights: a function of (seed, name, expert), with the right distribution. Layouts: tests/distributed."""

import math

import pytest
import torch
from torch import nn

from parallel.init import CLAMP_STDS, InitRule, clean_name, draw, fill, init_weights

CPU = torch.device("cpu")


def filled(name: str, shape: tuple[int, ...], std: float = 0.02, seed: int = 0, dtype=torch.float32) -> torch.Tensor:
    tensor = torch.full(shape, float("nan"), dtype=dtype)
    fill(tensor, name, InitRule("normal", std), seed)
    return tensor


def test_values_depend_on_seed_and_name_alone() -> None:
    first = filled("a.weight", (64, 32))
    torch.rand(7)
    assert torch.equal(first, filled("a.weight", (64, 32)))
    assert not torch.equal(first, filled("b.weight", (64, 32)))
    assert not torch.equal(first, filled("a.weight", (64, 32), seed=1))


def test_drawing_leaves_the_global_generator_alone() -> None:
    state = torch.get_rng_state()
    filled("a.weight", (64, 32))
    assert torch.equal(state, torch.get_rng_state())


def test_mean_spread_and_bounds() -> None:
    """200,000 values. Clamping moves 0.3 % of them by little: std within 1 %. Mean within 5 standard errors."""
    values = filled("a.weight", (500, 400), std=0.02)
    assert float(values.std()) == pytest.approx(0.02, rel=0.01)
    assert abs(float(values.mean())) < 5 * 0.02 / math.sqrt(values.numel())
    assert float(values.abs().max()) == pytest.approx(CLAMP_STDS * 0.02, rel=1e-6)
    # Both ends are reached, by about the 0.13 % of a normal distribution each.
    for edge in (values.max(), values.min()):
        assert 0.0005 < float((values == edge).double().mean()) < 0.003


def test_each_expert_is_drawn_on_its_own() -> None:
    """Expert 3 of 8 is what a rank that holds experts 2 and 3 alone draws: (seed, name, expert) and nothing else."""
    name = "layers.0.moe.experts.w_down"
    stack = filled(name, (8, 6, 5))
    for expert in range(8):
        assert torch.equal(stack[expert], draw(torch.Size((6, 5)), 0.02, f"{name}/{expert}", 0, CPU))
    assert len({tuple(row.flatten().tolist()) for row in stack}) == 8
    # More experts do not change the first ones.
    assert torch.equal(filled(name, (12, 6, 5))[:8], stack)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_values_are_drawn_in_fp32_and_cast(dtype: torch.dtype) -> None:
    assert torch.equal(filled("a.weight", (8, 4), dtype=dtype), filled("a.weight", (8, 4)).to(dtype))


@pytest.mark.parametrize(("kind", "value"), [("ones", 1.0), ("zeros", 0.0)])
def test_constants(kind: str, value: float) -> None:
    tensor = torch.full((3, 2), float("nan"))
    fill(tensor, "norm.weight", InitRule(kind), 0)
    assert torch.equal(tensor, torch.full((3, 2), value))


def test_a_name_is_the_same_with_and_without_wrappers() -> None:
    assert clean_name("layers.0._checkpoint_wrapped_module.moe._orig_mod.router.weight") == "layers.0.moe.router.weight"


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 3)
        self.register_buffer("state", torch.empty(5))


def test_a_model_on_the_meta_device_gets_memory_and_every_value() -> None:
    with torch.device("meta"):
        model = Small()
    # What is forgotten stays NaN.
    torch.use_deterministic_algorithms(True)
    try:
        init_weights(model, lambda name: InitRule("normal", 1.0), 0, CPU)
    finally:
        torch.use_deterministic_algorithms(False)
    tensors = [*model.parameters(), *model.buffers()]
    assert len(tensors) == 3
    assert all(tensor.device == CPU and bool(torch.isfinite(tensor).all()) for tensor in tensors)
    assert torch.equal(model.inner.weight, draw(torch.Size((3, 4)), 1.0, "inner.weight", 0, CPU))


def test_a_model_with_memory_keeps_it() -> None:
    model = Small()
    pointer = model.inner.weight.data_ptr()
    init_weights(model, lambda name: InitRule("zeros"), 0, CPU)
    assert model.inner.weight.data_ptr() == pointer and bool((model.inner.weight == 0).all())
