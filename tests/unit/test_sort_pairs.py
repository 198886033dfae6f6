"""Sorted pairs and their rows in plain PyTorch; the kernels are held to it in tests/interpreter and tests/gpu."""

import torch

from moe.kernels.pair_rows import expand_rows, gather_rows, gather_sums
from moe.kernels.sort_pairs import sort_pairs

IDS = torch.tensor([[1, 0], [-1, 1], [0, 1]])


def test_the_worked_examples() -> None:
    pairs = sort_pairs(IDS, 2, 5)
    tables = [table.tolist() for table in pairs]
    assert tables == [[0, 2, 0, 1, 2], [1, 4, 0, 3, 5], [[2, 0], [-1, 3], [1, 4]], [2, 5]]
    assert {table.dtype for table in pairs} == {torch.int32}
    x_RD = torch.tensor([[5.0], [7.0]])
    assert expand_rows(x_RD, torch.tensor([[2, 0], [-1, 1]]), 3).tolist() == [[5], [7], [5]]
    assert gather_rows(x_RD, torch.tensor([0, 1, 0])).tolist() == [[5], [7], [5]]


def test_sums() -> None:
    values_PV = torch.tensor([[1.0, 2.0], [4.0, 8.0]], dtype=torch.bfloat16)
    sums = gather_sums(values_PV, torch.tensor([[1, -1], [0, 1]]))
    assert sums.dtype == torch.float32 and sums.tolist() == [[12, 0], [3, 12]]
    assert gather_sums(values_PV[:0], torch.tensor([-1])).tolist() == [0]


def test_the_operators_describe_themselves() -> None:
    """Schemas and fakes agree with what they do: torch.compile and checkpointing rely on them."""
    ops, tests = torch.ops.sluicegate, ("test_schema", "test_faketensor")
    pairs = sort_pairs(IDS, 2, 5)
    torch.library.opcheck(ops.sort_pairs.default, (IDS, 2, 5), test_utils=tests)
    torch.library.opcheck(ops.expand_rows.default, (torch.randn(3, 4), pairs.slots_RK, 5), test_utils=tests)
    torch.library.opcheck(ops.gather_rows.default, (torch.randn(3, 4), pairs.rows_P), test_utils=tests)
    torch.library.opcheck(ops.gather_sums.default, (torch.randn(5, 2), pairs.slots_RK), test_utils=tests)
