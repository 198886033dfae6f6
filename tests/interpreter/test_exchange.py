"""The kernels of the symmetric-memory exchange, several ranks in one process, against loops over Python lists.

The interpreter runs programs one after another: every rank's puts first, then every rank's takes. Rows are moved, not
changed, and sums are in the collective backend's order, so equality is exact everywhere.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

import comms.put_and_take
from comms.kernels.codec import pack_rows, unpack_rows
from comms.kernels.gather_sum import gather_sum, gather_sum_reference
from comms.kernels.pieces import part_of, parts_per_piece
from comms.put_and_take import PUT, TAKE, Received, exchange_counts, move_back, move_there, order_rows
from comms.symmetric_exchange import COMBINE, DISPATCH, PLAN, SymmetricPlan, describe_tag, tag_of
from comms.symmetric_memory import Exchange, plan_layout
from tests.simulated_exchanges import simulated_exchanges

MAX_TOKENS, TOP_K, IDS_PER_RANK = 9, 3, 2


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several moves in a piece, several programs and blocks of tokens, so that each has neighbours."""
    monkeypatch.setattr(comms.put_and_take, "MOVE_UNITS", 4)
    monkeypatch.setattr(comms.put_and_take, "CODED_NUMBERS", 128)
    monkeypatch.setattr(comms.put_and_take, "SIDE_WORDS", 8)
    monkeypatch.setattr(comms.put_and_take, "PART_BYTES", 100)
    monkeypatch.setattr(comms.put_and_take, "SUM_NUMBERS", 16)
    monkeypatch.setattr(comms.put_and_take, "SUM_COLUMNS", 8)
    monkeypatch.setattr(comms.put_and_take, "SUM_TOKENS", 4)
    monkeypatch.setattr(comms.put_and_take, "BYTES_PER_CTA", 64)
    monkeypatch.setattr(comms.put_and_take, "MAX_CTAS", 3)
    monkeypatch.setattr(comms.put_and_take, "PLAN_TOKENS", 2)
    monkeypatch.setattr(comms.put_and_take, "PLAN_STRIP", 2)


def make(
    num_ranks: int, width: int, dtype: torch.dtype, capacity: float | None = None, piece: int = 2, max_pieces: int = 16
) -> list[Exchange]:
    """Pieces of so many rows of this width."""
    row_bytes = width * dtype.itemsize
    layout = plan_layout(num_ranks, MAX_TOKENS, TOP_K, row_bytes, 8 * TOP_K, capacity)
    layout = replace(layout, max_pieces=max_pieces)
    return simulated_exchanges(layout, MAX_TOKENS, describe_tag=describe_tag, piece_bytes=piece * row_bytes)


def random_ids(num_ranks: int, generator: torch.Generator) -> list[Tensor]:
    """Per rank (T, K); a token goes to at most TOP_K ranks, some to none."""
    tables = []
    for rank in range(num_ranks):
        num_tokens = (3 * rank + 4) % (MAX_TOKENS + 1)
        ids = torch.rand(num_tokens, IDS_PER_RANK * num_ranks, generator=generator).argsort(1)[:, :TOP_K]
        tables.append(ids.masked_fill(torch.rand(ids.shape, generator=generator) < 0.2, -1))
    return tables


def all_to_the_last(num_ranks: int, generator: torch.Generator) -> list[Tensor]:
    last = IDS_PER_RANK * num_ranks - 1
    ids = torch.tensor([[last, -1, last - 1]] * MAX_TOKENS)
    return [ids[: MAX_TOKENS - rank] for rank in range(num_ranks)]


def one_rank_is_empty(num_ranks: int, generator: torch.Generator) -> list[Tensor]:
    tables = random_ids(num_ranks, generator)
    return [tables[0][:0], *tables[1:]]


def nobody_has_tokens(num_ranks: int, generator: torch.Generator) -> list[Tensor]:
    return [torch.zeros(0, TOP_K, dtype=torch.int64)] * num_ranks


def nobody_sends_anything(num_ranks: int, generator: torch.Generator) -> list[Tensor]:
    return [torch.full((5, TOP_K), -1)] * num_ranks


