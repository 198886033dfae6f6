"""Traces of layouts for tests: made by the shared workers, and kept where several tests look at the same."""

from functools import cache

import torch.distributed as dist

from parallel.config import ParallelConfig
from tests.distributed.harness import run_workers
from tests.distributed.tiny_models import MODELS
from trainer.models.config import ModelConfig
from trainer.parity import Trace, compare, trace_layout
from trainer.parity_layouts import Layout

ONE = Layout(1, ParallelConfig())


def trace_on_rank_0(model: ModelConfig, parallel: ParallelConfig, options: dict) -> Trace | None:
    """Runs in the workers. That ranks agree is part of the trace."""
    trace = trace_layout(model, parallel, **options)
    return trace if dist.get_rank() == 0 else None


def trace_of(layout: Layout, model: ModelConfig, **options) -> Trace:
    """Steps after the first are clipped, unless the options say otherwise."""
    options = {"clip_later": True, **options}
    return run_workers(trace_on_rank_0, layout.num_processes, model, layout.parallel, options)[0]


@cache
def one_process(name: str, recipe: str = "fp64", micro_steps: int = 1) -> Trace:
    return trace_of(ONE, MODELS[name], recipe=recipe, micro_steps=micro_steps)


def assert_same(trace: Trace, reference: Trace, bound: float) -> None:
    mismatches = compare(trace, reference, bound)
    assert not mismatches, "\n".join(str(mismatch) for mismatch in mismatches[:10])
