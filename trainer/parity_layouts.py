"""Layouts as values: which are legal, what they are called, which few of them cover all combinations of axes.

A layout here is a number of processes and a ParallelConfig whose sizes are settled. Its name says the sizes above 1:
`dp_shard=2 cp=4 ulysses=2 ep=2`; an axis is in use when its size is above 1. Context parallelism counts as two axes,
`ring` and `ulysses`, because they are two mechanisms.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import NamedTuple

from parallel.config import ParallelConfig
from parallel.sizes import resolve_sizes
from trainer.config import Config
from trainer.layout import check_layout
from trainer.schema import did_you_mean

SIZES = ("dp_replicate", "dp_shard", "cp", "ulysses", "tp", "ep", "etp")
AXES = ("dp_replicate", "dp_shard", "ring", "ulysses", "tp", "ep", "etp")


class Layout(NamedTuple):
    """So many processes, laid out like this."""

    num_processes: int
    parallel: ParallelConfig

    @property
    def name(self) -> str:
        """The sizes above 1, `tp=2 ep=2`."""
        sizes = [(name, getattr(self.parallel, name)) for name in SIZES]
        return " ".join(f"{name}={size}" for name, size in sizes if size > 1) or "one process"

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes in use, of AXES."""
        parallel = self.parallel
        sizes = {name: getattr(parallel, name) for name in SIZES} | {"ring": parallel.cp // parallel.ulysses}
        return tuple(axis for axis in AXES if sizes[axis] > 1)


def settle(config: Config, num_processes: int) -> Layout:
    """The layout of a config on a number of processes.

    Raises:
        ValueError: the sizes do not fit the processes or the model: fields, values, nearest legal ones.
    """
    parallel = resolve_sizes(config.parallel, num_processes)
    check_layout(config, parallel)
    return Layout(num_processes, parallel)


def legal_layouts(config: Config, num_processes: int) -> list[Layout]:
    """Every layout of `num_processes` that mesh and model allow, those with few axes first.

    Settings of `config.parallel` that are no sizes stay as they are.
    """
    found: list[Layout] = []
    for sizes in _products(num_processes):
        try:
            found.append(settle(with_sizes(config, sizes), num_processes))
        except ValueError:
            continue
    return sorted(found, key=lambda layout: len(layout.axes))


def with_sizes(config: Config, sizes: dict[str, int]) -> Config:
    """The config with these sizes of parallel axes and 1 for all others but dp_shard, which takes what is left."""
    others = dict.fromkeys(SIZES, 1) | {"dp_shard": -1}
    return replace(config, parallel=replace(config.parallel, **(others | sizes)))


def _products(num_processes: int) -> Iterator[dict[str, int]]:
    """Sizes whose product is the number of processes, with every degree that could be inside them."""
    divisors = [size for size in range(1, num_processes + 1) if num_processes % size == 0]
    for dp_replicate, dp_shard, cp, tp in itertools.product(divisors, repeat=4):
        if dp_replicate * dp_shard * cp * tp != num_processes:
            continue
        for ulysses, ep, etp in itertools.product(divisors, divisors, sorted({1, tp})):
            sizes = (dp_replicate, dp_shard, cp, ulysses, tp, ep, etp)
            yield dict(zip(SIZES, sizes, strict=True))


def parse_layouts(text: str) -> list[dict[str, int]]:
    """`[tp=2 ep=2,cp=2]` -> the sizes of each layout.

    Raises:
        ValueError: an axis that does not exist, or a size that is no number.
    """
    layouts = [_parse_layout(part) for part in text.strip().removeprefix("[").removesuffix("]").split(",")]
    if not all(layouts):
        raise ValueError(f"layouts={text}: an empty layout; write layouts='[tp=2 ep=2,cp=2]' or layouts=all")
    return layouts


def _parse_layout(text: str) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for word in text.split():
        key, _, value = word.removeprefix("parallel.").partition("=")
        if key not in SIZES:
            raise ValueError(f"layouts: {word}: no axis of that name{did_you_mean(key, SIZES)} ({', '.join(SIZES)})")
        if not value.isdecimal() or int(value) < 1:
            raise ValueError(f"layouts: {word}: a size must be a whole number from 1")
        if key in sizes:
            raise ValueError(f"layouts: {text.strip()}: {key} stands there twice; write a comma between two layouts")
        sizes[key] = int(value)
    return sizes


def smallest_world(sizes: dict[str, int]) -> int:
    """The fewest processes that the sizes of a layout need."""
    size = dict.fromkeys(SIZES, 1) | sizes
    others = size["cp"] * size["tp"]
    lent = others // math.gcd(others, size["etp"])
    # dp_shard lends whatever ranks of ep are missing.
    dp_shard = sizes.get("dp_shard", size["ep"] // math.gcd(size["ep"], lent))
    return size["dp_replicate"] * dp_shard * others


def nearest_sizes(
    sizes: dict[str, int], axes: Iterable[str], is_legal: Callable[[dict[str, int]], bool], most: int
) -> list[dict[str, int]]:
    """Of each axis the nearest size below and above, up to `most`, with which the layout is legal."""
    found: list[dict[str, int]] = []
    for axis in axes:
        now = sizes.get(axis, 1)
        for values in (range(min(now - 1, most), 0, -1), range(now + 1, most + 1)):
            candidates = (_with_size(sizes, axis, value) for value in values)
            found += itertools.islice(filter(is_legal, filter(None, candidates)), 1)
    return found


# An axis and one that is a part of it: where both have the same size they change together.
_TOGETHER = {"tp": "etp", "cp": "ulysses", "ulysses": "cp"}


def _with_size(sizes: dict[str, int], axis: str, value: int) -> dict[str, int]:
    """The sizes above 1 after a change of one axis, and of the one that goes with it."""
    other = _TOGETHER.get(axis, axis)
    follows = {other: value} if sizes.get(axis, 1) > 1 and sizes.get(other) == sizes.get(axis) else {}
    changed = sizes | {axis: value} | follows
    return {name: changed[name] for name in SIZES if changed.get(name, 1) > 1}


def own_and_single_layouts(parallel: ParallelConfig, most: int = 8) -> list[dict[str, int]]:
    """A run's own layout with every size in use cut to 2 (and to `most` processes), and each of its axes alone."""
    own = {name: 2 for name in SIZES if getattr(parallel, name) != 1}
    if "ep" in own and "dp_shard" in own:
        # Twice the ranks of ep, so that ranks share experts as they do at scale.
        own["dp_shard"] = 4
    while smallest_world(own) > most and own.get("dp_shard", 1) > 1:
        own["dp_shard"] //= 2
    if smallest_world(own) > most:
        own.pop("dp_replicate", None)
    alone = [{name: 2} | ({"cp": 2} if name == "ulysses" else {"tp": 2} if name == "etp" else {}) for name in own]
    return [own, *alone]


def covering(layouts: Iterable[Layout]) -> list[Layout]:
    """A few of the layouts that together have every axis and every pair of axes that is in any of them."""
    pool = list(layouts)
    missing = {pair for layout in pool for pair in _pairs(layout)}
    chosen: list[Layout] = []
    while missing:
        # Most new pairs; among equals the fewest processes, then the first.
        best = max(pool, key=lambda layout: (len(missing & _pairs(layout)), -layout.num_processes))
        chosen.append(best)
        missing -= _pairs(best)
    return chosen


def _pairs(layout: Layout) -> set[tuple[str, ...]]:
    parallel, axes = layout.parallel, layout.axes
    # Whole experts are a way of their own to have them under tensor parallelism.
    axes = (*axes, "etp=1") if parallel.tp > 1 and parallel.etp == 1 else axes
    return {*itertools.combinations(axes, 1), *itertools.combinations(axes, 2)}
