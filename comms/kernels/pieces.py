"""Pieces of an exchange: which rows they are, who has a turn with them, and how a program moves one.

What m sends n is cut into pieces of equally many rows. They go out in turns, the first one to every rank (the next
neighbour first), then the second one to every rank; a take looks for them in the order in which they come. Turns are
dealt over programs. A signal costs the program that gives it more than a microsecond, so pieces are large; what has
come is taken in smaller parts, or the last piece would keep one program long after the others.

Moves are of 16 bytes per thread and several of them at a time, over the flat words of a piece: rows of a piece lie one
behind the other at the receiver, and only the source is gathered.

    piece of 3 rows of 8 words, UNIT = 4: unit     0  1  2  3  4  5
                                          row      0  0  1  1  2  2     (source: row tokens[row])
                                          words    0  4  0  4  0  4     and the 3 behind
"""

# Kernels are written in Triton's language, which has no types.
# pyright: basic, reportGeneralTypeIssues=false, reportOperatorIssue=false
# ruff: noqa: ANN001, ANN201, ANN202

import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer

from comms.kernels.e4m3 import absolute, decode, encode, scale_byte

# Pieces that rows are cut into, or a multiple of it: numbers of programs that put divide it, or come close.
FEW_PIECES = tl.constexpr(64)


@triton.jit
def route_of(routes, sender, receiver, PART: tl.constexpr, NUM_RANKS: tl.constexpr):
    """Number of rows (part 0), place at the receiver (1), place at the sender (2), number of the first one (3)."""
    return tl.load(routes + PART * NUM_RANKS * NUM_RANKS + sender * NUM_RANKS + receiver)


@triton.jit
def rows_per_piece(count, PIECE_ROWS: tl.constexpr, LEAST_ROWS: tl.constexpr, PIECES: tl.constexpr):
    """Rows of each piece but the last one, where so many go from one rank to another.

    At most PIECE_ROWS, and so many that there are about 64 pieces, or 128, 192, ...: the programs then end together,
    where a few pieces more would keep a few programs for a whole turn. Of few rows LEAST_ROWS. More of them, if there
    were more than PIECES.
    """
    rounds = tl.maximum(tl.cdiv(count, PIECE_ROWS * FEW_PIECES), 1)
    rows = tl.minimum(tl.maximum(tl.cdiv(count, rounds * FEW_PIECES), LEAST_ROWS), PIECE_ROWS)
    return tl.maximum(tl.cdiv(count, PIECES), rows)


@triton.jit
def parts_per_piece(per_piece, PART_ROWS: tl.constexpr):
    """Parts of a piece, which different programs take: what came last is taken by several."""
    return tl.cdiv(per_piece, PART_ROWS)


@triton.jit
def part_of(nth, per_piece, count, PART_ROWS: tl.constexpr):
    """Piece that the n-th part belongs to, and where the part's rows begin and end.

    A piece's parts are of equally many rows, give or take one. A program may come to the same part of every piece, and
    pieces of 32 rows in parts of 31 and 1 would give one program 31 times as many as the next.
    """
    parts = parts_per_piece(per_piece, PART_ROWS)
    piece, part = nth // parts, nth % parts
    begin = piece * per_piece + part * per_piece // parts
    end = piece * per_piece + (part + 1) * per_piece // parts
    return piece, begin, tl.minimum(end, count)


@triton.jit
def num_turns(
    routes, me, FROM_ME: tl.constexpr, NUM_RANKS: tl.constexpr,
    PIECE_ROWS: tl.constexpr, LEAST_ROWS: tl.constexpr, PIECES: tl.constexpr, PART_ROWS: tl.constexpr,
):  # fmt: skip
    """Turns with all other ranks: over the routes that begin here, or those that end here.

    PART_ROWS > 0: a turn is of a part of a piece.
    """
    most = 1
    for rank in range(NUM_RANKS):
        if FROM_ME:
            count = route_of(routes, me, rank, 0, NUM_RANKS)
        else:
            count = route_of(routes, rank, me, 0, NUM_RANKS)
        per_piece = rows_per_piece(count, PIECE_ROWS, LEAST_ROWS, PIECES)
        turns = tl.cdiv(count, per_piece)
        if PART_ROWS > 0:
            turns *= parts_per_piece(per_piece, PART_ROWS)
        most = tl.maximum(most, tl.where(rank == me, 1, turns))
    return most * (NUM_RANKS - 1)


@triton.jit
def linger(program, turn, JITTER: tl.constexpr):
    """Tests only: up to JITTER nanoseconds, as program, turn and clock have it."""
    start = globaltimer()
    chosen = ((start >> 5) + program * 7919 + turn * 104729) % JITTER
    while globaltimer() - start < chosen:
        pass


@triton.jit
def words_at(address):
    """int32 pointer from an address of rows, which are aligned to 16 bytes: so they can be moved 16 bytes at a time."""
    return tl.multiple_of(address.to(tl.pointer_type(tl.int32)), 16)


