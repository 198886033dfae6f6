"""Weights under tensor and context parallelism: drawn, evaluated and sampled from as by one process."""

from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from parallel.config import ParallelConfig
from parallel.init import local_box
from parallel.mesh import build_mesh
from tests.distributed.harness import run_workers
from tests.distributed.tiny_models import DEEPSEEK, GPT_OSS, MODELS
from trainer.build import build_model
from trainer.config import Config, PrecisionConfig, TrainConfig
from trainer.evaluate import EvalResult, evaluate
from trainer.generate import generate
from trainer.models.config import ModelConfig
from trainer.parity import full_tensors, named_parameters, synthetic_batches

LAYOUTS = {
    "tp2_fsdp2": ParallelConfig(tp=2),
    "tp2_etp2_ep2": ParallelConfig(tp=2, etp=2, ep=2),
    "tp2_cp2": ParallelConfig(tp=2, cp=2, ep=2),
    "ring2_ulysses2": ParallelConfig(cp=4, ulysses=2),
}
# fp64 sums in another order.
BOUND = 1e-12


class Letters:
    """What `generate` asks of a tokenizer; ids from 60 to 63 pad the vocabulary."""

    vocab_size, eos_id = 60, 0

    def encode(self, text: str) -> list[int]:
        return [ord(letter) - ord("0") for letter in text]

    def decode(self, ids: list[int]) -> str:
        return "".join(chr(ord("0") + index) for index in ids)


class Use(NamedTuple):
    evaluated: EvalResult
    samples: list[str]


def use(model: ModelConfig, parallel: ParallelConfig) -> Use:
    """A held-out loss, and texts whose length nothing divides: grown from the start, and cut to the last 11 tokens."""
    mesh = build_mesh(parallel, torch.device("cpu"))
    train = TrainConfig(global_batch_size=4, micro_batch_size=4 // mesh.batch_size, seq_len=16)
    config = Config(train=train, model=model, parallel=mesh.config, precision=PrecisionConfig(recipe="fp64"))
    built = build_model(config, mesh)
    bytes_V = torch.arange(model.vocab_size) % 3
    result = evaluate(built, synthetic_batches(config, mesh, 0), mesh, bytes_V, True)
    settings: Any = {"max_new_tokens": 9, "max_context": 11}
    samples = [
        generate(built, Letters(), "3=A", temperature=0, **settings),  # type: ignore[arg-type]
        generate(built, Letters(), "B2", seed=5, **settings),  # type: ignore[arg-type]
    ]
    return Use(result, samples)


@pytest.mark.parametrize("name", ["gpt_oss", "deepseek"])
def test_evaluation_and_samples_do_not_depend_on_the_layout(name: str) -> None:
    expected = run_workers(use, 1, MODELS[name], ParallelConfig())[0]
    assert expected.evaluated.num_tokens > 30
    assert len(set(expected.samples)) == 2 and min(len(text) for text in expected.samples) > 3
    for layout, parallel in LAYOUTS.items():
        for ours in run_workers(use, 4, MODELS[name], parallel):
            assert ours.evaluated == pytest.approx(expected.evaluated, rel=BOUND), layout
            assert ours.samples == expected.samples, layout


# Sizes that FSDP cannot cut evenly once tp has: 33 rows of the vocabulary, one sink, 17 hidden units, a width of 34.
UNEVEN_GQA = replace(
    GPT_OSS, vocab_size=66, dim=34, attention=replace(GPT_OSS.attention, num_heads=2, num_kv_heads=1, head_dim=6)
)
UNEVEN_MLA = replace(
    DEEPSEEK,
    vocab_size=66,
    dim=34,
    ffn_dim=34,
    attention=replace(DEEPSEEK.attention, num_heads=2, q_lora_rank=15, v_head_dim=5),
)


def draw(model: ModelConfig, parallel: ParallelConfig) -> tuple[dict[str, Tensor], list[tuple[str, Any, Tensor]]]:
    """Whole weights, and this rank's parts with their places."""
    mesh = build_mesh(parallel, torch.device("cpu"))
    config = Config(model=model, parallel=mesh.config, precision=PrecisionConfig(recipe="fp32"))
    built = build_model(config, mesh)
    parts = [(name, *local_box(parameter.detach())) for name, parameter in named_parameters(built)]
    return full_tensors(built), parts


@pytest.mark.parametrize("model", [UNEVEN_GQA, UNEVEN_MLA], ids=["gqa", "mla"])
def test_initial_weights_that_do_not_divide_evenly(model: ModelConfig) -> None:
    expected, _ = run_workers(draw, 1, model, ParallelConfig())[0]
    for parallel in (ParallelConfig(tp=2), ParallelConfig(tp=2, ep=2), ParallelConfig(tp=2, etp=2, ep=2)):
        covered = {name: torch.zeros(tensor.shape, dtype=torch.int64) for name, tensor in expected.items()}
        uneven = set()
        for whole, parts in run_workers(draw, 4, model, parallel):
            assert all(torch.equal(tensor, expected[name]) for name, tensor in whole.items())
            for name, offset, part in parts:
                window = tuple(slice(first, first + size) for first, size in zip(offset, part.shape, strict=True))
                assert torch.equal(expected[name][window], part), (name, offset)
                covered[name][window] += 1
                uneven.add((name, tuple(part.shape)))
        for name, _, _ in parts:
            # Every element is on as many ranks as every other.
            assert int(covered[name].min()) == int(covered[name].max()) > 0, name
        assert len({shape for name, shape in uneven if name == "tok_embeddings.weight"}) == 2
