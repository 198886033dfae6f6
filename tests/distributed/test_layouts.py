"""Layouts of every axis and every pair of axes compute what one process computes; CASES 5, 7, 16, 19 and 37 to 39.

A few layouts stand for all: `covering` picks them, so that they change when the rules do. All of them, up to 8
processes, are one command: `python scripts/parity.py matrix`. Bounds as in tests/distributed/test_parity.py.
"""

import functools
import itertools
import math
from dataclasses import replace
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
from torch.nn import functional as F

from parallel.config import ParallelConfig
from parallel.mesh import Mesh, build_mesh
from tests.distributed.harness import run_workers
from tests.distributed.tiny_models import MODELS, QWEN3
from tests.distributed.traces import ONE, assert_same, kept, one_process, settled, trace_of, trace_on_rank_0
from trainer.build import build_model
from trainer.config import Config, OptimConfig, PrecisionConfig, TrainConfig
from trainer.data import Batch
from trainer.evaluate import EvalResult, evaluate
from trainer.models.transformer import Transformer
from trainer.optim import build_optimizer
from trainer.parity import Trace, relative_error, synthetic_batches
from trainer.parity_layouts import AXES, Layout, covering, legal_layouts
from trainer.step import forward, sum_over, train_step

BOUND, FP32_BOUND = 1e-10, 5e-6
NAMES = ("qwen3", "deepseek", "gpt_oss")
TRAIN = TrainConfig(global_batch_size=8, seq_len=16)


def layouts_of(num_processes: int) -> list[Layout]:
    return legal_layouts(Config(model=QWEN3, train=TRAIN), num_processes)


# Two processes: every layout with every model. Four: every pair of axes, the models in turn. Eight: the same with
# three axes and more, where sharing experts out over several axes and rings of several chunks begin.
PAIRS = [(layout, NAMES[index % 3]) for index, layout in enumerate(covering(layouts_of(4)))]
TRIPLES = [(layout, NAMES[index % 3]) for index, layout in enumerate(covering(layouts_of(8)))]
SUBSET = [*((layout, name) for layout in layouts_of(2) for name in NAMES), *PAIRS, *TRIPLES]


def name_of(value: Layout | str) -> str:
    return value if isinstance(value, str) else value.name.replace(" ", "-")


def norm(gradients: dict[str, torch.Tensor], part: str = "") -> float:
    return math.sqrt(sum(float(grad.square().sum()) for name, grad in gradients.items() if part in name))


def test_the_subset_has_every_pair_of_axes() -> None:
    pairs = {pair for one, _ in SUBSET for pair in itertools.combinations(one.axes, 2)}
    # Every pair there is: none of the axes excludes another.
    assert pairs == set(itertools.combinations(AXES, 2))
    assert {name for _, name in PAIRS} == set(NAMES)
    assert any(len(one.axes) >= 4 for one, _ in TRIPLES)


@pytest.mark.parametrize(("one", "name"), SUBSET, ids=name_of)
def test_layout_equals_one_process(one: Layout, name: str) -> None:
    """And CASE 16: the norm is that of the whole gradient, whatever it is split over."""
    trace, reference = kept(one, name), one_process(name)
    assert_same(trace, reference, BOUND)
    assert trace.grad_norms[0] == pytest.approx(norm(reference.gradients), rel=BOUND)


@pytest.mark.parametrize("name", NAMES)
def test_case_16_the_norm_of_every_axis_and_pair_of_axes_is_that_of_one_process(name: str) -> None:
    compared = [(one, kept(one, name)) for one, of in SUBSET if of == name]
    assert len(compared) > len(layouts_of(2))
    for one, trace in compared:
        assert trace.grad_norms == pytest.approx(one_process(name).grad_norms, rel=BOUND), one.name


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("one", [settled(2, tp=2), settled(2, tp=2, etp=2)], ids=name_of)
def test_case_07_the_router_gradient_is_whole_under_tp_without_ep(one: Layout, name: str) -> None:
    ours, reference = kept(one, name).gradients, one_process(name).gradients
    routers = [key for key in reference if ".router." in key]
    assert routers
    for key in routers:
        assert float(ours[key].norm() / reference[key].norm()) == pytest.approx(1, abs=BOUND)
        assert relative_error(ours[key], reference[key]) <= BOUND, key


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("one", [settled(2, tp=2, ep=2), settled(4, tp=2, ep=2)], ids=name_of)
def test_case_19_the_norm_counts_experts_once_under_ep_and_tp(one: Layout, name: str) -> None:
    ours, reference = kept(one, name), one_process(name)
    assert ours.grad_norms == pytest.approx(reference.grad_norms, rel=BOUND)
    assert norm(ours.gradients, ".experts.") == pytest.approx(norm(reference.gradients, ".experts."), rel=BOUND)


