"""Low-precision recipes in whole models: layouts against one process, and a few steps of training against bf16.

Experts are chosen by position: of tokens near a tie, some would go elsewhere for a rounding.
"""

from dataclasses import replace
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from comms.backend import BackendChoice
from moe.layer import MoE
from parallel.config import ParallelConfig
from parallel.mesh import build_mesh
from tests.distributed.harness import run_workers
from tests.distributed.test_layout_use import Letters
from tests.distributed.tiny_models import QWEN3
from tests.low_precision_cases import relative_error
from trainer.build import build_model
from trainer.config import Config, OptimConfig, PrecisionConfig, TrainConfig
from trainer.evaluate import evaluate
from trainer.generate import generate
from trainer.models.config import ModelConfig
from trainer.optim import build_optimizer
from trainer.parity import full, named_parameters, synthetic_batches
from trainer.step import train_step

# Sizes that tp=2 leaves divisible by 32; a dense layer, then one with experts and a shared one.
MODEL = replace(
    QWEN3,
    dim=64,
    num_dense_layers=1,
    ffn_dim=128,
    attention=replace(QWEN3.attention, head_dim=32),
    moe=replace(QWEN3.moe, expert_dim=64, shared_expert_dim=64, force_balance=True),
)
EVERY_LINEAR = {"linears": ["*"], "linears_exclude": []}
PRECISIONS = {
    "mxfp8": PrecisionConfig(recipe="mxfp8"),
    "mxfp8_wgrad_bf16": PrecisionConfig(recipe="mxfp8", wgrad="bf16"),
    "mxfp8_linears": PrecisionConfig(recipe="mxfp8", **EVERY_LINEAR),
    "fp8_blockwise": PrecisionConfig(recipe="fp8_blockwise"),
    "fp8_blockwise_linears": PrecisionConfig(recipe="fp8_blockwise", **EVERY_LINEAR),
}


class Trained(NamedTuple):
    losses: list[float]
    # Of the first step.
    gradients: dict[str, Tensor]
    held_out: float
    sample: str


