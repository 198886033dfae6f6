"""Sizes of a layout are checked before anything is built; errors name the fields, their values and legal ones."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parallel.config import ParallelConfig, nearest_divisors
from parallel.mesh import check_experts, resolve_sizes


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
    ],
)
def test_sizes_that_do_not_fit_are_refused(config: ParallelConfig, world_size: int, words: list[str]) -> None:
    with pytest.raises(ValueError) as caught:
        resolve_sizes(config, world_size)
    missing = [word for word in words if word not in str(caught.value)]
    assert not missing, (missing, str(caught.value))


@pytest.mark.parametrize("axis", ["cp", "ulysses", "tp", "etp"])
def test_axes_that_do_not_exist_yet_are_refused_and_not_ignored(axis: str) -> None:
    with pytest.raises(
        ValueError, match=rf"parallel\.{axis}=2 is not available in this version; set parallel\.{axis}=1"
    ):
        resolve_sizes(ParallelConfig(**{axis: 2}), 8)


def test_async_tp_is_refused() -> None:
    with pytest.raises(ValueError, match=r"parallel\.async_tp=native"):
        resolve_sizes(ParallelConfig(async_tp="native"), 8)


def test_experts_must_divide_by_ep() -> None:
    check_experts(ParallelConfig(ep=4), 8)
    with pytest.raises(
        ValueError, match=r"model\.moe\.num_experts=6.*parallel\.ep=4.*nearest legal parallel\.ep: 3 or 6"
    ):
        check_experts(ParallelConfig(ep=4), 6)


@given(st.integers(1, 200), st.integers(1, 300))
def test_nearest_divisors_divide_and_enclose(total: int, value: int) -> None:
    divisors = nearest_divisors(total, value)
    assert divisors and all(total % divisor == 0 for divisor in divisors)
    for divisor in divisors:
        between = range(min(divisor, value) + 1, max(divisor, value))
        assert not [other for other in between if total % other == 0]


@settings(max_examples=100)
@given(st.integers(1, 16), st.integers(1, 4), st.integers(-1, 8), st.integers(1, 8))
def test_sizes_that_pass_multiply_to_the_world(world: int, dp_replicate: int, dp_shard: int, ep: int) -> None:
    """Whatever is accepted fits, and whatever fits is accepted."""
    shard = world // dp_replicate if dp_shard == -1 else dp_shard
    fits = shard >= 1 and dp_replicate * shard == world and shard % ep == 0
    try:
        resolved = resolve_sizes(ParallelConfig(dp_replicate=dp_replicate, dp_shard=dp_shard, ep=ep), world)
    except ValueError:
        assert not fits
    else:
        assert fits and resolved.dp_replicate * resolved.dp_shard == world
