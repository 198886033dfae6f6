"""The optimizer, its parameter groups, the learning-rate schedule and gradient clipping.

The schedule is a pure function of the step: nothing of it needs saving, and a resumed run cannot drift from it.
"""

import math
from collections.abc import Callable, Iterable
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.sgd import sgd

from moe.linear_maps import local
from trainer.config import OptimConfig

# What torch's own clipping adds to the norm.
CLIP_EPS = 1e-6
SCHEDULES = ("cosine", "linear", "wsd", "constant")


def build_optimizer(model: nn.Module, config: OptimConfig) -> torch.optim.Optimizer:
    """A fused AdamW (or plain SGD without momentum, for comparisons) over the trainable parameters of `model`.

    Build it after the model is sharded. Groups are split by weight decay and by device mesh, because a fused step
    cannot mix meshes.

    Raises:
        ValueError: `config.name` is unknown.
    """
    groups = parameter_groups(model.named_parameters(), config.weight_decay)
    if config.name == "adamw":
        beta1, beta2 = config.betas
        return torch.optim.AdamW(groups, lr=config.lr, betas=(beta1, beta2), eps=config.eps, fused=True)
    if config.name == "sgd":
        return LocalSGD(groups, lr=config.lr)
    raise ValueError(f"optim.name={config.name} must be adamw or sgd")


class LocalSGD(torch.optim.SGD):
    """Plain SGD on what each rank has of a weight: the same numbers as on DTensors, which plan each operation for
    seconds where a weight lies on four mesh axes."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # pyright: ignore
        """One update; weights without gradient stay as they are."""
        assert closure is None
        for group in self.param_groups:
            pairs = [(local(p), local(p.grad)) for p in group["params"] if p.grad is not None]
            weights, grads = [list(column) for column in zip(*pairs, strict=True)] if pairs else ([], [])
            skip = getattr(self, "found_inf", None)
            sgd(
                weights,
                grads,
                [None] * len(weights),
                weight_decay=group["weight_decay"],
                momentum=0.0,
                lr=group["lr"],
                dampening=0.0,
                nesterov=False,
                maximize=False,
                # Only the fused kernel asks the device whether to do anything.
                fused=skip is not None,
                found_inf=skip,
            )
        return None


def update(optimizer: torch.optim.Optimizer, skip: Tensor | None = None) -> None:
    """One step of an optimizer of `build_optimizer`; none where the device finds `skip` to be 1.

    Weights, moments and step counts then stay as they are, and the host need not know.

    Args:
        skip: float32 scalar, 0 or 1. The kernels know it under the name that gradient scaling gives it.
    """
    if skip is None:
        optimizer.step()
        return
    optimizer.found_inf = skip  # pyright: ignore[reportAttributeAccessIssue]
    try:
        optimizer.step()
    finally:
        del optimizer.found_inf  # pyright: ignore[reportAttributeAccessIssue]


def parameter_groups(named: Iterable[tuple[str, nn.Parameter]], weight_decay: float) -> list[dict[str, object]]:
    """Groups in order of first appearance, so that they are the same on every rank and in every run."""
    groups: dict[tuple[bool, object], dict[str, object]] = {}
    for name, parameter in named:
        if not parameter.requires_grad:
            continue
        decay = is_decayed(name, parameter)
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
        empty: dict[str, object] = {"params": [], "weight_decay": weight_decay if decay else 0.0}
        members = groups.setdefault((decay, mesh), empty)["params"]
        assert isinstance(members, list)
        members.append(parameter)
    return list(groups.values())


def is_decayed(name: str, parameter: Tensor) -> bool:
    """Matrices decay; norms, biases and sinks do not. Stacked biases of experts (`b_*`) are told by their name."""
    return parameter.ndim > 1 and not name.rpartition(".")[2].startswith("b_")


def learning_rate(step: int, config: OptimConfig, total_steps: int) -> float:
    """The rate of update number `step` (0 is the first).

    Warm-up is linear and reaches `lr` at update `warmup_steps - 1`; the last update has `lr * min_lr_ratio` (but for
    `constant`). `wsd` stays at `lr` until the last `decay_ratio` of all steps and then falls linearly.

    Raises:
        ValueError: `config.schedule` is unknown.
    """
    if config.schedule not in SCHEDULES:
        raise ValueError(f"optim.schedule={config.schedule} must be one of {', '.join(SCHEDULES)}")
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    decay_steps = total_steps - config.warmup_steps
    if config.schedule == "wsd":
        decay_steps = min(decay_steps, round(config.decay_ratio * total_steps))
    # 0 before the decay begins, 1 at the last update and whatever follows.
    progress = min(1.0, max(0.0, 1 - (total_steps - 1 - step) / max(1, decay_steps)))
    fall = (1 - math.cos(math.pi * progress)) / 2 if config.schedule == "cosine" else progress
    return config.lr * (1 - fall + fall * config.min_lr_ratio)


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Sets the rate of every group for the next update."""
    for group in optimizer.param_groups:
        group["lr"] = lr


def ensure_gradients(model: nn.Module) -> None:
    """Gives each trainable parameter without a gradient one of zeros.

    Otherwise the optimizer would skip it (an expert that no token chose, say): no decay, no decay of its moments, and
    a step count that falls behind the others'.
    """
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)


def clip_grad_norm(model: nn.Module, max_norm: float, flag: Tensor | None = None) -> Tensor:
    """Scales all gradients so that their global norm is at most `max_norm`; returns the norm before that.

    The norm is over all shards of every mesh, the same scalar on each rank: a rank adds the squares of its shards, each
    divided by the number of ranks that hold the same shard, and one sum over all ranks does the rest. So a tensor
    counts once whatever it is split over. `max_norm <= 0` only measures.

    Args:
        flag: scalar, 0 or 1, that travels with the norm: 1 afterwards if it was on any rank.
    """
    by_copies: dict[int, list[Tensor]] = {}
    for parameter in model.parameters():
        if parameter.grad is not None:
            by_copies.setdefault(_num_copies(parameter.grad), []).append(local(parameter.grad))
    square = torch.stack([_sum_of_squares(shards) / copies for copies, shards in by_copies.items()]).sum()
    if dist.is_initialized():
        square = _sum_with(square, flag)
    norm = square.sqrt()
    if max_norm > 0:
        factor = (max_norm / (norm + CLIP_EPS)).clamp(max=1.0)
        for shard in chain.from_iterable(by_copies.values()):
            shard.mul_(factor.to(shard.dtype))
    return norm


def _sum_with(square: Tensor, flag: Tensor | None) -> Tensor:
    """The sum over all ranks; `flag` rides along."""
    values = square[None] if flag is None else torch.stack([square, flag.to(square.dtype)])
    dist.all_reduce(values)
    if flag is not None:
        flag.copy_(values[1].clamp(max=1))
    return values[0]


def _sum_of_squares(tensors: list[Tensor]) -> Tensor:
    norms = torch._foreach_norm(tensors)  # pyright: ignore[reportPrivateImportUsage]
    return torch.stack(norms).double().square().sum()


def _num_copies(gradient: Tensor) -> int:
    """Ranks that hold the same shard."""
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    if not isinstance(gradient, DTensor):
        return world_size
    axes = zip(gradient.device_mesh.shape, gradient.placements, strict=True)
    return world_size // math.prod(size for size, placement in axes if not placement.is_replicate())
