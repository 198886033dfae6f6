"""Kernels that move rows straight into the memory of other ranks, and take in what came, in one launch each.

    dispatch    put: tokens' rows, gathered by index, to the ranks that they go to
                take: own rows to their places at once, the others' pieces from the arena as they come
    combine     put: received rows back to where they were sent from
                take: sum per token what came back, as soon as the pieces with its rows are there

The first `num_put` programs of a launch put and the others take, so that a take runs beside the put and ends shortly
after the last piece has come. Programs start in order: those that put never find the multiprocessors full of those that
wait, and they wait for nothing but the credit of takes of an *earlier* exchange. A launch of one side alone is right
too: tests play several ranks one after another that way, all puts, then all takes. What pieces are says pieces.py, how
they are signalled flags.py, what routes are routes.py.

A rank's own rows never enter its arena.

Shape suffixes: T tokens, N ranks, R rows received.
"""

# Kernels are written in Triton's language, which has no types.
# pyright: basic, reportGeneralTypeIssues=false, reportOperatorIssue=false
# ruff: noqa: ANN001, ANN201, ANN202

import triton
import triton.language as tl

from comms.kernels.flags import epoch_of, finish, ready_at, signal, wait, wait_for_room
from comms.kernels.parts import put_sums, sum_parts
from comms.kernels.pieces import (
    linger,
    load_coded,
    load_side,
    move,
    move_coded,
    num_turns,
    parts_per_piece,
    recode,
    records_at,
    route_of,
    rows_per_piece,
    store_side,
    words_at,
)

# ---- dispatch


@triton.jit(do_not_specialize=["me", "tag", "limit", "num_put", "num_tokens", "row_bound", "rows_at", "side_at"])
def dispatch_kernel(
    pointers, errors, state, rows, weights, ids, tokens, routes, totals, out_rows, out_weights, out_ids, out_base,
    me, tag, limit, num_put, num_tokens, row_bound, rows_at, side_at,
    FLAGS_AT: tl.constexpr, FAILED_AT: tl.constexpr, NUM_RANKS: tl.constexpr, RANKS: tl.constexpr,
    PIECES: tl.constexpr, PIECE_ROWS: tl.constexpr, LEAST_ROWS: tl.constexpr, PART_ROWS: tl.constexpr,
    WORDS: tl.constexpr, WEIGHT_WORDS: tl.constexpr, NUM_IDS: tl.constexpr,
    WIDTH: tl.constexpr, CODE_BLOCK: tl.constexpr, NUMBERS: tl.constexpr, VECTOR: tl.constexpr, CAST: tl.constexpr,
    BLOCK: tl.constexpr, SIDE_BLOCK: tl.constexpr, CLOCK: tl.constexpr, JITTER: tl.constexpr, FILL: tl.constexpr,
):  # fmt: skip
    """Every token's row and side words into its place at every rank that it goes to; of the chunk that routes are of.

    FILL: weights 0 and ids -1 go behind the last row.
    CODE_BLOCK > 0: rows travel as records (comms/kernels/codec.py), encoded as they are put and decoded as they are
    taken; own rows are both.
    out_base: number of the first of `out_rows`; None: 0.
    """
    if out_base is not None:
        out_rows += tl.load(out_base) * (WIDTH if CODE_BLOCK > 0 else WORDS)
    program, num_programs = tl.program_id(0), tl.num_programs(0)
    epoch = epoch_of(pointers, me, FLAGS_AT)
    if program < num_put:
        if NUM_RANKS > 1:
            _put_there(
                pointers, errors, rows, weights, ids, tokens, routes, program, num_put, epoch,
                me, tag, limit, num_tokens, rows_at, side_at,
                FLAGS_AT, FAILED_AT, NUM_RANKS, PIECES, PIECE_ROWS, LEAST_ROWS, WORDS, WEIGHT_WORDS, NUM_IDS,
                WIDTH, CODE_BLOCK, NUMBERS, VECTOR, CAST, BLOCK, SIDE_BLOCK, CLOCK, JITTER,
            )  # fmt: skip
    else:
        taker, takers = program - num_put, num_programs - num_put
        own_tokens = tokens + me * num_tokens + route_of(routes, me, me, 3, NUM_RANKS)
        own_count, own_first = route_of(routes, me, me, 0, NUM_RANKS), route_of(routes, me, me, 1, NUM_RANKS)
        # Each takes its share at once: what is coded is loaded ahead, which short parts would not let it be.
        share = tl.maximum(tl.cdiv(own_count, takers), PART_ROWS)
        begin = taker * share
        if begin < own_count:
            num_rows = tl.minimum(own_count - begin, share)
            place = (own_first + begin).to(tl.int64)
            if CODE_BLOCK > 0:
                move_coded(
                    rows, out_rows + place * WIDTH, own_tokens + begin, num_rows,
                    WIDTH, 4 * WORDS, CODE_BLOCK, NUMBERS, True, True, True, VECTOR, CAST,
                )  # fmt: skip
            else:
                move(rows, out_rows + place * WORDS, own_tokens + begin, num_rows, WORDS, 4, BLOCK, True)
            if NUM_IDS > 0:
                _own_side(
                    weights, ids, own_tokens + begin, num_rows, out_weights, out_ids, place,
                    WEIGHT_WORDS, NUM_IDS, SIDE_BLOCK,
                )  # fmt: skip
        if FILL:
            if NUM_IDS > 0:
                num_rows = tl.load(totals)
                _no_side(out_weights, out_ids, taker, takers, num_rows, row_bound, WEIGHT_WORDS, NUM_IDS, SIDE_BLOCK)
        if NUM_RANKS > 1:
            _take_there(
                pointers, errors, routes, out_rows, out_weights, out_ids, taker, takers, epoch,
                me, tag, limit, rows_at, side_at,
                FLAGS_AT, FAILED_AT, NUM_RANKS, PIECES, PIECE_ROWS, LEAST_ROWS, PART_ROWS, WORDS, WEIGHT_WORDS, NUM_IDS,
                WIDTH, CODE_BLOCK, NUMBERS, VECTOR, CAST, BLOCK, SIDE_BLOCK, CLOCK,
            )  # fmt: skip
    if num_put < num_programs:
        finish(pointers, state, me, tag, epoch, FLAGS_AT, NUM_RANKS, RANKS)


