"""Dispatch and combine between processes: what crosses the wire, in which order, and its gradients.

The oracles need no communication: what each rank sent is gathered as Python objects and put in order by loops, or the
whole round trip is computed on the token's own rank. Rows are moved, not changed, so values are compared exactly; sums
of partials are compared exactly too where their order is the contract, else within 1e-12 (fp64).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from comms.all_to_all import combine, dispatch, plan_dispatch
from comms.backend import choose_backend
from comms.config import CommsConfig
from comms.kernels.codec import pack_rows, unpack_rows
from comms.kernels.gather_sum import gather_sum_reference
from comms.payload import Payload
from tests.distributed.harness import run_workers

EXPERTS_PER_RANK = 2
TOP_K = 3

Ids = Callable[[int, int, torch.Generator], Tensor]


def random_ids(rank: int, world_size: int, generator: torch.Generator) -> Tensor:
    """Distinct experts per token; the number of tokens differs from rank to rank."""
    num_tokens = 5 + 4 * rank
    scores = torch.rand(num_tokens, EXPERTS_PER_RANK * world_size, generator=generator)
    ids = scores.argsort(dim=1)[:, :TOP_K]
    # Some slots, and one whole token, have no expert.
    ids[torch.rand(ids.shape, generator=generator) < 0.2] = -1
    ids[1] = -1
    return ids


def all_to_the_last_rank(rank: int, world_size: int, generator: torch.Generator) -> Tensor:
    experts = [EXPERTS_PER_RANK * (world_size - 1), EXPERTS_PER_RANK * world_size - 1, -1]
    return torch.tensor(experts).repeat(4 + rank, 1)


def one_rank_is_empty(rank: int, world_size: int, generator: torch.Generator) -> Tensor:
    ids = random_ids(rank, world_size, generator)
    return ids[:0] if rank == 0 else ids


def nobody_sends(rank: int, world_size: int, generator: torch.Generator) -> Tensor:
    return torch.full((3, TOP_K), -1)


def one_token_in_all(rank: int, world_size: int, generator: torch.Generator) -> Tensor:
    ids = torch.full((1, TOP_K), -1)
    ids[0, 1] = 0 if rank == world_size - 1 else -1
    return ids


PATTERNS = {
    pattern.__name__: pattern
    for pattern in (random_ids, all_to_the_last_rank, one_rank_is_empty, nobody_sends, one_token_in_all)
}


def inputs(pattern: Ids, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x, weights, ids of this rank, and the items of each of its tokens on each rank."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(rank)
    ids_TK = pattern(rank, world_size, generator)
    x_TD = torch.randn(ids_TK.shape[0], width, generator=generator).to(dtype)
    weights_TK = torch.rand(ids_TK.shape, generator=generator).to(torch.promote_types(dtype, torch.float32))
    owner_TK = torch.where(ids_TK >= 0, ids_TK // EXPERTS_PER_RANK, -1)
    items_TN = torch.stack([(owner_TK == other).sum(1) for other in range(world_size)], dim=1)
    return x_TD, weights_TK, ids_TK, items_TN


@contextmanager
def recorded_exchanges() -> Iterator[list[tuple[int, int, int]]]:
    """(rows sent, rows received, bytes per row) of each exchange; receive buffers start as NaN."""
    calls: list[tuple[int, int, int]] = []
    original = dist.all_to_all_single

    def exchange(output: Tensor, tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        if tensor.dtype == torch.uint8:
            calls.append((tensor.shape[0], output.shape[0], tensor.shape[1]))
            # All ones is NaN in every floating format, and -1 as an integer.
            output.fill_(0xFF)
        return original(output, tensor, *args, **kwargs)

    with patch.object(dist, "all_to_all_single", exchange):
        yield calls


def check_dispatch(pattern_name: str, width: int, dtype: torch.dtype) -> int:
    """Compare with the tables of every rank, row by row; returns the rows this rank put on the wire."""
    x_TD, weights_TK, ids_TK, items_TN = inputs(PATTERNS[pattern_name], width, dtype)
    plan = plan_dispatch(items_TN, dist.group.WORLD)
    with recorded_exchanges() as calls:
        rows_RD, weights_RK, ids_RK = dispatch(plan, x_TD, weights_TK, ids_TK)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (x_TD, weights_TK, ids_TK, items_TN))

    expected = [
        (x[token], weights[token], ids[token])
        for x, weights, ids, items in everyone
        for token in range(x.shape[0])
        if items[token, dist.get_rank()] > 0
    ]
    assert plan.num_rows == rows_RD.shape[0] == len(expected)
    assert plan.num_items == sum(int(items[:, dist.get_rank()].sum()) for *_, items in everyone)
    assert (rows_RD.dtype, weights_RK.dtype, ids_RK.dtype) == (x_TD.dtype, weights_TK.dtype, torch.int64)
    for row, (x, weights, ids) in enumerate(expected):
        assert torch.equal(rows_RD[row], x) and torch.equal(weights_RK[row], weights) and torch.equal(ids_RK[row], ids)
    # One exchange; a record holds the row and its side columns, rounded up to 16 bytes.
    record = width * x_TD.element_size() + TOP_K * (weights_TK.element_size() + 4)
    (sent, received, size), *others = calls
    assert not others and received == len(expected) and size == -(-record // 16) * 16
    unique_pairs = {(token, int(rank)) for token, rank in (items_TN > 0).nonzero().tolist()}
    assert sent == len(unique_pairs)
    return sent


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("num_ranks", [2, 3, 4, 8])
def test_rows_arrive_once_per_token_and_rank_in_order(pattern: str, num_ranks: int) -> None:
    # An odd width in bf16: nothing after the row is aligned.
    run_workers(check_dispatch, num_ranks, pattern, 5, torch.bfloat16)
    run_workers(check_dispatch, num_ranks, pattern, 8, torch.float64)


def test_a_token_crosses_once_however_many_of_its_experts_are_there() -> None:
    """Two experts of the last rank per token: 4 and 5 rows travel, not 8 and 10."""
    assert run_workers(check_dispatch, 2, "all_to_the_last_rank", 8, torch.float32) == [4, 5]


def weighted_work(rows_RD: Tensor, weights_RK: Tensor, ids_RK: Tensor, rank: int) -> Tensor:
    """A stand-in for experts: each of the rank's own ids scales the row by weight * (id + 1)."""
    first = rank * EXPERTS_PER_RANK
    is_ours_RK = (ids_RK >= first) & (ids_RK < first + EXPERTS_PER_RANK)
    scale_R = torch.where(is_ours_RK, weights_RK * (ids_RK + 1), 0).sum(1)
    return rows_RD * scale_R[:, None].to(rows_RD.dtype)


