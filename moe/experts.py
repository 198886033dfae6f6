"""The routed experts of one rank: gated feed-forward networks over rows that arrive unsorted.

Each received row carries K expert ids (those of this rank, -1 elsewhere) and K routing weights. A (row, expert) pair is
one unit of work. Pairs are sorted by expert, so that each expert sees one block of rows:

    rows_RD -> gather -> x_PD -> gate/up -> act, times weight -> a_PF -> down -> y_PD -> sum per row -> out_RD

The routing weight multiplies `a` instead of `y`: the down map is linear, so the result is the same, the product costs
nothing beside the activation, and its gradient needs `a` alone: y never has to be kept.

Shape suffixes: R rows, K experts per token, P pairs, D model dim, F expert hidden dim, E experts of this rank.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from comms.kernels.gather_sum import gather_sum
from moe.config import MoEConfig
from moe.exchanged_experts import Through, exchanged_experts
from moe.fused_experts import fused_experts
from moe.grouped_gemm import clear_tail_, grouped_linear, resolve_backend
from moe.kernels.pair_rows import expand_rows
from moe.kernels.sort_pairs import Pairs, sort_pairs
from moe.linear_maps import local
from moe.low_precision_experts import low_precision_experts
from moe.low_precision_linear import check_dims, low_precision_grouped_linear
from moe.recipes import Recipe
from moe.reference import CLAMP_LIMIT, CLAMP_SLOPE, reference_experts


def within_bound(pairs: Pairs, ids_RK: Tensor) -> Pairs:
    """What `sort_pairs` found, where `num_pairs` was but a bound: row and index -1 stand behind the last pair.

    Pairs for which there was no room have no slot; whoever set the bound has noted that.
    """
    num_pairs = pairs.rows_P.shape[0]
    offsets_E = pairs.offsets_E.clamp(max=num_pairs)
    is_pair_P = torch.arange(num_pairs, device=ids_RK.device) < offsets_E[-1]
    slots_RK = torch.where((ids_RK >= 0) & (pairs.slots_RK < num_pairs), pairs.slots_RK, -1)
    rows_P, order_P = (torch.where(is_pair_P, table_P, -1) for table_P in (pairs.rows_P, pairs.order_P))
    return Pairs(rows_P, order_P, slots_RK, offsets_E)


def each_row_a_pair(num_pairs: int, offsets_E: Tensor) -> Pairs:
    """Tables of rows that are sorted by expert already, one pair each."""
    index_P = torch.arange(num_pairs, device=offsets_E.device, dtype=torch.int32)
    return Pairs(index_P, index_P, torch.where(index_P < offsets_E[-1], index_P, -1)[:, None], offsets_E)


# w_gate_up, w_down, b_gate_up, b_down
ExpertWeights = tuple[Tensor, Tensor, Tensor | None, Tensor | None]


class Cast(Protocol):
    """How parameters become what is computed with (parallel/whole_weights.py)."""

    def __call__(self, compute: Callable[[ExpertWeights], Tensor], masters: Sequence[nn.Parameter | None]) -> Tensor:
        """The result of `compute` on what has been made of the parameters."""
        ...


class GroupedExperts(nn.Module):
    """E gated feed-forward experts. Weights in nn.Linear's orientation, gate and up stacked in one tensor."""

    def __init__(self, config: MoEConfig, dim: int) -> None:
        super().__init__()
        self.config = config
        # Replaced by its compiled twin when the run compiles.
        self.activation = weighted_activation
        # How sorted rows meet their experts' matrices, and by what recipe: see `use_recipe`.
        self.linear: Callable[..., Tensor] = grouped_linear
        self.recipe: Recipe | None = None
        # None: parameters are computed with as they are, or FSDP puts others in their place.
        self.cast: Cast | None = None
        # Whether exchanged experts keep h for backward; where the block is checkpointed they compute it again.
        self.keeps_hidden = True
        # False on all but one of the ranks that share each expert's hidden units: partial sums have one bias.
        self.adds_down_bias = True
        num_experts, hidden = config.num_experts, config.expert_dim
        self.w_gate_up = nn.Parameter(torch.empty(num_experts, 2, hidden, dim))
        self.w_down = nn.Parameter(torch.empty(num_experts, dim, hidden))
        if config.linear_bias:
            self.b_gate_up = nn.Parameter(torch.empty(num_experts, 2, hidden))
            self.b_down = nn.Parameter(torch.empty(num_experts, dim))
        else:
            self.b_gate_up = self.b_down = None

    def forward(
        self,
        rows_RD: Tensor,
        ids_RK: Tensor,
        weights_RK: Tensor,
        num_pairs: int,
        exact: bool = True,
        through: Through | None = None,
    ) -> Tensor:
        """out_RD[r] = sum over k of weights[r, k] * expert[ids[r, k]](rows[r]); ids are local, -1 means none.

        Args:
            num_pairs: how many ids are not -1; or, not `exact`, room for so many: rows without ids may hold anything.
            through: rows, ids (of all experts) and weights are those of this rank's tokens, and so is the result: they
                travel to their experts and back.
        """
        parameters = self.w_gate_up, self.w_down, self.b_gate_up, self.b_down
        given = rows_RD, ids_RK, weights_RK, num_pairs, exact, through
        if self.cast is not None:
            return self.cast(lambda weights: self.compute(weights, *given), parameters)
        weights = tuple(None if parameter is None else local(parameter) for parameter in parameters)
        return self.compute(cast(ExpertWeights, weights), *given)

    def compute(
        self,
        weights: ExpertWeights,
        rows_RD: Tensor,
        ids_RK: Tensor,
        weights_RK: Tensor,
        num_pairs: int,
        exact: bool,
        through: Through | None,
    ) -> Tensor:
        """`forward` with these weights, in the dtype of the rows."""
        w_gate_up, w_down, b_gate_up, b_down = weights
        if through is not None:
            return exchanged_experts(through, rows_RD, weights_RK, ids_RK, w_gate_up, w_down, self.config.activation)
        backend = resolve_backend(self.config.backend, rows_RD.dtype, rows_RD.device)
        b_down = b_down if self.adds_down_bias else None
        if backend == "reference":
            return reference_experts(rows_RD, ids_RK, weights_RK, w_gate_up, w_down, b_gate_up, b_down, self.config)
        pairs = sort_pairs(ids_RK, w_down.shape[0], num_pairs)
        if not exact:
            pairs = within_bound(pairs, ids_RK)
        # Where memory behind the last pair is undefined, it must be zero before it meets anything.
        ends_E = None if exact else pairs.offsets_E
        weights = w_gate_up, w_down, b_gate_up, b_down
        if self._is_low_precision:
            assert self.recipe is not None
            return low_precision_experts(
                rows_RD, weights_RK, w_gate_up, w_down, pairs, self.config.activation, self.recipe
            )
        if backend == "fused" and not self.config.scores_before_experts:
            return fused_experts(rows_RD, weights_RK, *weights, pairs, self.config.activation)
        weights_P = weights_RK.reshape(-1).index_select(0, pairs.order_P.clamp(min=0))
        x_PD = cast(Tensor, _GatherPairs.apply(rows_RD, pairs.slots_RK, num_pairs, ends_E))  # pyright: ignore
        if self.config.scores_before_experts:
            x_PD, weights_P = (x_PD * weights_P[:, None]).to(x_PD.dtype), torch.ones_like(weights_P)
        if backend == "fused":
            alone = each_row_a_pair(num_pairs, pairs.offsets_E)
            y_PD = fused_experts(x_PD, weights_P[:, None], *weights, alone, self.config.activation)
        else:
            y_PD = self.grouped(x_PD, weights_P, weights, pairs.offsets_E, exact)
        return _SumPairs.apply(y_PD, pairs.slots_RK, ends_E)  # type: ignore[no-any-return]

    def grouped(
        self, x_PD: Tensor, weights_P: Tensor, weights: ExpertWeights, offsets_E: Tensor, exact: bool
    ) -> Tensor:
        """y_PD[p] = weights[p] * expert of p (x[p]), by torch's grouped GEMM or a low-precision recipe."""
        w_gate_up, w_down, b_gate_up, b_down = weights
        h_PH = self.linear(x_PD, w_gate_up.flatten(1, 2), offsets_E, exact=exact)
        if b_gate_up is not None:
            h_PH = h_PH + _per_pair(b_gate_up.flatten(1, 2), offsets_E, x_PD.shape[0])
        a_PF = self.activation(h_PH, weights_P, self.config.activation)
        y_PD = self.linear(a_PF, w_down, offsets_E, exact=exact)
        if b_down is not None:
            bias_PD = _per_pair(b_down, offsets_E, x_PD.shape[0])
            y_PD = y_PD + (bias_PD * weights_P[:, None]).to(y_PD.dtype)
        return y_PD

    def can_exchange(self, dtype: torch.dtype, device: torch.device) -> bool:
        """Whether `forward` can have rows of this kind travel: fused kernels compute, and there is nothing to add."""
        fused = resolve_backend(self.config.backend, dtype, device) == "fused"
        return fused and self.recipe is None and self._is_plain

    def bears_bounds(self, dtype: torch.dtype, device: torch.device) -> bool:
        """Whether a bound on the pairs costs `forward` as good as nothing, since its kernels stop at the last one."""
        fused = resolve_backend(self.config.backend, dtype, device) == "fused"
        return self._is_low_precision or (fused and not self.config.scores_before_experts)

    @property
    def _is_low_precision(self) -> bool:
        """Whether kernels of a recipe's own do it all."""
        return self.recipe is not None and self.recipe.fused and self._is_plain

    @property
    def _is_plain(self) -> bool:
        """Whether there is nothing to add to, or to do before, the two products."""
        return not (self.config.linear_bias or self.config.scores_before_experts)

    def use_recipe(self, recipe: Recipe) -> None:
        """Compute both maps by a low-precision recipe from now on.

        Raises:
            ValueError: dims that the recipe cannot cut into blocks, or a backend that knows no recipes.
        """
        if self.config.backend not in ("auto", "grouped_mm"):
            raise ValueError(
                f"model.moe.backend={self.config.backend} does not compute in precision.recipe={recipe.name}; "
                "set model.moe.backend=auto"
            )
        check_dims(recipe, local(self.w_down).shape[1:], "a routed expert (model.dim x model.moe.expert_dim)")
        self.linear, self.recipe = partial(low_precision_grouped_linear, recipe=recipe), recipe
        self.config = replace(self.config, backend="grouped_mm")


