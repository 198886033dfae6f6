"""Matmuls of split activations whose rows travel while others are multiplied: async tensor parallelism.

    all_gather_matmul       every rank's rows, times this rank's columns of some weights: gather(x) @ w.T for each w
    matmul_reduce_scatter   this rank's part of a sum over columns, times its weight; each rank keeps its own rows:
                            scatter(sum over ranks of x @ w.T)

Each is the other's gradient with respect to x. That of a weight needs all rows on both sides, so it gathers once more:

    forward   gather x, y_i = x @ w_i.T               y = scatter(x @ w.T)
    dx        scatter(sum_i dy_i @ w_i)               gather dy, dx = dy @ w
    dw        gather x, dw_i = dy_i.T @ x             dw = dy.T @ x, of the same gather

The gathered x is not kept for backward: the shard is, and it travels again while dx is computed. Several weights share
one gather. A weight's gradient is one product over all rows: it accumulates in fp32 inside and is rounded once.

The order of work: a gather multiplies this rank's rows first, then those of the ranks after it as they come; a scatter
computes for the ranks after it first and for itself last. Neither shows in results: rows are put in their places, and
parts are rounded to the dtype of x, then summed in fp32 in ascending rank order and rounded once. Few rows take the
plain path: a collective and then the product, or the other way round; forward's gathered rows are then kept.

Shapes: O whatever comes before the split dim, R rows of one rank's shard, C = N * R rows of all ranks, X and Y widths.
"""

import math
from collections.abc import Generator, Sequence
from contextlib import closing, contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _get_group_size_by_name, _resolve_process_group  # pyright: ignore
from torch.nn import functional as F

from comms.collectives import gather_dim, reduce_scatter
from comms.kernels.gather_sum import gather_sum
from comms.operators import operator, register_fake
from comms.peer_buffers import buffers_of
from comms.shard_transport import Inbox, Messages, Transport

# Rows of all ranks together (times what comes before the split dim) from which GPUs overlap; with fewer, the launches
# and signals cost more than the transfer that they hide. To be set from scripts/bench_async_tp.py.
FUSED_ROWS = 4096


def all_gather_matmul(
    x: Tensor, weights: Sequence[Tensor], dim: int, group_name: str, min_rows: int | None = None
) -> tuple[Tensor, ...]:
    """Gather `x` over the ranks along `dim`, and multiply: (..., rows, ..., X) and (Y, X) -> (..., N * rows, ..., Y).

    Args:
        weights: one or more, in nn.Linear's orientation; they share the gather.
        dim: the dim that is split over the ranks. The last one is not overlapped.
        min_rows: rows of all ranks from which transfers overlap; None: FUSED_ROWS on GPUs, any number on CPUs.
    """
    dim, size = dim % x.dim(), _size(group_name)
    if dim == x.dim() - 1 or size * _num_rows(x) < _threshold(x, min_rows):
        whole = gather_dim(x, dim, group_name)
        return tuple(F.linear(whole, weight) for weight in weights)
    rows, shape = _as_rows(x, dim), list(x.shape)
    shape[dim] *= size
    found = _GatherMatmul.apply(rows, group_name, *weights)  # pyright: ignore
    return tuple(y.reshape(*shape[:-1], y.shape[-1]) for y in cast(tuple[Tensor, ...], found))


def matmul_reduce_scatter(
    x: Tensor, weight: Tensor, dim: int, group_name: str, min_rows: int | None = None
) -> Tensor:  # fmt: skip
    """Sum x @ weight.T over the ranks, each keeping its part of `dim`: (..., N * rows, ..., X) -> (..., rows, ..., Y).

    Raises:
        ValueError: `dim` does not divide by the number of ranks.
    """
    dim, shape, size = dim % x.dim(), list(x.shape), _size(group_name)
    # The last dim's size is that of the weight; what scatters it says so itself.
    if dim != x.dim() - 1 and shape[dim] % size:
        raise ValueError(f"dim {dim} of {tuple(shape)} cannot be scattered over {size} ranks: it does not divide")
    if dim == x.dim() - 1 or _num_rows(x) < _threshold(x, min_rows):
        return reduce_scatter(F.linear(x, weight), dim, group_name)
    shape[dim] //= size
    found = _MatmulScatter.apply(_as_rows(x, dim), weight, group_name)  # pyright: ignore
    return cast(Tensor, found).reshape(*shape[:-1], weight.shape[0])


def is_overlapped(num_rows: int, device: torch.device) -> bool:
    """Whether so many rows of all ranks together overlap with their transfer, by default."""
    return device.type != "cuda" or num_rows >= FUSED_ROWS


