"""What does not fit a number of processes is told with its reason, and every change that is proposed is a legal one."""

from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from parallel.config import ParallelConfig
from parallel.sizes import resolve_sizes
from trainer.compose import compose
from trainer.config import Config
from trainer.layout import check_layout, fit_layout

PROPOSED = "legal, with all else as it is: "
# 6 query and 2 key/value heads, a vocabulary of 4096, 8 experts; a dense layer in front.
BASE = "model.num_dense_layers=1 model.ffn_dim=96 train.seq_len=240 train.micro_batch_size=1 train.global_batch_size=24"


@cache
def demo() -> Config:
    return compose(["experiment=demo", *BASE.split()])


def with_settings(words: str, base: Config | None = None) -> Config:
    tree = OmegaConf.merge(OmegaConf.structured(base or demo()), OmegaConf.from_dotlist(words.split()))
    config = OmegaConf.to_object(tree)
    assert isinstance(config, Config)
    return config


def refusal(config: Config, world_size: int) -> str:
    with pytest.raises(ValueError) as raised:
        fit_layout(config, world_size)
    return str(raised.value)


def proposals(message: str) -> list[str]:
    return message.partition(PROPOSED)[2].split(" or ") if PROPOSED in message else []


@pytest.mark.parametrize(
    ("words", "world", "reason", "proposed"),
    [
        # 2 and 4 divide the 8 experts, but no more than one of them the processes.
        ("parallel.ep=3", 1, "parallel.ep=3 must divide dp_shard x cp x tp = 1", ["parallel.ep=1"]),
        ("parallel.ep=3", 2, "parallel.ep=3 must divide dp_shard x cp x tp = 2", ["parallel.ep=2"]),
        ("parallel.ep=3", 3, "model.moe.num_experts=8 is not divisible by parallel.ep=3", ["parallel.ep=1"]),
        ("parallel.ep=12", 12, "model.moe.num_experts=8 is not divisible by parallel.ep=12", ["parallel.ep=4"]),
        # 4 does not divide 6 heads, and 3 not the 8 processes; 8 is no better.
        ("parallel.tp=4", 8, "model.attention.num_heads=6 is not divisible by parallel.tp=4", ["parallel.tp=2"]),
        (
            "parallel.tp=4 parallel.etp=4",
            8,
            "model.attention.num_heads=6 is not divisible by parallel.tp=4",
            ["parallel.tp=2 parallel.etp=2"],
        ),
        (
            "parallel.tp=4 parallel.dp_shard=2",
            8,
            "model.attention.num_heads=6",
            ["parallel.tp=2 parallel.dp_shard=-1"],
        ),
        (
            "parallel.tp=3 model.vocab_size=4098",
            6,
            "model.attention.num_kv_heads=2 and parallel.tp=3: one must divide the other",
            ["parallel.tp=2", "parallel.tp=6"],
        ),
        (
            "parallel.tp=6 model.attention.qk_norm=full",
            6,
            "num_kv_heads=2 is not divisible by parallel.tp=6, and model.attention.qk_norm=full",
            ["parallel.tp=2"],
        ),
        (
            "parallel.tp=6",
            6,
            "model.vocab_size=4096 is not divisible by parallel.tp=6",
            # 4092 would not hold the tokenizer's 4096 entries.
            ["parallel.tp=2", "model.vocab_size=4098"],
        ),
        (
            "parallel.tp=2 model.ffn_dim=97",
            4,
            "model.ffn_dim=97 is not divisible by parallel.tp=2",
            ["parallel.tp=1", "model.ffn_dim=96", "model.ffn_dim=98"],
        ),
        (
            "parallel.cp=4 parallel.ulysses=4",
            8,
            "model.attention.num_heads=6 / parallel.tp=1 is not divisible by parallel.ulysses=4",
            ["parallel.ulysses=2"],
        ),
        (
            "parallel.cp=6 parallel.ulysses=3",
            6,
            "model.attention.num_kv_heads=2 over parallel.tp=1 leaves 2 to a rank, and parallel.ulysses=3",
            ["parallel.ulysses=2", "parallel.ulysses=6"],
        ),
        (
            "parallel.cp=4 parallel.ulysses=3",
            8,
            "parallel.ulysses=3 must divide parallel.cp=4",
            ["parallel.ulysses=2"],
        ),
        (
            "parallel.cp=2 parallel.tp=2 train.seq_len=242",
            4,
            "train.seq_len=242 cannot be cut into equal parts for parallel.cp=2, parallel.ulysses=1 and parallel.tp=2",
            ["parallel.cp=1", "train.seq_len=240", "train.seq_len=248"],
        ),
        (
            "parallel.cp=2 train.seq_len=2047",
            2,
            "train.seq_len=2047 cannot be cut",
            ["parallel.cp=1", "train.seq_len=2044", "train.seq_len=2048"],
        ),
        (
            "parallel.tp=2 parallel.etp=4",
            8,
            "parallel.etp=4 must be 1 (whole experts) or parallel.tp=2",
            ["parallel.etp=2"],
        ),
        (
            "parallel.tp=2 parallel.etp=2 model.moe.expert_dim=97",
            4,
            "model.moe.expert_dim=97 is not divisible by parallel.etp=2",
            ["parallel.etp=1", "parallel.tp=1 parallel.etp=1"],
        ),
        ("parallel.ep=8", 4, "parallel.ep=8 must divide dp_shard x cp x tp = 4", ["parallel.ep=4"]),
        (
            "parallel.tp=2 parallel.etp=2 parallel.ep=8",
            8,
            "parallel.ep=8 must divide dp_shard x cp x tp / etp = 4",
            ["parallel.ep=4"],
        ),
        # 3 would divide the ranks and not the experts.
        (
            "parallel.ep=4 parallel.dp_replicate=8",
            24,
            "parallel.ep=4 must divide dp_shard x cp x tp = 3",
            ["parallel.ep=1"],
        ),
        # With fewer ranks in tp there would be more data ranks than sequences.
        ("parallel.tp=4 train.global_batch_size=1", 4, "parallel.tp: 2, but other settings must change", []),
        (
            "parallel.dp_shard=3",
            8,
            "dp_shard=3 x cp=1 x tp=1 do not multiply to the 8 processes",
            ["parallel.dp_shard=8"],
        ),
        (
            "parallel.tp=2 parallel.cp=3",
            8,
            "cp=3 x tp=2 do not multiply to the 8 processes",
            ["parallel.cp=2", "parallel.cp=4"],
        ),
    ],
)
def test_refused_with_what_would_be_legal(words: str, world: int, reason: str, proposed: list[str]) -> None:
    message = refusal(with_settings(words), world)
    assert reason in message
    assert proposals(message) == proposed, message


