"""Traces of steps: which, by whom, and what becomes of them when a run ends early or cannot write."""

import gzip
import json
from pathlib import Path

import pytest
import torch

from trainer.config import ProfileConfig
from trainer.profiler import StepProfiler


def traced(folder: Path, config: ProfileConfig, first: int, last: int) -> tuple[list[str], list[str]]:
    """What an attempt at these steps says, and the operators in its trace."""
    said: list[str] = []
    profiler = StepProfiler(config, folder, said.append)
    for step in range(first, last + 1):
        profiler.before(step, is_first=step == first)
        torch.ones(step)
        profiler.after(step)
    profiler.close()
    files = list((folder / "profile").glob("*")) if (folder / "profile").is_dir() else []
    if not files:
        return said, []
    (file,) = files
    assert file.name == f"steps_{config.start}_to_{min(config.start + config.steps - 1, last)}.json.gz"
    events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    return said, [event["name"] for event in events if event.get("cat") == "cpu_op"]


@pytest.mark.parametrize(
    ("first", "last", "number"),
    [
        # The step before is not in the trace.
        (1, 6, 2),
        (3, 6, 2),
        (4, 6, 2),
        # An attempt that begins after profile.start.
        (5, 6, 0),
        # One that ends in the middle, and one that ends before.
        (1, 4, 1),
        (1, 3, 0),
    ],
)
def test_steps_of_an_attempt_are_traced(first: int, last: int, number: int, tmp_path: Path) -> None:
    said, operators = traced(tmp_path, ProfileConfig(steps=2, start=4), first, last)
    assert operators.count("aten::ones") == number
    assert len(said) == (number > 0) and all("trace of rank 0: " in line for line in said)


def test_an_attempt_that_traced_nothing_says_so_and_a_failure_is_left_alone(tmp_path: Path) -> None:
    said: list[str] = []
    profiler = StepProfiler(ProfileConfig(steps=2, start=4), tmp_path, said.append)
    with profiler.ended(5):
        pass
    assert said == ["no step was traced: an attempt from step 5 on did none from profile.start=4"]
    with StepProfiler(ProfileConfig(), tmp_path, said.append).ended(1):
        pass
    with pytest.raises(RuntimeError, match="the cause"), profiler.ended(4):
        profiler.before(4, is_first=True)
        raise RuntimeError("the cause")
    # Stopping would have waited for the device.
    assert profiler.profiler is not None and len(said) == 1
    profiler.close()


def test_nothing_is_traced_unless_asked_for(tmp_path: Path) -> None:
    assert traced(tmp_path, ProfileConfig(), 1, 20) == ([], [])
    assert not list(tmp_path.iterdir())


def test_a_trace_that_cannot_be_written_is_told_and_the_run_goes_on(tmp_path: Path) -> None:
    (tmp_path / "profile").write_text("a file where the folder should be")
    said, _ = traced(tmp_path, ProfileConfig(steps=1, start=2), 1, 3)
    assert len(said) == 1 and said[0].startswith("the trace of profile.steps cannot be written: ")
