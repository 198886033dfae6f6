"""This project's operators, as torch sees them: opaque to torch.compile, known by name to activation checkpointing.

    @operator("gather_sum")
    def gather_sum(rows_SD: Tensor, slots_RK: Tensor) -> Tensor: ...

    @register_fake(gather_sum)
    def _(rows_SD: Tensor, slots_RK: Tensor) -> Tensor: ...       # shapes and dtypes alone

They have no gradient: whoever wants one calls them in an autograd.Function, and is told so otherwise. Nor does torch
notice what a kernel writes: a tensor that was kept for backward and written to since is found by its version.
`torch.library.custom_op` would add more checks in Python around every call, most of its 58 microseconds on the host of
an H200, and a MoE layer makes twenty calls in a step; besides, a cycle of objects per call keeps the garbage collector
busy.
"""

import inspect
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, cast

import torch
from torch import Tensor

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
        _LIBRARY.impl(name, _guarded(name, function, mutates_args), "CompositeExplicitAutograd")
        op = getattr(torch.ops.sluicegate, name).default
        if schema.endswith("-> ()"):
            register_fake(op)(lambda *_args: None)
        return op  # type: ignore[no-any-return]

    return register


def _guarded(name: str, function: Callable[..., Any], mutates_args: Sequence[str]) -> Callable[..., Any]:
    """The function, but not where autograd would lose a gradient; what it writes to gets a new version."""
    parameters = list(inspect.signature(function).parameters)
    written = [parameters.index(parameter) for parameter in mutates_args]

    @wraps(function)
    def guarded(*args: Any) -> Any:
        # Within an autograd.Function there is no grad mode.
        if torch.is_grad_enabled() and any(map(_wants_grad, args)):
            raise RuntimeError(f"sluicegate::{name} has no gradient: call it in an autograd.Function or under no_grad")
        result = function(*args)
        if written:
            torch.autograd.graph.increment_version([args[index] for index in written])
        return result

    return guarded


def _wants_grad(arg: object) -> bool:
    if isinstance(arg, Tensor):
        return arg.requires_grad
    return isinstance(arg, list) and any(map(_wants_grad, cast(list[object], arg)))


def register_fake(op: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register what `op` returns for tensors without data."""
    return _torch_library.register_fake(op, lib=_LIBRARY)  # type: ignore[no-any-return]
