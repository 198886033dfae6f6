"""Checkpoints of one process: completeness, kills at every step of a save, damage, retention, strictness."""

import itertools
import json
import os
import random
import shutil
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy
import pytest
import torch

from tests.unit.checkpoint_toys import Toy, assert_same, checkpointer, fresh, state, train_step, trained
from trainer import checkpoint_files as files
from trainer.checkpoint import Checkpointer, load_weights, open_checkpoint
from trainer.checkpoint_files import IncompleteCheckpointError
from trainer.resume import resolve_resume


@pytest.mark.parametrize("asynchronous", [False, True])
def test_everything_comes_back_bit_for_bit(tmp_path: Path, asynchronous: bool) -> None:
    model, optimizer = trained()
    saver = checkpointer(tmp_path, asynchronous=asynchronous)
    extra = {"tokens": 12, "data": {"next_sample": 7}, "lr": 0.1 + 0.2, "wandb_run_id": None}
    saver.save(2, model, optimizer, extra)
    saved = state(model, optimizer)
    rng = [torch.rand(3).tolist(), random.random(), numpy.random.rand(2).tolist()]
    train_step(model, optimizer)
    after = state(model, optimizer)
    saver.close()

    new_model, new_optimizer = fresh()
    loader = checkpointer(tmp_path)
    path = loader.latest()
    assert path == tmp_path / "step_00000002"
    assert loader.load(path, new_model, new_optimizer) == extra
    assert loader.last_step == 2
    assert_same(state(new_model, new_optimizer), saved)
    assert saved["expert_bias"].eq(0.5).all(), "the balancing bias is saved as it is, not as it began"
    assert "unused.exp_avg" not in state(new_model, new_optimizer)
    assert [torch.rand(3).tolist(), random.random(), numpy.random.rand(2).tolist()] == rng

    # The step after the resume equals the step that was not interrupted.
    loader.load(path, new_model, new_optimizer)
    torch.rand(3)
    train_step(new_model, new_optimizer)
    assert_same(state(new_model, new_optimizer), after)


