"""A training step goes ahead of the device: nothing in it waits but whoever judges the step before its update."""

import pytest
import torch

from parallel.config import ParallelConfig
from parallel.mesh import build_mesh
from tests.gpu.test_train_gpu import tiny_model
from trainer.build import build_model
from trainer.config import Config, PrecisionConfig, TrainConfig
from trainer.optim import build_optimizer
from trainer.parity import synthetic_batches
from trainer.step import train_step

pytestmark = pytest.mark.gpu


def test_the_host_waits_for_nothing(world_of_one: torch.device) -> None:
    mesh = build_mesh(ParallelConfig(), world_of_one)
    train = TrainConfig(global_batch_size=4, micro_batch_size=2, seq_len=64)
    model_config = tiny_model(force_balance=False)
    config = Config(model=model_config, parallel=mesh.config, train=train, precision=PrecisionConfig("bf16"))
    model = build_model(config, mesh)
    optimizer = build_optimizer(model, config.optim)
    for step in range(3):
        # As the trainer's loader leaves them.
        batches = [batch.pin_memory() for batch in synthetic_batches(config, mesh, step)]
        if step == 2:
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error")
        try:
            result = train_step(model, optimizer, batches, mesh, config)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert bool(torch.isfinite(result.loss)) and result.updated
