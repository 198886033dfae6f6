"""What settings of the exchange become: fields of the layers, and programs of the launches. Nothing is exchanged."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from inspect import signature
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import comms.put_and_take
from comms.backend import BackendChoice
from comms.config import CommsConfig, PayloadConfig
from comms.payload import Payload
from comms.put_and_take import PUT, Beside, Received, beside_programs, move_back, move_there
from comms.symmetric_memory import Exchange, create_exchange, forget_exchanges
from moe.config import MoEConfig
from moe.layer import MoE
from parallel import expert_parallel
from parallel.config import ParallelConfig
from tests.simulated_exchanges import simulated_exchanges

WIDTH, TOP_K, MAX_TOKENS = 8, 2, 4


@pytest.fixture(autouse=True)
def no_exchange_is_left() -> Iterator[None]:
    yield
    forget_exchanges()


def connected(comms: CommsConfig, ep_group: object, ep: int = 1) -> list[MoE]:
    """Two layers of a model, told how rows reach their experts."""
    layers = [MoE(MoEConfig(num_experts=8, top_k=TOP_K, expert_dim=8), WIDTH) for _ in range(2)]
    mesh: Any = SimpleNamespace(config=ParallelConfig(ep=ep), device=torch.device("cpu"), ep_group=ep_group)
    expert_parallel.connect_experts(nn.ModuleList(layers), mesh, comms, MAX_TOKENS, torch.float32)
    return layers


@pytest.mark.parametrize("coded", ["dispatch", "combine", "dispatch_grad", "combine_grad"])
def test_what_is_sent_as_mxfp8_is_what_was_asked_for(coded: str) -> None:
    """One of the four alone, so that no two of them can stand for each other."""
    names = {name: "mxfp8" if name == coded else "model" for name in vars(PayloadConfig())}
    assert len(names) == 4
    for layer in connected(CommsConfig(payload=PayloadConfig(**names)), None):
        assert layer.dispatch_payload == Payload(rows=names["dispatch"], grads=names["dispatch_grad"])
        assert layer.combine_payload == Payload(rows=names["combine"], grads=names["combine_grad"])


def exchange_of(monkeypatch: pytest.MonkeyPatch, num_ranks: int, num_ctas: int | None) -> Exchange:
    """The exchange of a model whose settings ask for so many programs, in memory of this process."""

    def in_this_process(*args: Any, **kwargs: Any) -> Exchange:
        asked = signature(create_exchange).bind(*args, **kwargs).arguments
        return replace(simulated_exchanges(asked["layout"], asked["max_tokens"])[0], num_ctas=asked.get("num_ctas"))

    monkeypatch.setattr(expert_parallel, "choose_backend", lambda *_: BackendChoice("symm_mem", "as asked"))
    monkeypatch.setattr(expert_parallel, "make_node_groups", lambda *_: None)
    monkeypatch.setattr(expert_parallel, "create_exchange", in_this_process)
    layers = connected(CommsConfig(backend="symm_mem", num_ctas=num_ctas), object(), num_ranks)
    (exchange,) = {id(layer.exchange): layer.exchange for layer in layers}.values()
    assert exchange is not None
    return exchange


def putting(exchange: Exchange, beside: Beside, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many programs put rows there, and how many put them back; no kernel runs."""
    grids: list[int] = []

    class Recorder:
        def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
            return partial(self.launch, grid)

        def launch(self, grid: tuple[int], *_: Any, **__: Any) -> None:
            grids.extend(grid)

    for kernel in ("dispatch_kernel", "combine_kernel"):
        monkeypatch.setattr(comms.put_and_take, kernel, Recorder())
    monkeypatch.setattr(comms.put_and_take, "_on", lambda _: nullcontext())
    num_ranks, tokens = exchange.num_ranks, MAX_TOKENS
    x_TD, index_NT = torch.zeros(tokens, WIDTH), torch.zeros(num_ranks, tokens, dtype=torch.int32)
    weights_TK, ids_TK = torch.zeros(tokens, TOP_K), torch.zeros(tokens, TOP_K, dtype=torch.int64)
    out = Received(x_TD, weights_TK, ids_TK)
    move_there(exchange, *out, index_NT, index_NT, index_NT, out, 0, sides=PUT, beside=beside)
    move_back(exchange, x_TD, weights_TK, index_NT, index_NT, x_TD, weights_TK, 0, sides=PUT, beside=beside)
    return grids


@pytest.mark.parametrize(
    ("num_ranks", "num_ctas", "beside", "programs"),
    [
        # So few bytes are worth one program, if nobody asks.
        (2, None, Beside.NOTHING, 1),
        (2, 24, Beside.NOTHING, 24),
        (2, 24, Beside.COPIES, 24),
        # Products have left no more multiprocessors than these.
        (2, 24, Beside.PRODUCTS, beside_programs(2)[0]),
        (2, 3, Beside.PRODUCTS, 3),
        # The next number below that shares no divisor with the three other ranks.
        (4, 24, Beside.NOTHING, 23),
    ],
)
def test_as_many_programs_put_as_num_ctas_says(
    num_ranks: int, num_ctas: int | None, beside: Beside, programs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert putting(exchange_of(monkeypatch, num_ranks, num_ctas), beside, monkeypatch) == [programs, programs]
