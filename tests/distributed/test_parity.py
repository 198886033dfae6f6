"""Every layout computes what one process computes: loss, each gradient by name, norm, counts, weights after 3 steps.

Bounds (DESIGN section 6): 1e-10 in fp64 with the reference experts, where only the order of sums differs (correct code
shows 4e-16, a wrong factor 0.5 or more); 5e-6 in fp32 through grouped_mm, where splitting a batch alone moves gradients
by 1e-6. Initial weights and counts are compared exactly, always.
"""

import math
from dataclasses import replace
from functools import cache
from unittest.mock import patch

import pytest
import torch

from moe.layer import BalanceScale
from parallel.config import ParallelConfig
from tests.distributed.harness import run_workers
from tests.distributed.tiny_models import DEEPSEEK, GPT_OSS, MODELS, MULTI_TOKEN, QWEN3, num_moe_layers
from tests.distributed.traces import ONE, assert_same, kept, settled, trace_of, trace_on_rank_0
from trainer.models.config import ModelConfig
from trainer.parity import Trace, compare, full, named_parameters, relative_error

FP64_BOUND = 1e-10
FP32_BOUND = 5e-6

LAYOUTS = {
    "one": ONE,
    "fsdp2": settled(2),
    "ep2": settled(2, ep=2),
    "ep2_fsdp2": settled(4, ep=2),
    "ep4": settled(4, ep=4),
    "hsdp": settled(4, dp_replicate=2),
    "hsdp_ep2": settled(4, dp_replicate=2, ep=2),
}
SEVERAL = [name for name in LAYOUTS if name != "one"]
# The families whose parts appear in the first three: two layouts are enough for what is their own.
PAIRED = [
    (layout, name)
    for layout in SEVERAL
    for name in MODELS
    if name in ("qwen3", "deepseek", "gpt_oss") or layout in ("ep2", "ep2_fsdp2")
]


def traced(model: ModelConfig, parallel: ParallelConfig, **options) -> Trace | None:
    """In a worker: the trace, of which rank 0's is the one that is looked at."""
    return trace_on_rank_0(model, parallel, options)


def run_layout(name: str, model: ModelConfig, **options) -> Trace:
    return trace_of(LAYOUTS[name], model, **options)


def plain(layout: str, name: str, recipe: str = "fp64") -> Trace:
    """Traces that several tests look at."""
    return kept(LAYOUTS[layout], name, recipe)


def norm(trace: Trace, part: str) -> float:
    squares = [float(grad.square().sum()) for name, grad in trace.gradients.items() if part in name]
    assert squares, part
    return math.sqrt(sum(squares))


@pytest.mark.parametrize(("layout", "name"), PAIRED)
def test_layout_equals_one_process(layout: str, name: str) -> None:
    reference = plain("one", name)
    # The comparison is worth something only if nothing in it is trivially zero.
    assert all(float(grad.norm()) > 0 for grad in reference.gradients.values())
    assert_same(plain(layout, name), reference, FP64_BOUND)


@pytest.mark.parametrize("name", MODELS)
def test_grouped_mm_in_fp32(name: str) -> None:
    assert_same(plain("ep2_fsdp2", name, "fp32"), plain("one", name, "fp32"), FP32_BOUND)


