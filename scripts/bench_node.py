"""Everything worth knowing about one node, in one command and under 9 minutes.

    scripts/bench_node.sh                             2, 4 or 8 GPUs, as many as there are
    scripts/bench_node.sh model.moe.backend=fused     settings for our side of the training parts
    scripts/bench_node.sh --parts health,comms        some of it
    scripts/bench_node.sh --dry-run --nproc 8         tiny sizes on CPU processes

Parts (scripts/node_parts.py), each a program of its own that can fail or run out of time while the others go on:

    health        every pair's link, wrong bytes, clocks, ECC errors                scripts/node_health.py
    parity        layouts of all GPUs against one: those with every pair of axes
                  first, then as many of the others as there is time for: what
                  the other parts probably leave, but at least 75 seconds          scripts/parity.py
    comms         the exchange beside a put and NCCL, and what dedup spares         scripts/bench_comms.py
    ep            an expert-parallel layer over all GPUs, by symmetric memory       scripts/bench_ep.py
    ep x tp       the same with half as many ranks of EP, experts cut in two
    async tp      matmuls whose rows travel meanwhile, TP over all GPUs, beside
                  NCCL                                                             scripts/bench_async_tp.py
    attention     ring and Ulysses, 128k tokens over all GPUs                       scripts/bench_attention.py
    train         Qwen3-30B-A3B (8 GPUs: whole, full activation checkpointing;
                  fewer: 8 layers) beside torchtitan                                scripts/bench_train.py
    weak scaling  8 layers (4 on GPUs below 130 GiB) on 1, 2, 4, 8 GPUs; sizes
                  that fit beside each other run at the same time. Where train has
                  trained the same, its figure is that of the largest size

A part's program that would spend its first seconds importing is started while the part before it runs, and touches no
GPU before its turn.

The result goes into benchmarks/node_CARD.json, one entry per number of GPUs, and a table to the terminal. Exit code: 0
all parts went well or had nothing to do, 1 a part failed (the table says why), 2 wrong usage, 130 stopped by Ctrl-C.
"""

import argparse
import contextlib
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts.bench_results import MACHINE, ROOT, STARTER, TURN, probe, result_file, stamp, write_result
from scripts.node_parts import Command, Node, Part, parts_of, read_figures

SIZES = (8, 4, 2)
MINUTES = 9.0
# Lines of a failed part's output that are shown.
SHOWN_LINES = 60
# torchrun's workers are in sessions of their own: it must be given the time to end them.
GRACE_SECONDS = 20.0


class Outcome(NamedTuple):
    """What came of a part: ok, skipped, failed or late."""

    name: str
    status: str
    # Of the table: figures in short, or the reason.
    line: str
    seconds: float = 0.0
    figures: Any = None


