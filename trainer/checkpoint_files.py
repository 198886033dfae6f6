"""The directory of a checkpoint: how it comes to be, and how it is told from a broken one.

    checkpoints/
      step_00000100/            complete: has a manifest, and every file that it lists at its size and checksum
        manifest.json           written last; says itself which bytes it must have
        extra.json              data position, schedule, W&B run id, ...: whatever the loop needs, as JSON
        .metadata __0_0.distcp  tensors, in the format of torch.distributed.checkpoint, one file per rank
      step_00000200.partial.8f3a1c20/   a save that is going on, or was killed; cleared by the next save
      latest                    text: the name of the newest complete directory, or of the one that the run went back to
      went_back.json            the last time that it did (trainer/way_back.py)

Order of a save: every rank writes its file and fsyncs it -> rank 0 writes the manifest and fsyncs it -> the directory
is renamed -> `latest` is written to a temporary name, fsynced and renamed. A kill between any two of these leaves the
previous checkpoint, or the new one, complete and findable: what has no manifest yet is never read, whatever its name.

Checksums are CRC-32, taken by the writing rank while the bytes pass: against disks and copies that fail, not against
malice. (`.metadata` is a pickle: open only checkpoints that you trust.)
"""

import json
import os
import re
import shutil
import time
import zlib
from collections.abc import Callable, Collection, Generator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan

from trainer.way_back import read_note

MANIFEST = "manifest.json"
EXTRA = "extra.json"
LATEST = "latest"
FORMAT = 1
_STEP_FOLDER = re.compile(r"step_\d{8,}(\.partial\.[0-9a-f]+)?")
_SAVED = re.compile(r"step_\d{8,}")
_LEFTOVER = re.compile(r"step_\d{8,}\.(partial|deleting)\..*")
_BLOCK_BYTES = 1 << 23

Notify = Callable[[str], None]


class IncompleteCheckpointError(ValueError):
    """A directory that is not a complete checkpoint; the message says why."""


@dataclass(frozen=True)
class Manifest:
    """What a complete checkpoint consists of."""

    step: int
    # Ranks that wrote it; any number can read it.
    world_size: int
    # Class of the optimizer whose state is inside; null when there is none.
    optimizer: str | None
    # File name -> [size in bytes, CRC-32].
    files: dict[str, list[int]] = field(default_factory=dict)
    # Seconds since the epoch: which of two saves is newer, also after a run went back to an earlier step.
    time: float = field(default_factory=time.time)
    format: int = FORMAT


def step_name(step: int) -> str:
    """Directory name of a step: 100 -> step_00000100."""
    return f"step_{step:08d}"


# ---- writing


