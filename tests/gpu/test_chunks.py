"""Rows that travel chunk by chunk while experts compute, on two GPUs, against the collective backend.

A pair's result does not depend on which tile it is in, so outputs and gradients of x are equal bit for bit whatever the
number of chunks; weight gradients are sums in another order. Each check runs on both ranks.
"""

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from comms.payload import Payload
from comms.symmetric_memory import Exchange, exposed_seconds, register
from moe.config import MoEConfig
from moe.layer import MoE
from parallel.activation_checkpoint import apply_activation_checkpoint
from parallel.expert_parallel import share_saved
from tests.gpu.two_backends import TOP_K, make_exchange
from tests.gpu.two_ranks import NUM_RANKS, Check, assert_passed, run_checks

pytestmark = pytest.mark.multi_gpu(2, may_share=True)

EXPERTS_PER_RANK, WIDTH, HIDDEN, MAX_TOKENS = 16, 512, 256, 4096
CHUNKS = (1, 2, 4)
COMMUNICATION = ("dispatch_kernel", "combine_kernel")
PRODUCTS = ("up_kernel", "rows_kernel", "weight_grad_kernel")


def exchange_of(device: torch.device, width: int = WIDTH, measure: bool = False) -> Exchange:
    return make_exchange(device, MAX_TOKENS, width, timeout=60, measure=measure, max_chunks=max(CHUNKS))


def build_layer(
    device: torch.device, exchange: Exchange | None, chunks: int, width: int = WIDTH, hidden: int = HIDDEN
) -> MoE:
    config = MoEConfig(
        num_experts=EXPERTS_PER_RANK * NUM_RANKS, top_k=TOP_K, expert_dim=hidden, backend="fused", shared_expert_dim=256
    )
    torch.manual_seed(0)
    layer = MoE(config, width).to(device, torch.bfloat16)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(0, 0.05)
    torch.manual_seed(1 + dist.get_rank())
    for name, parameter in list(layer.experts.named_parameters()):
        shape = EXPERTS_PER_RANK, *parameter.shape[1:]
        setattr(layer.experts, name, nn.Parameter((torch.randn(shape, device=device) * 0.05).bfloat16()))
    layer.ep_group, layer.exchange, layer.chunks = dist.group.WORLD, exchange, chunks
    return layer


def layer_pass(
    device: torch.device, exchange: Exchange | None, chunks: int, tokens: int, mode: str = "none",
    payload: Payload | None = None,
) -> list[Tensor]:  # fmt: skip
    """Output and gradients of x and of every weight."""
    layer = build_layer(device, exchange, chunks)
    layer.dispatch_payload = layer.combine_payload = payload or Payload()
    wrapped = apply_activation_checkpoint(layer, mode)
    generator = torch.Generator(device).manual_seed(7 + dist.get_rank())
    shape = (1, tokens, WIDTH) if tokens else (0, 1, WIDTH)
    x = torch.randn(shape, generator=generator, device=device).bfloat16().requires_grad_()
    y, _ = wrapped(x)
    y.backward(torch.linspace(-1, 1, y.numel(), device=device).view_as(y).to(y.dtype))
    return [y.detach(), x.grad, *(parameter.grad for parameter in layer.parameters())]


def assert_alike(ours: list[Tensor], theirs: list[Tensor], exact: int = 2) -> None:
    for number, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        assert bool(a.isfinite().all()), number
        if number < exact:
            assert torch.equal(a, b), (number, int((a != b).sum()))
        else:
            assert float((a.float() - b.float()).norm()) <= 4e-3 * float(b.float().norm()), number


