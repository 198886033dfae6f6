"""Sizes of the arena of what is kept for backward, who is alive in it, and what a shortage says; the kernels that write
there are tested by tests/interpreter.
"""

import itertools
import math
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from comms.config import CommsConfig
from comms.saved_arena import SavedArena, SavedRoom, make_saved_arena, plan_saved
from comms.symmetric_exchange import describe_tag, tag_of
from comms.symmetric_memory import (
    ArenaLayout,
    NoRoomError,
    forget_exchanges,
    overflow_flag,
    register,
)
from moe.config import MoEConfig
from moe.layer import MoE
from parallel.expert_parallel import _check_chunks, expected_rows, share_saved, use_exchange
from tests.simulated_exchanges import simulated_exchanges

CPU = torch.device("cpu")


def arena(room: SavedRoom | None = None) -> SavedArena:
    return make_saved_arena(room or SavedRoom(40, 60, 30, 50, 3), 8, 2, 16, torch.bfloat16, CPU)


def test_room_is_the_expected_load_times_headroom_between_one_layer_and_all() -> None:
    assert plan_saved(10, 1.25, (100, 400), (80, 640)) == SavedRoom(1250, 1000, 1000, 800, 10)
    # One layer may bring all at once.
    assert plan_saved(2, 1.25, (100, 400), (80, 640)) == SavedRoom(400, 640, 200, 160, 2)
    # More can never come.
    assert plan_saved(10, 9.0, (100, 400), (80, 640)) == SavedRoom(4000, 6400, 1000, 800, 10)
    assert plan_saved(10, 1.1, (100, 400), (80, 640)).num_rows == 1100


@given(st.integers(1, 100), st.floats(1, 20), st.integers(0, 5000), st.floats(0, 1))
def test_one_layer_always_finds_room(layers: int, headroom: float, most: int, part: float) -> None:
    room = plan_saved(layers, headroom, (most * part, most), (most * part, most))
    assert most <= room.num_rows <= layers * most and room.num_items == room.num_rows
    assert room.num_rows >= min(math.floor(headroom * layers * most * part), layers * most) - layers


