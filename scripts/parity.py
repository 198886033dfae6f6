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
    seconds=N       begin no further layout when so much time has passed; those that together have every pair of axes
                    come first (one always runs; without it all of them do). On GPUs a layout that is at work 20
                    seconds later is stuck: its ranks tell where
    key=value       any setting of the trainer but those sizes. Of the experiment's own, parallel.compile is left out on
                    CPUs (slow) unless it is given here

matrix compares every legal layout of 2, 4, ... nproc processes for three experiments and writes a table. It goes on
from results=FILE (runs/parity.jsonl) where it was interrupted.

Exit code 0: all layouts are right. 1: some are not, or failed to run. 2: wrong usage. 130: stopped by Ctrl-C.
"""

import math
import sys
import time
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
# With seconds=: how long after them a layout that is still at work is stuck, by device. On CPUs ranks may share a core.
PATIENCE = {"cuda": 20.0, "cpu": math.inf}
# What the first layout, which runs in any case, has at least before that: kernels are compiled for it.
COMPILING = {"cuda": 60.0, "cpu": 0.0}
# More would prove nothing about a tiny model, and bring a machine down.
MOST_PROCESSES = 64
DEFAULTS = {
    "layouts": "",
    "nproc": "0",
    "recipe": "",
    "device": "auto",
    "accumulate": "1",
    "seconds": "",
    "results": "runs/parity.jsonl",
    "out": "docs/parity.md",
}
# What each of the two commands has no use for.
UNUSED = {True: ("layouts", "device", "accumulate", "seconds"), False: ("results", "out")}


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
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130


def read_words(argv: Sequence[str]) -> Words:
    """Sort the words of the command line.

    Raises:
        ValueError: one is neither a word of this tool nor of the trainer, stands there twice, or is of no use.
    """
    own: dict[str, str] = {}
    overrides: list[str] = []
    matrix = "matrix" in argv
    for word in argv:
        key, equals, value = word.partition("=")
        if equals and key in DEFAULTS:
            if key in own:
                raise ValueError(f"{key}= stands there twice: {own[key]} and {value}")
            if key in UNUSED[matrix]:
                command = "a matrix" if matrix else "an experiment's layouts"
                raise ValueError(f"{word}: {command} has no use for {key}=; leave it out")
            own[key] = value
        elif word != "matrix":
            overrides.append(_trainer_word(word))
    _check_no_sizes(overrides)
    return Words(DEFAULTS | own, overrides, matrix)


def _check_no_sizes(overrides: Sequence[str]) -> None:
    """Raises ValueError for sizes outside layouts=: beside it they would do nothing, without it be cut to 2."""
    from trainer.parity_layouts import SIZES

    keys = [word.lstrip("+~").partition("=")[0] for word in overrides]
    sizes = [word for word, key in zip(overrides, keys, strict=True) if key in {f"parallel.{axis}" for axis in SIZES}]
    if sizes:
        wanted = " ".join(word.lstrip("+~").removeprefix("parallel.") for word in sizes if not word.endswith("=-1"))
        example = wanted if "=" in wanted else "tp=2 ep=2"
        raise ValueError(f"{' '.join(sizes)}: sizes of axes belong into layouts=; write layouts='[{example}]'")


def _trainer_word(word: str) -> str:
    """Raises ValueError for what can be no setting, by its look; `compose` checks the rest."""
    from trainer.compose import GROUPS
    from trainer.parity_layouts import SIZES
    from trainer.schema import did_you_mean

    key, equals, _ = word.partition("=")
    name = key.lstrip("-+~")
    if "." in key or (equals and key.lstrip("+~") in GROUPS):
        return word
    meant = (
        f"; did you mean layouts='[{word}]'?" if name in SIZES else did_you_mean(name, [*DEFAULTS, *GROUPS, "matrix"])
    )
    raise ValueError(f"{word}: no such word{meant} (see --help)")


def run_experiment(words: Words) -> int:
    """Compare the layouts of one experiment and print a table."""
    from trainer.compose import compose

    if not any(word.startswith("experiment=") for word in words.overrides):
        raise ValueError("name an experiment: python scripts/parity.py experiment=qwen3_30b_a3b")
    micro_steps = words.number("accumulate", 1)
    seconds = words.number("seconds", 1) if words.own["seconds"] else math.inf
    recipe = words.choice("recipe", ("", "fp64", "fp32", "bf16"))
    wanted_device = words.choice("device", ("auto", "cpu", "cuda"))
    config = compose(words.overrides)
    layouts = wanted_layouts(words, config)
    # Importing torch takes seconds, and a mistake should not.
    from trainer.parity_check import TIMEOUT_SECONDS, ParityCheck, Workers

    device = choose_device(wanted_device, layouts)
    recipe = recipe or ("fp64" if device == "cpu" else "bf16")
    if device == "cpu" and not any(word.startswith("parallel.compile=") for word in words.overrides):
        layouts = [layout._replace(parallel=replace(layout.parallel, compile=False)) for layout in layouts]
    began = time.monotonic()
    workers = Workers(device)
    try:
        workers.start({1, *(layout.num_processes for layout in layouts)})
        check = ParityCheck(tiny(config, 1, device).model, recipe, workers, micro_steps)
        count = f"{len(layouts)} layout{'s' if len(layouts) > 1 else ''}"
        print(f"{config.experiment}, tiny, {recipe} on {device}: {count} against one process", flush=True)
        verdicts = []
        if seconds < math.inf:
            layouts = telling_first(layouts)
        for layout in layouts:
            passed = time.monotonic() - began
            if verdicts and passed > seconds:
                break
            left = max(seconds - passed, 0.0 if verdicts else COMPILING[device])
            check.timeout = min(left + PATIENCE[device], TIMEOUT_SECONDS)
            verdicts.append(check.check(layout))
            print(verdict_text(verdicts[-1]), flush=True)
    finally:
        workers.close()
    right, failed = (
        sum(verdict.is_right for verdict in verdicts),
        sum(verdict.failure is not None for verdict in verdicts),
    )
    left = len(layouts) - len(verdicts)
    print(
        f"{right} right, {len(verdicts) - right - failed} wrong"
        + (f", {failed} failed to run" if failed else "")
        + (f", {left} not tried (seconds={seconds})" if left else "")
    )
    return 0 if right == len(verdicts) else 1


def telling_first(layouts: "list[Layout]") -> "list[Layout]":
    """The same, those in front that together have every pair of axes."""
    from trainer.parity_layouts import covering

    chosen = covering(layouts)
    return [*chosen, *(layout for layout in layouts if layout not in chosen)]


def wanted_layouts(words: Words, config: "Config") -> "list[Layout]":
    """The layouts asked for, without repetition, all of them legal.

    Raises:
        ValueError: one is not: which, why, and the nearest legal sizes.
    """
    from trainer.parity_layouts import legal_layouts, own_and_single_layouts, parse_layouts

    nproc = words.number("nproc", 0)
    text = words.own["layouts"]
    if text == "all":
        nproc = nproc or 4
        if nproc > MOST_PROCESSES:
            raise ValueError(f"nproc={nproc}: at most {MOST_PROCESSES} processes are started on one machine")
        real = {layout.name for layout in legal_layouts(config, nproc)}
        layouts = [layout for layout in legal_layouts(tiny(config, nproc), nproc) if layout.name in real]
        if not layouts:
            raise ValueError(f"layouts=all: no layout of nproc={nproc} fits this model")
    else:
        sizes = parse_layouts(text) if text else own_and_single_layouts(config.parallel, nproc or 8)
        layouts = [settled(config, one, nproc if text else 0) for one in sizes]
    return list({(layout.num_processes, layout.name): layout for layout in layouts}.values())


def settled(config: "Config", sizes: dict[str, int], nproc: int) -> "Layout":
    """A layout that the experiment's model and its tiny twin can have, on the fewest processes where nproc is 0.

    Raises:
        ValueError: it is not legal; names the layout, the reason and the nearest legal layouts, each of them tried.
    """
    from parallel.config import LayoutError
    from trainer.parity_layouts import SIZES, nearest_sizes, smallest_world

    def is_legal(other: dict[str, int], processes: int = nproc) -> bool:
        try:
            _settled(config, other, processes or smallest_world(other))
        except ValueError:
            return False
        return True

    num_processes = nproc or smallest_world(sizes)
    try:
        return _settled(config, sizes, num_processes)
    except LayoutError as error:
        near = nearest_sizes(sizes, error.axes, is_legal, MOST_PROCESSES)
        near = near or nearest_sizes(sizes, SIZES, is_legal, MOST_PROCESSES)
        legal = list(dict.fromkeys(_words(other) for other in near))
        if nproc and is_legal(sizes, 0):
            legal.append(f"nproc={smallest_world(sizes)}")
        told = f"; nearest legal: {' or '.join(legal)}" if legal else f"; {error.hint or 'no change of one size helps'}"
        raise ValueError(f"layout {_words(sizes)} on {num_processes} processes{error.reason}{told}") from None


def _settled(config: "Config", sizes: dict[str, int], num_processes: int) -> "Layout":
    """Raises LayoutError with a reason that goes on after `on N processes`."""
    from parallel.config import LayoutError
    from trainer.parity_layouts import settle, with_sizes

    if num_processes > MOST_PROCESSES:
        raise LayoutError(f": at most {MOST_PROCESSES} are started on one machine", axes=tuple(sizes))
    for model, place in ((config, ""), (tiny(config, num_processes), " does not fit the tiny model")):
        try:
            layout = settle(with_sizes(model, sizes), num_processes)
        except LayoutError as error:
            raise LayoutError(f"{place}: {error.reason}", error.hint, error.axes) from None
    return layout


def _words(sizes: dict[str, int]) -> str:
    return " ".join(f"{axis}={size}" for axis, size in sizes.items())


def tiny(config: "Config", num_processes: int, device: str = "cpu") -> "Config":
    """The config with its model shrunk and its sequences cut."""
    from trainer.parity_model import batch_shape, shrink

    length = batch_shape(num_processes, 1, "cpu")[1]
    return replace(config, model=shrink(config.model, device), train=replace(config.train, seq_len=length))


def choose_device(wanted: str, layouts: "list[Layout]") -> str:
    """cpu, or cuda where every layout finds enough GPUs. Raises ValueError where cuda is asked for in vain."""
    import torch

    most = max(layout.num_processes for layout in layouts)
    available = torch.cuda.device_count()
    if wanted == "cuda" and available < most:
        raise ValueError(f"device=cuda: the largest layout needs {most} GPUs, {available} are visible; use device=cpu")
    return ("cuda" if available >= most else "cpu") if wanted == "auto" else wanted


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


def check_writable(**files: Path) -> None:
    """Before minutes of work: raises ValueError for a file that cannot be written. Missing folders are made."""
    for name, file in files.items():
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.open("a").close()
        except OSError as error:
            raise ValueError(f"{name}={file} cannot be written ({error.strerror}); choose another {name}=") from None


def run_matrix(words: Words) -> int:
    """Compare every layout of the three experiments that is not in the results yet, and write the table."""
    if words.overrides:
        used = ", ".join(name for name in DEFAULTS if name not in UNUSED[True])
        raise ValueError(f"matrix: {words.overrides[0]} is not among {used}")
    most = words.number("nproc", 2) if words.own["nproc"] != DEFAULTS["nproc"] else 8
    recipe = words.choice("recipe", ("", "fp64", "fp32")) or "fp64"
    from trainer.compose import compose
    from trainer.parity_check import ParityCheck, Workers
    from trainer.parity_layouts import legal_layouts
    from trainer.parity_matrix import append_result, code_digest, matrix_text, read_results, result_of

    path, out, code = Path(words.own["results"]), Path(words.own["out"]), code_digest()
    check_writable(results=path, out=out)
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
    out.write_text(matrix_text(results, recipe, "python scripts/parity.py matrix"))
    wrong = sum(not result.right for result in results)
    print(f"{len(results) - wrong} right, {wrong} wrong; {out}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
