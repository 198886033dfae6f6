"""Dispatch, experts and combine of a MoE layer as one operator, so that rows travel while experts compute.

The order of launches is written down here. Rows travel on a stream of the exchange's own (comms/beside.py), products
run on the current one; `|` is what happens at the same time, a digit the chunk of tokens:

    forward    there 0 | tokens are counted (and the shared expert); there 1 | experts 0; back 0, there 2 | experts 1;
               back 1 | experts 2; back 2
    backward   there 0 | rows to pairs (and h again); there 1 | data gradients 0; back 0 | data gradients 1;
               back 1 | weight gradients

There is one routing and one plan, and every expert's weight gradient is one sum over all chunks, in fp32 and rounded
once: neither counts nor gradients depend on the number of chunks, but for the order of sums. With one chunk the weight
gradients still run while rows travel back.

Pairs of all chunks stand one behind the other in buffers with room for all pairs, as received rows do: chunks need no
room of their own, and how many there are of each the device alone knows.

Backward needs the received rows, indices, and h. Where the block is checkpointed only h is made again, while the
gradients travel: rows are never sent twice (parallel/activation_checkpoint.py keeps this operator's results). They are
results of forward, in tensors with room for the most that may come; or, with comms.saved_headroom, parts of an arena
that all layers and micro-batches share (comms/saved_arena.py), of which forward returns only where they begin.

Shape suffixes: T tokens of this rank, R room for received rows, K slots per row, P room for pairs, D model dim,
F hidden units of one expert, H = 2 F, E experts of this rank, C chunks, S = C * E, N ranks.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from comms.beside import Arrival, Tables, Travel, departed, start_dispatch
from comms.operators import operator, register_fake
from comms.payload import Payload
from comms.put_and_take import Beside, Received
from comms.saved_arena import BASE_WORDS
from comms.symmetric_exchange import COMBINE, COMBINE_GRAD, DISPATCH, DISPATCH_GRAD, SymmetricPlan
from comms.symmetric_memory import find_exchange
from moe.fused_launches import launch_act_grad, launch_rows, launch_up, launch_weight_grad
from moe.kept_rows import as_results, find_kept, give_back, new_pairs, room_for_kept
from moe.kernels.pair_rows import expand_chunks, sum_chunk
from moe.kernels.sort_pairs import sort_chunk


class Through(NamedTuple):
    """The exchange that rows reach their experts through."""

    plan: SymmetricPlan
    # Expert 0 of this rank among all.
    first_id: int
    dispatch: Payload
    combine: Payload
    # Keep h for backward; or else compute it again there.
    keeps_hidden: bool = True
    # Keep what backward needs in the exchange's arena; False if nobody asks for gradients, or there is none.
    saves: bool = False


def depart(through: Through, x_TD: Tensor, weights_TK: Tensor, ids_TK: Tensor, beside: bool) -> None:
    """Send the first chunk now: `exchanged_experts` with the same arguments follows, after something else.

    Args:
        beside: leave most of the device to that, which are products.
    """
    plan = through.plan
    tables = plan.index_NT, plan.tokens_NT, plan.routes, plan.totals
    name, payload = plan.exchange.name, through.dispatch.rows
    saves = plan.num_items if through.saves else None
    # If nobody comes for it, the graph that led to it is not to stay.
    sent = x_TD.detach(), weights_TK.detach(), ids_TK
    start_dispatch(plan.exchange.state, *sent, *tables, name, plan.layer, payload, beside, saves)


def exchanged_experts(
    through: Through,
    x_TD: Tensor,
    weights_TK: Tensor,
    ids_TK: Tensor,
    w_gate_up_E2FD: Tensor,
    w_down_EDF: Tensor,
    activation: str,
) -> Tensor:
    """(T, D): the weighted sum over each token's experts, wherever they are.

    Args:
        ids_TK: int64, of all experts; -1 for none.
    """
    return _ExchangedExperts.apply(  # type: ignore[no-any-return]
        through, x_TD, weights_TK, ids_TK, w_gate_up_E2FD, w_down_EDF, activation
    )


class _ExchangedExperts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        through: Through,
        x_TD: Tensor,
        weights_TK: Tensor,
        ids_TK: Tensor,
        w_gate_up_E2FD: Tensor,
        w_down_EDF: Tensor,
        activation: str,
    ) -> Tensor:
        plan = through.plan
        tables = plan.index_NT, plan.tokens_NT, plan.routes, plan.totals
        # The exchange's state changes until backward, so it is not saved.
        ctx.through, ctx.activation, ctx.weights_dtype = through, activation, weights_TK.dtype
        y_TD, *kept = exchanged_experts_forward(
            plan.exchange.state, x_TD, weights_TK, ids_TK, w_gate_up_E2FD, w_down_EDF, *tables,
            plan.exchange.name, plan.layer, plan.num_items, through.first_id, activation,
            through.dispatch.rows, through.combine.rows, through.keeps_hidden, through.saves,
        )  # fmt: skip
        ctx.save_for_backward(*kept, w_gate_up_E2FD, w_down_EDF, *tables)
        return y_TD

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        plan, *payloads = ctx.through.plan, ctx.through.combine.grads, ctx.through.dispatch.grads
        found = exchanged_experts_backward(
            plan.exchange.state, grads[0], *ctx.saved_tensors,
            plan.exchange.name, plan.layer, plan.num_items, ctx.activation, *payloads, ctx.weights_dtype,
            ctx.through.keeps_hidden,
        )  # fmt: skip
        d_x_TD, d_weights_TK, dw_gate_up_E2FD, dw_down_EDF = found
        return None, d_x_TD, d_weights_TK, None, dw_gate_up_E2FD, dw_down_EDF, None


@operator("exchanged_experts_forward", mutates_args=("state",))
def exchanged_experts_forward(
    state: Tensor,
    x_TD: Tensor,
    weights_TK: Tensor,
    ids_TK: Tensor,
    w_gate_up_E2FD: Tensor,
    w_down_EDF: Tensor,
    index_NT: Tensor,
    tokens_NT: Tensor,
    routes: Tensor,
    totals: Tensor,
    name: str,
    layer: int,
    num_pairs: int,
    first_id: int,
    activation: str,
    payload_there: str,
    payload_back: str,
    keeps_hidden: bool,
    saves: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """y_TD; then, for backward, received rows, pairs as in moe/kernels/sort_pairs.py, h (no rows: not kept), nothing.

    If it saves: the end of each expert's pairs, and where all else begins in the arena; the others are empty.
    """
    travel = Travel(find_exchange(name), layer, Tables(index_NT, tokens_NT, routes, totals))
    num_experts, num_chunks, num_rows = w_down_EDF.shape[0], travel.num_chunks, travel.chunk_rows
    spare = travel.programs if num_chunks > 1 else 0
    sent, received, arrival, base, _ = departed(
        travel, x_TD, weights_TK, ids_TK, payload_there, num_pairs if saves else None
    )
    ends_S, saved = totals.new_empty(num_chunks * num_experts), travel.exchange.saved
    a_PF, y_PD = (x_TD.new_empty(num_pairs, width) for width in (w_down_EDF.shape[2], x_TD.shape[1]))
    kept = room_for_kept(saved, received.rows_RD, ids_TK.shape[1], ends_S, a_PF, keeps_hidden, base)
    _, pairs, h_PH, _ = kept
    y_TD, no_side = torch.empty_like(sent.rows_RD), (x_TD.new_empty(travel.num_rows, 0), x_TD.new_empty(len(x_TD), 0))
    # Sums of the pairs of chunks that others follow.
    out_RD = x_TD.new_empty(travel.num_rows if num_chunks > 1 else 0, x_TD.shape[1])
    returned: Arrival = None
    for chunk in range(num_chunks):
        coming = None
        if chunk + 1 < num_chunks:
            coming = travel.there(DISPATCH, chunk + 1, sent, received, payload_there, Beside.PRODUCTS, base)
        travel.wait(arrival)
        ours = received.ids_RK, received.weights_RK, totals, chunk, num_rows, first_id, num_experts
        sort_chunk(*ours, pairs, base)
        launch_up(
            received.rows_RD, pairs.rows_P, pairs.weights_P, w_gate_up_E2FD, None, pairs.ends_S, h_PH, a_PF,
            activation, chunk, spare, base, keeps_hidden,
        )  # fmt: skip
        launch_rows("down", a_PF, w_down_EDF, pairs.ends_S, y_PD, False, chunk=chunk, spare=spare)
        back = no_side[0], y_TD, no_side[1], payload_back
        if chunk + 1 == num_chunks:
            # Nothing else is left to do: the exchange itself adds up each row's pairs.
            returned = travel.back(COMBINE, chunk, y_PD, *back, Beside.NOTHING, pairs.slots_RK, base)
        else:
            sum_chunk(y_PD, pairs.slots_RK, totals, chunk, num_rows, out_RD, kept=base)
            returned = travel.back(COMBINE, chunk, out_RD, *back, Beside.PRODUCTS)
        arrival = coming
    travel.wait(returned)
    return y_TD, *as_results(kept, keeps_hidden)


@register_fake(exchanged_experts_forward)
def _(
    state: Tensor,
    x_TD: Tensor,
    weights_TK: Tensor,
    ids_TK: Tensor,
    w_gate_up_E2FD: Tensor,
    w_down_EDF: Tensor,
    index_NT: Tensor,
    tokens_NT: Tensor,
    routes: Tensor,
    totals: Tensor,
    name: str,
    layer: int,
    num_pairs: int,
    first_id: int,
    activation: str,
    payload_there: str,
    payload_back: str,
    keeps_hidden: bool,
    saves: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    num_rows = 0 if saves else find_exchange(name).layout.row_bound
    num_pairs = 0 if saves else num_pairs
    ends_S = totals.new_empty(routes.shape[0] * w_down_EDF.shape[0])
    rows_P, weights_P, slots_RK, _ = new_pairs(num_rows, ids_TK.shape[1], num_pairs, ends_S)
    h_PH = x_TD.new_empty(num_pairs if keeps_hidden else 0, 2 * w_down_EDF.shape[2])
    y_TD, rows_RD = x_TD.new_empty(x_TD.shape), x_TD.new_empty(num_rows, x_TD.shape[1])
    base = totals.new_empty(BASE_WORDS if saves else 0, dtype=torch.int64)
    return y_TD, rows_RD, rows_P, weights_P, slots_RK, ends_S, h_PH, base


@operator("exchanged_experts_backward", mutates_args=("state",))
def exchanged_experts_backward(
    state: Tensor,
    dy_TD: Tensor,
    rows_RD: Tensor,
    rows_P: Tensor,
    weights_P: Tensor,
    slots_RK: Tensor,
    ends_S: Tensor,
    h_PH: Tensor,
    base: Tensor,
    w_gate_up_E2FD: Tensor,
    w_down_EDF: Tensor,
    index_NT: Tensor,
    tokens_NT: Tensor,
    routes: Tensor,
    totals: Tensor,
    name: str,
    layer: int,
    num_pairs: int,
    activation: str,
    payload_there: str,
    payload_back: str,
    weights_dtype: torch.dtype,
    keeps_hidden: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x_TD, weights_TK, w_gate_up and w_down."""
    travel = Travel(find_exchange(name), layer, Tables(index_NT, tokens_NT, routes, totals))
    num_chunks, num_rows, spare = travel.num_chunks, travel.chunk_rows, travel.programs
    hidden, dim, saved = w_down_EDF.shape[2], dy_TD.shape[1], travel.exchange.saved
    results = rows_RD, rows_P, weights_P, slots_RK, ends_S, h_PH, base
    rows_RD, pairs, h_PH, kept = find_kept(saved, travel.num_rows, num_pairs, keeps_hidden, results)
    rows_P, weights_P, slots_RK, _ = pairs
    chunk_pairs = min(num_pairs, num_rows * min(slots_RK.shape[1], w_down_EDF.shape[0]))
    dy_TD = dy_TD.contiguous()
    sent, received = _no_side(dy_TD), _no_side(rows_RD.new_empty(rows_RD.shape))
    # Beside it rows become pairs, and h is made again.
    beside = Beside.COPIES if keeps_hidden else Beside.PRODUCTS
    arrival = travel.there(COMBINE_GRAD, 0, sent, received, payload_there, beside)

    rows_PD, dout_PD, dx_PD = (dy_TD.new_empty(num_pairs, dim) for _ in range(3))
    dh_PH, a_PF = dy_TD.new_empty(num_pairs, 2 * hidden), dy_TD.new_empty(num_pairs, hidden)
    dots_P, d_rows_RD = weights_P.new_empty(weights_P.shape), rows_RD.new_empty(rows_RD.shape)
    d_weights_RK = dy_TD.new_empty(slots_RK.shape, dtype=weights_dtype)
    d_x_TD, d_weights_TK = torch.empty_like(dy_TD), d_weights_RK.new_empty(dy_TD.shape[0], slots_RK.shape[1])
    # What needs no gradient of the output goes first.
    expand_chunks(rows_RD, slots_RK, totals, (0, num_chunks - 1), rows_RD.shape[0], rows_PD, kept, keeps_x=True)
    h_PH = h_PH if keeps_hidden else torch.empty_like(dh_PH)
    returned: Arrival = None
    for chunk in range(num_chunks):
        if not keeps_hidden:
            up = rows_RD, rows_P, weights_P, w_gate_up_E2FD, None, ends_S, h_PH, a_PF, activation
            launch_up(*up, chunk, spare, kept)
        coming = None
        if chunk + 1 < num_chunks:
            coming = travel.there(COMBINE_GRAD, chunk + 1, sent, received, payload_there, Beside.PRODUCTS)
        travel.wait(arrival)
        left = spare if num_chunks > 1 else 0
        expand_chunks(received.rows_RD, slots_RK, totals, (chunk, chunk), num_rows, dout_PD, kept)
        launch_rows("act_grad", dout_PD, w_down_EDF, ends_S, a_PF, True, chunk=chunk, spare=left)
        act = a_PF, h_PH, weights_P, ends_S, dh_PH, dots_P, activation, w_down_EDF.shape[0]
        launch_act_grad(*act, chunk=chunk, num_pairs=chunk_pairs, kept=kept, keeps_hidden=keeps_hidden)
        launch_rows("up_grad", dh_PH, w_gate_up_E2FD.flatten(1, 2), ends_S, dx_PD, True, chunk=chunk, spare=left)
        sum_chunk(dx_PD, slots_RK, totals, chunk, num_rows, d_rows_RD, dots_P, d_weights_RK, kept)
        back = d_rows_RD, d_weights_RK, d_x_TD, d_weights_TK
        returned = travel.back(DISPATCH_GRAD, chunk, *back, payload_back, Beside.PRODUCTS)
        arrival = coming

    # All that is read of it has been launched.
    give_back(saved, kept)
    dw_gate_up_E2FD, dw_down_EDF = torch.empty_like(w_gate_up_E2FD), torch.empty_like(w_down_EDF)
    launch_weight_grad(dout_PD, a_PF, ends_S, dw_down_EDF, spare)
    # By now the last rows have arrived.
    launch_weight_grad(dh_PH, rows_PD, ends_S, dw_gate_up_E2FD.flatten(1, 2))
    travel.wait(returned)
    return d_x_TD, d_weights_TK, dw_gate_up_E2FD, dw_down_EDF


def _no_side(rows_XD: Tensor) -> Received:
    """Rows without side columns."""
    return Received(rows_XD, rows_XD[:, :0], rows_XD.new_empty(rows_XD.shape[0], 0, dtype=torch.int64))


@register_fake(exchanged_experts_backward)
def _(
    state: Tensor,
    dy_TD: Tensor,
    rows_RD: Tensor,
    rows_P: Tensor,
    weights_P: Tensor,
    slots_RK: Tensor,
    ends_S: Tensor,
    h_PH: Tensor,
    base: Tensor,
    w_gate_up_E2FD: Tensor,
    w_down_EDF: Tensor,
    index_NT: Tensor,
    tokens_NT: Tensor,
    routes: Tensor,
    totals: Tensor,
    name: str,
    layer: int,
    num_pairs: int,
    activation: str,
    payload_there: str,
    payload_back: str,
    weights_dtype: torch.dtype,
    keeps_hidden: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    d_weights_TK = dy_TD.new_empty(dy_TD.shape[0], slots_RK.shape[1], dtype=weights_dtype)
    return dy_TD.new_empty(dy_TD.shape), d_weights_TK, torch.empty_like(w_gate_up_E2FD), torch.empty_like(w_down_EDF)