def check_round_trip(pattern_name: str) -> None:
    x_TD, weights_TK, ids_TK, items_TN = inputs(PATTERNS[pattern_name], 6, torch.float64)
    x_TD.requires_grad_()
    weights_TK.requires_grad_()
    plan = plan_dispatch(items_TN, dist.group.WORLD)
    with recorded_exchanges() as calls:
        rows = dispatch(plan, x_TD, weights_TK, ids_TK)
        out_TD = combine(plan, weighted_work(*rows, dist.get_rank()))
        generator = torch.Generator().manual_seed(7 + dist.get_rank())
        upstream_TD = torch.randn(out_TD.shape, dtype=torch.float64, generator=generator)
        grads = torch.autograd.grad(out_TD, [x_TD, weights_TK], upstream_TD)
    # There and back, and backward mirrors it: the same rows the other way round.
    there, back, gradient_there, gradient_back = [(sent, received) for sent, received, _ in calls]
    assert there == gradient_there == back[::-1] == gradient_back[::-1]

    expected_TD = sum(weighted_work(x_TD, weights_TK, ids_TK, rank) for rank in range(dist.get_world_size()))
    expected_grads = torch.autograd.grad(expected_TD, [x_TD, weights_TK], upstream_TD)
    for ours, oracle in zip((out_TD, *grads), (expected_TD, *expected_grads), strict=True):
        torch.testing.assert_close(ours, oracle, rtol=1e-12, atol=1e-12)
    # Tokens that went nowhere: exactly zero.
    unsent_T = (ids_TK < 0).all(dim=1)
    assert bool((out_TD[unsent_T] == 0).all()) and bool((grads[0][unsent_T] == 0).all())


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("num_ranks", [2, 3, 4, 8])
def test_round_trip_and_its_gradients_equal_work_done_at_home(pattern: str, num_ranks: int) -> None:
    run_workers(check_round_trip, num_ranks, pattern)


