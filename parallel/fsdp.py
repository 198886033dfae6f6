"""Fully sharded data parallelism (FSDP2), with gradients that are *sums*.

The loss is divided by the valid tokens of the whole global batch before backward, so each rank's gradient is its part
of the global one and the reduction is a plain sum, for dense and expert weights alike. No averaging factor is left that
could depend on the layout: that is how the doubled and halved expert gradients of other frameworks cannot arise.

Expert weights are gathered over dp_shard x cp x tp / (ep x etp) only: each group of ranks that holds the same experts
is its own FSDP mesh. Where that is one rank, FSDP leaves them alone (parallel/whole_experts.py).
"""

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

from moe.layer import MoE
from moe.linear_maps import local
from parallel.mesh import Mesh
from parallel.sizes import expert_shard_dim
from parallel.whole_experts import CastWeights


def apply_fsdp(
    model: nn.Module, blocks: list[nn.Module], mesh: Mesh, compute_dtype: torch.dtype, reshard_after_forward: bool
) -> None:
    """Shard each block, then what is left (embedding, final norm, head) with the root.

    Parameters keep their own dtype as masters; forward and backward see `compute_dtype`; gradients are reduced in fp32
    (fp64 when computing in fp64).
    """
    reduce_dtype = torch.promote_types(compute_dtype, torch.float32)
    # Inputs are not cast: routing weights and losses must stay fp32.
    policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=reduce_dtype, cast_forward_inputs=False)
    whole: set[nn.Parameter] = set()
    for block in blocks:
        for layer in [module for module in block.modules() if isinstance(module, MoE)]:
            if has_whole_experts(mesh):
                whole |= set(layer.experts.parameters())
                if compute_dtype != layer.experts.w_down.dtype:
                    layer.experts.cast = CastWeights(compute_dtype, reshard_after_forward)
            elif mesh.experts is not mesh.dense:
                _shard_experts(layer.experts, mesh, policy, reshard_after_forward)
    for module in (*blocks, model):
        fully_shard(
            module, mesh=mesh.dense, mp_policy=policy, reshard_after_forward=reshard_after_forward, ignored_params=whole
        )
    for module in model.modules():
        if isinstance(module, FSDPModule):
            sum_gradients(module)


def has_whole_experts(mesh: Mesh) -> bool:
    """Whether no other rank has a share, or a replica, of this rank's experts."""
    return mesh.experts.size() == 1


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
