"""What layers keep for backward in one arena, between processes on the CPU, kernels interpreted.

Against the same layers with tensors of their own: the same kernels in the same order, so equal bit for bit, gradients
of weights included. The arena starts poisoned; ranks have different numbers of tokens, some none.
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

from comms.payload import Payload
from comms.saved_arena import SavedArena, plan_saved
from comms.symmetric_exchange import plan_exchange
from comms.symmetric_memory import Exchange, plan_layout, register
from moe import tiles
from moe.exchanged_experts import Through, depart, exchanged_experts
from moe.layer import MoE
from parallel.activation_checkpoint import apply_activation_checkpoint
from parallel.config import ParallelConfig
from parallel.expert_parallel import share_saved, use_exchange
from parallel.mesh import build_mesh
from tests.distributed.tiny_models import QWEN3
from tests.interpreter.shared_arenas import run_interpreted, shared_exchange
from tests.interpreter.test_exchanged_experts import (
    EXPERTS_PER_RANK,
    MAX_TOKENS,
    TOP_K,
    WIDTH,
    build_layer,
    epochs,
)
from tests.interpreter.test_fused_experts import SMALL
from trainer.build import build_model
from trainer.config import Config, OptimConfig, PrecisionConfig, TrainConfig
from trainer.optim import build_optimizer
from trainer.parity import full_tensors, synthetic_batches
from trainer.step import train_step

LAYERS, MICRO_BATCHES = 2, 3
POISON = {torch.float32: float("nan"), torch.int32: -1, torch.int64: -1}


def with_arena(exchange: Exchange, num_layers: int = LAYERS, keeps_hidden: bool = True) -> tuple[Exchange, SavedArena]:
    """Room for the most that so many layers can bring, poisoned."""
    layers = [build_layer(exchange, 1) for _ in range(num_layers)]
    found = share_saved(layers, exchange, 100.0, keeps_hidden, torch.float32)
    saved = found.saved
    assert saved is not None
    for tensor in (saved.rows_SD, saved.slots_SK, saved.item_rows_I, saved.item_weights_I, saved.ends):
        tensor.fill_(POISON[tensor.dtype])
    if saved.hidden_IH is not None:
        saved.hidden_IH.fill_(float("nan"))
    return found, saved


def model_of(exchange: Exchange, chunks: int, mode: str = "none", payload: Payload | None = None) -> nn.ModuleList:
    blocks = []
    for number in range(LAYERS):
        layer = build_layer(exchange, chunks, shared=number > 0)
        layer.number, layer.dispatch_payload, layer.combine_payload = number, *[payload or Payload()] * 2
        blocks.append(apply_activation_checkpoint(layer, mode))
    return nn.ModuleList(blocks)


def run(blocks: nn.ModuleList, x: Tensor) -> Tensor:
    for block in blocks:
        x = x + block(x)[0]
    return x


def micro_batches(tokens: list[int]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(dist.get_rank())
    numbers = [tokens[(dist.get_rank() + step) % len(tokens)] for step in range(MICRO_BATCHES)]
    shapes = [(1, number, WIDTH) if number else (0, 1, WIDTH) for number in numbers]
    return [torch.rand(shape, generator=generator).requires_grad_() for shape in shapes]


def pass_through(blocks: nn.ModuleList, tokens: list[int], at_once: bool = False) -> list[Tensor]:
    """Outputs and every gradient of three micro-batches, one after the other or all alive `at_once`."""
    xs = micro_batches(tokens)
    outs = []
    for x in xs:
        outs.append(run(blocks, x))
        if not at_once:
            outs[-1].square().sum().backward()
    if at_once:
        for out in outs:
            out.square().sum().backward()
    leaves = [*xs, *blocks.parameters()]
    return [*(out.detach() for out in outs), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def assert_same(ours: list[Tensor], theirs: list[Tensor]) -> None:
    for number, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        assert bool(b.isfinite().all()) and torch.equal(a, b), (number, float((a - b).abs().max()))


def used_entries(saved: SavedArena) -> int:
    """How many entries have been alive at the same time."""
    return int((saved.ends[:, 0] >= 0).sum())


def assert_enough(exchange: Exchange) -> None:
    exchange.check()
    exchange.check_overflow()


def layers_and_micro_batches_have_the_same_bits(exchange: Exchange) -> None:
    tokens, chunks = ([3, 0, MAX_TOKENS], 3) if dist.get_world_size() == 3 else ([MAX_TOKENS, 7, 1], 1)
    theirs = pass_through(model_of(register(exchange), chunks), tokens)
    ours, saved = with_arena(exchange)
    assert_same(pass_through(model_of(ours, chunks), tokens), theirs)
    # Each micro-batch found the places of the one before.
    assert used_entries(saved) == LAYERS and saved.num_alive == 0
    assert_enough(ours)


def micro_batches_may_all_wait_for_their_backward(exchange: Exchange) -> None:
    """Backward of the first one comes first, so places are free only after the last."""
    tokens = [MAX_TOKENS, 7, 0]
    theirs = pass_through(model_of(register(exchange), 1), tokens, at_once=True)
    ours, saved = with_arena(exchange, LAYERS * MICRO_BATCHES)
    assert_same(pass_through(model_of(ours, 1), tokens, at_once=True), theirs)
    assert used_entries(saved) == LAYERS * MICRO_BATCHES and saved.num_alive == 0
    assert_same(pass_through(model_of(ours, 1), tokens), pass_through(model_of(register(exchange), 1), tokens))
    assert_enough(ours)


def coded_rows_are_kept_decoded(exchange: Exchange) -> None:
    tokens, payload = [MAX_TOKENS, 7, 1], Payload("mxfp8", "mxfp8")
    theirs = pass_through(model_of(register(exchange), 3, payload=payload), tokens)
    ours, _ = with_arena(exchange)
    assert_same(pass_through(model_of(ours, 3, payload=payload), tokens), theirs)


def checkpointing_keeps_rows_and_makes_h_again(exchange: Exchange) -> None:
    tokens = [MAX_TOKENS, 7, 1]
    for mode, chunks in (("full", 3), ("selective", 1)):
        theirs = pass_through(model_of(register(exchange), chunks, mode), tokens)
        ours, saved = with_arena(exchange, keeps_hidden=False)
        assert saved.hidden_IH is None
        before = epochs(ours)
        assert_same(pass_through(model_of(ours, chunks, mode), tokens), theirs)
        sent = [after - number for after, number in zip(epochs(ours), before, strict=True)]
        passes = LAYERS * MICRO_BATCHES
        assert sent == [passes, 2 * chunks * passes, 2 * chunks * passes], (mode, sent)
        assert used_entries(saved) == LAYERS and saved.num_alive == 0
        assert_enough(ours)


def nothing_is_kept_without_gradients(exchange: Exchange) -> None:
    ours, saved = with_arena(exchange)
    blocks = model_of(ours, 1)
    with torch.no_grad():
        found = run(blocks, micro_batches([5])[0])
    assert saved.num_alive == 0 and used_entries(saved) == 0 and bool(saved.rows_SD.isnan().all())
    assert torch.equal(found, run(model_of(register(exchange), 1), micro_batches([5])[0]))


def dropped_graphs_leave_no_trace(exchange: Exchange) -> None:
    """By whatever way: forgotten, or left by an exception; and with a living one on top, which keeps its place."""
    tokens = [MAX_TOKENS]
    theirs = pass_through(model_of(register(exchange), 1), tokens)
    ours, saved = with_arena(exchange, 2 * LAYERS)
    blocks = model_of(ours, 1)
    for _ in range(2):
        out = run(blocks, micro_batches(tokens)[0])
        assert saved.num_alive == LAYERS
        del out
        assert alive(saved) == 0

    def fails() -> None:
        kept = run(blocks, micro_batches(tokens)[0])
        raise ValueError(f"{kept.shape} is no good")

    with pytest.raises(ValueError, match="no good"):
        fails()
    assert alive(saved) == 0
    below, above = (run(blocks, x) for x in micro_batches(tokens)[:2])
    assert alive(saved) == used_entries(saved) == 2 * LAYERS
    del below
    assert alive(saved) == LAYERS
    above.square().sum().backward()
    blocks.zero_grad()
    assert_same(pass_through(blocks, tokens), theirs)
    assert used_entries(saved) == 2 * LAYERS and saved.num_alive == 0
    assert_enough(ours)


def alive(saved: SavedArena) -> int:
    """Triton's interpreter leaves arguments of its kernels in cycles."""
    gc.collect()
    return saved.num_alive


