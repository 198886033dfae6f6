"""A thousand random plans through the real dispatch and combine, between processes, forward and backward.

hypothesis draws the plans, and one call of the workers takes all of them. Every rank draws the tokens of all ranks from
the plan's seed, so the oracle needs no communication. Values are small integers, rows are told apart by their first
column, and partials are added in the contract's order: everything is compared exactly, in every dtype.
"""

from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from comms.all_to_all import combine, dispatch, items_by_rank, plan_dispatch
from tests.distributed.harness import run_workers
from tests.distributed.test_dispatch import recorded_exchanges

NUM_PLANS = 500
MAX_TOKENS = 12


class Case(NamedTuple):
    """A plan of all ranks: how many tokens each has, and whose ids they choose."""

    num_tokens: tuple[int, ...]
    # The ranks whose ids are chosen: one that gets everything, some, or all.
    chosen_ranks: tuple[int, ...]
    ids_per_rank: int
    top_k: int
    # Of ids that are -1; 1: nobody sends anything.
    share_missing: float
    width: int
    dtype: torch.dtype
    seed: int


class Tokens(NamedTuple):
    """dispatch's arguments, and what backward starts from."""

    x_TD: Tensor
    weights_TK: Tensor
    ids_TK: Tensor
    upstream_TD: Tensor


def cases(num_ranks: int) -> st.SearchStrategy[Case]:
    ranks = st.integers(0, num_ranks - 1)
    return st.builds(
        Case,
        num_tokens=st.tuples(*[st.integers(0, MAX_TOKENS)] * num_ranks),
        chosen_ranks=st.one_of(
            st.tuples(ranks), st.sets(ranks, min_size=2).map(tuple), st.just(tuple(range(num_ranks)))
        ),
        ids_per_rank=st.integers(1, 4),
        top_k=st.integers(1, 8),
        share_missing=st.sampled_from([0.0, 0.0, 0.2, 0.2, 0.5, 0.8, 1.0]),
        width=st.integers(1, 40),
        dtype=st.sampled_from([torch.bfloat16, torch.float32, torch.float64]),
        seed=st.integers(0, 2**32 - 1),
    )


def draw_cases(num_ranks: int) -> list[Case]:
    # A dict: some are drawn twice.
    drawn: dict[Case, None] = {}

    # Nothing fails here, so there is nothing to shrink or to remember; a worker that fails names its case.
    @settings(
        max_examples=NUM_PLANS * 5 // 4,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=[HealthCheck.too_slow],
    )
    @given(cases(num_ranks))
    def draw(case: Case) -> None:
        drawn[case] = None

    draw()
    return list(drawn)[:NUM_PLANS]


def draw_tokens(case: Case) -> Tokens:
    """Those of all ranks, by rank; the same on every rank."""
    generator = torch.Generator().manual_seed(case.seed)
    num_tokens = sum(case.num_tokens)

    def integers(low: int, high: int, width: int) -> Tensor:
        return torch.randint(low, high, (num_tokens, width), generator=generator)

    x_TD = integers(-4, 5, case.width)
    # At most 96 tokens: all different, in bf16 too.
    x_TD[:, 0] = torch.arange(1, num_tokens + 1)
    # With replacement: several ids of one rank, and the same id twice.
    owner_TK = torch.tensor(case.chosen_ranks)[integers(0, len(case.chosen_ranks), case.top_k)]
    ids_TK = owner_TK * case.ids_per_rank + integers(0, case.ids_per_rank, case.top_k)
    ids_TK[torch.rand(ids_TK.shape, generator=generator) < case.share_missing] = -1
    weights_TK = integers(1, 5, case.top_k).to(torch.promote_types(case.dtype, torch.float32))
    upstream_TD = integers(-4, 5, case.width)
    return Tokens(x_TD.to(case.dtype), weights_TK, ids_TK, upstream_TD.to(case.dtype))


