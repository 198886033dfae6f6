"""Traces of layouts for tests: made by the shared workers, and kept where several tests look at the same."""

import torch.distributed as dist

from parallel.config import ParallelConfig
from parallel.sizes import resolve_sizes
from tests.distributed.harness import run_workers
from tests.distributed.tiny_models import MODELS
from trainer.models.config import ModelConfig
from trainer.parity import Trace, compare, trace_layout
from trainer.parity_layouts import Layout


def settled(num_processes: int, **sizes) -> Layout:
    return Layout(num_processes, resolve_sizes(ParallelConfig(**sizes), num_processes))


ONE = settled(1)


def trace_on_rank_0(model: ModelConfig, parallel: ParallelConfig, options: dict) -> Trace | None:
    """Runs in the workers. Steps after the first are clipped, unless the options say otherwise."""
    trace = trace_layout(model, parallel, **{"clip_later": True, **options})
    return trace if dist.get_rank() == 0 else None


def trace_of(layout: Layout, model: ModelConfig, **options) -> Trace:
    return run_workers(trace_on_rank_0, layout.num_processes, model, layout.parallel, options)[0]


_KEPT: dict[tuple[int, str, str, str], Trace] = {}


def kept(layout: Layout, name: str, recipe: str = "fp64") -> Trace:
    """The trace of a model by name, made once."""
    key = (layout.num_processes, layout.name, name, recipe)
    if key not in _KEPT:
        _KEPT[key] = trace_of(layout, MODELS[name], recipe=recipe)
    return _KEPT[key]


def one_process(name: str, recipe: str = "fp64") -> Trace:
    return kept(ONE, name, recipe)


def assert_same(trace: Trace, reference: Trace, bound: float) -> None:
    mismatches = compare(trace, reference, bound)
    assert not mismatches, "\n".join(str(mismatch) for mismatch in mismatches[:10])
