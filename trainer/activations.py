"""What blocks keep for backward, and what one needs while it works: bytes of one micro-batch on a rank, by formula.

Kept, by parallel.activation_checkpoint, of a block of compute dtype b bytes wide:

    none        attention      the residual stream, its norm, q, k, v before and after what is done to them, the output
                feed-forward   the residual stream, its norm, gate, up and their product (dense, or the shared expert)
                router         its input with zeros for padding, where there may be some; on CPUs in fp32
                rows           what came by dispatch
                experts        fused: h of each pair; torch's grouped products: each pair's row, h and the activation
    full        block inputs   one row per token
                rows           as they came: nothing is sent twice
    selective   the same, and what fused attention gave; without parallel.compile every second matrix product, too
                (inside compiled code they are not seen)

Without parallel.compile the activation functions keep what they compute on the way. Norms keep one number per row, as
torch's fused ones on GPUs do. Where `comms.saved_headroom` is set, rows and h lie in the arena and not here.

The work of a block is what its backward has alive besides: gradients of pairs and of rows, copies of rows once per
pair, and with checkpointing all that is made again. Sizes of rows and pairs are what a router in balance brings, or the
room that an exchange by symm_mem or nvshmem makes for them.

Not counted: buffers of a ring (parallel.cp), operands of low-precision recipes, tables of a few numbers per row.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from comms.symmetric_memory import room_for
from parallel.config import ParallelConfig
from trainer.config import Config
from trainer.loss import default_chunk_tokens

# Of the routed pairs, what the busiest rank has: a bound for routers that are kept in balance.
IMBALANCE = 1.1
# Cards of configs/cluster on which model.moe.backend=auto is no fused kernel (moe/grouped_gemm.py).
NOT_FUSED_CARDS = ("b200", "gb200")
SYMMETRIC = ("symm_mem", "nvshmem")

# Bytes by kind.
Kept = dict[str, int]


@dataclass(frozen=True)
class Load:
    """What one micro-batch brings a rank; `sizes` are settled (trainer/layout.py)."""

    config: Config
    sizes: ParallelConfig
    # Of forward and backward.
    dtype: torch.dtype
    device_type: str = "cuda"

    @property
    def width(self) -> int:
        """Bytes of a number."""
        return self.dtype.itemsize

    @property
    def wide(self) -> int:
        """Bytes of a number of routers, losses and reduced gradients."""
        return torch.promote_types(self.dtype, torch.float32).itemsize

    @property
    def own(self) -> int:
        """Tokens between layers."""
        return self.config.train.micro_batch_size * -(-self.config.train.seq_len // (self.sizes.cp * self.sizes.tp))

    @property
    def inside(self) -> int:
        """Tokens inside attention and dense feed-forward, where ranks of tp share heads and hidden units."""
        return self.config.train.micro_batch_size * -(-self.config.train.seq_len // self.sizes.cp)

    @property
    def routed(self) -> int:
        """Tokens that a rank brings to its exchange: with etp, those of all ranks that share its experts."""
        return self.own * self.sizes.etp

    @property
    def rows(self) -> int:
        """Rows that one dispatch brings, one per (token, rank), or the room for them."""
        config, moe, ep = self.config, self.config.model.moe, self.sizes.ep
        if ep == 1:
            return self.routed
        if self.is_symmetric:
            capacity, worst = config.comms.capacity, ep * self.routed
            return worst if capacity is None else min(worst, room_for(capacity, self.routed))
        # A token comes unless all of its top_k experts are elsewhere.
        return int(ep * self.routed * (1 - (1 - 1 / ep) ** moe.top_k))

    @property
    def pairs(self) -> int:
        """(row, expert) pairs of the busiest rank, or the room for them."""
        moe, ep = self.config.model.moe, self.sizes.ep
        expected = self.routed * moe.top_k
        if self.is_symmetric:
            worst = self.rows * min(moe.top_k, moe.num_experts // ep)
            return worst if moe.pair_capacity is None else min(worst, room_for(moe.pair_capacity, expected))
        return expected if ep == 1 or moe.force_balance else int(expected * IMBALANCE)

    @property
    def hidden(self) -> int:
        """This rank's hidden units of an expert."""
        return self.config.model.moe.expert_dim // self.sizes.etp

    @property
    def is_symmetric(self) -> bool:
        """Whether rows travel through memory with room for the most that may come."""
        return self.config.comms.backend in SYMMETRIC and self.sizes.ep > 1

    @property
    def is_fused(self) -> bool:
        """Whether fused kernels compute the experts."""
        backend, recipe = self.config.model.moe.backend, self.config.precision.recipe
        if backend == "auto":
            return recipe in ("bf16", "fp8_blockwise") and self.config.cluster.name not in NOT_FUSED_CARDS
        return backend == "fused"

    @property
    def is_wide_router(self) -> bool:
        """Whether the router multiplies fp32 numbers, by an ordinary product (moe/router.py)."""
        return self.device_type == "cpu" or self.dtype != torch.bfloat16

    @property
    def is_exchanged(self) -> bool:
        """Whether dispatch, experts and combine are one operator (moe/exchanged_experts.py)."""
        moe = self.config.model.moe
        plain = not (moe.linear_bias or moe.scores_before_experts) and self.config.precision.recipe == "bf16"
        return self.is_symmetric and self.config.comms.backend == "symm_mem" and self.is_fused and plain

    @property
    def in_arena(self) -> bool:
        """Whether layers keep rows, and what experts keep of them, in memory that all of them share."""
        return self.config.comms.saved_headroom is not None and self.is_exchanged

    def is_dense(self, layer: int) -> bool:
        """Whether a block has no experts; blocks for multi-token prediction come last and have some."""
        return layer < self.config.model.num_dense_layers


