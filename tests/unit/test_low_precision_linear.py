"""Linear maps by a recipe: bit for bit against fp64 where sums are exact, within the rounding of e4m3 elsewhere."""

from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from moe.feed_forward import FeedForward
from moe.grouped_gemm import grouped_linear
from moe.low_precision_linear import LowPrecisionLinear, low_precision_grouped_linear, low_precision_linear
from moe.recipes import Recipe, resolve_recipe
from tests.low_precision_cases import (
    COUNTS,
    IN,
    OUT,
    Problem,
    exact_problem,
    expected,
    random_problem,
    relative_error,
    whole_numbers,
)

RECIPES = [("mxfp8", "recipe"), ("mxfp8", "bf16"), ("fp8_blockwise", "recipe")]
# A quantized operand is off by up to 2^-4 of each value, on average 2.6 %: two of them, 3.8 %.
LEAST_ERROR, MOST_ERROR = 0.02, 0.05


@pytest.fixture
def dirty_memory():
    """Fresh tensors are filled with NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def recipe_of(name: str, wgrad: str = "recipe") -> Recipe:
    return resolve_recipe(name, torch.device("cpu"), wgrad)


def run(problem: Problem, recipe: Recipe, exact: bool = False) -> list[Tensor]:
    x_PI, weight_EOI = (tensor.detach().requires_grad_() for tensor in (problem.x_PI, problem.weight_EOI))
    y_PO = low_precision_grouped_linear(x_PI, weight_EOI, problem.offsets_E, recipe, exact=exact)
    return [y_PO.detach(), *torch.autograd.grad(y_PO, [x_PI, weight_EOI], problem.dy_PO)]


def check_products(name: str, wgrad: str, problem: Problem, oracle: list[Tensor]) -> None:
    """`exact` says that no rows are left over."""
    left_over = problem.x_PI.shape[0] > int(problem.offsets_E[-1])
    for exact in (False,) if left_over else (True, False):
        for ours, expect in zip(run(problem, recipe_of(name, wgrad), exact), oracle, strict=True):
            assert ours.dtype == torch.bfloat16
            assert torch.equal(ours, expect)


@pytest.mark.parametrize("counts", [COUNTS, [0, 7, 0, 0], [1, 0, 31, 32]])
@pytest.mark.parametrize(("name", "wgrad"), RECIPES)
def test_case_62_no_block_of_wgrad_holds_rows_of_two_experts(
    name: str, wgrad: str, counts: list[int], dirty_memory
) -> None:
    """Every product is that of the quantized operands, group by group; some groups have no rows."""
    problem = exact_problem(counts)
    check_products(name, wgrad, problem, expected(problem, name, wgrad))


@pytest.mark.parametrize("tail", [0, 20])
@pytest.mark.parametrize(("name", "wgrad"), RECIPES)
def test_case_58_one_group_with_padding_is_finite(name: str, wgrad: str, tail: int, dirty_memory) -> None:
    """Neither the padding of its blocks nor NaN in rows of no expert reach y, dx or dw."""
    problem = exact_problem([65], tail)
    oracle = expected(problem, name, wgrad)
    problem.x_PI[65:] = problem.dy_PO[65:] = float("nan")
    check_products(name, wgrad, problem, oracle)


def test_rounding_is_real_in_these_problems() -> None:
    """Else the tests above would hold for bf16 too."""
    problem = exact_problem()
    for name, wgrad in RECIPES:
        plain = grouped_linear(problem.x_PI, problem.weight_EOI, problem.offsets_E)
        assert not torch.equal(expected(problem, name, wgrad)[0], plain)
    by_recipe, in_bf16 = (expected(problem, "mxfp8", wgrad)[2] for wgrad in ("recipe", "bf16"))
    assert not torch.equal(by_recipe, in_bf16)


@pytest.mark.parametrize(("name", "wgrad"), RECIPES)
def test_case_13_the_tail_is_zero_whatever_it_holds(name: str, wgrad: str, dirty_memory) -> None:
    """NaN in rows of no expert reaches neither y, dx nor dw; padding of blocks adds nothing."""
    problem, rows = exact_problem(tail=20), sum(COUNTS)
    oracle = expected(problem, name, wgrad)
    problem.x_PI[rows:] = problem.dy_PO[rows:] = float("nan")
    for ours, expect in zip(run(problem, recipe_of(name, wgrad)), oracle, strict=True):
        assert torch.equal(ours, expect)


@pytest.mark.parametrize("tail", [0, 3])
@pytest.mark.parametrize(("name", "wgrad"), RECIPES)
def test_no_expert_has_a_row(name: str, wgrad: str, tail: int, dirty_memory) -> None:
    for result in run(exact_problem([0, 0, 0], tail), recipe_of(name, wgrad)):
        assert bool((result == 0).all())


def test_last_blocks_of_fp8_blockwise_may_be_partial(dirty_memory) -> None:
    """Dims like gpt-oss's 2880 are no multiple of 128."""
    problem = exact_problem(out=136, width=200)
    for ours, oracle in zip(
        run(problem, recipe_of("fp8_blockwise")), expected(problem, "fp8_blockwise", ""), strict=True
    ):
        assert torch.equal(ours, oracle)


