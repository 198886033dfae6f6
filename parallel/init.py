"""Initial weights that do not depend on the layout.

Each parameter is drawn from a generator of its own, seeded by (seed, name): a rank draws the whole tensor and keeps its
shard. A stack of experts is drawn expert by expert, seeded by (seed, name, expert), so a rank draws only the experts it
holds. Values are drawn in fp32 on the parameter's device and then cast, clamped to three standard deviations. Equality
is promised per device type: CPU and CUDA generators differ.
"""

import hashlib
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

CLAMP_STDS = 3.0


class InitRule(NamedTuple):
    """How a parameter or buffer starts: `normal` with mean 0 and `std` (clamped at 3 std), `ones` or `zeros`."""

    kind: str
    std: float = 0.0


def init_weights(model: nn.Module, rule_of: Callable[[str], InitRule], seed: int, device: torch.device) -> None:
    """Give a model built on the meta device its memory and its initial values. Layout-independent; no communication."""
    if any(tensor.is_meta for tensor in [*model.parameters(), *model.buffers()]):
        model.to_empty(device=device)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            name = clean_name(name)
            fill(tensor, name, rule_of(name), seed)


def clean_name(name: str) -> str:
    """A parameter's name without what checkpointing and compiling wrap around modules."""
    return name.replace("_checkpoint_wrapped_module.", "").replace("_orig_mod.", "")


def fill(tensor: Tensor, name: str, rule: InitRule, seed: int) -> None:
    """Write the initial values of one parameter, or of this rank's shard of it."""
    if rule.kind in ("ones", "zeros"):
        tensor.fill_(1.0 if rule.kind == "ones" else 0.0)
        return
    assert rule.kind == "normal", rule
    offset, local = local_box(tensor)
    if local.numel() == 0:
        return
    window = tuple(slice(start, start + size) for start, size in zip(offset, local.shape, strict=True))
    if ".experts." in name:
        for index in range(local.shape[0]):
            values = draw(tensor.shape[1:], rule.std, f"{name}/{offset[0] + index}", seed, local.device)
            local[index].copy_(values[window[1:]])
    else:
        local.copy_(draw(tensor.shape, rule.std, name, seed, local.device)[window])


def local_box(tensor: Tensor) -> tuple[tuple[int, ...], Tensor]:
    """Where this rank's shard of a tensor begins, and the shard itself (sharing memory)."""
    if not isinstance(tensor, DTensor):
        return (0,) * tensor.dim(), tensor
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    local = tensor.to_local()
    assert tuple(local.shape) == tuple(shape), (local.shape, shape)
    return tuple(offset), local


def draw(shape: torch.Size, std: float, name: str, seed: int, device: torch.device) -> Tensor:
    """N(0, std^2) in fp32, clamped, from the generator that belongs to (seed, name)."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator(device=device).manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    values = torch.randn(shape, generator=generator, device=device, dtype=torch.float32)
    return values.clamp_(-CLAMP_STDS, CLAMP_STDS).mul_(std)
