"""Choosing experts: the k largest of each row, and how often each expert was chosen.

`stable_topk` takes the largest first and the lowest index among equals, as a stable descending sort does, which sorts
every row whole. Each number becomes an integer of the same order; k times the maximum is found, then the first place
that has it, which is taken out. A card finds either over a warp by one instruction for integers of 32 bits.

    0.5, 2.0, 2.0, -1.0   k = 2   ->   1, 2

NaN counts as larger than every number, and -0 equals 0. Counts are sums of histograms: no atomics.

Shape suffixes: T rows, E experts, K chosen.
"""

# Kernels are written in Triton's language, which has no types.
# pyright: basic, reportGeneralTypeIssues=false, reportArgumentType=false, reportCallIssue=false
# ruff: noqa: ANN001, ANN202

import os

import torch
import triton
import triton.language as tl
from torch import Tensor

from comms.operators import operator, register_fake

# Numbers of one program of `stable_topk`; of `count_ids` ids of one that counts, and experts of one that adds up.
NUMBERS, IDS, ADDED = 1024, 1024, 32


@operator("stable_topk")
def stable_topk(scores_TE: Tensor, k: int) -> Tensor:
    """(T, K) int64: indices of the k largest, the lowest index first among equals. No autograd."""
    if not (_on_triton(scores_TE) and scores_TE.dtype == torch.float32):
        return scores_TE.sort(dim=-1, descending=True, stable=True).indices[:, :k].contiguous()
    ids_TK = _empty_choice(scores_TE, k)
    num_rows, width = scores_TE.shape
    if num_rows:
        columns = triton.next_power_of_2(width)
        rows = max(NUMBERS // columns, 1)
        with torch.cuda.device(scores_TE.device) if scores_TE.is_cuda else torch.no_grad():
            _topk_kernel[(triton.cdiv(num_rows, rows),)](
                *(scores_TE.contiguous(), ids_TK, num_rows, width), K=k, ROWS=rows, COLUMNS=columns, num_warps=1
            )
    return ids_TK


@register_fake(stable_topk)
def _empty_choice(scores_TE: Tensor, k: int) -> Tensor:
    return scores_TE.new_empty(scores_TE.shape[0], k, dtype=torch.int64)


@operator("count_ids")
def count_ids(ids: Tensor, num_experts: int) -> Tensor:
    """(E,) int64: how often each id occurs; negative ids count nowhere. Does not wait for the device."""
    if not _on_triton(ids) or ids.numel() == 0:
        # Slot E collects the pairs without expert. Integer additions are exact in any order.
        slots = torch.where(ids >= 0, ids, num_experts).flatten()
        counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=ids.device)
        return counts.scatter_add(0, slots, torch.ones_like(slots))[:num_experts].clone()
    num_blocks = triton.cdiv(ids.numel(), IDS)
    counts = ids.new_empty(num_blocks, num_experts, dtype=torch.int32)
    total_E = ids.new_empty(num_experts, dtype=torch.int64)
    with torch.cuda.device(ids.device) if ids.is_cuda else torch.no_grad():
        _count_kernel[(num_blocks,)](
            *(ids.contiguous(), counts, ids.numel(), num_experts),
            EXPERTS=max(triton.next_power_of_2(num_experts), 2),
            BLOCK=IDS,
        )
        _add_kernel[(triton.cdiv(num_experts, ADDED),)](counts, total_E, num_blocks, num_experts, ADDED=ADDED)
    return total_E


@register_fake(count_ids)
def _(ids: Tensor, num_experts: int) -> Tensor:
    return ids.new_empty(num_experts, dtype=torch.int64)


def _on_triton(x: Tensor) -> bool:
    return x.is_cuda or os.environ.get("TRITON_INTERPRET") == "1"


@triton.jit
def _topk_kernel(scores, ids, num_rows, width, K: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """One program: some whole rows."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    inside = (row < num_rows)[:, None] & (column < width)[None, :]
    # Adding 0 makes 0 of -0.
    score = tl.load(scores + row[:, None] * width + column[None, :], mask=inside, other=float("-inf")) + 0.0
    bits = score.to(tl.int32, bitcast=True)
    # Negative floats grow with their bits, read as integers, in the wrong direction.
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    ordered = tl.where(score == score, ordered, 0x7FFFFFFF)
    # Below every number, -inf included: what has been taken, and what is behind the last column.
    taken = -(2**31)
    ordered = tl.where((column < width)[None, :], ordered, taken)
    for k in tl.static_range(K):
        best = tl.max(ordered, 1)
        first = tl.min(tl.where(ordered == best[:, None], column[None, :], COLUMNS), 1)
        tl.store(ids + row * K + k, first.to(tl.int64), mask=row < num_rows)
        ordered = tl.where(column[None, :] == first[:, None], taken, ordered)


@triton.jit
def _count_kernel(ids, counts, size, num_experts, EXPERTS: tl.constexpr, BLOCK: tl.constexpr):
    """One program: the histogram of one block of ids."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    id = tl.load(ids + at, mask=at < size, other=-1).to(tl.int32)
    count = tl.histogram(tl.maximum(id, 0), EXPERTS, mask=(id >= 0) & (id < num_experts))
    expert = tl.arange(0, EXPERTS)
    tl.store(counts + tl.program_id(0) * num_experts + expert, count, mask=expert < num_experts)


@triton.jit
def _add_kernel(counts, total, num_blocks, num_experts, ADDED: tl.constexpr):
    """One program: the counts of some experts, over all blocks."""
    expert = tl.program_id(0) * ADDED + tl.arange(0, ADDED)
    found = tl.zeros([ADDED], dtype=tl.int64)
    for first in range(0, num_blocks, ADDED):
        block = first + tl.arange(0, ADDED)
        inside = (block < num_blocks)[:, None] & (expert < num_experts)[None, :]
        some = tl.load(counts + block[:, None] * num_experts + expert[None, :], mask=inside, other=0)
        found += tl.sum(some, 0).to(tl.int64)
    tl.store(total + expert, found, mask=expert < num_experts)
