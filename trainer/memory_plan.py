"""How much memory a run takes on each rank: a pure function of a config and a number of ranks.

What stays: parameters, their gradients and the optimizer's moments, as FSDP, EP, ETP and TP share them out (exact), and
the buffers of an exchange through symmetric memory, with the arena of what layers keep (exact). What comes and goes:
weights that FSDP gathers and gradients that it has not reduced yet, what forward keeps for backward
(trainer/activations.py), one block at work, the head. The peak is the largest sum over a step's moments:

    loss            all kept activations + the head's logits and gradients
    backward of i   kept activations of blocks 0..i + gradients of the blocks after i + weights of i and of the block
                    gathered ahead + the work of i + its gradients, and those of i + 1 that are still being reduced
    reduction of i  the same without the activations, the work and the weights of i; its gradients as autograd left them
                    and as they are reduced
    end             all gradients, and the root's as autograd left them and as they are reduced

each with parameters, moments, buffers, and the root's gathered weights. The forward of a block takes no more than its
backward. FSDP reduces the gradients of every micro-batch: from a step's second one on all are there all the time.
Experts that a rank has alone are cast when they are needed, and their gradients added to those before; nothing is
gathered ahead.

The allocator's own losses are not counted, nor what a checkpoint copies to save it.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import torch

from comms.saved_arena import plan_saved
from moe.grouped_gemm import resolve_backend
from parallel.config import ParallelConfig
from parallel.expert_parallel import HIDDEN_DIM, expected_rows, plan_buffers
from parallel.sizes import expert_shard_dim
from trainer.activations import SYMMETRIC, Kept, Load, block_work, further_bytes, head_bytes, kept_by_block
from trainer.config import Config
from trainer.layout import fit_layout
from trainer.meta_model import DTYPES, meta_model
from trainer.models.transformer import tensor_plan
from trainer.validate import accumulation_steps

GIB = 2**30
# Of a device's memory, what an estimate may take: not everything is counted.
MARGIN = 0.95
# The same where nobody asked for what takes the memory: with less, too, the run would go.
AUTO_MARGIN = 0.85
# Bounds that are proposed, as multiples of what is expected.
HEADROOM = 1.25
# What comes and goes, in the order in which tables have it.
PARTS = ("gradients", "unreduced gradients", "gathered weights", "activations", "block at work", "head")
LOSS = "at the loss"
END = "end of backward"


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes of one rank. Parts come and go, so `at_most` adds up to more than the peak does."""

    parameters: int
    gradients: int
    moments: int
    # Buffers of comms.backend=symm_mem or nvshmem, and the arena of comms.saved_headroom.
    exchange: int
    arena: int
    # Kept for backward, by kind: all blocks together, one micro-batch.
    kept: Kept
    # The most of everything at once, when that is, and its parts then.
    peak: int
    moment: str
    at_peak: dict[str, int]
    # The most that each part takes, whenever that is.
    at_most: dict[str, int]

    @property
    def activations(self) -> int:
        """Kept for backward, all kinds together."""
        return sum(self.kept.values())


class Share(NamedTuple):
    """Numbers of one block's parameters on a rank: kept, and gathered for its forward and backward."""

    kept: int
    gathered: int
    # Of the gathered ones, those of experts, which are gathered and reduced by themselves.
    apart: int = 0
    # Of these, those that are cast instead (parallel/whole_weights.py), or computed with as they are: experts', and all
    # where no other rank has a share of anything.
    whole: int = 0


def plan_memory(config: Config, num_ranks: int, device_type: str = "cuda") -> MemoryPlan:
    """The estimate for a run on `num_ranks` ranks. Needs neither a process group nor a GPU, and allocates nothing.

    comms.backend=auto counts as collective; what it would be, trainer/planner.py and a run's start put in its place.

    Raises:
        ValueError: the layout does not fit the ranks, as at a launch.
    """
    sizes = fit_layout(config, num_ranks)
    master, compute = DTYPES[config.precision.recipe]
    shares, load = share_out(config, sizes, master), Load(config, sizes, compute, device_type)
    root, blocks = shares[""], [share for name, share in shares.items() if name]
    mode = sizes.activation_checkpoint
    kept_by_layer = [kept_by_block(load, layer, mode) for layer in range(len(blocks))]
    work = [block_work(load, layer, mode) for layer in range(len(blocks))]
    numbers = root.kept + sum(block.kept for block in blocks)
    held = {
        "weights": numbers * master.itemsize,
        "moments": 2 * numbers * master.itemsize if config.optim.name == "adamw" else 0,
        "exchange": exchange_bytes(load),
        "arena": arena_bytes(load),
        "tp buffers": lane_bytes(load),
    }
    accumulates = accumulation_steps(config.train, sizes.dp_replicate * sizes.dp_shard) > 1
    moments = _moments(load, root, blocks, kept_by_layer, work, accumulates)
    moment = max(moments, key=lambda name: sum(moments[name].values()))
    at_peak = held | moments[moment]
    kinds = dict.fromkeys(kind for kept in kept_by_layer for kind in kept)
    return MemoryPlan(
        parameters=held["weights"],
        gradients=numbers * load.wide,
        moments=held["moments"],
        exchange=held["exchange"],
        arena=held["arena"],
        kept={kind: sum(kept.get(kind, 0) for kept in kept_by_layer) for kind in kinds},
        peak=sum(at_peak.values()),
        moment=moment,
        at_peak=at_peak,
        at_most=held | {part: max(parts.get(part, 0) for parts in moments.values()) for part in PARTS},
    )


