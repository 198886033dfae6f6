"""Which tokens of a sequence lie on which rank, when context and tensor parallelism cut it.

Context parallelism (cp = ring x ulysses ranks) gives each ring rank two chunks of 2 * ring: r and 2 * ring - 1 - r. In
a causal mask early chunks see little and late ones much, so such a pair weighs the same for every rank. Within a ring
rank the tokens are cut into contiguous parts for its Ulysses ranks, and those again for the tp ranks (between
attention and feed-forward maps, where each token stands alone). For example:

    ring=2, ulysses=1, tp=2, S=8:     rank 0: 0 1    rank 1: 6 7    rank 2: 2 3    rank 3: 4 5

Ranks count ring first, then Ulysses, then tp, the last fastest.

Shape suffixes: B sequences, S tokens of a whole sequence, C of this rank's part under cp alone, L of this rank's part,
N ranks, X whatever follows.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from comms.collectives import gather_over_ranks, sum_over_ranks
from comms.sequence_unit import sequence_unit


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
        by_rank_BSX = parts_NBLX.transpose(0, 1).flatten(1, 2)
        if self.ring == 1:
            return by_rank_BSX
        # Of every ring rank the early and the late chunk; the late ones go down as the ranks go up.
        chunks = by_rank_BSX.unflatten(1, (self.ring, 2, -1))
        return torch.cat([chunks[:, :, 0], chunks[:, :, 1].flip(1)], dim=1).flatten(1, 2)

    def whole_from_attention(self, part_BCX: Tensor) -> Tensor:
        """(B, C, ...), alike on the tp ranks of a part -> (B, S, ...) in order. No gradient flows through it."""
        first = self.rank % self.tp * (part_BCX.shape[1] // self.tp)
        return self.whole(part_BCX[:, first : first + part_BCX.shape[1] // self.tp])

    def sum(self, values: Tensor) -> Tensor:
        """Sum of a small tensor over the ranks that share a sequence; no gradient."""
        return sum_over_ranks(values, self.group_name)

    def _take(self, whole_BSX: Tensor, first: int, end: int) -> Tensor:
        """The tokens of these ranks, all of one ring rank.

        Slices, and no table of indices: its copy from the host's memory would make the host wait for the device.
        """
        seq_len = whole_BSX.shape[1]
        self._check(seq_len)
        length = seq_len // self.num_parts
        ring_rank, place = divmod(first, self.ulysses * self.tp)
        # Within what the ring rank has.
        begin, stop = place * length, (place + end - first) * length
        if self.ring == 1:
            return whole_BSX[:, begin:stop].contiguous()
        chunk = seq_len // (2 * self.ring)
        runs: list[Tensor] = []
        for number, start in enumerate((ring_rank * chunk, (2 * self.ring - 1 - ring_rank) * chunk)):
            low, high = max(begin - number * chunk, 0), min(stop - number * chunk, chunk)
            if low < high:
                runs.append(whole_BSX[:, start + low : start + high])
        return torch.cat(runs, dim=1)

    def _check(self, seq_len: int) -> None:
        if seq_len % self.unit == 0:
            return
        below = seq_len // self.unit * self.unit
        legal = " or ".join(str(length) for length in (below, below + self.unit) if length)
        raise ValueError(
            f"a sequence of {seq_len} tokens cannot be cut into equal parts for parallel.cp={self.ring * self.ulysses} "
            f"(ulysses={self.ulysses}) and parallel.tp={self.tp}; nearest legal lengths: {legal}"
        )
