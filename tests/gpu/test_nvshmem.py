"""The exchange through NVSHMEM on two GPUs, against the collective backend in the same processes.

Rows are moved and sums keep the collective backend's order, so whatever both compute is compared bit for bit. Each
check runs on both ranks with buffers of its own; what it raised is the test's failure. NVSHMEM is asked for across
hosts, where the same kernel runs; two GPUs of one host show what it does, not how fast it is there.
"""

import random
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric
from torch import Tensor

from comms.all_to_all import AS_IT_IS, combine, dispatch
from comms.backend import choose_backend
from comms.config import CommsConfig
from comms.payload import Payload
from comms.record_exchange import RecordExchange, create_record_exchange, plan_record_layout, plan_records
from comms.symmetric_exchange import describe_tag
from comms.symmetric_memory import NoRoomError
from moe.config import MoEConfig
from moe.layer import MoE
from parallel.activation_checkpoint import apply_activation_checkpoint
from tests.gpu.two_backends import (
    EXPERTS_PER_RANK,
    MAX_TOKENS,
    TOP_K,
    WIDTH,
    Inputs,
    assert_same,
    check_two_layers_and_three_micro_batches,
    inputs,
    work,
)
from tests.gpu.two_backends import round_trip as collective_round_trip
from tests.gpu.two_ranks import NUM_RANKS, Check, assert_passed, run_checks

pytestmark = [
    pytest.mark.multi_gpu(2),
    pytest.mark.skipif(
        not torch.cuda.is_available() or not symmetric.is_nvshmem_available(),
        reason="this torch finds no NVSHMEM (libnvshmem_host.so.3)",
    ),
]


def make(device: torch.device, width: int = WIDTH, capacity: float | None = None) -> RecordExchange:
    group = dist.group.WORLD
    assert group is not None
    layout = plan_record_layout(NUM_RANKS, MAX_TOKENS, TOP_K, width * 4, 8 * TOP_K, capacity)
    exchange = create_record_exchange(group, device, layout, MAX_TOKENS, describe_tag, TOP_K)
    poison(exchange)
    return exchange


def poison(exchange: RecordExchange) -> None:
    """Rows become NaN, and ids -1; nothing may be under way."""
    torch.cuda.synchronize()
    dist.barrier()
    for tensor in exchange.moves.tensors():
        if tensor.dtype == torch.uint8:
            tensor.fill_(255)
    torch.cuda.synchronize()
    dist.barrier()


def round_trip(exchange: RecordExchange, given: Inputs, layer: int = 0, payload: Payload = AS_IT_IS) -> list[Tensor]:
    x, weights = given.x_TD.clone().requires_grad_(), given.weights_TK.clone().requires_grad_()
    plan = plan_records(given.ids_TK, EXPERTS_PER_RANK, exchange, layer, 10**6)
    with torch.enable_grad():
        rows, row_weights, ids = dispatch(plan, x, weights, given.ids_TK, payload)
        out = combine(plan, work(rows, row_weights, ids), payload)
    upstream = torch.linspace(-1, 1, out.numel(), device=out.device).view_as(out).to(out.dtype)
    grads = torch.autograd.grad(out, [x, weights], upstream)
    return [out.detach(), *grads, rows.detach(), row_weights.detach(), ids]


# ---- checks: each runs on both ranks


def it_is_chosen_when_asked_for(device: torch.device) -> None:
    assert choose_backend(CommsConfig(backend="nvshmem"), dist.group.WORLD, device).backend == "nvshmem"
    assert symmetric.get_backend(device) == "NVSHMEM"


def equal_to_the_collective_backend(device: torch.device) -> None:
    exchange, rank = make(device), dist.get_rank()
    sizes = [(1000, 700), (0, 513), (1, 0), (0, 0), (1024, 1024), (17, 1)]
    for layer, (pattern, tokens) in enumerate((p, t) for p in ("random", "last", "nobody") for t in sizes):
        given = inputs(device, tokens[rank], layer, pattern=pattern)
        assert_same(round_trip(exchange, given, layer), collective_round_trip(None, given))
    exchange.check_overflow()


