"""The sum of rows by slots, in plain PyTorch; its kernel is held to it in tests/interpreter and tests/gpu."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from comms.kernels.gather_sum import gather_sum, gather_sum_reference


def test_the_worked_example() -> None:
    rows_SD = torch.tensor([[1.0], [2.0], [4.0]])
    slots_TN = torch.tensor([[0, 2], [-1, 1], [-1, -1]])
    assert torch.equal(gather_sum(rows_SD, slots_TN), torch.tensor([[5.0], [2.0], [0.0]]))


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 6), st.integers(0, 5), st.integers(1, 3), st.integers(0, 100))
def test_equals_a_loop(num_out: int, num_rows: int, num_terms: int, seed: int) -> None:
    """In fp64; the same additions in the same order, so exactly."""
    generator = torch.Generator().manual_seed(seed)
    rows_SD = torch.randn(num_rows, 3, dtype=torch.float64, generator=generator)
    slots_TN = torch.randint(-1, max(num_rows, 1), (num_out, num_terms), generator=generator)
    slots_TN = slots_TN.clamp(max=num_rows - 1)
    expected = torch.zeros(num_out, 3, dtype=torch.float64)
    for t in range(num_out):
        for slot in slots_TN[t].tolist():
            if slot >= 0:
                expected[t] += rows_SD[slot]
    assert torch.equal(gather_sum(rows_SD, slots_TN), expected)


def test_slots_without_a_row_read_nothing() -> None:
    """Row 0 (where a clamped -1 would land) is NaN, and so is a row that no slot names."""
    rows_SD = torch.tensor([[float("nan")], [2.0], [float("nan")]])
    slots_TN = torch.tensor([[-1, 1], [-1, -1]])
    assert torch.equal(gather_sum(rows_SD, slots_TN), torch.tensor([[2.0], [0.0]]))


def test_half_precision_is_summed_in_fp32_and_rounded_once() -> None:
    """256 + 1 + 1 = 258 is a bf16 number, but 256 + 1 rounds back to 256."""
    rows_SD = torch.tensor([[256.0], [1.0], [1.0]], dtype=torch.bfloat16)
    out = gather_sum(rows_SD, torch.tensor([[0, 1, 2]]))
    assert out.dtype == torch.bfloat16 and out.item() == 258


def test_terms_are_added_in_ascending_order() -> None:
    """In fp32, (1e8 + 1) - 1e8 is 0 and (1e8 - 1e8) + 1 is 1."""
    rows_SD = torch.tensor([[1e8], [1.0], [-1e8]])
    assert gather_sum(rows_SD, torch.tensor([[0, 1, 2]])).item() == 0
    assert gather_sum(rows_SD, torch.tensor([[0, 2, 1]])).item() == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_without_rows_everything_is_zero(dtype: torch.dtype) -> None:
    out = gather_sum_reference(torch.empty(0, 4, dtype=dtype), torch.full((3, 2), -1))
    assert out.dtype == dtype and torch.equal(out, torch.zeros(3, 4, dtype=dtype))


def test_rows_of_any_stride() -> None:
    rows_SD = torch.arange(12.0).view(3, 4)
    slots_TN = torch.tensor([[0, 3], [2, -1]])
    assert torch.equal(gather_sum(rows_SD.t(), slots_TN), gather_sum(rows_SD.t().contiguous(), slots_TN))


def test_the_operator_describes_itself() -> None:
    """Schema and fake agree with what it does: torch.compile and checkpointing rely on them."""
    args = (torch.randn(3, 4), torch.tensor([[0, 2], [-1, 1]]))
    torch.library.opcheck(torch.ops.sluicegate.gather_sum.default, args, test_utils=("test_schema", "test_faketensor"))
