"""A benchmark whose figures several processes measure together: started here, or there already under torchrun."""

import argparse
import importlib
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes

from parallel.process_group import process_group
from trainer.worker_pool import PRELOADED, WorkerPool, free_port

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
            ranks = (free_port(), measure, arguments, file)
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


def run_rank(local_rank: int, port: int | None, measure: Measure, arguments: argparse.Namespace, file: Path) -> None:
    """One process; `port` is None where the environment names the others already."""
    if port is not None:
        world = str(arguments.nproc)
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
