"""The families whose Hugging Face format is known: their config.json as data. Their tensor names are in `hf_names`,
keys that do not go one to one in `hf_parts`.

A new family is one more Family here and one more NameMap there; the test of each is a tiny model of `transformers`.
"""

from dataclasses import replace
from typing import Any

from trainer import hf_names
from trainer.hf_config import Family, Raw
from trainer.hf_parts import (
    ALL_DENSE,
    DENSE_PREFIX,
    HEAD_DIM,
    IMPLIED_HEAD_DIM,
    LAYER_TYPES,
    LLAMA4_LAYERS,
    MLA_HEADS,
    MULTI_TOKEN,
    NO_WINDOW,
    Q_LORA,
    ROPE,
    SHARED,
    STATED_HEAD_DIM,
    V2_GROUPS,
    WINDOW,
)

_COMMON = {
    "vocab_size": "vocab_size",
    "hidden_size": "dim",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "attention.num_heads",
    "max_position_embeddings": "max_seq_len",
    "rms_norm_eps": "norm_eps",
    "tie_word_embeddings": "tie_embeddings",
    "initializer_range": "init_std",
}
_DEFAULTS: Raw = {"tie_word_embeddings": False, "initializer_range": 0.02, "attention_bias": False}
_ONLY: dict[str, tuple[Any, ...]] = {"hidden_act": ("silu",), "attention_dropout": (0.0,)}
_GQA = _COMMON | {"num_key_value_heads": "attention.num_kv_heads"}
_BIAS = {"attention_bias": "attention.bias"}
_TOP_K = {"num_experts_per_tok": "moe.top_k"}
_AUX = {"router_aux_loss_coef": "moe.aux_loss"}
_AUX_DEFAULT: Raw = {"router_aux_loss_coef": 0.0}

