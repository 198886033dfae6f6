"""Collectives with the gradients that parallel layers need, and small ones without.

    gather_dim       concatenates the ranks' parts of one dim; its gradient is the sum of what every rank wants to
                     change, each part to its owner: a reduce-scatter
    reduce_scatter   sums the ranks' tensors and leaves each rank its part of one dim; its gradient gathers
    all_reduce       sums and leaves each rank everything; its gradient sums too, because every rank's result is used
                     for a part of the loss of its own

A gather whose gradient merely cuts out the own part would drop what the other ranks computed from it: the commonest
wrong gradient of tensor parallelism.

Built on torch's functional collectives, which torch.compile can trace.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _get_group_size_by_name, _resolve_process_group  # pyright: ignore

from comms.operators import operator, register_fake


def group_size(group_name: str) -> int:
    """Ranks of a group."""
    return _get_group_size_by_name(group_name)  # pyright: ignore


def gather_dim(x: Tensor, dim: int, group_name: str) -> Tensor:
    """Every rank's `x`, concatenated along `dim` in rank order."""
    return _Gather.apply(x, dim, group_name)  # type: ignore[no-any-return]


def reduce_scatter(x: Tensor, dim: int, group_name: str) -> Tensor:
    """The sum of every rank's `x`, of which this rank keeps its equal part of `dim`."""
    return _ReduceScatter.apply(x, dim, group_name)  # type: ignore[no-any-return]


def all_reduce(x: Tensor, group_name: str) -> Tensor:
    """The sum of every rank's `x`."""
    return _AllReduce.apply(x, group_name)  # type: ignore[no-any-return]


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group_name: str) -> Tensor:
        ctx.dim, ctx.group_name = dim, group_name
        return _gathered(x, dim, group_name)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _scattered(grads[0], ctx.dim, ctx.group_name), None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group_name: str) -> Tensor:
        ctx.dim, ctx.group_name = dim, group_name
        return _scattered(x, dim, group_name)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _gathered(grads[0], ctx.dim, ctx.group_name), None, None


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group_name: str) -> Tensor:
        ctx.group_name = group_name
        return _summed(x, group_name)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _summed(grads[0], ctx.group_name), None


def _gathered(x: Tensor, dim: int, group_name: str) -> Tensor:
    size = group_size(group_name)
    parts = _wait(torch.ops._c10d_functional.all_gather_into_tensor(x.contiguous(), size, group_name))
    # Stacked by rank on the first dim; a part of another dim has to be moved there.
    return parts if dim == 0 else torch.cat(parts.chunk(size), dim=dim)


def _scattered(x: Tensor, dim: int, group_name: str) -> Tensor:
    size = group_size(group_name)
    parts = x.contiguous() if dim == 0 else torch.cat(x.chunk(size, dim=dim))
    return _wait(torch.ops._c10d_functional.reduce_scatter_tensor(parts, "sum", size, group_name))


def _summed(x: Tensor, group_name: str) -> Tensor:
    return _wait(torch.ops._c10d_functional.all_reduce(x.contiguous(), "sum", group_name))


def _wait(x: Tensor) -> Tensor:
    return torch.ops._c10d_functional.wait_tensor(x)  # type: ignore[no-any-return]


# Operators, so that activation checkpointing can see them and keep their results: nothing is sent twice.


@operator("sum_over_ranks")
def sum_over_ranks(values: Tensor, group_name: str) -> Tensor:
    """Sum of a small tensor over the ranks of a group; no gradient."""
    total = values.clone()
    dist.all_reduce(total, group=_resolve_process_group(group_name))  # type: ignore[no-untyped-call]
    return total


@operator("gather_over_ranks")
def gather_over_ranks(part: Tensor, group_name: str, num_ranks: int) -> Tensor:
    """(num_ranks, *shape): every rank's tensor; no gradient."""
    assert num_ranks == group_size(group_name)
    return _gathered(part.unsqueeze(0), 0, group_name)


@register_fake(sum_over_ranks)
def _(values: Tensor, group_name: str) -> Tensor:
    return torch.empty_like(values)


@register_fake(gather_over_ranks)
def _(part: Tensor, group_name: str, num_ranks: int) -> Tensor:
    return part.new_empty(num_ranks, *part.shape)
