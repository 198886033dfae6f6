"""Impossible values and combinations are refused, with the settings, their values and the nearest legal choice."""

import copy
import dataclasses
import re
from functools import cache
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from parallel.config import ParallelConfig, nearest_divisors
from trainer.choices import BOUNDS, CHOICES
from trainer.compose import compose
from trainer.config import Config, TrainConfig
from trainer.schema import known_keys
from trainer.validate import accumulation_steps, resolve_parallel, validate


@cache
def demo() -> Config:
    return compose(["experiment=demo"])


def with_settings(words: str) -> Config:
    """The demo with `key=value` settings; ten times quicker than composing it anew."""
    tree = OmegaConf.merge(OmegaConf.structured(demo()), OmegaConf.from_dotlist(words.split()))
    config = OmegaConf.to_object(tree)
    assert isinstance(config, Config)
    return config


def refusal(words: str) -> str:
    with pytest.raises(ValueError) as raised:
        validate(with_settings(words))
    return str(raised.value)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ("precision.recipe=bf61", "must be one of bf16, fp32, fp64, mxfp8, fp8_blockwise; did you mean bf16?"),
        ("logging.wandb.mode='on'", "logging.wandb.mode=on: must be one of disabled, offline, online"),
        ("data.train.stdlib.kind=txt", "data.train.stdlib.kind=txt: must be one of text"),
        ("comms.backend=nvshmen", "one of auto, collective, symm_mem, nvshmem; did you mean nvshmem?"),
        (
            "comms.backend=nvshmem parallel.async_tp=native",
            "parallel.async_tp=native and comms.backend=nvshmem want symmetric memory of two kinds",
        ),
        ("parallel.async_tp=nativ", "parallel.async_tp=nativ: must be one of none, native, inductor"),
        (
            "parallel.async_tp=inductor",
            "parallel.async_tp=inductor is a pass of the compiler, and parallel.compile=false; set",
        ),
        ("parallel.tp=0", "parallel.tp=0: must be at least 1; nearest legal: 1"),
        ("comms.capacity=0", "comms.capacity=0.0: must be positive"),
        ("model.moe.pair_capacity=-1", "model.moe.pair_capacity=-1.0: must be positive"),
        (
            "comms.capacity=2",
            "comms.capacity=2.0 bounds the room of comms.backend=symm_mem and nvshmem, and comms.backend=auto makes "
            "room for all that can come; set comms.capacity=null, or comms.backend=symm_mem",
        ),
        ("model.moe.pair_capacity=2", "model.moe.pair_capacity=2.0 bounds the room of comms.backend=symm_mem"),
        ("comms.chunks=0", "comms.chunks=0: must be at least 1; nearest legal: 1"),
        (
            "comms.chunks=2",
            "comms.chunks=2 is about rows that travel while fused kernels compute, which needs comms.backend=symm_mem "
            "instead of auto; set that, or comms.chunks=1",
        ),
        ("comms.measure=true", "comms.measure=true is about rows that travel while fused kernels compute, which needs"),
        (
            "comms.chunks=2 comms.backend=symm_mem model.moe.backend=grouped_mm",
            "which needs model.moe.backend=fused instead of grouped_mm",
        ),
        ("comms.saved_headroom=0.9", "comms.saved_headroom=0.9: must be at least 1 and finite"),
        (
            "comms.saved_headroom=1.25 comms.backend=nvshmem",
            "comms.saved_headroom=1.25 is about rows that travel while fused kernels compute, which needs "
            "comms.backend=symm_mem instead of nvshmem; set that, or comms.saved_headroom=null",
        ),
        (
            "comms.chunks=2 comms.backend=symm_mem model.moe.backend=fused model.moe.linear_bias=true",
            "which needs model.moe.linear_bias=false instead of true",
        ),
        ("train.steps=0", "train.steps=0: must be at least 1; nearest legal: 1"),
        ("optim.lr=-1", "optim.lr=-1.0: must be at least 0"),
        ("optim.lr=nan", "optim.lr=nan"),
        ("optim.lr=inf", "optim.lr=inf"),
        ("model.moe.capacity_factor=0", "model.moe.capacity_factor=0.0: must be positive"),
        ("optim.max_grad_norm=nan", "optim.max_grad_norm=nan"),
        ("optim.max_grad_norm=-1", "optim.max_grad_norm=-1.0: must be at least 0"),
        ("optim.eps=0", "optim.eps=0.0: must be at least 1e-30"),
        ("model.moe.route_scale=nan", "model.moe.route_scale=nan: must be positive"),
        ("model.rope.mscale=nan", "model.rope.mscale=nan"),
        ("model.rope.factor=4", "model.rope.factor=4.0 does nothing with model.rope.scaling=none"),
        ("model.rope.mscale=0.7", "model.rope.mscale=0.7 does nothing with model.rope.scaling=none"),
        ("model.rope.mscale_all_dim=1", "set model.rope.scaling=yarn, or model.rope.mscale_all_dim=0.0"),
        ("model.rope.beta_fast=16", "model.rope.beta_fast=16.0 does nothing"),
        ("model.rope.beta_slow=2", "model.rope.beta_slow=2.0 does nothing"),
        ("model.rope.original_seq_len=2048", "model.rope.original_seq_len=2048 does nothing"),
        ("model.rope.truncate=false", "model.rope.truncate=False does nothing"),
        ("profile.start=3", "profile.start=3 does nothing with profile.steps=0; set profile.steps=1"),
        ("profile.steps=2 profile.start=0", "profile.start=0: must be at least 1"),
        (
            "profile.steps=2 train.steps=10",
            "end with step 11, and the run with train.steps=10; nearest legal: profile.start",
        ),
        ("profile.steps=9 train.steps=4", "nearest legal: profile.start=1 profile.steps=4"),
        ("profile.steps=2 train.eval_only=true", "profile.steps=2 does nothing with train.eval_only=true"),
        ("model.moe.top_k=1", "set model.moe.normalize_topk=false"),
        ("data.empty_files=ignore", "data.empty_files=ignore: must be one of error, skip"),
        ("data.train.stdlib.hash_range=[0.5,0.1]", "data.train.stdlib.hash_range=[0.5, 0.1]: must be [from, to]"),
        ("data.train.stdlib.hash_range=[nan,1]", "must be [from, to]"),
        ("optim.min_lr_ratio=2", "must be between 0 and 1"),
        ("optim.betas=[0.9]", "optim.betas=[0.9]: must be two numbers"),
        ("model.moe.top_k=9", "model.moe.top_k=9 exceeds model.moe.num_experts=8; nearest legal: 8"),
        (
            "model.moe.num_groups=3",
            "model.moe.num_groups=3 does not divide model.moe.num_experts=8; nearest legal: 2 or 4",
        ),
        ("model.moe.top_groups=2", "model.moe.top_groups=2 exceeds model.moe.num_groups=1; nearest legal: 1"),
        ("model.moe.num_groups=8", "model.moe.top_k=2 exceeds the 1 experts of model.moe.top_groups=1 groups; nearest"),
        ("model.moe.num_groups=8 model.moe.top_groups=4", "set model.moe.group_score=max or fewer groups"),
        ("model.moe.bias_update_rate=0.1", "set model.moe.expert_bias=true or model.moe.bias_update_rate=0"),
        ("model.attention.num_kv_heads=4", "does not divide model.attention.num_heads=6; nearest legal: 3 or 6"),
        ("model.attention.head_dim=33", "model.attention.head_dim=33 must be even"),
        ("model.attention.kind=mla", "model.attention.qk_norm=head does not go with model.attention.kind=mla"),
        ("model.num_dense_layers=5", "model.num_dense_layers=5 exceeds model.num_layers=4; nearest legal: 4"),
        ("train.seq_len=4096", "train.seq_len=4096 exceeds model.max_seq_len=2048; nearest legal: train.seq_len=2048"),
        ("model.rope.scaling=yarn", "model.rope.factor=1.0 stretches nothing"),
        ("model.rope.scaling=llama3", "model.rope.factor=1.0 stretches nothing"),
        (
            "model.rope.scaling=llama3 model.rope.factor=8 model.rope.mscale=0.7",
            "model.rope.mscale=0.7 does nothing with",
        ),
        (
            "model.rope.scaling=yarn model.rope.factor=8 model.rope.low_freq_factor=2",
            "with model.rope.scaling=yarn; set model.rope.scaling=llama3, or model.rope.low_freq_factor=1.0",
        ),
        (
            "model.rope.scaling=yarn model.rope.factor=8 model.rope.beta_slow=64",
            "model.rope.beta_fast=32.0 is below model.rope.beta_slow=64.0; nearest legal: model.rope.beta_fast=64.0",
        ),
        (
            "model.rope.scaling=llama3 model.rope.factor=8 model.rope.high_freq_factor=0.5",
            "model.rope.high_freq_factor=0.5 is below model.rope.low_freq_factor=1.0; nearest legal",
        ),
        (
            "model.attention.chunk_size=8 model.attention.sliding_window=4",
            "model.attention.chunk_size=8 and model.attention.sliding_window=4 exclude each other",
        ),
        ("model.attention.temperature_scale=0.1", "model.attention.nope_every=0 leaves none"),
        ("model.mtp.depth=-1", "model.mtp.depth=-1: must be at least 0"),
        ("precision.recipe=fp32 model.attention.backend=varlen", "recipe=fp32; set model.attention.backend=auto"),
        ("precision.recipe=fp64 model.moe.backend=grouped_mm", "set model.moe.backend=reference"),
        ("parallel.ep=0", "parallel.ep=0: must be at least 1, or -1"),
        ("parallel.dp_shard=-2", "parallel.dp_shard=-2: must be at least 1, or -1"),
        ("data.eval.heldout.weight=1", "data.eval.heldout.paths is empty"),
        ("data.train.stdlib.weight=0", "data.train.stdlib.weight=0.0: must be positive"),
        ("data.tokenizer_vocab_size=5000", "exceeds model.vocab_size=4096; nearest legal: 4096"),
        ("checkpoint.resume=''", "checkpoint.resume=: must be auto, never or an existing folder"),
        ("checkpoint.init_from=''", "checkpoint.init_from=: there is no such folder"),
        ("checkpoint.init_from='hf:'", "checkpoint.init_from=hf:: there is no such folder"),
        ("checkpoint.resume=atuo", "must be auto, never or an existing folder; did you mean auto?"),
        ("checkpoint.init_from=/nowhere", "checkpoint.init_from=/nowhere: there is no such folder"),
        ("train.eval_only=true checkpoint.resume=never", "train.eval_only=true has nothing to evaluate"),
        ("run.id=a/b", "only letters, digits, '.', '_' and '-' are allowed; try run.id=a-b"),
        (f"run.id={'x' * 129}", "129 characters, and 128 are allowed"),
        ("run.id=..", "run.id='..'"),
        ("run.root=''", "run.root is empty"),
        ("run.allow_changes=[train.stepz]", "train.stepz is not a setting; did you mean train.steps?"),
    ],
)
def test_refused_with_the_nearest_legal_choice(overrides: str, expected: str) -> None:
    assert expected in refusal(overrides)


