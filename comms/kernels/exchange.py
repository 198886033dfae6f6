"""Kernels that move rows straight into the memory of other ranks: put, signal, wait, take.

Every rank has one *arena*, mapped by all others (comms/symmetric_memory.py lays it out). An exchange over a *channel*
(counts, rows there, rows back) has two halves. Puts wait for credit, write into the arenas of others and signal; takes
wait for the signals, read the own arena and return the credit:

    put     credit[n] >= e-1 for every n  ->  store rows at n  ->  barrier  ->  ready[me] at n := e   (release)
    take    ready[m] >= e for every m     ->  load rows        ->  barrier  ->  credit[me] at m := e  (release)

e is the channel's epoch. It lives in the arena, only grows, and is advanced by the take's last program: nothing about
it is known to the host, so a captured graph replays correctly. Flags hold epoch * 2^16 + tag; the tag names the layer
and the direction, so ranks that disagree about what they exchange find out instead of mixing their rows.
Flags are read with acquire semantics, all at system scope.

Waits end by themselves: after `limit` nanoseconds of the device's clock, or that many polls where there is none (the
interpreter, which runs programs one after another: all puts of all simulated ranks first, then the takes). What went
wrong is written to `errors`, in the host's memory, and later waits do not wait again.

`routes` (3, N, N) says where rows go, for sender m and receiver n: how many rows, the first one's place among the rows
that n receives, and its place among the rows that m sends (which is where the result comes back).

Worked example, 2 ranks, rank 0 sends 2 rows to rank 0 and 1 to rank 1, rank 1 sends 3 to rank 0:

    routes = [[2, 1], [3, 0]]  [[0, 0], [2, 1]]  [[0, 2], [0, 3]]

so rank 0 receives its own rows in places 0 and 1, rank 1's in places 2 to 4. If 4 rows are all it has room for, the 3
becomes a 2, on every rank alike, and rank 0 notes an overflow.

A rank's own rows never enter its arena: they go from the source to the result directly.

Shape suffixes: T tokens, N ranks, R rows received.
"""

# Kernels are written in Triton's language, which has no types.
# pyright: basic, reportGeneralTypeIssues=false, reportOperatorIssue=false
# ruff: noqa: ANN001, ANN201, ANN202

import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer

from comms.kernels.e4m3 import decode

# What `errors` says first: nothing happened, a peer did not come; else a peer is at another exchange.
NO_ERROR, EXPIRED = 0, 1

# Flags of one channel: ready[N], credit[N], then this rank's own epoch and number of programs that are done.
COUNTS, ROWS, RETURNS, NUM_CHANNELS = 0, 1, 2, 3


def channel_words(num_ranks: int) -> int:
    """int64 words of a channel's flags."""
    return 2 * num_ranks + 2


@triton.jit
def _word(pointers, rank, word):
    """Pointer to an int64 word of a rank's arena; ranks may be a block of them."""
    return tl.load(pointers + rank).to(tl.pointer_type(tl.int64)) + word


@triton.jit
def _report(pointers, errors, me, failed_at, code, tag, epoch, peer, seen):
    """Note the first error: in the arena for the waits to come, in the host's memory for the host; the code last."""
    failed = _word(pointers, me, failed_at)
    if tl.load(failed) == 0:
        tl.store(failed, 1)
        tl.store(errors + 1, tag)
        tl.store(errors + 2, epoch)
        tl.store(errors + 3, peer)
        tl.store(errors + 4, seen)
        tl.store(errors, code)


@triton.jit
def _wait(pointers, errors, me, peer, word, failed_at, tag, epoch, limit, CHECK_TAG: tl.constexpr, CLOCK: tl.constexpr):
    """Until the own flag that `peer` writes has reached the epoch. One thread polls, the program sees the result."""
    flag = _word(pointers, me, word)
    limit = tl.where(tl.load(_word(pointers, me, failed_at)) == 0, limit, 0).to(tl.int64)
    # Adding nothing, because a load cannot acquire.
    seen = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
    waited = limit * 0
    if CLOCK:
        start = globaltimer()
    while ((seen >> 16) < epoch) & (waited < limit):
        seen = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
        if CLOCK:
            waited = globaltimer() - start
        else:
            waited += 1
    if (seen >> 16) < epoch:
        _report(pointers, errors, me, failed_at, 1, tag, epoch, peer, seen)
    elif CHECK_TAG:
        if seen != epoch * 65536 + tag:
            _report(pointers, errors, me, failed_at, 2, tag, epoch, peer, seen)


