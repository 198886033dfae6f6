"""The inner attention against its written-out formula; masks and windows by what a token can see; MLA with YaRN."""

import math
from dataclasses import replace

import pytest
import torch

from tests.transformers_models import KeepDouble, build_pair
from trainer.models.attention import build_attention, has_rope, layer_chunk, layer_window, position_temperature
from trainer.models.config import AttentionConfig, ModelConfig
from trainer.models.inner_attention import (
    SequencePlan,
    _cumulative_lengths,
    _plan_chunks,
    choose_backend,
    document_starts,
    plan_sequences,
    reference_attention,
    sdpa_attention,
)

B, S, H, G, D, V = 2, 12, 4, 2, 8, 6
IDS = torch.tensor([[0, 0, 0, 0, 0, 1, 1, 1, 2, -1, -1, -1], [5, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5]])


def random_qkv(dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = ((B, S, H, D), (B, S, G, D), (B, S, G, V))
    return [torch.randn(shape, generator=generator, dtype=dtype) for shape in shapes]


def plan_for(ids=None, window=0, **kwargs):
    config = AttentionConfig(sliding_window=window, **kwargs)
    return plan_sequences(torch.zeros(B, S, 1), config, document_ids_BS=ids)


def test_reference_equals_a_loop_over_rows():
    """fp64: only the order of sums differs, so 1e-13."""
    q, k, v = random_qkv()
    sinks = torch.linspace(-1, 2, H, dtype=torch.float64)
    mask = plan_for(IDS).mask_B1SS
    actual = reference_attention(q, k, v, sinks, mask, scale=0.3)
    for b in range(B):
        for s in range(S):
            seen = [t for t in range(s + 1) if IDS[b, t] == IDS[b, s]]
            for h in range(H):
                g = h // (H // G)
                weights = torch.stack([(q[b, s, h] @ k[b, t, g] * 0.3).exp() for t in seen])
                expected = (weights[:, None] * v[b, seen, g]).sum(0) / (weights.sum() + sinks[h].exp())
                torch.testing.assert_close(actual[b, s, h], expected, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("ids", [None, IDS], ids=["causal", "documents"])
def test_sdpa_equals_reference_with_gradients(ids):
    """fp64: fused and written-out softmax differ by rounding, so 1e-12."""
    results = []
    for attention in (sdpa_attention, lambda *a: reference_attention(*a[:3], None, *a[3:])):
        tensors = [t.requires_grad_() for t in random_qkv()]
        out = attention(*tensors, plan_for(ids).mask_B1SS, 0.25)
        out.square().sum().backward()
        results.append([out.detach(), *(t.grad for t in tensors)])
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


def test_plan_of_packed_documents():
    plan = plan_for(IDS)
    assert plan.backend == "sdpa"
    assert plan.positions_BS.tolist() == [[0, 1, 2, 3, 4, 0, 1, 2, 0, 0, 1, 2], list(range(12))]
    assert plan.token_mask_BS.tolist() == (IDS >= 0).tolist()
    expected = [[[t <= s and IDS[b, t] == IDS[b, s] for t in range(S)] for s in range(S)] for b in range(B)]
    assert plan.mask_B1SS[:, 0].tolist() == expected
    assert plan.mask_B1SS.any(-1).all(), "a row without anything to attend to gives NaN"


def test_plan_without_documents_needs_no_mask():
    plan = plan_for()
    assert plan.mask_B1SS is None and plan.token_mask_BS is None
    assert plan.positions_BS.tolist() == [list(range(S))]


def test_equal_ids_apart_are_different_documents():
    ids = torch.tensor([[0, 0, 1, 0, 0, -1, -1, 0, 0, 0, 0, 0]]).expand(B, S)
    plan = plan_for(ids)
    assert not plan.mask_B1SS[0, 0, 3, :3].any() and not plan.mask_B1SS[0, 0, 7, :7].any()
    assert plan.positions_BS[0].tolist() == [0, 1, 0, 0, 1, 0, 1, 0, 1, 2, 3, 4]


def test_given_positions_are_used():
    positions = torch.arange(S).expand(B, S) + 7
    plan = plan_sequences(torch.zeros(B, S, 1), AttentionConfig(), positions_BS=positions, document_ids_BS=IDS)
    assert plan.positions_BS is positions


@pytest.mark.parametrize("bound", [None, 5, 9])
def test_cumulative_lengths(bound):
    """Sequences end documents; unused slots are documents of no tokens."""
    expected = [0, 5, 8, 9, 12, 24]
    actual = _cumulative_lengths(B, S, document_starts(IDS), bound, IDS.device)
    assert actual.dtype == torch.int32
    assert actual.tolist() == expected + [24] * ((bound or 5) - 5)
    assert _cumulative_lengths(B, S, None, None, IDS.device).tolist() == [0, 12, 24]


def test_too_low_a_bound_on_documents_is_noticed():
    with pytest.raises(RuntimeError, match="max_documents"):
        _cumulative_lengths(B, S, document_starts(IDS), 4, IDS.device)


def test_backend_choice():
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    plain, window = AttentionConfig(), AttentionConfig(sliding_window=4)
    assert choose_backend(plain, cpu, torch.bfloat16, documents=True) == "sdpa"
    assert choose_backend(plain, cuda, torch.bfloat16, documents=False) == "sdpa"
    assert choose_backend(plain, cuda, torch.bfloat16, documents=True) == "varlen"
    assert choose_backend(window, cuda, torch.bfloat16, documents=False) == "varlen"
    assert choose_backend(AttentionConfig(sinks=True), cuda, torch.bfloat16, documents=False) == "varlen"
    assert choose_backend(window, cuda, torch.float32, documents=True) == "sdpa"
    with pytest.raises(ValueError, match=r"backend=varlen needs CUDA"):
        choose_backend(AttentionConfig(backend="varlen"), cpu, torch.bfloat16, documents=True)
    with pytest.raises(ValueError, match=r"backend='flex' is not known"):
        choose_backend(AttentionConfig(backend="flex"), cpu, torch.bfloat16, documents=True)


@pytest.mark.parametrize("sinks", [False, True])
def test_window_sees_itself_and_the_window_minus_one_before(sinks):
    attention = AttentionConfig(
        num_heads=H, num_kv_heads=G, head_dim=D, sliding_window=4, sliding_window_layers="even", sinks=sinks
    )
    config = ModelConfig(dim=16, attention=attention)
    x = torch.randn(1, S, 16, dtype=torch.float64)
    moved = x.clone()
    moved[0, 3] += 1.0
    for layer, last_change in ((0, 6), (1, S - 1)):
        module = randomise(build_attention(config, layer))
        change = module(x, plan_sequences(x, attention)) - module(moved, plan_sequences(x, attention))
        changed = change[0].abs().amax(-1)
        assert (changed[3 : last_change + 1] > 1e-6).all()
        assert (changed[:3] == 0).all() and (changed[last_change + 1 :] == 0).all()


def randomise(module):
    generator = torch.Generator().manual_seed(1)
    module = module.double()
    for parameter in module.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.3
    return module


CHUNKED = AttentionConfig(
    num_heads=H, num_kv_heads=G, head_dim=D, qk_norm="l2", nope_every=2, chunk_size=4, temperature_scale=0.5
)


def test_chunks_are_documents_cut_further():
    """A token sees the earlier tokens of its chunk; chunks are counted from the start of its document."""
    plan = plan_for(IDS, chunk_size=2)
    places = plan_for(IDS).positions_BS
    sees = plan_for(IDS).mask_B1SS[:, 0]
    expected = sees & (places[:, :, None] // 2 == places[:, None, :] // 2)
    assert torch.equal(plan.chunk_mask_B1SS[:, 0], expected) and torch.equal(plan.mask_B1SS[:, 0], sees)
    without = plan_for(chunk_size=5)
    assert without.mask_B1SS is None and without.chunk_mask_B1SS[1, 0, 9].tolist() == [5 <= t <= 9 for t in range(S)]
    assert plan_for(IDS, chunk_size=S).chunk_mask_B1SS is None


@pytest.mark.parametrize("bound", [None, 5, 9])
def test_chunk_lengths_for_varlen(bound):
    """No chunk is longer than its size, whatever the documents; a static bound has room for all of them."""
    plan = SequencePlan("varlen", plan_for(IDS).positions_BS)
    starts = document_starts(IDS)
    lengths = _plan_chunks(plan, AttentionConfig(chunk_size=2), B, S, starts, bound).chunk_cu_seqlens_N
    ends = [0, 2, 4, 5, 7, 8, 9, 11, 12, 14, 16, 18, 20, 22, 24]
    assert lengths[: len(ends)].tolist() == ends and (lengths[len(ends) :] == 24).all()
    alone = _plan_chunks(plan, AttentionConfig(chunk_size=5), B, S, None, bound).chunk_cu_seqlens_N
    assert alone.unique().tolist() == [0, 5, 10, 12, 17, 22, 24]


def test_chunked_layers_and_those_without_rope():
    """Layer 0 has RoPE and chunks of 4: token 3 moves no token from 4 on. Layer 1 sees everything before it."""
    assert [has_rope(CHUNKED, layer) for layer in range(4)] == [True, False, True, False]
    assert [layer_chunk(CHUNKED, layer) for layer in range(2)] == [4, 0]
    config = ModelConfig(dim=16, attention=CHUNKED)
    x = torch.randn(1, S, 16, dtype=torch.float64)
    moved = x.clone()
    moved[0, 2] += 1.0
    for layer, last_change in ((0, 3), (1, S - 1)):
        module = randomise(build_attention(config, layer))
        change = module(x, plan_sequences(x, CHUNKED)) - module(moved, plan_sequences(x, CHUNKED))
        changed = change[0].abs().amax(-1)
        assert (changed[2 : last_change + 1] > 1e-6).all()
        assert (changed[:2] == 0).all() and (changed[last_change + 1 :] == 0).all()


def test_layers_without_rope_ignore_positions_but_for_the_temperature():
    config = ModelConfig(dim=16, attention=CHUNKED)
    x = torch.randn(1, S, 16, dtype=torch.float64)
    near, far = (plan_sequences(x, CHUNKED, positions_BS=torch.arange(S)[None] + shift) for shift in (0, 8192))
    turned, plain = (randomise(build_attention(config, layer)) for layer in (0, 1))
    # Tables are fp32: angles of 8192 differ from those of 0 by 5e-4.
    torch.testing.assert_close(turned(x, near), turned(x, far), rtol=1e-2, atol=1e-2)
    assert not torch.equal(plain(x, near), plain(x, far))
    untuned = randomise(build_attention(replace(config, attention=replace(CHUNKED, temperature_scale=0.0)), 1))
    assert torch.equal(untuned(x, near), untuned(x, far)) and torch.equal(untuned(x, near), plain(x, near))


def test_temperature_by_hand():
    positions = torch.tensor([[0, 8190, 8191, 3 * 8192 - 2, 3 * 8192 - 1]])
    expected = [1, 1, 1 + 0.1 * math.log(2), 1 + 0.1 * math.log(3), 1 + 0.1 * math.log(4)]
    assert position_temperature(positions, 0.1, 8192).flatten().tolist() == pytest.approx(expected, rel=1e-6)


def test_layer_window():
    even = AttentionConfig(sliding_window=8, sliding_window_layers="even")
    assert [layer_window(even, layer) for layer in range(4)] == [8, 0, 8, 0]
    assert [layer_window(AttentionConfig(sliding_window=8), layer) for layer in range(2)] == [8, 8]


@pytest.mark.parametrize(
    ("attention", "message"),
    [
        (AttentionConfig(kind="linear"), "kind='linear'.*gqa or mla"),
        (AttentionConfig(qk_norm="layer"), "qk_norm='layer'.*none, head, full or l2"),
        (AttentionConfig(num_heads=6, num_kv_heads=4), "num_heads=6 is not a multiple of num_kv_heads=4"),
        (AttentionConfig(sliding_window_layers="odd"), "sliding_window_layers='odd'"),
        (AttentionConfig(kind="mla", sinks=True), "neither sinks nor qk_norm"),
        (AttentionConfig(kind="mla", chunk_size=4), "RoPE and no chunks"),
    ],
)
def test_mistakes_are_named(attention, message):
    with pytest.raises(ValueError, match=message), torch.device("meta"):
        build_attention(ModelConfig(dim=16, attention=attention), 0)


@pytest.mark.parametrize("kwargs", [{}, {"q_lora_rank": None}], ids=["low_rank_q", "full_rank_q"])
def test_mla_with_yarn_equals_transformers_at_every_position(kwargs):
    """CASE 41. Position 0 is not turned, so a wrong YaRN factor only shows later; fp64, other order of sums: 1e-12."""
    theirs, ours = build_pair("deepseek_v3", torch.float64, **kwargs)
    x = torch.randn(1, 40, 32, dtype=torch.float64)
    positions = torch.arange(40)[None]
    mask = torch.full((40, 40), float("-inf"), dtype=torch.float64).triu(1)[None, None]
    with KeepDouble():
        expected, _ = theirs.model.layers[1].self_attn(x, theirs.model.rotary_emb(x, positions), mask)
    actual = ours.layers["1"].attention(x, plan_sequences(x, ours.config.attention))
    error = (actual - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert error.max() < 1e-12, f"position {error.argmax()}"
    assert ours.layers["1"].attention.inner.scale != pytest.approx(1 / math.sqrt(20)), "YaRN must move the scale"
