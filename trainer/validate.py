"""Checks of a composed config that need no device and no process group: they run before anything is allocated.

Single values are checked against trainer/choices.py, then what must fit together. Every message names the settings,
their values and the nearest legal choice. What depends on the number of processes, the batch too, is checked by
trainer/layout.py.
"""

import dataclasses
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from moe.config import LOW_PRECISION, MoEConfig
from parallel.config import ParallelConfig, either, nearest_divisors
from trainer.check_exchange import check_exchange
from trainer.choices import BOUNDS, CHOICES
from trainer.config import Config, PrecisionConfig, SourceConfig, TrainConfig
from trainer.hf_config import HF_PREFIX, choose_family
from trainer.hf_families import FAMILIES
from trainer.models.config import ROPE_SETTINGS, AttentionConfig, ModelConfig, RopeConfig
from trainer.schema import did_you_mean, leaf_type

RUN_ID = re.compile(r"[A-Za-z0-9._-]+")
# What W&B takes.
MAX_RUN_ID = 128
SET_NAME = re.compile(r"[A-Za-z0-9_-]+")


def validate(config: Config) -> None:
    """Check every setting and what must fit together.

    Raises:
        ValueError: the first thing that is wrong: setting, value and nearest legal choice.
    """
    _check_choices(config)
    _check_bounds(config)
    _check_run(config)
    check_sizes(config.model)
    _check_model(config)
    _check_rope(config.model.rope)
    _check_moe(config.model.moe)
    check_exchange(config)
    _check_precision(config)
    _check_parallel(config)
    _check_data(config)
    _check_optim(config)
    _check_checkpoint(config)
    _check_profile(config)


def check_run_id(run_id: str) -> str:
    """`run_id` itself, when it can name a folder on any file system and a W&B run.

    Raises:
        ValueError: other characters than [A-Za-z0-9._-], nothing but dots, or more than 128 characters.
    """
    if len(run_id) > MAX_RUN_ID:
        raise ValueError(f"run.id={run_id[:32]}...: {len(run_id)} characters, and {MAX_RUN_ID} are allowed")
    if not RUN_ID.fullmatch(run_id) or not run_id.strip("."):
        legal = re.sub(r"[^A-Za-z0-9._-]+", "-", run_id).strip("-.") or "my-run"
        raise ValueError(f"run.id={run_id!r}: only letters, digits, '.', '_' and '-' are allowed; try run.id={legal}")
    return run_id


