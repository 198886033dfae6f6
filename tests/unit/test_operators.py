"""This project's operators, as torch sees them (comms/operators.py)."""

import pytest
import torch
from torch import Tensor

from comms.kernels.gather_sum import gather_sum
from comms.operators import operator, register_fake
from moe.kernels.pair_rows import expand_rows


@operator("test_fill_", mutates_args=("x",))
def fill_(x: Tensor, value: float, times: int = 1) -> None:
    """Behind torch's back, as a Triton kernel does."""
    x.numpy()[...] = value * times


@operator("test_sum_of_all")
def sum_of_all(parts: list[Tensor], scale: float = 1.0) -> Tensor:
    """Sum of some tensors."""
    return torch.stack([part.detach() for part in parts]).sum(0) * scale


@register_fake(sum_of_all)
def _(parts: list[Tensor], scale: float = 1.0) -> Tensor:
    return torch.empty_like(parts[0])


SLOTS = torch.tensor([[2, 0], [-1, 1]])


@pytest.mark.parametrize(
    "call",
    [
        lambda x: expand_rows(x, SLOTS, 3),
        lambda x: gather_sum(x, SLOTS.clamp(max=1)),
        lambda x: sum_of_all([torch.ones(2, 4), x]),
    ],
)
def test_a_gradient_is_not_lost_without_a_word(call) -> None:
    x = torch.randn(2, 4, requires_grad=True)
    with pytest.raises(RuntimeError, match=r"has no gradient: call it in an autograd\.Function"):
        call(x)
    with torch.no_grad():
        assert not call(x).requires_grad
    assert not call(x.detach()).requires_grad


def test_second_derivatives_are_refused() -> None:
    """A backward made of operators cannot be differentiated: with create_graph it would lose terms."""

    class Summed(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return sum_of_all([x, x])

        @staticmethod
        def backward(ctx, *grads: Tensor) -> Tensor:
            return sum_of_all([grads[0] * ctx.saved_tensors[0]])

    x = torch.randn(3, requires_grad=True)
    with pytest.raises(RuntimeError, match="test_sum_of_all has no gradient"):
        torch.autograd.grad(Summed.apply(x).sum(), x, create_graph=True)


def test_a_tensor_kept_for_backward_is_not_written_to_unnoticed() -> None:
    x, factor = torch.randn(3, requires_grad=True), torch.randn(3)
    version = factor._version
    product = (x * factor).sum()
    fill_(factor, 2.0)
    assert factor._version == version + 1 and bool((factor == 2).all())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


def test_defaults_and_inference_mode() -> None:
    with torch.inference_mode():
        x = torch.zeros(2)
        fill_(x, 3.0, times=2)
        assert x.tolist() == [6, 6] and sum_of_all([x, x]).tolist() == [12, 12]


def test_compiled_as_one_graph_that_knows_what_is_written() -> None:
    def step(x: Tensor) -> tuple[Tensor, Tensor]:
        before = x + 1
        fill_(x, 5.0)
        return before, sum_of_all([x, x], 0.5)

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    x = torch.zeros(3)
    before, after = compiled(x)
    assert before.tolist() == [1, 1, 1] and after.tolist() == x.tolist() == [5, 5, 5]
