"""A benchmark whose figures several processes measure together: started here, or there already under torchrun.

Processes that are started here can be had before their turn, so that they have imported everything by then: where
SLUICEGATE_TURN names a file, they touch no GPU and join no group until it is there. Who started the program makes it.
"""

import argparse
import importlib
import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

if __name__ == "__main__":
    raise SystemExit("scripts/bench_ranks.py is a part of other benchmarks, and measures nothing: run one of those")

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes

from parallel.process_group import process_group
from scripts.bench_results import STARTER, TURN
from trainer.worker_pool import PRELOADED, WorkerPool, free_port

# Seconds between two looks for a file.
LOOK_SECONDS = 0.02
# Gives the figures, alike on every rank; what it returns can be written as JSON.
Measure = Callable[[argparse.Namespace, torch.device], Any]


def settle_gpus(arguments: argparse.Namespace, machine: dict[str, Any]) -> None:
    """Fill in `card`, and --nproc if it is None (all GPUs, 2 in a dry run).

    Raises:
        ValueError: fewer GPUs than processes.
    """
    if arguments.dry_run:
        machine.update(card="cpu", gpus=0)
        arguments.nproc = arguments.nproc or 2
        return
    arguments.nproc = arguments.nproc or machine["gpus"]
    if not arguments.nproc:
        raise ValueError("no GPU found; --dry-run tries the program on CPUs")
    if arguments.nproc > machine["gpus"] and "RANK" not in os.environ:
        raise ValueError(f"--nproc={arguments.nproc}: there are {machine['gpus']} GPUs; --dry-run runs on CPUs")


def measure_on_ranks(measure: Measure, arguments: argparse.Namespace) -> Any:
    """What rank 0 of --nproc processes measured; None in the other processes of torchrun."""
    method = start_method(arguments.dry_run)
    if arguments.dry_run and method == "spawn" and "RANK" not in os.environ:
        # Forked from a process that has imported torch: a test that tries several benchmarks waits for that once.
        pool = WorkerPool(arguments.nproc)
        try:
            return pool.run(measure_on_cpu, measure, arguments)[0]
        finally:
            pool.close()
    with tempfile.TemporaryDirectory(prefix="bench_") as folder:
        file = Path(folder) / "measured.json"
        if "RANK" in os.environ:
            run_rank(int(os.environ["LOCAL_RANK"]), None, measure, arguments, file)
            if int(os.environ["RANK"]) != 0:
                return None
        else:
            ranks = (Start(Path(folder) / "port", starter()), measure, arguments, file)
            start_processes(run_rank, ranks, nprocs=arguments.nproc, start_method=method)
        return json.loads(file.read_text())


def measure_on_cpu(measure: Measure, arguments: argparse.Namespace) -> Any:
    """In a worker of the pool: what it measured, as if read back from JSON."""
    return json.loads(json.dumps(measure(arguments, torch.device("cpu"))))


def start_method(dry_run: bool) -> str:
    """How processes start: forked in a dry run, so that none has to import anything, unless that cannot be.

    What has threads cannot be forked, nor what has used CUDA.
    """
    if not dry_run or len(os.listdir("/proc/self/task")) > 1:
        return "spawn"
    for name in PRELOADED:
        importlib.import_module(name)
    return "fork"


def starter() -> int:
    """The process that started this program; asked of the system it would be another, if that one has ended by now."""
    return int(os.environ.get(STARTER, os.getppid()))


class Start(NamedTuple):
    """How processes that are started here find each other, once it is their turn."""

    # Where the first of them writes the port at which it waits for the others.
    port_file: Path
    # The process that started the program.
    starter: int

    def wait(self, local_rank: int) -> int:
        """The port, when it is this program's turn.

        Raises:
            RuntimeError: whoever would say so is gone.
        """
        if local_rank == 0:
            self._wait_for_turn()
            # Not chosen before: somebody else could have taken it by now.
            written = self.port_file.with_suffix(".part")
            written.write_text(str(free_port()))
            written.rename(self.port_file)
        # Should the first process fail, torch ends those that wait for it.
        while not self.port_file.exists():
            time.sleep(LOOK_SECONDS)
        return int(self.port_file.read_text())

    def _wait_for_turn(self) -> None:
        turn = os.environ.get(TURN)
        while turn and not os.path.exists(turn):
            if not os.path.exists(f"/proc/{self.starter}"):
                raise RuntimeError(f"process {self.starter} is gone, which should have made {turn}")
            time.sleep(LOOK_SECONDS)


def run_rank(local_rank: int, start: Start | None, measure: Measure, arguments: argparse.Namespace, file: Path) -> None:
    """One process; `start` is None where the environment names the others already."""
    if start is not None:
        port, world = start.wait(local_rank), str(arguments.nproc)
        os.environ.update(RANK=str(local_rank), LOCAL_RANK=str(local_rank), WORLD_SIZE=world, LOCAL_WORLD_SIZE=world)
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    # Our kernels send each row to one rank; beside them, NCCL and torch must too.
    os.environ.update(NCCL_NVLS_ENABLE="0", TORCH_SYMM_MEM_DISABLE_MULTICAST="1")
    if arguments.dry_run:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    with process_group(timeout_seconds=300) as device:
        figures = measure(arguments, device)
        if dist.get_rank() == 0:
            file.write_text(json.dumps(figures))
