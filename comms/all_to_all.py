"""Dispatch and combine: move rows to the ranks that need them and bring one result per (token, rank) back.

A *plan* is data, the exchange is a function. `plan_dispatch` learns once per layer who sends how many rows to whom;
`dispatch` sends each token **once** to every rank that asked for it, however many items it feeds there, with opaque
side columns beside it; `combine` brings one row per (token, rank) back and sums them per token.

    tokens_TD --dispatch--> rows_RD --(work on the receiving rank)--> rows_RD --combine--> tokens_TD

Order is part of the contract. Sent rows are ordered by destination rank, then token; received rows by source rank,
then token; partial sums accumulate in fp32 in ascending rank order and are rounded once. So results do not depend on
timing, and one rank (no group) differs from many only by the rounding of the partials.

The backward of each is the mirror of the other: dispatch's gradient is combined, combine's gradient is dispatched.

Where the ranks are on several nodes, the same is done twice (`NodePlan`, comms/nodes.py): across nodes, to the rank
with the sender's local index, and inside the node to the ranks that need the row.

    tokens_TD --across--> one row per (token, node) --inside--> rows_RD --(work)--> rows_RD --inside--> --across-->

Received rows are then in order of (local index of the source, its node, token). Partial sums of a node are added first,
by ascending rank, and rounded to the rows' dtype for the way back; then those of the nodes, ascending. With u the unit
roundoff of that dtype and s_n node n's sum, the result differs from that of one level by at most
u * (sum over n of |s_n| + |one level| + |two levels|), beside the order of sums in fp32.

This file holds the collective backend, which is also what others are tested against (comms/symmetric_exchange.py and
comms/record_exchange.py keep the counts on the device): `all_to_all_single` over NCCL or gloo. It reads the counts on
the host once per plan, because that collective wants host-side splits. Everything travels as bytes: gloo knows no fp8,
and one record per row (values, then side columns, row stride rounded up to 16 bytes) makes one exchange per dispatch.

Shape suffixes: T tokens of this rank, S rows sent, R rows received, N ranks of the group (M nodes x L ranks of each),
D row width, K side columns, B bytes of one record.
"""

from dataclasses import dataclass
from typing import Any, overload

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group  # pyright: ignore

from comms.kernels.codec import RECORD_ALIGNMENT
from comms.kernels.gather_sum import gather_sum
from comms.nodes import NodeGroups
from comms.operators import operator, register_fake
from comms.payload import Payload, coded_like, decode, encode
from comms.symmetric_exchange import DevicePlan, combine_rows, dispatch_rows


@dataclass(frozen=True)
class DispatchPlan:
    """Who sends which rows to whom. `group_name` is empty when one rank does everything: rows then stay in place."""

    group_name: str
    num_tokens: int
    # Token index of each sent row.
    send_tokens_S: Tensor
    # Where token t's row for rank n stands among the sent rows, -1 if it is not sent.
    slots_TN: Tensor
    send_counts: list[int]
    recv_counts: list[int]
    # Items that the received rows feed on this rank, in total.
    num_items: int
    # Whether the host knows that number, and not only a bound.
    is_exact: bool = True

    @property
    def num_rows(self) -> int:
        """Rows received, R."""
        return sum(self.recv_counts)


@dataclass(frozen=True)
class NodePlan:
    """The two levels of an exchange between nodes. What it says of rows and items is what ends on this rank."""

    # To the rank of each node that passes rows on, and from there to those that need them.
    across: "Plan"
    inside: "Plan"

    @property
    def num_tokens(self) -> int:
        """Tokens of this rank, T."""
        return self.across.num_tokens

    @property
    def num_rows(self) -> int:
        """Rows received, R."""
        return self.inside.num_rows

    @property
    def num_items(self) -> int:
        """Items that the received rows feed on this rank, in total."""
        return self.inside.num_items

    @property
    def is_exact(self) -> bool:
        """Whether the host knows the numbers of rows and items, not only bounds."""
        return self.inside.is_exact


def items_by_rank(ids_TK: Tensor, num_ranks: int, ids_per_rank: int) -> Tensor:
    """(T, N) int64: how many of each token's ids rank n has, the n-th `ids_per_rank` of them; nobody has -1."""
    # Division rounds down: -1 stays below the first rank.
    owner_TK = ids_TK // ids_per_rank
    return (owner_TK[:, :, None] == torch.arange(num_ranks, device=ids_TK.device)).sum(1)


