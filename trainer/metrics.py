"""Metrics of a run: metrics.jsonl always, W&B if asked for, and the console. Rank 0 writes; the others only measure.

metrics.jsonl   one line per logged step (names and rules: `metrics_file`)
events.jsonl    what happened when: starts, resumes, checkpoints, signals
log.txt         every line that the console showed
"""

import dataclasses
import resource
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from comms.symmetric_memory import exposed_seconds
from moe.load_balance import load_stats
from parallel.mesh import Mesh
from trainer.config import Config
from trainer.console import Console, open_console
from trainer.evaluate import EvalResult
from trainer.flops import flops_per_token, peak_tflops
from trainer.metrics_file import JsonLines, MetricsFile, finite, read_metrics
from trainer.run import RunFolder
from trainer.step import StepResult
from trainer.wandb_run import WandbRun

__all__ = ["MetricsWriter", "RunMetrics", "read_metrics"]

_GIB = 2.0**30


class MetricsWriter:
    """Every place a rank-0 process writes measurements to."""

    def __init__(self, config: Config, folder: RunFolder, total_steps: int) -> None:
        self._attempt = folder.attempt
        path = folder.path / "metrics.jsonl"
        self._file = MetricsFile(path, folder.attempt, config.data.eval, add=config.train.eval_only)
        self._events = JsonLines(folder.path / "events.jsonl")
        self._console: Console = open_console(config.logging.console, total_steps, folder.path / "log.txt")
        self._wandb = WandbRun(folder.path, config.logging.wandb, folder.run_id, dataclasses.asdict(config))

    @property
    def wandb_run_id(self) -> str | None:
        """The W&B id, which checkpoints keep; None when W&B is disabled."""
        return self._wandb.id

    def log(self, step: int, tokens: int, values: Mapping[str, Any]) -> None:
        """Write one step's values by name; see MetricsFile.write for rules and errors."""
        for name in [name for name, value in values.items() if value is not None and finite(value) is None]:
            self.event("nonfinite", step=step, name=name, value=str(values[name]))
        record = self._file.write(step, tokens, values)
        self._wandb.log(record)
        self._console.progress(step, values)

    def event(self, kind: str, **fields: Any) -> None:
        """Append to events.jsonl."""
        self._events.write({"time": time.time(), "attempt": self._attempt, "event": kind, **fields})

    def say(self, text: str) -> None:
        """Tell the user."""
        self._console.say(text)

    def close(self, exit_code: int) -> None:
        """Flush and close every place."""
        self._wandb.close(exit_code)
        self._console.close()
        self._events.close()
        self._file.close()


