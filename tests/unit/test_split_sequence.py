"""Tokens of a rank are those that a table of all ranks names, and gathering them gives the sequence back."""

import itertools
from unittest.mock import patch

import pytest
import torch

from comms import split_sequence
from comms.split_sequence import SplitSequence
from tests.token_table import token_table

PLACES = [place for place in itertools.product((1, 2, 3), (1, 2), (1, 2, 4)) if place != (1, 1, 1)]


@pytest.mark.parametrize(("ring", "ulysses", "tp"), PLACES)
def test_a_rank_takes_what_the_table_says(ring: int, ulysses: int, tp: int) -> None:
    seq_len = 2 * SplitSequence(ring, ulysses, tp, 0, "").unit
    whole_BSX = torch.randn(3, seq_len, 2)
    table_NL, num_ranks = token_table(seq_len, ring, ulysses, tp), ring * ulysses * tp
    parts = []
    for rank in range(num_ranks):
        place = SplitSequence(ring, ulysses, tp, rank, "")
        parts.append(place.part(whole_BSX))
        assert torch.equal(parts[-1], whole_BSX[:, table_NL[rank]]) and parts[-1].is_contiguous()
        mates = table_NL[rank // tp * tp : (rank // tp + 1) * tp].flatten()
        assert torch.equal(place.attention_part(whole_BSX), whole_BSX[:, mates])
    with patch.object(split_sequence, "gather_over_ranks", lambda *_: torch.stack(parts)):
        assert torch.equal(SplitSequence(ring, ulysses, tp, 0, "").whole(parts[0]), whole_BSX)


def test_no_table_is_made_and_copied() -> None:
    """Not in a graph, either: route is compiled, and asks in every layer."""
    place, x_BS = SplitSequence(2, 1, 2, 3, ""), torch.randn(1, 16, requires_grad=True)
    compiled = torch.compile(place.part, backend="aot_eager", fullgraph=True)
    with patch.object(torch, "arange", side_effect=AssertionError):
        part = place.part(x_BS)
    assert torch.equal(compiled(x_BS), part)
    part.sum().backward()
    assert x_BS.grad is not None and x_BS.grad.sum() == 4


def test_a_length_that_cannot_be_cut_is_refused() -> None:
    with pytest.raises(ValueError, match=r"a sequence of 15 tokens cannot be cut .* nearest legal lengths: 8 or 16"):
        SplitSequence(2, 1, 2, 0, "").part(torch.zeros(1, 15))
