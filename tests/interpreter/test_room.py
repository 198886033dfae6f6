"""Bounds of the exchange in real training steps, between processes on the CPU: what finds no room changes nothing.

All tokens go to the experts of the last rank, so it alone has more rows or pairs than it has room for.
"""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from comms.symmetric_memory import NoRoomError, forget_exchanges, plan_layout
from moe import tiles
from moe.layer import MoE
from parallel.config import ParallelConfig
from parallel.expert_parallel import share_saved, use_exchange
from parallel.mesh import Mesh, build_mesh
from tests.distributed.tiny_models import QWEN3
from tests.interpreter.shared_arenas import run_interpreted, shared_exchange
from tests.interpreter.test_fused_experts import SMALL
from trainer.build import build_model
from trainer.config import Config, OptimConfig, PrecisionConfig, TrainConfig
from trainer.guard import RoomCheck
from trainer.optim import build_optimizer
from trainer.parity import full_tensors, synthetic_batches
from trainer.peers import Peers
from trainer.step import StepResult, train_step

NUM_RANKS, SEQ_LEN, TOP_K = 2, 12, 2
MAX_TOKENS = SEQ_LEN


def run_config(optimizer: str, pair_capacity: float | None, saved_headroom: float | None) -> Config:
    # The loop over experts is not interpreted, which saves most of the time; it has no use for room.
    backend = "reference" if pair_capacity is None else "grouped_mm"
    backend = backend if saved_headroom is None else "fused"
    moe = replace(QWEN3.moe, expert_bias=True, bias_update_rate=0.01, pair_capacity=pair_capacity, backend=backend)
    return Config(
        model=replace(QWEN3, num_layers=1 if saved_headroom is None else 2, moe=moe),
        train=TrainConfig(global_batch_size=2, micro_batch_size=1, seq_len=SEQ_LEN, steps=2),
        parallel=ParallelConfig(dp_shard=NUM_RANKS, ep=NUM_RANKS),
        precision=PrecisionConfig(recipe="fp32"),
        optim=OptimConfig(name=optimizer, lr=0.1),
    )


