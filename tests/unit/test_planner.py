"""What a run's memory is expected to be (trainer/planner.py), against what was measured and against arithmetic."""

import json
from pathlib import Path

import pytest
import torch

from comms.saved_arena import plan_saved
from parallel.expert_parallel import expected_rows
from trainer.compose import compose
from trainer.config import Config
from trainer.planner import GIB, advice, describe, describe_memory, main, plan_memory

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
EXPERIMENTS = {"qwen3": "qwen3_30b_a3b_bench", "deepseek_v3": "deepseek_v3_16b_bench"}


def measured_runs() -> list[tuple[str, dict]]:
    files = sorted(BENCHMARKS.glob("train_*.json"))
    return [(f"{file.stem}: {name}", entry) for file in files for name, entry in json.loads(file.read_text()).items()]


def plan_of(*words: str, ranks: int):
    return plan_memory(compose(words), ranks)


@pytest.mark.parametrize(("name", "entry"), measured_runs())
def test_peaks_are_as_measured(name: str, entry: dict) -> None:
    """Within 5 %: the allocator's rounding and what blocks keep are estimates."""
    (peak,) = {run["peak_memory_gib"] for run in entry["runs"] if run["side"] == "ours"}
    overrides = entry["overrides"]
    if not any(word.startswith("model.moe.backend=") for word in overrides):
        # What `auto` was then.
        overrides = [*overrides, "model.moe.backend=grouped_mm"]
    size = entry["world_size"]
    words = [f"experiment={EXPERIMENTS[entry['model']]}", f"model.num_layers={entry['layers']}"]
    words += [f"train.global_batch_size={entry['local_batch'] * size}", f"parallel.ep={size}"]
    plan = plan_of(*words, *overrides, ranks=size)
    assert plan.peak / GIB == pytest.approx(peak, rel=0.05), name
    assert plan.transient > 0


def test_plain_sgd_has_no_moments() -> None:
    words = ["experiment=qwen3_30b_a3b_bench", "parallel.ep=2"]
    adam, sgd = plan_of(*words, ranks=2), plan_of(*words, "optim.name=sgd", ranks=2)
    assert adam.moments == 2 * adam.parameters and sgd.moments == 0
    assert adam.peak - sgd.peak == adam.moments and adam.parameters == sgd.parameters


@pytest.mark.parametrize("mode", ["selective", "full"])
def test_checkpointing_keeps_less(mode: str) -> None:
    words = ["experiment=qwen3_30b_a3b_bench", "parallel.ep=2", "train.micro_batch_size=16"]
    words += ["train.global_batch_size=32"]
    plain, less = plan_of(*words, ranks=2), plan_of(*words, f"parallel.activation_checkpoint={mode}", ranks=2)
    assert less.activations < 0.6 * plain.activations and less.peak < plain.peak


def test_an_exchange_counts_with_its_room() -> None:
    words = ["experiment=qwen3_30b_a3b_bench", "parallel.ep=8", "train.global_batch_size=32"]
    by_collectives = plan_of(*words, ranks=8)
    whole = plan_of(*words, "comms.backend=symm_mem", ranks=8)
    bounded = plan_of(
        *words, "comms.backend=symm_mem", "comms.capacity=2", "model.moe.pair_capacity=1.2", ranks=8
    )  # fmt: skip
    assert by_collectives.exchange == 0 < bounded.exchange < whole.exchange
    assert bounded.activations < whole.activations / 2


def test_what_is_kept_in_one_arena_counts_once() -> None:
    words = ["experiment=qwen3_30b_a3b_bench", "parallel.ep=8", "train.global_batch_size=32"]
    words += ["comms.backend=symm_mem", "model.moe.backend=fused"]
    for mode, hidden in (("none", 2 * 768), ("full", None)):
        config = compose([*words, f"parallel.activation_checkpoint={mode}", "comms.saved_headroom=1.25"])
        apart = plan_of(*words, f"parallel.activation_checkpoint={mode}", ranks=8)
        shared = plan_memory(config, 8)
        layers, tokens = config.model.num_layers, config.train.micro_batch_size * config.train.seq_len
        bounds = (expected_rows(config.model.moe, 8, tokens), 8 * tokens), (8 * tokens, 64 * tokens)
        room = plan_saved(layers, 1.25, *bounds)
        kept = room.num_bytes(config.model.dim, 8, hidden, 2)
        assert shared.exchange - apart.exchange == kept, mode
        # Instead of the most that can come, layer by layer.
        assert apart.activations - shared.activations > kept
        # An arena stays while gradients come; of rows alone there are nearly as many as can come.
        assert (shared.peak < apart.peak) is (mode == "none")


def test_a_layout_that_does_not_fit_is_refused_as_at_a_launch() -> None:
    with pytest.raises(ValueError, match=r"parallel\.ep=3"):
        plan_of("experiment=qwen3_30b_a3b_bench", "parallel.ep=3", ranks=8)


def test_command(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["experiment=qwen3_30b_a3b", "cluster=h100", "--ranks", "64", "train.global_batch_size=64"]
    assert main([*words, "parallel.ep=8"]) == 0
    shown = capsys.readouterr().out
    assert "on 64 ranks: dp_replicate=1, dp_shard=64" in shown and "of 79 GiB per rank" in shown
    assert main([*words, "parallel.ep=8", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["peak"] >= found["parameters"] + found["moments"] and found["transient"] >= 0
    assert main([*words, "parallel.ep=7"]) == 2
    assert "parallel.ep=7" in capsys.readouterr().err


def test_what_does_not_fit_is_said_with_what_helps() -> None:
    plan = plan_of("experiment=qwen3_30b_a3b_bench", "parallel.ep=2", ranks=2)
    assert "warning" not in describe(plan, 139.0) and "of 139 GiB" in describe(plan, 139.0)
    said = describe(plan, 40.0)
    assert "warning: that is more than a device has" in said and advice(plan) in said and "dp_shard" in said
    wide = plan_of("experiment=qwen3_30b_a3b_bench", "parallel.ep=2", "train.micro_batch_size=16",
                   "train.global_batch_size=32", ranks=2)  # fmt: skip
    assert "activation_checkpoint=full" in describe(wide, 40.0)


def test_a_run_without_gpu_plans_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    config = compose(["experiment=qwen3_30b_a3b_bench", "parallel.ep=2"])
    assert describe_memory(config, 2, torch.device("cpu")) == ""
    config.cluster.memory_gib = 139.0
    assert "of 139 GiB per rank" in describe_memory(config, 2, torch.device("cuda"))


def test_default_config_can_be_planned() -> None:
    assert plan_memory(Config(), 1).peak > 0
