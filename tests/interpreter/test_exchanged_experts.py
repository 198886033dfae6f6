"""Layers whose rows travel chunk by chunk while experts compute, between processes on the CPU, kernels interpreted.

Against one chunk, and against the collective backend with the same fused kernels: outputs, gradients of x and of the
router are the same sums in the same order, so equal bit for bit; weight gradients are sums in another order (fp32,
1e-6). Memory starts as NaN, arenas too, and ranks have different numbers of tokens, some none.
"""

import gc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from comms.payload import Payload
from comms.symmetric_exchange import plan_exchange
from comms.symmetric_memory import Exchange, plan_layout
from moe import tiles
from moe.config import MoEConfig
from moe.exchanged_experts import Through, depart, exchanged_experts
from moe.layer import MoE
from parallel.activation_checkpoint import apply_activation_checkpoint
from parallel.config import ParallelConfig
from parallel.expert_parallel import use_exchange
from parallel.mesh import build_mesh
from tests.distributed.tiny_models import DEEPSEEK
from tests.interpreter.shared_arenas import run_interpreted, shared_exchange
from tests.interpreter.test_fused_experts import SMALL
from trainer.build import build_model
from trainer.config import Config, OptimConfig, PrecisionConfig, TrainConfig
from trainer.optim import build_optimizer
from trainer.parity import full_tensors, synthetic_batches
from trainer.step import train_step

MAX_TOKENS, WIDTH, HIDDEN, TOP_K, EXPERTS_PER_RANK = 12, 16, 16, 2, 3
CHUNKS = (1, 2, 5)


def build_layer(exchange: Exchange | None, chunks: int, shared: bool = True, **options: Any) -> MoE:
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(7)
    config = MoEConfig(
        num_experts=EXPERTS_PER_RANK * num_ranks, top_k=TOP_K, expert_dim=HIDDEN, backend="fused",
        shared_expert_dim=8 if shared else 0, **options,
    )  # fmt: skip
    layer = MoE(config, WIDTH)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(0, 0.3)
        # Some experts get no token.
        layer.router.weight[1::4] = -layer.router.weight[1::4].abs() - 9
    for name, parameter in list(layer.experts.named_parameters()):
        part = parameter.detach()[rank * EXPERTS_PER_RANK : (rank + 1) * EXPERTS_PER_RANK]
        setattr(layer.experts, name, nn.Parameter(part.clone()))
    layer.ep_group, layer.exchange, layer.number, layer.chunks = dist.group.WORLD, exchange, 3, chunks
    return layer


def layer_pass(
    exchange: Exchange | None, chunks: int, tokens: list[int], mode: str = "none", **options: Any
) -> list[Tensor]:
    """Output and every gradient of two calls of a layer, both alive at once."""
    payloads = options.pop("payloads", (Payload(), Payload()))
    layer = build_layer(exchange, chunks, **options)
    layer.dispatch_payload, layer.combine_payload = payloads
    wrapped = apply_activation_checkpoint(layer, mode)
    generator = torch.Generator().manual_seed(dist.get_rank())
    num_tokens = tokens[dist.get_rank()]
    # Positive: experts whose router's row is negative get none.
    shape = (1, num_tokens, WIDTH) if num_tokens else (0, 1, WIDTH)
    xs = [torch.rand(shape, generator=generator).requires_grad_() for _ in range(2)]
    if exchange is not None:
        exchange.arena[exchange.layout.rows_at :] = 255
        dist.barrier()
    outs = [wrapped(x)[0] for x in xs]
    sum((out * out).sum() for out in outs).backward()
    return [*(out.detach() for out in outs), *(x.grad for x in xs), *(p.grad for p in layer.parameters())]


def assert_close(ours: list[Tensor], theirs: list[Tensor], bound: float) -> None:
    for number, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        assert bool(a.isfinite().all()), number
        assert float((a - b).norm()) <= bound * float(b.norm()), (number, float((a - b).norm()), float(b.norm()))


def epochs(exchange: Exchange) -> list[int]:
    """Of counts, rows there and rows back."""
    words = exchange.arena[: 8 * exchange.layout.failed_at].view(torch.int64)
    return words.view(3, -1)[:, 0].tolist()


def equal_for_every_number_of_chunks(exchange: Exchange) -> None:
    for tokens, options, more in (
        # Each number between three ranks would say what it says between two.
        ([MAX_TOKENS, 7, 1], {}, CHUNKS[1:] if dist.get_world_size() < 3 else (3,)),
        ([3, 0, MAX_TOKENS], {"activation": "clamped_swiglu", "shared": False}, (5,)),
    ):
        one = layer_pass(exchange, 1, tokens, **options)
        assert_close(one, layer_pass(None, 1, tokens, **options), 1e-6)
        for chunks in more:
            # Outputs and gradients of x are equal bit for bit on GPUs (tests/gpu/test_chunks.py). Here products are
            # NumPy's, and on some processors those of a row depend on its place in the tile.
            assert_close(layer_pass(exchange, chunks, tokens, **options), one, 1e-6)


