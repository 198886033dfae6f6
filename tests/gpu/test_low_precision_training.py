"""Training by a recipe of low precision on a GPU is near training in bf16, and is not that: its own kernels ran."""

from dataclasses import replace

import pytest
import torch

from moe.recipes import resolve_recipe
from parallel.config import ParallelConfig
from tests.gpu.test_train_gpu import tiny_model
from trainer.parity import Trace, relative_error, trace_layout

pytestmark = pytest.mark.gpu

# Of whole blocks: 128 x 128 in fp8_blockwise. Experts by position, or rounding would move tokens to others.
PLAIN = tiny_model(force_balance=True)
MODEL = replace(PLAIN, dim=256, ffn_dim=512, moe=replace(PLAIN.moe, expert_dim=256, shared_expert_dim=256))
# What only the recipe launches, the product itself or what quantizes for it, and the cards that it runs on.
KERNELS = {"fp8_blockwise": "fp8_kernel", "mxfp8": "_gathered_kernel"}
RUNS_ON = {"fp8_blockwise": {9}, "mxfp8": {9, 10}}
# Two products of 14 are by the recipe, each off by 3.8 %; on CPUs 8 % are seen (tests/distributed/test_precision.py). A
# part that is missing or doubled shows as 50 % and more.
MOST = 0.2


def traced(recipe: str, device: torch.device) -> tuple[Trace, set[str]]:
    """What it computed, and the names of the kernels that did."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        trace = trace_layout(MODEL, ParallelConfig(), recipe=recipe, device=device, seq_len=64)
        torch.cuda.synchronize()
    return trace, {event.key for event in profile.key_averages()}


@pytest.mark.parametrize("recipe", list(KERNELS))
def test_every_gradient_is_another_than_that_of_bf16_and_near(world_of_one: torch.device, recipe: str) -> None:
    """Where the card cannot run it, it says so."""
    if torch.cuda.get_device_capability()[0] not in RUNS_ON[recipe]:
        with pytest.raises(ValueError, match=f"{recipe} cannot run on"):
            resolve_recipe(recipe, world_of_one)
        return
    plain, kernels_of_bf16 = traced("bf16", world_of_one)
    ours, kernels = traced(recipe, world_of_one)
    own = sorted(kernel for kernel in kernels - kernels_of_bf16 if KERNELS[recipe] in kernel)
    assert own, sorted(kernels - kernels_of_bf16)
    errors = {name: relative_error(ours.gradients[name], gradient) for name, gradient in plain.gradients.items()}
    assert ours.gradients.keys() == plain.gradients.keys()
    assert all(0 < error < MOST for error in errors.values()), errors
    assert ours.losses != plain.losses and ours.losses == pytest.approx(plain.losses, rel=2e-2)