def main(argv: Sequence[str] | None = None) -> int:
    """Run the parts, write and show; returns the exit code."""
    arguments = parse_arguments(argv)
    machine = probe(arguments.dry_run)
    try:
        settle(arguments, machine)
        if not arguments.dry_run:
            os.environ[MACHINE] = json.dumps(machine)
        out = result_file(arguments, "node", machine["card"], "parts")
        with tempfile.TemporaryDirectory(prefix="bench_node_") as folder:
            work = (arguments.work or Path(folder)).resolve()
            work.mkdir(parents=True, exist_ok=True)
            outcomes = run_parts(chosen_parts(arguments, machine, work), work, 60 * arguments.minutes)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130
    parts = {outcome.name: outcome._asdict() for outcome in outcomes}
    result = {"nproc": arguments.nproc, "overrides": arguments.overrides, **stamp(arguments, machine), "parts": parts}
    if out is not None:
        write_result(out, f"{arguments.nproc}_gpus", result, "parts")
    print(table(result) if out is None else f"{table(result)}\nwritten: {out}")
    return 1 if any(outcome.status in ("failed", "late") for outcome in outcomes) else 0


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line, checked; ends the process with code 2 if it is wrong."""
    parser = argparse.ArgumentParser(
        prog="bench_node.sh", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("overrides", nargs="*", help="settings of our side of the training parts, key=value")
    parser.add_argument("--nproc", type=int, help="GPUs, 2, 4 or 8; default: the most of these that there are")
    parser.add_argument("--parts", help="only these, by name, divided by commas")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="for all parts together; default: %(default)g")
    parser.add_argument("--limit", action="append", default=[], metavar="PART=SECONDS", help="another limit of a part")
    parser.add_argument("--out", type=Path, help="default: benchmarks/node_CARD.json; none for a dry run")
    parser.add_argument("--work", type=Path, help="keep logs and single results in this folder")
    parser.add_argument("--commit", help="commit to note; default: asked from git")
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes on 2 (or --nproc) CPU processes")
    arguments = parser.parse_intermixed_args(argv)
    if wrong := [word for word in arguments.overrides if "=" not in word]:
        parser.error(f"{wrong[0]} is no setting; write key=value")
    if arguments.minutes <= 0:
        parser.error("--minutes must be positive")
    return arguments


def settle(arguments: argparse.Namespace, machine: dict[str, Any]) -> None:
    """Fill in `card` and --nproc.

    Raises:
        ValueError: no GPUs, or a number that the parts are not made for.
    """
    if arguments.dry_run:
        machine.update(card="cpu", gpus=0, memory_gib=None)
        arguments.nproc = arguments.nproc or 2
    elif machine["gpus"] < 2:
        raise ValueError(f"{machine['gpus']} GPUs found, and the parts need 2; --dry-run runs on CPUs")
    arguments.nproc = arguments.nproc or next(size for size in SIZES if size <= machine["gpus"])
    if arguments.nproc not in SIZES:
        raise ValueError(f"--nproc={arguments.nproc}: must be 2, 4 or 8")
    if not arguments.dry_run and arguments.nproc > machine["gpus"]:
        raise ValueError(f"--nproc={arguments.nproc}: there are {machine['gpus']} GPUs")


def chosen_parts(arguments: argparse.Namespace, machine: dict[str, Any], work: Path) -> list[Part]:
    """The parts to run, with their limits.

    Raises:
        ValueError: a part that does not exist, or a limit that is no number.
    """
    chosen = () if arguments.parts is None else tuple(name.strip() for name in arguments.parts.split(","))
    memory_gib, dry_run, seconds = machine["memory_gib"], arguments.dry_run, 60 * arguments.minutes
    node = Node(arguments.nproc, memory_gib, dry_run, arguments.overrides, work, seconds, chosen, arguments.commit)
    parts = {part.name: part for part in parts_of(node)}
    names = chosen or [*parts]
    limits = [word.partition("=") for word in arguments.limit]
    for name in [*names, *(name for name, _, _ in limits)]:
        if name not in parts:
            raise ValueError(f"there is no part {name!r}; choose from {', '.join(parts)}")
    for name, _, seconds in limits:
        try:
            parts[name] = parts[name]._replace(seconds=float(seconds))
        except ValueError:
            raise ValueError(f"--limit {name}={seconds}: must be a number of seconds") from None
    return [part for name, part in parts.items() if name in names]


# ---- running


def run_parts(parts: Sequence[Part], work: Path, seconds: float) -> list[Outcome]:
    """One after the other, for so long in all; what is told of each is printed as it comes."""
    deadline = time.monotonic() + seconds
    outcomes: list[Outcome] = []
    ahead = Ahead()
    try:
        for index, part in enumerate(parts):
            print(f"{part.name} ...", file=sys.stderr, flush=True)
            following = [other for other in parts[index + 1 :] if not other.skipped]
            if following and not part.skipped and time.monotonic() < deadline:
                ahead.start(following[0], work)
            outcomes.append(run_part(part, work, deadline, ahead))
            print(row(outcomes[-1]._asdict()), file=sys.stderr, flush=True)
    finally:
        ahead.end()
    return outcomes


class Ahead:
    """Programs that were started before their part's turn, for which they wait."""

    def __init__(self) -> None:
        self.waiting: dict[Path, Process] = {}

    def start(self, part: Part, work: Path) -> None:
        """Start those of the first step that can wait."""
        for command, log in zip(part.steps[0], logs_of(part, 0, work), strict=True):
            if command.waits:
                turn_of(log).unlink(missing_ok=True)
                self.waiting[log] = start(command, log, turn_of(log))

    def take(self, command: Command, log: Path) -> "Process":
        """The program whose turn it is: it may go on, or is started now."""
        if log not in self.waiting:
            return start(command, log)
        turn_of(log).touch()
        return self.waiting.pop(log)

    def end(self) -> None:
        """End those whose turn will not come."""
        end([*self.waiting.values()])


def turn_of(log: Path) -> Path:
    """The file that says that it is the turn of the program which writes this log."""
    return log.with_suffix(".turn")


def logs_of(part: Part, step: int, work: Path) -> list[Path]:
    """Where the programs of a step write."""
    return [work / f"{part.name.replace(' ', '_')}_{step}_{index}.log" for index in range(len(part.steps[step]))]


def run_part(part: Part, work: Path, deadline: float, ahead: Ahead) -> Outcome:
    """Run the steps of a part and read what they found."""
    if part.skipped:
        return Outcome(part.name, "skipped", part.skipped)
    if reason := part.lacks():
        return Outcome(part.name, "failed", reason)
    begun = time.monotonic()
    limit = min(begun + part.seconds, deadline)
    found: list[Any] = []
    for number, commands in enumerate(part.steps):
        logs = logs_of(part, number, work)
        failure = run_together(commands, logs, limit, ahead)
        if failure is not None:
            status, reason = failure
            return Outcome(part.name, status, reason, time.monotonic() - begun)
        try:
            found += [read_figures(command, log) for command, log in zip(commands, logs, strict=True)]
        except (OSError, ValueError) as error:
            return Outcome(part.name, "failed", f"left no figures: {error}", time.monotonic() - begun)
    try:
        told = part.read(found)
    except (ValueError, KeyError, TypeError, IndexError) as error:
        reason = f"its figures cannot be read: {type(error).__name__} {error}"
        return Outcome(part.name, "failed", reason, time.monotonic() - begun)
    return Outcome(part.name, "ok", told.line, time.monotonic() - begun, told.figures)


