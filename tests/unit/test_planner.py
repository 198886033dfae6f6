"""What a run's memory is expected to be (trainer/planner.py), against what was measured and against arithmetic."""

import copy
import json
from pathlib import Path

import pytest
import torch

from comms.symmetric_memory import exchanges
from trainer.activations import Load
from trainer.compose import compose
from trainer.config import Config
from trainer.layout import fit_layout
from trainer.memory_plan import AUTO_MARGIN, MemoryPlan, Share, _moments, no_room, plan_memory
from trainer.meta_model import DTYPES
from trainer.planner import GIB, MEANINGS, describe, describe_memory, main, savings, settle_backend, table, warn

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
# Of one GPU when FSDP still had its weights, and held gradients of those outside of blocks twice.
BY_FSDP = (
    "qwen3, 4 layers, 1 GPU, experts grouped_mm", "qwen3, 4 layers, 1 GPU, experts fused",
    "qwen3, 1 GPU, batch 2, symm_mem", "qwen3, 1 GPU, experts cast", "qwen3, 1 GPU, experts by FSDP", "qwen3, 1 GPU",
    "qwen3 on one GPU, FSDP of one rank, between them",
)  # fmt: skip
EXPERIMENTS = {"qwen3": "qwen3_30b_a3b_bench", "deepseek_v3": "deepseek_v3_16b_bench"}


def measured_runs() -> list[tuple[str, dict]]:
    files = sorted(BENCHMARKS.glob("train_*.json"))
    found = [(file, *pair) for file in files for pair in json.loads(file.read_text()).items() if pair[0] not in BY_FSDP]
    return [(f"{file.stem}: {name}", entry) for file, name, entry in found]


def plan_of(*words: str, ranks: int) -> MemoryPlan:
    return plan_memory(compose(words), ranks)


@pytest.mark.parametrize(("name", "entry"), measured_runs())
def test_peaks_are_as_measured(name: str, entry: dict) -> None:
    """Within 3 %: what blocks keep is an estimate, and the allocator rounds."""
    (peak,) = {run["peak_memory_gib"] for run in entry["runs"] if run["side"] == "ours"}
    overrides = entry["overrides"]
    if not any(word.startswith("model.moe.backend=") for word in overrides):
        # What `auto` was then: fused since there are exchanges by symmetric memory.
        experts = "fused" if "comms.backend=symm_mem" in overrides else "grouped_mm"
        overrides = [*overrides, f"model.moe.backend={experts}"]
    size = entry["world_size"]
    words = [f"experiment={EXPERIMENTS[entry['model']]}", f"model.num_layers={entry['layers']}"]
    words += [f"train.micro_batch_size={entry['local_batch']}", f"parallel.ep={size}"]
    words += [f"train.global_batch_size={entry['local_batch'] * size}"]
    plan = plan_of(*words, *overrides, ranks=size)
    assert plan.peak / GIB == pytest.approx(peak, rel=0.03), name
    assert sum(plan.at_peak.values()) == plan.peak
    assert all(plan.at_peak[part] <= plan.at_most[part] for part in plan.at_peak)


def test_buffers_of_async_tp_are_counted() -> None:
    words = ["experiment=qwen3_30b_a3b_bench", "train.micro_batch_size=4", "train.seq_len=4096"]
    plain, native = (
        plan_of(*words, "parallel.tp=2", "parallel.ep=2", f"parallel.async_tp={mode}", ranks=2)
        for mode in ("none", "native")
    )
    assert native.peak - plain.peak == native.at_peak["tp buffers"] == 2 * 4 * 4096 * 2048 * 2
    assert "tp buffers" not in {name for name, size in plain.at_peak.items() if size}


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
    for mode in ("none", "full"):
        checkpointing = f"parallel.activation_checkpoint={mode}"
        apart = plan_of(*words, checkpointing, ranks=8)
        shared = plan_of(*words, checkpointing, "comms.saved_headroom=1.25", ranks=8)
        assert apart.arena == 0 < shared.arena and shared.exchange == apart.exchange, mode
        # Instead of the most that can come, layer by layer.
        assert apart.activations - shared.activations > shared.arena
        # An arena stays while gradients come; of rows alone there are nearly as many as can come.
        assert (shared.peak < apart.peak) is (mode == "none")


