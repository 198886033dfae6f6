"""--check: what can be found wrong before a run starts, for so many processes, and nothing is written."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from trainer.compose import CONFIG_DIR, compose, config_to_yaml
from trainer.look_ahead import look_ahead
from trainer.run import write_status
from trainer.train import main


def check(*words: str, processes: str = "2") -> str:
    given = ["experiment=demo", *words]
    return look_ahead(compose(given), given, processes, check=True)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "SLUICEGATE_RUN_ID", "SLURM_JOB_ID", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def make_run(folder: Path, *words: str, state: str = "preempted") -> None:
    path = folder / "runs" / "q"
    (path / "checkpoints" / "step_00000001").mkdir(parents=True)
    (path / "config.yaml").write_text(config_to_yaml(compose(["experiment=demo", "run.id=q", *words])))
    write_status(path, state, attempt=1, step=1)


def test_the_flag_ends_where_a_run_would_start(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    told = "no mistake found in config and files, for 2 processes\n"
    for rank, words in (("0", ["parallel.ep=2"]), ("0", ["--cfg=job"]), ("1", [])):
        monkeypatch.setenv("RANK", rank)
        with pytest.raises(SystemExit) as ended:
            main(["--check", "experiment=demo", *words])
        assert ended.value.code == 0
        assert capsys.readouterr().out == (told if rank == "0" else "")
    monkeypatch.setenv("RANK", "0")
    for words, told in ((["parallel.ep=3"], "parallel.ep=3"), (["-m", "optim.lr=1,2"], "leave --multirun out")):
        with pytest.raises(SystemExit) as ended:
            main(["--check", "experiment=demo", *words])
        assert ended.value.code == 2 and told in capsys.readouterr().err
    assert not list(folder.iterdir())


@pytest.mark.parametrize("given", ["abc", "", "1.5", "0", "-1"])
def test_a_number_of_processes_that_is_none(given: str) -> None:
    with pytest.raises(ValueError, match=f"WORLD_SIZE={given} must be the number of processes"):
        check(processes=given)


def test_a_run_that_goes_on_must_agree_with_its_past(folder: Path) -> None:
    make_run(folder)
    before = sorted(folder.rglob("*"))
    assert check("run.id=q") == "no mistake found in config and files, for 2 processes"
    with pytest.raises(ValueError, match=r"optim\.lr: .* -> 0\.5"):
        check("run.id=q", "optim.lr=0.5")
    with pytest.raises(ValueError, match=r"resume=never starts anew, but .* already holds step_00000001"):
        check("run.id=q", "checkpoint.resume=never")
    check("run.id=q", "optim.lr=0.5", "run.allow_changes=[optim.lr]")
    assert sorted(folder.rglob("*")) == before


def test_a_finished_run_is_no_mistake(folder: Path) -> None:
    make_run(folder, state="finished")
    assert check("run.id=q", "checkpoint.resume=never")


def test_an_evaluation_of_no_run_is_one(folder: Path) -> None:
    make_run(folder)
    assert check("run.id=q", "train.eval_only=true")
    with pytest.raises(ValueError, match=r"there is no run runs/qq: did you mean run\.id=q\?"):
        check("run.id=qq", "train.eval_only=true")


@pytest.mark.parametrize(
    ("word", "instead"),
    [
        ("comms.backend=symm_mem", "comms.backend=collective, or auto"),
        ("comms.backend=nvshmem", "comms.backend=collective, or auto"),
        ("model.moe.backend=fused", "model.moe.backend=grouped_mm, or auto"),
        ("model.attention.backend=varlen", "model.attention.backend=sdpa, or auto"),
    ],
)
def test_what_needs_gpus_is_refused_without_them(word: str, instead: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ValueError, match=f"^{word} needs GPUs, and this run is on cpu; use {instead}$"):
        check(word, "precision=bf16")
    # A run that starts finds out by itself, and sooner than torch could be imported here.
    look_ahead(compose(["experiment=demo", "precision=bf16", word]), [], "2", check=False)
    # It is for another machine.
    assert check(word, "precision=bf16", "cluster=h200")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert check(word, "precision=bf16")


def test_rows_of_one_rank_need_no_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert check("comms.backend=symm_mem", processes="1")


def test_patterns_of_linears_are_tried_on_the_model() -> None:
    words = ["precision=mxfp8", "precision.linears=[*.attention.wq]"]
    assert check(*words)
    with pytest.raises(ValueError, match=r"precision\.linears: 'nothing' matches no dense linear of the model"):
        check(*words[:1], "precision.linears=[nothing]")
    with pytest.raises(ValueError, match=r"precision\.linears_exclude: 'nothing' matches no dense linear"):
        check(*words, "precision.linears_exclude=[nothing]")


def test_torch_is_imported_for_nothing_else(folder: Path) -> None:
    code = (
        "import sys; from trainer.compose import compose; from trainer.look_ahead import look_ahead\n"
        "for words in ([], ['precision=mxfp8'], ['comms.backend=symm_mem', 'cluster=h200']):\n"
        "    look_ahead(compose(['experiment=demo', *words]), words, '2', check=True)\n"
        "print('torch' in sys.modules)"
    )
    environment = {**os.environ, "PYTHONPATH": str(CONFIG_DIR.parent)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.stdout == "False\n", done.stderr
