"""Speed of the exchange of rows between ranks, beside a bare put and NCCL, in one run.

    python scripts/bench_comms.py                                 two GPUs; about a minute and a half
    torchrun --nproc-per-node 2 scripts/bench_comms.py            the same; the processes are there already
    python scripts/bench_comms.py --sizes 64 --num-ctas 16,24,32  some sizes, other numbers of thread blocks
    python scripts/bench_comms.py --sizes 64 --piece-mb 0.03,0.06 other sizes of pieces, which are signalled at once
    python scripts/bench_comms.py --payload mxfp8                 rows coded before they travel, beside bf16
    python scripts/bench_comms.py --dry-run                       tiny sizes on 2 CPU processes, by collectives

A case is so many MB of tokens per rank (bf16, --width numbers each), each sent to `top_k` of 128 experts. Measured are

    plan       counts to every rank and back into tables
    dispatch   rows and side columns to their ranks, in their places, coding and decoding included (symm_mem: its put
               and its take once more, each alone, which together are longer than both at a time)
    combine    one row per (token, rank) back, and their sum
    put        the bytes that dispatch puts on the wire, by a kernel that does nothing else, with as many thread blocks
    nccl       the same bytes by all_to_all_single: no packing, no sum
    vdev       the same by NVSHMEM's all_to_all_vdev, in processes of its own afterwards; a dash where torch has no
               NVSHMEM, and under torchrun

Wire bytes are those that leave the rank, side columns included; `effective` counts a row once per (token, expert) of
another rank, which is what travels without deduplication. A time is the median over rounds of the slowest rank,
measured on the device with the launches already queued.

With a payload, `/ bf16` is the time of dispatch over that of the same rows in bf16, and combine is coded as well.

The result goes into benchmarks/comms_CARD.json. Exit code: 0 done, 2 wrong usage; a failed process ends the program
with its traceback, and so does a payload that did not travel through symmetric memory.
"""

import argparse
import itertools
import json
import os
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import triton
import triton.language as tl
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from comms.all_to_all import DispatchPlan, combine, dispatch, pack, plan_dispatch
from comms.kernels.codec import record_bytes
from comms.payload import Payload, encode
from comms.put_and_take import PUT, TAKE, Received, move_there
from comms.record_transport import nvshmem_unavailable
from comms.symmetric_exchange import DISPATCH, SymmetricPlan, describe_tag, plan_exchange, tag_of
from comms.symmetric_memory import Exchange, create_exchange, forget_exchanges, plan_layout
from scripts.bench_ranks import measure_on_ranks, settle_gpus
from scripts.bench_results import probe, result_file, stamp, write_result
from scripts.bench_times import max_over_ranks, slowest
from scripts.bench_vdev import add_vdev, vdev

NUM_EXPERTS = 128


class Case(NamedTuple):
    """MB of tokens per rank, experts per token, thread blocks that put and MB of a piece (0: chosen by size)."""

    megabytes: float
    top_k: int
    num_ctas: int
    piece_megabytes: float = 0


class Tokens(NamedTuple):
    """What one rank brings."""

    x_TD: Tensor
    weights_TK: Tensor
    ids_TK: Tensor
    items_TN: Tensor


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, write and show; returns the exit code."""
    arguments = parse_arguments(argv)
    machine = probe(arguments.dry_run)
    try:
        settle_gpus(arguments, machine)
        out = result_file(arguments, "comms", machine["card"], "cases")
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    cases = measure_on_ranks(measure_cases, arguments)
    if cases is None:
        return 0
    result = {**describe(arguments, machine), "vdev": add_vdev(cases, arguments, measure_vdev), "cases": cases}
    if out is not None:
        suffix = "" if arguments.payload == "model" else f"_{arguments.payload}"
        write_result(out, f"width_{arguments.width}_{arguments.nproc}_gpus{suffix}", result, "cases")
    if arguments.json:
        print(json.dumps(result))
    else:
        print(table(result) if out is None else f"{table(result)}\nwritten: {out}")
    return 0


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line, checked; ends the process with code 2 if it is wrong."""
    parser = argparse.ArgumentParser(
        prog="bench_comms.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nproc", type=int, default=int(os.environ.get("WORLD_SIZE", "2")))
    parser.add_argument("--sizes", default="1,8,64,256,512", help="MB of tokens per rank; default: %(default)s")
    parser.add_argument("--top-k", default="8", help="experts per token; default: %(default)s, and 1, 2, 4 at 64 MB")
    parser.add_argument("--num-ctas", default="0", help="thread blocks that put; 0: by size; default: %(default)s")
    parser.add_argument("--piece-mb", default="0", help="MB that are signalled at once; 0: the default of comms")
    parser.add_argument("--payload", choices=("model", "mxfp8"), default="model", help="what rows travel as")
    parser.add_argument("--width", type=int, default=2048, help="numbers per row, a multiple of 8")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument("--out", type=Path, help="default: benchmarks/comms_CARD.json; none for a dry run")
    parser.add_argument("--commit", help="commit to note; default: asked from git")
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes on 2 CPU processes")
    arguments = parser.parse_args(argv)
    try:
        arguments.cases = cases_of(arguments)
    except ValueError as error:
        parser.error(f"--sizes, --top-k, --num-ctas and --piece-mb are numbers divided by commas ({error})")
    if arguments.width <= 0 or arguments.width % 8 or arguments.rounds <= 0:
        parser.error("--width must be a positive multiple of 8 and --rounds positive")
    return arguments


