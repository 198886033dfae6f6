"""Recipes on a GPU: the products that fp64 gives, bit for bit where sums are exact, in whatever mode this card has."""

import pytest
import torch
from torch import Tensor

from moe.low_precision_linear import low_precision_grouped_linear
from moe.recipes import resolve_recipe
from tests.low_precision_cases import COUNTS, exact_problem, expected

pytestmark = pytest.mark.gpu
RECIPES = [("mxfp8", "recipe"), ("mxfp8", "bf16"), ("fp8_blockwise", "recipe")]


@pytest.fixture
def dirty_memory():
    """Fresh tensors are filled with NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("counts", [COUNTS, [130, 5, 0, 257], [0, 7, 0, 0], [65], [0, 0, 0]])
@pytest.mark.parametrize(("name", "wgrad"), RECIPES)
def test_products_are_those_of_quantized_operands(name: str, wgrad: str, counts: list[int], dirty_memory) -> None:
    """Cases 13, 14, 58 and 62: NaN behind the last row, idle experts, one group, groups that are no multiple of 32."""
    device = torch.device("cuda")
    if name == "fp8_blockwise" and torch.cuda.get_device_capability()[0] != 9:
        with pytest.raises(ValueError, match=r"precision\.recipe=fp8_blockwise cannot run on SM"):
            resolve_recipe(name, device, wgrad)
        return
    problem = exact_problem(counts, tail=20)
    oracle = expected(problem, name, wgrad)
    problem.x_PI[sum(counts) :] = problem.dy_PO[sum(counts) :] = float("nan")
    x_PI, weight_EOI, dy_PO, offsets_E = (tensor.to(device) for tensor in problem)
    leaves: list[Tensor] = [x_PI.requires_grad_(), weight_EOI.requires_grad_()]
    y_PO = low_precision_grouped_linear(x_PI, weight_EOI, offsets_E, resolve_recipe(name, device, wgrad))
    results = [y_PO, *torch.autograd.grad(y_PO, leaves, dy_PO)]
    for product, ours, expect in zip(("y", "dx", "dw"), results, oracle, strict=True):
        if name == "fp8_blockwise" and product != "dw":
            # fp8 tensor cores align the products of a sum and keep few bits of each: as close as one rounding to bf16.
            assert (ours.cpu().double() - expect.double()).norm() <= 4e-3 * expect.double().norm()
        else:
            assert torch.equal(ours.cpu(), expect)
