"""The benchmark of MoE layers: sides agree, routing is as asked, and it writes and draws what it found."""

import itertools
import json
from functools import partial
from pathlib import Path

import pytest
import torch

from moe.router import route
from scripts.bench_moe import count_waits, main, parse_arguments, saved_bound, speeds, table
from scripts.moe_picture import draw_ratios
from scripts.moe_sides import (
    ROUTINGS,
    TINY,
    Shape,
    Side,
    build,
    choose,
    config_of,
    draw_ids,
    first_tokens,
    make_problem,
    results,
)
from scripts.moe_times import time_sides

CPU = torch.device("cpu")


def test_dry_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, picture = tmp_path / "new" / "moe_cpu.json", tmp_path / "docs" / "moe.svg"
    options = ["--dry-run", "--json", "--commit", "abc", "--out", str(file), "--picture", str(picture)]
    assert main([*options, "--sides", "fused,grouped_mm,torch"]) == 0
    shown = capsys.readouterr()
    results = json.loads(shown.out)
    assert json.loads(file.read_text()) == results and list(results) == ["tiny balanced", "tiny zipf"]
    for result in results.values():
        assert (result["card"], result["commit"], result["tokens"]) == ("cpu", "abc", 64)
        assert list(result["sides"]) == ["grouped_mm", "torch"] and result["sides"]["torch"]["ratio"] == 1.0
        # fp32 in another order of sums.
        assert all(found["error"] < 1e-5 for found in result["sides"].values())
        assert "needs a GPU" in result["absent"]["fused"]
    assert "fused         absent: " in shown.err and "<svg" in picture.read_text()


def test_our_side_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """As nothing but a GPU does in earnest: what it computes stays the same."""
    problem = make_problem(TINY, "balanced", CPU)
    plain = results(build("grouped_mm", problem, compiled=False), problem)
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    compiled = results(build("grouped_mm", problem, compiled=True), problem)
    assert all(torch.equal(compiled[name], plain[name]) for name in plain)


def test_packages_that_are_not_installed_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--dry-run", "--routing", "zipf", "--sides", "torch,sonicmoe,scattermoe"]) == 0
    shown = capsys.readouterr().out
    assert "sonicmoe      absent: No module named" in shown and "scattermoe    absent: No module named" in shown


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_router_chooses_the_experts_that_were_drawn(routing: str, dtype: torch.dtype) -> None:
    shape = Shape(200, 64, 8, 32, 4)
    problem, expected = make_problem(shape, routing, CPU), draw_ids(shape, routing, CPU).sort(1).values
    x_TD, router_ED = problem.x_TD.to(dtype), problem.router_ED.to(dtype)
    ours = route(x_TD, router_ED, None, config_of(shape, "reference"), seq_len=200)
    assert torch.equal(ours.topk_ids_TK.sort(1).values, expected)
    assert torch.equal(choose(x_TD, router_ED, 4)[1].sort(1).values, expected)


def test_loads_are_as_asked() -> None:
    """Of 4096 x 1 pairs and 32 experts with p = 1 / (rank * 4.06): the first has a quarter, the second an eighth."""
    shape = Shape(4096, 64, 8, 32, 1)
    counts = draw_ids(shape, "zipf", CPU).flatten().bincount(minlength=32).sort(descending=True).values / 4096
    assert counts[:2].tolist() == pytest.approx([0.246, 0.123], abs=0.03)
    even = draw_ids(shape, "balanced", CPU).flatten().bincount(minlength=32)
    assert even.max() < 1.4 * even.float().mean()


def test_fewer_tokens_are_the_first() -> None:
    problem = make_problem(TINY, "balanced", CPU)
    few = first_tokens(problem, 10)
    assert few.shape.tokens == 10 and torch.equal(few.x_TD, problem.x_TD[:10]) and few.grad_TD.shape[0] == 10
    assert first_tokens(problem, 1000).shape == TINY


