"""Does a run fit a number of processes? Every size of the layout against model, sequence and batch, before any memory.

What does not fit is told with its reason and the nearest settings with which the same run would start: each of them is
tried, so that mending one mistake does not lead to the next.
"""

import copy
from collections.abc import Iterator

from comms.sequence_unit import sequence_unit
from parallel.config import LayoutError, ParallelConfig, divisors, either, nearest_divisors
from parallel.sizes import check_experts, expert_shard_dim, resolve_sizes
from trainer.config import Config
from trainer.models.config import ModelConfig
from trainer.validate import accumulation_steps, resolve_parallel, validate


def fit_layout(config: Config, world_size: int) -> ParallelConfig:
    """The sizes of a run on `world_size` processes: -1 replaced by what fits, everything checked.

    Raises:
        ValueError: the first thing that does not fit: the settings, their values and the nearest legal ones.
    """
    try:
        return _fitted(config, world_size)
    except LayoutError as error:
        told = [error.reason]
        if count := _legal_processes(config, error):
            told.append(f"start {count} with torchrun --nproc-per-node={count}")
        if legal := list(_legal_changes(config, world_size, error)):
            told.append(f"legal, with all else as it is: {' or '.join(legal)}")
        elif len(told) == 1:
            # Another number of processes does not help, so none is told.
            hint = "" if error.processes else error.hint
            told.append(f"{hint}, but other settings must change with it" if hint else "no change of one size helps")
        raise ValueError("; ".join(told)) from None


def _fitted(config: Config, world_size: int) -> ParallelConfig:
    parallel = resolve_parallel(config.parallel, config.model.moe.num_experts, world_size)
    parallel = resolve_sizes(parallel, world_size)
    check_layout(config, parallel)
    accumulation_steps(config.train, parallel.dp_replicate * parallel.dp_shard)
    return parallel


def _legal_processes(config: Config, error: LayoutError) -> int:
    """The fewest processes on which the run fits as it is, where only their number is wrong; 0: there are none."""
    # dp_shard=-1 takes what is left; more than this is at most of use to ep.
    multiples = range(1, max(config.parallel.ep, 1) + 1) if error.more else range(1, 2)
    for count in (error.processes * multiple for multiple in multiples if error.processes):
        try:
            _fitted(config, count)
        except ValueError:
            continue
        return count
    return 0


def _legal_changes(config: Config, world_size: int, error: LayoutError) -> Iterator[str]:
    """What to write on the command line: of each setting the nearest value below and above with which the run fits."""
    for axis in error.axes:
        now = getattr(config.parallel, axis)
        values = [value for value in divisors(world_size) if value != now]
        below, above = [v for v in values if v < now], [v for v in values if v > now]
        yield from _first_legal(config, world_size, [_axis_change(config, axis, value) for value in below[::-1]])
        yield from _first_legal(config, world_size, [_axis_change(config, axis, value) for value in above])
    for key, unit in error.multiples.items():
        section, _, name = key.rpartition(".")
        below = getattr(getattr(config, section), name) // unit * unit
        for value in (below, below + unit):
            yield from _first_legal(config, world_size, [{key: value}])


def _axis_change(config: Config, axis: str, value: int) -> dict[str, int]:
    """A new size of one axis, and what has to follow it."""
    parallel = config.parallel
    changes = {f"parallel.{axis}": value}
    if axis == "tp" and parallel.etp == parallel.tp > 1:
        changes["parallel.etp"] = value
    if axis in ("dp_replicate", "cp", "tp") and parallel.dp_shard != -1:
        changes["parallel.dp_shard"] = -1
    return changes


def _first_legal(config: Config, world_size: int, candidates: list[dict[str, int]]) -> Iterator[str]:
    for changes in candidates:
        changed = copy.deepcopy(config)
        for key, value in changes.items():
            section, _, name = key.rpartition(".")
            setattr(getattr(changed, section), name, value)
        try:
            validate(changed)
            _fitted(changed, world_size)
        except ValueError:
            continue
        yield " ".join(f"{key}={value}" for key, value in changes.items())
        return


