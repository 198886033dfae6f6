"""The run folder: its id, what a restart may change, what a finished run does, and that no write can be half done."""

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from trainer.changes import changed_settings, check_architecture
from trainer.compose import load_config
from trainer.config import Config, SourceConfig
from trainer.run import (
    RunFolder,
    new_run_id,
    prepare_run_folder,
    read_status,
    replace_file,
    resolve_run_id,
    write_status,
)
from trainer.validate import check_run_id
from trainer.way_back import NOTE, WentBack


@pytest.fixture
def config(tmp_path: Path) -> Config:
    config = Config()
    config.run.root, config.run.id = str(tmp_path / "runs"), "r1"
    config.data.cache_dir = "cache"
    config.data.train = {"text": SourceConfig(paths=["a.txt"])}
    return config


def start(config: Config, **settings: Any) -> RunFolder:
    """One attempt, with dotted settings (`optim__lr`) changed."""
    config = dataclasses.replace(config)
    for key, value in settings.items():
        section, name = key.split("__")
        setattr(config, section, dataclasses.replace(getattr(config, section), **{name: value}))
    return prepare_run_folder(config, ["experiment=demo", "optim.lr=1"], world_size=2)


def test_run_id_precedence() -> None:
    config = Config()
    environ = {"SLUICEGATE_RUN_ID": "ours", "SLURM_JOB_ID": "42", "TORCHELASTIC_RUN_ID": "elastic"}
    assert (
        resolve_run_id(dataclasses.replace(config, run=dataclasses.replace(config.run, id="mine")), environ) == "mine"
    )
    assert resolve_run_id(config, environ) == "ours"
    del environ["SLUICEGATE_RUN_ID"]
    assert resolve_run_id(config, environ) == "42"
    del environ["SLURM_JOB_ID"]
    assert resolve_run_id(config, environ) == "elastic"
    assert resolve_run_id(config, {"TORCHELASTIC_RUN_ID": "none"}) is None
    assert resolve_run_id(config, {"SLURM_JOB_ID": ""}) is None
    with pytest.raises(ValueError, match=r"try run\.id=a-b"):
        resolve_run_id(config, {"SLUICEGATE_RUN_ID": "a b"})


def test_new_ids_are_legal_and_distinct() -> None:
    ids = {new_run_id() for _ in range(50)}
    assert len(ids) == 50
    assert all(check_run_id(run_id) == run_id for run_id in ids)


def test_first_start_writes_the_folder(config: Config) -> None:
    folder = start(config)
    assert (folder.attempt, folder.finished, folder.notice) == (1, False, "")
    assert load_config(folder.path / "config.yaml") == config
    assert yaml.safe_load((folder.path / "overrides.yaml").read_text()) == ["experiment=demo", "optim.lr=1"]
    status = read_status(folder.path)
    assert status is not None and (status["state"], status["attempt"]) == ("running", 1)
    (attempt,) = json.loads((folder.path / "environment.json").read_text())["attempts"]
    assert attempt["world_size"] == 2
    assert attempt["versions"]["torch"] and attempt["host"] and "commit" in attempt
    assert sorted(p.name for p in folder.path.iterdir()) == [
        "config.yaml",
        "environment.json",
        "overrides.yaml",
        "status.json",
    ]


def test_secrets_of_the_environment_are_not_recorded(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "hunter2")
    folder = start(config)
    assert all("hunter2" not in file.read_text() for file in folder.path.iterdir())


@pytest.mark.parametrize("state", ["finished", "preempted", "failed"])
def test_an_attempt_that_could_not_begin_leaves_the_run_as_it_was(config: Config, state: str) -> None:
    path = start(config).path
    write_status(path, state, attempt=1, step=7, exit_code=1)
    before = {file.name: file.read_bytes() for file in path.iterdir()}
    config.run.allow_changes = ["train.steps"]
    folder = start(config, train__steps=2000)
    assert (folder.attempt, folder.finished, folder.step) == (2, False, 7)
    assert folder.take_back()
    assert {file.name: file.read_bytes() for file in path.iterdir()} == before


def test_no_status_is_put_back_that_says_a_run_is_running_or_where_it_never_began(config: Config) -> None:
    path = start(config).path
    write_status(path, "running", attempt=1, step=7)
    config_before = (path / "config.yaml").read_text()
    assert not start(config, train__log_every=3).take_back()
    assert (path / "config.yaml").read_text() == config_before
    write_status(path, "failed", attempt=2, exit_code=2)
    assert not start(config, model__dim=128).take_back()
    assert load_config(path / "config.yaml").model.dim == 128


