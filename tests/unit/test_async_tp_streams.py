"""The operators of comms/async_tp.py over lanes of buffers: in which order they work, and what may be read when.

Lanes are those of tests/unit/test_peer_buffers.py, where everything happens in the order of the program, and those of
tests/unit/test_peer_streams.py, whose streams are threads.
"""

import threading
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from comms import async_tp, peer_buffers, shard_transport
from comms.products import AS_THEY_ARE, PlainProduct
from tests.unit.test_peer_buffers import failures_of_ranks, threaded_lanes
from tests.unit.test_peer_streams import (
    SLOW_COPIES,
    StreamProduct,
    copied,
    current,
    finished,
    issue,
    on_threads,
    ranks_of,
)

GRADIENT, GATHERED, SUMMED = "weight gradient", "gather closed", "scatter closed"
NOTHING = torch.empty(0, dtype=torch.float64)


def names(weights: list[Any]) -> str:
    """Of products in the dtype of the rows."""
    return async_tp._joined([AS_THEY_ARE] * len(weights))


def steps_of_backward(size: int, needs_x: bool, needs_weights: list[bool]) -> list[list[object]]:
    """Of every rank: products by their number of rows, weight gradients, and which lane is given back when."""
    ranks, mine = threaded_lanes(size), threading.local()
    steps: list[list[object]] = [[] for _ in range(size)]

    class Noted(PlainProduct):
        def multiply(self, x_ORX: Tensor, weight: Tensor, out_ORY: Tensor, add: bool = False) -> None:
            steps[mine.rank].append(x_ORX.shape[:2].numel())
            super().multiply(x_ORX, weight, out_ORY, add)

        def weight_gradient(self, dy_PY: Tensor, x_PX: Tensor) -> Tensor:
            steps[mine.rank].append(GRADIENT)
            return super().weight_gradient(dy_PY, x_PX)

    def noting(step: str, close: Callable[[Any], None]) -> Callable[[Any], None]:
        def noted(box: Any) -> None:
            steps[mine.rank].append(step)
            close(box)

        return noted

    x, weight, grad = torch.randn(2, 4, 6), torch.randn(5, 6), torch.randn(2, 4 * size, 5)
    count = len(needs_weights)

    def work(rank: int) -> None:
        mine.rank = rank
        asked = names(needs_weights), needs_x, needs_weights
        with torch.no_grad():
            async_tp.gather_matmul_backward([grad] * count, x, [weight] * count, "peers", *asked)

    inbox, outbox = peer_buffers._BufferInbox, peer_buffers._BufferOutbox
    with (
        patch.multiple(async_tp, transport_of=lambda _x, _name: ranks[mine.rank], find_product=lambda _name: Noted()),
        patch.object(inbox, "close", noting(GATHERED, inbox.close)),
        patch.object(outbox, "close", noting(SUMMED, outbox.close)),
        patch.multiple(shard_transport, SUM_PIECE_ROWS=4),
    ):
        assert failures_of_ranks(work, size) == []
    return steps


@pytest.mark.parametrize("size", [2, 3])
def test_weight_gradients_are_computed_while_one_piece_of_dx_travels(size: int) -> None:
    """And the gather's lane is given back before this rank's own rows, which nobody else waits for."""
    others = size - 1
    assert steps_of_backward(size, True, [True]) == [[*[8] * others, GRADIENT, GATHERED, 8, SUMMED]] * size
    expected = [*[8, 8] * others, GRADIENT, GATHERED, 8, 8, SUMMED]
    assert steps_of_backward(size, True, [False, True]) == [expected] * size


@pytest.mark.parametrize("size", [2, 3])
def test_where_nothing_else_is_computed_dx_travels_in_pieces(size: int) -> None:
    assert steps_of_backward(size, True, [False]) == [[*[4, 4] * size, SUMMED]] * size
    assert steps_of_backward(size, False, [True]) == [[GRADIENT, GATHERED]] * size
    assert steps_of_backward(size, False, [False]) == [[]] * size


class SteppedProduct(StreamProduct):
    def weight_gradient(self, dy_PY: Tensor, x_PX: Tensor) -> Tensor:
        out = torch.full((dy_PY.shape[1], x_PX.shape[1]), float("nan"), dtype=x_PX.dtype)
        issue(lambda: out.copy_(dy_PY.t() @ x_PX))
        return out


class Round(NamedTuple):
    """An operator, and which gradients are asked of it; sizes of a shard, (outer, rows, width)."""

    kind: str
    shape: tuple[int, int, int]
    needs_x: bool = True
    needs_weights: tuple[bool, ...] = (True,)


class Operands(NamedTuple):
    """Of all ranks, which are the first dim, or of one: x (O, R, X) of a gather and wide (O, C, X) of a scatter.

    Gradients: (O, C, Y) of each of a gather's products, and (O, R, Y) of a scatter's.
    """

    x: Tensor
    wide: Tensor
    weights: list[Tensor]
    grads: list[Tensor]
    grad: Tensor

    def of(self, rank: int) -> "Operands":
        """Copies of one rank's."""
        return Operands(*([t[rank].clone() for t in x] if isinstance(x, list) else x[rank].clone() for x in self))  # type: ignore[arg-type]


