"""Quantizers in plain PyTorch against torchao and torch's own casts; the kernels are held to them in tests/interpreter
and tests/gpu, byte for byte."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from comms.kernels.codec import pack_rows, pack_rows_, record_bytes, split_record, unpack_rows
from moe.kernels.quantize import num_places, pad_groups
from moe.quantize import (
    Quantized,
    fp8_rows,
    fp8_squares,
    fp8_squares_transposed,
    mxfp8_both,
    mxfp8_columns,
    mxfp8_rows,
    swizzle,
    swizzle_column_groups,
    swizzle_row_groups,
)

INF, NAN = float("inf"), float("nan")


def torchao_bytes(x: Tensor) -> tuple[Tensor, Tensor]:
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.mx_tensor import to_mx

    scales, values = to_mx(x.contiguous(), torch.float8_e4m3fn, 32, scaling_mode=ScaleCalculationMode.RCEIL)
    return values.view(torch.uint8), scales.view(torch.uint8)


def raw(x: Tensor) -> Tensor:
    return x.view(torch.uint8)


def assert_same(coded: Quantized, expected: tuple[Tensor, Tensor]) -> None:
    assert torch.equal(coded.scales, expected[1])
    assert torch.equal(raw(coded.values), expected[0])


def every_bf16() -> Tensor:
    return torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)


def random(*shape: int, seed: int = 0, spread: int = 12) -> Tensor:
    """Normal numbers times 2^-spread to 1, in bf16."""
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randn(*shape, generator=generator) * 2.0 ** torch.randint(-spread, 1, shape, generator=generator)
    ).bfloat16()


# MXFP8 rows


def test_every_bf16_amax_as_torchao() -> None:
    """One block for each absolute value from 0 to Inf: subnormals and both extremes included."""
    amax = torch.arange(0x7F81, dtype=torch.int16).view(torch.bfloat16)
    share = torch.rand(amax.numel(), 32, generator=torch.Generator().manual_seed(0)) * 2 - 1
    x = (amax[:, None].float() * share).bfloat16()
    x[:, 7] = amax
    assert_same(mxfp8_rows(x), torchao_bytes(x))


def test_every_bf16_value_as_torchao() -> None:
    """Every finite value in blocks whose amax is up to 2^20 times as large; smaller parts round to zero."""
    values = every_bf16()
    values = values[values.isfinite()].float()
    for doublings in range(21):
        amax = (values.abs() * 2.0**doublings).clamp(max=3e38)
        x = torch.stack([values, amax], 1).repeat_interleave(16, 1).bfloat16()[:: 1 if doublings < 14 else 7]
        x[:, 1:16] = 0
        assert_same(mxfp8_rows(x), torchao_bytes(x))


def test_fp32_as_torchao_but_for_its_saturation() -> None:
    """torchao's ceil(log2(amax / 448)) misses some amax just above 448 * 2^k; ours is the smallest scale that fits."""
    powers = torch.arange(-100, 100)
    edge = torch.ldexp(torch.full(powers.shape, 448.0), powers)
    x = torch.cat([edge, torch.nextafter(edge, torch.tensor(INF)), torch.nextafter(edge, torch.tensor(0.0))])[:, None]
    x = torch.cat([x, x * torch.rand(x.numel(), 31, generator=torch.Generator().manual_seed(0))], 1)
    coded = mxfp8_rows(x)
    scale = torch.ldexp(torch.ones(len(x), dtype=torch.float64), coded.scales[:, 0].int() - 127)
    amax = x[:, 0].double()
    assert bool((amax <= 448 * scale).all()) and bool((amax > 224 * scale).all())
    values, scales = torchao_bytes(x)
    differ = scales[:, 0] != coded.scales[:, 0]
    assert bool(differ[200:400].any()) and not bool(differ[:200].any() or differ[400:].any())
    assert torch.equal(scales[differ] + 1, coded.scales[differ])
    assert torch.equal(values[~differ], raw(coded.values)[~differ])
    noise = torch.randn(500, 64, generator=torch.Generator().manual_seed(1))
    assert_same(mxfp8_rows(noise), torchao_bytes(noise))


