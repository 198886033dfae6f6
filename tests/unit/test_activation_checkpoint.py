"""Activation checkpointing on one process: what is recomputed, what is kept; results do not change by a bit."""

from collections import Counter
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from moe.config import MoEConfig
from moe.layer import MoE
from parallel import activation_checkpoint
from parallel.activation_checkpoint import apply_activation_checkpoint

DIM = 8


class Block(nn.Module):
    """Two linear maps and a MoE layer, as in a transformer's block."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(DIM, DIM, bias=False)
        self.second = nn.Linear(DIM, DIM, bias=False)
        self.moe = MoE(MoEConfig(num_experts=4, top_k=2, expert_dim=8, shared_expert_dim=8), DIM)
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.5)

    def forward(self, x_BSD: Tensor) -> Tensor:
        x_BSD = x_BSD + self.second(torch.tanh(self.first(x_BSD)))
        return x_BSD + self.moe(x_BSD)[0]


class CountOperators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func._opname] += 1
        return func(*args, **(kwargs or {}))


def sample() -> Tensor:
    return torch.randn(2, 5, DIM, generator=torch.Generator().manual_seed(1)).requires_grad_()


def run(mode: str) -> tuple[list[Tensor], Counter[str]]:
    """Output and gradients, and the operators of the backward pass (recomputation included)."""
    block = apply_activation_checkpoint(Block(), mode)
    x_BSD = sample()
    y_BSD = block(x_BSD)
    counter = CountOperators()
    with counter:
        y_BSD.square().sum().backward()
    return [y_BSD.detach(), x_BSD.grad, *(parameter.grad for parameter in block.parameters())], counter.counts


def test_results_are_the_same_bit_for_bit() -> None:
    reference, _ = run("none")
    for mode in ("selective", "full"):
        results, _ = run(mode)
        assert len(results) == len(reference)
        assert all(torch.equal(ours, expected) for ours, expected in zip(results, reference, strict=True))


def test_what_each_mode_recomputes() -> None:
    counts = {mode: run(mode)[1] for mode in ("none", "selective", "full")}
    # tanh belongs to the forward alone.
    assert [counts[mode]["tanh"] for mode in ("none", "selective", "full")] == [0, 1, 1]
    # Full repeats every matrix product of the forward that backward needs; selective every second one.
    extra = {mode: counts[mode]["mm"] - counts["none"]["mm"] for mode in ("selective", "full")}
    assert extra["full"] >= 4
    assert extra["full"] // 2 <= extra["selective"] <= (extra["full"] + 1) // 2


def test_the_choice_of_experts_is_never_made_again() -> None:
    for mode in ("selective", "full"):
        # It is handed out where the forward asked for it, without running.
        assert run(mode)[1]["keep_choice"] == 0, mode


def chosen_experts(mode: str) -> list[Tensor]:
    """Ids that reach the experts in forward and in recomputation, when the router changes in between."""
    block = Block()
    seen: list[Tensor] = []
    original = block.moe.experts.forward

    def forward(rows_RD: Tensor, ids_RK: Tensor, *rest: Any) -> Tensor:
        seen.append(ids_RK.clone())
        return original(rows_RD, ids_RK, *rest)

    block.moe.experts.forward = forward
    wrapped = apply_activation_checkpoint(block, mode)
    y_BSD = wrapped(sample())
    # As if the recomputed logits came out differently.
    with torch.no_grad():
        block.moe.router.weight.neg_()
    y_BSD.sum().backward()
    return seen


@pytest.mark.parametrize("mode", ["selective", "full"])
def test_case_32_recomputation_uses_the_saved_choice(mode: str) -> None:
    first, second = chosen_experts(mode)
    assert torch.equal(first, second)


def test_case_32_the_check_can_fail() -> None:
    """Without the kept operators the recomputation follows the changed router."""
    with patch.object(activation_checkpoint, "exchange_operators", set):
        first, second = chosen_experts("full")
    assert not torch.equal(first, second)


@pytest.mark.parametrize("mode", ["selective", "full"])
def test_case_22_statistics_come_out_once(mode: str) -> None:
    """Counts are a result of forward: a recomputation has nobody to hand its own to."""

    class WithStats(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Block()

        def forward(self, x_BSD: Tensor) -> tuple[Tensor, Tensor]:
            y_BSD, stats = self.block.moe(x_BSD)
            return y_BSD, stats.tokens_per_expert_E

    y_BSD, counts_E = apply_activation_checkpoint(WithStats(), mode)(sample())
    y_BSD.sum().backward()
    assert int(counts_E.sum()) == 2 * 5 * 2


def test_none_returns_the_block_itself() -> None:
    block = Block()
    assert apply_activation_checkpoint(block, "none") is block


def test_an_unknown_mode_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"parallel\.activation_checkpoint='some'.*none, selective, full"):
        apply_activation_checkpoint(Block(), "some")


def test_two_forwards_before_one_backward() -> None:
    """Each forward keeps its own results: a second one does not overwrite the first's."""

    def total(mode: str) -> list[Tensor]:
        block = apply_activation_checkpoint(Block(), mode)
        first, second = sample(), (sample() * 2).detach().requires_grad_()
        (block(first).sum() + block(second).square().sum()).backward()
        return [first.grad, second.grad, *(parameter.grad for parameter in block.parameters())]

    for ours, expected in zip(total("full"), total("none"), strict=True):
        assert torch.equal(ours, expected)
