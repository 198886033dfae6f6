"""Grouped-query attention and multi-head latent attention: the linear maps, norms and rotations around the softmax.

Llama 4 mixes two kinds of layers: most have RoPE and see their own chunk of a document, every n-th has neither RoPE nor
chunks and sharpens its softmax with the position (arXiv:2501.19399).

The softmax itself is `self.inner`, an InnerAttention given at construction and replaced by context parallelism. Head
counts are read from the activations, never from the config, so that a map cut by tensor parallelism still fits.

MLA (DeepSeek-V2, arXiv:2405.04434) keeps keys and values as one low-rank row per token: queries and keys are split
into a part without position and a part with RoPE, and the rotated key is shared by all heads.

Maps into and out of a layer go through `self.maps` (moe/linear_maps.py), which tensor parallelism replaces.

Shapes: B batch, S sequence (of this rank, where it is split; the tokens inside and outside a layer then differ), D
model dim, H query heads, G key/value heads, C head dim (N without position + R with), V head dim of the values, L low
rank of keys and values.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from moe.linear_maps import LinearMaps, local
from trainer.models.config import AttentionConfig, ModelConfig, RopeConfig
from trainer.models.inner_attention import InnerAttention, SequencePlan
from trainer.models.rope import apply_rotary, rotary_tables, softmax_scale

# The low-rank norms of every published MLA model use this, whatever the model's norm_eps (Moonlight's is 1e-5).
_LATENT_NORM_EPS = 1e-6


def build_attention(config: ModelConfig, layer: int) -> nn.Module:
    """The attention of block number `layer`. Raises ValueError for an unknown `attention.kind`."""
    kinds = {"gqa": GroupedQueryAttention, "mla": LatentAttention}
    if config.attention.kind not in kinds:
        raise ValueError(f"model.attention.kind={config.attention.kind!r} is not known; choose gqa or mla")
    return kinds[config.attention.kind](config, layer)


def layer_window(config: AttentionConfig, layer: int) -> int:
    """The sliding window of block number `layer`; 0 means none."""
    if config.sliding_window_layers not in ("all", "even"):
        raise ValueError(
            f"model.attention.sliding_window_layers={config.sliding_window_layers!r} is not known; choose all or even"
        )
    used = config.sliding_window_layers == "all" or layer % 2 == 0
    return config.sliding_window if used else 0


def has_rope(config: AttentionConfig, layer: int) -> bool:
    """Whether block number `layer` turns its queries and keys."""
    return config.nope_every == 0 or (layer + 1) % config.nope_every != 0


def layer_chunk(config: AttentionConfig, layer: int) -> int:
    """The chunk size of block number `layer`; 0 means none."""
    return config.chunk_size if has_rope(config, layer) else 0


def rotary_dim(config: AttentionConfig) -> int:
    """How many numbers of a head are turned by its position."""
    return config.qk_rope_head_dim if config.kind == "mla" else config.head_dim


class GroupedQueryAttention(nn.Module):
    """H query heads that share G heads of keys and values; optional qk-norm, biases, sinks, window and chunks."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.maps = LinearMaps()
        attention, D = config.attention, config.dim
        self.rope = config.rope if has_rope(attention, layer) else None
        self.temperature = (attention.temperature_scale, attention.temperature_floor)
        self.norm_eps = config.norm_eps
        self.qk_norm = attention.qk_norm
        self.head_dim = C = attention.head_dim
        H, G = attention.num_heads, attention.num_kv_heads
        if H % G:
            raise ValueError(f"model.attention.num_heads={H} is not a multiple of num_kv_heads={G}")
        self.wq = nn.Linear(D, H * C, bias=attention.bias)
        self.wk = nn.Linear(D, G * C, bias=attention.bias)
        self.wv = nn.Linear(D, G * C, bias=attention.bias)
        self.wo = nn.Linear(H * C, D, bias=attention.bias)
        self.q_norm = _qk_norm(attention, H, config.norm_eps)
        self.k_norm = _qk_norm(attention, G, config.norm_eps)
        self.sinks = nn.Parameter(torch.empty(H)) if attention.sinks else None
        self.inner = InnerAttention(C**-0.5, layer_window(attention, layer), layer_chunk(attention, layer))

    def forward(self, x_BSD: Tensor, plan: SequencePlan) -> Tensor:
        """(B, S, D) -> (B, S, D)."""
        q, k, v = self.maps.expand(x_BSD, self.wq, self.wk, self.wv)
        q_BSHC, k_BSGC = self._heads(q, self.q_norm), self._heads(k, self.k_norm)
        v_BSGC = v.unflatten(-1, (-1, self.head_dim))
        if self.rope is not None:
            cos, sin = plan.rotary or rotary_tables(plan.positions_BS, self.head_dim, self.rope)
            q_BSHC = self._turn(q_BSHC, cos, sin, self.rope)
            k_BSGC = self._turn(k_BSGC, cos, sin, self.rope)
        elif self.temperature[0]:
            q_BSHC = (q_BSHC * position_temperature(plan.positions_BS, *self.temperature)).to(q_BSHC.dtype)
        sinks_H = None if self.sinks is None else local(self.sinks)
        return self.maps.contract(self.inner(q_BSHC, k_BSGC, v_BSGC, sinks_H, plan).flatten(2), self.wo)

    def _heads(self, x: Tensor, norm: nn.Module | None) -> Tensor:
        """Splits a projection into heads and normalises it: over all heads together, or each by itself."""
        if norm is not None and self.qk_norm == "full":
            return norm(x).unflatten(-1, (-1, self.head_dim))
        x = x.unflatten(-1, (-1, self.head_dim))
        return x if norm is None else norm(x)

    def _turn(self, x_BSHC: Tensor, cos: Tensor, sin: Tensor, rope: RopeConfig) -> Tensor:
        x_BSHC = apply_rotary(x_BSHC, cos, sin, interleaved=rope.interleaved)
        if self.qk_norm != "l2":
            return x_BSHC
        wide = x_BSHC.to(torch.promote_types(x_BSHC.dtype, torch.float32))
        return F.rms_norm(wide, (self.head_dim,), eps=self.norm_eps).to(x_BSHC.dtype)