def cases_of(arguments: argparse.Namespace) -> list[Case]:
    """What to measure, in order."""
    if arguments.dry_run:
        arguments.width, arguments.rounds = 16, 2
        return [Case(0.01, 2, 0), Case(0.02, 8, 0)]
    sizes = [float(size) for size in arguments.sizes.split(",")]
    top_ks = [int(top_k) for top_k in arguments.top_k.split(",")]
    ctas = [int(number) for number in arguments.num_ctas.split(",")]
    pieces = [float(piece) for piece in arguments.piece_mb.split(",")]
    cases = [Case(*case) for case in itertools.product(sizes, top_ks, ctas, pieces)]
    if arguments.top_k == "8" and 64 in sizes:
        cases += [Case(64, top_k, ctas[0], pieces[0]) for top_k in (1, 2, 4)]
        cases += [Case(64, 8, number, pieces[0]) for number in (16, 24, 132) if number not in ctas]
    return cases


def describe(arguments: argparse.Namespace, machine: dict[str, Any]) -> dict[str, Any]:
    """What was measured, where, and with which code."""
    return {
        "width": arguments.width,
        "nproc": arguments.nproc,
        "rounds": arguments.rounds,
        "backend": "collective" if arguments.dry_run else "symm_mem",
        "payload": arguments.payload,
        **stamp(arguments, machine),
    }


def table(result: dict[str, Any]) -> str:
    """The result for a person: one line per case."""
    lines = [
        f"{result['backend']}, rows of {result['width']} as {result['payload']}, {result['nproc']} x {result['card']}, "
        f"torch {result['torch']}, {result['commit'][:12]}",
        " ".join(f"{name:>9}" for name in COLUMNS.values()),
    ]
    for case in result["cases"]:
        lines.append(" ".join(f"{cell(case[key]):>9}" for key in COLUMNS))
    return "\n".join(lines)


# Figure and heading; a slash stands for "ours over".
COLUMNS = {
    "megabytes": "MB",
    "top_k": "top_k",
    "num_ctas": "CTAs",
    "piece_megabytes": "piece MB",
    "wire_megabytes": "wire MB",
    "plan_us": "plan us",
    "dispatch_us": "disp us",
    "dispatch_put_us": "put alone",
    "dispatch_take_us": "take",
    "dispatch_gb_s": "GB/s",
    "dispatch_effective_gb_s": "effective",
    "combine_us": "comb us",
    "combine_gb_s": "GB/s",
    "put_gb_s": "put GB/s",
    "nccl_gb_s": "nccl GB/s",
    "vdev_gb_s": "vdev GB/s",
    "over_put": "/ put",
    "over_nccl": "/ nccl",
    "over_vdev": "/ vdev",
    "combine_over_put": "comb/put",
    "over_model": "/ bf16",
    "combine_over_model": "comb/bf16",
}


def cell(value: float | None) -> str:
    """A number, or a dash for what does not exist here."""
    return "-" if value is None else f"{value:.4g}"


# ---- one rank


def measure_cases(arguments: argparse.Namespace, device: torch.device) -> list[dict[str, Any]]:
    """Figures of every case, in order."""
    return [measure(arguments, case, device) for case in arguments.cases]


def tokens_of(case: Case, width: int, device: torch.device) -> Tokens:
    """Random rows and a random choice of experts, other ones on each rank."""
    generator = torch.Generator(device).manual_seed(dist.get_rank())
    num_tokens = max(int(case.megabytes * 1e6 / (2 * width)), 1)
    x_TD = torch.randn(num_tokens, width, generator=generator, device=device, dtype=torch.bfloat16)
    scores = torch.rand(num_tokens, NUM_EXPERTS, generator=generator, device=device)
    ids_TK = scores.topk(case.top_k).indices
    weights_TK = torch.rand(num_tokens, case.top_k, generator=generator, device=device)
    owner_TK = ids_TK // (NUM_EXPERTS // dist.get_world_size())
    items_TN = torch.stack([(owner_TK == rank).sum(1) for rank in range(dist.get_world_size())], 1)
    return Tokens(x_TD, weights_TK, ids_TK, items_TN)


