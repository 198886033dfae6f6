"""Kernels that plan an exchange: which token is which row for which rank, and how many rows everybody sends everybody.

Ids are numbered by owner: rank n owns ids n * per_rank to (n + 1) * per_rank, and a token goes to every rank that owns
one of its ids. Rows for a rank are in the order of tokens. A counting scan in two launches, over blocks of tokens:

    count    rows and ids of each block for every rank: a table (2N, blocks)
    place    a block adds up the counts before it and numbers its own rows

then one program exchanges the counts. `routes` (C, 4, N, N) says where the rows of each chunk of tokens go, for sender
m and receiver n: how many rows, the first one's place among the rows that n receives, its place among the rows that m
sends (which is where the result comes back), and its number among those that m has for n. Chunks are contiguous blocks
of tokens, so the rows of one follow those of the one before everywhere.

Worked example, 2 ranks, one chunk, rank 0 sends 2 rows to rank 0 and 1 to rank 1, rank 1 sends 3 to rank 0:

    routes = [[2, 1], [3, 0]]  [[0, 0], [2, 1]]  [[0, 2], [0, 3]]  [[0, 0], [0, 0]]

so rank 0 receives its own rows in places 0 and 1, rank 1's in places 2 to 4. If 4 rows are all it has room for, the 3
becomes a 2, on every rank alike, and rank 0 notes an overflow. With two chunks, of which the first has one row of each
kind that there is:

    routes[0] = [[1, 1], [1, 0]]  [[0, 0], [1, 1]]  [[0, 2], [0, 3]]  [[0, 0], [0, 0]]
    routes[1] = [[1, 0], [2, 0]]  [[2, 1], [3, 1]]  [[1, 3], [1, 3]]  [[1, 1], [1, 0]]

Shape suffixes: T tokens, K ids per token, N ranks, C chunks.
"""

# Kernels are written in Triton's language, which has no types.
# pyright: basic, reportGeneralTypeIssues=false, reportOperatorIssue=false
# ruff: noqa: ANN001, ANN201, ANN202

import triton
import triton.language as tl

from comms.kernels.flags import epoch_of, finish, ready_at, signal_all, wait, wait_for_room


