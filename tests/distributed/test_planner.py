"""Weights, gradients and moments of a rank are as trainer/planner.py plans them, to the byte, in every layout."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from moe.linear_maps import local
from parallel.config import ParallelConfig
from parallel.mesh import build_mesh
from tests.distributed.harness import run_workers
from tests.distributed.tiny_models import MODELS
from trainer.build import build_model
from trainer.config import Config, OptimConfig, PrecisionConfig, TrainConfig
from trainer.optim import build_optimizer, ensure_gradients, update
from trainer.planner import plan_memory

TRAIN = TrainConfig(global_batch_size=8, seq_len=16)
LAYOUTS = [
    {},
    {"ep": 2},
    {"ep": 4},
    {"dp_replicate": 2, "ep": 2},
    {"tp": 2},
    {"tp": 2, "ep": 2, "etp": 2},
    {"cp": 2, "ep": 4},
    {"tp": 2, "ep": 4},
]


def bytes_of(tensors: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in map(local, tensors))


def largest(value: int) -> int:
    every = [0] * dist.get_world_size()
    dist.all_gather_object(every, value)
    return max(every)


def held(name: str, sizes: dict[str, Any]) -> tuple[dict[str, int], dict[str, int]]:
    """Bytes of the rank that has most: as they are, and as planned."""
    config = Config(
        model=MODELS[name],
        train=TRAIN,
        parallel=ParallelConfig(**sizes),
        optim=OptimConfig(name="adamw"),
        precision=PrecisionConfig(recipe="fp32"),
    )
    mesh = build_mesh(config.parallel, torch.device("cpu"))
    model = build_model(config, mesh)
    optimizer = build_optimizer(model, config.optim)
    ensure_gradients(model)
    update(optimizer)
    moments = [state[key] for state in optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")]
    found = {
        "parameters": bytes_of(model.parameters()),
        "gradients": bytes_of(parameter.grad for parameter in model.parameters()),
        "moments": bytes_of(moments),
    }
    plan = plan_memory(config, dist.get_world_size(), "cpu")
    return {key: largest(value) for key, value in found.items()}, {key: getattr(plan, key) for key in found}


@pytest.mark.parametrize("name", ["qwen3", "deepseek", "gpt_oss"])
@pytest.mark.parametrize("sizes", LAYOUTS, ids=lambda sizes: "-".join(f"{k}{v}" for k, v in sizes.items()) or "fsdp")
def test_what_stays_is_as_planned(name: str, sizes: dict[str, Any]) -> None:
    found, planned = run_workers(held, 4, name, sizes)[0]
    assert found == planned
