"""Tiny random models of `transformers`, our ModelConfig of the same shape, and their weights under our names.

`transformers` casts to fp32 inside its norms, routers and softmaxes whatever the model's dtype. `KeepDouble` lets those
casts pass fp64 through, so that a comparison in fp64 can be held to 1e-10; its RoPE tables stay fp32, as ours are.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from moe.config import MoEConfig
from trainer.models.config import AttentionConfig, ModelConfig, RopeConfig
from trainer.models.transformer import Transformer
from trainer.tokenizer import END_OF_TEXT, Tokenizer

V, D, F, E, K, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 96, 32, 24, 8, 2, 3, 4, 2, 16
# Short enough that a sequence of 40 tokens is beyond it.
ORIGINAL_LEN = 16
COMMON: dict[str, Any] = {
    "vocab_size": V,
    "hidden_size": D,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "max_position_embeddings": 128,
    "pad_token_id": None,
    "tie_word_embeddings": False,
    "attn_implementation": "eager",
    "experts_implementation": "eager",
}


class KeepDouble(TorchFunctionMode):
    """fp64 tensors are not cast down to fp32 by `.float()`, `.to`, `.type` or a softmax's dtype."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.polar:
            # Its cosine and sine are not those of `cos` and `sin` to the last bit of fp32: 1e-8 in the logits.
            radius, angle = args
            return torch.complex(radius * angle.cos(), radius * angle.sin())
        double = len(args) > 0 and isinstance(args[0], Tensor) and args[0].dtype == torch.float64
        if double and func is torch.Tensor.float:
            return args[0]
        if double and func in (torch.Tensor.to, torch.Tensor.type) and torch.float32 in args[1:]:
            return args[0]
        if double and kwargs.get("dtype") == torch.float32:
            kwargs["dtype"] = torch.float64
        return func(*args, **kwargs)


def qwen3_moe() -> tuple[nn.Module, ModelConfig]:
    import transformers

    hf = transformers.Qwen3MoeConfig(
        **COMMON,
        head_dim=HEAD_DIM,
        intermediate_size=40,
        moe_intermediate_size=F,
        num_experts=E,
        num_experts_per_tok=K,
        norm_topk_prob=True,
        mlp_only_layers=[0],
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    )
    config = _config(
        AttentionConfig(num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM, qk_norm="head"),
        RopeConfig(theta=1e6),
        MoEConfig(num_experts=E, top_k=K, expert_dim=F),
        num_dense_layers=1,
        ffn_dim=40,
    )
    return transformers.Qwen3MoeForCausalLM(hf), config


