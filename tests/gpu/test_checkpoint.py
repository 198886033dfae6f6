"""Checkpoints from GPUs: page-locked staging, step counts on the device, and saving beside NCCL training."""

import datetime
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

from trainer.checkpoint import Checkpointer, load_weights
from trainer.config import CheckpointConfig
from trainer.train_state import Staging
from trainer.worker_pool import free_port

VOCAB, DIM, EXPERTS = 257, 64, 4


class Toy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, DIM)
        self.experts = nn.Linear(DIM, EXPERTS * DIM, bias=False)
        self.experts.weight = nn.Parameter(torch.randn(EXPERTS, DIM, DIM))
        self.register_buffer("expert_bias", torch.zeros(EXPERTS))


def build(seed: int = 0) -> tuple[Toy, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = Toy()
    if dist.is_initialized() and dist.get_world_size() > 1:
        ep = init_device_mesh("cuda", (1, dist.get_world_size()), mesh_dim_names=("efsdp", "ep"))
        mine = model.experts.weight.detach().chunk(dist.get_world_size())[dist.get_rank()].cuda()
        model = model.cuda()
        model.experts.weight = nn.Parameter(DTensor.from_local(mine, ep["ep"], [Shard(0)]))
        fully_shard(model.experts, mesh=ep["efsdp"])
        fully_shard(model, mesh=init_device_mesh("cuda", (dist.get_world_size(),)))
    model = model.cuda()
    # One group per mesh: a fused step cannot mix them.
    groups = [{"params": [model.embedding.weight]}, {"params": [model.experts.weight]}]
    return model, torch.optim.AdamW(groups, lr=0.1, fused=True)


@torch.no_grad()
def train(model: Toy, optimizer: torch.optim.Optimizer, steps: int) -> None:
    """An elementwise rule: every layout computes the same bits."""
    for _ in range(steps):
        for param in model.parameters():
            param.grad = param.detach() * 0.5 + 1
        optimizer.step()
        model.expert_bias += 0.125


def state(model: Toy, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    tensors = dict(model.state_dict())
    for name, param in model.named_parameters():
        tensors |= {f"{name}.{key}": value for key, value in optimizer.state[param].items()}
    return {name: (v.to_local() if isinstance(v, DTensor) else v).clone() for name, v in tensors.items()}


def assert_same(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].device == b[name].device and torch.equal(a[name], b[name]), name


def save_and_load(folder: str) -> None:
    model, optimizer = build()
    train(model, optimizer, 3)
    saver = Checkpointer(folder, CheckpointConfig(asynchronous=True), notify=lambda _: None)
    saver.save(3, model, optimizer, {})
    assert saver._staging._pinned
    draws = torch.rand(4, device="cuda")
    if dist.is_initialized():
        # Collectives of training go on beside those of the save.
        for _ in range(50):
            dist.all_reduce(torch.ones(1 << 20, device="cuda"))
    train(model, optimizer, 2)
    after = state(model, optimizer)
    saver.wait()
    other, other_optimizer = build(seed=1)
    saver.load(folder, other, other_optimizer)
    assert torch.equal(torch.rand(4, device="cuda"), draws)
    assert other_optimizer.state[other.embedding.weight]["step"].is_cuda
    train(other, other_optimizer, 2)
    assert_same(state(other, other_optimizer), after)
    saver.save(5, other, other_optimizer, {})
    saver.close()
    assert not saver._staging._pinned


@pytest.mark.gpu
def test_staging_copies_are_page_locked_and_exact() -> None:
    staging = Staging()
    tensors = {"a": torch.randn(1000, 3, device="cuda"), "b": torch.ones((), device="cuda"), "c": torch.arange(5)}
    copies = staging.copy(tensors)
    assert copies["a"].is_pinned() and copies["a"].device.type == "cpu"
    expected = {name: tensor.cpu().clone() for name, tensor in tensors.items()}
    tensors["a"].zero_()
    assert_same(copies, expected)
    memory = staging._memory.data_ptr()
    assert staging.copy(tensors)["a"].eq(0).all() and staging._memory.data_ptr() == memory
    staging.release()


@pytest.mark.gpu
def test_one_gpu(tmp_path: Path) -> None:
    save_and_load(str(tmp_path))


def _worker(rank: int, port: int, folder: str) -> None:
    torch.cuda.set_device(rank)
    dist.init_process_group(
        "cuda:nccl,cpu:gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=2,
        timeout=datetime.timedelta(seconds=120),
    )
    save_and_load(folder)
    # The saving thread must not make a context (hundreds of MiB) on the other process's card.
    assert not torch._C._cuda_hasPrimaryContext(1 - rank)
    dist.destroy_process_group()


@pytest.mark.multi_gpu
def test_two_gpus_and_then_one_process(tmp_path: Path) -> None:
    mp.spawn(_worker, args=(free_port(), str(tmp_path)), nprocs=2)
    model = Toy()
    load_weights(tmp_path / "step_00000003", model)
    expected, optimizer = build()
    train(expected, optimizer, 3)
    for name, value in expected.state_dict().items():
        assert torch.equal(model.state_dict()[name], value.cpu()), name
