"""Exchanges that travel beside other work, chunk by chunk: launched on a stream of their own, ordered by events.

One plan numbers the rows of all chunks of tokens, so that a chunk's rows follow those of the one before, at whoever
receives them and on their way back. One buffer then holds the rows of all chunks, and no chunk needs room of its own.

    arrival = travel.there(step, chunk, ...)    after what was launched so far; returns at once
    travel.wait(arrival)                        whatever is launched from here on finds the rows

Launches keep the order of the program on the exchange's stream, the same on every rank: that is what makes puts and
takes of different ranks meet. Where there are no streams (the CPU), everything happens in the order of the program.

What is sent must stay where it is until somebody waited for its arrival: whoever sends keeps it, and memory that was
made for the current stream is not given to others meanwhile.

Shape suffixes: T tokens of this rank, N ranks, C chunks, R room for received rows, D row width, K side columns.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from comms.operators import operator
from comms.put_and_take import Beside, Received, beside_programs, chunk_bound, chunk_ends, move_back, move_there
from comms.symmetric_exchange import DISPATCH, tag_of
from comms.symmetric_memory import Exchange, find_exchange

# When something has arrived; None: it is there already.
Arrival = torch.Event | None


class Tables(NamedTuple):
    """The tensors of a plan (comms/symmetric_exchange.py)."""

    index_NT: Tensor
    tokens_NT: Tensor
    routes: Tensor
    totals: Tensor


class Travel:
    """The exchanges of one pass through a layer."""

    def __init__(self, exchange: Exchange, layer: int, tables: Tables) -> None:
        self.exchange, self.layer, self.tables = exchange, layer, tables
        self.routes = tables.routes.unbind(0)
        num_tokens = tables.index_NT.shape[1]
        self.ends = chunk_ends(num_tokens, self.num_chunks)

    @property
    def num_chunks(self) -> int:
        """Chunks of tokens, C."""
        return len(self.routes)

    @property
    def programs(self) -> int:
        """How many programs travel beside other work, which is to leave them as many multiprocessors."""
        return 0 if self.exchange.stream is None else sum(beside_programs(self.exchange.num_ranks))

    @property
    def num_rows(self) -> int:
        """Room for the rows of all chunks, R."""
        return self.exchange.layout.row_bound

    @property
    def chunk_rows(self) -> int:
        """The most rows that one chunk can bring."""
        return min(self.num_rows, self.exchange.num_ranks * chunk_bound(self.exchange.max_tokens, self.num_chunks))

    def there(
        self, step: int, chunk: int, sent: Received, out: Received, payload: str, beside: Beside,
        base: Tensor | None = None,
    ) -> Arrival:  # fmt: skip
        """Send a chunk of this rank's rows and side columns, and take what comes to its places in `out`.

        Args:
            beside: what else runs meanwhile.
            base: where the rows of `out` begin (comms/saved_arena.py).
        """
        tables = self.tables.tokens_NT, self.routes[chunk], self.tables.totals
        tag = tag_of(self.layer, step)
        return self._launch(
            partial(move_there, self.exchange, *sent, *tables, out, tag, payload, fill=False, beside=beside, base=base)
        )

    def back(
        self, step: int, chunk: int, rows_RD: Tensor, side_RK: Tensor, out_TD: Tensor, side_TK: Tensor, payload: str,
        beside: Beside, slots_RS: Tensor | None = None, base: Tensor | None = None,
    ) -> Arrival:  # fmt: skip
        """Send back what became of a chunk's rows; `out` and `side` get the sums of its tokens.

        Args:
            slots_RS: `rows` are parts, and a row is the sum of those at its slots.
            base: where slots begin (comms/saved_arena.py).
        """
        tokens = self.ends[chunk - 1] if chunk else 0, self.ends[chunk]
        tables = self.tables.index_NT, self.routes[chunk]
        tag = tag_of(self.layer, step)
        return self._launch(
            partial(
                move_back,
                self.exchange,
                rows_RD,
                side_RK,
                *tables,
                out_TD,
                side_TK,
                tag,
                payload,
                tokens=tokens,
                beside=beside,
                slots_RS=slots_RS,
                base=base,
            )
        )

    def wait(self, arrival: Arrival) -> None:
        """Nothing that is launched from now on starts before that."""
        if arrival is None:
            return
        stream, waits = torch.cuda.current_stream(self.exchange.arena.device), self.exchange.waits
        if waits is None:
            stream.wait_event(arrival)
            return
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        stream.record_event(begin)
        stream.wait_event(arrival)
        stream.record_event(end)
        waits.append((begin, end))

    def _launch(self, launch: Callable[[], None]) -> Arrival:
        stream = self.exchange.stream
        if stream is None:
            launch()
            return None
        stream.wait_stream(torch.cuda.current_stream(stream.device))
        with torch.cuda.stream(stream):
            launch()
            return stream.record_event()


class Departed(NamedTuple):
    """A first chunk that is on its way."""

    sent: Received
    out: Received
    arrival: Arrival
    # Where rows begin that go to the arena of what is kept; None: they have a tensor of their own.
    base: Tensor | None
    # Of the plan that it follows: kernels read them on the way, and an exception may have ended whoever made them.
    tables: Tables


def depart(
    travel: Travel, x_TD: Tensor, weights_TK: Tensor, ids_TK: Tensor, payload: str, beside: Beside, saves: int | None
) -> Departed:  # fmt: skip
    """Send the first chunk of a dispatch; the rows of all chunks get their room.

    Args:
        saves: rows go to the arena of what is kept, with room for so many items beside them; None: they do not.
    """
    sent = Received(x_TD.contiguous(), weights_TK.contiguous(), ids_TK.contiguous())
    saved, base, num_rows = travel.exchange.saved, None, travel.num_rows
    weights_RK, ids_RK = (column.new_empty(num_rows, column.shape[1]) for column in sent[1:])
    if saves is None:
        rows_RD = x_TD.new_empty(num_rows, x_TD.shape[1])
    else:
        assert saved is not None and saved.rows_SD.shape[1] == x_TD.shape[1] and saved.rows_SD.dtype == x_TD.dtype
        rows_RD = saved.rows_SD[:num_rows]
        base = saved.reserve(travel.tables.totals, saves, tag_of(travel.layer, DISPATCH))
    out = Received(rows_RD, weights_RK, ids_RK)
    arrival = travel.there(DISPATCH, 0, sent, out, payload, beside, base)
    return Departed(sent, out, arrival, base, travel.tables)


def departed(
    travel: Travel, x_TD: Tensor, weights_TK: Tensor, ids_TK: Tensor, payload: str, saves: int | None
) -> Departed:  # fmt: skip
    """What `start_dispatch` has sent, or else send it now."""
    waiting: list[Departed] = travel.exchange.departed
    if not waiting or waiting[0].tables.routes.data_ptr() != travel.tables.routes.data_ptr():
        forget_departed(travel)
        return depart(travel, x_TD, weights_TK, ids_TK, payload, Beside.NOTHING, saves)
    found = waiting.pop()
    assert (found.base is None) == (saves is None), "departed and arriving rows go to other places"
    return found


def forget_departed(travel: Travel) -> None:
    """Give up what nobody came for, because an exception stood in between; not before it has arrived."""
    for departed in travel.exchange.departed:
        travel.wait(departed.arrival)
    travel.exchange.departed.clear()


@operator("start_dispatch", mutates_args=("state",))
def start_dispatch(
    state: Tensor,
    x_TD: Tensor,
    weights_TK: Tensor,
    ids_TK: Tensor,
    index_NT: Tensor,
    tokens_NT: Tensor,
    routes: Tensor,
    totals: Tensor,
    name: str,
    layer: int,
    payload: str,
    beside: bool,
    saves: int | None,
) -> None:
    """Send the first chunk, for the operator that asks with `departed`: something else can be computed until then.

    Args:
        beside: these are products.
    """
    travel = Travel(find_exchange(name), layer, Tables(index_NT, tokens_NT, routes, totals))
    forget_departed(travel)
    company = Beside.PRODUCTS if beside else Beside.NOTHING
    travel.exchange.departed.append(depart(travel, x_TD, weights_TK, ids_TK, payload, company, saves))
