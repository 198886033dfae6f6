"""Planted faults: the mistakes that trainers of this kind have really made, each as a context manager by name.

A parity check that has never failed proves nothing. Each fault is active in the worker processes while a layout is
traced (never in the one-process reference) and must be reported under the name of what it breaks.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn

import comms.all_to_all
import moe.layer
import parallel.fsdp
import parallel.init
import trainer.step


@contextmanager
def gradient_scaled_by_two() -> Iterator[None]:
    """One matrix's gradient is doubled after backward (a reduction that happens twice)."""
    original = trainer.step.ensure_gradients

    def ensure(model: nn.Module) -> None:
        original(model)
        for name, parameter in model.named_parameters():
            if name == "layers.0.attention.wq.weight":
                parameter.grad.mul_(2)

    with patch.object(trainer.step, "ensure_gradients", ensure):
        yield


@contextmanager
def router_gradient_dropped() -> Iterator[None]:
    """The routing weights are detached before they cross the wire: the loss is right, the router does not learn."""
    original = moe.layer.dispatch

    def dispatch(plan: Any, x_TD: Tensor, weights_TK: Tensor, ids_TK: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return original(plan, x_TD, weights_TK.detach(), ids_TK)

    with patch.object(moe.layer, "dispatch", dispatch):
        yield


@contextmanager
def expert_rows_swapped() -> Iterator[None]:
    """Two rows of the last rank change places between dispatch and the experts."""
    original = moe.layer.dispatch

    def dispatch(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
        rows_RD, weights_RK, ids_RK = original(*args)
        if dist.get_rank() == dist.get_world_size() - 1:
            rows_RD = rows_RD[torch.tensor([1, 0, *range(2, rows_RD.shape[0])])]
        return rows_RD, weights_RK, ids_RK

    with patch.object(moe.layer, "dispatch", dispatch):
        yield


@contextmanager
def experts_swapped_on_a_rank() -> Iterator[None]:
    """A rank takes its neighbour's experts for its own (an off-by-one in who owns what)."""
    original = moe.layer.GroupedExperts.forward

    def forward(self: Any, rows_RD: Tensor, ids_RK: Tensor, weights_RK: Tensor, num_pairs: int) -> Tensor:
        last = self.w_down.to_local().shape[0] - 1
        return original(self, rows_RD, torch.where(ids_RK >= 0, last - ids_RK, ids_RK), weights_RK, num_pairs)

    with patch.object(moe.layer.GroupedExperts, "forward", forward):
        yield


@contextmanager
def counts_doubled() -> Iterator[None]:
    """Every pair is counted twice, as a counter inside a recomputed forward would."""
    original = moe.layer.count_tokens
    with patch.object(moe.layer, "count_tokens", lambda ids, num_experts: 2 * original(ids, num_experts)):
        yield


@contextmanager
def loss_of_a_rank_weighted_wrongly() -> Iterator[None]:
    """Rank 0's tokens count half as much again."""
    original = trainer.step.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        output = original(*args, **kwargs)
        return output._replace(loss_sum=output.loss_sum * 1.5) if dist.get_rank() == 0 else output

    with patch.object(trainer.step, "forward", forward):
        yield


@contextmanager
def mean_of_rank_means() -> Iterator[None]:
    """Each rank divides by its own valid tokens times the number of ranks, instead of by those of the whole batch."""

    def counts(batches: Any, mesh: Any) -> tuple[Tensor, Tensor]:
        valid = sum((batch.labels_BS != -100).sum() for batch in batches)
        tokens = sum((batch.document_ids_BS >= 0).sum() for batch in batches)
        return valid * mesh.batch_size, tokens * mesh.batch_size

    with patch.object(trainer.step, "global_counts", counts):
        yield


@contextmanager
def gradients_averaged() -> Iterator[None]:
    """FSDP divides by its group size, as it does when nobody tells it otherwise."""

    # gloo knows no average: this is its sum, divided.
    def average(module: Any) -> None:
        sizes = {group.mesh_info.shard_mesh_size for group in module._get_fsdp_state()._fsdp_param_groups}
        module.set_gradient_divide_factor(float(max(sizes, default=1)))
        module.set_force_sum_reduction_for_comms(True)

    with patch.object(parallel.fsdp, "sum_gradients", average):
        yield


@contextmanager
def norm_misses_other_shards() -> Iterator[None]:
    """The gradient norm is that of this rank's shards."""

    def clip(model: nn.Module, max_norm: float) -> Tensor:
        shards = [parameter.grad.to_local() for parameter in model.parameters()]
        total = torch.stack([shard.square().sum() for shard in shards]).sum().sqrt()
        dist.broadcast(total, 0)
        return total

    with patch.object(trainer.step, "clip_grad_norm", clip):
        yield


@contextmanager
def local_counts_in_auxiliary_loss() -> Iterator[None]:
    """The batch-level auxiliary loss uses each rank's own counts (scaled up) instead of the batch's."""
    with patch.object(moe.layer, "sum_over_ranks", lambda counts, group_name: counts * dist.get_world_size()):
        yield


@contextmanager
def last_rank_not_combined() -> Iterator[None]:
    """The rows that come back from the last rank are not added."""
    original = comms.all_to_all.gather_sum

    def gather_sum(rows_SD: Tensor, slots_TN: Tensor) -> Tensor:
        slots_TN = slots_TN.clone()
        slots_TN[:, -1] = -1
        return original(rows_SD, slots_TN)

    with patch.object(comms.all_to_all, "gather_sum", gather_sum):
        yield


@contextmanager
def padding_routed() -> Iterator[None]:
    """Padding tokens are routed and counted like real ones."""
    original = moe.layer.MoE.forward

    def forward(self: Any, x_BSD: Tensor, token_mask_BS: Tensor | None = None, scale: Any = None) -> Any:
        return original(self, x_BSD, None, scale)

    with patch.object(moe.layer.MoE, "forward", forward):
        yield


@contextmanager
def initial_weights_depend_on_the_rank() -> Iterator[None]:
    """Every rank seeds its generators differently."""
    original = parallel.init.draw

    def draw(shape: Any, std: float, name: str, seed: int, device: Any) -> Tensor:
        return original(shape, std, name, seed + dist.get_rank(), device)

    with patch.object(parallel.init, "draw", draw):
        yield


@contextmanager
def none() -> Iterator[None]:
    """No fault at all: the control."""
    yield


FAULTS: dict[str, Callable[[], AbstractContextManager[None]]] = {
    fault.__name__: fault
    for fault in (
        none,
        gradient_scaled_by_two,
        router_gradient_dropped,
        expert_rows_swapped,
        experts_swapped_on_a_rank,
        counts_doubled,
        loss_of_a_rank_weighted_wrongly,
        mean_of_rank_means,
        gradients_averaged,
        norm_misses_other_shards,
        local_counts_in_auxiliary_loss,
        last_rank_not_combined,
        padding_routed,
        initial_weights_depend_on_the_rank,
    )
}
