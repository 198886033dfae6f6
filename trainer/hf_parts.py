"""Keys of config.json that belong together, read and written: what one-to-one fields of a family cannot say."""

import math
from typing import Any

from trainer.hf_config import Part, Raw, Values
from trainer.models.config import ModelConfig

_FULL, _SLIDING = "full_attention", "sliding_attention"
_YARN_KEYS = {
    "factor": "factor",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
    "original_max_position_embeddings": "original_seq_len",
    "truncate": "truncate",
}
_LLAMA3_KEYS = {
    "factor": "factor",
    "original_max_position_embeddings": "original_seq_len",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
}


# ---- parts


def _read_rope(raw: Raw) -> Values:
    """Of `transformers` 5 (`rope_parameters`) or 4 (`rope_theta`, `rope_scaling`)."""
    found = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if not isinstance(found, dict):
        raise ValueError(f"RoPE scaling {found!r} is no JSON object")
    given: dict[str, Any] = dict(found)
    theta = given.pop("rope_theta", raw.get("rope_theta"))
    if theta is None:
        raise ValueError("there is no rope_theta")
    kind, legacy = given.pop("rope_type", None), given.pop("type", None)
    kind = kind or legacy or "default"
    if kind not in ("default", "yarn", "llama3"):
        raise ValueError(f"RoPE scaling of type {kind!r} is not supported; only default, yarn and llama3")
    values: Values = {"rope.theta": theta, "rope.scaling": "none" if kind == "default" else kind}
    if kind == "llama3":
        values |= {f"rope.{ours}": given.pop(theirs) for theirs, ours in _LLAMA3_KEYS.items()}
    if kind == "yarn":
        given.setdefault("original_max_position_embeddings", raw.get("max_position_embeddings"))
        values |= {f"rope.{ours}": given.pop(theirs) for theirs, ours in _YARN_KEYS.items() if theirs in given}
        values |= _read_temperature(given, float(values["rope.factor"]))
    if given:
        raise ValueError(f"RoPE scaling has keys that are not known: {', '.join(given)}")
    return values


def _read_temperature(given: dict[str, Any], factor: float) -> Values:
    """`mscale` counts only together with `mscale_all_dim`; without them the temperature is 0.1 ln(factor) + 1."""
    mscale, all_dim, stated = (given.pop(key, None) for key in ("mscale", "mscale_all_dim", "attention_factor"))
    if stated is not None:
        mscale, all_dim = (stated - 1) / (0.1 * math.log(factor)), 0.0
    elif all_dim and not mscale:
        raise ValueError("RoPE scaling with mscale_all_dim but without mscale is not supported")
    elif not all_dim:
        mscale, all_dim = 1.0, 0.0
    return {"rope.mscale": mscale, "rope.mscale_all_dim": all_dim}


def _write_rope(config: ModelConfig) -> Raw:
    rope = config.rope
    if rope.scaling == "none":
        return {"rope_theta": rope.theta, "rope_scaling": None}
    if rope.scaling == "llama3":
        values = {theirs: getattr(rope, ours) for theirs, ours in _LLAMA3_KEYS.items()}
        return {"rope_theta": rope.theta, "rope_scaling": {"rope_type": "llama3", **values}}
    scaling: Raw = {"rope_type": "yarn"} | {theirs: getattr(rope, ours) for theirs, ours in _YARN_KEYS.items()}
    if rope.mscale_all_dim:
        scaling |= {"mscale": rope.mscale, "mscale_all_dim": rope.mscale_all_dim}
    elif rope.mscale != 1.0:
        scaling["attention_factor"] = 0.1 * rope.mscale * math.log(rope.factor) + 1.0
    return {"rope_theta": rope.theta, "rope_scaling": scaling}


def _read_dense_prefix(raw: Raw) -> Values:
    """Dense layers come first with us; Qwen may have them anywhere."""
    layers = sorted(raw.get("mlp_only_layers") or [])
    if layers != list(range(len(layers))) or raw.get("decoder_sparse_step", 1) != 1:
        raise ValueError(f"dense layers must be the first ones: mlp_only_layers={layers} decoder_sparse_step != 1?")
    return {"num_dense_layers": len(layers)}


