"""A training step goes ahead of the device: nothing in it waits but whoever judges the step before its update."""

from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from comms import async_tp
from parallel.config import ParallelConfig
from parallel.mesh import build_mesh
from parallel.process_group import temporary_groups
from tests.gpu.test_train_gpu import tiny_model
from tests.gpu.two_ranks import Check, assert_passed, run_checks
from trainer.build import build_model
from trainer.config import Config, PrecisionConfig, TrainConfig
from trainer.optim import build_optimizer
from trainer.parity import synthetic_batches
from trainer.step import train_step


def steps_wait_for_nothing(parallel: ParallelConfig, device: torch.device, *, force_balance: bool = False) -> None:
    mesh = build_mesh(parallel, device)
    train = TrainConfig(global_batch_size=4, micro_batch_size=2, seq_len=64)
    model_config = tiny_model(force_balance)
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


@pytest.mark.gpu
def test_the_host_waits_for_nothing(world_of_one: torch.device) -> None:
    """Of padded documents, too: how many tokens are real only the device knows."""
    steps_wait_for_nothing(ParallelConfig(), world_of_one)


def tp2(device: torch.device) -> None:
    with temporary_groups():
        steps_wait_for_nothing(ParallelConfig(tp=2), device)


def tp2_native(device: torch.device) -> None:
    # A pass of 128 tokens would not overlap.
    with temporary_groups(), patch.multiple(async_tp, GATHER_WORK=0, SCATTER_WORK=0):
        steps_wait_for_nothing(ParallelConfig(tp=2, async_tp="native"), device)


def tp2_native_compiled(device: torch.device) -> None:
    """By position, for which the router asks where in its sequence a token is."""
    parallel = ParallelConfig(tp=2, async_tp="native", compile=True)
    with temporary_groups(), patch.multiple(async_tp, GATHER_WORK=0, SCATTER_WORK=0):
        steps_wait_for_nothing(parallel, device, force_balance=True)


def ulysses2(device: torch.device) -> None:
    with temporary_groups():
        steps_wait_for_nothing(ParallelConfig(cp=2, ulysses=2), device)


# Where experts are spread, collectives wait for counts, once per layer.
LAYOUTS: list[Check] = [tp2, tp2_native, tp2_native_compiled, ulysses2]


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("steps")
    run_checks(LAYOUTS, folder)
    return folder


@pytest.mark.multi_gpu(2, may_share=True)
@pytest.mark.parametrize("check", LAYOUTS, ids=lambda check: check.__name__)
def test_the_host_waits_for_nothing_on_two_gpus(outcome: Path, check: Check) -> None:
    assert_passed(check.__name__, outcome)
