"""A MoE layer whose rows travel by some backend, for checks that compare backends."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moe.config import MoEConfig
from moe.layer import MoE
from parallel.activation_checkpoint import apply_activation_checkpoint


def layer_pass(exchange: Any, mode: str, *, experts_per_rank: int, top_k: int, width: int) -> list[Tensor]:
    """Output and every gradient of two calls of a layer under activation checkpointing, both alive at once.

    Args:
        exchange: None: by collectives.
    """
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(7)
    config = MoEConfig(num_experts=experts_per_rank * num_ranks, top_k=top_k, expert_dim=16, backend="grouped_mm")
    layer = MoE(config, width)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(0, 0.3)
    for name, parameter in list(layer.experts.named_parameters()):
        part = parameter.detach()[rank * experts_per_rank : (rank + 1) * experts_per_rank]
        setattr(layer.experts, name, torch.nn.Parameter(part))
    layer.ep_group, layer.exchange, layer.number = dist.group.WORLD, exchange, 3
    wrapped = apply_activation_checkpoint(layer, mode)
    generator = torch.Generator().manual_seed(rank)
    xs = [torch.randn(1, 4 + rank, width, generator=generator).requires_grad_() for _ in range(2)]
    outs = [wrapped(x)[0] for x in xs]
    sum((out * out).sum() for out in outs).backward()
    return [*(out.detach() for out in outs), *(x.grad for x in xs), *(p.grad for p in layer.parameters())]