def run_together(
    commands: Sequence[Command], logs: Sequence[Path], limit: float, ahead: Ahead
) -> tuple[str, str] | None:
    """Run programs side by side until all have ended; returns status and reason of the first that did not go well."""
    if time.monotonic() >= limit:
        return "late", "there was no time left for it"
    processes: list[Process] = []
    begun = time.monotonic()
    try:
        for command, log in zip(commands, logs, strict=True):
            processes.append(ahead.take(command, log))
        for process in processes:
            process.wait(max(limit - time.monotonic(), 0.01))
    except subprocess.TimeoutExpired:
        return "late", f"was stopped after {time.monotonic() - begun:.0f} seconds"
    finally:
        end(processes)
    for process, log in zip(processes, logs, strict=True):
        if process.returncode != 0:
            lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
            print("\n".join(f"    {line}" for line in lines[-SHOWN_LINES:]), file=sys.stderr, flush=True)
            return "failed", f"exit code {process.returncode}: {cause(lines)}"
    return None


def cause(lines: Sequence[str]) -> str:
    """The line of a failed program's output that says most."""
    errors = [line.strip() for line in lines if line.lstrip().startswith("error:")]
    return (errors or [line.strip() for line in lines[-1:]] or ["it said nothing"])[0]


class Forked:
    """A script that runs in a copy of this process; used like a Popen."""

    def __init__(self, words: Sequence[str], environment: dict[str, str], log: Path) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            os._exit(self._run(words, environment, log))

    def _run(self, words: Sequence[str], environment: dict[str, str], log: Path) -> int:
        code: Any = 0
        try:
            os.setsid()
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(output, 1)
            os.dup2(output, 2)
            os.chdir(ROOT)
            os.environ.update(environment)
            sys.argv = list(words)
            runpy.run_path(words[0], run_name="__main__")
        except SystemExit as ended:
            code = ended.code
        except BaseException:
            traceback.print_exc()
            code = 1
        sys.stdout.flush()
        sys.stderr.flush()
        return code if isinstance(code, int) else int(code is not None)

    def poll(self) -> int | None:
        """Its exit code, if it has ended."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout: float = float("inf")) -> int:
        """Its exit code. Raises TimeoutExpired."""
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() >= deadline:
                raise subprocess.TimeoutExpired("", timeout)
            time.sleep(0.05)
        return code


Process = subprocess.Popen[bytes] | Forked


def start(command: Command, log: Path, turn: Path | None = None) -> Process:
    """Start a program in a session of its own, so that all of its processes can be ended together.

    `turn`: it begins once this file is there.
    """
    if command.out is not None:
        # Of an earlier run in the same folder.
        command.out.unlink(missing_ok=True)
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}
    environment.setdefault("OMP_NUM_THREADS", "1")
    if turn is not None:
        environment |= {TURN: str(turn), STARTER: str(os.getpid())}
    if command.devices is not None:
        environment["CUDA_VISIBLE_DEVICES"] = command.devices
        # It has fewer GPUs.
        environment.pop(MACHINE, None)
    if command.forked and preload():
        return Forked(command.words[1:], environment, log)
    with log.open("w") as output:
        return subprocess.Popen(
            command.words, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )


def preload() -> bool:
    """Import what the parts of a dry run import; whether this process can be forked then: one with threads cannot."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    from scripts import bench_async_tp, bench_attention, bench_ep, bench_ranks, node_health  # noqa: F401

    return bench_ranks.start_method(True) == "fork"


def end(processes: Sequence[Process]) -> None:
    """End what still runs, first gently."""
    running = [process for process in processes if process.poll() is None]
    for process in running:
        os.killpg(process.pid, signal.SIGTERM)
    deadline = time.monotonic() + GRACE_SECONDS
    try:
        for process in running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(deadline - time.monotonic(), 0.01))
    finally:
        # Also when a second signal cuts the grace short.
        for process in processes:
            # What a program left behind, too.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


# ---- for a person


def table(result: dict[str, Any]) -> str:
    """One line per part."""
    parts = result["parts"].values()
    head = f"{result['nproc']} x {result['card']}, torch {result['torch']}, {result['commit'][:12]}"
    total = sum(part["seconds"] for part in parts)
    return "\n".join([head, *map(row, parts), f"{'':14}{'':8}{total:>5.0f} s in all"])


def row(part: dict[str, Any]) -> str:
    """Name, status, seconds and what was found or went wrong."""
    return f"{part['name']:14}{part['status']:8}{part['seconds']:>5.0f} s  {part['line']}"


if __name__ == "__main__":
    # Programs are in sessions of their own: whoever stops this one must have them ended, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    # A terminal that is closed.
    signal.signal(signal.SIGHUP, lambda *_: sys.exit(129))
    sys.exit(main())
