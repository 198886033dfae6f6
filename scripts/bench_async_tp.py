"""Speed of matmuls whose rows travel meanwhile, beside the matmul alone, NCCL, and torch's fused operators, in one run.

    python scripts/bench_async_tp.py                                 two GPUs; a few minutes
    torchrun --nproc-per-node 2 scripts/bench_async_tp.py            the same; the processes are there already
    python scripts/bench_async_tp.py --rows 8192 --widths 8192x8192  one size, N x K
    python scripts/bench_async_tp.py --piece-rows 2048,4096,8192     how finely shards are cut, per size
    python scripts/bench_async_tp.py --recipe fp8_blockwise          maps in low precision, rows coded as they travel
    python scripts/bench_async_tp.py --dry-run                       tiny sizes on 2 CPU processes

Cases: `gather` multiplies [M / ranks, K] per rank, gathered along M, by [K, N / ranks]; `scatter` multiplies
[M, K / ranks] by [K / ranks, N], summed and scattered along M. bf16; backward is dX and dW. `gather_rows` and
`scatter_rows` move [4, M / 4, K] along its second dim and multiply nothing (N is 0). Sides:

    matmul   the products alone: whole operands are there, nothing travels
    nccl     all-gather and then the product; product and then reduce-scatter (comms/collectives.py): the plain path,
             which small products take; `ours` should win from `work_to_overlap` on, forward and backward together
    torch    torch.ops.symm_mem.fused_*; the gather for dW, which has no fused operator, by NCCL. Only if asked for
             (--sides matmul,nccl,torch,ours, few sizes): beside others it did not end in two of three runs
    ours     comms/async_tp.py and comms/row_collectives.py, overlapped at every size

A time is the median over rounds of the slowest rank, launches already queued. `/ matmul` stands for "time over that of
the products alone"; `host` is how long the host is busy with forward and backward; `error` is the norm-wise difference
of output and gradients from nccl's, of rank 0. `block` is two dense blocks of a model under tp with parallel.async_tp
none and native, forward and backward of 4 sequences of 4096 tokens, compiled on GPUs as the trainer compiles them.

The result goes into benchmarks/async_tp_CARD.json. Exit code: 0 done, 2 wrong usage; a failed process ends the program
with its traceback.
"""

import argparse
import json
import os
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from comms import shard_transport
from comms.async_tp import all_gather_matmul, matmul_reduce_scatter, work_to_overlap
from comms.collectives import gather_dim, reduce_scatter
from comms.products import AS_THEY_ARE, find_product, register_product
from comms.row_collectives import gather_rows, scatter_rows
from moe.config import LOW_PRECISION
from moe.low_precision_linear import LowPrecisionProduct
from moe.recipes import resolve_recipe
from scripts.bench_comms import cell
from scripts.bench_ranks import measure_on_ranks, settle_gpus
from scripts.bench_results import probe, result_file, stamp, write_result
from scripts.bench_times import host_seconds, lead_for, max_over_ranks, seconds_of
from scripts.tp_blocks import measure_blocks
from trainer.parity import relative_error

SIDES = ("matmul", "nccl", "torch", "ours")
KINDS = ("gather", "scatter", "gather_rows", "scatter_rows")
# Nothing is multiplied with them: [SEQUENCES, M / SEQUENCES, K].
ROWS_ALONE, SEQUENCES = KINDS[2:], 4
CUDA = torch.device("cuda")
ROWS = "512,1024,2048,4096,8192,16384,32768"
COLUMNS = {
    "forward_ms": "fwd ms", "forward_ratio": "/ matmul", "backward_ms": "bwd ms", "backward_ratio": "/ matmul",
    "host_ms": "host ms", "error": "error",
}  # fmt: skip
HEADER = f"{'':42}" + "".join(f"{title:>9}" for title in COLUMNS.values())
# Of gathers and of sums.
DEFAULT_PIECES = shard_transport.PIECE_ROWS, shard_transport.SUM_PIECE_ROWS


class Case(NamedTuple):
    """kind: one of KINDS; rows of all ranks, width of the whole product and of the whole contraction.

    piece_rows: 0 is the default of the kind.
    """

    kind: str
    M: int
    N: int
    K: int
    piece_rows: int