def check_layout(config: Config, parallel: ParallelConfig) -> None:
    """Check model and sequence against sizes that are settled (`parallel.sizes.resolve_sizes`).

    Raises:
        ValueError: the first thing that does not divide: the settings, their values and the nearest legal ones.
    """
    model = config.model
    has_experts = model.num_dense_layers < model.num_layers + model.mtp.depth
    if has_experts:
        check_experts(parallel, model.moe.num_experts, model.moe.expert_dim)
        _check_capacity(config, parallel.ep)
        _check_nodes(config, parallel.ep)
    _check_heads(parallel, model)
    _check_split_dims(parallel, model)
    if has_experts:
        # Last: that no dim divides by the number of ranks is seldom the setting to change.
        _check_expert_shards(parallel, model)
    unit = sequence_unit(parallel.cp // parallel.ulysses, parallel.ulysses, parallel.tp)
    if config.train.seq_len % unit:
        raise LayoutError(
            f"train.seq_len={config.train.seq_len} cannot be cut into equal parts for parallel.cp={parallel.cp}, "
            f"parallel.ulysses={parallel.ulysses} and parallel.tp={parallel.tp}",
            f"it must be a multiple of {unit}",
            axes=("cp", "tp"),
            multiples={"train.seq_len": unit},
        )


def _check_capacity(config: Config, ep: int) -> None:
    """Raises ValueError where comms.capacity is less than some rank is sure to receive."""
    moe, capacity = config.model.moe, config.comms.capacity
    if capacity is None or moe.capacity_factor is not None or ep == 1:
        return
    # So many ranks hold a token's experts at least; the mean over ranks is no less.
    least = -(-moe.top_k // (moe.num_experts // ep))
    if capacity < least:
        raise ValueError(
            f"comms.capacity={capacity} is less than the {least} rows per own token that some rank always gets with "
            f"model.moe.top_k={moe.top_k} and parallel.ep={ep}; nearest legal: {least}"
        )


def _check_nodes(config: Config, ep: int) -> None:
    """Raises ValueError where comms.ranks_per_node does not divide the ranks that exchange rows."""
    ranks = config.comms.ranks_per_node
    if ranks is None or ep == 1 or ep % ranks == 0:
        return
    raise ValueError(
        f"comms.ranks_per_node={ranks} does not divide parallel.ep={ep}; nearest legal comms.ranks_per_node: "
        f"{either(nearest_divisors(ep, ranks))}, or null for what the hosts say"
    )


def _check_heads(parallel: ParallelConfig, model: ModelConfig) -> None:
    """Query heads are split over tp and then over Ulysses; key/value heads are shared where there are fewer."""
    attention, tp, ulysses = model.attention, parallel.tp, parallel.ulysses
    heads = attention.num_heads
    if heads % tp:
        raise LayoutError(
            f"model.attention.num_heads={heads} is not divisible by parallel.tp={tp}",
            _nearest_tp(tp, model),
            axes=("tp",),
        )
    if heads // tp % ulysses:
        raise LayoutError(
            f"model.attention.num_heads={heads} / parallel.tp={tp} is not divisible by parallel.ulysses={ulysses} "
            "(the rest of parallel.cp is a ring)",
            f"nearest legal parallel.ulysses: {either(nearest_divisors(heads // tp, ulysses))}",
            axes=("ulysses", "tp"),
        )
    if attention.kind == "gqa":
        _check_kv_heads(parallel, model)


def _nearest_tp(tp: int, model: ModelConfig) -> str:
    """The sizes next to `tp` that divide all that tp splits: what fits the heads alone leads to the next mistake."""
    attention, dims = model.attention, [model.vocab_size]
    if model.num_dense_layers:
        dims.append(model.ffn_dim)
    kv_heads = attention.num_kv_heads if attention.kind == "gqa" else attention.num_heads
    fits = [
        size
        for size in divisors(attention.num_heads)
        if not any(dim % size for dim in dims)
        and (kv_heads % size == 0 or (size % kv_heads == 0 and attention.qk_norm != "full"))
    ]
    return f"nearest legal parallel.tp: {either([*[v for v in fits if v < tp][-1:], *[v for v in fits if v > tp][:1]])}"


def _check_kv_heads(parallel: ParallelConfig, model: ModelConfig) -> None:
    tp, ulysses, kv_heads = parallel.tp, parallel.ulysses, model.attention.num_kv_heads
    if kv_heads % tp and model.attention.qk_norm == "full":
        raise LayoutError(
            f"model.attention.num_kv_heads={kv_heads} is not divisible by parallel.tp={tp}, and "
            "model.attention.qk_norm=full norms all heads together",
            _nearest_tp(tp, model),
            axes=("tp",),
        )
    if kv_heads % tp and tp % kv_heads:
        raise LayoutError(
            f"model.attention.num_kv_heads={kv_heads} and parallel.tp={tp}: one must divide the other",
            _nearest_tp(tp, model),
            axes=("tp",),
        )
    own = max(kv_heads // tp, 1)
    if own % ulysses and ulysses % own:
        raise LayoutError(
            f"model.attention.num_kv_heads={kv_heads} over parallel.tp={tp} leaves {own} to a rank, and "
            f"parallel.ulysses={ulysses}: one must divide the other",
            f"nearest legal parallel.ulysses: {either(nearest_divisors(own, ulysses))}",
            axes=("ulysses", "tp"),
        )


def _check_split_dims(parallel: ParallelConfig, model: ModelConfig) -> None:
    """The vocabulary and a dense layer's hidden units are split over tp."""
    sizes = {"model.vocab_size": model.vocab_size}
    if model.num_dense_layers:
        sizes["model.ffn_dim"] = model.ffn_dim
    for key, size in sizes.items():
        if size % parallel.tp:
            raise LayoutError(
                f"{key}={size} is not divisible by parallel.tp={parallel.tp}",
                _nearest_tp(parallel.tp, model),
                axes=("tp",),
                multiples={key: parallel.tp},
            )


def _check_expert_shards(parallel: ParallelConfig, model: ModelConfig) -> None:
    """FSDP has to cut the experts of a rank evenly, unless all ranks have all experts."""
    if parallel.ep * parallel.tp == 1:
        return
    ranks = parallel.dp_shard * parallel.cp * parallel.tp // (parallel.ep * parallel.etp)
    experts, hidden = model.moe.num_experts // parallel.ep, model.moe.expert_dim // parallel.etp
    try:
        expert_shard_dim((experts, 2, hidden, model.dim), ranks)
        expert_shard_dim((experts, model.dim, hidden), ranks)
        if model.moe.linear_bias:
            expert_shard_dim((experts, 2, hidden), ranks)
            expert_shard_dim((experts, model.dim), ranks)
    except ValueError as error:
        raise LayoutError(str(error).removesuffix("."), axes=("ep", "dp_replicate")) from None
