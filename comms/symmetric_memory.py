"""Memory that every rank of a group maps, and who may write where: the arena of one exchange.

An arena is one allocation per rank, alike on all of them (bytes, from its start):

    flags     int64: per channel those of comms/kernels/flags.py; then one word that says "failed"
    table     int32 (N, C, 2N): rank m's row says how many rows, then items, each chunk of tokens has for each rank
    rows      what arrives by dispatch: row_bound rows, and their side words
    returns   what comes back by combine: return_bound rows, and their side words

It is a stop on the way and belongs to nobody for long: takes copy rows out of it (or add them up), so one arena serves
every layer and micro-batch, and no operator returns memory that another will write. `row_bound` bounds what a rank may
receive in one dispatch: writes beyond it do not happen, and an overflow is noted on the device.

`create_exchange` makes the arena of a process group on GPUs that can map each other's memory; `simulated_exchanges`
makes those of several ranks in one process, for the kernels' tests. The rest of the program knows an exchange by its
name, as it does process groups: operators take names, not objects.
"""

import math
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from comms.kernels.flags import EXPIRED, NO_ERROR, NUM_CHANNELS, channel_words
from comms.saved_arena import SavedArena

# Regions begin at multiples of this many bytes.
REGION_ALIGNMENT = 256
# A flag keeps its tag in 16 bits.
MAX_TAG = 2**16 - 1
# Pieces that one rank's rows for another are cut into, at most: each has a flag of its own.
MAX_PIECES = 4096


class NoRoomError(RuntimeError):
    """A dispatch brought more than there was room for; the message names the setting that makes more."""


@dataclass(frozen=True)
class ArenaLayout:
    """Sizes of an arena and where its regions begin, in bytes."""

    num_ranks: int
    # Rows that one dispatch may bring to a rank, and that may come back to it.
    row_bound: int
    return_bound: int
    # The widest row and the widest side columns, in bytes.
    row_bytes: int
    side_bytes: int
    max_pieces: int = MAX_PIECES
    # Chunks of tokens that one plan can tell apart.
    max_chunks: int = 1

    @property
    def failed_at(self) -> int:
        """int64 word that is set once a wait has failed."""
        return NUM_CHANNELS * channel_words(self.num_ranks, self.max_pieces)

    @property
    def table_at(self) -> int:
        """The table of counts."""
        return _aligned(8 * (self.failed_at + 1))

    @property
    def rows_at(self) -> int:
        """Rows of dispatch."""
        return self.table_at + _aligned(8 * self.max_chunks * self.num_ranks**2)

    @property
    def side_at(self) -> int:
        """Side words of dispatch."""
        return self.rows_at + _aligned(self.row_bound * self.row_bytes)

    @property
    def returns_at(self) -> int:
        """Rows of combine."""
        return self.side_at + _aligned(self.row_bound * self.side_bytes)

    @property
    def return_side_at(self) -> int:
        """Side words of combine."""
        return self.returns_at + _aligned(self.return_bound * self.row_bytes)

    @property
    def num_bytes(self) -> int:
        """The whole arena."""
        return self.return_side_at + _aligned(self.return_bound * self.side_bytes)

    def flags_at(self, channel: int) -> int:
        """First int64 word of a channel's flags."""
        return channel * channel_words(self.num_ranks, self.max_pieces)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // REGION_ALIGNMENT) * REGION_ALIGNMENT


def plan_layout(
    num_ranks: int,
    max_tokens: int,
    max_copies: int,
    row_bytes: int,
    side_bytes: int,
    capacity: float | None = None,
    max_chunks: int = 1,
) -> ArenaLayout:
    """The arena for dispatches of up to `max_tokens` tokens per rank, each sent to up to `max_copies` ranks.

    Args:
        row_bytes: the widest row; a multiple of 16.
        side_bytes: the widest side columns; a multiple of 4.
        capacity: rows received per own token; None: every rank's tokens may come.
        max_chunks: chunks of tokens that one plan can tell apart.

    Raises:
        ValueError: rows that cannot be moved 16 bytes at a time.
    """
    if row_bytes % 16:
        raise ValueError(
            f"comms.backend=symm_mem moves rows of a multiple of 16 bytes, not {row_bytes}: make model.dim a multiple "
            "of 8, or set comms.backend=collective"
        )
    assert side_bytes % 4 == 0, side_bytes
    worst = num_ranks * max_tokens
    row_bound = worst if capacity is None else min(worst, room_for(capacity, max_tokens))
    return_bound = max_tokens * min(num_ranks, max_copies)
    return ArenaLayout(num_ranks, row_bound, return_bound, row_bytes, side_bytes, max_chunks=max_chunks)


