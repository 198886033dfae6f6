"""Moving pieces of tensors between this rank's shards and Hugging Face files. Which pieces: `hf_names`.

A shard is a box of its tensor, a piece a part of it. Where the two meet is a box of the file's tensor again (with
steps, where gate and up alternate); a few rows of it are moved at a time.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, groupby
from typing import NamedTuple

import torch
from torch import Tensor

from trainer.hf_names import Dim, Piece
from trainer.safetensors_stream import TensorWriter

Range = tuple[int, int]
Read = Callable[[str, Sequence[Range]], Tensor]
# Of one tensor, so much is in flight at most (or one row, where that is more).
CHUNK_BYTES = 1 << 28


class Part(NamedTuple):
    """This rank's box of a tensor: where it begins, and its values."""

    offset: tuple[int, ...]
    values: Tensor


class _Meeting(NamedTuple):
    """Where a piece and a part meet: of the part, a view with the piece's free dims; and its ranges in our tensor."""

    piece: Piece
    values: Tensor
    ranges: tuple[Range, ...]


def read_part(part: Part, pieces: Iterable[Piece], read: Read) -> None:
    """Fill a part from the file: each value of it that a piece covers."""
    for piece, values, ranges in _meetings(part, pieces):
        theirs = [_range(dim, ranges) for dim in piece.dims]
        block = read(piece.theirs, [(first, first + step * (count - 1) + 1) for first, count, step in theirs])
        block = block[tuple(slice(None, None, step) for _, _, step in theirs)]
        values.copy_(_in_our_order(block, piece.dims))


def write_part(part: Part, pieces: Iterable[Piece], writer: TensorWriter) -> None:
    """Write a part into the file's tensors; gate and up that alternate there are woven together first."""
    for _, group in groupby(pieces, key=lambda piece: (piece.theirs, piece.index[:1])):
        found = [list(_meetings(part, [piece])) for piece in group]
        if len(found) == 2 and all(found) and found[0][0].piece.dims[-1].step == 2:
            for gate, up in zip(*found, strict=True):
                both = torch.stack([_in_their_order(meeting) for meeting in (gate, up)], dim=-1)
                writer.write(gate.piece.theirs, _starts(gate), both.flatten(-2))
            continue
        for meeting in chain(*found):
            _write_alone(meeting, writer)


def _write_alone(meeting: _Meeting, writer: TensorWriter) -> None:
    values, starts, name = _in_their_order(meeting), _starts(meeting), meeting.piece.theirs
    step = meeting.piece.dims[-1].step if meeting.piece.dims else 1
    if step == 1:
        writer.write(name, starts, values)
        return
    # Another rank has what lies between: column by column, and slow. Only where two ranks share one expert.
    for column in range(values.shape[-1]):
        writer.write(name, [*starts[:-1], starts[-1] + step * column], values[..., column : column + 1])


def _starts(meeting: _Meeting) -> list[int]:
    return [_range(dim, meeting.ranges)[0] for dim in meeting.piece.dims]


def _meetings(part: Part, pieces: Iterable[Piece]) -> Iterator[_Meeting]:
    whole = [(lo, lo + size) for lo, size in zip(part.offset, part.values.shape, strict=True)]
    if part.values.numel() == 0:
        return
    for piece in pieces:
        lead = len(piece.index)
        if any(not lo <= i < hi for i, (lo, hi) in zip(piece.index, whole, strict=False)):
            continue
        inside = tuple(i - lo for i, (lo, _) in zip(piece.index, whole, strict=False))
        values, ranges = part.values[inside] if inside else part.values, tuple(whole[lead:])
        yield from _chunks(piece, values, ranges)


def _chunks(piece: Piece, values: Tensor, ranges: tuple[Range, ...]) -> Iterator[_Meeting]:
    """A few rows (of our first free dim) at a time."""
    if not ranges or values.nbytes <= CHUNK_BYTES:
        yield _Meeting(piece, values, ranges)
        return
    (lo, hi), *rest = ranges
    rows = max(1, CHUNK_BYTES * (hi - lo) // values.nbytes)
    for start in range(lo, hi, rows):
        stop = min(start + rows, hi)
        yield _Meeting(piece, values[start - lo : stop - lo], ((start, stop), *rest))


def _range(dim: Dim, ranges: Sequence[Range]) -> tuple[int, int, int]:
    """First, count and step of the file's indices along one of its dims."""
    if dim.ours is None:
        return dim.start, 1, 1
    lo, hi = ranges[dim.ours]
    return dim.start + dim.step * lo, hi - lo, dim.step


def _in_our_order(block: Tensor, dims: Sequence[Dim]) -> Tensor:
    constant = [place for place, dim in enumerate(dims) if dim.ours is None]
    order = [dim.ours for dim in dims if dim.ours is not None]
    free = block.flatten(0, len(constant)) if constant else block
    return free.permute([order.index(place) for place in range(len(order))])


def _in_their_order(meeting: _Meeting) -> Tensor:
    order = [dim.ours for dim in meeting.piece.dims if dim.ours is not None]
    # Constant dims come first in every known format.
    return meeting.values.permute(order)[(None,) * (len(meeting.piece.dims) - len(order))]
