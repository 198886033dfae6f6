"""Tiles and segments of a ring without a GPU: the kernels are replaced by plain loops that are told the same things.

What flash attention is told (segments, alignment, window) is carried out here row by row in fp64, with its habit of
writing +inf where a row has no key; cuDNN's one call per step by the masked formula. The whole ring must then equal
the definition to the rounding of fp64.
"""

import functools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from parallel import block_attention, ring_attention
from parallel.block_attention import Rule, Tile
from parallel.tile_segments import Segments, segments_of
from tests.ring_in_one_process import ring_in_one_process, visible
from trainer.models.inner_attention import reference_attention

SCALE = 0.4
BOUND = 1e-12


def allowed_pairs(segments: Segments, num_q: int, num_k: int) -> Tensor:
    """(T of queries, T of keys) bool, as the kernel's documentation defines segments, alignment and window."""
    cu_q, cu_k = segments.cu_q_N.tolist(), segments.cu_k_N.tolist()
    assert (cu_q[0], cu_q[-1], cu_k[0], cu_k[-1]) == (0, num_q, 0, num_k)
    allowed = torch.zeros(num_q, num_k, dtype=torch.bool)
    for q_start, q_stop, k_start, k_stop in zip(cu_q, cu_q[1:], cu_k, cu_k[1:], strict=False):
        assert 0 <= q_stop - q_start <= segments.max_q
        assert 0 <= k_stop - k_start <= segments.max_k
        aligned = torch.arange(q_stop - q_start).unsqueeze(1) + (k_stop - k_start) - (q_stop - q_start)
        key = torch.arange(k_stop - k_start)
        sees = torch.ones(q_stop - q_start, k_stop - k_start, dtype=torch.bool)
        if segments.left >= 0:
            sees &= key >= aligned - segments.left
        right = 0 if segments.causal else segments.right
        if right >= 0:
            sees &= key <= aligned + right
        allowed[q_start:q_stop, k_start:k_stop] = sees
    return allowed


