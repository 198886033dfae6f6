"""The parts of scripts/bench_node.py: which programs each runs, for how long, and what its line of the table says."""

import json
import os
import re
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from scripts.bench_results import ROOT

# Experts of the layer and the rows that the exchange moves.
EP_SHAPE = "Qwen3-30B-A3B"
FULL_DEPTH = 48
# GiB of a GPU from which on 8 layers of Qwen3-30B-A3B can be trained on it alone.
GIB_FOR_ONE_GPU = 130
# Of the train part on fewer than 8 such GPUs, and so of weak scaling, which takes over its figure.
ALIKE = ["--layers", 8, "--local-batch", 4, "--steps", 10]
# Scripts whose ranks wait for their turn (scripts/bench_ranks.py).
WAITING = ("node_health", "bench_comms", "bench_ep", "bench_async_tp", "bench_attention")
# Seconds that parts are expected to take on fewer than 8 GPUs and on 8: the former from a run on four H200, less what
# has been spared since, the latter guessed from them. Of parity what it takes besides the time in which it begins
# layouts. Of weak scaling the second where the largest size is not taken over.
EXPECTED = {
    "health": (35, 45),
    "parity": (15, 20),
    "comms": (40, 42),
    "ep": (45, 48),
    "ep x tp": (38, 42),
    "async tp": (30, 32),
    "attention": (27, 28),
    "train": (128, 190),
    "weak scaling": (57, 112),
}
# Seconds that are left for parts that take longer than that; the least in which parity begins layouts; and what it may
# take besides, in which it also gives up a layout that is stuck.
SPARE, LEAST_FOR_PARITY, PARITY_GRACE = 20, 75, 40
# How many times as long as GPUs the parts of a dry run may take.
PATIENCE = 6


class Command(NamedTuple):
    """One program. What it prints goes into a log, its figures into `out`."""

    words: list[str]
    # Where its figures will be; None: they are read from its log.
    out: Path | None = None
    # CUDA_VISIBLE_DEVICES; None: as it is.
    devices: str | None = None
    # Forked instead of started anew: of a dry run, in which importing would take most of the time.
    forked: bool = False
    # It can be started before its turn, for which it then waits.
    waits: bool = False


class Told(NamedTuple):
    """What came of a part: a line for the table, and the figures."""

    line: str
    figures: Any


class Part(NamedTuple):
    """Commands of a step run together, the steps one after the other."""

    name: str
    steps: list[list[Command]]
    # At most.
    seconds: float
    # From each command's figures (or the text that it printed).
    read: Callable[[list[Any]], Told]
    # Why it has nothing to run; empty: it has.
    skipped: str = ""
    # Asked when its turn comes: what it needs of parts before it and cannot find; empty: nothing.
    lacks: Callable[[], str] = lambda: ""


class Node(NamedTuple):
    """What the parts are planned for."""

    nproc: int
    memory_gib: float | None
    dry_run: bool
    # Further settings of our trainer.
    overrides: list[str]
    work: Path
    # For all parts together, and which of them run; empty: all.
    seconds: float = 540
    chosen: Sequence[str] = ()
    # What the results of parts note, too; None: they ask git.
    commit: str | None = None


def parts_of(node: Node) -> list[Part]:
    """All parts, in order: what tells whether the rest can be trusted comes first."""
    half = node.nproc // 2
    etp = _ep(node, "ep x tp", 2)
    if half < 2:
        etp = Part(etp.name, [], 0, read_ep, f"EP={half} exchanges nothing")
    health, *others = [
        Part("health", [[_bench(node, "node_health", "--nproc", node.nproc)]], 60, read_health),
        Part("comms", [[comms_command(node)]], 75, read_comms),
        _ep(node, "ep", 1),
        etp,
        Part("async tp", [[async_tp_command(node)]], 75, read_async_tp),
        Part("attention", [[attention_command(node)]], 60, read_attention),
        Part("train", [[train_command(node)]], 200, read_train),
        weak_part(node),
    ]
    parts = [health, parity_part(node, [health, *others]), *others]
    # A dry run is often beside tests, on few and slow cores.
    return [part._replace(seconds=PATIENCE * part.seconds) for part in parts] if node.dry_run else parts