def work(x_TD: Tensor, weights_TK: Tensor, ids_TK: Tensor, is_own_TK: Tensor) -> Tensor:
    """A stand-in for experts: each of the rank's own ids scales the row by weight * (id + 1)."""
    scale_T = torch.where(is_own_TK, weights_TK * (ids_TK + 1), 0).sum(-1)
    return x_TD * scale_T[..., None].to(x_TD.dtype)


def work_at_home(tokens: Tokens, is_own_NTK: Tensor) -> list[Tensor]:
    """Output and gradients of x and weights: what each rank makes of the tokens, added and then rounded."""
    num_ranks = len(is_own_NTK)
    x_NTD, weights_NTK = (tensor.expand(num_ranks, -1, -1).clone().requires_grad_() for tensor in tokens[:2])
    out_NTD = work(x_NTD, weights_NTK, tokens.ids_TK, is_own_NTK)
    grads = torch.autograd.grad(out_NTD, [x_NTD, weights_NTK], tokens.upstream_TD.expand_as(out_NTD))
    partials = [out_NTD.detach(), *grads]
    # Of whole numbers that fit into fp32: the order of the sum does not matter.
    return [partial.sum(0, dtype=torch.float64).to(partial.dtype) for partial in partials]


def check_case(case: Case) -> None:
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    everyones = draw_tokens(case)
    ours = Tokens._make(tensor.split(case.num_tokens)[rank] for tensor in everyones)
    x_TD, weights_TK = (tensor.clone().requires_grad_() for tensor in ours[:2])
    first = rank * case.ids_per_rank
    with recorded_exchanges() as calls:
        plan = plan_dispatch(items_by_rank(ours.ids_TK, num_ranks, case.ids_per_rank), dist.group.WORLD)
        rows_RD, weights_RK, ids_RK = dispatch(plan, x_TD, weights_TK, ours.ids_TK)
        partial_RD = work(rows_RD, weights_RK, ids_RK, (ids_RK >= first) & (ids_RK < first + case.ids_per_rank))
        out_TD = combine(plan, partial_RD)
        grads = torch.autograd.grad(out_TD, [x_TD, weights_TK], ours.upstream_TD)

    owner_TK = torch.where(everyones.ids_TK >= 0, everyones.ids_TK // case.ids_per_rank, -1)
    is_row_T = (owner_TK == rank).any(1)
    # By source rank, then token, is the order in which they were drawn.
    for name, actual, drawn in zip(("rows", "weights", "ids"), (rows_RD, weights_RK, ids_RK), everyones, strict=False):
        assert_equal(name, actual, drawn[is_row_T])
    assert plan.num_rows == len(rows_RD) and plan.num_items == int((owner_TK == rank).sum())
    own_TK = owner_TK.split(case.num_tokens)[rank]
    is_own_NTK = own_TK == torch.arange(num_ranks)[:, None, None]
    there = int(is_own_NTK.any(2).sum()), len(rows_RD)
    # Once per token and rank; and back, and backward mirrors both.
    assert [(sent, received) for sent, received, _ in calls] == [there, there[::-1]] * 2
    results = (out_TD, *grads)
    for name, actual, expected in zip(("out", "dx", "dweights"), results, work_at_home(ours, is_own_NTK), strict=True):
        assert_equal(name, actual, expected)


def assert_equal(name: str, actual: Tensor, expected: Tensor) -> None:
    assert actual.dtype == expected.dtype and actual.shape == expected.shape, name
    assert torch.equal(actual, expected), f"{name}: {(actual != expected).nonzero().tolist()[:3]} differ first"


def check_cases(drawn: list[Case]) -> None:
    for number, case in enumerate(drawn):
        try:
            check_case(case)
        except Exception as error:
            error.add_note(f"in plan {number} of {len(drawn)}: {case}")
            raise


@pytest.mark.parametrize("num_ranks", [4, 8])
def test_any_plan_brings_rows_in_order_and_sums_home(num_ranks: int) -> None:
    drawn = draw_cases(num_ranks)
    assert len(drawn) == NUM_PLANS
    run_workers(check_cases, num_ranks, drawn)
