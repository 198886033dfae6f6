"""The language model: embedding, a loop over blocks, a norm, the head.

A block is pre-norm attention followed by a pre-norm dense feed-forward or a MoE layer. What depends on the batch but
not on the layer (positions, documents, masks) is planned once, before the loop. The head takes the labels and returns
the summed loss, so that the logits of a whole batch never exist in training. In training, blocks for multi-token
prediction may follow the last block; they share the embedding and the head.

Construction only allocates: build on the meta device, then let parallel/init.py fill each parameter by `init_rule`.

Shapes: B batch, S sequence, T = B * S tokens, D model dim, V vocabulary, L MoE layers (those for
multi-token prediction come last), E experts, M depths of multi-token prediction.
"""

import math
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from comms.backend import BackendChoice
from comms.split_sequence import SplitSequence
from moe.feed_forward import FeedForward
from moe.layer import BalanceScale, MoE, MoEStats
from moe.linear_maps import LinearMaps, local
from parallel.async_tp import AsyncChoice
from parallel.init import InitRule
from parallel.tensor_parallel import TensorPlan
from trainer.loss import linear_cross_entropy
from trainer.models.attention import build_attention, rotary_dim
from trainer.models.config import ModelConfig
from trainer.models.inner_attention import SequencePlan, plan_sequences
from trainer.models.multi_token import ahead, labels_ahead, same_document_ahead
from trainer.models.rope import rotary_tables


class ModelOutput(NamedTuple):
    """Sums over the tokens of this rank; None where something was not asked for or does not exist."""

    loss_sum: Tensor | None
    """Cross-entropy summed over the valid labels."""
    logits_BSV: Tensor | None
    aux_loss: Tensor
    z_loss: Tensor
    tokens_per_expert_LE: Tensor | None
    """int64 (token, expert) pairs of each MoE layer, in order; None without MoE layers."""
    dropped: Tensor
    """int64 scalar: pairs dropped by capacity, over all layers."""
    mtp_loss_sums_M: Tensor | None = None
    """Training with labels: cross-entropy of each further token, summed over its labels (`labels_ahead`)."""


class Block(nn.Module):
    """x + attention(norm(x)), then x + ffn(norm(x)); the first `num_dense_layers` blocks have a dense ffn."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.attention = build_attention(config, layer)
        self.ffn_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        dense = layer < config.num_dense_layers
        self.feed_forward = FeedForward(config.dim, config.ffn_dim) if dense else None
        self.moe = None if dense else MoE(config.moe, config.dim)

    def forward(
        self, x_BSD: Tensor, plan: SequencePlan, balance: BalanceScale | None = None
    ) -> tuple[Tensor, MoEStats | None]:
        """-> (B, S, D) and the MoE layer's statistics (None from a dense block)."""
        x_BSD, h_BSD = self.attend(x_BSD, plan)
        if self.moe is None:
            assert self.feed_forward is not None
            return x_BSD + self.feed_forward(h_BSD), None
        y_BSD, stats = self.moe(h_BSD, plan.token_mask_BS, balance)
        return x_BSD + y_BSD, stats

    def attend(self, x_BSD: Tensor, plan: SequencePlan) -> tuple[Tensor, Tensor]:
        """The states after attention, and what the feed-forward maps take of them: (B, S, D) each.

        Replaced by its compiled twin where the run compiles and the block has experts.
        """
        x_BSD = x_BSD + self.attention(self.attention_norm(x_BSD), plan)
        return x_BSD, self.ffn_norm(x_BSD)


