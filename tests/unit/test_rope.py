"""RoPE tables against transformers bit for bit, and what a rotation must keep."""

import math
from unittest.mock import patch

import pytest
import torch

from tests.distributed.tiny_models import MODELS
from trainer.models import attention, transformer
from trainer.models.config import RopeConfig
from trainer.models.rope import apply_rotary, inverse_frequencies, rotary_tables, softmax_scale, table_scale

YARN = {"scaling": "yarn", "factor": 40.0, "original_seq_len": 4096}


def hf_frequencies(dim: int, config: RopeConfig) -> tuple[torch.Tensor, float]:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = {
        "rope_type": config.scaling,
        "rope_theta": config.theta,
        "factor": config.factor,
        "beta_fast": config.beta_fast,
        "beta_slow": config.beta_slow,
        "original_max_position_embeddings": config.original_seq_len,
        "truncate": config.truncate,
        "low_freq_factor": config.low_freq_factor,
        "high_freq_factor": config.high_freq_factor,
    }
    if config.mscale_all_dim:
        parameters |= {"mscale": config.mscale, "mscale_all_dim": config.mscale_all_dim}
    hf = LlamaConfig(head_dim=dim, rope_parameters=parameters, max_position_embeddings=4096)
    return ROPE_INIT_FUNCTIONS[config.scaling](hf)


@pytest.mark.parametrize(
    "config",
    [
        RopeConfig(**YARN, mscale_all_dim=1.0),
        RopeConfig(**YARN, mscale=0.8, mscale_all_dim=0.6),
        RopeConfig(theta=150000.0, scaling="yarn", factor=32.0, truncate=False),
        RopeConfig(theta=50000.0, scaling="yarn", factor=64.0, beta_fast=1.0, mscale_all_dim=1.0),
        RopeConfig(theta=500000.0, scaling="llama3", factor=8.0, original_seq_len=8192),
        RopeConfig(theta=500000.0, scaling="llama3", factor=16.0, original_seq_len=8192, high_freq_factor=1.0),
    ],
    ids=["deepseek_v3", "two_mscales", "gpt_oss", "kimi_k2_no_ramp", "llama3", "llama4_scout_no_ramp"],
)
def test_scaling_equals_transformers_bit_for_bit(config):
    expected, scale = hf_frequencies(64, config)
    assert torch.equal(inverse_frequencies(64, config), expected)
    assert table_scale(config) == pytest.approx(scale, rel=1e-15)


def test_plain_frequencies():
    actual = inverse_frequencies(8, RopeConfig(theta=10000.0))
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual, torch.tensor([1.0, 0.1, 0.01, 0.001]), rtol=1e-6, atol=0)


def test_yarn_keeps_fast_pairs_and_stretches_slow_ones():
    plain, yarn = inverse_frequencies(64, RopeConfig()), inverse_frequencies(64, RopeConfig(**YARN))
    assert yarn[0] == plain[0]
    torch.testing.assert_close(yarn[-1], plain[-1] / 40, rtol=1e-6, atol=0)
    assert ((yarn <= plain) & (yarn >= plain / 40 * (1 - 1e-6))).all()


def test_temperatures():
    assert table_scale(RopeConfig(**YARN)) == pytest.approx(0.1 * math.log(40) + 1)
    assert table_scale(RopeConfig(**YARN, mscale_all_dim=1.0)) == 1.0
    assert softmax_scale(RopeConfig(**YARN, mscale_all_dim=1.0)) == pytest.approx((0.1 * math.log(40) + 1) ** 2)
    assert softmax_scale(RopeConfig(**YARN)) == 1.0
    assert (table_scale(RopeConfig(mscale_all_dim=1.0)), softmax_scale(RopeConfig(mscale_all_dim=1.0))) == (1.0, 1.0)


def test_unknown_scaling_is_named():
    with pytest.raises(ValueError, match=r"model\.rope\.scaling='ntk'.*none, yarn or llama3"):
        inverse_frequencies(8, RopeConfig(scaling="ntk"))


@pytest.mark.parametrize("interleaved", [False, True])
def test_scores_depend_on_the_distance_only(interleaved):
    """fp32 tables of angles below 100 are good to about 1e-5."""
    q, k = torch.randn(2, 1, 1, 2, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).unbind(0)

    def score(position_q: int, position_k: int) -> torch.Tensor:
        turned = [
            apply_rotary(x, *rotary_tables(torch.tensor([[p]]), 16, RopeConfig()), interleaved=interleaved)
            for x, p in ((q, position_q), (k, position_k))
        ]
        return (turned[0] * turned[1]).sum(-1)

    torch.testing.assert_close(score(7, 3), score(97, 93), rtol=1e-4, atol=1e-4)
    assert (score(7, 3) - score(8, 3)).abs().max() > 1e-2
    torch.testing.assert_close(score(5, 5), (q * k).sum(-1), rtol=1e-5, atol=1e-5)


def test_interleaved_is_the_permuted_rotation():
    x = torch.randn(1, 5, 2, 8, dtype=torch.float64)
    tables = rotary_tables(torch.arange(5)[None], 8, RopeConfig())
    by_halves = torch.cat((x[..., 0::2], x[..., 1::2]), dim=-1)
    expected = apply_rotary(by_halves, *tables, interleaved=False)
    assert torch.equal(apply_rotary(x, *tables, interleaved=True), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_dtype_is_kept_and_half_precision_rounds_once(dtype):
    x = torch.randn(1, 4, 1, 8).to(dtype)
    tables = rotary_tables(torch.arange(4)[None] + 1000, 8, RopeConfig())
    assert tables[0].dtype == torch.float32
    actual = apply_rotary(x, *tables, interleaved=False)
    assert actual.dtype == dtype
    assert torch.equal(
        actual, apply_rotary(x.double(), *(t.double() for t in tables), interleaved=False).to(dtype)
    ) or (dtype == torch.float32)


@pytest.mark.parametrize("name", ["qwen3", "deepseek", "gpt_oss", "llama4", "multi_token"])
def test_tables_are_worked_out_once_and_are_those_that_each_layer_would_work_out(name: str) -> None:
    config = MODELS[name]
    torch.manual_seed(0)
    model = transformer.Transformer(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    tokens_BS, documents_BS = torch.arange(12).view(2, 6) % 7, torch.tensor([[0, 0, 0, 1, 1, 1], [0, 0, 2, 2, 2, 2]])
    with patch.object(attention, "rotary_tables", side_effect=AssertionError("worked out by a layer")):
        ours = model(tokens_BS, document_ids_BS=documents_BS).logits_BSV
    with patch.object(transformer, "rotary_tables", lambda *_: None):
        theirs = model(tokens_BS, document_ids_BS=documents_BS).logits_BSV
    assert torch.equal(ours, theirs)
    assert not torch.equal(ours, model(tokens_BS).logits_BSV)
