"""How benchmarks of exchanges time a call: on the slowest rank, with the launches already queued."""

import statistics
import time
from collections.abc import Callable
from typing import Any

if __name__ == "__main__":
    raise SystemExit("scripts/bench_times.py is a part of other benchmarks, and measures nothing: run one of those")

import torch
import torch.distributed as dist

# Seconds for which a device pauses, so that the host is ahead of it: at least, and at most.
LEAD, MOST_LEAD = 0.015, 0.15
CYCLES_PER_SECOND = 2e9


def slowest(function: Callable[[], Any], device: torch.device, rounds: int) -> float:
    """Seconds of one call on the slowest rank: median over rounds of the mean of several calls."""
    with torch.no_grad():
        calls = 3 if device.type == "cpu" else 10
        seconds = [seconds_of(function, device, calls) for _ in range(rounds + 1)][1:]
    return max_over_ranks(statistics.median(seconds))


def host_seconds(function: Callable[[], Any], device: torch.device, calls: int) -> float:
    """For how long the host is busy with a call, where nothing waits for the device: what its launches cost."""
    dist.barrier()
    if device.type == "cuda":
        torch.cuda.synchronize()
    begun = time.perf_counter()
    for _ in range(calls):
        function()
    return (time.perf_counter() - begun) / calls


def lead_for(launching: float, calls: int) -> float:
    """How long a pause hides that the host needs so many seconds for each of `calls` and one more."""
    return min(max(LEAD, 1.3 * launching * (calls + 1)), MOST_LEAD)


def seconds_of(function: Callable[[], Any], device: torch.device, calls: int, lead: float = LEAD) -> float:
    """Mean time of a call, without the time that the host needs to launch it, as far as a pause of `lead` hides it."""
    dist.barrier()
    if device.type == "cpu":
        start = time.perf_counter()
        for _ in range(calls):
            function()
        return (time.perf_counter() - start) / calls
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    # The host gets ahead meanwhile; then a call, after which the ranks' devices are together.
    torch.cuda._sleep(int(lead * CYCLES_PER_SECOND))
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
