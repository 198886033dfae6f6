"""Plan, dispatch and combine through symmetric memory: all counts stay on the device, nothing waits for the host.

Beside the collective backend (comms/all_to_all.py) the difference is what the host knows. It does not learn how many
rows came, so results have room for `row_bound` of them. The first `totals[0]` are rows, in the same order and with the
same bits; behind them rows are undefined, weights 0 and ids -1. The gradient that comes back may have anything there.

    plan       put the counts, take the counts                 -> routes
    dispatch   put rows at their places, wait, take them       -> rows_RD, side_RW
    combine    put rows back, wait, add up per token           -> out_TD

Rows are taken out of the arena by copying, this rank's own go straight to their place, and combine adds up what lies
in the arena.

Shape suffixes: T tokens of this rank, N ranks, R room for received rows, D row width, K side columns, W int32 words of
a row's side columns.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from comms.payload import Payload, decode, encode
from comms.put_and_take import put_back, put_counts, put_rows, sum_back, take_counts, take_rows, words_of
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
class SymmetricPlan:
    """Who sends which rows to whom; the counts are on the device."""

    exchange: Exchange
    # Number of the layer, for tags.
    layer: int
    num_tokens: int
    # int32: token t's row is this one (from 0) of those that this rank has for rank n; -1: none.
    index_NT: Tensor
    # int32 (3, N, N): see comms/kernels/exchange.py.
    routes: Tensor
    # int32 (2,): rows received and the items that they feed here.
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


def plan_exchange(items_TN: Tensor, exchange: Exchange, layer: int, item_bound: int) -> SymmetricPlan:
    """Plan the exchange of this rank's T tokens; see comms.all_to_all.plan_dispatch.

    Args:
        layer: the same on every rank, or the mismatch is reported.
        item_bound: items that this rank has room for; more are noted as an overflow.

    Raises:
        ValueError: more tokens than the exchange was made for.
        RuntimeError: a wait has failed before.
    """
    exchange.check()
    num_tokens, num_ranks = items_TN.shape
    assert num_ranks == exchange.num_ranks, (num_ranks, exchange.num_ranks)
    if num_tokens > exchange.max_tokens:
        raise ValueError(
            f"{num_tokens} tokens in one pass, and this run's exchange has room for {exchange.max_tokens} per rank "
            "(train.micro_batch_size x train.seq_len); use smaller batches, or comms.backend=collective"
        )
    index_NT, sent_2N = _order(items_TN)
    routes, totals = exchange_routes(exchange.state, sent_2N, exchange.name, tag_of(layer, PLAN), item_bound)
    return SymmetricPlan(exchange, layer, num_tokens, index_NT, routes, totals, item_bound)


def _order(items_TN: Tensor) -> tuple[Tensor, Tensor]:
    """Each row's number among those for its destination; rows and items for each rank."""
    num_tokens, num_ranks = items_TN.shape
    is_sent_NT = (items_TN > 0).t().contiguous()
    # One scan over everything: torch is slow at several.
    scan = is_sent_NT.view(-1).cumsum(0, dtype=torch.int32)
    starts_N = torch.zeros(num_ranks + 1, dtype=torch.int32, device=scan.device)
    if num_tokens:
        starts_N[1:] = scan[num_tokens - 1 :: num_tokens]
    index_NT = torch.where(is_sent_NT, scan.view_as(is_sent_NT) - 1 - starts_N[:-1, None], -1)
    return index_NT, torch.stack([starts_N.diff(), items_TN.sum(0, dtype=torch.int32)])


def dispatch_rows(
    plan: SymmetricPlan, x_TD: Tensor, weights_TK: Tensor, ids_TK: Tensor, payload: Payload
) -> tuple[Tensor, Tensor, Tensor]:
    """rows_RD, weights_RK, ids_RK (int64); see comms.all_to_all.dispatch."""
    return _Dispatch.apply(plan, x_TD, weights_TK, ids_TK, payload)  # type: ignore[no-any-return]


