"""The result of a run in use: a sample from a fresh process that has the run's folder and nothing else."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from scripts import generate
from tests.e2e.runs import ROOT, STEPS, Attempt, Bench

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
    assert in_this_process(capsys, latest, *GREEDY) == (0, done.stdout, done.stderr)
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


def test_what_cannot_be_sampled_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = in_this_process(capsys, str(tmp_path / "absent"))
    assert (code, out) == (2, "")
    assert "absent is not a directory: give a run's folder, its id" in err
    (tmp_path / "empty").mkdir()
    code, _, err = in_this_process(capsys, str(tmp_path / "empty"))
    assert code == 2 and "no complete checkpoint" in err
