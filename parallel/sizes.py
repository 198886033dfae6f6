"""Which sizes of a layout go together. Nothing here needs torch: what does not fit is told before it is imported."""

from collections.abc import Sequence
from dataclasses import replace

from parallel.config import LayoutError, ParallelConfig, either, nearest_divisors


def resolve_sizes(config: ParallelConfig, world_size: int) -> ParallelConfig:
    """Replace dp_shard = -1 by the ranks that are left, and check that the sizes fit the number of processes.

    Raises:
        ValueError: naming the fields, their values and the nearest legal ones.
    """
    for axis in ("dp_replicate", "cp", "ulysses", "tp", "ep", "etp"):
        if getattr(config, axis) < 1:
            raise ValueError(f"parallel.{axis}={getattr(config, axis)} must be at least 1.")
    if config.async_tp != "none" and config.tp == 1:
        raise ValueError(
            f"parallel.async_tp={config.async_tp} finds no matmul to fuse with parallel.tp=1: nothing is gathered; set "
            "parallel.tp above 1, or parallel.async_tp=none"
        )
    if config.cp % config.ulysses:
        nearest = either(nearest_divisors(config.cp, config.ulysses))
        raise LayoutError(
            f"parallel.ulysses={config.ulysses} must divide parallel.cp={config.cp} (cp = ulysses x ring)",
            f"nearest legal parallel.ulysses: {nearest}",
            axes=("ulysses", "cp"),
        )
    if config.etp not in (1, config.tp):
        raise LayoutError(
            f"parallel.etp={config.etp} must be 1 (whole experts) or parallel.tp={config.tp} (experts cut like the "
            "dense layers)",
            f"set parallel.etp to {either(sorted({1, config.tp}))}",
            axes=("etp",),
        )
    others = config.dp_replicate * config.cp * config.tp
    dp_shard = config.dp_shard
    if dp_shard == -1:
        dp_shard = world_size // others
    if dp_shard < 1 or others * dp_shard != world_size:
        raise _wrong_product(config, world_size)
    lent = dp_shard * config.cp * config.tp // config.etp
    if lent % config.ep:
        ranks = "dp_shard x cp x tp" if config.etp == 1 else "dp_shard x cp x tp / etp"
        raise LayoutError(
            f"parallel.ep={config.ep} must divide {ranks} = {lent} (EP borrows its ranks from them)",
            f"nearest legal parallel.ep: {either(nearest_divisors(lent, config.ep))}",
            axes=("ep",),
        )
    return replace(config, dp_shard=dp_shard)


def check_experts(config: ParallelConfig, num_experts: int, expert_dim: int) -> None:
    """Raises ValueError if the experts cannot be split evenly over ep, or each of them over etp."""
    if num_experts % config.ep:
        raise LayoutError(
            f"model.moe.num_experts={num_experts} is not divisible by parallel.ep={config.ep}",
            f"nearest legal parallel.ep: {either(nearest_divisors(num_experts, config.ep))}",
            axes=("ep",),
        )
    if expert_dim % config.etp:
        raise LayoutError(
            f"model.moe.expert_dim={expert_dim} is not divisible by parallel.etp={config.etp}",
            "set parallel.etp=1",
            axes=("etp", "tp"),
        )


def _wrong_product(config: ParallelConfig, world_size: int) -> LayoutError:
    names = ("dp_replicate", "dp_shard", "cp", "tp")
    product = " x ".join(f"{name}={getattr(config, name)}" for name in names)
    processes = "one process" if world_size == 1 else f"{world_size} processes"
    reason = f"parallel sizes {product} do not multiply to the {processes} of this run"
    others = config.dp_replicate * config.cp * config.tp
    if world_size % others == 0:
        return LayoutError(reason, f"parallel.dp_shard={world_size // others} (or -1) would fit", axes=("dp_shard",))
    more = config.dp_shard == -1
    needed = others if more else others * max(config.dp_shard, 1)
    hint = f"start {needed}{f', or a multiple of {needed},' if more else ''} or make their product {world_size}"
    axes = [name for name in ("tp", "cp", "dp_replicate") if getattr(config, name) > 1]
    return LayoutError(reason, hint, axes=axes, processes=needed, more=more)


def expert_shard_dim(shape: Sequence[int], shard_size: int) -> int:
    """The dim of a rank's stack of experts that `shard_size` ranks can split evenly; whole experts where possible.

    Fewer experts than ranks would leave ranks without any, and FSDP splits no other dim unevenly.

    Raises:
        ValueError: if no dim divides.
    """
    for dim, size in enumerate(shape):
        if size % shard_size == 0:
            return dim
    raise ValueError(
        f"expert weights of shape {tuple(shape)} (one rank's experts first) have no dim that divides by the "
        f"{shard_size} ranks that share them (dp_shard x cp x tp / (ep x etp)); raise parallel.ep or "
        "parallel.dp_replicate."
    )
