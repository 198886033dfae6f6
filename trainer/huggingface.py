"""Models from Hugging Face folders and into them, in any layout; no rank ever holds more than its share.

Load: rank 0 reads config.json and the headers, everybody learns them, and each rank reads the slices of the tensors
that its own shards need. Before that, every parameter is filled with NaN, and none may be left afterwards.

Export: the place of every byte is known beforehand. Rank 0 lays out the files under a temporary name, each rank writes
what it owns, the bytes written must add up, and then the folder gets its name.

    trainer/hf_families.py        config.json of each family        trainer/hf_names.py    names and layouts of tensors
    trainer/hf_source.py          what is kept of a source          trainer/hf_pieces.py   shards <-> slices of files
    trainer/safetensors_stream.py files                             trainer/hf_quantized.py  mxfp4 and fp8
"""

import errno
import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from parallel.init import InitRule, clean_name, fill, local_box
from trainer.checkpoint_files import sync_folder
from trainer.hf_config import differences, names_of
from trainer.hf_names import Piece, Shape
from trainer.hf_pieces import Part, read_part, write_part
from trainer.hf_plan import Export, ExportPlan, make_plan
from trainer.hf_quantized import SourceTensors
from trainer.hf_source import CONFIG, Source, open_source, small_files
from trainer.models.config import ModelConfig
from trainer.peers import Peers
from trainer.safetensors_stream import (
    Layout,
    TensorWriter,
    create_files,
    some,
)

BIAS = "moe.expert_bias"

PiecesOf = Callable[[str, Shape], list[Piece]]


@dataclass
class Transfer:
    """What happened: lines for the user, and the largest tensor that this rank held on the way, in bytes."""

    notes: list[str] = field(default_factory=list)
    largest: int = 0


# ---- load


def load_source(source: Source, model: nn.Module, config: ModelConfig, peers: Peers) -> Transfer:
    """Fill a model, in whatever layout and dtype it is, with the weights of a folder. Collective.

    Raises:
        ValueError: the model is another than the folder's; tensors missing, unexpected or of another shape (all by
            name); a file that cannot be read. The model is not usable then.
    """
    different = differences(config, source.config, source.family)
    if different:
        raise ValueError(
            f"{source.folder / CONFIG} is another model ({source.family.model_types[0]}) than this run's: "
            f"{'; '.join(different)}. Write its config with `python scripts/convert_hf.py config {source.folder}`"
        )
    tensors, names = source.tensors(), names_of(source.family, config)

    def pieces_of(name: str, shape: Shape) -> list[Piece]:
        return names.pieces(name, shape, tensors.stored)

    return fill_model(source, tensors, model, pieces_of, peers, fresh=_balancing_biases(model, pieces_of))


def _balancing_biases(model: nn.Module, pieces_of: PiecesOf) -> dict[str, InitRule]:
    """Those that the format has no place for: they start at zero."""
    tensors = named_tensors(model)
    names = [name for name in tensors if name.endswith(BIAS) and not pieces_of(name, tuple(tensors[name].shape))]
    return {name: InitRule("zeros") for name in names}


def fill_model(
    source: Source,
    tensors: SourceTensors,
    model: nn.Module,
    pieces_of: PiecesOf,
    peers: Peers,
    *,
    fresh: Mapping[str, InitRule],
    seed: int = 0,
) -> Transfer:
    """Fill every tensor of a model from its pieces. Collective; errors as `load_source`.

    Args:
        fresh: tensors that the folder does not have, and how they start.
    """
    targets = named_tensors(model)
    pieces = {name: pieces_of(name, tuple(tensor.shape)) for name, tensor in targets.items()}
    transfer = Transfer(list(source.notes))
    transfer.notes += check_tensors(source, tensors, {name: pieces[name] for name in pieces if name not in fresh})
    if fresh:
        kinds = " or ".join(sorted({rule.kind for rule in fresh.values()}))
        text = f"{len(fresh)} tensors are not in {source.folder} and start anew ({kinds}): {some([*fresh])}"
        transfer.notes.append(text)
    with peers.together(), torch.no_grad():
        for name, tensor in targets.items():
            part = Part(*local_box(tensor))
            part.values.fill_(float("nan"))
            if name in fresh:
                fill(tensor, name, fresh[name], seed)
            else:
                read_part(part, pieces[name], tensors.read)
        left = [
            name if name in fresh else f"{name} ({_place(source.layout, [piece.theirs for piece in pieces[name]])})"
            for name, tensor in targets.items()
            if bool(local_box(tensor)[1].isnan().any())
        ]
        if left:
            raise ValueError(f"{len(left)} tensors are not filled, or hold NaN in {source.folder}: {some(left)}")
    transfer.largest = tensors.reader.largest
    return transfer


