"""Settings that describe an architecture: every published family is a value of ModelConfig."""

from dataclasses import dataclass, field

from moe.config import MoEConfig


@dataclass
class AttentionConfig:
    """One attention layer: grouped-query (gqa) or latent (mla)."""

    # gqa | mla
    kind: str = "gqa"
    num_heads: int = 8
    # Heads of keys and values (gqa).
    num_kv_heads: int = 8
    # Query/key/value head dim (gqa).
    head_dim: int = 64
    # RMSNorm over each head of q and k, before RoPE: none | head (Qwen3) | full (OLMoE: over all heads together).
    qk_norm: str = "none"
    # Bias terms on the q, k, v and output maps.
    bias: bool = False
    # One learned logit per head that takes part in the softmax and has no value (gpt-oss).
    sinks: bool = False
    # Each token sees itself and the window - 1 tokens before it; 0 means all.
    sliding_window: int = 0
    # Layers that use the window: all | even (0, 2, 4, ...: gpt-oss).
    sliding_window_layers: str = "all"
    # MLA (DeepSeek): q_lora_rank 0 means a full-rank q map.
    q_lora_rank: int = 0
    kv_lora_rank: int = 512
    qk_nope_head_dim: int = 128
    qk_rope_head_dim: int = 64
    v_head_dim: int = 128
    # auto | sdpa | varlen
    backend: str = "auto"


@dataclass
class RopeConfig:
    """Rotary position embedding."""

    theta: float = 10000.0
    # none | yarn
    scaling: str = "none"
    factor: float = 1.0
    original_seq_len: int = 4096
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    # YaRN's attention temperature: DeepSeek states mscale and mscale_all_dim, gpt-oss uses 0.1 ln(factor) + 1.
    mscale: float = 1.0
    mscale_all_dim: float = 0.0
    # Round the YaRN correction range to whole dims (gpt-oss does not).
    truncate: bool = True
    # Pairs are (2i, 2i+1) (DeepSeek) instead of (i, i + d/2).
    interleaved: bool = False


@dataclass
class ModelConfig:
    """A whole architecture."""

    # Free text; the family and size.
    name: str = "custom"
    vocab_size: int = 4096
    dim: int = 256
    num_layers: int = 4
    # The first num_dense_layers blocks have a dense SwiGLU of hidden dim ffn_dim instead of experts.
    num_dense_layers: int = 0
    ffn_dim: int = 1024
    max_seq_len: int = 4096
    norm_eps: float = 1e-6
    tie_embeddings: bool = False
    # Standard deviation of the initial weights; output projections are scaled down by sqrt(2 * num_layers).
    init_std: float = 0.02
    attention: AttentionConfig = field(default_factory=AttentionConfig)
    rope: RopeConfig = field(default_factory=RopeConfig)
    moe: MoEConfig = field(default_factory=MoEConfig)