def write_durably(path: Path, data: bytes) -> list[int]:
    """Write a file so that after a crash it holds either its old or its new content, whole.

    Returns: its size and CRC-32, as a manifest lists them.
    """
    temporary = path.with_name(f"{path.name}.tmp")
    with open(temporary, "wb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(temporary, path)
    sync_folder(path.parent)
    return [len(data), zlib.crc32(data)]


def sync_folder(folder: Path) -> None:
    """Make names created in or renamed into a directory survive a crash."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest with its own checksum: the act that makes `folder` complete."""
    body = json.dumps(asdict(manifest), sort_keys=True)
    text = json.dumps({"crc32": zlib.crc32(body.encode()), "manifest": body}, indent=1)
    write_durably(folder / MANIFEST, text.encode())


def partial_name(step: int) -> str:
    """Directory name of a save that goes on: new each time, so that no other process writes into it."""
    return f"{step_name(step)}.partial.{os.urandom(4).hex()}"


def publish(partial: Path, final: Path) -> None:
    """Give a finished save its name, then move `latest` to it. A save of the same step made earlier is replaced."""
    doomed = _set_aside(final) if final.exists() else None
    os.rename(partial, final)
    sync_folder(final.parent)
    point_latest(final)
    if doomed:
        # What cannot be deleted now is tried again after the next save.
        shutil.rmtree(doomed, ignore_errors=True)


def point_latest(final: Path) -> None:
    """Make `latest` name a complete checkpoint that is beside it."""
    write_durably(final.parent / LATEST, f"{final.name}\n".encode())


def delete_checkpoint(folder: Path) -> None:
    """Delete a checkpoint; under another name first, so that a half-deleted one is never taken for a complete one."""
    shutil.rmtree(folder if ".deleting." in folder.name else _set_aside(folder))


def _set_aside(folder: Path) -> Path:
    doomed = folder.with_name(f"{folder.name}.deleting.{os.urandom(4).hex()}")
    os.rename(folder, doomed)
    return doomed


class _ChecksumStream:
    """A binary file opened for writing that knows the CRC-32 of what went through it."""

    def __init__(self, stream: IO[bytes]) -> None:
        self.stream = stream
        self.crc32 = 0
        self.size = 0

    def write(self, data: Any) -> int:
        self.crc32 = zlib.crc32(data, self.crc32)
        self.size += memoryview(data).nbytes
        return self.stream.write(data)

    def tell(self) -> int:
        return self.size

    def flush(self) -> None:
        self.stream.flush()

    def fileno(self) -> int:
        self.stream.flush()
        return self.stream.fileno()

    def close(self) -> None:
        self.stream.close()


class _ChecksumFileSystem(FileSystem):
    """Local files as torch.distributed.checkpoint wants them, with sizes and checksums noted on the way."""

    def __init__(self) -> None:
        self.files: dict[str, list[int]] = {}

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Generator[Any, None, None]:
        try:
            with open(path, mode) as raw:
                stream = _ChecksumStream(raw)
                yield stream
                self.files[Path(path).name] = [stream.size, stream.crc32]
        except OSError as error:
            # What a full disk raises on a write does not say which file it was.
            raise OSError(error.errno, error.strerror, error.filename or str(path)) from error

    def rename(self, path: Any, new_path: Any) -> None:
        super().rename(path, new_path)
        self.files[Path(new_path).name] = self.files.pop(Path(path).name)


class CheckpointWriter(FileSystemWriter):
    """One file per rank, fsynced, into a directory that rank 0 has made. `files`: what this rank wrote."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, single_file_per_rank=True, sync_files=True)
        self.fs = _ChecksumFileSystem()

    @property
    def files(self) -> dict[str, list[int]]:
        """Size and checksum of every file written, by name."""
        return self.fs.files

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Wait until this node sees the folder that rank 0 made."""
        folder = Path(self.path)
        # Network file systems may show a new directory to other nodes only after a while.
        for _ in range(100):
            if folder.is_dir():
                return super().prepare_local_plan(plan)
            time.sleep(0.1)
        raise FileNotFoundError(
            f"{folder} was made by rank 0 and is not seen here: run.root must be on a file system that all nodes share"
        )


class CheckpointReader(FileSystemReader):
    """Reads the tensors of a checkpoint; parses its metadata once."""

    _metadata: Metadata | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The metadata, read once."""
        if self._metadata is None:
            self._metadata = super().read_metadata(*args, **kwargs)
        return self._metadata


# ---- reading


def read_manifest(folder: Path) -> Manifest:
    """Raises: IncompleteCheckpointError if the directory has no manifest, or one that is damaged."""
    path = folder / MANIFEST
    try:
        outer = json.loads(path.read_bytes())
        intact = zlib.crc32(outer["manifest"].encode()) == outer["crc32"]
        fields = json.loads(outer["manifest"]) if intact else {}
    except FileNotFoundError:
        raise IncompleteCheckpointError(f"{folder} is no complete checkpoint: it has no {MANIFEST}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise IncompleteCheckpointError(f"{path} is damaged ({error})") from None
    if not intact:
        raise IncompleteCheckpointError(f"{path} is damaged (checksum)")
    if fields.get("format") != FORMAT:
        raise IncompleteCheckpointError(f"{path} has format {fields.get('format')}; this version reads {FORMAT}")
    return Manifest(**fields)


def check_sizes(folder: Path) -> Manifest:
    """The manifest of a directory whose files are all there at the right size (their content is not read).

    Raises: IncompleteCheckpointError
    """
    manifest = read_manifest(folder)
    for name, (size, _) in manifest.files.items():
        try:
            found = (folder / name).stat().st_size
        except FileNotFoundError:
            raise IncompleteCheckpointError(f"{folder} lacks the file {name}") from None
        if found != size:
            raise IncompleteCheckpointError(f"{folder / name} has {found} bytes instead of {size}")
    return manifest


def check_content(folder: Path, manifest: Manifest, share: int = 0, shares: int = 1) -> None:
    """Compare checksums. Reader `share` of `shares` takes every `shares`-th file, so each byte is read once.

    Raises: IncompleteCheckpointError
    """
    for name in sorted(manifest.files)[share::shares]:
        path = folder / name
        if not path.is_file():
            raise IncompleteCheckpointError(f"{folder} lacks the file {name}")
        if _file_crc32(path) != manifest.files[name][1]:
            raise IncompleteCheckpointError(f"{path} is damaged: its checksum is not the one of what was written")


def _file_crc32(path: Path) -> int:
    crc32 = 0
    with open(path, "rb", buffering=0) as stream:
        while block := stream.read(_BLOCK_BYTES):
            crc32 = zlib.crc32(block, crc32)
    return crc32


def complete_checkpoints(folder: Path, notify: Notify) -> list[tuple[Path, Manifest]]:
    """Complete checkpoints of `checkpoints/`, in the order of saving, but those that the run left by going back first.

    What is not complete is named through `notify`.
    """
    note = read_note(folder)
    found: list[tuple[Path, Manifest]] = []
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        if not _STEP_FOLDER.fullmatch(path.name):
            continue
        try:
            found.append((path, check_sizes(path)))
        except IncompleteCheckpointError as error:
            notify(f"checkpoint ignored: {error}")

    def age(item: tuple[Path, Manifest]) -> tuple[bool, float, int]:
        path, manifest = item
        left = note is not None and note.is_left(path.name, manifest.time)
        return not left, manifest.time, manifest.step

    return sorted(found, key=age)


def latest_checkpoint(folder: Path, notify: Notify = print) -> Path | None:
    """The checkpoint that `latest` names, or (said through `notify`) the newest complete one where it names none."""
    if pointed := _pointed(folder):
        try:
            check_sizes(pointed)
            return pointed
        except IncompleteCheckpointError as error:
            notify(f"{folder / LATEST} names {pointed.name!r}, which cannot be used: {error}")
    complete = complete_checkpoints(folder, notify)
    if not complete:
        return None
    notify(f"using {complete[-1][0]}, the newest complete checkpoint")
    return complete[-1][0]


def refuse_to_forget(folder: Path) -> None:
    """Whoever has saved is not to begin anew because a disk has failed: for a run that found nothing to go on from.

    Raises:
        IncompleteCheckpointError: there are checkpoints, so none of them can be used.
    """
    broken = [path.name for path in sorted(folder.iterdir()) if _SAVED.fullmatch(path.name)] if folder.is_dir() else []
    if broken:
        raise IncompleteCheckpointError(
            f"{folder} has {', '.join(broken)}, and none can be used (why is told above): put them right, begin again "
            "under another run.id, or move them away"
        )


def _pointed(folder: Path) -> Path | None:
    pointer = folder / LATEST
    name = pointer.read_text(errors="replace").strip() if pointer.is_file() else ""
    return folder / name if _STEP_FOLDER.fullmatch(name) else None


def find_checkpoint(path: str | Path, notify: Notify = print) -> Path:
    """The step directory meant by a path: itself, or the latest one of a run folder or of its `checkpoints/`.

    Raises:
        FileNotFoundError: nothing there that is a checkpoint.
        IncompleteCheckpointError: a step directory that is not complete.
    """
    path = Path(path)
    if not path.is_dir():
        raise FileNotFoundError(f"{path} is not a directory: give a step folder, a checkpoints folder or a run folder")
    if (path / MANIFEST).exists() or _STEP_FOLDER.match(path.name):
        check_sizes(path)
        return path
    for folder in (path / "checkpoints", path):
        if found := latest_checkpoint(folder, notify):
            return found
    raise FileNotFoundError(f"no complete checkpoint in {path} or {path / 'checkpoints'}")


def retain(folder: Path, keep_last: int, protected: Collection[Path], notify: Notify) -> None:
    """Delete all but the `keep_last` newest complete checkpoints, and what killed saves left behind.

    The one that `latest` names, the one that the run went back to (a restart has its path on the command line) and the
    `protected` ones stay whatever their age; `keep_last` < 1 keeps all. A directory that cannot be deleted is reported
    and left: that is no reason to stop a run.
    """
    note = read_note(folder)
    kept = {*protected, _pointed(folder), folder / note.to if note else None}
    complete = [path for path, _ in complete_checkpoints(folder, _silent)]
    old = complete[: max(0, len(complete) - keep_last)] if keep_last > 0 else []
    leftovers = [path for path in folder.iterdir() if _LEFTOVER.fullmatch(path.name) and path not in complete]
    for path in [path for path in (*old, *leftovers) if path not in kept]:
        try:
            delete_checkpoint(path)
        except OSError as error:
            notify(f"cannot delete {path}: {error}")


def _silent(_: str) -> None:
    pass
