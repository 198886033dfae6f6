"""Speed of one layer's attention when a sequence lies on several GPUs, beside one GPU that has all of it.

    python scripts/bench_attention.py --nproc 2 --seq-len 32768                  needs GPUs
    python scripts/bench_attention.py --shape mla --documents 8 --modes ring     MLA's heads; packed documents
    python scripts/bench_attention.py --dry-run                                  tiny sizes on 2 CPU processes

Measured is what lies between the projections: from this rank's q, k and v to its output (bf16), forward alone and
forward with backward, transfers included. `one` is the model's own attention on one GPU, `ring` and `ulysses` share the
sequence among all. Every round runs each mode once; a time is the median over rounds of the slowest rank.

TFLOP/s count the pairs of tokens that see each other, and per GPU. `ratio` is a mode's speed per GPU over that of one
GPU with the whole sequence; `error` the norm-wise difference of its output and gradients from that GPU's.

The result goes into benchmarks/attention_CARD.json, one entry per set of sizes. Exit code: 0 done, 2 wrong usage; a
failed process ends the program with its traceback.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from comms.split_sequence import SplitSequence
from parallel.context_parallel import ContextParallel, context_attention
from scripts.bench_ranks import measure_on_ranks, settle_gpus
from scripts.bench_results import probe, result_file, stamp, write_result
from trainer.models.config import AttentionConfig
from trainer.models.inner_attention import InnerAttention, plan_sequences

MODES = ("ring", "ulysses")


class Shape(NamedTuple):
    """Query heads, key/value heads, head dims of queries and keys, and of values."""

    heads: int
    kv_heads: int
    dim: int
    v_dim: int


# Qwen3-30B-A3B; DeepSeek-V2-Lite; --dry-run.
SHAPES = {"qwen3": Shape(32, 4, 128, 128), "mla": Shape(16, 16, 192, 128), "tiny": Shape(8, 2, 16, 8)}

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, write and show; returns the exit code."""
    arguments = parse_arguments(argv)
    machine = probe(arguments.dry_run)
    try:
        settle(arguments, machine)
        out = result_file(arguments, "attention", machine["card"], "modes")
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    modes = measure_on_ranks(measure, arguments)
    if modes is None:
        return 0
    result = {**describe(arguments, machine), "modes": modes}
    if out is not None:
        write_result(out, name_of(arguments), result, "modes")
        print(f"written: {out}")
    print(table(result))
    return 0


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line, checked; ends the process with code 2 if it is wrong."""
    parser = argparse.ArgumentParser(
        prog="bench_attention.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nproc", type=int, help="processes that share a sequence; default: all GPUs")
    parser.add_argument("--seq-len", type=int, default=32768)
    parser.add_argument("--documents", type=int, default=0, help="equal documents per sequence; 0: no documents")
    parser.add_argument("--window", type=int, default=0, help="tokens that each one sees; 0: all")
    parser.add_argument("--shape", choices=("qwen3", "mla"), default="qwen3")
    parser.add_argument("--modes", default=",".join(MODES), help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--out", type=Path, help="default: benchmarks/attention_CARD.json; none for a dry run")
    parser.add_argument("--commit", help="commit to note; default: asked from git")
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes on 2 CPU processes")
    arguments = parser.parse_args(argv)
    if arguments.dry_run:
        arguments.seq_len, arguments.rounds, arguments.shape = 64, 2, "tiny"
    arguments.modes = arguments.modes.split(",")
    if unknown := set(arguments.modes) - set(MODES):
        parser.error(f"--modes: {', '.join(sorted(unknown))} is not known; choose from {', '.join(MODES)}")
    if min(arguments.seq_len, arguments.rounds) <= 0 or min(arguments.documents, arguments.window) < 0:
        parser.error("--seq-len and --rounds must be positive, --documents and --window not negative")
    return arguments


def settle(arguments: argparse.Namespace, machine: dict[str, Any]) -> None:
    """Fill in what depends on the machine.

    Raises:
        ValueError: too few GPUs, or a sequence that does not divide.
    """
    settle_gpus(arguments, machine)
    unit = 2 * arguments.nproc
    if arguments.seq_len % unit:
        raise ValueError(f"--seq-len={arguments.seq_len} must be a multiple of 2 x --nproc = {unit}")


def name_of(arguments: argparse.Namespace) -> str:
    """Of the sizes: an entry replaces an earlier one of the same."""
    extras = [f"{arguments.documents}_documents"] * (arguments.documents > 0)
    extras += [f"window_{arguments.window}"] * (arguments.window > 0)
    return "_".join([arguments.shape, str(arguments.seq_len), f"{arguments.nproc}_gpus", *extras])


def describe(arguments: argparse.Namespace, machine: dict[str, Any]) -> dict[str, Any]:
    """What was measured, where, and with which code."""
    return {
        "shape": arguments.shape,
        **SHAPES[arguments.shape]._asdict(),
        "seq_len": arguments.seq_len,
        "documents": arguments.documents,
        "window": arguments.window,
        "nproc": arguments.nproc,
        "rounds": arguments.rounds,
        **stamp(arguments, machine),
    }


def table(result: dict[str, Any]) -> str:
    """The result for a person: one line per mode."""
    lines = [
        f"{result['shape']}, sequence {result['seq_len']}, {result['documents']} documents, window {result['window']}, "
        f"{result['nproc']} x {result['card']}, torch {result['torch']}, {result['commit'][:12]}",
        f"{'':10}{'fwd ms':>10}{'TFLOP/s':>10}{'ratio':>8}{'fwd+bwd ms':>12}{'TFLOP/s':>10}{'ratio':>8}{'error':>10}",
    ]
    for mode, found in result["modes"].items():
        forward, both = found["forward"], found["forward_backward"]
        lines.append(
            f"{mode:10}{forward['ms']:>10.3f}{forward['tflops_per_gpu']:>10.1f}{forward['ratio']:>8.3f}"
            f"{both['ms']:>12.3f}{both['tflops_per_gpu']:>10.1f}{both['ratio']:>8.3f}{found['error']:>10.1e}"
        )
    return "\n".join(lines)


# ---- one rank


def measure(arguments: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """{mode: figures}, alike on every rank."""
    rank = dist.get_rank()
    whole = random_inputs(arguments, device)
    runs: dict[str, tuple[Attention, list[Tensor]]] = {"one": (whole_attention(arguments, device), whole)}
    for mode in arguments.modes:
        place = place_of(mode, rank, arguments.nproc)
        parts = [place.part(x).contiguous() for x in whole]
        runs[mode] = shared_attention(arguments, mode, rank, device), parts
    times: dict[str, list[tuple[float, float]]] = {mode: [] for mode in runs}
    # The first round loads kernels and connects the ranks.
    for measured in [False] + [True] * arguments.rounds:
        for mode, (attention, tensors) in runs.items():
            found = time_once(attention, tensors, device, works=mode != "one" or rank == 0)
            if measured:
                times[mode].append(found)
    exact = [x.detach() for x in with_gradients(*runs["one"])]
    figures = {}
    for mode, pairs in times.items():
        results = [x.detach() for x in with_gradients(*runs[mode])]
        if mode != "one":
            results = [place_of(mode, rank, arguments.nproc).whole(x) for x in results]
        figures[mode] = {
            "error": max(relative_error(a, b) for a, b in zip(results, exact, strict=True)),
            **speeds(arguments, 1 if mode == "one" else arguments.nproc, pairs),
        }
    for found in figures.values():
        for kind in ("forward", "forward_backward"):
            found[kind]["ratio"] = found[kind]["tflops_per_gpu"] / figures["one"][kind]["tflops_per_gpu"]
    return figures


def random_inputs(arguments: argparse.Namespace, device: torch.device) -> list[Tensor]:
    """q, k, v and the gradient of the output of one whole sequence, the same on every rank."""
    shape, dtype = SHAPES[arguments.shape], torch.bfloat16 if device.type == "cuda" else torch.float32
    generator = torch.Generator(device).manual_seed(0)
    rows = (
        (shape.heads, shape.dim),
        (shape.kv_heads, shape.dim),
        (shape.kv_heads, shape.v_dim),
        (shape.heads, shape.v_dim),
    )
    return [torch.randn(1, arguments.seq_len, *row, generator=generator, device=device, dtype=dtype) for row in rows]


def place_of(mode: str, rank: int, nproc: int) -> SplitSequence:
    """Which tokens are this rank's when all ranks share a sequence."""
    assert dist.group.WORLD is not None
    return SplitSequence(*((nproc, 1) if mode == "ring" else (1, nproc)), 1, rank, dist.group.WORLD.group_name)


