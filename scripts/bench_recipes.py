"""Training by low-precision recipes beside bf16: the same model, data and seed, and how far the loss ends from bf16's.

    python scripts/bench_recipes.py                                 the demo model, 300 steps, on every GPU there is
    python scripts/bench_recipes.py --picture docs/recipes.svg      the curves as a picture, too
    python scripts/bench_recipes.py --recipes bf16,mxfp8 run.seed=2  some recipes; overrides of the run's config
    python scripts/bench_recipes.py --dry-run                       two steps on the CPU

Each recipe is one run of trainer.train on one device (runs on as many devices as there are go side by side). `final` is
the mean loss of the last tenth of the steps, `held out` the loss on the evaluation set after the last step; both are
compared with bf16's. What a run printed is kept beside its metrics, under --folder.

The result goes into benchmarks/recipes_CARD.json. Exit code: 0 done, 1 a run failed, 2 wrong usage.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts.bench_results import ROOT, probe, read_results, result_file, stamp, write_result

RECIPES = ("bf16", "mxfp8", "fp8_blockwise")


def main(argv: Sequence[str] | None = None) -> int:
    """Train, write and show; returns the exit code."""
    arguments = parse_arguments(argv)
    machine = probe()
    if arguments.dry_run or not machine["gpus"]:
        machine["card"], machine["gpus"] = "cpu", 0
    try:
        out = result_file(arguments, "recipes", machine["card"], "recipes")
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    folder = arguments.folder or Path(tempfile.mkdtemp(prefix="recipes-"))
    try:
        recipes = train_all(arguments, machine["gpus"], folder)
    except RuntimeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    result = {"steps": arguments.steps, "overrides": arguments.overrides, **stamp(arguments, machine)}
    result["recipes"] = compare(recipes)
    name = f"{arguments.experiment} {arguments.steps} steps"
    if out is not None:
        write_result(out, name, result, "recipes")
    if arguments.picture is not None:
        draw_curves(result if out is None else read_results(out, "recipes")[name], arguments.picture)
    print(json.dumps(result) if arguments.json else table(name, result))
    return 0


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line, checked; ends the process with code 2 if it is wrong."""
    parser = argparse.ArgumentParser(
        prog="bench_recipes.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("overrides", nargs="*", help="key=value, as for trainer.train")
    parser.add_argument("--experiment", default="demo")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--recipes", default=",".join(RECIPES), help="default: %(default)s")
    parser.add_argument("--at-once", type=int, default=1, help="runs that share a device; default: %(default)s")
    parser.add_argument("--folder", type=Path, help="where runs are kept; default: a temporary folder")
    parser.add_argument("--picture", type=Path, help="draw the curves, as SVG or PNG")
    parser.add_argument("--out", type=Path, help="default: benchmarks/recipes_CARD.json; none for a dry run")
    parser.add_argument("--commit", help="commit to note; default: asked from git")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument("--dry-run", action="store_true", help="two steps on the CPU")
    arguments = parser.parse_args(argv)
    arguments.recipes = arguments.recipes.split(",")
    if unknown := set(arguments.recipes) - set(RECIPES):
        parser.error(f"--recipes: {', '.join(sorted(unknown))} is not known; choose from {', '.join(RECIPES)}")
    if arguments.recipes[0] != "bf16":
        parser.error("--recipes must begin with bf16, to which the others are compared")
    if wrong := [text for text in arguments.overrides if "=" not in text]:
        parser.error(f"{wrong[0]} is no override: write key=value")
    if arguments.dry_run:
        arguments.steps = 2
        arguments.overrides += ["data.eval_samples=8", "data.tokenizer_vocab_size=300", "model.vocab_size=300"]
    if arguments.steps <= 0 or arguments.at_once <= 0:
        parser.error("--steps and --at-once must be positive")
    return arguments


def train_all(arguments: argparse.Namespace, num_gpus: int, folder: Path) -> dict[str, dict[str, Any]]:
    """{recipe: losses by step, loss on the held-out set}; as many runs at a time as there are devices.

    Raises:
        RuntimeError: a run failed; says where its output is.
    """
    devices: Queue[str] = Queue()
    places = max(num_gpus, 1) * arguments.at_once
    for number in range(places):
        devices.put(str(number % num_gpus) if num_gpus else "")

    def train(recipe: str) -> dict[str, Any]:
        device = devices.get()
        try:
            return train_one(arguments, recipe, device, folder)
        finally:
            devices.put(device)

    with ThreadPoolExecutor(places) as pool:
        return dict(zip(arguments.recipes, pool.map(train, arguments.recipes), strict=True))


def train_one(arguments: argparse.Namespace, recipe: str, device: str, folder: Path) -> dict[str, Any]:
    """One run, in a process of its own."""
    run = folder / recipe
    overrides = [
        f"experiment={arguments.experiment}", f"precision={recipe}", f"train.steps={arguments.steps}",
        f"train.eval_every={arguments.steps}", "train.log_every=1", "train.sample_prompt=null", "checkpoint=none",
        f"run.root={folder}", f"run.id={recipe}", *arguments.overrides,
    ]  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / f"{recipe}.log", "w") as log:
        done = subprocess.run(
            [sys.executable, "-m", "trainer.train", *overrides],
            cwd=ROOT,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": device},
            stdout=log,
            stderr=subprocess.STDOUT,
            check=False,
        )
    if done.returncode:
        raise RuntimeError(f"the run with precision={recipe} failed; {log.name} ends so:\n{tail(Path(log.name))}")
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    held_out = [value for line in lines for key, value in line.items() if is_eval_loss(key) and value is not None]
    return {
        "loss": {line["step"]: line["train/loss"] for line in lines if line["train/loss"] is not None},
        "held_out": held_out[-1],
    }


