"""Does a run fit? What it takes of each rank's memory, told before it starts, and what would help where it does not.

    python -m trainer.planner experiment=qwen3_30b_a3b parallel.ep=8 cluster=h200 --ranks 64

The estimate is made by trainer/memory_plan.py, of any layout, without starting it. Against the peaks in
benchmarks/train_*.json, of runs without checkpointing on one and two GPUs, it is within 2 %; nothing else has been
compared on GPUs, so it warns and never stops a run.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

import torch

from parallel.activation_checkpoint import MODES
from parallel.expert_parallel import NOT_WHILE_THEY_COMPUTE, expected_rows
from trainer.activations import Load
from trainer.compose import compose
from trainer.config import Config
from trainer.layout import fit_layout
from trainer.memory_plan import (
    GIB,
    HEADROOM,
    MARGIN,
    MemoryPlan,
    can_exchange,
    no_room,
    num_moe_layers,
    on_device,
    plan_memory,
    with_settings,
)
from trainer.meta_model import DTYPES
from trainer.validate import validate

AXES = ("dp_replicate", "dp_shard", "cp", "tp", "ep", "etp")
# Changes that are told, and the least part of the peak that one is worth telling for.
NUM_CHANGES, LEAST = 3, 0.02
# What the words of the table mean.
MEANINGS = {
    "weights": "parameters: this rank's share",
    "moments": "AdamW's two running averages of each weight",
    "exchange": "buffers through which rows travel (symm_mem, nvshmem)",
    "tp buffers": "through which tokens travel between tp ranks (async_tp=native)",
    "arena": "what layers keep of rows, in one piece (comms.saved_headroom)",
    "gradients": "summed over the ranks: this rank's share",
    "unreduced gradients": "of the blocks just done, whole, before ranks sum them up",
    "gathered weights": "of the blocks at work, whole, fetched from all ranks",
    "activations": "kept by the forward pass for the backward one, one micro-batch:",
    "block inputs": "from which blocks are computed again (activation checkpointing)",
    "attention": "queries, keys, values and output",
    "feed-forward": "dense layers, shared experts and their norms",
    "router": "its input",
    "rows": "tokens that came to this rank's experts",
    "experts": "what these keep of their rows",
    "products": "matrix products that are not computed again",
    "block at work": "what one block's backward needs besides",
    "head": "logits of one chunk of tokens, their gradients, the head's own",
}
READING = (
    "at the peak: everything at the moment when the sum is largest; at most: each part at its own worst moment",
    "peaks: at the loss; backward of a block (0 is the first); its reduction, when ranks sum up; end of backward",
)
# Where no card is named.
FITS = "whether that fits: add cluster=h100, or another one that configs/cluster/ knows, or cluster.memory_gib=N"


class Saving(NamedTuple):
    """A change of one setting, as it is written on the command line, and the bytes that the peak loses."""

    change: str
    saved: int


def describe_memory(config: Config, num_ranks: int, device: torch.device, backend: str) -> str:
    """What a run says before it starts; empty where there is no GPU, whose memory is not to be planned.

    Args:
        backend: what exchanges rows in this run (comms/backend.py).
    """
    if device.type != "cuda":
        return ""
    memory_gib = config.cluster.memory_gib
    if torch.cuda.is_available():
        memory_gib = memory_gib or torch.cuda.get_device_properties(device).total_memory / GIB
        config = on_device(config, device)
    if backend != "none":
        config = with_settings(config, {"comms.backend": backend})
    return describe(config, num_ranks, plan_memory(config, num_ranks), memory_gib)


def describe(config: Config, num_ranks: int, plan: MemoryPlan, memory_gib: float | None) -> str:
    """A line, and a warning where a device has less."""
    parts = ", ".join(f"{name} {size / GIB:.2f}" for name, size in plan.at_peak.items() if size)
    of = "" if memory_gib is None else f" of {memory_gib:.0f}"
    line = f"  memory  about {plan.peak / GIB:.1f}{of} GiB per rank at the peak ({plan.moment}): {parts}"
    warning = warn(config, num_ranks, plan, memory_gib)
    return f"{line}\n{warning}" if warning else line


def warn(config: Config, num_ranks: int, plan: MemoryPlan, memory_gib: float | None) -> str:
    """What is wrong and what would help most; empty where the plan fits."""
    if memory_gib is None or plan.peak <= MARGIN * memory_gib * GIB:
        return ""
    over = plan.peak > memory_gib * GIB
    what = "more than a device has" if over else "nearly all that a device has, and not everything is counted"
    found = savings(config, num_ranks, plan)
    if not found:
        return f"  warning: that is {what}, and no change of one setting helps"
    told = [
        f"{change} {saved / GIB:.1f} GiB{' (which fits)' if plan.peak - saved <= MARGIN * memory_gib * GIB else ''}"
        for change, saved in found
    ]
    return f"  warning: that is {what}; what saves most, each alone: {', '.join(told)}"


def savings(config: Config, num_ranks: int, plan: MemoryPlan) -> list[Saving]:
    """The changes of one setting that take most off the peak, each alone, all of them legal; the best one first."""
    best: dict[str, Saving] = {}
    for changes in _changes(config, num_ranks):
        changed = with_settings(config, changes)
        try:
            validate(changed)
            saved = plan.peak - plan_memory(changed, num_ranks).peak
        except ValueError:
            continue
        first = next(iter(changes))
        told = " ".join(f"{key}={_written(value)}" for key, value in changes.items())
        if first not in best or saved > best[first].saved:
            best[first] = Saving(told, saved)
    if config.parallel.dp_shard == -1:
        best["ranks"] = _more_ranks(config, num_ranks, plan)
    worth = [saving for saving in best.values() if saving.saved >= LEAST * plan.peak]
    return sorted(worth, key=lambda saving: -saving.saved)[:NUM_CHANGES]


def _more_ranks(config: Config, num_ranks: int, plan: MemoryPlan) -> Saving:
    try:
        more = plan_memory(config, 2 * num_ranks).peak
    except ValueError:
        more = plan.peak
    return Saving(f"{2 * num_ranks} ranks", plan.peak - more)


def _changes(config: Config, num_ranks: int) -> Iterator[dict[str, Any]]:
    """Settings that might take less memory."""
    sizes = fit_layout(config, num_ranks)
    for mode in MODES[MODES.index(sizes.activation_checkpoint) + 1 :]:
        yield {"parallel.activation_checkpoint": mode}
    if config.train.micro_batch_size > 1:
        yield {"train.micro_batch_size": config.train.micro_batch_size // 2}
    if not sizes.reshard_after_forward:
        yield {"parallel.reshard_after_forward": True}
    rest = {} if config.parallel.dp_shard == -1 else {"parallel.dp_shard": -1}
    if sizes.dp_replicate > 1:
        yield {"parallel.dp_replicate": 1} | rest
    if config.model.num_dense_layers < config.model.num_layers:
        yield from ({"parallel.ep": sizes.ep * factor} for factor in (2, 4))
        yield from _bounds(config, num_ranks)
    # With etp a rank's share of each expert follows tp.
    yield {"parallel.tp": 2 * sizes.tp} | ({"parallel.etp": 2 * sizes.tp} if sizes.etp > 1 else {}) | rest
    yield {"parallel.cp": 2 * sizes.cp} | rest


def _bounds(config: Config, num_ranks: int) -> Iterator[dict[str, Any]]:
    """Bounds of the room that an exchange by symm_mem or nvshmem makes; and an exchange that needs none."""
    load = Load(config, fit_layout(config, num_ranks), DTYPES[config.precision.recipe][1])
    if not load.is_symmetric:
        return
    # Which `auto` may have chosen, but has no bounds of.
    asked = {"comms.backend": config.comms.backend}
    if config.comms.capacity is None:
        multiple = HEADROOM * expected_rows(config.model.moe, load.sizes.ep, load.routed) / load.routed
        yield {"comms.capacity": round(multiple, 2)} | asked
    if config.model.moe.pair_capacity is None:
        yield {"model.moe.pair_capacity": HEADROOM} | asked
    if config.comms.saved_headroom is None and load.is_exchanged:
        yield {"comms.saved_headroom": HEADROOM} | asked
    yield {"comms.backend": "collective"}


def _written(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


# ---- the command


def settle_backend(config: Config, num_ranks: int) -> tuple[Config, str]:
    """What comms.backend=auto would be on GPUs as `cluster` describes them, and why; empty: there is nothing to choose.

    Raises:
        ValueError: the layout does not fit the ranks.
    """
    sizes, cluster = fit_layout(config, num_ranks), config.cluster
    if config.comms.backend != "auto" or sizes.ep == 1 or not num_moe_layers(config):
        return config, ""
    per_node = cluster.gpus_per_node or num_ranks
    # The ranks of ep follow each other, those of etp between them.
    is_split = per_node < num_ranks and bool(per_node % (sizes.ep * sizes.etp))
    if is_split or config.comms.ranks_per_node not in (None, 1, sizes.ep):
        why = "the ranks of parallel.ep are on several nodes"
    elif not can_exchange(config, num_ranks):
        why = NOT_WHILE_THEY_COMPUTE
    elif cluster.memory_gib is None:
        why = "cluster.memory_gib is not known; a run takes symm_mem where that fits"
    elif not (why := no_room(config, num_ranks, cluster.memory_gib)):
        return with_settings(config, {"comms.backend": "symm_mem"}), "symm_mem: it fits"
    return with_settings(config, {"comms.backend": "collective"}), f"collective: {why}"


def table(plan: MemoryPlan, memory_gib: float | None) -> str:
    """Every part in GiB: at the peak, and the most it ever takes; and what it is."""
    lines = [f"  {'GiB per rank':<28}{'at the peak':>12}{'at most':>12}"]
    for part, most in plan.at_most.items():
        if not most:
            continue
        lines.append(f"  {part:<28}{plan.at_peak.get(part, 0) / GIB:>12.2f}{most / GIB:>12.2f}  {MEANINGS[part]}")
        if part == "activations":
            kept = {kind: size for kind, size in plan.kept.items() if size}
            lines += [f"    {kind:<26}{'':>12}{size / GIB:>12.2f}    {MEANINGS[kind]}" for kind, size in kept.items()]
    of = "" if memory_gib is None else f"   of {memory_gib:.0f}"
    lines.append(f"  {'peak: ' + plan.moment:<28}{plan.peak / GIB:>12.2f}{of}")
    reading = READING if memory_gib is not None else (*READING, FITS)
    return "\n".join([*lines, *(f"  {said}" for said in reading)])


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit code: 0, or 2 after a mistake."""
    parser = argparse.ArgumentParser(prog="python -m trainer.planner", description="Memory of a run on each rank.")
    parser.add_argument("overrides", nargs="*", help="as python -m trainer.train takes them")
    parser.add_argument("--ranks", type=int, required=True, help="processes of the run")
    parser.add_argument("--json", action="store_true", help="bytes, as JSON")
    arguments = parser.parse_intermixed_args(argv)
    try:
        if arguments.ranks < 1:
            raise ValueError(f"--ranks {arguments.ranks}: must be at least 1")
        config, choice = settle_backend(compose(arguments.overrides), arguments.ranks)
        plan = plan_memory(config, arguments.ranks)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    memory_gib = config.cluster.memory_gib
    if arguments.json:
        fits = None if memory_gib is None else plan.peak <= MARGIN * memory_gib * GIB
        found = savings(config, arguments.ranks, plan) if fits is False else []
        given = {"memory": None if memory_gib is None else int(memory_gib * GIB), "fits": fits}
        given["backend"] = config.comms.backend
        print(json.dumps(asdict(plan) | given | {"savings": [saving._asdict() for saving in found]}))
        return 0
    sizes = fit_layout(config, arguments.ranks)
    print(f"{config.model.name} on {arguments.ranks} ranks: {', '.join(f'{a}={getattr(sizes, a)}' for a in AXES)}")
    if choice:
        print(f"  comms.backend=auto is counted as {choice}")
    print(table(plan, memory_gib))
    if warning := warn(config, arguments.ranks, plan, memory_gib):
        print(warning)
    return 0


if __name__ == "__main__":
    sys.exit(main())
