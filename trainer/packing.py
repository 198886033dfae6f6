"""Documents to rows of seq_len tokens, in an order that is a pure function of (seed, index).

Shape suffixes: S sequence length, N documents.

Documents are shuffled anew in every epoch. Plain text is laid end to end and cut every S tokens (`StreamPacking`), and
the rows are shuffled again, because neighbours in a long document make a batch of nearly the same text; where prompts
must stay with their responses, whole documents share a row (`WholePacking`). Example with S = 6,
documents a b c $ and d e f $ ($: end of text):

    tokens       a b c $ d e      labels       b c $ - e f      (-: ignored, nothing is learnt across a boundary)
    positions    0 1 2 3 0 1      document_ids 0 0 0 0 1 1

The next row begins with f, whose positions begin at 0: what a row does not show is not context. The order uses our own
integer mixing, so that it does not move with the version of a library.
"""

import hashlib
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from trainer.loss import IGNORE_INDEX
from trainer.shards import Corpus

Int64Array = npt.NDArray[np.int64]

# A mixture's block is the smallest power of two from MIN_BLOCK whose whole-number quotas are this close to the weights.
MIN_BLOCK, MAX_BLOCK = 64, 1 << 16
QUOTA_ERROR = 0.01


class Segment(NamedTuple):
    """Tokens [start, stop) of a document."""

    document: int
    start: int
    stop: int


class Row(NamedTuple):
    """One sequence: int64 arrays of shape (S,); fields as in trainer.data.Batch."""

    tokens_S: Int64Array
    labels_S: Int64Array
    positions_S: Int64Array
    document_ids_S: Int64Array


