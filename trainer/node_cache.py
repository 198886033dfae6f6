"""Things that are built once per node and then shared by every process and every later run.

One process takes a file lock and builds into a folder beside the wanted one, which a rename then puts in place: the
wanted folder is either whole or absent, also after a kill. The others wait for the lock and find it there. A build that
fails releases the lock, so each waiting process meets the same error instead of waiting for ever.
"""

import fcntl
import hashlib
import json
import logging
import os
import shutil
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

logger = logging.getLogger(__name__)


def cache_key(parts: object) -> str:
    """A folder name for JSON-able `parts`; any change in them gives another one."""
    return hashlib.blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=16).hexdigest()


def build_once(folder: Path, build: Callable[[Path], None], check: Callable[[Path], None]) -> None:
    """Make `folder` exist and be sound.

    build(empty folder) fills it; check(folder) raises ValueError or OSError where it is damaged (a damaged folder is
    built anew, with a warning). Errors of `build` pass through, and leave nothing behind."""
    if _is_sound(folder, check):
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _locked(folder.with_name(folder.name + ".lock")):
        if not _is_sound(folder, check):
            _build(folder, build)


def _build(folder: Path, build: Callable[[Path], None]) -> None:
    # Only this node's leftovers: where a shared file system has no locks, another node may be building now.
    prefix = f"{folder.name}.building-{socket.gethostname()}-"
    for leftover in folder.parent.glob(f"{prefix}*"):
        shutil.rmtree(leftover, ignore_errors=True)
    building = folder.with_name(f"{prefix}{os.getpid()}")
    building.mkdir()
    try:
        build(building)
        if folder.exists():
            shutil.rmtree(folder)
        building.rename(folder)
    finally:
        shutil.rmtree(building, ignore_errors=True)


def _is_sound(folder: Path, check: Callable[[Path], None]) -> bool:
    if not folder.is_dir():
        return False
    try:
        check(folder)
    except (ValueError, OSError) as error:
        logger.warning("The cache %s is damaged and is built again: %s", folder, error)
        return False
    return True


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with open(path, "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # released by the kernel when the process dies
        yield
