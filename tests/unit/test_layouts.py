"""Layouts as values: what is legal, how it is called and asked for, which few cover all; and the tiny model."""

import itertools
from dataclasses import replace

import pytest

from parallel.config import ParallelConfig
from tests.distributed.tiny_models import QWEN3
from trainer.compose import compose, group_options
from trainer.config import Config, TrainConfig
from trainer.layout import check_layout
from trainer.parity_layouts import (
    AXES,
    Layout,
    covering,
    legal_layouts,
    own_and_single_layouts,
    parse_layouts,
    settle,
    smallest_world,
    with_sizes,
)
from trainer.parity_model import batch_shape, shrink
from trainer.validate import validate

# 4 query heads, 2 key/value heads, 8 experts.
TINY = Config(model=QWEN3, train=TrainConfig(seq_len=16))


def names(num_processes: int) -> list[str]:
    return [layout.name for layout in legal_layouts(TINY, num_processes)]


def test_the_layouts_of_two_processes_written_out() -> None:
    without_ep = {"dp_replicate=2", "dp_shard=2", "cp=2", "cp=2 ulysses=2", "tp=2", "tp=2 etp=2"}
    # dp_replicate lends EP no ranks; etp = tp leaves none to lend.
    with_ep = {"dp_shard=2 ep=2", "cp=2 ep=2", "cp=2 ulysses=2 ep=2", "tp=2 ep=2"}
    assert set(names(2)) == without_ep | with_ep


def test_every_layout_is_there_once_and_fits() -> None:
    for num_processes in (1, 2, 4, 8):
        layouts = legal_layouts(TINY, num_processes)
        assert len({layout.name for layout in layouts}) == len(layouts)
        for layout in layouts:
            parallel = layout.parallel
            assert parallel.dp_replicate * parallel.dp_shard * parallel.cp * parallel.tp == num_processes
            check_layout(TINY, parallel)
    # 4 query heads: neither tp nor ulysses goes to 8, together neither.
    assert "tp=8" not in names(8) and "cp=8" in names(8) and "cp=8 ulysses=8" not in names(8)
    assert not any("ulysses=4 tp=2" in name for name in names(8))


def test_layouts_with_few_axes_come_first() -> None:
    sizes = [len(layout.axes) for layout in legal_layouts(TINY, 8)]
    assert sizes == sorted(sizes) and sizes[-1] >= 4


def test_other_settings_stay() -> None:
    config = replace(TINY, parallel=ParallelConfig(activation_checkpoint="full", tp=4))
    layouts = legal_layouts(config, 2)
    assert {layout.parallel.activation_checkpoint for layout in layouts} == {"full"}
    assert {layout.parallel.tp for layout in layouts} == {1, 2}


def test_names_and_axes() -> None:
    layout = Layout(8, ParallelConfig(dp_shard=1, cp=4, ulysses=2, tp=2))
    assert (layout.name, layout.axes) == ("cp=4 ulysses=2 tp=2", ("ring", "ulysses", "tp"))
    assert Layout(2, ParallelConfig(dp_shard=1, cp=2, ulysses=2)).axes == ("ulysses",)
    assert Layout(1, ParallelConfig(dp_shard=1)).name == "one process"


@pytest.mark.parametrize("num_processes", [4, 8])
def test_a_cover_has_every_pair_and_nothing_idle(num_processes: int) -> None:
    layouts = legal_layouts(TINY, num_processes)
    chosen = covering(layouts)

    def pairs(some: list[Layout]) -> set[tuple[str, ...]]:
        return {pair for layout in some for pair in itertools.combinations(layout.axes, 2)}

    assert pairs(chosen) == pairs(layouts)
    assert {axis for layout in chosen for axis in layout.axes} == set(AXES)
    # Expert weights whole under tensor parallelism are another code path.
    assert {layout.parallel.etp for layout in chosen if layout.parallel.tp > 1} == {1, 2}
    assert len(chosen) < len(layouts) / 3


