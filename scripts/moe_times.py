"""How bench_moe.py times sides that share a card: as a training run would find them, and none at another's cost.

A card at its power limit lowers its clock by a quarter within a second, the more the hotter it is. So every side works
for half a second before it is timed, and the sides take turns forwards and backwards: each follows each as often. A
time is of several calls in a row, queued behind a pause in which the host gets ahead, as in a training step.
"""

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from scripts.moe_sides import Problem, Side, step

REPEATS = 8
# How long a side works before it is timed.
WARM_SECONDS = 0.5
# Clock cycles of the device for which the host may run ahead: about 8 milliseconds.
HEAD_START = 15_000_000


def time_sides(sides: dict[str, Side], problem: Problem, rounds: int) -> dict[str, list[tuple[float, float]]]:
    """{name: (forward, forward with backward) in ms of every round}; of an even number of rounds."""
    leaf, cuda = problem.x_TD.detach().requires_grad_(), problem.x_TD.is_cuda
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
    for number in range(rounds + 1):
        for name in list(sides) if number % 2 else reversed(sides):
            work = partial(step, sides[name], leaf, problem.grad_TD)
            keep_at_it(work, cuda)
            both = milliseconds(work, cuda)
            forward = milliseconds(partial(sides[name].forward, leaf), cuda)
            # The first round compiles what is left and warms the card up.
            if number:
                times[name].append((forward, both))
    return times


def milliseconds(work: Callable[[], Any], cuda: bool, repeats: int = REPEATS) -> float:
    """Time of one call; on a GPU the mean of several, queued behind each other."""
    if not cuda:
        start = time.perf_counter()
        work()
        return (time.perf_counter() - start) * 1e3
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(HEAD_START)
    begin.record()
    for _ in range(repeats):
        work()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / repeats


def keep_at_it(work: Callable[[], Any], cuda: bool) -> None:
    """Work for a while, as in training."""
    took = milliseconds(work, cuda, repeats=2)
    if cuda:
        for _ in range(round(WARM_SECONDS * 1e3 / took)):
            work()


def host_milliseconds(side: Side, problem: Problem) -> float | None:
    """How long the host takes for one step, which the device works off later; None without a GPU."""
    if not problem.x_TD.is_cuda:
        return None
    leaf, times = problem.x_TD.detach().requires_grad_(), []
    for _ in range(REPEATS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        step(side, leaf, problem.grad_TD)
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times)
