"""Flags that ranks write into each other's memory: who has put what, and who has room.

Every rank has one *arena*, mapped by all others (comms/symmetric_memory.py lays it out). An exchange over a *channel*
(counts, rows there, rows back) has two sides. Puts wait for credit, write into the arenas of others and signal; takes
wait for the signals, read the own arena and return the credit:

    put     credit[n] >= e-1 for every n  ->  store a piece at n  ->  barrier  ->  ready[me, piece] at n := e  (release)
    take    ready[m, piece] >= e          ->  load the piece      ->  barrier  ->  credit[me] at m := e        (release)

Rows go in *pieces*: what m sends n is cut into pieces of equally many rows, at least one, and both know from the routes
which rows a piece has. One program moves a piece and signals it, so no program waits for another of its own rank.

e is the channel's epoch. It lives in the arena, only grows, and is advanced by the last program of a launch that takes:
nothing about it is known to the host, so a captured graph replays correctly. Flags hold epoch * 2^16 + tag; the tag
names the layer and the direction, so ranks that disagree about what they exchange find out instead of mixing their
rows. Flags are read with acquire semantics, all at system scope.

Waits end by themselves: after `limit` nanoseconds of the device's clock, or that many polls where there is none (the
interpreter, which runs programs one after another: all puts of all simulated ranks first, then the takes). What went
wrong is written to `errors`, in the host's memory, and later waits do not wait again.

Flags of one channel, in words of 64 bits: epoch, programs that are done, credit[N], ready[N, pieces].
"""

# Kernels are written in Triton's language, which has no types.
# pyright: basic, reportGeneralTypeIssues=false, reportOperatorIssue=false
# ruff: noqa: ANN001, ANN201, ANN202

import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer

# What `errors` says first: nothing happened, a peer did not come; else a peer is at another exchange.
NO_ERROR, EXPIRED = 0, 1

COUNTS, ROWS, RETURNS, NUM_CHANNELS = 0, 1, 2, 3


def channel_words(num_ranks: int, max_pieces: int) -> int:
    """int64 words of a channel's flags."""
    return 2 + num_ranks + num_ranks * max_pieces


@triton.jit
def word_of(pointers, rank, word):
    """Pointer to an int64 word of a rank's arena; ranks may be a block of them."""
    return tl.load(pointers + rank).to(tl.pointer_type(tl.int64)) + word


@triton.jit
def epoch_of(pointers, me, FLAGS_AT: tl.constexpr):
    """The epoch of what is exchanged now."""
    return tl.load(word_of(pointers, me, FLAGS_AT)) + 1


@triton.jit
def ready_at(rank, piece, FLAGS_AT: tl.constexpr, NUM_RANKS: tl.constexpr, PIECES: tl.constexpr):
    """Word of the flag that `rank` sets when a piece of its rows has been put."""
    return FLAGS_AT + 2 + NUM_RANKS + rank * PIECES + piece


@triton.jit
def _report(pointers, errors, me, failed_at, code, tag, epoch, peer, seen):
    """Note the first error: in the arena for the waits to come, in the host's memory for the host; the code last."""
    failed = word_of(pointers, me, failed_at)
    if tl.load(failed) == 0:
        tl.store(failed, 1)
        tl.store(errors + 1, tag)
        tl.store(errors + 2, epoch)
        tl.store(errors + 3, peer)
        tl.store(errors + 4, seen)
        tl.store(errors, code)


@triton.jit
def _of_first_thread(value):
    """A number that threads may read differently, as the first one has it: they are to leave a loop together."""
    return tl.sum(tl.where(tl.arange(0, 1024) == 0, value, 0), axis=0)


@triton.jit
def wait(pointers, errors, me, peer, word, failed_at, tag, epoch, limit, CHECK_TAG: tl.constexpr, CLOCK: tl.constexpr):
    """Until the own flag that `peer` writes has reached the epoch. One thread polls, the program sees the result."""
    flag, failed = word_of(pointers, me, word), word_of(pointers, me, failed_at)
    if CLOCK:
        limit = limit.to(tl.int64)
    else:
        limit = tl.where(tl.load(failed) == 0, limit, 0).to(tl.int64)
    # Adding nothing, because a load cannot acquire.
    seen = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
    waited, start = limit * 0, limit * 0
    while ((seen >> 16) < epoch) & (waited < limit):
        seen = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
        if CLOCK:
            # Who gave up before has spent everybody's time.
            now = _of_first_thread(tl.where(tl.load(failed, volatile=True) == 0, globaltimer(), -1))
            start = tl.where(start == 0, now, start)
            waited = tl.where(now < 0, limit, now - start)
        else:
            waited += 1
    if (seen >> 16) < epoch:
        _report(pointers, errors, me, failed_at, 1, tag, epoch, peer, seen)
    elif CHECK_TAG:
        if seen != epoch * 65536 + tag:
            _report(pointers, errors, me, failed_at, 2, tag, epoch, peer, seen)


@triton.jit
def wait_for_room(
    pointers, errors, me, tag, epoch, limit,
    FLAGS_AT: tl.constexpr, FAILED_AT: tl.constexpr, NUM_RANKS: tl.constexpr, CLOCK: tl.constexpr,
):  # fmt: skip
    """Until every other rank has taken what was put last."""
    for step in range(NUM_RANKS - 1):
        rank = (me + 1 + step) % NUM_RANKS
        wait(pointers, errors, me, rank, FLAGS_AT + 2 + rank, FAILED_AT, tag, epoch - 1, limit, False, CLOCK)


@triton.jit
def signal(pointers, rank, word, value):
    """Write `value` into that word of a rank's arena. Whatever this program did before is seen by who sees it.

    Nobody uses what one thread gets back, so the other warps go on while its fence waits for their stores.
    """
    tl.debug_barrier()
    tl.atomic_xchg(word_of(pointers, rank, word), value, sem="release", scope="sys")


@triton.jit
def signal_all(pointers, word, value, NUM_RANKS: tl.constexpr, RANKS: tl.constexpr):
    """The same word of every rank's arena."""
    tl.debug_barrier()
    rank = tl.arange(0, RANKS)
    inside = rank < NUM_RANKS
    flags = tl.load(pointers + rank, mask=inside, other=0).to(tl.pointer_type(tl.int64)) + word
    values = tl.zeros([RANKS], dtype=tl.int64) + value
    tl.atomic_xchg(flags, values, mask=inside, sem="release", scope="sys")


@triton.jit
def finish(
    pointers, state, me, tag, epoch,
    FLAGS_AT: tl.constexpr, NUM_RANKS: tl.constexpr, RANKS: tl.constexpr,
):  # fmt: skip
    """The last program of the launch returns the credit and ends the epoch: all others have read it by then."""
    own = word_of(pointers, me, FLAGS_AT)
    tl.debug_barrier()
    # Among programs of this device; what they have seen, whoever sees the credit has too.
    if tl.atomic_add(own + 1, 1, sem="acq_rel", scope="gpu") == tl.num_programs(0) - 1:
        tl.store(own + 1, 0)
        signal_all(pointers, FLAGS_AT + 2 + me, epoch * 65536 + tag, NUM_RANKS, RANKS)
        tl.store(own, epoch)
        tl.store(state, epoch)
