"""The Triton kernels against plain PyTorch, on CPU tensors under Triton's interpreter.

Kernels add in the same order and precision as their references, so results are equal bit for bit.
"""

import pytest
import torch
from triton.runtime.interpreter import InterpretedFunction

from comms.kernels import gather_sum as gather_sum_module
from comms.kernels.gather_sum import gather_sum, gather_sum_reference
from moe.kernels import zero_fill
from moe.kernels.zero_fill import zero_empty_groups_

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]


def test_the_kernels_are_interpreted() -> None:
    assert isinstance(gather_sum_module._gather_sum_kernel, InterpretedFunction)
    assert isinstance(zero_fill._zero_kernel, InterpretedFunction)


def truncated(x: torch.Tensor) -> torch.Tensor:
    """fp32 to bf16 as the interpreter casts it: bits cut off. Compiled kernels round (tests/gpu)."""
    return (x.view(torch.int32) & -65536).view(torch.float32).bfloat16()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_out", "num_rows", "num_terms", "width"), [(5, 4, 1, 1), (6, 9, 3, 7), (3, 2, 8, 130)])
def test_gather_sum_equals_its_reference(dtype, num_out, num_rows, num_terms, width) -> None:
    generator = torch.Generator().manual_seed(width)
    rows_SD = torch.randn(num_rows, width, generator=generator, dtype=torch.float32).to(dtype)
    slots_TN = torch.randint(-1, num_rows, (num_out, num_terms), generator=generator)
    # One row that nobody names holds NaN, and one output has no term at all.
    slots_TN[slots_TN == 0], slots_TN[0] = -1, -1
    rows_SD[0] = float("nan")
    out_TD = gather_sum(rows_SD, slots_TN)
    assert out_TD.dtype == dtype
    expected = [gather_sum_reference(rows_SD, slots_TN)]
    if dtype == torch.bfloat16:
        expected.append(truncated(gather_sum_reference(rows_SD.float(), slots_TN)))
    assert any(torch.equal(out_TD, candidate) for candidate in expected)
    assert bool((out_TD[0] == 0).all())


def test_gather_sum_in_blocks() -> None:
    """A row wider than one block of columns (2048) and not a multiple of it."""
    rows_SD = torch.randn(3, 2500)
    slots_TN = torch.tensor([[0, 2], [1, -1]])
    assert torch.equal(gather_sum(rows_SD, slots_TN), gather_sum_reference(rows_SD, slots_TN))


def test_gather_sum_without_rows_or_outputs() -> None:
    assert torch.equal(gather_sum(torch.empty(0, 4), torch.full((2, 3), -1)), torch.zeros(2, 4))
    assert gather_sum(torch.randn(2, 4), torch.empty(0, 3, dtype=torch.int64)).shape == (0, 4)


def test_gather_sum_keeps_fp64() -> None:
    """1 + 2^-40 needs fp64 inside the kernel too."""
    rows_SD = torch.tensor([[1.0], [2.0**-40]], dtype=torch.float64)
    assert gather_sum(rows_SD, torch.tensor([[0, 1]])).item() == 1 + 2.0**-40


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 6, zero_fill.BLOCK + 5])
def test_zero_fill_touches_empty_groups_alone(dtype, size) -> None:
    matrices_EOI = torch.full((4, 1, size), float("nan"), dtype=dtype)
    matrices_EOI[1] = 3
    # Experts 0 and 3 have no rows.
    zero_empty_groups_(matrices_EOI, torch.tensor([0, 2, 5, 5], dtype=torch.int32))
    assert bool((matrices_EOI[[0, 3]] == 0).all())
    assert bool((matrices_EOI[1] == 3).all()) and bool(matrices_EOI[2].isnan().all())


def test_zero_fill_walks_matrices_larger_than_its_grid() -> None:
    """More than 64 blocks per matrix: each program writes several."""
    matrices_EOI = torch.ones(2, 65, zero_fill.BLOCK)
    zero_empty_groups_(matrices_EOI, torch.tensor([0, 1], dtype=torch.int32))
    assert bool((matrices_EOI[0] == 0).all()) and bool((matrices_EOI[1] == 1).all())
