"""The benchmark of quantizers: it runs every form, counts bytes and writes what it found."""

import json
from pathlib import Path

import pytest
import torch

from scripts.bench_quantize import forms, main, parse_arguments, size_of, speeds, tensors


def test_dry_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "new" / "quantize_cpu.json"
    assert main(["--dry-run", "--json", "--commit", "abc", "--out", str(file)]) == 0
    result = json.loads(capsys.readouterr().out)
    assert json.loads(file.read_text()) == {"64_128_4_experts": result}
    assert (result["card"], result["commit"], result["rows"]) == ("cpu", "abc", 64)
    assert result["forms"]["copy"]["ratio"] == 1.0 and len(result["forms"]) == 11
    assert main(["--dry-run"]) == 0
    assert "gathered, both" in capsys.readouterr().out


def test_bytes() -> None:
    """Of 64 x 128: 2 bytes read, 1 written, one scale for 32; a record has 128 + 4 bytes, padded to 144."""
    found = {
        name: sum(map(size_of, tensors(work()))) for name, (work, _) in forms(parse_arguments(["--dry-run"])).items()
    }
    assert found["copy"] == 2 * 64 * 128 and found["mxfp8 rows"] == 64 * (128 + 4)
    assert found["mxfp8 record"] == 64 * 144 and found["rows and columns"] == 2 * found["mxfp8 rows"]
    assert found["fp8 128 x 128"] == 64 * 128 + 1


def test_speeds() -> None:
    found = speeds({"copy": 4_000_000_000, "form": 3_000_000_000}, {"copy": 2.0, "form": 1.0})
    assert found["form"] == {"us": 1e6, "gb_per_second": 3.0, "ratio": 1.5}


def test_mistakes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["--rows", "33"])
    assert "--rows=33 must be a multiple of 32" in capsys.readouterr().err
    file = tmp_path / "notes.json"
    file.write_text('{"model": {"loss": 1}}')
    assert main(["--dry-run", "--out", str(file)]) == 2
    assert "holds no results of this benchmark" in capsys.readouterr().err
    if not torch.cuda.is_available():
        assert main([]) == 2
        assert "no GPU found; --dry-run" in capsys.readouterr().err
