"""Zeros for the matrices of experts without rows, and nothing else."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe.kernels.zero_fill import zero_empty_groups_


def test_the_worked_example() -> None:
    matrices_EOI = torch.full((3, 2, 2), float("nan"))
    zero_empty_groups_(matrices_EOI, torch.tensor([2, 2, 5], dtype=torch.int32))
    assert torch.equal(matrices_EOI.isnan().flatten(1).all(1), torch.tensor([True, False, True]))
    assert torch.equal(matrices_EOI[1], torch.zeros(2, 2))


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 2), min_size=1, max_size=6))
def test_only_empty_groups_are_touched(counts: list[int]) -> None:
    matrices_EOI = torch.randn(len(counts), 3, 2)
    before = matrices_EOI.clone()
    zero_empty_groups_(matrices_EOI, torch.tensor(counts).cumsum(0).to(torch.int32))
    for expert, count in enumerate(counts):
        expected = before[expert] if count else torch.zeros(3, 2)
        assert torch.equal(matrices_EOI[expert], expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_nan_does_not_survive_in_any_dtype(dtype: torch.dtype) -> None:
    matrices_EOI = torch.full((2, 1, 3), float("nan"), dtype=dtype)
    zero_empty_groups_(matrices_EOI, torch.zeros(2, dtype=torch.int32))
    assert bool((matrices_EOI == 0).all())