def resolve_parallel(parallel: ParallelConfig, num_experts: int, world_size: int) -> ParallelConfig:
    """Replace `ep: -1` by the largest number of ranks that the experts and the mesh allow.

    EP borrows ranks from dp_shard x cp, and from tp too when etp is 1.
    """
    if parallel.ep != -1:
        return parallel
    lendable = max(world_size // parallel.dp_replicate, 1)
    if parallel.etp > 1:
        lendable //= parallel.tp
    return dataclasses.replace(parallel, ep=math.gcd(lendable, num_experts))


def accumulation_steps(train: TrainConfig, dp_size: int) -> int:
    """Micro-batches of one optimizer step on each rank; `dp_size` ranks share the global batch.

    Raises:
        ValueError: train.global_batch_size is not a multiple of train.micro_batch_size x dp_size.
    """
    per_pass = train.micro_batch_size * dp_size
    if train.global_batch_size % per_pass:
        below = train.global_batch_size // per_pass * per_pass
        legal = " or ".join(str(size) for size in (below, below + per_pass) if size)
        raise ValueError(
            f"train.global_batch_size={train.global_batch_size} is not a multiple of train.micro_batch_size="
            f"{train.micro_batch_size} x {dp_size} data-parallel ranks; nearest legal: {legal}"
        )
    return train.global_batch_size // per_pass


def values_at(config: Any, pattern: str) -> Iterator[tuple[str, Any]]:
    """(key, value) of every setting that `pattern` names; `*` runs over the entries of a dict."""
    found = [("", config)]
    for part in pattern.split("."):
        if part == "*":
            found = [(f"{key}.{name}", entry) for key, node in found for name, entry in node.items()]
        else:
            found = [(f"{key}.{part}", getattr(node, part)) for key, node in found]
    return ((key.lstrip("."), value) for key, value in found)


def _check_choices(config: Config) -> None:
    for pattern, options in CHOICES.items():
        for key, value in values_at(config, pattern):
            if value not in options:
                raise ValueError(f"{key}={value}: must be one of {', '.join(options)}{did_you_mean(value, options)}")


def _check_bounds(config: Config) -> None:
    for pattern, (low, high) in BOUNDS.items():
        for key, value in values_at(config, pattern):
            if value is not None and not (low <= value <= high and value < math.inf):
                raise ValueError(f"{key}={value}: {_bound_text(low, high, isinstance(value, int))}")


def _bound_text(low: float, high: float, whole: bool) -> str:
    if high == math.inf and not whole:
        return "must be positive" if low > 0 and low < 1e-300 else f"must be at least {low:g} and finite"
    if high == math.inf:
        return f"must be at least {low:g}; nearest legal: {low:g}"
    return f"must be between {low:g} and {high:g}"


def _check_run(config: Config) -> None:
    if config.run.id is not None:
        check_run_id(config.run.id)
    if not config.run.root:
        raise ValueError("run.root is empty; name a folder, for example run.root=runs")
    for key in config.run.allow_changes:
        leaf_type(key)


def check_sizes(model: ModelConfig) -> None:
    """Check what a model cannot be computed without, whatever it is for.

    Raises:
        ValueError: as `validate`.
    """
    _check_attention(model.attention)
    if model.num_dense_layers > model.num_layers:
        raise ValueError(
            f"model.num_dense_layers={model.num_dense_layers} exceeds model.num_layers={model.num_layers}; "
            f"nearest legal: {model.num_layers}"
        )
    if model.num_dense_layers < model.num_layers:
        _check_experts(model.moe)


def _check_attention(attention: AttentionConfig) -> None:
    if attention.kind == "mla":
        _check_mla(attention)
        return
    if attention.num_heads % attention.num_kv_heads:
        legal = nearest_divisors(attention.num_heads, attention.num_kv_heads)
        raise ValueError(
            f"model.attention.num_kv_heads={attention.num_kv_heads} does not divide model.attention.num_heads="
            f"{attention.num_heads}; nearest legal: {either(legal)}"
        )
    _check_even("model.attention.head_dim", attention.head_dim)
    if attention.chunk_size and attention.sliding_window:
        raise ValueError(
            f"model.attention.chunk_size={attention.chunk_size} and model.attention.sliding_window="
            f"{attention.sliding_window} exclude each other; set one of them to 0"
        )
    if attention.temperature_scale and not attention.nope_every:
        raise ValueError(
            f"model.attention.temperature_scale={attention.temperature_scale} tunes layers without RoPE, and "
            "model.attention.nope_every=0 leaves none; set model.attention.nope_every or temperature_scale=0"
        )


def _check_mla(attention: AttentionConfig) -> None:
    _check_even("model.attention.qk_rope_head_dim", attention.qk_rope_head_dim)
    plain = {"qk_norm": "none", "sinks": False}
    plain |= dict.fromkeys(("sliding_window", "nope_every", "chunk_size", "temperature_scale"), 0)
    for name, value in plain.items():
        if getattr(attention, name) != value:
            raise ValueError(
                f"model.attention.{name}={getattr(attention, name)} does not go with model.attention.kind=mla; "
                f"set model.attention.{name}={value}, or kind=gqa"
            )


def _check_even(key: str, value: int) -> None:
    if value % 2:
        legal = either([size for size in (value - 1, value + 1) if size])
        raise ValueError(f"{key}={value} must be even, because RoPE turns pairs; nearest legal: {legal}")


def _check_model(config: Config) -> None:
    model, train = config.model, config.train
    if train.seq_len > model.max_seq_len:
        raise ValueError(
            f"train.seq_len={train.seq_len} exceeds model.max_seq_len={model.max_seq_len}; "
            f"nearest legal: train.seq_len={model.max_seq_len}, or raise model.max_seq_len"
        )


def _check_rope(rope: RopeConfig) -> None:
    used = ROPE_SETTINGS[rope.scaling]
    for scaling, names in ROPE_SETTINGS.items():
        for name in names:
            value, default = getattr(rope, name), getattr(RopeConfig, name)
            if name not in used and value != default:
                raise ValueError(
                    f"model.rope.{name}={value} does nothing with model.rope.scaling={rope.scaling}; "
                    f"set model.rope.scaling={scaling}, or model.rope.{name}={default}"
                )
    if used and rope.factor <= 1:
        raise ValueError(
            f"model.rope.factor={rope.factor} stretches nothing; set it above 1, or model.rope.scaling=none"
        )
    for fast, slow in (("beta_fast", "beta_slow"), ("high_freq_factor", "low_freq_factor")):
        if fast in used and getattr(rope, fast) < getattr(rope, slow):
            raise ValueError(
                f"model.rope.{fast}={getattr(rope, fast)} is below model.rope.{slow}={getattr(rope, slow)}; "
                f"nearest legal: model.rope.{fast}={getattr(rope, slow)}"
            )


def _check_experts(moe: MoEConfig) -> None:
    if moe.top_k > moe.num_experts:
        raise ValueError(
            f"model.moe.top_k={moe.top_k} exceeds model.moe.num_experts={moe.num_experts}; "
            f"nearest legal: {moe.num_experts}"
        )
    if moe.num_experts % moe.num_groups:
        legal = either(nearest_divisors(moe.num_experts, moe.num_groups))
        raise ValueError(
            f"model.moe.num_groups={moe.num_groups} does not divide model.moe.num_experts={moe.num_experts}; "
            f"nearest legal: {legal}"
        )
    _check_groups(moe)


def _check_moe(moe: MoEConfig) -> None:
    if moe.top_k == 1 and moe.normalize_topk and moe.num_experts > 1:
        raise ValueError(
            "model.moe.top_k=1 with model.moe.normalize_topk=true gives every chosen expert the weight 1, and the "
            "router no gradient from the loss; set model.moe.normalize_topk=false"
        )
    if moe.bias_update_rate and not moe.expert_bias:
        raise ValueError(
            f"model.moe.bias_update_rate={moe.bias_update_rate} moves nothing while model.moe.expert_bias=false; "
            "set model.moe.expert_bias=true or model.moe.bias_update_rate=0"
        )


def _check_groups(moe: MoEConfig) -> None:
    if moe.top_groups > moe.num_groups:
        raise ValueError(
            f"model.moe.top_groups={moe.top_groups} exceeds model.moe.num_groups={moe.num_groups}; "
            f"nearest legal: {moe.num_groups}"
        )
    per_group = moe.num_experts // moe.num_groups
    if moe.top_k > moe.top_groups * per_group:
        raise ValueError(
            f"model.moe.top_k={moe.top_k} exceeds the {moe.top_groups * per_group} experts of model.moe.top_groups="
            f"{moe.top_groups} groups; nearest legal: model.moe.top_groups={-(-moe.top_k // per_group)}"
        )
    if moe.num_groups > 1 and moe.group_score == "top2_sum" and per_group < 2:
        raise ValueError(
            f"model.moe.group_score=top2_sum needs two experts in a group, and model.moe.num_groups={moe.num_groups} "
            f"leaves {per_group}; set model.moe.group_score=max or fewer groups"
        )


def _check_precision(config: Config) -> None:
    """What precision.linears names, and whether dims fit, is checked against the model (trainer/precision.py)."""
    backend, precision = config.model.moe.backend, config.precision
    if precision.recipe in LOW_PRECISION and backend not in ("auto", "grouped_mm"):
        raise ValueError(
            f"model.moe.backend={backend} does not compute in precision.recipe={precision.recipe}; set "
            "model.moe.backend=auto"
        )
    _check_unused(precision)
    if precision.recipe == "fp64" and backend not in ("auto", "reference"):
        raise ValueError(
            f"model.moe.backend={backend} does not compute in precision.recipe=fp64; set model.moe.backend=reference"
        )
    if config.model.attention.backend == "varlen" and precision.recipe in ("fp32", "fp64"):
        raise ValueError(
            f"model.attention.backend=varlen does not compute in precision.recipe={precision.recipe}; set "
            "model.attention.backend=auto"
        )
    for field in dataclasses.fields(config.comms.payload):
        key, payload = f"comms.payload.{field.name}", getattr(config.comms.payload, field.name)
        if payload == "mxfp8" and config.precision.recipe == "fp64":
            raise ValueError(f"{key}=mxfp8 does not code rows of precision.recipe=fp64; set {key}=model")


def _check_unused(precision: PrecisionConfig) -> None:
    """Settings of low-precision recipes where there is none."""
    plain = "" if precision.recipe in LOW_PRECISION else f"precision.recipe={precision.recipe}"
    alone = "" if precision.linears else "precision.linears=[]"
    for key, without in (("linears", plain), ("wgrad", plain), ("linears_exclude", alone)):
        value = getattr(precision, key)
        if without and value != getattr(PrecisionConfig(), key):
            text = f"[{','.join(value)}]" if isinstance(value, list) else value
            raise ValueError(f"precision.{key}={text} does nothing with {without}; leave it out, or change the latter")


def _check_parallel(config: Config) -> None:
    parallel = config.parallel
    if parallel.async_tp == "inductor" and not parallel.compile:
        raise ValueError(
            "parallel.async_tp=inductor is a pass of the compiler, and parallel.compile=false; set "
            "parallel.compile=true, or parallel.async_tp=native"
        )
    for name in ("dp_shard", "ep"):
        value = getattr(parallel, name)
        if value < 1 and value != -1:
            raise ValueError(f"parallel.{name}={value}: must be at least 1, or -1 for all that fit; nearest legal: 1")


def _check_data(config: Config) -> None:
    data = config.data
    if not data.train and not config.train.eval_only:
        choice = "data=python_stdlib, or data=text data.train.text.paths=[FILES]"
        raise ValueError(f"data.train has no source; choose {choice}")
    for section, sources in (("data.train", data.train), ("data.eval", data.eval)):
        for name, source in sources.items():
            _check_source(f"{section}.{name}", name, source)
    if data.tokenizer == "train" and data.tokenizer_vocab_size > config.model.vocab_size:
        enough = config.model.vocab_size >= BOUNDS["data.tokenizer_vocab_size"][0]
        hint = f"nearest legal: {config.model.vocab_size}" if enough else "raise model.vocab_size"
        raise ValueError(
            f"data.tokenizer_vocab_size={data.tokenizer_vocab_size} exceeds model.vocab_size="
            f"{config.model.vocab_size}; {hint}"
        )


def _check_source(key: str, name: str, source: SourceConfig) -> None:
    if not SET_NAME.fullmatch(name):
        raise ValueError(f"{key}: {name!r} becomes part of metric names; use letters, digits, '_' and '-' only")
    if not source.paths:
        raise ValueError(f"{key}.paths is empty; name files, for example {key}.paths=[/data/*.txt]")
    kept = source.hash_range
    if len(kept) != 2 or not 0 <= kept[0] < kept[1] <= 1:
        raise ValueError(f"{key}.hash_range={kept}: must be [from, to] with 0 <= from < to <= 1, like [0.0,0.99]")


def _check_optim(config: Config) -> None:
    betas = config.optim.betas
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        raise ValueError(f"optim.betas={betas}: must be two numbers from 0 up to, not including, 1, like [0.9,0.95]")


def _check_export(config: Config) -> None:
    """Better now than after the last step."""
    try:
        choose_family(config.model, FAMILIES)
    except ValueError as error:
        raise ValueError(f"checkpoint.export_hf=true: {error}") from error


def _check_checkpoint(config: Config) -> None:
    resume, init_from = config.checkpoint.resume, config.checkpoint.init_from
    if resume not in ("auto", "never") and not (resume and Path(resume).is_dir()):
        hint = did_you_mean(resume, ("auto", "never"))
        raise ValueError(f"checkpoint.resume={resume}: must be auto, never or an existing folder{hint}")
    if init_from is not None:
        source = init_from.removeprefix(HF_PREFIX)
        if not source or not Path(source).is_dir():
            raise ValueError(f"checkpoint.init_from={init_from}: there is no such folder")
    if config.checkpoint.export_hf:
        _check_export(config)
    if config.train.eval_only and resume == "never" and init_from is None:
        raise ValueError(
            "train.eval_only=true has nothing to evaluate with checkpoint.resume=never; "
            "name a checkpoint: checkpoint.init_from=PATH"
        )


def _check_profile(config: Config) -> None:
    """A trace that would not be made."""
    asked, train = config.profile, config.train
    if asked.steps == 0:
        if asked.start != type(asked).start:
            raise ValueError(f"profile.start={asked.start} does nothing with profile.steps=0; set profile.steps=1")
        return
    if train.eval_only:
        raise ValueError(f"profile.steps={asked.steps} does nothing with train.eval_only=true; leave it out")
    last = asked.start + asked.steps - 1
    if last > train.steps:
        begin = max(train.steps - asked.steps + 1, 1)
        raise ValueError(
            f"profile.steps={asked.steps} from profile.start={asked.start} end with step {last}, and the run with "
            f"train.steps={train.steps}; nearest legal: profile.start={begin}"
            + ("" if asked.steps <= train.steps else f" profile.steps={train.steps}")
        )
