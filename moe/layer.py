"""The Mixture-of-Experts layer, whole. A token's way through it:

    1. route      which K experts, with what weight                      moe/router.py
    2. plan       which ranks hold those experts, how many rows go where  comms/all_to_all.py
    3. dispatch   the row crosses to each such rank once                  comms/all_to_all.py
    4. experts    the rank's own experts, weighted sum per row            moe/experts.py
    5. combine    one row per (token, rank) comes back and is summed      comms/all_to_all.py

Rows travel by collectives, or through symmetric memory (comms/symmetric_exchange.py on one host,
comms/record_exchange.py on any number) behind the same two functions. With symmetric memory on one host fused
experts take steps 3 to 5 as one (moe/exchanged_experts.py), in which rows travel while experts compute.
Dispatch moves rows between ranks; experts are a local matter. On one rank steps 3 and 5 are the identity, so there is
one path for every layout. Beside it the shared expert, if there is one, sees every token.

Balancing statistics are results of `forward`, not state: activation checkpointing runs `forward` twice, and a counter
inside it would count twice.

Shape suffixes: B sequences, S tokens of a sequence, T = B*S tokens, D model dim, E experts of the whole layer,
K experts per token, N ranks of the expert-parallel group, R received rows.
"""

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from comms.all_to_all import AS_IT_IS, Plan, combine, dispatch, end_of_recomputation, items_by_rank, plan_dispatch
from comms.collectives import gather_dim, gather_over_ranks, reduce_scatter, sum_over_ranks
from comms.nodes import NodeGroups
from comms.record_exchange import RecordExchange, plan_records
from comms.split_sequence import SplitSequence
from comms.symmetric_exchange import SymmetricPlan, plan_exchange
from comms.symmetric_memory import Exchange, room_for
from moe.config import MoEConfig
from moe.exchanged_experts import Through, depart
from moe.experts import GroupedExperts
from moe.feed_forward import FeedForward
from moe.load_balance import batch_aux_loss, count_tokens, sequence_aux_loss, z_loss
from moe.router import Routing, most_pairs, route, validate_routing


class BalanceScale(NamedTuple):
    """What the auxiliary losses of one micro-step are means over: sizes of the *global* batch of an optimizer step.

    With them, the sum of every rank's and every micro-step's contribution is the loss of the global batch.
    """

    # Real (not padding) tokens.
    num_tokens: Tensor | int
    num_sequences: int
    num_micro_steps: int


class MoEStats(NamedTuple):
    """Side results of one forward. The losses are this rank's contributions, coefficient included."""

    aux_loss: Tensor
    z_loss: Tensor
    # (E,) int64: pairs this rank's tokens chose, before any capacity drop.
    tokens_per_expert_E: Tensor
    # int64 scalar: pairs dropped by capacity.
    dropped: Tensor


class Tokens(NamedTuple):
    """Tokens with their routing."""

    x_TD: Tensor
    weights_TK: Tensor
    ids_TK: Tensor


class Router(nn.Module):
    """The router's parameters; the choice itself is the pure function `moe.router.route`."""

    def __init__(self, config: MoEConfig, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.num_experts, dim))
        self.bias = nn.Parameter(torch.empty(config.num_experts)) if config.router_bias else None


