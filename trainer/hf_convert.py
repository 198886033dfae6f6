"""Hugging Face folders into run folders and back, without training: what `scripts/convert_hf.py` does.

An imported model is a run folder at step 0: `checkpoints/`, `config.yaml`, `tokenizer/` and `hf_source/`. Training
starts from it (`checkpoint.init_from=FOLDER`), generation and evaluation read it, export turns it back.

Any number of processes shares the work. On import each holds its part of every tensor, in memory backed by a file, so
that even one process needs no room for the model, but the disk needs room for it twice; on export each takes every
n-th tensor and holds it whole: the largest is one layer's stack of experts.
"""

import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import load as load_tensors
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from trainer import checkpoint_files as files
from trainer.checkpoint import Checkpointer, expect_one_process, open_checkpoint
from trainer.checkpoint_files import CheckpointReader
from trainer.compose import config_to_yaml, load_config
from trainer.config import CheckpointConfig, Config, TrainConfig
from trainer.hf_pieces import Part
from trainer.hf_run import run_folder
from trainer.hf_source import FOLDER, Source, keep_source, kept_source
from trainer.hf_upcycle import fill_upcycled, upcycled_config
from trainer.huggingface import (
    Export,
    Transfer,
    check_room,
    export_parts,
    load_source,
    named_tensors,
    open_for_all,
    target_folder,
)
from trainer.meta_model import meta_model
from trainer.models.config import ModelConfig
from trainer.peers import Peers
from trainer.safetensors_stream import DTYPES
from trainer.tokenizer import read_tokenizer
from trainer.train_state import MODEL

MAX_CONTEXT = 4096

Fill = Callable[[nn.Module], Transfer]


class NotWrittenError(RuntimeError):
    """A run folder could not be written to its end: a full disk, mostly. Nothing is left of it."""


def import_folder(path: str | Path, out: str | Path, peers: Peers, dtype: torch.dtype | None = None) -> Transfer:
    """A Hugging Face folder becomes a run folder. Collective.

    Args:
        dtype: of the stored parameters; None takes bf16 if that holds every value of the source exactly, else fp32.

    Raises:
        ValueError, FileNotFoundError, FileExistsError: as `huggingface.load_source` and `open_source`.
        NotWrittenError: the disk filled up, or failed.
        LostRankError: a process is gone.
    """
    source = open_for_all(path, peers)
    return _write_run(out, source, source.config, dtype, peers, lambda m: load_source(source, m, source.config, peers))


def upcycle_folder(
    path: str | Path,
    out: str | Path,
    peers: Peers,
    *,
    num_experts: int,
    top_k: int,
    noise: float = 0.0,
    seed: int = 0,
    dtype: torch.dtype | None = None,
) -> Transfer:
    """A dense Hugging Face folder becomes the run folder of a Mixture of Experts. Collective; see `hf_upcycle`."""
    source = open_for_all(path, peers)
    config = upcycled_config(source.config, num_experts, top_k)
    return _write_run(out, source, config, dtype, peers, lambda m: fill_upcycled(source, m, config, peers, noise, seed))


def export_folder(
    path: str | Path, out: str | Path, peers: Peers, *, dtype: torch.dtype | None = None, max_file_bytes: int
) -> Transfer:
    """A run, or one of its checkpoints, becomes a Hugging Face folder. Collective.

    Args:
        dtype: of the weights; None takes the source's, and bf16 where no source tells.

    Raises: as `checkpoint.open_checkpoint` and `huggingface.export_parts`.
    """
    stored = peers.from_rank0(lambda: open_checkpoint(path, notify=lambda line: None))
    run = run_folder(stored.path)
    config = peers.from_rank0(lambda: load_config(run / "config.yaml"))
    with peers.together():
        files.check_content(stored.path, files.read_manifest(stored.path), peers.rank, peers.size)
    model = meta_model(config)
    tensors = named_tensors(model)
    tokenizer = peers.from_rank0(lambda: read_tokenizer(run / "tokenizer") if (run / "tokenizer").is_dir() else None)
    export = Export(
        config.model,
        {name: tuple(tensor.shape) for name, tensor in tensors.items()},
        peers.from_rank0(lambda: kept_source(run)),
        tokenizer,
        dtype,
        max_file_bytes,
    )
    return export_parts(out, _stored_parts(stored.path, export, peers), export, peers)


def _stored_parts(folder: Path, export: Export, peers: Peers) -> Iterator[tuple[str, Part]]:
    """Every n-th tensor of a checkpoint, read when it is its turn."""
    expect_one_process()
    reader = CheckpointReader(folder)
    saved = reader.read_metadata().state_dict_metadata
    for name in list(export.shapes)[peers.rank :: peers.size]:
        if MODEL + name not in saved:
            raise ValueError(f"{folder} has no tensor {name}, which its config.yaml means")
        tensor = torch.empty(export.shapes[name], dtype=saved[MODEL + name].properties.dtype)  # type: ignore[union-attr]
        load_tensors(
            {MODEL + name: tensor},
            storage_reader=reader,
            planner=DefaultLoadPlanner(flatten_state_dict=False),
            no_dist=True,
        )
        yield name, Part((0,) * tensor.dim(), tensor)


