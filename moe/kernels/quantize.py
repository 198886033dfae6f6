"""MXFP8 along the rows of each group after a gather, alone or together with MXFP8 along the columns, from one read.

A contraction over an expert's tokens (wgrad) wants scales for 32 *tokens*, and these are neighbours only once they are
gathered. Groups are laid out with padding to whole blocks, so no block holds tokens of two experts, and a kernel needs
to know nothing but which row stands at each padded place (-1: none, which counts and is written as zeros):

    indices = [4, 0, 7], offsets = [1, 3], align = 2:  places = [4, -1, 0, 7], padded_offsets = [2, 4]

The number of places follows from the shapes alone, so the device's counts are never read by the host.

Along the tokens, values come out transposed (D, Q), the contracted dim innermost as low-precision GEMMs want it. It is
the MXFP8 of the gathered rows' transpose: what decodes rows decodes this too.

Shape suffixes: P (token, expert) pairs, Q places after padding, R rows to gather from, D row width, E experts,
N matrices.
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

from comms.kernels.codec import quantize_reference, word_view
from comms.kernels.e4m3 import absolute, can_cast, encode, scale_byte
from comms.operators import operator, register_fake

BLOCK = 32
# A program's tile: blocks of places, groups of GROUP_COLUMNS columns, warps; and how many tiles of the same columns are
# started after each other (with one, rows are read whole by neighbouring programs). One warp for one block of one group
# gives each thread 64 elements, whose words, codes and scales fit in its registers.
GROUP_COLUMNS = 64
COLUMNS_TILE = (8, 1, 8, 4)
BOTH_TILE = (2, 1, 2, 1)


def num_places(num_pairs: int, num_experts: int, align: int) -> int:
    """Q: places that suffice for any split of the pairs, a multiple of align."""
    return (num_pairs + min(num_experts, num_pairs) * (align - 1)) // align * align


@operator("pad_groups")
def pad_groups(indices_P: Tensor, offsets_E: Tensor, align: int) -> tuple[Tensor, Tensor]:
    """Lay groups out in multiples of `align` places.

    Args:
        indices_P: row of each pair, sorted by expert; what lies beyond offsets_E[-1] is not read.
        offsets_E: int32 end of each expert's pairs.

    Returns:
        places_Q (int32): the row that stands there, or -1; and padded_offsets_E (int32).
    """
    if not (offsets_E.is_cuda or os.environ.get("TRITON_INTERPRET") == "1"):
        return pad_groups_reference(indices_P, offsets_E, align)
    num_experts = offsets_E.shape[0]
    places_Q, padded_E = _empty_places(indices_P, offsets_E, align)
    columns = triton.next_power_of_2(num_experts)
    tile = max(8192 // columns, 16)
    with torch.cuda.device(offsets_E.device) if offsets_E.is_cuda else torch.no_grad():
        _pad_groups_kernel[(max(1, triton.cdiv(places_Q.shape[0], tile)),)](
            *(indices_P.contiguous(), offsets_E.contiguous(), places_Q, padded_E),
            *(num_experts, places_Q.shape[0], align),
            EXPERTS=columns,
            PLACES=tile,
        )  # type: ignore[arg-type]
    return places_Q, padded_E


@register_fake(pad_groups)
def _empty_places(indices_P: Tensor, offsets_E: Tensor, align: int) -> tuple[Tensor, Tensor]:
    size = num_places(indices_P.shape[0], offsets_E.shape[0], align)
    return indices_P.new_empty(size, dtype=torch.int32), torch.empty_like(offsets_E, dtype=torch.int32)


def pad_groups_reference(indices_P: Tensor, offsets_E: Tensor, align: int) -> tuple[Tensor, Tensor]:
    """`pad_groups` in plain PyTorch."""
    num_pairs, num_experts = indices_P.shape[0], offsets_E.shape[0]
    counts_E = offsets_E.diff(prepend=offsets_E.new_zeros(1))
    padded_E = ((counts_E + align - 1) // align * align).cumsum(0).to(torch.int32)
    place_Q = torch.arange(num_places(num_pairs, num_experts, align), device=offsets_E.device, dtype=torch.int32)
    if num_pairs == 0:
        return torch.full_like(place_Q, -1), padded_E
    expert_Q = torch.searchsorted(padded_E, place_Q, right=True)
    known_Q = expert_Q.clamp(max=num_experts - 1)
    ends_Q = offsets_E[known_Q]
    pair_Q = place_Q - (padded_E - (counts_E + align - 1) // align * align)[known_Q] + (ends_Q - counts_E[known_Q])
    taken_Q = (expert_Q < num_experts) & (pair_Q < ends_Q)
    rows_Q = indices_P[pair_Q.clamp(0, num_pairs - 1)].to(torch.int32)
    return torch.where(taken_Q, rows_Q, -1).to(torch.int32), padded_E


@operator("quantize_columns")
def quantize_columns(x: Tensor, places_Q: Tensor | None) -> tuple[Tensor, Tensor]:
    """MXFP8 of the transpose of the gathered rows. No autograd.

    Args:
        x: bf16 or fp32 (R, D), or (N, R, D) without places.
        places_Q: row at each place or -1, Q a multiple of 32; None: the rows as they stand, R a multiple of 32.

    Returns:
        values (..., D, Q) in e4m3, scales (..., D, Q / 32) in uint8: a view, those of a block of places side by side.
    """
    if not _on_triton(x):
        return _quantize_reference(gather_places(x, places_Q).transpose(-1, -2))
    outputs = _empty_columns(x, places_Q)
    _launch(x, places_Q, (), outputs)
    return outputs


@register_fake(quantize_columns)
def _empty_columns(x: Tensor, places_Q: Tensor | None) -> tuple[Tensor, Tensor]:
    width, size = x.shape[-1], x.shape[-2] if places_Q is None else places_Q.shape[0]
    _check(x, places_Q, size)
    values = x.new_empty(*x.shape[:-2], width, size, dtype=torch.float8_e4m3fn)
    return values, _empty_scales(values)


@operator("quantize_both")
def quantize_both(x: Tensor, places_Q: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """MXFP8 of the gathered rows, and of their transpose as `quantize_columns` has it; x is read once. No autograd.

    Returns:
        values (..., Q, D), scales (..., Q, ceil(D / 32)), values (..., D, Q), scales (..., D, Q / 32); scales are
        views, those of a block side by side.
    """
    if not _on_triton(x):
        rows = gather_places(x, places_Q)
        return (*_quantize_reference(rows), *_quantize_reference(rows.transpose(-1, -2)))
    outputs = _empty_both(x, places_Q)
    _launch(x, places_Q, outputs[:2], outputs[2:])
    return outputs


@register_fake(quantize_both)
def _empty_both(x: Tensor, places_Q: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    columns, column_scales = _empty_columns(x, places_Q)
    *matrices, width, size = columns.shape
    rows = x.new_empty(*matrices, size, width, dtype=torch.float8_e4m3fn)
    return rows, _empty_scales(rows), columns, column_scales


def _empty_scales(values: Tensor) -> Tensor:
    """Room for scales, those of a block of columns one behind the other.

    A tile has few blocks in a row, and many rows: so its scales go out in long runs. One byte here and there would keep
    the L2 cache busier than all the codes do.
    """
    *matrices, rows, width = values.shape
    return values.new_empty(*matrices, -(-width // BLOCK), rows, dtype=torch.uint8).transpose(-1, -2)


def _quantize_reference(x: Tensor) -> tuple[Tensor, Tensor]:
    values, scales = quantize_reference(x, 1, BLOCK)
    return values, _empty_scales(values).copy_(scales)


def gather_places(x: Tensor, places_Q: Tensor | None) -> Tensor:
    """The rows at each place, zeros where there is none."""
    _check(x, places_Q, x.shape[-2] if places_Q is None else places_Q.shape[0])
    if places_Q is None:
        return x
    if x.shape[0] == 0:
        return x.new_zeros(places_Q.shape[0], x.shape[1])
    return x[places_Q.clamp(min=0)].masked_fill((places_Q < 0)[:, None], 0)


def _check(x: Tensor, places_Q: Tensor | None, size: int) -> None:
    assert places_Q is None or x.dim() == 2, "places index the rows of one matrix"
    if size % BLOCK:
        raise ValueError(f"{size} rows are not whole blocks of {BLOCK}: lay them out with pad_groups(align={BLOCK})")


def _on_triton(x: Tensor) -> bool:
    return x.is_cuda or os.environ.get("TRITON_INTERPRET") == "1"


def _launch(x: Tensor, places_Q: Tensor | None, rows: tuple[Tensor, ...], columns: tuple[Tensor, ...]) -> None:
    values, scales = (out if out.dim() == 3 else out[None] for out in columns)
    x = word_view(x if x.dim() == 3 else x[None])
    num, width, size = values.shape
    if values.numel() == 0:
        return
    row_values, row_scales = (out if out.dim() == 3 else out[None] for out in rows) if rows else (values, scales)
    blocks, groups, warps, together = BOTH_TILE if rows else COLUMNS_TILE
    tiles = triton.cdiv(width, groups * GROUP_COLUMNS) * triton.cdiv(size, blocks * BLOCK)
    constants: dict[str, Any] = {"GATHER": places_Q is not None, "ROWS": bool(rows), "CAST": can_cast(x)}
    constants |= {"BLOCKS": blocks, "GROUPS": groups, "GROUP_COLUMNS": GROUP_COLUMNS}
    constants |= {"TOGETHER": together, "num_warps": warps}
    with torch.cuda.device(x.device) if x.is_cuda else torch.no_grad():
        _gathered_kernel[(tiles, num)](
            *(x, places_Q, row_values.view(torch.uint8), row_scales, values.view(torch.uint8), scales),
            *(size, width, x.stride(0), x.stride(1)),
            **constants,
        )


@triton.jit
def _gathered_kernel(
    x,
    places,
    row_values,
    row_scales,
    values,
    scales,
    size,
    width,
    x_matrix,
    x_row,
    GATHER: tl.constexpr,
    ROWS: tl.constexpr,
    CAST: tl.constexpr,
    BLOCKS: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP_COLUMNS: tl.constexpr,
    TOGETHER: tl.constexpr,
):
    """One program: some places x some columns, read once.

    The tile's dims are (part of a block of places, block, group of columns, place of a part, column of a group). In
    this order Triton deals them out so that a warp has whole blocks, its lanes standing for parts and 16 bytes of a
    row, and a thread has neighbouring places of each of its columns: no block is shared between warps, and codes to be
    transposed move through shared memory in words.
    """
    HELD: tl.constexpr = GROUP_COLUMNS // 8
    tiles, rows_of_tiles = tl.cdiv(width, GROUPS * GROUP_COLUMNS), tl.cdiv(size, BLOCKS * 32)
    first = tl.program_id(0)
    first_place, first_column = tl.swizzle2d(first // tiles, first % tiles, rows_of_tiles, tiles, TOGETHER)
    first_place, first_column = first_place * BLOCKS * 32, first_column * GROUPS * GROUP_COLUMNS
    matrix = tl.program_id(1).to(tl.int64)
    column = GROUP_COLUMNS * tl.arange(0, GROUPS)[:, None, None] + tl.arange(0, GROUP_COLUMNS)[None, None, :]
    # Eight at once: codes of rows are then written from where their words were read to, without an exchange.
    column = tl.max_contiguous((first_column + column)[None, None, :, :, :], [1, 1, 1, 1, 8])
    place = HELD * tl.arange(0, 32 // HELD)[:, None, None] + 32 * tl.arange(0, BLOCKS)[None, :, None]
    place = first_place + place + tl.arange(0, HELD)[None, None, :]
    if GATHER:
        row = tl.load(places + place, mask=place < size, other=-1)
    else:
        row = tl.where(place < size, place, -1)
    place, row = place[:, :, None, :, None], row[:, :, None, :, None]
    at = x + matrix * x_matrix + row.to(tl.int64) * x_row + column
    word = tl.load(at, mask=(row >= 0) & (column < width), other=0)
    # Rows first: so ordered, fewer registers are alive at once.
    if ROWS:
        _store_rows(word, row_values, row_scales, matrix, place, column, first_column, size, width, CAST)
    _store_columns(word, values, scales, matrix, first_place, first_column, size, width, CAST)


@triton.jit
def _store_rows(word, values, scales, matrix, place, column, first_column, size, width, CAST: tl.constexpr):
    """Code the tile in blocks along the rows."""
    BLOCKS: tl.constexpr = word.shape[4] // 32
    words = tl.reshape(word, [word.shape[0], word.shape[1], word.shape[2], word.shape[3], BLOCKS, 32])
    scale = scale_byte(tl.max(absolute(words), axis=5), word.dtype)
    code = tl.reshape(encode(words, scale[:, :, :, :, :, None], CAST), word.shape)
    row = (matrix * size + place).to(tl.int64)
    tl.store(values + row * width + column, code, mask=(place < size) & (column < width))
    block = BLOCKS * tl.arange(0, word.shape[2])[:, None, None] + tl.arange(0, BLOCKS)[None, None, :]
    block = (first_column // 32 + block)[None, None, :, :, :]
    at = scales + (matrix * tl.cdiv(width, 32) + block) * size + place
    tl.store(at, scale.to(tl.uint8), mask=(place < size) & (block * 32 < width))


@triton.jit
def _store_columns(word, values, scales, matrix, first_place, first_column, size, width, CAST: tl.constexpr):
    """Code the tile in blocks along the places and transpose it."""
    BLOCKS: tl.constexpr = word.shape[1]
    TILE_COLUMNS: tl.constexpr = word.shape[2] * word.shape[4]
    # A maximum within the thread, then one over its neighbours.
    scale = scale_byte(tl.max(tl.max(absolute(word), axis=3), axis=0), word.dtype)
    code = encode(_four_rows_together(word), scale[None, :, :, None, :, None, None], CAST)
    code = tl.reshape(tl.permute(code, (2, 4, 1, 0, 3, 5, 6)), [TILE_COLUMNS, BLOCKS * 32])
    column = first_column + tl.arange(0, TILE_COLUMNS)
    place = first_place + tl.arange(0, BLOCKS * 32)[None, :]
    row = (matrix * width + column[:, None]).to(tl.int64)
    tl.store(values + row * size + place, code, mask=(column < width)[:, None] & (place < size))
    scale = tl.reshape(scale.to(tl.uint8), [BLOCKS, TILE_COLUMNS])
    block = first_place // 32 + tl.arange(0, BLOCKS)[:, None]
    at = scales + (matrix * (size // 32) + block) * width + column[None, :]
    tl.store(at, scale, mask=(column < width)[None, :] & (block * 32 < size))


@triton.jit
def _four_rows_together(word):
    """(..., rows, columns) as (..., rows / 4, columns, 2, 2), four rows of a column next to each other in registers.

    Casting packs neighbours: now it packs what stays together, where bytes of four columns would have to be sorted.
    Only `join` sets the order of registers, hence the detour.
    """
    FOURS: tl.constexpr = word.shape[3] // 4
    word = tl.reshape(word, [word.shape[0], word.shape[1], word.shape[2], FOURS, 2, 2, word.shape[4]])
    even, odd = tl.split(tl.permute(word, (0, 1, 2, 3, 6, 4, 5)))
    even_0, even_1 = tl.split(even)
    odd_0, odd_1 = tl.split(odd)
    return tl.join(tl.join(even_0, even_1), tl.join(odd_0, odd_1))


@triton.jit
def _pad_groups_kernel(
    indices, offsets, places, padded, num_experts, size, align, EXPERTS: tl.constexpr, PLACES: tl.constexpr
):
    """One program: some places; each recomputes the few padded offsets."""
    expert = tl.arange(0, EXPERTS)
    known = expert < num_experts
    end = tl.load(offsets + expert, mask=known, other=0).to(tl.int32)
    start = tl.load(offsets + expert - 1, mask=known & (expert > 0), other=0).to(tl.int32)
    room = tl.where(known, (end - start + align - 1) // align * align, 0)
    padded_end = tl.cumsum(room, axis=0)
    if tl.program_id(0) == 0:
        tl.store(padded + expert, padded_end, mask=known)
    place = tl.program_id(0) * PLACES + tl.arange(0, PLACES)
    # Of all experts, one at most has room at this place.
    here = (place[:, None] >= (padded_end - room)[None, :]) & (place[:, None] < padded_end[None, :])
    pair = place[:, None] - (padded_end - room)[None, :] + start[None, :]
    pair = tl.max(tl.where(here & (pair < end[None, :]), pair, -1), axis=1)
    row = tl.load(indices + pair, mask=pair >= 0, other=-1)
    tl.store(places + place, row.to(tl.int32), mask=place < size)