def measure(arguments: argparse.Namespace, case: Case, device: torch.device) -> dict[str, Any]:
    """Figures of one case, alike on every rank but for its bytes."""
    tokens, payload = tokens_of(case, arguments.width, device), Payload(arguments.payload)
    exchange = None if device.type == "cpu" else exchange_of(case, tokens, device)
    counts = plan_dispatch(tokens.items_TN, dist.group.WORLD)
    me = dist.get_rank()
    wire_rows = sum(counts.send_counts) - counts.send_counts[me]
    row_bytes = 2 * arguments.width if payload.rows == "model" else record_bytes(arguments.width)
    wire = wire_rows * (row_bytes + 8 * case.top_k)
    times = times_of(tokens, exchange, payload, arguments.rounds)
    times["nccl"] = library(tokens, counts, payload, arguments.rounds)
    times["put"] = None if exchange is None else bare_put(exchange, wire, case, arguments.rounds)
    if exchange is not None:
        exchange.check()
    forget_exchanges()
    remote = int(tokens.items_TN.sum()) - int(tokens.items_TN[:, me].sum())
    return figures(case, times, wire, remote * row_bytes, wire_rows * row_bytes)


def times_of(tokens: Tokens, exchange: Exchange | None, payload: Payload, rounds: int) -> dict[str, float | None]:
    """Seconds of plan, dispatch, its halves, and combine."""
    device, row = tokens.x_TD.device, (tokens.x_TD, tokens.weights_TK, tokens.ids_TK)
    plan = plan_of(tokens, exchange)
    if payload.rows != "model" and device.type == "cuda" and not isinstance(plan, SymmetricPlan):
        raise RuntimeError(
            f"rows would travel as {payload.rows} by {type(plan).__name__}, not through symmetric memory"
        )
    rows_RD = dispatch(plan, *row, payload)[0]
    put, take = halves(plan, tokens, exchange, payload, rounds)
    found = {
        "plan": slowest(lambda: plan_of(tokens, exchange), device, rounds),
        "dispatch": slowest(lambda: dispatch(plan, *row, payload), device, rounds),
        "combine": slowest(lambda: combine(plan, rows_RD, payload), device, rounds),
        "dispatch_put": put,
        "dispatch_take": take,
    }
    if payload.rows != "model":
        found["dispatch_model"] = slowest(lambda: dispatch(plan, *row), device, rounds)
        found["combine_model"] = slowest(lambda: combine(plan, rows_RD), device, rounds)
    return found


def library(tokens: Tokens, counts: DispatchPlan, payload: Payload, rounds: int) -> float:
    """Seconds of one all_to_all_single of packed records."""
    record = packed(tokens, counts, payload)
    received = record.new_empty(counts.num_rows, record.shape[1])
    splits = counts.recv_counts, counts.send_counts
    return slowest(lambda: dist.all_to_all_single(received, record, *splits), record.device, rounds)


def packed(tokens: Tokens, counts: DispatchPlan, payload: Payload) -> Tensor:
    """Records of the rows that this rank sends, its own among them."""
    columns = (encode(tokens.x_TD, payload.rows), tokens.weights_TK, tokens.ids_TK.to(torch.int32))
    return pack([column[counts.send_tokens_S] for column in columns])


def measure_vdev(arguments: argparse.Namespace, device: torch.device) -> list[float] | str:
    """Seconds of NVSHMEM's operator for each case, or why it cannot run."""
    if reason := nvshmem_unavailable(dist.group.WORLD, device):
        return reason
    seconds = []
    for case in arguments.cases:
        tokens = tokens_of(case, arguments.width, device)
        counts = plan_dispatch(tokens.items_TN, dist.group.WORLD)
        record = packed(tokens, counts, Payload(arguments.payload))
        seconds.append(vdev(record, counts.send_counts, len(tokens.x_TD), arguments.rounds))
    return seconds


def exchange_of(case: Case, tokens: Tokens, device: torch.device) -> Exchange:
    """An arena with room for whatever may come."""
    assert dist.group.WORLD is not None
    num_tokens, width = tokens.x_TD.shape
    # Every rank has as many tokens as this one.
    layout = plan_layout(dist.get_world_size(), num_tokens, case.top_k, 2 * width, 8 * case.top_k)
    bounds = case.num_ctas or None, describe_tag, int(case.piece_megabytes * 1e6) or None
    return create_exchange(dist.group.WORLD, device, layout, num_tokens, 30, *bounds)