def alone_and_all_together(num_ranks: int, generator: torch.Generator) -> list[Tensor]:
    """Rank 0 keeps its rows, rank 1 has one for rank 0, the rest sends everything everywhere it can."""
    full = torch.arange(MAX_TOKENS * TOP_K).view(MAX_TOKENS, TOP_K) * IDS_PER_RANK % (num_ranks * IDS_PER_RANK)
    return [torch.tensor([[0, -1, 1]] * 4), torch.tensor([[-1, -1, 1]]), *[full] * num_ranks][:num_ranks]


PATTERNS: dict[str, Callable[[int, torch.Generator], list[Tensor]]] = {
    pattern.__name__: pattern
    for pattern in (
        random_ids, all_to_the_last, one_rank_is_empty, nobody_has_tokens, nobody_sends_anything,
        alone_and_all_together,
    )
}  # fmt: skip


def items_of(ids: list[Tensor]) -> list[Tensor]:
    """Per rank (T, N): how many of a token's ids each rank owns."""
    return [
        torch.stack([(table.div(IDS_PER_RANK, rounding_mode="floor") == n).sum(1) for n in range(len(ids))], 1)
        for table in ids
    ]


def plan_all(ranks: list[Exchange], ids: list[Tensor], layer: int = 0, bound: int = 10**6) -> list[SymmetricPlan]:
    tag = tag_of(layer, PLAN)
    orders = [order_rows(table, len(ranks), IDS_PER_RANK) for table in ids]
    for exchange, order in zip(ranks, orders, strict=True):
        exchange_counts(exchange, order.sent_C2N, tag, bound, PUT)
    taken = [
        exchange_counts(exchange, order.sent_C2N, tag, bound, TAKE)
        for exchange, order in zip(ranks, orders, strict=True)
    ]
    return [
        SymmetricPlan(exchange, layer, table.shape[0], *tables, bound, order.index_NT, order.tokens_NT)
        for exchange, table, order, tables in zip(ranks, ids, orders, taken, strict=True)
    ]


class Side(NamedTuple):
    """Side columns of a rank's rows."""

    weights: Tensor
    ids: Tensor


def no_side(x: Tensor) -> Side:
    return Side(x.new_empty(len(x), 0, dtype=torch.float32), x.new_empty(len(x), 0, dtype=torch.int64))


def dispatch_all(
    plans: list[SymmetricPlan], xs: list[Tensor], sides: list[Side], payload: str = "model"
) -> list[Received]:
    """What every rank receives; places that nothing was written to hold NaN, or 7."""
    outs = []
    for plan, x, side in zip(plans, xs, sides, strict=True):
        rows = x.new_full((plan.num_rows, x.shape[1]), float("nan"))
        weights, ids = (column.new_full((plan.num_rows, column.shape[1]), 7) for column in side)
        outs.append(Received(rows, weights, ids))
    for sides_of_launch in (PUT, TAKE):
        for plan, x, side, out in zip(plans, xs, sides, outs, strict=True):
            tables, tag = (plan.tokens_NT, plan.routes, plan.totals), tag_of(plan.layer, DISPATCH)
            move_there(plan.exchange, x, *side, *tables, out, tag, payload, sides_of_launch)
    return outs


def combine_all(
    plans: list[SymmetricPlan], rows: list[Tensor], sides: list[Tensor], payload: str = "model"
) -> list[tuple[Tensor, Tensor]]:
    """Sums per token on every rank; what is not written holds NaN."""
    outs = []
    for plan, row, side in zip(plans, rows, sides, strict=True):
        sums = row.new_full((plan.num_tokens, row.shape[1]), float("nan"))
        outs.append((sums, side.new_full((plan.num_tokens, side.shape[1]), 7)))
    for sides_of_launch in (PUT, TAKE):
        for plan, row, side, out in zip(plans, rows, sides, outs, strict=True):
            tables, tag = (plan.index_NT, plan.routes), tag_of(plan.layer, COMBINE)
            move_back(plan.exchange, row, side, *tables, out[0], out[1], tag, payload, sides_of_launch)
    return outs


def expected_rows(items: list[Tensor], xs: list[Tensor], rank: int) -> Tensor:
    parts = [x[table[:, rank] > 0] for table, x in zip(items, xs, strict=True)]
    return torch.cat(parts)


