"""Ranks that get records from each other, simulated: all inputs lie in one tensor, one rank's behind the other's."""

# A launch's arguments have no types.
# pyright: basic, reportArgumentType=false, reportCallIssue=false

from unittest.mock import patch

import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st

from comms.kernels import get_records


@triton.jit
def get_simulated(here, there, num_bytes, rank):
    """What NVSHMEM does: `rank` says how far that rank's memory is from one's own, in bytes."""
    for first in range(0, num_bytes, 64):
        at = first + tl.arange(0, 64)
        tl.store(here + at, tl.load(there + rank + at, mask=at < num_bytes), mask=at < num_bytes)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 5), st.integers(1, 4), st.integers(1, 40), st.integers(0, 12), st.randoms())
def test_every_rank_gets_what_its_table_names(num_ranks, units, parts, most, chooser) -> None:
    record, room = 16 * units, num_ranks * most + 1
    count = [[chooser.randint(0, most) for _ in range(num_ranks)] for _ in range(num_ranks)]
    generator = torch.Generator().manual_seed(chooser.randrange(10**6))
    inputs = torch.randint(0, 255, (num_ranks, room, record), generator=generator, dtype=torch.uint8)
    for me in range(num_ranks):
        # Places there are anywhere; places here lie one behind the other, in any order.
        there = [chooser.randint(0, room - count[me][rank]) for rank in range(num_ranks)]
        here, place = [0] * num_ranks, 0
        for rank in chooser.sample(range(num_ranks), num_ranks):
            here[rank], place = place, place + count[me][rank]
        table = torch.tensor([count[me], there, here], dtype=torch.int32)
        away = torch.tensor([(rank - me) * room * record for rank in range(num_ranks)], dtype=torch.int32)
        output = torch.full((room, record), 255, dtype=torch.uint8)
        expected = output.clone()
        for rank in range(num_ranks):
            end = there[rank] + count[me][rank]
            expected[here[rank] : here[rank] + count[me][rank]] = inputs[rank, there[rank] : end]
        with patch.object(get_records, "get", get_simulated):
            get_records.get_records_kernel[(num_ranks * parts,)](
                inputs[me], output, table, away, me, record, NUM_RANKS=num_ranks, PARTS=parts, UNIT=16
            )
        assert torch.equal(output, expected)
