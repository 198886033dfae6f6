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
    "shared_gradients_not_summed": (
        ["gradient norm.weight", "gradient layers.0.moe.router.weight", "copies of gradient norm.weight"],
        ["loss of step 0", "gradient head.weight", "gradient layers.0.attention.wq.weight"],
    ),
    "shared_gradients_summed_twice": (
        ["gradient norm.weight", "gradient layers.0.moe.router.weight", "grad_norm of step 0"],
        ["loss of step 0", "gradient head.weight", "copies of gradient norm.weight"],
    ),
    "gathered_input_keeps_its_own_gradient": (
        ["gradient layers.0.attention_norm.weight", "gradient norm.weight", "gradient tok_embeddings.weight"],
        ["loss of step 0", "gradient head.weight"],
    ),
    "router_out_of_sync": (["counts of step 0", "loss of step 0", "gradient layers.0.moe.router.weight"], []),
    "router_copies_differ": (
        ["copies of initial layers.0.moe.router.weight", "copies of final layers.0.moe.router.weight"],
        ["copies of initial layers.1.moe.router.weight"],
    ),
    "clipped_by_own_norm": (
        ["final head.weight", "final layers.0.moe.router.weight", "loss of step 2"],
        ["grad_norm of step 0", "grad_norm of step 1", "gradient head.weight"],
    ),
    "norm_misses_split_weights": (["grad_norm of step 0"], ["loss of step 0", "gradient head.weight"]),
    "merge_is_one_block_behind": (
        ["loss of step 0", "gradient layers.0.attention.wq.weight", "gradient layers.1.attention.wo.weight"],
        ["initial layers.0.attention.wq.weight"],
    ),
    "weight_cache_is_stale": (
        ["loss of step 1", "final layers.0.moe.experts.w_down", "grad_norm of step 1"],
        ["loss of step 0", "grad_norm of step 0", "gradient layers.0.moe.experts.w_down"],
    ),
    "auxiliary_gradient_dropped": (
        ["gradient layers.0.moe.router.weight", "gradient layers.1.moe.router.weight", "grad_norm of step 0"],
        ["loss of step 0", "aux_loss of step 0", "counts of step 0", "gradient head.weight"],
    ),
}
# Faults of two processes of an axis other than ep.
AXIS = dict.fromkeys(
    (
        "shared_gradients_not_summed",
        "shared_gradients_summed_twice",
        "gathered_input_keeps_its_own_gradient",
        "router_copies_differ",
        "norm_misses_split_weights",
    ),
    "tp",
) | {"merge_is_one_block_behind": "cp"}
# What only a second step can show.
LATER = ("clipped_by_own_norm", "weight_cache_is_stale")


def trace_with_fault(fault: str, axis: str, steps: int) -> Trace | None:
    with FAULTS[fault]():
        parallel = ParallelConfig(**{axis: dist.get_world_size()})
        trace = trace_layout(QWEN3, parallel, steps=steps, clip_later=True)
    return trace if dist.get_rank() == 0 else None


@cache
def one_process(steps: int) -> Trace:
    return run_workers(trace_with_fault, 1, "none", "ep", steps)[0]


def find(fault: str, axis: str) -> list[Mismatch]:
    steps = 3 if fault in LATER else 1
    return compare(run_workers(trace_with_fault, 2, fault, axis, steps)[0], one_process(steps), BOUND)


def test_every_fault_has_an_expectation() -> None:
    assert EXPECTED.keys() == FAULTS.keys() - {"none"}
    assert EXPECTED.keys() >= {*AXIS, *LATER}


@pytest.mark.parametrize("fault", EXPECTED)
def test_planted_fault_is_found_by_name(fault: str) -> None:
    reported = {mismatch.quantity for mismatch in find(fault, AXIS.get(fault, "ep"))}
    present, absent = EXPECTED[fault]
    assert reported >= set(present), (sorted(set(present) - reported), sorted(reported))
    assert not reported & set(absent), sorted(reported & set(absent))


def test_without_a_fault_nothing_is_reported() -> None:
    """Run last: the workers that carried the faults are clean again."""
    assert [find("none", axis) for axis in ("ep", "tp", "cp")] == [[], [], []]
