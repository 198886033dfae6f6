"""The compiled sort of pairs and movement of rows against plain PyTorch: integers and copies, so equal exactly."""

import pytest
import torch
from torch import Tensor

from moe.kernels.pair_rows import expand_rows, gather_rows, gather_sums
from moe.kernels.sort_pairs import BLOCK, Pairs, sort_pairs, sort_pairs_reference

pytestmark = pytest.mark.gpu


def draw(num_rows: int, num_slots: int, num_experts: int, *, missing: float = 0.2) -> Tensor:
    """(R, K) ids on the GPU, some of them -1."""
    generator = torch.Generator("cuda").manual_seed(num_rows)
    ids = torch.randint(0, num_experts, (num_rows, num_slots), generator=generator, device="cuda")
    return torch.where(torch.rand(ids.shape, generator=generator, device="cuda") < missing, -1, ids)


def assert_sorted(ids_RK: Tensor, num_experts: int) -> Pairs:
    num_pairs = int((ids_RK >= 0).sum())
    actual = sort_pairs(ids_RK, num_experts, num_pairs)
    for table, expected in zip(actual, sort_pairs_reference(ids_RK, num_experts, num_pairs), strict=True):
        assert table.dtype == torch.int32 and torch.equal(table, expected)
    return actual


@pytest.mark.parametrize("num_experts", [1, 2, 5, 64, 128, 256, 1000, 1024])
@pytest.mark.parametrize(("num_rows", "num_slots"), [(0, 8), (1, 1), (BLOCK, 1), (4099, 8), (1000, 16), (333, 6)])
def test_equals_its_reference(num_experts: int, num_rows: int, num_slots: int) -> None:
    ids_RK = draw(num_rows, num_slots, num_experts)
    assert_sorted(ids_RK, num_experts)
    assert_sorted(ids_RK.int(), num_experts)


@pytest.mark.parametrize("expert", [-1, 0, 127])
def test_all_pairs_to_one_expert_or_to_none(expert: int) -> None:
    assert_sorted(torch.full((5000, 8), expert, device="cuda"), 128)


def test_more_blocks_than_one_scan_takes() -> None:
    """Two million pairs, and the same result twice."""
    ids_RK = draw(131_000, 16, 256, missing=0.0)
    first, second = assert_sorted(ids_RK, 256), sort_pairs(ids_RK, 256, ids_RK.numel())
    assert all(map(torch.equal, first, second))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("width", [1, 7, 64, 2048, 2880, 4097])
def test_rows_are_copied_to_their_pairs(dtype: torch.dtype, width: int) -> None:
    ids_RK = draw(1000, 6, 16)
    pairs = sort_pairs(ids_RK, 16, int((ids_RK >= 0).sum()))
    x_RD = torch.randn(1000, width, device="cuda").to(dtype)
    x_RD[:, ::2] = float("nan")
    expected = x_RD[pairs.rows_P].view(torch.uint8)
    copies = expand_rows(x_RD, pairs.slots_RK, pairs.rows_P.shape[0]), gather_rows(x_RD, pairs.rows_P)
    assert all(torch.equal(out_PD.view(torch.uint8), expected) for out_PD in copies)


def test_offsets_beyond_32_bits() -> None:
    """2^31 elements and more of the expanded rows."""
    num_pairs, width = 2**31 // 4096 + 8, 4096
    x_RD = torch.arange(num_pairs // 8, device="cuda").bfloat16()[:, None].expand(-1, width).contiguous()
    slots_RK = torch.arange(num_pairs, device="cuda", dtype=torch.int32).view(-1, 8)
    rows_P = torch.arange(num_pairs, device="cuda", dtype=torch.int32) // 8
    for out_PD in (expand_rows(x_RD, slots_RK, num_pairs), gather_rows(x_RD, rows_P)):
        assert torch.equal(out_PD[:, -1], x_RD[rows_P][:, -1])
        del out_PD


def test_sums_of_a_few_values() -> None:
    values_PV, index = torch.randn(900, 3, device="cuda"), torch.randint(-1, 900, (500, 8), device="cuda")
    expected = torch.where(index >= 0, values_PV.sum(1)[index.clamp(min=0)], 0.0)
    # fp32 sums of three values, perhaps in another order.
    torch.testing.assert_close(gather_sums(values_PV, index.int()), expected, rtol=1e-6, atol=1e-6)


def test_nothing_waits_for_the_device() -> None:
    ids_RK, x_RD = draw(300, 8, 128, missing=0.0), torch.randn(300, 64, device="cuda")

    def work() -> None:
        pairs = sort_pairs(ids_RK, 128, 2400)
        gather_rows(expand_rows(x_RD, pairs.slots_RK, 2400), pairs.order_P)
        gather_sums(x_RD, pairs.rows_P)

    work()
    torch.cuda.set_sync_debug_mode("error")
    try:
        work()
    finally:
        torch.cuda.set_sync_debug_mode("default")