def chunks_equal_the_collective_backend(device: torch.device) -> None:
    exchange, rank = exchange_of(device), dist.get_rank()
    for sizes in ((4096, 4096), (3000, 1111), (100, 0), (0, 4095), (0, 0)):
        theirs, exact = layer_pass(device, None, 1, sizes[rank]), 1
        for chunks in CHUNKS:
            exchange.arena[exchange.layout.rows_at :] = 255
            torch.cuda.synchronize()
            dist.barrier()
            ours = layer_pass(device, exchange, chunks, sizes[rank])
            assert_alike(ours, theirs, exact)
            # The parts of the gradient of x are added in bf16, in whatever order the graph has.
            theirs, exact = ours, 2
    exchange.check()
    exchange.check_overflow()


def coded_rows_travel_in_chunks_too(device: torch.device) -> None:
    exchange, payload = exchange_of(device), Payload("mxfp8", "mxfp8")
    theirs = layer_pass(device, None, 1, 2000, payload=payload)
    for chunks in CHUNKS:
        assert_alike(layer_pass(device, exchange, chunks, 2000, payload=payload), theirs, exact=1)
    exchange.check()


def checkpointing_changes_nothing(device: torch.device) -> None:
    exchange = exchange_of(device)
    expected = layer_pass(device, exchange, 1, 2000)
    for mode in ("selective", "full"):
        for chunks in CHUNKS:
            assert_alike(layer_pass(device, exchange, chunks, 2000, mode), expected)
    exchange.check()


def streams_do_not_overtake_each_other(device: torch.device) -> None:
    """Many rounds in which puts linger and the ranks' devices wait at random: the same bits every time."""
    exchange = register(replace(exchange_of(device), jitter=20_000))
    chooser = random.Random(dist.get_rank())
    expected = {chunks: layer_pass(device, exchange, chunks, 1500) for chunks in CHUNKS}
    for step in range(60):
        torch.cuda._sleep(chooser.randrange(2_000_000))
        chunks = CHUNKS[step % len(CHUNKS)]
        ours = layer_pass(device, exchange, chunks, 1500)
        assert all(torch.equal(a, b) for a, b in zip(ours, expected[chunks], strict=True)), step
    exchange.check()


def measuring_changes_no_bits(device: torch.device) -> None:
    """Nor is the time that devices stood still for rows nothing, or told twice."""
    plain = exchange_of(device)
    expected = {chunks: layer_pass(device, plain, chunks, 2000) for chunks in CHUNKS}
    torch.cuda.synchronize()
    assert plain.waits is None and exposed_seconds() == 0
    measured = exchange_of(device, measure=True)
    for chunks in CHUNKS:
        ours = layer_pass(device, measured, chunks, 2000)
        assert all(torch.equal(a, b) for a, b in zip(ours, expected[chunks], strict=True)), chunks
        # Only what has ended has a duration.
        torch.cuda.synchronize()
        assert exposed_seconds() > 0, chunks
        assert exposed_seconds() == 0
    measured.check()


def the_host_waits_for_nothing(device: torch.device) -> None:
    exchange = exchange_of(device)
    layer = build_layer(device, exchange, 2)
    x = torch.randn(1, 2000, WIDTH, device=device).bfloat16().requires_grad_()
    layer(x)[0].sum().backward()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        layer(x)[0].sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()


def rows_travel_while_experts_compute(device: torch.device) -> None:
    """In a trace, kernels of the exchange run at the same time as products."""
    width, hidden = 2048, 768
    exchange = exchange_of(device, width)
    for chunks, least in ((1, 1), (2, 3)):
        layer = build_layer(device, exchange, chunks, width, hidden)
        x = torch.randn(1, MAX_TOKENS, width, device=device).bfloat16().requires_grad_()
        for _ in range(3):
            layer(x)[0].sum().backward()
        torch.cuda.synchronize()
        dist.barrier()
        with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as trace:
            # The host gets ahead, so that launches do not set the pace.
            torch.cuda._sleep(60_000_000)
            layer(x)[0].sum().backward()
            torch.cuda.synchronize()
        kernels = [event for event in trace.events() if event.device_type == DeviceType.CUDA]
        travels = [event.time_range for event in kernels if event.name.startswith(COMMUNICATION)]
        products = [event.time_range for event in kernels if event.name.startswith(PRODUCTS)]
        assert len(travels) == 4 * chunks and len(products) == 4 * chunks + 2, (len(travels), len(products))
        beside = [
            travel for travel in travels
            if any(min(travel.end, other.end) > max(travel.start, other.start) for other in products)
        ]  # fmt: skip
        assert len(beside) >= least, (chunks, len(beside))