def position_temperature(positions_BS: Tensor, scale: float, floor: int) -> Tensor:
    """What queries are multiplied by, (B, S, 1, 1) fp32: 1 at the start, growing with ln(position / floor)."""
    steps_BS = torch.floor((positions_BS.float() + 1.0) / floor)
    return (torch.log1p(steps_BS) * scale + 1.0)[:, :, None, None]


def _qk_norm(config: AttentionConfig, num_heads: int, eps: float) -> nn.Module | None:
    if config.qk_norm in ("none", "l2"):
        return None
    if config.qk_norm not in ("head", "full"):
        raise ValueError(f"model.attention.qk_norm={config.qk_norm!r} is not known; choose none, head, full or l2")
    heads = num_heads if config.qk_norm == "full" else 1
    return nn.RMSNorm(heads * config.head_dim, eps=eps)


class LatentAttention(nn.Module):
    """MLA in its training form: keys and values are expanded from the low rank for all heads."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.maps = LinearMaps()
        attention, D, H = config.attention, config.dim, config.attention.num_heads
        if attention.sinks or attention.qk_norm != "none":
            raise ValueError("model.attention.kind=mla has neither sinks nor qk_norm; set sinks=false and qk_norm=none")
        if attention.nope_every or attention.chunk_size:
            raise ValueError("model.attention.kind=mla has RoPE and no chunks in every layer; set both settings to 0")
        self.rope = config.rope
        self.nope_dim, self.rope_dim = attention.qk_nope_head_dim, attention.qk_rope_head_dim
        self.v_dim, self.kv_rank, self.q_rank = attention.v_head_dim, attention.kv_lora_rank, attention.q_lora_rank
        C = self.nope_dim + self.rope_dim
        if self.q_rank > 0:
            self.wq_a = nn.Linear(D, self.q_rank, bias=attention.bias)
            self.q_norm = nn.RMSNorm(self.q_rank, eps=_LATENT_NORM_EPS)
            self.wq_b = nn.Linear(self.q_rank, H * C, bias=False)
        else:
            self.wq = nn.Linear(D, H * C, bias=False)
        self.wkv_a = nn.Linear(D, self.kv_rank + self.rope_dim, bias=attention.bias)
        self.kv_norm = nn.RMSNorm(self.kv_rank, eps=_LATENT_NORM_EPS)
        self.wkv_b = nn.Linear(self.kv_rank, H * (self.nope_dim + self.v_dim), bias=False)
        self.wo = nn.Linear(H * self.v_dim, D, bias=attention.bias)
        self.inner = InnerAttention(C**-0.5 * softmax_scale(config.rope), layer_window(attention, layer))

    def forward(self, x_BSD: Tensor, plan: SequencePlan) -> Tensor:
        """(B, S, D) -> (B, S, D)."""
        cos, sin = plan.rotary or rotary_tables(plan.positions_BS, self.rope_dim, self.rope)
        q_BSHC = self._queries(x_BSD).unflatten(-1, (-1, self.nope_dim + self.rope_dim))
        q_BSHN, q_BSHR = q_BSHC.split([self.nope_dim, self.rope_dim], dim=-1)
        latent_BSL, k_BSR = self.wkv_a(x_BSD).split([self.kv_rank, self.rope_dim], dim=-1)
        (kv_BSX,) = self.maps.expand(self.kv_norm(latent_BSL), self.wkv_b)
        kv_BSHC = kv_BSX.unflatten(-1, (-1, self.nope_dim + self.v_dim))
        k_BSHN, v_BSHV = kv_BSHC.split([self.nope_dim, self.v_dim], dim=-1)
        q_BSHR = apply_rotary(q_BSHR, cos, sin, interleaved=self.rope.interleaved)
        k_BS1R = apply_rotary(self.maps.gather(k_BSR).unsqueeze(2), cos, sin, interleaved=self.rope.interleaved)
        k_BSHR = k_BS1R.expand(-1, -1, k_BSHN.size(2), -1)
        q = torch.cat((q_BSHN, q_BSHR), dim=-1)
        k = torch.cat((k_BSHN, k_BSHR), dim=-1)
        return self.maps.contract(self.inner(q, k, v_BSHV, None, plan).flatten(2), self.wo)

    def _queries(self, x_BSD: Tensor) -> Tensor:
        if self.q_rank > 0:
            return self.maps.expand(self.q_norm(self.wq_a(x_BSD)), self.wq_b)[0]
        return self.maps.expand(x_BSD, self.wq)[0]
