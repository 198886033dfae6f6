"""Sizes of an arena, what errors say, and which backend a run gets; the kernels are tested by tests/interpreter."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from comms.backend import BackendChoice, choose_backend
from comms.config import CommsConfig
from comms.put_and_take import chunk_bound, chunk_ends
from comms.symmetric_exchange import STEPS, describe_tag, plan_exchange, tag_of
from comms.symmetric_memory import (
    ArenaLayout,
    Exchange,
    NoRoomError,
    exposed_seconds,
    forget_exchanges,
    overflow_flag,
    plan_layout,
    register,
)
from moe.config import MoEConfig
from moe.layer import MoE
from parallel.expert_parallel import _check_chunks, use_exchange
from tests.simulated_exchanges import simulated_exchanges


@given(st.integers(1, 72), st.integers(0, 5000), st.integers(1, 16), st.integers(1, 9), st.floats(0.01, 80))
def test_regions_do_not_overlap(num_ranks: int, tokens: int, copies: int, sixteens: int, capacity: float) -> None:
    layout = plan_layout(num_ranks, tokens, copies, 16 * sixteens, 8 * copies, capacity, max_chunks=copies)
    begins = [layout.table_at, layout.rows_at, layout.side_at, layout.returns_at, layout.return_side_at]
    sizes = [8 * copies * num_ranks**2, layout.row_bound * layout.row_bytes, layout.row_bound * layout.side_bytes]
    sizes += [layout.return_bound * layout.row_bytes, layout.return_bound * layout.side_bytes]
    assert begins[0] >= 8 * (layout.failed_at + 1) and all(begin % 256 == 0 for begin in begins)
    for begin, size, end in zip(begins, sizes, [*begins[1:], layout.num_bytes], strict=True):
        assert begin + size <= end
    flags = [layout.flags_at(channel) for channel in range(3)]
    # Of each channel: epoch, programs done, a credit of each rank, and a flag for each of its pieces.
    words = 2 + num_ranks + num_ranks * layout.max_pieces
    assert flags == [0, words, 2 * words] and layout.failed_at == 3 * words


def test_bounds_are_the_worst_case_or_what_was_asked_for() -> None:
    assert plan_layout(4, 100, 8, 16, 8).row_bound == 400
    assert plan_layout(4, 100, 8, 16, 8, 1.5).row_bound == 150
    assert plan_layout(4, 100, 8, 16, 8, 1.001).row_bound == 101
    assert plan_layout(4, 100, 8, 16, 8, 9.0).row_bound == 400
    assert [plan_layout(4, 100, copies, 16, 8).return_bound for copies in (1, 3, 8)] == [100, 300, 400]


def test_rows_that_are_no_multiple_of_16_bytes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"multiple of 16 bytes, not 20: make model\.dim a multiple of 8"):
        plan_layout(2, 10, 2, 20, 8)


def test_tags_name_layer_and_step() -> None:
    tags = [tag_of(layer, step) for layer in range(100) for step in range(len(STEPS))]
    assert len(set(tags)) == len(tags) and max(tags) < 2**16
    assert describe_tag(tag_of(3, 2)) == "combine of MoE layer 3"


def exchange() -> Exchange:
    return simulated_exchanges(ArenaLayout(2, 20, 20, 16, 8), 10, describe_tag=describe_tag)[0]


def test_errors_name_the_rank_of_the_run_not_of_the_group() -> None:
    found = replace(exchange(), global_ranks=(4, 6))
    found.check()
    found.errors[:5] = torch.tensor([1, tag_of(3, 1), 17, 1, 16 << 16])
    with pytest.raises(RuntimeError, match=r"rank 4 waited for rank 6 in dispatch of MoE layer 3 .*epoch 17.*epoch 16"):
        found.check()
    forget_exchanges()


def test_an_overflow_names_a_setting_that_is_enough() -> None:
    """Three digits of need never become two of less."""
    found = replace(exchange(), items_per_token=3)
    flag = overflow_flag()
    assert flag is not None and float(flag) == 0
    found.check_overflow()
    found.overflow[3:] = torch.tensor([121, 60, tag_of(2, 0)], dtype=torch.int32)
    flag = overflow_flag()
    assert flag is not None and (float(flag), flag.dtype) == (1, torch.float32)
    with pytest.raises(NoRoomError, match=r"MoE layer 2: 121 pairs .* room for 60: raise .*pair_capacity to 4\.04 or"):
        found.check_overflow()
    found.overflow[:3] = torch.tensor([1001, 20, tag_of(1, 0)], dtype=torch.int32)
    with pytest.raises(NoRoomError, match=r"MoE layer 1: 1001 rows .* room for 20: raise comms.capacity to 100\.10 or"):
        found.check_overflow()
    forget_exchanges()
    assert overflow_flag() is None


def test_pairs_have_room_for_what_was_asked_or_all_that_can_come() -> None:
    """20 rows of up to 2 of the 4 experts here; balanced are 10 tokens x 2."""
    config = MoEConfig(num_experts=8, top_k=2)
    for pair_capacity, room in ((None, 40), (1.0, 20), (1.501, 31), (5.0, 40)):
        assert MoE(replace(config, pair_capacity=pair_capacity), 8).pair_room(exchange()) == room
    layers = [MoE(config, 8) for _ in range(2)]
    assert "room for 20 rows and 40 (row, expert) pairs" in use_exchange(layers, exchange())
    assert [layer.number for layer in layers] == [0, 1] and all(layer.exchange is not None for layer in layers)
    forget_exchanges()


def test_chunks_that_nobody_could_let_travel_are_refused() -> None:
    layers = [MoE(MoEConfig(backend="grouped_mm"), 8)]
    for backend in ("collective", "symm_mem"):
        with pytest.raises(ValueError, match=r"comms.chunks=2 .* needs comms.backend=symm_mem and"):
            _check_chunks(layers, CommsConfig(chunks=2), backend, torch.float32, torch.device("cpu"))
    _check_chunks(layers, CommsConfig(chunks=2), "none", torch.float32, torch.device("cpu"))


def test_chunks_are_whole_blocks_of_tokens_and_as_equal_as_these_allow() -> None:
    assert chunk_ends(8192, 4) == [2048, 4096, 6144, 8192]
    assert chunk_ends(1000, 3) == [256, 512, 1000] and chunk_bound(1000, 3) == 512
    assert chunk_ends(100, 3) == [0, 0, 100] and chunk_ends(0, 2) == [0, 0]


def test_what_was_waited_for_is_told_once() -> None:
    class At:
        def __init__(self, milliseconds: float) -> None:
            self.milliseconds = milliseconds

        def elapsed_time(self, other: "At") -> float:
            return other.milliseconds - self.milliseconds

    forget_exchanges()
    register(replace(exchange(), waits=[(At(1), At(3)), (At(4), At(9))]))
    assert exposed_seconds() == pytest.approx(7e-3) and exposed_seconds() == 0
    forget_exchanges()


def test_more_tokens_than_the_arena_was_made_for_are_refused() -> None:
    with pytest.raises(ValueError, match="11 tokens in one pass, and this run's exchange has room for 10 per rank"):
        plan_exchange(torch.ones(11, 2, dtype=torch.int64), 1, exchange(), 0, 100)
    forget_exchanges()


def test_a_rank_alone_exchanges_nothing() -> None:
    for backend in ("auto", "collective", "symm_mem", "nvshmem"):
        choice = choose_backend(CommsConfig(backend=backend), None, torch.device("cpu"))
        unused = "" if backend in ("auto", "collective") else f"comms.backend={backend}"
        assert choice == BackendChoice("none", "no row leaves its rank", unused=unused)
