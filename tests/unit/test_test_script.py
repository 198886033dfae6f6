"""scripts/test.sh against a stand-in for pytest: the sum of both processes, and what their exit codes come to."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
STAND_IN = """#!/bin/bash
echo "words: $*"
case " $* " in
*" tests/distributed "*) echo "== {there} in 1.00s =="; exit {there_code} ;;
*) echo "== {here} in 2.00s =="; exit {here_code} ;;
esac
"""


def run(folder: Path, **said: object) -> "subprocess.CompletedProcess[str]":
    (folder / "scripts").mkdir()
    shutil.copy(ROOT / "scripts" / "test.sh", folder / "scripts")
    python = folder / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(STAND_IN.format(**said))
    python.chmod(0o755)
    command = ["bash", str(folder / "scripts" / "test.sh"), "-k", "some words"]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_counts_are_added_and_both_outputs_shown(tmp_path: Path) -> None:
    done = run(tmp_path, here="1 failed, 30 passed, 2 skipped", here_code=1, there="12 passed", there_code=0)
    *shown, last = done.stdout.splitlines()
    # In whatever order awk has them.
    assert set(last.partition("tests: ")[2].rpartition(", in ")[0].split(", ")) == {
        "1 failed", "42 passed", "2 skipped"
    }  # fmt: skip
    words = [line for line in shown if line.startswith("words: ")]
    assert len(words) == 2 and all("-k some words tests/" in line for line in words)
    assert words[0].endswith("tests/unit tests/e2e") and " tests/distributed tests/e2e/" in words[1]
    # Nothing runs twice or not at all.
    moved = words[1].partition(" tests/distributed ")[2].split()
    assert moved and all((ROOT / file).is_file() and f"--ignore={file}" in words[0].split() for file in moved)


@pytest.mark.parametrize(
    ("here", "there", "code"), [(0, 0, 0), (1, 0, 1), (0, 1, 1), (0, 5, 0), (5, 0, 0), (5, 5, 5), (5, 1, 1), (2, 5, 2)]
)
def test_the_exit_code_is_that_of_what_went_wrong(tmp_path: Path, here: int, there: int, code: int) -> None:
    assert run(tmp_path, here="1 passed", here_code=here, there="1 passed", there_code=there).returncode == code