@triton.jit
def _signal(pointers, word, value, NUM_RANKS: tl.constexpr, RANKS: tl.constexpr):
    """Write `value` into that word of every rank's arena. Whatever this program did before is seen by who sees it."""
    tl.debug_barrier()
    rank = tl.arange(0, RANKS)
    inside = rank < NUM_RANKS
    flags = tl.load(pointers + rank, mask=inside, other=0).to(tl.pointer_type(tl.int64)) + word
    values = tl.zeros([RANKS], dtype=tl.int64) + value
    tl.atomic_xchg(flags, values, mask=inside, sem="release", scope="sys")


@triton.jit
def _is_last(counter, programs):
    """Whether every program of this launch is done but this one; the counter then starts anew for the next launch."""
    tl.debug_barrier()
    is_last = tl.atomic_add(counter, 1, sem="acq_rel", scope="sys") == programs - 1
    if is_last:
        tl.store(counter, 0)
    return is_last


@triton.jit
def _words_at(address):
    """int32 pointer from an address of rows, which are aligned to 16 bytes: so they can be moved 16 bytes at a time."""
    return tl.multiple_of(address.to(tl.pointer_type(tl.int32)), 16)


@triton.jit(do_not_specialize=["me", "tag", "limit", "table_at"])
def put_counts_kernel(
    pointers, errors, state, sent, me, tag, limit, table_at,
    FLAGS_AT: tl.constexpr, FAILED_AT: tl.constexpr, NUM_RANKS: tl.constexpr,
    RANKS: tl.constexpr, CLOCK: tl.constexpr,
):  # fmt: skip
    """One program: this rank's row of the table (rows to each rank, then items) into every rank's table."""
    epoch = tl.load(_word(pointers, me, FLAGS_AT + 2 * NUM_RANKS)) + 1
    column = tl.arange(0, 2 * RANKS)
    inside = column < 2 * NUM_RANKS
    row = tl.load(sent + column, mask=inside, other=0)
    for step in range(NUM_RANKS):
        rank = (me + 1 + step) % NUM_RANKS
        _wait(
            pointers, errors, me, rank, FLAGS_AT + NUM_RANKS + rank, FAILED_AT, tag, epoch - 1, limit, False, CLOCK
        )  # fmt: skip
        table = (tl.load(pointers + rank) + table_at).to(tl.pointer_type(tl.int32))
        tl.store(table + me * 2 * NUM_RANKS + column, row, mask=inside)
    _signal(pointers, FLAGS_AT + me, epoch * 65536 + tag, NUM_RANKS, RANKS)
    tl.store(state, epoch)


