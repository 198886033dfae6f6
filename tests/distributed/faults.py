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
import comms.collectives
import moe.experts
import moe.layer
import moe.router
import parallel.fsdp
import parallel.init
import parallel.ring_attention
import trainer.build
import trainer.optim
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

    def dispatch(plan: Any, x_TD: Tensor, weights_TK: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
        return original(plan, x_TD, weights_TK.detach(), *rest)

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

    def forward(self: Any, rows_RD: Tensor, ids_RK: Tensor, *rest: Any) -> Tensor:
        last = self.w_down.to_local().shape[0] - 1
        return original(self, rows_RD, torch.where(ids_RK >= 0, last - ids_RK, ids_RK), *rest)

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

    def clip(model: nn.Module, max_norm: float, _: Tensor | None = None) -> Tensor:
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
def shared_gradients_not_summed() -> Iterator[None]:
    """A missing reduction: the tp ranks keep the parts that they found of gradients of shared weights."""
    with patch.object(trainer.step, "sum_shared_gradients", lambda model, mesh: None):
        yield


@contextmanager
def shared_gradients_summed_twice() -> Iterator[None]:
    """A doubled reduction: the same sum, once too often."""
    original = trainer.step.sum_shared_gradients

    def twice(model: nn.Module, mesh: Any) -> None:
        original(model, mesh)
        original(model, mesh)

    with patch.object(trainer.step, "sum_shared_gradients", twice):
        yield


@contextmanager
def gathered_input_keeps_its_own_gradient() -> Iterator[None]:
    """What `to_local` on a gathered input does: each rank takes its part of its own gradient, and no sum."""

    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        group = comms.collectives._resolve_process_group(ctx.group_name)
        return grads[0].chunk(group.size(), dim=ctx.dim)[group.rank()].contiguous(), None, None

    with patch.object(comms.collectives._Gather, "backward", staticmethod(backward)):
        yield


@contextmanager
def router_out_of_sync() -> Iterator[None]:
    """The last rank's router sends its tokens to the experts that the others find worst."""
    original = moe.router._choose

    def choose(logits_TE: Tensor, scores_TE: Tensor, *rest: Any) -> Tensor:
        sign = -1 if dist.get_rank() == dist.get_world_size() - 1 else 1
        return original(sign * logits_TE, sign * scores_TE, *rest)

    with patch.object(moe.router, "_choose", choose):
        yield


@contextmanager
def router_copies_differ() -> Iterator[None]:
    """The last rank's copy of the first router has one weight of its own from the start."""
    original = trainer.build.parallelize

    def parallelize(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        choice = original(model, *args, **kwargs)
        if dist.get_rank() == dist.get_world_size() - 1:
            with torch.no_grad():
                model.layers["0"].moe.router.weight.to_local()[0, 0] += 1e-9
        return choice

    with patch.object(trainer.build, "parallelize", parallelize):
        yield


@contextmanager
def clipped_by_own_norm() -> Iterator[None]:
    """Each rank scales its gradients by a factor from the norm of its own shards; the norm that is told is right."""
    original = trainer.step.clip_grad_norm

    def clip(model: nn.Module, max_norm: float, _: Tensor | None = None) -> Tensor:
        norm = original(model, 0.0)
        shards = [parameter.grad.to_local() for parameter in model.parameters()]
        own = torch.stack([shard.square().sum() for shard in shards]).sum().sqrt()
        for shard in shards if max_norm > 0 else []:
            shard.mul_((max_norm / own).clamp(max=1.0))
        return norm

    with patch.object(trainer.step, "clip_grad_norm", clip):
        yield


@contextmanager
def norm_misses_split_weights() -> Iterator[None]:
    """The norm takes what tensor parallelism splits for copies, of which one counts."""
    original = trainer.optim._num_copies

    def copies(gradient: Any) -> int:
        axes = zip(gradient.device_mesh.mesh_dim_names, gradient.device_mesh.shape, strict=True)
        return original(gradient) * dict(axes).get("tp", 1)

    with patch.object(trainer.optim, "_num_copies", copies):
        yield


@contextmanager
def merge_is_one_block_behind() -> Iterator[None]:
    """The log-sum-exp by which blocks of a ring are merged lacks the block that came last."""
    original = parallel.ring_attention.merge

    def merge(out: Tensor, lse: Tensor, tile: Any, *part: Any) -> None:
        own = lse[..., tile.q_row : tile.q_row + tile.num_q]
        before = own.clone()
        original(out, lse, tile, *part)
        if bool(torch.isfinite(before).all()):
            own.copy_(before)

    with patch.object(parallel.ring_attention, "merge", merge):
        yield


@contextmanager
def weight_cache_is_stale() -> Iterator[None]:
    """The experts compute with the weights of their first forward, whatever the optimizer has done since."""
    original = moe.experts.local
    first: dict[int, Tensor] = {}

    def cached(weight: Any) -> Tensor:
        # The parameter's address outlives its memory, which FSDP frees after use.
        now = original(weight)
        stale = first.setdefault(id(weight), now.detach().clone())
        return now + (stale - now).detach()

    with patch.object(moe.experts, "local", cached):
        yield


@contextmanager
def auxiliary_gradient_dropped() -> Iterator[None]:
    """The auxiliary loss is told, and taught to nobody."""
    original = moe.layer.batch_aux_loss
    with patch.object(moe.layer, "batch_aux_loss", lambda *args: original(*args).detach()):
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
        shared_gradients_not_summed,
        shared_gradients_summed_twice,
        gathered_input_keeps_its_own_gradient,
        router_out_of_sync,
        router_copies_differ,
        clipped_by_own_norm,
        norm_misses_split_weights,
        merge_is_one_block_behind,
        weight_cache_is_stale,
        auxiliary_gradient_dropped,
    )
}