def what_is_gone_is_not_read(exchange: Exchange) -> None:
    """A graph that was kept can be asked again, until another has its place."""
    ours, _ = with_arena(exchange)
    blocks, x = model_of(ours, 1), micro_batches([5])[0]
    out = run(blocks, x).square().sum()
    first = torch.autograd.grad(out, x, retain_graph=True)[0]
    assert torch.equal(torch.autograd.grad(out, x, retain_graph=True)[0], first)
    run(blocks, x)
    with pytest.raises(RuntimeError, match="gradients were asked for twice"):
        torch.autograd.grad(out, x)


def kept_bytes(exchange: Exchange, pair_capacity: float | None) -> int:
    """What the graph of a layer keeps, weights included."""
    layer = build_layer(exchange, 1, pair_capacity=pair_capacity)
    sizes: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        kept = layer(torch.ones(1, 4, WIDTH))[0]
    del kept
    return sum(sizes.values())


def a_layer_keeps_the_same_whatever_the_room(exchange: Exchange) -> None:
    ours, saved = with_arena(exchange)
    hidden = 2 * build_layer(exchange, 1).experts.w_down.shape[2]
    # h, row and weight of each pair; row and slots of each row.
    pair_bytes, row_bytes = 4 * (hidden + 2), 4 * (WIDTH + TOP_K)
    keeps, keeps_in_arena = [], []
    for bound in (None, 0.5):
        pairs = build_layer(exchange, 1, pair_capacity=bound).pair_room(exchange)
        keeps.append(kept_bytes(register(exchange), bound) - pairs * pair_bytes)
        keeps_in_arena.append(kept_bytes(register(ours), bound))
    assert keeps[0] == keeps[1] and keeps_in_arena[0] == keeps_in_arena[1]
    # Instead of all that there must be room for: where it begins.
    assert keeps_in_arena[0] == keeps[0] - exchange.layout.row_bound * row_bytes + 24
    assert saved.room.num_rows == LAYERS * exchange.layout.row_bound