@overload
def plan_dispatch(
    items_TN: Tensor, group: NodeGroups, num_items: int | None = None, is_exact: bool = True
) -> NodePlan: ...


@overload
def plan_dispatch(
    items_TN: Tensor, group: dist.ProcessGroup | None, num_items: int | None = None, is_exact: bool = True
) -> DispatchPlan: ...


def plan_dispatch(
    items_TN: Tensor,
    group: dist.ProcessGroup | NodeGroups | None,
    num_items: int | None = None,
    is_exact: bool = True,
) -> DispatchPlan | NodePlan:
    """Plan the exchange of this rank's T tokens.

    Args:
        items_TN: integer; how many items of rank n token t feeds. A token is sent to n if and only if this is positive.
        group: the ranks that exchange, or their two levels; None or a group of one means that every row stays where it
            is.
        num_items: their total, where one rank knows it beforehand, or, not `is_exact`, a bound on it: that spares the
            device a question, for which the host would wait. Of no use to several ranks, who ask each other.
    """
    if isinstance(group, NodeGroups):
        return _plan_over_nodes(items_TN, group)
    return _plan_one_level(items_TN, group, num_items, is_exact)


def _plan_over_nodes(items_TN: Tensor, groups: NodeGroups) -> NodePlan:
    items_TML = items_TN.view(-1, groups.num_nodes, groups.ranks_per_node).int()
    across = _plan_one_level(items_TML.sum(2), groups.across)
    # Whoever passes rows on must plan that too: what each feeds on the ranks of its node goes ahead of it.
    tokens: list[Tensor] = list(torch.split(across.send_tokens_S, across.send_counts))
    record = pack([torch.cat([items_TML[index_S, node] for node, index_S in enumerate(tokens)])])
    received = dispatch_records(record, across.send_counts, across.recv_counts, across.group_name)
    (items_RL,) = unpack(received, [items_TML[:0, 0]])
    return NodePlan(across, _plan_one_level(items_RL, groups.inside))


def _plan_one_level(
    items_TN: Tensor, group: dist.ProcessGroup | None, num_items: int | None = None, is_exact: bool = True
) -> DispatchPlan:
    num_tokens, num_ranks = items_TN.shape
    if group is None or num_ranks == 1:
        tokens = torch.arange(num_tokens, device=items_TN.device)
        total = int(items_TN.sum()) if num_items is None else num_items
        exact = num_items is None or is_exact
        return DispatchPlan("", num_tokens, tokens, tokens[:, None], [num_tokens], [num_tokens], total, exact)
    assert num_ranks == group.size(), (num_ranks, group.size())
    is_sent_TN = items_TN > 0
    send_N2 = torch.stack([is_sent_TN.sum(0), items_TN.sum(0)], dim=1)
    recv_N2 = exchange_counts(send_N2, group.group_name)
    # The one host synchronization of a dispatch.
    table: list[list[list[int]]] = torch.stack([send_N2, recv_N2]).tolist()  # pyright: ignore
    sent, received = table
    send_counts = [rows for rows, _ in sent]
    slots_TN, send_tokens_S = _send_order(is_sent_TN, sum(send_counts))
    return DispatchPlan(
        group_name=group.group_name,
        num_tokens=num_tokens,
        send_tokens_S=send_tokens_S,
        slots_TN=slots_TN,
        send_counts=send_counts,
        recv_counts=[rows for rows, _ in received],
        num_items=sum(items for _, items in received),
    )


def _send_order(is_sent_TN: Tensor, num_sent: int) -> tuple[Tensor, Tensor]:
    """Slots by (destination rank, token), and their inverse; sized by the host so that the device is not asked."""
    num_tokens, num_ranks = is_sent_TN.shape
    flat = is_sent_TN.t().reshape(-1)
    slots = torch.where(flat, flat.cumsum(0) - 1, -1)
    tokens = torch.arange(num_tokens, device=flat.device).repeat(num_ranks)
    # Unsent entries are written to one spare place behind the end.
    send_tokens = tokens.new_empty(num_sent + 1).scatter_(0, torch.where(flat, slots, num_sent), tokens)
    return slots.view(num_ranks, num_tokens).t().contiguous(), send_tokens[:num_sent]


# The same for every backend: what differs is where the counts are.
Plan = DispatchPlan | DevicePlan | NodePlan