def parity_part(node: Node, others: Sequence[Part]) -> Part:
    """What the other parts leave of the time; that may be little, but not nothing."""
    names = [part.name for part in others if not part.skipped and (not node.chosen or part.name in node.chosen)]
    left = node.seconds - SPARE - sum(expected(node, name) for name in ["parity", *names])
    seconds = 1 if node.dry_run else max(int(left), LEAST_FOR_PARITY)
    limit = 60 if node.dry_run else seconds + PARITY_GRACE
    return Part("parity", [[parity_command(node, seconds)]], limit, read_parity)


def expected(node: Node, name: str) -> float:
    """Seconds that a part probably takes; of parity those besides the time in which it begins layouts."""
    few, many = EXPECTED[name]
    return few if node.nproc < 8 and (name != "weak scaling" or takes_over(node)) else many


def parity_command(node: Node, seconds: int) -> Command:
    """Layouts of all GPUs for so long, those that have every pair of axes first."""
    words = [f"nproc={node.nproc}", f"seconds={seconds}", f"device={'cpu' if node.dry_run else 'cuda'}"]
    plain = ["parallel.compile=false", "parallel.activation_checkpoint=none"]
    program = [sys.executable, str(ROOT / "scripts" / "parity.py"), "experiment=qwen3_30b_a3b", "layouts=all"]
    return Command([*program, *words, *plain], forked=node.dry_run)


def comms_command(node: Node) -> Command:
    """Two sizes of rows by the exchange, a put and NCCL."""
    return _bench(node, "bench_comms", "--nproc", node.nproc, "--sizes", "8,64", "--top-k", "8,1", "--rounds", 3)


def _ep(node: Node, name: str, etp: int) -> Part:
    words: list[Any] = ["--nproc", node.nproc, "--etp", etp, "--routing", "balanced"]
    if not node.dry_run:
        # Each further way to exchange rows would be compiled, too.
        words += ["--shapes", EP_SHAPE, "--backends", "symm_mem", "--experts", "fused", "--rounds", 3]
    return Part(name, [[_bench(node, "bench_ep", *words, tag=f"_etp{etp}")]], 90, read_ep)


def async_tp_command(node: Node) -> Command:
    """Two sizes of matmuls under TP of all GPUs, and two dense blocks."""
    # Without torch's fused operators, which did not end in some runs with four GPUs.
    rounds = ("--sides", "matmul,nccl,ours", "--rows", "8192,32768", "--widths", "8192x8192", "--rounds", 3)
    return _bench(node, "bench_async_tp", "--nproc", node.nproc, *rounds)


def attention_command(node: Node) -> Command:
    """A sequence of 128k tokens over all GPUs."""
    return _bench(node, "bench_attention", "--nproc", node.nproc, "--seq-len", 131072, "--rounds", 2)


def train_command(node: Node) -> Command:
    """Qwen3-30B-A3B beside torchtitan: whole on 8 GPUs, 8 layers on fewer."""
    limit = 95 * PATIENCE if node.dry_run else 95
    words: list[Any] = ["--nproc", train_size(node), "--repeats", 1, "--timeout", limit]
    if not node.dry_run and trains_alike(node):
        words += ALIKE
    elif not node.dry_run:
        words += ["--steps", 10]
        if node.nproc >= 8:
            batch = 4 if fits_one_gpu(node) else 1
            words += ["--layers", FULL_DEPTH, "--activation-checkpoint", "full", "--local-batch", batch]
    return _bench(node, "bench_train", *words, *node.overrides, tag="_whole")


def train_size(node: Node) -> int:
    """GPUs of the train part. On CPUs each of torchrun's processes takes seconds to start."""
    return 2 if node.dry_run else node.nproc


def fits_one_gpu(node: Node) -> bool:
    """Whether 8 layers can be trained on one GPU."""
    return node.memory_gib is None or node.memory_gib >= GIB_FOR_ONE_GPU


def trains_alike(node: Node) -> bool:
    """Whether the train part trains what weak scaling does."""
    return node.dry_run or (node.nproc < 8 and fits_one_gpu(node))