def test_attempt_grows_with_every_restart(config: Config) -> None:
    assert [start(config).attempt for _ in range(3)] == [1, 2, 3]
    path = start(config).path
    write_status(path, "preempted", attempt=4, step=17, exit_code=0)
    folder = start(config)
    assert folder.attempt == 5
    status = read_status(path)
    assert status is not None and (status["state"], status["step"]) == ("running", 17)
    assert len(json.loads((path / "environment.json").read_text())["attempts"]) == 5


@pytest.mark.parametrize(
    ("setting", "value", "line"),
    [
        ("optim__lr", 0.5, "  optim.lr: 0.0003 -> 0.5"),
        ("model__dim", 128, "  model.dim: 256 -> 128"),
        ("data__train", {"more": SourceConfig(paths=["b"])}, '  data.train.more.paths: null -> ["b"]'),
        ("train__seq_len", 64, "  train.seq_len: 1024 -> 64"),
        ("train__global_batch_size", 16, "  train.global_batch_size: 8 -> 16"),
        ("train__steps", 5, "  train.steps: 1000 -> 5"),
        ("run__seed", 1, "  run.seed: 0 -> 1"),
    ],
)
def test_other_model_data_or_optimizer_is_refused_with_a_diff(
    config: Config, setting: str, value: Any, line: str
) -> None:
    path = start(config).path
    before = {file.name: file.read_bytes() for file in path.iterdir()}
    with pytest.raises(ValueError) as raised:
        start(config, **{setting: value})
    lines = str(raised.value).splitlines()
    assert line in lines
    assert "run r1 was started with other settings" in lines[0]
    assert "run.allow_changes=[" in lines[-1]
    assert {file.name: file.read_bytes() for file in path.iterdir()} == before


@pytest.mark.parametrize(
    ("setting", "value", "moved"),
    [
        ("data__train", {"text": SourceConfig(paths=["b"])}, True),
        ("data__document_mask", False, False),
        ("data__tokenizer", "other", True),
        ("data__train", {"text": SourceConfig(paths=["b"], weight=2.0)}, False),
        ("train__seq_len", 64, False),
        ("run__seed", 1, False),
    ],
)
def test_other_samples_need_a_new_run_once_there_is_a_checkpoint(
    config: Config, setting: str, value: Any, moved: bool
) -> None:
    """Allowed, the loader would still refuse them; but files that were moved are the same samples."""
    path = start(config).path
    with pytest.raises(ValueError, match=r"run\.allow_changes=\["):
        start(config, **{setting: value})
    (path / "checkpoints" / "step_00000001").mkdir(parents=True)
    with pytest.raises(ValueError) as raised:
        start(config, **{setting: value})
    advice = str(raised.value).splitlines()[-1]
    assert f"a new run with another run.id from the weights of this one, checkpoint.init_from={path}:" in advice
    assert ("files were only moved: 'run.allow_changes=[data." in advice) == moved == ("allow_changes" in advice)


def test_held_out_sets_may_be_changed_beside_a_checkpoint(config: Config) -> None:
    path = start(config).path
    (path / "checkpoints" / "step_00000001").mkdir(parents=True)
    with pytest.raises(ValueError, match=r"accept the changes with 'run\.allow_changes=\[data\.eval_samples\]'"):
        start(config, data__eval_samples=3)


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("parallel__ep", 2),
        ("train__micro_batch_size", 2),
        ("logging__console", "plain"),
        ("checkpoint__every", 7),
        ("data__prefetch", 5),
        ("data__cache_dir", "/elsewhere"),
        ("model__name", "renamed"),
    ],
)
def test_layout_and_logging_may_change(config: Config, setting: str, value: Any) -> None:
    path = start(config).path
    folder = start(config, **{setting: value})
    assert folder.attempt == 2
    assert setting.replace("__", ".") in folder.notice
    section, name = setting.split("__")
    assert getattr(getattr(load_config(path / "config.yaml"), section), name) == value


def test_a_named_change_is_accepted_and_becomes_the_stored_one(config: Config) -> None:
    start(config)
    config.run.allow_changes = ["optim"]
    assert "optim.lr: 0.0003 -> 0.5" in start(config, optim__lr=0.5).notice
    with pytest.raises(ValueError, match=r"model\.dim"):
        start(config, optim__lr=0.5, model__dim=128)
    config.run.allow_changes = []
    assert start(config, optim__lr=0.5).attempt == 3


