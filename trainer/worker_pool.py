"""Processes that are started once and then run one function after another, all together, in one process group.

Importing torch and the trainer takes far longer than a tiny training step, so whoever compares many layouts
(scripts/parity.py, the distributed tests) starts a pool once, and on CPUs all of its processes are forked from a server
that has imported them. The functions must live at module level: they are pickled by name.

    def rank_times_two() -> int:
        return 2 * torch.distributed.get_rank()

    WorkerPool(2).run(rank_times_two)  # [0, 2]
"""

import atexit
import contextlib
import faulthandler
import gc
import multiprocessing
import multiprocessing.forkserver
import os
import signal
import socket
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

from parallel.process_group import process_group, temporary_groups

# A rank that waits longer than this for the others has lost them.
GROUP_TIMEOUT_SECONDS = 90
# After the first failure: how long to collect those of other ranks, one of which may be the cause.
FAILURE_SECONDS = 1.0
# The signal that asks a stuck rank for the stack of each thread, and how long it has to answer. What holds up Python, a
# kernel or a collective, does not hold this up. SIGUSR1 is the trainer's.
STACK_SIGNAL, STACK_SECONDS = signal.SIGUSR2, 1.0
# As much as a pipe holds.
STACK_BYTES = 2**16
# The folder of this checkout: others may be installed, or lie where a program is started.
ROOT = Path(__file__).resolve().parents[1]
# Imported once for all processes on CPUs. Importing them starts no thread but idle ones of NumPy, so that forking is
# safe.
PRELOADED = ["parallel.process_group", "trainer.attempt", "parallel.torchtitan_dims", "torch.distributed.fsdp"]


class WorkerError(RuntimeError):
    """A function failed on some rank, a worker died, or the ranks are stuck. The pool is closed by then."""


class WorkerPool:
    """`world_size` processes in one process group, fed through pipes.

    On `cpu` each has one thread and the group is gloo; on `cuda` each has a GPU of its own, and the group NCCL beside
    gloo.
    """

    def __init__(self, world_size: int, device: str = "cpu") -> None:
        context = _context(device)
        port = free_port()
        # For programs that a worker starts: the server has values of its own.
        search = {name: os.environ.get(name) for name in ("PYTHONPATH", "PYTHONSAFEPATH")}
        self.broken = False
        self.pipes: list[Connection] = []
        # Through which a rank that a signal ends, or that is asked by one, tells where it was.
        self.stacks: list[Connection] = []
        self.processes: list[Any] = []
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            stack, their_stack = context.Pipe(duplex=False)
            args = (rank, world_size, port, device, theirs, their_stack, search)
            process = context.Process(target=_work, args=args, daemon=True)
            process.start()
            theirs.close()
            their_stack.close()
            self.pipes.append(ours)
            self.stacks.append(stack)
            self.processes.append(process)
        atexit.register(self.close)

    def run(self, function: Callable[..., Any], *args: Any, timeout: float = 240.0) -> list[Any]:
        """`function(*args)` on every rank; the results in rank order.

        Raises:
            WorkerError: with the name of each rank that failed and its traceback, or of each that is stuck and where. A
                pool that failed stays closed.
        """
        for pipe in self.pipes:
            # A dead worker is found below, by its closed pipe.
            with contextlib.suppress(OSError):
                pipe.send((function, args))
        results: dict[int, Any] = {}
        failures: dict[int, str] = {}
        deadline = time.monotonic() + timeout
        while len(results) + len(failures) < len(self.pipes):
            waiting = [pipe for rank, pipe in enumerate(self.pipes) if rank not in results and rank not in failures]
            ready = wait(waiting, max(deadline - time.monotonic(), 0.0))
            if not ready:
                break
            for pipe in ready:
                rank = self.pipes.index(pipe)  # type: ignore[arg-type]
                succeeded, value = self._receive(rank)
                (results if succeeded else failures)[rank] = value
            if failures:
                deadline = min(deadline, time.monotonic() + FAILURE_SECONDS)
        if len(results) < len(self.pipes):
            stuck = {} if failures else self._stuck([rank for rank in range(len(self.pipes)) if rank not in results])
            self.close()
            raise WorkerError(_failure_message(function.__name__, failures, stuck, len(self.pipes), timeout))
        return [results[rank] for rank in range(len(self.pipes))]

    def close(self) -> None:
        """Ends the processes, whatever they are doing."""
        self.broken = True
        atexit.unregister(self.close)
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join(5)

    def _stuck(self, ranks: list[int]) -> dict[int, list[str]]:
        """Where each of these ranks is: the Python stack of each thread; nothing of one that does not say."""
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.processes[rank].pid, STACK_SIGNAL)
        time.sleep(STACK_SECONDS)
        return {rank: self._stack(rank) for rank in ranks}

    def _stack(self, rank: int) -> list[str]:
        """Which signal, and the Python stack of each thread; nothing of a process that ended otherwise."""
        descriptor = self.stacks[rank].fileno()
        os.set_blocking(descriptor, False)
        try:
            lines = os.read(descriptor, STACK_BYTES).decode(errors="replace").splitlines()
        except BlockingIOError:
            return []
        return [line for line in lines if line and not line.startswith("Extension modules:")]

    def _receive(self, rank: int) -> tuple[bool, Any]:
        try:
            return self.pipes[rank].recv()
        except (EOFError, OSError):
            self.processes[rank].join(5)
            died = f"the process died (exit code {self.processes[rank].exitcode})"
            return False, "\n".join([died, *self._stack(rank)])