def test_speeds_and_bytes() -> None:
    """6 T K D F forward, twice that backward; x, gate and up in bf16."""
    found = speeds(Shape(1000, 1000, 1000, 4, 2), [(3.0, 9.0), (1.0, 5.0), (2.0, 7.0)])
    assert (found["fwd_ms"], found["fwd_bwd_ms"]) == (2.0, 7.0)
    speed = [found[name] for name in ("fwd_tflops", "bwd_tflops", "fwd_bwd_tflops")]
    assert speed == pytest.approx([6.0, 4.8, 36 / 7])
    assert saved_bound(Shape(10, 7, 3, 4, 2)) == 2 * (10 * 7 + 2 * 10 * 2 * 3)


def test_sides_take_turns_in_both_orders() -> None:
    """So that a median over an even number of rounds has as much of either neighbour."""
    problem, asked = make_problem(TINY, "balanced", CPU), []

    def side(name: str) -> Side:
        return Side(lambda x_TD: asked.append(name) or x_TD * 2, {}, {})

    times = time_sides({name: side(name) for name in "abc"}, problem, 2)
    assert [len(times[name]) for name in "abc"] == [2, 2, 2]
    orders = [name for name, _ in itertools.groupby(asked)]
    # The first round is not measured; where two rounds meet, the same side works twice.
    assert orders == list("cbabcba")


def test_waits_are_those_of_the_step() -> None:
    events = [("cudaStreamSynchronize", 1.0), ("cudaLaunchKernel", 2.0), ("Memcpy DtoH (Device -> Pageable)", 9.0)]
    assert count_waits([*events, ("cudaDeviceSynchronize", 6.0), ("step", 0.0)], 5.0) == 2


def test_table() -> None:
    side = {
        "fwd_tflops": 500.0,
        "bwd_tflops": 540.4,
        "fwd_bwd_tflops": 526.0,
        "ratio": 1.25,
        "syncs": 0,
        "host_ms": 3.0,
    }
    side |= {"peak_gib": 3.0, "saved_gib": 1.0, "error": 4e-3, "first_call_seconds": {"cold": 20.0, "warm": 1.5}}
    result = {
        "load_max_over_mean": 1.1,
        "saved_bound_gib": 0.9,
        "dry_run": True,
        "card": "H200",
        "torch": "2",
        "commit": "abc",
    }
    result |= {"sides": {"fused": side}, "absent": {"liger": "none"}}
    result |= {"kernels": {"sort": {"ms": 0.05, "rate": 80.0, "unit": "GB/s"}}}
    lines = table("shape zipf", result).splitlines()
    assert lines[2].split()[:8] == ["fused", "500", "540", "526", "1.250", "3.00", "1.00", "0"]
    assert lines[2].endswith("cold 20.0 s, warm 1.5 s") and lines[3].split() == ["liger", "absent:", "none"]
    assert lines[4] == "a dry run: that it runs is all that its figures say"
    assert lines[5].split() == ["sort", "0.050", "ms", "80", "GB/s"]
    assert table("shape zipf", {**result, "dry_run": False}).splitlines() == [*lines[:4], lines[5]]


def test_mistakes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        parse_arguments(["--shapes", "Qwen3-30B-A3B,Grok"])
    assert "--shapes: Grok is not known; choose from Qwen3-30B-A3B" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        parse_arguments(["--dry-run", "--rounds", "3"])
    assert "--rounds must be even" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        parse_arguments(["--rounds", "0"])
    with pytest.raises(SystemExit, match="2"):
        parse_arguments(["--dry-run", "--kernels"])
    assert "--kernels needs a GPU" in capsys.readouterr().err
    with pytest.raises(ValueError, match="no result to draw has the side torch"):
        draw_ratios({"a": {"sides": {"fused": {}}}}, tmp_path / "a.svg")
    file = tmp_path / "notes.json"
    file.write_text('{"model": {"loss": 1}}')
    assert main(["--dry-run", "--out", str(file)]) == 2
    assert "holds no results of this benchmark" in capsys.readouterr().err
    if not torch.cuda.is_available():
        assert main([]) == 2
        assert "no GPU found; --dry-run" in capsys.readouterr().err
