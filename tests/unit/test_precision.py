"""precision.*: what is converted, what is told, and what is refused before anything has memory."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from moe.experts import GroupedExperts
from moe.low_precision_linear import LowPrecisionLinear
from parallel.config import ParallelConfig
from tests.distributed.tiny_models import DEEPSEEK, QWEN3
from trainer.config import Config, PrecisionConfig
from trainer.meta_model import meta_model
from trainer.models.config import ModelConfig
from trainer.precision import apply_precision, choose_linears, linear_names
from trainer.validate import validate

CPU = torch.device("cpu")
# Sizes that divide by 32: MLA, a dense layer, then experts with a shared one.
MLA = replace(
    DEEPSEEK,
    ffn_dim=64,
    attention=replace(DEEPSEEK.attention, q_lora_rank=32, qk_nope_head_dim=12, v_head_dim=8),
    moe=replace(DEEPSEEK.moe, expert_dim=32, shared_expert_dim=32),
)
GQA = replace(QWEN3, moe=replace(QWEN3.moe, expert_dim=32))


def converted(model: ModelConfig, **settings) -> tuple[nn.Module, list[str]]:
    built = meta_model(Config(model=model))
    conversion = apply_precision(built, PrecisionConfig(**settings), CPU)
    assert conversion is not None
    names = [name for name, module in built.named_modules() if isinstance(module, LowPrecisionLinear)]
    assert names == conversion.linears
    return built, names


def test_experts_alone_by_default() -> None:
    model, names = converted(MLA, recipe="mxfp8")
    assert names == []
    experts = [module for module in model.modules() if isinstance(module, GroupedExperts)]
    assert [str(module.linear.keywords["recipe"]) for module in experts] == ["mxfp8: exact mode on the CPU"]


def test_everything_is_told_in_one_line() -> None:
    settings = PrecisionConfig(recipe="fp8_blockwise", linears=["*.wq*", "*.shared.*"])
    conversion = apply_precision(meta_model(Config(model=MLA)), settings, CPU)
    assert str(conversion) == (
        "fp8_blockwise: portable mode on the CPU, weight gradients in bf16; layers.*.moe.experts (1), "
        "layers.*.attention.wq_a (2), layers.*.attention.wq_b (2), layers.*.moe.shared.w_gate (1), "
        "layers.*.moe.shared.w_up (1), layers.*.moe.shared.w_down (1)"
    )
    only_experts = apply_precision(meta_model(Config(model=GQA)), PrecisionConfig(recipe="mxfp8"), CPU)
    assert str(only_experts) == "mxfp8: exact mode on the CPU; layers.*.moe.experts (2)"


def test_names_and_parameters_stay() -> None:
    plain = meta_model(Config(model=GQA))
    model, names = converted(GQA, recipe="mxfp8", linears=["*"])
    assert names == ["layers.0.attention.wq", "layers.1.attention.wq"]
    assert [(n, p.shape, p.dtype) for n, p in model.named_parameters()] == [
        (n, p.shape, p.dtype) for n, p in plain.named_parameters()
    ]


def test_no_pattern_reaches_router_embedding_or_head() -> None:
    model, names = converted(GQA, recipe="fp8_blockwise", linears=["*"], linears_exclude=[])
    assert names == linear_names(model) != []
    assert {name.split(".")[-1] for name in names} == {"wq", "wk", "wv", "wo"}
    for path in ("tok_embeddings", "head", "layers.0.moe.router"):
        assert not isinstance(model.get_submodule(path), nn.Linear)


def test_other_recipes_convert_nothing() -> None:
    assert apply_precision(meta_model(Config(model=GQA)), PrecisionConfig(recipe="bf16"), CPU) is None


NAMES = [f"layers.{layer}.{name}" for layer in (0, 1) for name in ("attention.wq", "attention.wk", "shared.w_up")]


@pytest.mark.parametrize(
    ("include", "exclude", "words"),
    [
        (["*.wqq"], [], ["precision.linears: '*.wqq' matches no dense linear", "layers.*.attention.wq"]),
        (["layers.*.atention.wq"], [], ["did you mean layers.*.attention.wq"]),
        (["*.wq", "head"], [], ["'head' matches no dense linear"]),
        (["*"], ["*.wx"], ["precision.linears_exclude: '*.wx' matches no dense linear"]),
        (["*.wk"], ["*.wk"], ["everything that '*.wk' matches is left out by precision.linears_exclude=[*.wk]"]),
    ],
)
def test_case_64_a_pattern_that_finds_nothing_is_a_mistake(include, exclude, words) -> None:
    with pytest.raises(ValueError) as caught:
        choose_linears(NAMES, include, exclude)
    assert all(word in str(caught.value) for word in words), caught.value


def test_the_default_exclusion_names_linears_of_every_kind_of_model() -> None:
    assert choose_linears(NAMES, ["*"], PrecisionConfig().linears_exclude) == [
        name for name in NAMES if not name.endswith("wk")
    ]


def test_case_64_a_recipe_that_converts_nothing_is_a_mistake() -> None:
    dense = replace(MLA, num_dense_layers=2)
    with pytest.raises(ValueError, match=r"precision.recipe=mxfp8 converts nothing: .* precision.linears is empty"):
        converted(dense, recipe="mxfp8")
    assert len(converted(dense, recipe="mxfp8", linears=["*feed_forward*"])[1]) == 6


def test_dims_that_do_not_fit_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"multiples of 32, and a routed expert .* is 32 x 16 on each rank"):
        converted(QWEN3, recipe="mxfp8")
    narrow = replace(MLA, ffn_dim=48)
    with pytest.raises(ValueError, match=r"layers.0.feed_forward.w_gate of precision.linears is 48 x 32 on each rank"):
        converted(narrow, recipe="mxfp8", linears=["*feed_forward*"])
    assert converted(QWEN3, recipe="fp8_blockwise", linears=["*"])[1]


def test_another_backend_of_the_experts_is_refused() -> None:
    fused = replace(GQA, moe=replace(GQA.moe, backend="fused"))
    with pytest.raises(ValueError, match=r"model.moe.backend=fused does not compute in precision.recipe=mxfp8"):
        converted(fused, recipe="mxfp8")


@pytest.mark.parametrize(
    ("model", "precision", "text"),
    [
        (
            replace(GQA, moe=replace(GQA.moe, backend="fused")),
            PrecisionConfig(recipe="mxfp8"),
            "model.moe.backend=fused does not compute in precision.recipe=mxfp8; set model.moe.backend=auto",
        ),
        (
            GQA,
            PrecisionConfig(linears=["*.wq"]),
            "precision.linears=[*.wq] does nothing with precision.recipe=bf16",
        ),
        (GQA, PrecisionConfig(recipe="fp32", wgrad="bf16"), "precision.wgrad=bf16 does nothing with"),
        (
            GQA,
            PrecisionConfig(recipe="mxfp8", linears_exclude=[]),
            "precision.linears_exclude=[] does nothing with precision.linears=[]",
        ),
        (GQA, PrecisionConfig(recipe="mxfp8", wgrad="fp8"), "precision.wgrad=fp8: must be one of recipe, bf16"),
    ],
)
def test_settings_that_contradict_each_other(model: ModelConfig, precision: PrecisionConfig, text: str) -> None:
    with pytest.raises(ValueError) as caught:
        validate(Config(model=model, precision=precision, parallel=ParallelConfig()))
    assert text in str(caught.value)
