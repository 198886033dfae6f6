"""Held-out loss: the mean over all valid tokens of a set, whatever the number of ranks, and bits per byte of its text.

Bits per byte do not depend on the tokenizer: the summed negative log-likelihood in bits, over the bytes of the text
that the predicted tokens stand for. The end-of-document token costs its bits and stands for no byte.
"""

import math
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from parallel.mesh import Mesh
from trainer.data import Batch
from trainer.loss import IGNORE_INDEX, count_valid
from trainer.step import forward, sum_over


class EvalResult(NamedTuple):
    """Mean cross-entropy in nats per token; bits per byte is None when the text's bytes are not known."""

    loss: float
    bits_per_byte: float | None
    num_tokens: int


@torch.no_grad()
def evaluate(
    model: nn.Module, batches: Iterable[Batch], mesh: Mesh, bytes_per_token_V: Tensor, document_mask: bool
) -> EvalResult:
    """Evaluate on a set of which every data rank holds equally many batches. Collective."""
    was_training = model.training
    model.eval()
    sums = torch.zeros(3, dtype=torch.float64, device=mesh.device)
    for batch in batches:
        output = forward(model, batch, mesh.device, document_mask)
        assert output.loss_sum is not None
        labels = batch.labels_BS
        num_bytes = bytes_per_token_V[labels[labels != IGNORE_INDEX]].sum()
        sums[0] += output.loss_sum
        sums[1] += int(count_valid(labels))
        sums[2] += int(num_bytes)
    # Ranks that share a sequence have each a part of its loss, but all of its labels.
    sum_over(sums[:1], mesh.data_group)
    sum_over(sums[1:], mesh.batch_group)
    model.train(was_training)
    loss_sum, num_tokens, num_bytes = sums.tolist()
    bits = loss_sum / math.log(2) / num_bytes if num_bytes else None
    return EvalResult(loss_sum / max(num_tokens, 1), bits, int(num_tokens))
