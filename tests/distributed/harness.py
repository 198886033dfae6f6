"""Worker processes for distributed tests: started once, reused by every test that asks for the same number.

The function must live at module level: it is pickled by name.

    def rank_times_two() -> int:
        return 2 * torch.distributed.get_rank()

    def test_ranks() -> None:
        assert run_workers(rank_times_two, 2) == [0, 2]
"""

import signal
import warnings
from collections.abc import Callable
from typing import Any

from trainer.worker_pool import WorkerError, WorkerPool

_POOLS: dict[int, WorkerPool] = {}
_CALLS: dict[int, int] = {}
# Groups of gloo have threads that poll, and few tests end theirs: after hundreds of them half a core is busy with it.
MOST_CALLS = 60
# How a worker ends whose heap torch or gloo has spoilt: nothing else is native here. Seen in one of some 15 runs of all
# tests, each time elsewhere (docs/LOG.md).
CRASHES = tuple(f"(exit code {-number})" for number in (signal.SIGABRT, signal.SIGSEGV))


def run_workers(function: Callable[..., Any], world_size: int, *args: Any, timeout: float = 240) -> list[Any]:
    """Run `function(*args)` on every rank of a gloo world and return the results in rank order.

    A worker that crashes is told as a warning, and all ranks run once more.

    Raises:
        WorkerError: with the traceback of the first rank that failed. The pool is then restarted on its next use.
    """
    try:
        return _run(function, world_size, *args, timeout=timeout)
    except WorkerError as error:
        if not any(crash in str(error) for crash in CRASHES):
            raise
        warnings.warn(f"{function.__name__} runs again, since a worker crashed:\n{error}", stacklevel=2)
    return _run(function, world_size, *args, timeout=timeout)


def _run(function: Callable[..., Any], world_size: int, *args: Any, timeout: float) -> list[Any]:
    pool = _POOLS.get(world_size)
    if pool is not None and _CALLS[world_size] >= MOST_CALLS:
        pool.close()
        pool = None
    if pool is None or pool.broken:
        pool = _POOLS[world_size] = WorkerPool(world_size)
        _CALLS[world_size] = 0
    _CALLS[world_size] += 1
    return pool.run(function, *args, timeout=timeout)


def end_workers() -> None:
    """Of every size; the next test that asks for some starts them anew."""
    for pool in _POOLS.values():
        pool.close()
    _POOLS.clear()
