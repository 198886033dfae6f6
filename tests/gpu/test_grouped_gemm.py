"""grouped_linear on a GPU against the loop over experts in fp64, and what grouped_mm leaves undefined there.

bf16: 1e-2 of the largest value (8 bits of mantissa; products are accumulated in fp32).
"""

import pytest
import torch
from torch import Tensor

from moe.grouped_gemm import grouped_linear
from moe.kernels.zero_fill import BLOCK, zero_empty_groups_

pytestmark = pytest.mark.gpu

OUT, IN = 96, 64
BOUND = 1e-2


def dirty_allocator() -> None:
    """Leave NaN in the memory that the next tensors of these sizes will get."""
    for size in (2**10, 2**14, 2**16, 2**18, 2**20, 2**22):
        blocks = [torch.full((size,), float("nan"), dtype=torch.bfloat16, device="cuda") for _ in range(8)]
        del blocks


def problem(counts: list[int], tail: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator("cuda").manual_seed(sum(counts))
    x_PI = torch.randn(sum(counts) + tail, IN, generator=generator, device="cuda").bfloat16()
    weight_EOI = torch.randn(len(counts), OUT, IN, generator=generator, device="cuda").bfloat16()
    dy_PO = torch.randn(sum(counts) + tail, OUT, generator=generator, device="cuda").bfloat16()
    return x_PI, weight_EOI, torch.tensor(counts, device="cuda").cumsum(0).to(torch.int32), dy_PO


def run(x_PI: Tensor, weight_EOI: Tensor, offsets_E: Tensor, dy_PO: Tensor, **options) -> tuple[Tensor, Tensor, Tensor]:
    x_PI, weight_EOI = x_PI.detach().requires_grad_(), weight_EOI.detach().requires_grad_()
    dirty_allocator()
    y_PO = grouped_linear(x_PI, weight_EOI, offsets_E, **options)
    dirty_allocator()
    dx_PI, dw_EOI = torch.autograd.grad(y_PO, [x_PI, weight_EOI], dy_PO)
    return y_PO.detach(), dx_PI, dw_EOI


def assert_close(ours: Tensor, oracle: Tensor) -> None:
    error = float((ours.double() - oracle).abs().max()) / max(1.0, float(oracle.abs().max()))
    assert error <= BOUND, error


@pytest.mark.parametrize("counts", [[33, 5, 200, 6], [0, 7, 0, 0], [0, 0, 0, 129], [1, 0, 1, 0], [0, 0, 3, 0]])
@pytest.mark.parametrize("tail", [0, 19])
def test_case_13_14_equals_the_loop_with_clean_tails_and_idle_experts(counts: list[int], tail: int) -> None:
    x_PI, weight_EOI, offsets_E, dy_PO = problem(counts, tail)
    used = sum(counts)
    x_PI[used:], dy_PO[used:] = float("nan"), float("nan")
    y_PO, dx_PI, dw_EOI = run(x_PI, weight_EOI, offsets_E, dy_PO, exact=tail == 0)
    clean = [x_PI[:used].double(), weight_EOI.double(), offsets_E, dy_PO[:used].double()]
    for ours, oracle in zip((y_PO[:used], dx_PI[:used], dw_EOI), run(*clean, backend="reference"), strict=True):
        assert_close(ours, oracle)
    assert bool((y_PO[used:] == 0).all()) and bool((dx_PI[used:] == 0).all())
    idle = torch.tensor(counts, device="cuda") == 0
    assert bool((dw_EOI[idle] == 0).all())


@pytest.mark.parametrize("tail", [0, 5])
def test_no_expert_has_a_row(tail: int) -> None:
    for tensor in run(*problem([0, 0, 0], tail)):
        assert bool((tensor == 0).all())


def test_fp32_runs_too() -> None:
    """Slower, for parity runs; 1e-5: fp32 sums of 64 products, without TF32."""
    x_PI, weight_EOI, offsets_E, dy_PO = (t.float() if t.is_floating_point() else t for t in problem([9, 0, 30], 0))
    oracle = run(x_PI.double(), weight_EOI.double(), offsets_E, dy_PO.double(), backend="reference")
    for ours, expected in zip(run(x_PI, weight_EOI, offsets_E, dy_PO), oracle, strict=True):
        error = float((ours.double() - expected).abs().max()) / float(expected.abs().max())
        assert error <= 1e-5, error


def test_results_repeat_bit_for_bit() -> None:
    inputs = problem([33, 0, 200, 6], 3)
    for first, second in zip(run(*inputs), run(*inputs), strict=True):
        assert torch.equal(first, second)


def test_does_not_wait_for_the_device() -> None:
    x_PI, weight_EOI, offsets_E, dy_PO = problem([33, 0, 200, 6], 3)
    run(x_PI, weight_EOI, offsets_E, dy_PO)
    x_PI.requires_grad_()
    weight_EOI.requires_grad_()
    torch.cuda.set_sync_debug_mode("error")
    try:
        grouped_linear(x_PI, weight_EOI, offsets_E).backward(dy_PO)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("size", [1, BLOCK + 5, 70 * BLOCK])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_zero_fill_touches_empty_groups_alone(size: int, dtype: torch.dtype) -> None:
    matrices_EOI = torch.full((4, 1, size), float("nan"), dtype=dtype, device="cuda")
    matrices_EOI[1] = 3
    zero_empty_groups_(matrices_EOI, torch.tensor([0, 2, 5, 5], dtype=torch.int32, device="cuda"))
    assert bool((matrices_EOI[[0, 3]] == 0).all())
    assert bool((matrices_EOI[1] == 3).all()) and bool(matrices_EOI[2].isnan().all())