def coded_rows_travel_in_chunks_too(exchange: Exchange) -> None:
    tokens, payloads = [MAX_TOKENS, 7, 1], (Payload("mxfp8", "mxfp8"),) * 2
    theirs = layer_pass(None, 1, tokens, payloads=payloads)
    for chunks in (1, 3):
        assert_close(layer_pass(exchange, chunks, tokens, payloads=payloads), theirs, 1e-6)


def each_way_is_coded_as_asked(exchange: Exchange) -> None:
    """Rows otherwise than gradients, alike in both directions and then not: no two of the four can be mistaken."""
    tokens, coded_rows, coded_grads = [MAX_TOKENS, 7, 1], Payload("mxfp8", "model"), Payload("model", "mxfp8")
    for payloads in ((coded_rows, coded_rows), (coded_grads, coded_rows)):
        theirs = layer_pass(None, 1, tokens, payloads=payloads)
        assert_close(layer_pass(exchange, 2, tokens, payloads=payloads), theirs, 1e-6)


def nothing_is_sent_again_by_a_recomputation(exchange: Exchange) -> None:
    tokens = [MAX_TOKENS, 7, 1]
    expected = layer_pass(exchange, 1, tokens)
    for mode, numbers in (("none", (3,)), ("selective", (1,)), ("full", (1, 3))):
        for chunks in numbers:
            before = epochs(exchange)
            ours = layer_pass(exchange, chunks, tokens, mode)
            assert_close(ours, expected, 1e-6)
            # Two calls: a plan each; of every chunk its rows and the gradients of its result, and the way back of both.
            sent = [after - number for after, number in zip(epochs(exchange), before, strict=True)]
            assert sent == [2, 4 * chunks, 4 * chunks], (mode, chunks, sent)


def fewer_pairs_than_come_are_noted(exchange: Exchange) -> None:
    """What has no room is left out, on every rank alike, and said."""
    layer = build_layer(exchange, 3, pair_capacity=0.5)
    layer(torch.rand(1, MAX_TOKENS, WIDTH, generator=torch.Generator().manual_seed(3)))[0].sum().backward()
    exchange.check()
    noted = exchange.overflow.clone()
    exchange.overflow.zero_()
    everywhere = [torch.empty_like(noted) for _ in range(dist.get_world_size())]
    dist.all_gather(everywhere, noted)
    assert any(int(overflow[3]) > int(overflow[4]) > 0 for overflow in everywhere)


def a_compiled_graph_is_whole(exchange: Exchange) -> None:
    """The operators and their gradients in one graph, with something between departure and arrival."""
    layer = build_layer(exchange, 2)
    generator = torch.Generator().manual_seed(dist.get_rank())
    x, weights = torch.rand(9, WIDTH, generator=generator), torch.rand(9, TOP_K, generator=generator)
    num_experts = EXPERTS_PER_RANK * dist.get_world_size()
    ids = torch.rand(9, num_experts, generator=generator).argsort(1)[:, :TOP_K]

    def compute(x: Tensor, weights: Tensor, w_up: Tensor, w_down: Tensor, plan: Any) -> Tensor:
        through = Through(plan, dist.get_rank() * EXPERTS_PER_RANK, Payload(), Payload())
        depart(through, x, weights, ids, beside=True)
        beside = x @ x.T
        y = exchanged_experts(through, x, weights, ids, w_up, w_down, "swiglu")
        return y * 2 + beside @ x

    results = []
    compiled = torch.compile(compute, fullgraph=True, backend="aot_eager")
    for function in (compute, compiled):
        plan = plan_exchange(ids, EXPERTS_PER_RANK, exchange, 0, 10**3, 2)
        given = [leaf.detach().clone().requires_grad_() for leaf in (x, weights, *layer.experts.parameters())]
        out = function(*given, plan)
        results.append([out.detach(), *torch.autograd.grad(out.square().sum(), given)])
    assert_close(results[1], results[0], 0)


