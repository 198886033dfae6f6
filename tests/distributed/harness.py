"""Worker processes for distributed tests: started once, reused by every test that asks for the same number.

Starting Python with torch in 8 processes takes far longer than a tiny training step, so a pool stays up for the
whole pytest session and each test sends it a function. The function must live at module level: it is pickled by name.
The process groups that a function makes are destroyed after it: every gloo group has threads that wake up a hundred
times a second, and some hundred groups of earlier tests would take both cores of a small machine.

    def rank_times_two() -> int:
        return 2 * torch.distributed.get_rank()

    def test_ranks() -> None:
        assert run_workers(rank_times_two, 2) == [0, 2]
"""

import atexit
import contextlib
import datetime
import functools
import gc
import os
import socket
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

_POOLS: dict[int, "WorkerPool"] = {}


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def run_workers(function: Callable[..., Any], world_size: int, *args: Any, timeout: float = 240) -> list[Any]:
    """Run `function(*args)` on every rank of a gloo world and return the results in rank order.

    Raises:
        RuntimeError: with the traceback of the first rank that failed. The pool is then restarted on its next use.
    """
    pool = _POOLS.get(world_size)
    if pool is None or pool.broken:
        pool = _POOLS[world_size] = WorkerPool(world_size)
    return pool.run(function, args, timeout)


class WorkerPool:
    """`world_size` spawned processes in one gloo process group, fed through pipes."""

    def __init__(self, world_size: int) -> None:
        context = mp.get_context("spawn")
        port = free_port()
        self.broken = False
        self.pipes: list[Connection] = []
        self.processes: list[Any] = []
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_worker_main, args=(rank, world_size, port, theirs), daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)
        atexit.register(self.close)

    def run(self, function: Callable[..., Any], args: tuple[Any, ...], timeout: float) -> list[Any]:
        for pipe in self.pipes:
            pipe.send((function, args))
        results: dict[int, Any] = {}
        while len(results) < len(self.pipes):
            waiting = [pipe for rank, pipe in enumerate(self.pipes) if rank not in results]
            ready = wait(waiting, timeout)
            if not ready:
                self.close()
                raise RuntimeError(f"{function.__name__}: ranks still busy after {timeout} s; have {sorted(results)}")
            for pipe in ready:
                rank = self.pipes.index(pipe)  # type: ignore[arg-type]
                ok, value = _receive(pipe)
                if not ok:
                    self.close()
                    raise RuntimeError(f"{function.__name__} failed on rank {rank}:\n{value}")
                results[rank] = value
        return [results[rank] for rank in range(len(self.pipes))]

    def close(self) -> None:
        self.broken = True
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join(5)


def _receive(pipe: Any) -> tuple[bool, Any]:
    try:
        return pipe.recv()
    except (EOFError, OSError):
        return False, "the process died"


def _worker_main(rank: int, world_size: int, port: int, pipe: Connection) -> None:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    with contextlib.suppress(EOFError, KeyboardInterrupt):
        while True:
            function, args = pipe.recv()
            try:
                pipe.send((True, function(*args)))
            except BaseException:
                pipe.send((False, traceback.format_exc()))
                continue
            # A rank that is done must not hang up on one that still reads its last message.
            dist.barrier()
            _forget_groups()


def _forget_groups() -> None:
    """Destroy every process group but the world's. Their threads end when no mesh is left that knows them."""
    from torch.distributed.tensor import _redistribute
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    for group in list(dist.distributed_c10d._world.pg_map):
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)
    # torch remembers meshes in many caches, one of them in C++. An equal mesh of a later test must not meet them.
    _clear_sharding_prop_cache()
    _redistribute._planner_cache.clear()
    for found in gc.get_objects():
        if isinstance(found, functools._lru_cache_wrapper) and found.__module__.startswith("torch.distributed"):
            found.cache_clear()
    gc.collect()