def kept_by_block(load: Load, layer: int, mode: str) -> Kept:
    """What a block keeps until its backward."""
    if mode == "none":
        return _kept_whole(load, layer)
    model, heads = load.config.model, load.config.model.attention
    kept = {"block inputs": load.own * model.dim * load.width}
    if mode == "selective":
        value = heads.v_head_dim if heads.kind == "mla" else heads.head_dim
        kept["attention"] = load.inside * heads.num_heads * (value * load.width + 4) // load.sizes.tp
        if not load.config.parallel.compile:
            # Results of the products that are run first, third, ...
            kept["products"] = sum(list(_products(load, layer))[::2]) * load.width
    if not load.is_dense(layer) and load.sizes.ep > 1:
        kept["rows"] = 0 if load.in_arena else load.rows * (model.dim * load.width + 8 * model.moe.top_k)
        if load.is_exchanged:
            # The operator is kept whole, with its result.
            kept["experts"] = load.routed * model.dim * load.width
    return kept


def _kept_whole(load: Load, layer: int) -> Kept:
    model, moe, width = load.config.model, load.config.model.moe, load.width
    attention = load.own * 2 * model.dim + load.inside * _head_widths(load) // load.sizes.tp
    # What silu gives is kept, too, where nothing is compiled.
    gated = 3 if load.config.parallel.compile else 4
    if load.is_dense(layer):
        feed_forward = load.own * 2 * model.dim + load.inside * gated * model.ffn_dim // load.sizes.tp
        return {"attention": attention * width, "feed-forward": feed_forward * width}
    kept = {
        "attention": attention * width,
        "feed-forward": load.own * (2 * model.dim + gated * moe.shared_expert_dim) * width,
    }
    return kept | {"router": _kept_by_router(load)} | _kept_by_experts(load)


def _kept_by_router(load: Load) -> int:
    """A copy of its input: wide where no kernel widens the sum alone, or without what padding holds."""
    if load.is_wide_router and load.wide > load.width:
        return load.own * load.config.model.dim * load.wide
    return load.own * load.config.model.dim * load.width if load.config.data.document_mask else 0


def _kept_by_experts(load: Load) -> Kept:
    """Rows and what experts keep of them; nothing of what lies in an arena."""
    model, moe, pairs = load.config.model, load.config.model.moe, load.pairs
    if load.in_arena:
        return {"rows": 0, "experts": 0}
    came = load.rows * (model.dim * load.width + 4 * moe.top_k) if load.sizes.ep * load.sizes.etp > 1 else 0
    if load.is_fused and not moe.scores_before_experts:
        return {"rows": came, "experts": pairs * (2 * load.hidden * load.width + 8)}
    per_pair = (model.dim + 3 * load.hidden) * load.width
    if load.is_fused:
        # Each pair's row times its score, and before that.
        per_pair = 2 * (model.dim + load.hidden) * load.width
    elif not load.config.parallel.compile:
        # The activation keeps gate, up, silu and their product in fp32 instead of h.
        per_pair = (model.dim + load.hidden) * load.width + 4 * load.hidden * load.wide
    return {"rows": 0, "experts": pairs * per_pair}


def block_work(load: Load, layer: int, mode: str) -> int:
    """What the backward of a block has alive at most, besides what was kept and gradients of weights."""
    work = _dense_work(load) if load.is_dense(layer) else _expert_work(load, mode)
    if mode == "none":
        return work
    # What a dispatch brought is there. Exchanged experts are not run again: their backward makes h alone, see below.
    there = ("rows", "experts") if load.is_exchanged else ("rows",) if load.is_symmetric else ()
    whole = sum(size for kind, size in _kept_whole(load, layer).items() if kind not in there)
    kept = kept_by_block(load, layer, mode)
    return work + max(whole - sum(kept.get(kind, 0) for kind in ("block inputs", "attention", "products")), 0)


