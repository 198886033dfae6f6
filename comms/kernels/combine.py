"""The kernel that sends received rows back to where they were sent from, and adds up per token what comes back.

    put     what became of received rows, or sums of its parts, to their senders
    take    the sum of each token, as soon as the pieces with its rows are there; own rows are read where they are

Programs share the work as in dispatch.py.

Shape suffixes: T tokens, N ranks, R rows received.
"""

# Kernels are written in Triton's language, which has no types.
# pyright: basic, reportGeneralTypeIssues=false, reportOperatorIssue=false
# ruff: noqa: ANN001, ANN201, ANN202

import triton
import triton.language as tl

from comms.kernels.e4m3 import absolute, decode_fp32, encode, scale_byte
from comms.kernels.flags import epoch_of, finish, ready_at, signal, wait, wait_for_room
from comms.kernels.parts import put_sums, sum_parts
from comms.kernels.pieces import (
    linger,
    move,
    move_coded,
    num_turns,
    records_at,
    route_of,
    rows_per_piece,
    words_at,
)


@triton.jit(do_not_specialize=["me", "tag", "limit", "num_put", "num_tokens", "begin", "end", "rows_at", "side_at"])
def combine_kernel(
    pointers, errors, state, rows, slots, slots_base, side, index, routes, out, out_side,
    me, tag, limit, num_put, num_tokens, begin, end, rows_at, side_at,
    FLAGS_AT: tl.constexpr, FAILED_AT: tl.constexpr, NUM_RANKS: tl.constexpr, RANKS: tl.constexpr,
    PIECES: tl.constexpr, PIECE_ROWS: tl.constexpr, LEAST_ROWS: tl.constexpr,
    WORDS: tl.constexpr, SIDE_WORDS: tl.constexpr, SIDE_UNIT: tl.constexpr,
    WIDTH: tl.constexpr, COLUMNS: tl.constexpr, SIDE_WIDTH: tl.constexpr, SIDE_COLUMNS: tl.constexpr,
    CODE_BLOCK: tl.constexpr, NUMBERS: tl.constexpr, VECTOR: tl.constexpr, CAST: tl.constexpr,
    TOKENS: tl.constexpr, TILE: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr,
    CLOCK: tl.constexpr, JITTER: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """out[t] = the sum of what comes back for token t, by ascending rank; this rank's own part is read from `rows`.

    Of the tokens from `begin` to before `end`, which are those of the chunk that routes are of.

    SLOTS > 0: `rows` are parts of rows (comms/kernels/parts.py), added up as rows are put or taken.
    slots_base: number of the first row of `slots`; None: 0.
    CODE_BLOCK > 0: rows travel as records, encoded as they are put and decoded as they are added up; own rows are both.
    """
    if slots_base is not None:
        slots += tl.load(slots_base) * SLOTS
    program, num_programs = tl.program_id(0), tl.num_programs(0)
    epoch = epoch_of(pointers, me, FLAGS_AT)
    if program < num_put:
        if NUM_RANKS > 1:
            _put_back(
                pointers, errors, rows, slots, side, routes, program, num_put, epoch, me, tag, limit, rows_at, side_at,
                FLAGS_AT, FAILED_AT, NUM_RANKS, PIECES, PIECE_ROWS, LEAST_ROWS,
                WORDS, SIDE_WORDS, SIDE_UNIT, BLOCK, CLOCK, JITTER, WIDTH, COLUMNS, SLOTS, TILE,
                CODE_BLOCK, NUMBERS, VECTOR, CAST,
            )  # fmt: skip
    else:
        taker, takers = program - num_put, num_programs - num_put
        if taker == 0:
            # Also of those who send nothing: they are to be at the same exchange.
            for step in range(NUM_RANKS - 1):
                rank = (me + 1 + step) % NUM_RANKS
                word = ready_at(rank, 0, FLAGS_AT, NUM_RANKS, PIECES)
                wait(pointers, errors, me, rank, word, FAILED_AT, tag, epoch, limit, True, CLOCK)
        arena = tl.load(pointers + me)
        for first in range(begin + taker * TOKENS, end, takers * TOKENS):
            _wait_for_tokens(
                pointers, errors, index, routes, first, epoch, me, tag, limit, num_tokens, end,
                FLAGS_AT, FAILED_AT, NUM_RANKS, PIECES, PIECE_ROWS, LEAST_ROWS, TOKENS, CLOCK,
            )  # fmt: skip
            for tile in range(first, tl.minimum(first + TOKENS, end), TILE):
                if CODE_BLOCK > 0:
                    _sum_coded(
                        rows, slots, arena + rows_at, index, routes, out, tile, me, num_tokens, end,
                        NUM_RANKS, WIDTH, COLUMNS, 4 * WORDS, CODE_BLOCK, VECTOR, CAST, TILE, PARTS, SLOTS,
                    )  # fmt: skip
                else:
                    _sum(
                        rows, slots, arena + rows_at, index, routes, out, tile, me, num_tokens, end,
                        NUM_RANKS, WIDTH, COLUMNS, TILE, SLOTS,
                    )  # fmt: skip
                if SIDE_WORDS > 0:
                    _sum(
                        side, slots, arena + side_at, index, routes, out_side, tile, me, num_tokens, end,
                        NUM_RANKS, SIDE_WIDTH, SIDE_COLUMNS, TILE, 0,
                    )  # fmt: skip
    if num_put < num_programs:
        finish(pointers, state, me, tag, epoch, FLAGS_AT, NUM_RANKS, RANKS)


@triton.jit
def _put_back(
    pointers, errors, rows, slots, side, routes, program, programs, epoch, me, tag, limit, rows_at, side_at,
    FLAGS_AT: tl.constexpr, FAILED_AT: tl.constexpr, NUM_RANKS: tl.constexpr,
    PIECES: tl.constexpr, PIECE_ROWS: tl.constexpr, LEAST_ROWS: tl.constexpr,
    WORDS: tl.constexpr, SIDE_WORDS: tl.constexpr, SIDE_UNIT: tl.constexpr,
    BLOCK: tl.constexpr, CLOCK: tl.constexpr, JITTER: tl.constexpr,
    WIDTH: tl.constexpr, COLUMNS: tl.constexpr, SLOTS: tl.constexpr, TILE: tl.constexpr,
    CODE_BLOCK: tl.constexpr, NUMBERS: tl.constexpr, VECTOR: tl.constexpr, CAST: tl.constexpr,
):  # fmt: skip
    """This program's turns: each received row (or what became of it) to its place among those that its sender sent."""
    turns = num_turns(routes, me, False, NUM_RANKS, PIECE_ROWS, LEAST_ROWS, PIECES, 0)
    wait_for_room(pointers, errors, me, tag, epoch, limit, FLAGS_AT, FAILED_AT, NUM_RANKS, CLOCK)
    for turn in range(program, turns, programs):
        piece, rank = turn // (NUM_RANKS - 1), (me + 1 + turn % (NUM_RANKS - 1)) % NUM_RANKS
        count = route_of(routes, rank, me, 0, NUM_RANKS)
        per_piece = rows_per_piece(count, PIECE_ROWS, LEAST_ROWS, PIECES)
        begin = piece * per_piece
        if (begin < count) | (piece == 0):
            if JITTER > 0:
                linger(program, turn, JITTER)
            num_rows = tl.minimum(count - begin, per_piece)
            row = (route_of(routes, rank, me, 1, NUM_RANKS) + begin).to(tl.int64)
            place = (route_of(routes, rank, me, 2, NUM_RANKS) + begin).to(tl.int64)
            base = tl.load(pointers + rank)
            if SLOTS > 0:
                put_sums(
                    rows, slots, row, base + rows_at + place * (4 * WORDS), num_rows,
                    WIDTH, COLUMNS, SLOTS, TILE, 4 * WORDS, CODE_BLOCK, CAST,
                )  # fmt: skip
            elif CODE_BLOCK > 0:
                move_coded(
                    rows + row * WIDTH, records_at(base + rows_at) + place * (4 * WORDS), routes, num_rows,
                    WIDTH, 4 * WORDS, CODE_BLOCK, NUMBERS, False, True, False, VECTOR, CAST,
                )  # fmt: skip
            else:
                target = words_at(base + rows_at) + place * WORDS
                move(rows + row * WORDS, target, routes, num_rows, WORDS, 4, BLOCK, False)
            if SIDE_WORDS > 0:
                target = (base + side_at).to(tl.pointer_type(tl.int32)) + place * SIDE_WORDS
                move(side + row * SIDE_WORDS, target, routes, num_rows, SIDE_WORDS, SIDE_UNIT, BLOCK, False)
            if JITTER > 0:
                linger(program, turn + turns, JITTER)
            signal(pointers, rank, ready_at(me, piece, FLAGS_AT, NUM_RANKS, PIECES), epoch * 65536 + tag)


@triton.jit
def _nth_row(index, routes, me, rank, token, num_tokens, end, NUM_RANKS: tl.constexpr):
    """Numbers of tokens' rows among those of the chunk that went to `rank`; -1 for none, or without room for it."""
    nth = tl.load(index + rank * num_tokens + token, mask=token < end, other=-1)
    nth -= route_of(routes, me, rank, 3, NUM_RANKS)
    return tl.where((nth >= 0) & (nth < route_of(routes, me, rank, 0, NUM_RANKS)), nth, -1)


@triton.jit
def _wait_for_tokens(
    pointers, errors, index, routes, first, epoch, me, tag, limit, num_tokens, end,
    FLAGS_AT: tl.constexpr, FAILED_AT: tl.constexpr, NUM_RANKS: tl.constexpr,
    PIECES: tl.constexpr, PIECE_ROWS: tl.constexpr, LEAST_ROWS: tl.constexpr, TOKENS: tl.constexpr, CLOCK: tl.constexpr,
):  # fmt: skip
    """Until every piece with a row of these tokens has come back. Rows come back in the order of tokens."""
    token = first + tl.arange(0, TOKENS)
    for step in range(NUM_RANKS - 1):
        rank = (me + 1 + step) % NUM_RANKS
        nth = _nth_row(index, routes, me, rank, token, num_tokens, end, NUM_RANKS)
        last = tl.max(nth, axis=0)
        if last >= 0:
            earliest = tl.min(tl.where(nth >= 0, nth, last), axis=0)
            per_piece = rows_per_piece(route_of(routes, me, rank, 0, NUM_RANKS), PIECE_ROWS, LEAST_ROWS, PIECES)
            for piece in range(earliest // per_piece, last // per_piece + 1):
                word = ready_at(rank, piece, FLAGS_AT, NUM_RANKS, PIECES)
                wait(pointers, errors, me, rank, word, FAILED_AT, tag, epoch, limit, True, CLOCK)


@triton.jit
def _sum_coded(
    rows, slots, arena, index, routes, out, first, me, num_tokens, end,
    NUM_RANKS: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, RECORD: tl.constexpr,
    CODE_BLOCK: tl.constexpr, VECTOR: tl.constexpr, CAST: tl.constexpr,
    TILE: tl.constexpr, PARTS: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """Sums of TILE tokens whose rows come back as records. Own rows become what they would be beyond the wire.

    All rows are loaded before one is decoded, so that memory is waited for but twice: for their numbers and for them.

    The tile's dims are (block, token, part of a row, element of a block). In this order Triton deals them out so that
    neighbouring lanes have neighbouring blocks, and a thread has every part of its token's rows: finding a row is work.
    """
    WORD: tl.constexpr = tl.int16 if out.dtype.element_ty == tl.bfloat16 else tl.int32  # pyright: ignore
    BLOCKS: tl.constexpr = COLUMNS // CODE_BLOCK // PARTS
    token = first + tl.arange(0, TILE)[None, :, None, None]
    element = tl.arange(0, CODE_BLOCK)[None, None, None, :]
    for start in tl.static_range(0, WIDTH, COLUMNS):
        block = tl.arange(0, BLOCKS)[:, None, None, None] + BLOCKS * tl.arange(0, PARTS)[None, None, :, None]
        block += start // CODE_BLOCK
        # A thread reads and writes the same elements of rows and records.
        column = tl.max_contiguous(block * CODE_BLOCK + element, [1, 1, 1, VECTOR])
        own = _own_words(
            rows, slots, index, routes, token, column, me, num_tokens, end, out.dtype.element_ty,
            NUM_RANKS, WIDTH, SLOTS,
        )  # fmt: skip
        codes, scales = (), ()
        for step in tl.static_range(NUM_RANKS - 1):
            rank = tl.where(step < me, step, step + 1)
            nth = _nth_row(index, routes, me, rank, token, num_tokens, end, NUM_RANKS)
            record = records_at(arena) + (route_of(routes, me, rank, 2, NUM_RANKS) + nth).to(tl.int64) * RECORD
            codes += (tl.load(record + column, mask=(nth >= 0) & (column < WIDTH), other=0),)
            scales += (tl.load(record + WIDTH + block, mask=(nth >= 0) & (block * CODE_BLOCK < WIDTH), other=0),)
        scale = scale_byte(tl.max(absolute(own), axis=3, keep_dims=True), WORD)
        own = encode(own, scale, CAST)
        total = tl.zeros(own.shape, dtype=tl.float32)
        for step in tl.static_range(NUM_RANKS):
            # Own rows when it is their turn; the order of two makes no difference.
            if step == (me if NUM_RANKS > 2 else 0):
                total += decode_fp32(own, scale, WORD, CAST)
            if step < NUM_RANKS - 1:
                total += decode_fp32(codes[step], scales[step], WORD, CAST)
        place = token.to(tl.int64) * WIDTH + column
        tl.store(out + place, total.to(out.dtype.element_ty), mask=(token < end) & (column < WIDTH))


@triton.jit
def _own_words(
    rows, slots, index, routes, token, column, me, num_tokens, end,
    DTYPE: tl.constexpr, NUM_RANKS: tl.constexpr, WIDTH: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """Words of own rows, or of the sums of their parts."""
    nth = _nth_row(index, routes, me, me, token, num_tokens, end, NUM_RANKS)
    row = (route_of(routes, me, me, 1, NUM_RANKS) + nth).to(tl.int64)
    if SLOTS > 0:
        total = sum_parts(rows, slots, row, nth >= 0, column, WIDTH, SLOTS).to(DTYPE)
        return total.to(tl.int16 if DTYPE == tl.bfloat16 else tl.int32, bitcast=True)
    else:
        return tl.load(rows + (row * WIDTH + column), mask=(nth >= 0) & (column < WIDTH), other=0)


@triton.jit
def _sum(
    rows, slots, arena, index, routes, out, first, me, num_tokens, end,
    NUM_RANKS: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, TILE: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """Sums of TILE tokens. Own rows stand where they were received, the others where they were sent from."""
    WIDE: tl.constexpr = tl.float64 if out.dtype.element_ty == tl.float64 else tl.float32  # pyright: ignore
    token = first + tl.arange(0, TILE)
    for start in tl.static_range(0, WIDTH, COLUMNS):
        column = (start + tl.arange(0, COLUMNS))[None, :]
        total = tl.zeros([TILE, COLUMNS], dtype=WIDE)
        if SLOTS > 0:
            # As what the others send: rounded.
            nth = _nth_row(index, routes, me, me, token, num_tokens, end, NUM_RANKS)
            row = (route_of(routes, me, me, 1, NUM_RANKS) + nth).to(tl.int64)
            own = sum_parts(rows, slots, row[:, None], (nth >= 0)[:, None], column, WIDTH, SLOTS)
            own = own.to(out.dtype.element_ty).to(WIDE)
        for rank in tl.static_range(NUM_RANKS):
            nth = _nth_row(index, routes, me, rank, token, num_tokens, end, NUM_RANKS)
            begin = tl.load(routes + tl.where(rank == me, 1, 2) * NUM_RANKS * NUM_RANKS + me * NUM_RANKS + rank)
            row = (begin + nth).to(tl.int64)[:, None]
            if SLOTS == 0:
                # Rows stand one behind the other.
                numbers = tl.multiple_of(tl.where(rank == me, rows.to(tl.int64), arena).to(out.dtype), 16)
                mask = (nth >= 0)[:, None] & (column < WIDTH)
                total += tl.load(numbers + (row * WIDTH + column), mask=mask, other=0.0).to(WIDE)
            else:
                comes = ((nth >= 0) & (rank != me))[:, None]
                numbers = tl.multiple_of(arena.to(out.dtype), 16)
                theirs = tl.load(numbers + (row * WIDTH + column), mask=comes & (column < WIDTH), other=0.0)
                total += tl.where(rank == me, own, theirs.to(WIDE))
        place = token.to(tl.int64)[:, None] * WIDTH + column
        tl.store(out + place, total.to(out.dtype.element_ty), mask=(token < end)[:, None] & (column < WIDTH))
