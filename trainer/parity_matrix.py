"""Many layouts of several experiments: a file of results that an interrupted run goes on from, and a table of them.

The file has one JSON object per line. A line counts only for the code it was found with: change the code, and the
layouts are compared again.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from trainer.parity import BOUNDS
from trainer.parity_check import Verdict

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("trainer", "parallel", "moe", "comms", "configs")
# What is compared stands here too.
TOOL = Path("scripts/parity.py")


@dataclass(frozen=True)
class Result:
    """One experiment under one layout, in words and numbers."""

    experiment: str
    processes: int
    layout: str
    recipe: str
    right: bool
    # The gradient with the largest error; of a wrong layout what went wrong first, or what failed.
    worst: str
    error: float
    seconds: float
    code: str

    @property
    def key(self) -> tuple[str, int, str, str]:
        """What was compared."""
        return self.experiment, self.processes, self.layout, self.recipe


def result_of(experiment: str, recipe: str, verdict: Verdict, code: str) -> Result:
    """A verdict as a line of the results."""
    worst, error = verdict.worst_name, verdict.worst_error
    if verdict.failure is not None:
        worst = verdict.failure.splitlines()[-1]
    elif verdict.mismatches:
        worst, error = verdict.mismatches[0].quantity, verdict.mismatches[0].error
    layout = verdict.layout
    return Result(
        experiment, layout.num_processes, layout.name, recipe, verdict.is_right, worst, error, verdict.seconds, code
    )


def code_digest(root: Path = ROOT) -> str:
    """Changes with every source file and every config that a run reads."""
    digest = hashlib.sha256(torch.__version__.encode())
    for package in PACKAGES:
        for path in sorted([*(root / package).rglob("*.py"), *(root / package).rglob("*.yaml")]):
            digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes())
    digest.update((root / TOOL).read_bytes())
    return digest.hexdigest()[:16]


def read_results(path: Path, code: str) -> dict[tuple[str, int, str, str], Result]:
    """What was found right with this code. A line that cannot be read counts as missing, and so does what was wrong: it
    is compared again, as a worker that was killed says nothing about the layout."""
    found: dict[tuple[str, int, str, str], Result] = {}
    for line in path.read_text(errors="replace").splitlines() if path.is_file() else []:
        try:
            result = Result(**json.loads(line))
        except (json.JSONDecodeError, TypeError):
            continue
        if result.code == code and result.right is True:
            found[result.key] = result
    return found


def append_result(path: Path, result: Result) -> None:
    """One line more; in one write, so that several runs may share the file, and on a line of its own."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+b") as file:
        file.seek(max(file.seek(0, 2) - 1, 0))
        is_cut_off = file.read(1) not in (b"", b"\n")
        file.write(b"\n" * is_cut_off + json.dumps(vars(result)).encode() + b"\n")


def matrix_text(results: Sequence[Result], recipe: str, command: str) -> str:
    """The results as a Markdown document: a row for each layout, a column for each experiment."""
    experiments = list(dict.fromkeys(result.experiment for result in results))
    rows = sorted({(result.processes, result.layout) for result in results}, key=lambda row: (row[0], len(row[1])))
    cells = {result.key: _cell(result) for result in results}
    wrong = sum(not result.right for result in results)
    minutes = sum(result.seconds for result in results) / 60
    lines = [
        "# Layouts against one process",
        "",
        f"Written by `{command}` with torch {torch.__version__}: {len(results)} comparisons in {minutes:.0f} minutes, "
        f"{wrong or 'none'} wrong.",
        "",
        f"Each cell is the largest relative error of any gradient, ||a - b|| / ||b||, in {recipe} (bound "
        f"{BOUNDS[recipe].tensors:.0e}). Losses, gradient norms and the weights after three SGD steps, two of them",
        "clipped, are within the same bound; initial weights, balancing counts and the copies that ranks hold of the",
        "same weights are equal. The models are tiny ones with the features of the experiment named above the column.",
        "",
        f"| processes | layout | {' | '.join(experiments)} |",
        f"| --- | --- | {' | '.join('---' for _ in experiments)} |",
    ]
    for processes, layout in rows:
        found = [cells.get((experiment, processes, layout, recipe), "not legal") for experiment in experiments]
        lines.append(f"| {processes} | `{layout}` | {' | '.join(found)} |")
    return "\n".join(lines) + "\n"


def _cell(result: Result) -> str:
    if result.right:
        return f"{result.error:.1e}"
    return f"**wrong**: {result.worst.replace('|', '/')}, error {result.error:.1e}"
