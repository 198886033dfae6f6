"""Attention of a sequence whose chunks lie on the ranks of a ring: keys and values travel, queries stay.

Rank r of R holds chunks r and 2R - 1 - r of 2R (comms/split_sequence.py), so each pair of ranks has the same work:

    its own keys         both chunks causal, and the later one in full against the earlier
    of an earlier rank   all queries against its earlier chunk
    of a later rank      the later chunk of queries against all its keys

Forward, R steps; step i works on the keys and values of rank r - i:

    step           0          1          2         ...
    compute      own keys   of r - 1   of r - 2             merged into one output, weighed by their log-sum-exps
    transfer     -> r + 1   -> r + 1   -> r + 1             the next block comes while this one is worked on

Backward goes around once more. What the other ranks make of a block's gradients follows it: each adds its part, and
after R - 1 hops they meet the owner's. At no time does a rank hold more than two blocks of keys and values beside its
own.

Sinks (one more logit z per head, without a value) come last: l' = logaddexp(l, z), o' = o * exp(l - l'). Given l' and
o' the blocks' backward returns the exact dq, dk, dv, and dz = -sum over rows of exp(z - l') * <dO, o'>.

One operator, not many: activation checkpointing keeps its result or repeats it as a whole.

Shape suffixes: B sequences, S tokens of a whole sequence, L of this rank's part of it, H query heads, G key/value
heads, D head dim of queries and keys, V of values, X numbers of a block, flat.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group  # pyright: ignore

from comms.operators import operator, register_fake
from parallel.block_attention import Rule, Tile, accumulation_dtype, attend, attend_backward, choose_kernel

# A visiting block: the rank it belongs to, its keys and its values.
Block = tuple[int, Tensor, Tensor]

_KEYS_AND_VALUES, _GRADIENTS = 0, 1


def tiles_of_block(ring: int, rank: int, source: int, length: int, rule: Rule) -> list[Tile]:
    """What rank's queries see of source's keys, chunk by chunk, causal tiles first; `length` rows on each."""
    chunk = length // 2
    tiles = []
    for q_half, q_chunk in enumerate((rank, 2 * ring - 1 - rank)):
        for k_half, k_chunk in enumerate((source, 2 * ring - 1 - source)):
            if q_chunk < k_chunk:
                continue
            tile = Tile(q_half * chunk, k_half * chunk, chunk, chunk, q_chunk * chunk, k_chunk * chunk)
            tiles += [tile] if tile.causal or not rule.window else _within_window(tile, rule.window)
    return sorted(tiles, key=lambda tile: not tile.causal)


def _within_window(tile: Tile, window: int) -> list[Tile]:
    """The rows of an off-diagonal tile that a window can join: the earliest queries and the latest keys, or nothing."""
    k_stop = tile.k_start + tile.num_k
    num_q = min(tile.num_q, k_stop + window - 1 - tile.q_start)
    num_k = min(tile.num_k, k_stop + window - 1 - tile.q_start)
    if num_q <= 0:
        return []
    skipped = tile.num_k - num_k
    return [Tile(tile.q_row, tile.k_row + skipped, num_q, num_k, tile.q_start, tile.k_start + skipped)]


def _one_tile(tiles: list[Tile]) -> list[Tile]:
    """The tiles of one step as a single call, causal by rows or full: for a kernel that needs no positions."""
    num_q = max(tile.q_row + tile.num_q for tile in tiles) - tiles[0].q_row
    num_k = max(tile.k_row + tile.num_k for tile in tiles) - tiles[0].k_row
    return [tiles[0]._replace(num_q=num_q, num_k=num_k)]


def _tiles(kernel: str, ring: int, rank: int, source: int, length: int, rule: Rule) -> list[Tile]:
    tiles = tiles_of_block(ring, rank, source, length, rule)
    return _one_tile(tiles) if kernel == "cudnn" else tiles


# ---- computation, apart from where the blocks come from


def merge(out_BLHV: Tensor, lse_BHL: Tensor, tile: Tile, tile_out_BQHV: Tensor, tile_lse_BHQ: Tensor) -> None:
    """Add a tile's attention to what its queries have so far, in place. A query's causal tile must be its first: it
    starts afresh, and as every token sees itself, its log-sum-exp is finite from then on."""
    own_out_BQHV, own_lse_BHQ = tile.queries(out_BLHV), tile.queries(lse_BHL.mT).mT
    if tile.causal:
        own_out_BQHV.copy_(tile_out_BQHV)
        own_lse_BHQ.copy_(tile_lse_BHQ)
        return
    weight_BHQ = (tile_lse_BHQ - own_lse_BHQ).sigmoid()
    own_out_BQHV.lerp_(tile_out_BQHV.to(out_BLHV.dtype), weight_BHQ.transpose(1, 2).unsqueeze(-1))
    own_lse_BHQ.copy_(torch.logaddexp(own_lse_BHQ, tile_lse_BHQ))


def forward_over(q_BLHD: Tensor, blocks: Iterable[Block], ring: int, rank: int, rule: Rule) -> tuple[Tensor, Tensor]:
    """Attention of rank's queries to all blocks, its own first -> output (B, L, H, V), log-sum-exp (B, H, L), both in
    the dtype of accumulation."""
    B, L, H, _ = q_BLHD.shape
    dtype = accumulation_dtype(q_BLHD.dtype)
    lse_BHL = q_BLHD.new_empty((B, H, L), dtype=dtype)
    out_BLHV = None
    for source, k_BLGD, v_BLGV in blocks:
        if out_BLHV is None:
            out_BLHV = q_BLHD.new_empty(B, L, H, v_BLGV.size(-1), dtype=dtype)
        kernel = choose_kernel(q_BLHD, k_BLGD, v_BLGV, rule)
        for tile in _tiles(kernel, ring, rank, source, L, rule):
            part = attend(kernel, tile, rule, tile.queries(q_BLHD), tile.keys(k_BLGD), tile.keys(v_BLGV))
            merge(out_BLHV, lse_BHL, tile, *part)
    assert out_BLHV is not None
    return out_BLHV, lse_BHL


def backward_of(
    block: Block,
    grad_BLHV: Tensor,
    q_BLHD: Tensor,
    out_BLHV: Tensor,
    lse_BHL: Tensor,
    dq_BLHD: Tensor,
    ring: int,
    rank: int,
    rule: Rule,
) -> Tensor:
    """Add one block's part to dq; returns what rank's queries make of its dk and dv, flat, in dq's dtype."""
    source, k_BLGD, v_BLGV = block
    gradients_X = dq_BLHD.new_zeros(k_BLGD.numel() + v_BLGV.numel())
    dk_BLGD, dv_BLGV = _unpack(gradients_X, k_BLGD, v_BLGV)
    kernel = choose_kernel(q_BLHD, k_BLGD, v_BLGV, rule)
    for tile in _tiles(kernel, ring, rank, source, q_BLHD.size(1), rule):
        dq, dk, dv = attend_backward(
            kernel,
            tile,
            rule,
            tile.queries(grad_BLHV),
            tile.queries(q_BLHD),
            tile.keys(k_BLGD),
            tile.keys(v_BLGV),
            tile.queries(out_BLHV),
            tile.queries(lse_BHL.mT).mT,
        )
        tile.queries(dq_BLHD).add_(dq)
        tile.keys(dk_BLGD).add_(dk)
        tile.keys(dv_BLGV).add_(dv)
    return gradients_X


