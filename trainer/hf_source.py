"""What is kept of the Hugging Face folder that a run came from, so that it can end in one just like it.

`<run>/hf_source/` holds the folder's small files (config.json, tokenizer, generation settings, licence) and
`layout.json`: which tensor lies where in which file, in what dtype. Export then writes the same files with new values;
without it, names, sizes and order are those that `transformers` would choose.
"""

import json
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainer.hf_config import Family, family_of, model_config
from trainer.hf_families import FAMILIES
from trainer.hf_quantized import SourceTensors
from trainer.models.config import ModelConfig
from trainer.safetensors_stream import DTYPES, INDEX, Entry, Layout, plan_layout, read_json, read_layout
from trainer.validate import check_sizes

FOLDER = "hf_source"
CONFIG = "config.json"
_LAYOUT = "layout.json"
# Weights in any format; and what a download leaves.
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".onnx", ".h5", ".msgpack", ".index.json")
_MAX_FILE_BYTES = 1 << 27
# How pictures are prepared: nothing for a text model.
_OF_PICTURES = ("preprocessor_config.json", "processor_config.json")


@dataclass
class Source:
    """A Hugging Face folder: what its config.json says. Its tensors are opened by `tensors`."""

    folder: Path
    raw: dict[str, Any]
    config: ModelConfig
    # What is not taken over; for the user.
    notes: list[str] = field(default_factory=list)
    layout: Layout = field(default_factory=Layout)

    @property
    def family(self) -> Family:
        """What config.json names."""
        return family_of(self.raw, FAMILIES, str(self.folder / CONFIG))

    def tensors(self) -> SourceTensors:
        """Opens the folder's tensors."""
        return SourceTensors(self.folder, self.layout, self.raw)


def open_source(folder: str | Path) -> Source:
    """Reads config.json and every header of a folder; tensors stay on disk.

    Raises:
        FileNotFoundError: no such folder, no config.json, or a file of weights is missing.
        ValueError: a family that is not known, a damaged file, ...: names the file, the key or the tensor.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise FileNotFoundError(f"there is no folder {folder}")
    raw = read_json(folder / CONFIG)
    where = str(folder / CONFIG)
    family = family_of(raw, FAMILIES, where)
    config, notes = model_config(raw, family, where)
    try:
        check_sizes(config)
    except ValueError as error:
        raise ValueError(f"{where} describes no model: {error}") from None
    config.name = folder.resolve().name
    source = Source(folder, raw, config, notes, read_layout(folder))
    beyond = f"model.layers.{config.num_layers}."
    if not any(name.startswith(beyond) for name in source.tensors().stored):
        # `transformers` writes the number of such blocks, but never the blocks.
        config.mtp.depth = 0
    return source


@dataclass(frozen=True)
class Kept:
    """The files of a source, its layout, and whether that can be written again (not of quantized tensors)."""

    folder: Path
    raw: dict[str, Any]
    layout: Layout
    quantized: bool


def keep_source(source: Source, folder: Path) -> None:
    """Copy a source's small files, and describe its weights, in `folder`, which is made anew."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    raw, layout = source.raw, source.layout
    for path in small_files(source.folder):
        if not (source.family.text_config and path.name in _OF_PICTURES):
            shutil.copyfile(path, folder / path.name)
    if source.family.text_config:
        raw, layout = _text_alone(source)
        (folder / CONFIG).write_text(json.dumps(raw, indent=2) + "\n", encoding="utf-8")
    record = {
        "entries": layout.entries,
        "files": layout.files,
        "index": layout.index,
        "quantized": source.tensors().quantized,
    }
    (folder / _LAYOUT).write_text(json.dumps(record), encoding="utf-8")


def _text_alone(source: Source) -> tuple[dict[str, Any], Layout]:
    """config.json and files of the text model in a folder that has more: what export writes."""
    outside = {key: source.raw[key] for key in ("dtype", "torch_dtype", "transformers_version") if key in source.raw}
    raw = outside | source.raw[source.family.text_config]
    raw["architectures"] = [family_of(raw, FAMILIES, str(source.folder / CONFIG)).architecture]
    prefix = source.family.names.prefix
    entries = source.layout.entries.items()
    tensors = {
        name.removeprefix(prefix): (DTYPES[entry.dtype], entry.shape)
        for name, entry in entries
        if name.startswith(prefix)
    }
    return raw, plan_layout(tensors)


def kept_source(run: Path) -> Kept | None:
    """What a run keeps of its source; None if it has none."""
    folder = run / FOLDER
    if not (folder / _LAYOUT).is_file():
        return None
    record = read_json(folder / _LAYOUT)
    entries = {
        name: Entry(file, dtype, tuple(shape), start, end)
        for name, (file, dtype, shape, start, end) in record["entries"].items()
    }
    layout = Layout(entries, record["files"], record["index"])
    return Kept(folder, read_json(folder / CONFIG), layout, record["quantized"])


def small_files(folder: Path) -> list[Path]:
    """The files beside the weights."""
    return [
        path
        for path in sorted(folder.iterdir())
        if path.is_file()
        and not path.name.startswith(".")
        and not path.name.endswith(_WEIGHTS)
        and path.name not in (INDEX, _LAYOUT)
        and path.stat().st_size <= _MAX_FILE_BYTES
    ]
