"""Which backend exchanges rows, decided once at start, with the reason."""

from typing import NamedTuple

import torch
import torch.distributed as dist

from comms.config import CommsConfig
from comms.record_transport import nvshmem_unavailable
from comms.symmetric_memory import unavailable


class BackendChoice(NamedTuple):
    """What exchanges rows in this run, and why."""

    # none (one rank has every row) | collective | symm_mem | nvshmem
    backend: str
    reason: str
    # Memory that this takes, and what it has room for.
    room: str = ""


def choose_backend(config: CommsConfig, group: dist.ProcessGroup | None, device: torch.device) -> BackendChoice:
    """Turn comms.backend into what the ranks of `group` use. Collective over the group.

    Raises:
        ValueError: for a backend that cannot run here; it is never replaced by another.
    """
    if group is None or group.size() == 1:
        return BackendChoice("none", "no row leaves its rank")
    if config.backend == "collective":
        return BackendChoice("collective", "as asked")
    if config.backend == "auto":
        return BackendChoice(
            "collective",
            "symm_mem has to be asked for: it makes room for the most rows and pairs that could come, or for what "
            "comms.capacity and model.moe.pair_capacity say",
        )
    if config.backend not in ("symm_mem", "nvshmem"):
        raise ValueError(f"comms.backend={config.backend} is unknown; use auto, collective, symm_mem or nvshmem")
    if reason := (unavailable if config.backend == "symm_mem" else nvshmem_unavailable)(group, device):
        raise ValueError(f"comms.backend={config.backend} cannot run here: {reason}; use comms.backend=collective")
    return BackendChoice(config.backend, "as asked")
