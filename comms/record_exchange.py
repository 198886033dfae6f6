"""Plan, dispatch and combine by records that ranks get from each other: comms.backend=nvshmem.

The contract is that of comms/symmetric_exchange.py: counts stay on the device, results have room for `row_bound` rows,
the first `totals[0]` are rows in the order and with the bits of the collective backend; behind them rows are undefined,
weights 0 and ids -1. What differs is the way: every row travels with its side columns as one record, which a transport
(comms/record_transport.py) moves between GPUs of one host or of many.

    plan       number the rows; everybody's counts to everybody  -> slots, routes, totals
    dispatch   records by (destination, token), one call         -> rows_RD, weights_RK, ids_RK
    combine    records in the order received, one call, sums     -> out_TD

Records come back in the order in which they were sent, so `slots` serves both ways: where token t's record for rank n
stands among those that this rank sends. Every rank clamps by the same table of counts, so what finds no room is not
sent. Results are copied out of the transport's buffers, which belong to nobody for longer than an operator.

Nothing here bounds a wait: a rank that does not come holds up the others, until the run's watchdog ends them.

Shape suffixes: T tokens of this rank, N ranks, R room for received rows, D row width, K side columns, W words of a row.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from comms.all_to_all import items_by_rank
from comms.kernels.codec import record_bytes
from comms.kernels.gather_sum import gather_sum
from comms.kernels.records import make_routes, on_triton, pack_records, unpack_records
from comms.operators import operator, register_fake
from comms.payload import BLOCK, coded_like, decode, encode
from comms.put_and_take import order_rows, words_of
from comms.record_transport import NvshmemTransport, Transport, aligned_record
from comms.symmetric_exchange import PLAN, DevicePlan, check_tokens, tag_of
from comms.symmetric_memory import ArenaLayout, Exchange, find_exchange, plan_layout, register


@dataclass(frozen=True)
class RecordLayout(ArenaLayout):
    """Sizes of a transport's buffers: two inputs and an output, each with room for what goes either way."""

    @property
    def buffer_bytes(self) -> int:
        """One buffer."""
        widest = max(self.row_bytes, record_bytes(self.row_bytes // 2, BLOCK)) + self.side_bytes
        rows = max(self.row_bound, self.return_bound) * aligned_record(widest)
        return max(rows, self.num_ranks * count_bytes(self.num_ranks))

    @property
    def num_bytes(self) -> int:
        """All buffers."""
        return 3 * self.buffer_bytes


def count_bytes(num_ranks: int) -> int:
    """Bytes of a record of counts."""
    return aligned_record(8 * num_ranks)


@dataclass(frozen=True)
class RecordExchange(Exchange):
    """One rank's end of an exchange by records."""

    transport: Transport | None = field(default=None, repr=False)

    @property
    def moves(self) -> Transport:
        """The transport."""
        assert self.transport is not None
        return self.transport


@dataclass(frozen=True)
class RecordPlan(DevicePlan):
    """Of rows that travel as records.

    `routes` (3, N, N): rows from m to n, the first one's place at n, its place among those that m sends; `totals` (2,).
    """

    # int32: where token t's record for rank n stands among those that this rank sends, -1 if there is none.
    slots_TN: Tensor

    def there(
        self, step: int, x_TD: Tensor, weights_TK: Tensor, ids_TK: Tensor, payload: str
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `DevicePlan`."""
        state, name, tag = self.exchange.state, self.exchange.name, tag_of(self.layer, step)
        tables = self.slots_TN, self.routes, self.totals
        return record_dispatch(state, x_TD, weights_TK, ids_TK, *tables, name, tag, self.num_rows, payload)

    def back(self, step: int, rows_RD: Tensor, side_RK: Tensor, payload: str) -> tuple[Tensor, Tensor]:
        """See `DevicePlan`."""
        state, name, tag = self.exchange.state, self.exchange.name, tag_of(self.layer, step)
        tables = self.slots_TN, self.routes, self.totals
        return record_combine(state, rows_RD, side_RK, *tables, name, tag, payload)


def plan_record_layout(
    num_ranks: int, max_tokens: int, max_copies: int, row_bytes: int, side_bytes: int, capacity: float | None = None
) -> RecordLayout:
    """Buffers for what `plan_layout` makes an arena for.

    Raises:
        ValueError: rows that are no multiple of 4 bytes.
    """
    if row_bytes % 4:
        raise ValueError(
            f"comms.backend=nvshmem moves rows of a multiple of 4 bytes, not {row_bytes}: make model.dim a multiple of "
            "2, or set comms.backend=collective"
        )
    bounds = plan_layout(num_ranks, max_tokens, max_copies, 16, side_bytes, capacity)
    return RecordLayout(num_ranks, bounds.row_bound, bounds.return_bound, row_bytes, side_bytes)


def create_record_exchange(
    group: dist.ProcessGroup,
    device: torch.device,
    layout: RecordLayout,
    max_tokens: int,
    describe_tag: Callable[[int], str] = str,
    items_per_token: int = 1,
    transport: Transport | None = None,
) -> RecordExchange:
    """Allocate this rank's buffers. Collective over all ranks of the run, and alike on all of them.

    Args:
        transport: what moves records; None: NVSHMEM.
    """
    if transport is None:
        transport = NvshmemTransport(group, device, layout.buffer_bytes)
    exchange = RecordExchange(
        name=group.group_name,
        layout=layout,
        rank=group.rank(),
        global_ranks=tuple(dist.get_process_group_ranks(group)),
        max_tokens=max_tokens,
        arena=transport.tensors()[0],
        pointers=torch.empty(0, dtype=torch.int64, device=device),
        state=torch.zeros(1, dtype=torch.int64, device=device),
        errors=torch.zeros(8, dtype=torch.int64),
        overflow=torch.zeros(6, dtype=torch.int32, device=device),
        limit=0,
        items_per_token=items_per_token,
        describe_tag=describe_tag,
        transport=transport,
    )
    register(exchange)
    return exchange


def plan_records(
    ids_TK: Tensor, ids_per_rank: int, exchange: RecordExchange, layer: int, item_bound: int
) -> RecordPlan:  # fmt: skip
    """Plan the exchange of this rank's T tokens; see comms.symmetric_exchange.plan_exchange.

    Raises:
        ValueError: more tokens than the exchange was made for.
    """
    num_tokens = check_tokens(ids_TK, exchange)
    slots_TN, routes, totals = exchange_record_counts(
        exchange.state, ids_TK, exchange.num_ranks, ids_per_rank, exchange.name, tag_of(layer, PLAN), item_bound
    )
    return RecordPlan(exchange, layer, num_tokens, routes, totals, item_bound, slots_TN)


# Operators. Each changes `state`, so the compiler keeps them all, in order; what they return is fresh memory.
# Activation checkpointing keeps the results of the first two.


@operator("exchange_record_counts", mutates_args=("state",))
def exchange_record_counts(
    state: Tensor, ids_TK: Tensor, num_ranks: int, ids_per_rank: int, name: str, tag: int, item_bound: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Number the rows for each rank and tell everybody how many: (slots_TN, routes, totals)."""
    exchange, transport = _begin(state, name)
    assert num_ranks == exchange.num_ranks, (num_ranks, exchange.num_ranks)
    index_NT, sent_2N = number_rows(ids_TK, num_ranks, ids_per_rank)
    # One record for all ranks, the first of each one's.
    record = transport.next_input(count_bytes(num_ranks))[0].view(torch.int32)
    record[: 2 * num_ranks] = sent_2N.flatten()
    rank = torch.arange(num_ranks, dtype=torch.int32, device=ids_TK.device)
    received = transport.move(torch.stack([torch.ones_like(rank), torch.zeros_like(rank), rank]))
    table = received[:num_ranks].view(torch.int32)[:, : 2 * num_ranks].contiguous()
    row_bound, me = exchange.layout.row_bound, exchange.rank
    routes, totals = make_routes(table, exchange.overflow, me, tag, row_bound, item_bound)
    fits_NT = (index_NT >= 0) & (index_NT < routes[0, me, :, None])
    slots_NT = torch.where(fits_NT, index_NT + routes[2, me, :, None], -1)
    return slots_NT.t().contiguous(), routes, totals


@register_fake(exchange_record_counts)
def _(
    state: Tensor, ids_TK: Tensor, num_ranks: int, ids_per_rank: int, name: str, tag: int, item_bound: int
) -> tuple[Tensor, Tensor, Tensor]:
    shapes = ((ids_TK.shape[0], num_ranks), (3, num_ranks, num_ranks), (2,))
    slots_TN, routes, totals = (ids_TK.new_empty(shape, dtype=torch.int32) for shape in shapes)
    return slots_TN, routes, totals


def number_rows(ids_TK: Tensor, num_ranks: int, ids_per_rank: int) -> tuple[Tensor, Tensor]:
    """index_NT and sent_2N of comms.put_and_take.order_rows; in plain PyTorch where no kernel runs."""
    if on_triton(ids_TK):
        order = order_rows(ids_TK, num_ranks, ids_per_rank)
        return order.index_NT, order.sent_C2N[0]
    items_NT = items_by_rank(ids_TK, num_ranks, ids_per_rank).t()
    goes_NT = items_NT > 0
    index_NT = torch.where(goes_NT, goes_NT.cumsum(1) - 1, -1)
    return index_NT.int(), torch.stack([goes_NT.sum(1), items_NT.sum(1)]).int()


@operator("record_dispatch", mutates_args=("state",))
def record_dispatch(
    state: Tensor,
    x_TD: Tensor,
    weights_TK: Tensor,
    ids_TK: Tensor,
    slots_TN: Tensor,
    routes: Tensor,
    totals: Tensor,
    name: str,
    tag: int,
    row_bound: int,
    payload: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Received rows and side columns: (R, D), (R, K), (R, K) int64. Where there is no row weights are 0 and ids -1."""
    exchange, transport = _begin(state, name)
    weight_words = words_of(weights_TK)
    side = torch.cat([weight_words, ids_TK.to(torch.int32)], 1)
    rows = words_of(encode(x_TD.contiguous(), payload))
    records = transport.next_input(_record(rows, side))
    pack_records(records, rows, side, slots_TN)
    count, here, there = routes[:, :, exchange.rank]
    received = transport.move(torch.stack([count, there, here]))
    coded, side = _unpack(received, row_bound, coded_like(x_TD, payload), side, totals[:1], weight_words.shape[1])
    weights_RK = side[:, : weight_words.shape[1]].contiguous().view(-1).view(weights_TK.dtype)
    return (
        decode(coded, payload, x_TD.shape[1], x_TD.dtype),
        weights_RK.view(row_bound, weights_TK.shape[1]),
        side[:, weight_words.shape[1] :].long(),
    )


@register_fake(record_dispatch)
def _(
    state: Tensor,
    x_TD: Tensor,
    weights_TK: Tensor,
    ids_TK: Tensor,
    slots_TN: Tensor,
    routes: Tensor,
    totals: Tensor,
    name: str,
    tag: int,
    row_bound: int,
    payload: str,
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        x_TD.new_empty(row_bound, x_TD.shape[1]),
        weights_TK.new_empty(row_bound, weights_TK.shape[1]),
        ids_TK.new_empty(row_bound, ids_TK.shape[1], dtype=torch.int64),
    )


@operator("record_combine", mutates_args=("state",))
def record_combine(
    state: Tensor,
    rows_RD: Tensor,
    side_RK: Tensor,
    slots_TN: Tensor,
    routes: Tensor,
    totals: Tensor,
    name: str,
    tag: int,
    payload: str,
) -> tuple[Tensor, Tensor]:
    """The sums per token of rows and of side columns that come back: (T, D), (T, K)."""
    exchange, transport = _begin(state, name)
    rows, side = words_of(encode(rows_RD.contiguous(), payload)), words_of(side_RK)
    records = transport.next_input(_record(rows, side))
    place_R = torch.arange(rows.shape[0], dtype=torch.int32, device=rows.device)
    pack_records(records, rows, side, torch.where(place_R < totals[0], place_R, -1)[:, None])
    # They lie where they were received, and come to where they were sent from.
    received = transport.move(routes[:, exchange.rank])
    room, sent = slots_TN.shape[0] * exchange.num_ranks, routes[0, exchange.rank].sum(0, True, dtype=torch.int32)
    room = min(room, exchange.layout.return_bound)
    if payload == "model" and received.shape[1] == 4 * rows.shape[1]:
        # Records are nothing but rows: they can be added up where they lie.
        return gather_sum(received[:room].view(rows_RD.dtype), slots_TN), side_RK.new_empty(slots_TN.shape[0], 0)
    coded, side = _unpack(received, room, coded_like(rows_RD, payload), side, sent, side.shape[1])
    returned = decode(coded, payload, rows_RD.shape[1], rows_RD.dtype)
    sides = side.view(-1).view(side_RK.dtype).view(room, side_RK.shape[1])
    return gather_sum(returned, slots_TN), gather_sum(sides, slots_TN)


@register_fake(record_combine)
def _(
    state: Tensor,
    rows_RD: Tensor,
    side_RK: Tensor,
    slots_TN: Tensor,
    routes: Tensor,
    totals: Tensor,
    name: str,
    tag: int,
    payload: str,
) -> tuple[Tensor, Tensor]:
    num_tokens = slots_TN.shape[0]
    return rows_RD.new_empty(num_tokens, rows_RD.shape[1]), side_RK.new_empty(num_tokens, side_RK.shape[1])


def _begin(state: Tensor, name: str) -> tuple[RecordExchange, Transport]:
    exchange = find_exchange(name)
    assert isinstance(exchange, RecordExchange), exchange
    state.add_(1)
    return exchange, exchange.moves


def _record(rows: Tensor, side: Tensor) -> int:
    """Bytes of a record of these words."""
    return aligned_record(4 * (rows.shape[1] + side.shape[1]))


def _unpack(
    records: Tensor, room: int, like: Tensor, side_like: Tensor, num: Tensor, zeros: int
) -> tuple[Tensor, Tensor]:
    """Rows of the form of `like`, and words of side columns, of the first `num` records; as fresh memory."""
    rows = like.new_empty(room, like.shape[1])
    side = side_like.new_empty(room, side_like.shape[1])
    unpack_records(records, words_of(rows), side, num, zeros)
    return rows, side