# What is sent if nobody says: rows and gradients in their own dtype.
AS_IT_IS = Payload()


def dispatch(
    plan: Plan, x_TD: Tensor, weights_TK: Tensor, ids_TK: Tensor, payload: Payload = AS_IT_IS
) -> tuple[Tensor, Tensor, Tensor]:
    """Send each token to the ranks of its plan, with its side columns.

    Args:
        x_TD: rows, any floating dtype.
        weights_TK: floating side columns; gradients flow back through them.
        ids_TK: integer side columns, sent as int32.
        payload: what rows, and on their way back gradients, are sent as. Nothing is coded where nothing is sent.

    Returns:
        rows_RD, weights_RK, ids_RK (int64) in order of (source rank, token). Unless the plan is exact, ids -1 follow
        behind the last row.
    """
    if isinstance(plan, DevicePlan):
        return dispatch_rows(plan, x_TD, weights_TK, ids_TK, payload)
    if isinstance(plan, NodePlan):
        return dispatch(plan.inside, *dispatch(plan.across, x_TD, weights_TK, ids_TK, payload), payload)
    if not plan.group_name:
        return x_TD, weights_TK, ids_TK
    return _Dispatch.apply(plan, x_TD, weights_TK, ids_TK, payload)  # type: ignore[no-any-return]


def combine(plan: Plan, rows_RD: Tensor, payload: Payload = AS_IT_IS) -> Tensor:
    """Bring one row per (token, rank) back and sum them: out_TD in the dtype of the rows. Unsent tokens get zero."""
    if isinstance(plan, DispatchPlan) and not plan.group_name:
        return rows_RD
    return _bring_back(plan, end_of_recomputation(rows_RD, _some_table(plan)), payload)


def _some_table(plan: Plan) -> Tensor:
    """For the end of a recomputation: a tensor that the plan keeps anyway."""
    if isinstance(plan, NodePlan):
        return _some_table(plan.across)
    return plan.routes if isinstance(plan, DevicePlan) else plan.slots_TN


def _bring_back(plan: Plan, rows_RD: Tensor, payload: Payload) -> Tensor:
    if isinstance(plan, DevicePlan):
        return combine_rows(plan, rows_RD, payload)
    if isinstance(plan, NodePlan):
        # One end of recomputation for both: a second one would have the way back inside the node repeated.
        return _bring_back(plan.across, _bring_back(plan.inside, rows_RD, payload), payload)
    if not plan.group_name:
        return rows_RD
    return _Combine.apply(plan, rows_RD, payload)  # type: ignore[no-any-return]


def end_of_recomputation(rows_RD: Tensor, anchor: Tensor) -> Tensor:
    """The rows themselves; checkpointing recomputes no more than what led to them. `anchor` is any tensor."""
    return _EndOfRecomputation.apply(rows_RD, anchor)  # type: ignore[no-any-return]


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, plan: DispatchPlan, x_TD: Tensor, weights_TK: Tensor, ids_TK: Tensor, payload: Payload
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.plan, ctx.payload = plan, payload
        side = [weights_TK, ids_TK.to(torch.int32)]
        rows, weights, ids = _send(plan, x_TD, side, payload.rows)
        ids = ids.long()
        ctx.mark_non_differentiable(ids)
        return rows, weights, ids

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor, Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        d_x_TD, d_weights_TK = _return(ctx.plan, grads[0], [grads[1]], ctx.payload.grads)
        return None, d_x_TD, d_weights_TK, None, None