class Run:
    """A model whose rows travel through symmetric memory with these bounds, or by collectives (no `folder`)."""

    def __init__(
        self,
        mesh: Mesh,
        folder: Path | None = None,
        *,
        capacity: float | None = None,
        pair_capacity: float | None = None,
        saved_headroom: float | None = None,
        optimizer: str = "adamw",
    ) -> None:
        self.config, self.mesh = run_config(optimizer, pair_capacity, saved_headroom), mesh
        self.model = build_model(self.config, mesh)
        self.optimizer = build_optimizer(self.model, self.config.optim)
        layers = [module for module in self.model.modules() if isinstance(module, MoE)]
        for layer in layers:
            assert layer.expert_bias is not None
            layer.expert_bias[layer.config.num_experts // 2 :] = 100
        if folder is not None:
            folder.mkdir(exist_ok=True)
            dist.barrier()
            layout = plan_layout(NUM_RANKS, MAX_TOKENS, TOP_K, 4 * QWEN3.dim, 8 * TOP_K, capacity)
            exchange = shared_exchange(folder, layout, MAX_TOKENS, TOP_K)
            if saved_headroom is not None:
                exchange = share_saved(layers, exchange, saved_headroom, True, torch.float32)
            self.room = use_exchange(layers, exchange)

    def step(self, number: int) -> StepResult:
        batches = synthetic_batches(self.config, self.mesh, number)
        return train_step(self.model, self.optimizer, batches, self.mesh, self.config)

    def state(self) -> dict[str, Tensor]:
        """Weights, balancing bias, moments and step counts."""
        found = full_tensors(self.model)
        for index, state in enumerate(self.optimizer.state.values()):
            module = nn.Module()
            for name, value in state.items():
                module.register_buffer(name, value)
            found |= {f"{index}.{name}": value for name, value in full_tensors(module).items()}
        return found


def refusal(result: StepResult, peers: Peers) -> str:
    room = RoomCheck(peers)
    room.check()
    room.note(result.no_room)
    with pytest.raises(NoRoomError) as raised:
        room.check()
    return str(raised.value)


def assert_left_out(run: Run, number: int, peers: Peers) -> str:
    """A step changes nothing at all; what the run then says."""
    before = run.state()
    result = run.step(number)
    assert result.no_room is not None and float(result.no_room) == 1
    after = run.state()
    # The first update makes the optimizer's state: as if there had been none.
    for name, value in after.items():
        assert torch.equal(value, before.get(name, torch.zeros_like(value))), name
    assert all(parameter.grad is None for parameter in run.model.parameters())
    return refusal(result, peers)


def with_peers(check: Callable[..., None], folder: Path) -> None:
    mesh = build_mesh(ParallelConfig(dp_shard=NUM_RANKS, ep=NUM_RANKS), torch.device("cpu"))
    check(folder, mesh, Peers(60))


def check_room_for_all(folder: Path, mesh: Mesh, peers: Peers) -> None:
    """With room for all that comes, a run is that of the collective backend."""
    ours, theirs = Run(mesh, folder / "all", optimizer="sgd"), Run(mesh, optimizer="sgd")
    assert "room for 24 rows and 48 (row, expert) pairs" in ours.room
    room = RoomCheck(peers)
    room.note(ours.step(0).no_room)
    room.check()
    room.check_now()
    forget_exchanges()
    assert theirs.step(0).no_room is None
    for (name, a), b in zip(ours.state().items(), theirs.state().values(), strict=True):
        # fp32: an expert's last few rows may be multiplied in another way.
        assert float((a - b).norm()) <= 1e-5 * float(b.norm()), name


def check_rows(folder: Path, mesh: Mesh, peers: Peers) -> None:
    run = Run(mesh, folder / "rows", capacity=1.25)
    said = assert_left_out(run, 0, peers)
    found = re.search(r"rank 1: plan of MoE layer 0: (\d+) rows came to rank 1, which has room for 15: raise", said)
    assert found and int(found[1]) > 15, said
    enough = re.search(r"comms.capacity to ([0-9.]+) or more", said)
    assert enough
    forget_exchanges()
    run = Run(mesh, folder / "enough", capacity=float(enough[1]))
    before = run.state()
    assert float(run.step(0).no_room or 0) == 0
    after = run.state()
    assert not torch.equal(after["head.weight"], before["head.weight"])
    forget_exchanges()


def check_saved(folder: Path, mesh: Mesh, peers: Peers) -> None:
    """Two layers bring all their rows and pairs to rank 1, and there is room for the expected load of two layers."""
    small = patch.object(tiles, "CANDIDATES", {kernel: (tile,) for kernel, tile in SMALL.items()})
    with small:
        run = Run(mesh, folder / "saved", saved_headroom=1.0)
        assert "for what 2 layers keep for backward: 38 rows and 48 pairs, where 38 and 48 are expected" in run.room
        said = assert_left_out(run, 0, peers)
        found = re.search(
            r"rank 1: dispatch of MoE layer 1: on rank 1 (\d+) rows of up to 2 layers .* is room for 38: raise "
            r"comms.saved_headroom to (\S+) or",
            said,
        )
        assert found and 38 < int(found[1]) <= 48, said
        forget_exchanges()
        run = Run(mesh, folder / "enough", saved_headroom=float(found[2]))
        before = run.state()
        assert float(run.step(0).no_room or 0) == 0
        assert not torch.equal(run.state()["head.weight"], before["head.weight"])
        forget_exchanges()


def check_pairs(folder: Path, mesh: Mesh, peers: Peers) -> None:
    run = Run(mesh, folder / "pairs", pair_capacity=1.0)
    said = assert_left_out(run, 0, peers)
    found = re.search(
        r"(\d+) pairs fell to rank 1, which has room for 24: raise model.moe.pair_capacity to (\S+)", said
    )
    assert found and int(found[1]) > 24 and float(found[2]) * 24 >= int(found[1]), said
    forget_exchanges()


@pytest.mark.parametrize("check", [check_room_for_all, check_rows, check_pairs, check_saved])
def test_what_finds_no_room_changes_nothing(check: Callable[..., None], tmp_path: Path) -> None:
    run_interpreted(with_peers, NUM_RANKS, check, tmp_path)
