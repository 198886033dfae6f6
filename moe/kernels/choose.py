"""Choosing experts: the k largest of each row, and how often each expert was chosen.

`stable_topk` takes the largest first and the lowest index among equals, as a stable descending sort does, which sorts
every row whole. Each number becomes an integer of the same order with the index behind it, so all are different and k
maxima are the answer:

    0.5, 2.0, 2.0, -1.0   k = 2   ->   1, 2

NaN counts as larger than every number, and -0 equals 0. Counts are sums of histograms: no atomics.

Shape suffixes: T rows, E experts, K chosen.
"""

# Kernels are written in Triton's language, which has no types.
# pyright: basic, reportGeneralTypeIssues=false, reportArgumentType=false
# ruff: noqa: ANN001, ANN202

import os

import torch
import triton
import triton.language as tl
from torch import Tensor

from comms.operators import operator, register_fake

# Numbers of one program of `stable_topk`, ids of one of `count_ids`.
NUMBERS, IDS = 1024, 1024


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
                *(scores_TE.contiguous(), ids_TK, num_rows, width), K=k, ROWS=rows, COLUMNS=columns
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
    num_programs = triton.cdiv(ids.numel(), IDS)
    counts = ids.new_empty(num_programs, num_experts, dtype=torch.int32)
    with torch.cuda.device(ids.device) if ids.is_cuda else torch.no_grad():
        _count_kernel[(num_programs,)](
            *(ids.contiguous(), counts, ids.numel(), num_experts),
            EXPERTS=max(triton.next_power_of_2(num_experts), 2),
            BLOCK=IDS,
        )
    return counts.sum(0)


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
    key = (ordered.to(tl.int64) << 32) + (COLUMNS - 1 - column)[None, :]
    # Behind the last column: below every number, -inf included.
    lowest = tl.full([1, 1], -(2**63), tl.int64)
    key = tl.where((column < width)[None, :], key, lowest)
    for k in tl.static_range(K):
        best = tl.max(key, 1)
        tl.store(ids + row * K + k, COLUMNS - 1 - (best & 0xFFFFFFFF), mask=row < num_rows)
        key = tl.where(key == best[:, None], lowest, key)


@triton.jit
def _count_kernel(ids, counts, size, num_experts, EXPERTS: tl.constexpr, BLOCK: tl.constexpr):
    """One program: the histogram of one block of ids."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    id = tl.load(ids + at, mask=at < size, other=-1).to(tl.int32)
    count = tl.histogram(tl.maximum(id, 0), EXPERTS, mask=(id >= 0) & (id < num_experts))
    expert = tl.arange(0, EXPERTS)
    tl.store(counts + tl.program_id(0) * num_experts + expert, count, mask=expert < num_experts)
