"""The whole model: equal to transformers, packing and padding without effect, names, initial values, counts."""

from dataclasses import replace
from decimal import Decimal

import pytest
import torch

from moe.config import MoEConfig
from moe.layer import BalanceScale
from tests.transformers_models import FAMILIES as TINY_FAMILIES
from tests.transformers_models import KeepDouble, V, build_pair, convert
from trainer.models.config import AttentionConfig, ModelConfig, RopeConfig
from trainer.models.families import FAMILIES, load_family
from trainer.models.transformer import Transformer, count_parameters, init_rule


def error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return ((actual - expected).norm() / expected.norm().clamp_min(1e-300)).item()


def tiny(**changes) -> ModelConfig:
    attention = AttentionConfig(num_heads=4, num_kv_heads=2, head_dim=8, qk_norm="head")
    moe = MoEConfig(num_experts=4, top_k=2, expert_dim=12, shared_expert_dim=10, backend="reference")
    defaults = {"vocab_size": 50, "dim": 16, "num_layers": 3, "num_dense_layers": 1, "ffn_dim": 20, "init_std": 0.2}
    return ModelConfig(**{**defaults, "attention": attention, "moe": moe, **changes})


def build(config: ModelConfig, dtype: torch.dtype = torch.float64, seed: int = 0) -> Transformer:
    with torch.device("meta"):
        model = Transformer(config)
    model = model.to(dtype).to_empty(device="cpu")
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            rule = init_rule(name, config)
            values = torch.randn(tensor.shape, generator=generator, dtype=torch.float64) * rule.std
            tensor.copy_(values + (rule.kind == "ones"))
    return model


@pytest.mark.parametrize("name", TINY_FAMILIES)
def test_logits_and_gradients_equal_transformers(name):
    """40 tokens: beyond window (7), chunk (12) and original length (16) of scaled RoPE. Bounds of DESIGN section 6."""
    reference, ours = build_pair(name, torch.float64)
    tokens = torch.randint(0, V, (2, 40), generator=torch.Generator().manual_seed(3))
    labels = tokens.roll(-1, dims=1)
    with KeepDouble():
        logits = reference(tokens).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    loss.backward()
    out = ours(tokens, labels_BS=labels)
    out.loss_sum.backward()
    assert error(ours(tokens).logits_BSV, logits) < 1e-10
    assert error(out.loss_sum, loss) < 1e-10
    expected = convert(reference, ours.config, gradients=True)
    actual = {name: parameter.grad for name, parameter in ours.named_parameters()}
    assert actual.keys() == expected.keys()
    for parameter, gradient in actual.items():
        assert error(gradient, expected[parameter]) < 1e-10, parameter


