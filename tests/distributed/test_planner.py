"""Weights, gradients, moments and buffers of a rank are as trainer/memory_plan.py plans them, to the byte."""

from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from comms import record_exchange
from comms.backend import BackendChoice
from comms.config import CommsConfig
from comms.record_exchange import RecordExchange
from comms.record_transport import CollectiveTransport
from comms.symmetric_memory import Exchange, forget_exchanges
from moe.experts import GroupedExperts
from moe.layer import MoE
from moe.linear_maps import local
from parallel import expert_parallel
from parallel.config import ParallelConfig
from parallel.mesh import build_mesh
from tests.distributed.harness import run_workers
from tests.distributed.tiny_models import MODELS
from tests.simulated_exchanges import simulated_exchanges
from trainer.activations import Load
from trainer.build import build_model
from trainer.config import Config, OptimConfig, PrecisionConfig, TrainConfig
from trainer.layout import fit_layout
from trainer.memory_plan import plan_memory
from trainer.optim import build_optimizer, ensure_gradients, update

TRAIN = TrainConfig(global_batch_size=8, seq_len=16)
LAYOUTS = [
    {},
    {"ep": 2},
    {"ep": 4},
    {"dp_replicate": 2},
    {"dp_replicate": 2, "ep": 2},
    {"tp": 2},
    {"tp": 2, "ep": 2, "etp": 2},
    {"cp": 2, "ep": 4},
    {"tp": 2, "ep": 4},
]


def bytes_of(tensors: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in map(local, tensors))


def largest(value: int) -> int:
    every = [0] * dist.get_world_size()
    dist.all_gather_object(every, value)
    return max(every)


def held(name: str, sizes: dict[str, Any]) -> tuple[dict[str, int], dict[str, int]]:
    """Bytes of the rank that has most: as they are, and as planned."""
    config = Config(
        model=MODELS[name],
        train=TRAIN,
        parallel=ParallelConfig(**sizes),
        optim=OptimConfig(name="adamw"),
        precision=PrecisionConfig(recipe="fp32"),
    )
    mesh = build_mesh(config.parallel, torch.device("cpu"))
    model = build_model(config, mesh)
    optimizer = build_optimizer(model, config.optim)
    ensure_gradients(model)
    update(optimizer)
    moments = [state[key] for state in optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")]
    found = {
        "parameters": bytes_of(model.parameters()),
        "gradients": bytes_of(parameter.grad for parameter in model.parameters()),
        "moments": bytes_of(moments),
    }
    plan = plan_memory(config, dist.get_world_size(), "cpu")
    return {key: largest(value) for key, value in found.items()}, {key: getattr(plan, key) for key in found}


@pytest.mark.parametrize("name", ["qwen3", "deepseek", "gpt_oss", "multi_token"])
@pytest.mark.parametrize("sizes", LAYOUTS, ids=lambda sizes: "-".join(f"{k}{v}" for k, v in sizes.items()) or "fsdp")
def test_what_stays_is_as_planned(name: str, sizes: dict[str, Any]) -> None:
    found, planned = run_workers(held, 4, name, sizes)[0]
    assert found == planned


BACKENDS = [
    ("symm_mem", {}),
    ("symm_mem", {"capacity": 0.8, "chunks": 2}),
    ("symm_mem", {"saved_headroom": 1.25}),
    ("nvshmem", {}),
    ("nvshmem", {"capacity": 0.8}),
]


def exchange_as_built(name: str, backend: str, comms: dict[str, Any], sizes: dict[str, Any], mode: str) -> Any:
    """Bytes of the exchange's buffers and of the arena, as a model that is built has them; as planned; and room.

    What maps memory of other GPUs is replaced by memory of this process, of the size that it is asked for.
    """
    config = Config(
        model=MODELS[name],
        train=TRAIN,
        parallel=ParallelConfig(**sizes, activation_checkpoint=mode),
        comms=CommsConfig(backend=backend, **comms),
    )

    def in_this_process(group: Any, device: Any, layout: Any, max_tokens: int, *_: Any, **__: Any) -> Exchange:
        return simulated_exchanges(layout, max_tokens)[0]

    def by_collectives(group: Any, device: Any, num_bytes: int) -> CollectiveTransport:
        return CollectiveTransport(group, num_bytes)

    try:
        with (
            patch.object(expert_parallel, "choose_backend", lambda *_: BackendChoice(backend, "as asked")),
            patch.object(expert_parallel, "create_exchange", in_this_process),
            patch.object(record_exchange, "NvshmemTransport", by_collectives),
            # Fused kernels are for GPUs: nothing is computed here.
            patch.object(GroupedExperts, "can_exchange", lambda *_: True),
        ):
            model = build_model(config, build_mesh(config.parallel, torch.device("cpu")))
        (exchange,) = {id(layer.exchange): layer.exchange for layer in moe_layers(model)}.values()
        tensors = exchange.moves.tensors() if isinstance(exchange, RecordExchange) else [exchange.arena]
        found = bytes_of(tensors), 0 if exchange.saved is None else exchange.saved.num_bytes
        room = exchange.layout.row_bound, max(layer.pair_room(exchange) for layer in moe_layers(model))
    finally:
        forget_exchanges()
    plan = plan_memory(config, dist.get_world_size(), "cpu")
    load = Load(config, fit_layout(config, dist.get_world_size()), torch.bfloat16)
    return found, (plan.exchange, plan.arena), room, (load.rows, load.pairs)


def moe_layers(model: torch.nn.Module) -> list[MoE]:
    return [module for module in model.modules() if isinstance(module, MoE)]


@pytest.mark.parametrize("sizes", [{"ep": 4}, {"tp": 2, "ep": 2, "etp": 2}, {"cp": 2, "ep": 4}, {"tp": 2, "ep": 4}],
                         ids=lambda sizes: "-".join(f"{k}{v}" for k, v in sizes.items()))  # fmt: skip
@pytest.mark.parametrize(("backend", "comms"), BACKENDS)
def test_an_exchange_takes_what_is_planned(backend: str, comms: dict[str, Any], sizes: dict[str, Any]) -> None:
    if "capacity" in comms:
        # Less than everybody's tokens, and no less than some rank is sure to get.
        comms = comms | {"capacity": comms["capacity"] * sizes["ep"]}
    for name, mode in (("qwen3", "none"), ("multi_token", "full")):
        found, planned, room, planned_room = run_workers(exchange_as_built, 4, name, backend, comms, sizes, mode)[0]
        assert found == planned and found[0] > 0, name
        assert (found[1] > 0) is ("saved_headroom" in comms)
        assert room == planned_room, name
