"""One run through everything that happens to runs: asked to stop, one rank killed, all ranks killed while a checkpoint
is being written; each time started again, and in the end as if nothing had been.

Real processes under scripts/train.sh, real signals, real W&B in offline mode. An evaluation after every step gives
signals the time to find the run at work.
"""

import os
import random
import re
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.runs import STEPS, Attempt, Bench, Launch, all_lines, columns, status
from trainer.metrics import read_metrics

pytestmark = pytest.mark.slow
EXACT = ("train/loss", "train/grad_norm", "train/lr", "moe/tokens_per_expert")


@dataclass
class Ended:
    """One attempt, after its end."""

    code: int
    seconds: float
    output: str
    status: dict[str, Any]
    # Processes that outlived the launcher.
    left: dict[int, dict[str, str]]
    checkpoints: list[str] = field(default_factory=list)


def start(bench: Bench, eval_every: int = 1) -> Launch:
    return bench.launch(
        "chaos",
        f"train.eval_every={eval_every}",
        "checkpoint.every=1",
        "logging.wandb.mode=offline",
    )


def attempt_is_past(path: Path, number: int, steps: int) -> bool:
    if not (path / "metrics.jsonl").exists():
        return False
    return len({line["step"] for line in all_lines(path) if line["attempt"] == number}) > steps


def ended(launch: Launch, path: Path) -> Ended:
    start = time.monotonic()
    code = launch.end()
    seconds = time.monotonic() - start
    names = sorted(entry.name for entry in (path / "checkpoints").iterdir())
    return Ended(code, seconds, launch.output, status(path), launch.processes(), names)


@pytest.fixture(scope="module")
def attempts(bench: Bench) -> list[Ended]:
    """Run `chaos`: SIGUSR1; kill -9 of rank 1; kill -9 of both during a save; to the end."""
    path, found = bench.path("chaos"), []
    steps = random.randint(2, 4)

    launch = start(bench)
    launch.wait_until(lambda: attempt_is_past(path, 1, steps), "some steps")
    launch.process.send_signal(signal.SIGUSR1)
    found.append(ended(launch, path))

    launch = start(bench)
    launch.wait_until(lambda: attempt_is_past(path, 2, 1), "some steps")
    os.kill(launch.workers()[1], signal.SIGKILL)
    found.append(ended(launch, path))

    launch = start(bench)
    launch.wait_until(lambda: attempt_is_past(path, 3, 1), "some steps")
    workers = random.sample(launch.workers(), 2)
    launch.wait_until(lambda: any((path / "checkpoints").glob("*.partial.*")), "a save")
    for worker in workers:
        os.kill(worker, signal.SIGKILL)
    found.append(ended(launch, path))

    found.append(ended(start(bench, eval_every=10), path))
    return found


def test_stop_signal_saves_the_next_step_and_asks_for_a_requeue(attempts: list[Ended]) -> None:
    """CASES 65."""
    stopped = attempts[0]
    assert stopped.code == 75, stopped.output
    assert stopped.status["state"] == "preempted" and stopped.status["exit_code"] == 0
    step = stopped.status["step"]
    assert 2 < step < STEPS
    assert f"SIGUSR1: saved step {step} and stopped" in stopped.output
    assert f"step_{step:08d}" in stopped.checkpoints
    assert f"checkpoints/step_{step:08d} at step {step}" in attempts[1].output


def test_one_killed_rank_brings_the_run_down_in_time_and_is_named(attempts: list[Ended]) -> None:
    failed = attempts[1]
    assert failed.code == 1, failed.output
    # parallel.timeout_seconds is 60; a closed connection is seen at once.
    assert failed.seconds < 30
    assert failed.status["state"] == "failed" and failed.status["exit_code"] == 1
    assert "remote worker" in failed.status["message"]
    assert f"rank 0 failed: {failed.status['message']}" in failed.output
    assert re.search(r"Root Cause.*rank +: 1 .*SIGKILL", failed.output, re.DOTALL)


def test_kill_of_all_ranks_during_a_save_leaves_a_checkpoint_to_continue_from(attempts: list[Ended]) -> None:
    killed, last = attempts[2:]
    assert killed.code == 1, killed.output
    # Nobody was left to say how it ended.
    assert killed.status["state"] == "running"
    assert "latest" in killed.checkpoints
    assert re.search(r"continuing from \S+/step_\d{8} at step \d+", last.output), last.output
    assert not any("partial" in name for name in last.checkpoints), "the next save clears what the killed one left"
    assert last.checkpoints == ["latest", *(f"step_{step:08d}" for step in range(STEPS - 2, STEPS + 1))]


def test_nothing_outlives_the_launcher(attempts: list[Ended]) -> None:
    assert [attempt.left for attempt in attempts] == [{}, {}, {}, {}]


def test_the_run_ends_as_the_uninterrupted_one(bench: Bench, straight: list[Attempt], attempts: list[Ended]) -> None:
    last, path = attempts[-1], bench.path("chaos")
    assert last.code == 0, last.output
    assert (last.status["state"], last.status["step"], last.status["attempt"]) == ("finished", STEPS, 4)
    assert columns(path, *EXACT) == columns(bench.path("straight"), *EXACT)
    names = ("eval/held/loss", "eval/short/loss")
    assert columns(path, *names, first=STEPS) == columns(bench.path("straight"), *names, first=STEPS)


def test_one_line_per_step_counts_and_says_its_attempt(bench: Bench, attempts: list[Ended]) -> None:
    """CASES 59, 65: steps that were done twice are in the file twice, and readers see the newest."""
    path = bench.path("chaos")
    lines = all_lines(path)
    assert [line["attempt"] for line in lines] == sorted(line["attempt"] for line in lines)
    assert {line["attempt"] for line in lines} == {1, 2, 3, 4}
    records = read_metrics(path)
    assert [record["step"] for record in records] == list(range(1, STEPS + 1))
    for record in records:
        assert record["attempt"] == max(line["attempt"] for line in lines if line["step"] == record["step"])
    for attempt in attempts:
        # One voice: a step is told once for its training and once for its evaluation.
        told = re.findall(rf"^step (\d+)/{STEPS}  loss", attempt.output, re.MULTILINE)
        assert told and len(told) == len(set(told))


def test_one_wandb_run_across_all_attempts(bench: Bench, attempts: list[Ended]) -> None:
    """CASES 59: a folder per attempt, not per rank, all of one W&B run."""
    folder = bench.path("chaos") / "wandb"
    wandb_id = (folder / "run_id").read_text().strip()
    folders = sorted(path.name for path in folder.glob("offline-run-*"))
    assert len(folders) == 4
    assert {name.rpartition("-")[2] for name in folders} == {wandb_id}
