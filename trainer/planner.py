"""How much memory a run takes on each rank: an estimate for any layout, made without a process group or a GPU.

    python -m trainer.planner experiment=qwen3_30b_a3b parallel.ep=8 cluster=h200 --ranks 64

What stays: parameters, their gradients and the optimizer's moments, as FSDP, EP, ETP and TP share them out (exact),
and the buffers of an exchange through symmetric memory (exact). What comes and goes: weights that FSDP gathers and
gradients that it has not reduced yet, what forward keeps for backward, the chunk of logits. The peak is the largest sum
over a step's moments: at the loss, in the backward of each block, and at the last reduction of gradients:

    loss            parameters + moments + all kept activations + root's gathered weights + logits
    backward of i   parameters + moments + activations of blocks 0..i + gradients of the blocks after i
                    + weights of i and of the block that is gathered ahead + gradients of i, not reduced yet
    end             parameters + moments + all gradients + root's gathered weights and gradients, not reduced yet

Kept activations are those of compiled blocks: inputs of norms and matrix products, what attention and activation
functions take. The allocator's own losses are not counted. Within 3 % of the peaks in benchmarks/train_*.json, which
are of runs without checkpointing on one and two GPUs; nothing else has been compared.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatchcase
from typing import NamedTuple

import torch

from comms.saved_arena import plan_saved
from comms.symmetric_memory import room_for
from parallel.config import ParallelConfig
from parallel.expert_parallel import HIDDEN_DIM, expected_rows, plan_buffers
from parallel.fsdp import expert_shard_dim
from trainer.build import DTYPES, meta_model
from trainer.compose import compose
from trainer.config import Config
from trainer.layout import fit_layout
from trainer.loss import default_chunk_tokens
from trainer.models.config import AttentionConfig
from trainer.models.transformer import tensor_plan

GIB = 2**30
# Of the routed pairs, what the busiest rank has: a bound for routers that are kept in balance.
IMBALANCE = 1.1
# The moment at which nothing that forward kept is left.
END = "end of backward"


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes of one rank."""

    parameters: int
    gradients: int
    moments: int
    # Kept for backward, all blocks together, one micro-batch.
    activations: int
    # Buffers of comms.backend=symm_mem or nvshmem, and the arena of comms.saved_headroom.
    exchange: int
    # The most of everything at once, and when that is.
    peak: int
    moment: str

    @property
    def transient(self) -> int:
        """Of the peak: what is none of the above."""
        held = self.parameters + self.moments + self.exchange
        return self.peak - held - (self.activations if self.moment == "loss" else self.gradients)


class Share(NamedTuple):
    """Numbers of one block's parameters on a rank: kept, and gathered for its forward and backward."""

    kept: int
    gathered: int


def plan_memory(config: Config, num_ranks: int, device_type: str = "cuda") -> MemoryPlan:
    """The estimate for a run on `num_ranks` ranks.

    Raises:
        ValueError: the layout does not fit the ranks, as at a launch.
    """
    sizes = fit_layout(config, num_ranks)
    master, compute = DTYPES[config.precision.recipe]
    shares = share_out(config, sizes, master)
    root, blocks = shares[""], [share for name, share in shares.items() if name]
    kept = root.kept + sum(block.kept for block in blocks)
    wide = torch.promote_types(compute, torch.float32).itemsize
    moments = 2 * kept * master.itemsize if config.optim.name == "adamw" else 0
    exchange = exchange_bytes(config, sizes, compute) + saved_bytes(config, sizes, compute)
    saved = [block_activations(config, sizes, layer, compute) for layer in range(len(blocks))]
    always = kept * master.itemsize + moments + exchange
    # Weights of the root stay gathered; its head's gradient exists from the loss on.
    root_weights, head_grad = root.gathered * compute.itemsize, _head_numbers(config, sizes) * wide
    by_moment = {
        "loss": always + sum(saved) + root_weights + head_grad + logits_bytes(config, sizes, compute, device_type),
        END: always + kept * wide + root.gathered * (2 * compute.itemsize + wide),
    }
    reduced = 0
    for layer in reversed(range(len(blocks))):
        weights = (blocks[layer].gathered + (blocks[layer - 1].gathered if layer else 0)) * compute.itemsize
        if not config.parallel.reshard_after_forward:
            weights = sum(block.gathered for block in blocks) * compute.itemsize
        # In the compute dtype from autograd, and once more as they are reduced.
        unreduced = blocks[layer].gathered * (compute.itemsize + wide)
        recomputed = _recomputed(config, sizes, layer, compute)
        now = always + sum(saved[: layer + 1]) + reduced + weights + unreduced + recomputed + root_weights + head_grad
        by_moment[f"backward of block {layer}"] = now
        reduced += blocks[layer].kept * wide
    moment = max(by_moment, key=by_moment.__getitem__)
    return MemoryPlan(
        kept * master.itemsize, kept * wide, moments, sum(saved), exchange, by_moment[moment], moment
    )  # fmt: skip


