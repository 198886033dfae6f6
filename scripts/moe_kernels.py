"""Our kernels of a MoE layer one by one: products in TFLOP/s, movements of rows and the sort in GB/s.

Bytes are what a kernel must read and write once. Shape suffixes as in moe/fused_experts.py.
"""

import statistics
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from comms.kernels.gather_sum import gather_sum
from moe.fused_experts import down, down_backward, up, up_grad, weight_grad, weight_grad_and_sums
from moe.kernels.pair_rows import expand_rows, gather_rows
from moe.kernels.sort_pairs import sort_pairs
from scripts.moe_sides import Problem, Shape, draw_ids
from scripts.moe_times import milliseconds

ROUNDS = 5


class Work(NamedTuple):
    """A kernel's call, and what it does: operations in TFLOP or bytes in GB."""

    run: Callable[[], Any]
    amount: float
    unit: str


def measure_kernels(problem: Problem, routing: str) -> dict[str, dict[str, Any]]:
    """{kernel: ms, rate, unit}; medians of rounds that run every kernel."""
    ids_RK = draw_ids(problem.shape, routing, problem.x_TD.device)
    works = product_works(problem, ids_RK) | movement_works(problem.x_TD, ids_RK, problem.shape)
    times: dict[str, list[float]] = {name: [] for name in works}
    for measured in [False] + [True] * ROUNDS:
        for name, work in works.items():
            ms = milliseconds(work.run, cuda=True)
            if measured:
                times[name].append(ms)
    medians = {name: statistics.median(found) for name, found in times.items()}
    return {
        name: {"ms": medians[name], "rate": work.amount / medians[name] * 1e3, "unit": work.unit}
        for name, work in works.items()
    }


def product_works(problem: Problem, ids_RK: Tensor) -> dict[str, Work]:
    """The grouped products with what is fused into them."""
    shape, w_up, w_down = problem.shape, problem.w_gate_up_E2FD, problem.w_down_EDF
    P = ids_RK.numel()
    pairs = sort_pairs(ids_RK, shape.experts, P)
    offsets_E = pairs.offsets_E
    weights_P = torch.full((P,), 1 / shape.top_k, device=ids_RK.device)
    rows_PD = expand_rows(problem.x_TD, pairs.slots_RK, P)
    dout_PD = expand_rows(problem.grad_TD, pairs.slots_RK, P)
    of_up = problem.x_TD, pairs.rows_P, weights_P, w_up, None, offsets_E, "swiglu"
    h_PH, a_PF = up(*of_up)
    of_down = problem.grad_TD, problem.x_TD, pairs.slots_RK, weights_P, w_down, offsets_E, h_PH, "swiglu"
    # Operations of the down map; of the two maps before it twice as many.
    one = 2 * P * shape.dim * shape.hidden / 1e12
    works: dict[str, tuple[Callable[[], Any], float]] = {
        "up": (partial(up, *of_up), 2 * one),
        "down": (partial(down, a_PF, w_down, None, weights_P, offsets_E), one),
        # Two products, two copies of rows and the activation's gradient.
        "down_backward": (partial(down_backward, *of_down), 2 * one),
        "weight_grad down": (partial(weight_grad, dout_PD, a_PF, offsets_E), one),
        # h stands for its gradient, which has the same size.
        "up_grad": (partial(up_grad, h_PH, w_up, offsets_E), 2 * one),
        "weight_grad up": (partial(weight_grad, h_PH, rows_PD, offsets_E), 2 * one),
        # As backward has it, with sums beside it; rows_PD stands for gradients of pairs.
        "weight_grad + sums": (
            partial(weight_grad_and_sums, h_PH, rows_PD, offsets_E, rows_PD, pairs.slots_RK),
            2 * one,
        ),
    }
    return {name: Work(run, amount, "TFLOP/s") for name, (run, amount) in works.items()}


def movement_works(x_RD: Tensor, ids_RK: Tensor, shape: Shape) -> dict[str, Work]:
    """The sort, rows to pairs in both ways, and pairs to rows."""
    P = ids_RK.numel()
    pairs = sort_pairs(ids_RK, shape.experts, P)
    y_PD = expand_rows(x_RD, pairs.slots_RK, P)
    # Ids, and three tables of int32.
    sort_bytes = P * (ids_RK.element_size() + 3 * 4)
    row_bytes = (y_PD.numel() + x_RD.numel()) * x_RD.element_size()
    works: dict[str, tuple[Callable[[], Any], int]] = {
        "sort": (partial(sort_pairs, ids_RK, shape.experts, P), sort_bytes),
        "expand by slots": (partial(expand_rows, x_RD, pairs.slots_RK, P), row_bytes),
        "expand by rows": (partial(gather_rows, x_RD, pairs.rows_P), row_bytes),
        "sums": (partial(gather_sum, y_PD, pairs.slots_RK), row_bytes),
        "copy": (y_PD.clone, 2 * y_PD.numel() * y_PD.element_size()),
    }
    return {name: Work(run, amount / 1e9, "GB/s") for name, (run, amount) in works.items()}