class _EndOfRecomputation(torch.autograd.Function):
    """The identity, which saves a tensor. Checkpointing recomputes up to the last tensor that forward saved.

    So a recomputation ends here: before the exchange back, and outside the module that made the rows. An end inside it
    would cut off its forward hooks, and FSDP would take the next step's first forward for a part of this one.
    """

    @staticmethod
    def forward(ctx: Any, rows_RD: Tensor, anchor: Tensor) -> Tensor:
        ctx.save_for_backward(anchor)
        return rows_RD.view_as(rows_RD)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return grads[0], None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, plan: DispatchPlan, rows_RD: Tensor, payload: Payload) -> Tensor:
        ctx.plan, ctx.payload = plan, payload
        return _return(plan, rows_RD, [], payload.rows)[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return None, _send(ctx.plan, grads[0], [], ctx.payload.grads)[0], None


def _send(plan: DispatchPlan, x_TD: Tensor, side: list[Tensor], payload: str) -> list[Tensor]:
    """Rows and side columns of the plan's tokens at their destinations."""
    index = plan.send_tokens_S
    record = pack([encode(x_TD, payload)[index], *(column[index] for column in side)])
    received = dispatch_records(record, plan.send_counts, plan.recv_counts, plan.group_name)
    coded, *columns = unpack(received, [coded_like(x_TD, payload), *side])
    return [decode(coded, payload, x_TD.shape[1], x_TD.dtype), *columns]


def _return(plan: DispatchPlan, rows_RD: Tensor, side: list[Tensor], payload: str) -> list[Tensor]:
    """The sum per token of rows, and of side columns, that come back."""
    record = pack([encode(rows_RD, payload), *side])
    returned = return_records(record, plan.recv_counts, plan.send_counts, plan.group_name)
    coded, *columns = unpack(returned, [coded_like(rows_RD, payload), *side])
    rows_SD = decode(coded, payload, rows_RD.shape[1], rows_RD.dtype)
    return [gather_sum(column, plan.slots_TN) for column in (rows_SD, *columns)]


def pack(columns: list[Tensor]) -> Tensor:
    """Lay 2-D tensors of equal length side by side as bytes: (rows, B) with B rounded up to 16."""
    parts = [_as_bytes(column) for column in columns]
    width = sum(part.shape[1] for part in parts)
    if padding := -width % RECORD_ALIGNMENT:
        parts.append(parts[0].new_zeros(parts[0].shape[0], padding))
    return torch.cat(parts, dim=1) if len(parts) > 1 else parts[0]


def _as_bytes(column: Tensor) -> Tensor:
    num_rows, width = column.shape
    # By way of one dim: a dim of size 1 may have any stride, and a view of another dtype wants 1.
    return column.contiguous().view(-1).view(torch.uint8).view(num_rows, width * column.element_size())


def unpack(record_RB: Tensor, like: list[Tensor]) -> list[Tensor]:
    """Undo `pack`: one contiguous tensor per entry of `like`, with its dtype and its number of columns."""
    columns: list[Tensor] = []
    start = 0
    for example in like:
        width = example.shape[1] * example.element_size()
        column = record_RB[:, start : start + width]
        # A single row counts as contiguous wherever it starts, but a wider dtype needs an aligned start.
        column = column.clone(memory_format=torch.contiguous_format) if start else column.contiguous()
        columns.append(column.view(example.dtype))
        start += width
    return columns


def _exchange(record: Tensor, send_counts: list[int], recv_counts: list[int], group_name: str) -> Tensor:
    received = record.new_empty(sum(recv_counts), record.shape[1])
    group = _resolve_process_group(group_name)  # type: ignore[no-untyped-call]
    dist.all_to_all_single(received, record, recv_counts, send_counts, group=group)  # pyright: ignore
    return received


# Operators, so that activation checkpointing can see them and keep their results: a dispatch is never recomputed.


@operator("dispatch_records")
def dispatch_records(record: Tensor, send_counts: list[int], recv_counts: list[int], group_name: str) -> Tensor:
    """Send byte records to the ranks that work on them; returns what this rank received, by source rank."""
    return _exchange(record, send_counts, recv_counts, group_name)


@operator("return_records")
def return_records(record: Tensor, send_counts: list[int], recv_counts: list[int], group_name: str) -> Tensor:
    """The way back of `dispatch_records`."""
    return _exchange(record, send_counts, recv_counts, group_name)


@operator("exchange_counts")
def exchange_counts(send_N2: Tensor, group_name: str) -> Tensor:
    """Transpose a small table over the ranks: row n goes to rank n, and row m of the result came from rank m."""
    received = torch.empty_like(send_N2)
    dist.all_to_all_single(received, send_N2.contiguous(), group=_resolve_process_group(group_name))  # type: ignore[no-untyped-call]
    return received


@register_fake(dispatch_records)
@register_fake(return_records)
def _(record: Tensor, send_counts: list[int], recv_counts: list[int], group_name: str) -> Tensor:
    return record.new_empty(sum(recv_counts), record.shape[1])


@register_fake(exchange_counts)
def _(send_N2: Tensor, group_name: str) -> Tensor:
    return torch.empty_like(send_N2)
