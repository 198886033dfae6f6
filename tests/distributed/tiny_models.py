"""Models with the features of published families, as small as they can be: what the layout tests train."""

from dataclasses import replace

from moe.config import MoEConfig
from trainer.models.config import AttentionConfig, ModelConfig, MultiTokenConfig, RopeConfig

# About 1 / sqrt(dim): the usual 0.02 is so small here that the experts would hardly reach the loss.
INIT_STD = 0.15

# GQA with qk-norm, softmax top-2, batch-level auxiliary loss, z-loss.
QWEN3 = ModelConfig(
    name="tiny-qwen3",
    vocab_size=64,
    dim=32,
    num_layers=2,
    init_std=INIT_STD,
    attention=AttentionConfig(num_heads=4, num_kv_heads=2, head_dim=8, qk_norm="head"),
    moe=MoEConfig(num_experts=8, top_k=2, expert_dim=16, aux_loss=0.01, z_loss=0.001),
)

# MLA, a dense first layer, sigmoid scores, group-limited routing, balancing bias, shared expert, sequence-level loss.
DEEPSEEK = ModelConfig(
    name="tiny-deepseek",
    vocab_size=64,
    dim=32,
    num_layers=2,
    init_std=INIT_STD,
    num_dense_layers=1,
    ffn_dim=48,
    attention=AttentionConfig(
        kind="mla",
        num_heads=4,
        q_lora_rank=16,
        kv_lora_rank=8,
        qk_nope_head_dim=8,
        qk_rope_head_dim=4,
        v_head_dim=8,
    ),
    rope=RopeConfig(interleaved=True),
    moe=MoEConfig(
        num_experts=8,
        top_k=3,
        expert_dim=16,
        shared_expert_dim=24,
        score_function="sigmoid",
        route_scale=2.5,
        num_groups=4,
        top_groups=2,
        expert_bias=True,
        bias_update_rate=0.01,
        aux_loss=0.02,
        aux_loss_level="sequence",
    ),
)

# Attention sinks, a sliding window in every other layer, biases everywhere, clamped SwiGLU.
GPT_OSS = ModelConfig(
    name="tiny-gpt-oss",
    vocab_size=64,
    dim=32,
    num_layers=2,
    init_std=INIT_STD,
    attention=AttentionConfig(
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        bias=True,
        sinks=True,
        sliding_window=5,
        sliding_window_layers="even",
    ),
    moe=MoEConfig(
        num_experts=8,
        top_k=2,
        expert_dim=16,
        router_bias=True,
        linear_bias=True,
        activation="clamped_swiglu",
    ),
)

# Top-1 with the score before the experts, chunks of 4 with RoPE and l2 norm, then a layer without, whose queries have a
# temperature.
LLAMA4 = ModelConfig(
    name="tiny-llama4",
    vocab_size=64,
    dim=32,
    num_layers=2,
    init_std=INIT_STD,
    attention=AttentionConfig(
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        qk_norm="l2",
        nope_every=2,
        chunk_size=4,
        temperature_scale=0.3,
        temperature_floor=3,
    ),
    rope=RopeConfig(scaling="llama3", factor=8.0, original_seq_len=8, interleaved=True),
    moe=MoEConfig(
        num_experts=8,
        top_k=1,
        expert_dim=16,
        shared_expert_dim=24,
        score_function="sigmoid",
        normalize_topk=False,
        scores_before_experts=True,
        aux_loss=0.01,
    ),
)

# Two further tokens, whose blocks have experts and a balancing bias of their own; every published model has one.
MULTI_TOKEN = replace(DEEPSEEK, name="tiny-multi-token", mtp=MultiTokenConfig(depth=2, loss_weight=0.5))


def num_moe_layers(config: ModelConfig) -> int:
    return config.num_layers - config.num_dense_layers + config.mtp.depth


MODELS = {"qwen3": QWEN3, "deepseek": DEEPSEEK, "gpt_oss": GPT_OSS, "llama4": LLAMA4, "multi_token": MULTI_TOKEN}
