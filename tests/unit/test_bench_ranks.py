"""Ranks that were started before their turn: they wait for it, agree on a port only then, and do not wait for ever."""

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from scripts import bench_ranks
from scripts.bench_ranks import Start, run_rank
from scripts.bench_results import TURN
from tests.unit.test_bench_node import alive

ROOT = Path(__file__).parents[2]


def test_ranks_wait_for_their_turn_and_agree_on_a_port(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    turn = tmp_path / "turn"
    monkeypatch.setenv(TURN, str(turn))
    start = Start(tmp_path / "port", os.getpid())
    with ThreadPoolExecutor(3) as ranks:
        ports = [ranks.submit(start.wait, rank) for rank in range(3)]
        time.sleep(0.2)
        assert not any(port.done() for port in ports) and not start.port_file.exists()
        turn.touch()
        assert len({port.result(10) for port in ports}) == 1


def test_no_group_before_the_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    turn = tmp_path / "turn"
    monkeypatch.setattr(os, "environ", {**os.environ, TURN: str(turn)})
    joined: list[str] = []

    @contextlib.contextmanager
    def process_group(timeout_seconds: int):
        joined.append(os.environ["MASTER_PORT"])
        yield torch.device("cpu")

    monkeypatch.setattr(bench_ranks, "process_group", process_group)
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 0)
    arguments, start = argparse.Namespace(nproc=1, dry_run=True), Start(tmp_path / "port", os.getpid())
    with ThreadPoolExecutor(1) as ranks:
        rank = ranks.submit(run_rank, 0, start, lambda *_: [1], arguments, tmp_path / "measured.json")
        time.sleep(0.2)
        assert joined == []
        turn.touch()
        rank.result(10)
    assert joined == [start.port_file.read_text()]
    assert (tmp_path / "measured.json").read_text() == "[1]"


def test_without_a_turn_nothing_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TURN, raising=False)
    assert Start(tmp_path / "port", os.getpid()).wait(0) > 0


def test_nobody_waits_for_a_turn_that_cannot_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = subprocess.Popen([sys.executable, "-c", "pass"])
    gone.wait()
    monkeypatch.setenv(TURN, str(tmp_path / "turn"))
    with pytest.raises(RuntimeError, match=f"process {gone.pid} is gone, which should have made .*turn"):
        Start(tmp_path / "port", gone.pid).wait(0)


def ranks_and_sum(arguments: argparse.Namespace, device: torch.device) -> list[float]:
    """Runs in the ranks."""
    total = torch.tensor(dist.get_rank() + 1.0)
    dist.all_reduce(total)
    return [dist.get_world_size(), float(total)]


# As on GPUs, where ranks are not forked.
PROGRAM = """
import argparse
from scripts.bench_ranks import measure_on_ranks
from tests.unit.test_bench_ranks import ranks_and_sum

print(measure_on_ranks(ranks_and_sum, argparse.Namespace(nproc=2, dry_run=False)))
"""
# Tells the number of the program that it starts.
STARTER = """
import subprocess, sys, time
print(subprocess.Popen([sys.executable, "-c", sys.argv[1]]).pid, flush=True)
time.sleep(1000)
"""


def children(pid: int) -> list[int]:
    with contextlib.suppress(OSError):
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


def wait_until(condition: Callable[[], bool], seconds: float = 60) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()


@pytest.mark.slow
def test_a_program_with_ranks_waits_and_goes_on(tmp_path: Path) -> None:
    turn = tmp_path / "turn"
    environment = {**os.environ, TURN: str(turn), "CUDA_VISIBLE_DEVICES": ""}
    words = [sys.executable, "-c", PROGRAM]
    with subprocess.Popen(words, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True) as program:
        # Ranks, and the process that counts what they share.
        assert wait_until(lambda: len(children(program.pid)) == 3)
        time.sleep(3)
        assert program.poll() is None
        turn.touch()
        told, _ = program.communicate(timeout=60)
    assert (program.returncode, told) == (0, "[2, 3.0]\n")


@pytest.mark.slow
def test_a_program_whose_starter_is_killed_ends_with_its_ranks(tmp_path: Path) -> None:
    environment = {**os.environ, TURN: str(tmp_path / "turn"), "CUDA_VISIBLE_DEVICES": ""}
    words = [sys.executable, "-c", STARTER, PROGRAM]
    with subprocess.Popen(words, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True) as starter:
        assert starter.stdout is not None
        program = int(starter.stdout.readline())
        assert wait_until(lambda: len(children(program)) == 3)
        pids = [program, *children(program)]
        starter.send_signal(signal.SIGKILL)
        starter.wait()
        assert wait_until(lambda: not alive(pids)), pids
