"""A signal on one rank stops every rank at the same step boundary."""

import os
import signal

import torch
import torch.distributed as dist

from tests.distributed.harness import run_workers
from trainer.guard import StopSignal


def steps_until_stop(rank: int, step: int) -> tuple[int, str | None]:
    """Step boundaries passed, when `rank` gets SIGUSR1 in its step `step`."""
    stop = StopSignal(torch.device("cpu"))
    try:
        for current in range(10):
            if dist.get_rank() == rank and current == step:
                os.kill(os.getpid(), signal.SIGUSR1)
            if name := stop.agree():
                return current, name
        return 10, None
    finally:
        stop.restore()


def test_all_ranks_agree() -> None:
    assert run_workers(steps_until_stop, 2, 1, 3) == [(3, "SIGUSR1")] * 2
    assert run_workers(steps_until_stop, 2, 0, 0) == [(0, "SIGUSR1")] * 2
    assert run_workers(steps_until_stop, 2, 5, 0) == [(10, None)] * 2