@triton.jit(do_not_specialize=["me", "tag", "limit", "row_bound", "item_bound", "table_at"])
def take_counts_kernel(
    pointers, errors, state, overflow, routes, totals, me, tag, limit, row_bound, item_bound, table_at,
    FLAGS_AT: tl.constexpr, FAILED_AT: tl.constexpr, NUM_RANKS: tl.constexpr,
    RANKS: tl.constexpr, CLOCK: tl.constexpr,
):  # fmt: skip
    """One program: wait for every rank's row of the table, and work out the routes."""
    epoch = tl.load(_word(pointers, me, FLAGS_AT + 2 * NUM_RANKS)) + 1
    for rank in range(NUM_RANKS):
        _wait(pointers, errors, me, rank, FLAGS_AT + rank, FAILED_AT, tag, epoch, limit, True, CLOCK)
    sender = tl.arange(0, RANKS)[:, None]
    receiver = tl.arange(0, RANKS)[None, :]
    inside = (sender < NUM_RANKS) & (receiver < NUM_RANKS)
    table = (tl.load(pointers + me) + table_at).to(tl.pointer_type(tl.int32))
    asked = tl.load(table + sender * 2 * NUM_RANKS + receiver, mask=inside, other=0)
    items = tl.load(table + sender * 2 * NUM_RANKS + NUM_RANKS + receiver, mask=inside, other=0)
    first = tl.minimum(tl.cumsum(asked, axis=0) - asked, row_bound)
    count = tl.minimum(asked, row_bound - first)
    back = tl.cumsum(count, axis=1) - count
    place = routes + sender * NUM_RANKS + receiver
    tl.store(place, count, mask=inside)
    tl.store(place + NUM_RANKS * NUM_RANKS, first, mask=inside)
    tl.store(place + 2 * NUM_RANKS * NUM_RANKS, back, mask=inside)
    ours = inside & (receiver == me)
    rows_asked = tl.sum(tl.sum(tl.where(ours, asked, 0), axis=1), axis=0)
    items_asked = tl.sum(tl.sum(tl.where(ours, items, 0), axis=1), axis=0)
    tl.store(totals, tl.minimum(rows_asked, row_bound))
    tl.store(totals + 1, items_asked)
    _note_overflow(overflow, rows_asked, row_bound, tag)
    _note_overflow(overflow + 3, items_asked, item_bound, tag)
    _signal(pointers, FLAGS_AT + NUM_RANKS + me, epoch * 65536 + tag, NUM_RANKS, RANKS)
    tl.store(_word(pointers, me, FLAGS_AT + 2 * NUM_RANKS), epoch)
    tl.store(state, epoch)


@triton.jit
def _note_overflow(overflow, asked, bound, tag):
    """Keep the greatest need beyond the bound: need, bound, tag."""
    if asked > bound:
        if asked > tl.load(overflow):
            tl.store(overflow, asked)
            tl.store(overflow + 1, bound)
            tl.store(overflow + 2, tag)


@triton.jit
def _wait_for_room(
    pointers, errors, me, tag, limit,
    FLAGS_AT: tl.constexpr, FAILED_AT: tl.constexpr, NUM_RANKS: tl.constexpr, CLOCK: tl.constexpr,
):  # fmt: skip
    """Until every rank has taken what was put last. Returns the epoch of what comes now."""
    epoch = tl.load(_word(pointers, me, FLAGS_AT + 2 * NUM_RANKS)) + 1
    for rank in range(NUM_RANKS):
        _wait(
            pointers, errors, me, rank, FLAGS_AT + NUM_RANKS + rank, FAILED_AT, tag, epoch - 1, limit, False, CLOCK
        )  # fmt: skip
    return epoch