@settings(max_examples=60, deadline=None)
@given(
    world=st.sampled_from([1, 2, 4, 6, 8, 12, 16]),
    sizes=st.fixed_dictionaries(
        {name: st.sampled_from([1, 1, 2, 3, 4, 6, 8]) for name in ("dp_replicate", "cp", "ulysses", "tp", "ep")}
    ),
    dp_shard=st.sampled_from([-1, -1, 1, 2, 4]),
    cuts_experts=st.booleans(),
    seq_len=st.sampled_from([240, 242, 256]),
)
def test_whatever_is_proposed_is_legal(
    world: int, sizes: dict[str, int], dp_shard: int, cuts_experts: bool, seq_len: int
) -> None:
    """And whatever is accepted has sizes that multiply, and needs no further change."""
    parallel = ParallelConfig(**sizes, dp_shard=dp_shard, etp=sizes["tp"] if cuts_experts else 1)
    config = replace(demo(), parallel=parallel, train=replace(demo().train, seq_len=seq_len))
    try:
        settled = fit_layout(config, world)
    except ValueError as error:
        for words in proposals(str(error)):
            fit_layout(with_settings(words, config), world)
    else:
        assert resolve_sizes(settled, world) == settled
        check_layout(config, settled)
        assert settled.dp_replicate * settled.dp_shard * settled.cp * settled.tp == world


