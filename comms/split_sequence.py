"""Which tokens of a sequence lie on which rank, when context and tensor parallelism cut it.

Context parallelism (cp = ring x ulysses ranks) gives each ring rank two chunks of 2 * ring: r and 2 * ring - 1 - r. In
a causal mask early chunks see little and late ones much, so such a pair weighs the same for every rank. Within a ring
rank the tokens are cut into contiguous parts for its Ulysses ranks, and those again for the tp ranks (between
attention and feed-forward maps, where each token stands alone). One table says it all:

    ring=2, ulysses=1, tp=2, S=8:     rank 0: 0 1    rank 1: 6 7    rank 2: 2 3    rank 3: 4 5

Ranks count ring first, then Ulysses, then tp, the last fastest.

Shape suffixes: B sequences, S tokens of a whole sequence, C of this rank's part under cp alone, L of this rank's part,
N ranks, X whatever follows.
"""

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from comms.collectives import gather_over_ranks, sum_over_ranks
from comms.sequence_unit import sequence_unit


@functools.cache
def token_table(seq_len: int, ring: int, ulysses: int, tp: int) -> Tensor:
    """(N, L) int64: the tokens of each rank.

    Raises:
        ValueError: the sequence cannot be cut evenly.
    """
    unit = sequence_unit(ring, ulysses, tp)
    if seq_len % unit:
        below = seq_len // unit * unit
        legal = " or ".join(str(length) for length in (below, below + unit) if length)
        raise ValueError(
            f"a sequence of {seq_len} tokens cannot be cut into equal parts for parallel.cp={ring * ulysses} "
            f"(ulysses={ulysses}) and parallel.tp={tp}; nearest legal lengths: {legal}"
        )
    tokens = torch.arange(seq_len)
    if ring > 1:
        chunks = tokens.view(2 * ring, -1)
        # Chunk r beside chunk 2 * ring - 1 - r.
        tokens = torch.stack([chunks[:ring], chunks[ring:].flip(0)], dim=1)
    return tokens.reshape(ring * ulysses * tp, -1)


@dataclass(frozen=True)
class SplitSequence:
    """This rank's place among those that share each sequence."""

    ring: int
    ulysses: int
    tp: int
    # Place among the ring x ulysses x tp ranks, and the name of their group.
    rank: int
    group_name: str

    @property
    def unit(self) -> int:
        """What the length of a sequence must be a multiple of."""
        return sequence_unit(self.ring, self.ulysses, self.tp)

    @property
    def num_parts(self) -> int:
        """Ranks that share each sequence."""
        return self.ring * self.ulysses * self.tp

    def attention_part(self, whole_BSX: Tensor) -> Tensor:
        """(B, S, ...) -> (B, C, ...): the tokens whose queries this rank's heads work on, those of all its tp ranks."""
        first = self.rank // self.tp * self.tp
        return self._take(whole_BSX, first, first + self.tp)

    def part(self, whole_BSX: Tensor) -> Tensor:
        """(B, S, ...) -> (B, L, ...): this rank's own tokens."""
        return self._take(whole_BSX, self.rank, self.rank + 1)

    def whole(self, part_BLX: Tensor) -> Tensor:
        """(B, L, ...) on every rank -> (B, S, ...) in order. No gradient flows through it."""
        parts_NBLX = gather_over_ranks(part_BLX.detach(), self.group_name, self.num_parts)
        length = part_BLX.shape[1] * self.num_parts
        order_S = _order_of_all(length, self.ring, self.ulysses, self.tp, part_BLX.device)
        return parts_NBLX.transpose(0, 1).flatten(1, 2).index_select(1, order_S)

    def whole_from_attention(self, part_BCX: Tensor) -> Tensor:
        """(B, C, ...), alike on the tp ranks of a part -> (B, S, ...) in order. No gradient flows through it."""
        first = self.rank % self.tp * (part_BCX.shape[1] // self.tp)
        return self.whole(part_BCX[:, first : first + part_BCX.shape[1] // self.tp])

    def sum(self, values: Tensor) -> Tensor:
        """Sum of a small tensor over the ranks that share a sequence; no gradient."""
        return sum_over_ranks(values, self.group_name)

    def _take(self, whole_BSX: Tensor, first: int, end: int) -> Tensor:
        """The tokens of some ranks."""
        place = whole_BSX.shape[1], self.ring, self.ulysses, self.tp
        return whole_BSX.index_select(1, _tokens_of(*place, first, end, whole_BSX.device))


# Both are kept where they are used: a copy from the host's memory would make it wait for all that the device has to do.


@functools.lru_cache(maxsize=64)
def _tokens_of(seq_len: int, ring: int, ulysses: int, tp: int, first: int, end: int, device: torch.device) -> Tensor:
    # An evaluation may be the first that asks.
    with torch.inference_mode(False):
        return token_table(seq_len, ring, ulysses, tp)[first:end].flatten().to(device)


@functools.lru_cache(maxsize=16)
def _order_of_all(seq_len: int, ring: int, ulysses: int, tp: int, device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return token_table(seq_len, ring, ulysses, tp).flatten().argsort().to(device)
