"""Settings of one Mixture-of-Experts layer. Defaults describe a plain dropless softmax top-2 layer."""

from dataclasses import dataclass

# Recipes (moe/recipes.py) in which maps compute from quantized operands.
LOW_PRECISION = ("mxfp8", "fp8_blockwise")


@dataclass
class MoEConfig:
    """What a MoE layer is (its architecture) and how it is run (backend, capacity)."""

    num_experts: int = 8
    top_k: int = 2
    # Hidden dim F of one routed expert.
    expert_dim: int = 256
    # Hidden dim of the always-on shared expert (all shared experts fused into one); 0 means none.
    shared_expert_dim: int = 0
    # softmax | sigmoid
    score_function: str = "softmax"
    # Divide the chosen scores by their sum, so that the combine weights of a token add up to route_scale.
    normalize_topk: bool = True
    route_scale: float = 1.0
    # Group-limited routing (DeepSeek-V2/V3): only the best top_groups of num_groups expert groups are eligible.
    num_groups: int = 1
    top_groups: int = 1
    # max (DeepSeek-V2) | top2_sum (DeepSeek-V3)
    group_score: str = "top2_sum"
    # A bias term on the router's linear map (gpt-oss); unrelated to the balancing bias below.
    router_bias: bool = False
    # Bias terms on the experts' two linear maps (gpt-oss).
    linear_bias: bool = False
    # Multiply the rows by their routing weight before the experts instead of after (Llama 4).
    scores_before_experts: bool = False
    # swiglu | clamped_swiglu (gpt-oss)
    activation: str = "swiglu"
    # Balancing without an auxiliary loss (DeepSeek-V3): a per-expert bias used for the choice only.
    expert_bias: bool = False
    bias_update_rate: float = 0.0
    # Auxiliary balancing loss: coefficient, and whether it is computed over a micro-batch or each sequence.
    aux_loss: float = 0.0
    # batch | sequence
    aux_loss_level: str = "batch"
    z_loss: float = 0.0
    # Each expert takes at most capacity_factor * S * K / E pairs of a sequence; null means dropless.
    capacity_factor: float | None = None
    # Room for the (row, expert) pairs of one rank, as a multiple of the balanced load: top_k pairs per own token (of a
    # full micro-batch, times etp). For comms.backend=symm_mem and nvshmem; null means the most that can come. More than
    # that stop the run before they change a weight.
    pair_capacity: float | None = None
    # Route the token at place t of its sequence to experts (t*K + k) mod E whatever the scores: benchmarks only.
    force_balance: bool = False
    # auto (fused on Hopper, else grouped_mm) | fused | grouped_mm | reference
    backend: str = "auto"
