"""The recipe that turns a model on the meta device into one that runs in parallel, in the order it applies.

1. tensor and expert parallelism   split parameters, so they come before anything wraps these
2. context parallelism             tells attention how sequences are split
3. precision                       gives maps a low-precision recipe, which sees the sizes that splitting left
4. exchange                        chooses how rows reach the experts, by what these compute in
5. compile                         compiles the inside of blocks
6. activation checkpoint           wraps blocks
7. FSDP                            shards whatever parameters are there by now
8. initial weights                 every rank draws its shard
"""

from collections.abc import Callable

import torch
from torch import nn

from comms.backend import BackendChoice
from comms.config import CommsConfig
from parallel.activation_checkpoint import apply_activation_checkpoint
from parallel.compile import apply_compile
from parallel.context_parallel import apply_context_parallel
from parallel.expert_parallel import apply_expert_parallel, connect_experts
from parallel.fsdp import apply_fsdp
from parallel.init import InitRule, init_weights
from parallel.mesh import Mesh
from parallel.tensor_parallel import TensorPlan, apply_tensor_parallel


def parallelize(
    model: nn.Module,
    layers: nn.ModuleDict,
    mesh: Mesh,
    comms: CommsConfig,
    *,
    tensor_plan: TensorPlan,
    compute_dtype: torch.dtype,
    max_tokens: int,
    num_in_order: int,
    rule_of: Callable[[str], InitRule],
    seed: int,
    apply_precision: Callable[[nn.Module], object] | None = None,
    no_room: str = "",
) -> BackendChoice:
    """Apply the layout of `mesh` to a model whose blocks are `layers`, in place; says what exchanges rows.

    Args:
        tensor_plan: which weights tensor parallelism splits, and how.
        compute_dtype: dtype of forward and backward; parameters stay as they were built (fp32 masters).
        max_tokens: the most tokens of one pass on this rank, between attention and feed-forward maps.
        num_in_order: so many of the first layers run in every forward pass, in order.
        rule_of: how each named parameter starts.
        apply_precision: gives maps of the model another precision than `compute_dtype`.
        no_room: why comms.backend=auto is not to take symm_mem for want of memory; empty: there is room.
    """
    config = mesh.config
    apply_tensor_parallel(model, mesh, tensor_plan)
    apply_expert_parallel(model, mesh)
    apply_context_parallel(model, mesh)
    if apply_precision is not None:
        apply_precision(model)
    choice = connect_experts(model, mesh, comms, max_tokens, compute_dtype, no_room)
    for name, block in list(layers.named_children()):
        if config.compile:
            apply_compile(block)
        layers[name] = apply_activation_checkpoint(block, config.activation_checkpoint, config.compile)
    apply_fsdp(model, list(layers.children()), mesh, compute_dtype, config.reshard_after_forward, num_in_order)
    init_weights(model, rule_of, seed, mesh.device)
    return choice
