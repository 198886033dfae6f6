"""What the checks of tests/gpu/test_symm_mem.py exchange, by either backend, and how they compare it."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from comms.all_to_all import AS_IT_IS, combine, dispatch, plan_dispatch
from comms.payload import Payload
from comms.symmetric_exchange import describe_tag, plan_exchange
from comms.symmetric_memory import Exchange, create_exchange, plan_layout
from tests.gpu.two_ranks import NUM_RANKS

TOP_K, EXPERTS_PER_RANK = 4, 8
MAX_TOKENS, WIDTH = 1024, 512


def make_exchange(
    device: torch.device,
    max_tokens: int = MAX_TOKENS,
    width: int = WIDTH,
    timeout: float = 20,
    piece_bytes: int | None = None,
    measure: bool = False,
    **bounds: Any,
) -> Exchange:
    layout = plan_layout(NUM_RANKS, max_tokens, TOP_K, width * 4, 8 * TOP_K, **bounds)
    group = dist.group.WORLD
    assert group is not None
    exchange = create_exchange(
        group, device, layout, max_tokens, timeout, describe_tag=describe_tag, piece_bytes=piece_bytes, measure=measure
    )
    # Rows begin as NaN, and ids as -1.
    exchange.arena[layout.rows_at :] = 255
    torch.cuda.synchronize()
    dist.barrier()
    return exchange


class Inputs(NamedTuple):
    x_TD: Tensor
    weights_TK: Tensor
    ids_TK: Tensor
    items_TN: Tensor


def inputs(device: torch.device, num_tokens: int, seed: int, width: int = WIDTH, pattern: str = "random") -> Inputs:
    """This rank's tokens; ranks have other seeds."""
    generator = torch.Generator(device).manual_seed(10_000 * seed + dist.get_rank())
    num_experts = NUM_RANKS * EXPERTS_PER_RANK
    ids = torch.rand(num_tokens, num_experts, generator=generator, device=device).argsort(1)[:, :TOP_K]
    if pattern == "last":
        ids = ids % EXPERTS_PER_RANK + EXPERTS_PER_RANK
    elif pattern == "nobody":
        ids = torch.full_like(ids, -1)
    else:
        ids = ids.masked_fill(torch.rand(ids.shape, generator=generator, device=device) < 0.3, -1)
    x = torch.randn(num_tokens, width, generator=generator, device=device).bfloat16()
    weights = torch.rand(ids.shape, generator=generator, device=device)
    owner = torch.where(ids >= 0, ids // EXPERTS_PER_RANK, -1)
    return Inputs(x, weights, ids, torch.stack([(owner == rank).sum(1) for rank in range(NUM_RANKS)], 1))


def work(rows_RD: Tensor, weights_RK: Tensor, ids_RK: Tensor) -> Tensor:
    """A stand-in for experts: local ids scale the row. Rows without ids give 0, whatever they hold.

    In fp64, because the order in which torch adds depends on how many rows there are, and ours has room for more.
    """
    first = dist.get_rank() * EXPERTS_PER_RANK
    is_ours = (ids_RK >= first) & (ids_RK < first + EXPERTS_PER_RANK)
    scale_R = torch.where(is_ours, weights_RK.double() * (ids_RK + 1), 0).sum(1)
    rows_RD = torch.where(is_ours.any(1, keepdim=True), rows_RD, 0)
    return (rows_RD.double() * scale_R[:, None]).to(rows_RD.dtype)


def round_trip(exchange: Exchange | None, given: Inputs, layer: int = 0, payload: Payload = AS_IT_IS) -> list[Tensor]:
    """Output, gradients and (as far as they exist) received rows; by collectives without an exchange."""
    x, weights = given.x_TD.clone().requires_grad_(), given.weights_TK.clone().requires_grad_()
    if exchange is None:
        plan: Any = plan_dispatch(given.items_TN, dist.group.WORLD)
    else:
        plan = plan_exchange(given.ids_TK, EXPERTS_PER_RANK, exchange, layer, 10**6)
    with torch.enable_grad():
        rows, row_weights, ids = dispatch(plan, x, weights, given.ids_TK, payload)
        out = combine(plan, work(rows, row_weights, ids), payload)
    upstream = torch.linspace(-1, 1, out.numel(), device=out.device).view_as(out).to(out.dtype)
    grads = torch.autograd.grad(out, [x, weights], upstream)
    return [out.detach(), *grads, rows.detach(), row_weights.detach(), ids]


def assert_same(ours: list[Tensor], theirs: list[Tensor]) -> None:
    """Bit for bit; what stands behind the last row of ours has no ids."""
    for name, a, b in zip(("out", "dx", "dweights", "rows", "weights", "ids"), ours, theirs, strict=True):
        if name == "ids":
            assert bool((a[len(b) :] == -1).all())
        if name in ("rows", "weights", "ids"):
            a = a[: len(b)]
        assert a.shape == b.shape and a.dtype == b.dtype, name
        a, b = a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8)
        assert torch.equal(a, b), f"{name}: first byte that differs: {int((a != b).nonzero()[0])} of {a.numel()}"


def check_two_layers_and_three_micro_batches(device: torch.device, plan: Callable[[Tensor, int], Any]) -> None:
    """Six forwards before the first backward, and the host waits for nothing; the same bits as by collectives.

    Args:
        plan: of a layer's ids, by the backend that is tested.
    """
    batches = [inputs(device, 400 + 100 * dist.get_rank() + step, step) for step in range(3)]

    def forward(by_collectives: bool, given: Inputs) -> tuple[Tensor, list[Tensor]]:
        x, weights = given.x_TD.clone().requires_grad_(), given.weights_TK.clone().requires_grad_()
        hidden = x
        for layer in range(2):
            found = plan_dispatch(given.items_TN, dist.group.WORLD) if by_collectives else plan(given.ids_TK, layer)
            hidden = hidden + combine(found, work(*dispatch(found, hidden, weights, given.ids_TK)))
        return hidden, [x, weights]

    def run(by_collectives: bool) -> list[Tensor]:
        under_way = [forward(by_collectives, given) for given in batches]
        found = []
        for out, leaves in under_way:
            found += [out.detach(), *torch.autograd.grad(out, leaves, torch.ones_like(out))]
        return found

    # The first time kernels are loaded, which may wait.
    run(by_collectives=False)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        ours = run(by_collectives=False)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for a, b in zip(ours, run(by_collectives=True), strict=True):
        assert torch.equal(a, b)
