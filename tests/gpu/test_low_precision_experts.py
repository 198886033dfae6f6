"""Experts by fp8_blockwise on a GPU: fused kernels against the same products one by one, from decoded operands.

What the two round differently is the order of sums, and fp8 tensor cores keep few bits of one product; where that moves
a bf16 number by a bit, its e4m3 code may move by one in eight. Bound 3e-2 norm-wise; a scale, a row or an expert in the
wrong place shows as 3e-1 and more.
"""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from moe.config import MoEConfig
from moe.experts import GroupedExperts
from moe.quantized_gemm import exact_rows
from moe.recipes import Recipe, resolve_recipe

pytestmark = pytest.mark.gpu
BOUND = 3e-2
ROWS, DIM, HIDDEN, EXPERTS, TOP_K = 1500, 768, 640, 12, 4


@pytest.fixture
def recipe() -> Recipe:
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("fp8_blockwise runs on SM90 and is refused elsewhere (tests/gpu/test_low_precision_linear.py)")
    return resolve_recipe("fp8_blockwise", torch.device("cuda"))


def results(recipe: Recipe, *, exact: bool) -> list[Tensor]:
    """Output, gradients of rows and routing weights, then those of the experts' weights; the last expert is idle."""
    generator = torch.Generator("cuda").manual_seed(0)

    def randn(*shape: int, scale: float = 1.0) -> Tensor:
        size = 2.0 ** torch.randint(-3, 4, (*shape[:-1], 1), generator=generator, device="cuda")
        return (torch.randn(shape, generator=generator, device="cuda") * size * scale).bfloat16()

    experts = GroupedExperts(MoEConfig(num_experts=EXPERTS, top_k=TOP_K, expert_dim=HIDDEN), DIM)
    experts.use_recipe(recipe)
    experts.w_gate_up = torch.nn.Parameter(randn(EXPERTS, 2, HIDDEN, DIM, scale=DIM**-0.5))
    experts.w_down = torch.nn.Parameter(randn(EXPERTS, DIM, HIDDEN, scale=HIDDEN**-0.5))
    ids = torch.rand(ROWS, EXPERTS - 1, generator=generator, device="cuda").topk(TOP_K).indices
    ids = torch.where(torch.rand(ids.shape, generator=generator, device="cuda") < 0.2, -1, ids)
    rows = randn(ROWS, DIM).requires_grad_()
    weights = torch.rand(ROWS, TOP_K, generator=generator, device="cuda").requires_grad_()
    upstream, num_pairs = randn(ROWS, DIM), int((ids >= 0).sum())
    out = experts(rows, ids, weights, num_pairs if exact else num_pairs + 100, exact)
    return [out, *torch.autograd.grad(out, [rows, weights, experts.w_gate_up, experts.w_down], upstream)]


@pytest.mark.parametrize("exact", [True, False])
def test_equals_the_products_one_by_one(recipe: Recipe, exact: bool) -> None:
    assert recipe.fused
    ours = results(recipe, exact=exact)
    one_by_one = results(replace(recipe, fused=False, multiply_rows=exact_rows), exact=exact)
    for actual, expected in zip(ours, one_by_one, strict=True):
        assert (actual.double() - expected.double()).norm() <= BOUND * expected.double().norm()
    # Another path computed it.
    assert any(not torch.equal(actual, expected) for actual, expected in zip(ours, one_by_one, strict=True))
    assert not ours[-1][-1].any()


def test_runs_repeat(recipe: Recipe) -> None:
    first, second = results(recipe, exact=True), results(recipe, exact=True)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