@triton.jit
def _copy_words(source, target, source_row, target_row, mask_row, WORDS: tl.constexpr, COLUMNS: tl.constexpr):
    """Rows of WORDS int32 words from one place to another; COLUMNS is a power of two."""
    for start in tl.static_range(0, WORDS, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        mask = mask_row[:, None] & (column < WORDS)[None, :]
        words = tl.load(source + source_row[:, None] * WORDS + column[None, :], mask=mask)
        tl.store(target + target_row[:, None] * WORDS + column[None, :], words, mask=mask)


@triton.jit(do_not_specialize=["me", "tag", "limit", "num_tokens", "rows_at", "side_at"])
def put_rows_kernel(
    pointers, errors, state, rows, side, index, routes, out_rows, out_side, me, tag, limit, num_tokens,
    rows_at, side_at,
    FLAGS_AT: tl.constexpr, FAILED_AT: tl.constexpr,
    NUM_RANKS: tl.constexpr, RANKS: tl.constexpr,
    WORDS: tl.constexpr, COLUMNS: tl.constexpr, SIDE_WORDS: tl.constexpr, SIDE_COLUMNS: tl.constexpr,
    TILE: tl.constexpr, CLOCK: tl.constexpr,
):  # fmt: skip
    """Each token's row, and its side words, into its place at every rank that it goes to; read once, written often."""
    epoch = _wait_for_room(pointers, errors, me, tag, limit, FLAGS_AT, FAILED_AT, NUM_RANKS, CLOCK)
    for tile in range(tl.program_id(0), tl.cdiv(num_tokens, TILE), tl.num_programs(0)):
        token = tile * TILE + tl.arange(0, TILE)
        inside = token < num_tokens
        token = token.to(tl.int64)
        for start in tl.static_range(0, WORDS, COLUMNS):
            column = (start + tl.arange(0, COLUMNS))[None, :]
            words = tl.load(rows + token[:, None] * WORDS + column, mask=inside[:, None] & (column < WORDS))
            for step in range(NUM_RANKS):
                # Every rank begins with another neighbour.
                rank = (me + 1 + step) % NUM_RANKS
                place, goes = _place(index, routes, me, rank, token, inside, num_tokens, NUM_RANKS)
                address = tl.load(pointers + rank) + rows_at
                target = _words_at(tl.where(rank == me, out_rows.to(tl.int64), address))
                tl.store(target + place[:, None] * WORDS + column, words, mask=goes[:, None] & (column < WORDS))
        if SIDE_WORDS > 0:
            column = tl.arange(0, SIDE_COLUMNS)[None, :]
            words = tl.load(side + token[:, None] * SIDE_WORDS + column, mask=inside[:, None] & (column < SIDE_WORDS))
            for rank in range(NUM_RANKS):
                place, goes = _place(index, routes, me, rank, token, inside, num_tokens, NUM_RANKS)
                address = tl.load(pointers + rank) + side_at
                target = tl.where(rank == me, out_side.to(tl.int64), address).to(tl.pointer_type(tl.int32))
                mask = goes[:, None] & (column < SIDE_WORDS)
                tl.store(target + place[:, None] * SIDE_WORDS + column, words, mask=mask)
    if _is_last(_word(pointers, me, FLAGS_AT + 2 * NUM_RANKS + 1), tl.num_programs(0)):
        _signal(pointers, FLAGS_AT + me, epoch * 65536 + tag, NUM_RANKS, RANKS)
        tl.store(state, epoch)


@triton.jit
def _place(index, routes, me, rank, token, inside, num_tokens, NUM_RANKS: tl.constexpr):
    """Where tokens of this rank stand among the rows that `rank` receives, and whether they go there."""
    nth = tl.load(index + rank * num_tokens + token, mask=inside, other=-1)
    count = tl.load(routes + me * NUM_RANKS + rank)
    first = tl.load(routes + NUM_RANKS * NUM_RANKS + me * NUM_RANKS + rank)
    return (first + nth).to(tl.int64), (nth >= 0) & (nth < count)


@triton.jit(do_not_specialize=["me", "tag", "limit"])
def wait_kernel(
    pointers, errors, me, tag, limit,
    FLAGS_AT: tl.constexpr, FAILED_AT: tl.constexpr, NUM_RANKS: tl.constexpr, CLOCK: tl.constexpr,
):  # fmt: skip
    """One program per rank: until it has signalled."""
    epoch = tl.load(_word(pointers, me, FLAGS_AT + 2 * NUM_RANKS)) + 1
    rank = tl.program_id(0)
    _wait(pointers, errors, me, rank, FLAGS_AT + rank, FAILED_AT, tag, epoch, limit, True, CLOCK)


@triton.jit
def _finish_take(pointers, state, me, tag, FLAGS_AT: tl.constexpr, NUM_RANKS: tl.constexpr, RANKS: tl.constexpr):
    """The last program returns the credit and ends the epoch."""
    own = _word(pointers, me, FLAGS_AT + 2 * NUM_RANKS)
    if _is_last(own + 1, tl.num_programs(0)):
        epoch = tl.load(own) + 1
        _signal(pointers, FLAGS_AT + NUM_RANKS + me, epoch * 65536 + tag, NUM_RANKS, RANKS)
        tl.store(own, epoch)
        tl.store(state, epoch)


@triton.jit(do_not_specialize=["me", "tag", "row_bound", "rows_at", "side_at"])
def take_rows_kernel(
    pointers, state, routes, totals, out_rows, out_side, me, tag, row_bound, rows_at, side_at,
    FLAGS_AT: tl.constexpr,
    NUM_RANKS: tl.constexpr, RANKS: tl.constexpr,
    WORDS: tl.constexpr, COLUMNS: tl.constexpr, SIDE_WORDS: tl.constexpr, SIDE_COLUMNS: tl.constexpr,
    FILL_FROM: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Received rows from the arena to the result. Side words of places without a row: 0, from FILL_FROM on -1."""
    own = me * NUM_RANKS + me
    own_first = tl.load(routes + NUM_RANKS * NUM_RANKS + own)
    own_end = own_first + tl.load(routes + own)
    num_rows = tl.load(totals)
    base = tl.load(pointers + me)
    arena = _words_at(base + rows_at)
    for tile in range(tl.program_id(0), tl.cdiv(num_rows, TILE), tl.num_programs(0)):
        row = tile * TILE + tl.arange(0, TILE)
        came = (row < num_rows) & ((row < own_first) | (row >= own_end))
        row = row.to(tl.int64)
        _copy_words(arena, out_rows, row, row, came, WORDS, COLUMNS)
    if SIDE_WORDS > 0:
        side = (base + side_at).to(tl.pointer_type(tl.int32))
        column = tl.arange(0, SIDE_COLUMNS)[None, :]
        for tile in range(tl.program_id(0), tl.cdiv(row_bound, TILE), tl.num_programs(0)):
            row = tile * TILE + tl.arange(0, TILE)
            is_own = (row >= own_first) & (row < own_end)
            mask = ((row < row_bound) & (is_own == 0))[:, None] & (column < SIDE_WORDS)
            filler = tl.where(column >= FILL_FROM, -1, 0)
            came = mask & (row < num_rows)[:, None]
            place = row.to(tl.int64)[:, None] * SIDE_WORDS + column
            words = tl.where(came, tl.load(side + place, mask=came, other=0), filler)
            tl.store(out_side + place, words, mask=mask)
    _finish_take(pointers, state, me, tag, FLAGS_AT, NUM_RANKS, RANKS)


@triton.jit(do_not_specialize=["me", "tag", "limit", "rows_at", "side_at"])
def put_back_kernel(
    pointers, errors, state, rows, side, routes, totals, me, tag, limit, rows_at, side_at,
    FLAGS_AT: tl.constexpr, FAILED_AT: tl.constexpr,
    NUM_RANKS: tl.constexpr, RANKS: tl.constexpr,
    WORDS: tl.constexpr, COLUMNS: tl.constexpr, SIDE_WORDS: tl.constexpr, SIDE_COLUMNS: tl.constexpr,
    TILE: tl.constexpr, CLOCK: tl.constexpr,
):  # fmt: skip
    """Each received row (or what became of it) back to its sender, to its place among the rows that that one sent."""
    epoch = _wait_for_room(pointers, errors, me, tag, limit, FLAGS_AT, FAILED_AT, NUM_RANKS, CLOCK)
    num_rows = tl.load(totals)
    own = me * NUM_RANKS + me
    num_own = tl.load(routes + own)
    # Every rank begins with another neighbour: with the rows behind its own.
    begin = tl.load(routes + NUM_RANKS * NUM_RANKS + own) + num_own
    for tile in range(tl.program_id(0), tl.cdiv(num_rows - num_own, TILE), tl.num_programs(0)):
        nth = tile * TILE + tl.arange(0, TILE)
        inside = nth < num_rows - num_own
        row = begin + nth
        row = tl.where(row >= num_rows, row - num_rows, row)
        for rank in range(NUM_RANKS):
            count = tl.load(routes + rank * NUM_RANKS + me)
            first = tl.load(routes + NUM_RANKS * NUM_RANKS + rank * NUM_RANKS + me)
            goes = inside & (row >= first) & (row < first + count)
            if (rank != me) & (tl.sum(goes.to(tl.int32), axis=0) > 0):
                back = tl.load(routes + 2 * NUM_RANKS * NUM_RANKS + rank * NUM_RANKS + me)
                place = (back + row - first).to(tl.int64)
                base = tl.load(pointers + rank)
                target = _words_at(base + rows_at)
                _copy_words(rows, target, row.to(tl.int64), place, goes, WORDS, COLUMNS)
                if SIDE_WORDS > 0:
                    target = (base + side_at).to(tl.pointer_type(tl.int32))
                    _copy_words(side, target, row.to(tl.int64), place, goes, SIDE_WORDS, SIDE_COLUMNS)
    if _is_last(_word(pointers, me, FLAGS_AT + 2 * NUM_RANKS + 1), tl.num_programs(0)):
        _signal(pointers, FLAGS_AT + me, epoch * 65536 + tag, NUM_RANKS, RANKS)
        tl.store(state, epoch)


@triton.jit
def _load_row(
    address, column, mask, like,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr, ALIGNMENT: tl.constexpr,
):  # fmt: skip
    """A row's numbers from its address, 0 where the mask is not; BLOCK > 0: from a record (comms/kernels/codec.py)."""
    if BLOCK == 0:
        row = tl.multiple_of(address.to(like.dtype), ALIGNMENT)
        return tl.load(row + column, mask=mask, other=0.0).to(WIDE)
    else:
        record = tl.multiple_of(address.to(tl.pointer_type(tl.uint8)), ALIGNMENT)
        code = tl.load(record + column, mask=mask, other=0).to(tl.int32)
        scale = tl.load(record + WIDTH + column // BLOCK, mask=mask, other=0).to(tl.int32)
        # By integers, which every card and the interpreter have.
        bits = decode(code, scale, tl.int32, CAST=False)
        if like.dtype.element_ty == tl.bfloat16:
            # What unpacking into bf16 gives, and the sum starts from that.
            bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
        return bits.to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["me", "tag", "num_tokens", "rows_at"])
def sum_back_kernel(
    pointers, state, rows, index, routes, out, me, tag, num_tokens, rows_at,
    FLAGS_AT: tl.constexpr, NUM_RANKS: tl.constexpr, RANKS: tl.constexpr, WIDTH: tl.constexpr, ROW_BYTES: tl.constexpr,
    ALIGNMENT: tl.constexpr, COLUMNS: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr, FINISH: tl.constexpr,
):  # fmt: skip
    """out[t] = the sum of what came back for token t, by ascending rank; this rank's own part is read from `rows`."""
    parts: tl.constexpr = (WIDTH + COLUMNS - 1) // COLUMNS
    arena = tl.load(pointers + me) + rows_at
    for piece in range(tl.program_id(0), num_tokens * parts, tl.num_programs(0)):
        token = tl.cast(piece // parts, tl.int64)
        column = piece % parts * COLUMNS + tl.arange(0, COLUMNS)
        inside = column < WIDTH
        total = tl.zeros([COLUMNS], dtype=WIDE)
        for rank in range(NUM_RANKS):
            nth = tl.load(index + rank * num_tokens + token)
            count = tl.load(routes + me * NUM_RANKS + rank)
            goes = (nth >= 0) & (nth < count)
            # Own rows stand where they were received, the others where they were sent from.
            part = tl.where(rank == me, 1, 2)
            first = tl.load(routes + part * NUM_RANKS * NUM_RANKS + me * NUM_RANKS + rank)
            base = tl.where(rank == me, rows.to(tl.int64), arena)
            address = base + (first + nth).to(tl.int64) * ROW_BYTES
            total += _load_row(address, column, inside & goes, out, WIDTH, BLOCK, WIDE, ALIGNMENT)
        tl.store(out + token * WIDTH + column, total.to(out.dtype.element_ty), mask=inside)
    if FINISH:
        _finish_take(pointers, state, me, tag, FLAGS_AT, NUM_RANKS, RANKS)
