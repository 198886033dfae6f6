"""What launch_down_backward has beside each other, by streams that compute nothing: is each read behind its write?

A launch happens before another if a chain of streams' order, events and joins leads from one to the other. Two launches
that touch the same memory, one of them to write, must be in such an order.
"""

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from moe import fused_launches
from moe.fused_launches import Lanes, launch_down_backward

Places = set[tuple[str, int]]


class Stream:
    """Remembers all that happens before whatever comes next."""

    def __init__(self) -> None:
        self.before: set[int] = set()

    def wait_stream(self, other: "Stream") -> None:
        self.before |= other.before

    def wait_event(self, event: "Event") -> None:
        self.before |= event.before


class Event:
    def __init__(self) -> None:
        self.before: set[int] = set()

    def record(self, stream: Stream) -> None:
        self.before = set(stream.before)


class Recorder:
    """Launches in order, each with what happens before it and what it touches."""

    def __init__(self) -> None:
        self.main, self.products = Stream(), Stream()
        self.current = self.main
        self.launches: list[tuple[str, set[int], Places, Places]] = []

    @contextlib.contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        outer, self.current = self.current, stream
        yield
        self.current = outer

    def note(self, name: str, reads: Places, writes: Places) -> None:
        self.launches.append((name, set(self.current.before), reads, writes))
        self.current.before.add(len(self.launches) - 1)

    def conflicts(self) -> list[tuple[str, str]]:
        found = []
        for (i, one), (j, other) in itertools.combinations(enumerate(self.launches), 2):
            touched = (one[3] & (other[2] | other[3])) | (one[2] & other[3])
            if touched and i not in other[1] and j not in one[1]:
                found.append((one[0], other[0]))
        return found


@pytest.fixture(name="recorder")
def _recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    recorder = Recorder()

    def streams(lanes: Lanes, like: torch.Tensor) -> None:
        lanes.streams = (recorder.main, recorder.products)  # type: ignore[assignment]

    monkeypatch.setattr(Lanes, "__init__", streams)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "stream", recorder.on)
    monkeypatch.setattr(fused_launches, "LEAST_OF_PART", 0)
    return recorder


def launch(recorder: Recorder, monkeypatch: pytest.MonkeyPatch, parts: int) -> None:
    """With four experts; what a launch touches is told by the part of the experts, or by all parts."""

    def of(part: int | None, *names: str) -> Places:
        return {(name, n) for name in names for n in (range(parts) if part is None else [part])}

    def rows(kernel: str, *_: Any, chunk: int, **__: Any) -> None:
        recorder.note(f"da of {chunk}", of(chunk, "dout"), of(chunk, "a"))

    def act_grad(*_: Any, chunk: int, **__: Any) -> None:
        recorder.note(f"act of {chunk}", of(chunk, "a"), of(chunk, "a", "dh", "dots"))

    def weight_grad(*_: Any, chunk: int, **__: Any) -> None:
        recorder.note(f"dW of {chunk}", of(chunk, "dout", "a"), of(chunk, "dw"))

    def expand(_: Any, __: Any, out_PD: torch.Tensor, part: Any = None) -> None:
        which = None if part is None else part.first * parts // 4
        recorder.note(f"expand {which}", set(), of(which, "dout" if out_PD is made["dout_PD"] else "rows"))

    made = {name: torch.empty(1) for name in ("dout_PD", "rows_PD", "a_PF", "dh_PH", "dots_P", "dw_EDF")}
    monkeypatch.setattr(fused_launches, "EXPERT_PARTS", parts)
    for name, fake in (("rows", rows), ("act_grad", act_grad), ("weight_grad", weight_grad), ("expand", expand)):
        monkeypatch.setattr(fused_launches, f"launch_{name}", fake)
    x = torch.empty(4, 1)
    launch_down_backward(x, x, x, x, torch.empty(4, 1, 1), x, x, "swiglu", **made)


@pytest.mark.parametrize("parts", [1, 2, 4])
def test_what_touches_the_same_memory_is_in_order(
    parts: int, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch(recorder, monkeypatch, parts)
    names = [name for name, *_ in recorder.launches]
    of_parts = [f"{what} {n}" for what in ("expand", "da of", "act of", "dW of") for n in range(parts)]
    assert sorted(names) == sorted([*of_parts, "expand None"])
    assert recorder.conflicts() == []
    # What comes next on the caller's stream comes after all of them.
    assert recorder.main.before == set(range(len(names)))
    # And something is beside something, or streams would be for nothing.
    beside = [i not in other[1] for i, other in enumerate(recorder.launches[1:])]
    assert any(beside)


@pytest.mark.parametrize("forgotten", ["wait_event", "wait_stream"])
def test_a_forgotten_wait_is_found(forgotten: str, recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    def forget(*_: Any) -> None:
        return None

    original: Callable[..., None] = getattr(Stream, forgotten)
    monkeypatch.setattr(Stream, forgotten, forget)
    launch(recorder, monkeypatch, 2)
    monkeypatch.setattr(Stream, forgotten, original)
    assert recorder.conflicts() != []