def test_bounds_of_the_exchange_are_those_of_symmetric_memory() -> None:
    validate(with_settings("comms.backend=nvshmem comms.capacity=1.5 model.moe.pair_capacity=1"))
    ours = "comms.backend=symm_mem"
    validate(with_settings(f"{ours} comms.capacity=1.5 model.moe.pair_capacity=1"))
    message = refusal(f"{ours} model.moe.pair_capacity=0.9")
    assert "pair_capacity=0.9 is less than the balanced load" in message and message.endswith("nearest legal: 1")
    validate(with_settings(f"{ours} model.moe.pair_capacity=0.9 model.moe.capacity_factor=0.8"))
    assert "comms.backend=collective makes as much" in refusal("comms.backend=collective comms.capacity=1.5")


def test_chunks_travel_where_dispatch_experts_and_combine_are_one() -> None:
    for backend in ("fused", "auto"):
        validate(with_settings(f"comms.chunks=2 comms.backend=symm_mem model.moe.backend={backend}"))
        validate(with_settings(f"comms.saved_headroom=1.25 comms.backend=symm_mem model.moe.backend={backend}"))


def test_compose_validates() -> None:
    with pytest.raises(ValueError, match="choose data=python_stdlib"):
        compose(["experiment=demo", "data=none"])
    with pytest.raises(ValueError, match="is empty; name files"):
        compose(["experiment=demo", "data=text"])


