"""Two processes never write into one run's folder."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from trainer.run_lock import RunLock

HOLD = "import sys; from pathlib import Path; from trainer.run_lock import RunLock; lock = RunLock(); "
HOLD += "lock.acquire(Path(sys.argv[1])); print('held', flush=True); sys.stdin.read()"


def test_a_second_process_is_refused_and_told_who_holds_the_run(tmp_path: Path) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).resolve().parents[2],
    )
    try:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        with pytest.raises(ValueError, match=rf"process {holder.pid} on .* is training this run"):
            RunLock().acquire(tmp_path, wait_seconds=0.3)
    finally:
        holder.kill()
        holder.wait()
    # However it ended: the lock is free again.
    lock = RunLock()
    lock.acquire(tmp_path, wait_seconds=5)
    assert (tmp_path / ".lock").read_text().startswith(f"process {os.getpid()} on ")
    lock.release()


def test_released_it_can_be_taken_again_by_the_same_process(tmp_path: Path) -> None:
    first, second = RunLock(), RunLock()
    first.acquire(tmp_path)
    with pytest.raises(ValueError, match="is in use"):
        second.acquire(tmp_path, wait_seconds=0)
    first.release()
    first.release()
    assert (tmp_path / ".lock").read_text() == ""
    second.acquire(tmp_path, wait_seconds=0)
    second.release()
