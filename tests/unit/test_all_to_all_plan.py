"""The plan of an exchange and its byte records, without processes: the exchange itself is played on lists.

Everything here moves data, so equality is exact.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from comms.all_to_all import (
    RECORD_ALIGNMENT,
    _send_order,
    combine,
    dispatch,
    items_by_rank,
    pack,
    plan_dispatch,
    unpack,
)
from comms.kernels.gather_sum import gather_sum_reference

bool_tables = st.integers(1, 5).flatmap(
    lambda num_ranks: st.lists(st.lists(st.booleans(), min_size=num_ranks, max_size=num_ranks), max_size=9).map(
        lambda rows: torch.tensor(rows, dtype=torch.bool).view(-1, num_ranks)
    )
)


@settings(max_examples=60, deadline=None)
@given(bool_tables)
def test_rows_are_sent_by_destination_then_token(is_sent_TN: Tensor) -> None:
    num_sent = int(is_sent_TN.sum())
    slots_TN, send_tokens_S = _send_order(is_sent_TN, num_sent)
    expected = [(rank, token) for rank in range(is_sent_TN.shape[1]) for token in range(is_sent_TN.shape[0])]
    expected = [(rank, token) for rank, token in expected if is_sent_TN[token, rank]]
    assert send_tokens_S.tolist() == [token for _, token in expected]
    # The slots are the inverse: -1 exactly where nothing is sent, else the place among the sent rows.
    assert torch.equal(slots_TN >= 0, is_sent_TN)
    assert [int(slots_TN[token, rank]) for rank, token in expected] == list(range(num_sent))


@st.composite
def worlds(draw):
    """For each of N ranks, the items of its tokens on every rank."""
    num_ranks = draw(st.integers(1, 4))
    row = st.lists(st.integers(0, 3), min_size=num_ranks, max_size=num_ranks)
    tables = [draw(st.lists(row, max_size=6)) for _ in range(num_ranks)]
    return [torch.tensor(table, dtype=torch.int64).view(-1, num_ranks) for table in tables]


@settings(max_examples=1000, deadline=None)
@given(worlds())
def test_simulated_round_trip_brings_every_sum_home(items: list[Tensor]) -> None:
    """Rank n multiplies what it gets by 10^n: every token must come back with its own sum, and nobody else's."""
    num_ranks = len(items)
    orders = [_send_order(table > 0, int((table > 0).sum())) for table in items]
    counts = [(table > 0).sum(0).tolist() for table in items]
    tokens = [
        torch.arange(table.shape[0], dtype=torch.float64)[:, None] + 100 * rank + 1 for rank, table in enumerate(items)
    ]
    sent = [x[order].split(count) for x, (_, order), count in zip(tokens, orders, counts, strict=True)]
    returned = [[sent[rank][other] * 10.0**other for other in range(num_ranks)] for rank in range(num_ranks)]
    for rank, table in enumerate(items):
        assert sum(counts[rank]) == int((table > 0).sum())
        out_TD = gather_sum_reference(torch.cat(returned[rank]), orders[rank][0])
        scale_T = ((table > 0) * 10.0 ** torch.arange(num_ranks)).sum(1, keepdim=True)
        assert torch.equal(out_TD, tokens[rank] * scale_T)


COLUMNS = st.tuples(
    st.sampled_from([torch.bfloat16, torch.float32, torch.float64, torch.uint8, torch.int32]), st.integers(1, 9)
)


@settings(max_examples=80, deadline=None)
@given(st.lists(COLUMNS, min_size=1, max_size=4), st.integers(0, 3))
def test_records_give_back_what_was_packed(columns: list[tuple[torch.dtype, int]], num_rows: int) -> None:
    """Any dtypes and widths, also where only one row or none arrives (its columns then start unaligned)."""
    # Wider dtypes first, as callers do, would hide unaligned columns: keep the drawn order.
    tensors = [(torch.rand(num_rows, width) * 100).to(dtype) for dtype, width in columns]
    record = pack(tensors)
    assert record.dtype == torch.uint8 and record.shape[0] == num_rows
    assert record.shape[1] % RECORD_ALIGNMENT == 0
    assert record.shape[1] - sum(t.shape[1] * t.element_size() for t in tensors) < RECORD_ALIGNMENT
    for ours, given_ in zip(unpack(record, tensors), tensors, strict=True):
        assert ours.dtype == given_.dtype and ours.is_contiguous() and torch.equal(ours, given_)


def test_a_single_record_of_odd_width() -> None:
    """bf16 rows of width 5 put the fp32 weights at byte 10: found with a rank that received one row."""
    tensors = [
        torch.ones(1, 5, dtype=torch.bfloat16),
        torch.full((1, 3), 2.0),
        torch.full((1, 3), 3, dtype=torch.int32),
    ]
    for ours, given_ in zip(unpack(pack(tensors), tensors), tensors, strict=True):
        assert torch.equal(ours, given_)


def test_columns_of_width_one_may_have_any_stride() -> None:
    """Routing weights of top-1: a transposed row counts as contiguous, as does what an operator returns for no rows."""
    for column in (torch.arange(4.0)[None].t(), torch.arange(4.0)[None].t()[:0], torch.rand(0, 1) * 2):
        (back,) = unpack(pack([column]), [column])
        assert torch.equal(back, column)


def test_packing_keeps_every_bit_of_a_nan() -> None:
    bits = torch.tensor([[0x7FC1, 0x7F80, -1, 0x0001]], dtype=torch.int16)
    (back,) = unpack(pack([bits.view(torch.bfloat16)]), [bits.view(torch.bfloat16)])
    assert torch.equal(back.view(torch.int16), bits)


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_items_are_counted_by_rank(num_ranks: int) -> None:
    ids_TK = torch.randint(-1, 4 * num_ranks, (50, 5), generator=torch.Generator().manual_seed(0))
    ids_TK[7] = -1
    counted = [[sum(id >= 0 and id // 4 == n for id in ids) for n in range(num_ranks)] for ids in ids_TK.tolist()]
    assert items_by_rank(ids_TK, num_ranks, 4).tolist() == counted and not any(counted[7])


@pytest.mark.parametrize("num_tokens", [0, 3])
def test_one_rank_is_the_identity(num_tokens: int) -> None:
    items_TN = torch.ones(num_tokens, 1, dtype=torch.int64)
    plan = plan_dispatch(items_TN, None)
    assert (plan.num_rows, plan.num_items, plan.group_name) == (num_tokens, num_tokens, "")
    x_TD, weights_TK, ids_TK = torch.randn(num_tokens, 4), torch.rand(num_tokens, 2), torch.ones(num_tokens, 2).long()
    assert all(
        a is b for a, b in zip(dispatch(plan, x_TD, weights_TK, ids_TK), (x_TD, weights_TK, ids_TK), strict=True)
    )
    assert combine(plan, x_TD) is x_TD


def test_a_known_total_is_not_counted_again() -> None:
    plan = plan_dispatch(torch.ones(3, 1, dtype=torch.int64), None, num_items=17)
    assert plan.num_items == 17 and plan.is_exact
    assert not plan_dispatch(torch.ones(3, 1, dtype=torch.int64), None, num_items=17, is_exact=False).is_exact
