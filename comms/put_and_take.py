"""Launches of the kernels that exchange counts and rows (comms/kernels/routes.py, dispatch.py and combine.py there).

Every exchange has two sides: a put ends with signals to other ranks, a take begins with waits for theirs. One launch
does both. `sides` names them, so that tests can play several ranks in one process: all puts, then all takes.

Shape suffixes: T tokens of this rank, N ranks, C chunks of tokens, R room for received rows, D row width, X row width
or bytes of a record, K side columns or ids per token.
"""

# Kernels have no types: nor have the arguments of a launch.
# pyright: basic, reportArgumentType=false, reportCallIssue=false

import functools
import math
import os
from contextlib import AbstractContextManager
from enum import IntEnum
from typing import Any, NamedTuple

import torch
from torch import Tensor

from comms.kernels.codec import record_bytes, word_view
from comms.kernels.combine import combine_kernel
from comms.kernels.dispatch import dispatch_kernel
from comms.kernels.e4m3 import can_cast
from comms.kernels.flags import COUNTS, RETURNS, ROWS
from comms.kernels.routes import count_rows_kernel, counts_kernel, place_rows_kernel
from comms.payload import BLOCK
from comms.symmetric_memory import Exchange

# Bytes that are put and signalled at once, if the exchange does not say: of many rows, enough that signals cost little;
# of few (comms/kernels/pieces.py) no less than this, or programs would do nothing else.
PIECE_BYTES, LEAST_PIECE_BYTES = 2**18, 2**16
# Bytes that a program takes at once.
PART_BYTES = 2**15
# Rows that are coded: bytes of a piece, parts that a program takes at once, since it loads ahead within them, the most
# programs that put, and warps of each: coding is work.
CODED_PIECE_BYTES, CODED_PARTS, CODED_CTAS, CODED_WARPS = 2**17, 2, 64, 32
# 16-byte words that a program moves at a time, numbers that it codes on the way, and words of side columns.
MOVE_UNITS, CODED_NUMBERS, SIDE_WORDS = 4096, 16384, 1024
# Tokens that a program waits for and adds up, numbers that it adds up at a time, and the widest part of a row in them.
SUM_TOKENS, SUM_NUMBERS, SUM_COLUMNS = 8, 8192, 2048
# Of records: times the tokens, since a wait takes as long as adding up 8 of them, and parts of a row that a thread has.
CODED_TOKENS, CODED_SUM_PARTS = 2, 2
# Bytes that make one more program worth while, and the most programs that put if nobody asks for a number.
BYTES_PER_CTA, MAX_CTAS = 2**16, 32
# Rows that are yet to be added up: bytes of a piece, for the first of which others wait, and the most programs that
# put.
SUM_PIECE_BYTES, SUM_CTAS = 2**16, 48
# Programs that take: one for each multiprocessor without a put, but no fewer than this part of all.
LEAST_TAKE_PART = 0.5
# Programs that take beside passes over rows.
COPIES_TAKE = 48
# Programs of an exchange that travels beside products, which leave as many multiprocessors to it for all of their
# time: put and take, for each other rank, and the most of each. It need not be fast, but be over when they are.
BESIDE_PUT, BESIDE_TAKE, MAX_BESIDE = 6, 10, 12
# They are few: each takes more parts, and tokens, between two waits.
BESIDE_PARTS, BESIDE_TOKENS = 2, 4
NUM_WARPS = 16
# Tokens whose rows one program numbers, and blocks of tokens whose counts it adds up at a time.
PLAN_TOKENS, PLAN_STRIP = 256, 128

PUT, TAKE, BOTH = (True, False), (False, True), (True, True)
Sides = tuple[bool, bool]


class Beside(IntEnum):
    """What else runs on the device while rows travel."""

    # Nothing that would take long: all multiprocessors take.
    NOTHING = 0
    # Passes over rows, which find room as programs end.
    COPIES = 1
    # Products, which have dealt their tiles out beforehand: few programs put and take.
    PRODUCTS = 2


class Order(NamedTuple):
    """Which token is which row: int32."""

    # Token t's row is this one (from 0) of those for rank n; -1: none.
    index_NT: Tensor
    # Token of each row for rank n, as far as there are rows.
    tokens_NT: Tensor
    # (C, 2, N): rows and ids of each chunk for each rank.
    sent_C2N: Tensor