def check_tensors(source: Source, tensors: SourceTensors, pieces: Mapping[str, list[Piece]]) -> list[str]:
    """Compare what a model needs with what a folder has; returns lines about what is left out.

    Raises:
        ValueError: naming the tensors that are missing, unexpected or of another shape.
    """
    wanted = {piece.theirs: piece.shape for found in pieces.values() for piece in found}
    stored = tensors.stored
    notes: list[str] = []
    extra = {name: _reason(source, name) for name in stored if name not in wanted}
    for reason in sorted({why for why in extra.values() if why}):
        names = [name for name, why in extra.items() if why == reason]
        notes.append(f"{len(names)} tensors of {source.folder} are left out ({reason}): {some(names)}")
    shapes = [
        f"{name} ({list(stored[name].shape)} in {_file_of(source.layout, name)}, the config means {list(shape)})"
        for name, shape in wanted.items()
        if name in stored and stored[name].shape != shape
    ]
    problems = {
        "missing": [name for name in wanted if name not in stored],
        "unexpected": [name for name, why in extra.items() if why is None],
        "of another shape": shapes,
        "without a place in this format": [name for name, found in pieces.items() if not found],
    }
    texts = [f"{len(names)} tensors {what}: {some(names)}" for what, names in problems.items() if names]
    if texts:
        raise ValueError(f"{source.folder} does not fit its {CONFIG} or this model: {'; '.join(texts)}")
    return notes


def _file_of(layout: Layout, name: str) -> str:
    entry = layout.entries.get(name) or layout.entries.get(f"{name}_blocks")
    return entry.file if entry else "its file"


def _place(layout: Layout, names: list[str]) -> str:
    """The tensors that one of ours comes from, and their files."""
    names = list(dict.fromkeys(names))
    return f"from {some(names, 2)} in {some(sorted({_file_of(layout, name) for name in names}), 2)}"


def _reason(source: Source, name: str) -> str | None:
    """Why a tensor of the folder may be left out; None: it may not."""
    if name == f"{source.family.names.prefix}lm_head.weight" and source.config.tie_embeddings:
        return "tied to the embedding"
    parts = name.split(".")
    beyond = name.startswith("model.layers.") and int(parts[2]) >= source.config.num_layers
    if beyond and source.raw.get("num_nextn_predict_layers"):
        return "multi-token prediction, which this model does not have"
    return source.family.names.reason_left_out(name)


def open_for_all(path: str | Path, peers: Peers) -> Source:
    """`open_source` on rank 0, for everybody. Collective."""
    return peers.from_rank0(lambda: open_source(path))


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers by name; shards stay shards."""
    return {clean_name(name): value for name, value in model.state_dict().items()}


# ---- export


def export_model(
    folder: str | Path, model: nn.Module, export: Export, peers: Peers, *, replace: bool = False
) -> Transfer:
    """Write a live model, in whatever layout it is. Collective; errors as `export_parts`."""
    parts = [(name, Part(*local_box(tensor))) for name, tensor in named_tensors(model).items() if owns(tensor, peers)]
    return export_parts(folder, parts, export, peers, replace=replace)


def owns(tensor: Tensor, peers: Peers) -> bool:
    """Whether this rank writes its part of a tensor: one of those that hold the same."""
    if not isinstance(tensor, DTensor):
        return peers.rank == 0
    # The ranks of its mesh together have all of it. Whatever tp does not split is on several such meshes.
    if not bool((tensor.device_mesh.mesh == 0).any()):
        return False
    place = tensor.device_mesh.get_coordinate()
    assert place is not None
    return all(at == 0 for at, kind in zip(place, tensor.placements, strict=True) if isinstance(kind, Replicate))


def export_parts(
    folder: str | Path, parts: Iterable[tuple[str, Part]], export: Export, peers: Peers, *, replace: bool = False
) -> Transfer:
    """Write the parts that this rank owns; together the ranks must have every part once. Collective.

    Args:
        replace: a folder of that name is replaced when the new one is complete.

    Raises:
        FileExistsError: the folder exists.
        OSError: no room on the disk, ...
        ValueError: no format can express the model.
        RuntimeError: the parts do not make up the model. Nothing is left under the folder's name then.
    """
    folder = peers.from_rank0(lambda: target_folder(folder, replace=replace))
    plan = peers.from_rank0(lambda: make_plan(export))
    partial = peers.from_rank0(lambda: _begin(folder, plan))
    try:
        writer = TensorWriter(partial, plan.layout)
        lost: list[str] = []
        rounded: set[tuple[torch.dtype, torch.dtype]] = set()
        with peers.together(), torch.no_grad():
            for name, part in parts:
                pieces = plan.pieces(name, export.shapes[name])
                if not pieces and bool(part.values.any()):
                    lost.append(f"{name} is not zero, but {plan.family.model_types[0]} has no place for it")
                rounded |= {(part.values.dtype, dtype) for dtype in map(plan.dtype, pieces)}
                write_part(part, pieces, writer)
            writer.close()
        # Rank 0 speaks for all.
        done = peers.gather((writer.written, lost, rounded))
        peers.from_rank0(lambda: _finish(folder, partial, plan, export, sum(written for written, *_ in done)))
    except BaseException:
        if peers.rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
        raise
    notes = [*plan.notes, *(note for _, lost, _ in done for note in lost)]
    if export.dtype is None:
        notes += _tell_rounded(set().union(*(rounded for *_, rounded in done)))
    return Transfer(notes, writer.largest)


def _tell_rounded(dtypes: Iterable[tuple[torch.dtype, torch.dtype]]) -> list[str]:
    """A line where nobody asked for the dtype, and it holds less than the run's."""
    names = sorted((str(ours), str(written)) for ours, written in dtypes if written.itemsize < ours.itemsize)
    return [
        f"weights are {ours.removeprefix('torch.')} in the run and rounded to {written.removeprefix('torch.')} in the "
        "export; scripts/convert_hf.py export --dtype float32 writes float32"
        for ours, written in names
    ]