def free_port() -> int:
    """A TCP port of this machine that nobody uses."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _context(device: str) -> Any:
    """How processes start: CUDA does not survive a fork."""
    if device == "cuda":
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    # What the server knows about GPUs its children would believe. Its modules are theirs, too, and it does not look for
    # them where its starter does.
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    with _environment({"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": path, "PYTHONSAFEPATH": "1"}):
        multiprocessing.forkserver.ensure_running()
    return context


@contextlib.contextmanager
def _environment(values: dict[str, str | None]) -> Iterator[None]:
    """These environment variables for a while; None: not set."""
    before = {name: os.environ.get(name) for name in values}
    _set_environment(values)
    try:
        yield
    finally:
        _set_environment(before)


def _set_environment(values: dict[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def _failure_message(
    name: str, failures: dict[int, str], stuck: dict[int, list[str]], size: int, timeout: float
) -> str:
    if not failures:
        head = f"{name}: rank {', '.join(map(str, stuck))} of {size} still busy after {timeout:g} s"
        stacks = [
            f"rank {rank} is at\n" + "\n".join(stack) if stack else f"rank {rank} does not say where: is it starting?"
            for rank, stack in stuck.items()
        ]
        return "\n".join([head, *stacks])
    # A rank that lost a peer says so too: the one that died, or else the first that spoke, is the cause.
    ranks = sorted(failures, key=lambda rank: not failures[rank].startswith("the process died"))
    parts = [f"{name} failed on rank {ranks[0]}:\n{failures[ranks[0]].rstrip()}"]
    parts += [f"then on rank {rank}: {_last_word(failures[rank])}" for rank in ranks[1:]]
    return "\n".join(parts)


def _last_word(failure: str) -> str:
    lines = failure.rstrip().splitlines()
    return lines[0] if lines[0].startswith("the process died") else lines[-1]


def _work(
    rank: int,
    world_size: int,
    port: int,
    device: str,
    pipe: Connection,
    stack: Connection,
    search: dict[str, str | None],
) -> None:
    _set_environment(search)
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    if device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        torch.set_num_threads(1)
    # Open until the process ends, which may still crash after this function. What finds no room in it is cut off.
    descriptor = os.dup(stack.fileno())
    os.set_blocking(descriptor, False)
    faulthandler.enable(descriptor)
    faulthandler.register(STACK_SIGNAL, descriptor, all_threads=True)
    with contextlib.suppress(EOFError, KeyboardInterrupt), process_group(GROUP_TIMEOUT_SECONDS):
        while True:
            function, args = pipe.recv()
            # What is alive between tasks is modules, which receiving the function has loaded: the collection after the
            # task need not look through all of torch again, which takes longer than many a task.
            gc.freeze()
            try:
                with temporary_groups():
                    # Told before the ranks meet to give up their groups: one of them may be gone, or hang.
                    pipe.send((True, function(*args)))
            except BaseException:
                pipe.send((False, traceback.format_exc()))