def _write_dense_prefix(config: ModelConfig) -> Raw:
    return {"mlp_only_layers": list(range(config.num_dense_layers)), "decoder_sparse_step": 1}


def _read_head_dim(raw: Raw) -> Values:
    return {"attention.head_dim": raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"]}


def _read_stated_head_dim(raw: Raw) -> Values:
    """Where `transformers` has a default of its own, the key must be there."""
    return {"attention.head_dim": raw["head_dim"] or raw["hidden_size"] // raw["num_attention_heads"]}


def _read_window(raw: Raw) -> Values:
    return {"attention.sliding_window": raw.get("sliding_window") or 0}


def _write_window(config: ModelConfig) -> Raw:
    return {"sliding_window": config.attention.sliding_window or None}


def _read_no_window(raw: Raw) -> Values:
    if raw.get("use_sliding_window") and raw.get("sliding_window"):
        raise ValueError("use_sliding_window=true is not supported for this family")
    return {}


def _read_layer_types(raw: Raw) -> Values:
    """gpt-oss: the window is on layers 0, 2, 4, ..."""
    count, window = raw["num_hidden_layers"], raw.get("sliding_window", 128) or 0
    even = [_FULL if layer % 2 else _SLIDING for layer in range(count)]
    given = raw.get("layer_types") or even
    patterns = {"even": even, "all": [_SLIDING] * count}
    if given == [_FULL] * count:
        return {"attention.sliding_window": 0}
    name = next((name for name, pattern in patterns.items() if pattern == given), None)
    if name is None:
        raise ValueError(f"layer_types={given} is neither alternating from a sliding layer on, nor all alike")
    return {"attention.sliding_window": window, "attention.sliding_window_layers": name}


def _write_layer_types(config: ModelConfig) -> Raw:
    attention = config.attention
    even = attention.sliding_window_layers == "even"
    used = [attention.sliding_window > 0 and not (even and layer % 2) for layer in range(config.num_layers)]
    # `transformers` wants a window even where no layer uses it.
    return {
        "sliding_window": attention.sliding_window or 128,
        "layer_types": [_SLIDING if sliding else _FULL for sliding in used],
    }


def _read_shared(raw: Raw) -> Values:
    return {"moe.shared_expert_dim": (raw["n_shared_experts"] or 0) * raw["moe_intermediate_size"]}


def _write_shared(config: ModelConfig) -> Raw:
    count, rest = divmod(config.moe.shared_expert_dim, config.moe.expert_dim)
    if rest:
        raise ValueError(
            f"model.moe.shared_expert_dim={config.moe.shared_expert_dim} is no multiple of model.moe.expert_dim="
            f"{config.moe.expert_dim}, and the format counts shared experts"
        )
    return {"n_shared_experts": count or None}


def _read_v2_groups(raw: Raw) -> Values:
    method = raw.get("topk_method", "greedy")
    if method == "greedy":
        return {"moe.num_groups": 1}
    if method != "group_limited_greedy":
        raise ValueError(f"topk_method={method!r} is not known")
    return {"moe.num_groups": raw["n_group"], "moe.top_groups": raw["topk_group"], "moe.group_score": "max"}


def _write_v2_groups(config: ModelConfig) -> Raw:
    moe = config.moe
    method = "greedy" if moe.num_groups == 1 else "group_limited_greedy"
    return {"topk_method": method, "n_group": moe.num_groups, "topk_group": moe.top_groups}


def _read_llama4_layers(raw: Raw) -> Values:
    """Every so-manieth layer has no RoPE and no chunks; `no_rope_layers` has a 0 there."""
    count, every = raw["num_hidden_layers"], raw.get("no_rope_layer_interval", 4) or 0
    flags = raw.get("no_rope_layers") or [int(not every or (layer + 1) % every != 0) for layer in range(count)]
    every = flags.index(0) + 1 if 0 in flags else 0
    if flags != [int(not every or (layer + 1) % every != 0) for layer in range(count)]:
        raise ValueError(f"no_rope_layers={flags} is not every so-manieth layer")
    step = raw.get("interleave_moe_layer_step", 1)
    layers = raw.get("moe_layers") or list(range(step - 1, count, step))
    if layers != list(range(count)):
        raise ValueError(f"moe_layers={layers}: dense layers between the others are not supported")
    tuned = raw.get("attn_temperature_tuning", True)
    return {
        "attention.nope_every": every,
        "attention.chunk_size": raw.get("attention_chunk_size", 8192) or 0,
        "attention.temperature_scale": raw.get("attn_scale", 0.1) if tuned else 0.0,
        "attention.temperature_floor": raw.get("floor_scale", 8192),
        "attention.qk_norm": "l2" if raw.get("use_qk_norm", True) else "none",
        "moe.shared_expert_dim": raw["intermediate_size"],
    }


def _write_llama4_layers(config: ModelConfig) -> Raw:
    attention, count = config.attention, config.num_layers
    every = attention.nope_every
    return {
        "no_rope_layer_interval": every or count + 1,
        "no_rope_layers": [int(not every or (layer + 1) % every != 0) for layer in range(count)],
        "attention_chunk_size": attention.chunk_size or None,
        "attn_temperature_tuning": attention.temperature_scale > 0,
        "attn_scale": attention.temperature_scale,
        "floor_scale": attention.temperature_floor,
        "use_qk_norm": attention.qk_norm == "l2",
        "interleave_moe_layer_step": 1,
        "moe_layers": list(range(count)),
    }


LLAMA4_LAYERS = Part(
    tuple(
        "no_rope_layer_interval no_rope_layers layer_types attention_chunk_size attn_temperature_tuning attn_scale "
        "floor_scale use_qk_norm interleave_moe_layer_step moe_layers".split()
    ),
    _read_llama4_layers,
    _write_llama4_layers,
)
MULTI_TOKEN = Part(
    ("num_nextn_predict_layers",),
    lambda raw: {"mtp.depth": raw.get("num_nextn_predict_layers") or 0},
    lambda config: {"num_nextn_predict_layers": config.mtp.depth},
)
ROPE = Part(("rope_parameters", "rope_scaling", "rope_theta"), _read_rope, _write_rope)
DENSE_PREFIX = Part(("mlp_only_layers", "decoder_sparse_step"), _read_dense_prefix, _write_dense_prefix)
HEAD_DIM = Part(("head_dim",), _read_head_dim, lambda config: {"head_dim": config.attention.head_dim})
STATED_HEAD_DIM = Part(("head_dim",), _read_stated_head_dim, HEAD_DIM.write)
IMPLIED_HEAD_DIM = Part(("head_dim",), _read_head_dim, lambda config: {})
WINDOW = Part(("sliding_window",), _read_window, _write_window)
NO_WINDOW = Part(
    ("sliding_window", "use_sliding_window", "max_window_layers", "layer_types"),
    _read_no_window,
    lambda config: {"use_sliding_window": False, "sliding_window": None},
)
LAYER_TYPES = Part(("sliding_window", "layer_types"), _read_layer_types, _write_layer_types)
SHARED = Part(("n_shared_experts",), _read_shared, _write_shared)
Q_LORA = Part(
    ("q_lora_rank",),
    lambda raw: {"attention.q_lora_rank": raw["q_lora_rank"] or 0},
    lambda config: {"q_lora_rank": config.attention.q_lora_rank or None},
)
# Every head has its own keys and values; `transformers` wants the count.
MLA_HEADS = Part(
    ("num_key_value_heads",), lambda raw: {}, lambda config: {"num_key_value_heads": config.attention.num_heads}
)
V2_GROUPS = Part(("topk_method", "n_group", "topk_group"), _read_v2_groups, _write_v2_groups)
ALL_DENSE = Part(("num_hidden_layers",), lambda raw: {"num_dense_layers": raw["num_hidden_layers"]}, lambda config: {})
