"""A rank of a training run on two GPUs is killed: the run ends in time, says who it was, and leaves nothing behind."""

import os
import re
import signal
import time
from pathlib import Path

import pytest
import torch

from tests.e2e.runs import Bench, all_lines, status

pytestmark = pytest.mark.multi_gpu(2)
TIMEOUT = 20
SETTINGS = (
    "precision=bf16",
    "parallel.ep=2",
    f"parallel.timeout_seconds={TIMEOUT}",
    "train.steps=1000000",
    "train.eval_every=null",
    "checkpoint.every=1000000",
)


@pytest.mark.parametrize("backend", ["symm_mem", "collective"])
def test_a_killed_rank_ends_the_run(backend: str, tmp_path: Path) -> None:
    """Some time in a step: with 3 ms a step, mostly between its first kernel and its last."""
    check_a_killed_rank(tmp_path, *SETTINGS, f"comms.backend={backend}", "model.moe.backend=fused", on_gpus=True)
    for device in range(2):
        # A card that hangs would not answer.
        assert int(torch.ones(8, device=f"cuda:{device}").sum()) == 8


def check_a_killed_rank(folder: Path, *settings: str, on_gpus: bool) -> None:
    bench = Bench(folder)
    launch, path = bench.launch("killed", *settings, on_gpus=on_gpus), bench.path("killed")
    try:
        launch.wait_until(
            lambda: (path / "metrics.jsonl").exists() and len(all_lines(path)) > 5, "some steps", seconds=240
        )
        os.kill(launch.workers()[1], signal.SIGKILL)
        start = time.monotonic()
        code = launch.end(3 * TIMEOUT + 30)
        # The other rank waits no longer than the timeout, and what ends it afterwards has some seconds.
        assert time.monotonic() - start < TIMEOUT + 30
        assert code == 1, launch.output
        assert re.search(r"Root Cause.*rank +: 1 .*SIGKILL", launch.output, re.DOTALL), launch.output
        assert status(path)["state"] in ("failed", "running")
        assert launch.processes() == {}
    finally:
        launch.clear()
