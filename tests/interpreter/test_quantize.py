"""The quantizers' kernels against plain PyTorch, byte for byte. Run like tests/interpreter/test_kernels.py."""

import pytest
import torch
from triton.runtime.interpreter import InterpretedFunction

from comms.kernels import codec
from comms.kernels.codec import dequantize, dequantize_reference, pack_rows_, quantize, quantize_reference, record_bytes
from moe.kernels import quantize as gathered
from moe.kernels.quantize import (
    gather_places,
    num_places,
    pad_groups,
    pad_groups_reference,
    quantize_both,
    quantize_columns,
)
from tests.quantizer_cases import BLOCKS, DTYPES, assert_same, awkward

# NaN and Inf are among the inputs.
pytestmark = pytest.mark.filterwarnings("ignore:.* encountered in multiply:RuntimeWarning")


def test_the_kernels_are_interpreted() -> None:
    kernels = (codec._quantize_kernel, codec._dequantize_kernel, gathered._gathered_kernel, gathered._pad_groups_kernel)
    assert all(isinstance(kernel, InterpretedFunction) for kernel in kernels)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("row_block", "block"), BLOCKS)
def test_quantize_and_back(dtype, row_block, block) -> None:
    """Partial tiles and partial blocks both ways; a row stride that is not the width."""
    x = awkward(dtype, 40 if row_block == 1 else 150, 520)[:, :500]
    coded = quantize(x, row_block, block)
    assert_same(coded, quantize_reference(x, row_block, block))
    for out in DTYPES:
        back = dequantize(*coded, row_block, block, out)
        assert_same((back,), (dequantize_reference(*coded, row_block, block, out),))


def test_several_matrices_and_none() -> None:
    x = awkward(torch.bfloat16, 3 * 130, 140).view(3, 130, 140)
    assert_same(quantize(x, 128, 128), quantize_reference(x, 128, 128))
    assert_same(quantize(x, 128, 128, transposed=True), quantize_reference(x.transpose(-1, -2), 128, 128))
    values, scales = quantize_reference(x, 128, 128)
    back = dequantize(values, scales, 128, 128, torch.bfloat16)
    assert_same((back,), (dequantize_reference(values, scales, 128, 128, torch.bfloat16),))
    assert quantize(x[:, :0], 1, 32)[1].shape == (3, 0, 5)


def test_fp32_rounds_once() -> None:
    """Just above the middle of two codes, also where the product is a subnormal of fp32."""
    codes = torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    middle = (codes[:-1] + codes[1:]) / 2
    x = torch.full((middle.numel(), 32), 448.0)
    x[:, 3], x[:, 4] = torch.nextafter(middle, x[:, 0]), -torch.nextafter(middle, x[:, 0] * 0)
    found = quantize(x, 1, 32)
    assert_same(found, quantize_reference(x, 1, 32))
    code = torch.arange(0x7E, dtype=torch.uint8)
    assert torch.equal(found[0].cpu().view(torch.uint8)[:, 3:5], torch.stack([code + 1, code | 0x80], 1))


def test_the_largest_of_fp32() -> None:
    """Its bits are next to those of Inf."""
    bits = torch.arange(0x7F800000 - 300, 0x7F800000 + 4, dtype=torch.int32)
    x = torch.ones(bits.numel(), 32)
    x[:, 5] = bits.view(torch.float32)
    assert_same(quantize(x, 1, 32), quantize_reference(x, 1, 32))


def test_every_code_under_every_scale() -> None:
    values = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).repeat(256, 1)
    scales = torch.arange(256, dtype=torch.uint8)[:, None].repeat(1, 8)
    for out in DTYPES:
        back = dequantize(values, scales, 1, 32, out)
        assert_same((back,), (dequantize_reference(values, scales, 1, 32, out),))


def test_every_bf16_amax() -> None:
    amax = torch.arange(0x7F81, dtype=torch.int16).view(torch.bfloat16)
    share = torch.rand(amax.numel(), 32, generator=torch.Generator().manual_seed(0)) * 2 - 1
    x = (amax[:, None].float() * share).bfloat16()
    x[:, 7] = amax
    assert_same(quantize(x, 1, 32), quantize_reference(x, 1, 32))


@pytest.mark.parametrize(("width", "block"), [(100, 32), (300, 128)])
def test_records_in_a_wider_buffer(width, block) -> None:
    x, size = awkward(torch.bfloat16, 21, width), record_bytes(width, block)
    buffer = torch.full((21, size + 32), 0xAB, dtype=torch.uint8)
    pack_rows_(buffer[:, 16 : 16 + size], x, block)
    values, scales = quantize_reference(x, 1, block)
    expected = torch.full_like(buffer, 0xAB)
    expected[:, 16 : 16 + size] = 0
    expected[:, 16 : 16 + width] = values.view(torch.uint8)
    expected[:, 16 + width : 16 + width + scales.shape[1]] = scales
    assert torch.equal(buffer, expected)
    views = codec.split_record(buffer[:, 16 : 16 + size], width, block)
    assert_same(
        (dequantize(*views, 1, block, torch.bfloat16),), (dequantize(values, scales, 1, block, torch.bfloat16),)
    )


@pytest.mark.parametrize("counts", [[70], [0, 33, 0, 100, 7], [0, 0, 0], [64, 1] * 9])
def test_places(counts) -> None:
    indices = torch.cat([torch.randperm(sum(counts)), torch.full((5,), 1 << 30)])
    offsets = torch.tensor(counts).cumsum(0).int()
    for align in (32, 128):
        assert_same(pad_groups(indices, offsets, align), pad_groups_reference(indices, offsets, align))
    nothing = pad_groups(indices[:0], offsets * 0, 32)
    assert nothing[0].shape == (0,) == (num_places(0, len(counts), 32),) and not nothing[1].any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [100, 288])
def test_gathered_rows(dtype, width) -> None:
    """More than one tile of places and of columns, the last ones partial; a row that nobody gathers is NaN."""
    x = awkward(dtype, 50, width)
    x[9] = float("nan")
    indices = torch.randint(10, 50, (150,), generator=torch.Generator().manual_seed(0))
    places, _ = pad_groups_reference(indices, torch.tensor([3, 3, 100], dtype=torch.int32), 32)
    rows = gather_places(x, places)
    expected = (*quantize_reference(rows, 1, 32), *quantize_reference(rows.t(), 1, 32))
    assert_same(quantize_both(x, places), expected)
    assert_same(quantize_columns(x, places), expected[2:])


@pytest.mark.parametrize("together", [3, 64])
def test_any_order_of_tiles(together, monkeypatch) -> None:
    """Groups of tiles, the last one partial; one group of all."""
    monkeypatch.setattr(gathered, "COLUMNS_TILE", (*gathered.COLUMNS_TILE[:3], together))
    x = awkward(torch.bfloat16, 608, 160)
    assert_same(quantize_columns(x, None), quantize_reference(x.t(), 1, 32))


def test_matrices_without_places() -> None:
    w = awkward(torch.bfloat16, 2 * 160, 96).view(2, 160, 96)
    expected = (*quantize_reference(w, 1, 32), *quantize_reference(w.transpose(1, 2), 1, 32))
    assert_same(quantize_both(w, None), expected)
    assert_same(quantize_columns(w, None), expected[2:])
