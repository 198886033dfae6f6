"""Rows that cross to a node once and are passed on there, beside the exchange of one level.

Nodes are consecutive processes of one host. Rows are moved, not changed, so they are compared exactly. Sums of a node's
partials are rounded before they travel: in fp64 the two paths agree within 1e-12, in bf16 within the bound that
comms/all_to_all.py states.
"""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from comms.all_to_all import NodePlan, combine, dispatch, plan_dispatch
from comms.backend import choose_backend
from comms.config import CommsConfig
from comms.kernels.codec import pack_rows, unpack_rows
from comms.nodes import NodeGroups, make_node_groups
from comms.payload import Payload
from parallel.config import ParallelConfig
from tests.distributed.harness import run_workers
from tests.distributed.test_dispatch import EXPERTS_PER_RANK, PATTERNS, TOP_K, weighted_work
from tests.distributed.tiny_models import GPT_OSS, MODELS
from tests.distributed.traces import ONE, assert_same, kept, settled, trace_of
from trainer.models.config import ModelConfig

# Nodes and ranks of each.
WORLDS = [(2, 2), (2, 3), (4, 2)]
BF16_ROUNDOFF = 2.0**-8


def groups_of(ranks_per_node: int) -> NodeGroups:
    """In a worker; they end with the function that it runs."""
    assert dist.group.WORLD is not None
    groups = make_node_groups(dist.group.WORLD, ranks_per_node, 120)
    assert groups is not None
    return groups


class Sent(NamedTuple):
    """One exchange of records: the ranks of its group, records to each of them, bytes of a record."""

    ranks: list[int]
    counts: list[int]
    width: int


@contextmanager
def recorded() -> Iterator[list[Sent]]:
    """Exchanges of records; receive buffers start as NaN."""
    calls: list[Sent] = []
    original = dist.all_to_all_single

    def exchange(output: Tensor, tensor: Tensor, *splits: Any, group: Any) -> Any:
        if tensor.dtype == torch.uint8:
            calls.append(Sent(dist.get_process_group_ranks(group), list(splits[1]), tensor.shape[1]))
            # All ones is NaN in every floating format, and -1 as an integer.
            output.fill_(0xFF)
        return original(output, tensor, *splits, group=group)

    with patch.object(dist, "all_to_all_single", exchange):
        yield calls


