"""Whole runs of a tiny model, started as a user starts them, and what they leave behind.

`Bench` holds a folder with a corpus and the runs made from it. A run's processes are this one (`alone`), the pooled
workers of the distributed tests (`pooled`: imports are paid once), or new ones under scripts/train.sh (`launch`).
"""

import contextlib
import io
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from tests.distributed.harness import run_workers
from trainer.attempt import run
from trainer.checkpoint_files import CheckpointReader
from trainer.compose import config_from_command_line
from trainer.metrics import read_metrics
from trainer.run import read_status
from trainer.train import main

ROOT = Path(__file__).resolve().parents[2]
STEPS = 20
# The vocabulary is a number that nothing divides, the balancing bias is on, and each step accumulates two micro-steps.
OVERRIDES = (
    "data=text",
    "precision=fp32",
    "data.tokenizer_vocab_size=257",
    "model.vocab_size=257",
    "model.dim=32",
    "model.num_layers=2",
    "model.attention.num_heads=2",
    "model.attention.num_kv_heads=1",
    "model.attention.head_dim=16",
    "model.moe.num_experts=4",
    "model.moe.expert_dim=16",
    "model.moe.expert_bias=true",
    "model.moe.bias_update_rate=0.01",
    f"train.steps={STEPS}",
    "train.seq_len=32",
    "train.global_batch_size=8",
    "train.micro_batch_size=2",
    "train.log_every=1",
    "train.eval_every=10",
    "optim.warmup_steps=3",
    "optim.lr=3e-3",
    "checkpoint.every=10",
    "parallel.timeout_seconds=60",
)


@dataclass
class Attempt:
    """How one attempt of a run ended, as one process saw it."""

    code: int
    out: str
    err: str
    # Sample ids of each optimizer step, in the order in which this rank saw them.
    samples: list[list[int]]


