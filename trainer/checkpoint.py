"""Checkpoints of a sharded run: saved by every rank at once, verified when read, loadable into any layout.

Tensors go through torch.distributed.checkpoint: each rank writes its own shards (replicated tensors are divided among
their owners), and each rank reads the parts that its own layout needs. Nobody ever holds the whole model.
`checkpoint_files` says what the directory looks like and why a kill at any moment leaves a usable one.

A background save copies this rank's shards to host memory before `save` returns; only files are written behind
training's back. At most one save is on its way; its error is raised by the next `save`, `wait` or `close`, on every
rank together. `failed` tells of it before: the loop asks at every step.
"""

import json
import shutil
import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as load_tensors
from torch.distributed.checkpoint.state_dict_saver import save as save_tensors

from moe.linear_maps import local
from trainer import checkpoint_files as files
from trainer import train_state
from trainer.checkpoint_files import CheckpointReader, CheckpointWriter, IncompleteCheckpointError, Manifest
from trainer.config import CheckpointConfig
from trainer.peers import Peers
from trainer.resume import note_way_back, resolve_resume
from trainer.rng import capture_rng, reseed_rng, restore_rng

_RNG = "rng."


@dataclass(frozen=True)
class StoredCheckpoint:
    """A complete checkpoint on disk. `extra` is what the loop stored beside the tensors."""

    path: Path
    step: int
    world_size: int
    extra: dict[str, Any]


