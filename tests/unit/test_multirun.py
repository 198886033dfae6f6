"""Sweeps, with a stub in the place of torchrun that notes how it was called."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from trainer.compose import CONFIG_DIR, CommandLine, config_from_command_line
from trainer.multirun import expand_grid, multirun, plan_jobs, torchrun_command

# Writes its arguments to calls.jsonl and ends as the job's learning rate says.
STUB = """
import json, os, signal, sys, time
from pathlib import Path
here = Path(__file__).parent
words = dict(word.split("=", 1) for word in sys.argv[1:] if "=" in word)
with open(here / "calls.jsonl", "a") as file:
    file.write(json.dumps(sys.argv[1:]) + "\\n")
folder = Path(words["run.root"]) / words["run.id"]
folder.mkdir(parents=True, exist_ok=True)
def status(state, code):
    text = json.dumps({"state": state, "exit_code": code, "step": 1, "attempt": 1})
    (folder / "status.json").write_text(text)
lr = words.get("optim.lr")
if lr == "0.2":
    status("failed", 1); sys.exit(1)
if lr == "0.3":
    Path(os.environ["SLUICEGATE_EXIT_FILE"]).write_text("2\\nno such word\\n"); sys.exit(1)
if lr == "0.7":
    # An evaluation that was stopped.
    Path(os.environ["SLUICEGATE_EXIT_FILE"]).write_text("75\\nstopped\\n"); sys.exit(0)
if lr == "0.4":
    status("preempted", 0); sys.exit(0)
if lr == "0.5":
    # A worker that saves on a signal, below a torchrun that would die of it.
    worker = os.fork()
    if worker == 0:
        signal.signal(signal.SIGUSR1, lambda *_: (status("preempted", 0), os._exit(0)))
        (here / "ready").touch()
        time.sleep(60)
    os.waitpid(worker, 0); sys.exit(0)
