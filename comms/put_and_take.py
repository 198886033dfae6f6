"""The halves of an exchange: launches of the kernels that put and take (comms/kernels/exchange.py).

A put ends with a signal to every rank, a take begins with the wait for all of theirs. They are functions of their own,
so that tests can play several ranks in one process: all puts, then all takes.

Shape suffixes: T tokens of this rank, N ranks, R room for received rows, D row width, X row width or bytes of a record,
K side columns, W int32 words of a row's side columns.
"""

# Kernels have no types: nor have the arguments of a launch.
# pyright: basic, reportArgumentType=false, reportCallIssue=false

import math
import os
from contextlib import AbstractContextManager
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from comms.kernels.exchange import (
    COUNTS,
    RETURNS,
    ROWS,
    put_back_kernel,
    put_counts_kernel,
    put_rows_kernel,
    sum_back_kernel,
    take_counts_kernel,
    take_rows_kernel,
    wait_kernel,
)
from comms.payload import BLOCK
from comms.symmetric_memory import Exchange

# Words that a program moves at a time, and the widest part of a row in it.
TILE_WORDS, TILE_COLUMNS = 8192, 4096
# Elements that a program adds up at a time.
SUM_COLUMNS = 2048
# Bytes that make one more program worth while, and the most programs that put rows if nobody asks for a number.
BYTES_PER_CTA, MAX_CTAS = 2**16, 32


def put_counts(exchange: Exchange, sent_2N: Tensor, tag: int) -> None:
    """Put this rank's (2, N) int32 rows and items for each rank into every rank's table."""
    with _on(exchange):
        put_counts_kernel[(1,)](
            exchange.pointers, exchange.errors, exchange.state, sent_2N.contiguous(), exchange.rank, tag,
            exchange.limit, exchange.layout.table_at, **_channel(exchange, COUNTS),
            CLOCK=exchange.has_clock, num_warps=1,
        )  # fmt: skip


def take_counts(exchange: Exchange, tag: int, item_bound: int) -> tuple[Tensor, Tensor]:
    """Wait for every rank's counts: (routes, totals)."""
    num_ranks = exchange.num_ranks
    routes = exchange.overflow.new_empty(3, num_ranks, num_ranks)
    totals = exchange.overflow.new_empty(2)
    with _on(exchange):
        take_counts_kernel[(1,)](
            exchange.pointers, exchange.errors, exchange.state, exchange.overflow, routes, totals, exchange.rank, tag,
            exchange.limit, exchange.layout.row_bound, item_bound, exchange.layout.table_at,
            **_channel(exchange, COUNTS), CLOCK=exchange.has_clock, num_warps=1,
        )  # fmt: skip
    return routes, totals


def put_rows(
    exchange: Exchange,
    x_TD: Tensor,
    side_TW: Tensor,
    index_NT: Tensor,
    routes: Tensor,
    out_RD: Tensor,
    out_RW: Tensor,
    tag: int,
) -> None:
    """Put rows and side words at their places at other ranks, this rank's own into `out`."""
    x_words, out_words = words_of(x_TD), words_of(out_RD)
    num_bytes = 4 * x_words.shape[1] * index_NT.numel()
    sizes = _sizes(exchange, x_words.shape[1], side_TW.shape[1])
    with _on(exchange):
        put_rows_kernel[(_put_programs(exchange, num_bytes),)](
            exchange.pointers, exchange.errors, exchange.state, x_words, side_TW, index_NT, routes, out_words, out_RW,
            exchange.rank, tag, exchange.limit, x_TD.shape[0], exchange.layout.rows_at, exchange.layout.side_at,
            **_channel(exchange, ROWS), **sizes,
            CLOCK=exchange.has_clock, num_warps=16,
        )  # fmt: skip


def take_rows(
    exchange: Exchange, routes: Tensor, totals: Tensor, out_RD: Tensor, out_RW: Tensor, tag: int, fill_from: int
) -> None:
    """Wait for every rank's rows and copy them to `out`."""
    out_words = words_of(out_RD)
    sizes = _sizes(exchange, out_words.shape[1], out_RW.shape[1])
    _wait_for_all(exchange, ROWS, tag)
    channel = _channel(exchange, ROWS)
    del channel["FAILED_AT"]
    with _on(exchange):
        take_rows_kernel[(_take_programs(exchange, out_RD.shape[0], sizes["TILE"]),)](
            exchange.pointers, exchange.state, routes, totals, out_words, out_RW, exchange.rank, tag, out_RD.shape[0],
            exchange.layout.rows_at, exchange.layout.side_at, **channel, **sizes,
            FILL_FROM=fill_from, num_warps=8,
        )  # fmt: skip


def put_back(exchange: Exchange, rows_RD: Tensor, side_RK: Tensor, routes: Tensor, totals: Tensor, tag: int) -> None:
    """Put received rows and side columns back to where they were sent from."""
    words, side_words = words_of(rows_RD), words_of(side_RK)
    sizes = _sizes(exchange, words.shape[1], side_words.shape[1])
    with _on(exchange):
        put_back_kernel[(_put_programs(exchange, 4 * words.numel()),)](
            exchange.pointers, exchange.errors, exchange.state, words, side_words, routes, totals, exchange.rank, tag,
            exchange.limit, exchange.layout.returns_at, exchange.layout.return_side_at,
            **_channel(exchange, RETURNS), **sizes, CLOCK=exchange.has_clock, num_warps=16,
        )  # fmt: skip


