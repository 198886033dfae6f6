"""What runs of scripts/bench_train.py reported: reading it, summing it up, keeping it, showing it."""

import math
import re
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

ANSI = re.compile(r"\x1b\[[0-9;]*m")
TORCHTITAN_LINE = re.compile(
    r"(?<!validate )step:\s*(?P<step>\d+)\s+loss:\s*(?P<loss>\S+)\s+grad_norm:\s*\S+\s+"
    r"memory:\s*(?P<reserved>[\d.]+)GiB\(.*?%\)\s+tps:\s*(?P<tps>[\d,]+)"
)
PEAK_LINE = re.compile(r"^peak allocated: (?P<gib>[\d.]+)GiB", re.MULTILINE)


@dataclass(frozen=True)
class LogLine:
    """What a trainer reported at one step."""

    step: int
    tokens_per_second_per_gpu: float
    loss: float | None
    # Of the most loaded GPU; None where there is no GPU.
    peak_memory_gib: float | None


@dataclass(frozen=True)
class Row:
    """One run of one side. `error` is None when it went well, and the figures are None when it did not."""

    side: str
    repeat: int
    seconds: float
    error: str | None = None
    tokens_per_second_per_gpu: float | None = None
    peak_memory_gib: float | None = None
    loss: float | None = None
    lines: tuple[LogLine, ...] = ()


def read_ours(records: Iterable[dict[str, Any]]) -> list[LogLine]:
    """The lines of a run's metrics.jsonl that hold a speed."""
    return [
        LogLine(
            record["step"],
            record["perf/tokens_per_second_per_gpu"],
            record["train/loss"],
            record["perf/peak_memory_gib"],
        )
        for record in records
        if record.get("perf/tokens_per_second_per_gpu") is not None
    ]


def read_torchtitan(text: str) -> list[LogLine]:
    """The log lines in torchtitan's output, colored or not, and the peaks that scripts/torchtitan_baseline.py prints.

    Every rank writes them: the speed of a step is the mean over ranks, memory the maximum.
    """
    text = ANSI.sub("", text)
    peaks = [float(match["gib"]) for match in PEAK_LINE.finditer(text)]
    steps: dict[int, list[re.Match[str]]] = {}
    for match in TORCHTITAN_LINE.finditer(text):
        steps.setdefault(int(match["step"]), []).append(match)
    return [
        LogLine(
            step,
            statistics.mean(float(match["tps"].replace(",", "")) for match in ranks),
            finite(float(ranks[0]["loss"])),
            max(peaks, default=None) or max(float(match["reserved"]) for match in ranks),
        )
        for step, ranks in sorted(steps.items())
    ]


def finite(value: float) -> float | None:
    """The value, or None for a number that JSON cannot hold."""
    return value if math.isfinite(value) else None


def measure(side: str, repeat: int, seconds: float, lines: Sequence[LogLine], log_every: int) -> Row:
    """The figures of a run: median speed after the first window, highest memory, last loss.

    Raises:
        ValueError: no line after the first window.
    """
    later = [line for line in lines if line.step > log_every]
    if not later:
        steps = ", ".join(str(line.step) for line in lines) or "none"
        raise ValueError(f"reported no speed after step {log_every} (steps reported: {steps})")
    peaks = [line.peak_memory_gib for line in lines if line.peak_memory_gib is not None]
    return Row(
        side,
        repeat,
        seconds,
        tokens_per_second_per_gpu=statistics.median(line.tokens_per_second_per_gpu for line in later),
        peak_memory_gib=max(peaks, default=None),
        loss=later[-1].loss,
        lines=tuple(lines),
    )


def summarise(rows: Sequence[Row]) -> dict[str, Any]:
    """Medians over the repeats of each side, and ours / theirs."""

    def speeds(side: str) -> list[float]:
        found = (row.tokens_per_second_per_gpu for row in rows if row.side == side)
        return [speed for speed in found if speed is not None]

    ours, theirs = speeds("ours"), speeds("torchtitan")
    medians = {"ours": statistics.median(ours) if ours else None}
    medians["torchtitan"] = statistics.median(theirs) if theirs else None
    ratio = medians["ours"] / medians["torchtitan"] if medians["ours"] and medians["torchtitan"] else None
    return {
        "tokens_per_second_per_gpu": medians,
        "ratio": ratio,
        "pair_ratios": [a / b for a, b in zip(ours, theirs, strict=False)],
        "runs": [asdict(row) for row in rows],
    }


def table(result: dict[str, Any]) -> str:
    """The result for a person: one line per run, and the ratio."""
    lines = [
        f"{result['model']}, {result['layers']} layers, {result['world_size']} x {result['card']}, sequence "
        f"{result['seq_len']}, batch {result['local_batch']} per GPU, torch {result['torch']}, {result['commit'][:12]}",
        f"{'':12}{'run':>4}{'tokens/s/GPU':>14}{'peak GiB':>10}{'loss':>9}{'seconds':>9}",
    ]
    for run in result["runs"]:
        figures = ("tokens_per_second_per_gpu", "{:,.0f}", 14), ("peak_memory_gib", "{:.1f}", 10), ("loss", "{:.3f}", 9)
        cells = [f"{'-' if run[key] is None else form.format(run[key]):>{width}}" for key, form, width in figures]
        note = "  failed" if run["error"] else ""
        lines.append(f"{run['side']:12}{run['repeat']:>4}{''.join(cells)}{run['seconds']:>9.0f}{note}")
    if result["ratio"] is not None:
        pairs = ", ".join(f"{ratio:.3f}" for ratio in result["pair_ratios"])
        lines.append(f"ours / torchtitan {result['baseline']['torchtitan']}: {result['ratio']:.3f} (pairs: {pairs})")
    elif "skipped" in result["baseline"]:
        lines.append(f"no baseline: {result['baseline']['skipped']}")
    return "\n".join(lines)