def combine_rows(plan: SymmetricPlan, rows_RD: Tensor, payload: Payload) -> Tensor:
    """out_TD; see comms.all_to_all.combine."""
    return _Combine.apply(plan, rows_RD, payload)  # type: ignore[no-any-return]


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, plan: SymmetricPlan, x_TD: Tensor, weights_TK: Tensor, ids_TK: Tensor, payload: Payload
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.plan, ctx.payload = plan, payload
        weight_words_TW = words_of(weights_TK)
        num_words = weight_words_TW.shape[1]
        side_TW = torch.cat([weight_words_TW, ids_TK.to(torch.int32)], dim=1)
        rows_RD, side_RW = _there(plan, DISPATCH, x_TD, side_TW, num_words, payload.rows)
        weights_RK = side_RW[:, :num_words].contiguous().view(weights_TK.dtype)
        ids_RK = side_RW[:, num_words:].long()
        ctx.mark_non_differentiable(ids_RK)
        return rows_RD, weights_RK, ids_RK

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor, Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        d_x_TD, d_weights_TK = _back(ctx.plan, DISPATCH_GRAD, grads[0], grads[1], ctx.payload.grads)
        return None, d_x_TD, d_weights_TK, None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, plan: SymmetricPlan, rows_RD: Tensor, payload: Payload) -> Tensor:
        ctx.plan, ctx.payload = plan, payload
        return _back(plan, COMBINE, rows_RD, rows_RD[:, :0], payload.rows)[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        no_side_TW = grads[0].new_empty(grads[0].shape[0], 0, dtype=torch.int32)
        return None, _there(ctx.plan, COMBINE_GRAD, grads[0], no_side_TW, 0, ctx.payload.grads)[0], None


def _there(
    plan: SymmetricPlan, step: int, x_TD: Tensor, side_TW: Tensor, fill_from: int, payload: str
) -> tuple[Tensor, Tensor]:
    """Received rows and side words, with room for all that may come."""
    state, name, tag = plan.exchange.state, plan.exchange.name, tag_of(plan.layer, step)
    tables = plan.index_NT, plan.routes, plan.totals
    coded = encode(x_TD, payload)
    coded, side_RW = symmetric_dispatch(state, coded, side_TW, *tables, name, tag, plan.num_rows, fill_from)
    return decode(coded, payload, x_TD.shape[1], x_TD.dtype), side_RW


def _back(plan: SymmetricPlan, step: int, rows_RD: Tensor, side_RK: Tensor, payload: str) -> tuple[Tensor, Tensor]:
    """The sums per token of rows and side columns."""
    state, name, tag = plan.exchange.state, plan.exchange.name, tag_of(plan.layer, step)
    tables = plan.index_NT, plan.routes, plan.totals
    out_TD = rows_RD.new_empty(plan.num_tokens, rows_RD.shape[1])
    side_TK = symmetric_combine(state, out_TD, encode(rows_RD, payload), side_RK, *tables, name, tag)
    return out_TD, side_TK


# Operators. Each changes `state`, so the compiler keeps them all, in order; what they return is fresh memory.
# Activation checkpointing keeps the results of the first two.


@torch.library.custom_op("sluicegate::exchange_routes", mutates_args=("state",))
def exchange_routes(state: Tensor, sent_2N: Tensor, name: str, tag: int, item_bound: int) -> tuple[Tensor, Tensor]:
    """Tell every rank what this one has for whom: (routes, totals)."""
    exchange = find_exchange(name)
    put_counts(exchange, sent_2N, tag)
    return take_counts(exchange, tag, item_bound)


@exchange_routes.register_fake  # pyright: ignore[reportUnknownMemberType]
def _(state: Tensor, sent_2N: Tensor, name: str, tag: int, item_bound: int) -> tuple[Tensor, Tensor]:
    return sent_2N.new_empty(3, sent_2N.shape[1], sent_2N.shape[1]), sent_2N.new_empty(2)


@torch.library.custom_op("sluicegate::symmetric_dispatch", mutates_args=("state",))
def symmetric_dispatch(
    state: Tensor,
    x_TD: Tensor,
    side_TW: Tensor,
    index_NT: Tensor,
    routes: Tensor,
    totals: Tensor,
    name: str,
    tag: int,
    row_bound: int,
    fill_from: int,
) -> tuple[Tensor, Tensor]:
    """Received rows and their side words: (R, D), (R, W). Side words of no row: 0, from fill_from on -1."""
    exchange = find_exchange(name)
    out_RD, out_RW = x_TD.new_empty(row_bound, x_TD.shape[1]), side_TW.new_empty(row_bound, side_TW.shape[1])
    put_rows(exchange, x_TD, side_TW, index_NT, routes, out_RD, out_RW, tag)
    take_rows(exchange, routes, totals, out_RD, out_RW, tag, fill_from)
    return out_RD, out_RW


@symmetric_dispatch.register_fake  # pyright: ignore[reportUnknownMemberType]
def _(
    state: Tensor,
    x_TD: Tensor,
    side_TW: Tensor,
    index_NT: Tensor,
    routes: Tensor,
    totals: Tensor,
    name: str,
    tag: int,
    row_bound: int,
    fill_from: int,
) -> tuple[Tensor, Tensor]:
    return x_TD.new_empty(row_bound, x_TD.shape[1]), side_TW.new_empty(row_bound, side_TW.shape[1])


@torch.library.custom_op("sluicegate::symmetric_combine", mutates_args=("state", "out_TD"))
def symmetric_combine(
    state: Tensor,
    out_TD: Tensor,
    rows_RX: Tensor,
    side_RK: Tensor,
    index_NT: Tensor,
    routes: Tensor,
    totals: Tensor,
    name: str,
    tag: int,
) -> Tensor:
    """Write into `out` the sum of the rows that come back for each token; returns that of side columns, (T, K).

    Rows have the width and dtype of `out`, or are records of it in uint8.
    """
    exchange = find_exchange(name)
    rows_RX, side_RK = rows_RX.contiguous(), side_RK.contiguous()
    side_TK = side_RK.new_empty(out_TD.shape[0], side_RK.shape[1])
    put_back(exchange, rows_RX, side_RK, routes, totals, tag)
    sum_back(exchange, rows_RX, side_RK, index_NT, routes, out_TD, side_TK, tag)
    return side_TK


@symmetric_combine.register_fake  # pyright: ignore[reportUnknownMemberType]
def _(
    state: Tensor,
    out_TD: Tensor,
    rows_RX: Tensor,
    side_RK: Tensor,
    index_NT: Tensor,
    routes: Tensor,
    totals: Tensor,
    name: str,
    tag: int,
) -> Tensor:
    return side_RK.new_empty(out_TD.shape[0], side_RK.shape[1])
