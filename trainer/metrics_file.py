"""metrics.jsonl: the names that scripts rely on, one line per step, and how to read a file of many attempts.

Every line has every name of `scalar_names`; what does not apply is null. A value that is not finite is null as well
(JSON has no NaN) and told as an event. Per-layer arrays are in lists: rows are MoE layers.

A line is written by one call, so a killed run can tear the last line only; a later attempt starts on a fresh line.
"""

import json
import math
import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

SCALARS = (
    "train/loss",
    "train/aux_loss",
    "train/z_loss",
    # Of the tokens after the next one: mean over depths, without its weight.
    "train/mtp_loss",
    # Before clipping.
    "train/grad_norm",
    "train/lr",
    "perf/tokens_per_second",
    "perf/tokens_per_second_per_gpu",
    "perf/tflops_per_gpu",
    "perf/mfu",
    "perf/step_seconds",
    # Seconds of a step in which the loop waited for data.
    "perf/data_seconds",
    "perf/exposed_exchange_seconds",
    # Maximum over ranks.
    "perf/peak_memory_gib",
    # Of the worst layer; dropped_rows is the sum over layers.
    "moe/load_max_over_mean",
    "moe/load_entropy",
    "moe/dropped_rows",
)
# (L, E) lists.
ARRAYS = ("moe/tokens_per_expert",)
EVAL = ("loss", "bits_per_byte")


def scalar_names(eval_sets: Iterable[str]) -> list[str]:
    """Names of all scalar metrics of a run with these evaluation sets."""
    return [*SCALARS, *(f"eval/{name}/{kind}" for name in eval_sets for kind in EVAL)]


class JsonLines:
    """Appends JSON objects to a file, one per line and system call."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        if _last_byte(path) not in (b"", b"\n"):
            # A line that a kill tore must not swallow the first one of this attempt.
            os.write(self._file, b"\n")

    def write(self, record: Mapping[str, Any]) -> None:
        """Raises: OSError, e.g. on a full disk; names the file."""
        data = (json.dumps(record, allow_nan=False) + "\n").encode()
        try:
            while data:
                data = data[os.write(self._file, data) :]
        except OSError as error:
            raise OSError(error.errno, f"{self._path} cannot be written: {error.strerror}") from None

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)


def _last_byte(path: Path) -> bytes:
    with open(path, "rb") as stream:
        size = stream.seek(0, os.SEEK_END)
        stream.seek(max(0, size - 1))
        return stream.read(1)


class MetricsFile:
    """The metrics.jsonl of one attempt.

    Args:
        add: keep what earlier attempts wrote about a step, and add to it in their name (an evaluation, which may be of
            an earlier checkpoint).
    """

    def __init__(self, path: Path, attempt: int, eval_sets: Iterable[str], *, add: bool = False) -> None:
        self._attempt = attempt
        self._names = [*scalar_names(eval_sets), *ARRAYS]
        self._earlier = {record["step"]: record for record in read_metrics(path)} if add and path.exists() else {}
        self._lines = JsonLines(path)
        self._last: dict[str, Any] = {}

    def write(self, step: int, tokens: int, values: Mapping[str, Any]) -> dict[str, Any]:
        """Write the line of a step and return it.

        A second call for the same step writes the line again with the values added, because readers keep the newest.

        Raises:
            ValueError: a name that is not one of the run's metrics, or a step before the last one.
        """
        if unknown := sorted(set(values) - set(self._names)):
            raise ValueError(f"unknown metrics {', '.join(unknown)}; known are {', '.join(self._names)}")
        before = self._last if self._last.get("step") == step else self._earlier.get(step, {})
        if self._last and step < self._last["step"]:
            raise ValueError(f"metrics of step {step} after those of step {self._last['step']}")
        record = {**before, "step": step, "tokens": tokens, "time": time.time(), "attempt": self._attempt_of(step)}
        for name in self._names:
            value = finite(values.get(name))
            record[name] = before.get(name) if value is None else value
        self._lines.write(record)
        self._last = record
        return record

    def _attempt_of(self, step: int) -> int:
        """Whoever trained to there, as far as that is known."""
        known = [earlier for earlier in self._earlier if earlier <= step]
        return self._earlier[max(known)]["attempt"] if known else self._attempt

    def close(self) -> None:
        """Close the file."""
        self._lines.close()


def finite(value: Any) -> Any:
    """The value, or None for a number that JSON cannot hold."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """The lines of a metrics.jsonl (or of the run folder that holds one), ordered by step.

    Of several lines of a step the one of the newest attempt counts, and of these the last. What earlier attempts had
    from the first step of a later one on is left out: it is of weights that the run has left. So are lines that a kill
    tore.
    """
    path = Path(path)
    path = path / "metrics.jsonl" if path.is_dir() else path
    newest: dict[int, dict[str, Any]] = {}
    began: dict[int, int] = {}
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        record = _parse(line)
        if record is None:
            continue
        began.setdefault(record["attempt"], record["step"])
        known = newest.get(record["step"])
        if known is None or record["attempt"] >= known["attempt"]:
            newest[record["step"]] = record
    found = [newest[step] for step in sorted(newest)]
    return [record for record in found if not _is_left(record, began)]


def _is_left(record: Mapping[str, Any], began: Mapping[int, int]) -> bool:
    return any(attempt > record["attempt"] and step <= record["step"] for attempt, step in began.items())


def _parse(line: str) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) and {"step", "attempt"} <= record.keys() else None
