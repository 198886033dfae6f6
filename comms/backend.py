"""Which backend exchanges rows, decided once at start, with the reason."""

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


# Why rows travel by collectives.
REASONS = {
    "collective": "as asked",
    "auto": "symm_mem has to be asked for: it makes room for the most rows and pairs that could come, or for what "
    "comms.capacity and model.moe.pair_capacity say",
}


def choose_backend(config: CommsConfig, group: dist.ProcessGroup | None, device: torch.device) -> BackendChoice:
    """Turn comms.backend into what the ranks of `group` use. Collective over the group.

    Raises:
        ValueError: for a backend that cannot run here, which is never replaced by another; or nodes that cannot be.
    """
    if group is None or group.size() == 1:
        return BackendChoice("none", "no row leaves its rank", unused=_asked(config))
    if config.backend not in (*REASONS, "symm_mem", "nvshmem"):
        raise ValueError(f"comms.backend={config.backend} is unknown; use auto, collective, symm_mem or nvshmem")
    split = split_into_nodes(config.ranks_per_node, hosts_of(group))
    levels = None if split.ranks_per_node == group.size() else split.ranks_per_node
    if config.backend in REASONS:
        asked = REASONS[config.backend]
        if config.backend == "auto" and device.type != "cuda":
            asked = "symm_mem and nvshmem need GPUs"
        reason = "; ".join(filter(None, (split.reason, asked)))
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


def _asked(config: CommsConfig) -> str:
    """Settings of how rows travel that ask for more than collectives of rows as they are."""
    payload = config.payload
    found = [] if config.backend in REASONS else [f"comms.backend={config.backend}"]
    found += [
        f"comms.payload.{field.name}={getattr(payload, field.name)}"
        for field in fields(payload)
        if getattr(payload, field.name) != "model"
    ]
    return ", ".join(found)
