"""The kernels of comms/kernels/records.py against loops, and a whole exchange by records with interpreted kernels."""

import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from comms.kernels.records import _make_routes_reference, make_routes, pack_records, unpack_records
from comms.payload import Payload
from tests.distributed.test_record_exchange import AS_IT_IS, assert_same, make_exchange, round_trip
from tests.interpreter.shared_arenas import run_interpreted


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 7), st.integers(1, 4), st.integers(1, 70), st.integers(0, 5), st.integers(0, 9), st.randoms())
def test_rows_and_side_columns_go_to_their_slots_and_come_back(
    tokens, slots, width, side_width, spare, chooser
) -> None:
    generator = torch.Generator().manual_seed(chooser.randrange(10**6))
    rows = torch.randint(-(2**31), 2**31, (tokens, width), generator=generator, dtype=torch.int32)
    side = torch.randint(-(2**31), 2**31, (tokens, side_width), generator=generator, dtype=torch.int32)
    places = torch.randperm(tokens * slots, generator=generator).view(tokens, slots).int()
    places[torch.rand(places.shape, generator=generator) < 0.4] = -1
    records = torch.full((tokens * slots + spare, 4 * (width + side_width + spare)), 255, dtype=torch.uint8)
    expected = records.clone().view(torch.int32)
    for token, n in (places >= 0).nonzero().tolist():
        expected[places[token, n], :width] = rows[token]
        expected[places[token, n], width : width + side_width] = side[token]
    pack_records(records, rows, side, places)
    assert torch.equal(records.view(torch.int32), expected)

    room = tokens * slots
    count, zeros = chooser.randint(0, room), chooser.randint(0, side_width)
    out = torch.full((room, width), 7, dtype=torch.int32)
    back = torch.full((room, side_width), 7, dtype=torch.int32)
    unpack_records(records, out, back, torch.tensor([count], dtype=torch.int32), zeros)
    assert torch.equal(out[:count], expected[:count, :width]) and bool((out[count:] == 7).all())
    assert torch.equal(back[:count], expected[:count, width : width + side_width])
    assert bool((back[count:, :zeros] == 0).all() and (back[count:, zeros:] == -1).all())


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 6), st.integers(0, 60), st.integers(0, 60), st.integers(0, 10**6))
def test_routes_are_those_of_plain_pytorch(num_ranks: int, row_bound: int, item_bound: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    table = torch.randint(0, 20, (num_ranks, 2 * num_ranks), generator=generator, dtype=torch.int32)
    noted, expected = torch.tensor([30, 5, 1, 0, 0, 0], dtype=torch.int32), None
    for me in range(num_ranks):
        ours, theirs = noted.clone(), noted.clone()
        routes, totals = make_routes(table, ours, me, 7, row_bound, item_bound)
        oracle = _make_routes_reference(table, theirs, me, 7, row_bound, item_bound)
        assert torch.equal(routes, oracle[0]) and torch.equal(totals, oracle[1]) and torch.equal(ours, theirs)
        assert (routes.dtype, totals.dtype) == (oracle[0].dtype, oracle[1].dtype) == (torch.int32, torch.int32)
        # Every rank knows alike what is sent, and nobody gets more than there is room for.
        expected = routes if expected is None else expected
        assert torch.equal(routes, expected) and bool((routes[0].sum(0) <= row_bound).all())


def check_exchange() -> None:
    num_ranks = dist.get_world_size()
    exchange = make_exchange()
    coded = Payload("mxfp8", "mxfp8")
    for seed, (pattern, payload) in enumerate((("random", AS_IT_IS), ("random", coded), ("last", AS_IT_IS))):
        tokens = tuple((5 * rank + 7 * seed + 2) % 13 for rank in range(num_ranks))
        case = tokens, seed, pattern, torch.bfloat16, payload
        assert_same(round_trip(exchange, *case), round_trip(None, *case))


def test_every_process_gets_what_the_collective_backend_brings() -> None:
    run_interpreted(check_exchange, 3)