def test_fp32_rounds_once_to_nearest_even() -> None:
    """At, just below and just above the middle between any two codes, subnormal codes included."""
    codes = torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    middle = (codes[:-1] + codes[1:]) / 2
    near = [middle, torch.nextafter(middle, torch.tensor(INF)), torch.nextafter(middle, torch.tensor(0.0))]
    x = torch.cat([codes, *near, torch.tensor([2.0**-10 + 2.0**-30, 2.0**-11, 1e-30])])
    for sign in (1, -1):
        for power in (0, -90, 90):
            block = torch.full((x.numel(), 32), 448.0)
            block[:, 3] = sign * x
            coded = mxfp8_rows(torch.ldexp(block, torch.tensor(power)))
            assert bool((coded.scales == 127 + power).all())
            assert torch.equal(raw(coded.values[:, 3]), raw((sign * x).to(torch.float8_e4m3fn)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_nan_and_inf(dtype: torch.dtype) -> None:
    x = torch.ones(4, 64, dtype=dtype)
    x[0, 3], x[1, 3], x[2, 3], x[2, 4], x[3, 3], x[3, 4] = NAN, INF, -INF, 2.0**126, -NAN, INF
    coded = mxfp8_rows(x)
    assert coded.scales[:, 0].tolist() == [255, 254, 254, 255] and bool((coded.scales[:, 1] == 119).all())
    assert bool((raw(coded.values[[0, 3], :32]) == 0x7F).all())
    back = coded.dequantize(dtype)
    assert bool(back[[0, 3], :32].isnan().all())
    assert back[1, 3] == INF and back[2, 3] == -INF and back[2, 4] == 2.0**126
    assert bool((back[1, 4:32] == 0).all()) and torch.equal(back[:, 32:], x[:, 32:])


def test_other_dtypes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"torch.float64 cannot be quantized: only bfloat16 and float32"):
        mxfp8_rows(torch.zeros(2, 32, dtype=torch.float64))


def test_every_code_under_every_scale_is_decoded() -> None:
    """As torch's own cast times the scale in fp64; exact in bf16 unless the scale byte is 0-2 or 247 and above."""
    values = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).repeat(256, 1)
    scales = torch.arange(256, dtype=torch.uint8)[:, None].repeat(1, 8)
    exact = torch.ldexp(values.double(), scales[:, :1].int() - 127)
    exact[255] = NAN
    for dtype in (torch.float32, torch.bfloat16):
        found = Quantized(values, scales, 1, 32).dequantize(dtype)
        torch.testing.assert_close(found, exact.to(dtype), rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(found[3:247].double(), exact[3:247], rtol=0, atol=0, equal_nan=True)


# FP8 blocks


def scale_in_fp64(amax: Tensor) -> Tensor:
    """e8m0 bytes by definition: the smallest power of two with amax / scale <= 448."""
    mantissa, exponent = torch.frexp(amax.double() / 448)
    return (torch.where(mantissa == 0.5, exponent - 1, exponent) + 127).clamp(min=0)


@pytest.mark.parametrize("width", [128, 200, 2880])
def test_fp8_rows(width: int) -> None:
    x = random(9, width)
    coded = fp8_rows(x)
    padded = torch.nn.functional.pad(x, (0, -width % 128)).view(9, -1, 128)
    expected = scale_in_fp64(padded.abs().amax(-1))
    assert torch.equal(coded.scales.int(), expected.int())
    scale = torch.ldexp(torch.ones(expected.shape), expected - 127).repeat_interleave(128, 1)[:, :width]
    assert torch.equal(raw(coded.values), raw((x.float() / scale).to(torch.float8_e4m3fn)))
    # A legal MXFP8 tensor once scales are repeated.
    assert torch.equal(coded.as_mxfp8().dequantize(), coded.dequantize())
    assert coded.as_mxfp8().scales.shape == mxfp8_rows(x).scales.shape


def test_fp8_squares() -> None:
    w = random(2, 200, 300)
    coded = fp8_squares(w)
    assert coded.scales.shape == (2, 2, 3)
    corner = w[1, 128:, 256:]
    assert coded.scales[1, 1, 2] == scale_in_fp64(corner.abs().max())
    scale = 2.0 ** (coded.scales[1, 1, 2].item() - 127)
    assert torch.equal(raw(coded.values[1, 128:, 256:].contiguous()), raw((corner / scale).to(torch.float8_e4m3fn)))
    assert torch.equal(coded.dequantize()[1, 128:, 256:], coded.values[1, 128:, 256:].bfloat16() * scale)
    turned = fp8_squares(w.transpose(1, 2).contiguous())
    written = fp8_squares_transposed(w)
    assert written.values.is_contiguous() and torch.equal(written.scales, turned.scales)
    assert torch.equal(written.values.view(torch.uint8), turned.values.view(torch.uint8))
    assert torch.equal(raw(turned.values).transpose(1, 2), raw(coded.values))
    assert torch.equal(turned.scales.transpose(1, 2), coded.scales)
    assert torch.equal(coded.as_mxfp8().dequantize(), coded.dequantize())
    assert torch.equal(fp8_squares(w[0]).scales, coded.scales[0])


# Records


def test_the_worked_record() -> None:
    record = pack_rows(torch.tensor([[448.0, 1.0, -3.5, 0.0]]), block=2)
    assert bytes(record[0].tolist()).hex(" ") == "7e 38 fe 00 7f 78" + " 00" * 10


@pytest.mark.parametrize(("width", "block"), [(64, 32), (100, 32), (2880, 128), (5, 32)])
def test_records_hold_values_then_scales_then_zeros(width: int, block: int) -> None:
    x = random(7, width)
    size = record_bytes(width, block)
    assert size % 16 == 0 and 0 <= size - width - -(-width // block) < 16
    # Columns of a wider buffer: side columns on both sides stay as they were.
    buffer = torch.full((7, size + 48), 0xAB, dtype=torch.uint8)
    pack_rows_(buffer[:, 16 : 16 + size], x, block)
    assert bool((buffer[:, :16] == 0xAB).all()) and bool((buffer[:, 16 + size :] == 0xAB).all())
    record = buffer[:, 16 : 16 + size]
    coded = mxfp8_rows(x) if block == 32 else fp8_rows(x)
    values, scales = split_record(record, width, block)
    assert torch.equal(raw(values.contiguous()), raw(coded.values)) and torch.equal(scales, coded.scales)
    assert bool((record[:, width + scales.shape[1] :] == 0).all())
    assert torch.equal(unpack_rows(record, width, torch.bfloat16, block), coded.dequantize())
    assert torch.equal(pack_rows(x, block), record)


def test_moving_rows_and_coding_them_commute() -> None:
    x, order = random(40, 96), torch.randperm(40, generator=torch.Generator().manual_seed(0))[:25]
    assert torch.equal(pack_rows(x)[order], pack_rows(x[order]))
    with pytest.raises(ValueError, match=r"records of \(40, 96\) do not fit in \(40, 96\): see record_bytes"):
        pack_rows_(torch.empty(40, 96, dtype=torch.uint8), x, 32)


# Gathered tokens


def test_the_worked_places() -> None:
    places, padded = pad_groups(torch.tensor([4, 0, 7]), torch.tensor([1, 3], dtype=torch.int32), 2)
    assert places.tolist() == [4, -1, 0, 7] and padded.tolist() == [2, 4]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=6), st.integers(0, 5), st.sampled_from([1, 4, 32]))