def _write_run(
    out: str | Path, source: Source, model_config: ModelConfig, dtype: torch.dtype | None, peers: Peers, fill: Fill
) -> Transfer:
    out = peers.from_rank0(lambda: target_folder(out, replace=False))
    # Generation sees as much as the model does, within reason.
    seq_len = min(model_config.max_seq_len, MAX_CONTEXT)
    config = Config(model=model_config, train=TrainConfig(seq_len=seq_len))
    model = meta_model(config, dtype or stored_dtype(source))
    # Once in memory that files back, once as a checkpoint.
    room = 2 * sum(tensor.nbytes for tensor in named_tensors(model).values())
    partial = peers.from_rank0(lambda: _make(out, room))
    try:
        with peers.together():
            _allocate(model, partial / "scratch")
        moved = fill(model)
        peers.from_rank0(lambda: _describe(partial, source, config))
        digest = peers.from_rank0(lambda: _digest(partial))
        if digest is None:
            moved.notes.append(f"{source.folder} has no tokenizer.json: no tokenizer comes with the model")
        extra = {"step": 0, "data": None, "tokenizer": digest}
        settings = CheckpointConfig(asynchronous=False, keep_last=1)
        checkpointer = Checkpointer(partial / "checkpoints", settings, notify=lambda line: None)
        try:
            checkpointer.save(0, model, None, extra)
        except RuntimeError as error:
            raise NotWrittenError(
                f"{out} was not written, and nothing is left of it: {error.__cause__ or error}. If its disk is full, "
                f"make room ({room:,} bytes while it is written) and start again, or choose another folder"
            ) from error
        finally:
            checkpointer.close()
        del model
        peers.from_rank0(lambda: _publish(partial, out))
    except BaseException:
        if peers.rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
        raise
    return moved


def stored_dtype(source: Source) -> torch.dtype:
    """bf16 if every weight is bf16 or mxfp4 (which bf16 holds exactly), else fp32. fp64 stays."""
    tensors = source.tensors()
    # Balancing biases are fp32 with us whatever the parameters are.
    names = [name for name, s in tensors.stored.items() if s.kind == "plain" and not name.endswith("correction_bias")]
    plain = {DTYPES[source.layout.entries[name].dtype] for name in names}
    if torch.float64 in plain:
        return torch.float64
    exact = plain <= {torch.bfloat16} and all(stored.kind != "fp8" for stored in tensors.stored.values())
    return torch.bfloat16 if exact else torch.float32


def _make(out: Path, room: int) -> Path:
    folder = out.with_name(f"{out.name}.partial.{secrets.token_hex(4)}")
    out.parent.mkdir(parents=True, exist_ok=True)
    check_room(out, room)
    (folder / "scratch").mkdir(parents=True)
    return folder


def _allocate(model: nn.Module, scratch: Path) -> None:
    """Give every tensor of a model on the meta device its memory: this rank's rows, in a file."""
    world = torch.distributed.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    for path, module in model.named_modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            shape, _ = compute_local_shape_and_global_offset(parameter.shape, mesh, [Shard(0)])
            file = scratch / f"{path}.{name}.{mesh.get_rank()}"
            local = _in_file(file, tuple(shape), parameter.dtype)
            sharded = DTensor.from_local(
                local, mesh, [Shard(0)], run_check=False, shape=parameter.shape, stride=parameter.stride()
            )
            setattr(module, name, nn.Parameter(sharded, requires_grad=False))
        for name, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, name, torch.empty_like(buffer, device="cpu"))


def _in_file(file: Path, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    size = torch.Size(shape).numel()
    if size == 0:
        return torch.empty(shape, dtype=dtype)
    with open(file, "wb") as stream:
        try:
            # A write into memory that finds no room on the disk kills the process, without a word.
            os.posix_fallocate(stream.fileno(), 0, size * dtype.itemsize)
        except OSError as error:
            raise OSError(error.errno, f"{file} of {size * dtype.itemsize:,} bytes: {error.strerror}") from error
    return torch.from_file(str(file), shared=True, size=size, dtype=dtype).view(shape)


def _describe(partial: Path, source: Source, config: Config) -> None:
    (partial / "config.yaml").write_text(config_to_yaml(config), encoding="utf-8")
    keep_source(source, partial / FOLDER)
    if (source.folder / "tokenizer.json").is_file():
        read_tokenizer(source.folder).save(partial / "tokenizer")


def _digest(partial: Path) -> str | None:
    return read_tokenizer(partial / "tokenizer").digest.hex() if (partial / "tokenizer").is_dir() else None


def _publish(partial: Path, out: Path) -> None:
    shutil.rmtree(partial / "scratch")
    partial.rename(out)
