"""Every experiment is the published architecture: its parameters, counted on the meta device, are the published ones.

Totals are exact where the authors' figures or files give them to the last digit (the size of the published weights);
active figures are compared to the digits shown. `active` counts embedding and head, which authors differ on: the
comment says what the published figure leaves out.
"""

import functools
import math

import pytest
import torch

from trainer.compose import compose, group_options
from trainer.config import Config
from trainer.models.transformer import Transformer, count_parameters
from trainer.validate import accumulation_steps, resolve_parallel

BENCHES = {"qwen3_30b_a3b_bench": "qwen3_30b_a3b", "deepseek_v3_16b_bench": "deepseek_v3_16b"}

# name -> exact total, exact active, published total, published active (billions).
PUBLISHED = {
    "qwen3_30b_a3b": (30_532_122_624, 3_353_032_704, "30.53", "3.35"),
    "mixtral_8x7b": (46_702_792_704, 12_879_925_248, "46.70", "12.88"),
    "olmoe_1b_7b": (6_919_161_856, 1_282_017_280, "6.92", "1.28"),
    # OpenAI's 3.61 leaves the input embedding out.
    "gpt_oss_20b": (20_914_757_184, 4_187_440_704, "20.91", "4.19"),
    # Moonshot's 15.29 and 2.24 leave embedding and head out.
    "moonlight_16b_a3b": (15_960_108_544, 2_914_774_528, "15.96", "2.91"),
    # DeepSeek-V2-Lite: 15.7 and, without the input embedding, 2.4.
    "deepseek_v3_16b": (15_706_484_224, 2_661_150_208, "15.71", "2.66"),
    # Without the multi-token-prediction module. The balancing bias is no parameter (published files hold 14,848).
    "deepseek_v3_671b": (671_026_404_352, 37_552_282_624, "671.03", "37.55"),
}
GPUS = {"deepseek_v3_671b": 256}


@functools.cache
def experiment(name: str) -> Config:
    return compose([f"experiment={name}"])


@functools.cache
def counts(name: str) -> tuple[int, int]:
    with torch.device("meta"):
        total, active = count_parameters(Transformer(experiment(name).model))
    return total, active


def test_every_experiment_is_covered() -> None:
    assert set(group_options("experiment")) == {"demo", *PUBLISHED, *BENCHES}


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameter_counts_are_the_published_ones(name: str) -> None:
    exact_total, exact_active, total, active = PUBLISHED[name]
    assert counts(name) == (exact_total, exact_active)
    assert f"{counts(name)[0] / 1e9:.2f}" == total
    assert f"{counts(name)[1] / 1e9:.2f}" == active


def test_active_figures_that_leave_the_embeddings_out() -> None:
    model = experiment("gpt_oss_20b").model
    assert f"{(counts('gpt_oss_20b')[1] - model.vocab_size * model.dim) / 1e9:.2f}" == "3.61"
    model = experiment("moonlight_16b_a3b").model
    without = [count - 2 * model.vocab_size * model.dim for count in counts("moonlight_16b_a3b")]
    assert [f"{count / 1e9:.2f}" for count in without] == ["15.29", "2.24"]


def test_demo_has_two_to_four_million_parameters() -> None:
    assert 2e6 <= counts("demo")[0] <= 4e6


@pytest.mark.parametrize("name", [*PUBLISHED, "demo", *BENCHES])
def test_experiments_fit_the_number_of_ranks_they_name(name: str) -> None:
    config = experiment(name)
    ranks = 2 if name in ("demo", *BENCHES) else GPUS.get(name, 8)
    parallel = resolve_parallel(config.parallel, config.model.moe.num_experts, ranks)
    assert ranks % parallel.ep == 0 and config.model.moe.num_experts % parallel.ep == 0
    assert accumulation_steps(config.train, ranks // (parallel.cp * parallel.tp)) >= 1
    # The 80 GB (Mixtral: 141 GB) of its comment hold fp32 weights, gradients and two moments.
    states_gb = 16 * counts(name)[0] / ranks / 1e9
    assert states_gb < (141 if name in ("mixtral_8x7b", *BENCHES) else 80)


@pytest.mark.parametrize(("bench", "whole"), BENCHES.items())
def test_benches_are_eight_layers_of_the_whole(bench: str, whole: str) -> None:
    config, full = experiment(bench), experiment(whole)
    assert (config.model.num_layers, config.train.seq_len, config.train.micro_batch_size) == (8, 4096, 4)
    assert config.model.moe.force_balance and config.parallel.compile
    assert (config.parallel.ep, config.parallel.activation_checkpoint) == (-1, "none")
    assert (config.model.dim, config.model.attention, config.model.rope) == (
        *(full.model.dim, full.model.attention, full.model.rope),
    )
    per_layer = (counts(whole)[0] - counts(bench)[0]) / (full.model.num_layers - 8)
    assert math.isclose(per_layer, round(per_layer))


@pytest.mark.parametrize("name", group_options("model"))
def test_every_model_composes(name: str) -> None:
    assert compose([f"model={name}"]).model.name == name
