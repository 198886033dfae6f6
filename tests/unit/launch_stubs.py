"""Stand-ins for torchrun, the workers and Slurm's commands: programs of a few lines that import no torch.

Everything they do is appended to files in one folder, `$STUBS`, which the tests read.
"""

import os
import signal
import stat
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TRAIN = ROOT / "scripts" / "train.sh"
SBATCH = ROOT / "scripts" / "slurm" / "train.sbatch"

# A worker as trainer.train is one: handlers late (start-up takes time), a step every 20 ms, and on a stop signal it
# saves at the next step boundary and exits 0. Behaviour by $WORKER: stop (until told), finish, fail, late_fail (rank
# 0 has finished), config_early, config_late, deaf (never ends by itself).
WORKER = """
import json, os, pathlib, signal, sys, time
stubs, mode = pathlib.Path(os.environ["STUBS"]), os.environ.get("WORKER", "stop")
rank = os.environ.get("SLURM_NODEID", "0") + "." + os.environ.get("LOCAL_RANK", "0")
run = pathlib.Path("runs") / os.environ["SLUICEGATE_RUN_ID"]
def note(event):
    with open(stubs / "workers", "a") as log:
        log.write(f"{event} {rank} {os.getpid()}\\n")
def status(state, code):
    if rank == "0.0":
        run.mkdir(parents=True, exist_ok=True)
        (run / "status.json").write_text(json.dumps({"state": state, "exit_code": code, "time": time.time()}))
note("start")
if mode == "config_early":
    if rank == "0.0" and "SLUICEGATE_EXIT_FILE" in os.environ:
        pathlib.Path(os.environ["SLUICEGATE_EXIT_FILE"]).write_text("2\\nno such word\\n")
    sys.exit(2)
time.sleep(float(os.environ.get("STARTUP", "0.3")))
got = []
for name in ("SIGUSR1", "SIGTERM"):
    signal.signal(getattr(signal, name), lambda number, frame: got.append(signal.Signals(number).name))
status("running", None)
note("ready")
if mode == "config_late":
    status("failed", 2)
    sys.exit(2)
if mode == "fail":
    status("failed", 1)
    sys.exit(1)
for _ in range(1500):
    time.sleep(0.02)
    if mode in ("finish", "late_fail"):
        status("finished", 0)
        sys.exit(1 if mode == "late_fail" and rank != "0.0" else 0)
    if got and mode == "stop":
        note("saved-on-" + got[0])
        status("preempted", 0)
        sys.exit(0)
note("timeout")
sys.exit(3)
"""

# Starts the workers as torchrun does, each in a session of its own, and answers SIGUSR1 as it does: by dying.
TORCHRUN = """
import os, pathlib, subprocess, sys
arguments = sys.argv[1:]
stubs = pathlib.Path(os.environ["STUBS"])
with open(stubs / "torchrun", "a") as log:
    log.write(" ".join(arguments) + "\\n")
count = int(arguments[arguments.index("--nproc-per-node") + 1])
workers = [
    subprocess.Popen([sys.executable, str(stubs / "worker.py")], env={**os.environ, "LOCAL_RANK": str(rank)},
                     start_new_session=True)
    for rank in range(count)
]
sys.exit(1 if any([worker.wait() for worker in workers]) else 0)
"""

# Runs the command once per node and, like Slurm, passes a signal to *every* process of the step.
SRUN = """
import os, pathlib, signal, subprocess, sys, time
arguments = sys.argv[1:]
stubs = pathlib.Path(os.environ["STUBS"])
with open(stubs / "srun", "a") as log:
    log.write(" ".join(arguments) + "\\n")
nodes = int(os.environ["SLURM_JOB_NUM_NODES"])
command = arguments[arguments.index("bash"):]
mark = f"STEP_OF={os.getpid()}"
def everyone():
    for path in pathlib.Path("/proc").glob("[0-9]*/environ"):
        try:
            if mark.encode() in path.read_bytes().split(b"\\0"):
                yield int(path.parent.name)
        except OSError:
            pass
def forward(number, frame):
    for pid in everyone():
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            pass
for name in ("SIGUSR1", "SIGTERM"):
    signal.signal(getattr(signal, name), forward)
tasks = [
    subprocess.Popen(command, env={**os.environ, "STEP_OF": str(os.getpid()), "SLURM_NODEID": str(node)})
    for node in range(nodes)
]
sys.exit(max(task.wait() for task in tasks))
"""

SCONTROL = """
import os, pathlib, sys
with open(pathlib.Path(os.environ["STUBS"]) / "scontrol", "a") as log:
    log.write(" ".join(sys.argv[1:]) + "\\n")
if sys.argv[1:3] == ["show", "hostnames"]:
    print("node0\\nnode1")
"""


class Stubs:
    """A folder with the stand-ins, first on PATH, and what they wrote."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "bin").mkdir()
        (folder / "worker.py").write_text(WORKER)
        for name, source in {"torchrun-stub": TORCHRUN, "srun": SRUN, "scontrol": SCONTROL}.items():
            program = folder / "bin" / name
            program.write_text(f"#!{sys.executable}\n{textwrap.dedent(source)}")
            program.chmod(program.stat().st_mode | stat.S_IXUSR)
        self.processes: list[subprocess.Popen[str]] = []

    def start(self, script: Path, *arguments: str, **environment: str) -> "subprocess.Popen[str]":
        """Start a launcher in the folder; stderr joins stdout."""
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("SLURM_", "SLUICEGATE_"))}
        defaults = {
            "PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}",
            "STUBS": str(self.folder),
            "TORCHRUN": str(self.folder / "bin" / "torchrun-stub"),
            "PYTHON": sys.executable,
            "NPROC": "2",
            "STOP_GRACE": "2",
        }
        process = subprocess.Popen(
            ["bash", str(script), *arguments],
            cwd=self.folder,
            env={**kept, **defaults, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            # A background job of a script ignores interrupts, and so would all that it starts.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        self.processes.append(process)
        return process

    def lines(self, name: str) -> list[str]:
        """What the program `name` (or the workers) noted down, a line per call or event."""
        path = self.folder / name
        return path.read_text().splitlines() if path.exists() else []

    def events(self, kind: str) -> list[str]:
        return [line for line in self.lines("workers") if line.startswith(kind)]

    def wait_for(self, kind: str, count: int) -> None:
        """Until `count` workers have noted `kind`."""
        wait_until(lambda: len(self.events(kind)) >= count, f"{count} x {kind}: {self.lines('workers')}")

    def living_workers(self) -> list[int]:
        """Worker processes that still run (zombies do not count)."""
        return [pid for pid in (int(line.split()[2]) for line in self.events("start")) if _runs(pid)]

    def end(self) -> None:
        """Kill what a failed test left behind."""
        for process in self.processes:
            process.kill()
            process.wait()
        for pid in self.living_workers():
            os.kill(pid, 9)


def wait_until(condition: Callable[[], bool], what: str, seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds} s for {what}"
        time.sleep(0.02)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
