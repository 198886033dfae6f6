"""The protocol of buffers between GPUs, with threads as ranks, and how shards are cut. What GPUs add is streams."""

import random
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from threading import Barrier, Condition, Thread
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from comms import peer_buffers, shard_transport
from comms.async_tp import _SumOfProducts
from comms.lane import Lane, Streams
from comms.peer_buffers import PeerBuffers, copy_rows
from comms.products import PlainProduct
from comms.shard_transport import cut, cut_sum, split


class FakeHandle:
    """Buffers and flags of every rank in one process; a wait that takes too long is an error."""

    def __init__(self, rank: int, shared: dict[str, Any]) -> None:
        self.rank, self.shared = rank, shared

    def get_buffer(self, rank: int, sizes: Any, dtype: torch.dtype) -> Tensor:
        # A new tensor over old memory, as GPUs have it: in inference mode it is one of inference.
        memory, count = self.shared["buffers"][rank].numpy(), torch.Size(sizes).numel()
        return torch.frombuffer(memory, dtype=dtype, count=count).view(*sizes)

    def put_signal(self, dst_rank: int, channel: int = 0, timeout_ms: int = 0) -> None:
        self._turn((dst_rank, channel, self.rank), False)

    def wait_signal(self, src_rank: int, channel: int = 0, timeout_ms: int = 0) -> None:
        self._turn((self.rank, channel, src_rank), True)

    def _turn(self, flag: tuple[int, int, int], old: bool) -> None:
        changed, flags = self.shared["changed"], self.shared["flags"]
        with changed:
            assert changed.wait_for(lambda: flags.get(flag, False) == old, 10), f"{flag} never became {old}"
            flags[flag] = not old
            changed.notify_all()


def threaded_lanes(size: int) -> list[PeerBuffers]:
    lanes: list[list[Lane]] = []
    for _ in range(2):
        shared: dict[str, Any] = {"changed": Condition(), "barrier": Barrier(size)}

        def allocate(rank: int, num_bytes: int, shared: dict[str, Any] = shared) -> FakeHandle:
            if shared["barrier"].wait(10) == 0:
                # Poisoned: what is read before it came shows.
                shared["buffers"] = [torch.full((num_bytes,), 255, dtype=torch.uint8) for _ in range(size)]
                shared["flags"] = {}
            shared["barrier"].wait(10)
            return FakeHandle(rank, shared)

        lanes.append([Lane(rank, size, partial(allocate, rank), Streams(), 10) for rank in range(size)])
    return [PeerBuffers(*pair) for pair in zip(*lanes, strict=True)]


