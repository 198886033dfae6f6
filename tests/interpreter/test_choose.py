"""Choice and counts under Triton's interpreter against a stable sort and a loop, exactly."""

import pytest
import torch

from moe.kernels.choose import count_ids, stable_topk
from moe.kernels.two_halves import two_halves


def scores(rows: int, width: int, kind: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(width)
    if kind == "ties":
        return torch.randint(-2, 3, (rows, width), generator=generator).float() * 0.5
    if kind == "equal":
        return torch.full((rows, width), -3.0)
    values = torch.randn(rows, width, generator=generator) * 10
    if kind == "special":
        special = torch.tensor([float("inf"), -float("inf"), float("nan"), 0.0, -0.0, 1e-45, -1e-45])
        values = special[torch.randint(7, (rows, width), generator=generator)]
    return values


@pytest.mark.parametrize("kind", ["random", "ties", "equal", "special"])
@pytest.mark.parametrize(
    ("rows", "width", "k"), [(37, 16, 4), (5, 60, 6), (9, 256, 8), (3, 1, 1), (4, 7, 7), (0, 8, 2)]
)
def test_the_k_largest_in_order(rows: int, width: int, k: int, kind: str) -> None:
    x = scores(rows, width, kind)
    expected = x.sort(dim=-1, descending=True, stable=True).indices[:, :k]
    assert torch.equal(stable_topk(x, k), expected)


@pytest.mark.parametrize("experts", [1, 3, 128, 1000])
@pytest.mark.parametrize("shape", [(700, 4), (1, 1), (0, 4)])
def test_counts(experts: int, shape: tuple[int, int]) -> None:
    ids = torch.randint(-1, experts, shape, generator=torch.Generator().manual_seed(0))
    expected = torch.tensor([int((ids == expert).sum()) for expert in range(experts)])
    assert torch.equal(count_ids(ids, experts), expected)


@pytest.mark.parametrize("shape", [(700, 5), (1, 128), (0, 4)])
def test_two_halves_add_up(shape: tuple[int, int]) -> None:
    x = scores(*shape, "random")
    high, low = two_halves(x).float().chunk(2, dim=1)
    assert two_halves(x).dtype == torch.bfloat16
    # The interpreter cuts off where a card rounds: 8 bits of the number and 8 of the rest.
    assert ((high - x).abs() <= x.abs() * 2**-7).all() and ((high + low - x).abs() <= x.abs() * 2**-14).all()
