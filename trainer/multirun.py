"""`--multirun`: the grid of a sweep, one torchrun after another.

Hydra's own launcher would call the training function once per job inside every rank of one torchrun, which hangs. Here
a plain process composes every job first, so that a mistake in the last one is found before the first one starts, and
then runs `torchrun -m trainer.train` for each, under the run id `<base>-<index>`. A job that fails does not stop the
others; a signal does. Started again with the same base id, jobs that are finished say so and the rest go on.

Signals go to the workers and not to torchrun: it would die of SIGUSR1, leaving them behind. A worker gets a signal once
it has a handler for it.
"""

import itertools
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException

from trainer.compose import EXIT_PREEMPTED, CommandLine, compose, hydra_session
from trainer.layout import fit_layout
from trainer.run import new_run_id, read_status, resolve_run_id

# From best to worst; the sweep ends with the worst code of its jobs.
SEVERITY = (0, EXIT_PREEMPTED, 2, 1)
POLL_SECONDS = 0.2
_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


@dataclass(frozen=True)
class Job:
    """One point of the grid."""

    run_id: str
    overrides: list[str]
    folder: Path


@dataclass
class Stop:
    """The signals received so far and the workers they reached."""

    signals: list[int] = field(default_factory=list)
    delivered: set[tuple[int, int]] = field(default_factory=set)

    def receive(self, number: int, _frame: object) -> None:
        """The signal handler."""
        self.signals.append(number)

    @property
    def insisting(self) -> bool:
        """A second Ctrl-C: stop at once."""
        return self.signals.count(signal.SIGINT) > 1


