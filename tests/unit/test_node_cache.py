"""Built once by one of several processes; whole or absent, whatever happens meanwhile."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from trainer.node_cache import build_once, cache_key

ROOT = Path(__file__).parents[2]
# Waits until told to finish, so that the test and not the clock decides who meets whom.
WORKER = """
import os, sys, time
from pathlib import Path
from trainer.node_cache import build_once
folder = Path(sys.argv[1])
def build(target):
    with open(folder.parent / "builds", "a") as log:
        log.write("built\\n")
    (target / "part").write_text("half")
    while not (folder.parent / "go").exists():
        time.sleep(0.01)
    (target / "whole").write_text("x")
(folder.parent / f"arrived{os.getpid()}").touch()
build_once(folder, build, lambda target: None)
assert (folder / "whole").read_text() == "x"
"""


def start(folder: Path) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", WORKER, str(folder)], cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 30
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} did not appear"
        time.sleep(0.01)


def test_processes_that_race_build_once(tmp_path: Path) -> None:
    workers = [start(tmp_path / "wanted") for _ in range(4)]
    for worker in workers:
        wait_for(tmp_path / f"arrived{worker.pid}")
    wait_for(tmp_path / "builds")
    time.sleep(0.2)  # for those that have arrived to begin a second build, if nothing kept them from it
    assert not (tmp_path / "wanted").exists(), "visible before it was whole"
    (tmp_path / "go").touch()
    assert [worker.wait(timeout=30) for worker in workers] == [0] * 4
    assert (tmp_path / "builds").read_text() == "built\n"
    assert not list(tmp_path.glob("*building*"))


def test_killed_builder_leaves_nothing_behind(tmp_path: Path) -> None:
    worker = start(tmp_path / "wanted")
    wait_for(tmp_path / "builds")
    worker.send_signal(signal.SIGKILL)
    worker.wait(timeout=30)
    assert not (tmp_path / "wanted").exists()
    build_once(tmp_path / "wanted", lambda target: (target / "whole").touch(), lambda target: None)
    assert not list(tmp_path.glob("*building*"))


def test_failed_build_passes_on_and_can_be_repeated(tmp_path: Path) -> None:
    def fail(target: Path) -> None:
        (target / "part").touch()
        raise ValueError("bad file")

    for _ in range(2):
        with pytest.raises(ValueError, match="bad file"):
            build_once(tmp_path / "wanted", fail, lambda target: None)
    build_once(tmp_path / "wanted", lambda target: None, lambda target: None)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["wanted", "wanted.lock"]


def test_damaged_folder_is_built_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def check(target: Path) -> None:
        if (target / "x").read_text() != "good":
            raise ValueError("x is bad")

    def build(target: Path) -> None:
        (target / "x").write_text("good")

    build_once(tmp_path / "wanted", build, check)
    (tmp_path / "wanted" / "x").write_text("bad")
    build_once(tmp_path / "wanted", build, check)
    assert (tmp_path / "wanted" / "x").read_text() == "good"
    assert "x is bad" in caplog.text


def test_key_depends_on_every_part() -> None:
    assert cache_key([1, {"a": 2}]) == cache_key([1, {"a": 2}]) != cache_key([1, {"a": 3}])