def target_folder(path: str | Path, *, replace: bool) -> Path:
    """The folder that is to be written; of a link, the one it means. Raises FileExistsError if it may not be."""
    folder = Path(path).resolve()
    if folder.exists() and not (replace and folder.is_dir()):
        raise FileExistsError(f"{folder} exists; choose another folder")
    return folder


def check_room(folder: Path, needed: int) -> None:
    """Raises OSError if a new folder of so many bytes does not fit on its disk: better now than after hours."""
    free = shutil.disk_usage(folder.parent).free
    if needed > free:
        raise OSError(errno.ENOSPC, f"{folder} takes {needed:,} bytes, and its disk has {free:,} left")


def _begin(folder: Path, plan: ExportPlan) -> Path:
    folder.parent.mkdir(parents=True, exist_ok=True)
    check_room(folder, plan.size)
    partial = folder.with_name(f"{folder.name}.partial.{secrets.token_hex(4)}")
    partial.mkdir()
    try:
        create_files(partial, plan.layout)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return partial


def _finish(folder: Path, partial: Path, plan: ExportPlan, export: Export, written: int) -> None:
    expected = plan.size
    if written != expected:
        raise RuntimeError(
            f"{written} bytes of tensors were written, the model has {expected}: parts are missing or double"
        )
    _write_small_files(partial, plan, export)
    for path in partial.iterdir():
        with open(path, "rb") as stream:
            os.fsync(stream.fileno())
    sync_folder(partial)
    if folder.exists():
        old = folder.with_name(f"{folder.name}.old.{secrets.token_hex(4)}")
        folder.rename(old)
        partial.rename(folder)
        shutil.rmtree(old)
    else:
        partial.rename(folder)
    sync_folder(folder.parent)


def _write_small_files(partial: Path, plan: ExportPlan, export: Export) -> None:
    same_tokenizer = export.tokenizer is None
    if export.kept is not None:
        theirs = export.kept.folder / "tokenizer.json"
        same_tokenizer |= theirs.is_file() and export.tokenizer is not None and export.tokenizer.is_of(theirs)
        for path in small_files(export.kept.folder):
            if same_tokenizer or not _is_tokenizer_file(path.name):
                shutil.copyfile(path, partial / path.name)
    if not same_tokenizer and export.tokenizer is not None:
        export.tokenizer.save(partial, for_transformers=True)
    kept_config = None if export.kept is None else export.kept.raw
    if plan.raw != kept_config:
        (partial / CONFIG).write_text(json.dumps(plan.raw, indent=2) + "\n", encoding="utf-8")


def _is_tokenizer_file(name: str) -> bool:
    known = ("vocab.json", "merges.txt", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja")
    return name.startswith(("tokenizer", "tokenization")) or name in known