def order_rows(ids_TK: Tensor, num_ranks: int, ids_per_rank: int, chunks: int = 1) -> Order:
    """Number the rows for each rank in the order of tokens. Rank n owns ids n * ids_per_rank and on; -1 is no id."""
    num_tokens, num_ids = ids_TK.shape
    blocks = _plan_blocks(num_tokens)
    index_NT, tokens_NT, sent_C2N, counts = (
        torch.empty(shape, dtype=torch.int32, device=ids_TK.device)
        for shape in ((num_ranks, num_tokens), (num_ranks, num_tokens), (chunks, 2, num_ranks), (2 * num_ranks, blocks))
    )
    ids_TK = ids_TK.contiguous()
    sizes = {"NUM_RANKS": num_ranks, "NUM_IDS": num_ids, "IDS": _power_of_2(num_ids), "BLOCK": PLAN_TOKENS}
    with torch.cuda.device(ids_TK.device) if ids_TK.is_cuda else torch.no_grad():
        count_rows_kernel[(blocks,)](ids_TK, counts, num_tokens, ids_per_rank, **sizes)
        place_rows_kernel[(blocks,)](
            ids_TK, counts, index_NT, tokens_NT, sent_C2N, num_tokens, ids_per_rank, **sizes, STRIP=PLAN_STRIP,
            CHUNKS=chunks,
        )  # fmt: skip
    return Order(index_NT, tokens_NT, sent_C2N)


