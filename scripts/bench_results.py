"""What benchmarks note of machine and code, and where they keep their results: benchmarks/KIND_CARD.json, an object
with one entry per thing measured.
"""

import argparse
import functools
import json
import os
import re
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    raise SystemExit("scripts/bench_results.py is a part of other benchmarks, and measures nothing: run one of those")

ROOT = Path(__file__).resolve().parent.parent
# With these a program tells benchmarks that it starts what `probe` has found, which takes time and a GPU, and names the
# file that it will make when it is their turn, and itself (scripts/bench_ranks.py).
MACHINE, TURN, STARTER = "SLUICEGATE_MACHINE", "SLUICEGATE_TURN", "SLUICEGATE_STARTER"


def result_file(arguments: argparse.Namespace, kind: str, card: str, field: str) -> Path | None:
    """Where a result goes: `--out`, or `benchmarks/train_h200.json` for "NVIDIA H200"; None: nowhere (a dry run).

    Raises:
        ValueError: a file that is there already holds something else.
    """
    if arguments.dry_run and arguments.out is None:
        return None
    name = re.sub(r"[^a-z0-9]+", "_", card.lower().removeprefix("nvidia "))
    out: Path = arguments.out or ROOT / "benchmarks" / f"{kind}_{name}.json"
    if out.exists():
        read_results(out, field)
    return out


def read_results(file: Path, field: str) -> dict[str, Any]:
    """{name: result} of earlier invocations; every result of this benchmark has `field`.

    Raises:
        ValueError: the file is something else.
    """
    try:
        results = json.loads(file.read_text())
    except ValueError as error:
        raise ValueError(f"{file} is not JSON ({error}); give another --out, or remove it") from None
    if not isinstance(results, dict) or not all(isinstance(r, dict) and field in r for r in results.values()):
        raise ValueError(f"{file} holds no results of this benchmark; give another --out, or remove it")
    return results


def write_result(file: Path, name: str, result: dict[str, Any], field: str) -> None:
    """Put a result in the place of an earlier one of that name; others stay."""
    results = read_results(file, field) if file.exists() else {}
    results[name] = result
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(results, indent=1, allow_nan=False) + "\n")


def stamp(arguments: argparse.Namespace, machine: dict[str, Any]) -> dict[str, Any]:
    """Which card (`machine` as `probe` gives it), software and code, and when."""
    return {
        "dry_run": arguments.dry_run,
        "card": machine["card"],
        "torch": machine["torch"],
        "cuda": machine["cuda"],
        "commit": arguments.commit or commit(),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def probe(dry_run: bool = False) -> dict[str, Any]:
    """torch and the GPUs, asked in a process of its own: this one must not hold memory on a GPU.

    A dry run asks for no GPU, and is spared the seconds that this takes.
    """
    if dry_run:
        return {"torch": version("torch"), "cuda": None, "gpus": 0, "card": "cpu", "memory_gib": None}
    return json.loads(os.environ.get(MACHINE) or _probed())


@functools.cache
def _probed() -> str:
    code = (
        "import json, torch; n = torch.cuda.device_count(); p = torch.cuda.get_device_properties(0) if n else None;"
        "print(json.dumps({'torch': torch.__version__, 'cuda': torch.version.cuda, 'gpus': n,"
        "'card': p.name if p else None, 'memory_gib': p.total_memory / 2**30 if p else None}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"error: torch cannot be imported by {sys.executable}:\n{done.stderr}")
    return done.stdout.splitlines()[-1]


def commit() -> str:
    """The checkout's commit, `+changes` where files differ from it; `unknown` without git."""

    def git(*words: str) -> str:
        done = subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=True)
        return done.stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no")
        return git("rev-parse", "HEAD") + ("+changes" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
