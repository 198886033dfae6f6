"""The legal values of single settings, as data: choices of strings and bounds of numbers.

OmegaConf refuses `Literal`, so choices are plain strings in the schema. `*` stands for the name of a dict entry.
"""

import math

CHOICES: dict[str, tuple[str, ...]] = {
    "model.attention.kind": ("gqa", "mla"),
    "model.attention.qk_norm": ("none", "head", "full", "l2"),
    "model.attention.sliding_window_layers": ("all", "even"),
    "model.attention.backend": ("auto", "sdpa", "varlen"),
    "model.rope.scaling": ("none", "yarn", "llama3"),
    "model.moe.score_function": ("softmax", "sigmoid"),
    "model.moe.group_score": ("max", "top2_sum"),
    "model.moe.activation": ("swiglu", "clamped_swiglu"),
    "model.moe.aux_loss_level": ("batch", "sequence"),
    "model.moe.backend": ("auto", "fused", "grouped_mm", "reference"),
    "parallel.async_tp": ("none", "native", "inductor"),
    "parallel.activation_checkpoint": ("none", "selective", "full"),
    "precision.recipe": ("bf16", "fp32", "fp64", "mxfp8", "fp8_blockwise"),
    "precision.wgrad": ("recipe", "bf16"),
    "comms.backend": ("auto", "collective", "symm_mem", "nvshmem"),
    "comms.payload.dispatch": ("model", "mxfp8"),
    "comms.payload.combine": ("model", "mxfp8"),
    "comms.payload.dispatch_grad": ("model", "mxfp8"),
    "comms.payload.combine_grad": ("model", "mxfp8"),
    "data.train.*.kind": ("text", "huggingface", "tokens", "sft"),
    "data.eval.*.kind": ("text", "huggingface", "tokens", "sft"),
    "data.invalid_utf8": ("error", "skip"),
    "data.empty_files": ("error", "skip"),
    "optim.name": ("adamw", "sgd"),
    "optim.schedule": ("cosine", "linear", "wsd", "constant"),
    "logging.console": ("auto", "plain", "none"),
    "logging.wandb.mode": ("disabled", "offline", "online"),
    "guard.nonfinite": ("stop", "skip"),
}

# Choices of the schema that this version does not carry out yet, and what it does: asking for one is an error and
# never a silent no-op. A feature deletes its line when it lands.
AVAILABLE: dict[str, tuple[object, ...]] = {
    "profile.steps": (0,),
    # Where profile.steps begin.
    "profile.start": (10,),
}

_POSITIVE = (1, math.inf)
_COUNT = (0, math.inf)
# Smallest value above zero: for floats that must be positive.
_TINY = 5e-324

# Inclusive bounds; null is left to the type.
BOUNDS: dict[str, tuple[float, float]] = {
    "run.seed": (0, 2**63 - 1),
    "train.steps": _POSITIVE,
    "train.max_tokens": _POSITIVE,
    "train.global_batch_size": _POSITIVE,
    "train.micro_batch_size": _POSITIVE,
    "train.seq_len": _POSITIVE,
    "train.log_every": _POSITIVE,
    "train.eval_every": _COUNT,
    "train.gc_every": _COUNT,
    "model.vocab_size": _POSITIVE,
    "model.dim": _POSITIVE,
    "model.num_layers": _POSITIVE,
    "model.num_dense_layers": _COUNT,
    "model.ffn_dim": _POSITIVE,
    "model.max_seq_len": _POSITIVE,
    "model.norm_eps": (0, math.inf),
    "model.init_std": (0, math.inf),
    "model.attention.num_heads": _POSITIVE,
    "model.attention.num_kv_heads": _POSITIVE,
    "model.attention.head_dim": _POSITIVE,
    "model.attention.sliding_window": _COUNT,
    "model.attention.nope_every": _COUNT,
    "model.attention.chunk_size": _COUNT,
    "model.attention.temperature_scale": (0, math.inf),
    "model.attention.temperature_floor": _POSITIVE,
    "model.attention.q_lora_rank": _COUNT,
    "model.attention.kv_lora_rank": _POSITIVE,
    "model.attention.qk_nope_head_dim": _COUNT,
    "model.attention.qk_rope_head_dim": _POSITIVE,
    "model.attention.v_head_dim": _POSITIVE,
    "model.rope.theta": (_TINY, math.inf),
    "model.rope.factor": (1.0, math.inf),
    "model.rope.beta_fast": (_TINY, math.inf),
    "model.rope.beta_slow": (_TINY, math.inf),
    "model.rope.mscale": _COUNT,
    "model.rope.mscale_all_dim": _COUNT,
    "model.rope.original_seq_len": _POSITIVE,
    "model.rope.low_freq_factor": (_TINY, math.inf),
    "model.rope.high_freq_factor": (_TINY, math.inf),
    "model.mtp.depth": _COUNT,
    "model.mtp.loss_weight": (0, math.inf),
    "model.moe.num_experts": _POSITIVE,
    "model.moe.top_k": _POSITIVE,
    "model.moe.expert_dim": _POSITIVE,
    "model.moe.shared_expert_dim": _COUNT,
    "model.moe.route_scale": (_TINY, math.inf),
    "model.moe.num_groups": _POSITIVE,
    "model.moe.top_groups": _POSITIVE,
    "model.moe.bias_update_rate": (0, math.inf),
    "model.moe.aux_loss": (0, math.inf),
    "model.moe.z_loss": (0, math.inf),
    "model.moe.capacity_factor": (_TINY, math.inf),
    "model.moe.pair_capacity": (_TINY, math.inf),
    "parallel.dp_replicate": _POSITIVE,
    "parallel.cp": _POSITIVE,
    "parallel.ulysses": _POSITIVE,
    "parallel.tp": _POSITIVE,
    "parallel.etp": _POSITIVE,
    "parallel.timeout_seconds": _POSITIVE,
    "comms.capacity": (_TINY, math.inf),
    "comms.chunks": _POSITIVE,
    "comms.num_ctas": _POSITIVE,
    "comms.ranks_per_node": _POSITIVE,
    "data.train.*.weight": (_TINY, math.inf),
    "data.eval_samples": _COUNT,
    # A byte-level vocabulary holds the 256 bytes and the end of text.
    "data.tokenizer_vocab_size": (257, math.inf),
    "data.prefetch": _COUNT,
    "optim.lr": (0, math.inf),
    # With less, a weight that never had a gradient becomes 0 / 0.
    "optim.eps": (1e-30, math.inf),
    "optim.weight_decay": (0, math.inf),
    # 0: no clipping.
    "optim.max_grad_norm": (0, math.inf),
    "optim.warmup_steps": _COUNT,
    "optim.min_lr_ratio": (0, 1),
    "optim.decay_ratio": (0, 1),
    "checkpoint.every": _COUNT,
    "checkpoint.keep_last": _POSITIVE,
    "guard.max_skipped": _POSITIVE,
    "profile.steps": _COUNT,
    "profile.start": _COUNT,
    "cluster.gpus_per_node": _POSITIVE,
    "cluster.peak_tflops": (_TINY, math.inf),
    "cluster.memory_gib": (_TINY, math.inf),
}
