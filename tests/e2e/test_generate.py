"""The result of a run in use: a sample from a fresh process that has the run's folder and nothing else."""

import math
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from scripts import generate
from tests.e2e.runs import ROOT, STEPS, Attempt, Bench
from trainer.generate import generate as generate_text
from trainer.generate import sample_token

GREEDY = ("--temperature", "0", "--tokens", "24", "--prompt", "abc ")


def in_this_process(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["generate.py", *arguments])
        code = generate.main()
    return code, *capsys.readouterr()


def test_sample_from_a_run_and_from_a_checkpoint(
    bench: Bench, straight: list[Attempt], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = shutil.copytree(bench.path("straight"), tmp_path / "taken-along")
    program = [sys.executable, str(ROOT / "scripts" / "generate.py"), str(run), *GREEDY]
    done = subprocess.run(program, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("abc ")
    # A byte-level vocabulary: a token is a character, unless the document ended.
    assert 4 < len(done.stdout.rstrip("\n")) <= 4 + 24
    latest, earlier = (str(run / "checkpoints" / f"step_{step:08d}") for step in (STEPS, 10))
    assert done.stderr == f"loading {run}; then up to 24 tokens are drawn (--tokens)\n"
    assert in_this_process(capsys, latest, *GREEDY)[:2] == (0, done.stdout)
    assert in_this_process(capsys, latest, *GREEDY)[1] == done.stdout
    assert in_this_process(capsys, earlier, *GREEDY)[0] == 0
    drawn = [in_this_process(capsys, latest, "--prompt", "abc ", "--tokens", "24", "--seed", s)[1] for s in "112"]
    assert drawn[0] == drawn[1] != drawn[2]


def test_a_run_is_found_by_its_id_and_named_to_somebody_who_errs(
    bench: Bench, straight: list[Attempt], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(bench.folder)
    code, out, _ = in_this_process(capsys, "straight", *GREEDY)
    assert code == 0 and out == in_this_process(capsys, "runs/straight", *GREEDY)[1]
    code, _, err = in_this_process(capsys, "strait", *GREEDY)
    assert code == 2 and "newest in runs/: " in err and "straight" in err
    program = [sys.executable, str(ROOT / "scripts" / "generate.py"), "strait"]
    listed = subprocess.run(
        [*program[:1], "-X", "importtime", *program[1:]], capture_output=True, text=True, timeout=60
    )
    assert listed.returncode == 2 and "| torch\n" not in listed.stderr


@pytest.mark.parametrize("flag", ["--temperature", "--top-p"])
@pytest.mark.parametrize("value", ["nan", "inf", "-1"])
def test_a_number_that_nothing_can_be_drawn_with_is_named(
    flag: str, value: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = in_this_process(capsys, str(tmp_path), f"{flag}={value}")
    assert (code, out) == (2, "")
    assert err.startswith(f"error: {flag} {float(value)}: must be ") and err.count("\n") == 1


@pytest.mark.parametrize(
    ("argument", "told"),
    [
        ("--top-p=0", "--top-p 0.0: must be above 0"),
        ("--top-p=1.5", "--top-p 1.5: must be above 0 and at most 1"),
        ("--tokens=-1", "--tokens -1: must be at least 0"),
        ("--seed=-1", "--seed -1: must be at least 0"),
        (f"--seed={2**70}", "must be at least 0 and below 2^63"),
    ],
)
def test_a_number_out_of_range_is_named(
    argument: str, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = in_this_process(capsys, str(tmp_path), argument)
    assert code == 2 and told in err


def test_the_smallest_temperature_takes_the_likeliest_token() -> None:
    logits, generator = torch.tensor([1.0, 3.0, 2.0]), torch.Generator().manual_seed(0)
    assert sample_token(logits, 5e-324, 0.95, generator) == sample_token(logits, 0, 0.95, generator) == 1


@pytest.mark.parametrize("temperature", [math.nan, math.inf, -1.0])
def test_a_temperature_that_nothing_can_be_drawn_with_is_refused(temperature: float) -> None:
    with pytest.raises(ValueError, match="must be finite and not negative"):
        generate_text(nn.Identity(), None, "", temperature=temperature)


def test_what_cannot_be_sampled_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = in_this_process(capsys, str(tmp_path / "absent"))
    assert (code, out) == (2, "")
    assert "absent is not a directory: give a run's folder, its id" in err
    (tmp_path / "empty").mkdir()
    code, _, err = in_this_process(capsys, str(tmp_path / "empty"))
    assert code == 2 and "no complete checkpoint" in err