class Calls(NamedTuple):
    """One side of a case: what to time."""

    forward: Callable[[], Any]
    backward: Callable[[], Any]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, write and show; returns the exit code."""
    arguments = parse_arguments(argv)
    machine = probe(arguments.dry_run)
    try:
        settle_gpus(arguments, machine)
        out = result_file(arguments, "async_tp", machine["card"], "cases")
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    figures = measure_on_ranks(measure_all, arguments)
    if figures is None:
        return 0
    result = {**describe(arguments, machine), **figures}
    if out is not None:
        suffix = "" if arguments.recipe == "bf16" else f"_{arguments.recipe}"
        write_result(out, f"{arguments.nproc}_gpus{suffix}", result, "cases")
    if arguments.json:
        print(json.dumps(result))
    else:
        print(table(result) if out is None else f"{table(result)}\nwritten: {out}")
    return 0


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line, checked; ends the process with code 2 if it is wrong."""
    parser = argparse.ArgumentParser(
        prog="bench_async_tp.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nproc", type=int, default=int(os.environ.get("WORLD_SIZE", "2")))
    parser.add_argument("--rows", default=ROWS, help="M, rows of all ranks; default: %(default)s")
    parser.add_argument("--widths", default="8192x8192,8192x4096", help="N x K; default: %(default)s")
    parser.add_argument("--kinds", default=",".join(KINDS), help="default: %(default)s")
    parser.add_argument("--piece-rows", default="0", help="0, the default: as training does")
    parser.add_argument("--sides", default="matmul,nccl,ours", help="default: %(default)s; and torch")
    parser.add_argument("--recipe", default="bf16", choices=("bf16", *LOW_PRECISION), help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--no-block", action="store_true", help="leave the blocks of a model out")
    parser.add_argument("--eager", action="store_true", help="do not compile the blocks of a model")
    parser.add_argument("--trace", type=Path, help="folder for profiler traces of the blocks")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument("--out", type=Path, help="default: benchmarks/async_tp_CARD.json; none for a dry run")
    parser.add_argument("--commit", help="commit to note; default: asked from git")
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes on 2 CPU processes")
    arguments = parser.parse_args(argv)
    for option, known in (("sides", SIDES), ("kinds", KINDS)):
        given = getattr(arguments, option).split(",")
        setattr(arguments, option, given)
        if unknown := set(given) - set(known):
            parser.error(f"--{option}: {', '.join(sorted(unknown))} is not known; choose from {', '.join(known)}")
    try:
        arguments.cases = cases_of(arguments)
    except ValueError as error:
        parser.error(f"--rows and --piece-rows are numbers divided by commas, --widths are like 8192x4096 ({error})")
    wrong = [case for case in arguments.cases if not _divides(case, arguments.nproc)]
    if wrong or arguments.rounds <= 0:
        parser.error(
            f"M, N and K must be multiples of --nproc={arguments.nproc}, M of {SEQUENCES} times that where rows are "
            f"alone, and --rounds positive; wrong: {wrong}"
        )
    return arguments


def _divides(case: Case, nproc: int) -> bool:
    sequences = SEQUENCES if case.kind in ROWS_ALONE else 1
    return case.M % (sequences * nproc) == 0 and case.N % nproc == 0 and case.K % nproc == 0


def cases_of(arguments: argparse.Namespace) -> list[Case]:
    """What to measure, in order."""
    if arguments.dry_run:
        arguments.rounds = 1
        arguments.sides = [side for side in arguments.sides if side != "torch"]
        # Blocks of low precision, where there are any.
        unit = arguments.nproc * (1 if arguments.recipe == "bf16" else 32)
        rows_unit = arguments.nproc
        found = [Case(kind, rows * rows_unit, 12 * unit, 8 * unit, 8) for kind in arguments.kinds for rows in (8, 32)]
        return [case._replace(N=0) if case.kind in ROWS_ALONE else case for case in found]
    widths = [tuple(int(size) for size in pair.split("x")) for pair in arguments.widths.split(",")]
    rows, pieces = ([int(size) for size in text.split(",")] for text in (arguments.rows, arguments.piece_rows))
    found = [
        Case(kind, M, 0 if kind in ROWS_ALONE else N, K, piece_rows)
        for N, K in widths
        for M in rows
        for kind in arguments.kinds
        for piece_rows in pieces
    ]
    # Two products may have rows of the same width.
    return list(dict.fromkeys(found))


def describe(arguments: argparse.Namespace, machine: dict[str, Any]) -> dict[str, Any]:
    """What was measured, where, and with which code."""
    return {
        "nproc": arguments.nproc,
        "rounds": arguments.rounds,
        "fused_work": [work_to_overlap(CUDA, arguments.nproc, scatters=scatters) for scatters in (False, True)],
        "recipe": arguments.recipe,
        **stamp(arguments, machine),
    }


def table(result: dict[str, Any]) -> str:
    """The result for a person: one line per case and side."""
    lines = [
        f"{result['nproc']} x {result['card']}, torch {result['torch']}, {result['commit'][:12]}",
        HEADER,
    ]
    lines += [line for case in result["cases"] for line in lines_of(case)]
    for mode, milliseconds in result["block"].items():
        host = result["block_host"][mode]
        lines.append(f"{'two blocks, fwd + bwd':34}{mode:8}{milliseconds:>9.3f}{'host':>9}{host:>9.3f}")
    lines.append("cases: what travels, M, N, K / rows of a piece (0: as in training); milliseconds, and over `matmul`")
    if result["dry_run"]:
        lines.append("a dry run: that it runs is all that its figures say")
    return "\n".join(lines)


def lines_of(case: dict[str, Any]) -> list[str]:
    """One line per side."""
    lines: list[str] = []
    name = f"{case['kind']} {case['M']}, {case['N']}, {case['K']} / {case['piece_rows']}"
    for side, found in case["sides"].items():
        cells = [found[key] for key in COLUMNS]
        lines.append(f"{name:34}{side:8}" + "".join(f"{cell(value):>9}" for value in cells))
    return lines


# ---- one rank


def measure_all(arguments: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Figures of every case, in order, and of the blocks."""
    cases: list[dict[str, Any]] = []
    if dist.get_rank() == 0:
        # As it comes: a run takes minutes.
        print(HEADER, file=sys.stderr, flush=True)
    for case in arguments.cases:
        cases.append(measure(arguments, case, device))
        if dist.get_rank() == 0:
            print("\n".join(lines_of(cases[-1])), file=sys.stderr, flush=True)
    set_pieces(8 if arguments.dry_run else 0)
    block, hosts = ({}, {}) if arguments.no_block else measure_blocks(arguments, device)
    return {"cases": cases, "block": block, "block_host": hosts}


def measure(arguments: argparse.Namespace, case: Case, device: torch.device) -> dict[str, Any]:
    """Figures of one case, alike on every rank but for its error."""
    set_pieces(case.piece_rows)
    sides = sides_of(case, device, arguments.sides, arguments.recipe)
    times: dict[str, list[list[float]]] = {name: [] for name in sides}
    hosts = {name: [0.0, 0.0] for name in sides}
    calls = 2 if device.type == "cpu" else 10
    # Sides in turn, so that a slower moment is everybody's; the first round loads kernels and connects the ranks.
    for measured in [False] + [True] * arguments.rounds:
        for name, side in sides.items():
            leads = [lead_for(seconds, calls) for seconds in hosts[name]]
            pair = [seconds_of(function, device, calls, lead) for function, lead in zip(side, leads, strict=True)]
            if measured:
                times[name].append(pair)
            else:
                hosts[name] = [host_seconds(function, device, calls // 2) for function in side]
    exact = [sides["nccl"].forward(), *sides["nccl"].backward()] if "nccl" in sides else []
    found: dict[str, dict[str, float | None]] = {}
    for name, pairs in times.items():
        forward_s, backward_s = (max_over_ranks(statistics.median(column)) for column in zip(*pairs, strict=True))
        compared = exact if name in ("torch", "ours") else []
        results = [sides[name].forward(), *sides[name].backward()] if compared else []
        errors = [relative_error(a, b) for a, b in zip(results, exact, strict=True)] if results else []
        # JSON has no infinity, which is what numbers that are not finite give.
        error = min(max(errors), 1e30) if errors else None
        found[name] = {"forward_ms": 1e3 * forward_s, "backward_ms": 1e3 * backward_s, "error": error}
        found[name]["host_ms"] = 1e3 * max_over_ranks(sum(hosts[name]))
    for figures in found.values():
        for kind in ("forward", "backward"):
            alone = found["matmul"][f"{kind}_ms"] if "matmul" in found else None
            mine = figures[f"{kind}_ms"]
            figures[f"{kind}_ratio"] = mine / alone if alone and mine is not None else None
    return {**case._asdict(), "sides": found}


def set_pieces(piece_rows: int) -> None:
    """How finely shards are cut from here on; 0: as training does."""
    both = (piece_rows, piece_rows) if piece_rows else DEFAULT_PIECES
    shard_transport.PIECE_ROWS, shard_transport.SUM_PIECE_ROWS = both


def sides_of(case: Case, device: torch.device, names: Sequence[str], recipe: str) -> dict[str, Calls]:
    """What to time of each side, on operands of this rank."""
    if case.kind in ROWS_ALONE:
        return sides_of_rows(case, device, names, recipe)
    assert dist.group.WORLD is not None
    size, group = dist.get_world_size(), dist.group.WORLD.group_name
    random = random_on(device, recipe)
    product = product_named(recipe, device)
    linear = find_product(product).linear
    M, N, K = case.M, case.N, case.K
    if case.kind == "gather":
        x, weight, grad = random(M // size, K), random(N // size, K) / K**0.5, random(M, N // size)
        whole_x, whole_grad = random(M, K), grad
    else:
        x, weight, grad = random(M, K // size), random(N, K // size) / K**0.5, random(M // size, N)
        whole_x, whole_grad = x, random(M, N)
    forwards: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        "nccl": lambda x, w: linear(gather_dim(x, 0, group), w),
        "ours": lambda x, w: all_gather_matmul(x, [w], 0, group, 0, [product])[0],
    }
    if case.kind == "scatter":
        forwards = {
            "nccl": lambda x, w: reduce_scatter(linear(x, w), 0, group),
            "ours": lambda x, w: matmul_reduce_scatter(x, w, 0, group, 0, product),
        }
    found = {"matmul": through_autograd(linear, [whole_x, weight], whole_grad)}
    found |= {name: through_autograd(forward, [x, weight], grad) for name, forward in forwards.items()}
    if device.type == "cuda" and recipe == "bf16":
        found["torch"] = fused_by_torch(case.kind, x, weight, grad, group)
    return {name: found[name] for name in names if name in found}


def sides_of_rows(case: Case, device: torch.device, names: Sequence[str], recipe: str) -> dict[str, Calls]:
    """What to time of each side where rows are alone."""
    assert dist.group.WORLD is not None
    size, group, random = dist.get_world_size(), dist.group.WORLD.group_name, random_on(device, recipe)
    gathers, rows = case.kind == "gather_rows", case.M // SEQUENCES
    shard, whole = random(SEQUENCES, rows // size, case.K), random(SEQUENCES, rows, case.K)
    x, grad = (shard, whole) if gathers else (whole, shard)
    collective, ours = (gather_dim, gather_rows) if gathers else (reduce_scatter, scatter_rows)
    found = {
        "nccl": through_autograd(lambda x: collective(x, 1, group), [x], grad),
        "ours": through_autograd(lambda x: ours(x, 1, group, 0), [x], grad),
    }
    return {name: found[name] for name in names if name in found}


def random_on(device: torch.device, recipe: str) -> Callable[..., Tensor]:
    """Shape -> numbers that differ by rank."""
    generator = torch.Generator(device).manual_seed(dist.get_rank())
    dtype = torch.float32 if device.type == "cpu" and recipe == "bf16" else torch.bfloat16
    return lambda *shape: torch.randn(*shape, generator=generator, device=device, dtype=dtype)


def product_named(recipe: str, device: torch.device) -> str:
    """How maps of the recipe multiply (comms/products.py)."""
    if recipe == "bf16":
        return AS_THEY_ARE
    product = LowPrecisionProduct(resolve_recipe(recipe, device))
    return register_product(product.name, product)


def through_autograd(function: Callable[..., Tensor], operands: list[Tensor], grad: Tensor) -> Calls:
    """Forward without a graph, and backward of a graph that is kept."""
    leaves = [operand.detach().requires_grad_() for operand in operands]
    out = function(*leaves)

    def forward() -> Tensor:
        with torch.no_grad():
            return function(*operands)

    return Calls(forward, lambda: list(torch.autograd.grad(out, leaves, grad, retain_graph=True)))


def fused_by_torch(kind: str, x: Tensor, weight: Tensor, grad: Tensor, group: str) -> Calls:
    """torch's own operators, put together as its compiler would."""
    from torch.distributed._symmetric_memory import enable_symm_mem_for_group

    enable_symm_mem_for_group(group)  # pyright: ignore[reportArgumentType]
    ops = torch.ops.symm_mem
    if kind == "gather":
        return Calls(
            lambda: ops.fused_all_gather_matmul(x, [weight.t()], 0, group, return_A=False)[1][0],
            lambda: [
                ops.fused_matmul_reduce_scatter(grad, weight, "sum", 0, group),
                grad.t() @ gather_dim(x, 0, group),
            ],
        )

    def backward() -> list[Tensor]:
        whole, (dx,) = ops.fused_all_gather_matmul(grad, [weight], 0, group, return_A=True)
        return [dx, whole.t() @ x]

    return Calls(lambda: ops.fused_matmul_reduce_scatter(x, weight.t(), "sum", 0, group), backward)


if __name__ == "__main__":
    sys.exit(main())