class Bench:
    """A corpus, and runs on it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.launched: list[Launch] = []
        (folder / "text").mkdir()
        rng = random.Random(0)
        words = ["".join(rng.choices("abcdefghij", k=rng.randint(2, 6))) for _ in range(60)]
        # Documents of some 200 bytes: about every fourth micro-batch has one that ends, and so one label less.
        for index in range(40):
            text = " ".join(rng.choices(words, k=45))
            (folder / "text" / f"{index:02}.txt").write_text(text)
        (folder / "text" / "latin").write_bytes("caf\u00e9 ".encode("latin-1") * 40)
        # One row and a bit: the second of two ranks has nothing but padding.
        (folder / "text" / "short").write_text("".join(rng.choices("abcdefghij", k=40)))

    def overrides(self, run_id: str, *more: str) -> list[str]:
        """The command line of a run."""
        return [
            *OVERRIDES,
            f"data.train.text.paths=[{self.folder}/text/*.txt]",
            f"data.eval.held.paths=[{self.folder}/text/0*.txt]",
            f"data.eval.short.paths=[{self.folder}/text/short]",
            f"data.cache_dir={self.folder}/cache",
            f"run.root={self.folder}/runs",
            f"run.id={run_id}",
            *more,
        ]

    def path(self, run_id: str) -> Path:
        return self.folder / "runs" / run_id

    def copy(self, run_id: str, new_id: str) -> Path:
        """The folder of a run once more, as another run."""
        return shutil.copytree(self.path(run_id), self.path(new_id))

    def alone(self, run_id: str, *more: str) -> Attempt:
        """One attempt in this process."""
        return attempt(self.overrides(run_id, *more))

    def pooled(self, run_id: str, *more: str, stop_after: int | None = None) -> list[Attempt]:
        """One attempt on two ranks; the last rank gets SIGTERM in the middle of step number `stop_after`."""
        return run_workers(attempt, 2, self.overrides(run_id, *more), stop_after)

    def launch(self, run_id: str, *more: str, on_gpus: bool = False) -> "Launch":
        """One attempt by scripts/train.sh, with two processes."""
        self.launched.append(Launch(self.folder, run_id, self.overrides(run_id, *more), on_gpus))
        return self.launched[-1]


def attempt(overrides: list[str], stop_after: int | None = None) -> Attempt:
    """What `python -m trainer.train` does, in a process that has the imports and (on a pooled rank) the group."""
    samples: list[list[int]] = []
    out, err = io.StringIO(), io.StringIO()
    with _watched_steps(samples, stop_after), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = _attempt(overrides)
        except SystemExit as ended:
            code = ended.code
    assert isinstance(code, int)
    return Attempt(code, out.getvalue(), err.getvalue(), samples)


def _attempt(overrides: list[str]) -> int:
    if dist.is_initialized():
        config, line = config_from_command_line(overrides)
        return run(config, line.overrides, torch.device("cpu"))
    with patch("parallel.process_group._device", lambda: torch.device("cpu")):
        main(overrides)
    raise AssertionError("main returned")


@contextlib.contextmanager
def _watched_steps(samples: list[list[int]], stop_after: int | None) -> Iterator[None]:
    import trainer.trainer

    step = trainer.trainer.train_step

    def watched(model: Any, optimizer: Any, batches: Any, *rest: Any) -> Any:
        samples.append([int(index) for batch in batches for index in batch.sample_ids_B])
        if len(samples) == stop_after and dist.get_rank() == dist.get_world_size() - 1:
            signal.raise_signal(signal.SIGTERM)
        return step(model, optimizer, batches, *rest)

    with patch("trainer.trainer.train_step", watched), patch("trainer.compose.SILENT_RANK_SECONDS", 0.1):
        yield


class Launch:
    """scripts/train.sh and the processes it started."""

    def __init__(self, folder: Path, run_id: str, overrides: Sequence[str], on_gpus: bool = False) -> None:
        # W&B names its service process in the environment: one that this process started must not serve the run.
        dropped = ("SLURM_", "SLUICEGATE_", "WANDB_")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
        kept |= {"PYTHON": sys.executable, "NPROC": "2", "OMP_NUM_THREADS": "1"}
        if not on_gpus:
            kept["CUDA_VISIBLE_DEVICES"] = ""
        self.run_id = run_id
        self._log = folder / f"{run_id}.{time.monotonic_ns()}.log"
        with open(self._log, "w") as log:
            command = ["bash", str(ROOT / "scripts" / "train.sh"), *overrides]
            self.process = subprocess.Popen(command, cwd=folder, env=kept, stdout=log, stderr=subprocess.STDOUT)

    @property
    def output(self) -> str:
        return self._log.read_text()

    def wait_until(self, condition: Callable[[], bool], what: str, seconds: float = 120) -> None:
        """Until `condition`, which must come before the launcher ends."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert self.process.poll() is None, f"ended before {what}:\n{self.output}"
            assert time.monotonic() < deadline, f"waited {seconds} s for {what}:\n{self.output}"
            time.sleep(0.004)

    def end(self, seconds: float = 120) -> int:
        """The launcher's exit code."""
        return self.process.wait(seconds)

    def processes(self) -> dict[int, dict[str, str]]:
        """Environments by process id of all that this run's launchers started and that live."""
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                words = (folder / "environ").read_bytes().decode(errors="replace").split("\0")
                environment = dict(word.partition("=")[::2] for word in words if "=" in word)
                if environment.get("SLUICEGATE_LAUNCH", "").startswith(f"{self.run_id}."):
                    found[int(folder.name)] = environment
        return found

    def workers(self) -> list[int]:
        """Process ids in the order of ranks."""
        found = self.processes().items()
        ranks = {int(env["RANK"]): pid for pid, env in found if "RANK" in env and _runs_trainer(pid)}
        return [ranks[rank] for rank in sorted(ranks)]

    def clear(self) -> None:
        """Kill what a failed test left."""
        self.process.kill()
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _runs_trainer(pid: int) -> bool:
    words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    return b"trainer.train" in words and b"torch.distributed.run" not in words


# ---- what a run leaves behind


def status(path: Path) -> dict[str, Any]:
    found = read_status(path)
    assert found is not None
    return found


def columns(path: Path, *names: str, first: int = 1, last: int = STEPS) -> dict[int, list[Any]]:
    """Values of metrics by step, exactly as logged; every step of the range is there."""
    records = {record["step"]: record for record in read_metrics(path)}
    return {step: [records[step][name] for name in names] for step in range(first, last + 1)}


def all_lines(path: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl in the order of writing, without one that is half written or that a kill tore."""
    lines: list[dict[str, Any]] = []
    for line in (path / "metrics.jsonl").read_text().splitlines():
        with contextlib.suppress(json.JSONDecodeError):
            lines.append(json.loads(line))
    return lines


def stored_tensors(step_folder: Path) -> dict[str, torch.Tensor]:
    """Everything in a checkpoint, unsharded."""
    reader = CheckpointReader(step_folder)
    saved = reader.read_metadata().state_dict_metadata
    tensors = {
        name: torch.empty(description.size, dtype=description.properties.dtype)
        for name, description in saved.items()
        if isinstance(description, TensorStorageMetadata)
    }
    load(tensors, storage_reader=reader, planner=DefaultLoadPlanner(flatten_state_dict=False), no_dist=True)
    return tensors


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
