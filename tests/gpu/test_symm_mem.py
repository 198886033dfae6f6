"""The exchange through symmetric memory on two GPUs, against the collective backend in the same processes.

Rows are moved and sums keep the collective backend's order, so whatever both compute is compared bit for bit. Each
check runs on both ranks with an arena of its own; what it raised is the test's failure.
"""

import os
import random
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from comms.all_to_all import combine, dispatch
from comms.payload import Payload
from comms.put_and_take import BOTH, PUT, TAKE, Received, exchange_counts, move_back, move_there, order_rows
from comms.symmetric_exchange import COMBINE, DISPATCH, PLAN, SymmetricPlan, plan_exchange, tag_of
from comms.symmetric_memory import register
from moe.config import MoEConfig
from moe.layer import MoE
from parallel.process_group import process_group
from tests.gpu.two_backends import (
    EXPERTS_PER_RANK,
    TOP_K,
    WIDTH,
    assert_same,
    check_two_layers_and_three_micro_batches,
    inputs,
    make_exchange,
    round_trip,
    work,
)
from tests.gpu.two_ranks import NUM_RANKS, Check, assert_passed, run_checks, set_environment
from trainer.worker_pool import free_port

pytestmark = pytest.mark.multi_gpu(2, may_share=True)


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
    plan = plan_exchange(given.ids_TK, EXPERTS_PER_RANK, exchange, 0, 10**6)
    assert isinstance(plan, SymmetricPlan) and plan.routes.is_cuda

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a collective was called")

    with patch.object(dist, "all_to_all_single", refuse):
        round_trip(exchange, given)


def delay(chooser: random.Random) -> None:
    """Up to a quarter of a millisecond, in one of three places."""
    if chooser.random() < 0.3:
        torch.cuda._sleep(chooser.randrange(500_000))


def in_turn(chooser: random.Random) -> list[tuple[bool, bool]]:
    """One launch for both sides, or one after the other."""
    return [BOTH] if chooser.random() < 0.5 else [PUT, TAKE]


