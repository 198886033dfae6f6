"""What an export writes, decided before a byte is: the format, config.json, and every tensor's dtype and place.

A model that came from a Hugging Face folder goes back into the same files (`hf_source`). One that did not, or that is
another model by now, gets the first format that can express it, with the names and files `transformers` would choose.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from trainer.hf_config import Family, choose_family, config_json, differences, family_of, model_config, names_of
from trainer.hf_families import FAMILIES
from trainer.hf_names import Piece, Shape
from trainer.hf_source import CONFIG, Kept
from trainer.models.config import ModelConfig
from trainer.safetensors_stream import DTYPES, MAX_FILE_BYTES, Layout, plan_layout, some
from trainer.tokenizer import Tokenizer


@dataclass
class Export:
    """What to write, beside the values."""

    config: ModelConfig
    # Shapes of all of our tensors, whole.
    shapes: Mapping[str, Shape]
    # The folder that the weights came from, if any: its names, dtypes, files and config.json are kept.
    kept: Kept | None = None
    tokenizer: Tokenizer | None = None
    # None takes the source's, and bf16 where no source tells. Balancing biases are fp32 whatever is asked for.
    dtype: torch.dtype | None = None
    max_file_bytes: int = MAX_FILE_BYTES


@dataclass
class ExportPlan:
    """What an export writes: config.json, every tensor's place, and what the user should know."""

    raw: dict[str, Any]
    layout: Layout
    notes: list[str]
    config: ModelConfig

    @property
    def family(self) -> Family:
        """What config.json names."""
        return family_of(self.raw, FAMILIES, CONFIG)

    @property
    def size(self) -> int:
        """Bytes of all tensors."""
        return sum(entry.end - entry.start for entry in self.layout.entries.values())

    def dtype(self, piece: Piece) -> torch.dtype:
        """What a piece is written in."""
        return DTYPES[self.layout.entries[piece.theirs].dtype]

    def pieces(self, name: str, shape: Shape) -> list[Piece]:
        """Where our tensor `name` goes."""
        return names_of(self.family, self.config).pieces(name, shape, self.layout.entries)


def make_plan(export: Export) -> ExportPlan:
    """How a model is written. Raises ValueError when no format can express it."""
    family, raw, kept = _format(export)
    names = names_of(family, export.config)
    stored = () if kept is None or kept.quantized else kept.layout.entries
    wanted: dict[str, Shape] = {}
    notes: list[str] = []
    for name, shape in export.shapes.items():
        pieces = names.pieces(name, shape, stored or None)
        if not pieces:
            notes.append(f"{family.model_types[0]} has no place for {name}: it is not in the export")
        wanted |= {piece.theirs: piece.shape for piece in pieces}
    notes += _left_out(export.config)
    if stored and (dropped := [name for name in stored if name not in wanted]):
        notes.append(f"{len(dropped)} tensors of the source are not in the export: {some(dropped)}")
    dtypes = {name: _dtype(name, export, kept) for name in wanted}
    if kept is not None and stored and all(_is_kept(kept, name, wanted, dtypes) for name in {*wanted, *stored}):
        return ExportPlan(raw, kept.layout, notes, export.config)
    layout = plan_layout({name: (dtypes[name], wanted[name]) for name in wanted}, export.max_file_bytes)
    return ExportPlan(raw, layout, notes, export.config)


def _left_out(config: ModelConfig) -> list[str]:
    """What changes the results of this model's experts, and no config.json can say."""
    if config.num_dense_layers == config.num_layers:
        return []
    pairs = (
        ("capacity_factor", None, "drops no pair of token and expert"),
        ("force_balance", False, "routes by its scores"),
    )
    return [
        f"model.moe.{name}={str(value).lower()} has no place in {CONFIG}: the exported model {does}"
        for name, plain, does in pairs
        if (value := getattr(config.moe, name)) != plain
    ]


def _is_kept(kept: Kept, name: str, wanted: Mapping[str, Shape], dtypes: Mapping[str, torch.dtype]) -> bool:
    entry = kept.layout.entries.get(name)
    return entry is not None and name in wanted and (DTYPES[entry.dtype], entry.shape) == (dtypes[name], wanted[name])


def _format(export: Export) -> tuple[Family, dict[str, Any], Kept | None]:
    """Family, config.json and source to go by. A source that is another model by now (upcycled) is left aside."""
    kept = export.kept
    if kept is not None:
        family = family_of(kept.raw, FAMILIES, str(kept.folder / CONFIG))
        theirs, _ = model_config(kept.raw, family, str(kept.folder / CONFIG))
        if not differences(export.config, theirs, family):
            raw = {key: value for key, value in kept.raw.items() if key != "quantization_config"}
            if export.dtype is not None:
                raw["dtype" if "dtype" in raw else "torch_dtype"] = _word(export.dtype)
            return family, raw, kept
    family = choose_family(export.config, FAMILIES)
    raw = config_json(export.config, family) | {"torch_dtype": _word(export.dtype or torch.bfloat16)}
    if export.tokenizer is not None:
        raw |= {"bos_token_id": None, "eos_token_id": export.tokenizer.eos_id}
    return family, raw, None


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dtype(name: str, export: Export, kept: Kept | None) -> torch.dtype:
    balancing = name.endswith("e_score_correction_bias")
    if kept is not None and name in kept.layout.entries and (export.dtype is None or balancing):
        dtype = DTYPES[kept.layout.entries[name].dtype]
        if dtype.itemsize > 1:
            return dtype
    return torch.float32 if balancing else export.dtype or torch.bfloat16
