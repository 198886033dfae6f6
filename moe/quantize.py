"""Low-precision operands: which blocks a tensor's scales cover, and the layouts that grouped GEMMs take them in.

    recipe          activations              weights                  decoded by
    mxfp8           1 x 32 along the row     1 x 32 along the row     `Quantized.dequantize`
      wgrad         32 gathered tokens       -                        the same: values are transposed
    fp8_blockwise   1 x 128 along the row    128 x 128                the same

Formats, rounding and what becomes of NaN and Inf are in comms/kernels/codec.py; the kernel of gathered tokens, and the
padding of each expert's rows to whole blocks, in moe/kernels/quantize.py.

`swizzle*` bring scales into the order that block-scaled tensor cores (SM100) read: tiles of 128 rows x 4 scales, 512
bytes in a row, byte 16 * (r % 32) + 4 * (r // 32) + s within one; tiles go row by row of tiles. Missing rows and scales
are zeros. Counts stay on the device.

Shape suffixes: T tokens, D row width, E experts, Q places (expert-sorted rows, padded), S scales, O/I weight dims.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from comms.kernels.codec import dequantize, quantize
from moe.kernels.quantize import gather_places, num_places, quantize_both, quantize_columns

ROWS_PER_TILE, SCALES_PER_TILE = 128, 4


class Quantized(NamedTuple):
    """e4m3 values (..., R, D) and e8m0 scales for blocks of row_block x block of them.

    Scales are uint8, which torch can gather and pad; `.view(torch.float8_e8m0fnu)` is what its GEMMs want.
    """

    values: Tensor
    scales: Tensor
    row_block: int
    block: int

    def dequantize(self, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """The numbers meant, in bf16 or fp32."""
        return dequantize(self.values, self.scales, self.row_block, self.block, dtype)

    def gather(self, places_Q: Tensor) -> "Quantized":
        """Rows as they stand at each place (`pad_groups`), zeros where there is none; nothing is rounded again."""
        assert self.row_block == 1, "rows that share a scale cannot be moved one by one"
        values = gather_places(self.values.view(torch.uint8), places_Q).view(self.values.dtype)
        return self._replace(values=values, scales=gather_places(self.scales, places_Q))

    def transpose(self) -> "Quantized":
        """Each matrix the other way round, as views; blocks must be square, or the scales would lie across them."""
        assert self.row_block == self.block, "blocks of rows become blocks of columns: quantize the transpose instead"
        return self._replace(values=self.values.transpose(-1, -2), scales=self.scales.transpose(-1, -2))

    def as_mxfp8(self) -> "Quantized":
        """The same numbers with one scale for 1 x 32, each scale repeated."""
        rows, width = self.values.shape[-2:]
        scales = self.scales.repeat_interleave(self.row_block, -2).repeat_interleave(self.block // 32, -1)
        return Quantized(self.values, scales[..., :rows, : -(-width // 32)].contiguous(), 1, 32)


def mxfp8_rows(x: Tensor) -> Quantized:
    """MXFP8 along the last dim of bf16 or fp32 (R, D) or (N, R, D)."""
    values, scales = quantize(x, 1, 32)
    return Quantized(values, scales, 1, 32)


def mxfp8_columns(x: Tensor, places_Q: Tensor | None = None) -> Quantized:
    """MXFP8 of the transpose (..., D, Q): blocks of 32 gathered rows. `pad_groups` makes the places."""
    values, scales = quantize_columns(x, places_Q)
    return Quantized(values, scales, 1, 32)


def mxfp8_both(x: Tensor, places_Q: Tensor | None = None) -> tuple[Quantized, Quantized]:
    """MXFP8 of the gathered rows (..., Q, D) and of their transpose (..., D, Q), from one read of x."""
    row_values, row_scales, values, scales = quantize_both(x, places_Q)
    return Quantized(row_values, row_scales, 1, 32), Quantized(values, scales, 1, 32)


def fp8_rows(x: Tensor) -> Quantized:
    """FP8 with a power-of-two scale for 1 x 128: activations of `fp8_blockwise`."""
    values, scales = quantize(x, 1, 128)
    return Quantized(values, scales, 1, 128)


def fp8_squares(w: Tensor) -> Quantized:
    """FP8 with a power-of-two scale for 128 x 128: weights (O, I) or (E, O, I). The transpose has the same blocks."""
    values, scales = quantize(w, 128, 128)
    return Quantized(values, scales, 128, 128)


def fp8_squares_transposed(w: Tensor) -> Quantized:
    """`fp8_squares` of each matrix's transpose, (I, O) or (E, I, O): the same numbers, and contiguous."""
    values, scales = quantize(w, 128, 128, transposed=True)
    return Quantized(values, scales, 128, 128)