def check_partial_sums() -> bool:
    """Partials whose sum depends on the order; returns whether another order would have been seen."""
    num_ranks, rank = dist.get_world_size(), dist.get_rank()
    items_TN = torch.ones(16, num_ranks, dtype=torch.int64)
    items_TN[3, :2] = 0
    plan = plan_dispatch(items_TN, dist.group.WORLD)
    rows = dispatch(plan, torch.zeros(16, 8, dtype=torch.bfloat16), torch.zeros(16, 1), torch.zeros(16, 1).long())
    scale = 2.0 ** (10 * (rank % 2) + rank)
    generator = torch.Generator().manual_seed(rank)
    partial_RD = (torch.randn(rows[0].shape, generator=generator) * scale).bfloat16()
    out_TD = combine(plan, partial_RD)

    everyone: list[Any] = [None] * num_ranks
    dist.all_gather_object(everyone, (partial_RD, plan.recv_counts))
    first_rows = [sum(counts[:rank]) for _, counts in everyone]
    ascending_TD = torch.zeros(16, 8)
    rounded_early_TD = torch.zeros(16, 8, dtype=torch.bfloat16)
    for other, (partial, _) in enumerate(everyone):
        row = first_rows[other]
        for token in range(16):
            if items_TN[token, other]:
                ascending_TD[token] += partial[row].float()
                rounded_early_TD[token] += partial[row]
                row += 1
    assert torch.equal(out_TD, ascending_TD.bfloat16())
    return not torch.equal(out_TD, rounded_early_TD)


def test_partials_are_summed_in_fp32_by_ascending_rank_and_rounded_once() -> None:
    assert all(run_workers(check_partial_sums, 4))


def check_plan_reads_the_host_once() -> list[str]:
    """The collective operators of one round trip, in order."""
    names: list[str] = []

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func.namespace == "sluicegate":
                names.append(func._opname)
            return func(*args, **(kwargs or {}))

    x_TD, weights_TK, ids_TK, items_TN = inputs(random_ids, 4, torch.float32)
    with Recorder():
        plan = plan_dispatch(items_TN, dist.group.WORLD)
        combine(plan, dispatch(plan, x_TD, weights_TK, ids_TK)[0])
    return names


def test_a_round_trip_is_one_exchange_each_way_after_one_of_counts() -> None:
    expected = ["exchange_counts", "dispatch_records", "return_records", "gather_sum"]
    assert run_workers(check_plan_reads_the_host_once, 2) == [expected, expected]


def check_repeats_bitwise() -> None:
    """Twice the same: no result depends on timing."""
    x_TD, weights_TK, ids_TK, items_TN = inputs(random_ids, 16, torch.bfloat16)
    results = []
    for _ in range(2):
        plan = plan_dispatch(items_TN, dist.group.WORLD)
        rows = dispatch(plan, x_TD, weights_TK, ids_TK)
        results.append(combine(plan, weighted_work(*rows, dist.get_rank())))
    assert torch.equal(*results)


def test_results_repeat_bit_for_bit() -> None:
    run_workers(check_repeats_bitwise, 4)


def test_without_a_group_rows_stay_where_they_are() -> None:
    """One rank is the identity, and nothing is sent: there is no process group to send through."""
    x_TD, weights_TK, ids_TK = torch.randn(3, 4), torch.rand(3, 2), torch.tensor([[0, 1], [-1, -1], [1, -1]])
    plan = plan_dispatch((ids_TK >= 0).sum(1, keepdim=True), None)
    assert (plan.num_rows, plan.num_items) == (3, 3)
    for ours, given in zip(dispatch(plan, x_TD, weights_TK, ids_TK), (x_TD, weights_TK, ids_TK), strict=True):
        assert ours is given
    assert combine(plan, x_TD) is x_TD
    assert torch.equal(gather_sum_reference(x_TD, plan.slots_TN), x_TD)


