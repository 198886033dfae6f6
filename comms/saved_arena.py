"""One arena for what backward needs again of all layers and micro-batches: as much as comes, not as much as may come.

The host does not learn how many rows a dispatch brings, so a tensor that keeps them for backward has room for the most
that may come, in every layer. Here they share buffers whose size is a multiple of the expected load of all layers: of
many layers together, about as much comes as was expected.

    reserve     before rows travel: the device knows the counts, and writes where this entry's rows and items begin
    (kernels)   find their place there: what they work on has the same numbers, counted from the entry's base
    give_back   backward has read them; so says the host, and asks the device nothing

Entries lie one behind the other, and the host knows how many are alive: this is the number of the next one. One ends
when backward has given it back, or when nobody can ask for its gradients any more: its base, a small tensor which the
graph keeps, is gone with the graph. So neither dropped graphs nor exceptions leak. Ended entries under a living one
keep their room for as long; backward runs in the reverse order of forward, so this is rare.

There is room for the most that one layer can bring, so that a kernel never writes beyond the end. If all together have
too little, the last ones lie over those before: gradients are then anything, the need is noted, and no update is made
(trainer/guard.py).

The buffers and `ends` are not declared to torch as changed, as little as the exchange's arena is (a compiler that makes
functions of operators would hand them a copy): operators declare the exchange's state, by which they keep their order,
and return no part of a buffer. The order of launches keeps a region until it has been read: whatever writes it next, on
whichever stream, comes behind what is launched by then.

Shape suffixes: S rows of all entries, D row width, K slots per row, I items of all entries, H numbers kept of an item.
"""

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from comms.kernels.saved import launch_reserve

# Entries that are alive at the same time: layers times micro-batches whose backward is to come.
MAX_ENTRIES = 2**14
# What a base says: where rows begin, where items do, how many rows there are.
BASE_WORDS = 3


@dataclass(frozen=True)
class SavedRoom:
    """For how much there is room, and what a headroom is a multiple of."""

    num_rows: int
    num_items: int
    expected_rows: int
    expected_items: int
    num_layers: int

    def num_bytes(self, width: int, num_slots: int, hidden: int | None, itemsize: int) -> int:
        """Of an arena that `make_saved_arena` makes; `itemsize` is that of its dtype."""
        row, item = width * itemsize + 4 * num_slots, (hidden or 0) * itemsize + 8
        return self.num_rows * row + self.num_items * item + 16 * MAX_ENTRIES


def plan_saved(
    num_layers: int, headroom: float, rows: tuple[float, int], items: tuple[float, int]
) -> SavedRoom:  # fmt: skip
    """Room for the expected load of all layers times `headroom`: never less than what one layer can bring.

    Args:
        rows: of one layer: expected, and the most that can come.
        items: likewise.
    """

    def room(expected: int, most: int) -> int:
        return min(max(math.ceil(round(expected * headroom, 6)), most), num_layers * most)

    all_rows, all_items = (max(round(num_layers * of_one[0]), 1) for of_one in (rows, items))
    return SavedRoom(room(all_rows, rows[1]), room(all_items, items[1]), all_rows, all_items, num_layers)


@dataclass
class _Entry:
    """What is kept of one dispatch."""

    # StorageWeakRef, which has no types.
    base: Any
    given_back: bool = False

    @property
    def is_over(self) -> bool:
        return self.given_back or bool(self.base.expired())


