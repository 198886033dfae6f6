"""Speed of one whole expert-parallel MoE layer, by each way to exchange rows and to compute experts, in one run.

    python scripts/bench_ep.py                                      two GPUs; about a minute and a half
    torchrun --nproc-per-node 2 scripts/bench_ep.py                 the same; the processes are there already
    python scripts/bench_ep.py --shapes gpt-oss-20b --payload mxfp8 --pair-capacity 1.5
    python scripts/bench_ep.py --backends nvshmem,collective        NVSHMEM: not beside symm_mem in one run
    python scripts/bench_ep.py --experts fused,fp8_blockwise        a recipe of low precision beside bf16
    python scripts/bench_ep.py --experts fused --chunks 1,2,4       rows travel while experts compute
    python scripts/bench_ep.py --nproc 8 --etp 2                    EP=4, each expert cut over 2 ranks (parallel.etp)
    python scripts/bench_ep.py --dry-run                            tiny sizes on 2 CPU processes, by collectives

Every rank has --tokens tokens and its part of the experts (scripts/ep_sides.py), in bf16, compiled as the trainer
compiles it. A time is the median over rounds of the slowest rank, measured on the device with launches queued before;
`bwd` is forward with backward less forward. TFLOP/s are those of a rank's own tokens: 6 T K D F forward, twice that
backward. `exposed` is the part of a layer's time that is not spent on the slowest rank's share of the same work without
an exchange, so it is what communication costs, in %.

Memory is of one step beyond tokens, weights, the gradient of the output and the exchange's arena, which is told apart;
so is, with --saved-headroom, the arena of what is kept for backward: `kept` is what a step takes of it, `room` all.
`syncs` are waits for the device and copies to the host in a profiler's trace of one step. `error` is the worse of
output and gradient of x, ||a - b|| / ||b|| against collectives and a loop over experts in fp32. `host` is how long the
host is busy with a step; where nothing waits for the device, that is what launches cost.

The result goes into benchmarks/ep_CARD.json, one entry per shape and routing. Exit code: 0 done, 2 wrong usage; a
process that fails, or another backend than was asked for, ends the program with its traceback.
"""

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from comms.config import CommsConfig, PayloadConfig
from comms.symmetric_memory import forget_exchanges
from moe.config import LOW_PRECISION
from moe.fused_experts import tune
from moe.layer import MoE
from parallel.config import ParallelConfig
from parallel.mesh import Mesh, build_mesh
from scripts.bench_moe import memory, release, syncs
from scripts.bench_ranks import measure_on_ranks, settle_gpus
from scripts.bench_results import probe, result_file, stamp, write_result
from scripts.ep_sides import (
    BACKENDS,
    DEFAULT_BACKENDS,
    EXPERTS,
    Share,
    Work,
    alone,
    build_layers,
    check_ran,
    errors,
    layer_work,
    received,
    reference,
)
from scripts.moe_sides import ROUTINGS, SHAPES, TINY, Problem, Shape, make_problem, side_of
from trainer.garbage import NEVER, collected_together

