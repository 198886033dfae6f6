"""Lanes whose streams are threads: what events alone would order on GPUs, events alone order here, at random speeds.

Buffers and flags are those of tests/unit/test_peer_buffers.py, where everything happens in the order of the program.
"""

import itertools
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from queue import Queue
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from comms import peer_buffers, row_collectives, shard_transport
from comms.async_tp import _SumOfProducts
from comms.lane import Lane, Streams
from comms.peer_buffers import PeerBuffers
from comms.products import PlainProduct
from comms.shard_transport import sum_ascending
from tests.unit.test_peer_buffers import FakeHandle, failures_of_ranks

# Seconds that a step may take, at most, by its stream; the copies of one rank are slower than everybody else's.
JITTER = {"compute": 0.0005, "copies": 0.0005, "signals": 0.0003}
SLOW_COPIES = 0.004
# Forward gathers alone, too.
SCATTERS = True, True, False
# Of a rank's thread: the streams it has entered, and which rank it is.
current = threading.local()


def issue(step: Callable[[], object]) -> None:
    """Give a step to the current stream."""
    current.streams[-1].add(step)


class ThreadStream:
    """Runs what it is given, one step after the other."""

    def __init__(self, jitter: float, seed: int) -> None:
        self.jitter, self.random, self.failures = jitter, random.Random(seed), []
        self.steps: Queue[Callable[[], object]] = Queue()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        with torch.no_grad():
            while True:
                step = self.steps.get()
                try:
                    time.sleep(self.random.random() * self.jitter)
                    step()
                except BaseException as failure:
                    self.failures.append(repr(failure))

    def add(self, step: Callable[[], object]) -> None:
        self.steps.put(step)

    def record_event(self) -> threading.Event:
        event = threading.Event()
        self.add(event.set)
        return event

    def wait_event(self, event: threading.Event) -> None:
        def wait() -> None:
            assert event.wait(20), "an event that never came"

        self.add(wait)

    def __enter__(self) -> "ThreadStream":
        current.streams.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        current.streams.pop()

    def finish(self) -> None:
        assert self.record_event().wait(30), "a stream that is stuck"


class StreamLane(Lane):
    def _current(self) -> Any:
        return current.streams[-1]


class StreamHandle(FakeHandle):
    def put_signal(self, dst_rank: int, channel: int = 0, timeout_ms: int = 0) -> None:
        issue(partial(super().put_signal, dst_rank, channel))

    def wait_signal(self, src_rank: int, channel: int = 0, timeout_ms: int = 0) -> None:
        issue(partial(super().wait_signal, src_rank, channel))


class StreamProduct(PlainProduct):
    def multiply(self, x_ORX: Tensor, weight: Tensor, out_ORY: Tensor, add: bool = False) -> None:
        issue(partial(super().multiply, x_ORX, weight, out_ORY, add))


def copied(source: Tensor, target: Tensor) -> None:
    issue(lambda: target.copy_(source))


def summed(parts: Tensor) -> Tensor:
    out = torch.full_like(parts[0], float("nan"))
    issue(lambda: out.copy_(sum_ascending(parts)))
    return out


@contextmanager
def by_streams() -> Iterator[None]:
    """Pieces of two rows; copies and sums are steps of streams."""
    cuts = patch.multiple(shard_transport, PIECE_ROWS=2, SUM_PIECE_ROWS=2)
    with cuts, patch.multiple(peer_buffers, _copy=copied, sum_ascending=summed):
        yield


def ranks_of(size: int, seed: int) -> tuple[list[PeerBuffers], list[dict[str, ThreadStream]]]:
    """Both lanes of every rank, and its streams."""
    streams = [
        {
            name: ThreadStream(jitter, seed * 100 + rank * 10 + number)
            for number, (name, jitter) in enumerate(JITTER.items())
        }
        for rank in range(size)
    ]
    streams[-1]["copies"].jitter = SLOW_COPIES
    lanes: list[list[Lane]] = []
    for _ in range(2):
        shared: dict[str, Any] = {"changed": threading.Condition(), "barrier": threading.Barrier(size)}

        def allocate(rank: int, num_bytes: int, shared: dict[str, Any] = shared) -> FakeHandle:
            for stream in streams[rank].values():
                stream.finish()
            if shared["barrier"].wait(30) == 0:
                shared["buffers"] = [torch.full((num_bytes,), 255, dtype=torch.uint8) for _ in range(size)]
                shared["flags"] = {}
            shared["barrier"].wait(30)
            return StreamHandle(rank, shared)

        lanes.append(
            [
                StreamLane(rank, size, partial(allocate, rank), Streams(mine["copies"], mine["signals"]), 10)  # type: ignore
                for rank, mine in enumerate(streams)
            ]
        )
    return [PeerBuffers(*pair) for pair in zip(*lanes, strict=True)], streams


def finished(streams: dict[str, ThreadStream]) -> list[str]:
    """What failed on a rank's streams, once they are through."""
    for stream in streams.values():
        stream.finish()
    return [failure for stream in streams.values() for failure in stream.failures]