def _size(group_name: str) -> int:
    return _get_group_size_by_name(group_name)  # pyright: ignore


def _num_rows(x: Tensor) -> int:
    return x.numel() // x.shape[-1]


def _as_rows(x: Tensor, dim: int) -> Tensor:
    return x.reshape(math.prod(x.shape[:dim]), -1, x.shape[-1])


def _threshold(x: Tensor, min_rows: int | None) -> int:
    if min_rows is not None:
        return min_rows
    return FUSED_ROWS if x.is_cuda else 0


class _GatherMatmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_ORX: Tensor, group_name: str, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(x_ORX, *weights)
        ctx.group_name = group_name
        return tuple(gather_matmul(x_ORX, list(weights), group_name))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x_ORX, *weights = ctx.saved_tensors
        needs_x, _, *needs_weights = ctx.needs_input_grad
        found = gather_matmul_backward(list(grads), x_ORX, weights, ctx.group_name, needs_x, needs_weights)
        dx, *dws = (grad if needed else None for grad, needed in zip(found, (needs_x, *needs_weights), strict=True))
        return dx, None, *dws


class _MatmulScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_OCX: Tensor, weight_YX: Tensor, group_name: str) -> Tensor:
        ctx.save_for_backward(x_OCX, weight_YX)
        ctx.group_name = group_name
        return matmul_scatter(x_OCX, weight_YX, group_name)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x_OCX, weight_YX = ctx.saved_tensors
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        dx, dw = matmul_scatter_backward(grads[0], x_OCX, weight_YX, ctx.group_name, needs_x, needs_weight)
        return dx if needs_x else None, dw if needs_weight else None, None


# ---- operators: what the compiler and activation checkpointing see. No result is memory that a peer may write.


@operator("gather_matmul")
def gather_matmul(x_ORX: Tensor, weights: list[Tensor], group_name: str) -> list[Tensor]:
    """(O, C, Y) for each weight (Y, X)."""
    size = _size(group_name)
    transport = _transport(x_ORX, group_name)
    with closing(transport.gather(x_ORX.contiguous(), needs_whole=False)) as inbox:
        return _multiply_arrivals(inbox, size, x_ORX, [weight.t() for weight in weights])


@operator("gather_matmul_backward")
def gather_matmul_backward(
    grads: list[Tensor],
    x_ORX: Tensor,
    weights: list[Tensor],
    group_name: str,
    needs_x: bool,
    needs_weights: list[bool],
) -> list[Tensor]:
    """Gradients of x and of every weight; empty where not needed."""
    grads = [grad.contiguous() for grad in grads]
    transport = _transport(x_ORX, group_name)
    found = [x_ORX.new_empty(0) for _ in range(1 + len(weights))]
    # The shards travel again while dx is computed.
    with _maybe_gathered(transport, x_ORX, any(needs_weights)) as inbox:
        if needs_x:
            found[0] = _scatter_products(transport, grads, weights, x_ORX)
        if inbox is not None:
            whole = inbox.whole().flatten(0, 1)
            for number, (grad, needed) in enumerate(zip(grads, needs_weights, strict=True)):
                if needed:
                    found[1 + number] = grad.flatten(0, 1).t() @ whole
    return found


@operator("matmul_scatter")
def matmul_scatter(x_OCX: Tensor, weight_YX: Tensor, group_name: str) -> Tensor:
    """(O, R, Y): this rank's rows of the sum over ranks."""
    transport = _transport(x_OCX, group_name)
    return _scatter_products(transport, [x_OCX.contiguous()], [weight_YX.t()], x_OCX)


@operator("matmul_scatter_backward")
def matmul_scatter_backward(
    grad_ORY: Tensor,
    x_OCX: Tensor,
    weight_YX: Tensor,
    group_name: str,
    needs_x: bool,
    needs_weight: bool,
) -> list[Tensor]:
    """Gradients of x and of the weight, of one gather; empty where not needed."""
    transport = _transport(x_OCX, group_name)
    size = _size(group_name)
    found = [grad_ORY.new_empty(0), grad_ORY.new_empty(0)]
    with _maybe_gathered(transport, grad_ORY, needs_x or needs_weight, needs_whole=needs_weight) as inbox:
        if inbox is not None and needs_x:
            found[0] = _multiply_arrivals(inbox, size, grad_ORY, [weight_YX])[0]
        if inbox is not None and needs_weight:
            found[1] = inbox.whole().flatten(0, 1).t() @ x_OCX.contiguous().flatten(0, 1)
    return found


