"""Checks of the settings of the exchange of rows, for trainer/validate.py; and of all that the device has a say in."""

import os
from collections.abc import Iterator

from trainer.config import Config


def check_exchange(config: Config) -> None:
    """Bounds, chunks and measurements where the backend has them.

    Raises:
        ValueError: a setting that this run's backends cannot carry out.
    """
    _check_room(config)
    _check_chunks(config)


def check_device(config: Config, device_type: str) -> None:
    """What the device says of the backends, once the number of processes is known and before data are read.

    Raises:
        ValueError: a backend for GPUs without them.
    """
    if device_type == "cuda":
        return
    for asked, instead in _only_on_gpus(config):
        raise ValueError(f"{asked} needs GPUs, and this run is on {device_type}; use {instead}")


def _only_on_gpus(config: Config) -> Iterator[tuple[str, str]]:
    """Settings of the layout's final sizes that no CPU can carry out, and what to set instead."""
    model, parallel = config.model, config.parallel
    if config.comms.backend in ("symm_mem", "nvshmem") and parallel.ep > 1:
        yield f"comms.backend={config.comms.backend}", "comms.backend=collective, or auto"
    has_experts = model.num_dense_layers < model.num_layers + model.mtp.depth
    # Triton's interpreter computes on CPUs.
    if model.moe.backend == "fused" and has_experts and os.environ.get("TRITON_INTERPRET") != "1":
        yield "model.moe.backend=fused", "model.moe.backend=grouped_mm, or auto"
    if model.attention.backend == "varlen":
        yield "model.attention.backend=varlen", "model.attention.backend=sdpa, or auto"
    if parallel.async_tp == "inductor":
        yield "parallel.async_tp=inductor", "parallel.async_tp=native, or none"


def _check_room(config: Config) -> None:
    """Bounds of the exchange; how many ranks a token must reach is checked by trainer/layout.py."""
    moe, backend = config.model.moe, config.comms.backend
    for key, value in (("comms.capacity", config.comms.capacity), ("model.moe.pair_capacity", moe.pair_capacity)):
        if value is not None and backend not in ("symm_mem", "nvshmem"):
            makes = "room for all that can come" if backend == "auto" else "as much as is needed"
            raise ValueError(
                f"{key}={value} bounds the room of comms.backend=symm_mem and nvshmem, and comms.backend={backend} "
                f"makes {makes}; set {key}=null, or comms.backend=symm_mem"
            )
    if backend == "nvshmem" and config.parallel.async_tp != "none":
        raise ValueError(
            f"parallel.async_tp={config.parallel.async_tp} and comms.backend=nvshmem want symmetric memory of two "
            "kinds, and a process has one; set parallel.async_tp=none, or comms.backend=collective"
        )
    # With dropless routing the mean over ranks is exactly 1.
    if moe.pair_capacity is not None and moe.pair_capacity < 1 and moe.capacity_factor is None:
        raise ValueError(
            f"model.moe.pair_capacity={moe.pair_capacity} is less than the balanced load, which some rank always "
            "has; nearest legal: 1"
        )


def _check_chunks(config: Config) -> None:
    """What only the operator knows that is dispatch, experts and combine at once."""
    comms = config.comms
    if comms.chunks > 1:
        asked, without = f"comms.chunks={comms.chunks}", "comms.chunks=1"
    elif comms.saved_headroom is not None:
        asked, without = f"comms.saved_headroom={comms.saved_headroom}", "comms.saved_headroom=null"
    elif comms.measure:
        asked, without = "comms.measure=true", "comms.measure=false"
    else:
        return
    needs: dict[str, object] = {"comms.backend": "symm_mem"}
    if config.model.moe.backend != "auto":
        # Whether `auto` is fused, the device says (parallel/expert_parallel.py).
        needs["model.moe.backend"] = "fused"
    for key, needed in {**needs, "model.moe.linear_bias": False, "model.moe.scores_before_experts": False}.items():
        section = comms if key.startswith("comms.") else config.model.moe
        value = getattr(section, key.rpartition(".")[2])
        if value != needed:
            value, needed = str(value).lower(), str(needed).lower()
            raise ValueError(
                f"{asked} is about rows that travel while fused kernels compute, which needs {key}={needed} instead of "
                f"{value}; set that, or {without}"
            )
