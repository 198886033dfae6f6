"""Matmuls of split activations whose rows travel while others are multiplied: async tensor parallelism.

    all_gather_matmul       every rank's rows, times this rank's columns of some weights: gather(x) @ w.T for each w
    matmul_reduce_scatter   this rank's part of a sum over columns, times its weight; each rank keeps its own rows:
                            scatter(sum over ranks of x @ w.T)

Each is the other's gradient with respect to x. That of a weight needs all rows on both sides, so it gathers once more:

    forward   gather x, y_i = x @ w_i.T               y = scatter(x @ w.T)
    dx        scatter(sum_i dy_i @ w_i)               gather dy, dx = dy @ w
    dw        gather x, dw_i = dy_i.T @ x             dw = dy.T @ x, of the same gather

The gathered x is not kept for backward: the shard is, and it travels again while the others' dx is computed. Several
weights share one gather. A weight's gradient is one product over all rows: it accumulates in fp32 inside and is rounded
once.

The order of work: a gather multiplies this rank's rows first, then those of the ranks after it as they come; a scatter
computes for the ranks after it first and for itself last; a gather's backward computes weight gradients between the
two, while dx travels. None of it shows in results: rows are put in their places, and parts are rounded to the dtype of
x, then summed in fp32 in ascending rank order and rounded once. Of two GPUs a rank's own product adds itself to the
other's part; cuBLAS on Hopper rounds it before, so that bits are the plain path's where it takes the same kernel for a
piece as for the whole. Only dx of several weights is summed in another order. Small products take the plain path: a
collective and then the product, or the other way round; forward's gathered rows are then kept.

Weights may multiply in low precision (comms/products.py). Rows that all weights want coded travel coded, which is what
would have been made of them after the gather, in half of the bytes or less; the rest travels as it is.

Shapes: O whatever comes before the split dim, R rows of one rank's shard, C = N * R rows of all ranks, X and Y widths.
"""

from collections.abc import Generator, Sequence
from contextlib import ExitStack, closing, contextmanager
from typing import Any, cast

import torch
from torch import Tensor

from comms.collectives import gather_dim, group_size, reduce_scatter
from comms.operators import operator, register_fake
from comms.peer_buffers import transport_of
from comms.products import AS_THEY_ARE, Product, find_product
from comms.shard_transport import Inbox, Part, Transport, as_rows, scattered_shape

# Multiplications of one rank from which GPUs overlap, over all maps that share a gather, and of a scatter: rows of all
# ranks x X x Y. Below SCATTER_WORK launches and signals of a scatter take longer than the transfer that they hide: on
# two H200 half as many lose forward. On devices gathers win from there on, too, but below GATHER_WORK the host needs
# four to six times as long for one as the device, and longer than for the plain path (scripts/bench_async_tp.py).
GATHER_WORK, SCATTER_WORK = 2**36, 2**35
# Of four ranks either, and of more in proportion to the others, since each has launches and signals of its own: of four
# the host needs 2.8 to 4.4 ms for a gather with its backward and 2.0 to 4.1 for a scatter, as long as the device does
# from here on; two blocks of products below it took 36.4 ms, and by the plain path 29.3 (benchmarks/node_h200.json).
WORK_OF_FOUR = 2**39


def all_gather_matmul(
    x: Tensor,
    weights: Sequence[Tensor],
    dim: int,
    group_name: str,
    min_work: int | None = None,
    products: Sequence[str] | None = None,
) -> tuple[Tensor, ...]:
    """Gather `x` over the ranks along `dim`, and multiply: (..., rows, ..., X) and (Y, X) -> (..., N * rows, ..., Y).

    Args:
        weights: one or more, in nn.Linear's orientation; they share the gather.
        dim: the dim that is split over the ranks. The last one is not overlapped.
        min_work: multiplications of this rank from which transfers overlap; None: `work_to_overlap`.
        products: names of how each weight multiplies (comms/products.py); None: all in the dtype of x.
    """
    dim, size = dim % x.dim(), group_size(group_name)
    products = [AS_THEY_ARE] * len(weights) if products is None else list(products)
    least = work_to_overlap(x.device, size, scatters=False) if min_work is None else min_work
    if dim == x.dim() - 1 or size * x.numel() * sum(weight.shape[0] for weight in weights) < least:
        whole = gather_dim(x, dim, group_name)
        pairs = zip(products, weights, strict=True)
        return tuple(find_product(product).linear(whole, weight) for product, weight in pairs)
    rows, shape = as_rows(x, dim), list(x.shape)
    shape[dim] *= size
    found = _GatherMatmul.apply(rows, group_name, _joined(products), *weights)  # pyright: ignore
    return tuple(y.reshape(*shape[:-1], y.shape[-1]) for y in cast(tuple[Tensor, ...], found))


