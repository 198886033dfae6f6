"""The comparison of recipes by training: what it makes of losses, and what it does with mistakes and failed runs."""

import json
from pathlib import Path
from unittest.mock import patch

import pytest

from scripts import bench_recipes
from scripts.bench_recipes import compare, draw_curves, is_eval_loss, main, parse_arguments, table, train_all


def found(offset: float) -> dict:
    return {"loss": {str(step): 5.0 - 0.1 * step + offset for step in range(1, 21)}, "held_out": 4.0 + offset}


def test_losses_are_compared_with_bf16() -> None:
    """20 steps: the last tenth is two, of losses 3.1 and 3.0."""
    result = compare({"bf16": found(0.0), "mxfp8": found(0.0305)})
    assert result["bf16"]["final"] == pytest.approx(3.05) and result["bf16"]["final_over_bf16"] == 0
    assert result["mxfp8"]["final_over_bf16"] == pytest.approx(0.01)
    assert result["mxfp8"]["held_out_over_bf16"] == pytest.approx(0.0305 / 4)


def test_picture_and_table(tmp_path: Path) -> None:
    result = {
        "card": "a card",
        "torch": "2",
        "commit": "abc",
        "recipes": compare({"bf16": found(0), "mxfp8": found(0.1)}),
    }
    draw_curves(result, tmp_path / "new" / "curves.svg")
    assert "<svg" in (tmp_path / "new" / "curves.svg").read_text()
    assert "+3.279%" in table("demo", result) and "a card" in table("demo", result)


def run(folder: Path, recipe: str, **_: object) -> None:
    """What a run leaves behind."""
    lines = [
        {"step": 1, "train/loss": 5.0, "eval/text/loss": None},
        {"step": 2, "train/loss": 4.0, "eval/text/loss": 4.5, "eval/text/bits_per_byte": 2.0},
    ]
    (folder / recipe).mkdir(parents=True)
    (folder / recipe / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_runs_are_told_apart_and_spread_over_devices(tmp_path: Path) -> None:
    seen: dict[str, str] = {}

    def start(command: list[str], env: dict[str, str], **_: object):
        words = dict(word.split("=", 1) for word in command[3:])
        seen[words["precision"]] = env["CUDA_VISIBLE_DEVICES"]
        assert (words["experiment"], words["train.steps"], words["optim.lr"]) == ("demo", "7", "1e-3")
        run(tmp_path, words["run.id"])
        return type("Done", (), {"returncode": 0})

    arguments = parse_arguments(["--steps", "7", "--at-once", "2", "optim.lr=1e-3"])
    with patch.object(bench_recipes.subprocess, "run", start):
        recipes = train_all(arguments, 2, tmp_path)
    assert list(recipes) == ["bf16", "mxfp8", "fp8_blockwise"] and set(seen.values()) <= {"0", "1"}
    assert recipes["mxfp8"] == {"loss": {1: 5.0, 2: 4.0}, "held_out": 4.5}


def test_a_run_that_fails_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its last lines are in the message: a whole run, refused for its config."""
    arguments = ["--dry-run", "--recipes", "bf16", "--folder", str(tmp_path), "train.step=1"]
    assert main(arguments) == 1
    said = capsys.readouterr().err
    assert "precision=bf16 failed" in said and "train.steps" in said


def test_mistakes(capsys: pytest.CaptureFixture[str]) -> None:
    for words, message in (
        (["--recipes", "bf16,fp4"], "fp4 is not known"),
        (["--recipes", "mxfp8"], "must begin with bf16"),
        (["learn faster"], "write key=value"),
        (["--steps", "0"], "must be positive"),
    ):
        with pytest.raises(SystemExit, match="2"):
            parse_arguments(words)
        assert message in capsys.readouterr().err
    assert is_eval_loss("eval/text/loss") and not is_eval_loss("train/loss")
