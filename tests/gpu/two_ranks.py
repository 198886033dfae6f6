"""Checks that two GPUs pass together: each runs on both ranks in one pair of processes, and records what it raised."""

import os
import time
import traceback
from collections.abc import Callable, Iterable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from parallel.process_group import process_group
from trainer.worker_pool import free_port

NUM_RANKS = 2
# For how long a rank waits for the other one after a check: if its own failed, no longer than that one may compile.
SOON, NEVER = timedelta(seconds=20), timedelta(seconds=300)
Check = Callable[[torch.device], None]


def set_environment(rank: int, port: int, world_size: int = NUM_RANKS) -> None:
    """That of one of some processes, each with a GPU; with SHARE_GPU=1 all have it where there is but one."""
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), NCCL_NVLS_ENABLE="0", TORCH_SYMM_MEM_DISABLE_MULTICAST="1",
    )  # fmt: skip
    if os.environ.get("SHARE_GPU") == "1" and torch.cuda.device_count() < world_size:
        # NCCL refuses two ranks on one GPU of a host, so it is told of hosts that meet by sockets.
        os.environ.update(
            LOCAL_RANK="0", LOCAL_WORLD_SIZE="1", TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES="1",
            NCCL_HOSTID=f"rank{rank}", NCCL_NET="Socket", NCCL_SOCKET_IFNAME="lo", NCCL_MNNVL_ENABLE="0",
        )  # fmt: skip


def run_checks(checks: Iterable[Check], folder: Path) -> None:
    """Run them in order; `folder` then says what `assert_passed` asks."""
    try:
        mp.spawn(_run_rank, (free_port(), list(checks), folder), nprocs=NUM_RANKS)
    except Exception:
        (folder / "ended").write_text(traceback.format_exc())


def assert_passed(name: str, folder: Path) -> None:
    for rank in range(NUM_RANKS):
        file, ended = folder / f"{name}.{rank}", folder / "ended"
        assert file.exists(), ended.read_text() if ended.exists() else "never ran"
        assert not file.read_text(), f"rank {rank}:\n{file.read_text()}"


def _meet(name: str, rank: int, patience: timedelta) -> None:
    """A rank whose check failed early must not meet the other in the next one.

    If the other does not come, it waits within the check for what this one left out: both end.
    """
    store = dist.distributed_c10d._get_default_store()  # pyright: ignore[reportPrivateUsage]
    store.set(f"{name} {rank}", "")
    try:
        store.wait([f"{name} {other}" for other in range(NUM_RANKS)], patience)
    except dist.DistStoreError:
        print(f"{name}: rank {rank} waited in vain for the other one to end it", flush=True)
        os._exit(1)


def _run_rank(rank: int, port: int, checks: list[Check], folder: Path) -> None:
    set_environment(rank, port)
    with process_group(timeout_seconds=240) as device:
        for check in checks:
            problem, begun = "", time.monotonic()
            try:
                check(device)
                torch.cuda.synchronize()
            except Exception:
                problem = traceback.format_exc()
            (folder / f"{check.__name__}.{rank}").write_text(problem)
            # Shown with -s, or when a test fails: they all run in the first one's set-up.
            if rank == 0 or problem:
                print(f"{check.__name__}: {time.monotonic() - begun:.1f} s\n{problem}", end="", flush=True)
            _meet(check.__name__, rank, NEVER if not problem else SOON)