def expected_sums(items: list[Tensor], rows: list[Tensor], rank: int) -> Tensor:
    """What the collective backend computes: rows back in order of (rank, token), then summed by slot.

    bf16 by the interpreted kernel: the interpreter cuts where it should round.
    """
    back, slots, sent = [], [], 0
    for other, out in enumerate(rows):
        first = sum(int((table[:, other] > 0).sum()) for table in items[:rank])
        goes = items[rank][:, other] > 0
        back.append(out[first : first + int(goes.sum())])
        slots.append(torch.where(goes, goes.cumsum(0) - 1 + sent, -1))
        sent += int(goes.sum())
    sums = gather_sum if rows[0].dtype == torch.bfloat16 else gather_sum_reference
    return sums(torch.cat(back), torch.stack(slots, 1))


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8) if x.numel() else x


def check_order(plans: list[SymmetricPlan], items: list[Tensor]) -> None:
    for plan, table in zip(plans, items, strict=True):
        for rank, (index, tokens) in enumerate(zip(plan.index_NT, plan.tokens_NT, strict=True)):
            goes = table[:, rank] > 0
            assert torch.equal(index, torch.where(goes, goes.cumsum(0) - 1, -1).int())
            assert torch.equal(tokens[: int(goes.sum())], goes.nonzero().flatten().int())


def check_round(ranks: list[Exchange], ids: list[Tensor], width: int, dtype: torch.dtype, layer: int) -> None:
    """One plan, dispatch and combine of every rank; the arenas' rows are poisoned before."""
    num_ranks, items = len(ranks), items_of(ids)
    generator = torch.Generator().manual_seed(layer)
    for exchange in ranks:
        exchange.arena[exchange.layout.rows_at :] = 255
    xs = [torch.randn(table.shape[0], width, generator=generator).to(dtype) for table in items]
    sides = [Side(torch.randn(len(x), TOP_K, generator=generator), table) for x, table in zip(xs, ids, strict=True)]
    plans = plan_all(ranks, ids, layer)
    check_order(plans, items)
    received = dispatch_all(plans, xs, sides)
    for rank, (plan, found) in enumerate(zip(plans, received, strict=True)):
        expected = expected_rows(items, xs, rank)
        assert plan.totals.tolist() == [len(expected), sum(int(table[:, rank].sum()) for table in items)]
        assert torch.equal(bits(found.rows_RD[: len(expected)]), bits(expected))
        for column, ours in enumerate((found.weights_RK, found.ids_RK)):
            assert torch.equal(ours[: len(expected)], expected_rows(items, [side[column] for side in sides], rank))
        # Nothing is written behind the rows, and the side columns there say so.
        assert bool(found.rows_RD[len(expected) :].isnan().all())
        assert bool((found.weights_RK[len(expected) :] == 0).all() & (found.ids_RK[len(expected) :] == -1).all())
    partials = [(torch.randn(rows.shape, generator=generator) * 2.0 ** (9 * rank % 20)).to(dtype)
                for rank, (rows, *_) in enumerate(received)]  # fmt: skip
    weights = [torch.randn(len(rows), TOP_K, generator=generator) for rows in partials]
    for rank, (plan, rows, weight) in enumerate(zip(plans, partials, weights, strict=True)):
        rows[int(plan.totals[0]) :], weight[int(plan.totals[0]) :] = float("nan"), float("nan")
        assert rank == plan.exchange.rank
    for rank, (out, side) in enumerate(combine_all(plans, partials, weights)):
        assert torch.equal(bits(out), bits(expected_sums(items, partials, rank)))
        assert torch.equal(bits(side), bits(expected_sums(items, weights, rank)))
    assert len(plans) == num_ranks
    for exchange in ranks:
        exchange.check()
        exchange.check_overflow()


@pytest.mark.parametrize(
    ("num_ranks", "pattern"),
    [
        *((2, pattern) for pattern in PATTERNS),
        (1, "random_ids"),
        (3, "one_rank_is_empty"),
        (5, "alone_and_all_together"),
        (8, "random_ids"),
    ],
)
def test_every_rank_gets_what_the_collective_backend_brings(num_ranks: int, pattern: str) -> None:
    ranks = make(num_ranks, 24, torch.bfloat16)
    check_round(ranks, PATTERNS[pattern](num_ranks, torch.Generator().manual_seed(0)), 24, torch.bfloat16, 0)


