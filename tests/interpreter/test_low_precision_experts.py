"""Fused experts by a recipe under Triton's interpreter, against the same products one by one (moe/experts.py).

Both quantize the same operands by the same code. But the interpreter truncates where bf16 is rounded, and what differs
by one bit of bf16 may be rounded to another e4m3 value: bound 6e-2 norm-wise (seen: 4e-2), where a scale or a row in
the wrong place shows as 3e-1 and more. The interpreter multiplies no bf16 either: torch has the weight gradients.
"""

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from moe import low_precision_experts as module
from moe.config import MoEConfig
from moe.experts import GroupedExperts, within_bound
from moe.fused_experts import coded_act_grad_
from moe.grouped_gemm import weight_gradient
from moe.kernels import fp8_gemm_portable, fp8_gemm_sm90
from moe.kernels.sort_pairs import sort_pairs
from moe.low_precision_experts import low_precision_experts
from moe.quantize import fp8_rows as quantize_rows
from moe.quantized_gemm import fp8_gated, fp8_rows
from moe.recipes import resolve_recipe
from tests.unit.gluon_threads import OnThreads

BOUND = 6e-2
NUM_ROWS, DIM, HIDDEN, EXPERTS, TOP_K = 11, 144, 136, 5, 3
NAMES = ("out", "rows", "weights", "w_gate_up", "w_down")


@pytest.fixture(autouse=True)
def _weight_gradients_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "weight_grad", lambda left, right, ends: weight_gradient(left.t(), right, ends))


def problem(seed: int, idle: int, hidden: int = HIDDEN) -> tuple[list[Tensor], Tensor, Tensor]:
    """Leaves, ids with experts from `idle` on unused and some slots empty, and the output's gradient."""
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape: int, scale: float = 1.0) -> Tensor:
        # Rows of very different sizes, for a wrong scale to show.
        size = 2.0 ** torch.randint(-3, 4, (*shape[:-1], 1), generator=generator)
        return (torch.randn(shape, generator=generator) * size * scale).bfloat16()

    ids = torch.rand(NUM_ROWS, idle, generator=generator).topk(TOP_K).indices
    ids = torch.where(torch.rand(ids.shape, generator=generator) < 0.2, -1, ids)
    ids[3] = -1
    leaves = [
        randn(NUM_ROWS, DIM),
        torch.rand(NUM_ROWS, TOP_K, generator=generator),
        randn(EXPERTS, 2, hidden, DIM, scale=DIM**-0.5),
        randn(EXPERTS, DIM, hidden, scale=hidden**-0.5),
    ]
    return [leaf.requires_grad_() for leaf in leaves], ids, randn(NUM_ROWS, DIM)


@pytest.mark.parametrize(("idle", "activation", "room"), [(EXPERTS, "swiglu", 0), (3, "clamped_swiglu", 20)])
def test_equals_the_products_one_by_one(idle: int, activation: str, room: int) -> None:
    """`room`: places for more pairs than there are, which may hold anything."""
    leaves, ids_RK, grad = problem(idle, idle)
    recipe = resolve_recipe("fp8_blockwise", torch.device("cpu"))
    num_pairs = int((ids_RK >= 0).sum())
    config = MoEConfig(num_experts=EXPERTS, top_k=TOP_K, expert_dim=HIDDEN, activation=activation)
    experts = GroupedExperts(config, DIM)
    experts.use_recipe(recipe)
    experts.w_gate_up, experts.w_down = (torch.nn.Parameter(leaf) for leaf in leaves[2:])
    expected = experts(leaves[0], ids_RK, leaves[1], num_pairs)
    wanted = torch.autograd.grad(expected, [*leaves[:2], experts.w_gate_up, experts.w_down], grad)
    pairs = sort_pairs(ids_RK, EXPERTS, num_pairs + room)
    pairs = within_bound(pairs, ids_RK) if room else pairs
    ours = low_precision_experts(*leaves, pairs, activation, recipe)
    found = torch.autograd.grad(ours, leaves, grad)
    for name, actual, wants in zip(NAMES, [ours, *found], [expected, *wanted], strict=True):
        assert (actual.float() - wants.float()).norm() <= BOUND * wants.float().norm(), name


@pytest.mark.parametrize("hidden", [128, 384])
@pytest.mark.parametrize("num_pairs", [1, 33])
def test_coded_gradients_are_those_of_the_quantizer(num_pairs: int, hidden: int) -> None:
    """Gate's and up's blocks side by side, with the strides that a compiler is told."""
    generator = torch.Generator().manual_seed(3)
    da_PF, h_PH = (torch.randn(num_pairs, width, generator=generator).bfloat16() for width in (hidden, 2 * hidden))
    h_PH *= 2.0 ** torch.randint(-6, 7, (num_pairs, 1), generator=generator)
    weights_P, ends_E = torch.rand(num_pairs, generator=generator), torch.tensor([num_pairs], dtype=torch.int32)
    dh_PH, _, values_PH, scales_PS = coded_act_grad_(da_PF, h_PH, weights_P, ends_E, "swiglu")
    expected = quantize_rows(dh_PH)
    assert torch.equal(values_PH.view(torch.uint8), expected.values.view(torch.uint8))
    assert torch.equal(scales_PS, expected.scales)
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(tensor) for tensor in (da_PF, h_PH, weights_P, ends_E)]
        faked = coded_act_grad_(*fakes, "swiglu")
    assert faked[3].shape == scales_PS.shape and faked[3].stride() == scales_PS.stride()


def test_by_specialised_warps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel for SM90 and its host code by threads, the first map with its activation in it."""
    kernel = OnThreads(fp8_gemm_sm90.fp8_kernel)
    monkeypatch.setattr(fp8_gemm_sm90, "fp8_kernel", kernel)
    monkeypatch.setattr(fp8_gemm_portable, "launch_rows", fp8_gemm_sm90.launch_rows)
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    card = SimpleNamespace(multi_processor_count=3)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: card)
    leaves, ids_RK, grad = problem(0, EXPERTS, hidden=256)
    pairs = sort_pairs(ids_RK, EXPERTS, int((ids_RK >= 0).sum()))
    recipe = resolve_recipe("fp8_blockwise", torch.device("cpu"))
    found = []
    for products in ({}, {"multiply_rows": fp8_rows, "multiply_gated": fp8_gated}):
        out = low_precision_experts(*leaves, pairs, "swiglu", replace(recipe, **products))
        found.append([out, *torch.autograd.grad(out, leaves, grad)])
    # The first map with its activation, down, and the gradients of both.
    assert kernel.launches == 4
    for name, wants, actual in zip(NAMES, *found, strict=True):
        assert (actual.float() - wants.float()).norm() <= BOUND * wants.float().norm(), name


def test_other_dtypes_are_refused() -> None:
    leaves, ids_RK, _ = problem(0, EXPERTS)
    pairs = sort_pairs(ids_RK, EXPERTS, int((ids_RK >= 0).sum()))
    recipe = resolve_recipe("fp8_blockwise", torch.device("cpu"))
    with pytest.raises(ValueError, match=r"fp8_blockwise computes from bf16: rows are torch\.float32"):
        low_precision_experts(leaves[0].float(), *leaves[1:], pairs, "swiglu", recipe)
