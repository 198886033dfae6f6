"""Attention of some queries to some keys of a sequence that lies on several ranks: the building block of a ring.

A tile is a contiguous run of queries against a contiguous run of keys: either the same run (causal) or an earlier one,
every key of which lies before every query. A rule says what a query sees within that: query p sees key j if

    first[p] <= j <= p    and    p - j < window

with first[p] the beginning of p's document. Documents are contiguous, and that makes the masks of tiles simple: of an
earlier run only the document that is still open at its end can reach the queries.

Forward returns a tile's own output and log-sum-exp; a query that sees no key of the tile has log-sum-exp -inf and
output 0. Backward gets output and log-sum-exp over *all* keys, and returns the tile's part of the gradients.

    masked   the formula with an explicit mask: any device and dtype; the oracle of the others
    cudnn    CUDA, half precision, neither documents nor a window; the fastest
    flash    CUDA, half precision: flash attention over packed segments (parallel/tile_segments.py)

Shape suffixes: B sequences, S tokens of a whole sequence, Q queries and K keys of a tile, H query heads, G key/value
heads, D head dim of queries and keys, V of values, T rows of all sequences in one.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from parallel.tile_segments import Segments, segments_of


class Rule(NamedTuple):
    """What a query sees, and how its logits are scaled."""

    scale: float
    # The query and the window - 1 tokens before it; 0: no window.
    window: int = 0
    first_BS: Tensor | None = None
    # Bound on the documents of the batch, padding's runs included; None: ask the device, which synchronises.
    max_documents: int | None = None


class Tile(NamedTuple):
    """`num_q` queries from row `q_row` of the local ones, at `q_start` of the whole sequence; keys alike."""

    q_row: int
    k_row: int
    num_q: int
    num_k: int
    q_start: int
    k_start: int

    @property
    def causal(self) -> bool:
        """Queries and keys are the same run; otherwise all keys are earlier than all queries."""
        return self.q_start == self.k_start

    def queries(self, x_BLX: Tensor) -> Tensor:
        """The tile's rows of a tensor with a row per local query."""
        return x_BLX[:, self.q_row : self.q_row + self.num_q]

    def keys(self, x_BLX: Tensor) -> Tensor:
        """The tile's rows of a tensor with a row per key of the visiting block."""
        return x_BLX[:, self.k_row : self.k_row + self.num_k]


def choose_kernel(q_BSHD: Tensor, k_BSGD: Tensor, v_BSGV: Tensor, rule: Rule) -> str:
    """`masked`, `cudnn` or `flash`, from what is asked alone: the same on every rank."""
    if q_BSHD.device.type != "cuda" or q_BSHD.dtype not in (torch.float16, torch.bfloat16):
        return "masked"
    if rule.first_BS is None and rule.window == 0:
        q, k, v = (x.transpose(1, 2) for x in (q_BSHD, k_BSGD, v_BSGV))
        if torch.backends.cuda.can_use_cudnn_attention(torch.backends.cuda.SDPAParams(q, k, v, None, 0.0, True, True)):
            return "cudnn"
    return "flash"


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """fp32, or fp64 for fp64."""
    return torch.promote_types(dtype, torch.float32)


def attend(
    kernel: str, tile: Tile, rule: Rule, q_BQHD: Tensor, k_BKGD: Tensor, v_BKGV: Tensor
) -> tuple[Tensor, Tensor]:
    """-> output (B, Q, H, V), log-sum-exp (B, H, Q) in fp32 (fp64 for fp64)."""
    if kernel == "cudnn":
        return _cudnn(tile, rule, q_BQHD, k_BKGD, v_BKGV)
    if kernel == "flash":
        return _flash(tile, rule, q_BQHD, k_BKGD, v_BKGV)
    return _masked(tile, rule, q_BQHD, k_BKGD, v_BKGV)


