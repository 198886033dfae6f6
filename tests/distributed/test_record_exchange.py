"""The exchange by records between processes, against the collective backend in the same processes.

A transport over gloo stands in for NVSHMEM: the same records by the same tables, in buffers that are poisoned before
every use. Rows are moved and sums are in the collective backend's order, so equality is exact; the
experts of a layer may do their last few elements in another way than the rest, which leaves 1e-6.
"""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from comms.all_to_all import AS_IT_IS, combine, dispatch, plan_dispatch
from comms.backend import choose_backend
from comms.config import CommsConfig
from comms.payload import Payload
from comms.record_exchange import (
    RecordExchange,
    create_record_exchange,
    plan_record_layout,
    plan_records,
)
from comms.record_transport import CollectiveTransport
from comms.symmetric_exchange import describe_tag
from comms.symmetric_memory import NoRoomError, overflow_flag
from tests.distributed.exchanged_layer import layer_pass
from tests.distributed.harness import run_workers

MAX_TOKENS, WIDTH, TOP_K, IDS_PER_RANK = 12, 40, 3, 2
SIZES = {"experts_per_rank": IDS_PER_RANK, "top_k": TOP_K, "width": WIDTH}
CPU = torch.device("cpu")


def make_exchange(row_bytes: int = 8 * WIDTH, capacity: float | None = None) -> RecordExchange:
    group, num_ranks = dist.group.WORLD, dist.get_world_size()
    assert group is not None
    layout = plan_record_layout(num_ranks, MAX_TOKENS, TOP_K, row_bytes, 12 * TOP_K, capacity)
    transport = CollectiveTransport(group, layout.buffer_bytes)
    return create_record_exchange(group, CPU, layout, MAX_TOKENS, describe_tag, TOP_K, transport)


def calls_of(exchange: RecordExchange) -> int:
    assert isinstance(exchange.transport, CollectiveTransport)
    return exchange.transport.calls


def draw_ids(num_tokens: int, pattern: str, generator: torch.Generator) -> Tensor:
    num_ranks = dist.get_world_size()
    ids = torch.rand(num_tokens, IDS_PER_RANK * num_ranks, generator=generator).argsort(1)[:, :TOP_K]
    if pattern == "last":
        return ids % IDS_PER_RANK + IDS_PER_RANK * (num_ranks - 1)
    return ids.masked_fill(torch.rand(ids.shape, generator=generator) < (1 if pattern == "nobody" else 0.3), -1)


