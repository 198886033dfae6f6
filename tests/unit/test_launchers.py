"""The launchers against stand-ins: signals reach every worker and nobody else (CASES 65), nothing is left running, and
the exit code says how the run ended."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.launch_stubs import ROOT, SBATCH, TRAIN, Stubs, wait_until


@pytest.fixture
def stubs(tmp_path: Path) -> Iterator[Stubs]:
    made = Stubs(tmp_path)
    yield made
    made.end()


def _finish(process: "subprocess.Popen[str]", seconds: float = 30) -> tuple[int, str]:
    output, _ = process.communicate(timeout=seconds)
    return process.returncode, output


@pytest.mark.parametrize("name", ["SIGUSR1", "SIGTERM"])
def test_stop_signal_reaches_every_worker_once_and_the_run_counts_as_preempted(stubs: Stubs, name: str) -> None:
    process = stubs.start(TRAIN, "experiment=demo", NPROC="3", SLUICEGATE_RUN_ID="r")
    stubs.wait_for("ready", 3)
    process.send_signal(getattr(signal, name))
    code, output = _finish(process)
    assert code == 75, output
    assert len(stubs.events(f"saved-on-{name}")) == 3
    assert stubs.living_workers() == []
    assert "run.id=r goes on" in output


def test_signal_during_start_up_waits_for_the_workers_handlers(stubs: Stubs) -> None:
    process = stubs.start(TRAIN, "experiment=demo", SLUICEGATE_RUN_ID="r", STARTUP="1.0")
    stubs.wait_for("start", 2)
    process.send_signal(signal.SIGUSR1)
    code, output = _finish(process)
    assert code == 75, output
    assert len(stubs.events("saved-on-SIGUSR1")) == 2


def test_second_interrupt_stops_at_once(stubs: Stubs) -> None:
    process = stubs.start(TRAIN, "experiment=demo", SLUICEGATE_RUN_ID="r", WORKER="deaf")
    stubs.wait_for("ready", 2)
    process.send_signal(signal.SIGINT)
    wait_until(lambda: process.poll() is not None or _interrupt(process), "the launcher to end")
    code, output = _finish(process)
    assert code == 1, output
    assert stubs.living_workers() == []


def _interrupt(process: "subprocess.Popen[str]") -> bool:
    process.send_signal(signal.SIGINT)
    return False


def test_workers_of_a_killed_torchrun_are_stopped(stubs: Stubs) -> None:
    process = stubs.start(TRAIN, "experiment=demo", SLUICEGATE_RUN_ID="r", WORKER="deaf")
    stubs.wait_for("ready", 2)
    worker = stubs.living_workers()[0]
    agent = int(Path(f"/proc/{worker}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(agent, signal.SIGKILL)
    code, output = _finish(process)
    assert code == 1, output
    assert "torchrun is gone" in output
    assert stubs.living_workers() == []


@pytest.mark.parametrize(
    ("mode", "expected"), [("finish", 0), ("fail", 1), ("late_fail", 1), ("config_early", 2), ("config_late", 2)]
)
def test_exit_code_says_how_the_run_ended(stubs: Stubs, mode: str, expected: int) -> None:
    code, output = _finish(stubs.start(TRAIN, "experiment=demo", SLUICEGATE_RUN_ID="r", WORKER=mode))
    assert code == expected, output


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["optim.lrr=1"], "optim.lrr is not a setting; did you mean optim.lr?"),
        (["experiment=demo", "parallel.ep=3"], "parallel.ep=3 must divide dp_shard x cp x tp = 2"),
        (["experiment=demo", "--cgf", "job"], "unknown flag --cgf; did you mean --cfg?"),
    ],
)
def test_a_mistake_is_told_once_before_torchrun_starts(stubs: Stubs, words: list[str], told: str) -> None:
    """Not below the traceback with which torchrun ends; for as many processes as there would have been."""
    code, output = _finish(stubs.start(TRAIN, *words, SLUICEGATE_RUN_ID="r", TORCHRUN="", PYTHON=sys.executable))
    assert code == 2, output
    assert output.splitlines()[-1].startswith(f"error: {told}") and output.count(told) == 1, output
    assert "Traceback" not in output and not (stubs.folder / "runs").exists()


@pytest.fixture
def python_stub(stubs: Stubs) -> Path:
    """Says what it was asked for, and takes as long as $SLOW for a check; it fails where the real one would."""
    program = stubs.folder / "bin" / "python-stub"
    program.write_text(
        '#!/bin/bash\n[ "$2" = trainer.train ] || { echo "asked: $*"; exit; }\n'
        'echo check >>"$STUBS/checks"; sleep "${SLOW:-0}"; exit "${SAYS:-0}"\n'
    )
    program.chmod(0o755)
    return program


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        # A node that stayed away for a file that it alone lacks would leave the others waiting.
        ({"NNODES": "2", "NODE_RANK": "0", "MASTER_ADDR": "node0"}, []),
        ({}, ["--cfg", "job"]),
        ({}, ["-m"]),
        ({}, ["--check"]),
    ],
)
def test_what_is_not_looked_into_first(
    stubs: Stubs, python_stub: Path, environment: dict[str, str], words: list[str]
) -> None:
    given = {"SLUICEGATE_RUN_ID": "r", "TORCHRUN": "", "PYTHON": str(python_stub), **environment}
    _, output = _finish(stubs.start(TRAIN, *words, **given))
    assert "asked: -m torch.distributed.run" in output and stubs.lines("checks") == [], output


def test_a_check_that_cannot_run_leaves_it_to_the_workers(stubs: Stubs, python_stub: Path) -> None:
    given = {"SLUICEGATE_RUN_ID": "r", "TORCHRUN": "", "PYTHON": str(python_stub), "SAYS": "1"}
    code, output = _finish(stubs.start(TRAIN, **given))
    assert (code, len(stubs.lines("checks"))) == (0, 1) and "asked: -m torch.distributed.run" in output


def test_what_is_left_in_the_environment_does_not_reach_the_check(stubs: Stubs) -> None:
    """Another rank's silence, another launch's file."""
    left = {"RANK": "1", "WORLD_SIZE": "x", "SLUICEGATE_EXIT_FILE": str(stubs.folder / "other")}
    given = {"SLUICEGATE_RUN_ID": "r", "TORCHRUN": "", "PYTHON": sys.executable, **left}
    code, output = _finish(stubs.start(TRAIN, "optim.lrr=1", **given))
    assert code == 2 and output.splitlines()[-1].startswith("error: optim.lrr"), output
    assert not (stubs.folder / "other").exists()


def test_a_check_that_hangs_can_be_stopped(stubs: Stubs, python_stub: Path) -> None:
    given = {"SLUICEGATE_RUN_ID": "r", "TORCHRUN": "", "PYTHON": str(python_stub), "SLOW": "60"}
    process = stubs.start(TRAIN, **given)
    wait_until(lambda: stubs.lines("checks") != [], "the check to begin")
    wait_until(lambda: process.poll() is not None or _interrupt(process), "the launcher to end")
    code, output = _finish(process)
    assert code == 1 and "stopping at once" in output and "asked:" not in output, output


def test_a_mistake_is_told_last_and_no_file_that_is_not_there(stubs: Stubs) -> None:
    _, output = _finish(stubs.start(TRAIN, "experiment=demo", SLUICEGATE_RUN_ID="r", WORKER="config_early"))
    assert output.splitlines()[-1] == "train.sh: run r stopped because of a mistake: no such word"
    (stubs.folder / "worker.py").write_text("raise SystemExit(1)")
    _, output = _finish(stubs.start(TRAIN, "experiment=demo", SLUICEGATE_RUN_ID="r"))
    assert output.splitlines()[-1].endswith("see the first error above")


def test_a_mistake_before_a_restart_is_not_told_of_what_failed_after_it(stubs: Stubs) -> None:
    (stubs.folder / "worker.py").write_text(
        "import json, os, pathlib, sys; pathlib.Path(os.environ['SLUICEGATE_EXIT_FILE']).write_text('2\\nof yore')\n"
        "run = pathlib.Path('runs/r'); run.mkdir(parents=True, exist_ok=True)\n"
        "(run / 'status.json').write_text(json.dumps({'state': 'failed', 'exit_code': 1})); sys.exit(1)"
    )
    code, output = _finish(stubs.start(TRAIN, "experiment=demo", SLUICEGATE_RUN_ID="r"))
    assert code == 1 and "of yore" not in output and "see the first error above" in output.splitlines()[-1], output


@pytest.mark.parametrize("listens", [True, False])
def test_a_launch_that_has_no_workers_yet_can_be_stopped(stubs: Stubs, listens: bool) -> None:
    """It waits for other nodes; a further interrupt ends one that does not listen."""
    ignored = "" if listens else "signal.signal(signal.SIGTERM, signal.SIG_IGN);"
    program = stubs.folder / "bin" / "torchrun-stub"
    program.write_text(
        f"#!{sys.executable}\nimport os, pathlib, signal, time; {ignored}"
        "pathlib.Path(os.environ['STUBS'], 'waits').touch(); time.sleep(60)"
    )
    process = stubs.start(TRAIN, "experiment=demo", SLUICEGATE_RUN_ID="r")
    wait_until(lambda: (stubs.folder / "waits").exists(), "the stand-in to wait")
    wait_until(lambda: process.poll() is not None or _interrupt(process), "the launcher to end")
    code, output = _finish(process)
    assert code == 1 and "stopping at once" in output, output


def test_status_of_an_earlier_attempt_is_not_this_ones(stubs: Stubs) -> None:
    """A requeued run that dies at once must not read the old `preempted` and be requeued for ever."""
    status = stubs.folder / "runs" / "r" / "status.json"
    status.parent.mkdir(parents=True)
    status.write_text(json.dumps({"state": "preempted", "exit_code": 0}))
    (stubs.folder / "worker.py").write_text("raise SystemExit(1)")
    code, output = _finish(stubs.start(TRAIN, "experiment=demo", SLUICEGATE_RUN_ID="r"))
    assert code == 1, output


def test_a_status_that_was_put_back_is_not_this_attempts(stubs: Stubs) -> None:
    """An attempt that could not begin leaves a finished run its status, in a new file."""
    status = stubs.folder / "runs" / "r" / "status.json"
    status.parent.mkdir(parents=True)
    status.write_text(json.dumps({"state": "finished", "exit_code": 0}))
    (stubs.folder / "worker.py").write_text(
        "import os; file = 'runs/r/status.json'; text = open(file).read(); open('new', 'w').write(text)\n"
        "os.replace('new', file); raise SystemExit(1)"
    )
    code, output = _finish(stubs.start(TRAIN, "experiment=demo", SLUICEGATE_RUN_ID="r"))
    assert code == 1 and "run r failed" in output.splitlines()[-1], output


def test_an_evaluation_that_was_stopped_leaves_its_word_in_the_exit_file(stubs: Stubs) -> None:
    """It writes no status; what training leaves there meanwhile is another thing."""
    (stubs.folder / "worker.py").write_text(
        "import os, pathlib; pathlib.Path('runs/r').mkdir(parents=True, exist_ok=True)\n"
        'pathlib.Path(\'runs/r/status.json\').write_text(\'{"state": "finished", "exit_code": 0}\')\n'
        "pathlib.Path(os.environ['SLUICEGATE_EXIT_FILE']).write_text('75\\nstopped\\n')"
    )
    code, output = _finish(stubs.start(TRAIN, "train.eval_only=true", SLUICEGATE_RUN_ID="r"))
    assert code == 75 and "begins it anew" in output.splitlines()[-1], output


def test_run_folder_follows_the_overrides(stubs: Stubs) -> None:
    (stubs.folder / "worker.py").write_text(
        "import os, pathlib; folder = pathlib.Path('my out/x'); folder.mkdir(parents=True, exist_ok=True)\n"
        'folder.joinpath(\'status.json\').write_text(\'{"state": "preempted", "exit_code": 0}\')'
    )
    code, output = _finish(stubs.start(TRAIN, "run.root='my out'", "run.id=y", "run.id=x"))
    assert code == 75, output


def test_several_nodes_meet_at_one_place(stubs: Stubs) -> None:
    environment = {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "node0", "SLUICEGATE_RUN_ID": "r", "DRY_RUN": "1"}
    code, output = _finish(stubs.start(TRAIN, "experiment=demo", "optim.lr=1e-3", **environment))
    assert code == 0, output
    for words in (
        "--nnodes 2 --nproc-per-node 2",
        "--rdzv-backend c10d --rdzv-id r --rdzv-endpoint node0:29500 --rdzv-conf is_host=false",
        "-m trainer.train experiment=demo optim.lr=1e-3",
    ):
        assert words in output


@pytest.mark.parametrize(
    ("environment", "needs"),
    [({"MASTER_ADDR": "node0"}, "SLUICEGATE_RUN_ID"), ({"SLUICEGATE_RUN_ID": "r"}, "MASTER_ADDR")],
)
def test_several_nodes_without_a_meeting_point_are_refused(
    stubs: Stubs, environment: dict[str, str], needs: str
) -> None:
    code, output = _finish(stubs.start(TRAIN, "experiment=demo", NNODES="2", **environment))
    assert code == 2
    assert needs in output
    assert stubs.lines("torchrun") == []


def test_help_is_its_own_and_starts_nothing(stubs: Stubs) -> None:
    code, output = _finish(stubs.start(TRAIN, "--help"))
    assert code == 0
    for words in ("NNODES=2 NODE_RANK=0", "DRY_RUN=1 prints", "75 preempted", "python -m trainer.train --help"):
        assert words in output
    assert "set -uo" not in output
    assert stubs.lines("torchrun") == []


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("NNODES", "two"), ("NODE_RANK", "x"), ("NPROC", "gpu"), ("NPROC", "0"), ("NPROC", "9" * 20)),
        *(("OMP_NUM_THREADS", "x"), ("MAX_RESTARTS", "-1"), ("STOP_GRACE", "abc")),
    ],
)
def test_settings_that_are_no_numbers_are_refused(stubs: Stubs, name: str, value: str) -> None:
    code, output = _finish(stubs.start(TRAIN, "experiment=demo", **{"SLUICEGATE_RUN_ID": "r", name: value}))
    assert code == 2
    assert output.splitlines()[-1].startswith(f"train.sh: {name}={value} must be a whole number, at least ")
    assert stubs.lines("torchrun") == []


def test_a_node_beyond_the_last_is_refused(stubs: Stubs) -> None:
    given = {"SLUICEGATE_RUN_ID": "r", "NNODES": "2", "MASTER_ADDR": "node0"}
    code, output = _finish(stubs.start(TRAIN, "experiment=demo", NODE_RANK="2", **given))
    assert code == 2 and "NODE_RANK=2 must be less than NNODES=2" in output.splitlines()[-1]
    # One node of a larger job is the only one of its run.
    code, output = _finish(stubs.start(TRAIN, "experiment=demo", SLUICEGATE_RUN_ID="r", SLURM_NODEID="3", DRY_RUN="1"))
    assert code == 0 and "is_host=true" in output, output


def test_defaults_are_shown_with_their_reasons(stubs: Stubs) -> None:
    _, output = _finish(stubs.start(TRAIN, "experiment=demo", NPROC="", DRY_RUN="1", CUDA_VISIBLE_DEVICES=""))
    assert "NPROC=2 (no GPU here" in output
    assert "MAX_RESTARTS=0 (" in output
    assert "SLUICEGATE_RUN_ID=" in output


@pytest.mark.parametrize(("processes", "batch"), [(2, 8), (3, 12), (6, 24), (8, 32)])
def test_demo_fits_its_batch_to_any_number_of_processes(stubs: Stubs, processes: int, batch: int) -> None:
    demo = ROOT / "scripts" / "demo.sh"
    code, output = _finish(stubs.start(demo, "train.steps=5", NPROC=str(processes), DRY_RUN="1"))
    assert code == 0, output
    assert f"-m trainer.train experiment=demo train.global_batch_size={batch} train.steps=5" in output
    assert batch % (4 * processes) == 0


def _job(stubs: Stubs, *words: str, **environment: str) -> "subprocess.Popen[str]":
    slurm = {
        "SLUICEGATE_ROOT": str(stubs.folder),
        "SLURM_JOB_ID": "41",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_JOB_NODELIST": "node[0-1]",
    }
    (stubs.folder / "scripts").symlink_to(ROOT / "scripts")
    return stubs.start(SBATCH, "experiment=demo", *words, **slurm, **environment)


def test_job_whose_time_is_up_saves_on_all_nodes_and_requeues_once(stubs: Stubs) -> None:
    """CASES 65: SIGUSR1 used to kill torchrun and orphan its workers; here every process of the step even gets it."""
    process = _job(stubs)
    stubs.wait_for("ready", 4)
    process.send_signal(signal.SIGUSR1)
    code, output = _finish(process)
    assert code == 0, output
    assert len(stubs.events("saved-on-SIGUSR1")) == 4, stubs.lines("workers")
    assert stubs.living_workers() == []
    assert "torchrun is gone" not in output
    assert [line for line in stubs.lines("scontrol") if line.startswith("requeue")] == ["requeue 41"]
    commands = stubs.lines("torchrun")
    assert len(commands) == 2
    assert all("--rdzv-id 41 --rdzv-endpoint node0:20041" in command for command in commands)
    assert json.loads((stubs.folder / "runs" / "41" / "status.json").read_text())["state"] == "preempted"


def test_an_evaluation_whose_time_is_up_is_not_requeued(stubs: Stubs) -> None:
    """It would begin anew each time, and never end."""
    process = _job(stubs, "train.eval_only=True")
    stubs.wait_for("ready", 4)
    process.send_signal(signal.SIGUSR1)
    code, output = _finish(process)
    assert code == 75, output
    assert not any(line.startswith("requeue") for line in stubs.lines("scontrol"))


def test_job_that_is_cancelled_saves_and_stays_away(stubs: Stubs) -> None:
    process = _job(stubs)
    stubs.wait_for("ready", 4)
    process.send_signal(signal.SIGTERM)
    code, output = _finish(process)
    assert code == 75, output
    assert len(stubs.events("saved-on-SIGTERM")) == 4
    assert not any(line.startswith("requeue") for line in stubs.lines("scontrol"))


@pytest.mark.parametrize(("mode", "expected"), [("finish", 0), ("fail", 1)])
def test_job_that_ends_by_itself_is_not_requeued(stubs: Stubs, mode: str, expected: int) -> None:
    code, output = _finish(_job(stubs, WORKER=mode))
    assert code == expected, output
    assert not any(line.startswith("requeue") for line in stubs.lines("scontrol"))


def test_job_submitted_from_elsewhere_says_so(stubs: Stubs) -> None:
    code, output = _finish(stubs.start(SBATCH, SLURM_SUBMIT_DIR=str(stubs.folder), SLURM_JOB_ID="41"))
    assert code == 2
    assert "SLUICEGATE_ROOT" in output


@pytest.mark.slow
def test_real_torchrun_survives_the_signal(stubs: Stubs) -> None:
    """The same with torchrun itself, whose workers are the stand-ins."""
    program = stubs.folder / "bin" / "real-torchrun"
    # The launcher's options as they are, another program: exec keeps the process id, as the launcher expects.
    program.write_text(
        f'#!/bin/bash\noptions=()\nwhile [ "$1" != -m ]; do options+=("$1"); shift; done\n'
        f'exec {sys.executable} -m torch.distributed.run "${{options[@]}}" {stubs.folder}/worker.py\n'
    )
    program.chmod(0o755)
    process = stubs.start(TRAIN, "experiment=demo", SLUICEGATE_RUN_ID="r", TORCHRUN=str(program))
    wait_until(lambda: len(stubs.events("ready")) == 2 or process.poll() is not None, "workers", seconds=60)
    process.send_signal(signal.SIGUSR1)
    code, output = _finish(process, seconds=60)
    assert code == 75, output
    assert len(stubs.events("saved-on-SIGUSR1")) == 2, output
    assert stubs.living_workers() == []
