"""How shards of activations travel between the ranks of a group while products of others are computed.

    messages   send and receive, piece by piece: processes on CPUs
    buffers    copy engines move pieces between symmetric memory of peers (comms/peer_buffers.py): GPUs

Both have the same two ends. An `Inbox` brings every rank's shard: this rank's own first, then those of the ranks after
it. An `Outbox` takes a product for every rank: first those of the ranks after this one, its own last. Either way the
first product runs while rows travel. What arrives is put in its place by rank, so results do not depend on that order.

Shapes: O whatever comes before the split dim, R rows of one rank's shard of it, N ranks, X width.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from comms.kernels.gather_sum import gather_sum

# A shard is cut into pieces of about so many rows, so that the first arrive while the last are still computed; those of
# a sum are smaller, because the last one is added up when nothing is left to compute. Of a sum all rows count, of a
# gather those of one sequence: it has its own shard to multiply first, for longer than the first piece travels.
PIECE_ROWS, SUM_PIECE_ROWS = 4096, 2048
MAX_PIECES = 4
# Of (O, R, X).
Piece = tuple[slice, slice]


class Part(NamedTuple):
    """What is multiplied and sent at once: whose rows, and which piece of them."""

    rank: int
    number: int


class Inbox(Protocol):
    """Every rank's shard, on its way here."""

    def blocks(self) -> Iterator[tuple[slice, Tensor]]:
        """(rows, (O, rows, X)): which rows of the whole, and what they are, as they come."""
        ...

    def whole(self) -> Tensor:
        """(O, N * R, X), contiguous; another's memory, only good until `close`."""
        ...

    def close(self) -> None:
        """Nothing that came is read any more."""
        ...


class Outbox(Protocol):
    """A part of the sum for every rank, on its way there."""

    def parts(self) -> tuple[list[Part], list[Part]]:
        """What products are wanted of, in the order to compute them in: for the other ranks, and then for this one.

        Between the two there is time for what is not sent, while parts of the others come.
        """
        ...

    def split(self, x_OCX: Tensor) -> list[list[Tensor]]:
        """Every rank's pieces of rows of the whole."""
        ...

    def space(self, part: Part) -> tuple[Tensor, bool]:
        """Of the shape of that piece of a product: to be written, or, if True, to be added to."""
        ...

    def send(self, part: Part) -> None:
        """What `space` gave for it is written."""
        ...

    def total(self) -> Tensor:
        """(O, R, X): of this rank's rows, the sum of what each rank computed.

        By `sum_ascending`; of two ranks, this one's part may be added to the other's without being rounded before.
        """
        ...

    def close(self) -> None:
        """Nothing that came is read any more."""
        ...


class Transport(Protocol):
    """One way to move rows between the ranks of a group. All ranks open and close boxes in the same order."""

    def gather(self, shard_ORX: Tensor) -> Inbox:
        """Send this rank's shard to everyone."""
        ...

    def scatter(self, shape: tuple[int, int, int], like: Tensor, in_one_piece: bool = False) -> Outbox:
        """Take parts of (O, N * R, X) for everyone, in dtype and on the device of `like`.

        Args:
            in_one_piece: every rank's part is one piece, since something else is computed while it travels.
        """
        ...


def as_rows(x: Tensor, dim: int) -> Tensor:
    """(O, rows, X): what comes before the split dim, the dim with what follows it, and the last one."""
    return x.reshape(math.prod(x.shape[:dim]), -1, x.shape[-1])


