"""Does a parallel layout compute what one process computes? Prove it, by name, before a long run.

    python scripts/parity.py experiment=NAME [layouts='[tp=2 ep=2,cp=2 ep=2]'|all] [nproc=N] [key=value ...]
    python scripts/parity.py matrix [nproc=8] [out=docs/parity.md]

The experiment's model is shrunk to a tiny one with the same features and trained for three steps of SGD under each
layout and in one process. Compared are initial weights, losses, every gradient, its norm, balancing counts, the final
weights (two steps are clipped), and whether ranks hold equal copies.

    layouts=...     axes dp_replicate, dp_shard, cp, ulysses, tp, ep, etp; those left out are 1, and dp_shard takes what
                    nproc leaves. `all`: every legal layout of nproc processes. Without it: the experiment's own layout,
                    cut to at most 8 processes, and each of its axes alone
    nproc=N         processes of each layout; without it the fewest that a layout needs (all: 4)
    recipe=NAME     fp64 (errors below 1e-10), fp32 (5e-6) or bf16 (5e-2, with experts chosen by position); without it
                    fp64 on CPUs, bf16 on GPUs
    device=NAME     cpu, cuda, or auto: GPUs where there are enough
    accumulate=N    micro-steps of each step
    key=value       any setting of the trainer. Of the experiment's own, parallel.compile is left out on CPUs (slow)
                    unless it is given here

matrix compares every legal layout of 2, 4, ... nproc processes for three experiments and writes a table. It goes on
from results=FILE (runs/parity.jsonl) where it was interrupted.

Exit code 0: all layouts are right. 1: some are not. 2: wrong usage.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

if TYPE_CHECKING:
    from trainer.config import Config
    from trainer.parity_check import Verdict
    from trainer.parity_layouts import Layout

MATRIX = ("qwen3_30b_a3b", "deepseek_v3_671b", "gpt_oss_20b")
# What a matrix is about is the layout alone.
PLAIN = ("parallel.compile=false", "parallel.activation_checkpoint=none")
# Mismatches listed under a layout that is wrong.
SHOWN = 8
DEFAULTS = {
    "layouts": "",
    "nproc": "0",
    "recipe": "",
    "device": "auto",
    "accumulate": "1",
    "results": "runs/parity.jsonl",
    "out": "docs/parity.md",
}


@dataclass(frozen=True)
class Words:
    """The command line: words of this tool, and those of the trainer."""

    own: dict[str, str]
    overrides: list[str]
    matrix: bool

    def number(self, name: str, least: int) -> int:
        """A whole number. Raises ValueError for anything else."""
        value = self.own[name]
        if not value.isdecimal() or int(value) < least:
            raise ValueError(f"{name}={value}: must be a whole number from {least}")
        return int(value)

    def choice(self, name: str, options: Sequence[str]) -> str:
        """One of the options. Raises ValueError for anything else."""
        if self.own[name] not in options:
            raise ValueError(f"{name}={self.own[name]}: must be one of {', '.join(filter(None, options))}")
        return self.own[name]


def main(argv: Sequence[str]) -> int:
    """Run one of the two commands; returns the exit code."""
    if not argv or {"-h", "--help"} & set(argv):
        print(__doc__)
        return 0 if argv else 2
    try:
        words = read_words(argv)
        return run_matrix(words) if words.matrix else run_experiment(words)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def read_words(argv: Sequence[str]) -> Words:
    """Sort the words of the command line."""
    own, overrides = dict(DEFAULTS), []
    for word in argv:
        key, equals, value = word.partition("=")
        if equals and key in own:
            own[key] = value
        elif word != "matrix":
            overrides.append(word)
    return Words(own, overrides, "matrix" in argv)


def run_experiment(words: Words) -> int:
    """Compare the layouts of one experiment and print a table."""
    from trainer.compose import compose
    from trainer.parity_check import ParityCheck, Workers

    if not any(word.startswith("experiment=") for word in words.overrides):
        raise ValueError("name an experiment: python scripts/parity.py experiment=qwen3_30b_a3b")
    micro_steps = words.number("accumulate", 1)
    config = compose(words.overrides)
    layouts = wanted_layouts(words, config)
    device = choose_device(words, layouts)
    recipe = words.choice("recipe", ("", "fp64", "fp32", "bf16")) or ("fp64" if device == "cpu" else "bf16")
    if device == "cpu" and not any(word.startswith("parallel.compile=") for word in words.overrides):
        layouts = [layout._replace(parallel=replace(layout.parallel, compile=False)) for layout in layouts]
    workers = Workers(device)
    try:
        workers.start({1, *(layout.num_processes for layout in layouts)})
        check = ParityCheck(tiny(config, 1).model, recipe, workers, micro_steps)
        print(
            f"{config.experiment}, tiny, {recipe} on {device}: {len(layouts)} layouts against one process", flush=True
        )
        verdicts = []
        for layout in layouts:
            verdicts.append(check.check(layout))
            print(verdict_text(verdicts[-1]), flush=True)
    finally:
        workers.close()
    wrong = sum(not verdict.is_right for verdict in verdicts)
    print(f"{len(verdicts) - wrong} right, {wrong} wrong")
    return 1 if wrong else 0


def wanted_layouts(words: Words, config: "Config") -> "list[Layout]":
    """The layouts asked for, without repetition, all of them legal.

    Raises:
        ValueError: one is not: which, why, and the nearest legal sizes.
    """
    from trainer.parity_layouts import legal_layouts, own_and_single_layouts, parse_layouts, smallest_world

    nproc = words.number("nproc", 0)
    text = words.own["layouts"]
    if text == "all":
        nproc = nproc or 4
        real = {layout.name for layout in legal_layouts(config, nproc)}
        layouts = [layout for layout in legal_layouts(tiny(config, nproc), nproc) if layout.name in real]
        if not layouts:
            raise ValueError(f"layouts=all: no layout of nproc={nproc} fits this model")
    else:
        sizes = parse_layouts(text) if text else own_and_single_layouts(config.parallel, nproc or 8)
        layouts = [settled(config, one, (nproc if text else 0) or smallest_world(one)) for one in sizes]
    return list({(layout.num_processes, layout.name): layout for layout in layouts}.values())


def settled(config: "Config", sizes: dict[str, int], num_processes: int) -> "Layout":
    """A layout that the experiment's model and its tiny twin can have.

    Raises:
        ValueError: it is not legal; names the layout, the reason and the nearest legal sizes.
    """
    from trainer.parity_layouts import settle, with_sizes

    name = " ".join(f"{axis}={size}" for axis, size in sizes.items())
    try:
        settle(with_sizes(config, sizes), num_processes)
    except ValueError as error:
        raise ValueError(f"layout {name} on {num_processes} processes: {error}") from error
    try:
        return settle(with_sizes(tiny(config, num_processes), sizes), num_processes)
    except ValueError as error:
        raise ValueError(f"layout {name} on {num_processes} processes does not fit the tiny model: {error}") from error


def tiny(config: "Config", num_processes: int) -> "Config":
    """The config with its model shrunk and its sequences cut."""
    from trainer.parity_check import batch_shape
    from trainer.parity_model import shrink

    length = batch_shape(num_processes, 1, "cpu")[1]
    return replace(config, model=shrink(config.model), train=replace(config.train, seq_len=length))


def choose_device(words: Words, layouts: "list[Layout]") -> str:
    """cpu, or cuda where every layout finds enough GPUs. Raises ValueError where cuda is asked for in vain."""
    import torch

    most = max(layout.num_processes for layout in layouts)
    available = torch.cuda.device_count()
    device = words.choice("device", ("auto", "cpu", "cuda"))
    if device == "cuda" and available < most:
        raise ValueError(f"device=cuda: the largest layout needs {most} GPUs, {available} are visible; use device=cpu")
    return ("cuda" if available >= most else "cpu") if device == "auto" else device


def verdict_text(verdict: "Verdict") -> str:
    """One line of the table, and beneath it what is wrong."""
    layout = verdict.layout
    head = f"{layout.num_processes:>2} x  {layout.name:<58}"
    if verdict.failure is not None:
        return f"{head} FAILED\n" + "\n".join(f"        {line}" for line in verdict.failure.splitlines())
    state = "right" if verdict.is_right else "WRONG"
    lines = [f"{head} {state}  {verdict.worst_error:.1e}  {verdict.worst_name}  ({verdict.seconds:.1f} s)"]
    lines += [f"        {mismatch}" for mismatch in verdict.mismatches[:SHOWN]]
    if len(verdict.mismatches) > SHOWN:
        lines.append(f"        and {len(verdict.mismatches) - SHOWN} more")
    return "\n".join(lines)


def run_matrix(words: Words) -> int:
    """Compare every layout of the three experiments that is not in the results yet, and write the table."""
    from trainer.compose import compose
    from trainer.parity_check import ParityCheck, Workers
    from trainer.parity_layouts import legal_layouts
    from trainer.parity_matrix import append_result, code_digest, matrix_text, read_results, result_of

    if words.overrides:
        raise ValueError(f"matrix: {words.overrides[0]} is not among {', '.join(DEFAULTS)}")
    most, recipe = words.number("nproc", 0) or 8, words.choice("recipe", ("", "fp64", "fp32")) or "fp64"
    path, code = Path(words.own["results"]), code_digest()
    done, results = read_results(path, code), []
    workers = Workers("cpu")
    configs = {name: tiny(compose([f"experiment={name}", *PLAIN]), 1) for name in MATRIX}
    checks = {name: ParityCheck(config.model, recipe, workers) for name, config in configs.items()}
    try:
        for size in [2**power for power in range(1, most.bit_length()) if 2**power <= most]:
            for name, config in configs.items():
                for layout in legal_layouts(config, size):
                    result = done.get((name, size, layout.name, recipe))
                    if result is None:
                        result = result_of(name, recipe, checks[name].check(layout), code)
                        append_result(path, result)
                        print(f"{name:<18} {size} x  {layout.name:<58} {result.error:.1e}  {result.worst}", flush=True)
                    results.append(result)
    finally:
        workers.close()
    Path(words.own["out"]).write_text(matrix_text(results, recipe, "python scripts/parity.py matrix"))
    wrong = sum(not result.right for result in results)
    print(f"{len(results) - wrong} right, {wrong} wrong; {words.own['out']}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