# ---- parameters


def share_out(config: Config, sizes: ParallelConfig, dtype: torch.dtype) -> dict[str, Share]:
    """What a rank has of each block by its name, and under "" of everything else; of uneven shares the largest."""
    plan = tensor_plan(config.model, sizes.tp).split if sizes.tp > 1 else {}
    found: dict[str, Share] = {}
    for name, parameter in meta_model(config, dtype).named_parameters():
        shape, block = list(parameter.shape), ".".join(name.split(".")[:2]) if name.startswith("layers.") else ""
        is_expert = ".experts." in name
        if is_expert:
            shape[0] //= sizes.ep
            hidden = HIDDEN_DIM[name.rpartition(".")[2]]
            if hidden is not None:
                shape[hidden] //= sizes.etp
        for pattern, dim in plan.items():
            if not is_expert and fnmatchcase(name, pattern):
                shape[dim] //= sizes.tp
        dim, ranks = 0, sizes.dp_shard * sizes.cp
        if is_expert and sizes.ep * sizes.tp > 1:
            ranks = sizes.dp_shard * sizes.cp * sizes.tp // (sizes.ep * sizes.etp)
            dim = expert_shard_dim(shape, ranks)
        gathered = _product(shape)
        # Every rank has room for the largest share.
        kept = gathered // shape[dim] * -(-shape[dim] // ranks)
        before = found.get(block, Share(0, 0))
        found[block] = Share(before.kept + kept, before.gathered + gathered)
    return found


def _product(shape: Sequence[int]) -> int:
    return torch.Size(shape).numel()


