"""The fused expert kernels in fp32 under Triton's interpreter, against the loop over experts in fp64.

Bound 1e-5: fp32 rounding of sums over at most 48 terms (seen: 2e-7); a dropped row, tile or term shows as 1e-2 or more.
"""

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from moe import fused_experts as fused
from moe import fused_launches, tiles
from moe.config import MoEConfig
from moe.experts import GroupedExperts
from moe.layer import BalanceScale, MoE
from moe.tiles import Tile
from scripts.moe_sides import SHAPES, Shape, config_of, saved_bound
from tests.alive import Alive

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
    # An even number of experts in parts, as large ones on a GPU.
    monkeypatch.setattr(fused_launches, "LEAST_OF_PART", 0)
    # Few programs, which take several turns.
    monkeypatch.setattr(fused_launches, "BESIDE_PROGRAMS", 1)


def choose(num_rows: int, config: MoEConfig, routing: str) -> Tensor:
    """(R, K) expert ids, some of them -1."""
    generator = torch.Generator().manual_seed(1)
    E, K = config.num_experts, config.top_k
    if routing in ("one", "first"):
        return torch.full((num_rows, K), -1).index_fill_(1, torch.tensor([0]), E - 1 if routing == "one" else 0)
    if routing == "none":
        return torch.full((num_rows, K), -1)
    power = 3.0 if routing == "zipf" else 0.0
    weights = torch.arange(1, E + 1).float() ** -power
    if routing == "ends":
        weights[[0, -1]] = 0
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
        pytest.param(3, 8, "uniform", {"num_experts": 256, "top_k": 16, "expert_dim": 8}, id="many_experts"),
        pytest.param(33, 72, "first", {"expert_dim": 56}, id="first_expert"),
        pytest.param(18, 104, "ends", {"expert_dim": 8}, id="first_and_last_idle"),
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


@pytest.mark.parametrize("routing", ["first", "ends"])
def test_idle_experts_at_either_end_and_room_behind_the_last_pair(routing: str) -> None:
    config = MoEConfig(num_experts=5, top_k=2, expert_dim=56)
    ids_RK = choose(19, config, routing)
    expected = results("fused", torch.float32, config, 72, ids_RK)
    idle = [expert for expert in range(5) if not bool((ids_RK == expert).any())]
    assert 4 in idle
    for name, ours in results("fused", torch.float32, config, 72, ids_RK, room=40).items():
        assert (ours - expected[name]).norm() <= 1e-6 * expected[name].norm(), name
        assert not name.startswith("w_") or bool((ours[idle] == 0).all()), name


def test_strided_inputs_are_as_good_as_copies_of_them() -> None:
    """Rows and routing weights that are columns of something wider, starting anywhere; a gradient that is expanded."""
    config = MoEConfig(num_experts=4, top_k=2, expert_dim=24, backend="fused")
    layer, ids_RK = GroupedExperts(config, 16), choose(9, config, "uniform")
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(2)) / 4)
    wide = torch.randn(9, 16 + 1 + 2 + 3, generator=torch.Generator().manual_seed(3))
    found = []
    for copied in (True, False):
        rows, weights = wide[:, 1:17], wide[:, 18:20]
        assert rows.storage_offset() == 1 and not rows.is_contiguous()
        given = [(x.clone() if copied else x.detach()).requires_grad_() for x in (rows, weights)]
        out = layer(given[0], ids_RK, given[1], int((ids_RK >= 0).sum()))
        found.append([out.detach(), *torch.autograd.grad(out.sum(), [*given, *layer.parameters()])])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_ids_may_be_strided_where_there_is_room_for_more_pairs() -> None:
    """Slots then have the order of the ids in memory: here a row's ids are not next to each other."""
    config = MoEConfig(num_experts=4, top_k=2, expert_dim=24)
    ids_RK = choose(9, config, "uniform")
    layer, num_pairs = GroupedExperts(MoEConfig(**{**vars(config), "backend": "fused"}), 16), int((ids_RK >= 0).sum())
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 4)
    rows, weights = torch.randn(9, 16, generator=generator).requires_grad_(), torch.rand(9, 2, generator=generator)
    found = []
    for ids in (ids_RK, ids_RK.t().contiguous().t()):
        out = layer(rows, ids, weights, num_pairs + 3, exact=False)
        found.append([out.detach(), *torch.autograd.grad(out.sum(), [rows, *layer.parameters()])])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_what_forward_keeps_is_rows_h_and_indices() -> None:
    """The bound on saved bytes, of a whole layer: rows and h; beside them a few numbers of each pair."""
    T, D, F, E, K = 24, 32, 40, 16, 3
    layer = MoE(MoEConfig(num_experts=E, top_k=K, expert_dim=F, backend="fused"), D)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(generator=torch.Generator().manual_seed(1))
    x = torch.randn(1, T, D, generator=torch.Generator().manual_seed(2), requires_grad=True)
    kept: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        out = layer(x)[0]
    out.sum().backward()
    for parameter in layer.parameters():
        kept.pop(parameter.untyped_storage().data_ptr(), None)
    big = 4 * (T * D + 2 * T * K * F)
    # Ids in int64, slots, weights of pairs and of the choice, a mask; offsets. Not 4 * T * E for all probabilities.
    small = T * K * (8 + 4 + 4 + 4 + 1) + 4 * E
    assert big <= sum(kept.values()) <= big + small, (sum(kept.values()) - big, small, list(kept.values()))


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_what_is_alive_after_forward_at_the_measured_sizes(shape: Shape) -> None:
    """As an allocator counts, in fp32: beside rows and h 20 bytes of each pair, which are its id, places and weight."""
    with FakeTensorMode():
        layer = MoE(config_of(shape, "fused"), shape.dim)
        x = torch.randn(1, shape.tokens, shape.dim, requires_grad=True)
        with Alive(layer.parameters()) as alive:
            out = layer(x)[0]
            # Views of x count, and with them all of it.
            kept = alive.now() - out.untyped_storage().nbytes()
    small = kept - 4 // 2 * saved_bound(shape)
    assert 0 < small <= 20 * shape.tokens * shape.top_k + 4 * (shape.experts + 1)