@pytest.mark.parametrize(
    ("words", "world", "told"),
    [
        ("train.global_batch_size=9 train.micro_batch_size=4", 2, "4 x 2 data-parallel ranks; nearest legal: 8 or 16"),
        ("train.global_batch_size=9 train.micro_batch_size=4 parallel.tp=2", 2, "4 x 1 data-parallel ranks; nearest"),
    ],
)
def test_a_batch_is_measured_by_the_ranks_of_the_run(words: str, world: int, told: str) -> None:
    """Composing knows nothing of them, and says nothing."""
    compose(["experiment=demo", *words.split()])
    assert told in refusal(with_settings(words), world)


@pytest.mark.parametrize(
    ("words", "world", "count"),
    [
        ("parallel.tp=2", 1, 2),
        # EP borrows from more ranks than tp has.
        ("parallel.tp=2 parallel.ep=8", 1, 8),
        ("parallel.tp=2 parallel.dp_shard=4", 3, 8),
        # 3 divides 6 heads, but not 2 key/value heads.
        ("parallel.tp=3", 2, 0),
        ("parallel.tp=3 model.attention.num_kv_heads=3 model.vocab_size=4098", 2, 3),
        ("parallel.tp=2 train.global_batch_size=1 train.micro_batch_size=1 parallel.dp_replicate=2", 2, 0),
    ],
)
def test_processes_are_proposed_where_the_run_fits_them(words: str, world: int, count: int) -> None:
    message = refusal(with_settings(words), world)
    assert ("; start " in message) == bool(count), message
    if count:
        assert f"start {count} with torchrun --nproc-per-node={count}" in message
        fit_layout(with_settings(words), count)


def test_ranks_that_share_sequences_do_not_share_the_batch() -> None:
    words = "parallel.tp=2 parallel.cp=2 train.global_batch_size=3"
    assert "is not a multiple of train.micro_batch_size=1 x 2 data-parallel ranks" in refusal(with_settings(words), 8)
    fit_layout(with_settings(words), 4)


def test_ep_minus_one_takes_all_the_ranks_that_the_experts_allow() -> None:
    """It borrows from tp as well, but not where tp cuts the experts."""
    assert fit_layout(with_settings("parallel.ep=-1 parallel.tp=2 parallel.cp=2"), 8).ep == 8
    assert fit_layout(with_settings("parallel.ep=-1 parallel.tp=2 parallel.etp=2 parallel.cp=2"), 8).ep == 4
    assert fit_layout(with_settings("parallel.ep=-1 parallel.tp=2"), 6).ep == 2


def test_capacity_is_at_least_what_some_rank_always_receives() -> None:
    """Of 8 experts on 4 ranks a token's 3 lie on two ranks at least."""
    moe = "model.moe.num_experts=8 model.moe.top_k=3 comms.backend=symm_mem parallel.ep=4"
    message = refusal(with_settings(f"{moe} comms.capacity=1.9"), 4)
    assert "comms.capacity=1.9 is less than the 2 rows per own token" in message
    assert "parallel.ep=4; nearest legal: 2" in message
    fit_layout(with_settings(f"{moe} comms.capacity=2"), 4)
    # Nothing leaves a rank that has every expert; a capacity of the experts drops pairs before.
    fit_layout(with_settings(f"{moe} comms.capacity=1.9 parallel.ep=1"), 4)
    fit_layout(with_settings(f"{moe} comms.capacity=0.5 model.moe.capacity_factor=0.5"), 4)


@pytest.mark.parametrize(("ranks", "legal"), [(3, "2 or 4"), (8, "4"), (5, "4")])
def test_nodes_that_do_not_divide_ep(ranks: int, legal: str) -> None:
    config = with_settings(f"parallel.ep=4 comms.ranks_per_node={ranks}")
    expected = (
        f"comms.ranks_per_node={ranks} does not divide parallel.ep=4; nearest legal comms.ranks_per_node: {legal},"
    )
    assert refusal(config, 4).startswith(expected)


@pytest.mark.parametrize("words", ["parallel.ep=4 comms.ranks_per_node=2", "parallel.ep=1 comms.ranks_per_node=8"])
def test_nodes_that_divide_ep_and_none_without_ep(words: str) -> None:
    assert fit_layout(with_settings(words), 4).ep in (1, 4)
