"""A checkpoint that fails in the background ends the run at the next step boundary, on every rank alike."""

from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch.distributed as dist

from tests.distributed.harness import run_workers
from tests.e2e.runs import STEPS, Bench, attempt, status
from trainer import checkpoint_files


def attempt_with_a_full_disk(overrides: list[str], rank: int) -> str:
    """One attempt, in which nothing can be written into checkpoints on `rank`; what it raised."""
    write = checkpoint_files._ChecksumStream.write

    def full(self: Any, data: Any) -> int:
        if dist.get_rank() == rank:
            raise OSError(28, "No space left on device")
        return write(self, data)

    with patch.object(checkpoint_files._ChecksumStream, "write", full):
        try:
            attempt(overrides)
        except RuntimeError as error:
            return str(error)
    return ""


def test_a_failed_background_save_does_not_wait_for_the_next_one(bench: Bench) -> None:
    """Saves are due after steps 10 and 20; the failure of the first is noticed between them."""
    messages = run_workers(attempt_with_a_full_disk, 2, bench.overrides("full-disk", "train.eval_every=null"), 1)
    for message in messages:
        assert "the checkpoint of step 10 was not saved" in message and "No space left" in message
    ended = status(bench.path("full-disk"))
    assert (ended["state"], ended["exit_code"]) == ("failed", 1)
    assert 10 < ended["step"] < STEPS
    folder: Path = bench.path("full-disk") / "checkpoints"
    assert not list(folder.glob("step_*")), "what was written of it is gone"