def mixtral() -> tuple[nn.Module, ModelConfig]:
    import transformers

    hf = transformers.MixtralConfig(
        **COMMON,
        intermediate_size=F,
        num_local_experts=E,
        num_experts_per_tok=K,
        sliding_window=None,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    )
    config = _config(
        AttentionConfig(num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=D // HEADS),
        RopeConfig(theta=1e6),
        MoEConfig(num_experts=E, top_k=K, expert_dim=F),
        norm_eps=1e-5,
    )
    return transformers.MixtralForCausalLM(hf), config


def olmoe() -> tuple[nn.Module, ModelConfig]:
    import transformers

    hf = transformers.OlmoeConfig(
        **COMMON,
        intermediate_size=F,
        num_experts=E,
        num_experts_per_tok=K,
        norm_topk_prob=False,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    )
    config = _config(
        AttentionConfig(num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=D // HEADS, qk_norm="full"),
        RopeConfig(),
        MoEConfig(num_experts=E, top_k=K, expert_dim=F, normalize_topk=False),
        norm_eps=1e-5,
    )
    return transformers.OlmoeForCausalLM(hf), config


def deepseek_v3(q_lora_rank: int | None = 12, mscale: float = 0.8, bias: bool = False) -> tuple[nn.Module, ModelConfig]:
    """mscale differs from mscale_all_dim (unlike in the published V3), so that a mix-up shows."""
    import transformers

    common = {**COMMON, "num_key_value_heads": HEADS}
    yarn = {"factor": 8.0, "beta_fast": 32.0, "beta_slow": 1.0, "mscale": mscale, "mscale_all_dim": 0.9}
    hf = transformers.DeepseekV3Config(
        **common,
        intermediate_size=40,
        moe_intermediate_size=F,
        n_routed_experts=E,
        num_experts_per_tok=K,
        n_shared_experts=2,
        n_group=4,
        topk_group=2,
        first_k_dense_replace=1,
        routed_scaling_factor=2.5,
        norm_topk_prob=True,
        q_lora_rank=q_lora_rank,
        attention_bias=bias,
        kv_lora_rank=16,
        qk_nope_head_dim=12,
        qk_rope_head_dim=8,
        v_head_dim=10,
        rms_norm_eps=1e-5,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "original_max_position_embeddings": ORIGINAL_LEN,
            **yarn,
        },
    )
    attention = AttentionConfig(
        kind="mla",
        bias=bias,
        num_heads=HEADS,
        num_kv_heads=HEADS,
        q_lora_rank=q_lora_rank or 0,
        kv_lora_rank=16,
        qk_nope_head_dim=12,
        qk_rope_head_dim=8,
        v_head_dim=10,
    )
    moe = MoEConfig(
        num_experts=E,
        top_k=K,
        expert_dim=F,
        shared_expert_dim=2 * F,
        score_function="sigmoid",
        route_scale=2.5,
        num_groups=4,
        top_groups=2,
        expert_bias=True,
    )
    rope = RopeConfig(scaling="yarn", original_seq_len=ORIGINAL_LEN, interleaved=True, **yarn)
    config = _config(attention, rope, moe, num_dense_layers=1, ffn_dim=40, norm_eps=1e-5)
    return transformers.DeepseekV3ForCausalLM(hf), config


def deepseek_v2(q_lora_rank: int | None = 12) -> tuple[nn.Module, ModelConfig]:
    """Softmax scores, groups by their best score, no normalisation, scores scaled by 16."""
    import transformers

    yarn = {"factor": 8.0, "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 0.8, "mscale_all_dim": 0.9}
    hf = transformers.DeepseekV2Config(
        **{**COMMON, "num_key_value_heads": HEADS},
        intermediate_size=40,
        moe_intermediate_size=F,
        n_routed_experts=E,
        num_experts_per_tok=K,
        n_shared_experts=2,
        n_group=4,
        topk_group=2,
        topk_method="group_limited_greedy",
        first_k_dense_replace=1,
        routed_scaling_factor=16.0,
        q_lora_rank=q_lora_rank,
        kv_lora_rank=16,
        qk_nope_head_dim=12,
        qk_rope_head_dim=8,
        v_head_dim=10,
        rms_norm_eps=1e-6,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "original_max_position_embeddings": ORIGINAL_LEN,
            **yarn,
        },
    )
    attention = AttentionConfig(
        kind="mla",
        num_heads=HEADS,
        num_kv_heads=HEADS,
        q_lora_rank=q_lora_rank or 0,
        kv_lora_rank=16,
        qk_nope_head_dim=12,
        qk_rope_head_dim=8,
        v_head_dim=10,
    )
    moe = MoEConfig(
        num_experts=E,
        top_k=K,
        expert_dim=F,
        shared_expert_dim=2 * F,
        score_function="softmax",
        normalize_topk=False,
        route_scale=16.0,
        num_groups=4,
        top_groups=2,
        group_score="max",
    )
    rope = RopeConfig(scaling="yarn", original_seq_len=ORIGINAL_LEN, interleaved=True, **yarn)
    config = _config(attention, rope, moe, num_dense_layers=1, ffn_dim=40)
    return transformers.DeepseekV2ForCausalLM(hf), config


def llama4(attn_scale: float = 0.3) -> tuple[nn.Module, ModelConfig]:
    """Two layers with RoPE and chunks, then one without, whose temperature changes within the tests' 40 tokens."""
    import transformers

    llama3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    hf = transformers.Llama4TextConfig(
        **COMMON,
        head_dim=HEAD_DIM,
        intermediate_size=F,
        num_local_experts=E,
        num_experts_per_tok=1,
        no_rope_layer_interval=3,
        attention_chunk_size=12,
        floor_scale=8,
        attn_scale=attn_scale,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 1e4,
            "original_max_position_embeddings": ORIGINAL_LEN,
            **llama3,
        },
    )
    attention = AttentionConfig(
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        qk_norm="l2",
        nope_every=3,
        chunk_size=12,
        temperature_scale=attn_scale,
        temperature_floor=8,
    )
    moe = MoEConfig(
        num_experts=E,
        top_k=1,
        expert_dim=F,
        shared_expert_dim=F,
        score_function="sigmoid",
        normalize_topk=False,
        scores_before_experts=True,
    )
    rope = RopeConfig(theta=1e4, scaling="llama3", original_seq_len=ORIGINAL_LEN, interleaved=True, **llama3)
    return transformers.Llama4ForCausalLM(hf), _config(attention, rope, moe, norm_eps=1e-5)