def scattered_shape(shape: Sequence[int], dim: int, num_ranks: int) -> list[int]:
    """Each rank's part of a sum of that shape.

    Raises:
        ValueError: `dim` does not divide by the number of ranks.
    """
    if shape[dim] % num_ranks:
        raise ValueError(f"dim {dim} of {tuple(shape)} cannot be scattered over {num_ranks} ranks: it does not divide")
    return [*shape[:dim], shape[dim] // num_ranks, *shape[dim + 1 :]]


def cut(num_rows: int) -> list[slice]:
    """Pieces of a shard of so many rows, as equal as can be."""
    return _cut(num_rows, min(-(-num_rows // PIECE_ROWS), MAX_PIECES))


def cut_sum(outer: int, num_rows: int, in_one_piece: bool = False) -> list[Piece]:
    """Pieces of a rank's rows of a sum, (O, R, X): whole sequences as long as there are some, which lie in one run."""
    if in_one_piece:
        return [(slice(0, outer), slice(0, num_rows))]
    count = max(min(-(-outer * num_rows // SUM_PIECE_ROWS), MAX_PIECES), 1)
    # Of 6 sequences three pieces of two, and not four of one or two; of 5 four all the same.
    even = max(number for number in range(1, count + 1) if outer % number == 0) if outer else 1
    by_outer = _cut(outer, even if even > count // 2 or outer < count else count)
    return list(itertools.product(by_outer, _cut(num_rows, count // len(by_outer))))


def _cut(length: int, count: int) -> list[slice]:
    count = max(min(count, length), 1)
    bounds = [length * piece // count for piece in range(count + 1)]
    return [slice(first, last) for first, last in itertools.pairwise(bounds)]


def parts_of_sum(rank: int, size: int, num_pieces: int) -> tuple[list[Part], list[Part]]:
    """For every rank its pieces: first for those after this one, then this one's own."""
    numbers = range(num_pieces)
    return [Part(to, number) for to in after(rank, size) for number in numbers], [Part(rank, n) for n in numbers]


def split(x_ORX: Tensor, pieces: list[Piece]) -> list[Tensor]:
    """The pieces, by as few calls as can be: each costs the host a good part of a launch."""
    if len(pieces) == 1:
        return [x_ORX]
    for dim in (0, 1):
        if all(piece[1 - dim] == slice(0, x_ORX.shape[1 - dim]) for piece in pieces):
            return list(torch.split(x_ORX, [piece[dim].stop - piece[dim].start for piece in pieces], dim))
    return [x_ORX[piece] for piece in pieces]


def split_by_rank(x_OCX: Tensor, size: int, pieces: list[Piece]) -> list[list[Tensor]]:
    """Every rank's pieces of rows of the whole."""
    return [split(x_ORX, pieces) for x_ORX in x_OCX.chunk(size, 1)]


def rows_of(rank: int, num_rows: int, piece: slice) -> slice:
    """A piece of a rank's shard as rows of the whole."""
    return slice(rank * num_rows + piece.start, rank * num_rows + piece.stop)


def sum_ascending(parts_NORX: Tensor) -> Tensor:
    """(O, R, X): the sum over ranks in fp32 (fp64 for fp64), in ascending order, rounded once."""
    size, outer, num_rows, width = parts_NORX.shape
    if size == 2:
        # Two bf16 are added in fp32 and rounded once.
        return parts_NORX[0] + parts_NORX[1]
    # What a graph captures is computed when it replays: nothing to keep.
    capturing = parts_NORX.is_cuda and torch.cuda.is_current_stream_capturing()
    slots_of_parts = _slots_of_parts.__wrapped__ if capturing else _slots_of_parts
    slots_SN = slots_of_parts(size, outer * num_rows, parts_NORX.device)
    return gather_sum(parts_NORX.reshape(-1, width), slots_SN).view(outer, num_rows, width)


@lru_cache(maxsize=16)
def _slots_of_parts(size: int, rows: int, device: torch.device) -> Tensor:
    """(rows, N): where the parts of each row are. Kept: a few numbers of bytes per row, and four launches per sum."""
    first = torch.arange(size, device=device) * rows
    return torch.arange(rows, device=device)[:, None] + first


def after(rank: int, size: int) -> list[int]:
    """The other ranks, from the next one on."""
    return [(rank + step) % size for step in range(1, size)]


# ---- messages


class Messages:
    """Point-to-point messages of a process group: whatever was sent is kept until `close`."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.rank, self.size = group, group.rank(), group.size()

    def gather(self, shard_ORX: Tensor) -> Inbox:
        """See `Transport`."""
        return _MessageInbox(self, shard_ORX)

    def scatter(self, shape: tuple[int, int, int], like: Tensor, in_one_piece: bool = False) -> Outbox:
        """See `Transport`."""
        return _MessageOutbox(self, shape, like, in_one_piece)

    def isend(self, x: Tensor, to: int, tag: int) -> dist.Work:
        """To a rank of the group."""
        work = dist.isend(x, group=self.group, group_dst=to, tag=tag)
        assert work is not None
        return work

    def irecv(self, x: Tensor, source: int, tag: int) -> dist.Work:
        """From a rank of the group."""
        work = dist.irecv(x, group=self.group, group_src=source, tag=tag)
        assert work is not None
        return work


# Of the first piece of each kind, so that a gather and a scatter may be under way together.
_GATHER_TAG, _SCATTER_TAG = 0, MAX_PIECES


class _MessageInbox:
    def __init__(self, via: Messages, shard_ORX: Tensor) -> None:
        self.num_rows, self.rank = shard_ORX.shape[1], via.rank
        self.pieces = cut(self.num_rows)
        self.own = [shard_ORX[:, piece].contiguous() for piece in self.pieces]
        self.sent = [
            via.isend(part, to, _GATHER_TAG + number)
            for to in reversed(after(via.rank, via.size))
            for number, part in enumerate(self.own)
        ]
        self.found: dict[int, list[Tensor]] = {via.rank: self.own}
        # gloo counts messages: one that has come must not be waited for again.
        self.coming: dict[tuple[int, int], dist.Work] = {}
        for source in after(via.rank, via.size):
            self.found[source] = [torch.empty_like(part) for part in self.own]
            for number, part in enumerate(self.found[source]):
                self.coming[source, number] = via.irecv(part, source, _GATHER_TAG + number)

    def blocks(self) -> Iterator[tuple[slice, Tensor]]:
        for rank, parts in self.found.items():
            for number, part in enumerate(parts):
                if (rank, number) in self.coming:
                    self.coming.pop((rank, number)).wait()
                yield rows_of(rank, self.num_rows, self.pieces[number]), part

    def whole(self) -> Tensor:
        parts = {rows.start: part for rows, part in self.blocks()}
        return torch.cat([parts[start] for start in sorted(parts)], dim=1)

    def close(self) -> None:
        for work in self.sent:
            work.wait()


class _MessageOutbox:
    def __init__(self, via: Messages, shape: tuple[int, int, int], like: Tensor, in_one_piece: bool) -> None:
        outer, num_rows, width = shape
        self.via = via
        self.found = like.new_empty(via.size, outer, num_rows // via.size, width)
        self.pieces = cut_sum(outer, num_rows // via.size, in_one_piece)
        self.spaces: dict[Part, Tensor] = {}
        self.sent: list[dist.Work] = []
        self.coming: list[tuple[dist.Work, Tensor, Tensor]] = []
        for source in after(via.rank, via.size):
            for number, piece in enumerate(self.pieces):
                place = self.found[source][piece]
                part = torch.empty_like(place, memory_format=torch.contiguous_format)
                self.coming.append((via.irecv(part, source, _SCATTER_TAG + number), part, place))

    def parts(self) -> tuple[list[Part], list[Part]]:
        return parts_of_sum(self.via.rank, self.via.size, len(self.pieces))

    def split(self, x_OCX: Tensor) -> list[list[Tensor]]:
        return split_by_rank(x_OCX, self.via.size, self.pieces)

    def space(self, part: Part) -> tuple[Tensor, bool]:
        place = self.found[part.rank][self.pieces[part.number]]
        if part.rank == self.via.rank:
            return place, False
        self.spaces[part] = torch.empty_like(place, memory_format=torch.contiguous_format)
        return self.spaces[part], False

    def send(self, part: Part) -> None:
        if part.rank != self.via.rank:
            self.sent.append(self.via.isend(self.spaces[part], part.rank, _SCATTER_TAG + part.number))

    def total(self) -> Tensor:
        for work, part, place in self.coming:
            work.wait()
            place.copy_(part)
        return sum_ascending(self.found)

    def close(self) -> None:
        for work in self.sent:
            work.wait()
