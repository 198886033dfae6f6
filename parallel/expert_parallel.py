"""Expert parallelism: split each MoE layer's experts over the ranks of ep, and each expert's hidden units over etp.

Rank i of ep keeps experts i*E/ep to (i+1)*E/ep. The weights become DTensors, which tells FSDP, checkpoints and gradient
clipping which experts these are. Rows reach them through `comms`.

With etp > 1 a rank's experts have their share of the hidden units, and their results are partial sums over etp. The
bias of the down map is whole on every rank and added by one of them.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard

from comms.backend import BackendChoice, choose_backend
from comms.config import CommsConfig
from comms.nodes import make_node_groups
from comms.payload import Payload
from comms.record_exchange import RecordLayout, create_record_exchange, plan_record_layout
from comms.saved_arena import SavedArena, make_saved_arena, plan_saved
from comms.symmetric_exchange import describe_tag
from comms.symmetric_memory import ArenaLayout, Exchange, create_exchange, plan_layout, register
from moe.config import MoEConfig
from moe.layer import MoE
from moe.linear_maps import local
from parallel.mesh import Mesh
from parallel.sizes import check_experts
from parallel.tensor_parallel import split_parameter

# Why comms.backend=auto is collective for other experts.
NOT_WHILE_THEY_COMPUTE = (
    "rows cannot travel while these experts compute, as they do with model.moe.backend=fused, without biases, recipes "
    "of low precision and model.moe.scores_before_experts; otherwise symm_mem has to be asked for"
)
# The dim of each weight that counts hidden units: (E, 2, F, D), (E, D, F), (E, 2, F); the down map's bias has none.
HIDDEN_DIM = {"w_gate_up": 2, "w_down": 2, "b_gate_up": 2, "b_down": None}


def apply_expert_parallel(model: nn.Module, mesh: Mesh) -> int:
    """Split the experts of every MoE layer and tell the layer its groups. Returns the number of layers.

    Raises:
        ValueError: if the experts do not divide by ep, or their hidden units by etp.
    """
    layers = [module for module in model.modules() if isinstance(module, MoE)]
    for layer in layers:
        check_experts(mesh.config, layer.config.num_experts, layer.config.expert_dim)
        layer.data_group = mesh.token_group
        layer.sequence = mesh.sequence
        layer.ep_group = mesh.ep_group
        if mesh.etp is not None:
            layer.etp_group = mesh.etp.get_group()
            layer.experts.adds_down_bias = mesh.etp.get_local_rank() == 0
        if mesh.expert_split is not None:
            for name, parameter in list(layer.experts.named_parameters(recurse=False)):
                setattr(layer.experts, name, _split(name, parameter, mesh))
    return len(layers)


def connect_experts(
    model: nn.Module, mesh: Mesh, comms: CommsConfig, max_tokens: int, dtype: torch.dtype, no_room: str = ""
) -> BackendChoice:
    """Choose how rows reach the experts and tell every MoE layer. Collective over all processes.

    Experts have their precision by now, which says whether rows can travel while they compute.

    Args:
        max_tokens: the most tokens that a rank brings to a MoE layer in one pass.
        dtype: of the rows.
        no_room: why comms.backend=auto is not to take symm_mem for want of memory; empty: there is room.

    Raises:
        ValueError: a backend that was asked for cannot run here.
    """
    layers = [module for module in model.modules() if isinstance(module, MoE)]
    for layer in layers:
        layer.dispatch_payload = Payload(comms.payload.dispatch, comms.payload.dispatch_grad)
        layer.combine_payload = Payload(comms.payload.combine, comms.payload.combine_grad)
    against = no_room
    if comms.backend == "auto" and not _can_exchange(layers, dtype, mesh.device):
        against = NOT_WHILE_THEY_COMPUTE
    # Without experts there is nothing to bring to them.
    choice = choose_backend(comms, mesh.ep_group if layers else None, mesh.device, against)
    if comms.chunks > 1 or comms.saved_headroom is not None:
        _check_chunks(layers, comms, choice.backend, dtype, mesh.device)
    if mesh.ep_group is not None:
        nodes = make_node_groups(mesh.ep_group, choice.ranks_per_node, mesh.config.timeout_seconds)
        for layer in layers:
            layer.nodes = nodes
    if choice.backend not in ("symm_mem", "nvshmem"):
        return choice
    assert mesh.ep_group is not None
    config, dim = layers[0].config, layers[0].router.weight.shape[1]
    max_tokens *= mesh.config.etp
    buffers = plan_buffers(choice.backend, config, dim, mesh.config.ep, max_tokens, comms, dtype)
    if isinstance(buffers, RecordLayout):
        exchange: Exchange = create_record_exchange(
            mesh.ep_group, mesh.device, buffers, max_tokens, describe_tag, config.top_k
        )
    else:
        exchange = create_exchange(
            mesh.ep_group,
            mesh.device,
            buffers,
            max_tokens,
            mesh.config.timeout_seconds,
            comms.num_ctas,
            describe_tag,
            items_per_token=config.top_k,
            measure=comms.measure,
        )
    if comms.saved_headroom is not None:
        exchange = share_saved(
            layers, exchange, comms.saved_headroom, mesh.config.activation_checkpoint == "none", dtype
        )
    return choice._replace(room=use_exchange(layers, exchange))


def plan_buffers(
    backend: str, config: MoEConfig, dim: int, num_ranks: int, max_tokens: int, comms: CommsConfig, dtype: torch.dtype
) -> ArenaLayout | RecordLayout:
    """The memory of an exchange by symm_mem or nvshmem, which all MoE layers of a model share.

    Args:
        max_tokens: the most tokens that a rank brings, times etp.
    """
    side_bytes = config.top_k * (max(dtype.itemsize, 4) + 4)
    sizes = num_ranks, max_tokens, config.top_k, dim * dtype.itemsize, side_bytes, comms.capacity
    return plan_record_layout(*sizes) if backend == "nvshmem" else plan_layout(*sizes, comms.chunks)


def use_exchange(layers: Sequence[MoE], exchange: Exchange) -> str:
    """Connect the MoE layers of a model, in order; returns what there is room for."""
    for number, layer in enumerate(layers):
        layer.exchange, layer.number, layer.chunks = exchange, number, exchange.layout.max_chunks
    layout, pairs = exchange.layout, max(layer.pair_room(exchange) for layer in layers)
    return (
        f"an arena of {layout.num_bytes / 2**30:.2f} GiB per rank; room for {layout.row_bound:,} rows and {pairs:,} "
        f"(row, expert) pairs of one layer{_describe_saved(exchange.saved)}"
    )


def share_saved(
    layers: Sequence[MoE], exchange: Exchange, headroom: float, keeps_hidden: bool, dtype: torch.dtype
) -> Exchange:
    """The same exchange with an arena for what the layers keep for backward.

    Args:
        headroom: room for this multiple of the expected load of all layers.
        keeps_hidden: experts keep h, too: where blocks are not checkpointed.
        dtype: of the rows.
    """
    first = layers[0]
    rows = expected_rows(first.config, exchange.num_ranks, exchange.max_tokens), exchange.layout.row_bound
    items = exchange.max_tokens * first.config.top_k, max(layer.pair_room(exchange) for layer in layers)
    # This rank's slice of an expert's hidden units.
    hidden = 2 * local(first.experts.w_down).shape[2] if keeps_hidden else None
    width = first.router.weight.shape[1]
    room = plan_saved(len(layers), headroom, rows, items)
    saved = make_saved_arena(room, width, first.config.top_k, hidden, dtype, exchange.arena.device)
    return register(replace(exchange, saved=saved))


def expected_rows(config: MoEConfig, num_ranks: int, num_tokens: int) -> float:
    """Rows that a rank receives if each of `num_tokens` tokens of every rank chooses any top_k experts alike.

    1 minus the chance that none of a token's experts is here, C(E - E/N, K) / C(E, K), for each token of N ranks.
    Groups of experts (config.top_groups) make it less.
    """
    experts, top_k = config.num_experts, config.top_k
    nowhere = math.comb(experts - experts // num_ranks, top_k) / math.comb(experts, top_k)
    return num_ranks * num_tokens * (1 - nowhere)


def _describe_saved(saved: SavedArena | None) -> str:
    if saved is None:
        return ""
    room = saved.room
    return (
        f"; {saved.num_bytes:,} bytes ({saved.num_bytes / 2**30:.2f} GiB) for what {room.num_layers} layers keep for "
        f"backward: {room.num_rows:,} rows and {room.num_items:,} pairs, where {room.expected_rows:,} and "
        f"{room.expected_items:,} are expected"
    )


def _can_exchange(layers: Sequence[MoE], dtype: torch.dtype, device: torch.device) -> bool:
    """Whether rows can travel while the experts of every layer compute."""
    return all(layer.experts.can_exchange(dtype, device) for layer in layers)


def _check_chunks(
    layers: Sequence[MoE], comms: CommsConfig, backend: str, dtype: torch.dtype, device: torch.device
) -> None:
    """Whether rows can travel while experts compute. One rank has nothing that travels, and that is fine."""
    if backend == "none":
        return
    asked, without = f"comms.chunks={comms.chunks} lets rows travel", "comms.chunks=1"
    if comms.chunks == 1:
        asked, without = (
            f"comms.saved_headroom={comms.saved_headroom} is for rows that travel",
            "comms.saved_headroom=null",
        )
    if backend != "symm_mem" or not _can_exchange(layers, dtype, device):
        raise ValueError(
            f"{asked} while experts compute: it needs comms.backend=symm_mem and model.moe.backend=fused, without "
            f"biases and recipes of low precision; or set {without}"
        )


def _split(name: str, parameter: nn.Parameter, mesh: Mesh) -> nn.Parameter:
    assert mesh.expert_split is not None
    hidden = HIDDEN_DIM[name]
    placements: list[Shard | Replicate] = [] if mesh.ep is None else [Shard(0)]
    if mesh.etp is not None:
        placements.append(Replicate() if hidden is None else Shard(hidden))
    return split_parameter(name, parameter, mesh.expert_split, placements)
