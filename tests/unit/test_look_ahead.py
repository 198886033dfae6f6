"""--check: what can be found wrong without torch, for so many processes, and nothing is written."""

from pathlib import Path

import pytest

from trainer.compose import compose, config_to_yaml
from trainer.look_ahead import look_ahead
from trainer.run import write_status
from trainer.train import main


def check(*words: str, processes: str = "2") -> str:
    given = ["experiment=demo", *words]
    return look_ahead(compose(given), given, processes, folder_too=True)


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
