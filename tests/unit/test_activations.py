"""What blocks keep for backward (trainer/activations.py), against the tensors that real ones keep."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from comms.config import CommsConfig
from comms.symmetric_memory import forget_exchanges
from moe.config import MoEConfig
from moe.exchanged_experts import exchanged_experts_forward
from moe.fused_experts import fused_experts
from moe.kernels.sort_pairs import Pairs
from moe.layer import BalanceScale
from parallel.activation_checkpoint import apply_activation_checkpoint
from parallel.compile import apply_compile
from parallel.config import ParallelConfig
from parallel.expert_parallel import plan_buffers
from tests.alive import Alive
from tests.simulated_exchanges import simulated_exchanges
from trainer.activations import Load, block_work, kept_by_block
from trainer.config import Config, DataConfig, TrainConfig
from trainer.models.config import AttentionConfig, ModelConfig
from trainer.models.inner_attention import plan_sequences
from trainer.models.transformer import Block

BATCH, LENGTH = 2, 256
# The first layer is dense. Values as wide as keys: others have no fused attention on CPUs.
GQA = ModelConfig(
    dim=256,
    num_layers=2,
    num_dense_layers=1,
    ffn_dim=768,
    attention=AttentionConfig(num_heads=8, num_kv_heads=2, head_dim=64, qk_norm="head"),
    moe=MoEConfig(num_experts=8, top_k=4, expert_dim=128, backend="grouped_mm"),
)
MLA = replace(
    GQA,
    attention=AttentionConfig(
        kind="mla", num_heads=4, kv_lora_rank=64, qk_nope_head_dim=48, qk_rope_head_dim=16, v_head_dim=64
    ),
    moe=replace(GQA.moe, shared_expert_dim=256),
)
MODELS = {"gqa": GQA, "mla": MLA}


def load_of(model: ModelConfig, mode: str = "none", compiled: bool = False, comms: CommsConfig | None = None) -> Load:
    config = Config(
        model=model,
        train=TrainConfig(micro_batch_size=BATCH, global_batch_size=BATCH, seq_len=LENGTH),
        parallel=ParallelConfig(dp_shard=1, activation_checkpoint=mode, compile=compiled),
        data=DataConfig(document_mask=False),
        comms=comms or CommsConfig(),
    )
    return Load(config, config.parallel, torch.bfloat16, "cpu")


def make_block(model: ModelConfig, layer: int) -> Block:
    torch.manual_seed(0)
    block = Block(model, layer).bfloat16()
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    return block


def run(block: torch.nn.Module, model: ModelConfig) -> tuple[Tensor, Tensor]:
    """Input and output."""
    x = torch.randn(BATCH, LENGTH, model.dim, dtype=torch.bfloat16, requires_grad=True)
    y, _ = block(x, plan_sequences(x, model.attention), BalanceScale(BATCH * LENGTH, BATCH, 1))
    return x, y


@contextmanager
def saved_bytes(block: torch.nn.Module) -> Iterator[dict[Any, int]]:
    """Storages that autograd keeps, without weights."""
    weights = {parameter.untyped_storage()._cdata for parameter in block.parameters()}
    found: dict[Any, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in weights:
            found[storage._cdata] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield found


@pytest.mark.parametrize("layer", [0, 1], ids=["dense", "experts"])
@pytest.mark.parametrize("name", MODELS)
def test_compiled_blocks_keep_what_is_planned(name: str, layer: int) -> None:
    """Within 5 %: small tables, and one number per row and head, are not counted."""
    model = MODELS[name]
    block = make_block(model, layer)
    apply_compile(block)
    with saved_bytes(block) as found:
        run(block, model)
    planned = kept_by_block(load_of(model, compiled=True), layer, "none")
    assert sum(planned.values()) == pytest.approx(sum(found.values()), rel=0.05)


@pytest.mark.parametrize("mode", ["selective", "full"])
@pytest.mark.parametrize("layer", [0, 1], ids=["dense", "experts"])
@pytest.mark.parametrize("name", MODELS)
def test_checkpointed_blocks_keep_what_is_planned(name: str, layer: int, mode: str) -> None:
    """Within 8 %: of the experts' ids, which are kept, it is most where little else is."""
    model = MODELS[name]
    block = apply_activation_checkpoint(make_block(model, layer), mode)
    with Alive(block.parameters()) as alive:
        x, y = run(block, model)
        kept = alive.now() - y.untyped_storage().nbytes()
    assert x.grad_fn is None and y.requires_grad
    planned = kept_by_block(load_of(model, mode), layer, mode)
    assert sum(planned.values()) == pytest.approx(kept, rel=0.08)


@pytest.mark.parametrize("layer", [0, 1], ids=["dense", "experts"])
@pytest.mark.parametrize("mode", ["none", "full"])
def test_blocks_need_no_more_than_planned_while_they_work(mode: str, layer: int) -> None:
    """At least 3/4 of it is planned: norms on CPUs keep their input and result in fp32, which on GPUs they do not."""
    block = make_block(GQA, layer)
    weights = sum(parameter.untyped_storage().nbytes() for parameter in block.parameters())
    with Alive(block.parameters()) as alive:
        _, y = run(apply_activation_checkpoint(block, mode), GQA)
        alive.most = 0
        y.backward(torch.ones_like(y))
    load = load_of(GQA, mode)
    planned = sum(kept_by_block(load, layer, mode).values()) + block_work(load, layer, mode)
    assert 0.75 * alive.most <= planned + weights <= 1.05 * alive.most


