"""The compiled gather_sum kernel against plain PyTorch: same additions in the same order, so equal bit for bit."""

import pytest
import torch

from comms.kernels.gather_sum import gather_sum, gather_sum_reference

pytestmark = pytest.mark.gpu

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]
# output rows, input rows, terms, width: odd widths, rows wider than a block, more terms than rows, one of everything.
SIZES = [(1, 1, 1, 1), (37, 23, 3, 7), (64, 100, 8, 2880), (5, 3, 6, 4097), (4096, 9000, 2, 512)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_out", "num_rows", "num_terms", "width"), SIZES)
def test_equals_its_reference(dtype, num_out, num_rows, num_terms, width) -> None:
    generator = torch.Generator("cuda").manual_seed(width)
    rows_SD = torch.randn(num_rows, width, generator=generator, device="cuda").to(dtype)
    slots_TN = torch.randint(-1, num_rows, (num_out, num_terms), generator=generator, device="cuda")
    # A row that no slot names is NaN, and the output's memory was full of NaN before.
    slots_TN[slots_TN == 0] = -1
    rows_SD[0] = float("nan")
    del_me = torch.full((num_out, width), float("nan"), dtype=dtype, device="cuda")
    del del_me
    out_TD = gather_sum(rows_SD, slots_TN)
    assert out_TD.dtype == dtype
    assert torch.equal(out_TD, gather_sum_reference(rows_SD, slots_TN))
    assert torch.equal(out_TD.cpu(), gather_sum_reference(rows_SD.cpu(), slots_TN.cpu()))


def test_half_precision_rounds_once() -> None:
    """256 + 1 + 1 = 258 is a bf16 number, but 256 + 1 rounds back to 256."""
    rows_SD = torch.tensor([[256.0], [1.0], [1.0]], dtype=torch.bfloat16, device="cuda")
    assert gather_sum(rows_SD, torch.tensor([[0, 1, 2]], device="cuda")).item() == 258


def test_empty_sizes() -> None:
    slots_TN = torch.full((2, 3), -1, device="cuda")
    assert torch.equal(gather_sum(torch.empty(0, 4, device="cuda"), slots_TN), torch.zeros(2, 4, device="cuda"))
    assert gather_sum(torch.randn(2, 4, device="cuda"), slots_TN[:0]).shape == (0, 4)


def test_offsets_beyond_32_bits() -> None:
    """2^31 elements and more: the last row is found."""
    width = 4096
    num_rows = 2**31 // width + 3
    rows_SD = torch.zeros(num_rows, width, dtype=torch.bfloat16, device="cuda")
    rows_SD[-1] = 3
    out_TD = gather_sum(rows_SD, torch.tensor([[num_rows - 1, num_rows - 1]], device="cuda"))
    assert bool((out_TD == 6).all())


def test_does_not_wait_for_the_device() -> None:
    rows_SD, slots_TN = torch.randn(8, 16, device="cuda"), torch.zeros(4, 2, dtype=torch.int64, device="cuda")
    gather_sum(rows_SD, slots_TN)
    torch.cuda.set_sync_debug_mode("error")
    try:
        gather_sum(rows_SD, slots_TN)
    finally:
        torch.cuda.set_sync_debug_mode("default")