# Calls of one measurement, and clock cycles of the wait in which the host gets ahead of the device.
CALLS, AHEAD = 4, 60_000_000


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, write and show; returns the exit code."""
    arguments = parse_arguments(argv)
    machine = probe(arguments.dry_run)
    try:
        settle_gpus(arguments, machine)
        check_sizes(arguments)
        out = result_file(arguments, "ep", machine["card"], "sides")
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    entries = measure_on_ranks(measure, arguments)
    if entries is None:
        return 0
    described = describe(arguments, machine)
    results = {name: {**described, **entry} for name, entry in entries.items()}
    for name, result in results.items():
        if out is not None:
            write_result(out, name, result, "sides")
    if arguments.json:
        print(json.dumps(results, allow_nan=False))
    else:
        where = "" if out is None else f"; written: {out}"
        print(f"{arguments.nproc} x {machine['card']}, torch {machine['torch']}, {described['commit'][:12]}{where}")
    return 0


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line, checked; ends the process with code 2 if it is wrong."""
    parser = argparse.ArgumentParser(
        prog="bench_ep.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nproc", type=int, help="default: all GPUs")
    parser.add_argument("--etp", type=int, default=1, help="ranks that share each expert; EP is --nproc over that")
    parser.add_argument("--shapes", default="Qwen3-30B-A3B,Mixtral-8x7B", help="default: %(default)s")
    parser.add_argument("--routing", default=",".join(ROUTINGS), help="default: %(default)s")
    parser.add_argument("--backends", help=f"default: {','.join(DEFAULT_BACKENDS)}; collective in a dry run")
    parser.add_argument("--experts", help=f"default: {','.join(EXPERTS)}; grouped_mm in a dry run")
    parser.add_argument("--payload", default="model", choices=("model", "mxfp8"), help="of rows and gradients alike")
    parser.add_argument("--chunks", default="1", help="comms.chunks of symm_mem, some in turn; default: %(default)s")
    parser.add_argument("--capacity", type=float, help="comms.capacity; default: the most that can come")
    parser.add_argument("--pair-capacity", type=float, help="model.moe.pair_capacity; default: the same")
    parser.add_argument("--saved-headroom", type=float, help="comms.saved_headroom of symm_mem; default: no arena")
    parser.add_argument("--num-ctas", type=int, help="thread blocks that put; default: by size")
    parser.add_argument("--tokens", type=int, default=8192, help="per rank; default: %(default)s")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--eager", action="store_true", help="compile nothing")
    parser.add_argument("--tune", action="store_true", help="measure how to cut the fused kernels' work first")
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    parser.add_argument("--out", type=Path, help="default: benchmarks/ep_CARD.json; none for a dry run")
    parser.add_argument("--commit", help="commit to note; default: asked from git")
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes on 2 CPU processes, not compiled")
    arguments = parser.parse_args(argv)
    if arguments.dry_run:
        arguments.shapes, arguments.rounds, arguments.tokens, arguments.eager = "tiny", 2, TINY.tokens, True
    arguments.backends = arguments.backends or ("collective" if arguments.dry_run else ",".join(DEFAULT_BACKENDS))
    arguments.experts = arguments.experts or ("grouped_mm" if arguments.dry_run else ",".join(EXPERTS))
    known = {"shapes": [*SHAPES, "tiny"], "routing": ROUTINGS, "backends": BACKENDS}
    known["experts"] = [*EXPERTS, *LOW_PRECISION]
    for option, names in known.items():
        chosen = getattr(arguments, option).split(",")
        if unknown := set(chosen) - set(names):
            parser.error(f"--{option}: {', '.join(sorted(unknown))} is not known; choose from {', '.join(names)}")
        setattr(arguments, option, chosen)
    if min(arguments.rounds, arguments.tokens, arguments.etp) <= 0:
        parser.error("--rounds, --tokens and --etp must be positive")
    if arguments.dry_run and (arguments.backends != ["collective"] or arguments.experts != ["grouped_mm"]):
        parser.error("--dry-run has no GPUs: only --backends collective --experts grouped_mm")
    if {"symm_mem", "nvshmem"} <= set(arguments.backends):
        parser.error("--backends: symm_mem and nvshmem want symmetric memory of two kinds, and a process has one")
    try:
        arguments.chunks = [int(chunks) for chunks in arguments.chunks.split(",")]
    except ValueError as error:
        parser.error(f"--chunks are numbers divided by commas ({error})")
    if min(arguments.chunks) < 1 or (max(arguments.chunks) > 1 and arguments.experts != ["fused"]):
        parser.error("--chunks must be positive; more than one need --experts fused")
    if arguments.saved_headroom is not None and (arguments.saved_headroom < 1 or arguments.experts != ["fused"]):
        parser.error("--saved-headroom must be at least 1, and needs --experts fused")
    return arguments


def check_sizes(arguments: argparse.Namespace) -> None:
    """Raises ValueError where experts and processes do not fit."""
    if arguments.nproc < 2:
        raise ValueError("one process exchanges nothing: use scripts/bench_moe.py")
    ep, rest = divmod(arguments.nproc, arguments.etp)
    if rest or ep < 2:
        raise ValueError(f"--etp={arguments.etp} must divide --nproc={arguments.nproc} and leave 2 for EP")
    for name in arguments.shapes:
        shape = shape_of(name, arguments)
        if shape.experts % ep:
            raise ValueError(f"the experts of {name} cannot be split over {ep} processes")
        if shape.hidden % arguments.etp:
            raise ValueError(
                f"the {shape.hidden} hidden units of {name} cannot be split over {arguments.etp} processes"
            )


def shape_of(name: str, arguments: argparse.Namespace) -> Shape:
    """Its sizes, with this run's tokens."""
    return (TINY if name == "tiny" else SHAPES[name])._replace(tokens=arguments.tokens)


def describe(arguments: argparse.Namespace, machine: dict[str, Any]) -> dict[str, Any]:
    """What was measured, where, and with which code."""
    names = (
        "nproc",
        "etp",
        "payload",
        "chunks",
        "capacity",
        "pair_capacity",
        "saved_headroom",
        "num_ctas",
        "rounds",
        "tune",
    )
    chosen = {name: getattr(arguments, name) for name in (*names, "tune")}
    return {**chosen, "compiled": not arguments.eager, **stamp(arguments, machine)}