def test_compiled_code_hides_products_from_selective() -> None:
    block = make_block(GQA, 0)
    apply_compile(block)
    block = apply_activation_checkpoint(block, "selective")
    # Once before, so that nothing of the compiler's own is counted.
    run(block, GQA)[1].sum().backward()
    with Alive(block.parameters()) as alive:
        _, y = run(block, GQA)
        kept = alive.now() - y.untyped_storage().nbytes()
    compiled, plain = (kept_by_block(load_of(GQA, "selective", flag), 0, "selective") for flag in (True, False))
    # What compiled code gives to its caller is not seen here: y stands for nothing that was counted.
    assert "products" in plain and "products" not in compiled
    assert kept < 0.5 * sum(plain.values())


def fake_pairs(load: Load) -> Pairs:
    num_pairs, num_rows, top_k = load.pairs, load.rows, load.config.model.moe.top_k
    int32 = {"dtype": torch.int32}
    slots_RK = torch.zeros(num_rows, top_k, **int32)
    experts = load.config.model.moe.num_experts
    return Pairs(
        torch.zeros(num_pairs, **int32), torch.zeros(num_pairs, **int32), slots_RK, torch.zeros(experts, **int32)
    )


def test_fused_experts_keep_and_need_what_is_planned() -> None:
    """Without computing anything: by the shapes that the operators say they return."""
    model = replace(GQA, moe=replace(GQA.moe, backend="fused"))
    load = load_of(model)
    dim, hidden, experts = model.dim, load.hidden, model.moe.num_experts
    with FakeTensorMode():
        rows = torch.randn(load.rows, dim, dtype=torch.bfloat16, requires_grad=True)
        weights = torch.rand(load.rows, model.moe.top_k, requires_grad=True)
        w_up = torch.randn(experts, 2, hidden, dim, dtype=torch.bfloat16, requires_grad=True)
        w_down = torch.randn(experts, dim, hidden, dtype=torch.bfloat16, requires_grad=True)
        pairs = fake_pairs(load)
        gradients = 2 * (w_up.numel() + w_down.numel())
        with Alive() as alive:
            out = fused_experts(rows, weights, w_up, w_down, None, None, pairs, "swiglu")
            kept = alive.now() - out.untyped_storage().nbytes()
            gradient = torch.ones_like(out)
            alive.most = 0
            out.backward(gradient)
            # The activation is made within an operator, beside what it returns.
            work = alive.most - kept + 2 * load.pairs * hidden
    # h; the rows are the block's own.
    assert kept == pytest.approx(kept_by_block(load, 1, "none")["experts"], rel=0.02)
    # Never less than it is. Gradients of weights count apart, and are not all there at its peak.
    assert work <= block_work(load, 1, "none") + gradients <= 1.2 * work


@pytest.mark.parametrize("keeps_hidden", [True, False], ids=["none", "full"])
def test_exchanged_experts_keep_what_is_planned(keeps_hidden: bool) -> None:
    """What their operator says that it returns for backward."""
    ranks, mode = 4, "none" if keeps_hidden else "full"
    moe = replace(GQA.moe, backend="fused", pair_capacity=1.5)
    comms = CommsConfig(backend="symm_mem", capacity=2.5)
    load = load_of(replace(GQA, moe=moe), mode, comms=comms)
    load.config.parallel.ep = ranks
    assert load.is_exchanged
    layout = plan_buffers("symm_mem", moe, GQA.dim, ranks, load.routed, comms, torch.bfloat16)
    exchange = simulated_exchanges(layout, load.routed)[0]
    try:
        with FakeTensorMode() as mode_of_fakes:
            experts, hidden = moe.num_experts // ranks, moe.expert_dim
            x = torch.randn(load.own, GQA.dim, dtype=torch.bfloat16)
            weights, ids = torch.rand(load.own, moe.top_k), torch.zeros(load.own, moe.top_k, dtype=torch.int64)
            w_up = torch.randn(experts, 2, hidden, GQA.dim, dtype=torch.bfloat16)
            w_down = torch.randn(experts, GQA.dim, hidden, dtype=torch.bfloat16)
            tables = [torch.zeros(1, ranks, dtype=torch.int32) for _ in range(4)]
            state = mode_of_fakes.from_tensor(exchange.state)
            y, *kept = exchanged_experts_forward(
                state, x, weights, ids, w_up, w_down, *tables, exchange.name, 0, load.pairs, 0, "swiglu",
                "model", "model", keeps_hidden, False,
            )  # fmt: skip
            found = sum(tensor.untyped_storage().nbytes() for tensor in (kept if keeps_hidden else [y, *kept]))
    finally:
        forget_exchanges()
    planned = kept_by_block(load, 1, mode)
    assert planned["rows"] + planned["experts"] == pytest.approx(found, rel=0.01)


def test_an_arena_leaves_blocks_their_own_tensors() -> None:
    moe = replace(GQA.moe, backend="fused")
    alone, shared = (
        load_of(replace(GQA, moe=moe), comms=CommsConfig(backend="symm_mem", saved_headroom=headroom))
        for headroom in (None, 1.25)
    )
    for load in (alone, shared):
        load.config.parallel.ep = 4
    apart, together = kept_by_block(alone, 1, "none"), kept_by_block(shared, 1, "none")
    assert together["rows"] == together["experts"] == 0 < apart["rows"] < apart["experts"]
    assert together["attention"] == apart["attention"]
    # Room for what is kept is one thing, what one layer works with another.
    assert block_work(alone, 1, "none") == block_work(shared, 1, "none") > 0
