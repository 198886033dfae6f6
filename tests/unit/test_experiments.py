"""Every experiment is the published architecture: its parameters, counted on the meta device, are the published ones.

Totals are exact where the authors' figures or files give them to the last digit (the size of the published weights);
active figures are compared to the digits shown. `active` counts embedding and head, which authors differ on: the
comment says what the published figure leaves out.
"""

import functools
import math
import re
from typing import NamedTuple

import pytest
import torch

from trainer.compose import compose, group_options
from trainer.config import Config
from trainer.layout import fit_layout
from trainer.models.families import MODEL_DIR
from trainer.models.transformer import Transformer, count_parameters
from trainer.planner import GIB, MARGIN, plan_memory

BENCHES = {"qwen3_30b_a3b_bench": "qwen3_30b_a3b", "deepseek_v3_16b_bench": "deepseek_v3_16b"}

# name -> exact total, exact active, published total, published active (billions).
PUBLISHED = {
    "qwen3_30b_a3b": (30_532_122_624, 3_353_032_704, "30.53", "3.35"),
    "qwen3_235b_a22b": (235_093_634_560, 22_190_763_520, "235.09", "22.19"),
    "mixtral_8x7b": (46_702_792_704, 12_879_925_248, "46.70", "12.88"),
    "mixtral_8x22b": (140_620_634_112, 39_152_031_744, "140.62", "39.15"),
    "olmoe_1b_7b": (6_919_161_856, 1_282_017_280, "6.92", "1.28"),
    # OpenAI's 3.61 leaves the input embedding out.
    "gpt_oss_20b": (20_914_757_184, 4_187_440_704, "20.91", "4.19"),
    "gpt_oss_120b": (116_829_156_672, 5_711_982_912, "116.83", "5.71"),
    # The text model: the published 109 B have a vision encoder.
    "llama4_scout": (107_769_861_120, 17_172_894_720, "107.77", "17.17"),
    # Moonshot's 15.29 and 2.24 leave embedding and head out.
    "moonlight_16b_a3b": (15_960_108_544, 2_914_774_528, "15.96", "2.91"),
    "kimi_k2": (1_026_408_209_408, 32_861_477_888, "1026.41", "32.86"),
    "deepseek_v2_236b": (235_741_434_880, 21_375_800_320, "235.74", "21.38"),
    # DeepSeek-V2-Lite: 15.7 and, without the input embedding, 2.4.
    "deepseek_v3_16b": (15_706_484_224, 2_661_150_208, "15.71", "2.66"),
    # Without multi-token prediction. The balancing bias is no parameter (published files hold 14,848).
    "deepseek_v3_671b": (671_026_404_352, 37_552_282_624, "671.03", "37.55"),
}
EXPERIMENT_DIR = MODEL_DIR.parent / "experiment"


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


@pytest.mark.parametrize("name", ["demo", *BENCHES])
def test_small_experiments_run_on_the_two_ranks_they_name(name: str) -> None:
    config = experiment(name)
    fit_layout(config, 2)
    assert states_gb(config, 2) < 141


class Layout(NamedTuple):
    """One of the layouts that the header of an experiment tells."""

    gpus: int
    gb: int
    # GB of states on each GPU; None where the header does not say.
    states: int | None
    command: str


def layouts(name: str) -> list[Layout]:
    text = (EXPERIMENT_DIR / f"{name}.yaml").read_text().split("defaults:")[0]
    found = []
    for gpus, gb, reason, command in re.findall(r"(\d+) GPUs of (\d+) GB((?: |\n# )\([^)]*\))?:\n#   (\S.*)\n", text):
        states = re.search(r"(\d+) GB [a-z, ]*a GPU", reason)
        found.append(Layout(int(gpus), int(gb), int(states[1]) if states else None, command))
    assert len(found) == len(re.findall(r"^#   \S", text, re.MULTILINE)), "a command without its GPUs"
    return found


def states_gb(config: Config, ranks: int) -> float:
    """Weights, gradients and two moments of one rank, in fp32; the weights of multi-token prediction too."""
    with torch.device("meta"):
        weights = sum(parameter.numel() for parameter in Transformer(config.model).parameters())
    return 16 * weights / ranks / 1e9


@pytest.mark.parametrize("name", PUBLISHED)
def test_commands_in_the_header_fit_the_gpus_they_name(name: str) -> None:
    """Sizes divide, each command starts as many ranks as its line says, and their states leave memory for the rest."""
    sizes = [layout.gpus for layout in layouts(name)]
    assert min(sizes) == 8 and max(sizes) >= 64
    # Building a model, even without memory, takes half a second: once per number of layers.
    total_gb = functools.cache(lambda num_layers: states_gb(compose([f"model={name}", num_layers]), 1))
    for layout in layouts(name):
        launcher, words = re.fullmatch(r"(.*) (experiment=.*)", layout.command).groups()
        nodes = layout.gpus // 8
        torchrun = "torchrun --nproc-per-node 8 -m trainer.train"
        assert launcher == (torchrun if nodes == 1 else f"sbatch --nodes={nodes} scripts/slurm/train.sbatch")
        assert words.split()[0] == f"experiment={name}"
        config = compose(words.split())
        parallel = fit_layout(config, layout.gpus)
        # tp splits nearly all that FSDP does not.
        holders = parallel.dp_shard * parallel.cp * parallel.tp
        states = total_gb(f"model.num_layers={config.model.num_layers}") / holders
        assert states < 0.8 * layout.gb
        assert layout.states in (None, round(states)), layout.command
        # What a driver leaves of 80 and 141 GB.
        memory_gib = {80: 79.1, 141: 139.8}[layout.gb]
        assert plan_memory(config, layout.gpus).peak <= MARGIN * memory_gib * GIB, layout.command


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