class MoE(nn.Module):
    """Routed experts plus an optional shared expert.

    `parallel` sets who works together; None means this rank alone:
        ep_group     the ranks that share out the experts
        etp_group    the ranks that share the hidden units of each expert
        data_group   the ranks whose tokens make up one batch, for the batch-level auxiliary loss
        sequence     how the tokens of a sequence lie on ranks, for what is counted by sequence
        nodes        the two levels of ep_group where it spans nodes; None: one level
        exchange     symmetric memory through which the ranks of ep_group reach each other; None: collectives
    """

    expert_bias: Tensor | None

    def __init__(self, config: MoEConfig, dim: int) -> None:
        super().__init__()
        validate_routing(config)
        self.config = config
        self.router = Router(config, dim)
        # Not a parameter: it moves by the counts, once per optimizer step. fp32 whatever the model's dtype is.
        bias = torch.empty(config.num_experts, dtype=torch.float32) if config.expert_bias else None
        self.register_buffer("expert_bias", bias)
        self.experts = GroupedExperts(config, dim)
        self.shared = FeedForward(dim, config.shared_expert_dim) if config.shared_expert_dim else None
        # Replaced by its compiled twin when the run compiles.
        self.route = route
        self.ep_group: dist.ProcessGroup | None = None
        self.etp_group: dist.ProcessGroup | None = None
        self.data_group: dist.ProcessGroup | None = None
        self.sequence: SplitSequence | None = None
        self.nodes: NodeGroups | None = None
        self.exchange: Exchange | None = None
        # Parts of the tokens that travel and compute one by one, if steps 3 to 5 are one.
        self.chunks = 1
        # What rows and gradients are sent as.
        self.dispatch_payload = self.combine_payload = AS_IT_IS
        # Its place among the MoE layers of the model: ranks that meet in an exchange must be in the same layer.
        self.number = 0

    def forward(
        self, x_BSD: Tensor, token_mask_BS: Tensor | None = None, scale: BalanceScale | None = None
    ) -> tuple[Tensor, MoEStats]:
        """Returns y_BSD and the balancing statistics.

        Args:
            token_mask_BS: False at padding, which is neither routed nor counted.
            scale: None in evaluation: no auxiliary loss is computed.
        """
        x_TD = x_BSD.flatten(0, 1)
        mask_T = None if token_mask_BS is None else token_mask_BS.flatten()
        # 1. route
        routing = self.route(
            x_TD,
            self.router.weight,
            self.router.bias,
            self.config,
            expert_bias_E=self.expert_bias,
            token_mask_T=mask_T,
            seq_len=x_BSD.shape[1],
            sequence=self.sequence,
        )
        tokens = self.gather_tokens(x_TD, routing)
        # 2. plan
        plan = self.plan(tokens.ids_TK, mask_T, x_BSD)
        through = self.way_through(plan, x_TD)
        if through is not None:
            # Rows travel while tokens are counted and the shared expert computes.
            depart(through, *tokens, beside=self.shared is not None)
        stats = self.balance(routing, mask_T, x_BSD.shape[1], scale)
        shared_TD = None if self.shared is None else self.shared(x_TD)
        # 3 to 5. dispatch, experts, combine; last, because a recomputation for backward stops before combine.
        y_TD = self.routed_experts(tokens, plan, through)
        if shared_TD is not None:
            y_TD = y_TD + shared_TD
        return y_TD.view_as(x_BSD), stats

    def gather_tokens(self, x_TD: Tensor, routing: Routing) -> Tokens:
        """What is dispatched. With etp each of its ranks has a slice of every expert, so each needs all their rows."""
        tokens = Tokens(x_TD, routing.topk_weights_TK, routing.topk_ids_TK)
        if self.etp_group is None:
            return tokens
        group = self.etp_group.group_name
        ids_TK = gather_over_ranks(tokens.ids_TK, group, self.etp_group.size()).flatten(0, 1)
        return Tokens(gather_dim(x_TD, 0, group), gather_dim(tokens.weights_TK, 0, group), ids_TK)

    def routed_experts(self, tokens: Tokens, plan: Plan, through: Through | None) -> Tensor:
        """Steps 3 to 5 for tokens that have been planned."""
        x_TD, weights_TK, ids_TK = tokens
        if through is not None:
            # 3 to 5. as one operator, in which rows travel while experts compute
            y_TD = self.experts(x_TD, ids_TK, weights_TK, plan.num_items, plan.is_exact, through)
            y_TD = end_of_recomputation(y_TD, through.plan.index_NT)
        else:
            # 3. dispatch
            rows_RD, weights_RK, ids_RK = dispatch(plan, x_TD, weights_TK, ids_TK, self.dispatch_payload)
            if self.num_ranks > 1:
                first, end = self.first_id, self.first_id + self.experts_per_rank
                ids_RK = torch.where((ids_RK >= first) & (ids_RK < end), ids_RK - first, -1)
            # 4. experts
            out_RD = self.experts(rows_RD, ids_RK, weights_RK, plan.num_items, plan.is_exact)
            # 5. combine
            y_TD = combine(plan, out_RD, self.combine_payload)
        # With etp results are partial sums.
        return y_TD if self.etp_group is None else reduce_scatter(y_TD, 0, self.etp_group.group_name)

    def plan(self, ids_TK: Tensor, mask_T: Tensor | None, x_BSD: Tensor) -> Plan:
        """Step 2: who sends which rows to whom."""
        if self.exchange is not None:
            room = self.pair_room(self.exchange)
            if isinstance(self.exchange, RecordExchange):
                return plan_records(ids_TK, self.experts_per_rank, self.exchange, self.number, room)
            return plan_exchange(ids_TK, self.experts_per_rank, self.exchange, self.number, room, self.chunks)
        items_TN = items_by_rank(ids_TK, self.num_ranks, self.experts_per_rank)
        exact = self.config.capacity_factor is None and mask_T is None
        num_items = None
        if exact or self.experts.bears_bounds(x_BSD.dtype, x_BSD.device):
            # Room for the most: to ask how many ids padding and capacity leave, the host would wait for the device.
            whole_sequences = self.sequence is None
            num_items = most_pairs(self.config, ids_TK.shape[0], x_BSD.shape[1]) if whole_sequences else ids_TK.numel()
        return plan_dispatch(items_TN, self.nodes or self.ep_group, num_items, exact)

    def way_through(self, plan: Plan, x_TD: Tensor) -> Through | None:
        """How rows travel while experts compute; None where steps 3 to 5 are taken one by one."""
        if not (isinstance(plan, SymmetricPlan) and self.experts.can_exchange(x_TD.dtype, x_TD.device)):
            return None
        saves = plan.exchange.saved is not None and torch.is_grad_enabled()
        return Through(
            plan, self.first_id, self.dispatch_payload, self.combine_payload, self.experts.keeps_hidden, saves
        )

    @property
    def num_ranks(self) -> int:
        """Ranks that share out the experts."""
        return 1 if self.ep_group is None else self.ep_group.size()

    @property
    def experts_per_rank(self) -> int:
        """Experts of each of them."""
        return self.config.num_experts // self.num_ranks

    @property
    def first_id(self) -> int:
        """The first expert of this one."""
        return 0 if self.ep_group is None else self.ep_group.rank() * self.experts_per_rank

    def pair_room(self, exchange: Exchange) -> int:
        """How many (row, expert) pairs this rank can work on: what pair_capacity allows of the most that can come."""
        config = self.config
        worst = exchange.layout.row_bound * min(config.top_k, config.num_experts // exchange.num_ranks)
        if config.pair_capacity is None:
            return worst
        return min(worst, room_for(config.pair_capacity, exchange.max_tokens * config.top_k))

    def balance(self, routing: Routing, mask_T: Tensor | None, seq_len: int, scale: BalanceScale | None) -> MoEStats:
        """Counts, and the auxiliary losses where training asks for them."""
        config = self.config
        counts_E = count_tokens(routing.chosen_ids_TK, config.num_experts)
        aux = z = routing.logits_TE.new_zeros(())
        if scale is not None and config.aux_loss:
            aux = config.aux_loss * self._aux_loss(routing, counts_E, mask_T, seq_len, scale)
        if scale is not None and config.z_loss:
            z = config.z_loss * z_loss(routing.logits_TE, mask_T, scale.num_tokens)
        return MoEStats(aux, z, counts_E, routing.dropped)

    def _aux_loss(
        self, routing: Routing, counts_E: Tensor, mask_T: Tensor | None, seq_len: int, scale: BalanceScale
    ) -> Tensor:
        scores_TE = routing.scores_TE
        assert scores_TE is not None
        if self.config.aux_loss_level == "sequence":
            whole = None if self.sequence is None else self.sequence.sum
            return sequence_aux_loss(scores_TE, routing.chosen_ids_TK, mask_T, seq_len, scale.num_sequences, whole)
        # Filled on the device: a copy from the host would wait for it.
        num_tokens = counts_E.new_full((), scores_TE.shape[0]) if mask_T is None else mask_T.sum()
        totals = torch.cat([counts_E, num_tokens[None]])
        if self.data_group is not None:
            # Counts of the whole micro-step: per-rank counts would change the router's gradient with the layout.
            totals = sum_over_ranks(totals, self.data_group.group_name)
        loss = batch_aux_loss(scores_TE, mask_T, totals[:-1], totals[-1], self.config.top_k)
        return loss / scale.num_micro_steps