def other_widths_and_dtypes(device: torch.device) -> None:
    exchange = make(device, width=8192)
    for layer, (width, dtype) in enumerate([(6, torch.bfloat16), (2880, torch.bfloat16), (8192, torch.float32)]):
        given = inputs(device, 300 + dist.get_rank(), layer, width)
        given = given._replace(x_TD=given.x_TD.to(dtype))
        assert_same(round_trip(exchange, given, layer), collective_round_trip(None, given))


def coded_rows(device: torch.device) -> None:
    exchange = make(device)
    for layer, payload in enumerate([Payload("mxfp8"), Payload("model", "mxfp8"), Payload("mxfp8", "mxfp8")]):
        given = inputs(device, 300 + 77 * dist.get_rank(), layer)
        assert_same(round_trip(exchange, given, layer, payload), collective_round_trip(None, given, 0, payload))


def no_collective_is_called(device: torch.device) -> None:
    exchange, given = make(device), inputs(device, 200, 0)

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a collective was called")

    with patch.object(dist, "all_to_all_single", refuse):
        round_trip(exchange, given)
    assert int(exchange.state) == 5


def a_thousand_rounds_with_delays(device: torch.device) -> None:
    """Inputs and tables are used again while the other rank may be late: it must have read them by then."""
    exchange, chooser = make(device), random.Random(dist.get_rank())
    wrong = torch.zeros((), dtype=torch.int64, device=device)
    for step in range(1000):
        given = inputs(device, chooser.randrange(300) * (step % 11 > 0), step, 64, ("random", "last")[step % 5 == 0])
        expected = collective_round_trip(None, given)[:3]
        if chooser.random() < 0.5:
            torch.cuda._sleep(chooser.randrange(500_000))
        for ours, theirs in zip(round_trip(exchange, given, step % 50)[:3], expected, strict=True):
            wrong += (ours != theirs).sum()
    assert int(wrong) == 0


def two_layers_and_three_micro_batches(device: torch.device) -> None:
    exchange = make(device)
    check_two_layers_and_three_micro_batches(
        device, lambda ids, layer: plan_records(ids, EXPERTS_PER_RANK, exchange, layer, 10**6)
    )