class Checkpointer:
    """Saves and loads the checkpoints of one run. Every rank makes one and calls the same methods in the same order.

    Args:
        folder: the run's `checkpoints/`, on a file system that all nodes share.
        seed: reseeds the random generators of a run that continues on another number of ranks.
        timeout_seconds: how long ranks wait for the slowest one's disk.
        notify: prints one line for the user; called on rank 0 only.
    """

    def __init__(
        self,
        folder: str | Path,
        config: CheckpointConfig,
        *,
        seed: int = 0,
        timeout_seconds: float = 1800,
        notify: Callable[[str], None] = print,
    ) -> None:
        self.folder = Path(folder)
        self.last_step: int | None = None
        self._config = config
        self._seed = seed
        self._peers = Peers(timeout_seconds)
        self._notify = notify if self._peers.rank == 0 else _silent
        self._staging = train_state.Staging()
        self._thread = ThreadPoolExecutor(1, "checkpoint", initializer=_use_device, initargs=(_current_device(),))
        self._pending: Future[None] | None = None
        self._loading: Path | None = None
        expect_one_process()

    # ---- saving

    def save(
        self, step: int, model: nn.Module, optimizer: torch.optim.Optimizer | None, extra: Mapping[str, Any]
    ) -> None:
        """Save under `step_<step>`. With `checkpoint.asynchronous` the files are written in the background.

        Args:
            extra: JSON-able; rank 0's is stored. Read back by `load` and `open_checkpoint`.

        Raises:
            RuntimeError: this save, or the one before it, failed (full disk, permissions, ...). The checkpoints that
                were complete before are as they were.
            ValueError: the state cannot be stored.
        """
        self.wait()
        tensors = self._collect(model, optimizer)
        job = _Job(step, tensors, _to_json(extra), type(optimizer).__name__ if optimizer else None)
        if not self._config.asynchronous:
            self._write(job)
            return
        job.tensors = self._staging.copy(tensors)
        self._pending = self._thread.submit(self._write, job)

    @property
    def failed(self) -> bool:
        """Whether the save that was on its way has failed on this rank; `wait` then raises why. Costs nothing."""
        pending = self._pending
        return pending is not None and pending.done() and pending.exception() is not None

    def wait(self) -> None:
        """Return when nothing is on its way to disk. Raises what a background save raised."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def close(self) -> None:
        """Finish the save that is on its way and give back memory and thread."""
        try:
            self.wait()
        finally:
            self._thread.shutdown()
            self._staging.release()
            self._peers.close()

    def _collect(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, Tensor]:
        tensors = train_state.model_tensors(model)
        if optimizer is not None:
            tensors |= train_state.optimizer_tensors(model, optimizer)
        return tensors | {f"{_rng_prefix(self._peers.rank)}{name}": value for name, value in capture_rng().items()}

    def _write(self, job: "_Job") -> None:
        partial = self.folder / "not begun"
        try:
            partial, step = self._peers.from_rank0(lambda: (self._begin(job.step), job.step))
            with self._peers.together():
                _check_step(job.step, step)
            written = self._write_tensors(partial, job.tensors)
            self._peers.from_rank0(lambda: self._finish(partial, job, written))
        except Exception as error:
            # Before what there is of it goes, which makes room.
            hint = _room_hint(self.folder, job)
            if self._peers.rank == 0:
                shutil.rmtree(partial, ignore_errors=True)
            raise RuntimeError(
                f"the checkpoint of step {job.step} was not saved in {self.folder}: {error}. {hint}"
                f"Checkpoints saved before are as they were (last of this process: step {self.last_step})."
            ) from error
        self.last_step = job.step

    def _begin(self, step: int) -> Path:
        self.folder.mkdir(parents=True, exist_ok=True)
        partial = self.folder / files.partial_name(step)
        partial.mkdir()
        return partial

    @torch.no_grad()
    def _write_tensors(self, partial: Path, tensors: dict[str, Tensor]) -> dict[str, list[int]]:
        """Write and fsync this rank's shards. Returns, on rank 0, sizes and checksums of every rank's files."""
        writer = CheckpointWriter(partial)
        planner = DefaultSavePlanner(flatten_state_dict=False)
        with _plain_errors():
            save_tensors(tensors, storage_writer=writer, planner=planner, process_group=self._peers.group)
        return {name: record for written in self._peers.gather(writer.files) for name, record in written.items()}

    def _finish(self, partial: Path, job: "_Job", written: dict[str, list[int]]) -> None:
        written[files.EXTRA] = files.write_durably(partial / files.EXTRA, job.extra)
        files.write_manifest(partial, Manifest(job.step, self._peers.size, job.optimizer, written))
        files.publish(partial, self.folder / files.step_name(job.step))
        protected = [self._loading] if self._loading else []
        files.retain(self.folder, self._config.keep_last, protected, self._notify)

    # ---- loading

    def latest(self) -> Path | None:
        """The checkpoint to continue from, or None. Rank 0 looks; every rank gets its answer."""
        return self._peers.from_rank0(lambda: files.latest_checkpoint(self.folder, self._notify))

    def resume_path(self, words: Sequence[str] | None = None) -> Path | None:
        """The step directory that `checkpoint.resume` (auto | never | PATH) means for this run. Collective.

        Args:
            words: as for `resolve_resume`.
        Raises: FileNotFoundError, IncompleteCheckpointError: PATH names no usable checkpoint.
        """
        resume, folder = self._config.resume, self.folder
        return self._peers.from_rank0(lambda: resolve_resume(resume, folder, self._notify, words=words))

    def began(self, words: Sequence[str]) -> None:
        """What `resume_path` gave to a training of these words is loaded: it need not be taken again. Collective."""
        resume, folder = self._config.resume, self.folder
        if said := self._peers.from_rank0(lambda: note_way_back(resume, folder, words)):
            self._notify(said)

    def load(self, path: str | Path, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
        """Fill model, optimizer and random generators from a checkpoint of any layout; returns its `extra`.

        The model has memory already, and is sharded as this run wants it. Optimizer state that the checkpoint does
        not have (a parameter never stepped) is absent afterwards, too. After an error the model is not usable.

        Raises:
            ValueError: tensors missing, unexpected, of another shape or dtype; another optimizer.
            IncompleteCheckpointError, FileNotFoundError: no checkpoint, or a damaged one.
        """
        self._loading = self._peers.from_rank0(lambda: files.find_checkpoint(path, self._notify))
        try:
            return self._load(self._loading, model, optimizer)
        finally:
            self._loading = None

    def load_weights(self, path: str | Path, model: nn.Module) -> dict[str, Any]:
        """Fill the model alone (checkpoint.init_from), casting where its dtypes differ; returns the `extra`."""
        folder = self._peers.from_rank0(lambda: files.find_checkpoint(path, self._notify))
        manifest = self._peers.from_rank0(lambda: files.read_manifest(folder))
        with self._peers.together():
            _verify(folder, manifest, self._peers)
        with self._peers.together():
            _read_weights(folder, model)
        return self._peers.from_rank0(lambda: _read_extra(folder))

    def _load(self, folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
        manifest = self._peers.from_rank0(lambda: files.read_manifest(folder))
        with self._peers.together():
            _check_optimizer(folder, manifest, optimizer)
            _verify(folder, manifest, self._peers)
        with self._peers.together():
            _read_state(folder, model, optimizer)
            self._restore_rng(folder, manifest)
        self.last_step = manifest.step
        return self._peers.from_rank0(lambda: _read_extra(folder))

    def _restore_rng(self, folder: Path, manifest: Manifest) -> None:
        rank, size = self._peers.rank, self._peers.size
        if manifest.world_size != size:
            reseed_rng(self._seed, manifest.step, rank)
            self._notify(
                f"{folder} was written by {manifest.world_size} ranks, now there are {size}: random generators are "
                f"seeded anew from seed {self._seed}, step {manifest.step} and the rank"
            )
            return
        reader = CheckpointReader(folder)
        prefix = _rng_prefix(rank)
        states = {
            name: torch.empty(saved.size, dtype=torch.uint8)
            for name, saved in reader.read_metadata().state_dict_metadata.items()
            if name.startswith(prefix) and isinstance(saved, TensorStorageMetadata)
        }
        _read_tensors(reader, states)
        restore_rng({name.removeprefix(prefix): state for name, state in states.items()})


@dataclass
class _Job:
    step: int
    tensors: dict[str, Tensor]
    extra: bytes
    optimizer: str | None


def _room_hint(folder: Path, job: _Job) -> str:
    """What to do if the file system has less room than one rank's part takes: writers of files do not always say so."""
    try:
        free = shutil.disk_usage(folder).free
    except OSError:
        return ""
    needed = sum(local(tensor).nbytes for tensor in job.tensors.values())
    if free >= needed:
        return ""
    return (
        f"The file system is full ({free / 2**20:,.0f} MiB are left, a rank's part takes {needed / 2**20:,.0f}): make "
        "room, or keep fewer checkpoints (checkpoint.keep_last), and go on with the same run.id. "
    )