def test_rows_are_expected_as_if_every_choice_were_as_likely() -> None:
    """Against counting: the ranks that hold some of a token's experts."""
    for experts, top_k, ranks in ((8, 2, 2), (8, 2, 4), (6, 3, 3), (8, 8, 4), (4, 1, 1)):
        choices = list(itertools.combinations(range(experts), top_k))
        reached = sum(len({expert // (experts // ranks) for expert in choice}) for choice in choices)
        config = MoEConfig(num_experts=experts, top_k=top_k)
        assert expected_rows(config, ranks, 100) == pytest.approx(100 * reached / len(choices))


def no_kernel(ends: Tensor, totals: Tensor, base: Tensor, overflow: Tensor, depth: int, *more: object) -> None:
    base.fill_(depth)


def forgotten(saved: SavedArena) -> int:
    """Number of a place that nobody keeps."""
    return int(saved.reserve(torch.zeros(2, dtype=torch.int32), 9, 0)[0])


@patch("comms.saved_arena.launch_reserve", no_kernel)
def test_places_are_a_stack_of_those_that_are_alive() -> None:
    saved, totals = arena(), torch.zeros(2, dtype=torch.int32)
    first, second, third = (saved.reserve(totals, 9, 0) for _ in range(3))
    assert [int(base[0]) for base in (first, second, third)] == [0, 1, 2] and saved.num_alive == 3
    # Out of order: its place is free when those above are.
    saved.give_back(second)
    fourth = saved.reserve(totals, 9, 0)
    assert int(fourth[0]) == 3 and saved.num_alive == 3
    saved.give_back(fourth)
    saved.give_back(third)
    assert forgotten(saved) == 1 and saved.num_alive == 1
    # The last one is forgotten by now; the first one as well, whatever was made of it.
    kept = first.detach()
    del first
    saved.check(kept)
    assert forgotten(saved) == 1
    del kept
    assert saved.num_alive == 0 and forgotten(saved) == 0
    with pytest.raises(RuntimeError, match=r"gradients were asked for twice.*comms.saved_headroom=null"):
        saved.check(second)


@patch("comms.saved_arena.launch_reserve", no_kernel)
@patch("comms.saved_arena.MAX_ENTRIES", 2)
def test_graphs_that_nobody_ends_are_told() -> None:
    saved = arena()
    bases = [saved.reserve(torch.zeros(2, dtype=torch.int32), 9, 0) for _ in range(2)]
    with pytest.raises(RuntimeError, match="2 dispatches wait for their backward"):
        saved.reserve(torch.zeros(2, dtype=torch.int32), 9, 0)
    del bases


def test_a_shortage_names_a_headroom_that_is_enough() -> None:
    exchange = simulated_exchanges(ArenaLayout(2, 20, 20, 16, 8), 10, describe_tag=describe_tag)[0]
    saved = arena()
    exchange = register(replace(exchange, saved=saved, global_ranks=(4, 6)))
    flag = overflow_flag()
    assert flag is not None and float(flag) == 0
    exchange.check_overflow()
    saved.overflow[3:] = torch.tensor([77, 60, tag_of(2, 1)], dtype=torch.int32)
    flag = overflow_flag()
    assert flag is not None and float(flag) == 1
    with pytest.raises(NoRoomError, match=r"layer 2: on rank 4 77 pairs of up to 3 .* for 60: .*headroom to 1\.54 "):
        exchange.check_overflow()
    saved.overflow[:3] = torch.tensor([41, 40, tag_of(1, 1)], dtype=torch.int32)
    with pytest.raises(NoRoomError, match=r"dispatch of MoE layer 1: .* 4 41 rows .* for 40: .*headroom to 1\.54 "):
        exchange.check_overflow()
    forget_exchanges()


def test_a_run_says_what_layers_keep() -> None:
    config = MoEConfig(num_experts=8, top_k=2, expert_dim=16, backend="fused")
    layers = [MoE(config, 8) for _ in range(4)]
    exchange = simulated_exchanges(ArenaLayout(2, 20, 20, 16, 8), 10)[0]
    found = share_saved(layers, exchange, 1.25, True, torch.bfloat16)
    saved = found.saved
    assert saved is not None and saved.hidden_IH is not None and saved.hidden_IH.shape == (100, 32)
    assert saved.num_bytes == saved.room.num_bytes(8, 2, 32, 2)
    whole = saved.entry_bytes(saved.room.num_rows, saved.room.num_items)
    assert whole == saved.num_bytes - saved.ends.nbytes and saved.entry_bytes(1, 0) == 8 * 2 + 2 * 4
    said = use_exchange(layers, found)
    assert f"; {saved.num_bytes:,} bytes (0.00 GiB) for what 4 layers keep for backward: 79 rows and 100 pairs" in said
    assert said.endswith("where 63 and 80 are expected") and all(layer.exchange is found for layer in layers)
    assert share_saved(layers, exchange, 1.25, False, torch.bfloat16).saved.hidden_IH is None  # type: ignore[union-attr]
    assert "keep for backward" not in use_exchange(layers, exchange)
    forget_exchanges()


def test_an_arena_without_rows_that_travel_is_refused() -> None:
    layers = [MoE(MoEConfig(backend="grouped_mm"), 8)]
    for backend in ("collective", "symm_mem"):
        with pytest.raises(ValueError, match=r"comms.saved_headroom=1.5 .* needs comms.backend=symm_mem and.*=null"):
            _check_chunks(layers, CommsConfig(saved_headroom=1.5), backend, torch.float32, CPU)
    _check_chunks(layers, CommsConfig(saved_headroom=1.5), "none", torch.float32, CPU)