def multirun(line: CommandLine) -> int:
    """Run every combination of the swept values; the exit code is that of the worst job.

    Raises:
        ValueError: started under torchrun, or a job of the grid is not a valid config.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ or "LOCAL_RANK" in os.environ:
        raise ValueError(
            "--multirun cannot run under torchrun; start it as 'python -m trainer.train --multirun ...': "
            "it starts a torchrun for each job (SLUICEGATE_NPROC sets the processes)"
        )
    jobs = plan_jobs(line)
    stop = Stop()
    previous = {number: signal.signal(number, stop.receive) for number in _FORWARDED}
    try:
        codes = _run_all(jobs, line.config_dir, stop)
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    _print_summary(jobs, codes)
    if len(codes) < len(jobs):
        codes.append(EXIT_PREEMPTED)
    return max(codes, key=SEVERITY.index, default=0)


def plan_jobs(line: CommandLine) -> list[Job]:
    """Compose and check every job of the grid.

    Raises:
        ValueError: names the job whose config is not valid, or does not fit the processes.
    """
    fresh, processes = new_run_id(), _num_processes()
    jobs = []
    for index, overrides in enumerate(expand_grid(line.overrides)):
        try:
            config = compose(overrides, line.config_dir)
            fit_layout(config, processes)
        except ValueError as error:
            raise ValueError(f"job {index} ({' '.join(overrides)}): {error}") from error
        run_id = f"{resolve_run_id(config) or fresh}-{index}"
        jobs.append(Job(run_id, [*overrides, f"run.id={run_id}"], Path(config.run.root) / run_id))
    return jobs


def expand_grid(words: Sequence[str]) -> list[list[str]]:
    """`a=1,2 b=3` -> [[a=1, b=3], [a=2, b=3]], in Hydra's sweep syntax: lists, choice(), range(), glob() of a group.

    Raises:
        ValueError: a word that Hydra cannot read, or a continuous range.
    """
    with hydra_session():
        loader = GlobalHydra.instance().config_loader()
        try:
            overrides = OverridesParser.create(config_loader=loader).parse_overrides(list(words))
            return [list(point) for point in itertools.product(*(_points(o) for o in overrides))]
        except HydraException as error:
            raise ValueError(str(error).splitlines()[0]) from error


def torchrun_command(overrides: Sequence[str], config_dir: str | None) -> list[str]:
    """The command of one job; the variable TORCHRUN replaces its first words."""
    torchrun = shlex.split(os.environ.get("TORCHRUN", "")) or [sys.executable, "-m", "torch.distributed.run"]
    flags = [] if config_dir is None else ["--config-dir", config_dir]
    workers = ["--standalone", "--nproc-per-node", str(_num_processes())]
    return [*torchrun, *workers, "-m", "trainer.train", *flags, *overrides]


def _points(override: Override) -> list[str]:
    if not override.is_sweep_override():
        assert override.input_line is not None
        return [override.input_line]
    if not override.is_discrete_sweep():
        raise ValueError(f"{override.input_line}: a grid needs single values, not an interval")
    return [f"{override.get_key_element()}={value}" for value in override.sweep_string_iterator()]


def _num_processes() -> int:
    chosen = os.environ.get("SLUICEGATE_NPROC")
    if chosen is not None:
        if not chosen.isdigit() or int(chosen) < 1:
            raise ValueError(f"SLUICEGATE_NPROC={chosen}: must be a number of processes, at least 1")
        return int(chosen)
    import torch  # late: not needed where the number is given

    return max(torch.cuda.device_count(), 1)


def _run_all(jobs: Sequence[Job], config_dir: str | None, stop: Stop) -> list[int]:
    codes = []
    for index, job in enumerate(jobs):
        print(f"[{index + 1}/{len(jobs)}] {job.run_id}: {' '.join(job.overrides)}", flush=True)
        codes.append(_run(job, config_dir, stop))
        if stop.signals:
            print(f"stopped by {signal.Signals(stop.signals[0]).name}", flush=True)
            break
    return codes


def _run(job: Job, config_dir: str | None, stop: Stop) -> int:
    with tempfile.TemporaryDirectory() as folder:
        exit_file = Path(folder) / "exit"
        command = torchrun_command(job.overrides, config_dir)
        # A session of its own: Ctrl-C reaches this process alone, which passes it on once.
        process = subprocess.Popen(command, env=_environment(exit_file), start_new_session=True)
        while process.poll() is None:
            time.sleep(POLL_SECONDS)
            _forward(stop, process.pid)
        return _exit_code(process.returncode, exit_file, job.folder)


def _environment(exit_file: Path) -> dict[str, str]:
    root = str(Path(__file__).resolve().parent.parent)
    paths = [root, os.environ["PYTHONPATH"]] if os.environ.get("PYTHONPATH") else [root]
    threads = str(max((os.cpu_count() or 1) // _num_processes(), 1))
    defaults = {"OMP_NUM_THREADS": threads, **os.environ}
    return {**defaults, "PYTHONPATH": os.pathsep.join(paths), "SLUICEGATE_EXIT_FILE": str(exit_file)}


def _exit_code(returned: int, exit_file: Path, folder: Path) -> int:
    status = read_status(folder) or {}
    noted = exit_file.read_text().partition("\n")[0] if exit_file.exists() else str(status.get("exit_code"))
    if returned == 0:
        # An evaluation that was stopped leaves it in its file.
        return EXIT_PREEMPTED if noted == str(EXIT_PREEMPTED) or status.get("state") == "preempted" else 0
    return 2 if noted == "2" else 1


def _forward(stop: Stop, torchrun: int) -> None:
    for worker in _children(torchrun) if stop.signals else ():
        if stop.insisting:
            os.kill(worker, signal.SIGKILL)
            continue
        # Ctrl-C asks for the same as SIGTERM: save at the next step boundary, then end.
        wanted = signal.SIGUSR1 if stop.signals[0] == signal.SIGUSR1 else signal.SIGTERM
        if (worker, wanted) not in stop.delivered and _catches(worker, wanted):
            os.kill(worker, wanted)
            stop.delivered.add((worker, wanted))


def _children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def _catches(pid: int, number: int) -> bool:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return False
    mask = next((int(line.split()[1], 16) for line in lines if line.startswith("SigCgt:")), 0)
    return bool(mask >> (number - 1) & 1)


def _print_summary(jobs: Sequence[Job], codes: Sequence[int]) -> None:
    words = {0: "finished", EXIT_PREEMPTED: "preempted", 2: "refused: a mistake in config or data", 1: "failed"}
    for job, code in itertools.zip_longest(jobs, codes):
        print(f"{job.run_id}: {words[code] if code is not None else 'not started'} ({job.folder})", flush=True)