# ---- one process without torch.distributed: generating, evaluating, converting


def open_checkpoint(path: str | Path, notify: Callable[[str], None] = print) -> StoredCheckpoint:
    """Look into a checkpoint (a step folder, or the latest of a run folder) without reading tensors. Not collective.

    Raises: FileNotFoundError, IncompleteCheckpointError
    """
    folder = files.find_checkpoint(path, notify)
    manifest = files.check_sizes(folder)
    return StoredCheckpoint(folder, manifest.step, manifest.world_size, _read_extra(folder))


def load_weights(path: str | Path, model: nn.Module) -> dict[str, Any]:
    """Fill a model in a single process (no torchrun) from a checkpoint of any layout; returns its `extra`.

    Raises: ValueError, FileNotFoundError, IncompleteCheckpointError as `Checkpointer.load`.
    """
    folder = files.find_checkpoint(path)
    files.check_content(folder, files.read_manifest(folder))
    _read_weights(folder, model)
    return _read_extra(folder)


def _check_step(mine: int, of_rank0: int) -> None:
    """Shards of two steps would be a checkpoint that nobody could tell from a good one."""
    if mine != of_rank0:
        raise RuntimeError(f"this rank saves step {mine}, and rank 0 step {of_rank0}: they must be at the same one")


# ---- steps of a load, without collectives


def _verify(folder: Path, manifest: Manifest, peers: Peers) -> None:
    try:
        files.check_content(folder, manifest, peers.rank, peers.size)
    except IncompleteCheckpointError as error:
        raise IncompleteCheckpointError(f"{error}. Continue from an older one with checkpoint.resume=PATH") from error


def _check_optimizer(folder: Path, manifest: Manifest, optimizer: torch.optim.Optimizer | None) -> None:
    if optimizer is not None and manifest.optimizer != type(optimizer).__name__:
        raise ValueError(
            f"{folder} has the state of optimizer {manifest.optimizer}, this run uses {type(optimizer).__name__}: "
            "set optim.name back, or start from its weights alone with checkpoint.init_from"
        )


def _read_state(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
    reader = CheckpointReader(folder)
    metadata = reader.read_metadata()
    tensors = train_state.model_tensors(model)
    train_state.check_names(tensors, metadata, train_state.MODEL, same_dtype=True)
    if optimizer is not None:
        saved = train_state.saved_optimizer_state(metadata)
        tensors |= train_state.allocate_optimizer_state(model, optimizer, saved)
    _read_tensors(reader, tensors)


def _read_weights(folder: Path, model: nn.Module) -> None:
    reader = CheckpointReader(folder)
    tensors = train_state.model_tensors(model)
    train_state.check_names(tensors, reader.read_metadata(), train_state.MODEL, same_dtype=False)
    _read_tensors(reader, tensors)


@torch.no_grad()
def _read_tensors(reader: CheckpointReader, tensors: dict[str, Tensor]) -> None:
    """Fill `tensors` in place. Each rank reads on its own: what it needs is in its layout and the metadata."""
    expect_one_process()
    with _plain_errors():
        load_tensors(tensors, storage_reader=reader, planner=DefaultLoadPlanner(flatten_state_dict=False), no_dist=True)


def _read_extra(folder: Path) -> dict[str, Any]:
    return json.loads((folder / files.EXTRA).read_bytes())


def _to_json(extra: Mapping[str, Any]) -> bytes:
    try:
        return json.dumps(dict(extra), indent=1).encode()
    except (TypeError, ValueError) as error:
        raise ValueError(f"the extra state of a checkpoint must be JSON-able: {error}") from error


@contextmanager
def _plain_errors() -> Generator[None, None, None]:
    """CheckpointException is no Exception and carries a traceback per rank: say which rank failed, and of what."""
    try:
        yield
    except CheckpointException as error:
        failures = sorted(error.failures.items())
        raise RuntimeError("; ".join(f"rank {rank}: {failure[0]}" for rank, failure in failures)) from error


def expect_one_process() -> None:
    """Keep torch from warning that a process reads a checkpoint on its own: it is meant to."""
    warnings.filterwarnings("ignore", message="torch.distributed is disabled", module="torch.distributed")


def _rng_prefix(rank: int) -> str:
    return f"{_RNG}{rank:06d}."


def _current_device() -> int | None:
    return torch.cuda.current_device() if torch.cuda.is_available() else None


def _use_device(device: int | None) -> None:
    # A thread starts on GPU 0: without this every rank would make a context there.
    if device is not None:
        torch.cuda.set_device(device)


def _silent(_: str) -> None:
    pass
