"""Rows between GPUs that map each other's memory: copy engines move pieces, signals say when.

Each group has two lanes, one for gathers and one for scatters, so that one of each may be under way. A lane is a buffer
in symmetric memory and flags of one word per (channel, rank):

    gather    buffer (O, N * R, X): rank r pushes its shard to its place in everybody's
    scatter   buffer (N, O, R, X): rank r multiplies into place q of its own, and q pulls that

    gather    sender:    wait for the receiver's credit; copy a piece, signal it; next piece; next receiver
              receiver:  wait for a piece's signal, multiply it; ... after the last read, give the credit
    scatter   sender:    wait for the receiver's credit (all of them, if parts lie elsewhere than last time);
                         multiply, signal; next piece; next receiver
              receiver:  wait for a piece's signal, copy it; ... after the last copy, give the credit

Copies between GPUs need no thread blocks, and run on one stream of the group, one behind the other: where a gather and
a scatter are under way, what the gather brings is wanted first. What a scatter signals and waits for has a stream of
its own, since between products or copies it would hold them up (a product of 90 us for 10 to 20, measured). What a
gather brings is read where it arrived, since it came before it was wanted; what a scatter brings goes into the memory
of the result. Of two ranks, products of this rank's own rows are added to that as they are computed, so that nothing is
left to add up behind them; of more, parts are added up in the end.

A signal is one word that the sender turns from 0 to 1 (after its copies, at system scope) and the receiver back:
nothing is ever reset, so a captured graph can replay. The first use of a buffer needs no credit. Waits are bounded by
the device's clock: on expiry the kernel traps, which the host sees as a CUDA error. Nothing uses NVLink multicast.

Buffers grow to the largest need: collectively, because every rank of the group sees the same shapes.
"""

import math
import os
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group  # pyright: ignore

from comms.lane import Handle, Lane, Moment, Streams
from comms.shard_transport import (
    Inbox,
    Messages,
    Outbox,
    Part,
    Transport,
    after,
    cut,
    cut_sum,
    parts_of_sum,
    rows_of,
    split,
    split_by_rank,
    sum_ascending,
)

Runs = list[Tensor]
# The widest that torch knows.
WORD = torch.complex128

DEFAULT_TIMEOUT_SECONDS = 600


class PeerBuffers:
    """Both lanes of a group; see comms/shard_transport.py for what a transport does."""

    def __init__(self, gathers: Lane, scatters: Lane) -> None:
        self.gathers, self.scatters = gathers, scatters

    def gather(self, shard_ORX: Tensor) -> Inbox:
        """See `Transport`."""
        return _BufferInbox(self.gathers, shard_ORX)

    def scatter(self, shape: tuple[int, int, int], like: Tensor, in_one_piece: bool = False) -> Outbox:
        """See `Transport`."""
        return _BufferOutbox(self.scatters, shape, like, in_one_piece)


class _GatherViews(NamedTuple):
    """Of a gather's buffers: where pieces of this rank's shard go, and where pieces of the others' come."""

    # By rank and piece, in runs of memory.
    theirs: dict[int, list[Runs]]
    # All of it, among the others' rows.
    own: Tensor
    blocks: dict[int, list[tuple[slice, Tensor]]]


class _BufferInbox:
    def __init__(self, lane: Lane, shard_ORX: Tensor) -> None:
        outer, self.num_rows, width = shard_ORX.shape
        self.lane, self.shard, self.pieces = lane, shard_ORX, cut(self.num_rows)
        self.shape = outer, lane.size * self.num_rows, width
        # Whose pieces have come.
        self.arrived: set[tuple[int, int]] = set()
        lane.reserve(math.prod(self.shape) * shard_ORX.element_size())
        key = "gather", self.shape, shard_ORX.dtype, len(self.pieces)
        self.views = lane.keep(key, lambda: self._views(shard_ORX.dtype))
        self.mine = split(shard_ORX, [(slice(0, outer), rows) for rows in self.pieces])
        runs = [runs_of(piece) for piece in self.mine]
        with lane.on(lane.streams.copies, lane.now()):
            # The rank before this one wants this shard first.
            for to in reversed(after(lane.rank, lane.size)):
                lane.take_credit(to)
                for number, place in enumerate(self.views.theirs[to]):
                    copy_runs(runs[number], place)
                    lane.signal_piece(to, number)
            self.sent = lane.now()

    def _views(self, dtype: torch.dtype) -> _GatherViews:
        lane, others = self.lane, after(self.lane.rank, self.lane.size)

        def rows(rank: int, piece: slice) -> slice:
            return rows_of(rank, self.num_rows, piece)

        theirs = {to: lane.view(to, self.shape, dtype) for to in others}
        buffer, everything = lane.view(lane.rank, self.shape, dtype), slice(0, self.num_rows)
        return _GatherViews(
            {to: [runs_of(view[:, rows(lane.rank, piece)]) for piece in self.pieces] for to, view in theirs.items()},
            buffer[:, rows(lane.rank, everything)],
            {
                source: [(rows(source, piece), buffer[:, rows(source, piece)]) for piece in self.pieces]
                for source in others
            },
        )

    def blocks(self) -> Iterator[tuple[slice, Tensor]]:
        for piece, block in zip(self.pieces, self.mine, strict=True):
            yield rows_of(self.lane.rank, self.num_rows, piece), block
        for source, blocks in self.views.blocks.items():
            for number, block in enumerate(blocks):
                self._wait(source, number)
                yield block

    def whole(self) -> Tensor:
        # Not beside products: such a copy takes their thread blocks.
        copy_rows(self.shard, self.views.own)
        self._wait_all()
        return self.lane.view(self.lane.rank, self.shape, self.shard.dtype)

    def close(self) -> None:
        self._wait_all()
        self.lane.give_credits(self.lane.now())
        self.lane.wait_for(self.sent)

    def _wait(self, source: int, number: int) -> None:
        if (source, number) not in self.arrived:
            self.lane.wait_piece(source, number)
            self.arrived.add((source, number))

    def _wait_all(self) -> None:
        for source in after(self.lane.rank, self.lane.size):
            for number in range(len(self.pieces)):
                self._wait(source, number)


