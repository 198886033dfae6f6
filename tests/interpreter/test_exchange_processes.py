"""The whole exchange between processes on the CPU: arenas lie in files that all map, kernels are interpreted.

The same operators, gradients and layers as on GPUs, against the collective backend over gloo in the same processes.
Rows are moved and sums are in its order, so equality is exact; a layer's experts may do their last few elements in
another way than the rest, which leaves 1e-6.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from comms.all_to_all import AS_IT_IS, combine, dispatch, plan_dispatch
from comms.payload import Payload
from comms.symmetric_exchange import plan_exchange
from comms.symmetric_memory import Exchange, plan_layout
from tests.distributed.exchanged_layer import layer_pass
from tests.interpreter.shared_arenas import run_interpreted, shared_exchange

MAX_TOKENS, WIDTH, TOP_K, EXPERTS_PER_RANK = 12, 32, 3, 2
SIZES = {"experts_per_rank": EXPERTS_PER_RANK, "top_k": TOP_K, "width": WIDTH}


def random_ids(num_tokens: int, num_ranks: int, generator: torch.Generator) -> Tensor:
    num_experts = EXPERTS_PER_RANK * num_ranks
    ids = torch.rand(num_tokens, num_experts, generator=generator).argsort(1)[:, :TOP_K]
    return ids.masked_fill(torch.rand(ids.shape, generator=generator) < 0.3, -1)


def round_trip(
    exchange: Exchange | None, seed: int, payload: Payload = AS_IT_IS, group: dist.ProcessGroup | None = None
) -> list[Tensor]:
    """Output and gradients of rows and weights, by either backend. None: the group of all processes."""
    group = group or dist.group.WORLD
    rank, num_ranks = dist.get_rank(group), dist.get_world_size(group)
    generator = torch.Generator().manual_seed(100 * seed + rank)
    ids = random_ids((5 * rank + 7 * seed) % (MAX_TOKENS + 1), num_ranks, generator)
    x = torch.randn(len(ids), WIDTH, generator=generator).bfloat16().requires_grad_()
    weights = torch.rand(ids.shape, generator=generator).requires_grad_()
    owner = torch.where(ids >= 0, ids // EXPERTS_PER_RANK, -1)
    items = torch.stack([(owner == other).sum(1) for other in range(num_ranks)], 1)
    plan: Any = plan_dispatch(items, group)
    if exchange is not None:
        plan = plan_exchange(ids, EXPERTS_PER_RANK, exchange, seed, 10**6)
    rows, row_weights, row_ids = dispatch(plan, x, weights, ids, payload)
    is_ours = torch.where(row_ids >= 0, row_ids // EXPERTS_PER_RANK, -1) == rank
    scale = torch.where(is_ours, row_weights * (row_ids + 1), 0).sum(1, keepdim=True)
    partial = (torch.where(is_ours.any(1, keepdim=True), rows, 0) * scale).to(rows.dtype)
    out = combine(plan, partial, payload)
    upstream = torch.randn(out.shape, generator=generator).to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, [x, weights], upstream)]


def check_everything(folder: Path) -> None:
    num_ranks = dist.get_world_size()
    layout = plan_layout(num_ranks, MAX_TOKENS, TOP_K, 4 * WIDTH, 8 * TOP_K)
    exchange = shared_exchange(folder, layout, MAX_TOKENS)
    # Ranks with no tokens, some and all that there is room for.
    for seed in (0, 1):
        for ours, theirs in zip(round_trip(exchange, seed), round_trip(None, seed), strict=True):
            assert torch.equal(ours, theirs)
    coded = Payload("mxfp8", "mxfp8")
    for ours, theirs in zip(round_trip(exchange, 5, coded), round_trip(None, 5, coded), strict=True):
        assert torch.equal(ours, theirs)
    for mode in ("none", "full"):
        before = int(exchange.arena[: 8 * layout.failed_at].view(torch.int64).view(3, -1)[1, 0])
        for ours, theirs in zip(layer_pass(exchange, mode, **SIZES), layer_pass(None, "none", **SIZES), strict=True):
            assert float((ours - theirs).norm()) <= 1e-6 * float(theirs.norm())
        after = int(exchange.arena[: 8 * layout.failed_at].view(torch.int64).view(3, -1)[1, 0])
        # Of each call: its rows, and the gradients of its result. Nothing is sent again by a recomputation.
        assert after - before == 4
    exchange.check()
    exchange.check_overflow()


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_every_process_gets_what_the_collective_backend_brings(num_ranks: int, tmp_path: Path) -> None:
    run_interpreted(check_everything, num_ranks, tmp_path)


def check_two_groups(folder: Path) -> None:
    """Each has its own exchange, tokens and number of rounds; ranks of a group are not neighbours in the run."""
    group, _ = dist.new_subgroups_by_enumeration([[0, 2], [1, 3]])
    assert isinstance(group, dist.ProcessGroup)
    layout = plan_layout(2, MAX_TOKENS, TOP_K, 4 * WIDTH, 8 * TOP_K)
    exchange = shared_exchange(folder, layout, MAX_TOKENS, group=group)
    number = dist.get_rank() % 2
    assert exchange.global_ranks == (number, number + 2)
    for seed in (0, 1) if number else (2, 3, 4):
        ours, theirs = round_trip(exchange, seed, group=group), round_trip(None, seed, group=group)
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True)), seed
    exchange.check()
    exchange.check_overflow()


def test_two_groups_exchange_side_by_side(tmp_path: Path) -> None:
    run_interpreted(check_two_groups, 4, tmp_path)