def takes_over(node: Node) -> bool:
    """Whether the train part's figure, of this run, is that of weak scaling's largest size."""
    return trains_alike(node) and (not node.chosen or "train" in node.chosen)


def weak_part(node: Node) -> Part:
    """1, 2, 4, ... GPUs with as many tokens for each, the last of them from the train part if it trains the same."""
    sizes = [size for size in (1, 2, 4, 8) if size <= train_size(node)]
    if not takes_over(node):
        return Part("weak scaling", weak_steps(node, sizes), 150, read_weak)
    whole = train_command(node).out
    assert whole is not None

    def read(found: list[Any]) -> Told:
        return read_weak([*found, json.loads(whole.read_text())])

    lacks = partial(untrained, whole, sizes[-1])
    return Part("weak scaling", weak_steps(node, sizes[:-1]), 150, read, lacks=lacks)


def untrained(file: Path, size: int) -> str:
    """What is missing of the train part's figures of so many GPUs; empty: nothing."""
    try:
        (result,) = json.loads(file.read_text()).values()
    except (OSError, ValueError) as error:
        return f"the train part, with whose figure it compares, left none: {error}"
    if result["world_size"] == size and result["tokens_per_second_per_gpu"]["ours"]:
        return ""
    return f"the train part, with whose figure it compares, has none of ours on {size} GPUs"


def weak_steps(node: Node, sizes: Sequence[int]) -> list[list[Command]]:
    """So many GPUs each with as many tokens for each GPU; sizes for which there is room run together."""
    limit = 70 * PATIENCE if node.dry_run else 70
    own = ["--layers", 8 if fits_one_gpu(node) else 4, "--local-batch", 2, "--steps", 15]
    visible = _devices(node)
    steps: list[list[Command]] = []
    used = node.nproc
    for size in sizes:
        if used + size > node.nproc:
            steps.append([])
            used = 0
        words: list[Any] = ["--nproc", size, "--repeats", 1, "--baseline", "skip", "--timeout", limit]
        if not node.dry_run:
            words += ALIKE if trains_alike(node) else own
        devices = ",".join(visible[used : used + size]) if visible else None
        command = _bench(node, "bench_train", *words, *node.overrides, tag=f"_weak{size}")
        steps[-1].append(command._replace(devices=devices))
        used += size
    return steps


def _devices(node: Node) -> list[str]:
    """Names of the GPUs for CUDA_VISIBLE_DEVICES; none in a dry run."""
    if node.dry_run:
        return []
    named = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    return named or [str(index) for index in range(node.nproc)]


def _bench(node: Node, script: str, *words: Any, tag: str = "") -> Command:
    out = node.work / f"{script}{tag}.json"
    options = ["--dry-run"] * node.dry_run + (["--commit", node.commit] if node.commit else [])
    program = [sys.executable, str(ROOT / "scripts" / f"{script}.py")]
    waits = script in WAITING and not node.dry_run
    return Command([*program, *map(str, words), *options, "--out", str(out)], out, forked=node.dry_run, waits=waits)


# ---- what their figures say


def read_health(found: list[Any]) -> Told:
    """Speeds of pairs and the GPUs' state."""
    from scripts.node_health import summary

    return Told(summary(found[0]), found[0])


def read_parity(found: list[str]) -> Told:
    """How many layouts were right, and the worst error."""
    text = found[0]
    told = re.search(r"^(\d+) right, (\d+) wrong(?:, (\d+) not tried)?", text, re.MULTILINE)
    if told is None:
        raise ValueError("parity.py told no result")
    right, wrong, left = (int(number or 0) for number in told.groups())
    errors = [float(error) for error in re.findall(r" (?:right|WRONG) +(\d\S*) ", text)]
    recipe = re.search(r"tiny, (\w+) on", text)
    figures = {"right": right, "wrong": wrong, "not_tried": left, "worst_error": max(errors, default=None)}
    figures["recipe"] = recipe.group(1) if recipe else None
    rest = f" ({left} not tried in the time)" if left else ""
    line = f"{right} of {right + wrong} layouts right in {figures['recipe']}{rest}"
    return Told(line + (f", worst error {max(errors):.1e}" if errors else ""), figures)


