"""How benchmarks of exchanges time a call: on the slowest rank, with the launches already queued."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist


def slowest(function: Callable[[], Any], device: torch.device, rounds: int) -> float:
    """Seconds of one call on the slowest rank: median over rounds of the mean of several calls."""
    with torch.no_grad():
        calls = 3 if device.type == "cpu" else 10
        seconds = [seconds_of(function, device, calls) for _ in range(rounds + 1)][1:]
    return max_over_ranks(statistics.median(seconds))


def seconds_of(function: Callable[[], Any], device: torch.device, calls: int) -> float:
    """Mean time of a call, without the time that the host needs to launch it."""
    dist.barrier()
    if device.type == "cpu":
        start = time.perf_counter()
        for _ in range(calls):
            function()
        return (time.perf_counter() - start) / calls
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    # About 15 ms in which the host gets ahead; then a call, after which the ranks' devices are together.
    torch.cuda._sleep(30_000_000)
    function()
    begin.record()
    for _ in range(calls):
        function()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 1e3 / calls


def max_over_ranks(seconds: float) -> float:
    """The slowest rank's."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    value = torch.tensor(seconds, device=device)
    dist.all_reduce(value, dist.ReduceOp.MAX)
    return float(value)