class MultiTokenGlue(nn.Module):
    """What joins a block for multi-token prediction to the states before it and the head after it (DeepSeek-V3).

    The norm after the block stands here and not in the block: activation checkpointing would otherwise have to repeat
    the experts' exchange back to compute its gradient.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embedding_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.hidden_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        # Columns: the embedding first, as in the published weights (the report's formula has them the other way).
        self.projection = nn.Linear(2 * config.dim, config.dim, bias=False)
        # Of the block's output: what the shared head, and the next block's `hidden_norm`, take.
        self.norm = nn.RMSNorm(config.dim, eps=config.norm_eps)

    def forward(self, h_BSD: Tensor, embedded_BSD: Tensor) -> Tensor:
        """Normalised states and embeddings of the tokens ahead -> the block's input (B, S, D)."""
        return self.projection(torch.cat((self.embedding_norm(embedded_BSD), self.hidden_norm(h_BSD)), dim=-1))


class Embedding(nn.Module):
    """A row of the table for each token."""

    def __init__(self, vocab_size: int, dim: int) -> None:
        super().__init__()
        self.maps = LinearMaps()
        self.weight = nn.Parameter(torch.empty(vocab_size, dim))

    def forward(self, tokens_BS: Tensor) -> Tensor:
        """(B, S) -> (B, S, D)."""
        return self.maps.embed(tokens_BS, self.weight)


