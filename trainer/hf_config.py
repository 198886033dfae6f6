"""`config.json` of Hugging Face <-> our ModelConfig, both ways, for every family in `hf_families`.

What decides the function that a model computes must survive the way there and back; `architecture` lists it. Keys of
config.json that nothing here knows are reported, never swallowed. How to train (auxiliary losses, bias rates, backend)
is our own affair, except where a family's config.json states it.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from typing import Any

from trainer.choices import BOUNDS
from trainer.hf_names import NameMap, with_multi_token
from trainer.models.config import ROPE_SETTINGS, ModelConfig

HF_PREFIX = "hf:"
"""Of `checkpoint.init_from`, where it names a Hugging Face folder."""
Raw = dict[str, Any]
Values = dict[str, Any]
"""Settings by dotted path below `model.`."""


@dataclass(frozen=True)
class Part:
    """Keys of config.json that only make sense together, and how they are read and written."""

    keys: tuple[str, ...]
    read: Callable[[Raw], Values]
    write: Callable[[ModelConfig], Raw]


@dataclass(frozen=True)
class Family:
    """One kind of config.json and of tensor names."""

    # `model_type`; the first is written.
    model_types: tuple[str, ...]
    architecture: str
    names: NameMap
    # Key -> our setting, one to one.
    fields: Mapping[str, str]
    parts: tuple[Part, ...] = ()
    # Settings that every model of the family has, though config.json does not say so.
    fixed: Values = field(default_factory=dict)
    # Keys that may have only these values; the first is written, unless it is None.
    only: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    # Other spellings of keys in `fields`.
    aliases: Mapping[str, str] = field(default_factory=dict)
    # Values of absent keys.
    defaults: Raw = field(default_factory=dict)
    # Keys without effect on the model as it is trained here.
    ignored: frozenset[str] = frozenset()
    dense: bool = False
    # Has names for multi-token prediction.
    multi_token: bool = False
    # Of a format with more than text, the key that holds the text model's own keys. It is read, never written.
    text_config: str = ""


# Of any family: tokens, generation, provenance, storage.
IGNORED = frozenset(
    "architectures model_type torch_dtype dtype transformers_version use_cache bos_token_id eos_token_id pad_token_id "
    "output_router_logits pretraining_tp _name_or_path quantization_config auto_map return_dict".split()
)
# What changes how a model is trained or run, not what it computes.
TRAINING = frozenset(
    "name init_std max_seq_len attention.backend moe.bias_update_rate moe.aux_loss moe.aux_loss_level moe.z_loss "
    "moe.capacity_factor moe.pair_capacity moe.force_balance moe.backend mtp.depth mtp.loss_weight".split()
)


def model_config(raw: Raw, family: Family, where: str = "config.json") -> tuple[ModelConfig, list[str]]:
    """Our config of the model that config.json describes, and one line for each key that is not understood.

    Raises:
        ValueError: a key that is missing, or that asks for something that this trainer does not compute.
    """
    known = {family.aliases.get(key, key): value for key, value in _text_keys(raw, family, where).items()}
    values: Values = dict(family.fixed)
    for key, path in family.fields.items():
        value = known.get(key, family.defaults.get(key))
        if value is None:
            raise ValueError(f"{where} has no {key}, which a {family.model_types[0]} model needs")
        values[path] = value
    for key, allowed in family.only.items():
        if key in known and known[key] not in allowed:
            legal = " or ".join(repr(value) for value in allowed)
            kind = family.model_types[0]
            raise ValueError(f"{where}: {key}={known[key]!r} is not supported for {kind}; only {legal}")
    for part in family.parts:
        try:
            values |= part.read(known)
        except (KeyError, TypeError, AttributeError, ArithmeticError) as error:
            raise ValueError(f"{where}: {' and '.join(part.keys)} cannot be read: {error!r}") from None
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
    understood = {*family.fields, *family.only, *family.ignored, *IGNORED, *(k for p in family.parts for k in p.keys)}
    notes = [f"{where}: unknown key {key}={known[key]!r} is not taken over" for key in known if key not in understood]
    keys = {path: key for key, path in family.fields.items()}
    return _from_values(values, keys, where), notes


def _text_keys(raw: Raw, family: Family, where: str) -> Raw:
    if not family.text_config:
        return raw
    section = raw.get(family.text_config)
    if not isinstance(section, dict):
        raise ValueError(f"{where} has no {family.text_config}, which a {family.model_types[0]} model needs")
    return {key: value for key, value in raw.items() if key != family.text_config} | section


def config_json(config: ModelConfig, family: Family) -> Raw:
    """The config.json of a model, without what belongs to its tokens and storage."""
    raw: Raw = {"architectures": [family.architecture], "model_type": family.model_types[0]}
    for key, path in family.fields.items():
        raw[key] = setting(config, path)
    for part in family.parts:
        raw |= part.write(config)
    raw |= {key: allowed[0] for key, allowed in family.only.items() if allowed[0] is not None}
    return raw


def names_of(family: Family, config: ModelConfig) -> NameMap:
    """The names of a family's tensors in one model: with its blocks for multi-token prediction, if it has any."""
    depth = config.mtp.depth if family.multi_token else 0
    return with_multi_token(family.names, config.num_layers, depth) if depth else family.names