def test_a_layer_compiles_as_one_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every operator has a fake: router, sort, fused experts and their backward are one graph."""
    layer = MoE(MoEConfig(num_experts=4, top_k=2, expert_dim=24, backend="fused", aux_loss=0.1), 16)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(generator=torch.Generator().manual_seed(1))
    x = torch.randn(2, 6, 16, generator=torch.Generator().manual_seed(2))
    found = []
    for forward in (layer, torch.compile(layer, backend="aot_eager", fullgraph=True)):
        leaf = x.clone().requires_grad_()
        out, stats = forward(leaf, scale=BalanceScale(12, 2, 1))
        grads = torch.autograd.grad(out.square().sum() + stats.aux_loss, [leaf, *layer.parameters()])
        found.append([out.detach(), *grads])
    for ours, expected in zip(*reversed(found), strict=True):
        assert (ours - expected).norm() <= 1e-6 * expected.norm()


def test_the_same_bits_every_time() -> None:
    config = MoEConfig(num_experts=4, top_k=2, expert_dim=24)
    ids_RK = choose(30, config, "uniform")
    first, second = (results("fused", torch.float32, config, 16, ids_RK) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_experts_in_parts_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    config = MoEConfig(num_experts=4, top_k=2, expert_dim=24)
    ids_RK = choose(30, config, "zipf")
    in_parts = results("fused", torch.float32, config, 16, ids_RK)
    original, sizes = fused_launches.launch_weight_grad, []

    def launch(left: Tensor, right: Tensor, ends: Tensor, out: Tensor, **words: int) -> None:
        sizes.append(len(out))
        original(left, right, ends, out, **words)

    monkeypatch.setattr(fused_launches, "launch_weight_grad", launch)
    results("fused", torch.float32, config, 16, ids_RK)
    monkeypatch.setattr(fused_launches, "LEAST_OF_PART", 10**9)
    whole = results("fused", torch.float32, config, 16, ids_RK)
    assert sizes == [2, 2, 4]
    assert all(torch.equal(in_parts[name], whole[name]) for name in whole)


def test_a_row_beyond_an_experts_end_does_not_reach_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison above is worth something: off-by-one offsets are found."""
    config = MoEConfig(num_experts=4, top_k=2, expert_dim=24)
    ids_RK = choose(30, config, "uniform")
    right = results("fused", torch.float32, config, 16, ids_RK)
    original = fused_launches.launch_weight_grad

    def launch(left: Tensor, right: Tensor, ends: Tensor, out: Tensor, **words: int) -> None:
        original(left, right, ends - 1, out, **words)

    monkeypatch.setattr(fused_launches, "launch_weight_grad", launch)
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
    # Backward launches a part of the experts, by the tile of all of them.
    asked.clear()
    x_PD, h_PH, offsets_E = torch.ones(20, 16), torch.ones(20, 64), torch.tensor([9, 20], dtype=torch.int32)
    slots_RK = torch.arange(20, dtype=torch.int32)[:, None]
    fused.down_backward(x_PD, x_PD, slots_RK, torch.ones(20), torch.ones(2, 16, 32), offsets_E, h_PH, "swiglu")
    assert asked == {("act_grad", (2, 16, 32)), ("weight_grad", (2, 16, 32))}
