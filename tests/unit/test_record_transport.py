"""Sizes of records and of the buffers that they travel in; what moves them is tested between processes."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from comms.backend import choose_backend
from comms.config import CommsConfig
from comms.record_exchange import RecordLayout, count_bytes, plan_record_layout
from comms.record_transport import aligned_record, as_records


@pytest.mark.parametrize(("num_bytes", "record"), [(0, 16), (1, 16), (16, 16), (17, 32)])
def test_records_are_read_in_whole_units(num_bytes: int, record: int) -> None:
    assert aligned_record(num_bytes) == record


@given(
    st.integers(2, 64), st.integers(1, 2000), st.integers(1, 16), st.integers(1, 3000), st.sampled_from([2, 4, 8]),
    st.none() | st.floats(0.1, 80),
)  # fmt: skip
def test_buffers_have_room_for_everything_that_travels(
    num_ranks: int, tokens: int, copies: int, pairs: int, itemsize: int, capacity: float | None
) -> None:
    row, side = 2 * pairs * itemsize, (max(itemsize, 4) + 4) * copies
    layout = plan_record_layout(num_ranks, tokens, copies, row, side, capacity)
    assert isinstance(layout, RecordLayout) and layout.num_bytes == 3 * layout.buffer_bytes
    # Rows, rows coded as mxfp8, with side columns or without; counts.
    coded = -(-(2 * pairs + -(-2 * pairs // 32)) // 16) * 16
    for record in (row + side, row, coded + side if itemsize < 8 else row):
        rows = layout.buffer_bytes // aligned_record(record)
        assert rows >= max(layout.row_bound, layout.return_bound)
    assert layout.buffer_bytes >= num_ranks * count_bytes(num_ranks)


def test_a_buffer_has_whole_records() -> None:
    records = as_records(torch.zeros(100, dtype=torch.uint8), 48)
    assert records.shape == (2, 48) and records.is_contiguous()


def test_rows_that_are_not_whole_words_are_refused() -> None:
    with pytest.raises(ValueError, match=r"multiple of 4 bytes, not 10: make model\.dim a multiple of 2"):
        plan_record_layout(2, 10, 2, 10, 8)


def test_an_unknown_backend_names_those_there_are() -> None:
    class Two:
        def size(self) -> int:
            return 2

    with pytest.raises(ValueError, match="use auto, collective, symm_mem or nvshmem"):
        choose_backend(CommsConfig(backend="nccl"), Two(), torch.device("cpu"))  # type: ignore[arg-type]
