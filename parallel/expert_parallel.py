"""Expert parallelism: split each MoE layer's experts over the ranks of the ep axis.

Rank i of the axis keeps experts i*E/ep to (i+1)*E/ep. The weights become DTensors split on their first dim, which tells
FSDP, checkpoints and gradient clipping which experts these are. Rows reach them through `comms`.
"""

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from moe.layer import MoE
from parallel.mesh import Mesh, check_experts


def apply_expert_parallel(model: nn.Module, mesh: Mesh) -> int:
    """Split the experts of every MoE layer and tell the layer its groups. Returns the number of layers.

    Raises:
        ValueError: if the experts do not divide by ep.
    """
    layers = [module for module in model.modules() if isinstance(module, MoE)]
    for layer in layers:
        layer.data_group = mesh.data_group if mesh.world_size > 1 else None
        if mesh.ep is not None:
            check_experts(mesh.config, layer.config.num_experts)
            layer.ep_group = mesh.ep_group
            for name, parameter in list(layer.experts.named_parameters(recurse=False)):
                setattr(layer.experts, name, _split(parameter, mesh))
    return len(layers)


def _split(parameter: nn.Parameter, mesh: Mesh) -> nn.Parameter:
    assert mesh.ep is not None
    if parameter.is_meta:
        size = (parameter.shape[0] // mesh.ep.size(), *parameter.shape[1:])
        shard = torch.empty(size, dtype=parameter.dtype, device="meta")
        return nn.Parameter(DTensor.from_local(shard, mesh.ep, [Shard(0)], run_check=False))
    return nn.Parameter(distribute_tensor(parameter.detach(), mesh.ep, [Shard(0)]))