def a_thousand_rounds_with_delays(device: torch.device) -> None:
    """Random sizes and patterns, rows poisoned; the ranks' delays differ: before launches, between a put and its take,
    and within puts, before every piece.
    """
    exchange, rank = make_exchange(device, timeout=60, piece_bytes=512), dist.get_rank()
    lingering = [exchange, replace(exchange, jitter=20_000)]
    chooser = random.Random(rank)
    wrong = torch.zeros((), dtype=torch.int64, device=device)
    for step in range(1000):
        pattern = ("random", "random", "last", "nobody")[step // 7 % 4]
        given = inputs(device, chooser.randrange(300) * (step % 11 > 0), step, 64, pattern)
        order, bound, number = (
            order_rows(given.ids_TK, NUM_RANKS, EXPERTS_PER_RANK),
            exchange.layout.row_bound,
            step % 50,
        )
        delay(chooser)
        routes, totals = exchange_counts(exchange, order.sent_C2N, tag_of(number, PLAN), 10**6)
        out = Received(
            given.x_TD.new_full((bound, 64), float("nan")),
            given.weights_TK.new_full((bound, TOP_K), float("nan")),
            given.ids_TK.new_full((bound, TOP_K), 7),
        )
        there = given.x_TD, given.weights_TK, given.ids_TK, order.tokens_NT, routes, totals, out
        one = chooser.choice(lingering)
        for sides in in_turn(chooser):
            delay(chooser)
            move_there(one, *there, tag_of(number, DISPATCH), "model", sides)
        rows = work(*out)
        # Whatever stands where no row came may come back to nobody.
        rows[torch.arange(bound, device=device) >= totals[0]] = float("nan")
        sums = torch.full_like(given.x_TD, float("nan"))
        back = rows, rows[:, :0], order.index_NT, routes, sums, sums[:, :0]
        one = chooser.choice(lingering)
        for sides in in_turn(chooser):
            delay(chooser)
            move_back(one, *back, tag_of(number, COMBINE), "model", sides)
        wrong += (sums != round_trip(None, given)[0]).sum()
    exchange.check()
    assert int(wrong) == 0


def pieces_that_linger(device: torch.device) -> None:
    """Gradients and side columns too: every take overtakes puts, and results are those of the collective backend."""
    exchange = register(replace(make_exchange(device, piece_bytes=2048), jitter=100_000))
    sizes = [(1000, 700), (0, 513), (1, 0), (1024, 1024), (17, 1)]
    payloads = [Payload(), Payload("mxfp8", "mxfp8")]
    for layer, (pattern, tokens) in enumerate((p, t) for p in ("random", "last", "nobody") for t in sizes):
        given, payload = inputs(device, tokens[dist.get_rank()], layer, pattern=pattern), payloads[layer % 2]
        exchange.arena[exchange.layout.rows_at :] = 255
        torch.cuda.synchronize()
        dist.barrier()
        assert_same(round_trip(exchange, given, layer, payload), round_trip(None, given, 0, payload))
    exchange.check()


def two_layers_and_three_micro_batches(device: torch.device) -> None:
    exchange = make_exchange(device)
    check_two_layers_and_three_micro_batches(
        device, lambda ids, layer: plan_exchange(ids, EXPERTS_PER_RANK, exchange, layer, 10**6)
    )
    exchange.check()


def compiled_chain_of_two_dispatches(device: torch.device) -> None:
    """The compiler may neither drop an exchange whose result is unused, nor merge two equal ones, nor reorder them."""
    exchange = make_exchange(device, timeout=120)
    given = inputs(device, 256, 0)
    ops, name, bound = torch.ops.sluicegate, exchange.name, exchange.layout.row_bound

    def chain(state: Tensor, x: Tensor, weights: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        sizes = NUM_RANKS, EXPERTS_PER_RANK
        index, tokens, routes, totals = ops.exchange_routes(state, ids, *sizes, name, tag_of(0, PLAN), 10**6)
        there = weights, ids, tokens, routes, totals, name, tag_of(0, DISPATCH), bound, "model"
        _, _, _ = ops.symmetric_dispatch(state, x, *there)
        rows, _, _ = ops.symmetric_dispatch(state, x + 1, *there)
        again, _, _ = ops.symmetric_dispatch(state, x + 1, *there)
        is_row = (torch.arange(bound, device=x.device) < totals[0])[:, None]
        both = torch.where(is_row, rows + again, 0)
        out, second = torch.empty_like(x), torch.empty_like(x)
        ops.symmetric_combine(state, out, both, rows[:, :0], index, routes, name, tag_of(0, COMBINE), "model")
        out = out * 2
        ops.symmetric_combine(state, second, both, rows[:, :0], index, routes, name, tag_of(0, COMBINE), "model")
        return out + second, rows

    given_to = exchange.state, given.x_TD, given.weights_TK, given.ids_TK
    before = int(exchange.state)
    eager, rows = chain(*given_to)
    kept = rows.clone()
    compiled = torch.compile(chain, fullgraph=True)
    for _ in range(3):
        found, _ = compiled(*given_to)
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
    assert words[:, 0].tolist() == [4, 12, 8] and before == 0


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
        plan = plan_exchange(given.ids_TK, EXPERTS_PER_RANK, exchange, 3, 10**6)
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


def some_counts(device: torch.device) -> Tensor:
    return order_rows(inputs(device, 5, 0).ids_TK, NUM_RANKS, EXPERTS_PER_RANK).sent_C2N


def a_plan_numbers_rows_as_torch_does(device: torch.device) -> None:
    """More blocks of tokens than are added up at a time; every rank's numbers, both ways, and what it sends."""
    for num_tokens, num_ranks in ((100_003, 2), (40_000, 7), (257, 3), (0, 2)):
        ids = torch.randint(-1, 3 * num_ranks, (num_tokens, TOP_K), device=device)
        order = order_rows(ids, num_ranks, 3)
        owner = torch.where(ids >= 0, ids // 3, -1)
        for rank in range(num_ranks):
            items = (owner == rank).sum(1)
            goes = items > 0
            assert torch.equal(order.index_NT[rank], torch.where(goes, goes.cumsum(0) - 1, -1).int())
            assert torch.equal(order.tokens_NT[rank, : int(goes.sum())], goes.nonzero().flatten().int())
            assert order.sent_C2N[0, :, rank].tolist() == [int(goes.sum()), int(items.sum())]


def a_rank_that_does_not_come_is_named(device: torch.device) -> None:
    exchange = make_exchange(device, timeout=1)
    if dist.get_rank() == 0:
        exchange_counts(exchange, some_counts(device), tag_of(7, PLAN), 10**6)
        torch.cuda.synchronize()
        with pytest.raises(RuntimeError, match=r"rank 0 waited for rank 1 in plan of MoE layer 7 .* after 1 s"):
            exchange.check()
    dist.barrier()


def another_layer_is_an_error(device: torch.device) -> None:
    exchange, rank = make_exchange(device, timeout=5), dist.get_rank()
    exchange_counts(exchange, some_counts(device), tag_of(rank, PLAN), 10**6)
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
        a_plan_numbers_rows_as_torch_does,
        pieces_that_linger,
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


def dispatch_until_killed(rank: int, port: int, folder: Path) -> None:
    """Rank 1 is killed while its programs put rows; rank 0 notes what it is told, and how long that took."""
    set_environment(rank, port)
    with process_group(timeout_seconds=60) as device:
        # A put takes a second or two: 500 pieces, 32 at a time.
        exchange = register(replace(make_exchange(device, timeout=4, piece_bytes=2048), jitter=200_000_000))
        given = inputs(device, 1000, 0, pattern="random")
        plan = plan_exchange(given.ids_TK, EXPERTS_PER_RANK, exchange, 3, 10**6)
        # The first time kernels are compiled.
        for _ in range(2):
            torch.cuda.synchronize()
            dist.barrier()
            begun = time.monotonic()
            dispatch(plan, given.x_TD, given.weights_TK, given.ids_TK)
        if rank == 1:
            time.sleep(0.3)
            os.kill(os.getpid(), signal.SIGKILL)
        torch.cuda.synchronize()
        with pytest.raises(RuntimeError) as told:
            exchange.check()
        (folder / "told").write_text(f"{time.monotonic() - begun}\n{told.value}")
        # As after any failure: nobody says goodbye to a dead rank.
        os._exit(0)


def test_a_rank_killed_in_a_dispatch_is_named_in_time(tmp_path: Path) -> None:
    processes = mp.spawn(dispatch_until_killed, (free_port(), tmp_path), nprocs=NUM_RANKS, join=False)
    assert processes is not None
    with pytest.raises(mp.ProcessExitedException, match="SIGKILL"):
        while not processes.join(grace_period=30):
            pass
    seconds, told = (tmp_path / "told").read_text().split("\n")
    assert "rank 0 waited for rank 1 in dispatch of MoE layer 3" in told and "gave up after 4 s" in told, told
    assert float(seconds) < 10
    # Both devices work.
    for number in range(NUM_RANKS):
        assert float(torch.ones(8, device=f"cuda:{number}").sum()) == 8


@pytest.fixture(scope="module")
def problems(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("symm_mem")
    run_checks(CHECKS.values(), folder)
    return folder


@pytest.mark.parametrize("name", CHECKS)
def test_on_two_gpus(problems: Path, name: str) -> None:
    assert_passed(name, problems)
