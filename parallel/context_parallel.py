"""Context parallelism: the tokens of one sequence on several ranks, joined for attention alone.

cp = ring x ulysses ranks share a sequence (comms/split_sequence.py says which tokens lie where):

    Ulysses  exchanges tokens for heads: each of its ranks gets every token of the ring rank's part for H / ulysses
             heads, works as if alone, and the results go back. Few messages, but no more ranks than query heads.
    Ring     passes keys and values around (parallel/ring_attention.py). Any number of ranks; each holds a part.

Both together: Ulysses inside, between ranks that are close; the ring outside, between its equal ranks.

Key/value heads fewer than the Ulysses ranks are repeated, so that each rank has the one its query heads use.

Shape suffixes: B sequences, S tokens of a whole sequence, C of this rank's part of it, L = C * ulysses of its ring
rank's part, H query heads, G key/value heads, D head dim of queries and keys, V of values, N ranks.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parallel.mesh import Mesh
from parallel.ring_attention import ring_attention

# Attention on one rank: q, k, v and sinks -> output.
LocalAttention = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]


@dataclass(frozen=True)
class ContextParallel:
    """This rank's place among the ring x ulysses ranks that share a sequence; Ulysses ranks are neighbours."""

    ring: int
    ulysses: int
    ring_rank: int
    ulysses_rank: int
    # Ranks of equal ulysses_rank, in ring order; None when there is one.
    ring_group: dist.ProcessGroup | None
    # Ranks of equal ring_rank; None when there is one.
    ulysses_group: dist.ProcessGroup | None


def apply_context_parallel(model: nn.Module, mesh: Mesh) -> None:
    """Tell every attention (a module with a `context`) with whom it shares its sequences."""
    if mesh.config.cp == 1:
        return
    for module in model.modules():
        if hasattr(module, "context"):
            module.context = context_of(mesh)  # type: ignore[assignment]


def context_of(mesh: Mesh) -> ContextParallel:
    """This rank's place among the cp ranks of a mesh with cp > 1."""
    ring, ulysses = mesh.config.cp // mesh.config.ulysses, mesh.config.ulysses
    place = mesh.rank // mesh.config.tp % mesh.config.cp
    return ContextParallel(ring, ulysses, place // ulysses, place % ulysses, mesh.ring_group, mesh.ulysses_group)


def context_attention(
    q_BCHD: Tensor,
    k_BCGD: Tensor,
    v_BCGV: Tensor,
    sinks_H: Tensor | None,
    context: ContextParallel,
    *,
    scale: float,
    window: int,
    first_BS: Tensor | None,
    local: LocalAttention,
    max_documents: int | None = None,
) -> Tensor:
    """Causal attention over the whole sequence -> (B, C, H, V). Collective.

    first_BS (B or 1, S): per token of the whole sequence the first one it may see, the start of its document; None
    means 0. window: the token and the window - 1 before it; 0 means all. max_documents bounds the documents of the B
    sequences (padding's runs too); without it the ring's flash kernel asks the device, which synchronises.

    Without a ring `local` does the work on (B, S, heads, dim) and the slice of the sinks that belongs to its heads.

    Gradients are those of this rank's tokens and heads: a gradient of the sinks has to be summed over the ranks, like
    that of any weight.
    """
    # trainer/layout.py refuses others at start.
    heads, kv_heads, ulysses = q_BCHD.size(2), k_BCGD.size(2), context.ulysses
    assert heads % ulysses == 0 and (kv_heads % ulysses == 0 or ulysses % kv_heads == 0), (heads, kv_heads, ulysses)
    q, k, v = _to_heads(context, q_BCHD, k_BCGD, v_BCGV)
    sinks = None if sinks_H is None else sinks_H.chunk(context.ulysses)[context.ulysses_rank]
    if context.ring == 1:
        out = local(q, k, v, sinks)
    else:
        assert context.ring_group is not None
        # A window as long as the sequence is none.
        window = window if window < q.size(1) * context.ring else 0
        place = (context.ring, context.ring_rank, context.ring_group.group_name)
        out, _ = ring_attention(q, k, v, sinks, first_BS, *place, scale, window, max_documents)
    return _to_tokens(context, out)


def _to_heads(context: ContextParallel, *tensors_BCHD: Tensor) -> tuple[Tensor, ...]:
    """(B, C, heads, dim) -> (B, L, heads / ulysses, dim), fewer heads than ranks repeated."""
    if context.ulysses == 1:
        return tensors_BCHD
    N = context.ulysses
    whole = [x if x.size(2) % N == 0 else x.repeat_interleave(N // x.size(2), dim=2) for x in tensors_BCHD]
    return _Exchange.apply(True, N, _ulysses_group_name(context), *whole)  # type: ignore[no-any-return]


def _to_tokens(context: ContextParallel, x_BLHV: Tensor) -> Tensor:
    if context.ulysses == 1:
        return x_BLHV
    return _Exchange.apply(False, context.ulysses, _ulysses_group_name(context), x_BLHV)[0]  # type: ignore[no-any-return]


def _ulysses_group_name(context: ContextParallel) -> str:
    assert context.ulysses_group is not None
    return context.ulysses_group.group_name


class _Exchange(torch.autograd.Function):
    """Tokens for heads (or back) over N Ulysses ranks; its gradient is the exchange the other way."""

    @staticmethod
    def forward(ctx: Any, to_heads: bool, N: int, group_name: str, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.to_heads, ctx.N, ctx.group_name = to_heads, N, group_name
        return _exchange(to_heads, N, group_name, tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return None, None, None, *_exchange(not ctx.to_heads, ctx.N, ctx.group_name, grads)


def _exchange(to_heads: bool, N: int, group_name: str, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    # The tokens' or the heads' dim is cut into the ranks' parts, which must come first: one row of each per rank.
    cut, joined = (2, 1) if to_heads else (1, 2)
    rows = [1] * N
    # All are sent before the first is awaited.
    coming = [
        torch.ops._c10d_functional.all_to_all_single(
            x.unflatten(cut, (N, -1)).movedim(cut, 0).contiguous(), rows, rows, group_name
        )
        for x in tensors
    ]
    received = [torch.ops._c10d_functional.wait_tensor(x_NBX) for x_NBX in coming]
    return tuple(x_NBX.movedim(0, joined).flatten(joined, joined + 1) for x_NBX in received)
