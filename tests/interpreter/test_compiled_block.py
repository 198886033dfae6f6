"""A whole block with fused experts is compiled as one graph, forward and backward: every operator in it has a fake.

No contradiction to parallel/compile.py, which cuts such blocks into parts: between ranks the plan of an exchange waits
for counts on the host, which ends a graph. On one rank, without padding and capacity, the number of pairs is known from
shapes; with padding shapes bound it, which is enough for kernels that stop at the last pair. Where scores scale what
goes into the experts, the number is read from the device: `fullgraph=True` takes the reading into the graph, as a size
that nobody knows while it is traced, where `torch.compile` without it would end the graph there.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.backends.debugging import aot_eager, boxed_nop
from torch.fx import GraphModule

from moe import fused_launches, tiles
from moe.layer import BalanceScale
from tests.distributed.tiny_models import DEEPSEEK, GPT_OSS, LLAMA4, QWEN3
from tests.interpreter.test_fused_experts import SMALL
from trainer.models.config import ModelConfig
from trainer.models.inner_attention import plan_sequences
from trainer.models.transformer import Block

MODELS = {"qwen3": QWEN3, "deepseek": DEEPSEEK, "gpt_oss": GPT_OSS, "llama4": LLAMA4}
# Two documents; two and padding.
DOCUMENTS_BS = torch.tensor([[0, 0, 0, 1, 1, 1], [0, 0, 2, 2, -1, -1]])
READS_A_NUMBER = "aten._local_scalar_dense.default"


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "CANDIDATES", {kernel: (tile,) for kernel, tile in SMALL.items()})
    monkeypatch.setattr(fused_launches, "BESIDE_PROGRAMS", 1)
    torch._dynamo.reset()


def build_block(config: ModelConfig) -> Block:
    """The first with experts."""
    block = Block(replace(config, moe=replace(config.moe, backend="fused")), config.num_dense_layers)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for tensor in (*block.parameters(), *block.buffers()):
            tensor.normal_(0, 0.3, generator=generator)
    return block


def compiled_into(block: Block, graphs: list[list[str]]) -> Callable[..., Any]:
    """Notes the operators of each graph that is compiled, which then run as they are."""

    def note(graph: GraphModule, inputs: Any) -> Callable[..., Any]:
        graphs.append([str(node.target) for node in graph.graph.nodes if node.op == "call_function"])
        return boxed_nop(graph, inputs)

    return torch.compile(block, backend=partial(aot_eager, fw_compiler=note, bw_compiler=note), fullgraph=True)


def check_block(config: ModelConfig, documents_BS: Tensor | None) -> list[str]:
    """Compiled is as not compiled; returns the operators of the graph of forward."""
    block, graphs = build_block(config), []
    generator = torch.Generator().manual_seed(2)
    x_BSD, upstream_BSD = torch.randn(2, 2, 6, config.dim, generator=generator).unbind()
    plan = plan_sequences(x_BSD, config.attention, document_ids_BS=documents_BS)
    found: list[list[Tensor]] = []
    for forward in (block, compiled_into(block, graphs)):
        leaf_BSD = x_BSD.clone().requires_grad_()
        out_BSD, stats = forward(leaf_BSD, plan, BalanceScale(12, 2, 1))
        loss = (out_BSD * upstream_BSD).sum() + stats.aux_loss + stats.z_loss
        found.append([out_BSD.detach(), *torch.autograd.grad(loss, [leaf_BSD, *block.parameters()])])
    for expected, ours in zip(*found, strict=True):
        assert expected.norm() > 0 and (ours - expected).norm() <= 1e-6 * expected.norm()
    # One graph each way, with the experts in it.
    ahead, back = graphs
    assert {"sluicegate.experts_up.default", "sluicegate.experts_down.default"} <= set(ahead)
    assert {"sluicegate.experts_down_backward.default", "sluicegate.experts_up_grad.default"} <= set(back)
    return ahead


@pytest.mark.parametrize("name", MODELS)
def test_a_block_compiles_as_one_graph(name: str) -> None:
    assert READS_A_NUMBER not in check_block(MODELS[name], None)


@pytest.mark.parametrize("name", MODELS)
def test_a_block_with_padding_compiles_as_one_graph(name: str) -> None:
    reads = MODELS[name].moe.scores_before_experts
    assert check_block(MODELS[name], DOCUMENTS_BS).count(READS_A_NUMBER) == reads
