"""Does a model fit a layout? What tensor, expert and context parallelism must divide, before anything is allocated."""

from collections.abc import Iterator

from comms.split_sequence import sequence_unit
from parallel.config import ParallelConfig, either, nearest_divisors
from parallel.mesh import check_experts
from trainer.config import Config
from trainer.models.config import ModelConfig


def check_layout(config: Config) -> None:
    """Check a config whose parallel sizes are settled (`parallel.mesh.resolve_sizes`).

    Raises:
        ValueError: the first thing that does not divide: the settings, their values and the nearest legal ones.
    """
    parallel, model = config.parallel, config.model
    if model.num_dense_layers < model.num_layers:
        check_experts(parallel, model.moe.num_experts, model.moe.expert_dim)
    check_heads(parallel, model)
    check_split_dims(parallel, model)
    unit = sequence_unit(parallel.cp // parallel.ulysses, parallel.ulysses, parallel.tp)
    seq_len = config.train.seq_len
    if seq_len % unit:
        below = seq_len // unit * unit
        legal = either([length for length in (below, below + unit) if length])
        raise ValueError(
            f"train.seq_len={seq_len} cannot be cut into equal parts for parallel.cp={parallel.cp}, "
            f"parallel.ulysses={parallel.ulysses} and parallel.tp={parallel.tp}; nearest legal train.seq_len: {legal}."
        )


def check_heads(parallel: ParallelConfig, model: ModelConfig) -> None:
    """Query heads are split over tp and then over Ulysses; key/value heads are shared where there are fewer.

    Raises:
        ValueError: they do not divide.
    """
    attention, tp, ulysses = model.attention, parallel.tp, parallel.ulysses
    heads = attention.num_heads
    if heads % tp:
        legal = either(nearest_divisors(heads, tp))
        raise ValueError(
            f"model.attention.num_heads={heads} is not divisible by parallel.tp={tp}; nearest legal: {legal}."
        )
    if heads // tp % ulysses:
        legal = either(nearest_divisors(heads // tp, ulysses))
        raise ValueError(
            f"model.attention.num_heads={heads} / parallel.tp={tp} is not divisible by parallel.ulysses={ulysses}; "
            f"nearest legal parallel.ulysses: {legal} (the rest of parallel.cp is a ring)."
        )
    if attention.kind == "mla":
        return
    kv_heads = attention.num_kv_heads
    if kv_heads % tp and tp % kv_heads:
        legal = either(nearest_divisors(kv_heads, tp))
        raise ValueError(
            f"model.attention.num_kv_heads={kv_heads} and parallel.tp={tp}: one must divide the other; nearest legal "
            f"parallel.tp: {legal}."
        )
    if kv_heads % tp and attention.qk_norm == "full":
        raise ValueError(
            f"model.attention.num_kv_heads={kv_heads} is not divisible by parallel.tp={tp}, and qk_norm=full norms all "
            f"heads together; nearest legal parallel.tp: {either(nearest_divisors(kv_heads, tp))}."
        )
    own = max(kv_heads // tp, 1)
    if own % ulysses and ulysses % own:
        raise ValueError(
            f"model.attention.num_kv_heads={kv_heads} / parallel.tp={tp} = {own} and parallel.ulysses={ulysses}: one "
            f"must divide the other; nearest legal parallel.ulysses: {either(nearest_divisors(own, ulysses))}."
        )


def check_split_dims(parallel: ParallelConfig, model: ModelConfig) -> None:
    """Raises ValueError if the vocabulary or a dense layer's hidden units cannot be split over tp."""
    for key, size in _split_dims(model):
        if size % parallel.tp:
            below = size // parallel.tp * parallel.tp
            legal = either([value for value in (below, below + parallel.tp) if value])
            raise ValueError(
                f"{key}={size} is not divisible by parallel.tp={parallel.tp}; nearest legal {key}: {legal}."
            )


def _split_dims(model: ModelConfig) -> Iterator[tuple[str, int]]:
    yield "model.vocab_size", model.vocab_size
    if model.num_dense_layers:
        yield "model.ffn_dim", model.ffn_dim