def logits_of(q: Tensor, k: Tensor, segments: Segments, scale: float) -> Tensor:
    k = k.repeat_interleave(q.size(1) // k.size(1), dim=1)
    logits = torch.einsum("qhd,khd->hqk", q, k) * scale
    return logits.masked_fill(~allowed_pairs(segments, len(q), len(k)), float("-inf"))


def plain_flash(q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float) -> tuple[Tensor, Tensor]:
    logits = logits_of(q, k, segments, scale)
    weights = logits.softmax(dim=-1).nan_to_num(0.0)
    lse = logits.logsumexp(dim=-1)
    out = torch.einsum("hqk,khd->qhd", weights, v.repeat_interleave(q.size(1) // v.size(1), dim=1))
    return out, lse.masked_fill(lse == float("-inf"), float("inf"))


def plain_flash_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, segments: Segments, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    group = q.size(1) // k.size(1)
    weights = (logits_of(q, k, segments, scale) - lse.unsqueeze(-1)).exp()
    delta = (grad * out).sum(dim=-1).T
    d_weights = torch.einsum("qhd,khd->hqk", grad, v.repeat_interleave(group, dim=1))
    d_logits = weights * (d_weights - delta.unsqueeze(-1)) * scale
    dq = torch.einsum("hqk,khd->qhd", d_logits, k.repeat_interleave(group, dim=1))
    dk, dv = torch.einsum("hqk,qhd->khd", d_logits, q), torch.einsum("hqk,qhd->khd", weights, grad)
    return dq, *(x.unflatten(1, (-1, group)).sum(dim=2) for x in (dk, dv))


def by_rows(tile: Tile) -> Tile:
    """What a kernel without positions makes of a tile: causal from its first row, or full."""
    return tile._replace(q_start=0 if tile.causal else tile.num_k, k_start=0)


def plain_cudnn(tile: Tile, rule: Rule, *tensors: Tensor) -> tuple[Tensor, Tensor]:
    return block_attention._masked(by_rows(tile), rule, *tensors)


def plain_cudnn_backward(tile: Tile, rule: Rule, *tensors: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return block_attention._masked_backward(by_rows(tile), rule, *tensors)


@pytest.fixture(scope="module")
def plain_kernels():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(block_attention, "packed_flash", plain_flash)
        patch.setattr(block_attention, "packed_flash_backward", plain_flash_backward)
        patch.setattr(block_attention, "_cudnn", plain_cudnn)
        patch.setattr(block_attention, "_cudnn_backward", plain_cudnn_backward)
        yield


def worst_error(kernel: str, B: int, S: int, ring: int, rule: Rule, *, v_dim: int = 3) -> float:
    generator = torch.Generator().manual_seed(0)
    shapes = [(B, S, 4, 3), (B, S, 2, 3), (B, S, 2, v_dim), (B, S, 4, v_dim)]
    q, k, v, grad = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ring_attention, "choose_kernel", lambda *_: kernel)
        actual = ring_in_one_process(q, k, v, grad, ring, rule)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = reference_attention(*leaves, None, visible(B, S, rule), rule.scale)
    out.backward(grad)
    expected = (out.detach(), *(x.grad for x in leaves))
    return max(float((a - e).norm() / e.norm()) for a, e in zip(actual, expected, strict=True))


@st.composite
def rules(draw: st.DrawFn) -> tuple[int, int, int, Rule]:
    """B, S, ring and a rule with documents, a window, both or neither."""
    B, ring = draw(st.integers(1, 2)), draw(st.sampled_from([2, 3, 4]))
    S = 2 * ring * draw(st.integers(1, 5))
    window = draw(st.one_of(st.just(0), st.integers(1, S - 1)))
    if draw(st.booleans()):
        return B, S, ring, Rule(SCALE, window)
    starts = torch.tensor(draw(st.lists(st.sampled_from([0, 0, 0, 1]), min_size=B * S, max_size=B * S))).view(B, S)
    starts[:, 0] = 1
    first_BS = torch.where(starts.bool(), torch.arange(S), 0).cummax(dim=1).values
    bound = draw(st.sampled_from([None, int(starts.sum()), int(starts.sum()) + 3]))
    return B, S, ring, Rule(SCALE, window, first_BS, bound)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(rules())
def test_flash_segments_equal_the_definition(plain_kernels, case: tuple[int, int, int, Rule]) -> None:
    B, S, ring, rule = case
    assert worst_error("flash", B, S, ring, rule, v_dim=2) < BOUND


@pytest.mark.parametrize("ring", [2, 3, 4])
def test_one_call_per_step_equals_the_definition(plain_kernels, ring: int) -> None:
    assert worst_error("cudnn", 2, 24, ring, Rule(SCALE)) < BOUND


def test_the_example_of_the_docstring() -> None:
    first = torch.tensor([[0, 0, 0, 3, 3, 3, 3, 3, 3, 3, 10, 10]])
    make = functools.partial(segments_of, first, 1, max_documents=4, device=first.device)
    earlier = make(q_rows=(8, 4), k_rows=(0, 4), window=0)
    assert (earlier.cu_q_N.tolist(), earlier.cu_k_N.tolist()) == ([0, 0, 2, 4], [0, 3, 4, 4])
    same = make(q_rows=(8, 4), k_rows=(8, 4), window=0)
    assert same.cu_q_N.tolist() == [0, 2, 4, 4, 4]


def test_more_documents_than_announced() -> None:
    first = torch.arange(8).unsqueeze(0)
    with pytest.raises(RuntimeError, match="more documents in the batch than max_documents"):
        segments_of(first, 1, q_rows=(0, 8), k_rows=(0, 8), window=0, max_documents=7, device=first.device)


def test_a_window_leaves_out_what_it_cannot_join() -> None:
    """A ring of 4 with chunks of 8: with a window of 5, the last chunk meets only itself and 4 keys before it."""
    tiles = {source: ring_attention.tiles_of_block(4, 0, source, 16, Rule(SCALE, window=5)) for source in range(4)}
    assert tiles[0] == [Tile(0, 0, 8, 8, 0, 0), Tile(8, 8, 8, 8, 56, 56)]
    assert tiles[1] == [Tile(8, 12, 4, 4, 56, 52)]
    assert tiles[2] == tiles[3] == []
