"""Plan, dispatch and combine through symmetric memory: all counts stay on the device, nothing waits for the host.

Beside the collective backend (comms/all_to_all.py) the difference is what the host knows. It does not learn how many
rows came, so results have room for `row_bound` of them. The first `totals[0]` are rows, in the same order and with the
same bits; behind them rows are undefined, weights 0 and ids -1. The gradient that comes back may have anything there.

    plan       number the rows, exchange the counts        -> routes
    dispatch   put rows at their places, take what comes   -> rows_RD, weights_RK, ids_RK
    combine    put rows back, add up per token             -> out_TD

Dispatch and combine are one launch each, in which rows are taken while others still arrive. Both code rows as they put
them. Dispatch decodes them as it takes them out of the arena, and this rank's own go straight to their place; combine
adds up what lies in the arena.

Shape suffixes: T tokens of this rank, N ranks, C chunks of tokens (one, but for comms/beside.py), R room for received
rows, D row width, K side columns.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from comms.operators import operator, register_fake
from comms.payload import Payload
from comms.put_and_take import Received, exchange_counts, move_back, move_there, order_rows
from comms.symmetric_memory import Exchange, find_exchange

# What a tag says beside the layer.
STEPS = ("plan", "dispatch", "combine", "gradient of dispatch", "gradient of combine")
PLAN, DISPATCH, COMBINE, DISPATCH_GRAD, COMBINE_GRAD = range(5)


def tag_of(layer: int, step: int) -> int:
    """Number of a step of a layer's exchange."""
    return layer * len(STEPS) + step


def describe_tag(tag: int) -> str:
    """For messages."""
    return f"{STEPS[tag % len(STEPS)]} of MoE layer {tag // len(STEPS)}"