@triton.jit
def _put_there(
    pointers, errors, rows, weights, ids, tokens, routes, program, programs, epoch,
    me, tag, limit, num_tokens, rows_at, side_at,
    FLAGS_AT: tl.constexpr, FAILED_AT: tl.constexpr, NUM_RANKS: tl.constexpr,
    PIECES: tl.constexpr, PIECE_ROWS: tl.constexpr, LEAST_ROWS: tl.constexpr,
    WORDS: tl.constexpr, WEIGHT_WORDS: tl.constexpr, NUM_IDS: tl.constexpr,
    WIDTH: tl.constexpr, CODE_BLOCK: tl.constexpr, NUMBERS: tl.constexpr, VECTOR: tl.constexpr, CAST: tl.constexpr,
    BLOCK: tl.constexpr, SIDE_BLOCK: tl.constexpr, CLOCK: tl.constexpr, JITTER: tl.constexpr,
):  # fmt: skip
    """This program's turns of the put."""
    SIDE: tl.constexpr = WEIGHT_WORDS + NUM_IDS
    turns = num_turns(routes, me, True, NUM_RANKS, PIECE_ROWS, LEAST_ROWS, PIECES, 0)
    wait_for_room(pointers, errors, me, tag, epoch, limit, FLAGS_AT, FAILED_AT, NUM_RANKS, CLOCK)
    for turn in range(program, turns, programs):
        piece, rank = turn // (NUM_RANKS - 1), (me + 1 + turn % (NUM_RANKS - 1)) % NUM_RANKS
        count = route_of(routes, me, rank, 0, NUM_RANKS)
        per_piece = rows_per_piece(count, PIECE_ROWS, LEAST_ROWS, PIECES)
        begin = piece * per_piece
        # The first piece may be empty: whoever receives nothing learns it too.
        if (begin < count) | (piece == 0):
            if JITTER > 0:
                linger(program, turn, JITTER)
            num_rows = tl.minimum(count - begin, per_piece)
            place = (route_of(routes, me, rank, 1, NUM_RANKS) + begin).to(tl.int64)
            base = tl.load(pointers + rank)
            ours = tokens + rank * num_tokens + route_of(routes, me, rank, 3, NUM_RANKS) + begin
            if CODE_BLOCK > 0:
                move_coded(
                    rows, records_at(base + rows_at) + place * (4 * WORDS), ours, num_rows,
                    WIDTH, 4 * WORDS, CODE_BLOCK, NUMBERS, True, True, False, VECTOR, CAST,
                )  # fmt: skip
            else:
                move(rows, words_at(base + rows_at) + place * WORDS, ours, num_rows, WORDS, 4, BLOCK, True)
            if NUM_IDS > 0:
                target = (base + side_at).to(tl.pointer_type(tl.int32)) + place * SIDE
                for start in range(0, num_rows * SIDE, SIDE_BLOCK):
                    at = start + tl.arange(0, SIDE_BLOCK)
                    inside = at < num_rows * SIDE
                    token = tl.load(ours + at // SIDE, mask=inside, other=0).to(tl.int64)
                    words = load_side(weights, ids, token, at % SIDE, inside, WEIGHT_WORDS, NUM_IDS)
                    tl.store(target + at, words, mask=inside)
            signal(pointers, rank, ready_at(me, piece, FLAGS_AT, NUM_RANKS, PIECES), epoch * 65536 + tag)


@triton.jit
def _own_side(
    weights, ids, tokens, num_rows, out_weights, out_ids, place,
    WEIGHT_WORDS: tl.constexpr, NUM_IDS: tl.constexpr, SIDE_BLOCK: tl.constexpr,
):  # fmt: skip
    """Side words of own rows that stay here."""
    SIDE: tl.constexpr = WEIGHT_WORDS + NUM_IDS
    for start in range(0, num_rows * SIDE, SIDE_BLOCK):
        at = start + tl.arange(0, SIDE_BLOCK)
        inside = at < num_rows * SIDE
        token = tl.load(tokens + at // SIDE, mask=inside, other=0).to(tl.int64)
        words = load_side(weights, ids, token, at % SIDE, inside, WEIGHT_WORDS, NUM_IDS)
        store_side(out_weights, out_ids, place + at // SIDE, at % SIDE, words, inside, WEIGHT_WORDS, NUM_IDS)


@triton.jit
def _no_side(
    out_weights, out_ids, taker, takers, num_rows, row_bound,
    WEIGHT_WORDS: tl.constexpr, NUM_IDS: tl.constexpr, SIDE_BLOCK: tl.constexpr,
):  # fmt: skip
    """Places behind the last row: weights 0, ids -1."""
    SIDE: tl.constexpr = WEIGHT_WORDS + NUM_IDS
    for start in range(taker * SIDE_BLOCK, (row_bound - num_rows) * SIDE, takers * SIDE_BLOCK):
        at = start + tl.arange(0, SIDE_BLOCK)
        words = tl.where(at % SIDE < WEIGHT_WORDS, 0, -1)
        row = (num_rows + at // SIDE).to(tl.int64)
        store_side(out_weights, out_ids, row, at % SIDE, words, row < row_bound, WEIGHT_WORDS, NUM_IDS)


@triton.jit
def _take_there(
    pointers, errors, routes, out_rows, out_weights, out_ids, taker, takers, epoch,
    me, tag, limit, rows_at, side_at,
    FLAGS_AT: tl.constexpr, FAILED_AT: tl.constexpr, NUM_RANKS: tl.constexpr,
    PIECES: tl.constexpr, PIECE_ROWS: tl.constexpr, LEAST_ROWS: tl.constexpr, PART_ROWS: tl.constexpr,
    WORDS: tl.constexpr, WEIGHT_WORDS: tl.constexpr, NUM_IDS: tl.constexpr,
    WIDTH: tl.constexpr, CODE_BLOCK: tl.constexpr, NUMBERS: tl.constexpr, VECTOR: tl.constexpr, CAST: tl.constexpr,
    BLOCK: tl.constexpr, SIDE_BLOCK: tl.constexpr, CLOCK: tl.constexpr,
):  # fmt: skip
    """This program's turns of the take: each waits for one piece and copies a part of it out of the arena."""
    SIDE: tl.constexpr = WEIGHT_WORDS + NUM_IDS
    base = tl.load(pointers + me)
    turns = num_turns(routes, me, False, NUM_RANKS, PIECE_ROWS, LEAST_ROWS, PIECES, PART_ROWS)
    for turn in range(taker, turns, takers):
        # Whoever has me as the n-th neighbour comes n-th.
        nth, rank = turn // (NUM_RANKS - 1), (me + NUM_RANKS - 1 - turn % (NUM_RANKS - 1)) % NUM_RANKS
        count = route_of(routes, rank, me, 0, NUM_RANKS)
        per_piece = rows_per_piece(count, PIECE_ROWS, LEAST_ROWS, PIECES)
        parts = parts_per_piece(per_piece, PART_ROWS)
        piece = nth // parts
        begin = piece * per_piece + nth % parts * PART_ROWS
        end = tl.minimum((piece + 1) * per_piece, count)
        if (begin < end) | (nth == 0):
            word = ready_at(rank, piece, FLAGS_AT, NUM_RANKS, PIECES)
            wait(pointers, errors, me, rank, word, FAILED_AT, tag, epoch, limit, True, CLOCK)
            num_rows = tl.minimum(end - begin, PART_ROWS)
            place = (route_of(routes, rank, me, 1, NUM_RANKS) + begin).to(tl.int64)
            if CODE_BLOCK > 0:
                move_coded(
                    records_at(base + rows_at) + place * (4 * WORDS), out_rows + place * WIDTH, routes, num_rows,
                    WIDTH, 4 * WORDS, CODE_BLOCK, NUMBERS, False, False, True, VECTOR, CAST,
                )  # fmt: skip
            else:
                source = words_at(base + rows_at) + place * WORDS
                move(source, out_rows + place * WORDS, routes, num_rows, WORDS, 4, BLOCK, False)
            if NUM_IDS > 0:
                side = (base + side_at).to(tl.pointer_type(tl.int32)) + place * SIDE
                for start in range(0, num_rows * SIDE, SIDE_BLOCK):
                    at = start + tl.arange(0, SIDE_BLOCK)
                    inside = at < num_rows * SIDE
                    words = tl.load(side + at, mask=inside)
                    row = place + at // SIDE
                    store_side(out_weights, out_ids, row, at % SIDE, words, inside, WEIGHT_WORDS, NUM_IDS)


# ---- combine


@triton.jit(do_not_specialize=["me", "tag", "limit", "num_put", "num_tokens", "begin", "end", "rows_at", "side_at"])
def combine_kernel(
    pointers, errors, state, rows, slots, slots_base, side, index, routes, out, out_side,
    me, tag, limit, num_put, num_tokens, begin, end, rows_at, side_at,
    FLAGS_AT: tl.constexpr, FAILED_AT: tl.constexpr, NUM_RANKS: tl.constexpr, RANKS: tl.constexpr,
    PIECES: tl.constexpr, PIECE_ROWS: tl.constexpr, LEAST_ROWS: tl.constexpr,
    WORDS: tl.constexpr, SIDE_WORDS: tl.constexpr, SIDE_UNIT: tl.constexpr,
    WIDTH: tl.constexpr, COLUMNS: tl.constexpr, SIDE_WIDTH: tl.constexpr, SIDE_COLUMNS: tl.constexpr,
    CODE_BLOCK: tl.constexpr, NUMBERS: tl.constexpr, VECTOR: tl.constexpr, CAST: tl.constexpr,
    TOKENS: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
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
                _sum(
                    rows, slots, arena + rows_at, index, routes, out, tile, me, num_tokens, end,
                    NUM_RANKS, WIDTH, COLUMNS, 4 * WORDS, CODE_BLOCK, CAST, TILE, SLOTS,
                )  # fmt: skip
                if SIDE_WORDS > 0:
                    _sum(
                        side, slots, arena + side_at, index, routes, out_side, tile, me, num_tokens, end,
                        NUM_RANKS, SIDE_WIDTH, SIDE_COLUMNS, 4 * SIDE_WORDS, 0, False, TILE, 0,
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
def _sum(
    rows, slots, arena, index, routes, out, first, me, num_tokens, end,
    NUM_RANKS: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, ROW_BYTES: tl.constexpr,
    CODE_BLOCK: tl.constexpr, CAST: tl.constexpr, TILE: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """Sums of TILE tokens. Own rows stand where they were received, the others where they were sent from."""
    WIDE: tl.constexpr = tl.float64 if out.dtype.element_ty == tl.float64 else tl.float32  # pyright: ignore
    token = first + tl.arange(0, TILE)
    for start in tl.static_range(0, WIDTH, COLUMNS):
        column = (start + tl.arange(0, COLUMNS))[None, :]
        total = tl.zeros([TILE, COLUMNS], dtype=WIDE)
        if (SLOTS > 0) | (CODE_BLOCK > 0):
            # As what the others send: rounded, and coded.
            nth = _nth_row(index, routes, me, me, token, num_tokens, end, NUM_RANKS)
            row = (route_of(routes, me, me, 1, NUM_RANKS) + nth).to(tl.int64)
            if SLOTS > 0:
                own = sum_parts(rows, slots, row, nth >= 0, column, WIDTH, SLOTS).to(out.dtype.element_ty)
            else:
                own = tl.load(
                    rows + (row[:, None] * WIDTH + column), mask=(nth >= 0)[:, None] & (column < WIDTH), other=0
                )
            if CODE_BLOCK > 0:
                own = recode(own, out, COLUMNS, CODE_BLOCK, TILE, CAST)
            own = own.to(WIDE)
        for rank in tl.static_range(NUM_RANKS):
            nth = _nth_row(index, routes, me, rank, token, num_tokens, end, NUM_RANKS)
            begin = tl.load(routes + tl.where(rank == me, 1, 2) * NUM_RANKS * NUM_RANKS + me * NUM_RANKS + rank)
            row = (begin + nth).to(tl.int64)[:, None]
            if (SLOTS == 0) & (CODE_BLOCK == 0):
                # Rows stand one behind the other.
                numbers = tl.multiple_of(tl.where(rank == me, rows.to(tl.int64), arena).to(out.dtype), 16)
                mask = (nth >= 0)[:, None] & (column < WIDTH)
                total += tl.load(numbers + (row * WIDTH + column), mask=mask, other=0.0).to(WIDE)
            else:
                comes = ((nth >= 0) & (rank != me))[:, None]
                if CODE_BLOCK > 0:
                    records = records_at(arena) + row * ROW_BYTES
                    theirs = load_coded(records, start, column, comes, out, WIDTH, COLUMNS, CODE_BLOCK, TILE, CAST)
                else:
                    numbers = tl.multiple_of(arena.to(out.dtype), 16)
                    theirs = tl.load(numbers + (row * WIDTH + column), mask=comes & (column < WIDTH), other=0.0)
                total += tl.where(rank == me, own, theirs.to(WIDE))
        place = token.to(tl.int64)[:, None] * WIDTH + column
        tl.store(out + place, total.to(out.dtype.element_ty), mask=(token < end)[:, None] & (column < WIDTH))
