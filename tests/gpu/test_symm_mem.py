"""The exchange through symmetric memory on two GPUs, against the collective backend in the same processes.

Rows are moved and sums keep the collective backend's order, so whatever both compute is compared bit for bit. Each
check runs on both ranks with an arena of its own; what it raised is the test's failure.
"""

import random
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from comms.all_to_all import combine, dispatch, plan_dispatch
from comms.payload import Payload
from comms.put_and_take import put_back, put_counts, put_rows, sum_back, take_counts, take_rows
from comms.symmetric_exchange import COMBINE, DISPATCH, PLAN, SymmetricPlan, _order, plan_exchange, tag_of
from comms.symmetric_memory import Exchange
from moe.config import MoEConfig
from moe.layer import MoE
from tests.gpu.two_backends import (
    EXPERTS_PER_RANK,
    TOP_K,
    WIDTH,
    Inputs,
    assert_same,
    inputs,
    make_exchange,
    round_trip,
    work,
)
from tests.gpu.two_ranks import NUM_RANKS, Check, assert_passed, run_checks

pytestmark = pytest.mark.multi_gpu(2)


# ---- checks: each runs on both ranks


def equal_to_the_collective_backend(device: torch.device) -> None:
    exchange = make_exchange(device)
    rank = dist.get_rank()
    sizes = [(1000, 700), (0, 513), (1, 0), (0, 0), (1024, 1024), (17, 1)]
    for layer, (pattern, tokens) in enumerate((p, t) for p in ("random", "last", "nobody") for t in sizes):
        given = inputs(device, tokens[rank], layer, pattern=pattern)
        assert_same(round_trip(exchange, given, layer), round_trip(None, given))
    exchange.check()
    exchange.check_overflow()


def other_widths_and_dtypes(device: torch.device) -> None:
    exchange = make_exchange(device, width=8192)
    for layer, (width, dtype) in enumerate([(8, torch.bfloat16), (2880, torch.bfloat16), (8192, torch.float32)]):
        given = inputs(device, 300 + dist.get_rank(), layer, width)
        given = given._replace(x_TD=given.x_TD.to(dtype))
        assert_same(round_trip(exchange, given, layer), round_trip(None, given))


def coded_rows(device: torch.device) -> None:
    """mxfp8 there, back, and for both gradients."""
    exchange = make_exchange(device)
    for layer, payload in enumerate([Payload("mxfp8"), Payload("model", "mxfp8"), Payload("mxfp8", "mxfp8")]):
        given = inputs(device, 300 + 77 * dist.get_rank(), layer)
        assert_same(round_trip(exchange, given, layer, payload), round_trip(None, given, 0, payload))
    exchange.check()


def no_collective_is_called(device: torch.device) -> None:
    exchange = make_exchange(device)
    assert exchange.arena.is_cuda and exchange.handle is not None
    given = inputs(device, 200, 0)
    plan = plan_exchange(given.items_TN, exchange, 0, 10**6)
    assert isinstance(plan, SymmetricPlan) and plan.routes.is_cuda

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a collective was called")

    with patch.object(dist, "all_to_all_single", refuse):
        round_trip(exchange, given)


def delay(chooser: random.Random) -> None:
    """Up to a quarter of a millisecond, in one of three places."""
    if chooser.random() < 0.3:
        torch.cuda._sleep(chooser.randrange(500_000))


def a_thousand_rounds_with_delays(device: torch.device) -> None:
    """Random sizes; the ranks' delays differ, before puts and between puts and waits."""
    exchange, rank = make_exchange(device, timeout=60), dist.get_rank()
    chooser = random.Random(rank)
    wrong = torch.zeros((), dtype=torch.int64, device=device)
    for step in range(1000):
        given = inputs(device, chooser.randrange(300), step, 64)
        (index, sent), bound = _order(given.items_TN), exchange.layout.row_bound
        delay(chooser)
        put_counts(exchange, sent, tag_of(step % 50, PLAN))
        delay(chooser)
        routes, totals = take_counts(exchange, tag_of(step % 50, PLAN), 10**6)
        side = torch.cat([given.weights_TK.view(torch.int32), given.ids_TK.int()], 1)
        rows, row_side = given.x_TD.new_empty(bound, 64), side.new_empty(bound, side.shape[1])
        delay(chooser)
        put_rows(exchange, given.x_TD, side, index, routes, rows, row_side, tag_of(step % 50, DISPATCH))
        delay(chooser)
        take_rows(exchange, routes, totals, rows, row_side, tag_of(step % 50, DISPATCH), TOP_K)
        rows = work(rows, row_side[:, :TOP_K].contiguous().view(torch.float32), row_side[:, TOP_K:].long())
        no_side = rows[:, :0].contiguous()
        delay(chooser)
        put_back(exchange, rows, no_side, routes, totals, tag_of(step % 50, COMBINE))
        delay(chooser)
        out, no_sums = torch.empty_like(given.x_TD), no_side[:0]
        sum_back(exchange, rows, no_side, index, routes, out, no_sums, tag_of(step % 50, COMBINE))
        wrong += (out != round_trip(None, given)[0]).sum()
    exchange.check()
    assert int(wrong) == 0