@dataclass
class SavedArena:
    """The buffers of a rank, and who has a part of them. Rows, slots, weights and items count from an entry's base."""

    room: SavedRoom
    rows_SD: Tensor = field(repr=False)
    # int32: where the parts of a row stand among the items.
    slots_SK: Tensor = field(repr=False)
    # int32 and fp32: row and weight of an item.
    item_rows_I: Tensor = field(repr=False)
    item_weights_I: Tensor = field(repr=False)
    # What is kept of items; None: it is made again.
    hidden_IH: Tensor | None = field(repr=False)
    # int64 (entries, 2): see comms/kernels/saved.py.
    ends: Tensor = field(repr=False)
    # int32 (6,): greatest need of rows beyond the room, the room, tag; the same of items.
    overflow: Tensor = field(repr=False)
    _entries: list[_Entry] = field(default_factory=list[_Entry], repr=False)

    @property
    def num_bytes(self) -> int:
        """All buffers."""
        tensors = self.rows_SD, self.slots_SK, self.item_rows_I, self.item_weights_I, self.hidden_IH, self.ends
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors if tensor is not None)

    def entry_bytes(self, num_rows: int, num_items: int) -> int:
        """Of the buffers, what an entry with so many takes: what is kept of it for backward."""
        of_rows, of_items = (self.rows_SD, self.slots_SK), (self.item_rows_I, self.item_weights_I, self.hidden_IH)
        counted = [(num_rows, tensor) for tensor in of_rows] + [(num_items, tensor) for tensor in of_items]
        return sum(n * t.numel() // max(t.shape[0], 1) * t.element_size() for n, t in counted if t is not None)

    @property
    def num_alive(self) -> int:
        """Entries whose gradients somebody may ask for."""
        return sum(not entry.is_over for entry in self._entries)

    def reserve(self, totals: Tensor, item_bound: int, tag: int) -> Tensor:
        """int64: where the rows and items begin that `totals` says will come; rows. Whoever keeps it keeps them.

        Args:
            totals: of a plan (comms/symmetric_exchange.py).
            item_bound: no more items are worked on.

        Raises:
            RuntimeError: more graphs wait for their backward than can be numbered.
        """
        while self._entries and self._entries[-1].is_over:
            self._entries.pop()
        depth = len(self._entries)
        if depth == self.ends.shape[0]:
            raise RuntimeError(
                f"{depth} dispatches wait for their backward: call backward for each micro-batch, or set "
                "comms.saved_headroom=null"
            )
        base = self.ends.new_empty(BASE_WORDS)
        room = self.room.num_rows, self.room.num_items
        launch_reserve(self.ends, totals, base, self.overflow, depth, item_bound, room, tag)
        self._entries.append(_Entry(StorageWeakRef(base.untyped_storage())))
        return base

    def check(self, base: Tensor) -> None:
        """Whether what was kept is still there. Raises RuntimeError."""
        self._find(base)

    def give_back(self, base: Tensor) -> None:
        """Backward has read this entry. Until somebody reserves, it is still there."""
        self._find(base).given_back = True

    def shortage(self) -> tuple[int, str] | None:
        """Tag of the dispatch with the greatest need beyond the room, and what to do. Waits for the device."""
        numbers: list[int] = self.overflow.tolist()  # pyright: ignore
        rows, items = numbers[:3], numbers[3:]
        if not (rows[0] or items[0]):
            return None
        (need, bound, tag), what = (rows, "rows") if rows[0] else (items, "pairs")
        # Enough for both; in two digits, never less.
        multiple = max(rows[0] / self.room.expected_rows, items[0] / self.room.expected_items)
        return tag, (
            f"{need} {what} of up to {self.room.num_layers} layers wait for backward, and there is room for {bound}: "
            f"raise comms.saved_headroom to {math.ceil(100 * multiple) / 100:.2f} or more, or set it to null"
        )

    def _find(self, base: Tensor) -> _Entry:
        key = StorageWeakRef(base.untyped_storage())
        for entry in reversed(self._entries):
            if entry.base == key:
                return entry
        raise RuntimeError(
            "the rows that this backward needs have been given back: gradients were asked for twice, or something "
            "(hooks on saved tensors) moved what the graph keeps. comms.saved_headroom=null keeps them in tensors of "
            "their own"
        )


def make_saved_arena(
    room: SavedRoom, width: int, num_slots: int, hidden: int | None, dtype: torch.dtype, device: torch.device
) -> SavedArena:
    """Allocate the buffers of a rank.

    Args:
        width: of a row.
        num_slots: items that a row can feed.
        hidden: numbers that are kept of an item; None: none.
        dtype: of rows and of what is kept of items.
    """
    int32 = torch.int32
    return SavedArena(
        room,
        rows_SD=torch.empty(room.num_rows, width, dtype=dtype, device=device),
        slots_SK=torch.empty(room.num_rows, num_slots, dtype=int32, device=device),
        item_rows_I=torch.empty(room.num_items, dtype=int32, device=device),
        item_weights_I=torch.empty(room.num_items, dtype=torch.float32, device=device),
        hidden_IH=None if hidden is None else torch.empty(room.num_items, hidden, dtype=dtype, device=device),
        ends=torch.zeros(MAX_ENTRIES, 2, dtype=torch.int64, device=device),
        overflow=torch.zeros(6, dtype=int32, device=device),
    )
