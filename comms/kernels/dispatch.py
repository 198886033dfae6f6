"""The kernel that sends rows straight into the memory of other ranks, and takes in what came, in one launch.

    put     tokens' rows, gathered by index, to the ranks that they go to
    take    own rows to their places at once, the others' pieces from the arena as they come

The first `num_put` programs of a launch put and the others take, so that a take runs beside the put and ends shortly
after the last piece has come. Programs start in order: those that put never find the multiprocessors full of those that
wait, and they wait for nothing but the credit of takes of an *earlier* exchange. A launch of one side alone is right
too: tests play several ranks one after another that way, all puts, then all takes. What pieces are says pieces.py, how
they are signalled flags.py, what routes are routes.py. The way back is combine.py, built alike.

A rank's own rows never enter its arena.

Shape suffixes: T tokens, N ranks, R rows received.
"""

# Kernels are written in Triton's language, which has no types.
# pyright: basic, reportGeneralTypeIssues=false, reportOperatorIssue=false
# ruff: noqa: ANN001, ANN201, ANN202

import triton
import triton.language as tl

from comms.kernels.flags import epoch_of, finish, ready_at, signal, wait, wait_for_room
from comms.kernels.pieces import (
    linger,
    load_side,
    move,
    move_coded,
    num_turns,
    part_of,
    records_at,
    route_of,
    rows_per_piece,
    store_side,
    words_at,
)


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
            if JITTER > 0:
                linger(program, turn + turns, JITTER)
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
        piece, begin, end = part_of(nth, per_piece, count, PART_ROWS)
        if (begin < end) | (nth == 0):
            word = ready_at(rank, piece, FLAGS_AT, NUM_RANKS, PIECES)
            wait(pointers, errors, me, rank, word, FAILED_AT, tag, epoch, limit, True, CLOCK)
            num_rows = end - begin
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
