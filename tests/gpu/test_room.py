"""Bounds of the exchange on two GPUs: a real step that finds no room changes nothing, and a real run ends with it."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from comms.config import CommsConfig
from comms.symmetric_memory import NoRoomError, forget_exchanges
from moe.layer import MoE
from parallel.config import ParallelConfig
from parallel.mesh import build_mesh
from tests.distributed.tiny_models import QWEN3
from tests.gpu.two_ranks import NUM_RANKS, assert_passed, run_checks
from trainer.build import build_model
from trainer.config import Config, OptimConfig, PrecisionConfig, TrainConfig
from trainer.guard import RoomCheck
from trainer.optim import build_optimizer
from trainer.parity import synthetic_batches
from trainer.peers import Peers
from trainer.step import train_step

ROOT = Path(__file__).parents[2]
SEQ_LEN = 64


def run_config(
    optimizer: str, capacity: float | None, pair_capacity: float | None, saved_headroom: float | None
) -> Config:
    moe = replace(QWEN3.moe, expert_bias=True, bias_update_rate=0.01, force_balance=True)
    moe = replace(moe, pair_capacity=pair_capacity)
    return Config(
        model=replace(QWEN3, moe=moe),
        train=TrainConfig(global_batch_size=4, micro_batch_size=2, seq_len=SEQ_LEN, steps=1),
        parallel=ParallelConfig(dp_shard=NUM_RANKS, ep=NUM_RANKS, timeout_seconds=60),
        precision=PrecisionConfig(recipe="bf16"),
        optim=OptimConfig(name=optimizer, lr=0.1),
        comms=CommsConfig(backend="symm_mem", capacity=capacity, saved_headroom=saved_headroom),
    )


def state(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """What this rank has of weights, balancing bias, moments and step counts; copies."""
    tensors = [*model.parameters(), *model.buffers()]
    tensors += [value for moments in optimizer.state.values() for value in moments.values()]
    return [(t.to_local() if isinstance(t, DTensor) else t).detach().clone() for t in tensors if t is not None]


def check_bounds(
    device: torch.device,
    optimizer_name: str,
    capacity: float | None,
    pair_capacity: float | None,
    setting: str,
    saved_headroom: float | None = None,
) -> None:
    """Two steps in which each rank gets as much as any; then all goes to the last one, which may have no room for it.

    A token's two experts lie on one rank throughout, and a sixth of the tokens at most is padding: at least 1.66 rows,
    and as many balanced loads, per own token.
    """
    config = run_config(optimizer_name, capacity, pair_capacity, saved_headroom)
    mesh, peers = build_mesh(config.parallel, device), Peers(60)
    model = build_model(config, mesh)
    assert model.exchange_choice.backend == "symm_mem" and "GiB per rank; room for" in model.exchange_choice.room
    optimizer, room = build_optimizer(model, config.optim), RoomCheck(peers)
    for number in range(3):
        if number == 2:
            for layer in (module for module in model.modules() if isinstance(module, MoE)):
                assert layer.expert_bias is not None
                layer.expert_bias[layer.config.num_experts // 2 :] = 100
                layer.config = replace(layer.config, force_balance=False)
        before = state(model, optimizer)
        result = train_step(model, optimizer, synthetic_batches(config, mesh, number), mesh, config)
        room.check()
        room.note(result.no_room)
        same = [torch.equal(a, b) for a, b in zip(before, state(model, optimizer), strict=False)]
        assert all(same) if setting and number == 2 else not all(same), f"step {number}: {same}"
    if setting:
        with pytest.raises(NoRoomError, match=f"rank 1: (plan|dispatch) of MoE layer .* raise {setting} to"):
            room.check()
    else:
        room.check_now()
    forget_exchanges()


def room_for_all(device: torch.device) -> None:
    check_bounds(device, "adamw", None, None, "")


def too_many_rows(device: torch.device) -> None:
    check_bounds(device, "adamw", 1.25, None, "comms.capacity")


def too_many_pairs(device: torch.device) -> None:
    check_bounds(device, "adamw", None, 1.25, "model.moe.pair_capacity")


def too_many_rows_for_sgd(device: torch.device) -> None:
    check_bounds(device, "sgd", 1.25, None, "comms.capacity")


def too_much_is_kept(device: torch.device) -> None:
    """Balanced, two layers have 512 pairs in all; then more than 800, of which one layer has 512 at most."""
    check_bounds(device, "adamw", None, None, "comms.saved_headroom", 1.25)


def room_for_all_that_is_kept(device: torch.device) -> None:
    check_bounds(device, "adamw", None, None, "", 2.0)


CHECKS = {
    check.__name__: check
    for check in (
        room_for_all,
        too_many_rows,
        too_many_pairs,
        too_many_rows_for_sgd,
        too_much_is_kept,
        room_for_all_that_is_kept,
    )
}


@pytest.fixture(scope="module")
def problems(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("room")
    run_checks(CHECKS.values(), folder)
    return folder


@pytest.mark.multi_gpu(2, may_share=True)
@pytest.mark.parametrize("name", CHECKS)
def test_on_two_gpus(problems: Path, name: str) -> None:
    assert_passed(name, problems)


@pytest.mark.multi_gpu(2)
def test_a_run_without_room_ends_like_a_mistake(tmp_path: Path) -> None:
    """top_k 2 of 8 experts on 2 ranks: about 1.6 rows per token come, and there is room for 1."""
    (tmp_path / "text.txt").write_text("".join(f"def f{n}(x):\n    return x + {n}\n\n" for n in range(3000)))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += ["-m", "trainer.train", "experiment=demo", "data=text", f"data.train.text.paths=[{tmp_path}/*.txt]"]
    command += ["data.tokenizer_vocab_size=300", "model.vocab_size=512", f"data.cache_dir={tmp_path}/cache"]
    command += [f"run.root={tmp_path}/runs", "run.id=test", "train.steps=5", "train.log_every=1", "train.seq_len=128"]
    command += ["train.eval_every=null", "train.sample_prompt=null", "optim.warmup_steps=1", "checkpoint.every=1"]
    command += ["precision=bf16", "parallel.ep=2", "comms.backend=symm_mem", "comms.capacity=1"]
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False
    )  # fmt: skip
    said = done.stdout + done.stderr
    assert done.returncode != 0 and "raise comms.capacity to 1." in said, said[-6000:]
    ended = json.loads((tmp_path / "runs" / "test" / "status.json").read_text())
    assert (ended["state"], ended["exit_code"], ended["step"]) == ("failed", 2, 0)
    assert not list((tmp_path / "runs" / "test" / "checkpoints").glob("step_*"))
