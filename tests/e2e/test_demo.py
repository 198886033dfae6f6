"""`make train`, shortened: its launcher and its experiment, in a bare copy of the checkout that nobody installed.

The whole demo (240 steps) is for people and takes minutes; its result is in README.md. An eighth of it learns enough to
tell a trainer that learns from one that does not.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.runs import ROOT, status
from trainer.metrics import read_metrics

pytestmark = pytest.mark.slow
STEPS = 30
# An untrained model needs 12 bits for each of 4096 tokens, about 3.6 a byte. 30 steps reach 2.74; the rest is for other
# versions of the standard library.
BITS_PER_BYTE = 3.0


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The checkout that ran the demo, and what it printed."""
    checkout = tmp_path_factory.mktemp("demo") / "checkout"
    for name in ("trainer", "parallel", "moe", "comms", "configs", "scripts"):
        shutil.copytree(ROOT / name, checkout / name, ignore=shutil.ignore_patterns("__pycache__"))
    dropped = ("SLURM_", "SLUICEGATE_", "WANDB_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
    # What the launcher sets is all that leads to the packages.
    kept.pop("PYTHONPATH", None)
    kept |= {"PYTHON": sys.executable, "NPROC": "2", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    words = (
        f"train.steps={STEPS}",
        "train.eval_every=0",
        "optim.warmup_steps=5",
        "run.id=demo",
        "data.eval_samples=32",
    )
    command = ["bash", str(checkout / "scripts" / "demo.sh"), *words]
    done = subprocess.run(command, cwd=checkout, env=kept, capture_output=True, text=True, timeout=550, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    return checkout, done.stdout


def test_it_learns_real_text_on_two_ranks_that_share_the_experts(demo: tuple[Path, str]) -> None:
    run = demo[0] / "runs" / "demo"
    last = read_metrics(run)[-1]
    assert (status(run)["state"], last["step"]) == ("finished", STEPS)
    assert 1.0 < last["eval/stdlib/bits_per_byte"] < BITS_PER_BYTE
    config = (run / "config.yaml").read_text()
    assert re.search(r"^  ep: 2$", config, re.MULTILINE), "the experts are divided among both"
    assert last["train/loss"] < 7
    # 8 experts, 2 a token, every layer.
    assert [sum(layer) for layer in last["moe/tokens_per_expert"]] == [2 * 8 * 256] * 4


def test_it_runs_from_the_copy_alone(demo: tuple[Path, str]) -> None:
    checkout = demo[0]
    environment = json.loads((checkout / "runs" / "demo" / "environment.json").read_text())
    assert environment["attempts"][0]["code"] == str(checkout)
    assert (checkout / ".cache" / "sluicegate").is_dir(), "tokenizer and tokens are kept for the next run"


def test_the_first_step_is_told_of_long_before_the_first_figures(demo: tuple[Path, str]) -> None:
    line = rf"^step 1 took \d+\.\d s; figures come every (\d+) steps \(train\.log_every\) and at the end, step {STEPS}$"
    told = re.search(line, demo[1], re.MULTILINE)
    assert told is not None and int(told[1]) > 1, demo[1]
    assert demo[1].index(told[0]) < demo[1].index(f"step {told[1]}/")


def test_it_ends_with_a_sample_and_says_where_everything_lies(demo: tuple[Path, str]) -> None:
    checkout, out = demo
    sample = out.partition("sample of 128 tokens after 'def ':\n")[2]
    assert sample.startswith("def ")
    for label, path in {
        "metrics": "metrics.jsonl",
        "config": "config.yaml",
        "checkpoint": f"checkpoints/step_{STEPS:08d}",
    }.items():
        found = re.search(rf"^  {label} +(\S+)$", sample, re.MULTILINE)
        assert found is not None and found[1].endswith(path), (label, sample)
        assert (checkout / found[1]).exists()
    assert out.count("held-out set 'stdlib'") == 1, "one voice"
