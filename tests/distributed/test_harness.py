"""A worker that crashes is run again, once, and it is told; whose code workers run, and what a task leaves behind."""

import os
import signal
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from tests.distributed.harness import run_workers
from trainer.parity import full
from trainer.worker_pool import WorkerError


def crash_until(marks: str, times: int, number: int) -> int:
    """Rank 1 ends by a signal so many times."""
    if dist.get_rank() == 1 and len(os.listdir(marks)) < times:
        Path(marks, str(len(os.listdir(marks)))).touch()
        os.kill(os.getpid(), number)
    return dist.get_rank()


@pytest.mark.parametrize("number", [signal.SIGABRT, signal.SIGSEGV])
def test_a_crash_is_told_and_run_again(number: int, tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=r"(?s)crash_until runs again.*failed on rank 1.*exit code"):
        assert run_workers(crash_until, 2, str(tmp_path), 1, number) == [0, 1]


@pytest.mark.parametrize(("times", "number", "runs"), [(3, signal.SIGSEGV, 2), (3, signal.SIGKILL, 1)])
def test_what_crashes_again_and_what_was_killed_are_failures(
    times: int, number: int, runs: int, tmp_path: Path
) -> None:
    with pytest.warns(UserWarning) if runs > 1 else nullcontext(), pytest.raises(WorkerError, match="exit code"):
        run_workers(crash_until, 2, str(tmp_path), times, number)
    assert len(os.listdir(tmp_path)) == runs


def multiply_over_a_mesh() -> int:
    """Returns how many threads wait for messages meanwhile."""
    x = distribute_tensor(torch.ones(4, 4), init_device_mesh("cpu", (2, 2)), [Shard(0), Shard(1)])
    full(x @ x)
    return message_loops()


def message_loops() -> int:
    names = [task.joinpath("comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
    return names.count("gloo_tcp_loop")


def test_groups_of_a_task_end_with_it() -> None:
    """Each has a thread that looks for messages a hundred times per second: hundreds would take a core."""
    (before,) = set(run_workers(message_loops, 4))
    assert min(run_workers(multiply_over_a_mesh, 4)) >= before + 2
    assert set(run_workers(message_loops, 4)) == {before}


ASK = """
import os, sys
sys.path.insert(0, {root!r})
import trainer.trainer
from trainer.worker_pool import WorkerPool

def place():
    return trainer.trainer.__file__, os.environ.get("PYTHONPATH"), os.environ.get("PYTHONSAFEPATH")

if __name__ == "__main__":
    print(WorkerPool(1).run(place)[0])
"""


def test_workers_run_the_code_of_whoever_started_them(tmp_path: Path) -> None:
    """And not what has its name where the program is started, or on its path."""
    root = Path(__file__).resolve().parents[2]
    (tmp_path / "elsewhere").mkdir()
    for decoy in (tmp_path / "trainer.py", tmp_path / "elsewhere" / "trainer.py"):
        decoy.write_text("raise RuntimeError('another trainer')")
    (tmp_path / "scripts").mkdir()
    program = tmp_path / "scripts" / "ask.py"
    program.write_text(ASK.format(root=str(root)))
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "elsewhere")}
    command = [sys.executable, str(program)]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    expected = str(root / "trainer" / "trainer.py"), str(tmp_path / "elsewhere"), None
    assert done.stdout.strip() == str(expected), done.stderr