def test_a_background_save_is_not_touched_by_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = trained()
    saver = checkpointer(tmp_path, asynchronous=True)
    before = state(model, optimizer)
    trains = []
    write = Checkpointer._write_tensors

    def late(self: Checkpointer, *args: object) -> object:
        while not trains:
            time.sleep(0.01)
        return write(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(Checkpointer, "_write_tensors", late)
    saver.save(2, model, optimizer, {})
    train_step(model, optimizer)
    assert not (tmp_path / "latest").exists()
    trains.append(True)
    saver.wait()
    new_model, new_optimizer = fresh()
    saver.load(tmp_path, new_model, new_optimizer)
    assert_same(state(new_model, new_optimizer), before)


def die_at(action: int, folder: Path, work: Callable[[], None]) -> bool:
    """Run `work` in a copy of this process that is killed -9 before its `action`-th effect on disk. True if it died.

    Effects are calls that move, make or sync files and directories, and one in 100 writes into a file.
    """
    child = os.fork()
    if child == 0:
        count = [0]

        def counted(real: Callable, one_in: int = 1) -> Callable:
            calls = itertools.count()

            def call(*args: object, **kwargs: object) -> object:
                count[0] += next(calls) % one_in == 0
                if count[0] == action:
                    os.kill(os.getpid(), signal.SIGKILL)
                return real(*args, **kwargs)

            return call

        for name in ("fsync", "rename", "replace", "mkdir", "rmdir"):
            setattr(os, name, counted(getattr(os, name)))
        files._ChecksumStream.write = counted(files._ChecksumStream.write, one_in=100)
        try:
            work()
        except BaseException:
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return os.WIFSIGNALED(status)


@pytest.mark.parametrize("step", [2, 3])
def test_kill_at_any_moment_of_a_save_leaves_a_loadable_checkpoint(tmp_path: Path, step: int) -> None:
    """Step 3 is saved after step 2 (or step 2 is saved again), with keep_last=1, killed before each effect in turn."""
    model, optimizer = trained()
    old = state(model, optimizer)
    checkpointer(tmp_path / "origin").save(2, model, optimizer, {"save": "old"})
    train_step(model, optimizer)
    new = state(model, optimizer)
    outcomes = set()
    action = 0
    died = True
    while died:
        action += 1
        folder = tmp_path / f"kill{action}"
        shutil.copytree(tmp_path / "origin", folder)
        died = die_at(
            action, folder, lambda f=folder: checkpointer(f, keep_last=1).save(step, model, optimizer, {"save": "new"})
        )
        pointed = folder / (folder / "latest").read_text().strip()
        if step == 3 or pointed.exists():
            files.check_sizes(pointed)  # `latest` never names an unfinished save
        loader = checkpointer(folder, keep_last=1)
        for _ in range(2):
            path = loader.latest()
            assert path is not None, f"nothing to load after a kill at effect {action}"
            found_model, found_optimizer = fresh()
            extra = loader.load(path, found_model, found_optimizer)
            assert_same(state(found_model, found_optimizer), {"old": old, "new": new}[extra["save"]])
            outcomes.add(extra["save"])
            # Once more without `latest`: no directory that looks complete is unfinished.
            (folder / "latest").unlink(missing_ok=True)
        # The next save works, and leaves exactly one checkpoint and no debris.
        loader.save(4, model, optimizer, {})
        assert sorted(p.name for p in folder.iterdir()) == ["latest", "step_00000004"]
    assert outcomes == {"old", "new"} and action > 20


def test_latest_that_is_broken_or_missing_falls_back_and_says_so(tmp_path: Path) -> None:
    model, optimizer = trained()
    said: list[str] = []
    saver = checkpointer(tmp_path, said)
    for step in (1, 2, 3):
        saver.save(step, model, optimizer, {})
    assert not said
    shard = next((tmp_path / "step_00000003").glob("*.distcp"))
    shard.write_bytes(shard.read_bytes()[:-1])
    assert saver.latest() == tmp_path / "step_00000002"
    assert any("step_00000003" in line and "bytes instead of" in line for line in said)
    (tmp_path / "step_00000002" / "manifest.json").unlink()
    assert saver.latest() == tmp_path / "step_00000001"
    for junk in (b"", b"\xff\xfe", b"step_00000009\n", b"../elsewhere"):
        (tmp_path / "latest").write_bytes(junk)
        assert saver.latest() == tmp_path / "step_00000001"
    shutil.rmtree(tmp_path / "step_00000001")
    assert saver.latest() is None


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", "extra.json"])
def test_one_flipped_bit_is_noticed(tmp_path: Path, name: str) -> None:
    model, optimizer = trained()
    saver = checkpointer(tmp_path)
    saver.save(1, model, optimizer, {"a": 1})
    path = tmp_path / "step_00000001" / name
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(IncompleteCheckpointError, match=f"{name} is damaged.*checkpoint.resume=PATH"):
        saver.load(tmp_path, *fresh())
    with pytest.raises(IncompleteCheckpointError, match="damaged"):
        load_weights(tmp_path, Toy())


def test_damaged_manifest_is_no_checkpoint(tmp_path: Path) -> None:
    model, optimizer = trained()
    checkpointer(tmp_path).save(1, model, optimizer, {})
    path = tmp_path / "step_00000001" / "manifest.json"
    good = path.read_text()
    outer = json.loads(good)
    outer["manifest"] = outer["manifest"].replace('"step": 1', '"step": 2')
    for bad in (good[: len(good) // 2], "[]", "{}", json.dumps(outer)):
        path.write_text(bad)
        with pytest.raises(IncompleteCheckpointError):
            open_checkpoint(tmp_path / "step_00000001")
        assert files.latest_checkpoint(tmp_path, lambda _: None) is None


def test_a_run_whose_checkpoints_are_all_broken_does_not_begin_anew(tmp_path: Path) -> None:
    model, optimizer = trained()
    assert resolve_resume("auto", tmp_path) is None
    checkpointer(tmp_path).save(1, model, optimizer, {})
    (tmp_path / "step_00000001" / "extra.json").write_text("")
    with pytest.raises(IncompleteCheckpointError, match="has step_00000001, and none can be used"):
        resolve_resume("auto", tmp_path)
    assert resolve_resume("never", tmp_path) is None
    # What a killed save left is no checkpoint.
    (tmp_path / "step_00000001").rename(tmp_path / "step_00000001.partial.0123abcd")
    assert resolve_resume("auto", tmp_path) is None


def test_retention_keeps_the_newest_and_what_latest_names(tmp_path: Path) -> None:
    model, optimizer = trained()
    saver = checkpointer(tmp_path, keep_last=2)
    for step in (10, 20, 30):
        saver.save(step, model, optimizer, {})
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step_00000020", "step_00000030"]
    # A run that went back: newest means saved last, not the highest step.
    saver.save(15, model, optimizer, {})
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step_00000015", "step_00000030"]
    (tmp_path / "latest").write_text("step_00000030\n")
    files.retain(tmp_path, 1, [], lambda _: None)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step_00000015", "step_00000030"]
    (tmp_path / "latest").write_text("step_00000015\n")
    files.retain(tmp_path, 1, [tmp_path / "step_00000030"], lambda _: None)
    assert (tmp_path / "step_00000030").exists()
    files.retain(tmp_path, 0, [], lambda _: None)
    assert (tmp_path / "step_00000030").exists()


@pytest.mark.parametrize("asynchronous", [False, True])
def test_full_disk_is_told_and_harms_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asynchronous: bool
) -> None:
    model, optimizer = trained()
    saver = checkpointer(tmp_path, asynchronous=asynchronous)
    saver.save(1, model, optimizer, {})
    saver.wait()

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files._ChecksumStream, "write", full)
    with pytest.raises(RuntimeError, match=r"checkpoint of step 2 was not saved in .*No space left.*step 1"):
        saver.save(2, model, optimizer, {})
        # A background save tells at the next occasion.
        saver.save(3, model, optimizer, {})
    monkeypatch.undo()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step_00000001"]
    saver.load(tmp_path, *fresh())
    saver.save(4, model, optimizer, {})
    saver.close()
    assert open_checkpoint(tmp_path).step == 4


def test_a_file_system_without_room_is_told_whatever_the_writer_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's writer calls it an enforce that failed."""

    def confused(*_: object) -> int:
        raise RuntimeError("unexpected pos 704 vs 598")

    monkeypatch.setattr(files._ChecksumStream, "write", confused)
    saver = checkpointer(tmp_path, asynchronous=False)
    with pytest.raises(RuntimeError, match="unexpected pos") as plain:
        saver.save(1, *trained(), {})
    assert "full" not in str(plain.value), "there is room"
    usage = shutil.disk_usage(tmp_path)._replace(free=5)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(RuntimeError, match=r"system is full \(0 MiB are left, .*checkpoint.keep_last.* same run.id"):
        saver.save(1, *trained(), {})


def test_a_background_save_that_failed_is_known_before_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = trained()
    saver = checkpointer(tmp_path, asynchronous=True)
    fails = threading.Event()

    def full(*_: object) -> int:
        fails.wait(20)
        raise OSError(28, "No space left on device")

    assert not saver.failed
    monkeypatch.setattr(files._ChecksumStream, "write", full)
    saver.save(1, model, optimizer, {})
    assert not saver.failed, "it is on its way"
    fails.set()
    deadline = time.monotonic() + 20
    while not saver.failed and time.monotonic() < deadline:
        time.sleep(0.01)
    assert saver.failed
    with pytest.raises(RuntimeError, match="step 1 was not saved"):
        saver.wait()
    assert not saver.failed, "it has been told"
    monkeypatch.undo()
    saver.save(2, model, optimizer, {})
    saver.wait()
    assert not saver.failed
    saver.close()


def test_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    model, optimizer = trained()
    with pytest.raises(RuntimeError, match="was not saved"):
        checkpointer(tmp_path / "file" / "checkpoints").save(1, model, optimizer, {})


def test_file_system_that_is_not_shared_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files.time, "sleep", lambda _: None)
    writer = files.CheckpointWriter(tmp_path / "made elsewhere")
    with pytest.raises(FileNotFoundError, match="all nodes share"):
        writer.prepare_local_plan(None)  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())