@pytest.mark.parametrize("name", TINY_FAMILIES)
def test_logits_equal_transformers_in_fp32(name):
    """1e-5: fp32 rounding through three layers; measured 3e-7 to 5e-7."""
    reference, ours = build_pair(name, torch.float32)
    tokens = torch.randint(0, V, (2, 40), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        assert error(ours(tokens).logits_BSV, reference(tokens).logits) < 1e-5


@pytest.mark.parametrize("name", ["deepseek_v2", "deepseek_v3"])
def test_case_41_yarn_in_mla_is_right_at_every_position(name):
    """fp64, 1e-10 at each of 40 positions. A wrong factor shows at all but the first, which sees only itself."""
    reference, ours = build_pair(name, torch.float64)
    tokens = torch.randint(0, V, (2, 40), generator=torch.Generator().manual_seed(3))
    with KeepDouble(), torch.no_grad():
        expected = reference(tokens).logits

    def errors(rope: RopeConfig) -> torch.Tensor:
        model = Transformer(replace(ours.config, rope=rope)).double()
        model.load_state_dict(ours.state_dict())
        with torch.no_grad():
            return (model(tokens).logits_BSV - expected).norm(dim=(0, 2)) / expected.norm(dim=(0, 2))

    right = ours.config.rope
    assert errors(right).max() < 1e-10
    for change in ({"factor": 4.0}, {"mscale": 0.9}, {"mscale_all_dim": 0.8}, {"original_seq_len": 4096}):
        wrong = errors(replace(right, **change))
        assert wrong[0] < 1e-10 and wrong[1:].min() > 1e-6, change


@pytest.mark.parametrize("q_lora_rank", [None, 12])
def test_mla_with_biases_equals_transformers(q_lora_rank):
    reference, ours = build_pair("deepseek_v3", torch.float64, q_lora_rank=q_lora_rank, bias=True)
    assert "layers.0.attention.wo.bias" in ours.state_dict()
    tokens = torch.randint(0, V, (2, 40), generator=torch.Generator().manual_seed(3))
    with KeepDouble(), torch.no_grad():
        assert error(ours(tokens).logits_BSV, reference(tokens).logits) < 1e-10


def test_packed_documents_in_chunks_equal_transformers():
    """Chunks count from each document's start (13 and 27 tokens, chunks of 12). Without temperatures: transformers
    takes those from the place in the row, we from the place in the document, so that packing changes nothing."""
    reference, ours = build_pair("llama4", torch.float64, attn_scale=0.0)
    tokens = torch.randint(0, V, (1, 40), generator=torch.Generator().manual_seed(3))
    ids = torch.tensor([[0] * 13 + [1] * 27])
    positions = torch.cat((torch.arange(13), torch.arange(27)))[None]
    with KeepDouble(), torch.no_grad():
        expected = reference(tokens, position_ids=positions, use_cache=False).logits
    assert error(ours(tokens, document_ids_BS=ids).logits_BSV, expected) < 1e-10
    assert error(ours(tokens).logits_BSV, expected) > 1e-3


def gradients(model: Transformer) -> dict[str, torch.Tensor]:
    found = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    return found


ATTENTIONS = {
    "gqa": AttentionConfig(num_heads=4, num_kv_heads=2, head_dim=8, qk_norm="head"),
    "sinks": AttentionConfig(
        num_heads=4, num_kv_heads=2, head_dim=8, sinks=True, bias=True, sliding_window=3, sliding_window_layers="even"
    ),
    "mla": AttentionConfig(
        kind="mla", num_heads=4, kv_lora_rank=8, q_lora_rank=6, qk_nope_head_dim=4, qk_rope_head_dim=4, v_head_dim=6
    ),
    "chunks": AttentionConfig(
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        qk_norm="l2",
        nope_every=3,
        chunk_size=4,
        temperature_scale=0.3,
        temperature_floor=2,
    ),
}


@pytest.mark.parametrize("dense", [True, False])
@pytest.mark.parametrize("kind", ATTENTIONS)
def test_packed_documents_do_not_see_each_other(kind, dense):
    """CASE 39: exact, whatever stands in the other document.

    Except that other tokens make other groups in the experts' matrix products, which moves their rounding: 1e-13.
    """
    model = build(tiny(attention=ATTENTIONS[kind], num_dense_layers=3 if dense else 0))
    tokens = torch.randint(0, 50, (1, 14))
    ids = torch.tensor([[0] * 6 + [1] * 5 + [2] * 3])
    before = model(tokens, document_ids_BS=ids).logits_BSV
    tokens[0, :6] = (tokens[0, :6] + 17) % 50
    after = model(tokens, document_ids_BS=ids).logits_BSV
    assert (before[:, 6:] - after[:, 6:]).abs().max() <= (0 if dense else 1e-13)
    assert (before[:, :6] - after[:, :6]).abs().max() > 1e-3


@pytest.mark.parametrize("kind", ATTENTIONS)
def test_packed_and_padded_equals_one_by_one(kind):
    """CASE 24: padding changes neither counts, loss nor gradients; neither does packing. fp64: 1e-12."""
    model = build(tiny(attention=ATTENTIONS[kind]))
    documents = [torch.randint(0, 50, (1, length)) for length in (6, 5)]
    labels = [document.roll(-1, dims=1) for document in documents]
    counts, loss = 0, 0.0
    for document, label in zip(documents, labels, strict=True):
        out = model(document, labels_BS=label)
        out.loss_sum.backward()
        counts, loss = counts + out.tokens_per_expert_LE, loss + out.loss_sum.detach()
    expected = gradients(model)

    padding = torch.randint(0, 50, (1, 4))
    out = model(
        torch.cat([*documents, padding], dim=1),
        labels_BS=torch.cat([*labels, torch.full((1, 4), -100)], dim=1),
        document_ids_BS=torch.tensor([[0] * 6 + [1] * 5 + [-1] * 4]),
    )
    out.loss_sum.backward()
    assert torch.equal(out.tokens_per_expert_LE, counts)
    assert error(out.loss_sum, loss) < 1e-12
    for name, gradient in gradients(model).items():
        assert gradient.isfinite().all() and error(gradient, expected[name]) < 1e-12, name


def test_a_batch_of_padding_is_finite():
    """Data ranks that have run out of evaluation text get such a batch."""
    model = build(tiny(attention=ATTENTIONS["sinks"]))
    out = model(
        torch.zeros(2, 6, dtype=torch.int64),
        labels_BS=torch.full((2, 6), -100),
        document_ids_BS=torch.full((2, 6), -1),
        balance=BalanceScale(num_tokens=10, num_sequences=2, num_micro_steps=1),
    )
    out.loss_sum.backward()
    assert out.loss_sum == 0 and out.tokens_per_expert_LE.sum() == 0
    assert all(gradient.isfinite().all() for gradient in gradients(model).values())


def test_a_token_does_not_see_the_future():
    model = build(tiny(num_dense_layers=3))
    tokens = torch.randint(0, 50, (1, 9))
    before = model(tokens).logits_BSV
    tokens[0, 5:] = (tokens[0, 5:] + 1) % 50
    after = model(tokens).logits_BSV
    assert torch.equal(before[:, :5], after[:, :5]) and not torch.equal(before[:, 5:], after[:, 5:])


def test_balancing_results_come_from_every_moe_layer():
    config = tiny()
    config.moe.aux_loss, config.moe.z_loss = 0.3, 0.2
    model = build(config)
    tokens = torch.randint(0, 50, (2, 9))
    out = model(tokens, balance=BalanceScale(num_tokens=18, num_sequences=2, num_micro_steps=1))
    assert out.tokens_per_expert_LE.shape == (2, 4) and (out.tokens_per_expert_LE.sum(1) == 18 * 2).all()
    (out.aux_loss + out.z_loss).backward()
    for layer in ("1", "2"):
        assert model.layers[layer].moe.router.weight.grad.norm() > 0
    assert out.aux_loss > 0 and out.z_loss > 0 and out.dropped == 0
    without = model(tokens)
    assert without.aux_loss == 0 and without.z_loss == 0


def test_dense_model_has_no_counts():
    out = build(tiny(num_dense_layers=3))(torch.randint(0, 50, (1, 5)))
    assert out.tokens_per_expert_LE is None and out.aux_loss == 0 and out.dropped == 0


def test_tied_embeddings_are_one_parameter():
    """The gradient of the one weight is the sum of what its two uses have when it is held twice."""
    tied, untied = build(tiny(tie_embeddings=True)), build(tiny())
    untied.load_state_dict({**tied.state_dict(), "head.weight": tied.tok_embeddings.weight})
    assert "head.weight" not in tied.state_dict()
    assert count_parameters(untied).total - count_parameters(tied).total == 50 * 16
    tokens = torch.randint(0, 50, (2, 9))
    for model in (tied, untied):
        model(tokens, labels_BS=tokens.roll(-1, dims=1)).loss_sum.backward()
    assert torch.equal(tied(tokens).logits_BSV, untied(tokens).logits_BSV)
    expected = gradients(untied)
    actual = gradients(tied)["tok_embeddings.weight"]
    assert error(actual, expected["tok_embeddings.weight"] + expected["head.weight"]) < 1e-12


def test_state_dict_names():
    config = tiny(num_layers=2)
    config.moe.expert_bias, config.moe.router_bias, config.moe.linear_bias = True, True, True
    with torch.device("meta"):
        names = set(Transformer(config).state_dict())
    attention = {f"attention.{name}.weight" for name in ("wq", "wk", "wv", "wo", "q_norm", "k_norm")}
    common = attention | {"attention_norm.weight", "ffn_norm.weight"}
    swiglu = {f"{name}.weight" for name in ("w_gate", "w_up", "w_down")}
    experts = {f"moe.experts.{name}" for name in ("w_gate_up", "w_down", "b_gate_up", "b_down")}
    moe = {"moe.router.weight", "moe.router.bias", "moe.expert_bias"} | experts | {f"moe.shared.{n}" for n in swiglu}
    expected = {"tok_embeddings.weight", "norm.weight", "head.weight"}
    expected |= {f"layers.0.{name}" for name in common | {f"feed_forward.{n}" for n in swiglu}}
    expected |= {f"layers.1.{name}" for name in common | moe}
    assert names == expected


def test_nothing_but_the_state_dict_needs_a_value():
    """A model built on the meta device has no hidden buffers to fill (RoPE tables, masks)."""
    for kind in ATTENTIONS:
        with torch.device("meta"):
            model = Transformer(tiny(attention=ATTENTIONS[kind]))
        held = {name for name, _ in [*model.named_parameters(), *model.named_buffers()]}
        assert held == set(model.state_dict())


@pytest.mark.parametrize(
    ("name", "kind", "std"),
    [
        ("tok_embeddings.weight", "normal", 0.02),
        ("head.weight", "normal", 0.02),
        ("norm.weight", "ones", 0.0),
        ("layers.0.attention_norm.weight", "ones", 0.0),
        ("layers.0.attention.kv_norm.weight", "ones", 0.0),
        ("layers.0.attention.wq.weight", "normal", 0.02),
        ("layers.0.attention.wq.bias", "zeros", 0.0),
        ("layers.0.attention.sinks", "zeros", 0.0),
        ("layers.0.attention.wo.weight", "normal", 0.02 / 4),
        ("layers.0.attention.wo.bias", "zeros", 0.0),
        ("layers.0.feed_forward.w_down.weight", "normal", 0.02 / 4),
        ("layers.0.moe.shared.w_down.weight", "normal", 0.02 / 4),
        ("layers.0.moe.experts.w_down", "normal", 0.02 / 4),
        ("layers.0.moe.experts.w_gate_up", "normal", 0.02),
        ("layers.0.moe.experts.b_down", "zeros", 0.0),
        ("layers.0.moe.router.weight", "normal", 0.02),
        ("layers.0.moe.router.bias", "zeros", 0.0),
        ("layers.0.moe.expert_bias", "zeros", 0.0),
        ("mtp.0.projection.weight", "normal", 0.02),
        ("mtp.0.embedding_norm.weight", "ones", 0.0),
        ("mtp.0.norm.weight", "ones", 0.0),
    ],
)
def test_init_rule(name, kind, std):
    rule = init_rule(name, ModelConfig(num_layers=8, init_std=0.02))
    assert rule.kind == kind and rule.std == pytest.approx(std)


def test_active_parameters_by_hand():
    config = tiny(num_layers=1, num_dense_layers=0)
    with torch.device("meta"):
        total, active = count_parameters(Transformer(config))
    expert = 3 * 16 * 12
    assert total - active == 2 * expert
    attention = 2 * 16 * 32 + 2 * 16 * 16 + 2 * 8
    assert total == 2 * 50 * 16 + attention + 3 * 16 + 4 * 16 + 4 * expert + 3 * 16 * 10


@pytest.mark.parametrize("name", FAMILIES)
def test_sizes_equal_the_published_ones(name):
    """Within one unit of the last digit that was published: authors round or cut."""
    with torch.device("meta"):
        model = Transformer(load_family(name))
    count, published = count_parameters(model), FAMILIES[name]
    figures = (
        (count.total + published.total_adds, published.total, published.total_leaves_out),
        (count.active, published.active, published.active_leaves_out),
    )
    for counted, printed, leaves_out in figures:
        counted -= sum(model.get_submodule(part).weight.numel() for part in leaves_out)
        unit = 10.0 ** Decimal(printed).as_tuple().exponent
        assert abs(counted / 1e9 - float(printed)) < unit


@pytest.mark.parametrize(
    ("name", "config_class"),
    [
        ("mixtral_8x7b", "MixtralConfig"),
        ("gpt_oss_120b", "GptOssConfig"),
        ("deepseek_v3_671b", "DeepseekV3Config"),
        ("llama4_scout", "Llama4TextConfig"),
    ],
)
def test_sizes_equal_transformers_exactly(name, config_class):
    """These classes' defaults are the published models."""
    import transformers

    with torch.device("meta"):
        theirs = transformers.AutoModelForCausalLM.from_config(getattr(transformers, config_class)())
        ours = Transformer(load_family(name))
    assert count_parameters(ours).total == sum(parameter.numel() for parameter in theirs.parameters())


def test_multi_token_prediction_has_the_published_size():
    """DeepSeek-V3's files hold 684,489,830,400 bf16 and fp8 weights (model page), embedding and head twice."""
    with torch.device("meta"):
        model = Transformer(load_family("deepseek_v3_671b"))
    everything = sum(parameter.numel() for parameter in model.parameters())
    copies = model.tok_embeddings.weight.numel() + model.head.weight.numel()
    assert everything - count_parameters(model).total == 11_610_067_968
    assert everything + copies == 684_489_830_400


def test_unknown_family_lists_the_known_ones():
    with pytest.raises(FileNotFoundError, match=r"'mistral'.*mixtral_8x7b"):
        load_family("mistral")
