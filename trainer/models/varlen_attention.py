"""Flash attention over packed documents, with attention sinks, as one differentiable op.

Forward: torch's flash kernel gives the output o and the log-sum-exp l of each row's logits. A sink z (one more logit,
without a value) only changes the denominator: l' = logaddexp(l, z) and o' = o * exp(l - l').

Backward: the kernel rebuilds the weights as exp(logits - l) and needs delta = <dO, o>. Given l' and o' in place of l
and o it therefore returns exactly the gradients of the softmax with the sink; what is left is
dz = -sum over rows of exp(z - l') * <dO, o'>. So sinks cost two elementwise passes and no second attention.

We call the aten operators below torch.nn.attention.varlen because their signature is the same in torch 2.11 to 2.13,
where the public function's is not, and because the public function has no gradient through the log-sum-exp.

Shapes: B batch, S sequence, T = B * S tokens, H query heads, G key/value heads, D head dim of q and k, V of v,
N documents.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from comms.operators import operator, register_fake


def varlen_attention(
    q_BSHD: Tensor,
    k_BSGD: Tensor,
    v_BSGV: Tensor,
    sinks_H: Tensor | None,
    cu_seqlens_N: Tensor,
    *,
    max_len: int,
    scale: float,
    window: int,
) -> Tensor:
    """Causal attention within documents -> (B, S, H, V). CUDA, fp16 or bf16, head dims up to 256.

    cu_seqlens: int32 starts of the documents among the T tokens, then T. window 0 means no window.
    """
    B, S, H, _ = q_BSHD.shape
    V = v_BSGV.size(-1)
    # The kernel wants one head dim for all three, a multiple of 8; zeros add nothing to the logits or the output.
    width = -(-max(q_BSHD.size(-1), V) // 8) * 8
    q, k, v = (_widened(t, width).flatten(0, 1) for t in (q_BSHD, k_BSGD, v_BSGV))
    out_THD, _ = _flash_varlen(q, k, v, sinks_H, cu_seqlens_N, max_len, scale, window)
    return out_THD.view(B, S, H, width)[..., :V]


def _widened(x: Tensor, width: int) -> Tensor:
    # A pad by nothing would copy.
    return x if x.size(-1) == width else F.pad(x, (0, width - x.size(-1)))


@torch.library.custom_op("sluicegate::flash_varlen", mutates_args=())
def _flash_varlen(
    q_THD: Tensor,
    k_TGD: Tensor,
    v_TGD: Tensor,
    sinks_H: Tensor | None,
    cu_seqlens_N: Tensor,
    max_len: int,
    scale: float,
    window: int,
) -> tuple[Tensor, Tensor]:
    """-> output (T, H, D), log-sum-exp with the sink (H, T) fp32."""
    left, right = _kernel_window(window)
    out_THD, lse_HT, *_ = torch.ops.aten._flash_attention_forward(
        q_THD,
        k_TGD,
        v_TGD,
        cu_seqlens_N,
        cu_seqlens_N,
        max_len,
        max_len,
        0.0,
        True,
        False,
        scale=scale,
        window_size_left=left,
        window_size_right=right,
    )
    if sinks_H is None:
        return out_THD, lse_HT
    with_sink_HT = torch.logaddexp(lse_HT, sinks_H.float().unsqueeze(1))
    kept_TH = (lse_HT - with_sink_HT).exp().T
    return (out_THD * kept_TH.unsqueeze(-1)).to(out_THD.dtype), with_sink_HT


@_flash_varlen.register_fake
def _flash_varlen_shapes(q_THD: Tensor, *_rest: Any) -> tuple[Tensor, Tensor]:
    T, H, _ = q_THD.shape
    return torch.empty_like(q_THD), q_THD.new_empty((H, T), dtype=torch.float32)


@operator("flash_varlen_backward")
def _flash_varlen_backward(
    grad_THD: Tensor,
    q_THD: Tensor,
    k_TGD: Tensor,
    v_TGD: Tensor,
    out_THD: Tensor,
    lse_HT: Tensor,
    cu_seqlens_N: Tensor,
    max_len: int,
    scale: float,
    window: int,
) -> tuple[Tensor, Tensor, Tensor]:
    left, right = _kernel_window(window)
    no_dropout_state = torch.zeros(2, dtype=torch.uint64, device=q_THD.device)
    unused = torch.empty(0, device=q_THD.device)
    return torch.ops.aten._flash_attention_backward(
        grad_THD.contiguous(),
        q_THD,
        k_TGD,
        v_TGD,
        out_THD,
        lse_HT,
        cu_seqlens_N,
        cu_seqlens_N,
        max_len,
        max_len,
        0.0,
        True,
        no_dropout_state,
        unused,
        scale=scale,
        window_size_left=left,
        window_size_right=right,
    )


@register_fake(_flash_varlen_backward)
def _flash_varlen_backward_shapes(
    grad_THD: Tensor, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, *_rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(q_THD), torch.empty_like(k_TGD), torch.empty_like(v_TGD)


def _kernel_window(window: int) -> tuple[int, int]:
    """The kernel counts the tokens to the left of the query, -1 for all; ours counts the query too, 0 for all."""
    return (window - 1, 0) if window > 0 else (-1, 0)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, sinks, cu_seqlens, ctx.max_len, ctx.scale, ctx.window = inputs
    out, lse = output
    ctx.save_for_backward(q, k, v, sinks, cu_seqlens, out, lse)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad_THD: Tensor, _grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, sinks_H, cu_seqlens, out_THD, lse_HT = ctx.saved_tensors
    dq, dk, dv = _flash_varlen_backward(
        grad_THD, q, k, v, out_THD, lse_HT, cu_seqlens, ctx.max_len, ctx.scale, ctx.window
    )
    d_sinks = None
    if sinks_H is not None:
        delta_HT = (grad_THD.float() * out_THD.float()).sum(dim=-1).T
        weight_HT = (sinks_H.float().unsqueeze(1) - lse_HT).exp()
        d_sinks = -(weight_HT * delta_HT).sum(dim=1).to(sinks_H.dtype)
    return dq, dk, dv, d_sinks, None, None, None, None


_flash_varlen.register_autograd(_backward, setup_context=_save_for_backward)
