"""The benchmark of the exchange: it runs without GPUs, counts its bytes and writes what it found."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.bench_comms import COLUMNS, Case, cases_of, figures, main, parse_arguments
from scripts.bench_vdev import add_vdev


@pytest.mark.slow
def test_dry_run_of_a_payload(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--dry-run", "--commit", "abc", "--json", "--payload", "mxfp8"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["payload"] == "mxfp8" and all(
        min(case["over_model"], case["combine_over_model"]) > 0 for case in result["cases"]
    )


@pytest.mark.slow
def test_dry_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "new" / "comms_cpu.json"
    assert main(["--dry-run", "--commit", "abc", "--json", "--out", str(file)]) == 0
    result = json.loads(file.read_text())["width_16_2_gpus"]
    assert json.loads(capsys.readouterr().out) == result
    assert (result["card"], result["commit"], result["backend"]) == ("cpu", "abc", "collective")
    assert [(case["top_k"], case["megabytes"]) for case in result["cases"]] == [(2, 0.01), (8, 0.02)]
    for case in result["cases"]:
        assert case.keys() >= COLUMNS.keys()
        assert (
            min(case["plan_us"], case["dispatch_us"], case["combine_us"], case["nccl_us"], case["wire_megabytes"]) > 0
        )
        # There is no memory to put into.
        assert case["put_gb_s"] is None and case["over_put"] is None and case["vdev_gb_s"] is None


def test_figures_count_wire_bytes_and_rows_without_deduplication() -> None:
    times = {"plan": 1e-5, "dispatch": 2e-3, "combine": 1e-3, "dispatch_put": None, "dispatch_take": None}
    found = figures(Case(64, 8, 16), {**times, "put": 1e-3, "nccl": 4e-3}, 6 * 10**8, 24 * 10**8, 5 * 10**8)
    assert found["dispatch_gb_s"] == pytest.approx(300) and found["dispatch_effective_gb_s"] == pytest.approx(1200)
    assert found["combine_gb_s"] == pytest.approx(500) and found["put_gb_s"] == pytest.approx(600)
    assert found["over_put"] == pytest.approx(0.5) and found["over_nccl"] == pytest.approx(2)
    assert found["dispatch_put_us"] is None and found["plan_us"] == pytest.approx(10)
    assert found["combine_over_put"] == pytest.approx(500 / 600) and found["over_model"] is None


def test_a_payload_is_compared_with_rows_as_they_are() -> None:
    times = dict.fromkeys(("plan", "dispatch", "combine", "dispatch_put", "dispatch_take", "put", "nccl"), 3e-3)
    found = figures(Case(64, 8, 0), {**times, "dispatch_model": 6e-3, "combine_model": 4e-3}, 1, 1, 1)
    assert found["over_model"] == pytest.approx(0.5) and found["combine_over_model"] == pytest.approx(0.75)


def test_the_column_of_nvshmem_is_filled_or_says_why_not(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = parse_arguments(["--sizes", "8"])
    monkeypatch.delenv("RANK", raising=False)

    def refuse(*_: object) -> None:
        raise RuntimeError("a process died")

    for measure, seconds, why in (
        (lambda *_: [2e-3], 2e-3, ""),
        (lambda *_: "no NVSHMEM", None, "no NVSHMEM"),
        (refuse, None, "RuntimeError: a process died"),
    ):
        monkeypatch.setattr("scripts.bench_vdev.measure_on_ranks", measure)
        case = {"wire_megabytes": 600.0, "dispatch_us": 1000.0}
        assert add_vdev([case], arguments, measure) == why
        assert case["vdev_us"] == (None if seconds is None else seconds * 1e6)
        assert case["vdev_gb_s"] == (None if seconds is None else pytest.approx(300))
        assert case["over_vdev"] == (None if seconds is None else pytest.approx(2))


def test_cases() -> None:
    cases = cases_of(parse_arguments(["--sizes", "8,64", "--num-ctas", "16,32"]))
    assert cases[:4] == [Case(8, 8, 16), Case(8, 8, 32), Case(64, 8, 16), Case(64, 8, 32)]
    assert [(case.top_k, case.num_ctas) for case in cases[4:]] == [(1, 16), (2, 16), (4, 16), (8, 24), (8, 132)]
    cases = cases_of(parse_arguments(["--sizes", "8", "--piece-mb", "0.03,1"]))
    assert cases == [Case(8, 8, 0, 0.03), Case(8, 8, 0, 1)]


def test_mistakes(capsys: pytest.CaptureFixture[str]) -> None:
    for words, message in ((["--sizes", "8,a"], "numbers divided by commas"), (["--width", "12"], "multiple of 8")):
        with pytest.raises(SystemExit, match="2"):
            main(words)
        assert message in capsys.readouterr().err


@pytest.mark.parametrize("name", ["bench_vdev", "bench_ranks", "bench_results", "bench_times"])
def test_a_part_of_a_benchmark_says_that_it_is_no_program(name: str) -> None:
    """Run as a program runs, without the checkout on the path."""
    script = Path(__file__).parents[2] / "scripts" / f"{name}.py"
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run([sys.executable, str(script), "--help"], env=environment, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith(f"scripts/{name}.py is a part of ") and done.stderr.count("\n") == 1
