"""A module of a package is imported without the start of the package."""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from parallel.torchtitan_dims import import_alone


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Which fails as it starts; a module of it imports another one."""
    folder = tmp_path / "slow_to_start" / "inner"
    folder.mkdir(parents=True)
    (folder.parent / "__init__.py").write_text("1 / 0\n")
    (folder / "__init__.py").touch()
    (folder / "sizes.py").write_text("from slow_to_start.inner import unit\n\ndef size(): return 7 * unit.UNIT\n")
    (folder / "unit.py").write_text("UNIT = 2\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    return "slow_to_start"


def test_the_start_of_the_package_does_not_run(package: str) -> None:
    assert import_alone(f"{package}.inner.sizes").size() == 14
    assert not [name for name in sys.modules if name.startswith(package)]
    with pytest.raises(ZeroDivisionError):
        importlib.import_module(package)


def test_what_is_missing_is_named(package: str) -> None:
    with pytest.raises(ModuleNotFoundError, match=r"slow_to_start\.inner\.none"):
        import_alone(f"{package}.inner.none")
    assert package not in sys.modules
    with pytest.raises(ModuleNotFoundError, match="no_such_package"):
        import_alone("no_such_package.sizes")


def test_a_package_that_is_there_is_used(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = import_alone(f"{package}.inner.sizes")
    monkeypatch.setitem(sys.modules, package, sys)
    monkeypatch.setitem(sys.modules, f"{package}.inner", sys)
    monkeypatch.setitem(sys.modules, f"{package}.inner.sizes", sizes)
    assert import_alone(f"{package}.inner.sizes") is sizes and sys.modules[package] is sys


@pytest.mark.slow
def test_a_trainer_starts_without_the_compiler_and_torchtitan_s_models() -> None:
    code = (
        "import sys, parallel.torchtitan_dims as dims, torch.distributed as dist\n"
        "print(dims.parallel_dims.ParallelDims.__name__, 'FAKE' in dist.Backend._plugins)\n"
        "import trainer.trainer\n"
        "print([name for name in sys.modules if name.startswith(('torchtitan', 'torch._inductor.lowering'))])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.stdout.splitlines() == ["ParallelDims True", "[]"], done.stderr