def sum_back(
    exchange: Exchange,
    rows_RX: Tensor,
    side_RK: Tensor,
    index_NT: Tensor,
    routes: Tensor,
    out_TD: Tensor,
    side_TK: Tensor,
    tag: int,
) -> None:
    """Wait for every rank's results and add them up per token, into `out` and `side`."""
    _wait_for_all(exchange, RETURNS, tag)
    if side_TK.shape[1]:
        _sum(exchange, side_RK, index_NT, routes, side_TK, tag, exchange.layout.return_side_at, finish=False)
    # The last one returns the credit for both.
    _sum(exchange, rows_RX, index_NT, routes, out_TD, tag, exchange.layout.returns_at, finish=True)


def _sum(
    exchange: Exchange,
    rows_RX: Tensor,
    index_NT: Tensor,
    routes: Tensor,
    out_TX: Tensor,
    tag: int,
    rows_at: int,
    *,
    finish: bool,
) -> None:
    num_tokens, width = out_TX.shape
    columns = min(_power_of_2(width), SUM_COLUMNS)
    channel = _channel(exchange, RETURNS)
    del channel["FAILED_AT"]
    row_bytes, is_coded = rows_RX.shape[1] * rows_RX.element_size(), rows_RX.dtype == torch.uint8
    with _on(exchange):
        sum_back_kernel[(_take_programs(exchange, num_tokens * -(-width // columns), 1, per_sm=8),)](
            exchange.pointers, exchange.state, rows_RX, index_NT, routes, out_TX, exchange.rank, tag, num_tokens,
            rows_at, **channel, WIDTH=width, ROW_BYTES=row_bytes, ALIGNMENT=math.gcd(row_bytes, 16), COLUMNS=columns,
            WIDE=tl.float64 if out_TX.dtype == torch.float64 else tl.float32, BLOCK=BLOCK if is_coded else 0,
            FINISH=finish, num_warps=4,
        )  # fmt: skip


def _wait_for_all(exchange: Exchange, channel: int, tag: int) -> None:
    flags = _channel(exchange, channel)
    del flags["RANKS"]
    with _on(exchange):
        wait_kernel[(exchange.num_ranks,)](
            exchange.pointers, exchange.errors, exchange.rank, tag, exchange.limit, **flags,
            CLOCK=exchange.has_clock, num_warps=1,
        )  # fmt: skip


def words_of(x: Tensor) -> Tensor:
    """Rows as int32 words: (rows, bytes / 4)."""
    x = x.contiguous()
    width = x.shape[1] * x.element_size()
    assert width % 4 == 0, x.shape
    return x.view(-1).view(torch.int32).view(x.shape[0], width // 4)


def _sizes(exchange: Exchange, words: int, side_words: int) -> dict[str, int]:
    """How rows are cut into tiles."""
    layout = exchange.layout
    assert 4 * words <= layout.row_bytes and words % 4 == 0 and 4 * side_words <= layout.side_bytes, (words, side_words)
    columns = min(_power_of_2(words), TILE_COLUMNS)
    return {
        "WORDS": words,
        "COLUMNS": columns,
        "SIDE_WORDS": side_words,
        "SIDE_COLUMNS": _power_of_2(max(side_words, 1)),
        "TILE": max(TILE_WORDS // columns, 1),
    }


def _channel(exchange: Exchange, channel: int) -> dict[str, int]:
    """Where a channel's flags are."""
    num_ranks = exchange.num_ranks
    return {
        "FLAGS_AT": exchange.layout.flags_at(channel),
        "FAILED_AT": exchange.layout.failed_at,
        "NUM_RANKS": num_ranks,
        "RANKS": _power_of_2(num_ranks),
    }


def _power_of_2(number: int) -> int:
    """The next one, which sizes of a block have to be."""
    return 1 << (number - 1).bit_length()


def _put_programs(exchange: Exchange, num_bytes: int) -> int:
    """Few enough to leave multiprocessors to others."""
    return exchange.num_ctas or max(1, min(MAX_CTAS, num_bytes // BYTES_PER_CTA))


def _take_programs(exchange: Exchange, rows: int, tile: int, per_sm: int = 2) -> int:
    """Nobody waits for these, and they are bound by this device's own memory."""
    if not exchange.arena.is_cuda:
        return 3
    processors = torch.cuda.get_device_properties(exchange.arena.device).multi_processor_count
    return max(1, min(per_sm * processors, -(-rows // tile)))


def _on(exchange: Exchange) -> AbstractContextManager[Any]:
    """Kernels are launched on the exchange's device."""
    assert exchange.arena.is_cuda or os.environ.get("TRITON_INTERPRET") == "1"
    return torch.cuda.device(exchange.arena.device) if exchange.arena.is_cuda else torch.no_grad()