def attend_backward(
    kernel: str,
    tile: Tile,
    rule: Rule,
    grad_BQHV: Tensor,
    q_BQHD: Tensor,
    k_BKGD: Tensor,
    v_BKGV: Tensor,
    out_BQHV: Tensor,
    lse_BHQ: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """-> the tile's part of dq, dk, dv; `out` and `lse` are those over all keys."""
    arguments = (tile, rule, grad_BQHV, q_BQHD, k_BKGD, v_BKGV, out_BQHV, lse_BHQ)
    if kernel == "cudnn":
        return _cudnn_backward(*arguments)
    if kernel == "flash":
        return _flash_backward(*arguments)
    return _masked_backward(*arguments)


# ---- masked


def _masked(tile: Tile, rule: Rule, q_BQHD: Tensor, k_BKGD: Tensor, v_BKGV: Tensor) -> tuple[Tensor, Tensor]:
    logits_BHQK = _masked_logits(tile, rule, q_BQHD, k_BKGD)
    lse_BHQ = logits_BHQK.logsumexp(dim=-1)
    weights_BHQK = _weights(logits_BHQK, lse_BHQ)
    out_BQHV = torch.einsum("bhqk,bkhv->bqhv", weights_BHQK, _for_all_heads(v_BKGV, q_BQHD))
    return out_BQHV.to(q_BQHD.dtype), lse_BHQ


def _masked_backward(
    tile: Tile,
    rule: Rule,
    grad_BQHV: Tensor,
    q_BQHD: Tensor,
    k_BKGD: Tensor,
    v_BKGV: Tensor,
    out_BQHV: Tensor,
    lse_BHQ: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    weights_BHQK = _weights(_masked_logits(tile, rule, q_BQHD, k_BKGD), lse_BHQ)
    grad, out, q = (x.to(lse_BHQ.dtype) for x in (grad_BQHV, out_BQHV, q_BQHD))
    d_weights_BHQK = torch.einsum("bqhv,bkhv->bhqk", grad, _for_all_heads(v_BKGV, q_BQHD))
    delta_BHQ = (grad * out).sum(dim=-1).transpose(1, 2)
    d_logits_BHQK = weights_BHQK * (d_weights_BHQK - delta_BHQ.unsqueeze(-1)) * rule.scale
    dq_BQHD = torch.einsum("bhqk,bkhd->bqhd", d_logits_BHQK, _for_all_heads(k_BKGD, q_BQHD))
    dk_BKHD = torch.einsum("bhqk,bqhd->bkhd", d_logits_BHQK, q)
    dv_BKHV = torch.einsum("bhqk,bqhv->bkhv", weights_BHQK, grad)
    num_groups = k_BKGD.size(2)
    return dq_BQHD, *(x.unflatten(2, (num_groups, -1)).sum(dim=3) for x in (dk_BKHD, dv_BKHV))  # type: ignore[return-value]


def _masked_logits(tile: Tile, rule: Rule, q_BQHD: Tensor, k_BKGD: Tensor) -> Tensor:
    k_BKHD = _for_all_heads(k_BKGD, q_BQHD)
    logits_BHQK = torch.einsum("bqhd,bkhd->bhqk", q_BQHD.to(k_BKHD.dtype), k_BKHD) * rule.scale
    return logits_BHQK.masked_fill(~_sees(tile, rule, q_BQHD.device), float("-inf"))


def _for_all_heads(x_BKGX: Tensor, q_BQHD: Tensor) -> Tensor:
    """Each key/value head once per query head that uses it, in the dtype of accumulation."""
    x_BKHX = x_BKGX.repeat_interleave(q_BQHD.size(2) // x_BKGX.size(2), dim=2)
    return x_BKHX.to(accumulation_dtype(x_BKGX.dtype))


def _weights(logits_BHQK: Tensor, lse_BHQ: Tensor) -> Tensor:
    # -inf - -inf is not a number; the least finite number makes such rows 0.
    return (logits_BHQK - lse_BHQ.clamp(min=torch.finfo(lse_BHQ.dtype).min).unsqueeze(-1)).exp()


def _sees(tile: Tile, rule: Rule, device: torch.device) -> Tensor:
    """(B or 1, 1, Q, K) bool."""
    q_Q1 = torch.arange(tile.q_start, tile.q_start + tile.num_q, device=device).unsqueeze(1)
    k_K = torch.arange(tile.k_start, tile.k_start + tile.num_k, device=device)
    sees_BQK = (k_K <= q_Q1).unsqueeze(0)
    if rule.window:
        sees_BQK = sees_BQK & (q_Q1 - k_K < rule.window)
    if rule.first_BS is not None:
        first_BQ = rule.first_BS[:, tile.q_start : tile.q_start + tile.num_q]
        sees_BQK = sees_BQK & (k_K >= first_BQ.unsqueeze(-1))
    return sees_BQK.unsqueeze(1)


# ---- cuDNN, which takes (B, heads, rows, dim)


def _cudnn(tile: Tile, rule: Rule, q_BQHD: Tensor, k_BKGD: Tensor, v_BKGV: Tensor) -> tuple[Tensor, Tensor]:
    q, k, v = (x.transpose(1, 2) for x in (q_BQHD, k_BKGD, v_BKGV))
    out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        q, k, v, None, True, 0.0, tile.causal, False, scale=rule.scale
    )
    return out.transpose(1, 2), lse.view(q.shape[:3])


def _cudnn_backward(
    tile: Tile,
    rule: Rule,
    grad_BQHV: Tensor,
    q_BQHD: Tensor,
    k_BKGD: Tensor,
    v_BKGV: Tensor,
    out_BQHV: Tensor,
    lse_BHQ: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    grad, q, k, v, out = (x.transpose(1, 2) for x in (grad_BQHV, q_BQHD, k_BKGD, v_BKGV, out_BQHV))
    no_dropout_state = torch.zeros((), dtype=torch.int64, device=q.device)
    gradients = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
        grad,
        q,
        k,
        v,
        out,
        lse_BHQ.contiguous().unsqueeze(-1),
        no_dropout_state,
        no_dropout_state,
        None,
        None,
        None,
        tile.num_q,
        tile.num_k,
        0.0,
        tile.causal,
        scale=rule.scale,
    )
    dq, dk, dv = (x.transpose(1, 2) for x in gradients)
    return dq, dk, dv


# ---- flash attention over packed segments


def _flash(tile: Tile, rule: Rule, q_BQHD: Tensor, k_BKGD: Tensor, v_BKGV: Tensor) -> tuple[Tensor, Tensor]:
    B, Q, H, _ = q_BQHD.shape
    segments = _segments(tile, rule, q_BQHD)
    q, k, v = _padded(q_BQHD, k_BKGD, v_BKGV)
    out_THD, lse_HT = packed_flash(q, k, v, segments, rule.scale)
    lse_BHQ = lse_HT.view(H, B, Q).transpose(0, 1)
    # The kernel writes +inf for rows without keys.
    lse_BHQ = lse_BHQ.masked_fill(lse_BHQ == float("inf"), float("-inf"))
    if segments.reached_BQ is not None:
        lse_BHQ = lse_BHQ.masked_fill(~segments.reached_BQ.unsqueeze(1), float("-inf"))
    return out_THD.view(B, Q, H, -1)[..., : v_BKGV.size(-1)], lse_BHQ


def _flash_backward(
    tile: Tile,
    rule: Rule,
    grad_BQHV: Tensor,
    q_BQHD: Tensor,
    k_BKGD: Tensor,
    v_BKGV: Tensor,
    out_BQHV: Tensor,
    lse_BHQ: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    segments = _segments(tile, rule, q_BQHD)
    if segments.reached_BQ is not None:
        # All weights of the rows of other documents become 0, and with them their gradients.
        lse_BHQ = lse_BHQ.masked_fill(~segments.reached_BQ.unsqueeze(1), float("inf"))
    q, k, v, out, grad = _padded(q_BQHD, k_BKGD, v_BKGV, out_BQHV, grad_BQHV)
    lse_HT = lse_BHQ.transpose(0, 1).flatten(1).contiguous()
    dq, dk, dv = packed_flash_backward(grad, q, k, v, out, lse_HT, segments, rule.scale)
    return (
        dq.view(*q_BQHD.shape[:3], -1)[..., : q_BQHD.size(-1)],
        dk.view(*k_BKGD.shape[:3], -1)[..., : k_BKGD.size(-1)],
        dv.view(*v_BKGV.shape[:3], -1)[..., : v_BKGV.size(-1)],
    )


def _segments(tile: Tile, rule: Rule, q_BQHD: Tensor) -> Segments:
    return segments_of(
        rule.first_BS,
        q_BQHD.size(0),
        q_rows=(tile.q_start, tile.num_q),
        k_rows=(tile.k_start, tile.num_k),
        window=rule.window,
        max_documents=rule.max_documents,
        device=q_BQHD.device,
    )


def _padded(q_BQHD: Tensor, k_BKGD: Tensor, v_BKGV: Tensor, *like_v: Tensor) -> list[Tensor]:
    """(B, rows, heads, dim) -> (T, heads, width): the kernel wants one dim, a multiple of 8. Zeros change nothing."""
    width = -(-max(q_BQHD.size(-1), v_BKGV.size(-1)) // 8) * 8
    tensors = (q_BQHD, k_BKGD, v_BKGV, *like_v)
    # Padding by nothing would be a copy.
    wide = [x if x.size(-1) == width else F.pad(x, (0, width - x.size(-1))) for x in tensors]
    return [x.flatten(0, 1) for x in wide]


def packed_flash(
    q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, segments: Segments, scale: float
) -> tuple[Tensor, Tensor]:
    """torch's flash kernel over packed segments -> output (T, H, D), log-sum-exp (H, T)."""
    out_THD, lse_HT, *_ = torch.ops.aten._flash_attention_forward(
        q_THD,
        k_TGD,
        v_TGD,
        segments.cu_q_N,
        segments.cu_k_N,
        segments.max_q,
        segments.max_k,
        0.0,
        segments.causal,
        False,
        scale=scale,
        window_size_left=segments.left,
        window_size_right=segments.right,
    )
    return out_THD, lse_HT


def packed_flash_backward(
    grad_THD: Tensor,
    q_THD: Tensor,
    k_TGD: Tensor,
    v_TGD: Tensor,
    out_THD: Tensor,
    lse_HT: Tensor,
    segments: Segments,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """-> dq, dk, dv (T, heads, D)."""
    no_dropout_state = torch.zeros(2, dtype=torch.uint64, device=q_THD.device)
    unused = torch.empty(0, device=q_THD.device)
    return torch.ops.aten._flash_attention_backward(
        grad_THD.contiguous(),
        q_THD,
        k_TGD,
        v_TGD,
        out_THD.contiguous(),
        lse_HT,
        segments.cu_q_N,
        segments.cu_k_N,
        segments.max_q,
        segments.max_k,
        0.0,
        segments.causal,
        no_dropout_state,
        unused,
        scale=scale,
        window_size_left=segments.left,
        window_size_right=segments.right,
    )