def two_layers_and_three_micro_batches(device: torch.device) -> None:
    """Six forwards before the first backward, and the host waits for nothing."""
    exchange = make_exchange(device)
    batches = [inputs(device, 400 + 100 * dist.get_rank() + step, step) for step in range(3)]

    def forward(through: Exchange | None, given: Inputs) -> tuple[Tensor, list[Tensor]]:
        x, weights = given.x_TD.clone().requires_grad_(), given.weights_TK.clone().requires_grad_()
        hidden = x
        for layer in range(2):
            if through is None:
                plan: Any = plan_dispatch(given.items_TN, dist.group.WORLD)
            else:
                plan = plan_exchange(given.items_TN, through, layer, 10**6)
            hidden = hidden + combine(plan, work(*dispatch(plan, hidden, weights, given.ids_TK)))
        return hidden, [x, weights]

    def run(through: Exchange | None) -> list[Tensor]:
        under_way = [forward(through, given) for given in batches]
        found = []
        for out, leaves in under_way:
            found += [out.detach(), *torch.autograd.grad(out, leaves, torch.ones_like(out))]
        return found

    # The first time kernels are loaded, which may wait.
    run(exchange)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        ours = run(exchange)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for a, b in zip(ours, run(None), strict=True):
        assert torch.equal(a, b)
    exchange.check()


def compiled_chain_of_two_dispatches(device: torch.device) -> None:
    """The compiler may neither drop an exchange whose result is unused, nor merge two equal ones, nor reorder them."""
    exchange = make_exchange(device, timeout=120)
    given = inputs(device, 256, 0)
    index, sent = _order(given.items_TN)
    ops, name, bound = torch.ops.sluicegate, exchange.name, exchange.layout.row_bound

    def chain(state: Tensor, x: Tensor, side: Tensor) -> tuple[Tensor, Tensor]:
        routes, totals = ops.exchange_routes(state, sent, name, tag_of(0, PLAN), 10**6)
        tables = index, routes, totals
        _, _ = ops.symmetric_dispatch(state, x, side, *tables, name, tag_of(0, DISPATCH), bound, 0)
        rows, out_side = ops.symmetric_dispatch(state, x + 1, side, *tables, name, tag_of(0, DISPATCH), bound, 0)
        again, _ = ops.symmetric_dispatch(state, x + 1, side, *tables, name, tag_of(0, DISPATCH), bound, 0)
        is_row = (torch.arange(bound, device=x.device) < totals[0])[:, None]
        both = torch.where(is_row, rows + again, 0)
        out, second = torch.empty_like(x), torch.empty_like(x)
        ops.symmetric_combine(state, out, both, out_side[:, :0], *tables, name, tag_of(0, COMBINE))
        out = out * 2
        ops.symmetric_combine(state, second, both, out_side[:, :0], *tables, name, tag_of(0, COMBINE))
        return out + second, rows

    side = given.ids_TK.int()
    before = int(exchange.state)
    eager, rows = chain(exchange.state, given.x_TD, side)
    kept = rows.clone()
    compiled = torch.compile(chain, fullgraph=True)
    for _ in range(3):
        found, _ = compiled(exchange.state, given.x_TD, side)
        equal = torch.equal(found, eager)
        # Ranks do not compile equally fast; whoever gave up waiting says so.
        exchange.check()
        assert equal
    exchange.check()
    # What an operator returned is not what the next one writes into.
    assert torch.equal(rows.view(torch.int16), kept.view(torch.int16))
    torch.cuda.synchronize()
    words = exchange.arena[: 8 * exchange.layout.failed_at].view(torch.int64).view(3, -1)
    # Epochs of counts, rows there and rows back: four runs of the chain.
    assert words[:, 2 * NUM_RANKS].tolist() == [4, 12, 8] and before == 0


def other_collectives_run_beside(device: torch.device) -> None:
    """As FSDP's: gathers and reductions on NCCL's own stream while rows travel."""
    exchange = make_exchange(device)
    flat = torch.randn(2**22, device=device)
    for step in range(30):
        given = inputs(device, 900, step)
        expected = round_trip(None, given)
        gathered = torch.empty(NUM_RANKS * flat.numel(), device=device)
        pending = [dist.all_gather_into_tensor(gathered, flat, async_op=True)]
        reduced = flat.clone()
        pending.append(dist.all_reduce(reduced, async_op=True))
        ours = round_trip(exchange, given, step)
        for work_of_nccl in pending:
            work_of_nccl.wait()
        assert_same(ours, expected)
        assert torch.equal(gathered.view(NUM_RANKS, -1)[dist.get_rank()], flat)
    exchange.check()