@register_fake(gather_matmul)
def _(x_ORX: Tensor, weights: list[Tensor], group_name: str) -> list[Tensor]:
    outer, num_rows = x_ORX.shape[:2]
    num_rows = num_rows * _size(group_name)
    return [x_ORX.new_empty(outer, num_rows, weight.shape[0]) for weight in weights]


@register_fake(gather_matmul_backward)
def _(
    grads: list[Tensor],
    x_ORX: Tensor,
    weights: list[Tensor],
    group_name: str,
    needs_x: bool,
    needs_weights: list[bool],
) -> list[Tensor]:
    needed = zip((x_ORX, *weights), (needs_x, *needs_weights), strict=True)
    return [x_ORX.new_empty(like.shape if is_needed else (0,)) for like, is_needed in needed]


@register_fake(matmul_scatter)
def _(x_OCX: Tensor, weight_YX: Tensor, group_name: str) -> Tensor:
    num_rows = x_OCX.shape[1] // _size(group_name)
    return x_OCX.new_empty(x_OCX.shape[0], num_rows, weight_YX.shape[0])


@register_fake(matmul_scatter_backward)
def _(
    grad_ORY: Tensor,
    x_OCX: Tensor,
    weight_YX: Tensor,
    group_name: str,
    needs_x: bool,
    needs_weight: bool,
) -> list[Tensor]:
    needed = ((x_OCX, needs_x), (weight_YX, needs_weight))
    return [x_OCX.new_empty(like.shape if is_needed else (0,)) for like, is_needed in needed]


# ---- what the operators are made of


def _transport(x: Tensor, group_name: str) -> Transport:
    group: dist.ProcessGroup = _resolve_process_group(group_name)  # pyright: ignore
    return buffers_of(group, x.device) if x.is_cuda else Messages(group)


@contextmanager
def _maybe_gathered(transport: Transport, x: Tensor, needed: bool, needs_whole: bool = True) -> Generator[Inbox | None]:
    if not needed:
        yield None
        return
    with closing(transport.gather(x.contiguous(), needs_whole)) as inbox:
        yield inbox


def _multiply_arrivals(inbox: Inbox, size: int, like: Tensor, weights: Sequence[Tensor]) -> list[Tensor]:
    """(O, C, Y) for each weight (X, Y)."""
    outer, num_rows = like.shape[:2]
    products = [like.new_empty(outer, size * num_rows, weight.shape[1]) for weight in weights]
    for rows, block in inbox.blocks():
        for weight, product in zip(weights, products, strict=True):
            _multiply(block, weight, product[:, rows])
    return products


def _scatter_products(transport: Transport, xs: Sequence[Tensor], weights: Sequence[Tensor], like: Tensor) -> Tensor:
    """(O, R, Y): of the sum over ranks and over pairs of x (O, C, X) and weight (X, Y), this rank's rows."""
    outer, num_rows = xs[0].shape[:2]
    width = weights[0].shape[1]
    with closing(transport.scatter((outer, num_rows, width), like)) as outbox:
        for rows in outbox.blocks():
            space = outbox.space(rows)
            for number, (x, weight) in enumerate(zip(xs, weights, strict=True)):
                _multiply(x[:, rows], weight, space, add=number > 0)
            outbox.send(rows)
        return _sum_ascending(outbox.parts()).view(outer, -1, width)


def _multiply(x_ORX: Tensor, weight_XY: Tensor, out_ORY: Tensor, add: bool = False) -> None:
    """Write x @ weight into `out`, or add it; rows of `x` and `out` may be those of a larger tensor."""
    if x_ORX.shape[0] == 1:
        if add:
            out_ORY[0].addmm_(x_ORX[0], weight_XY)
        else:
            torch.mm(x_ORX[0], weight_XY, out=out_ORY[0])
        return
    # One launch, without copies: the weight has a stride of zero.
    weights = weight_XY.expand(x_ORX.shape[0], -1, -1)
    if add:
        out_ORY.baddbmm_(x_ORX, weights)
    else:
        torch.bmm(x_ORX, weights, out=out_ORY)


def _sum_ascending(parts_NSX: Tensor) -> Tensor:
    """(S, X): the sum over ranks in fp32 (fp64 for fp64), in ascending order, rounded once."""
    size, num_rows, width = parts_NSX.shape
    if size == 2:
        # Two bf16 are added in fp32 and rounded once.
        return parts_NSX[0] + parts_NSX[1]
    first = torch.arange(size, device=parts_NSX.device) * num_rows
    slots_SN = torch.arange(num_rows, device=parts_NSX.device)[:, None] + first
    return gather_sum(parts_NSX.reshape(-1, width), slots_SN)
