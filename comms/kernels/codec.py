"""e4m3 values with one power-of-two scale per block: MXFP8 (1 x 32), FP8 (1 x 128, 128 x 128) and the wire record.

    x = values * 2^(scales - 127), scales being e8m0 bytes

The scale is the smallest power of two with amax / scale <= 448 (RCEIL), so no finite value saturates. It is found
exactly, on the bits: amax = 1.m * 2^(e - 127) gives e - 8, plus one if 1.m > 1.75. Bytes equal torchao's
`to_mx(RCEIL)` for every bf16 input; of fp32 inputs torchao saturates an amax just above 448 * 2^k, because its
ceil(log2) runs in fp32.

Values are rounded once, to nearest even, and compiled, interpreted and plain PyTorch bytes are equal: e4m3.py has the
kernels' rounding and why it is exact.

    block holds             scale   values
    a NaN                   255     all NaN (0x7F)
    Inf, no NaN             254     Inf is 448, whose product is Inf again; the rest keep what is above 2^117
    amax <= 1.75 * 2^-119   0       signed zeros, as torchao has it

A wire record is one row's values, then its scales, then zeros up to a multiple of 16 bytes:

    D = 4, block = 2: x = [448, 1, -3.5, 0] -> 7E 38 FE 00 | 7F 78 | 00 x 10

Rows are coded one by one, so moving records or moving rows first is the same, byte for byte.

Shape suffixes: N matrices, R rows, D row width, S scales per row, B bytes of one record.
"""

# Kernels are written in Triton's language, which has no types.
# pyright: basic
# ruff: noqa: ANN001, ANN202

import os
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from comms.kernels.e4m3 import absolute, can_cast, decode, encode, scale_byte
from comms.operators import operator, register_fake

RECORD_ALIGNMENT = 16
# Elements of one program, and the widest part of a row in it.
TILE, TILE_COLUMNS = 2048, 256
WARPS, SQUARE_WARPS = 2, 8


