"""Rows that found no room end a run like a mistake in the config, and leave nothing that was trained without them."""

from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from comms.symmetric_memory import NoRoomError
from tests.distributed.harness import run_workers
from tests.e2e import runs
from tests.e2e.runs import Attempt, Bench, columns, status

SAID = "plan of MoE layer 1: 90 rows came to rank 1, which has room for 64: raise comms.capacity to 1.41 or more"


class Exchange:
    """What the last rank would have on GPUs."""

    def check(self) -> None:
        pass

    def check_overflow(self) -> None:
        if dist.get_rank() == 1:
            raise NoRoomError(SAID)


def attempt_without_room(overrides: list[str], at: int) -> Attempt:
    """One attempt, in which step number `at` brings too many rows to the last rank."""
    steps = 0

    def flag() -> torch.Tensor:
        nonlocal steps
        steps += 1
        return torch.tensor(float(steps >= at and dist.get_rank() == 1))

    found = patch("trainer.guard.overflow_flag", lambda: None), patch("trainer.guard.exchanges", lambda: [Exchange()])
    with patch("trainer.step.overflow_flag", flag), found[0], found[1]:
        return runs.attempt(overrides)


@pytest.mark.parametrize("at", [10, 12])
def test_no_room_ends_the_run_with_the_weights_of_the_step_before(
    bench: Bench, straight: list[Attempt], at: int
) -> None:
    """A checkpoint is due after step 10: that of a step without room is not written, that of steps before is good."""
    run_id = f"no-room-{at}"
    attempts = run_workers(attempt_without_room, 2, bench.overrides(run_id), at)
    assert [attempt.code for attempt in attempts] == [2, 2]
    for attempt, start in zip(attempts, ("error: rank 1: plan", "error on rank 1: rank 1: plan"), strict=True):
        (line,) = [line for line in attempt.err.splitlines() if "error" in line]
        assert line.startswith(start) and SAID in line and "Traceback" not in attempt.err
    ended = status(bench.path(run_id))
    assert (ended["state"], ended["exit_code"], ended["step"]) == ("failed", 2, at - 1)
    folder: Path = bench.path(run_id) / "checkpoints"
    assert len(list(folder.glob("step_*"))) == (at > 10)
    if at > 10:
        # With more room the run goes on as if nothing had been.
        assert [attempt.code for attempt in bench.pooled(run_id)] == [0, 0]
        names = ("train/loss", "train/grad_norm")
        assert columns(bench.path(run_id), *names) == columns(bench.path("straight"), *names)
