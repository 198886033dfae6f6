"""Draws the results of scripts/bench_moe.py: each side's speed over that of torch's grouped_mm, by shape."""

from pathlib import Path
from typing import Any


def draw_ratios(results: dict[str, dict[str, Any]], file: Path) -> None:
    """Bars of forward with backward, one group per entry that has the side `torch`; the suffix chooses SVG or PNG.

    Raises:
        ValueError: there is no such entry.
    """
    entries = {name: result for name, result in results.items() if "torch" in result["sides"]}
    if not entries:
        raise ValueError("no result to draw has the side torch, to which the others are compared; add it to --sides")
    # Heavy, and most runs draw nothing.
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    sides = sorted({side for result in entries.values() for side in result["sides"] if side != "torch"})
    figure, axes = pyplot.subplots(figsize=(1.2 * len(entries) + 2, 4), layout="constrained")
    width = 0.8 / max(len(sides), 1)
    for index, side in enumerate(sides):
        found = [
            (at, result["sides"][side]["ratio"])
            for at, result in enumerate(entries.values())
            if side in result["sides"]
        ]
        places = [at + (index - (len(sides) - 1) / 2) * width for at, _ in found]
        bars = axes.bar(places, [ratio for _, ratio in found], width, label=side)
        axes.bar_label(bars, fmt="%.2f", fontsize=7)
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_xticks(range(len(entries)), [name.replace(" ", "\n") for name in entries], fontsize=7)
    axes.set_ylabel("forward + backward,\nratio to torch grouped_mm, compiled")
    axes.set_title("One MoE layer on " + ", ".join(sorted({result["card"] for result in entries.values()})))
    axes.legend()
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file)
    pyplot.close(figure)
