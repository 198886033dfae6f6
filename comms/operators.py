"""This project's operators, as torch sees them: opaque to torch.compile, known by name to activation checkpointing.

    @operator("gather_sum")
    def gather_sum(rows_SD: Tensor, slots_RK: Tensor) -> Tensor: ...

    @register_fake(gather_sum)
    def _(rows_SD: Tensor, slots_RK: Tensor) -> Tensor: ...       # shapes and dtypes alone

They have no gradient: whoever wants one calls them in an autograd.Function. `torch.library.custom_op` would add checks
in Python around every call, most of its 58 microseconds on the host of an H200, and a MoE layer makes twenty calls in a
step; besides, a cycle of objects per call keeps the garbage collector busy.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

# Without types of its own.
_torch_library: Any = torch.library
_LIBRARY = _torch_library.Library("sluicegate", "FRAGMENT")


def operator(name: str, mutates_args: Sequence[str] = ()) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register the function as torch.ops.sluicegate.NAME, for every device; returns that operator.

    Args:
        mutates_args: the tensors that the function writes to. It must return none of its arguments; if it returns
            nothing, it needs no fake.
    """

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        schema: str = _torch_library.infer_schema(function, mutates_args=tuple(mutates_args))
        _LIBRARY.define(name + schema, tags=torch.Tag.pt2_compliant_tag)
        _LIBRARY.impl(name, function, "CompositeExplicitAutograd")
        op = getattr(torch.ops.sluicegate, name).default
        if schema.endswith("-> ()"):
            register_fake(op)(lambda *_args: None)
        return op  # type: ignore[no-any-return]

    return register


def register_fake(op: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register what `op` returns for tensors without data."""
    return _torch_library.register_fake(op, lib=_LIBRARY)  # type: ignore[no-any-return]