def test_layouts_are_parsed() -> None:
    assert parse_layouts("[tp=2 ep=2, cp=4 parallel.ulysses=2]") == [{"tp": 2, "ep": 2}, {"cp": 4, "ulysses": 2}]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[ulyses=2]", ["ulyses=2", "did you mean ulysses", "dp_replicate"]),
        ("[pp=2]", ["pp=2", "no axis"]),
        ("[tp=two]", ["tp=two", "whole number"]),
        ("[tp=0]", ["tp=0", "from 1"]),
        ("[tp=2,]", ["empty layout", "layouts='["]),
        ("[]", ["empty layout"]),
    ],
)
def test_layouts_that_cannot_be_read(text: str, words: list[str]) -> None:
    with pytest.raises(ValueError) as caught:
        parse_layouts(text)
    assert not [word for word in words if word not in str(caught.value)], str(caught.value)


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ({"tp": 2}, 2),
        ({"ep": 4}, 4),
        # EP borrows from cp and tp, and takes of dp_shard what is missing.
        ({"tp": 2, "ep": 2}, 2),
        ({"cp": 2, "ep": 4}, 4),
        ({"tp": 2, "etp": 2, "ep": 2}, 4),
        ({"dp_replicate": 2, "dp_shard": 2, "cp": 2, "ulysses": 2}, 8),
        ({"cp": 2, "ep": 3}, 6),
    ],
)
def test_the_fewest_processes_of_a_layout(sizes: dict[str, int], expected: int) -> None:
    assert smallest_world(sizes) == expected
    model = replace(QWEN3, moe=replace(QWEN3.moe, num_experts=24))
    config = with_sizes(replace(TINY, model=model, train=TrainConfig(seq_len=48)), sizes)
    assert settle(config, expected).num_processes == expected


@pytest.mark.parametrize(
    ("parallel", "expected"),
    [
        (ParallelConfig(), [{"dp_shard": 2}]),
        (ParallelConfig(ep=8), [{"dp_shard": 4, "ep": 2}, {"dp_shard": 2}, {"ep": 2}]),
        (ParallelConfig(dp_shard=1, cp=8, ulysses=4), [{"cp": 2, "ulysses": 2}, {"cp": 2}]),
        (ParallelConfig(dp_replicate=64, dp_shard=8, tp=8), [{"dp_replicate": 2, "dp_shard": 2, "tp": 2}]),
    ],
)
def test_the_layouts_that_an_experiment_is_compared_in(parallel: ParallelConfig, expected: list[dict]) -> None:
    layouts = own_and_single_layouts(parallel)
    assert [sizes for sizes in expected if sizes not in layouts] == []
    assert layouts[0] == expected[0]
    assert all(smallest_world(sizes) <= 8 for sizes in layouts)


def test_a_large_layout_is_cut_to_the_processes_there_are() -> None:
    everything = ParallelConfig(dp_replicate=4, dp_shard=-1, cp=2, tp=8, ep=4)
    assert smallest_world(own_and_single_layouts(everything)[0]) == 8
    assert smallest_world(own_and_single_layouts(everything, most=4)[0]) == 4


@pytest.mark.parametrize("name", group_options("experiment"))
def test_every_experiment_has_a_tiny_twin_with_its_features(name: str) -> None:
    config = compose([f"experiment={name}"])
    tiny = shrink(config.model)
    # Each of 8 ranks of etp has rows that GPUs read whole (trainer/build.py), and the rest is the same.
    on_gpus = shrink(config.model, "cuda")
    assert on_gpus.moe.expert_dim % (8 * 8) == 0
    assert replace(on_gpus, moe=replace(on_gpus.moe, expert_dim=tiny.moe.expert_dim)) == tiny
    train, data = replace(config.train, seq_len=16), replace(config.data, tokenizer="given")
    validate(replace(config, model=tiny, train=train, data=data))
    for part in ("attention", "rope", "moe", "mtp"):
        ours, theirs = vars(getattr(tiny, part)), vars(getattr(config.model, part))
        for key, value in theirs.items():
            if key not in ("force_balance", "backend", "top_groups"):
                assert bool(ours[key]) == bool(value), (part, key)
                assert isinstance(value, int | float) or ours[key] == value, (part, key)
    assert bool(tiny.num_dense_layers) == bool(config.model.num_dense_layers)
    # What the heads allow, up to 8 ranks that share them, those of the tiny one allow too.
    for sizes in ({"tp": 2}, {"tp": 4}, {"tp": 8}, {"cp": 8, "ulysses": 8}, {"tp": 2, "cp": 4, "ulysses": 4}):
        world = smallest_world(sizes)
        assert is_legal(replace(config, model=tiny), sizes, world) or not is_legal(config, sizes, world), sizes


def is_legal(config: Config, sizes: dict[str, int], num_processes: int) -> bool:
    try:
        settle(with_sizes(config, sizes), num_processes)
    except ValueError:
        return False
    return True


@pytest.mark.parametrize("num_processes", [1, 2, 3, 4, 6, 8])
@pytest.mark.parametrize("micro_steps", [1, 2])
def test_the_batch_can_be_split_by_every_layout(num_processes: int, micro_steps: int) -> None:
    batch, length = batch_shape(num_processes, micro_steps, "cpu")
    assert batch >= 8 and length >= 16
    for sizes in itertools.product(range(1, num_processes + 1), repeat=2):
        if num_processes % (sizes[0] * sizes[1]) == 0:
            # Any number of data ranks, any ring: two chunks of each sequence to each of its ranks.
            assert batch % (micro_steps * sizes[0]) == 0 and length % (2 * sizes[1]) == 0