def _dense_work(load: Load) -> int:
    """Gradients of gate, up and their product, and of the states."""
    model = load.config.model
    return (load.inside * 3 * model.ffn_dim // load.sizes.tp + 2 * load.own * model.dim) * load.width


def _expert_work(load: Load, mode: str) -> int:
    """Gradients of rows and pairs (moe/exchanged_experts.py, moe/fused_experts.py, moe/grouped_gemm.py)."""
    dim, hidden, width = load.config.model.dim, load.hidden, load.width
    rows = 2 * load.rows * dim * width
    if load.is_exchanged:
        # Rows, their gradients and those of the output, once per pair; dh and the activation; h, where it is not kept.
        again = 0 if mode == "none" else 2 * hidden
        return rows + load.pairs * (3 * dim + 3 * hidden + again) * width
    if load.is_fused:
        # Sums of the pairs' gradients are there, too, before the pairs' gradients are gone; fp32 numbers of each pair.
        sums = load.rows * dim * width + 2 * load.pairs * 4
        # Rows and the output's gradient, once per pair; dh and the activation. By the time of the rows' gradients
        # the output's and the activation are gone.
        return rows + sums + load.pairs * (2 * dim + 3 * hidden) * width
    # Each product's gradient replaces what was kept for it.
    return rows + load.pairs * (dim + hidden) * width


def _head_widths(load: Load) -> int:
    """Numbers of a token in all heads: q, k and v before and after what is done to them, and the output."""
    attention = load.config.model.attention
    if attention.kind == "mla":
        query = attention.qk_nope_head_dim + attention.qk_rope_head_dim
        # Attention over packed documents wants values as wide as keys (trainer/models/varlen_attention.py).
        padded = load.device_type == "cuda" and load.config.data.document_mask
        # q, k and v of every head, the output, and the low-rank rows before they are expanded.
        heads = attention.num_heads * (2 * query + 2 * (query if padded else attention.v_head_dim))
        return heads + 2 * (attention.kv_lora_rank + attention.qk_rope_head_dim) + 2 * attention.q_lora_rank
    query, key = attention.num_heads * attention.head_dim, attention.num_kv_heads * attention.head_dim
    normalised = 0 if attention.qk_norm == "none" else query + key
    return 2 * query + 2 * key + normalised


def _products(load: Load, layer: int) -> Iterator[int]:
    """Numbers that each matrix product of a block's forward gives, in the order in which they run."""
    model, attention, moe, tp = load.config.model, load.config.model.attention, load.config.model.moe, load.sizes.tp
    inside, heads = load.inside, attention.num_heads
    if attention.kind == "mla":
        if attention.q_lora_rank:
            yield load.own * attention.q_lora_rank
        yield inside * heads * (attention.qk_nope_head_dim + attention.qk_rope_head_dim) // tp
        yield load.own * (attention.kv_lora_rank + attention.qk_rope_head_dim)
        yield inside * heads * (attention.qk_nope_head_dim + attention.v_head_dim) // tp
        yield inside * model.dim
    elif not attention.bias:
        # With a bias they are other operators.
        yield inside * heads * attention.head_dim // tp
        yield from [inside * attention.num_kv_heads * attention.head_dim // min(tp, attention.num_kv_heads)] * 2
        yield inside * model.dim
    if load.is_dense(layer):
        yield from [inside * model.ffn_dim // tp] * 2
        yield inside * model.dim
        return
    if load.is_wide_router:
        yield load.own * moe.num_experts
    if moe.shared_expert_dim:
        yield from [load.own * moe.shared_expert_dim] * 2
        yield load.own * model.dim


# ---- head


def head_bytes(load: Load) -> int:
    """At the loss: one chunk of logits in fp32, in the compute dtype, and their gradient; gradients of all states."""
    model = load.config.model
    vocabulary = -(-model.vocab_size // load.sizes.tp)
    chunk = min(default_chunk_tokens(vocabulary, load.device_type), load.inside)
    return chunk * vocabulary * (4 + 2 * load.width) + load.inside * model.dim * (4 + load.width)


def further_bytes(load: Load) -> int:
    """What joins the blocks for multi-token prediction to those before: inputs of norms and of the projection."""
    return load.config.model.mtp.depth * load.own * 5 * load.config.model.dim * load.width