def room_for(multiple: float, count: int) -> int:
    """The next whole number to `multiple` times `count`, not raised by binary rounding."""
    return -(-int(multiple * count * 2**20) // 2**20)


@dataclass(frozen=True)
class Exchange:
    """One rank's end of the exchange between the ranks of a group."""

    name: str
    layout: ArenaLayout
    rank: int
    # Number in the whole run of each rank of the group, for messages.
    global_ranks: tuple[int, ...]
    max_tokens: int
    # uint8, this rank's own; other ranks write into it.
    arena: Tensor = field(repr=False)
    # int64 (N,): where each rank's arena is mapped here.
    pointers: Tensor = field(repr=False)
    # int64 (1,): what operators declare that they change, so that none is dropped, reused or reordered.
    state: Tensor = field(repr=False)
    # int64 (8,) in memory of the host that the device can write: code, tag, epoch, peer, flag seen.
    errors: Tensor = field(repr=False)
    # int32 (6,): greatest need of rows beyond the bound, the bound, tag; the same of items.
    overflow: Tensor = field(repr=False)
    # How long a wait may last: nanoseconds on a device, polls under the interpreter.
    limit: int
    # Programs that put rows, and bytes that are signalled at once, alike on every rank; None: chosen by size.
    num_ctas: int | None = None
    piece_bytes: int | None = None
    # Tests only: nanoseconds that a put may linger before a piece, and again before its signal.
    jitter: int = 0
    # Items that a balanced load brings per own token: what their bound is a multiple of, for messages.
    items_per_token: int = 1
    # Says what a tag stands for.
    describe_tag: Callable[[int], str] = str
    # What travels beside other work is launched here; None on the CPU, where all is done in order.
    stream: torch.cuda.Stream | None = field(default=None, repr=False)
    # Beginnings and ends of what others waited for on the device; None: nobody measures.
    waits: list[tuple[torch.Event, torch.Event]] | None = field(default=None, repr=False)
    # What is kept for backward of all layers and micro-batches; None: tensors of their own.
    saved: SavedArena | None = None
    # The dispatch that was sent before the operator that takes it, if any (comms/beside.py).
    departed: list[Any] = field(default_factory=list[Any], repr=False)
    # Keeps the mapping alive.
    handle: object = field(default=None, repr=False)

    @property
    def num_ranks(self) -> int:
        """Ranks of the group."""
        return self.layout.num_ranks

    @property
    def has_clock(self) -> bool:
        """Whether waits are measured by the device's clock."""
        return self.arena.is_cuda

    def check(self) -> None:
        """Look, without waiting for the device, whether a wait has failed so far.

        Raises:
            RuntimeError: naming the peer, what was waited for, and the epoch.
        """
        numbers: list[int] = self.errors.tolist()  # pyright: ignore
        code, tag, epoch, peer, seen, *_ = numbers
        if code == NO_ERROR:
            return
        who = f"rank {self.global_ranks[self.rank]} waited for rank {self.global_ranks[peer]}"
        what = f"{self.describe_tag(tag)} (exchange {self.name}, epoch {epoch})"
        if code == EXPIRED:
            limit = f"{self.limit / 1e9:g} s" if self.has_clock else f"{self.limit} polls"
            raise RuntimeError(
                f"{who} in {what} and gave up after {limit}: it came as far as epoch {seen >> 16}. It has stopped, is "
                "in another part of the program, or is slower than parallel.timeout_seconds allows."
            )
        raise RuntimeError(
            f"{who} in {what}, and that rank was in {self.describe_tag(seen & MAX_TAG)}, epoch {seen >> 16}: the ranks "
            "do not run the same layers in the same order."
        )

    def check_overflow(self) -> None:
        """Ask the device whether a dispatch brought more than there was room for. Waits for the device.

        Raises:
            NoRoomError: with the layer, the need and the setting.
        """
        numbers: list[int] = self.overflow.tolist()  # pyright: ignore
        rows, row_bound, row_tag, items, item_bound, item_tag = numbers
        if rows:
            raise NoRoomError(
                f"{self.describe_tag(row_tag)}: {rows} rows came to rank {self.global_ranks[self.rank]}, which has "
                f"room for {row_bound}: raise comms.capacity to {_raised(rows, self.max_tokens)} or more, or set it to "
                "null"
            )
        if items:
            least = _raised(items, self.max_tokens * self.items_per_token)
            raise NoRoomError(
                f"{self.describe_tag(item_tag)}: {items} pairs fell to rank {self.global_ranks[self.rank]}, which has "
                f"room for {item_bound}: raise model.moe.pair_capacity to {least} or more, or set it to null"
            )
        shortage = None if self.saved is None else self.saved.shortage()
        if shortage:
            tag, need = shortage
            raise NoRoomError(f"{self.describe_tag(tag)}: on rank {self.global_ranks[self.rank]} {need}")


def _raised(need: int, unit: int) -> str:
    """`need` as a multiple of `unit` in two digits, never below it."""
    return f"{math.ceil(100 * need / unit) / 100:.2f}"


_EXCHANGES: dict[str, Exchange] = {}


def register(exchange: Exchange) -> Exchange:
    """Make an exchange known by its name; returns it."""
    _EXCHANGES[exchange.name] = exchange
    return exchange


def find_exchange(name: str) -> Exchange:
    """The exchange of that name."""
    return _EXCHANGES[name]


def exchanges() -> list[Exchange]:
    """Every exchange of this process."""
    return list(_EXCHANGES.values())


def overflow_flag() -> Tensor | None:
    """float32 scalar on the device: 1 where a dispatch of this rank, or what is kept of it, has found no room so far.

    None without exchanges, which is so on every rank or none.
    """
    found = [exchange.overflow[::3] for exchange in exchanges()]
    found += [exchange.saved.overflow[::3] for exchange in exchanges() if exchange.saved is not None]
    return torch.cat(found).any().float() if found else None


def exposed_seconds() -> float:
    """How long this device has stood still for rows that travel since the last call, where exchanges measure it.

    What was launched must have ended.
    """
    total = 0.0
    for exchange in exchanges():
        if exchange.waits:
            total += sum(begin.elapsed_time(end) for begin, end in exchange.waits) / 1e3
            exchange.waits.clear()
    return total


def forget_exchanges() -> None:
    """Give up every arena of this process, before its process groups end. Nothing may be under way."""
    _EXCHANGES.clear()


def unavailable(group: dist.ProcessGroup | None, device: torch.device) -> str | None:
    """Why the ranks of a group cannot map each other's memory; None if they can. Collective over the group."""
    if device.type != "cuda":
        return "it needs GPUs"
    if group is None or group.size() == 1:
        return "one rank exchanges nothing"
    # Everybody on one host: GPUs of other hosts cannot be mapped this way.
    hosts: list[tuple[str, int]] = [("", 0)] * group.size()
    dist.all_gather_object(hosts, (os.uname().nodename, torch.cuda.current_device()), group=group)  # pyright: ignore
    if len({host for host, _ in hosts}) > 1:
        return f"the ranks are on {len({host for host, _ in hosts})} hosts"
    own = torch.cuda.current_device()
    apart = [other for _, other in hosts if other != own and not torch.cuda.can_device_access_peer(own, other)]
    answers: list[list[int]] = [[]] * group.size()
    dist.all_gather_object(answers, apart, group=group)  # pyright: ignore
    if any(answers):
        return "some of the GPUs cannot reach each other's memory"
    return None


def create_exchange(
    group: dist.ProcessGroup,
    device: torch.device,
    layout: ArenaLayout,
    max_tokens: int,
    timeout_seconds: float,
    num_ctas: int | None = None,
    describe_tag: Callable[[int], str] = str,
    piece_bytes: int | None = None,
    items_per_token: int = 1,
    measure: bool = False,
) -> Exchange:
    """Allocate this rank's arena, map the others' and check the mapping. Collective over the group.

    Raises:
        RuntimeError: memory that does not turn out to be shared.
    """
    import torch.distributed._symmetric_memory as symmetric
    from torch._C._distributed_c10d import _SymmetricMemory  # pyright: ignore

    # Rows go to one rank each: nothing here uses multicast, and setting it up can fail where the rest works.
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    if symmetric.get_backend(device) != "CUDA":
        symmetric.set_backend("CUDA")
    # An allocation of its own, not a piece of a pool: it ends with the exchange.
    arena = _SymmetricMemory.empty_strided_p2p((layout.num_bytes,), (1,), torch.uint8, device)
    arena[: layout.rows_at].zero_()
    handle = symmetric.rendezvous(arena, group.group_name)
    assert handle.buffer_ptrs[handle.rank] == arena.data_ptr() and handle.world_size == group.size()
    pointers = torch.tensor(handle.buffer_ptrs, dtype=torch.int64, device=device)
    exchange = Exchange(
        name=group.group_name,
        layout=layout,
        rank=group.rank(),
        global_ranks=tuple(dist.get_process_group_ranks(group)),
        max_tokens=max_tokens,
        arena=arena,
        pointers=pointers,
        state=torch.zeros(1, dtype=torch.int64, device=device),
        errors=torch.zeros(8, dtype=torch.int64).pin_memory(),
        overflow=torch.zeros(6, dtype=torch.int32, device=device),
        limit=int(timeout_seconds * 1e9),
        num_ctas=num_ctas,
        piece_bytes=piece_bytes,
        items_per_token=items_per_token,
        describe_tag=describe_tag,
        # Its programs get multiprocessors before those of other work.
        stream=torch.cuda.Stream(device, priority=-1),
        waits=[] if measure else None,
        handle=handle,
    )
    # Flags are zero everywhere before the first signal.
    torch.cuda.synchronize(device)
    dist.barrier(group)  # pyright: ignore
    return register(exchange)