def a_captured_graph_replays(device: torch.device) -> None:
    exchange = make_exchange(device)
    given = inputs(device, 500, 0)
    static = given.x_TD.clone()

    def forward() -> Tensor:
        plan = plan_exchange(given.items_TN, exchange, 3, 10**6)
        return combine(plan, work(*dispatch(plan, static, given.weights_TK, given.ids_TK)))

    with torch.no_grad():
        side_stream = torch.cuda.Stream()
        side_stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side_stream):
            forward()
        torch.cuda.current_stream().wait_stream(side_stream)
        torch.cuda.synchronize()
        dist.barrier()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = forward()
        for step in range(5):
            static.copy_(inputs(device, 500, step + 1).x_TD)
            graph.replay()
            expected = round_trip(None, given._replace(x_TD=static.clone()))[0]
            assert torch.equal(out, expected)
    exchange.check()


def a_layer_equals_that_of_the_collective_backend(device: torch.device) -> None:
    """Room for more pairs than come changes no result: 1e-3 leaves kernels free to choose another tile."""
    config = MoEConfig(num_experts=NUM_RANKS * EXPERTS_PER_RANK, top_k=TOP_K, expert_dim=128, backend="grouped_mm")
    results = []
    for exchange in (None, make_exchange(device)):
        torch.manual_seed(dist.get_rank())
        layer = MoE(config, WIDTH).to(device, torch.bfloat16)
        first = dist.get_rank() * EXPERTS_PER_RANK
        for name, parameter in list(layer.experts.named_parameters()):
            part = torch.randn(parameter.shape, device=device)[first : first + EXPERTS_PER_RANK] * 0.1
            setattr(layer.experts, name, torch.nn.Parameter(part.bfloat16()))
        with torch.no_grad():
            layer.router.weight.copy_(
                torch.linspace(-1, 1, layer.router.weight.numel()).sin().view_as(layer.router.weight)
            )
        layer.ep_group, layer.exchange = dist.group.WORLD, exchange
        x = torch.randn(2, 300, WIDTH, device=device, dtype=torch.bfloat16).requires_grad_()
        y, _ = layer(x)
        y.backward(torch.ones_like(y))
        results.append([y.detach(), x.grad, *(parameter.grad for parameter in layer.parameters())])
    for ours, theirs in zip(results[1], results[0], strict=True):
        assert bool(ours.isfinite().all())
        assert float((ours.float() - theirs.float()).norm()) <= 1e-3 * float(theirs.float().norm())


def a_rank_that_does_not_come_is_named(device: torch.device) -> None:
    exchange = make_exchange(device, timeout=1)
    if dist.get_rank() == 0:
        put_counts(exchange, _order(inputs(device, 5, 0).items_TN)[1], tag_of(7, PLAN))
        take_counts(exchange, tag_of(7, PLAN), 10**6)
        torch.cuda.synchronize()
        with pytest.raises(RuntimeError, match=r"rank 0 waited for rank 1 in plan of MoE layer 7 .* after 1 s"):
            exchange.check()
    dist.barrier()


def another_layer_is_an_error(device: torch.device) -> None:
    exchange, rank = make_exchange(device, timeout=5), dist.get_rank()
    put_counts(exchange, _order(inputs(device, 5, 0).items_TN)[1], tag_of(rank, PLAN))
    take_counts(exchange, tag_of(rank, PLAN), 10**6)
    torch.cuda.synchronize()
    with pytest.raises(RuntimeError, match=f"that rank was in plan of MoE layer {1 - rank}"):
        exchange.check()
    dist.barrier()


def overflow_is_noted(device: torch.device) -> None:
    exchange = make_exchange(device, capacity=1.25)
    round_trip(exchange, inputs(device, 1000, 0, pattern="last"), layer=2)
    exchange.check()
    if dist.get_rank() == 0:
        exchange.check_overflow()
    else:
        with pytest.raises(RuntimeError, match="MoE layer 2: 2000 rows came to rank 1, which has room for 1280"):
            exchange.check_overflow()


CHECKS: dict[str, Check] = {
    check.__name__: check
    for check in (
        equal_to_the_collective_backend,
        other_widths_and_dtypes,
        coded_rows,
        no_collective_is_called,
        two_layers_and_three_micro_batches,
        other_collectives_run_beside,
        a_layer_equals_that_of_the_collective_backend,
        overflow_is_noted,
        a_captured_graph_replays,
        compiled_chain_of_two_dispatches,
        a_thousand_rounds_with_delays,
        a_rank_that_does_not_come_is_named,
        another_layer_is_an_error,
    )
}


@pytest.fixture(scope="module")
def problems(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("symm_mem")
    run_checks(CHECKS.values(), folder)
    return folder


@pytest.mark.parametrize("name", CHECKS)
def test_on_two_gpus(problems: Path, name: str) -> None:
    assert_passed(name, problems)
