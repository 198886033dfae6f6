"""Kernels that move rows straight into the memory of other ranks, and take in what came, in one launch each.

    dispatch    put: tokens' rows, gathered by index, to the ranks that they go to
                take: own rows to their places at once, the others' pieces from the arena as they come
    combine     put: received rows back to where they were sent from
                take: sum per token what came back, as soon as the pieces with its rows are there

The first `num_put` programs of a launch put and the others take, so that a take runs beside the put and ends shortly
after the last piece has come. Programs start in order: those that put never find the multiprocessors full of those that
wait, and they wait for nothing but the credit of takes of an *earlier* exchange. A launch of one side alone is right
too: tests play several ranks one after another that way, all puts, then all takes. How pieces are signalled says
flags.py, what routes are routes.py.

Pieces go out in turns, the first one to every rank (the next neighbour first), then the second one to every rank; a
take looks for them in the order in which they come. Turns are dealt over programs. A rank's own rows never enter its
arena.

Moves are of 16 bytes per thread and several of them at a time, over the flat words of a piece: rows of a piece lie one
behind the other at the receiver, and only the source is gathered.

Shape suffixes: T tokens, N ranks, R rows received.
"""

# Kernels are written in Triton's language, which has no types.
# pyright: basic, reportGeneralTypeIssues=false, reportOperatorIssue=false
# ruff: noqa: ANN001, ANN201, ANN202

import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer

from comms.kernels.e4m3 import decode
from comms.kernels.flags import epoch_of, finish, ready_at, signal, wait, wait_for_room

# ---- pieces


@triton.jit
def _route(routes, sender, receiver, PART: tl.constexpr, NUM_RANKS: tl.constexpr):
    """Number of rows (part 0), place at the receiver (1), place at the sender (2)."""
    return tl.load(routes + PART * NUM_RANKS * NUM_RANKS + sender * NUM_RANKS + receiver)


@triton.jit
def _rows_per_piece(count, PIECE_ROWS: tl.constexpr, PIECES: tl.constexpr):
    """Rows of each piece but the last one, where so many go from one rank to another: more, if pieces would be many."""
    return tl.maximum(tl.cdiv(count, PIECES), PIECE_ROWS)


@triton.jit
def _num_turns(
    routes, me, FROM_ME: tl.constexpr, NUM_RANKS: tl.constexpr, PIECE_ROWS: tl.constexpr, PIECES: tl.constexpr
):
    """Turns with all other ranks: over the routes that begin here, or those that end here."""
    most = 1
    for rank in range(NUM_RANKS):
        if FROM_ME:
            count = _route(routes, me, rank, 0, NUM_RANKS)
        else:
            count = _route(routes, rank, me, 0, NUM_RANKS)
        pieces = tl.cdiv(count, _rows_per_piece(count, PIECE_ROWS, PIECES))
        most = tl.maximum(most, tl.where(rank == me, 1, pieces))
    return most * (NUM_RANKS - 1)


@triton.jit
def _linger(program, turn, JITTER: tl.constexpr):
    """Tests only: up to JITTER nanoseconds, as program, turn and clock have it."""
    start = globaltimer()
    chosen = ((start >> 5) + program * 7919 + turn * 104729) % JITTER
    while globaltimer() - start < chosen:
        pass


# ---- moves of one piece


@triton.jit
def _words_at(address):
    """int32 pointer from an address of rows, which are aligned to 16 bytes: so they can be moved 16 bytes at a time."""
    return tl.multiple_of(address.to(tl.pointer_type(tl.int32)), 16)


