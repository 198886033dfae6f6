"""Running a model on a batch: what becomes of padding."""

import pytest
import torch
from torch import Tensor, nn

from tests.distributed.tiny_models import QWEN3
from trainer.data import Batch
from trainer.models.transformer import Transformer
from trainer.step import forward

PADDING = -1


@pytest.fixture(scope="module")
def model() -> nn.Module:
    model = Transformer(QWEN3)
    with torch.no_grad():
        generator = torch.Generator().manual_seed(0)
        for parameter in model.parameters():
            parameter.normal_(std=0.1, generator=generator)
    return model


def batch_with(document_ids: list[int]) -> Batch:
    ids_BS = torch.tensor([document_ids])
    tokens_BS = torch.arange(len(document_ids))[None]
    labels_BS = torch.where(ids_BS == PADDING, -100, tokens_BS + 1)
    positions_BS = torch.arange(len(document_ids))[None]
    return Batch(tokens_BS, labels_BS, positions_BS, ids_BS, torch.tensor([0]))


def counts_and_loss(model: nn.Module, document_ids: list[int], document_mask: bool) -> tuple[Tensor, float]:
    with torch.no_grad():
        output = forward(model, batch_with(document_ids), torch.device("cpu"), document_mask)
    assert output.tokens_per_expert_LE is not None and output.loss_sum is not None
    return output.tokens_per_expert_LE, float(output.loss_sum)


@pytest.mark.parametrize("document_mask", [True, False])
def test_case_24_padding_is_neither_routed_nor_counted(model: nn.Module, document_mask: bool) -> None:
    """The padded batch equals the one without padding; 1e-5: the mask may take another attention kernel, in fp32."""
    counts, loss = counts_and_loss(model, [0, 0, 0, 0, PADDING, PADDING], document_mask)
    expected, expected_loss = counts_and_loss(model, [0, 0, 0, 0], document_mask)
    assert torch.equal(counts, expected) and int(counts[0].sum()) == 4 * QWEN3.moe.top_k
    assert loss == pytest.approx(expected_loss, rel=1e-5)


def test_without_the_mask_documents_see_each_other_beside_padding_too(model: nn.Module) -> None:
    _, one = counts_and_loss(model, [0, 0, 0, 0, PADDING], document_mask=False)
    _, two = counts_and_loss(model, [0, 0, 1, 1, PADDING], document_mask=False)
    _, apart = counts_and_loss(model, [0, 0, 1, 1, PADDING], document_mask=True)
    assert one == two != apart
