"""Fully sharded data parallelism (FSDP2), with gradients that are *sums*.

The loss is divided by the valid tokens of the whole global batch before backward, so each rank's gradient is its part
of the global one and the reduction is a plain sum, for dense and expert weights alike. No averaging factor is left that
could depend on the layout: that is how the doubled and halved expert gradients of other frameworks cannot arise.

Expert weights are gathered over dp_shard x cp x tp / (ep x etp) only: each group of ranks that holds the same experts
is its own FSDP mesh.
"""

from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

from moe.layer import MoE
from moe.linear_maps import local
from parallel.mesh import Mesh


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
    for block in blocks:
        for layer in [module for module in block.modules() if isinstance(module, MoE)]:
            if mesh.experts is not mesh.dense:
                _shard_experts(layer.experts, mesh, policy, reshard_after_forward)
        fully_shard(block, mesh=mesh.dense, mp_policy=policy, reshard_after_forward=reshard_after_forward)
    fully_shard(model, mesh=mesh.dense, mp_policy=policy, reshard_after_forward=reshard_after_forward)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            sum_gradients(module)


def sum_gradients(module: FSDPModule) -> None:
    """Make one FSDP module reduce its gradients by a plain sum, on NCCL and gloo alike."""
    module.set_gradient_divide_factor(1.0)
    # Without this, a factor equal to the group size turns into an average, and gloo knows no pre-multiplied sums.
    module.set_force_sum_reduction_for_comms(True)


def expert_shard_dim(shape: Sequence[int], shard_size: int) -> int:
    """The dim of a rank's stack of experts that `shard_size` ranks can split evenly; whole experts where possible.

    Fewer experts than ranks would leave ranks without any, and FSDP splits no other dim unevenly.

    Raises:
        ValueError: if no dim divides.
    """
    for dim, size in enumerate(shape):
        if size % shard_size == 0:
            return dim
    raise ValueError(
        f"expert weights of shape {tuple(shape)} (one rank's experts first) have no dim that divides by the "
        f"{shard_size} ranks that share them (dp_shard x cp x tp / (ep x etp)); raise parallel.ep or "
        "parallel.dp_replicate."
    )


def _shard_experts(experts: nn.Module, mesh: Mesh, policy: MixedPrecisionPolicy, reshard_after_forward: bool) -> None:
    shard_size = mesh.experts.size(mesh.experts.ndim - 1)
    fully_shard(
        experts,
        mesh=mesh.experts,
        mp_policy=policy,
        reshard_after_forward=reshard_after_forward,
        shard_placement_fn=lambda weight: Shard(expert_shard_dim(local(weight).shape, shard_size)),
    )
