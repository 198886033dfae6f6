"""The benchmark of expert-parallel layers: it runs without GPUs, agrees with fp32, refuses other backends."""

import json
from pathlib import Path

import pytest
import torch

from moe.layer import MoE
from scripts.bench_ep import COLUMNS, check_sizes, comms_of, exposed, main, parse_arguments, speeds, table
from scripts.ep_sides import check_ran
from scripts.moe_sides import TINY, Shape, config_of, draw_ids, make_problem

CPU = torch.device("cpu")


@pytest.mark.slow
def test_dry_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "new" / "ep_cpu.json"
    assert main(["--dry-run", "--commit", "abc", "--json", "--out", str(file)]) == 0
    results = json.loads(file.read_text())
    assert json.loads(capsys.readouterr().out) == results
    assert list(results) == ["tiny balanced ep=2 model", "tiny zipf ep=2 model"]
    for result in results.values():
        assert (result["card"], result["commit"], result["tokens"], result["nproc"]) == ("cpu", "abc", 64, 2)
        # Every pair is somebody's, and no token comes to a rank twice.
        assert sum(result["pairs_by_rank"]) == 2 * 64 * 2 and max(result["rows_by_rank"]) <= 2 * 64
        found = result["sides"]["collective grouped_mm"]
        assert found.keys() >= COLUMNS.keys() and list(result["sides"]) == ["collective grouped_mm"]
        # fp32 in another order of sums.
        assert found["error"] < 1e-5 and found["fwd_ms"] == max(found["fwd_ms_by_rank"])
        assert result["alone"]["grouped_mm"]["fwd_ms"] > 0 and found["peak_gib"] is found["syncs"] is None


@pytest.mark.slow
def test_experts_that_two_ranks_share(tmp_path: Path) -> None:
    file = tmp_path / "ep_cpu.json"
    words = ["--dry-run", "--nproc", "4", "--etp", "2", "--routing", "balanced", "--commit", "abc"]
    assert main([*words, "--out", str(file)]) == 0
    (entry,) = json.loads(file.read_text()).values()
    assert entry["etp"] == 2
    # Both ranks that share experts get the same rows, of the tokens of both.
    rows, pairs = entry["rows_by_rank"], entry["pairs_by_rank"]
    assert rows[0] == rows[1] and rows[2] == rows[3] and sum(pairs) == 2 * 4 * 64 * 2
    assert entry["sides"]["collective grouped_mm"]["error"] < 1e-5


def test_speeds_are_of_the_slowest_rank_and_its_own_tokens() -> None:
    """6 T K D F forward, twice that backward."""
    found = speeds(Shape(1000, 1000, 1000, 4, 2), {"fwd_ms": 2.0, "fwd_bwd_ms": 7.0})
    speed = [found[name] for name in ("fwd_tflops", "bwd_tflops", "fwd_bwd_tflops")]
    assert speed == pytest.approx([6.0, 4.8, 36 / 7]) and found["bwd_ms"] == pytest.approx(5)
    assert exposed(found, {"fwd_ms": 1.5, "fwd_bwd_ms": 6.3}) == pytest.approx(
        {"fwd_exposed": 25, "fwd_bwd_exposed": 10}
    )


def test_parts_have_other_tokens_and_experts_but_one_distribution() -> None:
    whole, parts = make_problem(TINY, "zipf", CPU), [make_problem(TINY, "zipf", CPU, part, 2) for part in range(2)]
    assert all(part.w_down_EDF.shape[0] == TINY.experts // 2 for part in parts)
    assert torch.equal(parts[0].router_ED, whole.router_ED) and torch.equal(parts[1].router_ED, whole.router_ED)
    assert not torch.equal(parts[0].x_TD, parts[1].x_TD)
    shape = Shape(4096, 64, 8, 32, 1)
    loads = [draw_ids(shape, "zipf", CPU, part).flatten().bincount(minlength=32) / 4096 for part in range(2)]
    assert not torch.equal(*loads) and float((loads[0] - loads[1]).abs().max()) < 0.03


def test_another_backend_than_was_asked_for_is_an_error() -> None:
    layer = MoE(config_of(TINY, "grouped_mm"), TINY.dim)
    check_ran(layer, "collective")
    with pytest.raises(RuntimeError, match=r"backend=symm_mem was asked for"):
        check_ran(layer, "symm_mem")


def test_bounds_and_payload_reach_the_exchange_that_knows_them() -> None:
    words = ["--payload", "mxfp8", "--capacity", "1.5", "--num-ctas", "24", "--nproc", "2"]
    words += ["--chunks", "1,3", "--experts", "fused", "--saved-headroom", "1.25"]
    arguments = parse_arguments(words)
    ours, theirs = comms_of("symm_mem", arguments), comms_of("collective", arguments)
    assert (ours.capacity, theirs.capacity, ours.num_ctas) == (1.5, None, 24)
    assert (ours.chunks, theirs.chunks) == (3, 1) and (ours.saved_headroom, theirs.saved_headroom) == (1.25, None)
    assert {ours.payload.dispatch, ours.payload.combine_grad} == {"mxfp8"}


def test_table() -> None:
    side = {**dict.fromkeys(COLUMNS, 1.25), "peak_gib": None, "syncs": 0}
    entry = {"shape": "Mixtral", "routing": "zipf", "rows_by_rank": [5, 6], "pairs_by_rank": [7, 8]}
    entry |= {"sides": {"symm_mem fused": side}, "alone": {"fused": {"fwd_ms": 1.0, "fwd_bwd_ms": 3.0}}}
    lines = table(entry).splitlines()
    assert lines[0].endswith("rows [5, 6], pairs [7, 8]")
    assert lines[2].split()[:3] == ["symm_mem", "fused", "1.25"] and lines[2].split()[-3:] == ["1.25", "0", "1.25"]
    assert lines[3].split()[-4:] == ["1.000", "/", "3.000", "ms"]


def test_mistakes(capsys: pytest.CaptureFixture[str]) -> None:
    for words, message in (
        (["--shapes", "Grok"], "--shapes: Grok is not known; choose from Qwen3-30B-A3B"),
        (["--backends", "nccl"], "--backends: nccl is not known; choose from symm_mem, nvshmem, collective"),
        (["--backends", "symm_mem,nvshmem"], "want symmetric memory of two kinds"),
        (["--chunks", "2"], "--chunks must be positive; more than one need --experts fused"),
        (["--saved-headroom", "1.5"], "--saved-headroom must be at least 1, and needs --experts fused"),
        (["--chunks", "1,two", "--experts", "fused"], "--chunks are numbers divided by commas"),
        (["--tokens", "0"], "must be positive"),
        (["--dry-run", "--backends", "symm_mem"], "--dry-run has no GPUs"),
    ):
        with pytest.raises(SystemExit, match="2"):
            main(words)
        assert message in capsys.readouterr().err
    with pytest.raises(ValueError, match="experts of tiny cannot be split over 3"):
        check_sizes(parse_arguments(["--dry-run", "--nproc", "3"]))
    with pytest.raises(ValueError, match="one process exchanges nothing"):
        check_sizes(parse_arguments(["--dry-run", "--nproc", "1"]))