def test_gradients_of_earlier_micro_batches_are_there_at_the_loss() -> None:
    words = ["experiment=qwen3_30b_a3b", "parallel.ep=8"]
    once = plan_of(*words, "train.global_batch_size=64", ranks=64)
    twice = plan_of(*words, "train.global_batch_size=128", ranks=64)
    assert once.moment == twice.moment == "at the loss" and once.gradients == twice.gradients
    assert twice.peak - once.peak == twice.at_peak["gradients"] == once.gradients


# Of experts that no other rank has a share of nothing is gathered ahead.
@pytest.mark.parametrize(("ranks", "experts"), [(4, 0), (2, 2 * 64 * 3 * 2048 * 768)])
def test_weights_that_stay_gathered_count_all_together(ranks: int, experts: int) -> None:
    words = ["experiment=qwen3_30b_a3b_bench", "parallel.ep=2", "train.global_batch_size=16"]
    freed, kept = (plan_of(*words, f"parallel.reshard_after_forward={flag}", ranks=ranks) for flag in ("true", "false"))
    more = kept.at_most["gathered weights"] - freed.at_most["gathered weights"]
    blocks = (kept.at_most["gathered weights"] - 2 * 2 * 151936 * 2048) / 8
    # Eight blocks instead of two; the root's two tables (and norm) stay in either case.
    assert more == pytest.approx(6 * blocks + experts, rel=1e-3)


def test_experts_of_one_rank_alone_are_gathered_and_reduced_by_nobody() -> None:
    """In fp32 they are computed with as they are, and their gradients are where they stay."""
    words = ["experiment=qwen3_30b_a3b_bench", "parallel.ep=2", "precision=fp32", "train.global_batch_size=16"]
    alone, shared = plan_of(*words, ranks=2), plan_of(*words, ranks=4)
    experts = 64 * 3 * 2048 * 768
    assert shared.at_most["gathered weights"] - alone.at_most["gathered weights"] == 2 * 4 * experts
    assert alone.gradients > shared.gradients


@pytest.mark.parametrize("accumulates", [False, True])
@pytest.mark.parametrize(("recipe", "casts"), [("bf16", True), ("fp32", False)])
def test_a_block_whose_experts_one_rank_has_alone(recipe: str, casts: bool, accumulates: bool) -> None:
    """By moment: 10 numbers of attention of which a rank keeps 5, and 100 of experts; the block before is the same."""
    config = compose(["experiment=qwen3_30b_a3b_bench", "parallel.ep=2", f"precision={recipe}"])
    compute = DTYPES[recipe][1]
    load, block = Load(config, fit_layout(config, 2), compute), Share(105, 110, apart=100, whole=100)
    moments = _moments(load, Share(0, 0), [block, block], [{}, {}], [0, 0], accumulates)
    width, wide, everything = compute.itemsize, 4, 2 * 105 * 4
    backward, reduction = moments["backward of block 1"], moments["reduction of block 1"]
    # Attention's of this block and of the one that is gathered ahead; experts' of this block, if they are cast.
    assert backward["gathered weights"] == (20 + (100 if casts else 0)) * width
    assert reduction["gathered weights"] == 20 * width
    assert backward["unreduced gradients"] == 110 * width
    # As autograd left them; cast to fp32, unless they are that, or are added to those of passes before.
    cast = 100 * wide if casts and not accumulates else 0
    assert reduction["unreduced gradients"] == 100 * width + cast
    # Attention's of a later pass are reduced by themselves, and then added.
    assert reduction["gradients"] == (everything + 5 * wide if accumulates else 0)


