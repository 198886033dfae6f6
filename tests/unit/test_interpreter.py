"""Runs tests/interpreter in a process whose Triton interprets: the choice is made when triton is imported."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_kernels_under_the_interpreter() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "pytest", "tests/interpreter", "-q", "-p", "no:cacheprovider"]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900)
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-2000:]
    # Nothing was skipped: the folder is worth nothing then.
    assert " passed" in result.stdout and "skipped" not in result.stdout, result.stdout[-2000:]