def record_bytes(width: int, block: int = 32) -> int:
    """Bytes of one record of a row of `width` values."""
    return -(-(width + -(-width // block)) // RECORD_ALIGNMENT) * RECORD_ALIGNMENT


def split_record(record_RB: Tensor, width: int, block: int = 32) -> tuple[Tensor, Tensor]:
    """(values_RD, scales_RS) of records, as views."""
    num_scales = -(-width // block)
    return record_RB[:, :width].view(torch.float8_e4m3fn), record_RB[:, width : width + num_scales]


def pack_rows(x_RD: Tensor, block: int = 32) -> Tensor:
    """record_RB (uint8) of bf16 or fp32 rows, written by one kernel."""
    record_RB = x_RD.new_empty(x_RD.shape[0], record_bytes(x_RD.shape[1], block), dtype=torch.uint8)
    pack_rows_(record_RB, x_RD, block)
    return record_RB


def unpack_rows(record_RB: Tensor, width: int, dtype: torch.dtype, block: int = 32) -> Tensor:
    """x_RD of records, read by one kernel."""
    values_RD, scales_RS = split_record(record_RB, width, block)
    return dequantize(values_RD, scales_RS, 1, block, dtype)


@operator("pack_rows_", mutates_args=("record_RB",))
def pack_rows_(record_RB: Tensor, x_RD: Tensor, block: int) -> None:
    """Write the records of x into record_RB, which may be columns of a wider buffer. No autograd."""
    width = x_RD.shape[1]
    if record_RB.shape != (x_RD.shape[0], record_bytes(width, block)) or record_RB.stride(-1) != 1:
        raise ValueError(f"records of {tuple(x_RD.shape)} do not fit in {tuple(record_RB.shape)}: see record_bytes()")
    values_RD, scales_RS = split_record(record_RB, width, block)
    record_RB = record_RB[:, width + scales_RS.shape[1] :]
    if _on_triton(x_RD):
        _quantize_triton(x_RD[None], values_RD[None], scales_RS[None], 1, block, padding=record_RB.shape[1])
        return
    coded, scales = quantize_reference(x_RD, 1, block)
    values_RD.view(torch.uint8).copy_(coded.view(torch.uint8))
    scales_RS.copy_(scales)
    record_RB.zero_()


@operator("quantize")
def quantize(x: Tensor, row_block: int, block: int, transposed: bool = False) -> tuple[Tensor, Tensor]:
    """Code bf16 or fp32 matrices in blocks of row_block (1 or 128) rows x block (32 or 128) columns. No autograd.

    Args:
        x: (R, D) or (N, R, D). Last blocks may be partial.
        transposed: write the transpose of values and scales; of square blocks only.

    Returns:
        e4m3 values of x's shape, and uint8 scales of shape (..., ceil(R / row_block), ceil(D / block)).
    """
    assert row_block == block or not transposed, "blocks of rows become blocks of columns: quantize the transpose"
    if not _on_triton(x):
        return quantize_reference(x.transpose(-1, -2) if transposed else x, row_block, block)
    values, scales = _empty_coded(x, row_block, block, transposed)
    if x.dim() == 2:
        _quantize_triton(x[None], values[None], scales[None], row_block, block, transposed=transposed)
    else:
        _quantize_triton(x, values, scales, row_block, block, transposed=transposed)
    return values, scales


@register_fake(quantize)
def _(x: Tensor, row_block: int, block: int, transposed: bool = False) -> tuple[Tensor, Tensor]:
    return _empty_coded(x, row_block, block, transposed)


def _empty_coded(x: Tensor, row_block: int, block: int, transposed: bool = False) -> tuple[Tensor, Tensor]:
    x = x.transpose(-1, -2) if transposed else x
    *matrices, rows, width = x.shape
    shape = (*matrices, -(-rows // row_block), -(-width // block))
    return x.new_empty(x.shape, dtype=torch.float8_e4m3fn), x.new_empty(shape, dtype=torch.uint8)


@operator("dequantize")
def dequantize(values: Tensor, scales: Tensor, row_block: int, block: int, dtype: torch.dtype) -> Tensor:
    """values * 2^(scales - 127) in bf16 or fp32, rounded once to nearest even. No autograd.

    Exact in fp32 below overflow, and in bf16 except for scale bytes 0 to 2 and from 247 on. NaN comes out as 0x7FC0.
    """
    if not _on_triton(values):
        return dequantize_reference(values, scales, row_block, block, dtype)
    out = values.new_empty(values.shape, dtype=dtype)
    if values.dim() == 2:
        _dequantize_triton(values[None], scales[None], out[None], row_block, block)
    else:
        _dequantize_triton(values, scales, out, row_block, block)
    return out


@register_fake(dequantize)
def _(values: Tensor, scales: Tensor, row_block: int, block: int, dtype: torch.dtype) -> Tensor:
    return values.new_empty(values.shape, dtype=dtype)


def _on_triton(x: Tensor) -> bool:
    return x.is_cuda or os.environ.get("TRITON_INTERPRET") == "1"


# The same in plain PyTorch, in integers alone.


def quantize_reference(x: Tensor, row_block: int, block: int) -> tuple[Tensor, Tensor]:
    """`quantize` in plain PyTorch."""
    *matrices, rows, width = x.shape
    num_rows, num_columns = -(-rows // row_block), -(-width // block)
    bits = fp32_bits(x)
    padded = bits.new_zeros(*matrices, num_rows * row_block, num_columns * block)
    padded[..., :rows, :width] = bits
    tiles = padded.view(*matrices, num_rows, row_block, num_columns, block)
    scales = scale_of((tiles & 0x7FFFFFFF).amax(dim=(-3, -1)) if tiles.numel() else tiles.sum(dim=(-3, -1)).int())
    coded = encode_reference(tiles, scales[..., :, None, :, None]).view_as(padded)[..., :rows, :width]
    return coded.contiguous().view(torch.float8_e4m3fn), scales.to(torch.uint8)


def dequantize_reference(values: Tensor, scales: Tensor, row_block: int, block: int, dtype: torch.dtype) -> Tensor:
    """`dequantize` in plain PyTorch."""
    rows, width = values.shape[-2:]
    wide = scales.to(torch.int32).repeat_interleave(row_block, -2).repeat_interleave(block, -1)[..., :rows, :width]
    code = values.view(torch.uint8).to(torch.int32)
    # ldexp through float64, which holds every product.
    product = torch.ldexp(((code & 0x7F) << 20).view(torch.float32).double(), wide - 7)
    product = torch.where((code & 0x80) != 0, -product, product)
    return product.float().to(dtype).masked_fill(((code & 0x7F) == 0x7F) | (wide == 255), float("nan"))


def fp32_bits(x: Tensor) -> Tensor:
    """int32 bits of x as fp32.

    Raises:
        ValueError: x is neither bf16 nor fp32.
    """
    if x.dtype == torch.bfloat16:
        return x.contiguous().view(torch.int16).to(torch.int32) << 16
    if x.dtype == torch.float32:
        return x.contiguous().view(torch.int32)
    raise ValueError(f"{x.dtype} cannot be quantized: only bfloat16 and float32; cast it first")


def scale_of(amax: Tensor) -> Tensor:
    """e8m0 byte, as int32, of a block whose largest absolute value has these fp32 bits."""
    scale = (((amax & 0x7FFFFFFF).clamp(max=0x7F800000) + 0x1FFFFF >> 23) - 8).clamp(min=0)
    return scale.masked_fill(amax == 0x7F800000, 254).masked_fill(amax > 0x7F800000, 255)


def encode_reference(bits: Tensor, scale: Tensor) -> Tensor:
    """uint8 e4m3 codes of fp32 bits over 2^(scale - 127). In integers: shift the mantissa, round half to even."""
    magnitude = bits & 0x7FFFFFFF
    # A subnormal of fp32, m * 2^-149, is normalised by the conversion of m.
    normal = torch.where(magnitude < 0x800000, magnitude.float().view(torch.int32) - (149 << 23), magnitude)
    # Of y = x / 2^(scale - 127): 2^exponent * 1.m. The shift leaves 4 bits, fewer below 2^-6, none below 2^-11.
    exponent = (normal >> 23) - scale
    mantissa = (normal & 0x7FFFFF) | 0x800000
    shift = (14 - exponent).clamp(20, 26)
    rounded = mantissa + (1 << (shift - 1)) - 1 + (mantissa >> shift & 1) >> shift
    code = ((exponent + 6).clamp(min=0) * 8 + rounded).clamp(max=0x7E)
    code = code.masked_fill((magnitude == 0) | (scale == 0), 0).masked_fill(magnitude == 0x7F800000, 0x7E)
    return (code | (bits >> 24 & 0x80)).masked_fill(scale == 255, 0x7F).to(torch.uint8)


# Launches. Matrices are (N, R, D) with rows of any stride, their elements adjacent.


def word_view(x: Tensor) -> Tensor:
    """x as integers of its own size: kernels work on bits."""
    if x.dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(f"{x.dtype} cannot be quantized: only bfloat16 and float32; cast it first")
    x = x if x.stride(-1) == 1 else x.contiguous()
    return x.view(torch.int16 if x.dtype == torch.bfloat16 else torch.int32)


def _tile(width: int, row_block: int, block: int) -> tuple[int, int]:
    columns = max(block, min(TILE_COLUMNS, int(triton.next_power_of_2(width))))
    return (row_block, block) if row_block > 1 else (TILE // columns, columns)


def _constants(row_block: int, block: int, tile_rows: int, tile_columns: int, words: Tensor) -> dict[str, Any]:
    sizes = {"ROW_BLOCK": row_block, "BLOCK": block, "TILE_ROWS": tile_rows, "TILE_COLUMNS": tile_columns}
    # A thread moves 16 bytes of words and as many codes at once, so no exchange stands between reading and writing.
    sizes |= {"VECTOR": 16 // words.element_size(), "CAST": can_cast(words)}
    return {**sizes, "num_warps": WARPS if tile_rows * tile_columns == TILE else SQUARE_WARPS}


def _quantize_triton(
    x: Tensor,
    values: Tensor,
    scales: Tensor,
    row_block: int,
    block: int,
    padding: int = 0,
    transposed: bool = False,
) -> None:
    num, rows, width = x.shape
    if x.numel() == 0:
        return
    x, values = word_view(x), values.view(torch.uint8)
    tile_rows, tile_columns = _tile(width, row_block, block)
    grid = (triton.cdiv(rows, tile_rows) * triton.cdiv(width, tile_columns), num)
    constants: dict[str, Any] = _constants(row_block, block, tile_rows, tile_columns, x)
    constants["TRANSPOSED"] = transposed
    with torch.cuda.device(x.device) if x.is_cuda else torch.no_grad():
        _quantize_kernel[grid](
            *(x, values, scales, rows, width, padding),
            *(x.stride(0), x.stride(1), values.stride(0), values.stride(1), scales.stride(0), scales.stride(1)),
            **constants,
        )


def _dequantize_triton(values: Tensor, scales: Tensor, out: Tensor, row_block: int, block: int) -> None:
    num, rows, width = values.shape
    if values.numel() == 0:
        return
    values = (values if values.stride(-1) == 1 else values.contiguous()).view(torch.uint8)
    out = word_view(out)
    tile_rows, tile_columns = _tile(width, 1, block)
    grid = (triton.cdiv(rows, tile_rows) * triton.cdiv(width, tile_columns), num)
    with torch.cuda.device(values.device) if values.is_cuda else torch.no_grad():
        _dequantize_kernel[grid](
            *(values, scales, out, rows, width),
            *(values.stride(0), values.stride(1), scales.stride(0), scales.stride(1), scales.stride(2)),
            *(out.stride(0), out.stride(1)),
            **_constants(row_block, block, tile_rows, tile_columns, out),
        )


@triton.jit
def _quantize_kernel(
    x,
    values,
    scales,
    rows,
    width,
    padding,
    x_matrix,
    x_row,
    values_matrix,
    values_row,
    scales_matrix,
    scales_row,
    ROW_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
    VECTOR: tl.constexpr,
    CAST: tl.constexpr,
    TRANSPOSED: tl.constexpr,
):
    """One program: a tile of whole blocks, read once. A warp takes whole rows of it, for long runs of bytes."""
    BLOCKS: tl.constexpr = TILE_COLUMNS // BLOCK
    tiles = tl.cdiv(width, TILE_COLUMNS)
    matrix = tl.program_id(1).to(tl.int64)
    first = tl.program_id(0) % tiles
    row = (tl.program_id(0) // tiles).to(tl.int64) * TILE_ROWS + tl.arange(0, TILE_ROWS).to(tl.int64)
    column = tl.max_contiguous(first * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS), VECTOR)[None, :]
    inside = (row < rows)[:, None] & (column < width)
    word = tl.load(x + matrix * x_matrix + row[:, None] * x_row + column, mask=inside, other=0)
    word = tl.reshape(word, [TILE_ROWS, BLOCKS, BLOCK])
    amax = tl.max(absolute(word), axis=2)
    if ROW_BLOCK > 1:
        amax = tl.max(amax, axis=0, keep_dims=True)
    scale = scale_byte(amax, word.dtype)
    code = tl.reshape(encode(word, scale[:, :, None], CAST), [TILE_ROWS, TILE_COLUMNS])
    values += matrix * values_matrix
    scales += matrix * scales_matrix
    if TRANSPOSED:
        tl.store(values + tl.trans(column).to(tl.int64) * values_row + row[None, :], tl.trans(code), tl.trans(inside))
        tl.store(scales + first.to(tl.int64) * scales_row + tl.program_id(0) // tiles, tl.max(scale).to(tl.uint8))
        return
    tl.store(values + row[:, None] * values_row + column, code, mask=inside)
    block = first * BLOCKS + tl.arange(0, BLOCKS)
    if ROW_BLOCK > 1:
        scale_row = (tl.program_id(0) // tiles).to(tl.int64) + tl.zeros([1], dtype=tl.int64)
        inside = (block * BLOCK < width)[None, :]
    else:
        scale_row = row
        inside = (row < rows)[:, None] & (block * BLOCK < width)[None, :]
    tl.store(scales + scale_row[:, None] * scales_row + block[None, :], scale.to(tl.uint8), mask=inside)
    if padding > 0:
        if first == tiles - 1:
            byte = tl.arange(0, 16)[None, :]
            end = scales + row[:, None] * scales_row + tl.cdiv(width, BLOCK) + byte
            zero = tl.zeros([TILE_ROWS, 16], dtype=tl.uint8)
            tl.store(end, zero, mask=(row < rows)[:, None] & (byte < padding))


@triton.jit
def _dequantize_kernel(
    values,
    scales,
    out,
    rows,
    width,
    values_matrix,
    values_row,
    scales_matrix,
    scales_row,
    scales_column,
    out_matrix,
    out_row,
    ROW_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
    VECTOR: tl.constexpr,
    CAST: tl.constexpr,
):
    """One program: the same tile the other way, one row of scales per ROW_BLOCK rows."""
    BLOCKS: tl.constexpr = TILE_COLUMNS // BLOCK
    tiles = tl.cdiv(width, TILE_COLUMNS)
    matrix = tl.program_id(1).to(tl.int64)
    first = tl.program_id(0) % tiles
    row = (tl.program_id(0) // tiles).to(tl.int64) * TILE_ROWS + tl.arange(0, TILE_ROWS).to(tl.int64)
    column = tl.max_contiguous(first * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS), VECTOR)[None, :]
    block = first * BLOCKS + tl.arange(0, BLOCKS)
    inside = (row < rows)[:, None] & (column < width)
    code = tl.load(values + matrix * values_matrix + row[:, None] * values_row + column, mask=inside, other=0)
    at = scales + matrix * scales_matrix + (row // ROW_BLOCK)[:, None] * scales_row + block[None, :] * scales_column
    scale = tl.load(at, mask=(row < rows)[:, None] & (block * BLOCK < width)[None, :], other=0)
    word = decode(tl.reshape(code, [TILE_ROWS, BLOCKS, BLOCK]), scale[:, :, None], out.dtype.element_ty, CAST)
    word = tl.reshape(word, [TILE_ROWS, TILE_COLUMNS])
    tl.store(out + matrix * out_matrix + row[:, None] * out_row + column, word, mask=inside)
