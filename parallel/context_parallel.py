"""stub"""

from dataclasses import dataclass

import torch.distributed as dist
from torch import nn

from parallel.mesh import Mesh


@dataclass(frozen=True)
class ContextParallel:
    ring: int
    ulysses: int
    ring_rank: int
    ulysses_rank: int
    ring_group: dist.ProcessGroup | None
    ulysses_group: dist.ProcessGroup | None


def context_attention(*a, **k):
    raise NotImplementedError


def apply_context_parallel(model: nn.Module, mesh: Mesh) -> None:
    pass