@pytest.mark.parametrize(("name", "wgrad"), RECIPES)
def test_error_against_bf16(name: str, wgrad: str) -> None:
    problem = random_problem([70, 0, 33, 128])
    x_PI, weight_EOI = (tensor.detach().requires_grad_() for tensor in (problem.x_PI, problem.weight_EOI))
    y_PO = grouped_linear(x_PI, weight_EOI, problem.offsets_E)
    plain = [y_PO, *torch.autograd.grad(y_PO, [x_PI, weight_EOI], problem.dy_PO)]
    errors = [relative_error(a, b) for a, b in zip(run(problem, recipe_of(name, wgrad)), plain, strict=True)]
    if name == "fp8_blockwise" or wgrad == "bf16":
        assert errors.pop() == 0
    assert all(LEAST_ERROR < error < MOST_ERROR for error in errors), errors


@pytest.mark.parametrize(("name", "wgrad"), RECIPES)
def test_both_passes_see_the_weights_of_now(name: str, wgrad: str) -> None:
    """Steps and loaded checkpoints write into the same memory; FSDP's gather does not even move `_version`."""
    problem, recipe = exact_problem(), recipe_of(name, wgrad)
    weight = problem.weight_EOI.requires_grad_()
    for new in (None, whole_numbers(*weight.shape, seed=9)):
        if new is not None:
            weight.data.copy_(new)
        x_PI = problem.x_PI.detach().requires_grad_()
        y_PO = low_precision_grouped_linear(x_PI, weight, problem.offsets_E, recipe)
        ours = [y_PO, *torch.autograd.grad(y_PO, [x_PI, weight], problem.dy_PO)]
        oracle = expected(problem._replace(weight_EOI=weight.detach()), name, wgrad)
        assert all(torch.equal(a, b) for a, b in zip(ours, oracle, strict=True))


def saved_bytes(problem: Problem, recipe: Recipe) -> int:
    """Bytes of x that autograd keeps, in whatever form, with what belongs to it."""
    sizes: list[int] = []
    inputs = {problem.weight_EOI.data_ptr(), problem.offsets_E.data_ptr()}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.data_ptr() not in inputs:
            sizes.append(tensor.numel() * tensor.element_size())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        x_PI, weight_EOI = problem.x_PI.requires_grad_(), problem.weight_EOI.requires_grad_()
        low_precision_grouped_linear(x_PI, weight_EOI, problem.offsets_E, recipe)
    return sum(sizes)


