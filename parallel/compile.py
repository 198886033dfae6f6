"""`torch.compile`, block by block: one graph is compiled and reused by every block of the same shape.

A dense block compiles whole. Around a MoE layer's exchange the number of rows is known only at run time and the host
has to wait for it, so there the attention, the shared expert, the router and the experts' activation compile apart, the
latter for a number of rows that varies.
"""

import torch
from torch import nn

from moe.layer import MoE


def apply_compile(block: nn.Module) -> None:
    """Compile a block's parts in place. Forward hooks added later (FSDP's) stay outside the compiled code."""
    layers = [module for module in block.modules() if isinstance(module, MoE)]
    if not layers:
        _compile_forward(block)
        return
    for child in block.children():
        if not isinstance(child, MoE):
            _compile_forward(child)
    for layer in layers:
        layer.route = torch.compile(layer.route)
        layer.experts.activation = torch.compile(layer.experts.activation, dynamic=True)
        if layer.shared is not None:
            _compile_forward(layer.shared)


def _compile_forward(module: nn.Module) -> None:
    module.forward = torch.compile(module.forward)  # type: ignore[method-assign]
