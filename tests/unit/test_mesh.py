"""Sizes of a layout are checked before anything is built; errors name the fields, their values and legal ones."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parallel.config import ParallelConfig, nearest_divisors
from parallel.sizes import check_experts, resolve_sizes


def test_dp_shard_takes_the_ranks_that_are_left() -> None:
    assert resolve_sizes(ParallelConfig(), 8).dp_shard == 8
    assert resolve_sizes(ParallelConfig(dp_replicate=2), 8).dp_shard == 4
    assert resolve_sizes(ParallelConfig(dp_replicate=8), 8).dp_shard == 1
    assert resolve_sizes(ParallelConfig(dp_shard=8), 8).dp_shard == 8


def test_the_given_config_stays_as_it_is() -> None:
    config = ParallelConfig()
    resolve_sizes(config, 4)
    assert config.dp_shard == -1


@pytest.mark.parametrize(
    ("config", "world_size", "words"),
    [
        (ParallelConfig(dp_shard=3), 8, ["dp_shard=3", "8 processes", "parallel.dp_shard=8"]),
        (ParallelConfig(dp_replicate=2, dp_shard=8), 8, ["dp_replicate=2", "dp_shard=8", "parallel.dp_shard=4"]),
        (ParallelConfig(dp_replicate=3), 8, ["dp_replicate=3", "8 processes", "a multiple of 3"]),
        (ParallelConfig(dp_replicate=16), 8, ["dp_replicate=16", "8 processes"]),
        (ParallelConfig(ep=3), 8, ["parallel.ep=3", "= 8", "2 or 4"]),
        (ParallelConfig(ep=16), 8, ["parallel.ep=16", "nearest legal parallel.ep: 8"]),
        (ParallelConfig(dp_replicate=2, ep=8), 8, ["parallel.ep=8", "= 4", "nearest legal parallel.ep: 4"]),
        (ParallelConfig(dp_shard=0), 8, ["dp_shard=0"]),
        (ParallelConfig(dp_shard=-2), 8, ["dp_shard=-2"]),
        (ParallelConfig(dp_replicate=0), 8, ["parallel.dp_replicate=0", "at least 1"]),
        (ParallelConfig(ep=0), 8, ["parallel.ep=0", "at least 1"]),
        (ParallelConfig(tp=0), 8, ["parallel.tp=0", "at least 1"]),
        (ParallelConfig(tp=3), 8, ["tp=3", "8 processes", "a multiple of 3"]),
        (ParallelConfig(tp=2, cp=2, dp_shard=4), 8, ["dp_shard=4", "cp=2", "tp=2", "parallel.dp_shard=2"]),
        (ParallelConfig(cp=4, ulysses=3), 8, ["parallel.ulysses=3", "parallel.cp=4", "2 or 4"]),
        (ParallelConfig(ulysses=2), 8, ["parallel.ulysses=2", "parallel.cp=1", "nearest legal parallel.ulysses: 1"]),
        (ParallelConfig(tp=4, etp=2), 8, ["parallel.etp=2", "parallel.tp=4", "1 or 4"]),
        (ParallelConfig(etp=2), 8, ["parallel.etp=2", "parallel.tp=1", "set parallel.etp to 1"]),
        (ParallelConfig(tp=2, etp=2, ep=8), 8, ["parallel.ep=8", "/ etp = 4", "nearest legal parallel.ep: 4"]),
    ],
)
def test_sizes_that_do_not_fit_are_refused(config: ParallelConfig, world_size: int, words: list[str]) -> None:
    with pytest.raises(ValueError) as caught:
        resolve_sizes(config, world_size)
    missing = [word for word in words if word not in str(caught.value)]
    assert not missing, (missing, str(caught.value))


@pytest.mark.parametrize("mode", ["native", "inductor"])
def test_case_63_async_tp_without_tp_is_refused(mode: str) -> None:
    with pytest.raises(ValueError, match=f"parallel.async_tp={mode} finds no matmul to fuse with parallel.tp=1"):
        resolve_sizes(ParallelConfig(async_tp=mode), 8)
    assert resolve_sizes(ParallelConfig(async_tp=mode, tp=2), 8).async_tp == mode


def test_ep_borrows_ranks_of_cp_and_of_tp_that_leaves_experts_whole() -> None:
    assert resolve_sizes(ParallelConfig(tp=2, cp=2, ep=8), 8).dp_shard == 2
    assert resolve_sizes(ParallelConfig(tp=2, etp=2, cp=2, ep=4), 8).dp_shard == 2


def test_experts_must_divide_by_ep_and_their_hidden_units_by_etp() -> None:
    check_experts(ParallelConfig(ep=4, tp=2, etp=2), 8, 6)
    with pytest.raises(ValueError, match=r"model\.moe\.expert_dim=7.*parallel\.etp=2; set parallel\.etp=1"):
        check_experts(ParallelConfig(tp=2, etp=2), 8, 7)
    with pytest.raises(
        ValueError, match=r"model\.moe\.num_experts=6.*parallel\.ep=4.*nearest legal parallel\.ep: 3 or 6"
    ):
        check_experts(ParallelConfig(ep=4), 6, 8)


@given(st.integers(1, 200), st.integers(1, 300))
def test_nearest_divisors_divide_and_enclose(total: int, value: int) -> None:
    divisors = nearest_divisors(total, value)
    assert divisors and all(total % divisor == 0 for divisor in divisors)
    for divisor in divisors:
        between = range(min(divisor, value) + 1, max(divisor, value))
        assert not [other for other in between if total % other == 0]


@settings(max_examples=200)
@given(
    world=st.integers(1, 16),
    dp_replicate=st.integers(1, 4),
    dp_shard=st.integers(-1, 8),
    cp=st.integers(1, 3),
    tp=st.integers(1, 3),
    ep=st.integers(1, 8),
    whole=st.booleans(),
)
def test_sizes_that_pass_multiply_to_the_world(
    world: int, dp_replicate: int, dp_shard: int, cp: int, tp: int, ep: int, whole: bool
) -> None:
    """Whatever is accepted fits, and whatever fits is accepted."""
    shard = world // (dp_replicate * cp * tp) if dp_shard == -1 else dp_shard
    lent = shard * cp * (tp if whole else 1)
    fits = shard >= 1 and dp_replicate * shard * cp * tp == world and lent % ep == 0
    sizes = ParallelConfig(dp_replicate=dp_replicate, dp_shard=dp_shard, cp=cp, tp=tp, ep=ep, etp=1 if whole else tp)
    try:
        resolved = resolve_sizes(sizes, world)
    except ValueError:
        assert not fits
    else:
        assert fits and resolved.dp_shard == shard
