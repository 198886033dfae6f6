"""The segments in which flash attention over packed sequences computes one tile of a ring.

The kernel gets, per segment, a run of queries and a run of keys; it aligns the last query with the last key and knows
a causal mask and a window. Documents come from a tensor on the device (`first`: where each token's document begins in
the sequence), so how many segments there are is bounded and never asked.

Queries and keys the same run: a segment per document, causal. More segments than documents are empty ones.

Queries [a, b) against earlier keys [c, d): only the document still open at d reaches the queries, with its keys [s, d),
s = max(first[a], c). Three segments per sequence:

                 queries                          keys
    skipped      none                             [c, s): they get gradients of zero
    shared       [a, n): the document's rows      [s, d)
    untouched    [n, b)                           none: log-sum-exp +inf

    S=12, documents 0..2, 3..9, 10..11; queries [8, 12), keys [0, 4):    s=3, n=10    cu_q 0 0 2 4    cu_k 0 3 4 4

With a window the kernel's alignment needs the number of queries on the host, so all rows are in the shared segment and
`reached` tells which of them count. If no key of a sequence is reached, s = d and everything is skipped or untouched.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Segments(NamedTuple):
    """What the kernel is told. N segments and one; rows count over all sequences of the batch."""

    cu_q_N: Tensor
    cu_k_N: Tensor
    # Bounds on the rows of one segment.
    max_q: int
    max_k: int
    causal: bool
    # Keys to the left and right of the aligned one that a query sees; -1: all.
    left: int
    right: int
    # (B, Q) bool: queries whose results count; None: all.
    reached_BQ: Tensor | None = None


def segments_of(
    first_BS: Tensor | None,
    num_sequences: int,
    *,
    q_rows: tuple[int, int],
    k_rows: tuple[int, int],
    window: int,
    max_documents: int | None,
    device: torch.device,
) -> Segments:
    """Segments for queries and keys given as (start in the sequence, length); first None: one document, B sequences."""
    if first_BS is None:
        first_BS = torch.zeros(1, sum(q_rows), dtype=torch.int64, device=device)
        max_documents = num_sequences
    q_start, num_q = q_rows
    first_BQ = first_BS[:, q_start : q_start + num_q].expand(num_sequences, -1)
    if q_rows == k_rows:
        return _same_run(first_BQ, q_start, window, max_documents)
    return _earlier_run(first_BQ, q_start, k_rows, window)


def _same_run(first_BQ: Tensor, start: int, window: int, max_documents: int | None) -> Segments:
    B, Q = first_BQ.shape
    row_Q = torch.arange(start, start + Q, device=first_BQ.device)
    # A document that began before the run has its first row here.
    begins_T = (first_BQ.clamp(min=start) == row_Q).flatten()
    num_segments = int(begins_T.sum()) if max_documents is None else max_documents
    torch._assert_async(  # pyright: ignore[reportPrivateImportUsage]
        begins_T.sum() <= num_segments, "more documents in the batch than max_documents"
    )
    # What is not a beginning goes into one more slot, which is cut off.
    slot_T = torch.where(begins_T, begins_T.cumsum(0) - 1, num_segments + 1)
    cu_N = torch.full((num_segments + 2,), B * Q, dtype=torch.int32, device=first_BQ.device)
    row_T = torch.arange(B * Q, dtype=torch.int32, device=first_BQ.device)
    cu_N = cu_N.scatter_(0, slot_T, row_T)[:-1]
    left = window - 1 if window else -1
    return Segments(cu_N, cu_N, Q, Q, causal=True, left=left, right=0)


def _earlier_run(first_BQ: Tensor, q_start: int, k_rows: tuple[int, int], window: int) -> Segments:
    B, Q = first_BQ.shape
    k_start, num_k = k_rows
    k_stop = k_start + num_k
    skipped_B = first_BQ[:, 0].clamp(k_start, k_stop) - k_start
    reached_BQ = first_BQ < k_stop
    shared_B = skipped_B.new_full((B,), Q) if window else reached_BQ.sum(dim=1)
    sequence_B = torch.arange(B, device=first_BQ.device)
    cu_q_N = _cumulative(sequence_B * Q, torch.zeros_like(shared_B), shared_B, Q)
    cu_k_N = _cumulative(sequence_B * num_k, skipped_B, torch.full_like(skipped_B, num_k), num_k)
    # Aligned, query a + i meets key d - Q + i, whose distance is a + Q - d: what that leaves of the window lies left.
    left = window - 1 - (q_start + Q - k_stop) if window else -1
    return Segments(
        cu_q_N, cu_k_N, Q, num_k, causal=False, left=left, right=-1, reached_BQ=reached_BQ if window else None
    )


def _cumulative(base_B: Tensor, *ends: Tensor | int) -> Tensor:
    """Ends of the segments within each sequence -> int32 ends over the batch, from 0."""
    ends_BN = torch.stack([base_B + end for end in ends], dim=1)
    return torch.cat([ends_BN.new_zeros(1), ends_BN.flatten()]).to(torch.int32)
