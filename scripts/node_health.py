"""Can every GPU of this node reach every other, how fast, and is any of them ill?

    python scripts/node_health.py               all GPUs; about half a minute
    python scripts/node_health.py --dry-run     2 CPU processes, transfers by gloo

Every pair of GPUs is measured, in rounds in which each has another partner, both ways at once:

    put, get   copies into and out of memory that the partner has mapped; what came is compared
    library    the same bytes sent and received by NCCL, in the communicator of all GPUs

Beside that, nvidia-smi's clocks, temperatures and uncorrected ECC errors, where there is one. Problems are pairs
without access to each other's memory, wrong bytes, ECC errors, and pairs with less than 0.7 of the median speed.

Exit code: 0 well, 1 a problem was found (each is told), 2 wrong usage.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from comms.symmetric_memory import unavailable
from scripts.bench_ranks import measure_on_ranks, settle_gpus
from scripts.bench_results import probe, stamp
from scripts.bench_times import seconds_of

MEGABYTES = 256
# Of the median over pairs: a pair with less has a link that is down or shared.
LEAST_PART = 0.7
KINDS = ("put", "get", "library")
FACTS = {
    "index": "index",
    "clock_mhz": "clocks.sm",
    "most_clock_mhz": "clocks.max.sm",
    "temperature": "temperature.gpu",
    "power_limit_w": "power.limit",
    "ecc_errors": "ecc.errors.uncorrected.volatile.total",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and show; returns the exit code."""
    arguments = parse_arguments(argv)
    machine = probe(arguments.dry_run)
    try:
        settle_gpus(arguments, machine)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    found = measure_on_ranks(measure, arguments)
    if found is None:
        return 0
    facts = [] if arguments.dry_run else gpu_facts()
    wrong = [*problems(found, arguments.dry_run), *ecc_problems(facts)]
    result = {**stamp(arguments, machine), "nproc": arguments.nproc, **found, "gpus": facts, "problems": wrong}
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(result, indent=1, allow_nan=False) + "\n")
    print(summary(result))
    for problem in wrong:
        print(f"error: {problem}", file=sys.stderr)
    return 1 if wrong else 0


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line, checked; ends the process with code 2 if it is wrong."""
    parser = argparse.ArgumentParser(
        prog="node_health.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nproc", type=int, help="default: all GPUs")
    parser.add_argument("--megabytes", type=float, default=MEGABYTES, help="per transfer; default: %(default)s")
    parser.add_argument("--out", type=Path, help="write the result there, as JSON")
    parser.add_argument("--commit", help="commit to note; default: asked from git")
    parser.add_argument("--dry-run", action="store_true", help="CPU processes, tiny transfers")
    arguments = parser.parse_args(argv)
    if arguments.dry_run:
        arguments.megabytes = 0.1
    if arguments.megabytes <= 0 or (arguments.nproc is not None and arguments.nproc < 2):
        parser.error("--megabytes must be positive and --nproc at least 2")
    return arguments


def summary(result: dict[str, Any]) -> str:
    """One line: median and least speed over pairs, and the GPUs' state."""
    told: list[str] = []
    for kind in KINDS:
        speeds = [pair[kind] for pair in result["pairs"] if pair[kind] is not None]
        if speeds:
            told.append(f"{kind} {statistics.median(speeds):.3g} GB/s (least {min(speeds):.3g})")
    if clocks := [gpu["clock_mhz"] for gpu in result["gpus"] if gpu["clock_mhz"] is not None]:
        told.append(f"clocks {min(clocks):.0f}-{max(clocks):.0f} MHz")
    if result["unreachable"]:
        told.append(result["unreachable"])
    return f"{len(result['pairs'])} pairs: {', '.join(told)}; {len(result['problems'])} problems"


def problems(found: dict[str, Any], dry_run: bool) -> list[str]:
    """What is wrong with the links; a CPU has none, and its speeds say nothing."""
    if dry_run:
        return []
    wrong = [found["unreachable"]] if found["unreachable"] else []
    for kind in KINDS:
        speeds = [pair[kind] for pair in found["pairs"] if pair[kind] is not None]
        usual = statistics.median(speeds) if speeds else 0.0
        wrong += [
            f"GPUs {pair['ranks']}: {kind} has {pair[kind]:.3g} GB/s, the median pair {usual:.3g}"
            for pair in found["pairs"]
            if pair[kind] is not None and pair[kind] < LEAST_PART * usual
        ]
    return wrong + [f"GPUs {pair['ranks']}: other bytes came than were sent" for pair in found["pairs"] if pair["bad"]]


def ecc_problems(facts: list[dict[str, float | None]]) -> list[str]:
    """GPUs that counted errors since they were reset."""
    return [
        f"GPU {gpu['index']:.0f}: {gpu['ecc_errors']:.0f} uncorrected ECC errors" for gpu in facts if gpu["ecc_errors"]
    ]