def test_finished_run_says_so_and_stays_as_it_is(config: Config) -> None:
    path = start(config).path
    write_status(path, "finished", attempt=1, step=1000, exit_code=0)
    before = {file.name: file.read_bytes() for file in path.iterdir()}
    folder = start(config)
    assert folder.finished and folder.attempt == 1
    assert "run r1 is finished (step 1000" in folder.notice
    assert {file.name: file.read_bytes() for file in path.iterdir()} == before


def test_finished_run_goes_back_once(config: Config) -> None:
    path = start(config).path
    step = path / "checkpoints" / "step_00000010"
    step.mkdir(parents=True)
    write_status(path, "finished", attempt=1, step=1000, exit_code=0)
    folder = start(config, checkpoint__resume=str(step))
    assert not folder.finished and folder.attempt == 2
    (step.parent / NOTE).write_bytes(WentBack(step.name, list(folder.overrides), {}).to_json())
    write_status(path, "finished", attempt=2, step=1000, exit_code=0)
    assert start(config, checkpoint__resume=str(step)).finished, "the same command, which has been there"
    assert start(config, checkpoint__resume=str(path)).finished
    assert start(config).finished


def test_finished_run_goes_on_only_when_told_explicitly(config: Config) -> None:
    path = start(config).path
    write_status(path, "finished", attempt=1, step=1000, exit_code=0)
    with pytest.raises(ValueError, match=r"train\.steps: 1000 -> 2000"):
        start(config, train__steps=2000)
    config.run.allow_changes = ["train.steps"]
    folder = start(config, train__steps=2000)
    assert not folder.finished and folder.attempt == 2


def test_never_resuming_does_not_mix_two_runs(config: Config) -> None:
    path = start(config).path
    assert start(config, checkpoint__resume="never").attempt == 2
    (path / "checkpoints" / "step_00000100").mkdir(parents=True)
    assert start(config, checkpoint__resume="never").attempt == 3, "saved by this same command: a job requeued"
    for text in ("- experiment=demo\n- checkpoint.every=3\n", "", "{", "[a"):
        (path / "overrides.yaml").write_text(text)
        with pytest.raises(ValueError, match=r"already holds step_00000100, and the last command .* another one"):
            start(config, checkpoint__resume="never")
    (path / "overrides.yaml").unlink()
    with pytest.raises(ValueError, match=r"choose another run\.id"):
        start(config, checkpoint__resume="never")
    assert start(config).attempt == 4


def test_evaluation_alone_leaves_the_run_as_it_is(config: Config) -> None:
    path = start(config).path
    write_status(path, "finished", attempt=1, step=1000, exit_code=0)
    before = {file.name: file.read_bytes() for file in path.iterdir()}
    other_data = {"heldout": SourceConfig(paths=["c"])}
    folder = start(config, train__eval_only=True, data__eval=other_data)
    assert not folder.finished
    assert folder.attempt == 1, "the next training is attempt 2, and this is not"
    assert {file.name: file.read_bytes() for file in path.iterdir()} == before
    with pytest.raises(ValueError, match=r"model\.dim: 256 -> 128"):
        start(config, train__eval_only=True, model__dim=128)


def test_evaluation_of_a_run_that_is_not_there_leaves_no_folder(config: Config, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"there is no run .*r1: name a run"):
        start(config, train__eval_only=True)
    assert not (tmp_path / "runs").exists()
    start(config, run__id="r-long")
    with pytest.raises(ValueError, match=r"did you mean run\.id=r-long\?"):
        start(config, train__eval_only=True, run__id="r-lnog")
    assert [folder.name for folder in (tmp_path / "runs").iterdir()] == ["r-long"]
    start(config, run__id="20260102-030405-abcdef")
    with pytest.raises(ValueError, match=r"name a run that has a checkpoint \(run\.id\)"):
        start(config, train__eval_only=True, run__id="20260102-030406-abcdef")


@pytest.mark.parametrize("source", ["init_from", "resume"])
def test_weights_from_elsewhere_are_evaluated_in_a_new_run(config: Config, source: str) -> None:
    given: Any = {f"checkpoint__{source}": "elsewhere"}
    folder = start(config, train__eval_only=True, **given)
    assert not folder.finished
    # It is no run that goes on, and holds none to its settings.
    assert read_status(folder.path) is None and folder.attempt == 0
    assert start(config, model__dim=128).attempt == 1


