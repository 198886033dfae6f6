"""The fused expert kernels in fp32 under Triton's interpreter, against the loop over experts in fp64.

Bound 1e-5: fp32 rounding of sums over at most 48 terms (seen: 2e-7); a dropped row, tile or term shows as 1e-2 or more.
"""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from moe import fused_experts as fused
from moe import fused_launches, tiles
from moe.config import MoEConfig
from moe.experts import GroupedExperts
from moe.tiles import Tile

BOUND = 1e-5
# Blocks that these sizes fill once, several times and in part; the epilogues' parts as on a GPU.
SMALL = {
    "up": Tile(16, 16, 16, 4, 2, 2, parts=2),
    "down": Tile(16, 32, 16, 4, 2, 2),
    "act_grad": Tile(16, 32, 16, 4, 2, 2),
    "up_grad": Tile(16, 32, 16, 4, 2, 2),
    "weight_grad": Tile(16, 32, 16, 4, 2, 2),
}


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "CANDIDATES", {kernel: (tile,) for kernel, tile in SMALL.items()})


def choose(num_rows: int, config: MoEConfig, routing: str) -> Tensor:
    """(R, K) expert ids, some of them -1."""
    generator = torch.Generator().manual_seed(1)
    E, K = config.num_experts, config.top_k
    if routing == "one":
        return torch.full((num_rows, K), -1).index_fill_(1, torch.tensor([0]), E - 1)
    if routing == "none":
        return torch.full((num_rows, K), -1)
    power = 3.0 if routing == "zipf" else 0.0
    weights = torch.arange(1, E + 1).float() ** -power
    ids = torch.stack([torch.multinomial(weights, K, generator=generator) for _ in range(num_rows)])
    return torch.where(torch.rand(ids.shape, generator=generator) < 0.2, -1, ids)


def results(
    backend: str, dtype: torch.dtype, config: MoEConfig, dim: int, ids_RK: Tensor, room: int | None = None
) -> dict[str, Tensor]:
    """Output and every gradient, by name; the same numbers whatever the dtype.

    Args:
        room: 4 rows of NaN without ids follow, whose gradients are NaN too, and room for so many pairs more.
    """
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=generator) * scale).to(dtype)

    layer = GroupedExperts(MoEConfig(**{**vars(config), "backend": backend}), dim).to(dtype)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(draw(*parameter.shape, scale=parameter.shape[-1] ** -0.5))
    rows, weights = draw(ids_RK.shape[0], dim).requires_grad_(), draw(*ids_RK.shape).abs().requires_grad_()
    num_rows, num_pairs = ids_RK.shape[0], int((ids_RK >= 0).sum())
    leaves = {"rows": rows, "weights": weights, **dict(layer.named_parameters())}
    upstream = draw(num_rows, dim)
    if room is None:
        out = layer(rows, ids_RK, weights, num_pairs)
    else:
        behind = torch.full((4, dim), float("nan"), dtype=dtype)
        ids_RK = torch.cat([ids_RK, ids_RK.new_full((4, ids_RK.shape[1]), -1)])
        weights = torch.cat([weights, weights.new_zeros(4, weights.shape[1])])
        out = layer(torch.cat([rows, behind]), ids_RK, weights, num_pairs + room, exact=False)
        upstream = torch.cat([upstream, behind])
    grads = torch.autograd.grad(out, list(leaves.values()), upstream)
    return {"out": out[:num_rows].detach(), **dict(zip(leaves, grads, strict=True))}


