"""Checks that two GPUs pass together: each runs on both ranks in one pair of processes, and records what it raised."""

import os
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from parallel.process_group import process_group
from trainer.worker_pool import free_port

NUM_RANKS = 2
Check = Callable[[torch.device], None]


def set_environment(rank: int, port: int) -> None:
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(NUM_RANKS), LOCAL_WORLD_SIZE=str(NUM_RANKS),
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), NCCL_NVLS_ENABLE="0", TORCH_SYMM_MEM_DISABLE_MULTICAST="1",
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


def _run_rank(rank: int, port: int, checks: list[Check], folder: Path) -> None:
    set_environment(rank, port)
    with process_group(timeout_seconds=240) as device:
        for check in checks:
            problem = ""
            try:
                check(device)
                torch.cuda.synchronize()
            except Exception:
                problem = traceback.format_exc()
            (folder / f"{check.__name__}.{rank}").write_text(problem)
            # A rank whose check failed early must not meet the other in the next one.
            dist.barrier()
