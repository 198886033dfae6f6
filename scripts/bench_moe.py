"""Speed and memory of one whole MoE layer on one GPU, beside torch's grouped_mm and other packages' layers.

    python scripts/bench_moe.py                                        needs a GPU
    python scripts/bench_moe.py --shapes Qwen3-30B-A3B --routing zipf --sides fused,torch
    python scripts/bench_moe.py --kernels --picture docs/moe.svg       our kernels one by one; ratios as a picture
    python scripts/bench_moe.py --first-call --shapes Qwen3-30B-A3B    seconds of a process's first step, too
    python scripts/bench_moe.py --dry-run                              tiny sizes on the CPU

A layer is router, sort, experts and sum (scripts/moe_sides.py), in bf16, compiled; ours as the trainer compiles it.
Times are those of a card at work (scripts/moe_times.py), medians over rounds; `bwd` is their difference. TFLOP/s count
6 T K D F forward and 12 T K D F backward. `ratio` is a side's forward with backward over that of `torch`, `host` the
milliseconds that the host takes to launch them.

Memory is of one step beyond tokens, weights and the gradient of the output: `peak` at most, `saved` what forward keeps
for backward, x included and the output not. Its bound is 2 (T D + 2 T K F) bytes, indices not counted. `syncs` are
waits for the device and copies to the host in a profiler's trace of one step. `error` is the worst of output and
gradients, ||a - b|| / ||b|| against a loop over experts in fp32, on the first 2048 tokens.

A side that cannot run is listed with the reason. The result goes into benchmarks/moe_CARD.json, one entry per shape and
routing. Exit code: 0 done, 2 wrong usage.
"""

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts.bench_results import read_results, result_file, stamp, write_result
from scripts.moe_kernels import measure_kernels
from scripts.moe_picture import draw_ratios
from scripts.moe_sides import (
    ROUTINGS,
    SHAPES,
    SIDES,
    TINY,
    Problem,
    Shape,
    Side,
    build,
    draw_ids,
    first_tokens,
    make_problem,
    reference,
    relative_errors,
    results,
    saved_bound,
    step,
)
from scripts.moe_times import host_milliseconds, time_sides
from trainer.garbage import NEVER, collected_together