def plan_of(tokens: Tokens, exchange: Exchange | None) -> Any:
    """By symmetric memory where there is any."""
    if exchange is None:
        return plan_dispatch(tokens.items_TN, dist.group.WORLD)
    return plan_exchange(tokens.ids_TK, NUM_EXPERTS // exchange.num_ranks, exchange, 0, 2**30)


def halves(
    plan: Any, tokens: Tokens, exchange: Exchange | None, payload: Payload, rounds: int
) -> tuple[float | None, float | None]:
    """Seconds of dispatch's put, and of its take after that."""
    if exchange is None:
        return None, None
    row = tokens.x_TD, tokens.weights_TK, tokens.ids_TK
    out = Received(*(column.new_empty(plan.num_rows, column.shape[1]) for column in row))
    tables = plan.tokens_NT, plan.routes, plan.totals
    there = *row, *tables, out, tag_of(0, DISPATCH), payload.rows
    found = []
    for _ in range(rounds + 1):
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
        torch.cuda.synchronize()
        dist.barrier()
        torch.cuda._sleep(500_000)
        marks[0].record()
        move_there(exchange, *there, PUT)
        marks[1].record()
        move_there(exchange, *there, TAKE)
        marks[2].record()
        torch.cuda.synchronize()
        found.append([marks[0].elapsed_time(marks[1]) / 1e3, marks[1].elapsed_time(marks[2]) / 1e3])
    put, take = (max_over_ranks(statistics.median(column)) for column in zip(*found[1:], strict=True))
    return put, take


def bare_put(exchange: Exchange, num_bytes: int, case: Case, rounds: int) -> float:
    """Seconds to store so many bytes at the next rank, and nothing else."""
    words = num_bytes // 4
    source = torch.zeros(words, dtype=torch.int32, device=exchange.arena.device)
    programs = case.num_ctas or max(1, min(32, num_bytes // 2**16))
    peer = (exchange.rank + 1) % exchange.num_ranks

    def put() -> None:
        arguments = exchange.pointers, source, peer, words, exchange.layout.rows_at
        put_kernel[(programs,)](*arguments, BLOCK=8192, num_warps=16)  # pyright: ignore[reportCallIssue]

    return slowest(put, exchange.arena.device, rounds)


@triton.jit(do_not_specialize=["peer", "words", "rows_at"])
def put_kernel(pointers, source, peer, words, rows_at, BLOCK: tl.constexpr):  # noqa: ANN001, ANN201
    """Copy `words` int32 words to a rank's rows."""
    target = tl.multiple_of((tl.load(pointers + peer) + rows_at).to(tl.pointer_type(tl.int32)), 16)
    for block in range(tl.program_id(0), tl.cdiv(words, BLOCK), tl.num_programs(0)):
        at = block * BLOCK + tl.arange(0, BLOCK)
        # Whole 16 bytes: so they are moved at once.
        inside = at < words // 4 * 4
        tl.store(target + at, tl.load(source + at, mask=inside), mask=inside)


def figures(
    case: Case, times: dict[str, float | None], wire: int, effective: int, combined: int
) -> dict[str, float | None]:
    """Microseconds and GB/s; bytes are this rank's."""

    def speed(name: str, num_bytes: int) -> float | None:
        seconds = times[name]
        return None if seconds is None else num_bytes / seconds / 1e9

    found: dict[str, float | None] = {**case._asdict(), "wire_megabytes": wire / 1e6}
    found |= {f"{name}_us": None if seconds is None else seconds * 1e6 for name, seconds in times.items()}
    found["dispatch_gb_s"], found["dispatch_effective_gb_s"] = speed("dispatch", wire), speed("dispatch", effective)
    found["combine_gb_s"] = speed("combine", combined)
    found["put_gb_s"], found["nccl_gb_s"] = speed("put", wire), speed("nccl", wire)
    ours, back = times["dispatch"], found["combine_gb_s"]
    for other in ("put", "nccl"):
        theirs = times[other]
        found[f"over_{other}"] = None if theirs is None or ours is None else theirs / ours
    found["combine_over_put"] = None if found["put_gb_s"] is None or back is None else back / found["put_gb_s"]
    for name, way in (("over_model", "dispatch"), ("combine_over_model", "combine")):
        seconds, model = times[way], times.get(f"{way}_model")
        found[name] = None if model is None or seconds is None else seconds / model
    return found


if __name__ == "__main__":
    sys.exit(main())
