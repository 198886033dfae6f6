"""Joining the other processes of a run, and leaving them."""

import datetime
import gc
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
import torch.distributed.tensor._redistribute as redistribute
from torch._C._distributed_c10d import HashStore
from torch.distributed.tensor._collective_utils import MeshTopoInfo
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from comms.peer_buffers import forget_buffers
from comms.symmetric_memory import forget_exchanges


@contextmanager
def process_group(timeout_seconds: int) -> Iterator[torch.device]:
    """The default process group, for the time of a run; yields this rank's device.

    Under torchrun it spans every process; started plainly, it is a world of one. With GPUs it is NCCL for tensors on
    the device and gloo for those on the CPU, otherwise gloo.

    Raises:
        RuntimeError: when this node has fewer GPUs than processes.
    """
    device = _device()
    # It advises on the order of collectives, on every rank, whenever a weight lies on two mesh axes.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    backend = "cuda:nccl,cpu:gloo" if device.type == "cuda" else "gloo"
    timeout = datetime.timedelta(seconds=timeout_seconds)
    if "RANK" in os.environ:
        dist.init_process_group(backend, timeout=timeout)
    else:
        dist.init_process_group(backend, timeout=timeout, store=HashStore(), rank=0, world_size=1)
    try:
        yield device
    finally:
        forget_exchanges()
        forget_buffers()
        dist.destroy_process_group()


@contextmanager
def temporary_groups() -> Iterator[None]:
    """Ends whatever groups are made inside: each has threads of its own, and those of many layouts stop a machine.

    Nothing that was laid out inside can be used afterwards. Collective, unless an error leaves it.
    """
    groups = dist.distributed_c10d._world.pg_map  # pyright: ignore[reportPrivateUsage]
    before = set(groups)
    try:
        yield
        # A rank that is done must not hang up on one that still reads its last message.
        dist.barrier()
    finally:
        forget_exchanges()
        forget_buffers()
        # In the order in which all ranks made them: NCCL's ranks end a group together, and those that begin with
        # another group wait for each other for ever.
        for group in [group for group in groups if group not in before]:
            dist.destroy_process_group(group)
        _forget_meshes()


def _forget_meshes() -> None:
    """torch remembers meshes in many caches, one of them in C++; an equal mesh made later must not meet them.

    And a mesh that is remembered keeps its groups, whose threads look for messages a hundred times per second.
    """
    _clear_sharding_prop_cache()
    MeshTopoInfo.build_from_mesh.cache_clear()
    redistribute._gen_transform_infos.cache_clear()
    getattr(redistribute, "_planner_cache", {}).clear()
    # Meshes and their groups refer to each other.
    gc.collect()


def _device() -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    local_rank, count = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if local_rank >= count:
        raise RuntimeError(
            f"process {local_rank} of this node has no GPU of its own: {count} visible. Start at most {count} "
            "processes per node, or set CUDA_VISIBLE_DEVICES= to train on CPUs."
        )
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    # Gradients of weights are sums over all tokens: no part of one is rounded, which costs no time.
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    return device
