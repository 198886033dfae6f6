"""The benchmark of matmuls whose rows travel: it runs, sides agree, and it writes and shows what it found."""

import gzip
import json
from multiprocessing.forkserver import _forkserver
from pathlib import Path

import pytest
import torch

from scripts.bench_async_tp import KINDS, ROWS_ALONE, SIDES, cases_of, main, parse_arguments
from scripts.bench_times import LEAD, MOST_LEAD, lead_for
from scripts.tp_blocks import trace_step
from tests.distributed.harness import end_workers


@pytest.mark.slow
def test_dry_run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "new" / "async_tp_cpu.json"
    # A server of an earlier test would have ranks write to where that test's words go; it ends once its workers have.
    end_workers()
    _forkserver._stop()  # pyright: ignore[reportAttributeAccessIssue]
    # Blocks of a model are among the parts of test_bench_node.py's dry run.
    assert main(["--dry-run", "--json", "--no-block", "--commit", "abc", "--out", str(file)]) == 0
    told = capfd.readouterr()
    result = json.loads(told.out)
    # The head of the columns before the first case.
    assert told.err.index("fwd ms") < told.err.index("gather 16")
    assert json.loads(file.read_text()) == {"2_gpus": result}
    assert (result["card"], result["commit"], result["nproc"]) == ("cpu", "abc", 2)
    assert [(case["kind"], case["M"]) for case in result["cases"]] == [
        (kind, rows) for kind in KINDS for rows in (16, 64)
    ]
    for case in result["cases"]:
        alone = case["kind"] in ROWS_ALONE
        assert set(case["sides"]) == set(SIDES) - {"torch"} - ({"matmul"} if alone else set())
        if not alone:
            assert case["sides"]["matmul"]["forward_ratio"] == case["sides"]["matmul"]["backward_ratio"] == 1.0
        for side in ("ours",):
            # fp32 in another order of sums.
            assert case["sides"][side]["error"] < 1e-5
            assert case["sides"][side]["backward_ms"] > 0 and case["sides"][side]["host_ms"] > 0
    assert result["block"] == result["block_host"] == {}


@pytest.mark.slow
def test_low_precision(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "async_tp_cpu.json"
    words = ["--dry-run", "--json", "--recipe", "fp8_blockwise", "--no-block", "--commit", "abc", "--out", str(file)]
    assert main(words) == 0
    result = json.loads(file.read_text())["2_gpus_fp8_blockwise"]
    assert result == json.loads(capfd.readouterr().out) and result["recipe"] == "fp8_blockwise"
    # The same operands; sums of bf16 parts are rounded elsewhere.
    assert all(case["sides"]["ours"]["error"] < 8e-3 for case in result["cases"])


def test_the_second_step_is_traced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 0)
    steps: list[torch.Tensor] = []
    trace_step(lambda: steps.append(torch.ones(3).cumsum(0)), tmp_path / "new", "native")
    with gzip.open(tmp_path / "new" / "blocks_native_host.json.gz") as file:
        names = [event.get("name") for event in json.load(file)["traceEvents"]]
    assert len(steps) == 2 and names.count("aten::cumsum") == 1


def test_a_pause_hides_the_launches_of_all_calls() -> None:
    assert lead_for(0.0, 10) == LEAD
    assert 11 * 0.003 < lead_for(0.003, 10) < MOST_LEAD
    # A host that waits for the device takes as long as that: it would pause for longer and longer.
    assert lead_for(1.0, 10) == MOST_LEAD


def test_cases() -> None:
    cases = parse_arguments(["--rows", "512,8192", "--widths", "8192x4096", "--piece-rows", "2048,4096"]).cases
    assert len(cases) == 16 and cases[0] == ("gather", 512, 8192, 4096, 2048)
    assert ("scatter_rows", 8192, 0, 4096, 2048) in cases
    # Two products whose rows are alike.
    pair = ["--rows", "512", "--widths", "8192x4096,4096x4096", "--kinds", "gather,gather_rows"]
    assert [case.N for case in parse_arguments(pair).cases] == [8192, 0, 4096]
    published = {("gather", 8192, 8192, 8192), ("scatter", 16384, 8192, 4096)}
    assert published <= {case[:4] for case in cases_of(parse_arguments([]))}


def test_mistakes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words, message in (
        (["--sides", "ours,theirs"], "theirs is not known"),
        (["--kinds", "gather,all"], "all is not known"),
        (["--rows", "12", "--kinds", "gather_rows"], "of 4 times that where rows are alone"),
        (["--widths", "8192"], "like 8192x4096"),
        (["--rows", "511"], "multiples of --nproc=2"),
    ):
        with pytest.raises(SystemExit, match="2"):
            main(words)
        assert message in capsys.readouterr().err
    assert main(["--nproc", "64"]) == 2
    assert "--nproc=64: there are" in capsys.readouterr().err