QWEN3_MOE = Family(
    ("qwen3_moe",),
    "Qwen3MoeForCausalLM",
    hf_names.QWEN3_MOE,
    {
        **_GQA,
        **_BIAS,
        **_TOP_K,
        **_AUX,
        "num_experts": "moe.num_experts",
        "moe_intermediate_size": "moe.expert_dim",
        "intermediate_size": "ffn_dim",
        "norm_topk_prob": "moe.normalize_topk",
    },
    (ROPE, HEAD_DIM, DENSE_PREFIX, NO_WINDOW),
    fixed={"attention.qk_norm": "head"},
    only=_ONLY,
    aliases={"num_local_experts": "num_experts"},
    defaults=_DEFAULTS | _AUX_DEFAULT,
)
MIXTRAL = Family(
    ("mixtral",),
    "MixtralForCausalLM",
    hf_names.MIXTRAL,
    {
        **_GQA,
        **_TOP_K,
        **_AUX,
        "num_local_experts": "moe.num_experts",
        "intermediate_size": "moe.expert_dim",
    },
    (ROPE, HEAD_DIM, WINDOW),
    only=_ONLY | {"router_jitter_noise": (0.0,)},
    defaults=_DEFAULTS | _AUX_DEFAULT,
)
OLMOE = Family(
    ("olmoe",),
    "OlmoeForCausalLM",
    hf_names.OLMOE,
    {
        **_GQA,
        **_BIAS,
        **_TOP_K,
        **_AUX,
        "num_experts": "moe.num_experts",
        "intermediate_size": "moe.expert_dim",
        "norm_topk_prob": "moe.normalize_topk",
    },
    (ROPE, IMPLIED_HEAD_DIM),
    fixed={"attention.qk_norm": "full"},
    only=_ONLY | {"clip_qkv": (None,)},
    aliases={"num_local_experts": "num_experts"},
    defaults=_DEFAULTS | _AUX_DEFAULT,
)
_DEEPSEEK = {
    **_COMMON,
    **_BIAS,
    **_TOP_K,
    "n_routed_experts": "moe.num_experts",
    "moe_intermediate_size": "moe.expert_dim",
    "intermediate_size": "ffn_dim",
    "first_k_dense_replace": "num_dense_layers",
    "norm_topk_prob": "moe.normalize_topk",
    "routed_scaling_factor": "moe.route_scale",
    "kv_lora_rank": "attention.kv_lora_rank",
    "qk_nope_head_dim": "attention.qk_nope_head_dim",
    "qk_rope_head_dim": "attention.qk_rope_head_dim",
    "v_head_dim": "attention.v_head_dim",
}
# Head sizes follow from the MLA dims; the loss settings belong to the authors' own training.
_DEEPSEEK_IGNORED = frozenset("head_dim qk_head_dim ep_size aux_loss_alpha seq_aux".split())
DEEPSEEK_V3 = Family(
    # Moonlight has DeepSeek's own type; Kimi K2 names its own and is the same.
    ("deepseek_v3", "kimi_k2"),
    "DeepseekV3ForCausalLM",
    hf_names.DEEPSEEK_V3,
    {
        **_DEEPSEEK,
        "n_group": "moe.num_groups",
        "topk_group": "moe.top_groups",
        "rope_interleave": "rope.interleaved",
    },
    (ROPE, SHARED, Q_LORA, MLA_HEADS, MULTI_TOKEN),
    fixed={
        "attention.kind": "mla",
        "moe.score_function": "sigmoid",
        "moe.expert_bias": True,
        "moe.group_score": "top2_sum",
    },
    only=_ONLY | {"scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",), "moe_layer_freq": (1,)},
    defaults=_DEFAULTS | {"rope_interleave": True},
    ignored=_DEEPSEEK_IGNORED,
    multi_token=True,
)
DEEPSEEK_V2 = Family(
    ("deepseek_v2",),
    "DeepseekV2ForCausalLM",
    hf_names.DEEPSEEK_V2,
    _DEEPSEEK,
    (ROPE, SHARED, Q_LORA, MLA_HEADS, V2_GROUPS),
    fixed={"attention.kind": "mla", "moe.score_function": "softmax", "rope.interleaved": True},
    only=_ONLY | {"scoring_func": ("softmax",), "moe_layer_freq": (1,), "mlp_bias": (False,)},
    defaults=_DEFAULTS | {"norm_topk_prob": False},
    ignored=_DEEPSEEK_IGNORED,
)
GPT_OSS = Family(
    ("gpt_oss",),
    "GptOssForCausalLM",
    hf_names.GPT_OSS,
    {
        **_GQA,
        **_BIAS,
        **_TOP_K,
        **_AUX,
        "num_local_experts": "moe.num_experts",
        "intermediate_size": "moe.expert_dim",
    },
    (ROPE, STATED_HEAD_DIM, LAYER_TYPES),
    fixed={
        "attention.sinks": True,
        "moe.router_bias": True,
        "moe.linear_bias": True,
        "moe.activation": "clamped_swiglu",
    },
    only=_ONLY | {"swiglu_limit": (7.0,), "swiglu_alpha": (None, 1.702)},
    defaults=_DEFAULTS | _AUX_DEFAULT | {"attention_bias": True},
    ignored=frozenset({"initial_context_length", "experts_per_token"}),
)
LLAMA4 = Family(
    ("llama4_text",),
    "Llama4ForCausalLM",
    hf_names.LLAMA4,
    {
        **_GQA,
        **_BIAS,
        **_TOP_K,
        **_AUX,
        "num_local_experts": "moe.num_experts",
        "intermediate_size": "moe.expert_dim",
    },
    (ROPE, STATED_HEAD_DIM, LLAMA4_LAYERS),
    fixed={
        "rope.interleaved": True,
        "moe.score_function": "sigmoid",
        "moe.normalize_topk": False,
        "moe.scores_before_experts": True,
    },
    only=_ONLY | {"router_jitter_noise": (0.0,)},
    defaults=_DEFAULTS | _AUX_DEFAULT,
    # Of dense layers, which it has none of; of quantization.
    ignored=frozenset({"intermediate_size_mlp", "for_llm_compressor"}),
)
LLAMA4_WITH_VISION = replace(
    LLAMA4,
    model_types=("llama4",),
    architecture="Llama4ForConditionalGeneration",
    names=hf_names.LLAMA4_WITH_VISION,
    ignored=LLAMA4.ignored | frozenset("vision_config boi_token_index eoi_token_index image_token_index".split()),
    text_config="text_config",
)
QWEN3 = Family(
    ("qwen3",),
    "Qwen3ForCausalLM",
    hf_names.DENSE,
    {**_GQA, **_BIAS, "intermediate_size": "ffn_dim"},
    (ROPE, STATED_HEAD_DIM, NO_WINDOW, ALL_DENSE),
    fixed={"attention.qk_norm": "head"},
    only=_ONLY,
    defaults=_DEFAULTS,
    dense=True,
)
LLAMA = Family(
    ("llama",),
    "LlamaForCausalLM",
    hf_names.DENSE,
    {**_GQA, **_BIAS, "intermediate_size": "ffn_dim"},
    (ROPE, HEAD_DIM, ALL_DENSE),
    only=_ONLY | {"mlp_bias": (False,)},
    defaults=_DEFAULTS,
    dense=True,
)

# In the order in which export looks for one that can express a model.
FAMILIES: dict[str, Family] = {
    "mixtral": MIXTRAL,
    "qwen3_moe": QWEN3_MOE,
    "olmoe": OLMOE,
    "deepseek_v3": DEEPSEEK_V3,
    "deepseek_v2": DEEPSEEK_V2,
    "gpt_oss": GPT_OSS,
    "llama4": LLAMA4,
    "llama4_with_vision": LLAMA4_WITH_VISION,
    "qwen3": QWEN3,
    "llama": LLAMA,
}