class Built(NamedTuple):
    """A model in a worker, and what one step of it needs."""

    model: Transformer
    mesh: Mesh
    config: Config
    batches: list[Batch]


def build(name: str, parallel: ParallelConfig) -> Built:
    mesh = build_mesh(parallel, torch.device("cpu"))
    train = replace(TRAIN, micro_batch_size=TRAIN.global_batch_size // mesh.batch_size)
    precision, optim = PrecisionConfig(recipe="fp64"), OptimConfig(name="sgd", lr=0.1, weight_decay=0.0)
    config = Config(train=train, model=MODELS[name], parallel=mesh.config, precision=precision, optim=optim)
    return Built(build_model(config, mesh), mesh, config, synthetic_batches(config, mesh, 0))


def input_gradients(name: str, parallel: ParallelConfig) -> dict[str, torch.Tensor]:
    """dX of every block, of whole sequences."""
    model, mesh, _, batches = build(name, parallel)
    inputs: dict[str, torch.Tensor] = {}

    def keep(layer: str, module: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        args[0].retain_grad()
        inputs[layer] = args[0]

    for layer, block in model.layers.items():
        block.attention_norm.register_forward_pre_hook(functools.partial(keep, layer))
    output = forward(model, batches[0], mesh.device, True)
    output.loss_sum.backward()
    return {layer: x.grad if mesh.sequence is None else mesh.sequence.whole(x.grad) for layer, x in inputs.items()}


@pytest.mark.parametrize("name", NAMES)
def test_case_05_the_gradient_of_a_gathered_input_is_summed(name: str) -> None:
    reference = run_workers(input_gradients, 1, name, ParallelConfig())[0]
    for ours in run_workers(input_gradients, 2, name, ParallelConfig(tp=2)):
        assert ours.keys() == reference.keys() == {"0", "1"}
        for layer, gradient in reference.items():
            assert relative_error(ours[layer], gradient) <= BOUND, layer


def evaluated(name: str, parallel: ParallelConfig) -> EvalResult:
    model, mesh, _, batches = build(name, parallel)
    return evaluate(model, batches, mesh, torch.arange(MODELS[name].vocab_size), document_mask=True)


@pytest.mark.parametrize(
    "one", [settled(2, cp=2), settled(2, cp=2, ulysses=2), settled(4, cp=2), settled(4, cp=2, tp=2)], ids=name_of
)
def test_case_37_the_evaluation_loss_is_not_multiplied_by_cp(one: Layout) -> None:
    reference = run_workers(evaluated, 1, "qwen3", ParallelConfig())[0]
    for ours in run_workers(evaluated, one.num_processes, "qwen3", one.parallel):
        assert ours.loss / reference.loss == pytest.approx(1, abs=BOUND)
        assert ours.bits_per_byte / reference.bits_per_byte == pytest.approx(1, abs=BOUND)
        assert ours.num_tokens == reference.num_tokens


def logged_and_recomputed_loss(name: str, parallel: ParallelConfig) -> tuple[float, float]:
    """What the step tells, and the mean over all valid labels of the cross-entropy of logits written out."""
    model, mesh, config, batches = build(name, parallel)
    optimizer = build_optimizer(model, config.optim)
    batch = batches[0]
    model.eval()
    with torch.no_grad():
        output = model(batch.tokens_BS, positions_BS=batch.positions_BS, document_ids_BS=batch.document_ids_BS)
    sums = F.cross_entropy(output.logits_BSV.flatten(0, 1), batch.labels_BS.flatten(), reduction="sum")
    totals = torch.stack([sums, (batch.labels_BS != -100).sum().double()])
    # Ranks that share sequences have all of their logits here.
    sum_over(totals, mesh.batch_group)
    model.train()
    step = train_step(model, optimizer, batches, mesh, config)
    return float(step.loss), float(totals[0] / totals[1])


@pytest.mark.parametrize(
    "one", [settled(4, cp=2, tp=2), settled(4, cp=2, ulysses=2, tp=2), settled(8, cp=2, tp=2)], ids=name_of
)
def test_case_38_the_logged_loss_is_the_true_one_under_tp_and_cp(one: Layout) -> None:
    for logged, recomputed in run_workers(logged_and_recomputed_loss, one.num_processes, "deepseek", one.parallel):
        assert logged == pytest.approx(recomputed, rel=BOUND)
        assert logged == pytest.approx(one_process("deepseek").losses[0], rel=BOUND)


# Of a sequence of 16: document A is the first 7 tokens, document B the rest.
SPLIT = 7


def logits_before_and_after(name: str, parallel: ParallelConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of a sequence of two documents, before and after document A changes."""
    model, *_ = build(name, parallel)
    model.eval()
    tokens, places = torch.arange(16)[None] * 3 % 64, torch.arange(16)[None]
    is_first = places < SPLIT
    with torch.no_grad():
        before, after = (
            model(
                torch.where(is_first, (tokens + shift) % 64, tokens),
                positions_BS=torch.where(is_first, places, places - SPLIT),
                document_ids_BS=torch.where(is_first, 0, 1),
            ).logits_BSV
            for shift in (0, 5)
        )
    return before, after


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "one", [settled(2, cp=2), settled(2, cp=2, ulysses=2), settled(4, cp=4, ulysses=2)], ids=name_of
)
def test_case_39_packed_documents_do_not_see_each_other_under_cp(one: Layout, name: str) -> None:
    for before, after in run_workers(logits_before_and_after, one.num_processes, name, one.parallel):
        assert relative_error(after[:, SPLIT:], before[:, SPLIT:]) <= 1e-12
        assert relative_error(after[:, :SPLIT], before[:, :SPLIT]) > 1e-2


# What is done around a layout does not change its numbers.
AROUND = [
    (settled(2, tp=2, ep=2), "qwen3"),
    (settled(2, cp=2, ep=2), "deepseek"),
    (settled(4, cp=2, ulysses=2, tp=2, etp=2), "gpt_oss"),
]


@pytest.mark.parametrize(("one", "name"), AROUND, ids=name_of)
def test_grouped_mm_in_fp32(one: Layout, name: str) -> None:
    assert_same(kept(one, name, "fp32"), one_process(name, "fp32"), FP32_BOUND)


@pytest.mark.parametrize("mode", ["selective", "full"])
@pytest.mark.parametrize(("one", "name"), AROUND, ids=name_of)
def test_activation_checkpointing_changes_nothing(one: Layout, name: str, mode: str) -> None:
    parallel = replace(one.parallel, activation_checkpoint=mode)
    assert_same(trace_of(one._replace(parallel=parallel), MODELS[name]), one_process(name), BOUND)


@pytest.mark.parametrize(("one", "name"), AROUND, ids=name_of)
def test_accumulation_changes_nothing(one: Layout, name: str) -> None:
    """Against one process that accumulates too: the batch-level auxiliary loss is defined by micro-step."""
    assert_same(trace_of(one, MODELS[name], micro_steps=2), trace_of(ONE, MODELS[name], micro_steps=2), BOUND)


def trace_compiled(name: str, parallel: ParallelConfig) -> Trace | None:
    """Graphs are captured and differentiated as always, then run by the operators themselves: no code generation."""
    with patch.object(torch, "compile", functools.partial(torch.compile, backend="aot_eager")):
        trace = trace_on_rank_0(MODELS[name], replace(parallel, compile=True), {})
    # Attention with its norms, the router, the experts' activation.
    counters = torch._dynamo.utils.counters
    assert counters["stats"]["unique_graphs"] >= 3 and not counters["graph_break"], counters
    return trace


@pytest.mark.parametrize(("one", "name"), AROUND[:2], ids=name_of)
def test_compiled_graphs_compute_the_same(one: Layout, name: str) -> None:
    """What Inductor makes of the graphs is compared on GPUs (tests/gpu/test_train_gpu.py)."""
    assert_same(run_workers(trace_compiled, one.num_processes, name, one.parallel)[0], one_process(name), BOUND)


def trace_by_inductor(name: str) -> Trace | None:
    """Attention with its norms alone is compiled: what is kept for backward lies among what its own kernels write."""
    compile = torch.compile

    def attend_alone(function: Any, **options: Any) -> Any:
        return compile(function, **options) if function.__name__ == "attend" else function

    parallel = ParallelConfig(tp=2, async_tp="native", activation_checkpoint="selective", compile=True)
    with patch.object(torch, "compile", attend_alone):
        trace = trace_on_rank_0(MODELS[name], parallel, {})
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] >= 1
    return trace


def test_what_is_kept_for_backward_is_not_written_to_by_compiled_graphs() -> None:
    """0.4 is seen where what is kept is no copy."""
    assert_same(run_workers(trace_by_inductor, 2, "qwen3")[0], one_process("qwen3"), BOUND)
