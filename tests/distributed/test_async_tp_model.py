"""A model whose matmuls overlap with their transfer computes what one process computes; CASES 63 and 64's kind."""

import re
from collections import Counter
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch

from comms import async_tp
from comms.shard_transport import Messages
from moe.linear_maps import local
from parallel.async_tp import AsyncChoice, connect_async_tp, transfers_of
from parallel.config import ParallelConfig
from parallel.mesh import build_mesh
from parallel.sizes import resolve_sizes
from parallel.tensor_parallel import TensorParallelMaps, Transfer
from tests.distributed.harness import run_workers
from tests.distributed.tiny_models import MODELS
from tests.distributed.traces import assert_same, one_process, trace_of
from trainer.banner import describe_async_tp
from trainer.build import build_model
from trainer.config import Config, PrecisionConfig, TrainConfig
from trainer.models.config import ModelConfig
from trainer.models.transformer import Transformer
from trainer.parity import synthetic_batches
from trainer.parity_layouts import Layout
from trainer.step import forward


def native(num_processes: int, **sizes) -> Layout:
    return Layout(num_processes, resolve_sizes(ParallelConfig(async_tp="native", **sizes), num_processes))


NATIVE = native(2, tp=2)
# tp=4 has more ranks than key and value heads; activation checkpointing runs the operators twice.
OTHERS = [
    (native(4, tp=4), "qwen3"),
    (native(4, tp=2, ep=2, cp=2), "gpt_oss"),
    (native(2, tp=2, etp=2, activation_checkpoint="full"), "deepseek"),
    (native(2, tp=2, activation_checkpoint="selective"), "deepseek"),
]


@pytest.mark.parametrize("name", ["qwen3", "deepseek", "gpt_oss"])
def test_native_async_tp_equals_one_process(name: str) -> None:
    assert_same(trace_of(NATIVE, MODELS[name]), one_process(name), 1e-10)


@pytest.mark.parametrize(("layout", "name"), OTHERS)
def test_native_async_tp_beside_other_axes_equals_one_process(layout: Layout, name: str) -> None:
    assert_same(trace_of(layout, MODELS[name]), one_process(name), 1e-10)


def test_native_async_tp_in_fp32() -> None:
    trace = trace_of(NATIVE, MODELS["qwen3"], recipe="fp32")
    assert_same(trace, one_process("qwen3", "fp32"), 5e-6)


def build(model: ModelConfig, parallel: ParallelConfig, **train) -> tuple[Transformer, Config]:
    mesh = build_mesh(parallel, torch.device("cpu"))
    train = TrainConfig(global_batch_size=2, micro_batch_size=2, seq_len=8, **train)
    config = Config(train=train, model=model, parallel=mesh.config, precision=PrecisionConfig(recipe="fp64"))
    return build_model(config, mesh), config


def told_and_called(name: str, parallel: ParallelConfig) -> tuple[AsyncChoice, str, int, int]:
    """What the run says of itself; how many maps one forward takes through fused operators, and how many through
    plain ones."""
    model, config = build(MODELS[name], parallel)
    mesh, fused, plain = build_mesh(parallel, torch.device("cpu")), [], []
    gather, scatter = async_tp.all_gather_matmul, async_tp.matmul_reduce_scatter

    def count_gather(x, weights, *rest, **more):
        fused.extend(weights)
        return gather(x, weights, *rest, **more)

    def count_scatter(x, weight, *rest, **more):
        fused.append(weight)
        return scatter(x, weight, *rest, **more)

    with (
        patch("parallel.tensor_parallel.all_gather_matmul", count_gather),
        patch("parallel.tensor_parallel.matmul_reduce_scatter", count_scatter),
        patch.object(TensorParallelMaps, "_columns", lambda self, x, linear: plain.append(linear)),
        torch.no_grad(),
    ):
        forward(model, synthetic_batches(config, mesh, 0)[0], mesh.device, True)
    return model.async_tp, describe_async_tp(model.async_tp), len(fused), len(plain)