def _moments(
    load: Load, root: Share, blocks: Sequence[Share], kept_by_layer: Sequence[Kept], work: Sequence[int],
    accumulates: bool,
) -> dict[str, dict[str, int]]:  # fmt: skip
    """What comes and goes, by moment and part."""
    width, wide, depth = load.width, load.wide, load.config.model.mtp.depth
    kept = [sum(of_one.values()) for of_one in kept_by_layer]
    all_gradients = (root.kept + sum(block.kept for block in blocks)) * wide
    before = all_gradients if accumulates else 0
    reshards, casts = load.sizes.reshard_after_forward, DTYPES[load.config.precision.recipe][0] != load.dtype
    head = _head_numbers(load)
    # The loss leaves the gradient of the head's weight, once for each token that is predicted.
    moments = {
        LOSS: {
            "gradients": before,
            "gathered weights": (root.gathered + (0 if reshards else _gathered(blocks, casts))) * width,
            "activations": sum(kept) + further_bytes(load),
            "head": head_bytes(load) + (1 + depth) * head * wide,
        },
        END: {
            "gradients": all_gradients + (root.kept * wide if accumulates else 0),
            "gathered weights": root.gathered * width,
            # What is cast becomes a gradient at once, one weight after the other.
            "unreduced gradients": head * width if root.whole else root.gathered * (width + wide),
        },
    }
    reduced = 0
    for layer in reversed(range(len(blocks))):
        block, after = blocks[layer], blocks[layer + 1] if layer + 1 < len(blocks) else Share(0, 0)
        alive = blocks[max(layer - 1, 0) : layer + 1] if reshards else blocks[: layer + 1]
        ahead = alive[0].whole if reshards and casts and layer else 0
        # Losses of tokens further ahead come first, one before each of their blocks.
        pending = max(layer + 1 - load.config.model.num_layers, 0)
        parts = {
            "gradients": before or reduced,
            "gathered weights": (root.gathered + _gathered(alive, casts) - ahead) * width,
            "head": head * (width + pending * wide),
        }
        moments[f"backward of block {layer}"] = parts | {
            "unreduced gradients": block.gathered * width + (after.gathered - after.apart) * wide,
            "activations": sum(kept[: layer + 1]),
            "block at work": work[layer],
        }
        # Experts by themselves are reduced before the backward of the block's attention.
        apart = block.apart or block.gathered
        # Added to what is there, or there already as autograd left them.
        added = block.whole if before or not casts else 0
        moments[f"reduction of block {layer}"] = parts | {
            # A micro-batch's gradients are reduced by themselves, and then added to those before.
            "gradients": before + (block.kept - block.whole) * wide if before else reduced,
            "gathered weights": parts["gathered weights"] - (apart - (0 if casts else block.whole)) * width,
            "unreduced gradients": apart * width + (apart - added) * wide,
            "activations": sum(kept[:layer]) + (kept_by_layer[layer].get("attention", 0) if block.apart else 0),
        }
        reduced += block.kept * wide
    return moments


def _gathered(blocks: Sequence[Share], casts: bool) -> int:
    return sum(block.gathered - (0 if casts else block.whole) for block in blocks)


# ---- parameters


def share_out(config: Config, sizes: ParallelConfig, dtype: torch.dtype) -> dict[str, Share]:
    """What a rank has of each block by its name, and under "" of everything else; of uneven shares the largest."""
    plan = tensor_plan(config.model, sizes.tp).split if sizes.tp > 1 else {}
    found: dict[str, Share] = {"": Share(0, 0)}
    alone = sizes.dp_replicate * sizes.dp_shard * sizes.cp == 1
    all_whole = alone and (sizes.tp == sizes.ep * sizes.etp or not num_moe_layers(config))
    for name, parameter in meta_model(config, dtype).named_parameters():
        shape, block = list(parameter.shape), ".".join(name.split(".")[:2]) if name.startswith("layers.") else ""
        is_expert = ".experts." in name
        if is_expert:
            shape[0] //= sizes.ep
            hidden = HIDDEN_DIM[name.rpartition(".")[2]]
            if hidden is not None:
                shape[hidden] //= sizes.etp
        for pattern, dim in plan.items():
            if not is_expert and fnmatchcase(name, pattern):
                shape[dim] //= sizes.tp
        dim, ranks = 0, sizes.dp_shard * sizes.cp
        if is_expert:
            ranks = sizes.dp_shard * sizes.cp * sizes.tp // (sizes.ep * sizes.etp)
            dim = expert_shard_dim(shape, ranks) if sizes.ep * sizes.tp > 1 else 0
        is_whole = all_whole or (is_expert and ranks * sizes.dp_replicate == 1)
        is_apart = is_whole or (is_expert and sizes.ep * sizes.tp > 1)
        gathered = torch.Size(shape).numel()
        # Every rank has room for the largest share.
        kept = gathered // shape[dim] * -(-shape[dim] // ranks)
        before = found.get(block, Share(0, 0))
        apart, whole = (gathered if counts else 0 for counts in (is_apart, is_whole))
        found[block] = Share(*map(sum, zip(before, (kept, gathered, apart, whole), strict=True)))
    return found