class _ScatterViews(NamedTuple):
    """Of a scatter's buffers, by rank and piece: what this rank computes for it, and where it has computed for this."""

    spaces: list[list[Tensor]]
    theirs: dict[int, list[Runs]]


class _BufferOutbox:
    def __init__(self, lane: Lane, shape: tuple[int, int, int], like: Tensor, in_one_piece: bool) -> None:
        outer, num_rows, width = shape
        self.lane, self.dtype = lane, like.dtype
        # Of every rank's part.
        self.shape = lane.size, outer, num_rows // lane.size, width
        self.pieces = cut_sum(outer, num_rows // lane.size, in_one_piece)
        lane.reserve(math.prod(self.shape) * like.element_size())
        self.views = lane.keep(("scatter", self.shape, self.dtype, len(self.pieces)), self._views)
        # By rank, this one's own among them; of two ranks, the one part that is both the other's and the sum.
        self.adds = lane.size == 2
        self.found = like.new_empty(1 if self.adds else lane.size, *self.shape[1:])
        self.sums = [split(part, self.pieces) for part in self.found.unbind()]
        # When a receiver's part may be written to, and when pieces of the others' parts have come.
        self.free: dict[int, Moment] = {}
        self.arrived: list[Moment] = []
        with lane.on(lane.streams.signals, lane.now()):
            for rank in after(lane.rank, lane.size):
                lane.take_credit(rank)
                self.free[rank] = lane.now()
            if lane.layout != (self.shape, self.dtype):
                # Another part was where a rank's is now: whoever reads that must be through, too.
                self.free = dict.fromkeys(self.free, lane.now())
                lane.layout = self.shape, self.dtype

    def _views(self) -> _ScatterViews:
        lane = self.lane
        theirs = {
            source: lane.view(source, self.shape, self.dtype)[lane.rank] for source in after(lane.rank, lane.size)
        }
        return _ScatterViews(
            [split(part, self.pieces) for part in lane.view(lane.rank, self.shape, self.dtype)],
            {source: [runs_of(piece) for piece in split(part, self.pieces)] for source, part in theirs.items()},
        )

    def parts(self) -> tuple[list[Part], list[Part]]:
        return parts_of_sum(self.lane.rank, self.lane.size, len(self.pieces))

    def split(self, x_OCX: Tensor) -> list[list[Tensor]]:
        return split_by_rank(x_OCX, self.lane.size, self.pieces)

    def space(self, part: Part) -> tuple[Tensor, bool]:
        rank, number = part
        if rank == self.lane.rank:
            if self.adds:
                self.lane.wait_for(self.arrived[number])
            return self._sum_of(rank, number), self.adds
        if number == 0:
            self.lane.wait_for(self.free[rank])
        return self.views.spaces[rank][number], False

    def send(self, part: Part) -> None:
        rank, number = part
        if rank == self.lane.rank:
            return
        lane = self.lane
        # As many ranks before this one as `rank` is after it: that one has computed for this one meanwhile.
        source = (2 * lane.rank - rank) % lane.size
        with lane.on(lane.streams.signals, lane.now()):
            lane.signal_piece(rank, number)
            lane.wait_piece(source, number)
            told = lane.now()
        with lane.on(lane.streams.copies, told):
            copy_runs(self.views.theirs[source][number], runs_of(self._sum_of(source, number)))
            self.arrived.append(lane.now())

    def total(self) -> Tensor:
        self.lane.wait_for(self.arrived[-1])
        return self.found[0] if self.adds else sum_ascending(self.found)

    def close(self) -> None:
        self.lane.give_credits(self.arrived[-1] if self.arrived else self.lane.now())

    def _sum_of(self, rank: int, number: int) -> Tensor:
        return self.sums[0 if self.adds else rank][number]


def runs_of(x_ORX: Tensor) -> Runs:
    """Runs of memory, which copy engines move where a kernel would move the whole."""
    return [x_ORX] if x_ORX.is_contiguous() else list(x_ORX.unbind())


def copy_runs(source: Runs, target: Runs) -> None:
    """Run by run; what is one run on one side may be several on the other, one for each sequence."""
    if len(source) < len(target):
        source = list(source[0].unbind())
    elif len(target) < len(source):
        target = list(target[0].unbind())
    for run, place in zip(source, target, strict=True):
        _copy(run, place)


def copy_rows(source_ORX: Tensor, target_ORX: Tensor) -> None:
    """By this GPU's thread blocks, in one launch if it can be: run by run takes a third longer (four of 17 MB)."""
    source, target = _in_words(source_ORX), _in_words(target_ORX)
    if source is None or target is None:
        copy_runs(runs_of(source_ORX), runs_of(target_ORX))
    else:
        _copy(source, target)


def _in_words(x: Tensor) -> Tensor | None:
    """The same memory as words of 16 bytes, which a thread moves at once; None: it does not divide into them."""
    places = [place * x.element_size() for place in (*x.stride()[:-1], x.storage_offset(), x.shape[-1])]
    # Memory that torch has not allocated may begin anywhere.
    places.append(x.data_ptr())
    return x.view(WORD) if x.stride(-1) == 1 and not any(place % WORD.itemsize for place in places) else None


def _copy(source: Tensor, target: Tensor) -> None:
    target.copy_(source)


# ---- of a process group

_BUFFERS: dict[str, PeerBuffers] = {}
_TIMEOUTS: dict[str, float] = {}


def set_timeout(group_name: str, timeout_seconds: float) -> None:
    """How long a wait for a peer of this group may last. Before its first use."""
    _TIMEOUTS[group_name] = timeout_seconds


def buffers_of(group: dist.ProcessGroup, device: torch.device) -> PeerBuffers:
    """The lanes of a group of GPUs, made at first use. Collective then."""
    name = group.group_name
    if name not in _BUFFERS:
        timeout = _TIMEOUTS.get(name, DEFAULT_TIMEOUT_SECONDS)
        streams = Streams(*(torch.cuda.Stream(device, priority=-1) for _ in Streams._fields))

        def lane() -> Lane:
            return Lane(group.rank(), group.size(), lambda size: _allocate(group, device, size), streams, timeout)

        _BUFFERS[name] = PeerBuffers(lane(), lane())
    return _BUFFERS[name]


def transport_of(x: Tensor, group_name: str) -> Transport:
    """How rows of x travel in a group: by buffers between GPUs, by messages on CPUs."""
    group: dist.ProcessGroup = _resolve_process_group(group_name)  # pyright: ignore
    return buffers_of(group, x.device) if x.is_cuda else Messages(group)


def forget_buffers() -> None:
    """Give up the buffers of every group, before the groups end. Nothing may be under way."""
    _BUFFERS.clear()
    _TIMEOUTS.clear()


def _allocate(group: dist.ProcessGroup, device: torch.device, num_bytes: int) -> Handle:
    import torch.distributed._symmetric_memory as symmetric
    from torch._C._distributed_c10d import _SymmetricMemory  # pyright: ignore[reportPrivateUsage]

    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError("a captured graph cannot make room for larger shards: run one step of this size before")
    # Setting multicast up can fail where the rest works.
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    if symmetric.get_backend(device) != "CUDA":
        symmetric.set_backend("CUDA")
    # Nobody still reads or writes the buffer that this one replaces.
    torch.cuda.synchronize(device)
    dist.barrier(group)  # pyright: ignore[reportUnknownMemberType]
    buffer = _SymmetricMemory.empty_strided_p2p((num_bytes,), (1,), torch.uint8, device)
    handle = symmetric.rendezvous(buffer, group.group_name)
    torch.cuda.synchronize(device)
    dist.barrier(group)  # pyright: ignore[reportUnknownMemberType]
    return _Mapped(buffer, handle)


class _Mapped:
    """A handle that keeps its buffer alive."""

    def __init__(self, buffer: Tensor, handle: Any) -> None:
        self.buffer, self.handle = buffer, handle

    def get_buffer(self, rank: int, sizes: Any, dtype: torch.dtype) -> Tensor:
        return self.handle.get_buffer(rank, sizes, dtype)

    def put_signal(self, dst_rank: int, channel: int = 0, timeout_ms: int = 0) -> None:
        self.handle.put_signal(dst_rank, channel, timeout_ms)

    def wait_signal(self, src_rank: int, channel: int = 0, timeout_ms: int = 0) -> None:
        self.handle.wait_signal(src_rank, channel, timeout_ms)