def gpu_facts() -> list[dict[str, float | None]]:
    """What nvidia-smi says of each GPU; None for what one does not have; nothing without it."""
    if shutil.which("nvidia-smi") is None:
        return []
    command = ["nvidia-smi", f"--query-gpu={','.join(FACTS.values())}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    except (subprocess.SubprocessError, OSError):
        return []
    return [read_facts(line) for line in done.stdout.splitlines() if line.strip()]


def read_facts(line: str) -> dict[str, float | None]:
    """One line of nvidia-smi's table."""
    facts: dict[str, float | None] = {}
    for name, text in zip(FACTS, line.split(","), strict=True):
        try:
            facts[name] = float(text)
        except ValueError:
            facts[name] = None
    return facts


# ---- one rank


def measure(arguments: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Figures of every pair, alike on every rank."""
    size = max(int(arguments.megabytes * 1e6) // 16 * 16, 16)
    reason = unavailable(dist.group.WORLD, device)
    mapped = None if reason else Mapped(size, device)
    # With all ranks: NCCL makes the communicator in which pairs then meet. A pair's own would take seconds.
    dist.all_reduce(torch.zeros(1, device=device))
    pairs: list[dict[str, Any]] = []
    for partners in rounds_of(dist.get_world_size()):
        mine = measure_pair(partners[dist.get_rank()], size, device, mapped)
        sides: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(sides, mine)
        for rank, partner in enumerate(partners):
            if rank < partner:
                pairs.append({"ranks": [rank, partner], **worse(sides[rank], sides[partner])})
    return {"megabytes": size / 1e6, "unreachable": reason, "pairs": pairs}


def rounds_of(size: int) -> list[list[int]]:
    """Who is whose partner in each round, until each pair has met; a rank that is its own partner waits.

    The tables of a round-robin tournament: one stays, the others move on by one seat.
    """
    seats = size + size % 2
    rounds: list[list[int]] = []
    for turn in range(seats - 1):
        ring = [0, *((turn + seat) % (seats - 1) + 1 for seat in range(seats - 1))]
        partners = list(range(size))
        for one, other in zip(ring[: seats // 2], ring[::-1], strict=False):
            if max(one, other) < size:
                partners[one], partners[other] = other, one
        rounds.append(partners)
    return rounds


def worse(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Of two ranks' figures of the same transfers."""
    found = {kind: None if one[kind] is None else min(one[kind], other[kind]) for kind in KINDS}
    return {**found, "bad": one["bad"] or other["bad"]}


class Mapped:
    """Memory of every rank that each of them can reach."""

    def __init__(self, size: int, device: torch.device) -> None:
        import torch.distributed._symmetric_memory as symmetric
        from torch._C._distributed_c10d import _SymmetricMemory  # pyright: ignore

        os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
        if symmetric.get_backend(device) != "CUDA":
            symmetric.set_backend("CUDA")
        assert dist.group.WORLD is not None
        self.own = _SymmetricMemory.empty_strided_p2p((size,), (1,), torch.uint8, device)
        self.handle = symmetric.rendezvous(self.own, dist.group.WORLD.group_name)

    def of(self, rank: int) -> torch.Tensor:
        """Another rank's."""
        return self.handle.get_buffer(rank, self.own.shape, torch.uint8)


def swap(sent: torch.Tensor, came: torch.Tensor, partner: int) -> None:
    """Both ways at once between two ranks, by the library; nothing where a rank is its own partner."""
    if partner == dist.get_rank():
        return
    both = [dist.P2POp(dist.isend, sent, partner), dist.P2POp(dist.irecv, came, partner)]
    for work in dist.batch_isend_irecv(both):
        work.wait()


def measure_pair(partner: int, size: int, device: torch.device, mapped: Mapped | None) -> dict[str, Any]:
    """GB/s of this rank with its partner, and whether wrong bytes came. Collective: the others measure theirs."""
    rank, calls = dist.get_rank(), 2 if device.type == "cpu" else 10
    sent = torch.full((0 if partner == rank else size,), rank + 1, dtype=torch.uint8, device=device)
    came = torch.zeros_like(sent)

    def speed(function: Callable[[], Any]) -> float:
        # The first call connects the two.
        seconds_of(function, device, 1)
        return size / seconds_of(function, device, calls) / 1e9

    library = speed(lambda: swap(sent, came, partner))
    found = {"put": None, "get": None, "library": library, "bad": not bool((came == partner + 1).all())}
    if mapped is None:
        return found
    theirs = mapped.of(partner)
    put = speed(lambda: theirs[: len(sent)].copy_(sent))
    if device.type == "cuda":
        torch.cuda.synchronize()
    dist.barrier()
    found["bad"] |= not bool((mapped.own[: len(sent)] == partner + 1).all())
    get = speed(lambda: came.copy_(theirs[: len(sent)]))
    # What this rank put there.
    found["bad"] |= not bool((came == rank + 1).all())
    dist.barrier()
    return {**found, "put": put, "get": get}


if __name__ == "__main__":
    sys.exit(main())