def layers_pass(device: torch.device, exchange: Exchange, chunks: int, mode: str = "none") -> list[Tensor]:
    """Outputs and every gradient of two layers and three micro-batches, one after the other."""
    register(exchange)
    blocks = [apply_activation_checkpoint(build_layer(device, exchange, chunks), mode) for _ in range(2)]
    for number, module in enumerate(
        module for block in blocks for module in block.modules() if isinstance(module, MoE)
    ):
        module.number = number
    generator, found = torch.Generator(device).manual_seed(7 + dist.get_rank()), []
    for tokens in (1500, 3000 * dist.get_rank(), 700):
        shape = (1, tokens, WIDTH) if tokens else (0, 1, WIDTH)
        x = torch.randn(shape, generator=generator, device=device).bfloat16().requires_grad_()
        y = x
        for block in blocks:
            y = y + block(y)[0]
        y.backward(torch.linspace(-1, 1, y.numel(), device=device).view_as(y).to(y.dtype))
        found += [y.detach(), x.grad]
    return [*found, *(parameter.grad for block in blocks for parameter in block.parameters())]


def an_arena_changes_nothing(device: torch.device) -> None:
    """The same bits with what is kept in one arena, poisoned, also where puts linger and devices wait at random."""
    exchange, chooser = exchange_of(device), random.Random(dist.get_rank())
    lingering = replace(exchange, jitter=20_000)
    for mode, chunks in (("none", 1), ("none", 2), ("full", 1), ("full", 4)):
        expected = layers_pass(device, exchange, chunks, mode)
        layers = [build_layer(device, exchange, chunks) for _ in range(2)]
        for step in range(12):
            ours = share_saved(layers, lingering if step else exchange, 1.5, mode == "none", torch.bfloat16)
            saved = ours.saved
            assert saved is not None
            for tensor in (saved.rows_SD, saved.hidden_IH, saved.slots_SK, saved.item_rows_I, saved.item_weights_I):
                if tensor is not None:
                    tensor.view(torch.uint8).fill_(255)
            torch.cuda._sleep(chooser.randrange(2_000_000))
            found = layers_pass(device, ours, chunks, mode)
            assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)), (mode, chunks, step)
            # Each micro-batch found the places of the one before.
            assert saved.num_alive == 0 and int(saved.ends[2:].sum()) == 0
            ours.check()
            ours.check_overflow()


def an_arena_asks_the_host_for_nothing(device: torch.device) -> None:
    exchange = exchange_of(device)
    layer = build_layer(device, exchange, 2)
    layer.exchange = share_saved([layer], exchange, 1.5, True, torch.bfloat16)
    x = torch.randn(1, 2000, WIDTH, device=device).bfloat16().requires_grad_()
    layer(x)[0].sum().backward()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(2):
            layer(x)[0].sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()


CHECKS: list[Check] = [
    chunks_equal_the_collective_backend,
    coded_rows_travel_in_chunks_too,
    checkpointing_changes_nothing,
    streams_do_not_overtake_each_other,
    measuring_changes_no_bits,
    an_arena_changes_nothing,
    an_arena_asks_the_host_for_nothing,
    the_host_waits_for_nothing,
    rows_travel_while_experts_compute,
]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checks")
    run_checks(CHECKS, folder)
    return folder


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_on_two_gpus(results: Path, check: Check) -> None:
    assert_passed(check.__name__, results)
