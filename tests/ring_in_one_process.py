"""A ring's attention with its ranks in a loop: the same schedule, tiles and kernels, and nothing sent."""

import torch
from torch import Tensor

from parallel.block_attention import Rule
from parallel.ring_attention import _unpack, backward_of, forward_over
from tests.token_table import token_table


def ring_in_one_process(
    q: Tensor, k: Tensor, v: Tensor, grad: Tensor, ring: int, rule: Rule
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(B, S, heads, dim) each -> output, dq, dk, dv, in the order of the sequence."""
    table = token_table(q.size(1), ring, 1, 1).to(q.device)
    blocks = [(rank, k[:, rows].contiguous(), v[:, rows].contiguous()) for rank, rows in enumerate(table)]
    gradients = [0.0] * ring
    whole_out, whole_dq = torch.empty_like(grad), torch.empty_like(q)
    for rank, rows in enumerate(table):
        own_q, own_grad = q[:, rows], grad[:, rows]
        visiting = [blocks[(rank - step) % ring] for step in range(ring)]
        out, lse = forward_over(own_q, visiting, ring, rank, rule)
        whole_out[:, rows] = out = out.to(q.dtype)
        dq = torch.zeros_like(own_q, dtype=lse.dtype)
        for block in visiting:
            gradients[block[0]] += backward_of(block, own_grad, own_q, out, lse, dq, ring, rank, rule)
        whole_dq[:, rows] = dq.to(q.dtype)
    whole_dk, whole_dv = torch.empty_like(k), torch.empty_like(v)
    for (_, k_part, v_part), rows, flat in zip(blocks, table, gradients, strict=True):
        dk, dv = _unpack(flat, k_part, v_part)
        whole_dk[:, rows], whole_dv[:, rows] = dk.to(k.dtype), dv.to(v.dtype)
    return whole_out, whole_dq, whole_dk, whole_dv


def visible(num_sequences: int, seq_len: int, rule: Rule) -> Tensor:
    """(B, 1, S, S) bool: the definition of a rule."""
    q, k = torch.arange(seq_len).unsqueeze(1), torch.arange(seq_len)
    sees = (k <= q).expand(num_sequences, seq_len, seq_len)
    if rule.window:
        sees = sees & (q - k < rule.window)
    if rule.first_BS is not None:
        sees = sees & (k >= rule.first_BS.cpu().unsqueeze(-1))
    return sees.unsqueeze(1)