def document_ids(arguments: argparse.Namespace, device: torch.device) -> Tensor | None:
    """(1, S): `documents` runs of equal length, but for rounding."""
    if arguments.documents == 0:
        return None
    return (torch.arange(arguments.seq_len, device=device) * arguments.documents // arguments.seq_len).unsqueeze(0)


def first_tokens(arguments: argparse.Namespace, device: torch.device) -> Tensor | None:
    """(1, S): where each token's document begins; None without documents."""
    ids = document_ids(arguments, device)
    return None if ids is None else torch.searchsorted(ids, ids)


def whole_attention(arguments: argparse.Namespace, device: torch.device) -> Attention:
    """The model's attention on one GPU, for every head or some."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    plan = plan_sequences(
        torch.empty(1, arguments.seq_len, 1, device=device, dtype=dtype),
        AttentionConfig(sliding_window=arguments.window),
        document_ids_BS=document_ids(arguments, device),
        max_documents=max(arguments.documents, 1),
    )
    inner = InnerAttention(scale_of(arguments), arguments.window)
    return lambda q, k, v: inner.whole_sequences(q, k, v, None, plan)


def shared_attention(arguments: argparse.Namespace, mode: str, rank: int, device: torch.device) -> Attention:
    """The same by all ranks together."""
    world, nproc = dist.group.WORLD, arguments.nproc
    ring, ulysses = ContextParallel(nproc, 1, rank, 0, world, None), ContextParallel(1, nproc, 0, rank, None, world)
    alone = whole_attention(arguments, device)
    return partial(
        context_attention,
        sinks_H=None,
        context=ring if mode == "ring" else ulysses,
        scale=scale_of(arguments),
        window=arguments.window,
        first_BS=first_tokens(arguments, device),
        max_documents=max(arguments.documents, 1),
        local=lambda q, k, v, _sinks: alone(q, k, v),
    )


def scale_of(arguments: argparse.Namespace) -> float:
    """1 / sqrt(head dim)."""
    return SHAPES[arguments.shape].dim ** -0.5


def with_gradients(attention: Attention, tensors: list[Tensor]) -> list[Tensor]:
    """Output, dq, dk, dv."""
    *inputs, grad = tensors
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = attention(*leaves)
    return [out, *torch.autograd.grad(out, leaves, grad)]


def relative_error(actual: Tensor, exact: Tensor) -> float:
    """||a - b|| / ||b||."""
    return float((actual.float() - exact.float()).norm() / exact.float().norm())


def time_once(attention: Attention, tensors: list[Tensor], device: torch.device, *, works: bool) -> tuple[float, float]:
    """Milliseconds of the slowest rank, forward and forward with backward; ranks without work only wait."""

    def forward() -> None:
        with torch.no_grad():
            attention(*tensors[:3])

    def both() -> None:
        with_gradients(attention, tensors)

    found = []
    for function in (forward, both):
        dist.barrier()
        found.append(milliseconds(function, device) if works else 0.0)
    slowest = torch.tensor(found, device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return float(slowest[0]), float(slowest[1])


def milliseconds(function: Callable[[], None], device: torch.device) -> float:
    """Time of one call, the device's work included."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    function()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - start) * 1e3


def speeds(arguments: argparse.Namespace, gpus: int, times: list[tuple[float, float]]) -> dict[str, dict[str, float]]:
    """Median times, and the work that was asked for per GPU and second."""
    shape = SHAPES[arguments.shape]
    pairs = visible_pairs(arguments)
    # Q K^T and P V; backward Q K^T again, dO V^T, P^T dO, and dQ and dK from dS.
    forward = 2 * pairs * shape.heads * (shape.dim + shape.v_dim)
    both = forward + 2 * pairs * shape.heads * (3 * shape.dim + 2 * shape.v_dim)
    found = {}
    for kind, operations, column in (("forward", forward, 0), ("forward_backward", both, 1)):
        ms = statistics.median(row[column] for row in times)
        found[kind] = {"ms": ms, "tflops_per_gpu": operations / gpus / ms / 1e9}
    return found


def visible_pairs(arguments: argparse.Namespace) -> int:
    """How many pairs of a query and a key that it sees one head has."""
    index_S = torch.arange(arguments.seq_len)
    first_1S = first_tokens(arguments, index_S.device)
    seen_S = index_S + 1 if first_1S is None else index_S + 1 - first_1S[0]
    return int(seen_S.clamp(max=arguments.window or arguments.seq_len).sum())


if __name__ == "__main__":
    sys.exit(main())
