"""Where benchmarks keep their results: benchmarks/KIND_CARD.json, an object with one entry per thing measured."""

import argparse
import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


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