def _plan_blocks(num_tokens: int) -> int:
    """Blocks of tokens that the plan's kernels count; chunks are made of whole ones."""
    return max(-(-num_tokens // PLAN_TOKENS), 1)


def chunk_ends(num_tokens: int, chunks: int) -> list[int]:
    """Where each chunk of the tokens ends: as equal as whole blocks of them allow; one may have none."""
    blocks = _plan_blocks(num_tokens)
    return [min((chunk + 1) * blocks // chunks * PLAN_TOKENS, num_tokens) for chunk in range(chunks)]


def chunk_bound(num_tokens: int, chunks: int) -> int:
    """The most tokens of one chunk, if a rank has no more than `num_tokens`."""
    return -(-_plan_blocks(num_tokens) // chunks) * PLAN_TOKENS


def exchange_counts(
    exchange: Exchange, sent_C2N: Tensor, tag: int, item_bound: int, sides: Sides = BOTH
) -> tuple[Tensor, Tensor]:
    """Tell every rank this one's rows and items for it, and learn theirs: (routes, totals)."""
    num_ranks, chunks = exchange.num_ranks, sent_C2N.shape[0]
    assert chunks <= exchange.layout.max_chunks, (chunks, exchange.layout)
    routes = exchange.overflow.new_empty(chunks, 4, num_ranks, num_ranks)
    totals = exchange.overflow.new_empty(chunks + 1)
    with _on(exchange):
        counts_kernel[(1,)](
            exchange.pointers, exchange.errors, exchange.state, exchange.overflow, sent_C2N, routes, totals,
            exchange.rank, tag, exchange.limit, exchange.layout.row_bound, item_bound, exchange.layout.table_at,
            **_channel(exchange, COUNTS), CHUNKS=chunks, COLUMNS=_power_of_2(2 * chunks * num_ranks),
            PUT=sides[0], TAKE=sides[1], CLOCK=exchange.has_clock, num_warps=1,
        )  # fmt: skip
    return routes, totals


class Received(NamedTuple):
    """What dispatch brings: rows in their places, and side columns."""

    rows_RD: Tensor
    weights_RK: Tensor
    ids_RK: Tensor


def move_there(
    exchange: Exchange,
    x_TD: Tensor,
    weights_TK: Tensor,
    ids_TK: Tensor,
    tokens_NT: Tensor,
    routes: Tensor,
    totals: Tensor,
    out: Received,
    tag: int,
    payload: str = "model",
    sides: Sides = BOTH,
    fill: bool = True,
    beside: Beside = Beside.NOTHING,
    base: Tensor | None = None,
) -> None:
    """Put rows and side columns at their places at other ranks; take what comes, and own rows, into `out`.

    Every row of `out`, this rank's own included, has been coded as the payload says and decoded.

    Args:
        routes: of one chunk of the tokens.
        fill: write weights 0 and ids -1 behind the last row.
        beside: what is to find room on the device.
        base: int64; number of the row of `out` that the first one becomes, which may be beyond its shape. None: 0.
    """
    is_coded = payload != "model"
    (num_rows, width), num_ids = out.rows_RD.shape, ids_TK.shape[1]
    rows, out_rows = (word_view(x.contiguous()) if is_coded else words_of(x) for x in (x_TD, out.rows_RD))
    weight_words = words_of(weights_TK)
    row_words = record_bytes(width, BLOCK) // 4 if is_coded else rows.shape[1]
    _check_sizes(exchange, row_words, weight_words.shape[1] + num_ids)
    piece_bytes, most = _sizes_of(is_coded)
    put = _put_programs(exchange, 4 * row_words * tokens_NT.numel(), beside, most)
    parts = max(BESIDE_PARTS if beside == Beside.PRODUCTS else 1, CODED_PARTS if is_coded else 1)
    part_rows = max(PART_BYTES * parts // (4 * row_words), 1)
    take = _take_programs(exchange, put, -(-num_rows // part_rows), beside)
    put, take = put * sides[0], take * sides[1]
    with _on(exchange):
        dispatch_kernel[(put + take,)](
            exchange.pointers, exchange.errors, exchange.state, rows, weight_words, ids_TK.contiguous(), tokens_NT,
            routes, totals, out_rows, words_of(out.weights_RK), out.ids_RK, base,
            exchange.rank, tag, exchange.limit, put, tokens_NT.shape[1], num_rows,
            exchange.layout.rows_at, exchange.layout.side_at,
            **_channel(exchange, ROWS), **_piece_rows(exchange, 4 * row_words, piece_bytes), PART_ROWS=part_rows,
            WORDS=row_words, WEIGHT_WORDS=weight_words.shape[1], NUM_IDS=num_ids,
            WIDTH=width, CODE_BLOCK=BLOCK if is_coded else 0, NUMBERS=CODED_NUMBERS,
            VECTOR=16 // rows.element_size(), CAST=can_cast(x_TD),
            BLOCK=MOVE_UNITS, SIDE_BLOCK=SIDE_WORDS, CLOCK=exchange.has_clock, JITTER=exchange.jitter, FILL=fill,
            num_warps=CODED_WARPS if is_coded else NUM_WARPS,
        )  # fmt: skip


def move_back(
    exchange: Exchange,
    rows_RD: Tensor,
    side_RK: Tensor,
    index_NT: Tensor,
    routes: Tensor,
    out_TD: Tensor,
    side_TK: Tensor,
    tag: int,
    payload: str = "model",
    sides: Sides = BOTH,
    tokens: tuple[int, int] | None = None,
    beside: Beside = Beside.NOTHING,
    slots_RS: Tensor | None = None,
    base: Tensor | None = None,
) -> None:
    """Put received rows and side columns back to where they were sent from; add up per token what comes back.

    Every row, this rank's own included, has been coded as the payload says and decoded.

    Args:
        tokens: first and end of the chunk that `routes` are of; None: there is but one.
        beside: what is to find room on the device.
        slots_RS: int32; `rows` are parts, and row r is the sum of those at its slots (-1: none).
        base: int64; number of the first row of `slots`, which may be beyond its shape. None: 0.
    """
    is_coded, num_slots = payload != "model", 0 if slots_RS is None else slots_RS.shape[1]
    (num_tokens, width), side_words = out_TD.shape, words_of(side_RK)
    row_words = (record_bytes(width, BLOCK) if is_coded else width * out_TD.element_size()) // 4
    if slots_RS is not None:
        rows, num_rows = rows_RD, slots_RS.shape[0]
    else:
        rows, num_rows = word_view(rows_RD.contiguous()) if is_coded else words_of(rows_RD), rows_RD.shape[0]
    _check_sizes(exchange, row_words, side_words.shape[1])
    begin, end = tokens or (0, num_tokens)
    sizes = _sum_sizes(exchange, out_TD, is_coded, num_slots, beside)
    piece_bytes, most = _sizes_of(is_coded, num_slots > 0)
    put = _put_programs(exchange, 4 * row_words * num_rows, beside, most)
    take = _take_programs(exchange, put, -(-(end - begin) // sizes["TOKENS"]), beside)
    put, take = put * sides[0], take * sides[1]
    with _on(exchange):
        combine_kernel[(put + take,)](
            exchange.pointers, exchange.errors, exchange.state, rows, slots_RS, base, side_words, index_NT, routes,
            out_TD, side_TK,
            exchange.rank, tag, exchange.limit, put, num_tokens, begin, end,
            exchange.layout.returns_at, exchange.layout.return_side_at,
            **_channel(exchange, RETURNS), **_piece_rows(exchange, 4 * row_words, piece_bytes),
            WORDS=row_words, SIDE_WORDS=side_words.shape[1], SIDE_UNIT=math.gcd(side_words.shape[1], 4),
            WIDTH=width, CODE_BLOCK=BLOCK if is_coded else 0, NUMBERS=CODED_NUMBERS,
            VECTOR=16 // out_TD.element_size(), CAST=can_cast(out_TD),
            SIDE_WIDTH=side_TK.shape[1], SIDE_COLUMNS=_power_of_2(max(side_TK.shape[1], 1)),
            **sizes, BLOCK=MOVE_UNITS, CLOCK=exchange.has_clock, JITTER=exchange.jitter, SLOTS=num_slots,
            num_warps=CODED_WARPS if is_coded else NUM_WARPS,
        )  # fmt: skip


def _sum_sizes(exchange: Exchange, out_TD: Tensor, is_coded: bool, num_slots: int, beside: Beside) -> dict[str, int]:
    """Tokens between two waits, and the tile that is added up at a time."""
    # Whole blocks that share a scale.
    columns = max(min(_power_of_2(out_TD.shape[1]), SUM_COLUMNS), BLOCK if is_coded else 1)
    more = BESIDE_TOKENS if beside == Beside.PRODUCTS else CODED_TOKENS if is_coded else 1
    numbers, twice = SUM_NUMBERS, more > 1
    if is_coded:
        # A thread has as many registers for words of a row, and more if there is little else to hold.
        numbers, twice = 2 * SUM_NUMBERS // out_TD.element_size(), exchange.num_ranks <= 2 and num_slots == 0
    return {
        "TOKENS": SUM_TOKENS * more,
        "TILE": max(min(numbers * (1 + twice) // columns, SUM_TOKENS), 1),
        "COLUMNS": columns,
        "PARTS": min(CODED_SUM_PARTS, max(columns // BLOCK, 1)),
    }


def words_of(x: Tensor) -> Tensor:
    """Rows as int32 words: (rows, bytes / 4)."""
    x = x.contiguous()
    width = x.shape[1] * x.element_size()
    assert width % 4 == 0, x.shape
    return x.view(-1).view(torch.int32).view(x.shape[0], width // 4)


def _check_sizes(exchange: Exchange, words: int, side_words: int) -> None:
    """Whether rows and side columns fit into the arena, and rows can be moved 16 bytes at a time."""
    layout = exchange.layout
    assert 4 * words <= layout.row_bytes and words % 4 == 0 and 4 * side_words <= layout.side_bytes, (words, side_words)


def _channel(exchange: Exchange, channel: int) -> dict[str, int]:
    """Where a channel's flags are."""
    layout = exchange.layout
    return {
        "FLAGS_AT": layout.flags_at(channel),
        "FAILED_AT": layout.failed_at,
        "NUM_RANKS": layout.num_ranks,
        "RANKS": _power_of_2(layout.num_ranks),
        "PIECES": layout.max_pieces,
    }


def _power_of_2(number: int) -> int:
    """The next one, which sizes of a block have to be."""
    return 1 << (number - 1).bit_length()


def _sizes_of(is_coded: bool, is_sum: bool = False) -> tuple[int, int]:
    """Bytes of a piece, and the most programs that put: by what making a row takes."""
    if is_sum:
        return SUM_PIECE_BYTES, SUM_CTAS
    return (CODED_PIECE_BYTES, CODED_CTAS) if is_coded else (PIECE_BYTES, MAX_CTAS)


def _piece_rows(exchange: Exchange, row_bytes: int, most: int) -> dict[str, int]:
    """Rows of a piece, at most and at least; alike on every rank."""
    most, least = exchange.piece_bytes or most, exchange.piece_bytes or LEAST_PIECE_BYTES
    return {"PIECE_ROWS": max(most // row_bytes, 1), "LEAST_ROWS": max(least // row_bytes, 1)}


def _put_programs(exchange: Exchange, num_bytes: int, beside: Beside, most: int) -> int:
    """Few enough to leave multiprocessors to others."""
    programs = exchange.num_ctas or max(1, min(most, num_bytes // BYTES_PER_CTA))
    if beside == Beside.PRODUCTS:
        programs = min(programs, beside_programs(exchange.num_ranks)[0])
    # Turns go round the other ranks: every program is to come to all of them, or some would have more to do.
    while programs > 1 and math.gcd(programs, exchange.num_ranks - 1) > 1:
        programs -= 1
    return programs


def beside_programs(num_ranks: int) -> tuple[int, int]:
    """How many put and how many take beside products."""
    return min(BESIDE_PUT * (num_ranks - 1), MAX_BESIDE), min(BESIDE_TAKE * (num_ranks - 1), MAX_BESIDE)


def _take_programs(exchange: Exchange, put: int, pieces: int, beside: Beside) -> int:
    """They wait most of the time, but what came last is to be taken fast."""
    if not exchange.arena.is_cuda:
        return 3
    processors = num_processors(exchange.arena.device)
    most = max(processors - put, int(LEAST_TAKE_PART * processors))
    if beside != Beside.NOTHING:
        most = COPIES_TAKE if beside == Beside.COPIES else beside_programs(exchange.num_ranks)[1]
    return max(1, min(pieces, most))


@functools.cache
def num_processors(device: torch.device) -> int:
    """Multiprocessors of a GPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def _on(exchange: Exchange) -> AbstractContextManager[Any]:
    """Kernels are launched on the exchange's device."""
    assert exchange.arena.is_cuda or os.environ.get("TRITON_INTERPRET") == "1"
    return torch.cuda.device(exchange.arena.device) if exchange.arena.is_cuda else torch.no_grad()