class Head(nn.Module):
    """The output map to the vocabulary. With labels it returns their summed loss and never holds all logits.

    A tied head has no weight of its own and is given the embedding's: a parameter that two modules share would not
    survive the move from the meta device.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.maps = LinearMaps()
        tied = config.tie_embeddings
        self.weight = None if tied else nn.Parameter(torch.empty(config.vocab_size, config.dim))
        # Set by whoever compiles the blocks: fuses the element-wise work on each chunk of logits.
        self.compile_chunks = False

    def forward(self, h_BSD: Tensor, labels_BS: Tensor | None = None, embedding_VD: Tensor | None = None) -> Tensor:
        """-> logits (B, S, V), or with labels (-100: not counted) the sum of the cross-entropy, a scalar."""
        weight_VD = embedding_VD if self.weight is None else self.weight
        assert weight_VD is not None
        h_BSD, weight_VD = self.maps.gather(h_BSD), local(weight_VD)
        if labels_BS is None:
            return self.maps.join_vocabulary(F.linear(h_BSD, weight_VD))
        return linear_cross_entropy(
            h_BSD.flatten(0, 1),
            weight_VD,
            labels_BS.flatten(),
            compile_chunks=self.compile_chunks,
            vocabulary_group=self.maps.vocabulary_group,
        )


class Transformer(nn.Module):
    """A decoder-only language model described by a ModelConfig."""

    def __init__(self, config: ModelConfig) -> None:
        """Raises ValueError when the config names something unknown or contradicts itself."""
        super().__init__()
        self.config = config
        # Set by parallel: how sequences are split over ranks.
        self.sequence: SplitSequence | None = None
        # Settled when the model is laid out over ranks.
        self.exchange_choice = BackendChoice("none", "no row leaves its rank")
        self.async_tp = AsyncChoice("none", 0)
        self.tok_embeddings = Embedding(config.vocab_size, config.dim)
        # The last mtp.depth blocks are those for multi-token prediction.
        num_blocks = config.num_layers + config.mtp.depth
        self.layers = nn.ModuleDict({str(layer): Block(config, layer) for layer in range(num_blocks)})
        self.norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.head = Head(config)
        self.mtp = nn.ModuleDict({str(depth): MultiTokenGlue(config) for depth in range(config.mtp.depth)})

    def forward(
        self,
        tokens_BS: Tensor,
        *,
        labels_BS: Tensor | None = None,
        positions_BS: Tensor | None = None,
        document_ids_BS: Tensor | None = None,
        balance: BalanceScale | None = None,
        max_documents: int | None = None,
    ) -> ModelOutput:
        """Runs the model; the loss with labels, else the logits.

        Every rank that shares a sequence is given all of it and works on its part; the loss is that of the part of its
        tp ranks together, the logits (then without a gradient) are those of whole sequences.

        Args:
            tokens_BS: int64.
            labels_BS: int64, already shifted; -100 is not counted.
            positions_BS: int64 places within the document; None derives them from the documents.
            document_ids_BS: tokens see earlier tokens of their own run of equal ids; -1 is padding, which is neither
                seen nor routed. None means that each sequence is one document without padding.
            balance: sizes of the global batch for the auxiliary losses; None computes none.
            max_documents: a bound on the runs of equal ids in the batch; spares the varlen backend a synchronisation.
        """
        x_BSD = self.tok_embeddings(self.attention_part(tokens_BS))
        plan = plan_sequences(
            x_BSD,
            self.config.attention,
            positions_BS=positions_BS,
            document_ids_BS=document_ids_BS,
            max_documents=max_documents,
            sequence=self.sequence,
        )
        # Once for all layers and heads: compilers would fuse the cosines into every use.
        tables = rotary_tables(plan.positions_BS, rotary_dim(self.config.attention), self.config.rope)
        plan = plan._replace(rotary=tables)
        layer_stats: list[MoEStats] = []
        for block in list(self.layers.values())[: self.config.num_layers]:
            x_BSD, stats = block(x_BSD, plan, balance)
            if stats is not None:
                layer_stats.append(stats)
        h_BSD = self.norm(x_BSD)
        own_labels_BS = None if labels_BS is None else self.attention_part(labels_BS)
        out = self.head(h_BSD, own_labels_BS, self.tok_embeddings.weight)
        loss_sum, logits_BSV = (None, self.whole(out)) if labels_BS is None else (out, None)
        mtp_sums_M = None
        if self.training and labels_BS is not None and self.mtp:
            mtp_sums_M = self.predict_further(h_BSD, tokens_BS, labels_BS, document_ids_BS, plan, balance, layer_stats)
        return ModelOutput(loss_sum, logits_BSV, *_total(layer_stats, x_BSD.device), mtp_sums_M)

    def attention_part(self, whole_BSX: Tensor) -> Tensor:
        """The tokens of whole sequences that this rank's attention works on."""
        return whole_BSX if self.sequence is None else self.sequence.attention_part(whole_BSX)

    def whole(self, logits_BCV: Tensor) -> Tensor:
        """Logits of whole sequences from those of `attention_part`."""
        return logits_BCV if self.sequence is None else self.sequence.whole_from_attention(logits_BCV)

    def predict_further(
        self,
        h_BSD: Tensor,
        tokens_BS: Tensor,
        labels_BS: Tensor,
        document_ids_BS: Tensor | None,
        plan: SequencePlan,
        balance: BalanceScale | None,
        layer_stats: list[MoEStats],
    ) -> Tensor:
        """Summed losses of the tokens further ahead, (M,); appends the blocks' statistics to `layer_stats`.

        Attention needs no other mask: a token without a token ahead is the last of its document, so none sees it.
        """
        sums: list[Tensor] = []
        blocks = list(self.layers.values())[self.config.num_layers :]
        for steps, (glue, block) in enumerate(zip(self.mtp.values(), blocks, strict=True), start=1):
            x_BSD = glue(h_BSD, self.tok_embeddings(self.attention_part(ahead(tokens_BS, steps, 0))))
            mask_BS = same_document_ahead(tokens_BS, document_ids_BS, steps)
            routed = plan._replace(token_mask_BS=mask_BS if self.sequence is None else self.sequence.part(mask_BS))
            x_BSD, stats = block(x_BSD, routed, balance)
            h_BSD = cast(MultiTokenGlue, glue).norm(x_BSD)
            if stats is not None:
                layer_stats.append(stats)
            labels = self.attention_part(labels_ahead(labels_BS, document_ids_BS, steps))
            sums.append(self.head(h_BSD, labels, self.tok_embeddings.weight))
        return torch.stack(sums)