def test_tables_name_settings_that_exist() -> None:
    keys = set(known_keys())
    for table in (CHOICES, BOUNDS):
        assert {pattern.replace("*", "NAME") for pattern in table} <= keys


def test_choices_are_never_spelled_like_booleans() -> None:
    words = {word for options in CHOICES.values() for word in options}
    assert not words & {"on", "off", "yes", "no", "true", "false", "null"}


@pytest.mark.parametrize("pattern", CHOICES)
def test_every_choice_is_accepted_or_not_available_yet(pattern: str) -> None:
    for value in CHOICES[pattern]:
        config = node = copy.deepcopy(demo())
        *path, last = pattern.replace("*", "stdlib").split(".")
        for part in path:
            node = node[part] if isinstance(node, dict) else getattr(node, part)
        setattr(node, last, value)
        try:
            validate(config)
        except ValueError as error:
            # Some choices need other settings too (mla, yarn): the message is then about those.
            assert "must be one of" not in str(error)


def test_resume_from_an_existing_folder(tmp_path: Path) -> None:
    assert compose(["experiment=demo", f"checkpoint.resume={tmp_path}"]).checkpoint.resume == str(tmp_path)
    compose(["experiment=demo", "train.eval_only=true", f"checkpoint.init_from={tmp_path}", "data=none"])