def weighted_activation(h_PH: Tensor, weights_P: Tensor, activation: str) -> Tensor:
    """weight * act(gate, up) for h = [gate; up], computed in fp32 and rounded once to the dtype of h."""
    wide = torch.promote_types(h_PH.dtype, torch.float32)
    gate, up = h_PH.to(wide).chunk(2, dim=-1)
    if activation == "swiglu":
        out = F.silu(gate) * up
    elif activation == "clamped_swiglu":
        gate, up = gate.clamp(max=CLAMP_LIMIT), up.clamp(-CLAMP_LIMIT, CLAMP_LIMIT)
        out = gate * torch.sigmoid(CLAMP_SLOPE * gate) * (up + 1)
    else:
        raise ValueError(f"model.moe.activation={activation!r} is unknown; use swiglu or clamped_swiglu.")
    return (out * weights_P[:, None].to(wide)).to(h_PH.dtype)


def _per_pair(bias_EX: Tensor, offsets_E: Tensor, num_pairs: int) -> Tensor:
    """Each pair's row of a per-expert table, as a product with a one-hot matrix: its gradient has no atomics."""
    pair = torch.arange(num_pairs, device=bias_EX.device)
    expert_P = torch.searchsorted(offsets_E, pair, right=True)
    of_expert_PE = expert_P[:, None] == torch.arange(bias_EX.shape[0], device=bias_EX.device)
    return of_expert_PE.to(bias_EX.dtype) @ bias_EX