def matmul_reduce_scatter(
    x: Tensor, weight: Tensor, dim: int, group_name: str, min_work: int | None = None, product: str = AS_THEY_ARE
) -> Tensor:
    """Sum x @ weight.T over the ranks, each keeping its part of `dim`: (..., N * rows, ..., X) -> (..., rows, ..., Y).

    Raises:
        ValueError: `dim` of the product does not divide by the number of ranks.
    """
    dim, size = dim % x.dim(), group_size(group_name)
    shape = scattered_shape([*x.shape[:-1], weight.shape[0]], dim, size)
    least = work_to_overlap(x.device, size, scatters=True) if min_work is None else min_work
    if dim == x.dim() - 1 or x.numel() * weight.shape[0] < least:
        return reduce_scatter(find_product(product).linear(x, weight), dim, group_name)
    found = _MatmulScatter.apply(as_rows(x, dim), weight, group_name, product)  # pyright: ignore
    return cast(Tensor, found).reshape(shape)


def work_to_overlap(device: torch.device, num_ranks: int, *, scatters: bool) -> int:
    """Multiplications of one rank from which its products overlap with a gather, or a scatter, by default.

    Any on CPUs, where the plain path is of no use but to be compared with.
    """
    if device.type != "cuda":
        return 0
    if num_ranks > 2:
        return WORK_OF_FOUR * (num_ranks - 1) // 3
    return SCATTER_WORK if scatters else GATHER_WORK


# Operators take no lists of names.
_BETWEEN = ";"


def _joined(products: Sequence[str]) -> str:
    assert not any(_BETWEEN in product for product in products), products
    return _BETWEEN.join(products)


def _divided(products: str) -> list[Product]:
    return [find_product(name) for name in products.split(_BETWEEN)]


class _GatherMatmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_ORX: Tensor, group_name: str, products: str, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(x_ORX, *weights)
        ctx.group_name, ctx.products = group_name, products
        return tuple(gather_matmul(x_ORX, list(weights), group_name, products))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x_ORX, *weights = ctx.saved_tensors
        needs_x, _, _, *needs_weights = ctx.needs_input_grad
        names = ctx.group_name, ctx.products
        found = gather_matmul_backward(list(grads), x_ORX, weights, *names, needs_x, needs_weights)
        dx, *dws = (grad if needed else None for grad, needed in zip(found, (needs_x, *needs_weights), strict=True))
        return dx, None, None, *dws


class _MatmulScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_OCX: Tensor, weight_YX: Tensor, group_name: str, product: str) -> Tensor:
        ctx.save_for_backward(x_OCX, weight_YX)
        ctx.group_name, ctx.product = group_name, product
        return matmul_scatter(x_OCX, weight_YX, group_name, product)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x_OCX, weight_YX = ctx.saved_tensors
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        names = ctx.group_name, ctx.product
        dx, dw = matmul_scatter_backward(grads[0], x_OCX, weight_YX, *names, needs_x, needs_weight)
        return dx if needs_x else None, dw if needs_weight else None, None, None


# ---- operators: what the compiler and activation checkpointing see. No result is memory that a peer may write.


@operator("gather_matmul")
def gather_matmul(x_ORX: Tensor, weights: list[Tensor], group_name: str, products: str) -> list[Tensor]:
    """(O, C, Y) for each weight (Y, X)."""
    found = _divided(products)
    transport = transport_of(x_ORX, group_name)
    # Rows travel coded if that is what all weights multiply.
    common = found[0] if len(set(products.split(_BETWEEN))) == 1 else None
    sent = x_ORX.contiguous() if common is None else common.sent_as(x_ORX.contiguous())
    outer, num_rows = x_ORX.shape[0], group_size(group_name) * x_ORX.shape[1]
    outs = [x_ORX.new_empty(outer, num_rows, weight.shape[0]) for weight in weights]
    with closing(transport.gather(sent)) as inbox:
        prepared = [product.weight(weight) for product, weight in zip(found, weights, strict=True)]
        for rows, block in inbox.blocks():
            for product, weight, out in zip(found, prepared, outs, strict=True):
                (product.multiply if common is None else product.multiply_sent)(block, weight, out[:, rows])
    return outs


@operator("gather_matmul_backward")
def gather_matmul_backward(
    grads: list[Tensor],
    x_ORX: Tensor,
    weights: list[Tensor],
    group_name: str,
    products: str,
    needs_x: bool,
    needs_weights: list[bool],
) -> list[Tensor]:
    """Gradients of x and of every weight; empty where not needed."""
    grads, multiplying = [grad.contiguous() for grad in grads], _divided(products)
    transport = transport_of(x_ORX, group_name)
    found = [x_ORX.new_empty(0) for _ in range(1 + len(weights))]
    dx = None
    # The shards travel again while the others' dx is computed, and parts of dx while weight gradients are.
    with ExitStack() as until_summed:
        with _maybe_gathered(transport, x_ORX, any(needs_weights)) as inbox:
            if needs_x:
                prepared = [product.weight_transposed(w) for product, w in zip(multiplying, weights, strict=True)]
                # In one piece: between two GPUs it travels for less time than the gradients of weights with some 1000
                # rows take, of many ranks with 2000.
                sums = _SumOfProducts(transport, grads, prepared, multiplying, x_ORX.shape[2], any(needs_weights))
                dx = until_summed.enter_context(closing(sums))
                dx.send()
            if inbox is not None:
                whole = inbox.whole().flatten(0, 1)
                for number, (product, grad, needed) in enumerate(zip(multiplying, grads, needs_weights, strict=True)):
                    if needed:
                        found[1 + number] = product.weight_gradient(grad.flatten(0, 1), whole)
        if dx is not None:
            found[0] = dx.total()
    return found