def a_compiled_graph_is_whole(exchange: Exchange) -> None:
    """With something between departure and arrival; twice, so that one finds the places of the other."""
    ours, saved = with_arena(exchange)
    layer = build_layer(ours, 2)
    generator = torch.Generator().manual_seed(dist.get_rank())
    x, weights = torch.rand(9, WIDTH, generator=generator), torch.rand(9, TOP_K, generator=generator)
    ids = torch.rand(9, EXPERTS_PER_RANK, generator=generator).argsort(1)[:, :TOP_K]

    def compute(x: Tensor, weights: Tensor, w_up: Tensor, w_down: Tensor, plan: Any, saves: bool) -> Tensor:
        through = Through(plan, 0, Payload(), Payload(), saves=saves)
        depart(through, x, weights, ids, beside=True)
        beside = x @ x.T
        y = exchanged_experts(through, x, weights, ids, w_up, w_down, "swiglu")
        return y * 2 + beside @ x

    results = []
    compiled = torch.compile(compute, fullgraph=True, backend="aot_eager")
    for function, saves in ((compute, False), (compiled, True), (compiled, True)):
        plan = plan_exchange(ids, EXPERTS_PER_RANK, ours, 0, 18, 2)
        given = [leaf.detach().clone().requires_grad_() for leaf in (x, weights, *layer.experts.parameters())]
        out = function(*given, plan, saves)
        assert saved.num_alive == int(saves)
        results.append([out.detach(), *torch.autograd.grad(out.square().sum(), given)])
    assert_same(results[1], results[0])
    assert_same(results[2], results[0])
    assert used_entries(saved) == 1 and saved.num_alive == 0
    assert_enough(ours)


