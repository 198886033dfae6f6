"""The compiled quantizers against plain PyTorch on the CPU, byte for byte."""

import pytest
import torch
import triton
import triton.language as tl

from comms.kernels import codec
from comms.kernels.codec import dequantize, dequantize_reference, pack_rows_, quantize, quantize_reference, record_bytes
from comms.kernels.e4m3 import decode_fp32
from moe.kernels import quantize as gathered
from moe.kernels.quantize import (
    gather_places,
    pad_groups,
    pad_groups_reference,
    quantize_both,
    quantize_columns,
)
from moe.quantize import swizzle_column_groups, swizzle_row_groups
from tests.quantizer_cases import BLOCKS, DTYPES, assert_same, awkward

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _outputs_start_poisoned():
    """What a kernel forgets to write stays NaN, or 255."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("row_block", "block"), BLOCKS)
@pytest.mark.parametrize(("rows", "width"), [(5, 33), (300, 2880), (257, 4096), (64, 1408)])
def test_quantize_and_back(dtype, row_block, block, rows, width) -> None:
    x = awkward(dtype, rows, width)
    coded = quantize(x.cuda(), row_block, block)
    assert_same(coded, quantize_reference(x, row_block, block))
    for out in DTYPES:
        back = dequantize(*coded, row_block, block, out)
        assert_same((back,), (dequantize_reference(coded[0].cpu(), coded[1].cpu(), row_block, block, out),))


@triton.jit
def _add_kernel(codes, scales, numbers, sums, BF16: tl.constexpr):
    """One program: what is to be added to a row of numbers, all of one scale."""
    WORD: tl.constexpr = tl.int16 if BF16 else tl.int32
    at = tl.program_id(0) * 256 + tl.arange(0, 256)
    total = tl.load(numbers + at)
    total += decode_fp32(tl.load(codes + at), tl.load(scales + tl.program_id(0)), WORD, True)
    tl.store(sums + at, total)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("before", [0.0, -1.0, float("-inf"), -3.4e38, 2.0**-130])
def test_every_code_of_every_scale_is_added_up_as_decoded(dtype: torch.dtype, before: float) -> None:
    """A product that is fused with the sum is rounded, and overflows, as if it were not."""
    scales = torch.arange(256, dtype=torch.uint8)
    codes = torch.arange(256, dtype=torch.uint8).repeat(256, 1)
    codes[255] = 0x7F
    numbers = torch.full((256, 256), before)
    expected = numbers + dequantize_reference(codes.view(torch.float8_e4m3fn), scales[:, None], 1, 256, dtype).float()
    sums = torch.empty_like(numbers, device="cuda")
    _add_kernel[(256,)](codes.cuda(), scales.cuda(), numbers.cuda(), sums, BF16=dtype == torch.bfloat16)
    torch.testing.assert_close(sums.cpu(), expected, rtol=0, atol=0, equal_nan=True)


def test_every_bf16_amax() -> None:
    """Subnormal products and both extremes: no flushing to zero where the CPU does not."""
    amax = torch.arange(0x7F81, dtype=torch.int16).view(torch.bfloat16)
    share = torch.rand(amax.numel(), 32, generator=torch.Generator().manual_seed(0)) * 2 - 1
    x = (amax[:, None].float() * share).bfloat16()
    x[:, 7] = amax
    assert_same(quantize(x.cuda(), 1, 32), quantize_reference(x, 1, 32))


def test_every_bf16_value() -> None:
    values = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    values = values[values.isfinite()].float()
    for doublings in range(21):
        amax = (values.abs() * 2.0**doublings).clamp(max=3e38)
        x = torch.stack([values, amax], 1).repeat_interleave(16, 1).bfloat16()
        assert_same(quantize(x.cuda(), 1, 32), quantize_reference(x, 1, 32))


@pytest.mark.parametrize("dtype", DTYPES)
def test_without_the_cast(dtype, monkeypatch) -> None:
    """What older cards run: integers alone."""
    monkeypatch.setattr(codec, "can_cast", lambda x: False)
    monkeypatch.setattr(gathered, "can_cast", lambda x: False)
    x = awkward(dtype, 320, 288)
    coded = quantize(x.cuda(), 1, 32)
    assert_same(coded, quantize_reference(x, 1, 32))
    back = dequantize(*coded, 1, 32, dtype)
    assert_same((back,), (dequantize_reference(coded[0].cpu(), coded[1].cpu(), 1, 32, dtype),))
    expected = (*quantize_reference(x, 1, 32), *quantize_reference(x.t(), 1, 32))
    assert_same(quantize_both(x.cuda(), None), expected)


@pytest.mark.parametrize("together", [3, 64])
def test_any_order_of_tiles(together, monkeypatch) -> None:
    """Groups of tiles, the last one partial; one group of all."""
    monkeypatch.setattr(gathered, "COLUMNS_TILE", (*gathered.COLUMNS_TILE[:3], together))
    x = awkward(torch.bfloat16, 1120, 416)
    assert_same(quantize_columns(x.cuda(), None), quantize_reference(x.t(), 1, 32))


def test_fp32_rounds_once() -> None:
    """Just above the middle of two codes, also where the product is a subnormal of fp32."""
    codes = torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    middle = (codes[:-1] + codes[1:]) / 2
    x = torch.full((middle.numel(), 32), 448.0)
    x[:, 3], x[:, 4] = torch.nextafter(middle, x[:, 0]), -torch.nextafter(middle, x[:, 0] * 0)
    found = quantize(x.cuda(), 1, 32)
    assert_same(found, quantize_reference(x, 1, 32))
    code = torch.arange(0x7E, dtype=torch.uint8)
    assert torch.equal(found[0].cpu().view(torch.uint8)[:, 3:5], torch.stack([code + 1, code | 0x80], 1))


def test_the_largest_of_fp32() -> None:
    """Its bits are next to those of Inf."""
    bits = torch.arange(0x7F800000 - 300, 0x7F800000 + 4, dtype=torch.int32)
    x = torch.ones(bits.numel(), 32)
    x[:, 5] = bits.view(torch.float32)
    assert_same(quantize(x.cuda(), 1, 32), quantize_reference(x, 1, 32))


def test_every_code_under_every_scale() -> None:
    values = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).repeat(256, 1)
    scales = torch.arange(256, dtype=torch.uint8)[:, None].repeat(1, 8)
    for out in DTYPES:
        back = dequantize(values.cuda(), scales.cuda(), 1, 32, out)
        assert_same((back,), (dequantize_reference(values, scales, 1, 32, out),))


@pytest.mark.parametrize(("width", "block"), [(100, 32), (2880, 128), (2048, 32)])
def test_records_in_a_wider_buffer(width, block) -> None:
    x, size = awkward(torch.bfloat16, 121, width), record_bytes(width, block)
    buffer = torch.full((121, size + 32), 0xAB, dtype=torch.uint8)
    on_card = buffer.cuda()
    pack_rows_(on_card[:, 16 : 16 + size], x.cuda(), block)
    pack_rows_(buffer[:, 16 : 16 + size], x, block)
    assert torch.equal(on_card.cpu(), buffer)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [100, 288, 2048, 2880])
@pytest.mark.parametrize("experts", [1, 7, 256])
def test_gathered_rows(dtype, width, experts) -> None:
    """Experts without rows included; a row that nobody gathers is NaN, and pairs past the last offset point nowhere."""
    x = awkward(dtype, 500, width)
    x[9] = float("nan")
    generator = torch.Generator().manual_seed(experts)
    indices = torch.cat([torch.randint(10, 500, (1111,), generator=generator), torch.full((9,), 1 << 30)])
    offsets = torch.randint(0, 1112, (experts,), generator=generator, dtype=torch.int32).sort().values
    places = pad_groups(indices.cuda(), offsets.cuda(), 32)
    assert_same(places, pad_groups_reference(indices, offsets, 32))
    rows = gather_places(x, places[0].cpu())
    expected = (*quantize_reference(rows, 1, 32), *quantize_reference(rows.t(), 1, 32))
    assert_same(quantize_both(x.cuda(), places[0]), expected)
    assert_same(quantize_columns(x.cuda(), places[0]), expected[2:])


def test_matrices_without_places() -> None:
    w = awkward(torch.bfloat16, 2 * 160, 96).view(2, 160, 96)
    expected = (*quantize_reference(w, 1, 32), *quantize_reference(w.transpose(1, 2), 1, 32))
    assert_same(quantize_both(w.cuda(), None), expected)
    assert_same(quantize_columns(w.cuda(), None), expected[2:])


def test_offsets_beyond_32_bits() -> None:
    """2^31 elements and more: the last row is found, along rows and along columns."""
    width, rows = 4096, 2**31 // 4096 + 32
    x = torch.zeros(rows, width, dtype=torch.bfloat16, device="cuda")
    x[-1] = 3
    row_values, row_scales, values, scales = quantize_both(x, None)
    last = quantize(x[-32:].clone(), 1, 32)
    assert_same((row_values[-32:], row_scales[-32:]), last)
    assert_same(quantize_columns(x[-32:].clone(), None), (values[:, -32:].contiguous(), scales[:, -1:].contiguous()))
    values, scales = quantize(x, 1, 32)
    assert_same((values[-32:], scales[-32:]), last)
    assert bool((dequantize(values, scales, 1, 32, torch.bfloat16)[-1] == 3).all())


def test_does_not_wait_for_the_device() -> None:
    x = torch.randn(64, 96, device="cuda", dtype=torch.bfloat16)
    indices, offsets = torch.arange(64, device="cuda"), torch.tensor([3, 64], dtype=torch.int32, device="cuda")

    def everything() -> None:
        places, _ = pad_groups(indices, offsets, 32)
        quantize_both(x, places)
        quantize_columns(x, places)
        coded = quantize(x, 1, 32)
        dequantize(*coded, 1, 32, torch.bfloat16)
        swizzle_row_groups(coded[1], offsets)
        swizzle_column_groups(coded[1], offsets // 32)

    everything()
    torch.cuda.set_sync_debug_mode("error")
    try:
        everything()
    finally:
        torch.cuda.set_sync_debug_mode("default")
