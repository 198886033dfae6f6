"""Worker processes for distributed tests: started once, reused by every test that asks for the same number.

The function must live at module level: it is pickled by name.

    def rank_times_two() -> int:
        return 2 * torch.distributed.get_rank()

    def test_ranks() -> None:
        assert run_workers(rank_times_two, 2) == [0, 2]
"""

from collections.abc import Callable
from typing import Any

from trainer.worker_pool import WorkerPool

_POOLS: dict[int, WorkerPool] = {}
_CALLS: dict[int, int] = {}
# Groups of gloo have threads that poll, and few tests end theirs: after hundreds of them half a core is busy with it.
MOST_CALLS = 60


def run_workers(function: Callable[..., Any], world_size: int, *args: Any, timeout: float = 240) -> list[Any]:
    """Run `function(*args)` on every rank of a gloo world and return the results in rank order.

    Raises:
        WorkerError: with the traceback of the first rank that failed. The pool is then restarted on its next use.
    """
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