def test_further_tokens_take_blocks_heads_and_what_joins_them() -> None:
    words = ["experiment=deepseek_v3_671b", "model.num_layers=4", "train.global_batch_size=8"]
    with_them, without = plan_of(*words, ranks=8), plan_of(*words, "model.mtp.depth=0", ranks=8)
    assert with_them.parameters > without.parameters and with_them.activations > without.activations
    # The loss leaves one more gradient of the head, in fp32.
    more = with_them.at_most["head"] - without.at_most["head"]
    assert more == 4 * 129280 * 7168


def test_a_layout_that_does_not_fit_is_refused_as_at_a_launch() -> None:
    with pytest.raises(ValueError, match=r"parallel\.ep=3"):
        plan_of("experiment=qwen3_30b_a3b_bench", "parallel.ep=3", ranks=8)


def test_command(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["experiment=qwen3_30b_a3b", "cluster=h100", "--ranks", "64", "train.global_batch_size=64"]
    assert main([*words, "parallel.ep=8"]) == 0
    shown = capsys.readouterr().out
    assert "on 64 ranks: dp_replicate=1, dp_shard=64" in shown and "   of 79" in shown and "warning" not in shown
    # A line for each part that is there, and the kinds of what is kept under it.
    assert "  weights " in shown and "    block inputs " in shown
    assert "  comms.backend=auto is counted as symm_mem: it fits\n" in shown and "  exchange " in shown
    assert main([*words, "parallel.ep=8", "comms.backend=collective"]) == 0
    shown = capsys.readouterr().out
    assert "is counted as" not in shown and "  exchange " not in shown
    assert main([*words, "parallel.ep=8", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["peak"] == sum(found["at_peak"].values()) and found["fits"] and found["savings"] == []
    assert found["memory"] == 79 * GIB and found["backend"] == "symm_mem" and found["exchange"] > 0
    assert main([*words, "parallel.ep=7"]) == 2
    assert "parallel.ep=7" in capsys.readouterr().err
    assert main(["experiment=qwen3_30b_a3b", "--ranks", "0"]) == 2
    assert "--ranks 0" in capsys.readouterr().err


def test_every_word_of_the_table_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["experiment=qwen3_30b_a3b", "parallel.ep=8", "train.global_batch_size=64", "comms.backend=symm_mem"]
    # What is compiled keeps fewer kinds.
    words.append("parallel.compile=false")
    parts: set[str] = set()
    for more in ("none", "selective", "full"):
        plan = plan_of(*words, f"parallel.activation_checkpoint={more}", ranks=64)
        assert all(MEANINGS[part] in table(plan, None) for part, size in (plan.at_most | plan.kept).items() if size)
        parts |= plan.at_most.keys() | plan.kept.keys()
    parts |= plan_of("experiment=deepseek_v3_671b", "parallel.activation_checkpoint=none", ranks=64).kept.keys()
    assert parts == MEANINGS.keys()
    assert main(["experiment=demo", "--ranks", "2", "cluster=h100"]) == 0
    assert "whether that fits" not in capsys.readouterr().out
    assert main(["experiment=demo", "--ranks", "2"]) == 0
    shown = capsys.readouterr().out
    assert "  whether that fits: add cluster=h100, or another" in shown
    assert "  at the peak: everything at the moment" in shown and "  peaks: at the loss; backward of a block" in shown


def test_a_mistake_says_what_a_launch_says(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["experiment=qwen3_30b_a3b", "parallel.cp=4", "train.seq_len=4100", "--ranks", "8"]) == 2
    assert "legal, with all else as it is: parallel.cp=2" in capsys.readouterr().err
    assert main(["experiment=qwen3_30b_a3b", "parallel.epp=4", "--ranks", "8"]) == 2
    assert "did you mean" in capsys.readouterr().err


def test_what_does_not_fit_is_said_with_what_helps(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["experiment=qwen3_30b_a3b_bench", "parallel.ep=2", "train.micro_batch_size=16"]
    words += ["train.global_batch_size=32"]
    config = compose(words)
    plan = plan_memory(config, 2)
    assert "warning" not in describe(config, 2, plan, 139.0) and "of 139 GiB" in describe(config, 2, plan, 139.0)
    said = warn(config, 2, plan, 60.0)
    assert "warning: that is more than a device has" in said and "parallel.activation_checkpoint=full" in said
    assert "(which fits)" in said and "train.micro_batch_size=8" in said
    assert "nearly all that a device has" in warn(config, 2, plan, plan.peak / GIB + 0.1)
    assert main([*words, "cluster.memory_gib=60", "--ranks", "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["fits"] is False and found["savings"][0]["change"] in said


def test_what_is_said_to_save_does() -> None:
    words = ["experiment=qwen3_30b_a3b", "parallel.activation_checkpoint=none", "comms.backend=symm_mem"]
    plan = plan_of(*words, ranks=8)
    found = savings(compose(words), 8, plan)
    assert len(found) == 3 and found == sorted(found, key=lambda saving: -saving.saved)
    for change, saved in found:
        changed = plan_of(*words, *change.split(), ranks=8)
        assert plan.peak - changed.peak == saved > 0, change


def test_more_ranks_are_named_where_shares_are_too_large() -> None:
    words = ["experiment=deepseek_v3_671b"]
    (first, *_) = savings(compose(words), 64, plan_of(*words, ranks=64))
    assert first.change == "128 ranks"


def test_where_nothing_helps_that_is_said() -> None:
    words = [
        "experiment=demo",
        "parallel.dp_shard=1",
        "parallel.activation_checkpoint=full",
        "train.micro_batch_size=1",
    ]
    config = compose(words)
    plan = plan_memory(config, 1)
    assert "no change of one setting helps" in warn(config, 1, plan, plan.peak / GIB / 2)


def test_a_run_without_gpu_plans_nothing() -> None:
    config = compose(["experiment=qwen3_30b_a3b_bench", "parallel.ep=2"])
    assert describe_memory(config, 2, torch.device("cpu"), "collective") == ""


def test_a_run_on_a_gpu_says_it_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    config = compose(["experiment=qwen3_30b_a3b_bench", "parallel.ep=2", "cluster.memory_gib=139"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    said = describe_memory(config, 2, torch.device("cuda"), "collective")
    assert said.startswith("  memory  about ") and "of 139 GiB per rank" in said and "\n" not in said
    # No fused experts on that card, which keep less.
    fused = describe(config, 2, plan_memory(config, 2), 139.0)
    assert said != fused and config.model.moe.backend == "auto"
    # What comms.backend=auto has become is counted.
    assert "exchange" not in said and "exchange" in describe_memory(config, 2, torch.device("cuda"), "symm_mem")
    assert "exchange" not in describe_memory(config, 2, torch.device("cuda"), "none")
    assert config.comms.backend == "auto"


def test_what_auto_would_be_fits_or_is_told_with_what_takes_less() -> None:
    words = ["experiment=qwen3_30b_a3b", "parallel.ep=8", "parallel.activation_checkpoint=none"]
    config = compose(words)
    symmetric = [*words, "comms.backend=symm_mem"]
    peak = plan_of(*symmetric, ranks=8).peak / GIB
    assert no_room(config, 8, peak / AUTO_MARGIN + 0.01) == "" and config.comms.backend == "auto"
    said = no_room(config, 8, peak / AUTO_MARGIN - 0.01)
    assert said.startswith(f"with symm_mem the run would take about {peak:.1f} GiB, more than 85% of a GPU's ")
    assert "; comms.backend=symm_mem has to be asked for: with comms.saved_headroom=1.25 it takes " in said
    for setting in ("comms.saved_headroom=1.25", "model.moe.pair_capacity=1.25"):
        less = plan_of(*symmetric, setting, ranks=8).peak / GIB
        assert less < peak and f"with {setting} it takes {less:.1f}" in said
    # Where blocks are checkpointed an arena may take more than it spares.
    words = ["experiment=qwen3_30b_a3b_bench", "parallel.ep=8", "train.global_batch_size=32"]
    full = no_room(compose([*words, "parallel.activation_checkpoint=full"]), 8, 1.0)
    assert "model.moe.pair_capacity=1.25 it takes" in full and "saved_headroom" not in full


@pytest.mark.parametrize("other", ["model.moe.backend=grouped_mm", "precision=fp32", "model.moe.linear_bias=true"])
def test_experts_through_which_no_rows_travel_are_not_planned(other: str) -> None:
    """Rows of 66 numbers are none that symm_mem could move: that is no mistake of a run by collectives."""
    assert (
        no_room(compose(["experiment=demo", "parallel.ep=2", "model.dim=66", "precision=bf16", other]), 2, 1e-3) == ""
    )


@pytest.mark.parametrize(
    ("more", "ranks", "backend", "reason"),
    [
        ("", 64, "symm_mem", "symm_mem: it fits"),
        ("comms.backend=nvshmem", 64, "nvshmem", ""),
        ("parallel.ep=1", 64, "auto", ""),
        # No experts to bring rows to.
        ("model.num_dense_layers=48 model.ffn_dim=64", 64, "auto", ""),
        ("parallel.ep=16", 64, "collective", "collective: the ranks of parallel.ep are on several nodes"),
        ("comms.ranks_per_node=4", 64, "collective", "collective: the ranks of parallel.ep are on several nodes"),
        ("comms.ranks_per_node=8", 64, "symm_mem", "symm_mem: it fits"),
        # All on one node, whatever its groups begin with; and groups that nodes cut.
        ("cluster.gpus_per_node=12 cluster.memory_gib=140", 8, "symm_mem", "symm_mem: it fits"),
        ("cluster.gpus_per_node=12", 64, "collective", "collective: the ranks of parallel.ep are on several nodes"),
        ("parallel.tp=2 parallel.etp=2", 64, "collective", "collective: the ranks of parallel.ep are on several nodes"),
        ("cluster.name=b200", 64, "collective", "collective: rows cannot travel while these experts compute"),
        ("cluster.memory_gib=15", 64, "collective", "collective: with symm_mem the run would take about "),
        ("cluster.memory_gib=null", 64, "collective", "collective: cluster.memory_gib is not known"),
    ],
)
def test_auto_is_planned_as_a_run_would_choose(more: str, ranks: int, backend: str, reason: str) -> None:
    words = ["experiment=qwen3_30b_a3b", "cluster=h100", "parallel.ep=8", "train.global_batch_size=64"]
    config = compose([*words, *more.split()])
    asked = config.comms.backend
    settled, said = settle_backend(config, ranks)
    assert settled.comms.backend == backend and said.startswith(reason) and bool(said) is bool(reason)
    assert config.comms.backend == asked


def test_bounds_are_told_with_the_backend_that_has_them() -> None:
    """Where `auto` has become symm_mem, which fits here and not on the card that `cluster` describes."""
    words = ["experiment=qwen3_30b_a3b", "parallel.ep=8", "parallel.activation_checkpoint=none"]
    config = compose([*words, "comms.backend=symm_mem"])
    changes = [change for change, _ in savings(config, 8, plan_memory(config, 8))]
    bounds = [change for change in changes if "capacity" in change or "headroom" in change]
    assert bounds and all(change.endswith(" comms.backend=symm_mem") for change in bounds)


def test_default_config_can_be_planned() -> None:
    assert plan_memory(Config(), 1).peak > 0


def test_planning_leaves_no_trace() -> None:
    """No exchange, no process group, no tensor: the same config, the same plan."""
    config = compose(["experiment=qwen3_30b_a3b", "comms.backend=symm_mem"])
    assert plan_memory(config, 8) == plan_memory(config, 8) == plan_memory(copy.deepcopy(config), 8)
    assert exchanges() == [] and not torch.distributed.is_initialized()
