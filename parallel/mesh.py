"""The topology of a run: one frozen object, checked when it is built and passed explicitly.

Axes and who shares what (torchtitan's `ParallelDims` builds the device meshes):

    dense weights    split over tp, then sharded over fsdp = dp_shard x cp, replicated over dp_replicate
    expert weights   split over ep (and etp), then sharded over efsdp = dp_shard x cp x tp / (ep x etp)
    batch            different samples on each of dp_replicate x dp_shard ranks
    sequence         cp x tp ranks that share each sample; comms/split_sequence.py says who has which tokens
    data             batch x cp: the ranks over which the loss is summed (tp ranks all have the same loss)

A rank's number is ((dp_replicate, dp_shard), ring, ulysses, tp), the last fastest; cp = ring x ulysses. EP borrows its
ranks from dp_shard x cp (x tp): the product of the sizes without ep is the number of processes.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from comms.split_sequence import SplitSequence
from parallel.config import ParallelConfig
from parallel.sizes import resolve_sizes


@dataclass(frozen=True)
class Mesh:
    """Sizes, device meshes and this rank's place in them."""

    config: ParallelConfig
    device: torch.device
    rank: int
    world_size: int
    # What FSDP shards dense weights over: (fsdp,) or (dp_replicate, fsdp).
    dense: DeviceMesh
    # The same for expert weights, after their split.
    experts: DeviceMesh
    # None for axes of size 1.
    tp: DeviceMesh | None
    ep: DeviceMesh | None
    etp: DeviceMesh | None
    # What expert weights are split over before FSDP: (ep,), (etp,) or (ep, etp); None: every rank has all of them.
    expert_split: DeviceMesh | None
    # None when each rank has whole sequences.
    sequence: SplitSequence | None
    # The ranks that pass keys and values round, and those that exchange heads; None for degrees of 1.
    ring_group: dist.ProcessGroup | None
    ulysses_group: dist.ProcessGroup | None
    batch_rank: int
    batch_size: int
    # None: this rank alone.
    batch_group: dist.ProcessGroup | None
    data_group: dist.ProcessGroup | None
    # data x tp: the ranks that have different tokens between attention and feed-forward maps.
    token_group: dist.ProcessGroup | None

    @property
    def ep_group(self) -> dist.ProcessGroup | None:
        """The ranks that share out the experts; None when each rank holds all of them."""
        return None if self.ep is None else self.ep.get_group()


def build_mesh(config: ParallelConfig, device: torch.device) -> Mesh:
    """Build the device meshes over the initialised default process group. Collective: every rank must call it."""
    world_size, rank = dist.get_world_size(), dist.get_rank()
    config = resolve_sizes(config, world_size)
    dims = _parallel_dims(config, world_size, device)
    replicated = ["dp_replicate"] if config.dp_replicate > 1 else []
    dense = dims.get_mesh([*replicated, "fsdp"])
    split_axes = [axis for axis in ("ep", "etp") if getattr(config, axis) > 1]
    ring, shared = config.cp // config.ulysses, config.cp * config.tp
    place = rank % shared
    whole_groups, ring_groups, ulysses_groups = _sequence_groups(config, world_size)
    group = _my_group(whole_groups) if shared > 1 else None
    return Mesh(
        config=config,
        device=device,
        rank=rank,
        world_size=world_size,
        dense=dense,
        experts=dims.get_mesh([*replicated, "efsdp"]) if config.ep * config.tp > 1 else dense,
        tp=dims.get_mesh("tp") if config.tp > 1 else None,
        ep=dims.get_mesh("ep") if config.ep > 1 else None,
        etp=dims.get_mesh("etp") if config.etp > 1 else None,
        expert_split=dims.get_mesh(split_axes) if split_axes else None,
        sequence=SplitSequence(ring, config.ulysses, config.tp, place, group.group_name) if group else None,
        ring_group=_my_group(ring_groups) if ring > 1 else None,
        ulysses_group=_my_group(ulysses_groups) if config.ulysses > 1 else None,
        batch_rank=rank // shared,
        batch_size=world_size // shared,
        batch_group=dims.get_mesh("batch").get_group() if world_size > shared else None,
        data_group=_data_group(dims, config, world_size),
        token_group=dist.group.WORLD if world_size > 1 else None,
    )


def _data_group(dims: Any, config: ParallelConfig, world_size: int) -> dist.ProcessGroup | None:
    if config.tp == 1:
        return dist.group.WORLD if world_size > 1 else None
    return dims.get_mesh("loss").get_group() if world_size > config.tp else None


def _sequence_groups(config: ParallelConfig, world_size: int) -> tuple[list[list[int]], ...]:
    """Every group of ranks that shares sequences, passes keys and values round, or exchanges heads."""
    ranks = torch.arange(world_size).view(-1, config.cp // config.ulysses, config.ulysses, config.tp)
    whole = ranks.flatten(1).tolist()
    ring = ranks.movedim(1, -1).flatten(0, -2).tolist()
    ulysses = ranks.movedim(2, -1).flatten(0, -2).tolist()
    return whole, ring, ulysses


def _my_group(groups: list[list[int]]) -> dist.ProcessGroup:
    """Of groups that together hold every rank, this rank's. Collective."""
    mine, _ = dist.new_subgroups_by_enumeration(groups)
    assert isinstance(mine, dist.ProcessGroup)
    return mine


def _parallel_dims(config: ParallelConfig, world_size: int, device: torch.device) -> Any:
    # Imported here: it takes a second, which whoever only checks a configuration does without.
    from parallel.torchtitan_dims import parallel_dims

    # What it found assumes CUDA.
    parallel_dims.device_type = device.type

    class Dims(parallel_dims.ParallelDims):
        def _mesh_exist(self, name: str, degree: int) -> bool:
            # FSDP wraps every layout, even of one rank: it is what keeps fp32 masters beside bf16 compute.
            exists: Callable[[str, int], bool] = super()._mesh_exist
            return name == "fsdp" or (name == "efsdp" and self.tp > 1) or exists(name, degree)

    dims = Dims(
        dp_replicate=config.dp_replicate,
        dp_shard=config.dp_shard,
        cp=config.cp,
        tp=config.tp,
        pp=1,
        ep=config.ep,
        etp=config.etp,
        world_size=world_size,
    )
    dims.build_mesh()
    return dims