@operator("matmul_scatter")
def matmul_scatter(x_OCX: Tensor, weight_YX: Tensor, group_name: str, product: str) -> Tensor:
    """(O, R, Y): this rank's rows of the sum over ranks."""
    transport, found = transport_of(x_OCX, group_name), find_product(product)
    xs, prepared = [x_OCX.contiguous()], [found.weight(weight_YX)]
    with closing(_SumOfProducts(transport, xs, prepared, [found], weight_YX.shape[0])) as y:
        y.send()
        return y.total()


@operator("matmul_scatter_backward")
def matmul_scatter_backward(
    grad_ORY: Tensor,
    x_OCX: Tensor,
    weight_YX: Tensor,
    group_name: str,
    product: str,
    needs_x: bool,
    needs_weight: bool,
) -> list[Tensor]:
    """Gradients of x and of the weight, of one gather; empty where not needed."""
    transport, multiplying = transport_of(x_OCX, group_name), find_product(product)
    found = [grad_ORY.new_empty(0), grad_ORY.new_empty(0)]
    with _maybe_gathered(transport, grad_ORY, needs_x or needs_weight) as inbox:
        if inbox is not None and needs_x:
            prepared = multiplying.weight_transposed(weight_YX)
            found[0] = grad_ORY.new_empty(*x_OCX.shape)
            for rows, block in inbox.blocks():
                multiplying.multiply(block, prepared, found[0][:, rows])
        if inbox is not None and needs_weight:
            found[1] = multiplying.weight_gradient(inbox.whole().flatten(0, 1), x_OCX.contiguous().flatten(0, 1))
    return found


@register_fake(gather_matmul)
def _(x_ORX: Tensor, weights: list[Tensor], group_name: str, products: str) -> list[Tensor]:
    outer, num_rows = x_ORX.shape[:2]
    num_rows = num_rows * group_size(group_name)
    return [x_ORX.new_empty(outer, num_rows, weight.shape[0]) for weight in weights]


@register_fake(gather_matmul_backward)
def _(
    grads: list[Tensor],
    x_ORX: Tensor,
    weights: list[Tensor],
    group_name: str,
    products: str,
    needs_x: bool,
    needs_weights: list[bool],
) -> list[Tensor]:
    needed = zip((x_ORX, *weights), (needs_x, *needs_weights), strict=True)
    return [x_ORX.new_empty(like.shape if is_needed else (0,)) for like, is_needed in needed]


@register_fake(matmul_scatter)
def _(x_OCX: Tensor, weight_YX: Tensor, group_name: str, product: str) -> Tensor:
    num_rows = x_OCX.shape[1] // group_size(group_name)
    return x_OCX.new_empty(x_OCX.shape[0], num_rows, weight_YX.shape[0])


@register_fake(matmul_scatter_backward)
def _(
    grad_ORY: Tensor,
    x_OCX: Tensor,
    weight_YX: Tensor,
    group_name: str,
    product: str,
    needs_x: bool,
    needs_weight: bool,
) -> list[Tensor]:
    needed = ((x_OCX, needs_x), (weight_YX, needs_weight))
    return [x_OCX.new_empty(like.shape if is_needed else (0,)) for like, is_needed in needed]


# ---- what the operators are made of


@contextmanager
def _maybe_gathered(transport: Transport, x: Tensor, needed: bool) -> Generator[Inbox | None]:
    if not needed:
        yield None
        return
    with closing(transport.gather(x.contiguous())) as inbox:
        yield inbox


class _SumOfProducts:
    """Of the sum over products of x, (O, C, Y), and its weight, (O, C, width): to every rank its rows."""

    def __init__(
        self,
        transport: Transport,
        xs: Sequence[Tensor],
        weights: Sequence[Any],
        products: Sequence[Product],
        width: int,
        in_one_piece: bool = False,
    ) -> None:
        outer, num_rows = xs[0].shape[:2]
        self.outbox = transport.scatter((outer, num_rows, width), xs[0], in_one_piece)
        self.factors = list(zip([self.outbox.split(x) for x in xs], weights, products, strict=True))
        self.of_others, self.own = self.outbox.parts()

    def send(self) -> None:
        """Compute what others get. What is computed between this and `total` hides how that travels."""
        self._compute(self.of_others)

    def total(self) -> Tensor:
        """(O, R, width): compute this rank's own rows, and add all parts up."""
        self._compute(self.own)
        return self.outbox.total()

    def close(self) -> None:
        """Nothing that came is read any more."""
        self.outbox.close()

    def _compute(self, parts: Sequence[Part]) -> None:
        for part in parts:
            space, holds = self.outbox.space(part)
            for number, (pieces, weight, product) in enumerate(self.factors):
                product.multiply(pieces[part.rank][part.number], weight, space, add=holds or number > 0)
            self.outbox.send(part)