status("finished", 0)
"""


@pytest.fixture
def stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "torchrun.py").write_text(textwrap.dedent(STUB))
    monkeypatch.setenv("TORCHRUN", f"{sys.executable} {tmp_path / 'torchrun.py'}")
    monkeypatch.setenv("SLUICEGATE_NPROC", "2")
    monkeypatch.setattr("trainer.multirun.POLL_SECONDS", 0.01)
    return tmp_path


def line(folder: Path, *words: str) -> CommandLine:
    return CommandLine([*words, "experiment=demo", f"run.root={folder}/runs"], multirun=True)


def calls(folder: Path) -> list[list[str]]:
    file = folder / "calls.jsonl"
    return [json.loads(text) for text in file.read_text().splitlines()] if file.exists() else []


def test_grid_is_the_product_in_hydras_syntax() -> None:
    grid = expand_grid(["optim.lr=1e-3,1e-4", "train.steps=range(1,3)", "experiment=demo", "optim.betas=[0.9,0.95]"])
    lrs_and_steps = [words[:2] for words in grid]
    assert lrs_and_steps == [
        ["optim.lr=0.001", "train.steps=1"],
        ["optim.lr=0.001", "train.steps=2"],
        ["optim.lr=0.0001", "train.steps=1"],
        ["optim.lr=0.0001", "train.steps=2"],
    ]
    assert all(words[2:] == ["experiment=demo", "optim.betas=[0.9,0.95]"] for words in grid)
    assert expand_grid(["optim=glob(*)"]) == [["optim=adamw"], ["optim=sgd"]]
    with pytest.raises(ValueError, match="not an interval"):
        expand_grid(["optim.lr=interval(0,1)"])
    with pytest.raises(ValueError, match="no viable alternative"):
        expand_grid(["optim.lr=[1"])


def test_one_torchrun_per_job_each_with_its_own_id(stub: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert multirun(line(stub, "optim.lr=0.1,0.6", "run.id=sweep")) == 0
    first, second = calls(stub)
    assert first[:5] == ["--standalone", "--nproc-per-node", "2", "-m", "trainer.train"]
    assert {"optim.lr=0.1", "experiment=demo"} <= set(first)
    assert (first[-1], second[-1]) == ("run.id=sweep-0", "run.id=sweep-1")
    assert "optim.lr=0.6" in second
    printed = capsys.readouterr().out
    assert "sweep-0: finished" in printed and "sweep-1: finished" in printed


@pytest.mark.parametrize(
    ("rates", "code", "words"),
    [
        ("0.2,0.1", 1, ["failed", "finished"]),
        ("0.3,0.1", 2, ["refused: a mistake in config or data", "finished"]),
        ("0.4,0.1", 75, ["preempted", "finished"]),
        ("0.7,0.1", 75, ["preempted", "finished"]),
        ("0.3,0.2,0.4,0.1", 1, ["refused: a mistake in config or data", "failed", "preempted", "finished"]),
    ],
)
def test_failures_are_reported_and_the_rest_still_runs(
    stub: Path, capsys: pytest.CaptureFixture[str], rates: str, code: int, words: list[str]
) -> None:
    assert multirun(line(stub, f"optim.lr={rates}", "run.id=s")) == code
    summary = capsys.readouterr().out.splitlines()[-len(words) :]
    assert [text.split(" (")[0] for text in summary] == [f"s-{i}: {word}" for i, word in enumerate(words)]
    assert len(calls(stub)) == len(words)


def test_a_mistake_in_any_job_is_found_before_the_first_starts(stub: Path) -> None:
    with pytest.raises(ValueError, match=r"job 1 \(model\.moe\.top_k=9 .*: model\.moe\.top_k=9 exceeds"):
        multirun(line(stub, "model.moe.top_k=2,9"))
    assert not calls(stub)


def test_new_base_id_is_shared_by_the_jobs(stub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = plan_jobs(line(stub, "optim.lr=0.1,0.6"))
    bases = {job.run_id.rpartition("-")[0] for job in jobs}
    assert len(bases) == 1 and len({job.run_id for job in jobs}) == 2
    monkeypatch.setenv("SLUICEGATE_RUN_ID", "base")
    assert [job.run_id for job in plan_jobs(line(stub, "optim.lr=0.1,0.6"))] == ["base-0", "base-1"]
    # A swept id stays unique too.
    assert [job.run_id for job in plan_jobs(line(stub, "run.id=a,b"))] == ["a-0", "b-1"]


def test_a_job_that_does_not_fit_the_processes_is_found_before_the_first(stub: Path) -> None:
    with pytest.raises(ValueError, match=r"job 1 .*micro_batch_size=4 x 2 data-parallel ranks; nearest legal: 8"):
        plan_jobs(line(stub, "train.global_batch_size=8,9"))


def test_refused_under_torchrun(
    stub: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    with pytest.raises(SystemExit) as ended:
        config_from_command_line(["--multirun", "optim.lr=0.1,0.2"])
    assert ended.value.code == 2
    assert "--multirun cannot run under torchrun; start it as 'python -m trainer.train" in capsys.readouterr().err
    assert not calls(stub)


def test_number_of_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHRUN", raising=False)
    monkeypatch.setenv("SLUICEGATE_NPROC", "4")
    command = torchrun_command(["a=1"], "/configs")
    assert command == [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"),
        *("-m", "trainer.train", "--config-dir", "/configs", "a=1"),
    ]
    monkeypatch.setenv("SLUICEGATE_NPROC", "all")
    with pytest.raises(ValueError, match="SLUICEGATE_NPROC=all"):
        torchrun_command([], None)


def test_a_signal_reaches_the_worker_and_ends_the_sweep(stub: Path) -> None:
    # optim.lr=0.5 waits for SIGUSR1; without it the job would take a minute.
    code = "import sys; from trainer.compose import config_from_command_line as c; c(sys.argv[1:])"
    words = ["--multirun", "optim.lr=0.5,0.1", "experiment=demo", "run.id=s", f"run.root={stub}/runs"]
    environment = {**os.environ, "PYTHONPATH": str(CONFIG_DIR.parent)}
    sweep = subprocess.Popen([sys.executable, "-c", code, *words], env=environment, stdout=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not (stub / "ready").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    sweep.send_signal(signal.SIGUSR1)
    printed, _ = sweep.communicate(timeout=30)
    assert sweep.returncode == 75
    assert "stopped by SIGUSR1" in printed
    assert printed.splitlines()[-2].startswith("s-0: preempted")
    assert printed.splitlines()[-1].startswith("s-1: not started")
    assert len(calls(stub)) == 1