def items_of(ids_TK: Tensor) -> Tensor:
    owner_TK = torch.where(ids_TK >= 0, ids_TK // EXPERTS_PER_RANK, -1)
    return torch.stack([(owner_TK == rank).sum(1) for rank in range(dist.get_world_size())], dim=1)


def tokens_of(ids_TK: Tensor, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(dist.get_rank())
    x_TD = torch.randn(ids_TK.shape[0], width, generator=generator).to(dtype)
    return x_TD, torch.rand(ids_TK.shape, generator=generator).to(torch.promote_types(dtype, torch.float32))


def check(ids_by_rank: list[Tensor], ranks_per_node: int) -> None:
    groups = groups_of(ranks_per_node)
    check_rows(ids_by_rank, groups)
    check_round_trip(ids_by_rank, groups)


def check_rows(ids_by_rank: list[Tensor], groups: NodeGroups) -> None:
    """Which rows arrive, in which order, and how many cross between nodes."""
    rank, num_ranks, ranks_per_node = dist.get_rank(), dist.get_world_size(), groups.ranks_per_node
    ids_TK = ids_by_rank[rank]
    # An odd width in bf16: nothing after the row is aligned.
    x_TD, weights_TK = tokens_of(ids_TK, 5, torch.bfloat16)
    items_TN = items_of(ids_TK)
    plan, flat = plan_dispatch(items_TN, groups), plan_dispatch(items_TN, dist.group.WORLD)
    assert isinstance(plan, NodePlan) and plan.is_exact
    figures = [(one.num_tokens, one.num_rows, one.num_items) for one in (plan, flat)]
    assert figures[0] == figures[1]
    with recorded() as calls:
        received = dispatch(plan, x_TD, weights_TK, ids_TK)
    everyone: list[Any] = [None] * num_ranks
    dist.all_gather_object(everyone, (x_TD, weights_TK, ids_TK, items_TN))
    sources = sorted(range(num_ranks), key=lambda source: (source % ranks_per_node, source))
    expected = [
        tuple(column[token] for column in everyone[source][:3])
        for source in sources
        for token in range(everyone[source][0].shape[0])
        if everyone[source][3][token, rank] > 0
    ]
    assert received[0].shape == (len(expected), 5) and received[2].dtype == torch.int64
    for ours, oracle in zip(zip(*received, strict=True), expected, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, oracle, strict=True))
    # Between nodes one row per (token, node), and only to the rank with the same local index.
    across, inside = calls
    node = rank // ranks_per_node
    needs_TM = items_TN.view(-1, num_ranks // ranks_per_node, ranks_per_node).sum(2) > 0
    assert across.ranks == list(range(rank % ranks_per_node, num_ranks, ranks_per_node))
    assert across.counts == needs_TM.sum(0).tolist()
    assert inside.ranks == list(range(node * ranks_per_node, (node + 1) * ranks_per_node))
    assert across.width == inside.width == -(-(2 * 5 + 8 * TOP_K) // 16) * 16


def check_round_trip(ids_by_rank: list[Tensor], groups: NodeGroups) -> None:
    """Output and gradients beside those of one level, and of work that is done at home."""
    ids_TK = ids_by_rank[dist.get_rank()]
    x_TD, weights_TK = (x.requires_grad_() for x in tokens_of(ids_TK, 6, torch.float64))
    upstream_TD = torch.randn(x_TD.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(7))

    def results(out_TD: Tensor) -> list[Tensor]:
        return [out_TD, *torch.autograd.grad(out_TD, [x_TD, weights_TK], upstream_TD)]

    found: list[list[Tensor]] = []
    for group in (groups, dist.group.WORLD):
        with recorded():
            plan = plan_dispatch(items_of(ids_TK), group)
            rows = dispatch(plan, x_TD, weights_TK, ids_TK)
            found.append(results(combine(plan, weighted_work(*rows, dist.get_rank()))))
    terms = [weighted_work(x_TD, weights_TK, ids_TK, rank) for rank in range(dist.get_world_size())]
    found.append(results(torch.stack(terms).sum(0)))
    for ours, flat, home in zip(*found, strict=True):
        torch.testing.assert_close(ours, flat, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(ours, home, rtol=1e-12, atol=1e-12)
    # Tokens that went nowhere: exactly zero.
    unsent_T = (ids_TK < 0).all(dim=1)
    assert bool((found[0][0][unsent_T] == 0).all()) and bool((found[0][1][unsent_T] == 0).all())


def ids_of(pattern: str, num_ranks: int) -> list[Tensor]:
    return [PATTERNS[pattern](rank, num_ranks, torch.Generator().manual_seed(rank)) for rank in range(num_ranks)]


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize(("num_nodes", "ranks_per_node"), WORLDS)
def test_patterns(pattern: str, num_nodes: int, ranks_per_node: int) -> None:
    """Uneven and empty ranks, everything to one rank, and nothing at all."""
    num_ranks = num_nodes * ranks_per_node
    run_workers(check, num_ranks, ids_of(pattern, num_ranks), ranks_per_node)


@st.composite
def worlds(draw):
    """Nodes, ranks of each, and for each rank the ids of its tokens; -1: a slot without one, as after a drop."""
    num_nodes, ranks_per_node = draw(st.sampled_from(WORLDS))
    num_ranks = num_nodes * ranks_per_node
    ids = st.integers(-1, EXPERTS_PER_RANK * num_ranks - 1)
    row = st.lists(ids, min_size=TOP_K, max_size=TOP_K)
    tables = [draw(st.lists(row, max_size=4)) for _ in range(num_ranks)]
    return num_ranks, ranks_per_node, [torch.tensor(table, dtype=torch.int64).view(-1, TOP_K) for table in tables]


@settings(max_examples=30, deadline=None)
@given(worlds())
def test_random_plans_equal_one_level(world: tuple[int, int, list[Tensor]]) -> None:
    num_ranks, ranks_per_node, ids = world
    run_workers(check, num_ranks, ids, ranks_per_node)


def check_partial_sums(ranks_per_node: int) -> float:
    """The order of sums, bit for bit, and their distance from one level, as a part of its bound."""
    num_ranks, rank = dist.get_world_size(), dist.get_rank()
    generator = torch.Generator().manual_seed(3)
    is_sent_TN = torch.rand(16, num_ranks, generator=generator) < 0.7
    everyone_NTD = torch.randn(num_ranks, num_ranks, 16, 8, generator=generator)
    # What rank n makes of the row of token t of rank m; magnitudes differ, so that the order shows.
    everyone_NTD = (everyone_NTD * 2.0 ** torch.arange(num_ranks)[:, None, None, None]).bfloat16()
    outs: list[Tensor] = []
    for group in (groups_of(ranks_per_node), dist.group.WORLD):
        plan = plan_dispatch(is_sent_TN.long(), group)
        place_T2 = torch.stack([torch.full((16,), rank), torch.arange(16)], dim=1)
        rows = dispatch(plan, torch.zeros(16, 8, dtype=torch.bfloat16), torch.zeros(16, 2), place_T2)
        source_R, token_R = rows[2].unbind(1)
        outs.append(combine(plan, everyone_NTD[rank, source_R, token_R]))
    partial_NTD = torch.where(is_sent_TN.t()[:, :, None], everyone_NTD[:, rank].float(), 0)
    nodes = []
    for start in range(0, num_ranks, ranks_per_node):
        total_TD = torch.zeros(16, 8)
        for part_TD in partial_NTD[start : start + ranks_per_node]:
            total_TD += part_TD
        nodes.append(total_TD.bfloat16().float())
    expected_TD = torch.zeros(16, 8)
    for node_TD in nodes:
        expected_TD += node_TD
    two, one = (out.float() for out in outs)
    assert torch.equal(two, expected_TD.bfloat16().float())
    sums_TD = partial_NTD.view(-1, ranks_per_node, 16, 8).sum(1).abs().sum(0)
    bound_TD = BF16_ROUNDOFF * (sums_TD + one.abs() + two.abs()) + 1e-6 * partial_NTD.abs().sum(0)
    assert bool(((two - one).abs() <= bound_TD).all())
    return float(((two - one).abs() / bound_TD.clamp(min=1e-30)).max())


@pytest.mark.parametrize(("num_nodes", "ranks_per_node"), WORLDS)
def test_partials_are_summed_inside_nodes_then_across(num_nodes: int, ranks_per_node: int) -> None:
    # Above 0: the two differ somewhere, so the order was seen.
    assert max(run_workers(check_partial_sums, num_nodes * ranks_per_node, ranks_per_node)) > 0


def check_coded_rows() -> None:
    """A row that was coded, decoded and coded again is the row that was coded once; so are gradients on the way."""
    ids_TK = PATTERNS["random_ids"](dist.get_rank(), dist.get_world_size(), torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(dist.get_rank())
    # Rows of very different size, and blocks whose greatest value rounds down to half of the scale's range.
    x_TD = torch.randn(ids_TK.shape[0], 40, generator=generator) * 2.0 ** torch.randint(-9, 9, (1, 40))
    x_TD[::2, 0] = 225.0
    x_TD, plan = x_TD.bfloat16().requires_grad_(), plan_dispatch(items_of(ids_TK), groups_of(2))
    payload, weights_TK = Payload("mxfp8", "mxfp8"), torch.rand(ids_TK.shape)

    def coded(x: Tensor) -> Tensor:
        return unpack_rows(pack_rows(x.detach()), 40, torch.bfloat16)

    rows_RD = dispatch(plan, x_TD, weights_TK, ids_TK, payload)[0]
    assert torch.equal(rows_RD, dispatch(plan, coded(x_TD), weights_TK, ids_TK)[0])
    rows_RD = rows_RD.detach().requires_grad_()
    out_TD = combine(plan, rows_RD, payload)
    upstream_TD = torch.randn(out_TD.shape, generator=generator).bfloat16()
    (gradient_RD,) = torch.autograd.grad(out_TD, rows_RD, upstream_TD)
    (plain_RD,) = torch.autograd.grad(combine(plan, rows_RD), rows_RD, coded(upstream_TD))
    assert torch.equal(gradient_RD, plain_RD)


def test_rows_coded_as_mxfp8_are_coded_once_in_effect() -> None:
    run_workers(check_coded_rows, 4)


def check_choice() -> list[str]:
    def choose(hosts: list[str], **settings: Any) -> Any:
        with patch("comms.backend.hosts_of", lambda _: hosts):
            return choose_backend(CommsConfig(**settings), dist.group.WORLD, torch.device("cpu"))

    by_hosts = choose(["a", "a", "b", "b"])
    assert (by_hosts.backend, by_hosts.ranks_per_node) == ("collective", 2)
    one_host = choose(["a"] * 4)
    assert one_host.ranks_per_node is None and "two levels" not in one_host.reason
    uneven = choose(["a", "a", "a", "b"], backend="collective")
    assert uneven.ranks_per_node is None
    with pytest.raises(ValueError, match=r"symm_mem reaches the ranks of one node, and .* parallel.ep are on 2; use"):
        choose(["a"] * 4, backend="symm_mem", ranks_per_node=2)
    with pytest.raises(ValueError, match=r"comms.ranks_per_node=3 does not divide the 4 ranks"):
        choose(["a"] * 4, ranks_per_node=3)
    asked = choose_backend(CommsConfig(backend="collective", ranks_per_node=2), dist.group.WORLD, torch.device("cpu"))
    return [asked.reason, by_hosts.reason, uneven.reason]


def test_the_choice_says_how_many_levels_and_why() -> None:
    asked, by_hosts, uneven = run_workers(check_choice, 4)[0]
    assert asked == "two levels: 2 nodes x 2 ranks, as comms.ranks_per_node says; as asked"
    assert by_hosts.startswith("two levels: 2 nodes x 2 ranks, as their hosts say; symm_mem and nvshmem need GPUs")
    assert uneven.startswith("one level: ") and uneven.endswith("a x 3 b x 1; as asked")


LAYOUTS = {
    "ep4": (settled(4, ep=4), 2),
    "ep4_fsdp2": (settled(8, ep=4), 2),
    "ep4_etp2": (settled(8, tp=2, etp=2, ep=4), 2),
    "ep8": (settled(8, ep=8), 4),
}
CASES = [*itertools.product(["ep4"], ("qwen3", "deepseek", "gpt_oss")), ("ep4_etp2", "gpt_oss"), ("ep8", "qwen3")]


def of_two_levels(layout: str, model: ModelConfig) -> Any:
    where, ranks_per_node = LAYOUTS[layout]
    return trace_of(where, model, comms=CommsConfig(ranks_per_node=ranks_per_node))


@pytest.mark.parametrize(("layout", "name"), [*CASES, ("ep4_fsdp2", "deepseek")])
def test_a_model_equals_one_process(layout: str, name: str) -> None:
    """Loss, every gradient by name, norms, counts and weights after three steps (bound: test_parity.py)."""
    assert_same(of_two_levels(layout, MODELS[name]), kept(ONE, name), 1e-10)


def test_capacity_drops_the_same_pairs() -> None:
    model = replace(GPT_OSS, moe=replace(GPT_OSS.moe, capacity_factor=0.75))
    ours, reference = of_two_levels("ep4", model), trace_of(ONE, model)
    assert ours.dropped == reference.dropped and ours.dropped[0] > 0
    assert_same(ours, reference, 1e-10)


def levels_in_a_model(ranks_per_node: int | None) -> set[bool]:
    """Whether the MoE layers of a built model have two levels."""
    from moe.layer import MoE
    from parallel.mesh import build_mesh
    from trainer.build import build_model
    from trainer.config import Config, TrainConfig

    mesh = build_mesh(ParallelConfig(ep=4), torch.device("cpu"))
    comms = CommsConfig(ranks_per_node=ranks_per_node)
    config = Config(train=TrainConfig(seq_len=16), model=MODELS["qwen3"], parallel=mesh.config, comms=comms)
    model = build_model(config, mesh)
    assert ("two levels" in model.exchange_choice.reason) == (ranks_per_node == 2)
    return {layer.nodes is not None for layer in model.modules() if isinstance(layer, MoE)}


def test_one_node_and_one_rank_per_node_have_one_level() -> None:
    for ranks_per_node, has_two in ((None, False), (1, False), (2, True), (4, False)):
        assert run_workers(levels_in_a_model, 4, ranks_per_node)[0] == {has_two}