class _GatherPairs(torch.autograd.Function):
    """x[p] = rows[row of p]; the gradient sums a row's pairs in a fixed order."""

    @staticmethod
    def forward(ctx: Any, rows_RD: Tensor, slots_RK: Tensor, num_pairs: int, ends_E: Tensor | None) -> Tensor:
        ctx.save_for_backward(slots_RK)
        return _expand(rows_RD, slots_RK, num_pairs, ends_E)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return gather_sum(grads[0], ctx.saved_tensors[0]), None, None, None


class _SumPairs(torch.autograd.Function):
    """out[r] = sum of the row's pairs; the mirror of `_GatherPairs`."""

    @staticmethod
    def forward(ctx: Any, y_PD: Tensor, slots_RK: Tensor, ends_E: Tensor | None) -> Tensor:
        ctx.save_for_backward(slots_RK, ends_E)
        ctx.num_pairs = y_PD.shape[0]
        return gather_sum(y_PD, slots_RK)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        slots_RK, ends_E = ctx.saved_tensors
        return _expand(grads[0], slots_RK, ctx.num_pairs, ends_E), None, None


def _expand(rows_RD: Tensor, slots_RK: Tensor, num_pairs: int, ends_E: Tensor | None) -> Tensor:
    """Each row at its pairs; zero behind the last one, if there may be more room than pairs."""
    x_PD = expand_rows(rows_RD, slots_RK, num_pairs)
    return x_PD if ends_E is None else clear_tail_(x_PD, ends_E)
