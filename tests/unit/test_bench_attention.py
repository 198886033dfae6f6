"""The benchmark of shared attention: it runs, compares with one process, counts its work and writes what it found."""

import json
from pathlib import Path

import pytest
import torch

from scripts import bench_attention
from scripts.bench_attention import main, parse_arguments, speeds, visible_pairs


@pytest.mark.slow
def test_dry_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "new" / "attention_cpu.json"
    assert main(["--dry-run", "--documents", "3", "--window", "20", "--commit", "abc", "--out", str(file)]) == 0
    result = json.loads(file.read_text())["tiny_64_2_gpus_3_documents_window_20"]
    assert (result["card"], result["commit"], result["nproc"]) == ("cpu", "abc", 2)
    assert list(result["modes"]) == ["one", "ring", "ulysses"]
    for mode, found in result["modes"].items():
        # fp32 in another order of sums.
        assert found["error"] < 1e-5, mode
        assert found["forward_backward"]["ms"] > 0
    assert result["modes"]["one"]["forward"]["ratio"] == 1.0
    shown = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in shown[-3:]] == ["one", "ring", "ulysses"]


@pytest.mark.parametrize("documents", [0, 3])
@pytest.mark.parametrize("window", [0, 9])
def test_visible_pairs(documents: int, window: int) -> None:
    arguments = parse_arguments(["--dry-run", "--documents", str(documents), "--window", str(window)])
    row, column = torch.arange(64).unsqueeze(1), torch.arange(64)
    sees = column <= row
    if documents:
        sees &= row * documents // 64 == column * documents // 64
    if window:
        sees &= row - column < window
    assert visible_pairs(arguments) == int(sees.sum())


def test_speeds() -> None:
    """One head pair, one visible pair: 2 x (D + V) operations forward, 2 x (3 D + 2 V) more backward."""
    arguments = parse_arguments(["--dry-run", "--window", "1"])
    heads, _, dim, v_dim = bench_attention.SHAPES["tiny"]
    forward = 2 * 64 * heads * (dim + v_dim)
    found = speeds(arguments, 2, [(3.0, 5.0), (1.0, 4.0), (2.0, 9.0)])
    assert found["forward"] == {"ms": 2.0, "tflops_per_gpu": pytest.approx(forward / 2 / 2e-3 / 1e12)}
    both = forward + 2 * 64 * heads * (3 * dim + 2 * v_dim)
    assert found["forward_backward"] == {"ms": 5.0, "tflops_per_gpu": pytest.approx(both / 2 / 5e-3 / 1e12)}


def test_mistakes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["--modes", "ring,star"])
    assert "star is not known; choose from ring, ulysses" in capsys.readouterr().err
    file = tmp_path / "notes.json"
    file.write_text('{"model": {"loss": 1}}')
    assert main(["--dry-run", "--out", str(file)]) == 2
    assert "holds no results of this benchmark" in capsys.readouterr().err
    assert main(["--dry-run", "--nproc", "3"]) == 2
    assert "--seq-len=64 must be a multiple of 2 x --nproc = 6" in capsys.readouterr().err