def is_eval_loss(key: str) -> bool:
    """eval/<set>/loss."""
    return key.startswith("eval/") and key.endswith("/loss")


def tail(file: Path, lines: int = 15) -> str:
    """A file's last lines."""
    return "\n".join(file.read_text(errors="replace").splitlines()[-lines:])


def compare(recipes: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Adds what a person looks at: final loss, and how far it and the held-out loss are from bf16's."""
    for found in recipes.values():
        losses = list(found["loss"].values())
        found["final"] = statistics.fmean(losses[-max(len(losses) // 10, 1) :])
    base = recipes["bf16"]
    for found in recipes.values():
        for key in ("final", "held_out"):
            found[f"{key}_over_bf16"] = found[key] / base[key] - 1
    return recipes


def table(name: str, result: dict[str, Any]) -> str:
    """The result for a person."""
    lines = [
        f"{name} on {result['card']}, torch {result['torch']}, {result['commit'][:12]}",
        f"{'':16}{'final':>9}{'to bf16':>10}{'held out':>10}{'to bf16':>10}",
    ]
    for recipe, found in result["recipes"].items():
        lines.append(
            f"{recipe:16}{found['final']:>9.4f}{found['final_over_bf16']:>+10.3%}"
            f"{found['held_out']:>10.4f}{found['held_out_over_bf16']:>+10.3%}"
        )
    return "\n".join(lines)


def draw_curves(result: dict[str, Any], file: Path) -> None:
    """Loss by step above, difference from bf16 below; the suffix chooses SVG or PNG."""
    # Heavy, and most runs draw nothing.
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (above, below) = pyplot.subplots(2, 1, sharex=True, figsize=(7, 5), layout="constrained")
    base = list(result["recipes"]["bf16"]["loss"].values())
    for recipe, found in result["recipes"].items():
        steps, losses = [int(step) for step in found["loss"]], list(found["loss"].values())
        above.plot(steps, losses, label=f"{recipe}: {found['final']:.4f}", linewidth=0.9)
        if recipe != "bf16":
            differences = [100 * (a / b - 1) for a, b in zip(losses, base, strict=True)]
            below.plot(steps, differences, label=recipe, linewidth=0.7)
    above.set_ylabel("training loss")
    above.legend(title="mean of the last tenth")
    below.axhline(0.0, color="black", linewidth=0.8)
    below.set_ylabel("% above bf16")
    below.set_xlabel("step")
    below.legend()
    above.set_title(f"Recipes on {result['card']}")
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file)
    pyplot.close(figure)


if __name__ == "__main__":
    sys.exit(main())