def compiled_chain_of_two_dispatches(device: torch.device) -> None:
    """The compiler may neither drop an exchange whose result is unused, nor merge two equal ones, nor reorder them."""
    exchange, given = make(device), inputs(device, 256, 0)
    ops, name, bound = torch.ops.sluicegate, exchange.name, exchange.layout.row_bound

    def chain(state: Tensor, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        tables = ops.exchange_record_counts(state, ids, NUM_RANKS, EXPERTS_PER_RANK, name, 0, 10**6)
        there = weights, ids, *tables, name, 1, bound, "model"
        _, _, _ = ops.record_dispatch(state, x, *there)
        rows, _, row_ids = ops.record_dispatch(state, x + 1, *there)
        again, _, _ = ops.record_dispatch(state, x + 1, *there)
        both = torch.where((row_ids >= 0).any(1, keepdim=True), rows + again, 0)
        out, _ = ops.record_combine(state, both, rows[:, :0], *tables, name, 2, "model")
        second, _ = ops.record_combine(state, both, rows[:, :0], *tables, name, 2, "model")
        return out * 2 + second

    given_to = exchange.state, given.x_TD, given.weights_TK, given.ids_TK
    eager = chain(*given_to)
    compiled = torch.compile(chain, fullgraph=True)
    for _ in range(3):
        assert torch.equal(compiled(*given_to), eager)
    assert int(exchange.state) == 4 * 6


def other_collectives_run_beside(device: torch.device) -> None:
    """As FSDP's: gathers and reductions on NCCL's own stream while rows travel."""
    exchange, flat = make(device), torch.randn(2**22, device=device)
    for step in range(30):
        given = inputs(device, 900, step)
        expected = collective_round_trip(None, given)
        gathered, reduced = torch.empty(NUM_RANKS * flat.numel(), device=device), flat.clone()
        pending = [dist.all_gather_into_tensor(gathered, flat, async_op=True), dist.all_reduce(reduced, async_op=True)]
        ours = round_trip(exchange, given, step)
        for work_of_nccl in pending:
            work_of_nccl.wait()
        assert_same(ours, expected)
        assert torch.equal(gathered.view(NUM_RANKS, -1)[dist.get_rank()], flat)


def a_layer_equals_that_of_the_collective_backend(device: torch.device) -> None:
    """Room for more pairs than come changes no result: 1e-3 leaves kernels free to choose another tile."""
    config = MoEConfig(num_experts=NUM_RANKS * EXPERTS_PER_RANK, top_k=TOP_K, expert_dim=128, backend="grouped_mm")
    results = []
    for exchange, mode in ((None, "none"), (make(device), "none"), (make(device), "full")):
        torch.manual_seed(dist.get_rank())
        layer = MoE(config, WIDTH).to(device, torch.bfloat16)
        first = dist.get_rank() * EXPERTS_PER_RANK
        for name, parameter in list(layer.experts.named_parameters()):
            part = torch.randn(parameter.shape, device=device)[first : first + EXPERTS_PER_RANK] * 0.1
            setattr(layer.experts, name, torch.nn.Parameter(part.bfloat16()))
        with torch.no_grad():
            values = torch.linspace(-1, 1, layer.router.weight.numel()).sin()
            layer.router.weight.copy_(values.view_as(layer.router.weight))
        layer.ep_group, layer.exchange = dist.group.WORLD, exchange
        x = torch.randn(2, 300, WIDTH, device=device, dtype=torch.bfloat16).requires_grad_()
        y, _ = apply_activation_checkpoint(layer, mode)(x)
        y.backward(torch.ones_like(y))
        results.append([y.detach(), x.grad, *(parameter.grad for parameter in layer.parameters())])
        # Counts, rows there and back, gradients there and back: a recomputation sends nothing.
        assert exchange is None or int(exchange.state) == 5
    for found in results[1:]:
        for ours, theirs in zip(found, results[0], strict=True):
            assert bool(ours.isfinite().all())
            assert float((ours.float() - theirs.float()).norm()) <= 1e-3 * float(theirs.float().norm())


def overflow_is_noted(device: torch.device) -> None:
    exchange = make(device, capacity=1.25)
    round_trip(exchange, inputs(device, 1000, 0, pattern="last"), layer=2)
    if dist.get_rank() == 0:
        exchange.check_overflow()
    else:
        with pytest.raises(NoRoomError, match="MoE layer 2: 2000 rows came to rank 1, which has room for 1280"):
            exchange.check_overflow()


def capturing_is_refused(device: torch.device) -> None:
    exchange, given = make(device), inputs(device, 100, 0)
    with (
        pytest.raises(RuntimeError, match="cannot be captured in a CUDA graph"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        exchange.moves.next_input(64)
    assert_same(round_trip(exchange, given), collective_round_trip(None, given))


CHECKS: dict[str, Check] = {
    check.__name__: check
    for check in (
        it_is_chosen_when_asked_for,
        equal_to_the_collective_backend,
        other_widths_and_dtypes,
        coded_rows,
        no_collective_is_called,
        two_layers_and_three_micro_batches,
        other_collectives_run_beside,
        a_layer_equals_that_of_the_collective_backend,
        overflow_is_noted,
        compiled_chain_of_two_dispatches,
        a_thousand_rounds_with_delays,
        capturing_is_refused,
    )
}


@pytest.fixture(scope="module")
def problems(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("nvshmem")
    run_checks(CHECKS.values(), folder)
    return folder


@pytest.mark.parametrize("name", CHECKS)
def test_on_two_gpus(problems: Path, name: str) -> None:
    assert_passed(name, problems)
