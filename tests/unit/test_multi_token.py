"""Multi-token prediction against a written-out reference, and against transformers' drafting module.

The reference knows no masks and no packing: each document alone, each depth on a sequence cut by one token more.
"""

from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from moe.layer import BalanceScale
from tests.transformers_models import E, KeepDouble, V, build_pair
from tests.transformers_models import K as TOP_K
from tests.transformers_models import convert as convert_main
from tests.unit.test_transformer import ATTENTIONS, build, error, gradients, tiny
from trainer.models.config import ModelConfig, MultiTokenConfig
from trainer.models.multi_token import ahead, labels_ahead, same_document_ahead
from trainer.models.transformer import Transformer, count_parameters

DEPTH = 2
IDS = torch.tensor([[0, 0, 0, 1, 1, 0, 0, 0, -1, -1]])


def tiny_mtp(attention: str = "gqa", **changes) -> ModelConfig:
    return tiny(attention=ATTENTIONS[attention], mtp=MultiTokenConfig(depth=DEPTH), **changes)


def rms(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def reference_losses(model: Transformer, tokens: torch.Tensor, labels: torch.Tensor) -> list[torch.Tensor]:
    """Summed losses at depths 1, 2, ... of one document: tokens and labels are (S,), -100 is not counted.

    h_i of depth k-1 and the embedding of token i+k give h_i of depth k, which predicts token i+k+1 = labels[i+k].
    """
    eps, weights = model.config.norm_eps, dict(model.named_parameters())
    embeddings, head = weights["tok_embeddings.weight"], model.head.weight
    h = states(model, tokens[None])[0]
    losses = []
    for k in range(1, model.config.mtp.depth + 1):
        parameters = {name.split(".", 2)[2]: p for name, p in weights.items() if name.startswith(f"mtp.{k - 1}.")}
        length = len(tokens) - k
        if length < 1:
            losses.append(h.new_zeros(()))
            continue
        e = rms(embeddings[tokens[k:]], parameters["embedding_norm.weight"], eps)
        previous = rms(h[:length], parameters["hidden_norm.weight"], eps)
        x = torch.cat((e, previous), dim=-1) @ parameters["projection.weight"].T
        x = block_output(model, k, x)
        h = rms(x, parameters["norm.weight"], eps)
        losses.append(F.cross_entropy(h @ head.T, labels[k:], ignore_index=-100, reduction="sum"))
    return losses


def states(model: Transformer, tokens_1S: torch.Tensor) -> torch.Tensor:
    """The normalised states that the head takes."""
    kept = []
    hook = model.norm.register_forward_hook(lambda _module, _inputs, output: kept.append(output))
    model(tokens_1S)
    hook.remove()
    return kept[0]


def block_output(model: Transformer, depth: int, x_SD: torch.Tensor) -> torch.Tensor:
    from trainer.models.inner_attention import plan_sequences

    plan = plan_sequences(x_SD[None], model.config.attention)
    return model.layers[str(model.config.num_layers + depth - 1)](x_SD[None], plan)[0][0]


def nonzero_gradients(model: Transformer) -> dict[str, torch.Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None and p.grad.norm() > 0}


def test_places_ahead_by_hand():
    tokens = torch.arange(10)[None]
    assert ahead(tokens, 3, -7).tolist() == [[3, 4, 5, 6, 7, 8, 9, -7, -7, -7]]
    assert ahead(tokens, 12, 0).tolist() == [[0] * 10]
    labels = torch.tensor([[1, 2, 30, 4, 50, 6, 7, 80, -100, -100]])
    assert labels_ahead(labels, IDS, 1).tolist() == [[2, 30, -100, 50, -100, 7, 80, -100, -100, -100]]
    assert labels_ahead(labels, IDS, 2).tolist() == [[30, -100, -100, -100, -100, 80, -100, -100, -100, -100]]
    assert same_document_ahead(tokens, IDS, 1).nonzero()[:, 1].tolist() == [0, 1, 3, 5, 6]
    apart = torch.tensor([[0, 1, 0, -1, 0]])
    assert not same_document_ahead(apart, apart, 2).any(), "equal ids apart are different documents"
    assert same_document_ahead(tokens, None, 4).nonzero()[:, 1].tolist() == list(range(6))


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_packed_documents_equal_the_reference_one_by_one(attention):
    """Losses at each depth and every gradient, with prompts, padding and a document too short for depth 2; fp64."""
    model = build(tiny_mtp(attention))
    documents = [torch.randint(0, 50, (length,)) for length in (7, 2, 6)]
    labels = [document.roll(-1) for document in documents]
    labels[0][:2] = -100
    expected = torch.zeros(DEPTH, dtype=torch.float64)
    for document, label in zip(documents, labels, strict=True):
        losses = torch.stack(reference_losses(model, document, label))
        (losses[0] + 3 * losses[1]).backward()
        expected += losses.detach()
    expected_gradients = nonzero_gradients(model)
    model.zero_grad(set_to_none=True)

    out = model(
        torch.cat([*documents, torch.randint(0, 50, (3,))])[None],
        labels_BS=torch.cat([*labels, torch.full((3,), -100)])[None],
        document_ids_BS=torch.tensor([[0] * 7 + [1] * 2 + [2] * 6 + [-1] * 3]),
    )
    (out.mtp_loss_sums_M[0] + 3 * out.mtp_loss_sums_M[1]).backward()
    assert error(out.mtp_loss_sums_M, expected) < 1e-12
    actual = nonzero_gradients(model)
    assert {"tok_embeddings.weight", "head.weight", "layers.0.attention.wo.weight"} <= actual.keys()
    assert actual.keys() == expected_gradients.keys()
    for name, gradient in actual.items():
        assert error(gradient, expected_gradients[name]) < 1e-11, name


def test_tokens_without_a_token_ahead_are_not_routed():
    """They are what padding is to the model: 15 real tokens, of which 12 and 9 have a token 1 and 2 ahead."""
    config = tiny_mtp()
    config.moe.aux_loss = 0.1
    model = build(config)
    ids = torch.tensor([[0] * 7 + [1] * 2 + [2] * 6 + [-1] * 3])
    tokens = torch.randint(0, 50, (1, 18))
    labels = tokens.roll(-1, dims=1)
    balance = BalanceScale(num_tokens=15, num_sequences=1, num_micro_steps=1)
    out = model(tokens, labels_BS=labels, document_ids_BS=ids, balance=balance)
    k = config.moe.top_k
    assert out.tokens_per_expert_LE.sum(dim=1).tolist() == [15 * k, 15 * k, 12 * k, 9 * k]
    out.aux_loss.backward()
    assert all(model.layers[str(layer)].moe.router.weight.grad.norm() > 0 for layer in (1, 2, 3, 4))


def test_only_training_predicts_further():
    model = build(tiny_mtp())
    tokens = torch.randint(0, 50, (2, 9))
    labels = tokens.roll(-1, dims=1)
    trained = model(tokens, labels_BS=labels)
    assert model(tokens).mtp_loss_sums_M is None
    model.eval()
    evaluated = model(tokens, labels_BS=labels)
    assert evaluated.mtp_loss_sums_M is None and evaluated.tokens_per_expert_LE.shape[0] == 2
    assert torch.equal(evaluated.loss_sum, trained.loss_sum)
    without = build(replace(model.config, mtp=MultiTokenConfig()))
    names = {name for name in model.state_dict() if not name.startswith(("mtp.", "layers.3.", "layers.4."))}
    assert set(without.state_dict()) == names
    assert count_parameters(without) == count_parameters(model)


def test_tied_heads_are_shared_too():
    model = build(tiny_mtp(tie_embeddings=True))
    tokens = torch.randint(0, 50, (1, 9))
    model(tokens, labels_BS=tokens.roll(-1, dims=1)).mtp_loss_sums_M.sum().backward()
    assert gradients(model)["tok_embeddings.weight"].norm() > 0


GLUE = {"enorm": "embedding_norm", "hnorm": "hidden_norm", "eh_proj": "projection", "post_norm": "norm"}


def test_equals_transformers_drafting_module():
    """DeepSeek-V3's module in transformers, which drafts tokens with it: states at each depth give our losses.

    Two depths, although the published model has one: transformers, too, hands normalised states on.
    """
    from transformers.modeling_layers import MtpModel

    reference, ours = build_pair("deepseek_v3", torch.float64)
    reference.config.num_nextn_predict_layers = DEPTH
    drafting = MtpModel(reference, DEPTH)
    ours_mtp = Transformer(replace(ours.config, mtp=MultiTokenConfig(depth=DEPTH))).double()
    ours_mtp.load_state_dict(ours.state_dict(), strict=False)
    load_drafting(ours_mtp, drafting)

    tokens = torch.randint(0, V, (2, 40), generator=torch.Generator().manual_seed(3))
    labels = tokens.roll(-1, dims=1)
    labels[:, -1] = -100
    out = ours_mtp(tokens, labels_BS=labels)
    with KeepDouble(), torch.no_grad():
        h = reference.model(tokens).last_hidden_state
        for depth in range(1, DEPTH + 1):
            length = 40 - depth
            positions = torch.arange(length)[None]
            h = drafting.forward_layer(depth - 1, h[:, :length], positions, None, input_ids=tokens[:, depth:])
            logits = drafting.shared_head(h)
            expected = F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, depth + 1 :].flatten(), reduction="sum")
            assert error(out.mtp_loss_sums_M[depth - 1], expected) < 1e-10, depth
    assert out.tokens_per_expert_LE.shape == (2 + DEPTH, E)
    assert out.tokens_per_expert_LE.sum(dim=1).tolist() == [2 * length * TOP_K for length in (40, 40, 39, 38)]


def load_drafting(model: Transformer, drafting: torch.nn.Module) -> None:
    """Random weights, under transformers' names and under ours."""
    generator = torch.Generator().manual_seed(5)
    # Not the tables of RoPE, which the two models share and which stay fp32.
    drafting.layers.double().eval()
    tensors = [*drafting.layers.named_parameters(), *drafting.layers.named_buffers()]
    with torch.no_grad():
        for name, tensor in tensors:
            centre, spread = (1.0, 0.2) if "norm" in name else (0.0, 0.15)
            tensor.copy_(centre + spread * torch.randn(tensor.shape, generator=generator, dtype=torch.float64))
    for depth, layer in enumerate(drafting.layers):
        block = f"layers.{model.config.num_layers + depth}."
        found = {block + name: tensor for name, tensor in convert_main(layer.mtp_block, model.config).items()}
        found |= {f"mtp.{depth}.{ours}.weight": getattr(layer, theirs).weight for theirs, ours in GLUE.items()}
        missing, unexpected = model.load_state_dict(found, strict=False)
        assert not unexpected and not [name for name in missing if name.startswith((block, f"mtp.{depth}."))]
