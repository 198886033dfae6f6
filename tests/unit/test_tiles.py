"""The choice of tiles: measured once, kept, shared by processes, never taken from a damaged or foreign file."""

import json
from multiprocessing import get_context
from pathlib import Path

import pytest

from moe import tiles
from moe.tiles import CANDIDATES, Tile, cache_folder, choose_tiles, tile_for

SHAPE = (8, 64, 32)
WORK = ("weight_grad", SHAPE)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLUICEGATE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(tiles, "_chosen", {})


def clock(times: dict[Tile, float], log: list[Tile]):
    """Tells the time of the tile that a launch would take now."""

    def milliseconds(work: object) -> float:
        log.append(tile_for(*WORK))
        return times[tile_for(*WORK)]

    return milliseconds


def slow_first() -> dict[Tile, float]:
    return {tile: float(len(CANDIDATES["weight_grad"]) - i) for i, tile in enumerate(CANDIDATES["weight_grad"])}


def test_the_fastest_is_chosen_kept_and_not_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    assert tile_for(*WORK) == CANDIDATES["weight_grad"][0]
    launches: list[Tile] = []
    log: list[Tile] = []
    best = CANDIDATES["weight_grad"][-1]
    choices = choose_tiles({WORK: lambda: launches.append(tile_for(*WORK))}, "card", clock(slow_first(), log))
    assert choices == {WORK: best} and tile_for(*WORK) == best
    # Every candidate was launched before it was measured.
    assert list(dict.fromkeys(launches)) == list(CANDIDATES["weight_grad"]) == list(dict.fromkeys(log))

    monkeypatch.setattr(tiles, "_chosen", {})
    log.clear()
    assert choose_tiles({WORK: lambda: None}, "card", clock(slow_first(), log)) == {WORK: best}
    assert not log and tile_for(*WORK) == best


def test_another_card_or_shape_is_measured_for_itself() -> None:
    log: list[Tile] = []
    choose_tiles({WORK: lambda: None}, "card", clock(slow_first(), log))
    measured = len(log)
    choose_tiles({WORK: lambda: None}, "other card", clock(slow_first(), log))
    assert len(log) == 2 * measured
    assert tile_for("weight_grad", (9, 64, 32)) == CANDIDATES["weight_grad"][0]
    assert len(json.loads((cache_folder() / "tiles.json").read_text())) == 2


@pytest.mark.parametrize(
    "content",
    ["", "{", "[1]", '{"card | weight_grad | 8 x 64 x 32": [1, 2]}', '{"card | weight_grad | 8 x 64 x 32": 3}'],
)
def test_what_is_no_candidate_is_measured_again(content: str) -> None:
    cache_folder().mkdir(parents=True)
    (cache_folder() / "tiles.json").write_text(content)
    log: list[Tile] = []
    choices = choose_tiles({WORK: lambda: None}, "card", clock(slow_first(), log))
    assert choices == {WORK: CANDIDATES["weight_grad"][-1]} and log
    log.clear()
    choose_tiles({WORK: lambda: None}, "card", clock(slow_first(), log))
    assert not log


def test_where_there_is_one_candidate_nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CANDIDATES, "up", CANDIDATES["up"][:1])
    log: list[Tile] = []
    assert choose_tiles({("up", SHAPE): lambda: log.append(tile_for("up", SHAPE))}, "card", clock({}, log)) == {}
    assert not log and tile_for("up", SHAPE) == CANDIDATES["up"][0]


def test_a_launch_that_fails_is_told_and_leaves_no_choice() -> None:
    def fail() -> None:
        raise RuntimeError("no such kernel")

    with pytest.raises(RuntimeError, match="no such kernel"):
        choose_tiles({WORK: fail}, "card", clock(slow_first(), []))
    assert not (cache_folder() / "tiles.json").exists()
    assert tile_for(*WORK) == CANDIDATES["weight_grad"][0]


def _process(results) -> None:
    log: list[Tile] = []
    choices = choose_tiles({WORK: lambda: None}, "card", clock(slow_first(), log))
    results.put((choices[WORK], len(log)))


def test_of_several_processes_one_measures() -> None:
    context = get_context("fork")
    results = context.Queue()
    processes = [context.Process(target=_process, args=(results,)) for _ in range(4)]
    for process in processes:
        process.start()
    found = [results.get(timeout=60) for _ in processes]
    for process in processes:
        process.join(60)
    assert {tile for tile, _ in found} == {CANDIDATES["weight_grad"][-1]}
    assert sum(measured > 0 for _, measured in found) == 1
