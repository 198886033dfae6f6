"""Packages of another program with our names are found before anything is trained, and named."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from trainer.compose import CONFIG_DIR
from trainer.install_check import PACKAGES, check_one_root

ROOT = CONFIG_DIR.parent


def check_with(first: Path) -> str:
    """The error of the check in a process that has `first` before our root on its path; empty when it passes."""
    code = "import trainer.install_check as c\ntry: c.check_one_root()\nexcept RuntimeError as e: print(e)"
    environment = {**os.environ, "PYTHONPATH": f"{first}{os.pathsep}{ROOT}"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=first, env=environment, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_this_checkout_is_one_program() -> None:
    check_one_root()


def test_a_package_from_elsewhere_is_named(tmp_path: Path) -> None:
    assert check_with(tmp_path) == ""
    (tmp_path / "comms").mkdir()
    (tmp_path / "comms" / "__init__.py").touch()
    message = check_with(tmp_path)
    assert f"package comms comes from {tmp_path / 'comms'}, but the others from {ROOT}" in message


def test_the_distribution_that_brought_it_is_named(tmp_path: Path) -> None:
    (tmp_path / "moe").mkdir()
    (tmp_path / "moe" / "__init__.py").touch()
    info = tmp_path / "intruder-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: intruder\nVersion: 1.0\n")
    (info / "top_level.txt").write_text("moe\n")
    assert "(installed by intruder)" in check_with(tmp_path)


def test_an_overwritten_package_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package, file in PACKAGES.items():
        (tmp_path / package).mkdir()
        (tmp_path / package / file).touch()
    monkeypatch.setattr("trainer.install_check._folder", lambda package: tmp_path / package)
    check_one_root(tmp_path)
    (tmp_path / "comms" / PACKAGES["comms"]).unlink()
    with pytest.raises(RuntimeError, match=r"package comms in .* is not sluicegate's \(all_to_all\.py is missing\)"):
        check_one_root(tmp_path)