@triton.jit
def _move(
    source, target, tokens, num_rows,
    WORDS: tl.constexpr, UNIT: tl.constexpr, BLOCK: tl.constexpr, GATHER: tl.constexpr,
):  # fmt: skip
    """Rows of WORDS words, one behind the other or (GATHER) those of `tokens`; a thread moves UNIT words at a time."""
    PER_ROW: tl.constexpr = WORDS // UNIT
    word = tl.arange(0, UNIT)[None, :]
    for start in range(0, num_rows * PER_ROW, BLOCK):
        unit = start + tl.arange(0, BLOCK)
        inside = unit < num_rows * PER_ROW
        at = unit * UNIT
        if GATHER:
            token = tl.load(tokens + unit // PER_ROW, mask=inside, other=0).to(tl.int64)
            origin = token * WORDS + unit % PER_ROW * UNIT
        else:
            origin = at
        words = tl.load(source + (origin[:, None] + word), mask=inside[:, None])
        tl.store(target + (at[:, None] + word), words, mask=inside[:, None])


@triton.jit
def _move_decoded(
    source, target, tokens, num_rows,
    WIDTH: tl.constexpr, RECORD: tl.constexpr, CODE_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr, GATHER: tl.constexpr, CAST: tl.constexpr,
):  # fmt: skip
    """Records (comms/kernels/codec.py) to rows; BLOCK blocks of codes at a time."""
    PER_ROW: tl.constexpr = (WIDTH + CODE_BLOCK - 1) // CODE_BLOCK
    source = tl.multiple_of(source.to(tl.pointer_type(tl.uint8)), 16)
    element = tl.arange(0, CODE_BLOCK)[None, :]
    for start in range(0, num_rows * PER_ROW, BLOCK):
        block = start + tl.arange(0, BLOCK)
        inside = block < num_rows * PER_ROW
        nth, of_row = (block // PER_ROW).to(tl.int64), block % PER_ROW
        row = nth
        if GATHER:
            row = tl.load(tokens + nth, mask=inside, other=0).to(tl.int64)
        scale = tl.load(source + row * RECORD + WIDTH + of_row, mask=inside, other=0)
        column = (of_row * CODE_BLOCK)[:, None] + element
        mask = inside[:, None] & (column < WIDTH)
        code = tl.load(source + ((row * RECORD)[:, None] + column), mask=mask, other=0)
        words = decode(code, scale[:, None], target.dtype.element_ty, CAST)
        tl.store(target + ((nth * WIDTH)[:, None] + column), words, mask=mask)


@triton.jit
def _load_side(weights, ids, token, column, mask, WEIGHT_WORDS: tl.constexpr, NUM_IDS: tl.constexpr):
    """Side words of tokens as they travel: words of their weights, then ids of 32 bits."""
    is_weight = column < WEIGHT_WORDS
    weight = tl.load(weights + token * WEIGHT_WORDS + column, mask=mask & is_weight, other=0)
    id = tl.load(ids + token * NUM_IDS + (column - WEIGHT_WORDS), mask=mask & (column >= WEIGHT_WORDS), other=0)
    return tl.where(is_weight, weight, id.to(tl.int32))


@triton.jit
def _store_side(weights, ids, row, column, words, mask, WEIGHT_WORDS: tl.constexpr, NUM_IDS: tl.constexpr):
    tl.store(weights + row * WEIGHT_WORDS + column, words, mask=mask & (column < WEIGHT_WORDS))
    place = ids + row * NUM_IDS + (column - WEIGHT_WORDS)
    tl.store(place, words.to(ids.dtype.element_ty), mask=mask & (column >= WEIGHT_WORDS))


# ---- dispatch


@triton.jit(do_not_specialize=["me", "tag", "limit", "num_put", "num_tokens", "row_bound", "rows_at", "side_at"])
def dispatch_kernel(
    pointers, errors, state, rows, weights, ids, tokens, routes, totals, out_rows, out_weights, out_ids,
    me, tag, limit, num_put, num_tokens, row_bound, rows_at, side_at,
    FLAGS_AT: tl.constexpr, FAILED_AT: tl.constexpr, NUM_RANKS: tl.constexpr, RANKS: tl.constexpr,
    PIECES: tl.constexpr, PIECE_ROWS: tl.constexpr,
    WORDS: tl.constexpr, WEIGHT_WORDS: tl.constexpr, NUM_IDS: tl.constexpr,
    WIDTH: tl.constexpr, CODE_BLOCK: tl.constexpr, CAST: tl.constexpr,
    BLOCK: tl.constexpr, SIDE_BLOCK: tl.constexpr, CLOCK: tl.constexpr, JITTER: tl.constexpr,
):  # fmt: skip
    """Every token's row and side words into its place at every rank that it goes to; CODE_BLOCK > 0: as records."""
    program, num_programs = tl.program_id(0), tl.num_programs(0)
    epoch = epoch_of(pointers, me, FLAGS_AT)
    if program < num_put:
        if NUM_RANKS > 1:
            _put_there(
                pointers, errors, rows, weights, ids, tokens, routes, program, num_put, epoch,
                me, tag, limit, num_tokens, rows_at, side_at,
                FLAGS_AT, FAILED_AT, NUM_RANKS, PIECES, PIECE_ROWS, WORDS, WEIGHT_WORDS, NUM_IDS,
                BLOCK, SIDE_BLOCK, CLOCK, JITTER,
            )  # fmt: skip
    else:
        taker, takers = program - num_put, num_programs - num_put
        own_tokens = tokens + me * num_tokens
        own_count, own_first = _route(routes, me, me, 0, NUM_RANKS), _route(routes, me, me, 1, NUM_RANKS)
        for begin in range(taker * PIECE_ROWS, own_count, takers * PIECE_ROWS):
            num_rows = tl.minimum(own_count - begin, PIECE_ROWS)
            place = (own_first + begin).to(tl.int64)
            if CODE_BLOCK > 0:
                _move_decoded(
                    rows, out_rows + place * WIDTH, own_tokens + begin, num_rows,
                    WIDTH, 4 * WORDS, CODE_BLOCK, BLOCK * 16 // CODE_BLOCK, True, CAST,
                )  # fmt: skip
            else:
                _move(rows, out_rows + place * WORDS, own_tokens + begin, num_rows, WORDS, 4, BLOCK, True)
            if NUM_IDS > 0:
                _own_side(
                    weights, ids, own_tokens + begin, num_rows, out_weights, out_ids, place,
                    WEIGHT_WORDS, NUM_IDS, SIDE_BLOCK,
                )  # fmt: skip
        if NUM_IDS > 0:
            _no_side(out_weights, out_ids, taker, takers, tl.load(totals), row_bound, WEIGHT_WORDS, NUM_IDS, SIDE_BLOCK)
        if NUM_RANKS > 1:
            _take_there(
                pointers, errors, routes, out_rows, out_weights, out_ids, taker, takers, epoch,
                me, tag, limit, rows_at, side_at,
                FLAGS_AT, FAILED_AT, NUM_RANKS, PIECES, PIECE_ROWS, WORDS, WEIGHT_WORDS, NUM_IDS,
                WIDTH, CODE_BLOCK, CAST, BLOCK, SIDE_BLOCK, CLOCK,
            )  # fmt: skip
    if num_put < num_programs:
        finish(pointers, state, me, tag, epoch, FLAGS_AT, NUM_RANKS, RANKS)


@triton.jit
def _put_there(
    pointers, errors, rows, weights, ids, tokens, routes, program, programs, epoch,
    me, tag, limit, num_tokens, rows_at, side_at,
    FLAGS_AT: tl.constexpr, FAILED_AT: tl.constexpr, NUM_RANKS: tl.constexpr,
    PIECES: tl.constexpr, PIECE_ROWS: tl.constexpr,
    WORDS: tl.constexpr, WEIGHT_WORDS: tl.constexpr, NUM_IDS: tl.constexpr,
    BLOCK: tl.constexpr, SIDE_BLOCK: tl.constexpr, CLOCK: tl.constexpr, JITTER: tl.constexpr,
):  # fmt: skip
    """This program's turns of the put."""
    SIDE: tl.constexpr = WEIGHT_WORDS + NUM_IDS
    wait_for_room(pointers, errors, me, tag, epoch, limit, FLAGS_AT, FAILED_AT, NUM_RANKS, CLOCK)
    for turn in range(program, _num_turns(routes, me, True, NUM_RANKS, PIECE_ROWS, PIECES), programs):
        piece, rank = turn // (NUM_RANKS - 1), (me + 1 + turn % (NUM_RANKS - 1)) % NUM_RANKS
        count = _route(routes, me, rank, 0, NUM_RANKS)
        per_piece = _rows_per_piece(count, PIECE_ROWS, PIECES)
        begin = piece * per_piece
        # The first piece may be empty: whoever receives nothing learns it too.
        if (begin < count) | (piece == 0):
            if JITTER > 0:
                _linger(program, turn, JITTER)
            num_rows = tl.minimum(count - begin, per_piece)
            place = (_route(routes, me, rank, 1, NUM_RANKS) + begin).to(tl.int64)
            base, ours = tl.load(pointers + rank), tokens + rank * num_tokens + begin
            _move(rows, _words_at(base + rows_at) + place * WORDS, ours, num_rows, WORDS, 4, BLOCK, True)
            if NUM_IDS > 0:
                target = (base + side_at).to(tl.pointer_type(tl.int32)) + place * SIDE
                for start in range(0, num_rows * SIDE, SIDE_BLOCK):
                    at = start + tl.arange(0, SIDE_BLOCK)
                    inside = at < num_rows * SIDE
                    token = tl.load(ours + at // SIDE, mask=inside, other=0).to(tl.int64)
                    words = _load_side(weights, ids, token, at % SIDE, inside, WEIGHT_WORDS, NUM_IDS)
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
        words = _load_side(weights, ids, token, at % SIDE, inside, WEIGHT_WORDS, NUM_IDS)
        _store_side(out_weights, out_ids, place + at // SIDE, at % SIDE, words, inside, WEIGHT_WORDS, NUM_IDS)


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
        _store_side(out_weights, out_ids, row, at % SIDE, words, row < row_bound, WEIGHT_WORDS, NUM_IDS)


@triton.jit
def _take_there(
    pointers, errors, routes, out_rows, out_weights, out_ids, taker, takers, epoch,
    me, tag, limit, rows_at, side_at,
    FLAGS_AT: tl.constexpr, FAILED_AT: tl.constexpr, NUM_RANKS: tl.constexpr,
    PIECES: tl.constexpr, PIECE_ROWS: tl.constexpr,
    WORDS: tl.constexpr, WEIGHT_WORDS: tl.constexpr, NUM_IDS: tl.constexpr,
    WIDTH: tl.constexpr, CODE_BLOCK: tl.constexpr, CAST: tl.constexpr,
    BLOCK: tl.constexpr, SIDE_BLOCK: tl.constexpr, CLOCK: tl.constexpr,
):  # fmt: skip
    """This program's turns of the take: each waits for one piece and copies it out of the arena."""
    SIDE: tl.constexpr = WEIGHT_WORDS + NUM_IDS
    base = tl.load(pointers + me)
    for turn in range(taker, _num_turns(routes, me, False, NUM_RANKS, PIECE_ROWS, PIECES), takers):
        # Whoever has me as the n-th neighbour comes n-th.
        piece, rank = turn // (NUM_RANKS - 1), (me + NUM_RANKS - 1 - turn % (NUM_RANKS - 1)) % NUM_RANKS
        count = _route(routes, rank, me, 0, NUM_RANKS)
        per_piece = _rows_per_piece(count, PIECE_ROWS, PIECES)
        begin = piece * per_piece
        if (begin < count) | (piece == 0):
            word = ready_at(rank, piece, FLAGS_AT, NUM_RANKS, PIECES)
            wait(pointers, errors, me, rank, word, FAILED_AT, tag, epoch, limit, True, CLOCK)
            num_rows = tl.minimum(count - begin, per_piece)
            place = (_route(routes, rank, me, 1, NUM_RANKS) + begin).to(tl.int64)
            source = _words_at(base + rows_at) + place * WORDS
            if CODE_BLOCK > 0:
                _move_decoded(
                    source, out_rows + place * WIDTH, routes, num_rows,
                    WIDTH, 4 * WORDS, CODE_BLOCK, BLOCK * 16 // CODE_BLOCK, False, CAST,
                )  # fmt: skip
            else:
                _move(source, out_rows + place * WORDS, routes, num_rows, WORDS, 4, BLOCK, False)
            if NUM_IDS > 0:
                side = (base + side_at).to(tl.pointer_type(tl.int32)) + place * SIDE
                for start in range(0, num_rows * SIDE, SIDE_BLOCK):
                    at = start + tl.arange(0, SIDE_BLOCK)
                    inside = at < num_rows * SIDE
                    words = tl.load(side + at, mask=inside)
                    row = place + at // SIDE
                    _store_side(out_weights, out_ids, row, at % SIDE, words, inside, WEIGHT_WORDS, NUM_IDS)


# ---- combine


@triton.jit(do_not_specialize=["me", "tag", "limit", "num_put", "num_tokens", "rows_at", "side_at"])
def combine_kernel(
    pointers, errors, state, rows, side, index, routes, out, out_side,
    me, tag, limit, num_put, num_tokens, rows_at, side_at,
    FLAGS_AT: tl.constexpr, FAILED_AT: tl.constexpr, NUM_RANKS: tl.constexpr, RANKS: tl.constexpr,
    PIECES: tl.constexpr, PIECE_ROWS: tl.constexpr,
    WORDS: tl.constexpr, SIDE_WORDS: tl.constexpr, SIDE_UNIT: tl.constexpr,
    WIDTH: tl.constexpr, COLUMNS: tl.constexpr, SIDE_WIDTH: tl.constexpr, SIDE_COLUMNS: tl.constexpr,
    CODE_BLOCK: tl.constexpr, TOKENS: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
    CLOCK: tl.constexpr, JITTER: tl.constexpr,
):  # fmt: skip
    """out[t] = the sum of what comes back for token t, by ascending rank; this rank's own part is read from `rows`."""
    program, num_programs = tl.program_id(0), tl.num_programs(0)
    epoch = epoch_of(pointers, me, FLAGS_AT)
    if program < num_put:
        if NUM_RANKS > 1:
            _put_back(
                pointers, errors, rows, side, routes, program, num_put, epoch, me, tag, limit, rows_at, side_at,
                FLAGS_AT, FAILED_AT, NUM_RANKS, PIECES, PIECE_ROWS, WORDS, SIDE_WORDS, SIDE_UNIT, BLOCK, CLOCK, JITTER,
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
        for first in range(taker * TOKENS, num_tokens, takers * TOKENS):
            _wait_for_tokens(
                pointers, errors, index, routes, first, epoch, me, tag, limit, num_tokens,
                FLAGS_AT, FAILED_AT, NUM_RANKS, PIECES, PIECE_ROWS, TOKENS, CLOCK,
            )  # fmt: skip
            for tile in range(first, tl.minimum(first + TOKENS, num_tokens), TILE):
                _sum(
                    rows, arena + rows_at, index, routes, out, tile, me, num_tokens,
                    NUM_RANKS, WIDTH, COLUMNS, 4 * WORDS, CODE_BLOCK, TILE,
                )  # fmt: skip
                if SIDE_WORDS > 0:
                    _sum(
                        side, arena + side_at, index, routes, out_side, tile, me, num_tokens,
                        NUM_RANKS, SIDE_WIDTH, SIDE_COLUMNS, 4 * SIDE_WORDS, 0, TILE,
                    )  # fmt: skip
    if num_put < num_programs:
        finish(pointers, state, me, tag, epoch, FLAGS_AT, NUM_RANKS, RANKS)


@triton.jit
def _put_back(
    pointers, errors, rows, side, routes, program, programs, epoch, me, tag, limit, rows_at, side_at,
    FLAGS_AT: tl.constexpr, FAILED_AT: tl.constexpr, NUM_RANKS: tl.constexpr,
    PIECES: tl.constexpr, PIECE_ROWS: tl.constexpr,
    WORDS: tl.constexpr, SIDE_WORDS: tl.constexpr, SIDE_UNIT: tl.constexpr,
    BLOCK: tl.constexpr, CLOCK: tl.constexpr, JITTER: tl.constexpr,
):  # fmt: skip
    """This program's turns: each received row (or what became of it) to its place among those that its sender sent."""
    wait_for_room(pointers, errors, me, tag, epoch, limit, FLAGS_AT, FAILED_AT, NUM_RANKS, CLOCK)
    for turn in range(program, _num_turns(routes, me, False, NUM_RANKS, PIECE_ROWS, PIECES), programs):
        piece, rank = turn // (NUM_RANKS - 1), (me + 1 + turn % (NUM_RANKS - 1)) % NUM_RANKS
        count = _route(routes, rank, me, 0, NUM_RANKS)
        per_piece = _rows_per_piece(count, PIECE_ROWS, PIECES)
        begin = piece * per_piece
        if (begin < count) | (piece == 0):
            if JITTER > 0:
                _linger(program, turn, JITTER)
            num_rows = tl.minimum(count - begin, per_piece)
            row = (_route(routes, rank, me, 1, NUM_RANKS) + begin).to(tl.int64)
            place = (_route(routes, rank, me, 2, NUM_RANKS) + begin).to(tl.int64)
            base = tl.load(pointers + rank)
            target = _words_at(base + rows_at) + place * WORDS
            _move(rows + row * WORDS, target, routes, num_rows, WORDS, 4, BLOCK, False)
            if SIDE_WORDS > 0:
                target = (base + side_at).to(tl.pointer_type(tl.int32)) + place * SIDE_WORDS
                _move(side + row * SIDE_WORDS, target, routes, num_rows, SIDE_WORDS, SIDE_UNIT, BLOCK, False)
            signal(pointers, rank, ready_at(me, piece, FLAGS_AT, NUM_RANKS, PIECES), epoch * 65536 + tag)


@triton.jit
def _nth_row(index, routes, me, rank, token, num_tokens, NUM_RANKS: tl.constexpr):
    """Numbers of tokens' rows among those that went to `rank`; -1 for none, or if there was no room for it."""
    nth = tl.load(index + rank * num_tokens + token, mask=token < num_tokens, other=-1)
    return tl.where(nth < _route(routes, me, rank, 0, NUM_RANKS), nth, -1)


@triton.jit
def _wait_for_tokens(
    pointers, errors, index, routes, first, epoch, me, tag, limit, num_tokens,
    FLAGS_AT: tl.constexpr, FAILED_AT: tl.constexpr, NUM_RANKS: tl.constexpr,
    PIECES: tl.constexpr, PIECE_ROWS: tl.constexpr, TOKENS: tl.constexpr, CLOCK: tl.constexpr,
):  # fmt: skip
    """Until every piece with a row of these tokens has come back. Rows come back in the order of tokens."""
    token = first + tl.arange(0, TOKENS)
    for step in range(NUM_RANKS - 1):
        rank = (me + 1 + step) % NUM_RANKS
        nth = _nth_row(index, routes, me, rank, token, num_tokens, NUM_RANKS)
        last = tl.max(nth, axis=0)
        if last >= 0:
            earliest = tl.min(tl.where(nth >= 0, nth, last), axis=0)
            per_piece = _rows_per_piece(_route(routes, me, rank, 0, NUM_RANKS), PIECE_ROWS, PIECES)
            for piece in range(earliest // per_piece, last // per_piece + 1):
                word = ready_at(rank, piece, FLAGS_AT, NUM_RANKS, PIECES)
                wait(pointers, errors, me, rank, word, FAILED_AT, tag, epoch, limit, True, CLOCK)


@triton.jit
def _sum(
    rows, arena, index, routes, out, first, me, num_tokens,
    NUM_RANKS: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, ROW_BYTES: tl.constexpr,
    CODE_BLOCK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Sums of TILE tokens. Own rows stand where they were received, the others where they were sent from."""
    WIDE: tl.constexpr = tl.float64 if out.dtype.element_ty == tl.float64 else tl.float32
    token = first + tl.arange(0, TILE)
    for start in tl.static_range(0, WIDTH, COLUMNS):
        column = (start + tl.arange(0, COLUMNS))[None, :]
        total = tl.zeros([TILE, COLUMNS], dtype=WIDE)
        for rank in tl.static_range(NUM_RANKS):
            nth = _nth_row(index, routes, me, rank, token, num_tokens, NUM_RANKS)
            begin = tl.load(routes + tl.where(rank == me, 1, 2) * NUM_RANKS * NUM_RANKS + me * NUM_RANKS + rank)
            base = tl.where(rank == me, rows.to(tl.int64), arena)
            mask = (nth >= 0)[:, None] & (column < WIDTH)
            total += _load_rows(base, (begin + nth)[:, None], column, mask, out, WIDTH, ROW_BYTES, CODE_BLOCK, WIDE)
        place = token.to(tl.int64)[:, None] * WIDTH + column
        tl.store(out + place, total.to(out.dtype.element_ty), mask=(token < num_tokens)[:, None] & (column < WIDTH))


@triton.jit
def _load_rows(
    base, row, column, mask, like,
    WIDTH: tl.constexpr, ROW_BYTES: tl.constexpr, CODE_BLOCK: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Rows' numbers, 0 where the mask is not; CODE_BLOCK > 0: from records (comms/kernels/codec.py)."""
    row = row.to(tl.int64)
    if CODE_BLOCK == 0:
        numbers = tl.multiple_of(base.to(like.dtype), 16)
        # Rows stand one behind the other.
        return tl.load(numbers + (row * WIDTH + column), mask=mask, other=0.0).to(WIDE)
    else:
        records = tl.multiple_of(base.to(tl.pointer_type(tl.uint8)), 16)
        code = tl.load(records + (row * ROW_BYTES + column), mask=mask, other=0).to(tl.int32)
        scale = tl.load(records + (row * ROW_BYTES + WIDTH + column // CODE_BLOCK), mask=mask, other=0).to(tl.int32)
        # By integers, which every card and the interpreter have.
        bits = decode(code, scale, tl.int32, CAST=False)
        if like.dtype.element_ty == tl.bfloat16:
            # What unpacking into bf16 gives, and the sum starts from that.
            bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
        return bits.to(tl.float32, bitcast=True)