def test_nearest_divisors() -> None:
    assert nearest_divisors(12, 5) == [4, 6]
    assert nearest_divisors(12, 6) == [6]
    assert nearest_divisors(12, 20) == [12]


@pytest.mark.parametrize(
    ("world", "experts", "sizes", "expected"),
    [
        (1, 8, {}, 1),
        (2, 8, {}, 2),
        (6, 8, {}, 2),
        (16, 8, {}, 8),
        (8, 6, {}, 2),
        (8, 8, {"dp_replicate": 4}, 2),
        (8, 8, {"tp": 2}, 8),
        (8, 8, {"tp": 2, "etp": 2}, 4),
        (8, 1, {"tp": 2}, 1),
    ],
)
def test_ep_minus_one_takes_what_divides(world: int, experts: int, sizes: dict[str, int], expected: int) -> None:
    assert resolve_parallel(ParallelConfig(ep=-1, **sizes), experts, world).ep == expected
    fixed = ParallelConfig(ep=2, **sizes)
    assert resolve_parallel(fixed, experts, world) is fixed


def test_accumulation_is_derived() -> None:
    train = TrainConfig(global_batch_size=24, micro_batch_size=2)
    assert accumulation_steps(train, dp_size=4) == 3
    with pytest.raises(ValueError, match=re.escape("2 x 5 data-parallel ranks; nearest legal: 20 or 30")):
        accumulation_steps(train, dp_size=5)
    with pytest.raises(ValueError, match=r"nearest legal: 32$"):
        accumulation_steps(dataclasses.replace(train, global_batch_size=24), dp_size=16)
