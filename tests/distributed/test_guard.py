"""A signal on one rank stops every rank at the same step boundary."""

import os
import signal

import torch
import torch.distributed as dist

from tests.distributed.harness import run_workers
from trainer.guard import FAILED, Stopped, StopSignal


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


def answer_when_failing(rank: int) -> tuple[str | None, str | None]:
    """Answers at two boundaries; `rank` says at the first that something failed."""
    stop = StopSignal(torch.device("cpu"))
    try:
        return stop.agree(failed=dist.get_rank() == rank), stop.agree()
    finally:
        stop.restore()


def test_a_failure_on_one_rank_is_known_to_all() -> None:
    assert run_workers(answer_when_failing, 2, 1) == [(FAILED, None)] * 2


def items_until_stop(rank: int, item: int) -> tuple[list[int], str]:
    """Items that were handed out, when `rank` gets SIGTERM while it works on `item`."""
    stop, got = StopSignal(torch.device("cpu")), []
    try:
        for current in stop.until_stopped(range(5)):
            got.append(current)
            if dist.get_rank() == rank and current == item:
                os.kill(os.getpid(), signal.SIGTERM)
    except Stopped as stopped:
        return got, str(stopped)
    finally:
        stop.restore()
    return got, ""


def test_all_ranks_leave_at_the_same_item() -> None:
    assert run_workers(items_until_stop, 2, 1, 2) == [([0, 1, 2], "SIGTERM")] * 2
    assert run_workers(items_until_stop, 2, 2, 2) == [([0, 1, 2, 3, 4], "")] * 2