def seed_key(*parts: int | str) -> int:
    """64 bits that depend on every part."""
    text = "\0".join(f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def permutation(num: int, key: int) -> Int64Array:
    """A permutation of range(num) chosen by `key`: the order of splitmix64's outputs from `key` on."""
    with np.errstate(over="ignore"):
        x = np.arange(1, num + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(key)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        x ^= x >> np.uint64(31)
    return np.argsort(x, kind="stable").astype(np.int64)


def shuffled_index(index: int, num: int, key: int) -> int:
    """Where a permutation of range(num) chosen by `key` sends `index`; needs no memory, unlike `permutation`.

    Odd multiplications, additions and xor-shifts are bijections of k-bit numbers; what lands at or above `num` is sent
    on until it lands below (cycle walking: under two rounds on average, since num > 2^(k-1)).
    """
    bits = max((num - 1).bit_length(), 1)
    mask, half = (1 << bits) - 1, bits // 2 + 1
    while True:
        for turn in range(4):
            index = (index * (key >> turn | 1) + (key >> (8 * turn + 7))) & mask
            index = (index ^ index >> half) * 0x9E3779B97F4A7C15 & mask
            index ^= index >> half
        if index < num:
            return index


class StreamPacking:
    """Shuffled documents end to end, cut every `seq_len` tokens.

    num_samples: rows per epoch. The tokens after the last whole row are left out of that epoch, or, with keep_tail (for
    evaluation), form one shorter row; then rows stay in the stream's order. Any row of any epoch is found in O(log N),
    after O(N) once per epoch."""

    def __init__(self, corpus: Corpus, seq_len: int, key: int, *, keep_tail: bool = False) -> None:
        self._corpus = corpus
        self._seq_len = seq_len
        self._key = key
        self._in_order = keep_tail
        self.num_samples = -(-corpus.num_tokens // seq_len) if keep_tail else corpus.num_tokens // seq_len
        self.truncated = 0
        self._epoch: tuple[int, Int64Array, Int64Array] | None = None

    def segments(self, index: int) -> list[Segment]:
        """The parts of documents in row `index` (counted on through the epochs)."""
        epoch, row = divmod(index, self.num_samples)
        order, ends = self._shuffled(epoch)
        if not self._in_order:
            row = shuffled_index(row, self.num_samples, seed_key(self._key, epoch, "rows"))
        begin = row * self._seq_len
        stop = min(begin + self._seq_len, self._corpus.num_tokens)
        first = int(np.searchsorted(ends, begin, side="right"))
        segments = []
        while begin < stop:
            length = int(self._corpus.lengths[order[first]])
            start = begin - (int(ends[first]) - length)
            take = min(length - start, stop - begin)
            segments.append(Segment(int(order[first]), start, start + take))
            begin += take
            first += 1
        return segments

    def _shuffled(self, epoch: int) -> tuple[Int64Array, Int64Array]:
        """The documents in this epoch's order, and where each ends in the stream."""
        if self._epoch is None or self._epoch[0] != epoch:
            order = permutation(self._corpus.num_documents, seed_key(self._key, epoch))
            self._epoch = (epoch, order, np.cumsum(self._corpus.lengths[order]))
        return self._epoch[1:]


class WholePacking:
    """Rows of whole documents, as many as fit in turn; a document longer than a row is cut (and counted: `truncated`).

    Which documents share a row is drawn once, so that every epoch has equally many rows; their order in every
    epoch."""

    def __init__(self, corpus: Corpus, seq_len: int, key: int) -> None:
        self._key = key
        self._order = permutation(corpus.num_documents, seed_key(key, "rows"))
        self._lengths = np.minimum(corpus.lengths[self._order], seq_len)
        self.truncated = int((corpus.lengths > seq_len).sum())
        ends = np.cumsum(self._lengths)
        bounds = [0]
        while bounds[-1] < corpus.num_documents:
            begin = int(ends[bounds[-1]] - self._lengths[bounds[-1]])
            bounds.append(int(np.searchsorted(ends, begin + seq_len, side="right")))
        self._bounds = bounds
        self.num_samples = len(bounds) - 1
        self._epoch: tuple[int, Int64Array] | None = None

    def segments(self, index: int) -> list[Segment]:
        """The documents in row `index` (counted on through the epochs)."""
        epoch, position = divmod(index, self.num_samples)
        if self._epoch is None or self._epoch[0] != epoch:
            self._epoch = (epoch, permutation(self.num_samples, seed_key(self._key, epoch)))
        row = int(self._epoch[1][position])
        places = range(self._bounds[row], self._bounds[row + 1])
        return [Segment(int(self._order[place]), 0, int(self._lengths[place])) for place in places]


class PackedSource:
    """Rows of one source by index, without end: an epoch follows the other."""

    def __init__(self, corpus: Corpus, seq_len: int, key: int, *, document_mask: bool, keep_tail: bool = False) -> None:
        self._corpus = corpus
        self._seq_len = seq_len
        self._document_mask = document_mask
        whole = corpus.has_prompts
        self._packing = (
            WholePacking(corpus, seq_len, key) if whole else StreamPacking(corpus, seq_len, key, keep_tail=keep_tail)
        )
        self.num_samples = self._packing.num_samples
        self.truncated = self._packing.truncated

    def row(self, index: int) -> Row:
        """Row `index`; a row that is not full ends in padding."""
        row = empty_row(self._seq_len)
        column = 0
        for number, segment in enumerate(self._packing.segments(index)):
            length = segment.stop - segment.start
            here = slice(column, column + length)
            # One token more than the inputs: the label of the last, where the document goes on.
            tokens = self._corpus.tokens(segment.document, segment.start, segment.stop + 1)
            row.tokens_S[here] = tokens[:length]
            row.labels_S[column : column + len(tokens) - 1] = tokens[1:]
            # Label at column c is the document's token start + (c - column) + 1.
            masked = int(self._corpus.label_starts[segment.document]) - segment.start - 1
            row.labels_S[column : column + min(max(masked, 0), length)] = IGNORE_INDEX
            first_position = 0 if self._document_mask else column
            row.positions_S[here] = np.arange(first_position, first_position + length)
            row.document_ids_S[here] = number if self._document_mask else 0
            column += length
        return row


def empty_row(seq_len: int) -> Row:
    """A row of padding: token 0, no label, document -1."""
    return Row(*(np.full(seq_len, value, dtype=np.int64) for value in (0, IGNORE_INDEX, 0, -1)))


class Mixture:
    """Which source the global sample `index` comes from, and which of that source's samples it is.

    Every block of samples holds a fixed quota of each source, close to its weight, in an order shuffled by (key,
    block). weights: by name, all > 0. Raises ValueError for a weight too small for any quota."""

    def __init__(self, weights: dict[str, float], key: int) -> None:
        self._key = key
        self.quotas = _quotas(weights)
        self._labels = np.repeat(np.arange(len(self.quotas)), self.quotas)
        self._ranks = np.concatenate([np.arange(quota) for quota in self.quotas])
        self._block: tuple[int, Int64Array, Int64Array] | None = None

    def locate(self, index: int) -> tuple[int, int]:
        """(number of the source, index in that source); each source's indices run 0, 1, 2, ... without a gap."""
        block, offset = divmod(index, len(self._labels))
        if self._block is None or self._block[0] != block:
            sources = self._labels[permutation(len(self._labels), seed_key(self._key, "mixture", block))]
            ranks = np.empty_like(sources)
            # The k-th appearance of a source in the block is its k-th sample there.
            ranks[np.argsort(sources, kind="stable")] = self._ranks
            self._block = (block, sources, ranks)
        source = int(self._block[1][offset])
        return source, block * int(self.quotas[source]) + int(self._block[2][offset])


def _quotas(weights: dict[str, float]) -> Int64Array:
    """Samples of each source per block: largest remainders of the smallest block that follows the weights closely."""
    share = np.array(list(weights.values()), dtype=np.float64)
    share /= share.sum()
    block = 1 if len(share) == 1 else MIN_BLOCK
    while True:
        quotas = np.floor(share * block).astype(np.int64)
        missing = block - int(quotas.sum())
        quotas[np.argsort(quotas - share * block, kind="stable")[:missing]] += 1
        if np.all(np.abs(quotas / block - share) <= QUOTA_ERROR * share) or block == MAX_BLOCK:
            break
        block *= 2
    if not quotas.all():
        name = list(weights)[int(quotas.argmin())]
        raise ValueError(f"data.train.{name}.weight is too small: less than one sample in {MAX_BLOCK} comes from it")
    return quotas