# ---- transfer


class _Transfer:
    """A tensor on its way to the next rank while one of the same shape comes from the previous rank."""

    def __init__(self, leaving: Tensor, ring: int, rank: int, group: dist.ProcessGroup, tag: int) -> None:
        self.arriving = torch.empty_like(leaving)
        # Kept until it has been sent.
        self.leaving = leaving
        send = dist.P2POp(dist.isend, leaving, group=group, tag=tag, group_peer=(rank + 1) % ring)
        receive = dist.P2POp(dist.irecv, self.arriving, group=group, tag=tag, group_peer=(rank - 1) % ring)
        self.works = dist.batch_isend_irecv([send, receive])

    def wait(self) -> Tensor:
        """What has arrived. On a GPU its stream waits, not the host."""
        for work in self.works:
            work.wait()
        return self.arriving


def _rotate(k_BLGD: Tensor, v_BLGV: Tensor, ring: int, rank: int, group: dist.ProcessGroup) -> Iterator[Block]:
    """This rank's block, then each previous rank's; the next one is on its way while one is worked on."""
    block_X = torch.cat([k_BLGD.flatten(), v_BLGV.flatten()])
    for step in range(ring):
        coming = _Transfer(block_X, ring, rank, group, _KEYS_AND_VALUES) if step + 1 < ring else None
        yield (rank - step) % ring, *_unpack(block_X, k_BLGD, v_BLGV)
        if coming is not None:
            block_X = coming.wait()


def _unpack(flat_X: Tensor, k_BLGD: Tensor, v_BLGV: Tensor) -> tuple[Tensor, Tensor]:
    k_X, v_X = flat_X.split([k_BLGD.numel(), v_BLGV.numel()])
    return k_X.view(k_BLGD.shape), v_X.view(v_BLGV.shape)


# ---- the operator