@pytest.mark.parametrize("name", list(MODELS))
def test_case_63_a_run_says_how_many_matmuls_are_fused(name: str) -> None:
    """And that is how many there are: a forward takes each map once (evaluation leaves out what predicts further)."""
    for choice, said, num_fused, num_plain in run_workers(told_and_called, 2, name, NATIVE.parallel):
        assert f"native: {choice.num_fused} matmuls fused" in said
        assert choice.num_fused == num_fused > 0 == num_plain


def gathers_of_blocks() -> tuple[list[list[list[str]]], int, int]:
    """Of each block of a forward, the maps of each of its fused calls; all gathers and scatters there were."""
    model, config = build(replace(MODELS["qwen3"], num_dense_layers=1, ffn_dim=48), NATIVE.parallel)
    mesh, found, counts = build_mesh(NATIVE.parallel, torch.device("cpu")), [], Counter()
    fused = async_tp.all_gather_matmul
    names: dict[int, str] = {}

    def enter(block, _) -> None:
        found.append([])
        linears = [(n, m) for n, m in block.named_modules() if isinstance(m, torch.nn.Linear)]
        names.update({local(linear.weight).data_ptr(): name for name, linear in linears})

    def record(x, weights, *rest, **more):
        found[-1].append([names[weight.data_ptr()] for weight in weights])
        return fused(x, weights, *rest, **more)

    def counted(method):
        def count(self, *given, **named):
            counts[method.__name__] += 1
            return method(self, *given, **named)

        return count

    for block in model.layers.values():
        block.register_forward_pre_hook(enter)
    with (
        patch("parallel.tensor_parallel.all_gather_matmul", record),
        patch.multiple(Messages, gather=counted(Messages.gather), scatter=counted(Messages.scatter)),
        torch.no_grad(),
    ):
        forward(model, synthetic_batches(config, mesh, 0)[0], mesh.device, True)
    return found, counts["gather"], counts["scatter"]


def test_maps_of_the_same_tokens_share_one_gather() -> None:
    attention = ["attention.wq", "attention.wk", "attention.wv"]
    # A dense block, and one whose experts take each rank's own tokens.
    expected = [[attention, ["feed_forward.w_gate", "feed_forward.w_up"]], [attention]]
    # And the head wants all rows of its last; what comes out of three layers is summed, and what the embedding finds.
    assert run_workers(gathers_of_blocks, 2) == [(expected, 4, 4)] * 2


def refusal(mode: str, on_gpu: bool) -> str:
    """Of a pass of 16 tokens; GPUs that can reach each other are pretended."""
    model, _ = build(MODELS["qwen3"], NATIVE.parallel)
    mesh = build_mesh(replace(NATIVE.parallel, async_tp=mode), torch.device("cpu"))
    if on_gpu:
        mesh = replace(mesh, device=torch.device("cuda"))
    with patch("parallel.async_tp.unavailable", lambda *_: None), pytest.raises(ValueError) as caught:
        connect_async_tp(model, mesh, 16)
    return str(caught.value)


def bound_of(transfer: Transfer) -> int:
    return async_tp.work_to_overlap(torch.device("cuda"), 2, scatters=transfer.scatters)


