"""Checkpoints of sharded models: bit-equal in every layout, and whole when ranks fail or die.

The toy has what is awkward in the real model: a vocabulary of 257 rows that no number of ranks divides, a tensor with
fewer rows than ranks (empty shards), experts spread over an `ep` axis and sharded by FSDP over `efsdp`, and the
balancing bias, a buffer that every rank holds. Training is an elementwise rule, so that every layout computes the
same bits and equality can be exact.
"""

import os
import random
import signal
from collections.abc import Callable
from pathlib import Path

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

from tests.distributed.harness import run_workers
from trainer import checkpoint_files as files
from trainer.checkpoint import Checkpointer, load_weights, open_checkpoint
from trainer.config import CheckpointConfig

VOCAB, DIM, EXPERTS, HIDDEN = 257, 6, 4, 4
# Size of the ep axis (the rest is efsdp), and the dim of the expert weights that FSDP shards.
Layout = tuple[int, int]


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w_gate_up = nn.Parameter(torch.randn(EXPERTS, 2, HIDDEN, DIM))


class Toy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCAB, DIM)
        self.experts = Experts()
        self.few = nn.Parameter(torch.randn(3))
        self.unused = nn.Parameter(torch.randn(5))
        self.register_buffer("expert_bias", torch.zeros(EXPERTS))

    def forward(self, tokens_T: Tensor) -> Tensor:
        return self.tok_embeddings(tokens_T).sum() * self.few.sum()


def build(layout: Layout, seed: int = 0) -> tuple[Toy, torch.optim.Optimizer]:
    """The same initial values in every layout; plain tensors where there is one process."""
    torch.manual_seed(seed)
    model = Toy()
    if dist.is_initialized():
        shard(model, layout)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1)


def shard(model: Toy, layout: Layout) -> None:
    ep, expert_dim = layout
    mesh = init_device_mesh("cpu", (dist.get_world_size() // ep, ep), mesh_dim_names=("efsdp", "ep"))
    experts = model.experts
    if ep > 1:
        mine = experts.w_gate_up.detach().chunk(ep)[mesh["ep"].get_local_rank()].clone()
        experts.w_gate_up = nn.Parameter(DTensor.from_local(mine, mesh["ep"], [Shard(0)]))
    fully_shard(experts, mesh=mesh["efsdp"], shard_placement_fn=lambda _: Shard(expert_dim))
    # The root stays unsharded after a forward pass: state must be taken from the shards all the same.
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)), reshard_after_forward=False)


@torch.no_grad()
def train(model: Toy, optimizer: torch.optim.Optimizer, steps: int) -> None:
    model.state_dict()  # puts FSDP's parameters in their sharded state
    for _ in range(steps):
        for name, param in model.named_parameters():
            param.grad = None if name == "unused" else param.detach() * 0.5 + 1
        optimizer.step()
        model.expert_bias += 0.125


