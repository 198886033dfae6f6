"""`torch.compile`, block by block: one graph is compiled and reused by every block of the same shape.

A dense block compiles whole. Around a MoE layer's exchange the number of rows is known only at run time and the host
has to wait for it, so there attention (with both norms), the shared expert, the router and the experts' activation
compile apart, the latter for a number of rows that varies.
"""

from typing import Any

import torch
from torch import nn

from moe.layer import MoE


def apply_compile(block: Any) -> None:
    """Compile the parts of a block (trainer/models/transformer.py) in place.

    Forward hooks added later (FSDP's) stay outside the compiled code.
    """
    layers = [module for module in block.modules() if isinstance(module, MoE)]
    if not layers:
        _compile_forward(block)
        return
    # As few parts as can be: entering each costs the host some 0.2 ms.
    block.attend = torch.compile(block.attend)
    for layer in layers:
        compile_layer(layer)


def compile_layer(layer: MoE) -> None:
    """Compile the parts of a MoE layer in place."""
    layer.route = torch.compile(layer.route)
    layer.experts.activation = torch.compile(layer.experts.activation, dynamic=True)
    if layer.shared is not None:
        _compile_forward(layer.shared)


def _compile_forward(module: nn.Module) -> None:
    module.forward = torch.compile(module.forward)  # type: ignore[method-assign]