class RunMetrics:
    """Measures a run and hands the results to rank 0's MetricsWriter. Made on every rank.

    The window of `perf/*` goes from one `log` to the next, without what `pause` encloses (evaluation, saving).
    """

    def __init__(self, config: Config, folder: RunFolder, mesh: Mesh, total_steps: int | None = None) -> None:
        self._config, self._mesh = config, mesh
        total_steps = config.train.steps if total_steps is None else total_steps
        self._writer = MetricsWriter(config, folder, total_steps) if mesh.rank == 0 else None
        self._flops_per_token = flops_per_token(config.model, config.train.seq_len)
        name = torch.cuda.get_device_name(mesh.device) if mesh.device.type == "cuda" else ""
        self._peak_tflops = config.cluster.peak_tflops or peak_tflops(name)
        self._tokens_per_step = config.train.global_batch_size * config.train.seq_len
        # Tokens trained on up to a step; from there on every step adds the same number.
        self._known_step = self._known_tokens = 0
        self._window_step: int | None = None
        self.begin(0)
        kind = "evaluation" if config.train.eval_only else "start"
        self.event(kind, world_size=mesh.world_size, run_id=folder.run_id, device=name or "cpu")

    # ---- measuring

    def begin(self, step: int) -> None:
        """Start a window of time: `step` optimizer steps are done. Called before the first step and by `log`."""
        self._window_step, self._window_start = step, time.perf_counter()
        self._paused = self._data_seconds = 0.0

    @contextmanager
    def pause(self) -> Generator[None, None, None]:
        """Time that is no part of training: evaluation, saving."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self._paused += time.perf_counter() - start

    @contextmanager
    def waiting_for_data(self) -> Generator[None, None, None]:
        """Time in which the loop waits for the next batch."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self._data_seconds += time.perf_counter() - start

    def log(
        self, step: int, result: StepResult, lr: float | None = None, evals: Mapping[str, EvalResult] | None = None
    ) -> None:
        """Write a step's metrics, those of the time since the last call, and of the step's evaluation if there was one.

        Collective; waits for the device.
        """
        values = {
            **_train_values(result, lr),
            **_eval_values(evals or {}),
            **_moe_values(result),
            **self._perf_values(step),
        }
        if self._writer is not None:
            self._writer.log(step, self.tokens(step), values)
        self.begin(step)

    def log_eval(self, step: int, results: Mapping[str, EvalResult]) -> None:
        """Write an evaluation that no training step belongs to."""
        if self._writer is not None:
            self._writer.log(step, self.tokens(step), _eval_values(results))

    def _perf_values(self, step: int) -> dict[str, float | None]:
        if self._mesh.device.type == "cuda":
            torch.cuda.synchronize(self._mesh.device)
        seconds = time.perf_counter() - self._window_start - self._paused
        steps = step - (self._window_step or 0)
        measured = [_peak_memory_gib(self._mesh.device), self._data_seconds, exposed_seconds()]
        peak_gib, data_seconds, exposed = self._worst(measured)
        if steps < 1 or seconds <= 0:
            return {"perf/peak_memory_gib": peak_gib}
        tokens_per_second = steps * self._tokens_per_step / seconds
        per_device = tokens_per_second / self._mesh.world_size
        tflops = per_device * self._flops_per_token / 1e12
        return {
            "perf/tokens_per_second": tokens_per_second,
            "perf/tokens_per_second_per_gpu": per_device,
            "perf/tflops_per_gpu": tflops,
            "perf/mfu": None if self._peak_tflops is None else tflops / self._peak_tflops,
            "perf/step_seconds": seconds / steps,
            "perf/data_seconds": data_seconds / steps,
            # Evaluations of the window included.
            "perf/exposed_exchange_seconds": exposed / steps if self._config.comms.measure else None,
            "perf/peak_memory_gib": peak_gib,
        }

    def _worst(self, values: Sequence[float]) -> list[float]:
        """Elementwise maximum over ranks."""
        tensor = torch.tensor(values, dtype=torch.float64, device=self._mesh.device)
        if dist.is_initialized():
            dist.all_reduce(tensor, dist.ReduceOp.MAX)
        return tensor.tolist()

    # ---- telling; nothing happens on ranks other than 0

    def say(self, text: str) -> None:
        """Tell the user."""
        if self._writer is not None:
            self._writer.say(text)

    def event(self, kind: str, **fields: Any) -> None:
        """Append to events.jsonl."""
        if self._writer is not None:
            self._writer.event(kind, **fields)

    def tokens(self, step: int) -> int:
        """Tokens of all steps up to `step`, padding included, whatever batch sizes earlier attempts had."""
        return self._known_tokens + (step - self._known_step) * self._tokens_per_step

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps of it; put it into the checkpoint's `extra`, at its top level."""
        return {"wandb_run_id": self._writer.wandb_run_id if self._writer is not None else None}

    def count_from(self, extra: Mapping[str, Any]) -> None:
        """Go on counting tokens from a checkpoint with this `extra`."""
        step = int(extra["step"])
        # Checkpoints of earlier versions do not know.
        self._known_tokens = int(extra.get("tokens", step * self._tokens_per_step))
        self._known_step = step

    def resume(self, extra: Mapping[str, Any]) -> None:
        """Note that the run continues from a checkpoint with this `extra`."""
        self.count_from(extra)
        self.begin(int(extra["step"]))
        self.event("resume", step=extra["step"])

    def close(self, exit_code: int = 0) -> None:
        """Flush everything; W&B gets the exit code."""
        if self._writer is not None:
            self._writer.close(exit_code)
            self._writer = None


def _train_values(result: StepResult, lr: float | None) -> dict[str, float | None]:
    tensors = {
        "train/loss": result.loss,
        "train/aux_loss": result.aux_loss,
        "train/z_loss": result.z_loss,
        "train/grad_norm": result.grad_norm,
    }
    if result.mtp_loss is not None:
        tensors["train/mtp_loss"] = result.mtp_loss
    # One copy from the device.
    values = torch.stack([value.detach().double() for value in tensors.values()]).tolist()
    return {**dict(zip(tensors, values, strict=True)), "train/lr": lr}


def _eval_values(results: Mapping[str, EvalResult]) -> dict[str, float | None]:
    values: dict[str, float | None] = {}
    for name, result in results.items():
        values[f"eval/{name}/loss"] = result.loss
        values[f"eval/{name}/bits_per_byte"] = result.bits_per_byte
    return values


def _moe_values(result: StepResult) -> dict[str, Any]:
    counts_LE = result.tokens_per_expert_LE
    if counts_LE is None:
        return {}
    loads = {f"moe/{name}": value for name, value in load_stats(counts_LE).items()}
    return {**loads, "moe/dropped_rows": int(result.dropped), "moe/tokens_per_expert": counts_LE.tolist()}


def _peak_memory_gib(device: torch.device) -> float:
    """Most memory allocated on the device since the process began; on the CPU, the most that the process held."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / _GIB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / _GIB