@triton.jit
def _owners(ids, token, num_tokens, per_rank, NUM_IDS: tl.constexpr, IDS: tl.constexpr):
    """(BLOCK, IDS) ranks that own a block's ids; -1 for none."""
    column = tl.arange(0, IDS)[None, :]
    inside = (token < num_tokens)[:, None] & (column < NUM_IDS)
    id = tl.load(ids + token.to(tl.int64)[:, None] * NUM_IDS + column, mask=inside, other=-1).to(tl.int32)
    return tl.where(id >= 0, id // per_rank, -1)


@triton.jit(do_not_specialize=["num_tokens", "per_rank"])
def count_rows_kernel(
    ids, counts, num_tokens, per_rank,
    NUM_RANKS: tl.constexpr, NUM_IDS: tl.constexpr, IDS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: rows and ids of one block for every rank."""
    block = tl.program_id(0)
    owner = _owners(ids, block * BLOCK + tl.arange(0, BLOCK), num_tokens, per_rank, NUM_IDS, IDS)
    for rank in range(NUM_RANKS):
        items = tl.sum((owner == rank).to(tl.int32), axis=1)
        tl.store(counts + rank * tl.num_programs(0) + block, tl.sum((items > 0).to(tl.int32), axis=0))
        tl.store(counts + (NUM_RANKS + rank) * tl.num_programs(0) + block, tl.sum(items, axis=0))


@triton.jit
def _sum_blocks(counts, first, end, STRIP: tl.constexpr):
    """Sum of a row of the table over the blocks from `first` to before `end`."""
    total = tl.zeros([STRIP], dtype=tl.int32)
    for start in range(first, end, STRIP):
        other = start + tl.arange(0, STRIP)
        total += tl.load(counts + other, mask=other < end, other=0)
    return tl.sum(total, axis=0)


@triton.jit(do_not_specialize=["num_tokens", "per_rank"])
def place_rows_kernel(
    ids, counts, index, tokens, sent, num_tokens, per_rank,
    NUM_RANKS: tl.constexpr, NUM_IDS: tl.constexpr, IDS: tl.constexpr, BLOCK: tl.constexpr, STRIP: tl.constexpr,
    CHUNKS: tl.constexpr,
):  # fmt: skip
    """One program: number one block's rows for every rank, both ways; the last one of a chunk writes its totals."""
    block, num_blocks = tl.program_id(0), tl.num_programs(0)
    token = block * BLOCK + tl.arange(0, BLOCK)
    inside = token < num_tokens
    owner = _owners(ids, token, num_tokens, per_rank, NUM_IDS, IDS)
    for rank in range(NUM_RANKS):
        goes = tl.max((owner == rank).to(tl.int32), axis=1)
        nth = _sum_blocks(counts + rank * num_blocks, 0, block, STRIP) + tl.cumsum(goes, axis=0) - 1
        goes = goes > 0
        tl.store(index + rank * num_tokens + token, tl.where(goes, nth, -1), mask=inside)
        tl.store(tokens + rank * num_tokens + nth, token, mask=inside & goes)
    for chunk in range(CHUNKS):
        end = (chunk + 1) * num_blocks // CHUNKS
        # A chunk without blocks, of few tokens, may end before the first.
        if tl.maximum(end, 1) == block + 1:
            for column in range(2 * NUM_RANKS):
                total = _sum_blocks(counts + column * num_blocks, chunk * num_blocks // CHUNKS, end, STRIP)
                tl.store(sent + chunk * 2 * NUM_RANKS + column, total)


@triton.jit(do_not_specialize=["me", "tag", "limit", "row_bound", "item_bound", "table_at"])
def counts_kernel(
    pointers, errors, state, overflow, sent, routes, totals, me, tag, limit, row_bound, item_bound, table_at,
    FLAGS_AT: tl.constexpr, FAILED_AT: tl.constexpr, NUM_RANKS: tl.constexpr, RANKS: tl.constexpr,
    PIECES: tl.constexpr, CHUNKS: tl.constexpr, COLUMNS: tl.constexpr,
    PUT: tl.constexpr, TAKE: tl.constexpr, CLOCK: tl.constexpr,
):  # fmt: skip
    """One program: tell every rank this one's row of the table (of each chunk rows to each rank, then items), learn
    theirs.
    """
    epoch = epoch_of(pointers, me, FLAGS_AT)
    WIDTH: tl.constexpr = CHUNKS * 2 * NUM_RANKS
    if PUT:
        column = tl.arange(0, COLUMNS)
        inside = column < WIDTH
        row = tl.load(sent + column, mask=inside, other=0)
        wait_for_room(pointers, errors, me, tag, epoch, limit, FLAGS_AT, FAILED_AT, NUM_RANKS, CLOCK)
        for rank in range(NUM_RANKS):
            table = (tl.load(pointers + rank) + table_at).to(tl.pointer_type(tl.int32))
            tl.store(table + me * WIDTH + column, row, mask=inside)
        signal_all(pointers, ready_at(me, 0, FLAGS_AT, NUM_RANKS, PIECES), epoch * 65536 + tag, NUM_RANKS, RANKS)
    if TAKE:
        for rank in range(NUM_RANKS):
            word = ready_at(rank, 0, FLAGS_AT, NUM_RANKS, PIECES)
            wait(pointers, errors, me, rank, word, FAILED_AT, tag, epoch, limit, True, CLOCK)
        table = (tl.load(pointers + me) + table_at).to(tl.pointer_type(tl.int32))
        _write_routes(table, overflow, routes, totals, me, tag, row_bound, item_bound, NUM_RANKS, RANKS, CHUNKS)
        finish(pointers, state, me, tag, epoch, FLAGS_AT, NUM_RANKS, RANKS)


@triton.jit
def _write_routes(
    table, overflow, routes, totals, me, tag, row_bound, item_bound,
    NUM_RANKS: tl.constexpr, RANKS: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """Routes and totals (where each chunk's rows end here, then all items) from everybody's rows of the table."""
    sender = tl.arange(0, RANKS)[:, None]
    receiver = tl.arange(0, RANKS)[None, :]
    inside = (sender < NUM_RANKS) & (receiver < NUM_RANKS)
    at = table + sender * (CHUNKS * 2 * NUM_RANKS) + receiver
    PART: tl.constexpr = NUM_RANKS * NUM_RANKS
    in_all = tl.zeros([RANKS, RANKS], dtype=tl.int32)
    items = tl.zeros([RANKS, RANKS], dtype=tl.int32)
    for chunk in range(CHUNKS):
        in_all += tl.load(at + chunk * 2 * NUM_RANKS, mask=inside, other=0)
        items += tl.load(at + chunk * 2 * NUM_RANKS + NUM_RANKS, mask=inside, other=0)
    back = tl.cumsum(in_all, axis=1) - in_all
    # Of the chunks before: rows from each sender to each receiver, and in all to each receiver.
    number = tl.zeros([RANKS, RANKS], dtype=tl.int32)
    base = tl.zeros([1, RANKS], dtype=tl.int32)
    for chunk in range(CHUNKS):
        asked = tl.load(at + chunk * 2 * NUM_RANKS, mask=inside, other=0)
        first = tl.minimum(base + tl.cumsum(asked, axis=0) - asked, row_bound)
        place = routes + chunk * 4 * PART + sender * NUM_RANKS + receiver
        tl.store(place, tl.minimum(asked, row_bound - first), mask=inside)
        tl.store(place + PART, first, mask=inside)
        tl.store(place + 2 * PART, back + number, mask=inside)
        tl.store(place + 3 * PART, number, mask=inside)
        number += asked
        base += tl.sum(asked, axis=0)[None, :]
        rows = tl.sum(tl.sum(tl.where(receiver == me, base, 0), axis=1), axis=0)
        tl.store(totals + chunk, tl.minimum(rows, row_bound))
    ours = inside & (receiver == me)
    rows_asked = tl.sum(tl.sum(tl.where(ours, in_all, 0), axis=1), axis=0)
    items_asked = tl.sum(tl.sum(tl.where(ours, items, 0), axis=1), axis=0)
    tl.store(totals + CHUNKS, items_asked)
    note_overflow(overflow, rows_asked, row_bound, tag)
    note_overflow(overflow + 3, items_asked, item_bound, tag)


@triton.jit
def note_overflow(overflow, asked, bound, tag):
    """Keep the greatest need beyond the bound: need, bound, tag."""
    if asked > bound:
        if asked > tl.load(overflow):
            tl.store(overflow, asked)
            tl.store(overflow + 1, bound)
            tl.store(overflow + 2, tag)