# One behind the other, and nobody waits.
ROUNDS = [
    Round("gather_backward", (2, 4, 6), needs_weights=(True, True)),
    Round("gather_backward", (2, 4, 6)),
    Round("scatter", (2, 4, 6)),
    Round("gather_backward", (2, 4, 6), needs_weights=(False, True)),
    Round("gather", (2, 4, 6), needs_weights=(True, True)),
    Round("gather_backward", (2, 4, 6), needs_weights=(False,)),
    Round("scatter_backward", (2, 4, 6)),
    Round("gather_backward", (1, 8, 6)),
    Round("gather_backward", (3, 1, 4), needs_x=False),
    Round("scatter", (1, 2, 6)),
    Round("gather_backward", (2, 1, 3), needs_weights=(False,)),
    Round("scatter", (2, 5, 3)),
    Round("gather_backward", (2, 5, 3), needs_weights=(True, False, True)),
    Round("scatter_backward", (2, 5, 3), needs_x=False),
    Round("gather_backward", (2, 4, 6)),
]


def results_of(asked: Round, given: Operands) -> list[Tensor]:
    """What one rank gets."""
    x, wide, weights, grads, grad = given
    needs = asked.needs_x, list(asked.needs_weights)
    if asked.kind == "gather":
        return async_tp.gather_matmul(x, weights, "peers", names(weights))
    if asked.kind == "gather_backward":
        return async_tp.gather_matmul_backward(grads, x, weights, "peers", names(weights), *needs)
    if asked.kind == "scatter":
        return [async_tp.matmul_scatter(wide, weights[0], "peers", AS_THEY_ARE)]
    return async_tp.matmul_scatter_backward(grad, wide, weights[0], "peers", AS_THEY_ARE, needs[0], needs[1][0])


def expected_of(asked: Round, given: Operands, rank: int) -> list[Tensor]:
    """The same from every rank's operands."""
    x, wide, weights, grads, grad = given
    size, rows = x.shape[0], x.shape[2]
    mine = slice(rank * rows, (rank + 1) * rows)
    whole_x, whole_grad = (shards.transpose(0, 1).flatten(1, 2) for shards in (x, grad))
    if asked.kind == "gather":
        return [whole_x @ weight[rank].t() for weight in weights]
    if asked.kind == "scatter":
        return [torch.stack([wide[r] @ weights[0][r].t() for r in range(size)]).sum(0)[:, mine]]
    if asked.kind == "scatter_backward":
        dx = whole_grad @ weights[0][rank]
        dws = [whole_grad.flatten(0, 1).t() @ wide[rank].flatten(0, 1)]
    else:
        parts = [g[r] @ weight[r] for g, weight in zip(grads, weights, strict=True) for r in range(size)]
        dx = torch.stack(parts).sum(0)[:, mine]
        dws = [g[rank].flatten(0, 1).t() @ whole_x.flatten(0, 1) for g in grads]
    needed = zip((dx, *dws), (asked.needs_x, *asked.needs_weights), strict=True)
    return [gradient if is_needed else NOTHING for gradient, is_needed in needed]


def wrong_operators(size: int, seed: int) -> list[str]:
    ranks, streams = ranks_of(size, seed)
    streams[0]["compute"].jitter = SLOW_COPIES
    generator = torch.Generator().manual_seed(seed)
    randn = partial(torch.randn, generator=generator, dtype=torch.float64)

    def operands(asked: Round) -> Operands:
        outer, rows, width = asked.shape
        ys = range(3, 3 + len(asked.needs_weights))
        return Operands(
            x=randn(size, outer, rows, width),
            wide=randn(size, outer, size * rows, width),
            weights=[randn(size, y, width) for y in ys],
            grads=[randn(size, outer, size * rows, y) for y in ys],
            grad=randn(size, outer, rows, ys[0]),
        )

    rounds, found = [(asked, operands(asked)) for asked in ROUNDS], []

    def work(rank: int) -> None:
        current.streams, current.rank = [streams[rank]["compute"]], rank
        kept: list[list[Tensor]] = []
        for asked, given in rounds:
            mine = given.of(rank)
            results = results_of(asked, mine)
            kept.append([torch.full_like(result, float("nan")) for result in results])
            for result, place in zip(results, kept[-1], strict=True):
                copied(result, place)
            # Whose memory is then somebody else's.
            for used in (mine.x, mine.wide, mine.grad, *mine.weights, *mine.grads):
                issue(partial(used.fill_, float("nan")))
        found.extend(finished(streams[rank]))
        for number, ((asked, given), results) in enumerate(zip(rounds, kept, strict=False)):
            for place, (a, b) in enumerate(zip(results, expected_of(asked, given, rank), strict=True)):
                if a.shape != b.shape or not torch.allclose(a, b, rtol=1e-9, atol=1e-9):
                    found.append(f"rank {rank}, round {number} ({asked.kind}): result {place}")

    replaced = {
        "transport_of": lambda _x, _name: ranks[current.rank],
        "group_size": lambda _name: size,
        "find_product": lambda _name: SteppedProduct(),
    }
    with patch.multiple(async_tp, **replaced):
        return on_threads(work, size) + found


@pytest.mark.parametrize("size", [2, 3, 8])
def test_operators_read_nothing_before_it_is_there_nor_after_it_was_given_back(size: int) -> None:
    assert wrong_operators(size, seed=size) == []
