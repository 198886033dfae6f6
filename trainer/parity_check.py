"""Compare the layouts of one config with one process: worker processes, and a verdict for each layout.

`trainer/parity.py` says what is compared, `trainer/parity_layouts.py` what a layout is.
"""

import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from parallel.config import ParallelConfig
from trainer.models.config import ModelConfig
from trainer.parity import BOUNDS, Mismatch, Trace, compare, trace_layout, worst_error
from trainer.parity_layouts import Layout
from trainer.parity_model import batch_shape
from trainer.worker_pool import WorkerError, WorkerPool

STEPS = 3
# A group that waits for a compiler, or for many processes on few cores, is not stuck.
TIMEOUT_SECONDS = 600.0


@dataclass(frozen=True)
class Verdict:
    """What came of one layout."""

    layout: Layout
    # What went wrong first comes first.
    mismatches: list[Mismatch]
    # The gradient with the largest error, within its bound or not.
    worst_name: str
    worst_error: float
    seconds: float
    # What the workers said when one failed; None where the layout ran.
    failure: str | None = None

    @property
    def is_right(self) -> bool:
        """Whether the layout computes what one process computes."""
        return self.failure is None and not self.mismatches


class Workers:
    """Pools by number of processes: each is started once, and again only after a failure."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.pools: dict[int, WorkerPool] = {}

    def start(self, sizes: Iterable[int]) -> None:
        """Start pools that will be needed; they come up side by side."""
        for size in sizes:
            self.pool(size)

    def pool(self, size: int) -> WorkerPool:
        """The pool of `size` processes."""
        pool = self.pools.get(size)
        if pool is None or pool.broken:
            pool = self.pools[size] = WorkerPool(size, self.device)
        return pool

    def close(self) -> None:
        """End all processes."""
        for pool in self.pools.values():
            pool.close()


class ParityCheck:
    """One tiny model, compared layout by layout with one process without any of the layout's settings."""

    def __init__(self, model: ModelConfig, recipe: str, workers: Workers, micro_steps: int = 1) -> None:
        # In bf16 a token near a tie would go to another expert for a rounding.
        by_position = replace(model, moe=replace(model.moe, force_balance=True))
        self.model = by_position if recipe == "bf16" else model
        self.recipe, self.workers, self.micro_steps = recipe, workers, micro_steps
        # Seconds after which a trace is stuck; of the next `check`.
        self.timeout = TIMEOUT_SECONDS
        # By batch size and length, which depend on the number of processes if that is no power of 2.
        self.references: dict[tuple[int, int], Trace] = {}

    def check(self, layout: Layout) -> Verdict:
        """Trace a layout and compare it. What goes wrong in a worker is a verdict too."""
        began = time.monotonic()
        shape = batch_shape(layout.num_processes, self.micro_steps, self.workers.device)
        try:
            reference, trace = self._both(layout, shape)
        except WorkerError as error:
            return Verdict(layout, [], "", float("inf"), time.monotonic() - began, str(error))
        mismatches = compare(trace, reference, BOUNDS[self.recipe])
        return Verdict(layout, mismatches, *worst_error(trace, reference), time.monotonic() - began)

    def _both(self, layout: Layout, shape: tuple[int, int]) -> tuple[Trace, Trace]:
        """The reference and the layout's trace; the first time side by side, since both then compile for long."""
        # Found here: no two threads may start pools at once.
        alone, pool = self.workers.pool(1), self.workers.pool(layout.num_processes)
        if shape in self.references or pool is alone:
            return self._reference(alone, shape), self._trace(pool, layout.parallel, shape)
        with ThreadPoolExecutor(2) as beside:
            reference = beside.submit(self._reference, alone, shape)
            trace = beside.submit(self._trace, pool, layout.parallel, shape)
            try:
                # Both, whatever comes of one: a pool at work can be given nothing else.
                wait([reference, trace])
                return reference.result(), trace.result()
            except (KeyboardInterrupt, SystemExit):
                # Without its processes a thread has nothing to wait for.
                self.workers.close()
                raise

    def _reference(self, pool: WorkerPool, shape: tuple[int, int]) -> Trace:
        if shape not in self.references:
            try:
                self.references[shape] = self._trace(pool, ParallelConfig(), shape)
            except WorkerError as error:
                raise WorkerError(f"not this layout, but the one process that it is compared with: {error}") from error
        return self.references[shape]

    def _trace(self, pool: WorkerPool, parallel: ParallelConfig, shape: tuple[int, int]) -> Trace:
        options: dict[str, Any] = {
            "recipe": self.recipe,
            "steps": STEPS,
            "global_batch_size": shape[0],
            "seq_len": shape[1],
            "micro_steps": self.micro_steps,
            "clip_later": True,
        }
        return pool.run(TRACE, self.model, parallel, options, timeout=self.timeout)[0]


def train_tiny_model(model: ModelConfig, parallel: ParallelConfig, options: dict[str, Any]) -> Trace | None:
    """Runs in the workers, whose failures are told under this name; rank 0 returns the trace, equal on every rank."""
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    trace = trace_layout(model, parallel, device=device, **options)
    return trace if dist.get_rank() == 0 else None


# What the workers run.
TRACE = train_tiny_model
