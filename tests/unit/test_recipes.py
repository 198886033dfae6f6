"""What a recipe becomes on which hardware. Cards are made up; nothing may be launched on them."""

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from moe.config import MoEConfig
from moe.experts import GroupedExperts
from moe.quantized_gemm import exact_columns, exact_rows, fp8_rows, native_columns, native_rows
from moe.recipes import Recipe, resolve_recipe

CARDS = {
    "NVIDIA A100": (8, 0),
    "NVIDIA L40S": (8, 9),
    "NVIDIA H200": (9, 0),
    "NVIDIA B200": (10, 0),
    "NVIDIA B300": (10, 3),
    "NVIDIA RTX 5090": (12, 0),
}


def resolve_on(card: str, name: str, wgrad: str = "recipe") -> Recipe:
    def launch(*_: Any, **__: Any) -> None:
        raise AssertionError("nothing may run on a card before it is known to be able to")

    with (
        patch("torch.cuda.get_device_capability", lambda device: CARDS[card]),
        patch("torch.cuda.get_device_name", lambda device: card),
        patch("torch.nn.functional.scaled_grouped_mm", launch),
        patch("torch.nn.functional.grouped_mm", launch),
    ):
        return resolve_recipe(name, torch.device("cuda", 0), wgrad)


@pytest.mark.parametrize(
    ("card", "name", "text"),
    [
        ("NVIDIA H200", "mxfp8", "mxfp8: exact mode on SM90 (NVIDIA H200)"),
        ("NVIDIA B200", "mxfp8", "mxfp8: native mode on SM100 (NVIDIA B200)"),
        ("NVIDIA B300", "mxfp8", "mxfp8: native mode on SM103 (NVIDIA B300)"),
        (
            "NVIDIA H200",
            "fp8_blockwise",
            "fp8_blockwise: native mode on SM90 (NVIDIA H200), weight gradients in bf16",
        ),
    ],
)
def test_modes(card: str, name: str, text: str) -> None:
    assert str(resolve_on(card, name)) == text


def test_case_61_only_sm100_gets_the_call_that_destroys_other_cards() -> None:
    assert resolve_on("NVIDIA B200", "mxfp8").multiply_rows is native_rows
    assert resolve_on("NVIDIA B200", "mxfp8").multiply_columns is native_columns
    for recipe in (resolve_on("NVIDIA H200", "mxfp8"), resolve_recipe("mxfp8", torch.device("cpu"))):
        assert recipe.multiply_rows is exact_rows and recipe.multiply_columns is exact_columns


def test_only_sm90_multiplies_blocks_on_its_own_cores() -> None:
    hopper, cpu = resolve_on("NVIDIA H200", "fp8_blockwise"), resolve_recipe("fp8_blockwise", torch.device("cpu"))
    assert hopper.multiply_rows is fp8_rows and hopper.fused and hopper.unit == 16
    assert cpu.multiply_rows is exact_rows and not cpu.fused and str(cpu).startswith("fp8_blockwise: portable mode")


def test_experts_that_the_kernels_cannot_compute_take_the_products_one_by_one() -> None:
    """Biases and scores applied first stand between the products: fused kernels know neither."""
    plain = MoEConfig(num_experts=4, top_k=2, expert_dim=16)
    for config, expected in (
        (plain, 1),
        (replace(plain, linear_bias=True), 0),
        (replace(plain, scores_before_experts=True), 0),
    ):
        recipe = replace(resolve_recipe("fp8_blockwise", torch.device("cpu")), fused=True)
        experts = GroupedExperts(config, 16).bfloat16()
        for parameter in experts.parameters():
            torch.nn.init.normal_(parameter)
        experts.use_recipe(recipe)
        rows, ids = torch.randn(3, 16).bfloat16(), torch.tensor([[0, 1], [2, 3], [1, 2]])
        with patch("moe.experts.low_precision_experts", side_effect=lambda rows, *_: rows) as fused:
            assert experts(rows, ids, torch.ones(3, 2), 6).shape == (3, 16)
        assert fused.call_count == expected


@pytest.mark.parametrize(
    ("card", "name"),
    [
        ("NVIDIA A100", "mxfp8"),
        ("NVIDIA L40S", "mxfp8"),
        ("NVIDIA RTX 5090", "mxfp8"),
        ("NVIDIA A100", "fp8_blockwise"),
        ("NVIDIA B200", "fp8_blockwise"),
    ],
)
def test_case_61_other_cards_are_refused_by_name(card: str, name: str) -> None:
    with pytest.raises(ValueError) as caught:
        resolve_on(card, name)
    for word in (f"precision.recipe={name}", card, "SM90 (H100, H200)", "set precision.recipe=bf16"):
        assert word in str(caught.value)


def test_weight_gradients_in_bf16_by_option() -> None:
    for card in ("NVIDIA H200", "NVIDIA B200"):
        recipe = resolve_on(card, "mxfp8", "bf16")
        assert recipe.multiply_columns is None and str(recipe).endswith(", weight gradients in bf16")
    assert str(resolve_recipe("mxfp8", torch.device("cpu"))) == "mxfp8: exact mode on the CPU"
