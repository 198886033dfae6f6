"""Which backend exchanges rows, decided once at start, with the reason.

`auto` takes symm_mem where that is the fastest: on GPUs of one host that can map each other's memory, where the caller
has nothing against it; else collectives. All processes of a run come to the same choice.
"""

from dataclasses import fields
from typing import NamedTuple

import torch
import torch.distributed as dist

from comms.config import CommsConfig
from comms.nodes import hosts_of, split_into_nodes
from comms.record_transport import nvshmem_unavailable
from comms.symmetric_memory import unavailable


class BackendChoice(NamedTuple):
    """What exchanges rows in this run, and why."""

    # none (one rank has every row) | collective | symm_mem | nvshmem
    backend: str
    reason: str
    # Memory that this takes, and what it has room for.
    room: str = ""
    # Of the two levels of an exchange between nodes; None: one level.
    ranks_per_node: int | None = None
    # What was asked for and means nothing, since no row leaves its rank.
    unused: str = ""


def choose_backend(
    config: CommsConfig, group: dist.ProcessGroup | None, device: torch.device, against: str = ""
) -> BackendChoice:
    """Turn comms.backend into what the ranks of `group` use. Collective over all processes: each is in one such group.

    Args:
        against: why `auto` is not to take symm_mem, as this process sees it; empty: nothing is known.

    Raises:
        ValueError: for a backend that cannot run here, which is never replaced by another; or nodes that cannot be.
    """
    if group is None or group.size() == 1:
        return BackendChoice("none", "no row leaves its rank", unused=_asked(config))
    if config.backend not in ("auto", "collective", "symm_mem", "nvshmem"):
        raise ValueError(f"comms.backend={config.backend} is unknown; use auto, collective, symm_mem or nvshmem")
    hosts = hosts_of(group)
    split = split_into_nodes(config.ranks_per_node, hosts)
    levels = None if split.ranks_per_node == group.size() else split.ranks_per_node
    if config.backend in ("auto", "collective"):
        why = "as asked"
        if config.backend == "auto":
            why = _against_symm_mem(group, device, len(set(hosts)), levels is not None, against)
        if not why:
            return BackendChoice(
                "symm_mem", "one host, work on rows while others travel, and room for all that can come"
            )
        reason = "; ".join(filter(None, (split.reason, why)))
        return BackendChoice("collective", reason, ranks_per_node=levels)
    if levels is not None and config.ranks_per_node is not None:
        what = "reaches the ranks of one node" if config.backend == "symm_mem" else "knows one level"
        raise ValueError(
            f"comms.backend={config.backend} {what}, and with comms.ranks_per_node={levels} the {group.size()} ranks "
            f"of parallel.ep are on {group.size() // levels}; use comms.backend=collective"
        )
    if reason := (unavailable if config.backend == "symm_mem" else nvshmem_unavailable)(group, device):
        raise ValueError(f"comms.backend={config.backend} cannot run here: {reason}; use comms.backend=collective")
    return BackendChoice(config.backend, "as asked")


def _against_symm_mem(
    group: dist.ProcessGroup, device: torch.device, num_hosts: int, has_levels: bool, against: str
) -> str:
    """Why `auto` does not take symm_mem, on every process alike; empty if it does. Collective over all processes."""
    if device.type != "cuda":
        return "symm_mem and nvshmem need GPUs"
    if num_hosts > 1:
        against = "symm_mem reaches the GPUs of one host, and nvshmem, which knows one level, has to be asked for"
    elif has_levels:
        against = "symm_mem and nvshmem know one level"
    elif reason := unavailable(group, device):
        against = f"symm_mem cannot run here: {reason}"
    # Not of this group alone: ranks with an exchange sum more over all ranks (overflow_flag) than ranks without.
    every = [""] * dist.get_world_size()
    dist.all_gather_object(every, against)  # pyright: ignore[reportUnknownMemberType]
    return next(filter(None, every), "")


def _asked(config: CommsConfig) -> str:
    """Settings of how rows travel that ask for more than collectives of rows as they are."""
    payload = config.payload
    found = [] if config.backend in ("auto", "collective") else [f"comms.backend={config.backend}"]
    found += [
        f"comms.payload.{field.name}={getattr(payload, field.name)}"
        for field in fields(payload)
        if getattr(payload, field.name) != "model"
    ]
    return ", ".join(found)