def _head_numbers(config: Config, sizes: ParallelConfig) -> int:
    return -(-config.model.vocab_size // sizes.tp) * config.model.dim


# ---- activations, in bytes, of one micro-batch


def block_activations(config: Config, sizes: ParallelConfig, layer: int, dtype: torch.dtype) -> int:
    """What a block keeps for backward under parallel.activation_checkpoint."""
    mode, model = sizes.activation_checkpoint, config.model
    is_dense = layer < model.num_dense_layers
    own, inside = _tokens(config, sizes)
    sent = 0
    if not (is_dense or sizes.ep * sizes.etp == 1 or _in_arena(config, sizes)):
        sent = _received_rows(config, sizes) * model.dim * dtype.itemsize
    if mode == "full":
        # Its input; rows are never sent twice, so those that came are kept.
        return own * model.dim * dtype.itemsize + sent
    attention = _attention_numbers(config, sizes, own, inside)
    if mode == "selective":
        # What fused attention gave, and every second product; the rest is computed again.
        attention = own * 2 * model.dim + inside * model.attention.num_heads * model.attention.head_dim // sizes.tp
    ffn = _dense_numbers(config, sizes, own, inside) if is_dense else _moe_numbers(config, sizes, own, mode)
    return (attention + ffn) * dtype.itemsize + (sent if mode == "selective" else 0)


def _recomputed(config: Config, sizes: ParallelConfig, layer: int, dtype: torch.dtype) -> int:
    """What a checkpointed block makes again while its backward runs."""
    if sizes.activation_checkpoint == "none":
        return 0
    # Wherever rows are kept.
    config = replace(config, comms=replace(config.comms, saved_headroom=None))
    plain = replace(sizes, activation_checkpoint="none")
    return max(block_activations(config, plain, layer, dtype) - block_activations(config, sizes, layer, dtype), 0)


def _tokens(config: Config, sizes: ParallelConfig) -> tuple[int, int]:
    """Tokens of a rank between layers, and inside attention and dense feed-forward, where tp ranks share heads."""
    batch, length = config.train.micro_batch_size, -(-config.train.seq_len // sizes.cp)
    return batch * -(-length // sizes.tp), batch * length


def _attention_numbers(config: Config, sizes: ParallelConfig, own: int, inside: int) -> int:
    """The residual stream, the normalised input, q, k and v before and after what is done to them, and the output."""
    heads = _head_widths(config.model.attention)
    return own * 2 * config.model.dim + inside * heads // sizes.tp


def _head_widths(attention: AttentionConfig) -> int:
    if attention.kind == "mla":
        query = attention.qk_nope_head_dim + attention.qk_rope_head_dim
        # q, k and v of every head, the output, and the low-rank rows before they are expanded.
        heads = attention.num_heads * (2 * query + 2 * attention.v_head_dim)
        return heads + 2 * (attention.kv_lora_rank + attention.qk_rope_head_dim) + 2 * attention.q_lora_rank
    query, key = attention.num_heads * attention.head_dim, attention.num_kv_heads * attention.head_dim
    normalised = 0 if attention.qk_norm == "none" else query + key
    return 2 * query + 2 * key + normalised


def _dense_numbers(config: Config, sizes: ParallelConfig, own: int, inside: int) -> int:
    """The residual stream, the normalised input, gate, up and their product."""
    return own * 2 * config.model.dim + inside * 3 * config.model.ffn_dim // sizes.tp


def _moe_numbers(config: Config, sizes: ParallelConfig, own: int, mode: str) -> int:
    """The residual stream, the normalised input, the shared expert, the rows that came and what their experts keep."""
    model, moe = config.model, config.model.moe
    pairs, hidden = _pairs(config, sizes), moe.expert_dim // sizes.etp
    numbers = own * (2 * model.dim + 3 * moe.shared_expert_dim)
    if mode == "selective" or _in_arena(config, sizes):
        return numbers
    rows = _received_rows(config, sizes) * model.dim if sizes.ep * sizes.etp > 1 else 0
    if moe.backend == "fused" or (moe.backend == "auto" and config.precision.recipe == "bf16"):
        return numbers + rows + pairs * 2 * hidden
    # Torch's grouped products: rows once per pair, hidden units, the weighted activation.
    return numbers + pairs * (model.dim + 3 * hidden)


def _in_arena(config: Config, sizes: ParallelConfig) -> bool:
    """Whether layers keep rows, and what experts keep of them, in memory that all of them share."""
    return config.comms.saved_headroom is not None and config.comms.backend == "symm_mem" and sizes.ep > 1


def _pairs(config: Config, sizes: ParallelConfig) -> int:
    """(row, expert) pairs of the busiest rank, or room for them."""
    own, moe = _tokens(config, sizes)[0], config.model.moe
    expected = own * sizes.etp * moe.top_k
    if config.comms.backend in ("symm_mem", "nvshmem") and sizes.ep > 1:
        worst = _received_rows(config, sizes) * min(moe.top_k, moe.num_experts // sizes.ep)
        return worst if moe.pair_capacity is None else min(worst, room_for(moe.pair_capacity, expected))
    return expected if sizes.ep == 1 or moe.force_balance else int(expected * IMBALANCE)


def _received_rows(config: Config, sizes: ParallelConfig) -> int:
    """Rows that one dispatch brings a rank, one per (token, rank), or room for them."""
    own, moe, ep = _tokens(config, sizes)[0] * sizes.etp, config.model.moe, sizes.ep
    if config.comms.backend in ("symm_mem", "nvshmem") and ep > 1:
        worst = ep * own
        return worst if config.comms.capacity is None else min(worst, room_for(config.comms.capacity, own))
    # A token comes unless all of its top_k experts are elsewhere.
    return int(ep * own * (1 - (1 - 1 / ep) ** moe.top_k)) if ep > 1 else own


def logits_bytes(config: Config, sizes: ParallelConfig, dtype: torch.dtype, device_type: str) -> int:
    """One chunk of logits: in fp32, in the compute dtype, and their gradient; and the gradient of all states."""
    vocabulary = -(-config.model.vocab_size // sizes.tp)
    inside = _tokens(config, sizes)[1]
    chunk = min(default_chunk_tokens(vocabulary, device_type), inside)
    return chunk * vocabulary * (4 + 2 * dtype.itemsize) + inside * config.model.dim * (4 + dtype.itemsize)


def exchange_bytes(config: Config, sizes: ParallelConfig, dtype: torch.dtype) -> int:
    """The symmetric memory that a run allocates; 0 where rows travel by collectives."""
    model, comms = config.model, config.comms
    if comms.backend not in ("symm_mem", "nvshmem") or sizes.ep == 1 or model.num_dense_layers == model.num_layers:
        return 0
    batch, shared = config.train.micro_batch_size, sizes.cp * sizes.tp
    max_tokens = batch * -(-config.train.seq_len // shared) * sizes.etp
    return plan_buffers(comms.backend, model.moe, model.dim, sizes.ep, max_tokens, comms, dtype).num_bytes


def saved_bytes(config: Config, sizes: ParallelConfig, dtype: torch.dtype) -> int:
    """The arena of comms.saved_headroom; 0 without."""
    model, moe, headroom = config.model, config.model.moe, config.comms.saved_headroom
    num_layers = model.num_layers + model.mtp.depth - model.num_dense_layers
    if headroom is None or num_layers == 0 or not _in_arena(config, sizes):
        return 0
    own = _tokens(config, sizes)[0] * sizes.etp
    rows = expected_rows(moe, sizes.ep, own), _received_rows(config, sizes)
    room = plan_saved(num_layers, headroom, rows, (own * moe.top_k, _pairs(config, sizes)))
    hidden = 2 * moe.expert_dim // sizes.etp if sizes.activation_checkpoint == "none" else None
    return room.num_bytes(model.dim, moe.top_k, hidden, dtype.itemsize)


# ---- for a person


def describe_memory(config: Config, num_ranks: int, device: torch.device) -> str:
    """What a run says before it starts; empty where there is no GPU, whose memory is not to be planned."""
    if device.type != "cuda":
        return ""
    memory_gib = config.cluster.memory_gib or torch.cuda.get_device_properties(device).total_memory / GIB
    return describe(plan_memory(config, num_ranks), memory_gib)


def describe(plan: MemoryPlan, memory_gib: float | None) -> str:
    """A line, and another one where a device has less."""
    parts = {
        "weights": plan.parameters, "gradients": plan.gradients, "moments": plan.moments,
        "activations": plan.activations, "exchange": plan.exchange,
    }  # fmt: skip
    shown = ", ".join(f"{name} {size / GIB:.2f}" for name, size in parts.items() if size)
    of = "" if memory_gib is None else f" of {memory_gib:.0f}"
    line = f"  memory  about {plan.peak / GIB:.1f}{of} GiB per rank at the peak ({plan.moment}): {shown}"
    if memory_gib is None or plan.peak <= memory_gib * GIB:
        return line
    return f"{line}\n  warning: that is more than a device has; {advice(plan)}"


def advice(plan: MemoryPlan) -> str:
    """What would help at the moment of the peak."""
    if plan.moment != END and plan.activations > plan.gradients:
        return "parallel.activation_checkpoint=full, a smaller train.micro_batch_size and parallel.cp keep less of them"
    return "more ranks in parallel.dp_shard or parallel.ep have smaller shares of weights, gradients and moments"


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit code: 0, or 2 after a mistake."""
    parser = argparse.ArgumentParser(prog="python -m trainer.planner", description="Memory of a run on each rank.")
    parser.add_argument("overrides", nargs="*", help="as python -m trainer.train takes them")
    parser.add_argument("--ranks", type=int, required=True, help="processes of the run")
    parser.add_argument("--json", action="store_true", help="bytes, as JSON")
    arguments = parser.parse_intermixed_args(argv)
    try:
        config = compose(arguments.overrides)
        plan = plan_memory(config, arguments.ranks)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if arguments.json:
        print(json.dumps({**asdict(plan), "transient": plan.transient}))
        return 0
    sizes = fit_layout(config, arguments.ranks)
    axes = ("dp_replicate", "dp_shard", "cp", "tp", "ep", "etp")
    print(f"{config.model.name} on {arguments.ranks} ranks: {', '.join(f'{a}={getattr(sizes, a)}' for a in axes)}")
    print(describe(plan, config.cluster.memory_gib))
    return 0


if __name__ == "__main__":
    sys.exit(main())