@pytest.mark.parametrize(("piece", "max_pieces"), [(1, 16), (1, 2), (100, 1)])
def test_pieces_of_every_size(piece: int, max_pieces: int) -> None:
    """One row each, more rows each because there are flags for two only, and everything in one; some have no row."""
    ranks = make(3, 8, torch.float32, piece=piece, max_pieces=max_pieces)
    for layer, pattern in enumerate(("random_ids", "alone_and_all_together", "nobody_sends_anything")):
        ids = PATTERNS[pattern](3, torch.Generator().manual_seed(9))
        check_round(ranks, ids, 8, torch.float32, layer)
    # Each piece of the last exchange that has had one has its own flag.
    flags = ranks[0].arena[: 8 * ranks[0].layout.failed_at].view(torch.int64).view(3, -1)
    ready = (flags[1, 2 + 3 :] >> 16).view(3, max_pieces)
    assert ready[1:, 0].tolist() == [3, 3] and int((ready[2] > 0).sum()) == min(max_pieces, -(-MAX_TOKENS // piece))


@triton.jit
def _parts_kernel(places, count, per_piece, PART_ROWS: tl.constexpr):
    """One program: a part's piece, begin and end; then how many parts a piece has."""
    piece, begin, end = part_of(tl.program_id(0), per_piece, count, PART_ROWS)
    at = places + 4 * tl.program_id(0)
    tl.store(at, piece)
    tl.store(at + 1, begin)
    tl.store(at + 2, end)
    tl.store(at + 3, parts_per_piece(per_piece, PART_ROWS))


@pytest.mark.parametrize(("per_piece", "part_rows"), [(32, 31), (43, 31), (62, 31), (31, 31), (9, 8), (10, 3), (5, 9)])
def test_parts_of_a_piece_are_alike(per_piece: int, part_rows: int) -> None:
    """Or programs that take the same part of every piece would not end together."""
    count, parts = 3 * per_piece + 1, -(-per_piece // part_rows)
    places = torch.empty(4 * parts, 4, dtype=torch.int32)
    _parts_kernel[(4 * parts,)](places, count, per_piece, PART_ROWS=part_rows)
    whole = [(piece, int(begin), int(end)) for piece, begin, end, _ in places.tolist()[: 3 * parts]]
    assert [begin for _, begin, _ in whole] == [0] + [end for _, _, end in whole[:-1]]
    assert whole[-1][2] == 3 * per_piece and places[:, 3].unique().tolist() == [parts]
    assert [piece for piece, _, _ in whole] == [nth // parts for nth in range(3 * parts)]
    sizes = [end - begin for _, begin, end in whole]
    assert max(sizes) <= part_rows and max(sizes) - min(sizes) <= 1
    # The last piece has but one row.
    assert (places[3 * parts :, 2] - places[3 * parts :, 1]).clamp(min=0).tolist() == [1] + [0] * (parts - 1)


def test_few_rows_go_in_smaller_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """9 rows: in pieces of 8 where these are as large as may be; of 2, which is the least, because they are few."""
    width, row_bytes = 8, 32
    monkeypatch.setattr(comms.put_and_take, "PIECE_BYTES", 8 * row_bytes)
    monkeypatch.setattr(comms.put_and_take, "LEAST_PIECE_BYTES", 2 * row_bytes)
    monkeypatch.setattr(comms.put_and_take, "PART_BYTES", row_bytes)
    ranks = [replace(rank, piece_bytes=None) for rank in make(2, width, torch.float32)]
    check_round(ranks, all_to_the_last(2, torch.Generator()), width, torch.float32, 0)
    flags = ranks[1].arena[: 8 * ranks[1].layout.failed_at].view(torch.int64).view(3, -1)
    ready = (flags[1, 2 + 2 :] >> 16).view(2, -1)
    assert int((ready[0] > 0).sum()) == -(-MAX_TOKENS // 2)


@pytest.mark.parametrize(
    ("num_ranks", "payload", "dtype"),
    [
        (1, "model", torch.float32),
        (2, "mxfp8", torch.bfloat16),
        (3, "model", torch.bfloat16),
        (3, "mxfp8", torch.float32),
    ],
)
def test_rows_may_be_sums_that_the_exchange_adds_up(num_ranks: int, payload: str, dtype: torch.dtype) -> None:
    """Parts and their slots, which may begin anywhere, give the bits that rows do which were added up before."""
    width, num_parts, generator = 40, 40, torch.Generator().manual_seed(3)
    ranks = make(num_ranks, width, dtype)
    plans = plan_all(ranks, random_ids(num_ranks, generator))
    parts = [torch.randn(num_parts, width, generator=generator) for _ in ranks]
    if dtype == torch.bfloat16:
        # Sums of small integers are exact: the interpreter cuts off what hardware rounds.
        parts = [(4 * part).round().to(dtype) for part in parts]
    slots = [torch.randint(-1, num_parts, (plan.num_rows, 3), generator=generator).int() for plan in plans]
    rows = [gather_sum_reference(*given) for given in zip(parts, slots, strict=True)]
    # Behind two rows of somebody else's.
    kept = [torch.cat([table.new_full((2, 3), 7), table]) for table in slots]
    base = torch.tensor([2])
    results: list[list[Tensor]] = []
    for sent, tables, begin in ((rows, [None] * num_ranks, None), (parts, slots, None), (parts, kept, base)):
        outs = [torch.full((plan.num_tokens, width), float("nan"), dtype=dtype) for plan in plans]
        for sides in (PUT, TAKE):
            for plan, given, table, out in zip(plans, sent, tables, outs, strict=True):
                tensors = given, given[:, :0].float(), plan.index_NT, plan.routes[0], out, out[:, :0].float()
                move_back(plan.exchange, *tensors, tag_of(0, COMBINE), payload, sides, slots_RS=table, base=begin)
        results.append(outs)
    for plan, expected, *others in zip(plans, *results, strict=True):
        plan.exchange.check()
        assert expected.isfinite().all() and all(torch.equal(expected, found) for found in others)


@pytest.mark.parametrize("numbers", [128, 32])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_coded_on_the_way_there_and_back(
    dtype: torch.dtype, numbers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """mxfp8: coding then moving is moving then coding; sums are those of decoded rows, rounded once more.

    Of 32 numbers at a time even few rows take several steps, each of which loads ahead for those behind it.
    """
    monkeypatch.setattr(comms.put_and_take, "CODED_NUMBERS", numbers)
    width, generator = 40, torch.Generator().manual_seed(8)
    ranks, ids = make(2, width, dtype), random_ids(2, generator)
    items = items_of(ids)
    xs = [(torch.randn(len(table), width, generator=generator) * 50).to(dtype) for table in items]
    plans = plan_all(ranks, ids)
    sides = [Side(torch.zeros(len(table), TOP_K), table) for table in ids]
    received = dispatch_all(plans, xs, sides, "mxfp8")
    for rank, (rows, _, row_ids) in enumerate(received):
        expected = expected_rows(items, xs, rank)
        assert torch.equal(bits(rows[: len(expected)]), bits(unpack_rows(pack_rows(expected), width, dtype)))
        assert torch.equal(row_ids[: len(expected)], expected_rows(items, ids, rank))
    sent = [rows for rows, *_ in received]
    outs = combine_all(plans, sent, [rows[:, :0].float() for rows in sent], "mxfp8")
    decoded = [unpack_rows(pack_rows(torch.where(rows.isnan(), 0, rows)), width, dtype) for rows in sent]
    for rank, (out, _) in enumerate(outs):
        assert torch.equal(bits(out), bits(expected_sums(items, decoded, rank)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
def test_other_dtypes(dtype: torch.dtype) -> None:
    ranks = make(2, 8, dtype)
    check_round(ranks, random_ids(2, torch.Generator().manual_seed(1)), 8, dtype, 0)


def test_one_arena_serves_many_layers_one_after_another() -> None:
    """Epochs grow and nothing of an earlier exchange remains: other tokens, other widths, poison in between."""
    ranks = make(3, 16, torch.float32)
    generator = torch.Generator().manual_seed(2)
    for layer in range(6):
        dtype, width = ((torch.float32, 16), (torch.bfloat16, 8))[layer % 2]
        check_round(ranks, random_ids(3, generator), width, dtype, layer)
    assert [int(exchange.state) for exchange in ranks] == [6] * 3


def test_two_micro_batches_are_under_way_at_once() -> None:
    """Both dispatches come before either combine: what the first brought is not touched by the second."""
    ranks = make(2, 8, torch.float32)
    generator = torch.Generator().manual_seed(3)
    batches = [random_ids(2, generator) for _ in range(2)]
    under_way = []
    for layer, ids in enumerate(batches):
        xs = [torch.randn(len(table), 8, generator=generator) for table in ids]
        plans = plan_all(ranks, ids, layer)
        under_way.append((items_of(ids), xs, plans, dispatch_all(plans, xs, [no_side(x) for x in xs])))
    for items, xs, plans, received in reversed(under_way):
        partials = [found.rows_RD for found in received]
        for rank, rows in enumerate(partials):
            expected = expected_rows(items, xs, rank)
            assert torch.equal(rows[: len(expected)], expected)
        for rank, (out, _) in enumerate(combine_all(plans, partials, [rows[:, :0] for rows in partials])):
            assert torch.equal(out, expected_sums(items, partials, rank))


@pytest.mark.parametrize("num_ranks", [2, 5])
def test_more_rows_than_there_is_room_for_are_noted_and_never_written(num_ranks: int) -> None:
    ranks = make(num_ranks, 8, torch.float32, capacity=1.5)
    bound = ranks[0].layout.row_bound
    ids = all_to_the_last(num_ranks, torch.Generator())
    xs = [torch.randn(len(table), 8) for table in ids]
    sides = [Side(torch.ones(len(table), TOP_K), table) for table in ids]
    plans = plan_all(ranks, ids, layer=4)
    # Every rank knows alike what is dropped.
    assert all(torch.equal(plan.routes, plans[0].routes) for plan in plans)
    behind = [exchange.arena[exchange.layout.side_at + bound * 8 * TOP_K :].clone() for exchange in ranks]
    received = [found.rows_RD for found in dispatch_all(plans, xs, sides)]
    expected = expected_rows(items_of(ids), xs, num_ranks - 1)
    assert len(expected) > bound and torch.equal(received[-1], expected[:bound])
    assert all(torch.equal(exchange.arena[-len(b) :], b) for exchange, b in zip(ranks, behind, strict=True))
    outs = combine_all(plans, received, [rows[:, :0] for rows in received])
    kept = [int(count) for count in plans[0].routes[0, 0, :, -1]]
    for rank, (out, _) in enumerate(outs):
        assert torch.equal(out[: kept[rank]], xs[rank][: kept[rank]]) and not bool(out[kept[rank] :].any())
    for exchange in ranks[:-1]:
        exchange.check_overflow()
    with pytest.raises(RuntimeError, match=f"plan of MoE layer 4: {len(expected)} rows came to rank .*comms.capacity"):
        ranks[-1].check_overflow()


def test_more_items_than_there_is_room_for_are_noted() -> None:
    ranks = make(2, 8, torch.float32)
    plan_all(ranks, all_to_the_last(2, torch.Generator()), layer=1, bound=33)
    ranks[0].check_overflow()
    # 34 / MAX_TOKENS, rounded up.
    with pytest.raises(RuntimeError, match=r"plan of MoE layer 1: 34 pairs fell to rank 1.*pair_capacity to 3\.78 or"):
        ranks[1].check_overflow()


def test_a_compiled_graph_keeps_every_exchange_in_order() -> None:
    """Also one whose result is unused, and one that is like the one before."""
    (exchange,) = make(1, 8, torch.float32)
    ids = torch.zeros(4, 1, dtype=torch.int64)
    ops, name, bound = torch.ops.sluicegate, exchange.name, exchange.layout.row_bound

    def chain(state: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        index, tokens, routes, totals = ops.exchange_routes(state, ids, 1, 1, name, 0, 100)
        no_weights, no_ids = x[:, :0], ids[:, :0]
        there = no_weights, no_ids, tokens, routes, totals, name, 1, bound, "model"
        ops.symmetric_dispatch(state, x, *there)
        rows, _, _ = ops.symmetric_dispatch(state, x, *there)
        again, _, _ = ops.symmetric_dispatch(state, x, *there)
        out = torch.empty_like(x)
        ops.symmetric_combine(state, out, rows + again, rows[:, :0], index, routes, name, 2, "model")
        return out + 1, rows

    x = torch.randn(4, 8)
    compiled = torch.compile(chain, fullgraph=True, backend="aot_eager")
    for function in (chain, compiled, compiled):
        out, rows = function(exchange.state, x)
        exchange.arena[exchange.layout.rows_at :] = 255
        assert torch.equal(out, x + x + 1) and torch.equal(rows[:4], x)
    flags = exchange.arena[: 8 * exchange.layout.failed_at].view(torch.int64).view(3, -1)
    # Epochs of counts, rows there and rows back.
    assert flags[:, 0].tolist() == [3, 9, 3]


def sent_by(ids: list[Tensor]) -> list[Tensor]:
    return [order_rows(table, len(ids), IDS_PER_RANK).sent_C2N for table in ids]


def test_a_rank_that_does_not_come_is_named() -> None:
    ranks = make(3, 8, torch.float32)
    sent = sent_by(random_ids(3, torch.Generator().manual_seed(5)))
    for exchange, counts in list(zip(ranks, sent, strict=True))[:2]:
        exchange_counts(exchange, counts, tag_of(7, PLAN), 100, PUT)
    exchange_counts(ranks[0], sent[0], tag_of(7, PLAN), 100, TAKE)
    with pytest.raises(
        RuntimeError, match=r"rank 0 waited for rank 2 in plan of MoE layer 7 .*epoch 1.* after 10 polls: .*epoch 0"
    ):
        ranks[0].check()
    ranks[1].check()


@pytest.mark.parametrize("direction", ["dispatch", "combine"])
def test_a_rank_whose_pieces_do_not_come_is_named(direction: str) -> None:
    """Also one that has no row for whoever waits."""
    ranks = make(3, 8, torch.float32)
    ids = [random_ids(3, torch.Generator().manual_seed(5))[1]] * 2 + [torch.full((2, TOP_K), -1)]
    plans, xs = plan_all(ranks, ids, layer=6), [torch.randn(len(table), 8) for table in ids]
    plan, out = plans[0], torch.zeros(plans[0].num_rows, 8)
    if direction == "dispatch":
        for other, x in zip(plans[:2], xs, strict=False):
            tables = other.tokens_NT, other.routes, other.totals
            move_there(
                other.exchange, x, *no_side(x), *tables, Received(out, *no_side(out)), tag_of(6, DISPATCH), "model", PUT
            )
        tables = plan.tokens_NT, plan.routes, plan.totals
        move_there(
            plan.exchange,
            xs[0],
            *no_side(xs[0]),
            *tables,
            Received(out, *no_side(out)),
            tag_of(6, DISPATCH),
            "model",
            TAKE,
        )
    else:
        for other, side in ((plans[0], PUT), (plans[1], PUT), (plans[0], TAKE)):
            sums = torch.zeros(other.num_tokens, 8)
            rest = other.index_NT, other.routes, sums, sums[:, :0], tag_of(6, COMBINE)
            move_back(other.exchange, out, out[:, :0], *rest, "model", side)
    with pytest.raises(RuntimeError, match=f"rank 0 waited for rank 2 in {direction} of MoE layer 6 .*epoch 0"):
        ranks[0].check()


def test_a_receiver_that_does_not_take_is_named_by_its_sender() -> None:
    """The second put may not overwrite what rank 1 has not read."""
    ranks = make(2, 8, torch.float32)
    sent = sent_by(random_ids(2, torch.Generator().manual_seed(6)))
    for exchange, counts in zip(ranks, sent, strict=True):
        exchange_counts(exchange, counts, tag_of(0, PLAN), 100, PUT)
    exchange_counts(ranks[0], sent[0], tag_of(0, PLAN), 100, TAKE)
    ranks[0].check()
    exchange_counts(ranks[0], sent[0], tag_of(1, PLAN), 100, PUT)
    with pytest.raises(RuntimeError, match="rank 0 waited for rank 1 in plan of MoE layer 1"):
        ranks[0].check()


def test_ranks_in_different_layers_are_an_error() -> None:
    ranks = make(2, 8, torch.float32)
    sent = sent_by(random_ids(2, torch.Generator().manual_seed(7)))
    for layer, (exchange, counts) in enumerate(zip(ranks, sent, strict=True)):
        exchange_counts(exchange, counts, tag_of(layer, PLAN), 100, PUT)
    exchange_counts(ranks[0], sent[0], tag_of(0, PLAN), 100, TAKE)
    with pytest.raises(RuntimeError, match=r"in plan of MoE layer 0 .*that rank was in plan of MoE layer 1, epoch 1"):
        ranks[0].check()


def test_after_a_failure_nothing_waits_again() -> None:
    """Otherwise a broken run would spend its limit at every wait that was already queued."""
    ranks = make(2, 8, torch.float32)
    sent = sent_by(random_ids(2, torch.Generator().manual_seed(7)))[0]
    exchange_counts(ranks[0], sent, 0, 100, TAKE)
    first = ranks[0].errors.clone()
    # With a limit that no test would live to see.
    exchange_counts(replace(ranks[0], limit=2**40), sent, 0, 100, TAKE)
    assert torch.equal(ranks[0].errors, first)