def test_changed_settings_finds_entries_that_came_or_went(config: Config) -> None:
    other = dataclasses.replace(config, data=dataclasses.replace(config.data, train={}))
    keys = {change.key for change in changed_settings(config, other)}
    assert {"data.train.text.kind", "data.train.text.paths"} <= keys
    assert {c.new for c in changed_settings(config, other)} == {None}
    assert changed_settings(config, config) == []


def other_model(config: Config, **settings: Any) -> Config:
    """The same run's config with other settings of the model, as another run."""
    model = dataclasses.replace(config.model, **settings)
    return dataclasses.replace(config, model=model, run=dataclasses.replace(config.run, id="r2"))


def test_a_checkpoint_of_another_architecture_with_equal_shapes_is_refused(config: Config) -> None:
    step = start(config).path / "checkpoints" / "step_00000010"
    assert check_architecture(other_model(config), step, refuse=True) == ""
    changed = other_model(config, rope=dataclasses.replace(config.model.rope, theta=77.0))
    with pytest.raises(ValueError) as raised:
        check_architecture(changed, step, refuse=True)
    first, second, last = str(raised.value).splitlines()
    assert str(step) in first and "config.yaml" in first
    assert second == "  model.rope.theta: 10000.0 -> 77.0"
    assert "run.allow_changes=[model.rope.theta]" in last
    assert second in check_architecture(changed, step, refuse=False).splitlines()
    changed.run.allow_changes = ["model.rope"]
    assert second in check_architecture(changed, step, refuse=True).splitlines(), "accepted, and still told"


def test_what_is_no_architecture_may_differ_from_the_checkpoints_run(config: Config) -> None:
    step = start(config).path / "checkpoints" / "step_00000010"
    changed = other_model(config, name="renamed", moe=dataclasses.replace(config.model.moe, backend="reference"))
    changed.optim = dataclasses.replace(changed.optim, lr=0.5)
    assert check_architecture(changed, step, refuse=True) == ""


def test_a_checkpoint_outside_a_run_cannot_be_compared_and_that_is_told(config: Config, tmp_path: Path) -> None:
    path = start(config).path
    for step in (tmp_path / "kept" / "checkpoints" / "step_00000010", path / "elsewhere" / "step_00000010"):
        assert "cannot be checked" in check_architecture(config, step, refuse=True)
    (path / "config.yaml").write_text("model: {dimm: 3}")
    with pytest.raises(ValueError, match=r"r1/config\.yaml: .*dimm"):
        check_architecture(config, path / "checkpoints" / "step_00000010", refuse=True)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"attempts": 3}', b"\xff\xfe"])
def test_damaged_list_of_environments_is_set_aside(config: Config, text: str | bytes) -> None:
    path = start(config).path
    damaged = text.encode() if isinstance(text, str) else text
    (path / "environment.json").write_bytes(damaged)
    folder = start(config)
    assert "environment.json was damaged" in folder.notice and "environment.damaged.json" in folder.notice
    assert [entry["attempt"] for entry in json.loads((path / "environment.json").read_text())["attempts"]] == [2]
    assert (path / "environment.damaged.json").read_bytes() == damaged
    assert start(config).notice == ""


def test_foreign_status_file_is_refused(tmp_path: Path) -> None:
    assert read_status(tmp_path) is None
    for text in ("", "{", "[]", '{"state": "happy", "attempt": 1, "step": 0}'):
        (tmp_path / "status.json").write_text(text)
        with pytest.raises(ValueError, match="is not a status file"):
            read_status(tmp_path)


def test_replacing_a_file_is_all_or_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "status.json"
    replace_file(file, "old")

    def crash(source: str, target: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", crash)
    with pytest.raises(KeyboardInterrupt):
        replace_file(file, "new, much longer")
    assert file.read_text() == "old"


def test_a_full_disk_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    replace_file(tmp_path / "status.json", "old")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        replace_file(tmp_path / "status.json", "new")
    assert [path.name for path in tmp_path.iterdir()] == ["status.json"]
    assert (tmp_path / "status.json").read_text() == "old"


@pytest.mark.parametrize("taken", ["runs", "runs/r1"])
def test_a_file_in_the_folders_place_is_named(config: Config, tmp_path: Path, taken: str) -> None:
    (tmp_path / taken).parent.mkdir(exist_ok=True)
    (tmp_path / taken).write_text("")
    with pytest.raises(ValueError, match=r"runs/r1 cannot be made .*; choose another run\.root or run\.id"):
        start(config)