def local_state(model: Toy, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    state = dict(model.state_dict())
    for name, param in model.named_parameters():
        state |= {f"{name}.{key}": value for key, value in optimizer.state.get(param, {}).items()}
    return {name: (value.to_local() if isinstance(value, DTensor) else value).clone() for name, value in state.items()}


def assert_same(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].dtype == b[name].dtype and torch.equal(a[name], b[name]), name


def checkpointer(folder: str, **config: object) -> Checkpointer:
    return Checkpointer(folder, CheckpointConfig(**config), notify=lambda _: None)  # type: ignore[arg-type]


def run(function: Callable, world: int, *args: object) -> list:
    """`function` on `world` ranks; in this process, without torch.distributed, when that is one."""
    return [function(*args)] if world == 1 else run_workers(function, world, *args)


def save(folder: str, layout: Layout, steps: int, asynchronous: bool) -> None:
    model, optimizer = build(layout)
    train(model, optimizer, steps)
    with torch.no_grad():
        model(torch.tensor([1, VOCAB - 1]))
    saver = checkpointer(folder, asynchronous=asynchronous)
    saver.save(steps, model, optimizer, {"tokens": 100 * steps})
    # A background save must not see this.
    train(model, optimizer, 1)
    saver.close()


def load_and_compare(folder: str, layout: Layout, steps: int) -> None:
    """Start from other values (a sentinel: none may stay), load, and compare with having trained in this layout."""
    model, optimizer = build(layout, seed=1)
    train(model, optimizer, 1)
    with torch.no_grad():
        for value in local_state_views(model):
            value.fill_(1e30)
    loader = checkpointer(folder)
    path = loader.latest()
    assert path is not None
    assert loader.load(path, model, optimizer) == {"tokens": 100 * steps}
    expected, expected_optimizer = build(layout)
    train(expected, expected_optimizer, steps)
    assert_same(local_state(model, optimizer), local_state(expected, expected_optimizer))
    assert "unused.exp_avg" not in local_state(model, optimizer)
    train(model, optimizer, 1)
    train(expected, expected_optimizer, 1)
    assert_same(local_state(model, optimizer), local_state(expected, expected_optimizer))
    loader.close()


def local_state_views(model: nn.Module) -> list[Tensor]:
    return [value.to_local() if isinstance(value, DTensor) else value for value in model.state_dict().values()]


@pytest.mark.parametrize(
    ("writers", "layout", "asynchronous"),
    [
        (1, (1, 0), False),
        (2, (2, 0), True),
        (2, (1, 0), False),
        (4, (2, 0), True),
        (4, (2, 2), False),
        (4, (4, 0), True),
    ],
)
def test_any_layout_loads_any_layouts_checkpoint(
    tmp_path: Path, writers: int, layout: Layout, asynchronous: bool
) -> None:
    run(save, writers, str(tmp_path), layout, 3, asynchronous)
    for readers, reader_layout in [(1, (1, 0)), (2, (1, 0)), (2, (2, 0)), (4, (1, 0)), (4, (2, 0)), (4, (2, 2))]:
        run(load_and_compare, readers, str(tmp_path), reader_layout, 3)


def test_a_fresh_process_reads_weights_without_a_process_group(tmp_path: Path) -> None:
    run(save, 4, str(tmp_path / "checkpoints"), (2, 0), 2, False)
    assert not dist.is_initialized()
    stored = open_checkpoint(tmp_path)
    assert (stored.step, stored.world_size, stored.extra["tokens"]) == (2, 4, 200)
    model = Toy()
    load_weights(stored.path, model)
    expected, optimizer = build((1, 0))
    train(expected, optimizer, 2)
    assert_same(dict(model.state_dict()), dict(expected.state_dict()))
    assert model.expert_bias.eq(0.25).all()
    # Every rank wrote its own shards: no file is as large as the model.
    sizes = [path.stat().st_size for path in stored.path.glob("*.distcp")]
    assert len(sizes) == 4


def draw() -> list[float]:
    return [torch.rand(1).item(), random.random(), numpy.random.rand()]


def save_rng(folder: str) -> list[float]:
    for seed in (torch.manual_seed, random.seed, numpy.random.seed):
        seed(1000 + dist.get_rank())
    model, optimizer = build((1, 0), seed=50 + dist.get_rank())
    saver = checkpointer(folder)
    saver.save(5, model, optimizer, {})
    saver.close()
    return draw()


def load_rng(folder: str) -> tuple[list[float], list[str]]:
    said: list[str] = []
    model, optimizer = build((1, 0))
    loader = Checkpointer(folder, CheckpointConfig(), seed=3, notify=said.append)
    loader.load(folder, model, optimizer)
    loader.close()
    return draw(), said


def test_random_generators_per_rank(tmp_path: Path) -> None:
    saved = run(save_rng, 2, str(tmp_path))
    assert saved[0] != saved[1]
    assert [numbers for numbers, _ in run(load_rng, 2, str(tmp_path))] == saved
    first, again = run(load_rng, 4, str(tmp_path)), run(load_rng, 4, str(tmp_path))
    assert [numbers for numbers, _ in first] == [numbers for numbers, _ in again]
    assert len({tuple(numbers) for numbers, _ in first}) == 4
    assert "written by 2 ranks, now there are 4" in first[0][1][0] and not first[1][1]


def fail_on_rank_1(folder: str, asynchronous: bool) -> str:
    model, optimizer = build((1, 0))
    saver = checkpointer(folder, asynchronous=asynchronous)
    saver.save(1, model, optimizer, {})
    saver.wait()
    write = files._ChecksumStream.write
    if dist.get_rank() == 1:
        files._ChecksumStream.write = _full_disk  # type: ignore[method-assign]
    try:
        saver.save(2, model, optimizer, {})
        saver.close()
    except RuntimeError as error:
        return str(error)
    finally:
        files._ChecksumStream.write = write  # type: ignore[method-assign]
    return "no error"


def _full_disk(*_: object) -> int:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("asynchronous", [False, True])
def test_one_ranks_full_disk_is_everybodys_error(tmp_path: Path, asynchronous: bool) -> None:
    for text in run(fail_on_rank_1, 2, str(tmp_path), asynchronous):
        assert "checkpoint of step 2 was not saved" in text and "rank 1: [Errno 28] No space left on device" in text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step_00000001"]


def save_at_different_steps(folder: str) -> str:
    model, optimizer = build((1, 0))
    saver = checkpointer(folder, asynchronous=False)
    saver.save(1, model, optimizer, {})
    try:
        saver.save(5 + dist.get_rank(), model, optimizer, {})
    except RuntimeError as error:
        return str(error)
    return "no error"


def test_ranks_at_different_steps_save_nothing(tmp_path: Path) -> None:
    for text in run(save_at_different_steps, 2, str(tmp_path)):
        assert "rank 1: this rank saves step 6, and rank 0 step 5: they must be at the same one" in text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step_00000001"]


def load_other_shape(folder: str) -> str:
    model, optimizer = build((1, 0))
    if dist.get_rank() == 1:
        model.odd = nn.Parameter(torch.zeros(1))
    loader = checkpointer(folder)
    try:
        loader.load(folder, model, optimizer)
    except ValueError as error:
        return str(error)
    finally:
        loader.close()
    return "no error"


def test_a_model_that_does_not_fit_on_one_rank_stops_all(tmp_path: Path) -> None:
    run(save, 2, str(tmp_path), (1, 0), 1, False)
    for text in run(load_other_shape, 2, str(tmp_path)):
        assert text.startswith("rank 1:") and "missing in the checkpoint: model.odd" in text


def die_during_save(folder: str, who: int) -> None:
    model, optimizer = build((2, 0))
    train(model, optimizer, 2)
    saver = checkpointer(folder, asynchronous=True)
    saver.save(1, model, optimizer, {"tokens": 200})
    saver.wait()
    train(model, optimizer, 1)
    write = files._ChecksumStream.write

    def die(self: files._ChecksumStream, data: bytes) -> int:
        if self.size > 4000:
            os.kill(os.getpid(), signal.SIGKILL)
        return write(self, data)

    if dist.get_rank() == who:
        files._ChecksumStream.write = die  # type: ignore[method-assign]
    saver.save(2, model, optimizer, {"tokens": 300})
    saver.wait()


@pytest.mark.parametrize("who", [0, 1])
def test_kill_of_one_rank_in_the_middle_of_its_file(tmp_path: Path, who: int) -> None:
    with pytest.raises(RuntimeError, match="die_during_save failed"):
        run_workers(die_during_save, 2, str(tmp_path), who)
    assert (tmp_path / "latest").read_text() == "step_00000001\n"
    left = [path.name for path in tmp_path.iterdir()]
    assert "step_00000002" not in left
    run(load_and_compare, 1, str(tmp_path), (1, 0), 2)
    # The next save clears what the killed one left.
    run(save, 1, str(tmp_path), (1, 0), 3, False)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["latest", "step_00000001", "step_00000003"]