@triton.jit
def move(
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
def move_coded(
    source, target, tokens, num_rows,
    WIDTH: tl.constexpr, RECORD: tl.constexpr, CODE_BLOCK: tl.constexpr, NUMBERS: tl.constexpr,
    GATHER: tl.constexpr, ENCODES: tl.constexpr, DECODES: tl.constexpr, VECTOR: tl.constexpr, CAST: tl.constexpr,
):  # fmt: skip
    """Rows (ENCODES) or records, one behind the other or (GATHER) those of `tokens`, to rows (DECODES) or records.

    What is encoded and decoded again is what it would be beyond the wire. Nobody reads the end of a record.

    A step works on what the step before has loaded, by tokens that the one before that has: it would wait for memory
    twice otherwise, with nothing else to do.
    """
    PER_ROW: tl.constexpr = (WIDTH + CODE_BLOCK - 1) // CODE_BLOCK
    STEP: tl.constexpr = NUMBERS // CODE_BLOCK
    # A thread reads and writes the same elements: no exchange between threads stands in between.
    element = tl.max_contiguous(tl.arange(0, CODE_BLOCK), VECTOR)[None, :]
    end, nth_block = num_rows * PER_ROW, tl.arange(0, STEP)
    row = _row_of(tokens, nth_block, end, PER_ROW, GATHER)
    loaded, scales = _load_blocks(source, row, nth_block, end, element, WIDTH, RECORD, CODE_BLOCK, ENCODES)
    row = _row_of(tokens, STEP + nth_block, end, PER_ROW, GATHER)
    for start in range(0, end, STEP):
        block = start + nth_block
        later, later_scales = _load_blocks(
            source, row, block + STEP, end, element, WIDTH, RECORD, CODE_BLOCK, ENCODES
        )  # fmt: skip
        row = _row_of(tokens, block + 2 * STEP, end, PER_ROW, GATHER)
        inside = block < end
        nth, of_row = (block // PER_ROW).to(tl.int64), block % PER_ROW
        column = (of_row * CODE_BLOCK)[:, None] + element
        mask = inside[:, None] & (column < WIDTH)
        if ENCODES:
            scale = scale_byte(tl.max(absolute(loaded), axis=1), loaded.dtype)
            code = encode(loaded, scale[:, None], CAST)
        else:
            scale, code = scales, loaded
        if DECODES:
            words = decode(code, scale[:, None], target.dtype.element_ty, CAST)
            tl.store(target + ((nth * WIDTH)[:, None] + column), words, mask=mask)
        else:
            tl.store(target + ((nth * RECORD)[:, None] + column), code, mask=mask)
            tl.store(target + nth * RECORD + WIDTH + of_row, scale.to(tl.uint8), mask=inside)
        loaded, scales = later, later_scales


@triton.jit
def _row_of(tokens, block, end, PER_ROW: tl.constexpr, GATHER: tl.constexpr):
    """The source's row of each block."""
    nth = block // PER_ROW
    if GATHER:
        nth = tl.load(tokens + nth, mask=block < end, other=0)
    return nth.to(tl.int64)


@triton.jit
def _load_blocks(
    source, row, block, end, element,
    WIDTH: tl.constexpr, RECORD: tl.constexpr, CODE_BLOCK: tl.constexpr, ENCODES: tl.constexpr,
):  # fmt: skip
    """(words, nothing) of rows, or (codes, scales) of records."""
    PER_ROW: tl.constexpr = (WIDTH + CODE_BLOCK - 1) // CODE_BLOCK
    of_row, inside = block % PER_ROW, block < end
    column = (of_row * CODE_BLOCK)[:, None] + element
    begin = row * (WIDTH if ENCODES else RECORD)
    loaded = tl.load(source + (begin[:, None] + column), mask=inside[:, None] & (column < WIDTH), other=0)
    scales = of_row
    if not ENCODES:
        scales = tl.load(source + begin + WIDTH + of_row, mask=inside, other=0)
    return loaded, scales


@triton.jit
def records_at(address):
    """uint8 pointer from an address of records, aligned as rows are."""
    return tl.multiple_of(address.to(tl.pointer_type(tl.uint8)), 16)


@triton.jit
def code_numbers(numbers, COLUMNS: tl.constexpr, CODE_BLOCK: tl.constexpr, TILE: tl.constexpr, CAST: tl.constexpr):
    """(TILE, COLUMNS) numbers, as bf16, fp32 or their bits: codes by blocks, and each block's scale."""
    if numbers.dtype == tl.bfloat16:
        words = numbers.to(tl.int16, bitcast=True)
    elif numbers.dtype == tl.float32:
        words = numbers.to(tl.int32, bitcast=True)
    else:
        words = numbers
    words = tl.reshape(words, [TILE, COLUMNS // CODE_BLOCK, CODE_BLOCK])
    scale = scale_byte(tl.max(absolute(words), axis=2), words.dtype)
    return encode(words, scale[:, :, None], CAST), scale


@triton.jit
def load_side(weights, ids, token, column, mask, WEIGHT_WORDS: tl.constexpr, NUM_IDS: tl.constexpr):
    """Side words of tokens as they travel: words of their weights, then ids of 32 bits."""
    is_weight = column < WEIGHT_WORDS
    weight = tl.load(weights + token * WEIGHT_WORDS + column, mask=mask & is_weight, other=0)
    id = tl.load(ids + token * NUM_IDS + (column - WEIGHT_WORDS), mask=mask & (column >= WEIGHT_WORDS), other=0)
    return tl.where(is_weight, weight, id.to(tl.int32))


@triton.jit
def store_side(weights, ids, row, column, words, mask, WEIGHT_WORDS: tl.constexpr, NUM_IDS: tl.constexpr):
    """The other way: ids get their own width again."""
    tl.store(weights + row * WEIGHT_WORDS + column, words, mask=mask & (column < WEIGHT_WORDS))
    place = ids + row * NUM_IDS + (column - WEIGHT_WORDS)
    tl.store(place, words.to(ids.dtype.element_ty), mask=mask & (column >= WEIGHT_WORDS))
