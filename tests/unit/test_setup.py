"""scripts/setup.sh with a stand-in for Python: it asks for the right packages, once, and says what it misses. And what
setup installs: the distribution's contents."""

import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# Notes its arguments. `-` (a script on stdin) asks which torch there is; `-m venv` makes a folder with itself in it.
PYTHON = r"""#!/bin/bash
echo "$*" >>"$CALLS"
case "$1 $2" in
  "-m venv") mkdir -p "${@: -1}/bin" && cp "$0" "${@: -1}/bin/python" ;;
  "- "*) exit 1 ;;
  "-c import sys; sys.exit(sys.version_info"*) exit "$TOO_OLD" ;;
  "-m pip") [ -z "$PIP_FAILS" ] || { echo "no such package"; exit 1; } ;;
esac
"""


def _run(folder: Path, **environment: str) -> tuple[int, str, list[str]]:
    calls = folder / "calls"
    calls.unlink(missing_ok=True)
    done = subprocess.run(
        ["bash", str(folder / "scripts" / "setup.sh")],
        env={
            "PATH": os.environ["PATH"],
            "CALLS": str(calls),
            "PYTHON": str(folder / "python"),
            "TOO_OLD": "0",
            "PIP_FAILS": "",
            "CUDA_VISIBLE_DEVICES": "",
            **environment,
        },
        capture_output=True,
        text=True,
        timeout=60,
    )
    return done.returncode, done.stdout + done.stderr, calls.read_text().splitlines() if calls.exists() else []


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    for name in ("scripts/setup.sh", "scripts/devices.sh", "pyproject.toml", "requirements/constraints.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "python").write_text(PYTHON)
    (tmp_path / "python").chmod(0o755)
    return tmp_path


def test_first_call_installs_under_the_constraints_and_the_second_does_nothing(copy: Path) -> None:
    code, output, calls = _run(copy)
    assert code == 0, output
    install = next(call for call in calls if f"-e {copy}[dev]" in call)
    assert f"-c {copy}/requirements/constraints.txt" in install
    assert _run(copy)[::2] == (0, [])
    with (copy / "requirements" / "constraints.txt").open("a") as pins:
        pins.write("# moved\n")
    assert any(f"-e {copy}[dev]" in call for call in _run(copy)[2])


def test_index_for_torch_can_be_named(copy: Path) -> None:
    _, _, calls = _run(copy, SLUICEGATE_TORCH_INDEX="https://example.org/whl")
    assert any("--extra-index-url https://example.org/whl" in call and "-e " in call for call in calls)


def test_old_python_is_refused_by_name(copy: Path) -> None:
    code, output, _ = _run(copy, TOO_OLD="1")
    assert code == 1
    assert "no Python >= 3.11 found" in output
    assert "PYTHON=" in output
    assert not (copy / ".venv").exists()


def test_failed_install_is_shown_and_tried_again_next_time(copy: Path) -> None:
    code, output, _ = _run(copy, PIP_FAILS="1")
    assert code == 1
    assert "no such package" in output
    assert _run(copy)[0] == 0


def test_every_direct_dependency_is_pinned_within_its_range() -> None:
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = (ROOT / "requirements" / "constraints.txt").read_text().splitlines()
    pins = {canonicalize_name(line.split("==")[0]): line.split("==")[1] for line in lines if "==" in line}
    for text in (*project["dependencies"], *project["optional-dependencies"]["dev"]):
        needed = Requirement(text)
        assert needed.specifier.contains(pins[canonicalize_name(needed.name)]), text
    assert pins["torch"] == "2.13.0"


def test_wheel_has_every_package_and_config_and_no_tests(tmp_path: Path) -> None:
    """A package or a YAML file that pyproject.toml forgets is missing from an installed copy only."""
    packages = ("trainer", "parallel", "moe", "comms", "configs")
    ignore = shutil.ignore_patterns("__pycache__")
    for name in (*packages, "tests"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=ignore)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path / name)
    build = "from setuptools.build_meta import build_wheel; print(build_wheel('dist'))"
    subprocess.run([sys.executable, "-c", build], cwd=tmp_path, check=True, capture_output=True, timeout=120)
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        inside = {name for name in archive.namelist() if ".dist-info/" not in name}
    expected = {
        str(path.relative_to(tmp_path))
        for name in packages
        for path in (tmp_path / name).rglob("*")
        if path.suffix in (".py", ".yaml")
    }
    assert inside == expected
