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
    # RMSNorm of q and k: none | head (Qwen3: each head, before RoPE) | full (OLMoE: all heads together, before RoPE) |
    # l2 (Llama 4: each head after RoPE, without weights, in the layers that have RoPE).
    qk_norm: str = "none"
    # Bias terms on the q, k, v and output maps.
    bias: bool = False
    # One learned logit per head that takes part in the softmax and has no value (gpt-oss).
    sinks: bool = False
    # Each token sees itself and the window - 1 tokens before it; 0 means all.
    sliding_window: int = 0
    # Layers that use the window: all | even (0, 2, 4, ...: gpt-oss).
    sliding_window_layers: str = "all"
    # Every nope_every-th layer (4: layers 3, 7, ...) has no RoPE (Llama 4); 0 means all layers have it.
    nope_every: int = 0
    # Layers with RoPE: each token sees itself and the tokens before it in its own chunk of a document; 0 means all.
    chunk_size: int = 0
    # Layers without RoPE multiply q by 1 + temperature_scale * ln(1 + floor((position + 1) / temperature_floor)).
    temperature_scale: float = 0.0
    temperature_floor: int = 8192
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
    # none | yarn | llama3
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
    # llama3: pairs that turn more than high_freq_factor times within original_seq_len are kept, those that turn less
    # than low_freq_factor times are stretched.
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    # Pairs are (2i, 2i+1) (DeepSeek, Llama 4) instead of (i, i + d/2).
    interleaved: bool = False


# The settings of RopeConfig that each scaling reads, beside theta and interleaved.
ROPE_SETTINGS: dict[str, tuple[str, ...]] = {
    "none": (),
    "yarn": ("factor", "original_seq_len", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    "llama3": ("factor", "original_seq_len", "low_freq_factor", "high_freq_factor"),
}


@dataclass
class MultiTokenConfig:
    """Multi-token prediction."""

    # Blocks after the last that predict the tokens after the next one, in training only (DeepSeek-V3); 0 means none.
    depth: int = 0
    # What the mean of their losses is multiplied by.
    loss_weight: float = 0.3


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
    mtp: MultiTokenConfig = field(default_factory=MultiTokenConfig)
