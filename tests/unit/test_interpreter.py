"""The result of tests/interpreter, which runs in a process of its own (conftest.py)."""

from tests.unit.conftest import Interpreted


def test_kernels_under_the_interpreter(interpreted: Interpreted) -> None:
    process, output = interpreted
    code = process.wait(timeout=900)
    said = output.read_text()
    assert code == 0, said[-6000:]
    # Nothing was skipped: the folder is worth nothing then.
    assert " passed" in said and "skipped" not in said, said[-2000:]
