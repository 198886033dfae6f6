"""Upcycling (Komatsuzaki et al., 2023, arXiv:2212.05055): a dense model becomes a Mixture of Experts.

Every feed-forward is copied into N experts and a new router chooses K of them. With weights that sum to 1, equal
experts give what the dense layer gave, whatever the router says: the first loss is the dense model's. Noise, if asked
for, tells the experts apart from the start.
"""

import dataclasses
import re

import torch
from torch import nn

from moe.config import MoEConfig
from parallel.init import InitRule, draw, local_box
from trainer.hf_names import DENSE, Dim, Piece, Shape
from trainer.hf_source import Source
from trainer.huggingface import Transfer, fill_model, named_tensors
from trainer.models.config import ModelConfig
from trainer.models.transformer import init_rule
from trainer.peers import Peers

_STACK = re.compile(r"(layers\.\d+\.)moe\.experts\.(w_gate_up|w_down)")


def upcycled_config(dense: ModelConfig, num_experts: int, top_k: int) -> ModelConfig:
    """The Mixture of Experts that a dense model becomes: every layer, experts as wide as its feed-forward.

    Raises:
        ValueError: the model has experts already, or top_k does not fit.
    """
    if dense.num_dense_layers != dense.num_layers:
        raise ValueError(f"{dense.name} has experts already; only a dense model can be upcycled")
    # With one expert per token and weights that sum to 1, the router would have no gradient.
    if not 2 <= top_k <= num_experts:
        raise ValueError(f"top_k={top_k} must be from 2 to the number of experts, {num_experts}")
    moe = MoEConfig(num_experts=num_experts, top_k=top_k, expert_dim=dense.ffn_dim, normalize_topk=True)
    name = f"{dense.name}-upcycled-{num_experts}"
    return dataclasses.replace(dense, name=name, num_dense_layers=0, moe=moe)


def fill_upcycled(
    source: Source, model: nn.Module, config: ModelConfig, peers: Peers, noise: float, seed: int
) -> Transfer:
    """Fill a model of `upcycled_config` from a dense folder. Collective; errors as `huggingface.load_source`.

    Args:
        noise: standard deviation of what is added to every expert's weights, as a multiple of `model.init_std`.
    """
    routers = [name for name in named_tensors(model) if name.endswith("moe.router.weight")]
    fresh = {name: InitRule("normal", init_rule(name, config).std) for name in routers}
    moved = fill_model(source, source.tensors(), model, dense_pieces, peers, fresh=fresh, seed=seed)
    if noise:
        add_noise(model, noise * config.init_std, seed)
    return moved


def dense_pieces(name: str, shape: Shape) -> list[Piece]:
    """Every expert is the dense layer's feed-forward."""
    stack = _STACK.fullmatch(name)
    if stack is None:
        return DENSE.pieces(name, shape)
    layer = f"model.{stack[1]}mlp."
    if stack[2] == "w_down":
        return [Piece(f"{layer}down_proj.weight", shape[1:], (e,), (Dim(0), Dim(1))) for e in range(shape[0])]
    maps = ("gate_proj", "up_proj")
    return [
        Piece(f"{layer}{maps[j]}.weight", shape[2:], (e, j), (Dim(0), Dim(1)))
        for e in range(shape[0])
        for j in range(2)
    ]


@torch.no_grad()
def add_noise(model: nn.Module, std: float, seed: int) -> None:
    """Add N(0, std^2), clamped at three standard deviations, to every expert: the same in any layout."""
    for name, tensor in named_tensors(model).items():
        if _STACK.fullmatch(name) is None:
            continue
        offset, local = local_box(tensor)
        window = tuple(slice(lo, lo + size) for lo, size in zip(offset[1:], local.shape[1:], strict=True))
        for index in range(local.shape[0]):
            values = draw(tensor.shape[1:], std, f"upcycle/{name}/{offset[0] + index}", seed, local.device)
            local[index] += values[window].to(local.dtype)