def on_threads(work: Callable[[int], object], size: int) -> list[str]:
    """Run every rank's work by streams: what it raised, and who does not end."""
    with by_streams(), torch.no_grad():
        return failures_of_ranks(work, size)


def wrong_results(size: int, widths: list[int], seed: int, rows: int = 4) -> list[str]:
    """Rounds of a gather, and mostly a scatter of some width while it is open, as in backward; nobody waits between."""
    ranks, streams = ranks_of(size, seed)
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    rounds = [(randn(size, 2, size * rows, 5), randn(size, width, 5), randn(size, 2, rows, width)) for width in widths]
    found: list[str] = []

    def work(rank: int) -> None:
        current.streams = [streams[rank]["compute"]]
        kept: list[tuple[Tensor, Tensor | None]] = []
        for scatters, (wide, weights, shards) in zip(itertools.cycle(SCATTERS), rounds, strict=False):
            shard = shards[rank].clone()
            inbox = ranks[rank].gather(shard)
            total = None
            if scatters:
                in_one_piece = len(kept) % 4 > 1
                factors = [wide[rank]], [weights[rank].t()], [StreamProduct()]
                sums = _SumOfProducts(ranks[rank], *factors, weights.shape[1], in_one_piece)
                sums.send()
            whole = inbox.whole()
            gathered = torch.full_like(whole, float("nan"))
            copied(whole, gathered)
            inbox.close()
            if scatters:
                total = sums.total()
                sums.close()
            kept.append((gathered, total))
            # Whose memory is then somebody else's.
            issue(partial(shard.fill_, float("nan")))
        found.extend(finished(streams[rank]))
        for number, ((wide, weights, shards), (whole, total)) in enumerate(zip(rounds, kept, strict=False)):
            mine = slice(rank * rows, (rank + 1) * rows)
            expected = sum((wide[r] @ weights[r].t())[:, mine] for r in range(size))
            if not torch.equal(whole, shards.transpose(0, 1).flatten(1, 2)):
                found.append(f"rank {rank}, round {number}: gathered rows")
            if total is not None and not torch.allclose(total, expected, rtol=1e-10, atol=1e-10):  # type: ignore
                found.append(f"rank {rank}, round {number}: sums")

    return on_threads(work, size) + found


@pytest.mark.parametrize("size", [2, 3, 8])
@pytest.mark.parametrize("widths", [[6] * 8, [6, 3, 6, 2] * 2], ids=["alike", "mixed"])
def test_nothing_is_read_before_it_is_there_nor_written_while_it_is_read(size: int, widths: list[int]) -> None:
    assert wrong_results(size, widths, seed=size) == []


def wrong_rows(size: int, seed: int) -> list[str]:
    """Rounds of gathers and reduce-scatters with nothing to multiply, one behind the other, of sizes that change."""
    ranks, streams = ranks_of(size, seed)
    streams[0]["compute"].jitter = SLOW_COPIES
    generator = torch.Generator().manual_seed(seed)
    rounds = [
        (
            torch.randn(size, outer, rows, 3, generator=generator, dtype=torch.float64),
            torch.randn(size, outer, size * rows, 3, generator=generator, dtype=torch.float64),
        )
        for outer, rows in ((2, 4), (2, 4), (3, 1), (1, 5), (2, 4), (2, 4))
    ]
    found: list[str] = []

    def work(rank: int) -> None:
        current.streams, current.rank = [streams[rank]["compute"]], rank
        kept: list[list[Tensor]] = []
        for shards, wide in rounds:
            kept.append([])
            # Gathers one behind the other, too; memory of operands is then somebody else's.
            for function, operand in (
                (row_collectives.gathered_rows, 2 * shards[rank]),
                (row_collectives.gathered_rows, 3 * shards[rank]),
                (row_collectives.gathered_rows, shards[rank].clone()),
                (row_collectives.scattered_rows, wide[rank].clone()),
            ):
                result = function(operand, "peers")
                kept[-1].append(torch.full_like(result, float("nan")))
                copied(result, kept[-1][-1])
                issue(partial(operand.fill_, float("nan")))
        found.extend(finished(streams[rank]))
        for number, ((shards, wide), (*gathered, total)) in enumerate(zip(rounds, kept, strict=False)):
            rows, whole = shards.shape[2], shards.transpose(0, 1).flatten(1, 2)
            if not all(torch.equal(a, times * whole) for a, times in zip(gathered, (2, 3, 1), strict=True)):
                found.append(f"rank {rank}, round {number}: gathered rows")
            if not torch.allclose(total, wide.sum(0)[:, rank * rows : (rank + 1) * rows], rtol=1e-10, atol=1e-10):
                found.append(f"rank {rank}, round {number}: sums")

    added = {
        "transport_of": lambda _x, _name: ranks[current.rank],
        "group_size": lambda _name: size,
        "_add": lambda space, piece: issue(lambda: space.add_(piece)),
    }
    with patch.multiple(row_collectives, **added):
        return on_threads(work, size) + found


@pytest.mark.parametrize("size", [2, 3])
def test_rows_alone_arrive_before_they_are_read(size: int) -> None:
    assert wrong_rows(size, seed=size) == []