def train(model: ModelConfig, parallel: ParallelConfig, precision: PrecisionConfig, steps: int) -> Trained:
    """Steps on one batch over and over, then an evaluation and a sample."""
    mesh = build_mesh(parallel, torch.device("cpu"))
    train = TrainConfig(global_batch_size=4, micro_batch_size=4 // mesh.batch_size, seq_len=16)
    optim = OptimConfig(lr=1e-3, weight_decay=0.0, max_grad_norm=1.0)
    config = Config(train=train, model=model, parallel=mesh.config, precision=precision, optim=optim)
    built = build_model(config, mesh)
    optimizer = build_optimizer(built, optim)
    batches = synthetic_batches(config, mesh, 0)
    gradients: dict[str, Tensor] = {}

    def keep(loss: Tensor, grad_norm: Tensor) -> bool:
        if not gradients:
            gradients.update((name, full(p.grad)) for name, p in named_parameters(built) if p.grad is not None)
        return True

    losses = [float(train_step(built, optimizer, batches, mesh, config, keep).loss) for _ in range(steps)]
    held_out = evaluate(built, batches, mesh, torch.ones(model.vocab_size, dtype=torch.int64), True).loss
    sample = generate(built, Letters(), "3=A", temperature=0, max_new_tokens=3)  # type: ignore[arg-type]
    return Trained(losses, gradients, held_out, sample)


# Rows are quantized one by one, so forward and dgrad see the same operands in every layout, but for what bf16 does to
# them before (2e-2 in this model): a rounding of bf16 flips one of e4m3 now and then, which is 16 times as large. With
# experts alone 5e-2 is seen, with every linear 0.1. A doubled or missing part would show 0.5 or 1.
LAYOUT_BOUND = 0.15


@pytest.mark.parametrize(
    ("name", "parallel"),
    [
        ("mxfp8", ParallelConfig(ep=2)),
        ("fp8_blockwise", ParallelConfig(ep=2)),
        ("mxfp8_linears", ParallelConfig(tp=2, ep=2)),
        ("fp8_blockwise_linears", ParallelConfig(tp=2, etp=2)),
        ("mxfp8_linears", ParallelConfig(tp=2, etp=2, async_tp="native")),
        ("mxfp8", ParallelConfig(ep=2, activation_checkpoint="full")),
    ],
    ids=[
        "mxfp8_ep2",
        "fp8_blockwise_ep2",
        "mxfp8_linears_tp2_ep2",
        "fp8_blockwise_linears_tp2_etp2",
        "mxfp8_linears_tp2_etp2_async",
        "mxfp8_ep2_full",
    ],
)
def test_layouts_equal_one_process(name: str, parallel: ParallelConfig) -> None:
    alone = run_workers(train, 1, MODEL, ParallelConfig(), PRECISIONS[name], 1)[0]
    for ours in run_workers(train, 2, MODEL, parallel, PRECISIONS[name], 1):
        assert ours.losses == pytest.approx(alone.losses, rel=1e-2)
        assert ours.held_out == pytest.approx(alone.held_out, rel=1e-2)
        assert ours.gradients.keys() == alone.gradients.keys()
        errors = {key: relative_error(ours.gradients[key], alone.gradients[key]) for key in alone.gradients}
        assert max(errors.values()) <= LAYOUT_BOUND, errors


def test_training_follows_bf16_and_is_not_bf16() -> None:
    """10 steps, from a loss of 4.6 to 0.25: never further from bf16 than 2 % of where it began (seen: 0.8 %).

    Every gradient of the first step is another one, and near. A product of quantized operands is off by 3.8 %; with
    experts alone (2 products of 14) 8 % are seen, with every linear 25 %.
    """
    plain = run_workers(train, 1, MODEL, ParallelConfig(), PrecisionConfig(recipe="bf16"), 10)[0]
    assert plain.losses[-1] < 0.1 * plain.losses[0]
    near = 0.02 * plain.losses[0]
    for name, precision in PRECISIONS.items():
        ours = run_workers(train, 1, MODEL, ParallelConfig(), precision, 10)[0]
        assert ours.losses != plain.losses, name
        assert ours.losses == pytest.approx(plain.losses, abs=near, rel=0), name
        assert ours.held_out == pytest.approx(plain.held_out, abs=near, rel=0), name
        assert len(ours.sample) > len("3=A")
        errors = {key: relative_error(ours.gradients[key], plain.gradients[key]) for key in plain.gradients}
        most = 0.4 if precision.linears else 0.15
        assert all(0 < error < most for error in errors.values()), (name, errors)


def recipes_when_connected(recipe: str) -> list[bool]:
    """Whether each layer's experts have a recipe when it is chosen how rows reach them."""
    found: list[bool] = []

    def connect(model: torch.nn.Module, *_: Any) -> BackendChoice:
        found.extend(layer.experts.recipe is not None for layer in model.modules() if isinstance(layer, MoE))
        return BackendChoice("collective", "")

    mesh = build_mesh(ParallelConfig(ep=2), torch.device("cpu"))
    config = Config(
        model=MODEL,
        parallel=mesh.config,
        train=TrainConfig(global_batch_size=2, seq_len=16),
        precision=PrecisionConfig(recipe),
    )
    with patch("parallel.parallelize.connect_experts", connect):
        build_model(config, mesh)
    return found


@pytest.mark.parametrize("recipe", ["bf16", "mxfp8"])
def test_how_rows_travel_is_chosen_by_what_experts_compute_in(recipe: str) -> None:
    """In a recipe of low precision none travel while they compute (comms.backend=auto, comms.chunks)."""
    assert run_workers(recipes_when_connected, 2, recipe)[0] == [recipe == "mxfp8"]