# Tokens of the comparison with fp32.
CHECKED_TOKENS = 2048
# Calls that make the host wait for the device.
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "Memcpy DtoH")


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, write and show; returns the exit code."""
    arguments = parse_arguments(argv)
    if not arguments.dry_run and not torch.cuda.is_available():
        print("error: no GPU found; --dry-run tries the program on the CPU", file=sys.stderr)
        return 2
    card = "cpu" if arguments.dry_run else torch.cuda.get_device_name()
    if arguments.only_first_call:
        print(json.dumps(first_call(arguments)))
        return 0
    try:
        out = result_file(arguments, "moe", card, "sides")
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    entries: dict[str, Any] = {}
    for shape in arguments.shapes:
        for entry in measure_shape(shape, arguments):
            result = {**describe(arguments, card), **entry}
            name = f"{shape} {result['routing']}"
            entries[name] = result
            if out is not None:
                write_result(out, name, result, "sides")
            # As it comes: a run takes minutes.
            print(table(name, result), file=sys.stderr if arguments.json else sys.stdout, flush=True)
    if arguments.picture is not None:
        draw_ratios(entries if out is None else read_results(out, "sides"), arguments.picture)
    if arguments.json:
        print(json.dumps(entries, allow_nan=False))
    return 0


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line, checked; ends the process with code 2 if it is wrong."""
    parser = argparse.ArgumentParser(
        prog="bench_moe.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", default=",".join(SHAPES), help="default: %(default)s")
    parser.add_argument("--routing", default=",".join(ROUTINGS), help="default: %(default)s")
    parser.add_argument("--sides", default=",".join(SIDES), help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=8, help="an even number; default: %(default)s")
    parser.add_argument("--eager", action="store_true", help="compile nothing")
    parser.add_argument("--kernels", action="store_true", help="time our kernels one by one as well")
    parser.add_argument(
        "--first-call", action="store_true", help="time a new process's first step, caches empty and full"
    )
    parser.add_argument("--only-first-call", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--picture", type=Path, help="draw the ratios of all results in the file, as SVG or PNG")
    parser.add_argument("--out", type=Path, help="default: benchmarks/moe_CARD.json; none for a dry run")
    parser.add_argument("--commit", help="commit to note; default: asked from git")
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes on the CPU, not compiled")
    arguments = parser.parse_args(argv)
    for option, known in (("shapes", [*SHAPES, "tiny"]), ("routing", ROUTINGS), ("sides", SIDES)):
        chosen = getattr(arguments, option).split(",")
        if unknown := set(chosen) - set(known):
            parser.error(f"--{option}: {', '.join(sorted(unknown))} is not known; choose from {', '.join(known)}")
        setattr(arguments, option, chosen)
    if arguments.rounds <= 0 or arguments.rounds % 2:
        parser.error("--rounds must be even and above 0: sides take turns in both orders")
    if arguments.dry_run and arguments.kernels:
        parser.error("--kernels needs a GPU: leave --dry-run out")
    if arguments.dry_run:
        arguments.shapes, arguments.rounds, arguments.eager = ["tiny"], 2, True
    return arguments


def describe(arguments: argparse.Namespace, card: str) -> dict[str, Any]:
    """What was measured, where, and with which code."""
    return {
        "rounds": arguments.rounds,
        "compiled": not arguments.eager,
        **stamp(arguments, {"card": card, "torch": torch.__version__, "cuda": torch.version.cuda}),
    }


def shape_of(name: str) -> Shape:
    """Its sizes."""
    return TINY if name == "tiny" else SHAPES[name]


def device_of(arguments: argparse.Namespace) -> torch.device:
    """Where everything runs."""
    return torch.device("cpu" if arguments.dry_run else "cuda")


# ---- one shape


def measure_shape(name: str, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """One entry per routing; every side is built and compiled once."""
    shape, device = shape_of(name), device_of(arguments)
    torch.compiler.reset()
    sides, absent = build_sides(make_problem(shape, arguments.routing[0], device), arguments)
    entries = []
    for routing in arguments.routing:
        problem = make_problem(shape, routing, device)
        figures = measure_sides(sides, problem, arguments.rounds)
        load_E = torch.bincount(draw_ids(shape, routing, device).flatten(), minlength=shape.experts)
        entry: dict[str, Any] = {"shape": name, "routing": routing, **shape._asdict()}
        entry["load_max_over_mean"] = float(load_E.max() / load_E.float().mean())
        entry["saved_bound_gib"] = saved_bound(shape) / 2**30
        entry |= {"sides": figures, "absent": absent}
        entries.append(entry)
    del sides
    release(device)
    for entry in entries if arguments.kernels else []:
        entry["kernels"] = measure_kernels(make_problem(shape, entry["routing"], device), entry["routing"])
    for side in arguments.sides if arguments.first_call else []:
        if side in entries[0]["sides"]:
            entries[0]["sides"][side]["first_call_seconds"] = first_calls(name, side, arguments)
    return entries


# Other packages' layers.
INSTALL = {
    "sonicmoe": "pip install sonic-moe, for Hopper and Blackwell",
    "liger": "pip install liger-kernel",
    "scattermoe": "pip install git+https://github.com/shawntan/scattermoe",
}


def build_sides(problem: Problem, arguments: argparse.Namespace) -> tuple[dict[str, Side], dict[str, str]]:
    """{name: layer} of those that can run here, {name: reason} of the others."""
    sides, absent = {}, {}
    for name in arguments.sides:
        try:
            side = build(name, problem, compiled=not arguments.eager)
            # Some find out in their first step.
            step(side, problem.x_TD.detach().requires_grad_(), problem.grad_TD)
        except ImportError as error:
            absent[name] = f"{error}; {INSTALL[name]}" if name in INSTALL else str(error)
        except ValueError as error:
            absent[name] = str(error)
        except Exception as error:
            if name in ("fused", "grouped_mm", "torch"):
                raise
            absent[name] = f"{type(error).__name__}: {error}".splitlines()[0]
        else:
            sides[name] = side
    return sides, absent


def measure_sides(sides: dict[str, Side], problem: Problem, rounds: int) -> dict[str, dict[str, Any]]:
    """{name: figures}."""
    release(problem.x_TD.device)
    # As in a training step.
    with collected_together(NEVER):
        times = time_sides(sides, problem, rounds)
        host = {name: host_milliseconds(side, problem) for name, side in sides.items()}
    errors = errors_of(sides, problem)
    figures: dict[str, dict[str, Any]] = {}
    for name, side in sides.items():
        figures[name] = {**speeds(problem.shape, times[name]), **memory(side, problem), "syncs": syncs(side, problem)}
        figures[name] |= {"host_ms": host[name], "error": max(errors[name].values())}
        figures[name]["errors"] = errors[name]
    if "torch" in figures:
        for found in figures.values():
            found["ratio"] = found["fwd_bwd_tflops"] / figures["torch"]["fwd_bwd_tflops"]
    return figures


def errors_of(sides: dict[str, Side], problem: Problem) -> dict[str, dict[str, float]]:
    """{name: {tensor: error}} on a few tokens."""
    few = first_tokens(problem, CHECKED_TOKENS)
    exact = reference(few)
    # Not compiled: another number of tokens would be compiled again, and for sizes that vary.
    torch.compiler.set_stance("force_eager")
    try:
        return {name: relative_errors(results(side, few), exact) for name, side in sides.items()}
    finally:
        torch.compiler.set_stance("default")


def speeds(shape: Shape, times: list[tuple[float, float]]) -> dict[str, float]:
    """Of (forward, forward with backward) in ms: medians and TFLOP/s."""
    forward, both = (statistics.median(column) for column in zip(*times, strict=True))
    work = 6 * shape.tokens * shape.top_k * shape.dim * shape.hidden / 1e9
    found = {"fwd_ms": forward, "fwd_bwd_ms": both, "fwd_tflops": work / forward, "fwd_bwd_tflops": 3 * work / both}
    # On a CPU's tiny sizes the difference may be noise.
    return {**found, "bwd_tflops": 2 * work / max(both - forward, 1e-6)}


def memory(side: Side, problem: Problem) -> dict[str, float | None]:
    """Peak of a step, and what its forward leaves for backward, in GiB; None without a GPU's allocator."""
    if not problem.x_TD.is_cuda:
        return {"peak_gib": None, "saved_gib": None}
    leaf = problem.x_TD.detach().requires_grad_()
    release(problem.x_TD.device)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    out_TD = side.forward(leaf)
    saved = torch.cuda.memory_allocated() - before - size_of(out_TD) + size_of(leaf)
    grads = torch.autograd.grad(out_TD, [leaf, *side.weights.values()], problem.grad_TD)
    peak = torch.cuda.max_memory_allocated() - before
    del out_TD, grads
    return {"peak_gib": peak / 2**30, "saved_gib": saved / 2**30}


def syncs(side: Side, problem: Problem) -> int | None:
    """How often one step makes the host wait; None without a GPU."""
    if not problem.x_TD.is_cuda:
        return None
    leaf = problem.x_TD.detach().requires_grad_()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
        with torch.profiler.record_function("step"):
            step(side, leaf, problem.grad_TD)
    events = trace.events() or []
    # The profiler itself waits when it stops: what counts begins within the step.
    ends = [event.time_range.end for event in events if event.name == "step"]
    return count_waits([(event.name, event.time_range.start) for event in events], min(ends))


def count_waits(events: list[tuple[str, float]], end: float) -> int:
    """Of (name, start): waits that begin before `end`, and every copy to the host, which may run behind it."""
    found = [(name, start) for name, start in events if name.startswith(WAITS)]
    return sum(start < end or name.startswith("Memcpy") for name, start in found)


def size_of(x: Tensor) -> int:
    """Bytes of the elements."""
    return x.numel() * x.element_size()


def release(device: torch.device) -> None:
    """Give memory of what is no longer used back."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def first_calls(shape: str, side: str, arguments: argparse.Namespace) -> dict[str, float]:
    """Seconds of the first step of a new process, with empty caches and with those it left."""
    command = [sys.executable, __file__, "--only-first-call", "--shapes", shape, "--sides", side]
    command += ["--eager"] * arguments.eager + ["--dry-run"] * arguments.dry_run
    with tempfile.TemporaryDirectory(prefix="bench_moe_") as folder:
        caches = {
            name: f"{folder}/{name}" for name in ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "XDG_CACHE_HOME")
        }
        found = {}
        for kind in ("cold", "warm"):
            done = subprocess.run(command, env={**os.environ, **caches}, capture_output=True, text=True, check=False)
            if done.returncode:
                raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
            found[kind] = float(json.loads(done.stdout.splitlines()[-1]))
    return found


def first_call(arguments: argparse.Namespace) -> float:
    """Seconds of the first step here, with the choice of tiles before it."""
    problem = make_problem(shape_of(arguments.shapes[0]), arguments.routing[0], device_of(arguments))
    release(problem.x_TD.device)
    start = time.perf_counter()
    side = build(arguments.sides[0], problem, compiled=not arguments.eager)
    step(side, problem.x_TD.detach().requires_grad_(), problem.grad_TD)
    release(problem.x_TD.device)
    return time.perf_counter() - start


def table(name: str, result: dict[str, Any]) -> str:
    """The result for a person: one line per side, per absent side, and per kernel."""
    lines = [
        f"{name}: load {result['load_max_over_mean']:.2f} x mean, saved >= {result['saved_bound_gib']:.2f} GiB, "
        f"{result['card']}, torch {result['torch']}, {result['commit'][:12]}",
        f"{'TFLOP/s':14}{'fwd':>7}{'bwd':>7}{'f+b':>7}{'ratio':>8}{'peak':>8}{'saved':>8}{'syncs':>7}{'host':>7}{'error':>10}",
    ]
    for side, found in result["sides"].items():
        calls = found.get("first_call_seconds", {})
        lines.append(
            f"{side:14}{found['fwd_tflops']:>7.0f}{found['bwd_tflops']:>7.0f}{found['fwd_bwd_tflops']:>7.0f}"
            f"{_number(found.get('ratio'), '.3f'):>8}{_number(found['peak_gib'], '.2f'):>8}"
            f"{_number(found['saved_gib'], '.2f'):>8}{_number(found['syncs'], 'd'):>7}"
            f"{_number(found['host_ms'], '.1f'):>7}{found['error']:>10.1e}  "
            + ", ".join(f"{kind} {seconds:.1f} s" for kind, seconds in calls.items())
        )
    lines += [f"{side:14}absent: {reason}" for side, reason in result["absent"].items()]
    if result["dry_run"]:
        lines.append("a dry run: that it runs is all that its figures say")
    for kernel, found in result.get("kernels", {}).items():
        lines.append(f"  {kernel:18}{found['ms']:>9.3f} ms{found['rate']:>8.0f} {found['unit']}")
    return "\n".join(lines)


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


if __name__ == "__main__":
    sys.exit(main())