def test_x_is_kept_once() -> None:
    """Quantized: half the bytes, scales and places included; else bf16 as it is."""
    problem = random_problem([256, 256], width=256)
    rows = 512 + 2 * 31
    assert saved_bytes(problem, recipe_of("mxfp8")) <= rows * 256 * (1 + 1 / 32) + 4 * rows + 8
    assert saved_bytes(problem, recipe_of("mxfp8", "bf16")) == 512 * 256 * 2
    assert saved_bytes(problem, recipe_of("fp8_blockwise")) == 512 * 256 * 2


def test_nothing_is_quantized_for_a_gradient_that_nobody_wants() -> None:
    problem = exact_problem()
    with patch("moe.low_precision_linear.mxfp8_columns", side_effect=AssertionError):
        with torch.no_grad():
            low_precision_grouped_linear(
                problem.x_PI, problem.weight_EOI.requires_grad_(), problem.offsets_E, recipe_of("mxfp8")
            )
        x_PI = problem.x_PI.detach().requires_grad_()
        y_PO = low_precision_grouped_linear(
            x_PI, problem.weight_EOI.detach(), problem.offsets_E, recipe_of("mxfp8", "recipe")
        )
        y_PO.sum().backward()
    assert x_PI.grad is not None


@pytest.mark.parametrize(("name", "wgrad"), RECIPES)
def test_a_dense_linear_is_one_group(name: str, wgrad: str) -> None:
    problem = exact_problem([42])
    oracle = expected(problem, name, wgrad)
    linear = torch.nn.Linear(IN, OUT, dtype=torch.bfloat16)
    linear.weight.data.copy_(problem.weight_EOI[0])
    linear.bias.data.copy_(whole_numbers(1, OUT, seed=5)[0])
    ours = LowPrecisionLinear(linear, recipe_of(name, wgrad))
    assert [key for key, _ in ours.named_parameters()] == ["weight", "bias"]
    x = problem.x_PI.view(2, 21, IN).requires_grad_()
    y = ours(x)
    assert torch.equal(y.flatten(0, 1), oracle[0] + linear.bias)
    y.backward(problem.dy_PO.view(2, 21, OUT))
    assert torch.equal(x.grad.flatten(0, 1), oracle[1]) and torch.equal(linear.weight.grad, oracle[2][0])
    assert relative_error(linear.bias.grad, problem.dy_PO.double().sum(0)) < 0.01


@pytest.mark.parametrize(("name", "wgrad"), RECIPES)
def test_compiled_as_one_graph(name: str, wgrad: str) -> None:
    """As in a compiled block; without kernels of the compiler's own, so that bits are equal."""
    layer, recipe = FeedForward(64, 96).bfloat16(), recipe_of(name, wgrad)
    for child, linear in list(layer.named_children()):
        assert isinstance(linear, torch.nn.Linear)
        setattr(layer, child, LowPrecisionLinear(linear, recipe))
    results = []
    for forward in (layer, torch.compile(layer, backend="aot_eager", fullgraph=True)):
        x = whole_numbers(14, 64, seed=1).view(2, 7, 64).requires_grad_()
        y = forward(x)
        results.append([y, *torch.autograd.grad(y, [x, *layer.parameters()], torch.ones_like(y))])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_what_does_not_fit_is_refused() -> None:
    x, weight = torch.zeros(4, 48).bfloat16(), torch.zeros(8, 48).bfloat16()
    with pytest.raises(ValueError, match=r"precision.recipe=mxfp8 needs dims that are multiples of 32, .* is 8 x 48"):
        low_precision_linear(x, weight, None, recipe_of("mxfp8"))
    assert low_precision_linear(x, weight, None, recipe_of("fp8_blockwise")).shape == (4, 8)
    with pytest.raises(ValueError, match=r"mxfp8 computes from bf16, not from torch.float32 and torch.bfloat16"):
        low_precision_linear(x.float(), weight, None, recipe_of("mxfp8"))
