"""Weights are gathered from where a block begins, and never those of an update before."""

import itertools
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from moe.experts import GroupedExperts
from parallel import fsdp
from parallel.config import ParallelConfig
from parallel.mesh import build_mesh
from tests.distributed.harness import run_workers
from tests.distributed.tiny_models import MODELS
from trainer.build import build_model
from trainer.config import Config, PrecisionConfig, TrainConfig

SEQ_LEN = 8


def built(name: str, **layout: int) -> tuple[nn.Module, Tensor]:
    mesh = build_mesh(ParallelConfig(**layout), torch.device("cpu"))
    train = TrainConfig(global_batch_size=mesh.batch_size, seq_len=SEQ_LEN)
    precision = PrecisionConfig(recipe="bf16")
    model = build_model(Config(model=MODELS[name], parallel=mesh.config, train=train, precision=precision), mesh)
    return model, (torch.arange(SEQ_LEN)[None] * 3 + mesh.batch_rank) % 11


def is_coming(module: nn.Module) -> bool:
    """Whether FSDP has asked for the module's weights and not taken them yet."""
    assert isinstance(module, FSDPModule)
    return all(group._all_gather_result is not None for group in module._get_fsdp_state()._fsdp_param_groups)


def seen_by_attention() -> list[tuple[bool, bool]]:
    """Of each block but the last: whether its experts and the next block are coming when its attention begins."""
    model, tokens_BS = built("qwen3", ep=2)
    found: list[tuple[bool, bool]] = []
    blocks = list(model.get_submodule("layers").children())
    for block, following in itertools.pairwise(blocks):
        experts = next(module for module in block.modules() if isinstance(module, GroupedExperts))
        block.get_submodule("attention").register_forward_pre_hook(
            lambda *_, experts=experts, following=following: found.append((is_coming(experts), is_coming(following)))
        )
    model(tokens_BS, labels_BS=tokens_BS).loss_sum.backward()
    assert not any(is_coming(module) for module in model.modules() if isinstance(module, FSDPModule))
    return found


def test_experts_and_the_next_block_are_gathered_from_where_a_block_begins() -> None:
    """Four ranks, of which two share experts."""
    found = run_workers(seen_by_attention, 4)
    assert found[0] and all(seen == [(True, True)] * len(found[0]) for seen in found)


def losses_of_updates(name: str) -> list[float]:
    """In turn a step, a pass without gradients, which leaves blocks for further tokens out, and an update."""
    model, tokens_BS = built(name, ep=2)
    found = []
    for _ in range(3):
        output = model(tokens_BS, labels_BS=tokens_BS)
        sums = [output.loss_sum, *(() if output.mtp_loss_sums_M is None else output.mtp_loss_sums_M)]
        torch.stack(sums).sum().backward()
        found += [float(loss.detach()) for loss in sums]
        with torch.no_grad():
            model.eval()
            found.append(float(model(tokens_BS, labels_BS=tokens_BS).loss_sum))
            model.train()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    part = parameter.to_local() if isinstance(parameter, DTensor) else parameter
                    grad = parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad
                    part.sub_(grad, alpha=0.1)
                    parameter.grad = None
    return found


def compare_with_gathering_late(name: str) -> tuple[list[float], list[float]]:
    ours = losses_of_updates(name)
    with patch.object(fsdp, "gather_beside_attention", lambda *_: None):
        return ours, losses_of_updates(name)


def test_no_pass_computes_with_weights_of_before_an_update() -> None:
    for name in ("qwen3", "multi_token"):
        for ours, theirs in run_workers(compare_with_gathering_late, 4, name):
            # A step sees the weights of the pass before it, and no other's.
            assert ours == theirs and len(set(ours[:: len(ours) // 3])) == 3