@pytest.mark.parametrize("name", MODELS)
def test_grouped_mm_computes_what_the_reference_experts_compute(name: str) -> None:
    """fp32 through grouped_mm against fp64 through the loop; 1e-4: fp32 rounding of two layers and three steps."""
    ours, oracle = plain("one", name, "fp32"), plain("one", name)
    errors = {key: relative_error(ours.gradients[key], grad) for key, grad in oracle.gradients.items()}
    assert max(errors.values()) < 1e-4, sorted(errors.items(), key=lambda item: -item[1])[:5]
    assert ours.losses == pytest.approx(oracle.losses, rel=1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_case_01_expert_gradients_are_not_doubled(name: str) -> None:
    ours, reference = plain("ep2", name), plain("one", name)
    assert norm(ours, ".experts.") / norm(reference, ".experts.") == pytest.approx(1, abs=FP64_BOUND)


def test_case_02_expert_gradients_are_identical_for_ep_1_2_4() -> None:
    reference = norm(plain("hsdp", "qwen3"), ".experts.")
    for layout in ("fsdp2", "ep2", "ep2_fsdp2", "ep4", "hsdp_ep2"):
        assert norm(plain(layout, "qwen3"), ".experts.") / reference == pytest.approx(1, abs=FP64_BOUND), layout


def test_case_03_parameters_after_steps_with_ep_and_fsdp_agree() -> None:
    ours, reference = plain("ep2_fsdp2", "gpt_oss"), plain("one", "gpt_oss")
    assert ours.final.keys() == reference.final.keys()
    for key, value in reference.final.items():
        assert relative_error(ours.final[key], value) <= FP64_BOUND, key
    moved = [key for key, value in reference.final.items() if not torch.equal(value, reference.initial[key])]
    assert len(moved) == len(reference.final)


@pytest.mark.parametrize(("layout", "name"), PAIRED)
def test_case_08_the_router_gradient_is_right_in_every_layout(layout: str, name: str) -> None:
    ours, reference = plain(layout, name), plain("one", name)
    keys = [key for key in reference.gradients if ".router." in key]
    assert keys
    for key in keys:
        assert float(reference.gradients[key].norm()) > 0
        assert relative_error(ours.gradients[key], reference.gradients[key]) <= FP64_BOUND, key


@pytest.mark.parametrize("layout", SEVERAL)
def test_case_10_the_router_learns_without_auxiliary_losses(layout: str) -> None:
    """GPT_OSS has none: what reaches its router comes back through the combine weights alone."""
    assert GPT_OSS.moe.aux_loss == GPT_OSS.moe.z_loss == 0
    ours, reference = norm(plain(layout, "gpt_oss"), "moe.router"), norm(plain("one", "gpt_oss"), "moe.router")
    assert reference > 1e-6
    assert ours / reference == pytest.approx(1, abs=FP64_BOUND)


@pytest.mark.parametrize("layout", SEVERAL)
def test_case_16_the_norm_of_a_layout_is_that_of_one_process(layout: str) -> None:
    ours, reference = plain(layout, "qwen3"), plain("one", "qwen3")
    assert ours.grad_norms == pytest.approx(reference.grad_norms, rel=FP64_BOUND)
    # And it is the norm of the whole gradient.
    assert ours.grad_norms[0] == pytest.approx(norm(ours, ""), rel=FP64_BOUND)


def test_a_clipped_first_step_equals_that_of_one_process() -> None:
    """Elsewhere the steps after the first are clipped."""
    bound = 0.2
    ours, reference = (run_layout(name, QWEN3, max_grad_norm=bound, clip_later=False) for name in ("ep2_fsdp2", "one"))
    assert min(reference.grad_norms) > bound
    # Gradients are looked at after clipping.
    assert norm(reference, "") == pytest.approx(bound, rel=1e-4)
    assert_same(ours, reference, FP64_BOUND)


@pytest.mark.parametrize("layout", ["one", "ep2", "ep2_fsdp2"])
def test_accumulated_micro_steps_equal_one_large_step(layout: str) -> None:
    """Invariance across accumulation is promised for the sequence-level loss and the balancing bias."""
    assert DEEPSEEK.moe.aux_loss_level == "sequence"
    assert_same(run_layout(layout, DEEPSEEK, micro_steps=2), plain("one", "deepseek"), FP64_BOUND)


def explicit_gradients(model: ModelConfig) -> tuple[list[float], dict[str, torch.Tensor]]:
    """d(CE + aux + weight * mean over depths of the mean loss), written out for the first step's batch in one piece."""
    from parallel.mesh import build_mesh
    from trainer.build import build_model
    from trainer.config import Config, PrecisionConfig, TrainConfig
    from trainer.parity import synthetic_batches
    from trainer.step import forward, global_counts

    mesh = build_mesh(ParallelConfig(), torch.device("cpu"))
    train = TrainConfig(global_batch_size=8, micro_batch_size=8, seq_len=16)
    config = Config(train=train, model=model, parallel=mesh.config, precision=PrecisionConfig(recipe="fp64"))
    built = build_model(config, mesh)
    batches = synthetic_batches(config, mesh, 0)
    num_valid, num_tokens = global_counts(batches, mesh)
    out = forward(built, batches[0], mesh.device, True, BalanceScale(num_tokens, 8, 1))
    labels, ids = batches[0].labels_BS, batches[0].document_ids_BS
    means = []
    for depth, loss_sum in enumerate(out.mtp_loss_sums_M, start=1):
        follows = (ids[:, depth:] == ids[:, :-depth]) & (ids[:, depth:] >= 0) & (labels[:, depth:] != -100)
        means.append(loss_sum / follows.sum())
    further = sum(means) / len(means)
    (out.loss_sum / num_valid + out.aux_loss + model.mtp.loss_weight * further).backward()
    return [float(further.detach())], {name: full(p.grad) for name, p in named_parameters(built)}


def test_further_tokens_add_their_weighted_mean() -> None:
    losses, gradients = run_workers(explicit_gradients, 1, MULTI_TOKEN)[0]
    reference = plain("one", "multi_token")
    assert reference.mtp_losses[0] == pytest.approx(losses[0], rel=FP64_BOUND)
    assert gradients.keys() == reference.gradients.keys()
    for key, gradient in gradients.items():
        assert relative_error(reference.gradients[key], gradient) <= FP64_BOUND, key


def test_accumulation_normalises_further_tokens_by_the_whole_step() -> None:
    """Micro-steps have unequal numbers of labels at each depth: a mean of their means would differ."""
    reference, ours = plain("one", "multi_token"), run_layout("ep2_fsdp2", MULTI_TOKEN, micro_steps=2)
    assert min(reference.mtp_losses) > 1
    assert_same(ours, reference, FP64_BOUND)


def test_layouts_agree_on_accumulated_micro_steps_with_the_batch_level_loss() -> None:
    reference = run_layout("one", QWEN3, micro_steps=2)
    assert_same(run_layout("ep2_fsdp2", QWEN3, micro_steps=2), reference, FP64_BOUND)


@pytest.mark.parametrize("layout", SEVERAL)
def test_case_26_auxiliary_losses_do_not_scale_with_the_layout(layout: str) -> None:
    ours, reference = plain(layout, "qwen3"), plain("one", "qwen3")
    assert min(reference.aux_losses) > 0
    assert ours.aux_losses == pytest.approx(reference.aux_losses, rel=FP64_BOUND)


@pytest.mark.parametrize("name", ["qwen3", "deepseek", "multi_token"])
def test_case_21_22_counts_are_whole_and_move_the_bias(name: str) -> None:
    """Counts are of real tokens: padding is neither routed nor counted (the synthetic batches have some)."""
    trace, config = plain("ep2_fsdp2", name), MODELS[name].moe
    sums = {int(layer.sum()) for counts in trace.counts for layer in counts}
    assert all(total % config.top_k == 0 and total < 8 * 16 * config.top_k for total in sums), sums
    biases = [value for key, value in trace.final.items() if key.endswith("expert_bias")]
    assert len(biases) == (num_moe_layers(MODELS[name]) if config.expert_bias else 0)
    assert all(float(bias.abs().max()) > 0 for bias in biases)


@pytest.mark.parametrize("layout", ["ep2", "ep2_fsdp2"])
def test_case_34_capacity_drops_the_same_pairs_in_every_layout(layout: str) -> None:
    """Capacity is per sequence, so what is dropped does not depend on the layout; ranks receive unequal rows."""
    model = replace(GPT_OSS, moe=replace(GPT_OSS.moe, capacity_factor=0.75))
    reference = _capacity_reference(model.moe.capacity_factor)
    # It does drop: the trace is not that of the dropless model. `assert_same` compares the numbers of dropped pairs.
    assert min(reference.dropped) > 0 == max(plain("one", "gpt_oss").dropped)
    assert compare(reference, plain("one", "gpt_oss"), FP64_BOUND)
    assert_same(run_layout(layout, model), reference, FP64_BOUND)


@cache
def _capacity_reference(factor: float) -> Trace:
    return run_layout("one", replace(GPT_OSS, moe=replace(GPT_OSS.moe, capacity_factor=factor)))


def choose_the_first(logits_TE: torch.Tensor, *_) -> torch.Tensor:
    """Every token goes to experts 0 to K-1: all of them live on the first rank."""
    return torch.arange(QWEN3.moe.top_k).expand(logits_TE.shape[0], -1)


def trace_with_one_busy_rank(parallel: ParallelConfig) -> Trace | list[float]:
    with patch("moe.router._choose", choose_the_first):
        return traced(QWEN3, parallel)


@pytest.mark.parametrize("layout", ["ep2", "ep2_fsdp2"])
def test_case_11_15_idle_experts_have_zero_gradients_and_nothing_hangs(layout: str) -> None:
    reference = run_workers(trace_with_one_busy_rank, 1, ParallelConfig())[0]
    num_processes, parallel = LAYOUTS[layout]
    ours = run_workers(trace_with_one_busy_rank, num_processes, parallel)[0]
    assert_same(ours, reference, FP64_BOUND)
    for key, grad in ours.gradients.items():
        if ".experts." in key:
            used, idle = grad[: QWEN3.moe.top_k], grad[QWEN3.moe.top_k :]
            assert bool((idle == 0).all()) and float(used.norm()) > 0, key


def trace_with_an_idle_rank(parallel: ParallelConfig) -> Trace | list[float]:
    """The first half of each global batch is padding alone: the first rank has no token at all."""
    from trainer import parity

    original = parity.synthetic_sample

    def sample(config, index: int):
        tokens, labels, positions, documents, sample_id = original(config, index)
        if index % config.train.global_batch_size < config.train.global_batch_size // 2:
            labels, documents = torch.full_like(labels, -100), torch.full_like(documents, -1)
        return tokens, labels, positions, documents, sample_id

    with patch.object(parity, "synthetic_sample", sample):
        return traced(QWEN3, parallel)


@pytest.mark.parametrize("layout", ["ep2", "ep2_fsdp2"])
def test_a_rank_without_tokens_takes_part(layout: str) -> None:
    reference = run_workers(trace_with_an_idle_rank, 1, ParallelConfig())[0]
    num_processes, parallel = LAYOUTS[layout]
    ours = run_workers(trace_with_an_idle_rank, num_processes, parallel)[0]
    assert_same(ours, reference, FP64_BOUND)


def trace_on_dirty_memory(recipe: str) -> Trace | list[float]:
    """Every fresh tensor is filled with NaN (integers: with their largest value) before use."""
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    assert torch.empty(3).isnan().all()
    try:
        return traced(GPT_OSS, ParallelConfig(ep=2), recipe=recipe)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("recipe", ["fp64", "fp32"])
def test_case_13_nothing_uninitialised_is_ever_read(recipe: str) -> None:
    ours = run_workers(trace_on_dirty_memory, 2, recipe)[0]
    assert_same(ours, plain("ep2", "gpt_oss", recipe), 0.0)


def adamw_step_counts() -> set[float]:
    """Two AdamW steps while most experts are idle; the step counts found in the optimizer's state."""
    from parallel.mesh import build_mesh
    from trainer.build import build_model
    from trainer.config import Config, OptimConfig, PrecisionConfig, TrainConfig
    from trainer.optim import build_optimizer
    from trainer.parity import synthetic_batches
    from trainer.step import train_step

    mesh = build_mesh(ParallelConfig(ep=2), torch.device("cpu"))
    config = Config(
        train=TrainConfig(global_batch_size=4, micro_batch_size=2, seq_len=8),
        model=QWEN3,
        parallel=mesh.config,
        precision=PrecisionConfig(recipe="fp32"),
        optim=OptimConfig(name="adamw"),
    )
    model = build_model(config, mesh)
    optimizer = build_optimizer(model, config.optim)
    with patch("moe.router._choose", choose_the_first):
        for step in range(2):
            train_step(model, optimizer, synthetic_batches(config, mesh, step), mesh, config)
    assert all(bool(torch.isfinite(p.to_local()).all()) for p in model.parameters())
    return {float(optimizer.state[parameter]["step"]) for parameter in model.parameters()}


def test_case_11_every_parameter_has_taken_every_optimizer_step() -> None:
    assert run_workers(adamw_step_counts, 2) == [{2.0}, {2.0}]
