"""Fully sharded data parallelism (FSDP2), with gradients that are *sums*.

The loss is divided by the valid tokens of the whole global batch before backward, so each rank's gradient is its part
of the global one and the reduction is a plain sum, for dense and expert weights alike. No averaging factor is left that
could depend on the layout: that is how the doubled and halved expert gradients of other frameworks cannot arise.

Expert weights are gathered over dp_shard x cp x tp / (ep x etp) only: each group of ranks that holds the same experts
is its own FSDP mesh. Where that is one rank, FSDP leaves them alone (parallel/whole_weights.py), and all other weights
too where they have nobody to be gathered from either.
"""

from typing import cast

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

from moe.layer import MoE
from moe.linear_maps import local
from parallel.mesh import Mesh
from parallel.sizes import expert_shard_dim
from parallel.whole_weights import CastModule, CastWeights


def apply_fsdp(
    model: nn.Module,
    blocks: list[nn.Module],
    mesh: Mesh,
    compute_dtype: torch.dtype,
    reshard_after_forward: bool,
    num_in_order: int,
) -> None:
    """Shard each block, then what is left (embedding, final norm, head) with the root.

    Parameters keep their own dtype as masters; forward and backward see `compute_dtype`; gradients are reduced in fp32
    (fp64 when computing in fp64).

    Args:
        num_in_order: so many of the first blocks run in every forward pass; the others all or not at all. In order.
    """
    if has_whole_weights(model, mesh):
        _cast_whole(model, blocks, compute_dtype, give_up=reshard_after_forward)
        return
    reduce_dtype = torch.promote_types(compute_dtype, torch.float32)
    # Inputs are not cast: routing weights and losses must stay fp32.
    policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=reduce_dtype, cast_forward_inputs=False)
    whole: set[nn.Parameter] = set()
    for block in blocks:
        for layer in [module for module in block.modules() if isinstance(module, MoE)]:
            if has_whole_experts(mesh):
                whole |= _cast_experts(layer, compute_dtype, reshard_after_forward)
            elif mesh.experts is not mesh.dense:
                _shard_experts(layer.experts, mesh, policy, reshard_after_forward)
    for module in (*blocks, model):
        fully_shard(
            module, mesh=mesh.dense, mp_policy=policy, reshard_after_forward=reshard_after_forward, ignored_params=whole
        )
    for module in model.modules():
        if isinstance(module, FSDPModule):
            sum_gradients(module)
    gather_beside_attention(model, blocks, num_in_order)


def gather_beside_attention(model: nn.Module, blocks: list[nn.Module], num_in_order: int) -> None:
    """Gather a block's experts and the next block's weights from where the block begins on the device.

    By itself FSDP gathers what comes next as soon as the host is there, whatever the device is at. NCCL's programs then
    hold multiprocessors until the last rank has come, and the experts' kernels, of one program for each, take twice as
    long beside them (on four H200 a fifth of a forward pass). Attention's kernels do not mind.

    What is gathered and not used would be old by the next pass. Whoever goes on after a pass that failed calls
    model.reset_iter_state() first.

    Args:
        num_in_order: so many of the first blocks run in every forward pass; the others all or not at all. In order.
    """
    for number, module in enumerate((model, *blocks)):
        inside = module.modules() if number else ()
        following = () if number == num_in_order else blocks[number : number + 1]
        gathered = [child for child in (*inside, *following) if child is not module]
        ahead: list[FSDPModule] = [child for child in gathered if isinstance(child, FSDPModule)]
        cast(FSDPModule, module).set_modules_to_forward_prefetch(ahead)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # On the stream that computes, for where it begins, and from there on beside it.
            module._set_unshard_async_op(True)  # pyright: ignore[reportPrivateUsage]


def has_whole_experts(mesh: Mesh) -> bool:
    """Whether FSDP has nobody to gather this rank's experts from, or to reduce their gradients over.

    What ranks of etp share of them, biases, is summed elsewhere (parallel/tensor_parallel.py).
    """
    return mesh.experts.size() == 1


def has_whole_weights(model: nn.Module, mesh: Mesh) -> bool:
    """Whether FSDP has nobody to gather any of this rank's weights from."""
    has_experts = any(isinstance(module, MoE) for module in model.modules())
    return mesh.dense.size() == 1 and (has_whole_experts(mesh) or not has_experts)


def _cast_whole(model: nn.Module, blocks: list[nn.Module], dtype: torch.dtype, *, give_up: bool) -> None:
    """Experts cast their own weights, each block the rest of its, and the model what is left."""
    taken: set[nn.Parameter] = set()
    for layer in [module for module in model.modules() if isinstance(module, MoE)]:
        taken |= _cast_experts(layer, dtype, give_up)
    for module in (*blocks, model):
        own = [parameter for parameter in module.parameters() if parameter not in taken and parameter.dtype != dtype]
        taken |= set(own)
        if own:
            # Inside what recomputes it, which calls it once more.
            CastModule(getattr(module, "_checkpoint_wrapped_module", module), own, dtype, give_up)


def _cast_experts(layer: MoE, dtype: torch.dtype, give_up: bool) -> set[nn.Parameter]:
    """Let experts cast their weights, where there is anything to cast; which weights these are."""
    if dtype != layer.experts.w_down.dtype:
        layer.experts.cast = CastWeights(dtype, give_up)
    return set(layer.experts.parameters())


def sum_gradients(module: FSDPModule) -> None:
    """Make one FSDP module reduce its gradients by a plain sum, on NCCL and gloo alike."""
    module.set_gradient_divide_factor(1.0)
    # Without this, a factor equal to the group size turns into an average, and gloo knows no pre-multiplied sums.
    module.set_force_sum_reduction_for_comms(True)


def _shard_experts(experts: nn.Module, mesh: Mesh, policy: MixedPrecisionPolicy, reshard_after_forward: bool) -> None:
    shard_size = mesh.experts.size(mesh.experts.ndim - 1)
    fully_shard(
        experts,
        mesh=mesh.experts,
        mp_policy=policy,
        reshard_after_forward=reshard_after_forward,
        shard_placement_fn=lambda weight: Shard(expert_shard_dim(local(weight).shape, shard_size)),
    )
