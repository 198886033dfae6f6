"""parallel.reshard_after_forward: whether gathered weights are given up between forward and backward."""

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from parallel.config import ParallelConfig
from parallel.mesh import build_mesh
from tests.distributed.harness import run_workers
from tests.distributed.tiny_models import QWEN3
from trainer.build import build_model
from trainer.config import Config, PrecisionConfig, TrainConfig

SEQ_LEN = 8


def held(parameter: Tensor) -> int:
    """Elements that this rank holds."""
    return (parameter.to_local() if isinstance(parameter, DTensor) else parameter).numel()


def held_by_parts(model: nn.Module) -> tuple[int, int]:
    """Elements of the attention and of the experts in the first block."""
    block = model.get_submodule("layers.0")
    attention = sum(held(parameter) for parameter in block.get_submodule("attention").parameters())
    return attention, sum(held(parameter) for parameter in block.get_submodule("moe.experts").parameters())


def held_before_after_and_at_the_end(reshard: bool) -> list[tuple[int, int]]:
    """What this rank holds before the forward pass, after it, and after the backward pass."""
    mesh = build_mesh(ParallelConfig(ep=2, reshard_after_forward=reshard), torch.device("cpu"))
    train = TrainConfig(global_batch_size=4, seq_len=SEQ_LEN)
    config = Config(model=QWEN3, parallel=mesh.config, train=train, precision=PrecisionConfig(recipe="fp32"))
    model = build_model(config, mesh)
    tokens_BS = torch.arange(SEQ_LEN)[None]
    found = [held_by_parts(model)]
    loss = model(tokens_BS, labels_BS=tokens_BS).loss_sum
    found.append(held_by_parts(model))
    loss.backward()
    found.append(held_by_parts(model))
    return found


def test_gathered_weights_are_kept_or_given_up_as_told() -> None:
    """Four ranks share the attention; two of them (2 x EP=2) a stack of experts."""
    for shards in run_workers(held_before_after_and_at_the_end, 4, True):
        assert shards == [shards[0]] * 3
    for before, after, end in run_workers(held_before_after_and_at_the_end, 4, False):
        assert after == (4 * before[0], 2 * before[1])
        assert end == before
