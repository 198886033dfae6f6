"""Multi-token prediction: what lies further ahead of each token than the next one.

DeepSeek-V3 (arXiv:2412.19437, section 2.2) trains `depth` more blocks after the last one. At depth k, token i sees its
state (of depth k - 1, or of the model) and the token i + k, and predicts the token i + k + 1. So a label at depth k is
the ordinary label k places on, if that place still belongs to the same document; the tokens without one (the last k of
each document) are to depth k what padding is to the model.

Shapes: B batch, S sequence.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from trainer.loss import IGNORE_INDEX
from trainer.models.inner_attention import document_starts


def ahead(x_BS: Tensor, steps: int, fill: int) -> Tensor:
    """What stands `steps` places on; `fill` beyond the end of the sequence."""
    steps = min(steps, x_BS.size(1))
    return F.pad(x_BS[:, steps:], (0, steps), value=fill)


def same_document_ahead(like_BS: Tensor, document_ids_BS: Tensor | None, steps: int) -> Tensor:
    """True where the token `steps` places on belongs to the same document: a bool tensor shaped like `like_BS`.

    document_ids: as for Transformer.forward; None means that each sequence is one document.
    """
    if document_ids_BS is None:
        return ahead(torch.ones_like(like_BS, dtype=torch.int64), steps, 0).bool()
    runs_BS = document_starts(document_ids_BS).cumsum(dim=1)
    return (runs_BS == ahead(runs_BS, steps, 0)) & (document_ids_BS >= 0)


def labels_ahead(labels_BS: Tensor, document_ids_BS: Tensor | None, steps: int) -> Tensor:
    """Labels of the prediction at depth `steps`: -100 where the document ends before."""
    within_BS = same_document_ahead(labels_BS, document_ids_BS, steps)
    return ahead(labels_BS, steps, IGNORE_INDEX).masked_fill(~within_BS, IGNORE_INDEX)