def what_departed_for_nobody_is_not_taken(exchange: Exchange) -> None:
    """An exception may stand between departure and arrival; the next pass is of other rows."""
    layer = build_layer(exchange, 2)
    num_experts, first_id = EXPERTS_PER_RANK * dist.get_world_size(), dist.get_rank() * EXPERTS_PER_RANK
    generator = torch.Generator().manual_seed(dist.get_rank())

    def given() -> tuple[Through, Tensor, Tensor, Tensor]:
        x, weights = torch.rand(9, WIDTH, generator=generator), torch.rand(9, TOP_K, generator=generator)
        ids = torch.rand(9, num_experts, generator=generator).argsort(1)[:, :TOP_K]
        plan = plan_exchange(ids, EXPERTS_PER_RANK, exchange, 0, 10**3, 2)
        return Through(plan, first_id, Payload(), Payload()), x, weights, ids

    through, x, *columns = given()
    depart(through, x.requires_grad_() * 1, *columns, beside=True)
    assert len(exchange.departed) == 1
    # What kernels may still read is kept, but not the graph that led to it.
    tables = [StorageWeakRef(table.untyped_storage()) for table in (through.plan.tokens_NT, through.plan.routes)]
    del through
    gc.collect()
    assert not any(table.expired() for table in tables)
    assert not any(column.requires_grad for column in exchange.departed[0].sent)
    # Neither by whoever departs next, nor by whoever comes.
    depart(*given(), beside=True)
    assert len(exchange.departed) == 1
    now = given()
    with torch.no_grad():
        found, expected = (exchanged_experts(*now, *layer.experts.parameters(), "swiglu") for _ in range(2))
    assert torch.equal(found, expected) and not exchange.departed


def train(exchange: Exchange | None, chunks: int, mode: str) -> dict[str, Tensor]:
    """Weights after a step of a small model whose experts FSDP wraps."""
    num_ranks = dist.get_world_size()
    config = Config(
        model=replace(DEEPSEEK, moe=replace(DEEPSEEK.moe, backend="fused")),
        train=TrainConfig(global_batch_size=num_ranks, micro_batch_size=1, seq_len=MAX_TOKENS, steps=1),
        parallel=ParallelConfig(dp_shard=num_ranks, ep=num_ranks, activation_checkpoint=mode),
        precision=PrecisionConfig(recipe="fp32"),
        optim=OptimConfig(name="sgd", lr=0.1),
    )
    mesh = build_mesh(config.parallel, torch.device("cpu"))
    model = build_model(config, mesh)
    layers = [module for module in model.modules() if isinstance(module, MoE)]
    if exchange is not None:
        use_exchange(layers, exchange)
        for layer in layers:
            layer.chunks = chunks
    optimizer = build_optimizer(model, config.optim)
    train_step(model, optimizer, synthetic_batches(config, mesh, 0), mesh, config)
    return full_tensors(model)


def a_model_learns_the_same(exchange: Exchange) -> None:
    """Loss, auxiliary loss and balancing bias included: they are in the weights after a step."""
    theirs = train(None, 1, "none")
    for chunks, mode in ((2, "none"), (3, "full")):
        for (name, a), b in zip(train(exchange, chunks, mode).items(), theirs.values(), strict=True):
            assert float((a - b).norm()) <= 1e-5 * float(b.norm()), name


# By the number of ranks. The interpreter is slow, and ranks wait for each other by polling.
CHECKS = {
    1: (equal_for_every_number_of_chunks, a_compiled_graph_is_whole, what_departed_for_nobody_is_not_taken),
    2: (
        equal_for_every_number_of_chunks,
        coded_rows_travel_in_chunks_too,
        each_way_is_coded_as_asked,
        nothing_is_sent_again_by_a_recomputation,
        fewer_pairs_than_come_are_noted,
        a_compiled_graph_is_whole,
        what_departed_for_nobody_is_not_taken,
        a_model_learns_the_same,
    ),
    3: (equal_for_every_number_of_chunks,),
}


def prepared(check: Callable[[Exchange], None], folder: Path) -> None:
    """The check, with small tiles of experts too."""
    num_ranks = dist.get_world_size()
    row_bytes, side_bytes = 4 * max(WIDTH, DEEPSEEK.dim), 8 * max(TOP_K, DEEPSEEK.moe.top_k)
    layout = plan_layout(num_ranks, MAX_TOKENS, num_ranks, row_bytes, side_bytes, max_chunks=max(CHUNKS))
    exchange = shared_exchange(folder, layout, MAX_TOKENS, TOP_K)
    three = num_ranks == 3
    # Parts and tokens that are taken between two waits: one, and several.
    beside = patch.multiple("comms.put_and_take", BESIDE_PARTS=2 if three else 1, BESIDE_TOKENS=4 if three else 1)
    small = patch.object(tiles, "CANDIDATES", {kernel: (tile,) for kernel, tile in SMALL.items()})
    with beside, small:
        check(exchange)
    exchange.check()
    exchange.check_overflow()


@pytest.mark.parametrize(
    ("check", "num_ranks"),
    [pytest.param(check, n, id=f"{check.__name__}-{n}") for n, checks in CHECKS.items() for check in checks],
)
def test_chunks_change_nothing(check: Callable[[Exchange], None], num_ranks: int, tmp_path: Path) -> None:
    run_interpreted(prepared, num_ranks, check, tmp_path)
