"""How the fused kernels cut their work: a few candidates for each, the best of them for a shape, kept on disk.

    tile_for(kernel, shape)      what a launch takes: the chosen tile, else the first candidate. Never measures.
    choose_tiles(works, device)  measures, once per card, Triton, candidates and shape; at start, before the first step

The choice is a file, `tiles.json` in the user's cache folder ($SLUICEGATE_CACHE, else $XDG_CACHE_HOME/sluicegate, else
~/.cache/sluicegate). A node's processes take turns: the first measures, the others find its choice. So all of a node,
and every later run, cut the same way, and the same numbers come out; tiles may differ in the last bits of a sum.
"""

import fcntl
import json
import logging
import os
import statistics
import tempfile
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, cast

import torch

logger = logging.getLogger(__name__)

ROUNDS, REPEATS = 3, 4


class Tile(NamedTuple):
    """How a kernel cuts its work: rows, columns and depth of a block, warps, loads in flight."""

    m: int
    n: int
    k: int
    warps: int
    stages: int
    # Tiles of M next to each other in time, which share blocks of B in L2.
    group: int = 4
    # Parts of the columns, 1 or 2, that an epilogue takes one after the other, to stay within the registers.
    parts: int = 1
    # up and down on SM90 by warps with one thing to do each (moe/kernels/warps_sm90.py), which know one cut, 128 x 256,
    # 64 deep, and take only `group` from here; the rest is for the other kernel, where these cannot be.
    specialized: bool = False


# The first of each is the best over all shapes measured on an H200. Of weight gradients the other one was as good or
# better on 4 of 14; for the rest, groups of 4 and 8 won in turns on seven shapes, and nothing else did (docs/LOG.md).
# Specialised are those that share no multiprocessor with what runs beside: the others lose more by that than they gain.
CANDIDATES: dict[str, tuple[Tile, ...]] = {
    "up": (Tile(128, 128, 64, 8, 3, group=8, parts=2, specialized=True),),
    "down": (Tile(128, 256, 64, 8, 3, group=8, specialized=True),),
    "act_grad": (Tile(128, 256, 64, 8, 3, group=8),),
    "up_grad": (Tile(128, 256, 64, 8, 3, group=8),),
    "weight_grad": (Tile(128, 256, 64, 8, 3, group=8), Tile(128, 256, 32, 8, 5)),
}

# Experts, then the two dims of the product.
Shape = tuple[int, int, int]
# What to measure: one launch of the kernel, which asks `tile_for` like any other.
Work = Callable[[], object]

_chosen: dict[tuple[str, Shape], Tile] = {}


def tile_for(kernel: str, shape: Shape) -> Tile:
    """The tile chosen for this kernel and shape, else the kernel's first candidate."""
    return _chosen.get((kernel, shape), CANDIDATES[kernel][0])


def choose_tiles(
    works: Mapping[tuple[str, Shape], Work],
    device: str,
    milliseconds: Callable[[Work], float] | None = None,
) -> dict[tuple[str, Shape], Tile]:
    """Find the tile of each work in the cache, or measure its candidates and put the best there.

    A kernel with one candidate has nothing to choose: it is not launched.

    Args:
        works: by kernel and shape.
        device: what tells cards and software apart; a choice is good for one of them.
        milliseconds: measures a call; events on the current GPU unless given.

    Returns:
        the choices made, which `tile_for` tells from now on.
    """
    measure = milliseconds or _milliseconds
    works = {work: launch for work, launch in works.items() if len(CANDIDATES[work[0]]) > 1}
    if not works:
        return {}
    path = cache_folder() / "tiles.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    with _locked(path.with_suffix(".lock")):
        known = _read(path)
        found = {work: _known_tile(known, device, *work) for work in works}
        missing = [work for work, tile in found.items() if tile is None]
        for kernel, shape in missing:
            found[kernel, shape] = best = _fastest(kernel, shape, works[kernel, shape], measure)
            known[_key(device, kernel, shape)] = list(best)
        if missing:
            _write(path, known)
            logger.info("Chose tiles of %d products for %s; kept in %s", len(missing), device, path)
    choices = {work: tile for work, tile in found.items() if tile is not None}
    _chosen.update(choices)
    return choices


def cache_folder() -> Path:
    """Where choices are kept."""
    if folder := os.environ.get("SLUICEGATE_CACHE"):
        return Path(folder)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "sluicegate"


def _key(device: str, kernel: str, shape: Shape) -> str:
    return f"{device} | {kernel} | {' x '.join(map(str, shape))}"


def _known_tile(known: Mapping[str, object], device: str, kernel: str, shape: Shape) -> Tile | None:
    """None where nothing is known, or what is known is no candidate (any more)."""
    values = known.get(_key(device, kernel, shape))
    return next((tile for tile in CANDIDATES[kernel] if values == list(tile)), None)


def _read(path: Path) -> dict[str, object]:
    """A file that is damaged counts as empty: a choice costs seconds."""
    try:
        known = json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        logger.warning("%s is damaged (%s); tiles are measured again", path, error)
        return {}
    return cast(dict[str, object], known) if isinstance(known, dict) else {}


def _write(path: Path, known: Mapping[str, object]) -> None:
    """Whole or not at all."""
    with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=path.name, delete=False) as file:
        file.write(json.dumps(known, indent=1, sort_keys=True) + "\n")
    os.replace(file.name, path)


def _fastest(kernel: str, shape: Shape, work: Work, milliseconds: Callable[[Work], float]) -> Tile:
    times: dict[Tile, float] = {}
    try:
        for tile in CANDIDATES[kernel]:
            _chosen[kernel, shape] = tile
            work()  # compiles
            times[tile] = statistics.median(milliseconds(work) for _ in range(ROUNDS))
    finally:
        del _chosen[kernel, shape]
    return min(times, key=times.__getitem__)


def _milliseconds(work: Work) -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()  # pyright: ignore[reportUnknownMemberType]
    for _ in range(REPEATS):
        work()
    end.record()  # pyright: ignore[reportUnknownMemberType]
    end.synchronize()
    return begin.elapsed_time(end) / REPEATS  # pyright: ignore[reportUnknownMemberType]


@contextmanager
def _locked(path: Path) -> Generator[None]:
    with open(path, "a") as file:
        # Released by the kernel when the process dies.
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
