"""Rotary position embeddings and their extensions to longer contexts: YaRN and Llama 3's.

A head vector is a row of R = dim / 2 pairs; pair i of the token at position p is turned by the angle p * f_i with
f_i = theta^(-2i / dim). YaRN (Peng et al., 2023, arXiv:2309.00071) stretches a context by `factor`: pairs that turn
more than `beta_fast` times within the original length keep f_i, pairs that turn less than `beta_slow` times use
f_i / factor, a linear ramp lies between; the tables are scaled by an attention temperature. Llama 3's scaling
(arXiv:2407.21783; Llama 4 too) has a ramp that is linear in the number of turns, and no temperature.

Tables are computed from the positions, once for all layers of a forward pass: there is no buffer to materialise, to
shard or to save. (Fused into their use by torch.compile, a cosine for every number of every head took ten times as long
as the memory's traffic, on an H200.) They are fp32 whatever the model's dtype: the published weights were trained with
fp32 tables, so that is what equals the references bit for bit. The rotation itself runs in fp32 for half-precision
inputs, in fp64 for fp64.

Shapes: B batch, S sequence, H heads, D head dim, R = D / 2 pairs.
"""

import math

import torch
from torch import Tensor

from trainer.models.config import RopeConfig


def inverse_frequencies(dim: int, config: RopeConfig, device: torch.device | None = None) -> Tensor:
    """Angles per position of the dim / 2 pairs: (R,) fp32. Raises ValueError for an unknown `rope.scaling`."""
    exponents_R = torch.arange(0, dim, 2, dtype=torch.float32, device=device) / dim
    periods_R = config.theta**exponents_R
    if config.scaling == "none":
        return 1.0 / periods_R
    if config.scaling == "llama3":
        return _llama3_frequencies(1.0 / periods_R, config)
    if config.scaling != "yarn":
        raise ValueError(f"model.rope.scaling={config.scaling!r} is not known; choose none, yarn or llama3")
    keep_R = 1.0 - _yarn_ramp(dim, config, device)
    return (1.0 / (config.factor * periods_R)) * (1.0 - keep_R) + (1.0 / periods_R) * keep_R


def _llama3_frequencies(frequencies_R: Tensor, config: RopeConfig) -> Tensor:
    turns_R = config.original_seq_len / (2 * math.pi / frequencies_R)
    # Equal factors (Llama 4 Scout) make a step instead of a ramp.
    width = max(config.high_freq_factor - config.low_freq_factor, 1e-9)
    keep_R = ((turns_R - config.low_freq_factor) / width).clamp(0, 1)
    return (1.0 - keep_R) * frequencies_R / config.factor + keep_R * frequencies_R


def _yarn_ramp(dim: int, config: RopeConfig, device: torch.device | None) -> Tensor:
    """0 for pairs whose frequency is kept, 1 for pairs that are stretched: (R,) fp32."""
    low, high = (_pair_with_turns(turns, dim, config) for turns in (config.beta_fast, config.beta_slow))
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001  # a step instead of a ramp; avoids 0 / 0
    return ((torch.arange(dim // 2, dtype=torch.float32, device=device) - low) / (high - low)).clamp(0, 1)


def _pair_with_turns(turns: float, dim: int, config: RopeConfig) -> float:
    """The (fractional) index of the pair that turns `turns` times within the original sequence length."""
    return dim * math.log(config.original_seq_len / (turns * 2 * math.pi)) / (2 * math.log(config.theta))


def _temperature(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def table_scale(config: RopeConfig) -> float:
    """What cos and sin are multiplied by: 1 without YaRN."""
    if config.scaling != "yarn":
        return 1.0
    return _temperature(config.factor, config.mscale) / _temperature(config.factor, config.mscale_all_dim)


def softmax_scale(config: RopeConfig) -> float:
    """What MLA's softmax scale is multiplied by: temperature(mscale_all_dim)^2, 1 without YaRN (DeepSeek-V2/V3)."""
    return _temperature(config.factor, config.mscale_all_dim) ** 2 if config.scaling == "yarn" else 1.0


def rotary_tables(positions_BS: Tensor, dim: int, config: RopeConfig) -> tuple[Tensor, Tensor]:
    """cos and sin of every pair at every position: two (B, S, R) fp32 tensors."""
    frequencies_R = inverse_frequencies(dim, config, positions_BS.device)
    angles_BSR = positions_BS.unsqueeze(-1).float() * frequencies_R
    scale = table_scale(config)
    return angles_BSR.cos() * scale, angles_BSR.sin() * scale


def apply_rotary(x_BSHD: Tensor, cos_BSR: Tensor, sin_BSR: Tensor, *, interleaved: bool) -> Tensor:
    """Turns every pair of every head; keeps x's dtype.

    Pairs are (i, i + R), or (2i, 2i + 1) with `interleaved`. The interleaved result is laid out by halves: a fixed
    permutation of the head dim that queries and keys share, so that no score changes.
    """
    if interleaved:
        first_BSHR, second_BSHR = x_BSHD[..., 0::2], x_BSHD[..., 1::2]
    else:
        first_BSHR, second_BSHR = x_BSHD.chunk(2, dim=-1)
    cos, sin = cos_BSR.unsqueeze(2), sin_BSR.unsqueeze(2)
    turned = (first_BSHR * cos - second_BSHR * sin, second_BSHR * cos + first_BSHR * sin)
    return torch.cat(turned, dim=-1).to(x_BSHD.dtype)