def gpt_oss() -> tuple[nn.Module, ModelConfig]:
    import transformers

    hf = transformers.GptOssConfig(
        **COMMON,
        head_dim=HEAD_DIM,
        intermediate_size=F,
        num_local_experts=E,
        num_experts_per_tok=K,
        sliding_window=7,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 150000.0,
            "factor": 8.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": ORIGINAL_LEN,
        },
    )
    attention = AttentionConfig(
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        bias=True,
        sinks=True,
        sliding_window=7,
        sliding_window_layers="even",
    )
    moe = MoEConfig(
        num_experts=E, top_k=K, expert_dim=F, router_bias=True, linear_bias=True, activation="clamped_swiglu"
    )
    rope = RopeConfig(theta=150000.0, scaling="yarn", factor=8.0, original_seq_len=ORIGINAL_LEN, truncate=False)
    return transformers.GptOssForCausalLM(hf), _config(attention, rope, moe, norm_eps=1e-5)


def qwen3_dense() -> tuple[nn.Module, ModelConfig]:
    """No experts: what upcycling starts from. Embedding and head are one."""
    import transformers

    common = {**COMMON, "tie_word_embeddings": True}
    rope = {"rope_type": "default", "rope_theta": 1e6}
    hf = transformers.Qwen3Config(**common, head_dim=HEAD_DIM, intermediate_size=F, rope_parameters=rope)
    config = _config(
        AttentionConfig(num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM, qk_norm="head"),
        RopeConfig(theta=1e6),
        MoEConfig(),
        num_dense_layers=LAYERS,
        ffn_dim=F,
        tie_embeddings=True,
    )
    return transformers.Qwen3ForCausalLM(hf), config


def llama() -> tuple[nn.Module, ModelConfig]:
    """No experts: what upcycling starts from."""
    import transformers

    rope = {"rope_type": "default", "rope_theta": 1e4}
    hf = transformers.LlamaConfig(**COMMON, intermediate_size=F, rope_parameters=rope)
    config = _config(
        AttentionConfig(num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=D // HEADS),
        RopeConfig(),
        MoEConfig(),
        num_dense_layers=LAYERS,
        ffn_dim=F,
    )
    return transformers.LlamaForCausalLM(hf), config


FAMILIES = {
    "qwen3_moe": qwen3_moe,
    "mixtral": mixtral,
    "olmoe": olmoe,
    "deepseek_v2": deepseek_v2,
    "deepseek_v3": deepseek_v3,
    "gpt_oss": gpt_oss,
    "llama4": llama4,
}
DENSE = {"qwen3": qwen3_dense, "llama": llama}


def _config(attention: AttentionConfig, rope: RopeConfig, moe: MoEConfig, **rest: Any) -> ModelConfig:
    moe.backend = "reference"
    return ModelConfig(vocab_size=V, dim=D, num_layers=LAYERS, attention=attention, rope=rope, moe=moe, **rest)


def build_reference(name: str, dtype: torch.dtype, seed: int = 0, **kwargs: Any) -> tuple[nn.Module, ModelConfig]:
    """The `transformers` model with random weights (norms, biases and sinks too), and our config of it."""
    reference, config = {**FAMILIES, **DENSE}[name](**kwargs)
    generator = torch.Generator().manual_seed(seed)
    for parameter_name, tensor in [*reference.named_parameters(), *_named_bias_buffers(reference)]:
        centre, spread = (1.0, 0.2) if "norm" in parameter_name else (0.0, 0.15)
        tensor.data = centre + spread * torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype)
    tables = reference.model.rotary_emb.inv_freq.clone()
    reference = reference.to(dtype).eval()
    reference.model.rotary_emb.inv_freq = tables
    return reference, config


