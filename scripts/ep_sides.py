"""The expert-parallel MoE layers of scripts/bench_ep.py: a way to exchange rows and a way to compute experts.

Tokens, weights and routing are those of scripts/moe_sides.py; every rank draws its own tokens and its own experts. A
side is our layer as the trainer connects and compiles it. Beside it stand

    alone       a rank's share of the work without the exchange: routing of its own tokens, and its experts over the
                rows that it receives, which lie there already
    reference   the layer by collectives, with a loop over experts in fp32

Shape suffixes: T tokens of this rank, D model dim, K experts per token, R received rows.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from comms.config import CommsConfig
from comms.record_exchange import RecordExchange
from moe.config import LOW_PRECISION
from moe.grouped_gemm import resolve_backend
from moe.layer import MoE
from parallel.expert_parallel import connect_experts
from parallel.mesh import Mesh
from scripts.moe_sides import Problem, Side, make_layer, results, side_of, step

# Backends of the exchange and of the experts; these may also be recipes of low precision.
BACKENDS, EXPERTS = ("symm_mem", "nvshmem", "collective"), ("fused", "grouped_mm")
# Without being asked: a process has symmetric memory of one kind, so only one of the first two.
DEFAULT_BACKENDS = ("symm_mem", "collective")


class Share(NamedTuple):
    """What a rank's experts were given by an exact exchange."""

    rows_RD: Tensor
    ids_RK: Tensor
    weights_RK: Tensor
    num_pairs: int


class Work(NamedTuple):
    """What is timed: forward, and forward with backward."""

    forward: Callable[[], Any]
    both: Callable[[], Any]


def build_layers(
    problem: Problem,
    experts: Sequence[str],
    comms: CommsConfig,
    pair_capacity: float | None,
    mesh: Mesh,
    compiled: bool,
) -> dict[str, MoE]:
    """{experts: layer} of one backend of the exchange. Collective.

    Raises:
        ValueError: something that was asked for cannot run here.
        RuntimeError: something else than what was asked for would run.
    """
    layers = {name: make_layer(name, problem, compiled) for name in experts}
    for name, layer in layers.items():
        join_ranks(layer, mesh)
        layer.config = replace(layer.config, pair_capacity=pair_capacity)
        # A recipe that cannot run has been refused.
        found = name if name in LOW_PRECISION else resolve_backend(name, problem.x_TD.dtype, mesh.device)
        if found != name:
            raise RuntimeError(f"experts were asked for as {name} and would be {found}")
    model = nn.ModuleList(layers.values())
    choice = connect_experts(model, mesh, comms, problem.shape.tokens, problem.x_TD.dtype)
    if choice.backend != comms.backend:
        raise RuntimeError(f"comms.backend={comms.backend} was asked for, {choice.backend} would run: {choice.reason}")
    return layers


def join_ranks(layer: MoE, mesh: Mesh) -> None:
    """Tell a layer with whom it shares experts out, and with whom it shares each of them."""
    layer.ep_group = mesh.ep_group
    layer.etp_group = None if mesh.etp is None else mesh.etp.get_group()


def check_ran(layer: MoE, backend: str) -> None:
    """After some passes, that rows travelled as was asked, and all of them. Waits for the device.

    Raises:
        RuntimeError: by another way, or rows or pairs found no room.
    """
    exchange = layer.exchange
    found = "collective" if exchange is None else "nvshmem" if isinstance(exchange, RecordExchange) else "symm_mem"
    if found != backend:
        raise RuntimeError(f"comms.backend={backend} was asked for, and the layer has {exchange}")
    if exchange is not None:
        exchange.check()
        exchange.check_overflow()
        if not int(exchange.state):
            raise RuntimeError(f"comms.backend={backend} was asked for, and nothing went through its memory")


def layer_work(layer: MoE, problem: Problem) -> Work:
    """The whole layer."""
    side, leaf = side_of(layer), problem.x_TD.detach().requires_grad_()
    return Work(partial(side.forward, leaf), partial(step, side, leaf, problem.grad_TD))


def received(problem: Problem, mesh: Mesh) -> Share:
    """What this rank's experts get, by collectives. Collective."""
    layer, seen = make_layer("reference", problem, compiled=False), []

    def note(_: nn.Module, given: tuple[Any, ...]) -> None:
        seen.append(Share(*given[:4]))

    join_ranks(layer, mesh)
    layer.experts.register_forward_pre_hook(note)
    with torch.no_grad():
        layer(problem.x_TD[None])
    return seen[0]


def alone(layer: MoE, problem: Problem, share: Share) -> Work:
    """The layer's own work on this rank's share, without plan, dispatch and combine."""
    leaf_TD, rows_RD, weights_RK = (
        tensor.detach().requires_grad_() for tensor in (problem.x_TD, share.rows_RD, share.weights_RK)
    )
    weights = list(side_of(layer).weights.values())
    # Any gradients of these sizes.
    grad_RD = problem.grad_TD.repeat(-(-len(rows_RD) // len(leaf_TD)), 1)[: len(rows_RD)]
    grad_TK = torch.rand(len(leaf_TD), layer.config.top_k, device=leaf_TD.device)

    def forward() -> tuple[Tensor, Tensor]:
        routing = layer.route(
            leaf_TD, layer.router.weight, None, layer.config,
            expert_bias_E=None, token_mask_T=None, seq_len=len(leaf_TD), sequence=None,
        )  # fmt: skip
        layer.balance(routing, None, len(leaf_TD), None)
        out_RD = layer.experts(rows_RD, share.ids_RK, weights_RK, share.num_pairs, True)
        return out_RD, routing.topk_weights_TK

    def both() -> None:
        out_RD, weights_TK = forward()
        grads = grad_RD, grad_TK.to(weights_TK.dtype)
        torch.autograd.grad([out_RD, weights_TK], [leaf_TD, rows_RD, weights_RK, *weights], grads)

    return Work(forward, both)


def reference(problem: Problem, mesh: Mesh) -> dict[str, Tensor]:
    """Output and gradient of x in fp32, by collectives and a loop over experts. Collective."""
    wide = Problem(problem.shape, *(tensor.float() for tensor in problem[1:]))
    layer = make_layer("reference", wide, compiled=False)
    join_ranks(layer, mesh)
    return _out_and_dx(side_of(layer), wide)


def errors(layer: MoE, problem: Problem, exact: dict[str, Tensor]) -> dict[str, float]:
    """||a - b|| / ||b|| of the output and the gradient of x; the worst rank's. Collective."""
    found = _out_and_dx(side_of(layer), problem)
    values = torch.stack([(found[name].float() - exact[name]).norm() / exact[name].norm() for name in exact])
    dist.all_reduce(values, dist.ReduceOp.MAX)
    return dict(zip(exact, values.tolist(), strict=True))


def _out_and_dx(side: Side, problem: Problem) -> dict[str, Tensor]:
    found = results(side, problem)
    return {name: found[name] for name in ("out", "x")}
