"""What a layer whose rows travel keeps for backward, and where: in tensors of its own or in the arena of all layers.

In tensors of their own (comms.saved_headroom=null) rows, tables and h have room for the most that may come, and are
results of forward. In the arena (comms/saved_arena.py) they have the same shapes, and kernels add where they begin; the
results of forward are then without rows, but for `ends_S` and the base: an operator returns no part of the arena.

Shape suffixes as in moe/exchanged_experts.py.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from comms.saved_arena import SavedArena
from moe.kernels.sort_pairs import ChunkedPairs


class Kept(NamedTuple):
    """What backward needs."""

    rows_RD: Tensor
    pairs: ChunkedPairs
    # No rows: it is made again.
    h_PH: Tensor
    # int64 (comms/saved_arena.py): where rows, and pairs, begin in the arena; None: they are not in one.
    base: Tensor | None


# Rows, the tables of `ChunkedPairs`, h, base.
Results = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


def new_pairs(num_rows: int, num_slots: int, num_pairs: int, ends_S: Tensor) -> ChunkedPairs:
    """Tables in memory of their own, undefined."""

    def empty(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return ends_S.new_empty(shape, dtype=dtype)

    weights_P = empty(num_pairs, dtype=torch.float32)
    return ChunkedPairs(empty(num_pairs), weights_P, empty(num_rows, num_slots), ends_S)


def room_for_kept(
    saved: SavedArena | None, rows_RD: Tensor, num_slots: int, ends_S: Tensor, a_PF: Tensor, keeps_hidden: bool,
    base: Tensor | None,
) -> Kept:  # fmt: skip
    """Tables and h, undefined, for rows that are there: in the arena if the rows are (`base`), or else elsewhere.

    Args:
        a_PF: for what h becomes.
        keeps_hidden: until backward; or else h is nowhere but in memory of its own.
    """
    num_rows, (num_pairs, hidden) = rows_RD.shape[0], a_PF.shape
    if base is None or saved is None:
        pairs = new_pairs(num_rows, num_slots, num_pairs, ends_S)
    else:
        pairs = _saved_pairs(saved, num_rows, num_pairs, ends_S)
        if keeps_hidden:
            return Kept(rows_RD, pairs, _saved_hidden(saved, num_pairs, 2 * hidden), base)
    return Kept(rows_RD, pairs, a_PF.new_empty(num_pairs, 2 * hidden), base)


def _saved_pairs(saved: SavedArena, num_rows: int, num_pairs: int, ends_S: Tensor) -> ChunkedPairs:
    """Tables in the arena, of the shapes that they would have elsewhere."""
    assert num_rows <= saved.room.num_rows and num_pairs <= saved.room.num_items
    rows_P, weights_P = saved.item_rows_I[:num_pairs], saved.item_weights_I[:num_pairs]
    return ChunkedPairs(rows_P, weights_P, saved.slots_SK[:num_rows], ends_S)


def _saved_hidden(saved: SavedArena, num_pairs: int, width: int) -> Tensor:
    hidden_IH = saved.hidden_IH
    assert hidden_IH is not None and hidden_IH.shape[1] == width and hidden_IH.dtype == saved.rows_SD.dtype
    return hidden_IH[:num_pairs]


def as_results(kept: Kept, keeps_hidden: bool) -> Results:
    """What an operator returns of it: nothing that is in the arena."""
    rows_RD, (rows_P, weights_P, slots_RK, ends_S), h_PH, base = kept
    if base is None:
        h_PH = h_PH if keeps_hidden else _none_of(h_PH)
        return rows_RD, rows_P, weights_P, slots_RK, ends_S, h_PH, ends_S.new_empty(0, dtype=torch.int64)
    tables = _none_of(rows_P), _none_of(weights_P), _none_of(slots_RK), ends_S
    return _none_of(rows_RD), *tables, _none_of(h_PH), base


def find_kept(saved: SavedArena | None, num_rows: int, num_pairs: int, keeps_hidden: bool, results: Results) -> Kept:
    """What `as_results` was made of; h has no rows if it was not kept.

    Raises:
        RuntimeError: the arena has given it to others.
    """
    rows_RD, rows_P, weights_P, slots_RK, ends_S, h_PH, base = results
    if base.shape[0] == 0:
        return Kept(rows_RD, ChunkedPairs(rows_P, weights_P, slots_RK, ends_S), h_PH, None)
    assert saved is not None
    saved.check(base)
    if keeps_hidden:
        h_PH = _saved_hidden(saved, num_pairs, h_PH.shape[1])
    return Kept(saved.rows_SD[:num_rows], _saved_pairs(saved, num_rows, num_pairs, ends_S), h_PH, base)


def give_back(saved: SavedArena | None, base: Tensor | None) -> None:
    """Backward has read it, if it is in the arena."""
    if base is not None:
        assert saved is not None
        saved.give_back(base)


def _none_of(tensor: Tensor) -> Tensor:
    """The same without rows, in memory of its own."""
    return tensor.new_empty(0, *tensor.shape[1:])
