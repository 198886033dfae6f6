"""Gathers and reduce-scatters of split activations that nothing is multiplied with, by the ways of comms/async_tp.py.

    gather_rows     every rank's rows, in rank order; its gradient is a reduce-scatter
    scatter_rows    the sum over ranks, of which each rank keeps its rows; its gradient gathers

Two GPUs move rows by copy engines at 320 GB/s where NCCL moves 200 (32,768 rows of 8192), and put them where they
belong, or read them where they are, while others travel; a collective of NCCL wants rows of another dim than the first
brought together before, or taken apart after it, by a copy of everything. Fewer rows, and more GPUs, take the
collective.

Parts are summed in ascending rank order, in fp32, and rounded once.

Shapes: O whatever comes before the split dim, R rows of one rank's shard, C = N * R rows of all ranks, X width.
"""

import itertools
import math
from contextlib import closing
from typing import Any, cast

import torch
from torch import Tensor

from comms.collectives import gather_dim, group_size, reduce_scatter
from comms.operators import operator, register_fake
from comms.peer_buffers import copy_runs, runs_of, transport_of
from comms.shard_transport import as_rows, scattered_shape

# Bytes of a rank's rows from which two GPUs use copy engines: with four sequences half as many win as well, by a tenth,
# and a quarter loses (scripts/bench_async_tp.py). And of those of each sequence, which are a copy by themselves.
MIN_BYTES, MIN_RUN_BYTES = 2**24, 2**20


def gather_rows(x: Tensor, dim: int, group_name: str, min_bytes: int | None = None) -> Tensor:
    """Every rank's `x`, concatenated along `dim` in rank order: (..., rows, ..., X) -> (..., N * rows, ..., X).

    Args:
        dim: of the rows; the last one takes the collective.
        min_bytes: of a rank's rows, from which the collective is not used; None: by device, number of ranks and length
            of runs.
    """
    dim = dim % x.dim()
    if not _travels(x, x.numel(), dim, group_name, min_bytes):
        return gather_dim(x, dim, group_name)
    shape = list(x.shape)
    shape[dim] *= group_size(group_name)
    found = _Moved.apply(as_rows(x, dim), group_name, True)  # pyright: ignore
    return cast(Tensor, found).reshape(shape)


def scatter_rows(x: Tensor, dim: int, group_name: str, min_bytes: int | None = None) -> Tensor:
    """The sum of every rank's `x`, of which this rank keeps its equal part of `dim`; arguments as of `gather_rows`.

    Raises:
        ValueError: `dim` does not divide by the number of ranks.
    """
    dim, size = dim % x.dim(), group_size(group_name)
    shape = scattered_shape(x.shape, dim, size)
    if not _travels(x, x.numel() // size, dim, group_name, min_bytes):
        return reduce_scatter(x, dim, group_name)
    found = _Moved.apply(as_rows(x, dim), group_name, False)  # pyright: ignore
    return cast(Tensor, found).reshape(shape)


def _travels(x: Tensor, numbers_of_shard: int, dim: int, group_name: str, min_bytes: int | None) -> bool:
    """By what all ranks of the group share."""
    # Sums of numbers without a point would go through fp32.
    if dim == x.dim() - 1 or not x.numel() or not x.is_floating_point():
        return False
    num_bytes = numbers_of_shard * x.element_size()
    if min_bytes is not None:
        return num_bytes >= min_bytes
    # Always on CPUs, where the collective is of no use but to be compared with.
    if not x.is_cuda:
        return True
    runs = math.prod(x.shape[:dim])
    return group_size(group_name) == 2 and num_bytes >= max(MIN_BYTES, runs * MIN_RUN_BYTES)


class _Moved(torch.autograd.Function):
    """`gathered_rows`, whose gradient is `scattered_rows`, and the other way round."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group_name: str, gathers: bool) -> Tensor:
        ctx.group_name, ctx.gathers = group_name, gathers
        return (gathered_rows if gathers else scattered_rows)(x, group_name)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return (scattered_rows if ctx.gathers else gathered_rows)(grads[0], ctx.group_name), None, None


@operator("gathered_rows")
def gathered_rows(x_ORX: Tensor, group_name: str) -> Tensor:
    """(O, C, X). No result is memory that a peer may write."""
    outer, num_rows, width = x_ORX.shape
    out_OCX = x_ORX.new_empty(outer, group_size(group_name) * num_rows, width)
    # Rows of all sequences in one run: fewer copies, and pieces of whole sequences.
    shard_1PX = x_ORX.contiguous().view(1, -1, width)
    with closing(transport_of(x_ORX, group_name).gather(shard_1PX)) as inbox:
        for rows, block_1PX in inbox.blocks():
            rank, first = divmod(rows.start, max(outer * num_rows, 1))
            _put(block_1PX[0], first, out_OCX[:, rank * num_rows : (rank + 1) * num_rows])
    return out_OCX


@operator("scattered_rows")
def scattered_rows(x_OCX: Tensor, group_name: str) -> Tensor:
    """(O, R, X)."""
    outer, num_rows, width = x_OCX.shape
    with closing(transport_of(x_OCX, group_name).scatter((outer, num_rows, width), x_OCX)) as outbox:
        pieces = outbox.split(x_OCX)
        for part in itertools.chain(*outbox.parts()):
            space, holds = outbox.space(part)
            piece = pieces[part.rank][part.number]
            if holds:
                _add(space, piece)
            else:
                copy_runs(runs_of(piece), runs_of(space))
            outbox.send(part)
        return outbox.total()


@register_fake(gathered_rows)
def _(x_ORX: Tensor, group_name: str) -> Tensor:
    outer, num_rows, width = x_ORX.shape
    return x_ORX.new_empty(outer, group_size(group_name) * num_rows, width)


@register_fake(scattered_rows)
def _(x_OCX: Tensor, group_name: str) -> Tensor:
    outer, num_rows, width = x_OCX.shape
    return x_OCX.new_empty(outer, num_rows // group_size(group_name), width)


def _put(rows_PX: Tensor, first: int, place_ORX: Tensor) -> None:
    """Rows from `first` on, counted over all sequences, into theirs."""
    num_rows, taken = place_ORX.shape[1], 0
    while taken < rows_PX.shape[0]:
        sequence, row = divmod(first + taken, num_rows)
        count = min(num_rows - row, rows_PX.shape[0] - taken)
        copy_runs([rows_PX[taken : taken + count]], [place_ORX[sequence, row : row + count]])
        taken += count


def _add(space: Tensor, piece: Tensor) -> None:
    space.add_(piece)