def _head_numbers(load: Load) -> int:
    return -(-load.config.model.vocab_size // load.sizes.tp) * load.config.model.dim


# ---- exchange


def num_moe_layers(config: Config) -> int:
    """Layers with experts, those for multi-token prediction included."""
    return config.model.num_layers + config.model.mtp.depth - config.model.num_dense_layers


def exchange_bytes(load: Load) -> int:
    """The symmetric memory that a run allocates; 0 where rows travel by collectives."""
    config, comms = load.config, load.config.comms
    if comms.backend not in SYMMETRIC or load.sizes.ep == 1 or not num_moe_layers(config):
        return 0
    model = config.model
    return plan_buffers(
        comms.backend, model.moe, model.dim, load.sizes.ep, load.routed, comms, load.dtype
    ).num_bytes  # fmt: skip


def lane_bytes(load: Load) -> int:
    """Where parallel.async_tp=native gathers tokens, and where it sums: those of all tp ranks, as wide as the model."""
    if load.sizes.async_tp != "native" or load.sizes.tp == 1:
        return 0
    return 2 * load.inside * load.config.model.dim * load.width


def arena_bytes(load: Load) -> int:
    """The arena of comms.saved_headroom; 0 without."""
    config, moe = load.config, load.config.model.moe
    headroom, num_layers = config.comms.saved_headroom, num_moe_layers(config)
    if headroom is None or not num_layers or not load.in_arena:
        return 0
    rows = expected_rows(moe, load.sizes.ep, load.routed), load.rows
    room = plan_saved(num_layers, headroom, rows, (load.routed * moe.top_k, load.pairs))
    hidden = 2 * load.hidden if load.sizes.activation_checkpoint == "none" else None
    return room.num_bytes(config.model.dim, moe.top_k, hidden, load.width)


# ---- comms.backend=auto


def with_settings(config: Config, changes: Mapping[str, Any]) -> Config:
    """A copy in which settings, by their dotted keys, have other values."""
    changed = copy.deepcopy(config)
    for key, value in changes.items():
        *path, name = key.split(".")
        section: Any = changed
        for part in path:
            section = getattr(section, part)
        setattr(section, name, value)
    return changed


def on_device(config: Config, device: torch.device) -> Config:
    """A copy in which model.moe.backend is what this GPU runs. Low-precision recipes have kernels of their own."""
    backend = config.model.moe.backend
    if config.precision.recipe == "bf16":
        backend = resolve_backend(backend, torch.bfloat16, device)
    return with_settings(config, {"model.moe.backend": backend})


def can_exchange(config: Config, num_ranks: int) -> bool:
    """Whether symm_mem would have rows travel while the experts compute."""
    asked = with_settings(config, {"comms.backend": "symm_mem"})
    return Load(asked, fit_layout(asked, num_ranks), DTYPES[config.precision.recipe][1]).is_exchanged


def no_room(config: Config, num_ranks: int, memory_gib: float) -> str:
    """Why symm_mem, with room for the most that can come, does not fit a device, and what takes less; empty: it fits.

    Empty, too, where rows do not travel while experts compute: that says enough against it.
    """

    def peak_gib(bounds: Mapping[str, float]) -> float:
        return plan_memory(with_settings(config, {"comms.backend": "symm_mem", **bounds}), num_ranks).peak / GIB

    if not can_exchange(config, num_ranks) or (peak := peak_gib({})) <= AUTO_MARGIN * memory_gib:
        return ""
    less = [
        f"with {key}={HEADROOM} it takes {bounded:.1f}"
        for key in ("comms.saved_headroom", "model.moe.pair_capacity")
        if (bounded := peak_gib({key: HEADROOM})) < peak
    ]
    would = (
        f"with symm_mem the run would take about {peak:.1f} GiB, more than {AUTO_MARGIN:.0%} of a GPU's "
        f"{memory_gib:.1f}"
    )
    return f"{would}; comms.backend=symm_mem has to be asked for: {', '.join(less)}" if less else would
