"""A tiny model with the features of a large one, and its batches, for comparing layouts on whatever machine is there.

Kept are the kinds of everything: attention (grouped or latent, norms, biases, sinks, windows, chunks), RoPE scaling,
dense layers, tied embeddings, routing, groups, shared experts, auxiliary losses, capacity, multi-token prediction.
Sizes shrink; heads so that what tp and Ulysses up to 8 divide, or share, they still do.
"""

import math
from dataclasses import replace

from moe.config import MoEConfig
from trainer.models.config import AttentionConfig, ModelConfig, RopeConfig

DIM = 32
# The least that attention kernels of GPUs take.
HEAD_DIM = 16
# Of an expert; on GPUs each of 8 ranks of etp has rows of 16 bytes, which grouped products of bf16 read whole.
EXPERT_DIM, GPU_EXPERT_DIM = 16, 64
# What a sequence of 16 tokens can notice.
WINDOW, CHUNK, CONTEXT = 5, 4, 8
MAX_HEADS = 8


def shrink(model: ModelConfig, device: str = "cpu") -> ModelConfig:
    """The tiny model for cpu or cuda: two layers, one of them dense if the model has dense ones."""
    dense_only = model.num_dense_layers == model.num_layers
    return replace(
        model,
        vocab_size=64,
        dim=DIM,
        num_layers=2,
        num_dense_layers=2 if dense_only else min(model.num_dense_layers, 1),
        ffn_dim=48,
        # About 1 / sqrt(dim): with less the experts would hardly reach the loss.
        init_std=0.15,
        attention=_attention(model.attention),
        rope=_rope(model.rope),
        moe=_experts(model.moe, EXPERT_DIM if device == "cpu" else GPU_EXPERT_DIM),
        mtp=replace(model.mtp, depth=min(model.mtp.depth, 2)),
    )


def _attention(attention: AttentionConfig) -> AttentionConfig:
    mla = attention.kind == "mla"
    kv_heads = math.gcd(attention.num_heads if mla else attention.num_kv_heads, MAX_HEADS)
    groups = 1 if mla else min(attention.num_heads // attention.num_kv_heads, 2)
    return replace(
        attention,
        num_heads=groups * kv_heads,
        num_kv_heads=kv_heads,
        head_dim=HEAD_DIM,
        sliding_window=min(attention.sliding_window, WINDOW),
        chunk_size=min(attention.chunk_size, CHUNK),
        nope_every=min(attention.nope_every, 2),
        temperature_floor=3,
        q_lora_rank=min(attention.q_lora_rank, 16),
        kv_lora_rank=8,
        qk_nope_head_dim=HEAD_DIM,
        qk_rope_head_dim=HEAD_DIM,
        v_head_dim=HEAD_DIM,
    )


def _rope(rope: RopeConfig) -> RopeConfig:
    return rope if rope.scaling == "none" else replace(rope, original_seq_len=CONTEXT)


def _experts(moe: MoEConfig, expert_dim: int) -> MoEConfig:
    num_experts = min(moe.num_experts, 8)
    grouped = moe.num_groups > 1
    return replace(
        moe,
        num_experts=num_experts,
        top_k=min(moe.top_k, 3, num_experts),
        expert_dim=expert_dim,
        shared_expert_dim=24 if moe.shared_expert_dim else 0,
        num_groups=4 if grouped else 1,
        top_groups=2 if grouped else 1,
        # Fast enough to be seen after three steps.
        bias_update_rate=0.01 if moe.bias_update_rate else 0.0,
        # By scores even where a benchmark asks for balance by position, which would leave the router untested.
        force_balance=False,
        # fp64 has one backend only.
        backend="auto",
    )


def batch_shape(num_processes: int, micro_steps: int, device: str) -> tuple[int, int]:
    """Sequences of a global batch and their length: the least from (8, 16) on that every layout can split.

    Sequences are longer on GPUs, whose attention works in tiles and whose rounding wants averaging.
    """
    least_length = 16 if device == "cpu" else 256
    batch_unit, length_unit = num_processes * micro_steps, 2 * num_processes
    return -(-8 // batch_unit) * batch_unit, -(-least_length // length_unit) * length_unit
