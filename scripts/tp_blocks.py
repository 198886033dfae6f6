"""Two dense blocks of a model under tensor parallelism with parallel.async_tp none and native, for bench_async_tp."""

import argparse
import statistics
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from parallel.config import ParallelConfig
from parallel.mesh import build_mesh
from scripts.bench_times import CYCLES_PER_SECOND, MOST_LEAD, host_seconds, max_over_ranks, seconds_of
from trainer.build import build_model
from trainer.config import Config, PrecisionConfig, TrainConfig
from trainer.models.config import AttentionConfig, ModelConfig
from trainer.parity import synthetic_batches
from trainer.step import forward

# Dense blocks as wide as those of 8B models; --dry-run.
BLOCKS = ModelConfig(
    name="blocks", vocab_size=1024, dim=4096, num_layers=2, num_dense_layers=2, ffn_dim=14336, max_seq_len=4096,
    attention=AttentionConfig(num_heads=32, num_kv_heads=8, head_dim=128),
)  # fmt: skip
TINY = replace(
    BLOCKS, dim=64, ffn_dim=128, vocab_size=64, attention=AttentionConfig(num_heads=16, num_kv_heads=8, head_dim=8)
)


def precision_of(arguments: argparse.Namespace) -> PrecisionConfig:
    """Of the blocks of a model: every linear in the recipe."""
    if arguments.recipe != "bf16":
        return PrecisionConfig(recipe=arguments.recipe, linears=["*"], linears_exclude=[])
    return PrecisionConfig(recipe="fp32" if arguments.dry_run else "bf16")


def measure_blocks(arguments: argparse.Namespace, device: torch.device) -> tuple[dict[str, float], dict[str, float]]:
    """Milliseconds of forward and backward of two dense blocks, per value of parallel.async_tp, and those of the host.

    Both are of cards at work, by turns: what is measured first would find them cool, and faster.
    """
    steps = {mode: blocks_step(arguments, device, mode) for mode in ("none", "native")}
    warm, calls = (0, 1) if arguments.dry_run else (10, 10)
    rounds: dict[str, list[float]] = {mode: [] for mode in steps}
    hosts: dict[str, float] = {}
    for number in range(arguments.rounds + 1):
        for mode in list(steps) if number % 2 else reversed(list(steps)):
            for _ in range(warm):
                steps[mode]()
            if not number:
                hosts[mode] = 1e3 * max_over_ranks(host_seconds(steps[mode], device, 1))
            seconds = seconds_of(steps[mode], device, calls)
            if number:
                rounds[mode].append(seconds)
    # Afterwards: what a profiler leaves behind makes the host slower.
    if arguments.trace is not None:
        for mode, step in steps.items():
            trace_step(step, arguments.trace, mode)
    return {mode: 1e3 * max_over_ranks(statistics.median(found)) for mode, found in rounds.items()}, hosts


def blocks_step(arguments: argparse.Namespace, device: torch.device, mode: str) -> Callable[[], None]:
    """Forward and backward of two dense blocks with this parallel.async_tp."""
    compiled = not (arguments.eager or arguments.dry_run)
    mesh = build_mesh(ParallelConfig(tp=arguments.nproc, async_tp=mode, compile=compiled), device)
    batch_size = 2 if arguments.dry_run else 4
    config = Config(
        train=TrainConfig(
            global_batch_size=batch_size,
            micro_batch_size=batch_size,
            seq_len=16 if arguments.dry_run else BLOCKS.max_seq_len,
        ),
        model=TINY if arguments.dry_run else BLOCKS,
        parallel=mesh.config,
        precision=precision_of(arguments),
    )
    model = build_model(config, mesh)
    (batch,) = synthetic_batches(config, mesh, 0)
    if device.type == "cuda":
        # As in training: a copy from other memory would make the host wait, and the device after it.
        batch = batch.pin_memory()

    def step() -> None:
        output = forward(model, batch, device, config.data.document_mask)
        assert output.loss_sum is not None
        output.loss_sum.backward()
        model.zero_grad(set_to_none=True)

    return step


def trace_step(step: Callable[[], None], folder: Path, mode: str) -> None:
    """Profiler's traces, for chrome://tracing and Perfetto: of rank 0's host and device, and of each rank's device.

    The first shows what the host spends its time on, which the profiler makes longer: the device waits for it there. In
    the others the host is ahead for the first steps of four, and devices get as warm as they do at work.
    """
    folder.mkdir(parents=True, exist_ok=True)
    step()
    has_gpu = torch.cuda.is_available()
    with profile(activities=[ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * has_gpu) as trace:
        step()
        if has_gpu:
            torch.cuda.synchronize()
    if dist.get_rank() == 0:
        trace.export_chrome_trace(str(folder / f"blocks_{mode}_host.json.gz"))
    if not has_gpu:
        return
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        torch.cuda._sleep(int(MOST_LEAD * CYCLES_PER_SECOND))
        for _ in range(4):
            step()
        torch.cuda.synchronize()
    trace.export_chrome_trace(str(folder / f"blocks_{mode}_rank{dist.get_rank()}.json.gz"))
