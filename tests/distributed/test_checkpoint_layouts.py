"""A checkpoint written under one layout goes on under any other: the same bits first, the same training afterwards."""

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from parallel.config import ParallelConfig
from parallel.mesh import build_mesh
from tests.distributed.harness import run_workers
from tests.distributed.tiny_models import DEEPSEEK, GPT_OSS
from trainer.build import build_model
from trainer.checkpoint import Checkpointer
from trainer.config import CheckpointConfig, Config, OptimConfig, PrecisionConfig, TrainConfig
from trainer.models.config import ModelConfig
from trainer.optim import build_optimizer
from trainer.parity import full, relative_error, synthetic_batches
from trainer.step import train_step
from trainer.train_state import model_tensors, optimizer_tensors

# fp64, where layouts differ by 1e-15; Adam magnifies that where a gradient is as small as its epsilon.
BOUND = 1e-8
STEPS = 2

# name -> processes, sizes.
LAYOUTS = {
    "one": (1, ParallelConfig()),
    "fsdp2": (2, ParallelConfig()),
    "tp2_fsdp2": (4, ParallelConfig(tp=2)),
    "ep4": (4, ParallelConfig(ep=4)),
    "tp2_ep2": (4, ParallelConfig(tp=2, ep=2)),
    "tp2_etp2": (4, ParallelConfig(tp=2, etp=2)),
    "cp2": (2, ParallelConfig(cp=2)),
}

# 33 rows of the vocabulary on each of two tp ranks, 17 and 16 of them after FSDP; one sink each, so that half of FSDP's
# ranks have none.
UNEVEN = replace(GPT_OSS, vocab_size=66, attention=replace(GPT_OSS.attention, num_heads=2, num_kv_heads=1))
MODELS = {"uneven": UNEVEN, "deepseek": DEEPSEEK}


class State(NamedTuple):
    """Every parameter, buffer and optimizer tensor, whole, and the losses of the steps that led to it."""

    tensors: dict[str, Tensor]
    losses: list[float]


class Run:
    """A model in a layout, with its optimizer."""

    def __init__(self, model: ModelConfig, parallel: ParallelConfig) -> None:
        self.mesh = build_mesh(parallel, torch.device("cpu"))
        self.config = Config(
            train=TrainConfig(global_batch_size=4, micro_batch_size=4 // self.mesh.batch_size, seq_len=16),
            model=model,
            parallel=self.mesh.config,
            precision=PrecisionConfig(recipe="fp64"),
            optim=OptimConfig(name="adamw", lr=0.01),
        )
        self.model = build_model(self.config, self.mesh)
        self.optimizer = build_optimizer(self.model, self.config.optim)

    def train(self, first: int) -> list[float]:
        steps = [synthetic_batches(self.config, self.mesh, step) for step in range(first, first + STEPS)]
        return [float(train_step(self.model, self.optimizer, step, self.mesh, self.config).loss) for step in steps]

    def state(self) -> dict[str, Tensor]:
        tensors = model_tensors(self.model) | optimizer_tensors(self.model, self.optimizer)
        return {name: full(tensor) for name, tensor in tensors.items()}


def train_and_save(folder: str, model: ModelConfig, parallel: ParallelConfig) -> tuple[State, State]:
    """What is saved, and what two more steps make of it."""
    run = Run(model, parallel)
    losses = run.train(0)
    saved = State(run.state(), losses)
    checkpointer = Checkpointer(folder, CheckpointConfig(), notify=lambda _: None)
    checkpointer.save(STEPS, run.model, run.optimizer, {})
    checkpointer.close()
    more = run.train(STEPS)
    return saved, State(run.state(), more)


def load_and_go_on(folder: str, model: ModelConfig, parallel: ParallelConfig) -> tuple[State, State]:
    run = Run(model, parallel)
    # Whatever a load leaves out shows as NaN.
    for tensor in model_tensors(run.model).values():
        tensor.detach().fill_(float("nan"))
    checkpointer = Checkpointer(folder, CheckpointConfig(), notify=lambda _: None)
    checkpointer.load(folder, run.model, run.optimizer)
    checkpointer.close()
    loaded = State(run.state(), [])
    losses = run.train(STEPS)
    return loaded, State(run.state(), losses)


@cache
def straight(name: str) -> tuple[State, State]:
    """One process that never stops."""
    return run_workers(train_without_saving, 1, MODELS[name])[0]


def train_without_saving(model: ModelConfig) -> tuple[State, State]:
    run = Run(model, ParallelConfig())
    losses = run.train(0)
    first = State(run.state(), losses)
    more = run.train(STEPS)
    return first, State(run.state(), more)


def assert_bit_equal(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert torch.equal(ours[name], tensor), name


def assert_close(ours: State, theirs: State) -> None:
    assert ours.tensors.keys() == theirs.tensors.keys()
    errors = {name: relative_error(ours.tensors[name], tensor) for name, tensor in theirs.tensors.items()}
    assert max(errors.values()) < BOUND, sorted(errors.items(), key=lambda item: -item[1])[:5]
    assert ours.losses == pytest.approx(theirs.losses, rel=BOUND)


@pytest.mark.parametrize(
    ("name", "writer", "reader"),
    [
        ("uneven", "fsdp2", "tp2_fsdp2"),
        ("deepseek", "tp2_ep2", "ep4"),
        ("uneven", "tp2_etp2", "fsdp2"),
        ("deepseek", "ep4", "tp2_etp2"),
        ("uneven", "cp2", "tp2_ep2"),
    ],
)
def test_a_checkpoint_goes_on_in_another_layout(tmp_path: Path, name: str, writer: str, reader: str) -> None:
    folder, model = str(tmp_path), MODELS[name]
    written: list[Any] = run_workers(train_and_save, LAYOUTS[writer][0], folder, model, LAYOUTS[writer][1])
    read: list[Any] = run_workers(load_and_go_on, LAYOUTS[reader][0], folder, model, LAYOUTS[reader][1])
    saved, after = written[0]
    expected, expected_after = straight(name)
    assert_close(saved, expected)
    for loaded, went_on in read:
        assert_bit_equal(loaded.tensors, saved.tensors)
        assert_close(went_on, after)
    assert_close(after, expected_after)
    moments = [tensor for key, tensor in saved.tensors.items() if key.endswith((".exp_avg", ".exp_avg_sq"))]
    assert moments and all(bool(tensor.any()) for tensor in moments)
