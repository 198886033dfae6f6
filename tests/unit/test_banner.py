"""What a run says of itself."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from comms.backend import BackendChoice, choose_backend
from comms.config import CommsConfig, PayloadConfig
from parallel.async_tp import AsyncChoice
from parallel.config import ParallelConfig
from tests.distributed.tiny_models import QWEN3
from trainer.banner import describe_data, describe_exchange, describe_layout, describe_run, describe_sources, human
from trainer.config import Config, PrecisionConfig, TrainConfig


@pytest.mark.parametrize(
    ("number", "text"), [(7, "7"), (1200, "1.2 k"), (3_553_920, "3.55 M"), (30_532_122_624, "30.5 B"), (10**12, "1 T")]
)
def test_numbers_have_three_digits(number: int, text: str) -> None:
    assert human(number) == text


def test_every_source_has_a_line_that_tells_what_was_left_out() -> None:
    counts = {"books": {"documents": 1234, "tokens": 5_000_000, "invalid_utf8": 2, "empty_files": 0}}
    lines = describe_data("train", {**counts, "code": {"documents": 1, "tokens": 10}}).splitlines()
    assert lines == [
        "  train    books: 1,234 documents, 5 M tokens, 2 files of invalid UTF-8 skipped",
        "  train    code: 1 documents, 10 tokens",
    ]


def test_what_was_read_is_told_and_that_nothing_is_held_out() -> None:
    counts = {"books": {"documents": 2, "tokens": 5}}
    books = "books: 2 documents, 5 tokens"
    assert describe_sources(counts, counts) == [f"  train    {books}", f"  held out {books}"]
    assert describe_sources({}, counts) == [f"  held out {books}"]
    assert describe_sources(counts, {}) == [f"  train    {books}", "  no held-out set: data.eval is empty"]


def banner(precision: PrecisionConfig, experiment: str | None = None, **train: Any) -> list[str]:
    folder: Any = SimpleNamespace(run_id="r", attempt=1, path=Path("runs/r"))
    mesh: Any = SimpleNamespace(config=ParallelConfig(), world_size=1, device=torch.device("cpu"))
    config = Config(model=QWEN3, precision=precision, train=TrainConfig(**train), experiment=experiment)
    return describe_run(config, folder, mesh).splitlines()


def test_an_evaluation_has_no_length() -> None:
    assert banner(PrecisionConfig(), steps=7)[-1].startswith("  length  7 steps of ")
    assert banner(PrecisionConfig(), steps=7, eval_only=True)[-1] == "  length  an evaluation, no steps"
    assert banner(PrecisionConfig(), eval_only=True)[0] == "run r (evaluation) in runs/r"


def test_a_run_without_an_experiment_says_so() -> None:
    said = "  config  no experiment=NAME: the defaults of configs/config.yaml, and what was given; "
    said += "experiment=demo is what a CPU trains in minutes"
    assert said in banner(PrecisionConfig()) and said not in banner(PrecisionConfig(), experiment="demo")
    assert said not in banner(PrecisionConfig(), eval_only=True)


def test_a_low_precision_recipe_has_a_line_that_tells_how_it_runs_here() -> None:
    lines = banner(PrecisionConfig(recipe="fp8_blockwise", linears=["*.wq"]))
    assert lines[2] == "  layout  1 process on cpu; fp8_blockwise"
    assert lines[3] == (
        "  recipe  fp8_blockwise: portable mode on the CPU, weight gradients in bf16; "
        "layers.*.moe.experts (2), layers.*.attention.wq (2)"
    )
    assert len(banner(PrecisionConfig(recipe="bf16"))) == len(lines) - 1


def test_what_does_not_fit_is_told_before_anything_else() -> None:
    with pytest.raises(ValueError, match=r"needs dims that are multiples of 32"):
        banner(PrecisionConfig(recipe="mxfp8"))


def test_the_exchange_is_told_with_its_room() -> None:
    assert describe_exchange(BackendChoice("none", "no row leaves its rank")) == ""
    asked = CommsConfig("symm_mem", PayloadConfig(dispatch="mxfp8"))
    told = describe_exchange(choose_backend(asked, None, torch.device("cpu")))
    settings = "comms.backend=symm_mem, comms.payload.dispatch=mxfp8"
    assert told == f"  experts  no row leaves its rank: {settings} has no effect"
    assert describe_exchange(choose_backend(CommsConfig(), None, torch.device("cpu"))) == ""
    assert (
        describe_exchange(BackendChoice("collective", "as asked")) == "  experts  rows travel by collective: as asked"
    )
    told = describe_exchange(BackendChoice("symm_mem", "as asked", "an arena of 1.00 GiB per rank")).splitlines()
    assert told == ["  experts  rows travel by symm_mem: as asked", "           an arena of 1.00 GiB per rank"]


def test_the_memory_that_is_told_is_that_of_what_exchanges_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not of comms.backend=auto, which is no way to exchange rows."""
    monkeypatch.setattr("trainer.banner.describe_memory", lambda config, num_ranks, device, backend: f"as {backend}")
    mesh: Any = SimpleNamespace(world_size=2, device=torch.device("cuda"))
    model: Any = SimpleNamespace(exchange_choice=BackendChoice("symm_mem", ""), async_tp=AsyncChoice("none", 0))
    assert "as symm_mem" in describe_layout(Config(model=QWEN3), mesh, model)


def test_what_a_layout_settles_is_told_where_there_is_something_to_tell() -> None:
    mesh: Any = SimpleNamespace(world_size=1, device=torch.device("cpu"))
    nothing: Any = SimpleNamespace(exchange_choice=BackendChoice("none", ""), async_tp=AsyncChoice("none", 0))
    assert describe_layout(Config(model=QWEN3), mesh, nothing) == []
    both: Any = SimpleNamespace(
        exchange_choice=BackendChoice("collective", "as asked"), async_tp=AsyncChoice("native", 2)
    )
    assert describe_layout(Config(model=QWEN3), mesh, both) == [
        "  experts  rows travel by collective: as asked",
        "  async   native: 2 matmuls fused with their transfer",
    ]
