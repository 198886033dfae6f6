"""The parity check finds planted faults, and says which quantity each one breaks (DESIGN section 6, CASES 8)."""

from functools import cache

import pytest
import torch.distributed as dist

from parallel.config import ParallelConfig
from tests.distributed.faults import FAULTS
from tests.distributed.harness import run_workers
from tests.distributed.tiny_models import QWEN3
from trainer.parity import Mismatch, Trace, compare, trace_layout

# As loose as any bound of the parity tests: the faults must stand out even in fp32.
BOUND = 5e-6

# fault -> quantities that must be reported, quantities that must not (a fault is found where it is).
EXPECTED = {
    "gradient_scaled_by_two": (
        ["gradient layers.0.attention.wq.weight", "grad_norm of step 0", "final layers.0.attention.wq.weight"],
        ["gradient layers.0.attention.wk.weight", "loss of step 0"],
    ),
    "router_gradient_dropped": (
        ["gradient layers.0.moe.router.weight", "gradient layers.1.moe.router.weight"],
        ["loss of step 0", "gradient layers.1.moe.experts.w_down", "counts of step 0"],
    ),
    "expert_rows_swapped": (["loss of step 0", "gradient layers.0.moe.experts.w_down"], ["initial norm.weight"]),
    "experts_swapped_on_a_rank": (["loss of step 0", "gradient layers.0.moe.experts.w_gate_up"], []),
    "counts_doubled": (["counts of step 0", "aux_loss of step 0"], ["loss of step 0"]),
    "loss_of_a_rank_weighted_wrongly": (["loss of step 0", "gradient head.weight"], ["counts of step 0"]),
    "mean_of_rank_means": (["loss of step 0", "gradient head.weight"], ["counts of step 0"]),
    "gradients_averaged": (
        ["gradient norm.weight", "gradient layers.1.moe.router.weight", "grad_norm of step 0"],
        ["loss of step 0", "gradient layers.1.moe.experts.w_down"],
    ),
    "norm_misses_other_shards": (["grad_norm of step 0"], ["loss of step 0", "gradient head.weight"]),
    "local_counts_in_auxiliary_loss": (
        ["aux_loss of step 0", "gradient layers.1.moe.router.weight"],
        ["loss of step 0", "counts of step 0"],
    ),
    "last_rank_not_combined": (["loss of step 0", "gradient layers.0.moe.router.weight"], []),
    "padding_routed": (["counts of step 0", "aux_loss of step 0"], ["loss of step 0"]),
    "initial_weights_depend_on_the_rank": (["initial layers.0.moe.experts.w_down", "initial head.weight"], []),
}


def trace_with_fault(fault: str) -> Trace | None:
    with FAULTS[fault]():
        trace = trace_layout(QWEN3, ParallelConfig(ep=dist.get_world_size()), steps=1)
    return trace if dist.get_rank() == 0 else None


@cache
def one_process() -> Trace:
    return run_workers(trace_with_fault, 1, "none")[0]


def find(fault: str) -> list[Mismatch]:
    return compare(run_workers(trace_with_fault, 2, fault)[0], one_process(), BOUND)


def test_every_fault_has_an_expectation() -> None:
    assert EXPECTED.keys() == FAULTS.keys() - {"none"}
    assert len(EXPECTED) >= 5


@pytest.mark.parametrize("fault", EXPECTED)
def test_planted_fault_is_found_by_name(fault: str) -> None:
    reported = {mismatch.quantity for mismatch in find(fault)}
    present, absent = EXPECTED[fault]
    assert reported >= set(present), (sorted(set(present) - reported), sorted(reported))
    assert not reported & set(absent), sorted(reported & set(absent))


def test_without_a_fault_nothing_is_reported() -> None:
    """Run last: the workers that carried the faults are clean again."""
    assert find("none") == []