@dataclass(frozen=True)
class DevicePlan(ABC):
    """Who sends which rows to whom, where the counts stay on the device. A backend says how rows travel."""

    exchange: Exchange
    # Number of the layer, for tags.
    layer: int
    num_tokens: int
    # int32: how many rows go from whom to whom, and where they stand there.
    routes: Tensor
    # int32: where the rows end here, last the items that they feed.
    totals: Tensor
    # Room for items: no more than this many are worked on.
    num_items: int

    @property
    def num_rows(self) -> int:
        """Room for received rows, R."""
        return self.exchange.layout.row_bound

    @property
    def is_exact(self) -> bool:
        """Whether the host knows the numbers of rows and items, not only bounds."""
        return False

    @abstractmethod
    def there(
        self, step: int, x_TD: Tensor, weights_TK: Tensor, ids_TK: Tensor, payload: str
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Received rows, weights and ids, with room for all that may come. No autograd."""

    @abstractmethod
    def back(self, step: int, rows_RD: Tensor, side_RK: Tensor, payload: str) -> tuple[Tensor, Tensor]:
        """The sums per token of rows and side columns. No autograd."""


@dataclass(frozen=True)
class SymmetricPlan(DevicePlan):
    """Of rows that are put straight into other ranks' memory.

    `routes` is (C, 4, N, N), see comms/kernels/routes.py; `totals` (C + 1,) has the end of each chunk's rows.
    """

    # int32: token t's row is this one (from 0) of those that this rank has for rank n (-1: none), and the other way.
    index_NT: Tensor
    tokens_NT: Tensor

    def there(
        self, step: int, x_TD: Tensor, weights_TK: Tensor, ids_TK: Tensor, payload: str
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `DevicePlan`."""
        assert self.routes.shape[0] == 1, "chunks travel by comms/beside.py"
        state, name, tag = self.exchange.state, self.exchange.name, tag_of(self.layer, step)
        tables = self.tokens_NT, self.routes, self.totals
        return symmetric_dispatch(state, x_TD, weights_TK, ids_TK, *tables, name, tag, self.num_rows, payload)

    def back(self, step: int, rows_RD: Tensor, side_RK: Tensor, payload: str) -> tuple[Tensor, Tensor]:
        """See `DevicePlan`."""
        state, name, tag = self.exchange.state, self.exchange.name, tag_of(self.layer, step)
        tables = self.index_NT, self.routes
        out_TD = rows_RD.new_empty(self.num_tokens, rows_RD.shape[1])
        side_TK = symmetric_combine(state, out_TD, rows_RD, side_RK, *tables, name, tag, payload)
        return out_TD, side_TK


def plan_exchange(
    ids_TK: Tensor, ids_per_rank: int, exchange: Exchange, layer: int, item_bound: int, chunks: int = 1
) -> SymmetricPlan:
    """Plan the exchange of this rank's T tokens: each goes to every rank that owns one of its ids.

    Args:
        ids_TK: integer; rank n owns ids n * ids_per_rank to (n + 1) * ids_per_rank, and -1 is no id.
        layer: the same on every rank, or the mismatch is reported.
        item_bound: ids that this rank has room for; more are noted as an overflow.
        chunks: parts of the tokens that travel one by one; `dispatch` and `combine` take plans of one.

    Raises:
        ValueError: more tokens than the exchange was made for.
        RuntimeError: a wait has failed before.
    """
    exchange.check()
    num_tokens = check_tokens(ids_TK, exchange)
    tag = tag_of(layer, PLAN)
    index_NT, tokens_NT, routes, totals = exchange_routes(
        exchange.state, ids_TK, exchange.num_ranks, ids_per_rank, exchange.name, tag, item_bound, chunks
    )
    return SymmetricPlan(exchange, layer, num_tokens, routes, totals, item_bound, index_NT, tokens_NT)


def check_tokens(ids_TK: Tensor, exchange: Exchange) -> int:
    """The number of tokens. Raises ValueError if there are more than the exchange was made for."""
    num_tokens = ids_TK.shape[0]
    if num_tokens > exchange.max_tokens:
        raise ValueError(
            f"{num_tokens} tokens in one pass, and this run's exchange has room for {exchange.max_tokens} per rank "
            "(train.micro_batch_size x train.seq_len); use smaller batches, or comms.backend=collective"
        )
    return num_tokens


def dispatch_rows(
    plan: DevicePlan, x_TD: Tensor, weights_TK: Tensor, ids_TK: Tensor, payload: Payload
) -> tuple[Tensor, Tensor, Tensor]:
    """rows_RD, weights_RK, ids_RK (int64); see comms.all_to_all.dispatch."""
    return _Dispatch.apply(plan, x_TD, weights_TK, ids_TK, payload)  # type: ignore[no-any-return]


def combine_rows(plan: DevicePlan, rows_RD: Tensor, payload: Payload) -> Tensor:
    """out_TD; see comms.all_to_all.combine."""
    return _Combine.apply(plan, rows_RD, payload)  # type: ignore[no-any-return]


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, plan: DevicePlan, x_TD: Tensor, weights_TK: Tensor, ids_TK: Tensor, payload: Payload
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.plan, ctx.payload = plan, payload
        rows_RD, weights_RK, ids_RK = plan.there(DISPATCH, x_TD, weights_TK, ids_TK, payload.rows)
        ctx.mark_non_differentiable(ids_RK)
        return rows_RD, weights_RK, ids_RK

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor, Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        d_x_TD, d_weights_TK = ctx.plan.back(DISPATCH_GRAD, grads[0], grads[1], ctx.payload.grads)
        return None, d_x_TD, d_weights_TK, None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, plan: DevicePlan, rows_RD: Tensor, payload: Payload) -> Tensor:
        ctx.plan, ctx.payload = plan, payload
        return plan.back(COMBINE, rows_RD, rows_RD[:, :0], payload.rows)[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        no_ids = grads[0].new_empty(grads[0].shape[0], 0, dtype=torch.int64)
        no_weights = grads[0][:, :0]
        return None, ctx.plan.there(COMBINE_GRAD, grads[0], no_weights, no_ids, ctx.payload.grads)[0], None


# Operators. Each changes `state`, so the compiler keeps them all, in order; what they return is fresh memory.
# Activation checkpointing keeps the results of the first two.


@operator("exchange_routes", mutates_args=("state",))
def exchange_routes(
    state: Tensor,
    ids_TK: Tensor,
    num_ranks: int,
    ids_per_rank: int,
    name: str,
    tag: int,
    item_bound: int,
    chunks: int = 1,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Number the rows for each rank and tell it: (index_NT, tokens_NT, routes, totals)."""
    exchange = find_exchange(name)
    assert num_ranks == exchange.num_ranks, (num_ranks, exchange.num_ranks)
    order = order_rows(ids_TK, num_ranks, ids_per_rank, chunks)
    return order.index_NT, order.tokens_NT, *exchange_counts(exchange, order.sent_C2N, tag, item_bound)


@register_fake(exchange_routes)
def _(
    state: Tensor,
    ids_TK: Tensor,
    num_ranks: int,
    ids_per_rank: int,
    name: str,
    tag: int,
    item_bound: int,
    chunks: int = 1,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    table = num_ranks, ids_TK.shape[0]
    shapes = (table, table, (chunks, 4, num_ranks, num_ranks), (chunks + 1,))
    index_NT, tokens_NT, routes, totals = (ids_TK.new_empty(shape, dtype=torch.int32) for shape in shapes)
    return index_NT, tokens_NT, routes, totals


@operator("symmetric_dispatch", mutates_args=("state",))
def symmetric_dispatch(
    state: Tensor,
    x_TD: Tensor,
    weights_TK: Tensor,
    ids_TK: Tensor,
    tokens_NT: Tensor,
    routes: Tensor,
    totals: Tensor,
    name: str,
    tag: int,
    row_bound: int,
    payload: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Received rows and side columns: (R, D), (R, K), (R, K) int64. Where there is no row weights are 0 and ids -1."""
    out = _received(x_TD, weights_TK, ids_TK, row_bound)
    tables = tokens_NT, routes, totals
    move_there(find_exchange(name), x_TD, weights_TK, ids_TK, *tables, Received(*out), tag, payload)
    return out


def _received(x_TD: Tensor, weights_TK: Tensor, ids_TK: Tensor, row_bound: int) -> tuple[Tensor, Tensor, Tensor]:
    return (
        x_TD.new_empty(row_bound, x_TD.shape[1]),
        weights_TK.new_empty(row_bound, weights_TK.shape[1]),
        ids_TK.new_empty(row_bound, ids_TK.shape[1], dtype=torch.int64),
    )


@register_fake(symmetric_dispatch)
def _(
    state: Tensor,
    x_TD: Tensor,
    weights_TK: Tensor,
    ids_TK: Tensor,
    tokens_NT: Tensor,
    routes: Tensor,
    totals: Tensor,
    name: str,
    tag: int,
    row_bound: int,
    payload: str,
) -> tuple[Tensor, Tensor, Tensor]:
    return _received(x_TD, weights_TK, ids_TK, row_bound)


@operator("symmetric_combine", mutates_args=("state", "out_TD"))
def symmetric_combine(
    state: Tensor,
    out_TD: Tensor,
    rows_RD: Tensor,
    side_RK: Tensor,
    index_NT: Tensor,
    routes: Tensor,
    name: str,
    tag: int,
    payload: str,
) -> Tensor:
    """Write into `out` the sum of the rows that come back for each token; returns that of side columns, (T, K)."""
    side_TK = side_RK.new_empty(out_TD.shape[0], side_RK.shape[1])
    move_back(find_exchange(name), rows_RD, side_RK, index_NT, routes, out_TD, side_TK, tag, payload)
    return side_TK


@register_fake(symmetric_combine)
def _(
    state: Tensor,
    out_TD: Tensor,
    rows_RD: Tensor,
    side_RK: Tensor,
    index_NT: Tensor,
    routes: Tensor,
    name: str,
    tag: int,
    payload: str,
) -> Tensor:
    return side_RK.new_empty(out_TD.shape[0], side_RK.shape[1])
