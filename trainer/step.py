"""One optimizer step: the arithmetic that must not depend on the layout, in one place.

    loss = sum over all valid tokens of the global batch / their number   (+ auxiliary losses, already normalised)
         + model.mtp.loss_weight * mean over depths of the same for the tokens further ahead, by their own number

The divisor counts every data rank and every accumulation step, and is known before the first backward. Gradients are
therefore plain sums (see parallel/fsdp.py), the norm is the norm of the global gradient, and the balancing bias moves
once, by the counts of the whole batch.

Shape suffixes: L MoE layers, E experts, M depths of multi-token prediction.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from comms.symmetric_memory import exchanges, overflow_flag
from moe.layer import BalanceScale, MoE
from moe.load_balance import update_expert_bias
from parallel.mesh import Mesh
from parallel.tensor_parallel import sum_shared_gradients
from trainer.config import Config
from trainer.data import Batch
from trainer.loss import count_valid
from trainer.models.multi_token import labels_ahead
from trainer.models.transformer import ModelOutput
from trainer.optim import clip_grad_norm, ensure_gradients, update


class StepResult(NamedTuple):
    """Figures of one step, the same on every rank. Tensors stay on the device until somebody reads them."""

    # Mean cross-entropy per valid token, without the auxiliary losses.
    loss: Tensor
    aux_loss: Tensor
    z_loss: Tensor
    # Before clipping.
    grad_norm: Tensor
    # int64 (L, E) pairs of every rank and micro-batch; None for a model without MoE layers.
    tokens_per_expert_LE: Tensor | None
    # Pairs dropped by capacity.
    dropped: Tensor
    # Real (not padding) tokens.
    num_tokens: Tensor
    # False when the update was skipped.
    updated: bool
    # Mean over depths of the mean cross-entropy per valid label of the tokens further ahead, without its weight.
    mtp_loss: Tensor | None = None
    # 1 where rows or pairs found no room on any rank: the device has then left the update out. None: cannot happen.
    no_room: Tensor | None = None


def train_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Sequence[Batch],
    mesh: Mesh,
    config: Config,
    may_update: Callable[[Tensor, Tensor], bool] | None = None,
) -> StepResult:
    """Forward and backward over this rank's micro-batches, then one update.

    Args:
        batches: this rank's micro-batches, in host memory; every rank has the same number.
        may_update: asked with (loss, grad_norm) before the update; False leaves the weights as they are.
    """
    num_valid, num_tokens = global_counts(batches, mesh)
    num_further_M = global_further_counts(batches, mesh, config)
    balance = BalanceScale(num_tokens, config.train.global_batch_size, len(batches))
    sums: Tensor | None = None
    counts: Tensor | None = None
    for batch in batches:
        output = forward(model, batch, mesh.device, config.data.document_mask, balance)
        assert output.loss_sum is not None
        loss = output.loss_sum / num_valid.clamp(min=1)
        mtp_loss = _further_loss(output, num_further_M)
        (loss + config.model.mtp.loss_weight * mtp_loss + output.aux_loss + output.z_loss).backward()
        values = (loss, mtp_loss, output.aux_loss, output.z_loss, output.dropped)
        parts = torch.stack([value.detach().double() for value in values])
        sums = parts if sums is None else sums + parts
        if output.tokens_per_expert_LE is not None:
            counts = output.tokens_per_expert_LE if counts is None else counts + output.tokens_per_expert_LE
    assert sums is not None
    # Ranks of tp have the same loss, but tokens of their own between the layers' maps.
    sum_over(sums[:2], mesh.data_group)
    sum_over(sums[2:], mesh.token_group)
    if counts is not None:
        sum_over(counts, mesh.token_group)
    loss, mtp_loss, aux_loss, z_loss, dropped = sums.unbind()
    ensure_gradients(model)
    sum_shared_gradients(model, mesh)
    no_room = overflow_flag()
    grad_norm = clip_grad_norm(model, config.optim.max_grad_norm, no_room)
    updated = may_update is None or may_update(loss, _judged(grad_norm, no_room))
    # The host has waited for this step: what its exchanges met is known.
    for exchange in exchanges():
        exchange.check()
    if updated:
        update(optimizer, no_room)
        move_expert_bias(model, counts, no_room)
    optimizer.zero_grad(set_to_none=True)
    further = None if num_further_M is None else mtp_loss
    return StepResult(loss, aux_loss, z_loss, grad_norm, counts, dropped, num_tokens, updated, further, no_room)


def _judged(grad_norm: Tensor, no_room: Tensor | None) -> Tensor:
    """Gradients of what found no room may be anything, and change nothing: RoomCheck says so, and what to do."""
    return grad_norm if no_room is None else torch.where(no_room > 0, 0, grad_norm)


def forward(
    model: nn.Module,
    batch: Batch,
    device: torch.device,
    document_mask: bool,
    balance: BalanceScale | None = None,
) -> ModelOutput:
    """Run the model on a batch (in host memory) with labels. Without `document_mask` a sequence is one document.

    Padding is no document of either kind: it is never routed or counted.
    """
    has_documents = document_mask or bool((batch.document_ids_BS < 0).any())
    max_documents = batch.max_documents if has_documents else None
    batch = batch.to(device)
    document_ids_BS = None
    if has_documents:
        document_ids_BS = batch.document_ids_BS if document_mask else batch.document_ids_BS.clamp(max=0)
    return model(
        batch.tokens_BS,
        labels_BS=batch.labels_BS,
        positions_BS=batch.positions_BS if document_mask else None,
        document_ids_BS=document_ids_BS,
        balance=balance,
        max_documents=max_documents,
    )


def global_counts(batches: Sequence[Batch], mesh: Mesh) -> tuple[Tensor, Tensor]:
    """Valid labels and real tokens of the global batch, over all batch ranks and accumulation steps."""
    valid = torch.stack([count_valid(batch.labels_BS) for batch in batches]).sum()
    tokens = torch.stack([(batch.document_ids_BS >= 0).sum() for batch in batches]).sum()
    counts = _without_waiting(torch.stack([valid, tokens]), mesh.device)
    sum_over(counts, mesh.batch_group)
    return counts[0], counts[1]


def global_further_counts(batches: Sequence[Batch], mesh: Mesh, config: Config) -> Tensor | None:
    """(M,) valid labels of the global batch at each depth of multi-token prediction; None without it."""
    if config.model.mtp.depth == 0:
        return None
    counts_M = torch.zeros(config.model.mtp.depth, dtype=torch.int64)
    for batch in batches:
        ids_BS = batch.document_ids_BS if config.data.document_mask else None
        for depth in range(len(counts_M)):
            counts_M[depth] += count_valid(labels_ahead(batch.labels_BS, ids_BS, depth + 1))
    counts_M = _without_waiting(counts_M, mesh.device)
    sum_over(counts_M, mesh.batch_group)
    return counts_M


def _without_waiting(counts: Tensor, device: torch.device) -> Tensor:
    """On the device. From pageable memory the host would wait there until the update of the step before is done."""
    return (counts.pin_memory() if device.type == "cuda" else counts).to(device, non_blocking=True)


def _further_loss(output: ModelOutput, num_further_M: Tensor | None) -> Tensor:
    """This micro-batch's part of the mean over depths of the mean losses further ahead."""
    if num_further_M is None:
        return output.aux_loss.new_zeros(())
    assert output.mtp_loss_sums_M is not None, "the model is not in training mode"
    return (output.mtp_loss_sums_M / num_further_M.clamp(min=1)).mean()


def sum_over(tensor: Tensor, group: dist.ProcessGroup | None) -> None:
    """In place, over the ranks of a group; None: this rank alone."""
    if group is not None:
        dist.all_reduce(tensor, group=group)


def move_expert_bias(model: nn.Module, counts_LE: Tensor | None, skip: Tensor | None = None) -> None:
    """Update the balancing bias of every MoE layer that has one, from the counts of the whole optimizer step.

    `skip`: as `trainer.optim.update` has it.
    """
    layers = [module for module in model.modules() if isinstance(module, MoE)]
    for index, layer in enumerate(layers):
        if layer.expert_bias is not None and layer.config.bias_update_rate:
            assert counts_LE is not None
            rate = layer.config.bias_update_rate
            bias_E = update_expert_bias(layer.expert_bias, counts_LE[index], rate)
            layer.expert_bias.copy_(bias_E if skip is None else torch.where(skip > 0, layer.expert_bias, bias_E))
