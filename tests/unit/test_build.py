"""What the build asks the fused kernels to measure, by layout; and what this GPU's memory says of the exchange."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from parallel.config import ParallelConfig
from trainer import build
from trainer.compose import compose
from trainer.meta_model import meta_model


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
    model = meta_model(config)
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


def test_the_memory_that_is_there_decides_whether_auto_may_be_symm_mem(monkeypatch: pytest.MonkeyPatch) -> None:
    """And no word of `cluster`; nobody is asked where there is nothing to choose."""
    words = ["experiment=qwen3_30b_a3b", "parallel.ep=8", "cluster.memory_gib=1"]
    memory = {"gib": 139}
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=memory["gib"] * 2**30)
    )
    mesh: Any = SimpleNamespace(config=ParallelConfig(ep=8), device=torch.device("cuda"), world_size=8)
    assert build._no_room(compose(words), mesh) == ""
    memory["gib"] = 40
    assert "of a GPU's 40.0; comms.backend=symm_mem has to be asked for" in build._no_room(compose(words), mesh)
    # What these experts are is said elsewhere.
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    assert build._no_room(compose(words), mesh) == ""
    monkeypatch.setattr(build, "no_room", lambda *_: pytest.fail("nothing is to be chosen"))
    assert build._no_room(compose([*words, "comms.backend=symm_mem"]), mesh) == ""
    for other in ({"config": ParallelConfig()}, {"device": torch.device("cpu")}):
        assert build._no_room(compose(words), SimpleNamespace(**{**vars(mesh), **other})) == ""