def a_place_that_is_too_small_is_noted(exchange: Exchange) -> None:
    """The last one lies over those before, nowhere else, and the need is that of all together."""
    register(exchange)
    layers = [build_layer(exchange, 1) for _ in range(LAYERS)]
    ours, saved = with_arena(exchange)
    bound, pairs = ours.layout.row_bound, layers[0].pair_room(ours)
    room = plan_saved(LAYERS, 1.0, (bound / 2, bound), (pairs / 2, pairs))
    assert room.num_rows == bound and room.num_items == pairs
    beyond = saved.rows_SD[bound:], saved.hidden_IH[pairs:], saved.slots_SK[bound:]
    saved.room = room
    out = run(model_of(ours, 1), micro_batches([MAX_TOKENS])[0])
    assert saved.overflow.tolist()[:2] == [LAYERS * MAX_TOKENS, bound]
    assert saved.overflow.tolist()[3:5] == [LAYERS * MAX_TOKENS * TOP_K, pairs]
    assert all(bool((tensor.isnan() if tensor.is_floating_point() else tensor == -1).all()) for tensor in beyond)
    out.sum().backward()
    assert torch.equal(out, run(model_of(register(exchange), 1), micro_batches([MAX_TOKENS])[0]))


def train(exchange: Exchange | None, headroom: float | None, mode: str) -> dict[str, Tensor]:
    """Weights after a step of three micro-batches of a small model whose experts FSDP wraps."""
    num_ranks = dist.get_world_size()
    config = Config(
        model=replace(QWEN3, moe=replace(QWEN3.moe, backend="fused")),
        train=TrainConfig(
            global_batch_size=num_ranks * MICRO_BATCHES, micro_batch_size=1, seq_len=MAX_TOKENS, steps=1
        ),
        parallel=ParallelConfig(dp_shard=num_ranks, ep=num_ranks, activation_checkpoint=mode),
        precision=PrecisionConfig(recipe="fp32"),
        optim=OptimConfig(name="sgd", lr=0.1),
    )  # fmt: skip
    mesh = build_mesh(config.parallel, torch.device("cpu"))
    model = build_model(config, mesh)
    layers = [module for module in model.modules() if isinstance(module, MoE)]
    if headroom is not None:
        exchange = share_saved(layers, exchange, headroom, mode == "none", torch.float32)
    use_exchange(layers, exchange)
    train_step(model, build_optimizer(model, config.optim), synthetic_batches(config, mesh, 0), mesh, config)
    if exchange.saved is not None:
        assert exchange.saved.num_alive == 0 and int(exchange.saved.ends[len(layers) :].abs().sum()) == 0
    assert_enough(exchange)
    return full_tensors(model)


def a_model_learns_the_same(exchange: Exchange) -> None:
    theirs = train(register(exchange), None, "full")
    for (name, a), b in zip(train(exchange, 1.5, "full").items(), theirs.values(), strict=True):
        assert torch.equal(a, b), name


CHECKS = {
    1: (
        nothing_is_kept_without_gradients,
        dropped_graphs_leave_no_trace,
        what_is_gone_is_not_read,
        a_layer_keeps_the_same_whatever_the_room,
        a_compiled_graph_is_whole,
        a_place_that_is_too_small_is_noted,
    ),
    2: (
        layers_and_micro_batches_have_the_same_bits,
        micro_batches_may_all_wait_for_their_backward,
        coded_rows_are_kept_decoded,
        checkpointing_keeps_rows_and_makes_h_again,
        a_model_learns_the_same,
    ),
    3: (layers_and_micro_batches_have_the_same_bits,),
}


def prepared(checks: tuple[Callable[[Exchange], None], ...], folder: Path) -> None:
    num_ranks = dist.get_world_size()
    layout = plan_layout(num_ranks, MAX_TOKENS, num_ranks, 4 * max(WIDTH, QWEN3.dim), 8 * TOP_K, max_chunks=3)
    exchange = shared_exchange(folder, layout, MAX_TOKENS, TOP_K)
    small = patch.object(tiles, "CANDIDATES", {kernel: (tile,) for kernel, tile in SMALL.items()})
    with small:
        for check in checks:
            check(exchange)


@pytest.mark.parametrize(
    ("check", "num_ranks"),
    [pytest.param(check, n, id=f"{check.__name__}-{n}") for n, checks in CHECKS.items() for check in checks],
)
def test_an_arena_changes_nothing(check: Callable[[Exchange], None], num_ranks: int, tmp_path: Path) -> None:
    run_interpreted(prepared, num_ranks, (check,), tmp_path)