def check_coded_rows(pattern_name: str) -> None:
    """Coding, moving and decoding is moving what was coded and decoded at home; so for gradients and sums."""
    x_TD, weights_TK, ids_TK, items_TN = inputs(PATTERNS[pattern_name], 40, torch.bfloat16)
    x_TD.requires_grad_()
    plan = plan_dispatch(items_TN, dist.group.WORLD)

    def coded(x: Tensor) -> Tensor:
        return unpack_rows(pack_rows(x.detach()), 40, torch.bfloat16)

    with recorded_exchanges() as calls:
        rows_RD, *_ = dispatch(plan, x_TD, weights_TK, ids_TK, Payload("mxfp8", "mxfp8"))
    # 40 values and 2 scales, rounded up to 16 bytes; then the side columns.
    assert calls[0][2] == 48 + -(-8 * TOP_K // 16) * 16
    assert torch.equal(rows_RD, dispatch(plan, coded(x_TD), weights_TK, ids_TK)[0])
    upstream_RD = torch.randn_like(rows_RD)
    assert torch.equal(
        torch.autograd.grad(rows_RD, x_TD, upstream_RD)[0],
        torch.autograd.grad(dispatch(plan, x_TD, weights_TK, ids_TK)[0], x_TD, coded(upstream_RD))[0],
    )
    partial_RD = torch.randn_like(rows_RD).requires_grad_()
    out_TD = combine(plan, partial_RD, Payload("mxfp8", "mxfp8"))
    assert torch.equal(out_TD, combine(plan, coded(partial_RD)))
    upstream_TD = torch.randn_like(out_TD)
    assert torch.equal(
        torch.autograd.grad(out_TD, partial_RD, upstream_TD)[0],
        torch.autograd.grad(combine(plan, partial_RD), partial_RD, coded(upstream_TD))[0],
    )


@pytest.mark.parametrize("pattern", PATTERNS)
def test_rows_coded_as_mxfp8_are_those_coded_at_home(pattern: str) -> None:
    run_workers(check_coded_rows, 2, pattern)


def check_symm_mem_is_refused() -> None:
    with pytest.raises(ValueError, match=r"comms.backend=symm_mem cannot run here: it needs GPUs; use"):
        choose_backend(CommsConfig(backend="symm_mem"), dist.group.WORLD, torch.device("cpu"))
    assert choose_backend(CommsConfig(), dist.group.WORLD, torch.device("cpu")).backend == "collective"


def test_a_backend_that_cannot_run_is_never_replaced_by_another() -> None:
    run_workers(check_symm_mem_is_refused, 2)


def choices_of_two_groups() -> list[tuple[str, str]]:
    """Of rank pairs 0 1 and 2 3, as on GPUs that reach each other: without a word against symm_mem, and with one."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    rank = dist.get_rank()
    with patch("comms.backend.unavailable", lambda *_: None):
        choices = [
            choose_backend(CommsConfig(), groups[rank // 2], torch.device("cuda"), "no room" if rank == full else "")
            for full in (None, 3)
        ]
    return [(choice.backend, choice.reason) for choice in choices]


def test_one_process_without_room_decides_for_all_groups() -> None:
    every = run_workers(choices_of_two_groups, 4)
    assert all(found == every[0] for found in every)
    assert [backend for backend, _ in every[0]] == ["symm_mem", "collective"] and every[0][1][1] == "no room"


def check_layer_rows() -> None:
    """A whole layer: what it sends is the number of distinct (token, rank) pairs of its routing."""
    from moe.config import MoEConfig
    from moe.layer import MoE

    torch.manual_seed(0)
    config = MoEConfig(num_experts=8, top_k=4, expert_dim=8)
    layer = MoE(config, 16)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(0, 0.3)
    per_rank = config.num_experts // dist.get_world_size()
    first = per_rank * dist.get_rank()
    for name, parameter in list(layer.experts.named_parameters()):
        setattr(layer.experts, name, torch.nn.Parameter(parameter.detach()[first : first + per_rank]))
    layer.ep_group = dist.group.WORLD
    x_BSD = torch.randn(2, 5 + dist.get_rank(), 16)
    original, seen = layer.route, []

    def route(*args: Any, **kwargs: Any) -> Any:
        seen.append(original(*args, **kwargs))
        return seen[-1]

    layer.route = route
    with recorded_exchanges() as calls:
        y_BSD, _ = layer(x_BSD)
        y_BSD.sum().backward()
    ids_TK = seen[0].topk_ids_TK
    pairs = {(token, expert // per_rank) for token, row in enumerate(ids_TK.tolist()) for expert in row}
    assert len(pairs) < ids_TK.numel()
    # Rows sent by dispatch and by its mirror, combine's backward; rows received by combine and dispatch's backward.
    assert [calls[0][0], calls[1][1], calls[2][0], calls[3][1]] == [len(pairs)] * 4
    assert len(calls) == 4


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_wire_rows_of_a_layer_are_the_unique_token_rank_pairs(num_ranks: int) -> None:
    run_workers(check_layer_rows, num_ranks)
