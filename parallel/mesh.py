"""The topology of a run: one frozen object, checked when it is built and passed explicitly.

Axes and who shares what (torchtitan's `ParallelDims` builds the device meshes):

    dense weights    sharded over fsdp = dp_shard x cp, replicated over dp_replicate
    expert weights   split over ep, then sharded over efsdp = dp_shard x cp x tp / (ep x etp)
    batch            different samples on each of dp_replicate x dp_shard ranks
    data             batch x cp: the ranks over which the loss and the token counts are summed

EP borrows its ranks from dp_shard x cp (x tp): the product of the sizes without ep is the number of processes.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from parallel.config import ParallelConfig, either, nearest_divisors

# Axes whose mechanisms are not part of this version.
UNAVAILABLE_AXES = ("cp", "ulysses", "tp", "etp")


@dataclass(frozen=True)
class Mesh:
    """Sizes, device meshes and this rank's place in them."""

    config: ParallelConfig
    device: torch.device
    rank: int
    world_size: int
    # What FSDP shards dense weights over: (fsdp,) or (dp_replicate, fsdp).
    dense: DeviceMesh
    # The same for the expert weights that remain after the split over ep.
    experts: DeviceMesh
    # None when every rank has all experts.
    ep: DeviceMesh | None
    batch_rank: int
    batch_size: int
    data_group: dist.ProcessGroup

    @property
    def ep_group(self) -> dist.ProcessGroup | None:
        """The ranks that share out the experts; None when each rank holds all of them."""
        return None if self.ep is None else self.ep.get_group()


def resolve_sizes(config: ParallelConfig, world_size: int) -> ParallelConfig:
    """Replace dp_shard = -1 by the ranks that are left, and check that the sizes fit the number of processes.

    Raises:
        ValueError: naming the fields, their values and the nearest legal ones.
    """
    for axis in ("dp_replicate", "cp", "ulysses", "tp", "ep", "etp"):
        if getattr(config, axis) < 1:
            raise ValueError(f"parallel.{axis}={getattr(config, axis)} must be at least 1.")
    for axis in UNAVAILABLE_AXES:
        if getattr(config, axis) != 1:
            raise ValueError(
                f"parallel.{axis}={getattr(config, axis)} is not available in this version; set parallel.{axis}=1."
            )
    if config.async_tp != "none":
        raise ValueError(f"parallel.async_tp={config.async_tp} is not available in this version; set it to none.")
    others = config.dp_replicate * config.cp * config.tp
    dp_shard = config.dp_shard
    if dp_shard == -1:
        dp_shard = world_size // others
    if dp_shard < 1 or others * dp_shard != world_size:
        raise ValueError(_product_message(config, world_size))
    shared = dp_shard * config.cp * config.tp
    if shared % (config.ep * config.etp):
        legal = either(nearest_divisors(shared, config.ep))
        raise ValueError(
            f"parallel.ep={config.ep} must divide dp_shard x cp x tp = {shared} (EP borrows its ranks from them); "
            f"nearest legal parallel.ep: {legal}."
        )
    return replace(config, dp_shard=dp_shard)


def check_experts(config: ParallelConfig, num_experts: int) -> None:
    """Raises ValueError if the experts cannot be split evenly over ep."""
    if num_experts % config.ep:
        raise ValueError(
            f"model.moe.num_experts={num_experts} is not divisible by parallel.ep={config.ep}; "
            f"nearest legal parallel.ep: {either(nearest_divisors(num_experts, config.ep))}."
        )


def _product_message(config: ParallelConfig, world_size: int) -> str:
    names = ("dp_replicate", "dp_shard", "cp", "tp")
    product = " x ".join(f"{name}={getattr(config, name)}" for name in names)
    others = config.dp_replicate * config.cp * config.tp
    if world_size % others == 0:
        hint = f"parallel.dp_shard={world_size // others} (or -1) would fit"
    else:
        hint = f"start a multiple of {others} processes, or change these sizes so that their product is {world_size}"
    return f"parallel sizes {product} do not multiply to the {world_size} processes of this run; {hint}."


def build_mesh(config: ParallelConfig, device: torch.device) -> Mesh:
    """Build the device meshes over the initialised default process group. Collective: every rank must call it."""
    world_size, rank = dist.get_world_size(), dist.get_rank()
    config = resolve_sizes(config, world_size)
    dims = _parallel_dims(config, world_size, device)
    replicated = ["dp_replicate"] if config.dp_replicate > 1 else []
    dense = dims.get_mesh([*replicated, "fsdp"])
    batch_size = config.dp_replicate * config.dp_shard
    return Mesh(
        config=config,
        device=device,
        rank=rank,
        world_size=world_size,
        dense=dense,
        experts=dims.get_mesh([*replicated, "efsdp"]) if config.ep > 1 else dense,
        ep=dims.get_mesh("ep") if config.ep > 1 else None,
        # cp and tp are inside the batch axis: neighbours in them see the same samples.
        batch_rank=rank // (config.cp * config.tp),
        batch_size=batch_size,
        data_group=_data_group(dims, config),
    )


def _data_group(dims: Any, config: ParallelConfig) -> dist.ProcessGroup:
    everyone = config.tp == 1
    return dist.group.WORLD if everyone else dims.get_mesh("loss").get_group()  # type: ignore[return-value]


def _parallel_dims(config: ParallelConfig, world_size: int, device: torch.device) -> Any:
    # Imported here: torchtitan takes seconds to import, and its device detection assumes CUDA.
    from torchtitan.distributed import parallel_dims

    parallel_dims.device_type = device.type

    class Dims(parallel_dims.ParallelDims):
        def _mesh_exist(self, name: str, degree: int) -> bool:
            # FSDP wraps every layout, even of one rank: it is what keeps fp32 masters beside bf16 compute.
            return name == "fsdp" or super()._mesh_exist(name, degree)

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
