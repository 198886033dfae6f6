"""The sort of pairs and movement of their rows under Triton's interpreter: integers and copies, so equal exactly."""

import pytest
import torch
from torch import Tensor
from triton.runtime.interpreter import InterpretedFunction

from moe.kernels import pair_rows
from moe.kernels import sort_pairs as module
from moe.kernels.pair_rows import expand_rows, expand_rows_reference, gather_rows, gather_sums
from moe.kernels.sort_pairs import sort_pairs, sort_pairs_reference


def test_the_kernels_are_interpreted() -> None:
    assert isinstance(module._place_kernel, InterpretedFunction)
    assert isinstance(pair_rows._expand_kernel, InterpretedFunction)


def draw(num_rows: int, num_slots: int, num_experts: int, dtype: torch.dtype = torch.int64) -> Tensor:
    """(R, K) ids, a fifth of them -1."""
    generator = torch.Generator().manual_seed(num_rows * num_slots)
    ids = torch.randint(0, num_experts, (num_rows, num_slots), generator=generator)
    return torch.where(torch.rand(ids.shape, generator=generator) < 0.2, -1, ids).to(dtype)


def assert_sorted(ids_RK: Tensor, num_experts: int) -> None:
    num_pairs = int((ids_RK >= 0).sum())
    actual = sort_pairs(ids_RK, num_experts, num_pairs)
    for table, expected in zip(actual, sort_pairs_reference(ids_RK, num_experts, num_pairs), strict=True):
        assert table.dtype == torch.int32 and torch.equal(table, expected)


def test_the_worked_example() -> None:
    pairs = sort_pairs(torch.tensor([[1, 0], [-1, 1], [0, 1]]), 2, 5)
    tables = [table.tolist() for table in pairs]
    assert tables == [[0, 2, 0, 1, 2], [1, 4, 0, 3, 5], [[2, 0], [-1, 3], [1, 4]], [2, 5]]


@pytest.mark.parametrize(
    ("num_rows", "num_slots", "num_experts"),
    [(75, 1, 1), (1, 1, 2), (13, 8, 5), (13, 8, 128), (6, 16, 256), (20, 3, 256), (11, 4, 1000), (0, 3, 7)],
)
def test_equals_its_reference(num_rows, num_slots, num_experts, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of which one size is a multiple and others not."""
    monkeypatch.setattr(module, "BLOCK", 16)
    monkeypatch.setattr(module, "SCAN", 4)
    dtype = torch.int64 if num_rows == 13 else torch.int32
    assert_sorted(draw(num_rows, num_slots, num_experts, dtype), num_experts)


@pytest.mark.parametrize("expert", [-1, 0, 6])
def test_all_pairs_to_one_expert_or_to_none(expert: int) -> None:
    assert_sorted(torch.full((400, 3), expert), 7)


def test_blocks_of_the_real_size_and_ids_of_any_stride() -> None:
    assert_sorted(draw(16, 2 * module.BLOCK // 16 + 3, 40).t(), 40)


def test_pairs_beyond_the_known_number_are_not_written() -> None:
    ids_RK = draw(50, 4, 6)
    actual, expected = sort_pairs(ids_RK, 6, 90), sort_pairs_reference(ids_RK, 6, 90)
    assert all(map(torch.equal, actual, expected)) and int((actual.slots_RK >= 0).sum()) == 90


@pytest.mark.parametrize(
    ("num_rows", "width", "dtype"),
    [(0, 8, torch.bfloat16), (1, 1, torch.float32), (11, 7, torch.float64), (5, 2500, torch.bfloat16)],
)
def test_rows_are_copied_to_their_pairs(num_rows, width, dtype) -> None:
    ids_RK = draw(num_rows, 3, 5)
    num_pairs = int((ids_RK >= 0).sum())
    pairs = sort_pairs(ids_RK, 5, num_pairs)
    # Half of the values have a NaN for neighbour: bits are kept, whatever they mean.
    x_RD = torch.randn(num_rows, width, dtype=torch.float32).to(dtype)
    x_RD[:, ::2] = float("nan")
    expected = x_RD[pairs.rows_P].view(torch.uint8)
    copies = [
        expand_rows(x_RD, pairs.slots_RK, num_pairs),
        expand_rows(x_RD, pairs.slots_RK.long(), num_pairs),
        expand_rows_reference(x_RD, pairs.slots_RK, num_pairs),
        gather_rows(x_RD, pairs.rows_P),
    ]
    assert all(torch.equal(out_PD.view(torch.uint8), expected) for out_PD in copies)


@pytest.mark.parametrize("num_values", [1, 3])
@pytest.mark.parametrize("shape", [(0,), (5,), (100, 7)])
def test_sums_of_a_few_values(num_values, shape) -> None:
    values_PV, index = torch.randn(9, num_values), torch.randint(-1, 9, shape)
    # Nobody asks for the first.
    values_PV[0] = float("nan")
    index[index == 0] = -1
    expected = torch.where(index >= 0, values_PV.sum(1)[index.clamp(min=0)], 0.0)
    # fp32 sums of three values, perhaps in another order.
    torch.testing.assert_close(gather_sums(values_PV, index.int()), expected, rtol=1e-6, atol=1e-6)