def setting(config: ModelConfig, path: str) -> Any:
    """The value at a dotted path."""
    value: Any = config
    for name in path.split("."):
        value = getattr(value, name)
    return value


def architecture(config: ModelConfig) -> Values:
    """The settings that decide what the model computes; those that are without effect in it are left out."""
    values = {path: value for path, value in _flat(asdict(config)).items() if path not in TRAINING}
    return {path: value for path, value in values.items() if not _without_effect(path, config)}


def differences(ours: ModelConfig, theirs: ModelConfig, family: Family) -> list[str]:
    """What the two models do not have in common: `model.moe.top_k=2 (there 4)`, ...

    A balancing bias on our side is no difference where the family has no place for it: it starts at zero, and export
    says so.
    """
    mine, other = architecture(ours), architecture(theirs)
    if "moe.expert_bias" not in family.names.plain:
        mine.pop("moe.expert_bias", None)
        other.pop("moe.expert_bias", None)
    absent = "without effect"
    paths = sorted({*mine, *other})
    pairs = {path: (mine.get(path, absent), other.get(path, absent)) for path in paths}
    return [f"model.{path}={a} (there {b})" for path, (a, b) in pairs.items() if not _same(a, b)]


def family_of(raw: Raw, families: Mapping[str, Family], where: str) -> Family:
    """The family that config.json names. Raises ValueError for one that is not known, with those that are."""
    kind = raw.get("model_type")
    found = next((family for family in families.values() if kind in family.model_types), None)
    if found is None:
        known = ", ".join(sorted(kind for family in families.values() for kind in family.model_types))
        raise ValueError(f"{where}: model_type={kind!r} is not known here; known: {known}")
    return found


def choose_family(config: ModelConfig, families: Mapping[str, Family]) -> Family:
    """The family whose format can express a model of ours; the first of several.

    Raises:
        ValueError: none can; names the nearest and what it lacks.
    """
    lacking: dict[str, list[str]] = {}
    for name, family in families.items():
        if family.text_config or family.dense != (config.num_dense_layers == config.num_layers):
            continue
        try:
            there, _ = model_config(config_json(config, family), family)
            lacking[name] = differences(config, there, family)
        except ValueError as error:
            lacking[name] = [str(error), "", ""]
        if not lacking[name]:
            return family
    nearest = min(lacking, key=lambda name: len(lacking[name]))
    raise ValueError(
        f"no Hugging Face format known here can express this model; the nearest is {nearest}, which differs in "
        f"{'; '.join(filter(None, lacking[nearest]))}"
    )


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, float) and isinstance(b, float | int) and not isinstance(b, bool):
        return abs(a - b) <= 1e-12 * max(abs(a), abs(b))
    return a == b


def _flat(tree: Mapping[str, Any], prefix: str = "") -> Values:
    found: Values = {}
    for name, value in tree.items():
        found |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return found


_MLA = "q_lora_rank kv_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim".split()
_GQA = (
    "num_kv_heads head_dim qk_norm sinks sliding_window sliding_window_layers nope_every chunk_size temperature_scale "
    "temperature_floor".split()
)


def _without_effect(path: str, config: ModelConfig) -> bool:
    section, _, name = path.rpartition(".")
    if section == "attention":
        unused = _MLA if config.attention.kind == "gqa" else _GQA
        off = {
            "sliding_window_layers": config.attention.sliding_window == 0,
            "temperature_floor": config.attention.temperature_scale == 0,
        }
        return name in unused or off.get(name, False)
    if section == "rope":
        return name not in ("theta", "scaling", "interleaved", *ROPE_SETTINGS[config.rope.scaling])
    if section == "moe":
        no_groups = config.moe.num_groups == 1 and name in ("top_groups", "group_score")
        return no_groups or config.num_dense_layers == config.num_layers
    return name == "ffn_dim" and config.num_dense_layers == 0


def _from_values(values: Values, keys: Mapping[str, str], where: str) -> ModelConfig:
    config = ModelConfig()
    for path, value in values.items():
        section, _, name = path.rpartition(".")
        node: Any = setting(config, section) if section else config
        assert is_dataclass(node) and name in {f.name for f in fields(node)}, path
        setattr(node, name, _typed(value, type(getattr(node, name)), f"{where}: {keys.get(path, path)}"))
        low, high = BOUNDS.get(f"model.{path}", (-math.inf, math.inf))
        if isinstance(value, int | float) and not low <= value <= high:
            raise ValueError(f"{where}: {keys.get(path, path)}={value} must be from {low:g} to {high:g}")
    return config


def _typed(value: Any, kind: type, what: str) -> Any:
    """JSON knows no 8 that is not an 8.0, and anything is true to `bool`: only what means the same is converted."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if type(value) is kind:
        return value
    if number and (kind is float or (kind is int and value == int(value))):
        return kind(value)
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}
    raise ValueError(f"{what}={value!r} is not {names[kind]}")