def swizzled_shape(rows: int, num_scales: int) -> tuple[int, int]:
    """Rows and scales after padding to whole tiles."""
    return -(-rows // ROWS_PER_TILE) * ROWS_PER_TILE, -(-num_scales // SCALES_PER_TILE) * SCALES_PER_TILE


def swizzle(scales: Tensor) -> Tensor:
    """Scales (R, S) or (E, R, S) in tiles: flat, or one flat row per expert as `scaled_grouped_mm` takes weights'."""
    *matrices, rows, num_scales = scales.shape
    padded_rows, padded_scales = swizzled_shape(rows, num_scales)
    padded = scales.new_zeros(*matrices, padded_rows, padded_scales)
    padded[..., :rows, :num_scales] = scales
    tiles = padded.view(*matrices, padded_rows // ROWS_PER_TILE, 4, 32, padded_scales // SCALES_PER_TILE, 4)
    return tiles.movedim(-2, -4).transpose(-2, -3).reshape(*matrices, -1)


def swizzle_row_groups(scales_RS: Tensor, offsets_E: Tensor) -> Tensor:
    """Scales of experts' rows, each expert's rows padded to whole tiles.

    Args:
        scales_RS: rows sorted by expert, offsets_E their ends.

    Returns:
        (R + 128 E, S padded to 4): enough for any split; what no expert needs is zero.
    """
    rows, num_scales = scales_RS.shape
    starts_E, padded_starts_E = _padded_starts(offsets_E, ROWS_PER_TILE)
    row_R = torch.arange(rows, device=scales_RS.device)
    expert_R = torch.searchsorted(offsets_E, row_R, right=True)
    known_R = expert_R.clamp(max=offsets_E.shape[0] - 1)
    size = rows + ROWS_PER_TILE * offsets_E.shape[0]
    # Rows of no expert go to one row too many, which is cut off.
    target_R = torch.where(expert_R < offsets_E.shape[0], row_R - starts_E[known_R] + padded_starts_E[known_R], size)
    padded = scales_RS.new_zeros(size + 1, num_scales).index_copy_(0, target_R, scales_RS)[:size]
    whole = size // ROWS_PER_TILE * ROWS_PER_TILE
    out = scales_RS.new_zeros(size, swizzled_shape(size, num_scales)[1])
    out[:whole] = swizzle(padded[:whole]).view(whole, -1)
    return out


def swizzle_column_groups(scales_DS: Tensor, offsets_E: Tensor) -> Tensor:
    """Scales along experts' tokens, each expert's scales padded to whole tiles, which stand together.

    Args:
        scales_DS: from `mxfp8_columns`; expert e's scales end at offsets_E[e] (padded offsets over 32).

    Returns:
        (D padded to 128, S + 4 E): enough for any split; what no expert needs is zero.
    """
    width, num_scales = scales_DS.shape
    starts_E, padded_starts_E = _padded_starts(offsets_E, SCALES_PER_TILE)
    tiles_E = (offsets_E - starts_E + SCALES_PER_TILE - 1) // SCALES_PER_TILE
    scale_S = torch.arange(num_scales, device=scales_DS.device)
    expert_S = torch.searchsorted(offsets_E, scale_S, right=True)
    known_S = expert_S.clamp(max=offsets_E.shape[0] - 1)
    column_S = scale_S - starts_E[known_S]
    rows = swizzled_shape(width, 1)[0]
    row_D1 = torch.arange(width, device=scales_DS.device)[:, None]
    tile_DS = row_D1 // ROWS_PER_TILE * tiles_E[known_S] + column_S // SCALES_PER_TILE
    byte_DS = row_D1 % 32 * 16 + row_D1 % ROWS_PER_TILE // 32 * 4 + column_S % SCALES_PER_TILE
    size = rows * (num_scales + SCALES_PER_TILE * offsets_E.shape[0])
    target_DS = padded_starts_E[known_S] * rows + tile_DS * ROWS_PER_TILE * SCALES_PER_TILE + byte_DS
    target_DS = torch.where(expert_S < offsets_E.shape[0], target_DS, size)
    out = scales_DS.new_zeros(size + 1).scatter_(0, target_DS.flatten(), scales_DS.flatten())
    return out[:size].view(rows, -1)


def places_of_rows(num_rows: int, offsets_E: Tensor, align: int) -> Tensor:
    """place_P: where `pad_groups` puts each row (the inverse of its places); rows of no expert share the last place."""
    starts_E, padded_starts_E = _padded_starts(offsets_E, align)
    row_P = torch.arange(num_rows, device=offsets_E.device)
    expert_P = torch.searchsorted(offsets_E, row_P, right=True).clamp(max=offsets_E.shape[0] - 1)
    place_P = row_P - starts_E[expert_P] + padded_starts_E[expert_P]
    return place_P.clamp(max=num_places(num_rows, offsets_E.shape[0], align) - 1)


def _padded_starts(offsets_E: Tensor, unit: int) -> tuple[Tensor, Tensor]:
    """Where each expert's share starts, before and after padding shares to whole units."""
    counts_E = offsets_E.diff(prepend=offsets_E.new_zeros(1))
    padded_E = (counts_E + unit - 1) // unit * unit
    return offsets_E - counts_E, padded_E.cumsum(0) - padded_E
