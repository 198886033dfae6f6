"""Where Hugging Face folders meet runs: starting one from a folder, ending one in a folder."""

import shutil
from pathlib import Path

from torch import nn

from trainer.hf_source import FOLDER, keep_source, kept_source
from trainer.huggingface import Export, Transfer, export_model, load_source, named_tensors, open_for_all
from trainer.models.config import ModelConfig
from trainer.peers import Peers
from trainer.tokenizer import Tokenizer, read_tokenizer

EXPORT_FOLDER = "hf"


def start_from(
    path: str | Path, model: nn.Module, config: ModelConfig, run: Path | None, peers: Peers
) -> tuple[Transfer, str | None]:
    """Fill a model from a Hugging Face folder. Collective.

    Args:
        run: the run's folder, which keeps what export needs; None keeps nothing.

    Returns: what happened, and the digest of the folder's tokenizer if it has one.
    """
    source = open_for_all(path, peers)
    moved = load_source(source, model, config, peers)
    if run is not None:
        peers.from_rank0(lambda: keep_source(source, run / FOLDER))
    return moved, peers.from_rank0(lambda: _digest(Path(path)))


def _digest(folder: Path) -> str | None:
    return read_tokenizer(folder).digest.hex() if (folder / "tokenizer.json").is_file() else None


def run_folder(path: Path) -> Path:
    """The run that a path means: the run itself, its `checkpoints/`, or one of the steps in it."""
    inside = [parent for parent in (path, *path.resolve().parents[:2]) if (parent / "checkpoints").is_dir()]
    return inside[0] if inside else path


def inherit_source(path: Path, run: Path) -> None:
    """A run that starts from another's weights keeps what that one kept of its Hugging Face folder."""
    theirs = run_folder(path) / FOLDER
    if theirs.is_dir() and not (run / FOLDER).exists():
        shutil.copytree(theirs, run / FOLDER)


def export_run(run: Path, model: nn.Module, config: ModelConfig, tokenizer: Tokenizer, peers: Peers) -> Transfer:
    """Write a run's model as `<run>/hf`, replacing an older one. Collective; errors as `huggingface.export_parts`."""
    shapes = {name: tuple(tensor.shape) for name, tensor in named_tensors(model).items()}
    export = Export(config, shapes, peers.from_rank0(lambda: kept_source(run)), tokenizer)
    return export_model(run / EXPORT_FOLDER, model, export, peers, replace=True)