# ---- one rank


class LayerSide(NamedTuple):
    """A layer, by which backends, and in how many chunks: several numbers of chunks share a layer."""

    backend: str
    experts: str
    chunks: int
    layer: MoE


def measure(arguments: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """{shape and routing: entry}, alike on every rank."""
    ep, etp = dist.get_world_size() // arguments.etp, arguments.etp
    mesh = build_mesh(ParallelConfig(ep=ep, tp=etp, etp=etp, timeout_seconds=300), device)
    entries: dict[str, Any] = {}
    for name in arguments.shapes:
        for entry in measure_shape(shape_of(name, arguments), arguments, mesh):
            shared = f" etp={etp}" if etp > 1 else ""
            key = f"{name} {entry['routing']} ep={ep}{shared} {arguments.payload}"
            entries[key] = {"shape": name, **entry}
            if dist.get_rank() == 0:
                # As it comes: should the rest fail, this is known.
                print(table(entries[key]), file=sys.stderr if arguments.json else sys.stdout, flush=True)
    return entries


def measure_shape(shape: Shape, arguments: argparse.Namespace, mesh: Mesh) -> list[dict[str, Any]]:
    """One entry per routing; every layer is built and compiled once."""
    torch.compiler.reset()
    problems = [
        make_problem(shape, routing, mesh.device, mesh.rank, mesh.world_size, mesh.config.etp)
        for routing in arguments.routing
    ]
    if arguments.tune and "fused" in arguments.experts:
        pairs, hidden = shape.tokens * shape.top_k * mesh.config.etp, shape.hidden // mesh.config.etp
        tune(pairs, shape.experts // mesh.config.ep, shape.dim, hidden, mesh.device)
    layers: dict[str, LayerSide] = {}
    for backend in arguments.backends:
        comms = comms_of(backend, arguments)
        bound = None if backend == "collective" else arguments.pair_capacity
        built = build_layers(problems[0], arguments.experts, comms, bound, mesh, not arguments.eager)
        for chunks in arguments.chunks if backend == "symm_mem" else [1]:
            cut = f" chunks={chunks}" if chunks > 1 else ""
            layers |= {
                f"{backend} {name}{cut}": LayerSide(backend, name, chunks, layer) for name, layer in built.items()
            }
    entries = [measure_layers(layers, problem, arguments, mesh) for problem in problems]
    for entry, routing in zip(entries, arguments.routing, strict=True):
        entry.update(routing=routing, **shape._asdict())
    layers.clear()
    forget_exchanges()
    release(mesh.device)
    return entries


def comms_of(backend: str, arguments: argparse.Namespace) -> CommsConfig:
    """Settings of the exchange; bounds mean nothing to collectives, chunks and an arena something to symm_mem alone."""
    payload = PayloadConfig(**{field.name: arguments.payload for field in fields(PayloadConfig)})
    capacity, chunks, headroom = None if backend == "collective" else arguments.capacity, 1, None
    if backend == "symm_mem":
        chunks, headroom = max(arguments.chunks), arguments.saved_headroom
    return CommsConfig(backend, payload, capacity, chunks, arguments.num_ctas, saved_headroom=headroom)


def measure_layers(
    layers: dict[str, LayerSide], problem: Problem, arguments: argparse.Namespace, mesh: Mesh
) -> dict[str, Any]:
    """Figures of every layer with one problem."""
    share, exact = received(problem, mesh), reference(problem, mesh)
    own = {side.experts: side.layer for side in layers.values()}
    times_alone = {
        experts: time_work(alone(layer, problem, share), mesh.device, arguments.rounds)
        for experts, layer in own.items()
    }
    sides: dict[str, Any] = {}
    for name, (backend, experts, chunks, layer) in layers.items():
        side, layer.chunks = side_of(layer), chunks
        found = speeds(problem.shape, time_work(layer_work(layer, problem), mesh.device, arguments.rounds))
        found |= exposed(found, times_alone[experts])
        found |= {figure: over_ranks(value) for figure, value in memory(side, problem).items()}
        arena = None if layer.exchange is None else layer.exchange.layout.num_bytes / 2**30
        kept, room = kept_bytes(layer, share)
        found |= {"kept_gib": kept and kept / 2**30, "room_gib": room and room / 2**30}
        found |= {"arena_gib": arena, "syncs": over_ranks(syncs(side, problem))}
        found["errors"] = errors(layer, problem, exact)
        found["error"] = max(found["errors"].values())
        check_ran(layer, backend)
        sides[name] = found
    return {"sides": sides, "alone": times_alone, **load_of(share)}


def kept_bytes(layer: MoE, share: Share) -> tuple[float | None, float | None]:
    """Of the arena of what is kept for backward: what one step takes, on the rank with most, and all; None without."""
    saved = None if layer.exchange is None else layer.exchange.saved
    if saved is None:
        return None, None
    return over_ranks(saved.entry_bytes(len(share.rows_RD), int(share.num_pairs))), saved.num_bytes


def load_of(share: Share) -> dict[str, list[int]]:
    """Rows and (row, expert) pairs of each rank."""
    return {"rows_by_rank": gathered(len(share.rows_RD)), "pairs_by_rank": gathered(int(share.num_pairs))}


def time_work(work: Work, device: torch.device, rounds: int) -> dict[str, Any]:
    """Milliseconds of forward (`fwd`) and forward with backward (`fwd_bwd`): of each rank, and of the slowest."""
    found: dict[str, Any] = {}
    gc.collect()
    # As in a training step. The first round compiles and warms up.
    with collected_together(NEVER):
        measured = [[measure_calls(function, device) for function in work] for _ in range(rounds + 1)][1:]
    for name, column in zip(("fwd", "fwd_bwd"), zip(*measured, strict=True), strict=True):
        found[f"{name}_ms_by_rank"] = gathered(statistics.median(milliseconds for milliseconds, _ in column))
        found[f"{name}_ms"] = max(found[f"{name}_ms_by_rank"])
        found[f"{name}_host_ms"] = max(gathered(statistics.median(host for _, host in column)))
    return found


def measure_calls(function: Callable[[], Any], device: torch.device) -> tuple[float, float]:
    """Mean milliseconds of a call on the device, and of the host's part of it."""
    dist.barrier()
    calls = CALLS if device.type == "cuda" else 1
    if device.type == "cuda":
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        # The host gets ahead; then a call, after which the ranks' devices are together.
        torch.cuda._sleep(AHEAD)
        function()
        begin.record()
    start = time.perf_counter()
    for _ in range(calls):
        function()
    host = (time.perf_counter() - start) * 1e3 / calls
    if device.type != "cuda":
        return host, host
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / calls, host


def speeds(shape: Shape, times: dict[str, Any]) -> dict[str, Any]:
    """TFLOP/s per rank beside the times."""
    work = 6 * shape.tokens * shape.top_k * shape.dim * shape.hidden / 1e9
    # On a CPU's tiny sizes the difference may be noise.
    backward = max(times["fwd_bwd_ms"] - times["fwd_ms"], 1e-6)
    found = {"fwd_tflops": work / times["fwd_ms"], "bwd_tflops": 2 * work / backward}
    return {**times, **found, "bwd_ms": backward, "fwd_bwd_tflops": 3 * work / times["fwd_bwd_ms"]}


def exposed(times: dict[str, Any], without: dict[str, Any]) -> dict[str, float]:
    """Percent of a layer's time that is more than its work without an exchange."""
    return {f"{name}_exposed": 100 * (1 - without[f"{name}_ms"] / times[f"{name}_ms"]) for name in ("fwd", "fwd_bwd")}


def gathered(value: Any) -> list[Any]:
    """Every rank's. Collective."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def over_ranks(value: float | None) -> float | None:
    """The greatest; None where there is none. Collective."""
    return max((each for each in gathered(value) if each is not None), default=None)


# ---- for a person


def table(entry: dict[str, Any]) -> str:
    """One line per side, behind what each rank received."""
    lines = [
        f"{entry['shape']} {entry['routing']}, TFLOP/s per GPU; rows {entry['rows_by_rank']}, "
        f"pairs {entry['pairs_by_rank']}",
        f"{'':30}" + "".join(f"{heading:>10}" for heading in COLUMNS.values()),
    ]
    for side, found in entry["sides"].items():
        lines.append(f"{side:30}" + "".join(f"{_cell(found[key]):>10}" for key in COLUMNS))
    for experts, found in entry["alone"].items():
        lines.append(f"{'without exchange: ' + experts:40}{found['fwd_ms']:.3f} / {found['fwd_bwd_ms']:.3f} ms")
    return "\n".join(lines)


COLUMNS = {
    "fwd_tflops": "fwd",
    "bwd_tflops": "bwd",
    "fwd_bwd_tflops": "f+b",
    "fwd_ms": "fwd ms",
    "fwd_bwd_ms": "f+b ms",
    "fwd_exposed": "exposed %",
    "fwd_bwd_exposed": "f+b exp %",
    "fwd_bwd_host_ms": "host ms",
    "peak_gib": "peak GiB",
    "arena_gib": "arena GiB",
    "kept_gib": "kept GiB",
    "room_gib": "room GiB",
    "syncs": "syncs",
    "error": "error",
}


def _cell(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


if __name__ == "__main__":
    sys.exit(main())