def test_case_63_what_would_fuse_nothing_is_refused() -> None:
    for message in run_workers(refusal, 2, "native", True):
        assert "fuses none of" in message and "16 tokens" in message
        # With so many the largest would overlap.
        rows = int(re.search(r"pays from (\d+)", message)[1])
        model = run_workers(counted_and_done, 2, "qwen3", NATIVE.parallel)[0][0]
        assert any(transfer.work // 16 * rows >= bound_of(transfer) for transfer in model)
        assert all(transfer.work // 16 * (rows - 1) < bound_of(transfer) for transfer in model)
    for message in run_workers(refusal, 2, "inductor", False):
        assert message.startswith("parallel.async_tp=inductor needs GPUs")


def counted_and_done(name: str, parallel: ParallelConfig) -> tuple[list[Transfer], list[Transfer]]:
    """The transfers that a run counts, and those of a forward."""
    model, config = build(MODELS[name], parallel)
    mesh, done = build_mesh(parallel, torch.device("cpu")), []
    gather, scatter = async_tp.all_gather_matmul, async_tp.matmul_reduce_scatter

    def count_gather(x, weights, *rest, **more):
        done.append(Transfer(False, len(weights), parallel.tp * x.numel() * sum(len(weight) for weight in weights)))
        return gather(x, weights, *rest, **more)

    def count_scatter(x, weight, *rest, **more):
        done.append(Transfer(True, 1, x.numel() * len(weight)))
        return scatter(x, weight, *rest, **more)

    with (
        patch("parallel.tensor_parallel.all_gather_matmul", count_gather),
        patch("parallel.tensor_parallel.matmul_reduce_scatter", count_scatter),
        torch.no_grad(),
    ):
        forward(model, synthetic_batches(config, mesh, 0)[0], mesh.device, True)
    num_rows = config.train.micro_batch_size * config.train.seq_len // parallel.cp
    return sorted(transfers_of(model, num_rows)), sorted(done)


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        *((name, native(2, tp=2)) for name in MODELS),
        # Ranks share key and value heads.
        ("qwen3", native(4, tp=4)),
        # FSDP holds a part of every weight.
        ("gpt_oss", native(4, tp=2, cp=2)),
    ],
)
def test_multiplications_are_counted_as_they_are_done(name: str, layout: Layout) -> None:
    for counted, done in run_workers(counted_and_done, layout.num_processes, name, layout.parallel):
        assert counted == done and done


def fused_on_gpus(gather_work: int, scatter_work: int) -> tuple[int, list[Transfer]]:
    """How many a run would say it fuses, of 16 tokens; and all transfers."""
    model, _ = build(MODELS["deepseek"], NATIVE.parallel)
    mesh = replace(build_mesh(NATIVE.parallel, torch.device("cpu")), device=torch.device("cuda"))
    bounds = {"GATHER_WORK": gather_work, "SCATTER_WORK": scatter_work}
    with patch("parallel.async_tp.unavailable", lambda *_: None), patch.multiple(async_tp, **bounds):
        return connect_async_tp(model, mesh, 16).num_fused, transfers_of(model, 16)


def test_small_matmuls_are_not_counted() -> None:
    """A transfer that is not worth overlapping takes the plain path, whatever the others do."""
    num_fused, transfers = run_workers(fused_on_gpus, 2, 0, 0)[0]
    assert num_fused == sum(transfer.maps for transfer in transfers)
    gathers = sorted(transfer.work for transfer in transfers if not transfer.scatters)
    scatters = [transfer for transfer in transfers if transfer.scatters]
    assert gathers[0] < gathers[-1] and scatters
    largest = [transfer for transfer in transfers if not transfer.scatters and transfer.work == gathers[-1]]
    expected = sum(transfer.maps for transfer in largest)
    assert run_workers(fused_on_gpus, 2, gathers[-1], 2**62) == [(expected, transfers)] * 2
    assert run_workers(fused_on_gpus, 2, 2**62, 0) == [(len(scatters), transfers)] * 2


def test_case_63_a_compiler_that_fused_nothing_is_an_error() -> None:
    """The count comes from a pass over compiled graphs; it is told once."""
    choice, counter = AsyncChoice("inductor", 0, 0), patch("parallel.async_tp.fused_by_inductor")
    with counter as made:
        made.return_value.count = 0
        with pytest.raises(RuntimeError, match="the compiler fused no matmul"):
            choice.check_compiled()
        made.return_value.count = 12
        choice = AsyncChoice("inductor", 0, 0)
        assert "inductor fused 12 matmuls" in (choice.check_compiled() or "")
        assert choice.check_compiled() is None
    assert AsyncChoice("native", 1, 1).check_compiled() is AsyncChoice("none", 0, 0).check_compiled() is None


def test_the_pass_counts_matmuls_of_fused_operators() -> None:
    from parallel.async_tp import fused_by_inductor

    counter = type(fused_by_inductor())()
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    symm_mem = torch.ops.symm_mem
    graph.call_function(symm_mem.fused_all_gather_matmul.default, (x, [x, x, x], 0, "tp"))
    graph.call_function(symm_mem.fused_matmul_reduce_scatter.default, (x, x, "sum", 0, "tp"))
    graph.call_function(torch.ops.aten.mm.default, (x, x))
    counter(graph)
    assert counter.count == 4 and counter.uuid() is None