def _total(layer_stats: list[MoEStats], device: torch.device) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """aux_loss and z_loss summed over the layers, counts (L, E), dropped pairs."""
    if not layer_stats:
        zero = torch.zeros((), device=device)
        return zero, zero, None, torch.zeros((), dtype=torch.int64, device=device)
    aux, z, counts, dropped = (torch.stack(field) for field in zip(*layer_stats, strict=True))
    return aux.sum(), z.sum(), counts, dropped.sum()


def init_rule(name: str, config: ModelConfig) -> InitRule:
    """The initial values of the parameter or buffer called `name` (as in the state dict).

    Maps that add to the residual stream start smaller by sqrt(2 * num_layers), so that its variance does not grow with
    depth (GPT-2).
    """
    path = name.split(".")
    module, last = path[-2] if len(path) > 1 else "", path[-1]
    if last == "bias" or last.startswith("b_") or last in ("sinks", "expert_bias"):
        return InitRule("zeros")
    if module.endswith("norm"):
        return InitRule("ones")
    if module in ("wo", "w_down") or last == "w_down":
        return InitRule("normal", config.init_std / math.sqrt(2 * config.num_layers))
    return InitRule("normal", config.init_std)


def tensor_plan(config: ModelConfig, tp: int) -> TensorPlan:
    """How tensor parallelism splits the model: heads, hidden units of dense layers, vocabulary.

    Low-rank maps of MLA, norms and what belongs to MoE layers stay whole. So do key and value maps with fewer heads
    than ranks: each rank then takes the rows of the head that its query heads share.
    """
    attention, feed_forward = "layers.*.attention", "layers.*.feed_forward"
    split = {"tok_embeddings.weight": 0, "head.weight": 0, f"{attention}.sinks": 0}
    shares_heads = attention_kv_heads(config) % tp != 0
    columns = ("wq", "wq_b", "wkv_b") if shares_heads else ("wq", "wk", "wv", "wq_b", "wkv_b")
    for name in columns:
        split[f"{attention}.{name}.weight"] = split[f"{attention}.{name}.bias"] = 0
    split |= {f"{feed_forward}.w_gate.weight": 0, f"{feed_forward}.w_up.weight": 0}
    split |= {f"{attention}.wo.weight": 1, f"{feed_forward}.w_down.weight": 1}
    full_norm = config.attention.qk_norm == "full"
    return TensorPlan(
        split=split,
        modules=("tok_embeddings", "head", attention, feed_forward),
        norms=(f"{attention}.q_norm", f"{attention}.k_norm") if full_norm else (),
        groups=(("wq", "wk", "wv"), ("wq_b",), ("wkv_b",), ("wo",), ("w_gate", "w_up"), ("w_down",)),
        kv_rows=config.attention.head_dim,
        kv_sharers=max(tp // config.attention.num_kv_heads, 1),
    )


def attention_kv_heads(config: ModelConfig) -> int:
    """Heads of keys and values; MLA expands one of each for every query head."""
    return config.attention.num_heads if config.attention.kind == "mla" else config.attention.num_kv_heads


class ParameterCount(NamedTuple):
    """`total` parameters, and those `active` for one token: of a layer's E routed experts, only top_k."""

    total: int
    active: int


def count_parameters(model: Transformer) -> ParameterCount:
    """Counts on any device, meta included; a tied weight once, balancing biases (buffers) not at all.

    What is there for multi-token prediction is left out, as in the authors' figures: only training has it.
    Embedding and head both count as active, as in Qwen3's and DeepSeek's figures; gpt-oss leaves the embedding out of
    its active figure.
    """
    total = routed = 0
    for name, parameter in model.named_parameters():
        path = name.split(".")
        if path[0] == "mtp" or (path[0] == "layers" and int(path[1]) >= model.config.num_layers):
            continue
        total += parameter.numel()
        routed += parameter.numel() if ".experts." in name else 0
    config = model.config.moe
    return ParameterCount(total, total - routed + routed * config.top_k // config.num_experts)