def plan_either(exchange: RecordExchange | None, ids: Tensor, layer: int) -> Any:
    if exchange is not None:
        return plan_records(ids, IDS_PER_RANK, exchange, layer, 10**6)
    owner = torch.where(ids >= 0, ids // IDS_PER_RANK, -1)
    items = torch.stack([(owner == rank).sum(1) for rank in range(dist.get_world_size())], 1)
    return plan_dispatch(items, dist.group.WORLD)


def work(rows: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    """A stand-in for experts; whatever stands where no row came may come back to nobody."""
    is_ours = torch.where(ids >= 0, ids // IDS_PER_RANK, -1) == dist.get_rank()
    scale = torch.where(is_ours, weights * (ids + 1), 0).sum(1, keepdim=True)
    is_row = is_ours.any(1, keepdim=True)
    return torch.where(is_row, torch.where(is_row, rows, 0) * scale, float("nan")).to(rows.dtype)


def round_trip(
    exchange: RecordExchange | None,
    tokens: tuple[int, ...],
    seed: int,
    pattern: str = "random",
    dtype: torch.dtype = torch.bfloat16,
    payload: Payload = AS_IT_IS,
) -> list[Tensor]:
    """Output, gradients and received rows, weights and ids, by either backend."""
    generator = torch.Generator().manual_seed(1000 * seed + dist.get_rank())
    ids = draw_ids(tokens[dist.get_rank()], pattern, generator)
    x = torch.randn(len(ids), WIDTH, generator=generator).to(dtype).requires_grad_()
    weights = torch.rand(ids.shape, generator=generator).to(torch.promote_types(dtype, torch.float32)).requires_grad_()
    plan = plan_either(exchange, ids, seed % 7)
    rows, row_weights, row_ids = dispatch(plan, x, weights, ids, payload)
    out = combine(plan, work(rows, row_weights, row_ids), payload)
    upstream = torch.randn(out.shape, generator=generator).to(out.dtype)
    return [
        out.detach(),
        *torch.autograd.grad(out, [x, weights], upstream),
        rows.detach(),
        row_weights.detach(),
        row_ids,
    ]


def assert_same(ours: list[Tensor], theirs: list[Tensor]) -> None:
    for name, a, b in zip(("out", "dx", "dweights", "rows", "weights", "ids"), ours, theirs, strict=True):
        if name in ("weights", "ids"):
            assert bool((a[len(b) :] == (0 if name == "weights" else -1)).all()), name
        a = a[: len(b)] if name in ("rows", "weights", "ids") else a
        assert a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b), name


def check_cases(cases: list[tuple[tuple[int, ...], int, str]], dtypes: list[torch.dtype], payload: Payload) -> None:
    exchange = make_exchange()
    for index, (tokens, seed, pattern) in enumerate(cases):
        dtype = dtypes[index % len(dtypes)]
        ours = round_trip(exchange, tokens, seed, pattern, dtype, payload)
        assert_same(ours, round_trip(None, tokens, seed, pattern, dtype, payload))
    exchange.check()
    exchange.check_overflow()


DTYPES = [torch.bfloat16, torch.float32, torch.float64]
PATTERNS = ("random", "last", "nobody")


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_edges_bring_what_the_collective_backend_brings(num_ranks: int) -> None:
    sizes = [(12,) * num_ranks, (0,) * num_ranks, (5, *(0,) * (num_ranks - 1)), (0, *range(1, num_ranks))]
    sizes.append((12, 9, 6, 3)[:num_ranks])
    cases = [(tokens, seed, pattern) for seed, tokens in enumerate(sizes) for pattern in PATTERNS]
    run_workers(check_cases, num_ranks, cases, DTYPES[:2], AS_IT_IS)
    run_workers(check_cases, num_ranks, cases, DTYPES[2:], AS_IT_IS)
    run_workers(check_cases, num_ranks, cases, DTYPES[:2], Payload("mxfp8", "mxfp8"))


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_plan_brings_what_the_collective_backend_brings(num_ranks: int, data: st.DataObject) -> None:
    tokens = st.tuples(*[st.integers(0, MAX_TOKENS)] * num_ranks)
    case = st.tuples(tokens, st.integers(0, 10**6), st.sampled_from(PATTERNS))
    payload = data.draw(st.sampled_from([AS_IT_IS, Payload("mxfp8"), Payload("model", "mxfp8")]))
    run_workers(check_cases, num_ranks, data.draw(st.lists(case, min_size=3, max_size=3)), DTYPES[:2], payload)


def check_layers_in_flight() -> None:
    """Six forwards before the first backward: what an operator returned is not what the next one writes into."""

    def forward(exchange: RecordExchange | None, seed: int) -> tuple[Tensor, list[Tensor]]:
        generator = torch.Generator().manual_seed(100 * seed + dist.get_rank())
        ids = draw_ids(4 + seed + dist.get_rank(), "random", generator)
        x = torch.randn(len(ids), WIDTH, generator=generator).requires_grad_()
        weights = torch.rand(ids.shape, generator=generator).requires_grad_()
        hidden = x
        for layer in range(2):
            plan = plan_either(exchange, ids, layer)
            hidden = hidden + combine(plan, work(*dispatch(plan, hidden, weights, ids)))
        return hidden, [x, weights]

    def run(exchange: RecordExchange | None) -> list[Tensor]:
        under_way = [forward(exchange, seed) for seed in range(3)]
        return [x for out, leaves in under_way for x in (out, *torch.autograd.grad(out, leaves, torch.ones_like(out)))]

    exchange = make_exchange()
    ours = run(exchange)
    for tensor in exchange.moves.tensors():
        tensor.fill_(255)
    for a, b in zip(ours, run(None), strict=True):
        assert torch.equal(a, b)


def test_layers_and_micro_batches_are_in_flight_together() -> None:
    run_workers(check_layers_in_flight, 3)


def check_layer() -> None:
    exchange = make_exchange()
    for mode in ("none", "selective", "full"):
        before = calls_of(exchange)
        for ours, theirs in zip(layer_pass(exchange, mode, **SIZES), layer_pass(None, "none", **SIZES), strict=True):
            assert float((ours - theirs).norm()) <= 1e-6 * float(theirs.norm())
        # Of each call: counts, rows there and back, gradients there and back. A recomputation sends nothing.
        assert calls_of(exchange) - before == 10


def test_a_layer_dispatches_once_whatever_is_recomputed() -> None:
    run_workers(check_layer, 2)


def check_overflow() -> None:
    """Everything goes to the last rank, which has room for 18 rows: those of the first ranks."""
    num_ranks, rank = dist.get_world_size(), dist.get_rank()
    exchange = make_exchange(capacity=1.5)
    ids = draw_ids(10, "last", torch.Generator().manual_seed(rank))
    plan = plan_records(ids, IDS_PER_RANK, exchange, 4, 10**6)
    everyone = [torch.empty_like(plan.routes) for _ in range(num_ranks)]
    dist.all_gather(everyone, plan.routes)
    assert all(torch.equal(routes, plan.routes) for routes in everyone)
    x = torch.randn(10, WIDTH, generator=torch.Generator().manual_seed(rank)).requires_grad_()
    rows, weights, _ = dispatch(plan, x, torch.ones(ids.shape), ids)
    assert len(rows) == 18 and int((weights[:, 0] > 0).sum()) == (18 if rank == num_ranks - 1 else 0)
    out = combine(plan, rows)
    kept = max(0, min(10, 18 - 10 * rank))
    assert torch.equal(out[:kept], x[:kept]) and not bool(out[kept:].any())
    (gradient,) = torch.autograd.grad(out, x, torch.ones_like(out))
    assert bool((gradient[:kept] == 1).all()) and not bool(gradient[kept:].any())
    flag = overflow_flag()
    assert flag is not None and float(flag) == float(rank == num_ranks - 1)
    if rank < num_ranks - 1:
        return exchange.check_overflow()
    message = (
        rf"plan of MoE layer 4: {10 * num_ranks} rows came to rank {rank}, which has room for 18: raise comms.capac"
    )
    with pytest.raises(NoRoomError, match=message):
        exchange.check_overflow()


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_rows_without_room_are_noted_and_sent_nowhere(num_ranks: int) -> None:
    run_workers(check_overflow, num_ranks)


def check_items_and_tokens() -> None:
    exchange, rank = make_exchange(), dist.get_rank()
    plan_records(draw_ids(6, "last", torch.Generator()), IDS_PER_RANK, exchange, 1, 30)
    with pytest.raises(ValueError, match=r"13 tokens in one pass, and this run's exchange has room for 12 per rank"):
        plan_records(torch.zeros(13, TOP_K).long(), IDS_PER_RANK, exchange, 1, 30)
    if rank == 0:
        return exchange.check_overflow()
    with pytest.raises(NoRoomError, match=r"plan of MoE layer 1: 36 pairs fell to rank 1, which has room for 30"):
        exchange.check_overflow()


def test_more_items_or_tokens_than_there_is_room_for_are_told() -> None:
    run_workers(check_items_and_tokens, 2)


def check_compiled() -> None:
    """The compiler may neither drop an exchange whose result is unused, nor merge two equal ones, nor reorder them."""
    exchange, num_ranks = make_exchange(), dist.get_world_size()
    generator = torch.Generator().manual_seed(dist.get_rank())
    ids, x = draw_ids(8, "random", generator), torch.randn(8, WIDTH, generator=generator)
    weights = torch.rand(ids.shape, generator=generator)
    ops, name, bound = torch.ops.sluicegate, exchange.name, exchange.layout.row_bound

    def chain(state: Tensor, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        tables = ops.exchange_record_counts(state, ids, num_ranks, IDS_PER_RANK, name, 0, 10**6)
        there = weights, ids, *tables, name, 1, bound, "model"
        ops.record_dispatch(state, x, *there)
        rows, _, row_ids = ops.record_dispatch(state, x, *there)
        again, _, _ = ops.record_dispatch(state, x, *there)
        both = torch.where((row_ids >= 0).any(1, keepdim=True), rows + again, 0)
        out, _ = ops.record_combine(state, both, rows[:, :0], *tables, name, 2, "model")
        return out + 1, rows, row_ids

    compiled = torch.compile(chain, fullgraph=True, backend="aot_eager")
    (expected, kept, kept_ids), before = chain(exchange.state, x), calls_of(exchange)
    is_row = (kept_ids >= 0).any(1)
    for _ in range(2):
        out, rows, row_ids = compiled(exchange.state, x)
        assert torch.equal(out, expected) and torch.equal(row_ids, kept_ids)
        assert torch.equal(rows[is_row], kept[is_row])
    assert calls_of(exchange) - before == 2 * 5 and int(exchange.state) == 3 * 5


def test_a_compiled_graph_keeps_every_exchange() -> None:
    run_workers(check_compiled, 2)


def check_refused() -> None:
    with pytest.raises(
        ValueError, match=r"comms.backend=nvshmem cannot run here: it needs GPUs; use comms.backend=coll"
    ):
        choose_backend(CommsConfig(backend="nvshmem"), dist.group.WORLD, CPU)


def test_nvshmem_is_never_replaced_by_another_backend() -> None:
    run_workers(check_refused, 2)