def failures_of_ranks(work: Callable[[int], object], size: int) -> list[str]:
    """Run every rank's work, each on a thread of its own: what it raised, and who does not end."""
    failures: list[str] = []

    def run(rank: int) -> None:
        try:
            work(rank)
        except BaseException as failure:
            failures.append(f"rank {rank}: {failure!r}")

    threads = [Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return failures + [f"rank {rank} does not end" for rank, thread in enumerate(threads) if thread.is_alive()]


@pytest.mark.parametrize("size", [2, 3, 5, 8])
def test_lanes_of_buffers_compute_the_same(size: int) -> None:
    """Sizes grow and shrink; a gather is open while a scatter runs; training comes after inference."""
    ranks = threaded_lanes(size)
    generator = torch.Generator().manual_seed(0)
    rounds = []
    for rows in (3, 5, 1, 8, 8):
        shards = torch.randn(size, 2, rows, 4, generator=generator, dtype=torch.float64)
        wide = torch.randn(size, 2, size * rows, 6, generator=generator, dtype=torch.float64)
        weights = torch.randn(2, size, 4, 6, generator=generator, dtype=torch.float64)
        rounds.append((shards, wide, weights))
    assert rounds[3][0].shape == rounds[4][0].shape, "the fourth makes the views that the fifth writes to"

    def check(rank: int, chooser: random.Random, shards: Tensor, wide: Tensor, weights: Tensor) -> None:
        up, down = weights
        whole = shards.transpose(0, 1).flatten(1, 2)
        inbox = ranks[rank].gather(shards[rank])
        time.sleep(chooser.random() * 0.01)
        in_one_piece = shards.shape[2] == 5
        sums = _SumOfProducts(
            ranks[rank], [wide[rank]], [down[rank].t()], [PlainProduct()], down.shape[1], in_one_piece
        )
        assert not in_one_piece or len(sums.own) == 1
        sums.send()
        time.sleep(chooser.random() * 0.01)
        gathered = whole.new_empty(*whole.shape[:2], up[rank].shape[1])
        for rows, block in inbox.blocks():
            PlainProduct().multiply(block, up[rank], gathered[:, rows])
        torch.testing.assert_close(gathered, whole @ up[rank], rtol=1e-12, atol=1e-12)
        assert torch.equal(inbox.whole(), whole)
        products = sums.total()
        sums.close()
        inbox.close()
        count = shards.shape[2]
        parts = [(wide[r] @ down[r].t())[:, rank * count : (rank + 1) * count] for r in range(size)]
        torch.testing.assert_close(products, sum(parts), rtol=1e-12, atol=1e-12)

    def work(rank: int) -> None:
        chooser = random.Random(rank)
        for number, data in enumerate(rounds):
            with torch.inference_mode(number == 3):
                check(rank, chooser, *data)

    with patch.multiple(shard_transport, PIECE_ROWS=2, SUM_PIECE_ROWS=2), torch.no_grad():
        assert failures_of_ranks(work, size) == []


@pytest.mark.parametrize("num_rows", [1, 2, 7, 4095, 4096, 4097, 10_000, 100_001])
def test_pieces_cover_a_shard_in_order(num_rows: int) -> None:
    pieces = cut(num_rows)
    assert pieces[0].start == 0 and pieces[-1].stop == num_rows
    assert all(a.stop == b.start for a, b in pairwise(pieces))
    sizes = [piece.stop - piece.start for piece in pieces]
    assert min(sizes) >= 1 and max(sizes) - min(sizes) <= 1 and len(pieces) <= shard_transport.MAX_PIECES


@pytest.mark.parametrize("outer", [1, 2, 3, 4, 9])
@pytest.mark.parametrize("num_rows", [1, 2, 512, 2048, 2049, 4096, 10_000])
def test_pieces_of_a_sum_cover_it_once(outer: int, num_rows: int) -> None:
    """As many as its rows of all sequences ask for: one piece would leave nothing to compute while it travels."""
    pieces = cut_sum(outer, num_rows)
    assert cut_sum(outer, num_rows, in_one_piece=True) == [(slice(0, outer), slice(0, num_rows))]
    seen = torch.zeros(outer, num_rows, 1)
    for found, piece in zip(split(seen, pieces), pieces, strict=True):
        found += 1
        assert found.shape == seen[piece].shape and found.data_ptr() == seen[piece].data_ptr()
    assert bool((seen == 1).all())
    wanted = min(-(-outer * num_rows // shard_transport.SUM_PIECE_ROWS), shard_transport.MAX_PIECES)
    # Sequences come out even where they can: 3 of them are 3 pieces and not 4.
    assert wanted / 2 < len(pieces) <= wanted
    if outer >= wanted:
        assert all(rows == slice(0, num_rows) for _, rows in pieces), "whole sequences lie in one run of memory"


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(
    ("outer", "num_rows", "width", "first"), [(1, 3, 16, 0), (3, 4, 16, 0), (2, 3, 32, 1), (3, 1, 5, 0), (2, 5, 24, 16)]
)
def test_rows_are_copied_bit_for_bit_and_nothing_else(
    dtype: torch.dtype, outer: int, num_rows: int, width: int, first: int
) -> None:
    """Bits of all kinds, NaN among them; rows that do not begin where a word does, or end in the midst of one."""
    generator = torch.Generator().manual_seed(width)
    size, numbers = dtype.itemsize, outer * num_rows * width

    def random(count: int) -> Tensor:
        return torch.randint(0, 256, (count * size,), generator=generator, dtype=torch.uint8).view(dtype)

    memory = random(first + numbers)
    source, whole = memory[first:].view(outer, num_rows, width), random(3 * numbers).view(outer, 3 * num_rows, width)
    expected = whole.view(torch.uint8).clone()
    expected[:, num_rows : 2 * num_rows] = source.view(torch.uint8)
    copy_rows(source, whole[:, num_rows : 2 * num_rows])
    assert torch.equal(whole.view(torch.uint8), expected)


def test_whole_words_are_copied_in_one_launch() -> None:
    """Rows as they come in training; else it would be one for each sequence."""
    copies: list[torch.Size] = []
    whole = torch.zeros(3, 8, 16, dtype=torch.bfloat16)
    with patch.object(peer_buffers, "_copy", lambda source, target: copies.append(source.shape)):
        copy_rows(torch.zeros(3, 4, 16, dtype=torch.bfloat16), whole[:, 4:])
        assert copies == [(3, 4, 2)]
        copy_rows(torch.zeros(3, 4, 15, dtype=torch.bfloat16), whole[:, 4:, :15])
    assert copies[1:] == [(4, 15)] * 3


@pytest.mark.parametrize(
    "source",
    [
        torch.arange(3 * 4 * 17).view(3, 4, 17).bfloat16()[..., :16],
        torch.arange(3 * 4 * 16).view(3, 16, 4).bfloat16().transpose(1, 2),
        torch.arange(3 * 4 * 32).view(3, 4, 32).bfloat16()[..., ::2],
        torch.frombuffer(bytearray(3 * 4 * 32 + 2), dtype=torch.bfloat16, offset=2).view(3, 4, 16),
    ],
    ids=["rows apart", "transposed", "numbers apart", "memory that begins elsewhere"],
)
def test_rows_that_are_no_words_are_copied_all_the_same(source: Tensor) -> None:
    whole = torch.full((3, 8, 16), 7.0, dtype=torch.bfloat16)
    copy_rows(source, whole[:, 4:])
    assert torch.equal(whole[:, 4:], source) and bool((whole[:, :4] == 7).all())
    assert peer_buffers._in_words(source) is None