def read_comms(found: list[Any]) -> Told:
    """Of the largest case: speeds, and what deduplication spares."""
    (result,) = found[0].values()
    for case in result["cases"]:
        # Bytes of rows alone: one for each (token, expert) of another rank, over those that come back to be summed.
        rows = case["combine_gb_s"] * case["combine_us"]
        case["dedup"] = case["dispatch_effective_gb_s"] * case["dispatch_us"] / rows if rows else None
    case = max(result["cases"], key=lambda case: (case["megabytes"], case["top_k"]))
    line = (
        f"{result['backend']}, {case['megabytes']:g} MB top-{case['top_k']}: dispatch {case['dispatch_gb_s']:.3g}, "
        f"combine {case['combine_gb_s']:.3g} GB/s; dedup {case['dedup'] or 1:.2f}x; / nccl {case['over_nccl']:.2f}"
    )
    return Told(line, result)


def read_ep(found: list[Any]) -> Told:
    """Forward and backward of each side, and how many pairs a row that travels stands for."""
    told: list[str] = []
    for name, entry in found[0].items():
        sides = {side: f"{one['fwd_tflops']:.3g} / {one['bwd_tflops']:.3g}" for side, one in entry["sides"].items()}
        dedup = sum(entry["pairs_by_rank"]) / max(sum(entry["rows_by_rank"]), 1)
        speeds = ", ".join(f"{side} {speed}" for side, speed in sides.items())
        told.append(f"{name}: fwd / bwd TFLOP/s: {speeds}; dedup {dedup:.2f}x")
    return Told("; ".join(told), found[0])


def read_async_tp(found: list[Any]) -> Told:
    """Time over that of the matmul alone, of the largest case of each kind."""
    (result,) = found[0].values()
    told: list[str] = []
    for kind in ("gather", "scatter"):
        case = max((case for case in result["cases"] if case["kind"] == kind), key=lambda case: case["M"])
        ratios = [f"{side} {case['sides'][side]['forward_ratio']:.2f}" for side in ("ours", "nccl")]
        told.append(f"{kind} {case['M']} rows / matmul: {', '.join(ratios)}")
    return Told("; ".join(told), result)


def read_attention(found: list[Any]) -> Told:
    """Speed per GPU over that of one GPU with the whole sequence."""
    (result,) = found[0].values()
    ratios = [
        f"{mode} {one['forward_backward']['ratio']:.2f}" for mode, one in result["modes"].items() if mode != "one"
    ]
    errors = max(one["error"] for one in result["modes"].values())
    return Told(f"{result['seq_len']} tokens, f+b / one GPU: {', '.join(ratios)}; error {errors:.1e}", result)


def read_train(found: list[Any]) -> Told:
    """Tokens per second and GPU of both sides."""
    (result,) = found[0].values()
    speeds = result["tokens_per_second_per_gpu"]
    head = f"{result['layers']} layers on {result['world_size']}: {speeds['ours']:,.0f} tokens/s per GPU"
    if result["ratio"] is not None:
        return Told(f"{head}; / torchtitan {result['ratio']:.2f}", result)
    return Told(f"{head}; no torchtitan: {result['baseline'].get('skipped', 'it failed')}", result)


def read_weak(found: list[Any]) -> Told:
    """Speed per GPU by number of GPUs, and the largest over the smallest."""
    results = [next(iter(one.values())) for one in found]
    speeds = {one["world_size"]: one["tokens_per_second_per_gpu"]["ours"] for one in results}
    told = ", ".join(f"{size}: {speed:,.0f}" for size, speed in speeds.items())
    most = max(speeds)
    efficiency = speeds[most] / speeds[min(speeds)]
    line = f"{results[0]['layers']} layers, tokens/s per GPU {told}; {most} GPUs / 1: {efficiency:.2f}"
    return Told(line, {"by_size": {one["world_size"]: one for one in results}, "efficiency": efficiency})


def read_figures(command: Command, log: Path) -> Any:
    """What a command found: its JSON, or the text that it printed."""
    return log.read_text(errors="replace") if command.out is None else json.loads(command.out.read_text())