@torch.library.custom_op("sluicegate::ring_attention", mutates_args=())
def ring_attention(
    q_BLHD: Tensor,
    k_BLGD: Tensor,
    v_BLGV: Tensor,
    sinks_H: Tensor | None,
    first_BS: Tensor | None,
    ring: int,
    rank: int,
    group_name: str,
    scale: float,
    window: int,
    max_documents: int | None,
) -> tuple[Tensor, Tensor]:
    """Attention over the sequence that the ranks of the group share -> output (B, L, H, V), log-sum-exp with the sink
    (B, H, L) in fp32 (fp64 for fp64). Collective. See `Rule` for what a token sees."""
    rule, group = Rule(scale, window, first_BS, max_documents), _resolve_process_group(group_name)  # pyright: ignore
    blocks = _rotate(k_BLGD, v_BLGV, ring, rank, group)
    out_BLHV, lse_BHL = forward_over(q_BLHD.contiguous(), blocks, ring, rank, rule)
    if sinks_H is not None:
        with_sink_BHL = torch.logaddexp(lse_BHL, sinks_H.to(lse_BHL.dtype).unsqueeze(1))
        out_BLHV *= (lse_BHL - with_sink_BHL).exp().transpose(1, 2).unsqueeze(-1)
        lse_BHL = with_sink_BHL
    return out_BLHV.to(q_BLHD.dtype), lse_BHL


@ring_attention.register_fake
def _(q_BLHD: Tensor, _k: Tensor, v_BLGV: Tensor, *_rest: Any) -> tuple[Tensor, Tensor]:
    B, L, H, _ = q_BLHD.shape
    lse_BHL = q_BLHD.new_empty((B, H, L), dtype=accumulation_dtype(q_BLHD.dtype))
    return q_BLHD.new_empty((B, L, H, v_BLGV.size(-1))), lse_BHL


@operator("ring_attention_backward")
def _ring_attention_backward(
    grad_BLHV: Tensor,
    q_BLHD: Tensor,
    k_BLGD: Tensor,
    v_BLGV: Tensor,
    first_BS: Tensor | None,
    out_BLHV: Tensor,
    lse_BHL: Tensor,
    ring: int,
    rank: int,
    group_name: str,
    scale: float,
    window: int,
    max_documents: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    rule, group = Rule(scale, window, first_BS, max_documents), _resolve_process_group(group_name)  # pyright: ignore
    grad, q = grad_BLHV.contiguous(), q_BLHD.contiguous()
    dq_BLHD = torch.zeros_like(q, dtype=lse_BHL.dtype)
    blocks = _rotate(k_BLGD, v_BLGV, ring, rank, group)
    own_X = backward_of(next(blocks), grad, q, out_BLHV, lse_BHL, dq_BLHD, ring, rank, rule)
    travelling = None
    for block in blocks:
        gradients_X = backward_of(block, grad, q, out_BLHV, lse_BHL, dq_BLHD, ring, rank, rule)
        if travelling is not None:
            gradients_X += travelling.wait()
        travelling = _Transfer(gradients_X, ring, rank, group, _GRADIENTS)
    assert travelling is not None
    dk_BLGD, dv_BLGV = _unpack(own_X.add_(travelling.wait()), k_BLGD, v_BLGV)
    # Copies: results of an operator must not share memory.
    return tuple(torch.empty_like(x).copy_(dx) for x, dx in ((q_BLHD, dq_BLHD), (k_BLGD, dk_BLGD), (v_BLGV, dv_BLGV)))  # type: ignore[return-value]


@register_fake(_ring_attention_backward)
def _(_grad: Tensor, q_BLHD: Tensor, k_BLGD: Tensor, v_BLGV: Tensor, *_rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(q_BLHD), torch.empty_like(k_BLGD), torch.empty_like(v_BLGV)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, sinks, first, *ctx.settings = inputs
    ctx.save_for_backward(q, k, v, sinks, first, *output)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad_BLHV: Tensor, _grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, sinks_H, first, out_BLHV, lse_BHL = ctx.saved_tensors
    dq, dk, dv = _ring_attention_backward(grad_BLHV, q, k, v, first, out_BLHV, lse_BHL, *ctx.settings)
    d_sinks = None
    if sinks_H is not None:
        delta_BHL = (grad_BLHV.to(lse_BHL.dtype) * out_BLHV.to(lse_BHL.dtype)).sum(dim=-1).transpose(1, 2)
        weight_BHL = (sinks_H.to(lse_BHL.dtype).unsqueeze(1) - lse_BHL).exp()
        d_sinks = -(weight_BHL * delta_BHL).sum(dim=(0, 2)).to(sinks_H.dtype)
    return dq, dk, dv, d_sinks, None, *(None for _ in ctx.settings)


ring_attention.register_autograd(_backward, setup_context=_save_for_backward)
