"""Which tokens of a sequence lie on which rank, as a table: what comms/split_sequence.py does by slices."""

import torch
from torch import Tensor


def token_table(seq_len: int, ring: int, ulysses: int, tp: int) -> Tensor:
    """(N, L) int64: the tokens of each rank. Ring rank r has chunks r and 2 * ring - 1 - r of 2 * ring."""
    tokens = torch.arange(seq_len)
    if ring > 1:
        chunks = tokens.view(2 * ring, -1)
        tokens = torch.stack([chunks[:ring], chunks[ring:].flip(0)], dim=1)
    return tokens.reshape(ring * ulysses * tp, -1)