def build_pair(name: str, dtype: torch.dtype, seed: int = 0, **kwargs: Any) -> tuple[nn.Module, Transformer]:
    """The `transformers` model with random weights, and ours with the same weights."""
    reference, config = build_reference(name, dtype, seed, **kwargs)
    ours = Transformer(config).to(dtype)
    ours.load_state_dict(convert(reference, config))
    return reference, ours


def _named_bias_buffers(model: nn.Module) -> list[tuple[str, Tensor]]:
    return [(name, buffer) for name, buffer in model.named_buffers() if "correction_bias" in name]


RENAMES = [
    ("model.embed_tokens.", "tok_embeddings."),
    ("model.norm.", "norm."),
    ("lm_head.", "head."),
    ("model.layers.", "layers."),
    ("input_layernorm", "attention_norm"),
    ("post_attention_layernorm", "ffn_norm"),
    ("self_attn.", "attention."),
    ("q_a_layernorm", "q_norm"),
    ("kv_a_layernorm", "kv_norm"),
    ("kv_a_proj_with_mqa", "wkv_a"),
    ("feed_forward.", "mlp."),
    ("mlp.shared_expert.", "mlp.shared_experts."),
    ("mlp.gate.e_score_correction_bias", "moe.expert_bias"),
    ("mlp.gate.", "moe.router."),
    ("mlp.router.", "moe.router."),
    ("mlp.experts.gate_up_proj_bias", "moe.experts.b_gate_up"),
    ("mlp.experts.gate_up_proj", "moe.experts.w_gate_up"),
    ("mlp.experts.down_proj_bias", "moe.experts.b_down"),
    ("mlp.experts.down_proj", "moe.experts.w_down"),
    ("mlp.shared_experts.", "moe.shared."),
    ("mlp.", "feed_forward."),
    *((f"{name}_proj", f"w{name}") for name in ("q_a", "q_b", "kv_b", "q", "k", "v", "o")),
    *((f"{name}_proj", f"w_{name}") for name in ("gate", "up", "down")),
]


def convert(reference: nn.Module, config: ModelConfig, *, gradients: bool = False) -> dict[str, Tensor]:
    """The reference's weights (or their gradients) under our names and in our shapes."""
    tensors = dict(reference.named_parameters())
    if gradients:
        tensors = {name: tensor.grad for name, tensor in tensors.items()}
    else:
        tensors |= dict(_named_bias_buffers(reference))
    converted = {}
    for name, tensor in tensors.items():
        for old, new in RENAMES:
            name = name.replace(old, new)
        converted[name] = _expert_layout(name, tensor.detach(), config)
    return converted


def _expert_layout(name: str, tensor: Tensor, config: ModelConfig) -> Tensor:
    gpt_oss_layout = config.moe.activation == "clamped_swiglu"  # gate and up alternate
    # gpt-oss and Llama 4: (E, in, out)
    if (gpt_oss_layout or config.moe.scores_before_experts) and ".experts.w_" in name:
        tensor = tensor.transpose(1, 2)
    if "gate_up" not in name:
        return tensor
    if gpt_oss_layout:
        return tensor.unflatten(1, (-1, 2)).transpose(1, 2)
    return tensor.unflatten(1, (2, -1))


def byte_tokenizer() -> Tokenizer:
    """Each byte is a token; with the end of text, 257."""
    import tokenizers

    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate(alphabet)}
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[]))
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = tokenizers.decoders.ByteLevel()
    bpe.add_special_tokens([END_OF_TEXT])
    return Tokenizer(bpe.to_str(), END_OF_TEXT, "bytes")
