"""What a token costs in floating-point operations, and what a device can do: the two sides of MFU.

    MFU = flops_per_token * tokens per second and device / peak of the device in dense bf16

Counted are the multiply-adds (2 operations) of matrix products, the backward pass as twice the forward pass; neither
recomputation nor padding nor the embedding look-up. So per token

    6 * N_active + 6 * sum over layers of S_layer * heads * (query/key head dim + value head dim)

N_active: weights of the matrix products that one token passes through (its top_k experts, the output head;
the blocks for multi-token prediction, each with the head once more).
S_layer = S, or the window or chunk of a layer that has one: the zeros above the diagonal of causal attention are
counted as if they were computed. This is the convention of PaLM (arXiv:2204.02311, appendix B) and of torchtitan, whose
figures ours are compared with; causal=True counts the lower half alone.
"""

from trainer.models.attention import layer_chunk, layer_window
from trainer.models.config import ModelConfig

# Dense bf16 TFLOP/s from the vendors' data sheets, by a part of the card's name; the first that fits.
PEAK_TFLOPS = (
    ("GB200", 2500.0),
    ("B200", 2250.0),
    ("B100", 1750.0),
    ("H100 PCIe", 756.0),
    ("H100 NVL", 835.0),
    ("H100", 989.0),
    ("H200", 989.0),
    ("GH200", 989.0),
    ("H800", 989.0),
    ("H20", 148.0),
    ("A100", 312.0),
    ("A800", 312.0),
    ("L40S", 362.0),
)


def peak_tflops(device_name: str) -> float | None:
    """Dense bf16 peak of a card in TFLOP/s by its CUDA name, None for one that is not in the table or no card."""
    return next((peak for part, peak in PEAK_TFLOPS if part in device_name), None)


def flops_per_token(config: ModelConfig, seq_len: int, *, causal: bool = False) -> float:
    """Floating-point operations of forward and backward per token; the formula is at the top of this file."""
    return 6.0 * active_matmul_weights(config) + _attention_flops(config, seq_len, causal)


def active_matmul_weights(config: ModelConfig) -> int:
    """Weights that one token is multiplied with: no biases, norms or embedding, only top_k of the routed experts."""
    depth = config.mtp.depth
    num_moe_layers = config.num_layers - config.num_dense_layers + depth
    dense = 3 * config.dim * config.ffn_dim
    moe = config.moe
    experts = 3 * config.dim * (moe.top_k * moe.expert_dim + moe.shared_expert_dim)
    router = config.dim * moe.num_experts
    return (
        (config.num_layers + depth) * _attention_weights(config)
        + config.num_dense_layers * dense
        + num_moe_layers * (experts + router)
        + (1 + depth) * config.dim * config.vocab_size
        + depth * 2 * config.dim * config.dim
    )


def _attention_weights(config: ModelConfig) -> int:
    attention, dim, heads = config.attention, config.dim, config.attention.num_heads
    if attention.kind == "gqa":
        return dim * attention.head_dim * (2 * heads + 2 * attention.num_kv_heads)
    query = heads * (attention.qk_nope_head_dim + attention.qk_rope_head_dim)
    rank = attention.q_lora_rank
    queries = rank * (dim + query) if rank else dim * query
    down = dim * (attention.kv_lora_rank + attention.qk_rope_head_dim)
    up = attention.kv_lora_rank * heads * (attention.qk_nope_head_dim + attention.v_head_dim)
    return queries + down + up + heads * attention.v_head_dim * dim


def _attention_flops(config: ModelConfig, seq_len: int, causal: bool) -> float:
    attention = config.attention
    head_dims = 2 * attention.head_dim
    if attention.kind == "mla":
        head_dims = attention.qk_nope_head_dim + attention.qk_rope_head_dim + attention.v_head_dim
    keys = sum(_mean_keys(config, layer, seq_len, causal) for layer in range(config.num_layers + config.mtp.depth))
    return 6.0 * attention.num_heads * head_dims * keys


def _mean_keys(config: ModelConfig, layer: int, seq_len: int, causal: bool) -> float:
    """Keys that a query of this layer is counted with."""
    chunk = min(layer_chunk(config.attention, layer) or seq_len, seq_len)
    window = min(layer_window(config.attention, layer) or chunk, chunk)
    if not causal:
        return window
    if chunk < seq_len:
        whole, rest = divmod(seq_len, chunk)
        return (whole * chunk * (chunk + 1) / 2 + rest * (rest + 1) / 2) / seq_len
    # The first `window` queries see 1, 2, ... keys, the others `window`.
    return (window * (window + 1) / 2 + (seq_len - window) * window) / seq_len