def test_places_equal_a_loop(counts: list[int], spare: int, align: int) -> None:
    """Pairs past the last offset point nowhere: they must not be read."""
    num_pairs = sum(counts)
    indices = torch.cat([torch.randperm(num_pairs), torch.full((spare,), 1 << 30)])
    offsets = torch.tensor(counts).cumsum(0).int()
    places, padded = pad_groups(indices, offsets, align)
    expected, start = [], 0
    for expert, count in enumerate(counts):
        expected += indices[start : start + count].tolist() + [-1] * (-count % align)
        start += count
        assert padded[expert] == len(expected)
    assert len(places) == num_places(num_pairs + spare, len(counts), align) >= len(expected)
    assert places.tolist() == expected + [-1] * (len(places) - len(expected))


def gathered() -> tuple[Tensor, list[Tensor], Tensor, Tensor]:
    """Tokens, each expert's gathered rows with zeros up to 32, the places, their offsets. Expert 1 has no row."""
    x, counts = random(50, 100), [33, 0, 64, 5]
    indices = torch.randint(0, 50, (sum(counts),), generator=torch.Generator().manual_seed(1))
    offsets = torch.tensor(counts).cumsum(0).int()
    rows = [torch.nn.functional.pad(x[i], (0, 0, 0, -len(i) % 32)) for i in indices.split(counts)]
    return x, rows, *pad_groups(indices, offsets, 32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_columns_are_blocks_of_each_experts_rows(dtype: torch.dtype) -> None:
    x, rows, places, padded = gathered()
    coded = mxfp8_columns(x.to(dtype), places)
    for expert, own in enumerate(rows):
        start, end = int(padded[expert - 1]) if expert else 0, int(padded[expert])
        share = Quantized(coded.values[:, start:end].contiguous(), coded.scales[:, start // 32 : end // 32], 1, 32)
        assert_same(share, torchao_bytes(own.to(dtype).t()))
    assert not raw(coded.values)[:, padded[-1] :].any() and not coded.scales[:, padded[-1] // 32 :].any()


def test_rows_and_columns_from_one_read() -> None:
    x, rows, places, padded = gathered()
    along_rows, along_columns = mxfp8_both(x, places)
    assert torch.equal(raw(along_columns.values), raw(mxfp8_columns(x, places).values))
    assert torch.equal(along_columns.scales, mxfp8_columns(x, places).scales)
    expected = mxfp8_rows(torch.cat(rows))
    assert torch.equal(raw(along_rows.values[: padded[-1]]), raw(expected.values))
    assert torch.equal(along_rows.scales[: padded[-1]], expected.scales)
    # Coded before it is gathered, as after a transfer in MXFP8: the same bytes.
    moved = mxfp8_rows(x).gather(places)
    assert torch.equal(raw(moved.values), raw(along_rows.values)) and torch.equal(moved.scales, along_rows.scales)


def test_weights_along_both_dims() -> None:
    w = random(3, 64, 96)
    along_rows, along_columns = mxfp8_both(w)
    for expert in range(3):
        one = Quantized(along_rows.values[expert], along_rows.scales[expert], 1, 32)
        assert_same(one, torchao_bytes(w[expert]))
        one = Quantized(along_columns.values[expert], along_columns.scales[expert], 1, 32)
        assert_same(one, torchao_bytes(w[expert].t()))


def test_rows_that_are_no_whole_blocks_are_refused() -> None:
    with pytest.raises(ValueError, match=r"33 rows are not whole blocks of 32: lay them out with pad_groups"):
        mxfp8_columns(torch.zeros(33, 64), None)


# Scales for block-scaled tensor cores


def scale_bytes(*shape: int) -> Tensor:
    return torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(0), dtype=torch.uint8)


@pytest.mark.parametrize("shape", [(1, 1), (128, 4), (130, 5), (300, 12)])
def test_swizzle_as_torchao(shape: tuple[int, int]) -> None:
    from torchao.prototype.mx_formats.utils import to_blocked

    assert torch.equal(swizzle(scale_bytes(*shape)), to_blocked(scale_bytes(*shape)))


def test_swizzle_of_weights_as_torchao() -> None:
    from torchao.prototype.moe_training.kernels.mxfp8.quant import torch_to_blocked_per_group_3d

    assert torch.equal(swizzle(scale_bytes(3, 130, 5)), torch_to_blocked_per_group_3d(scale_bytes(3, 130, 5)))


@pytest.mark.parametrize("offsets", [[5, 5, 200], [0, 128, 300], [70, 70, 70]])
def test_swizzle_of_groups_as_torchao(offsets: list[int]) -> None:
    from torchao.prototype.moe_training.kernels.mxfp8 import quant

    ends, size = torch.tensor(offsets, dtype=torch.int32), offsets[-1]
    scales = scale_bytes(size, 8)
    expected, _ = quant.torch_to_blocked_2d_M_groups(scales, ends)
    assert torch.equal(swizzle_row_groups(scales, ends), expected)
    # Rows past the last offset belong to nobody.
    more = swizzle_row_groups(torch.cat([scales, scales[:9]]), ends)
    assert torch.equal(more.flatten()[: expected.numel()], expected.flatten())
    assert not more.flatten()[expected.numel() :].any()
    scales = scale_bytes(150, size)
    expected, _ = quant.torch_to_blocked_2d_K_groups(scales, ends)
    assert torch.equal(swizzle_column_groups(scales, ends), expected)
    more = swizzle_column_groups(torch.cat([scales, scales[:, :9]], 1), ends)
    assert torch.equal(more.flatten()[: expected.numel()], expected.flatten())
    assert not more.flatten()[expected.numel() :].any()


def test_swizzle_pads_a_width_that_torchao_does_not() -> None:
    """90 scales, as of gpt-oss: padded to 92."""
    out = swizzle_row_groups(scale_bytes(256, 90), torch.tensor([128, 256], dtype=torch.int32))
    assert out.shape == (512, 92)
    assert torch.equal(out[:256].flatten(), swizzle(scale_bytes(256, 90)))


def test_the_operators_describe_themselves() -> None:
    """Schema and fake agree with what they do: torch.compile relies on them."""
    ops = torch.ops.sluicegate
    x, places = random(64, 48), torch.arange(64, dtype=torch.int32)
    coded = mxfp8_rows(x)
    cases = [
        (ops.quantize, (x, 1, 32)),
        (ops.quantize, (x[None], 128, 128)),
        (ops.pack_rows_, (torch.empty(64, record_bytes(48), dtype=torch.uint8), x, 32)),
        (ops.quantize_columns, (x, places)),
        (ops.quantize_both, (x, None)),
        (ops.pad_groups, (places, torch.tensor([3, 64], dtype=torch.int32), 32)),
    ]
    for op, args in cases:
        torch.library.opcheck(op.default, args, test_utils=("test_schema", "test_faketensor"))
    # The check of schemas cannot copy e4m3 arguments.
    args = (coded.values, coded.scales, 1, 32, torch.bfloat16)
    torch.library.opcheck(ops.dequantize.default, args, test_utils="test_faketensor")