@pytest.mark.parametrize(
    ("num_rows", "dim", "routing", "options"),
    [
        pytest.param(50, 32, "uniform", {}, id="even"),
        pytest.param(37, 40, "zipf", {"activation": "clamped_swiglu", "linear_bias": True}, id="gpt_oss"),
        pytest.param(21, 16, "uniform", {"top_k": 1, "scores_before_experts": True}, id="llama4"),
        pytest.param(9, 24, "one", {"linear_bias": True}, id="one_expert"),
        pytest.param(5, 16, "none", {"linear_bias": True}, id="no_pairs"),
        pytest.param(1, 16, "uniform", {"num_experts": 1, "top_k": 1}, id="single"),
        pytest.param(4, 16, "uniform", {"num_experts": 16, "top_k": 16}, id="every_expert"),
    ],
)
def test_equals_the_loop_over_experts(num_rows: int, dim: int, routing: str, options: dict) -> None:
    config = MoEConfig(**{"num_experts": 5, "top_k": 3, "expert_dim": 40, **options})
    ids_RK = choose(num_rows, config, routing)
    ours = results("fused", torch.float32, config, dim, ids_RK)
    oracle = results("reference", torch.float64, config, dim, ids_RK)
    for name, expected in oracle.items():
        size = expected.norm()
        error = (ours[name].double() - expected).norm() / size if size > 0 else ours[name].abs().max()
        assert error < BOUND, f"{name}: {float(error):.1e}"


@pytest.mark.parametrize("backend", ["fused", "grouped_mm"])
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="plain"),
        pytest.param({"activation": "clamped_swiglu", "linear_bias": True}, id="gpt_oss"),
        pytest.param({"top_k": 1, "scores_before_experts": True}, id="llama4"),
    ],
)
def test_room_for_more_pairs_changes_nothing(options: dict, backend: str) -> None:
    """Memory behind the last pair starts as NaN here, and tables of indices as huge numbers."""
    config = MoEConfig(**{"num_experts": 5, "top_k": 2, "expert_dim": 24, **options})
    ids_RK = choose(11, config, "uniform")
    expected = results(backend, torch.float32, config, 16, ids_RK)
    for name, ours in results(backend, torch.float32, config, 16, ids_RK, room=9).items():
        assert (ours - expected[name]).norm() <= 1e-6 * expected[name].norm(), name


def test_experts_without_pairs_get_gradients_of_exactly_zero() -> None:
    config = MoEConfig(num_experts=5, top_k=2, expert_dim=24)
    ids_RK = choose(9, config, "one")
    grads = results("fused", torch.float32, config, 16, ids_RK)
    for name in ("w_gate_up", "w_down"):
        assert bool((grads[name][:-1] == 0).all()) and bool((grads[name][-1] != 0).any()), name


def test_the_same_bits_every_time() -> None:
    config = MoEConfig(num_experts=4, top_k=2, expert_dim=24)
    ids_RK = choose(30, config, "uniform")
    first, second = (results("fused", torch.float32, config, 16, ids_RK) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_row_beyond_an_experts_end_does_not_reach_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison above is worth something: off-by-one offsets are found."""
    config = MoEConfig(num_experts=4, top_k=2, expert_dim=24)
    ids_RK = choose(30, config, "uniform")
    right = results("fused", torch.float32, config, 16, ids_RK)
    original = fused.weight_grad
    monkeypatch.setattr(fused, "weight_grad", lambda left, right, offsets: original(left, right, offsets - 1))
    wrong = results("fused", torch.float32, config, 16, ids_RK)
    assert (right["w_down"] - wrong["w_down"]).norm() / right["w_down"].norm() > 1e-2


def test_tuning_measures_what_launches_ask_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A choice under another shape than the one a launch names would never be used."""
    monkeypatch.setenv("SLUICEGATE_CACHE", str(tmp_path))
    other = Tile(16, 16, 16, 4, 2, 1)
    monkeypatch.setattr(tiles, "CANDIDATES", {kernel: (tile, other) for kernel, tile in SMALL.items()})
    monkeypatch.setattr(tiles, "_chosen", {})
    works = fused._works(20, 2, 16, 32, torch.device("cpu"))
    # The second candidate is the faster one, whatever it takes.
    slow = dict.fromkeys(SMALL.values(), 2.0) | {other: 1.0}
    for name, work in works.items():
        assert tiles.choose_tiles({name: work}, "card", lambda _, name=name: slow[tiles.tile_for(*name)]) == {
            name: other
        }
    asked: set[tuple[str, tiles.Shape]] = set()
    monkeypatch.setattr(fused_launches, "tile_for", lambda *name: asked.add(name) or tiles.tile_for(*name))
    for work in works.values():
        work()
    assert asked == set(works)
