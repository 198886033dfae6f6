"""What the build asks the fused kernels to measure, by layout."""

from types import SimpleNamespace

import pytest
import torch

from parallel.config import ParallelConfig
from trainer import build
from trainer.compose import compose


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ({}, (2 * 64 * 2, 8, 128, 64)),
        ({"ep": 4}, (2 * 64 * 2, 2, 128, 64)),
        ({"tp": 2, "ep": 2, "etp": 2}, (2 * 64 * 2, 4, 128, 32)),
        ({"cp": 2, "tp": 2}, (2 * 64 * 2 // 4, 8, 128, 64)),
    ],
)
def test_tiles_are_chosen_for_what_a_rank_will_have(
    monkeypatch: pytest.MonkeyPatch, sizes: dict[str, int], expected: tuple[int, ...]
) -> None:
    overrides = ["model.dim=128", "model.moe.num_experts=8", "model.moe.top_k=2", "model.moe.expert_dim=64"]
    config = compose(["experiment=demo", *overrides, "train.micro_batch_size=2", "train.seq_len=64"])
    asked: list[tuple[object, ...]] = []
    monkeypatch.setattr(build, "tune", lambda *arguments: asked.append(arguments))
    model = build.meta_model(config)
    mesh = SimpleNamespace(config=ParallelConfig(**sizes), device=torch.device("cpu"))
    build.choose_expert_tiles(model, config, mesh)
    assert asked == []
    monkeypatch.setattr(build, "resolve_backend", lambda *_: "fused")
    build.choose_expert_tiles(model, config, mesh)
    assert asked == [(*expected, mesh.device)]


@pytest.mark.parametrize(
    ("model", "etp", "words"),
    [
        ({"dim": 100}, 1, r"model\.dim=100 must be a multiple of 8 for bf16 experts on GPUs; nearest: 96 or 104"),
        ({"moe.expert_dim": 4}, 1, r"model\.moe\.expert_dim=4 must be a multiple of 8 .*; nearest: 8\."),
        ({"moe.expert_dim": 24}, 2, r"expert_dim=24 must be a multiple of 16 .* of each of parallel\.etp=2 ranks"),
    ],
)
def test_rows_that_are_not_whole_16_bytes_are_refused(model: dict[str, int], etp: int, words: str) -> None:
    """What the copy engine cannot read is told by name, not by an assertion of Triton's."""
    config = compose(["experiment=demo", "precision=bf16", *(f"model.{key}={value}" for key, value in model.items())])
    mesh = SimpleNamespace(config=ParallelConfig(etp=etp), device=torch.device("cuda"))
    with pytest.raises(ValueError, match=words):
        build._check_alignment(config, mesh)
    mesh.device = torch.device("cpu")
    build._check_alignment(config, mesh)
