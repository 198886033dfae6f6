"""The fused expert kernels on the card, with their own tiles, against the loop over experts in fp64.

Descriptors cut blocks off where an expert's pairs end and where a row ends: here at places of all kinds. Memory that
nobody has written is NaN. Bound 1e-2 as in test_moe_layer.py: bf16 rounding of h, a, y and their gradients.
"""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from comms.kernels.gather_sum import gather_sum
from moe import fused_launches, tiles
from moe.config import MoEConfig
from moe.experts import GroupedExperts
from moe.fused_experts import down_backward, up_grad, weight_grad, weight_grad_and_sums
from moe.fused_launches import launch_rows, launch_up, launch_weight_grad
from moe.kernels import rows_sm90, up_sm90
from moe.kernels.pair_rows import expand_rows
from moe.kernels.sort_pairs import sort_pairs
from moe.tiles import Tile

pytestmark = pytest.mark.gpu
BOUND = 1e-2
# Rows behind the last one, and room behind the last pair.
SPARE_ROWS, SPARE_PAIRS = 37, 301


@pytest.fixture(autouse=True)
def _memory_starts_poisoned() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def choose(num_rows: int, config: MoEConfig, routing: str) -> Tensor:
    """(R, K) different expert ids of each row, some of them -1."""
    E, K = config.num_experts, config.top_k
    if routing in ("first", "last"):
        return torch.full((num_rows, K), -1).index_fill_(1, torch.tensor([0]), 0 if routing == "first" else E - 1)
    generator = torch.Generator().manual_seed(1)
    weights = torch.arange(1, E + 1).float() ** (-1.5 if routing == "zipf" else 0.0)
    if routing == "ends_idle":
        weights[[0, -1]] = 0
    ids_RK = torch.stack([torch.multinomial(weights, K, generator=generator) for _ in range(num_rows)])
    return torch.where(torch.rand(ids_RK.shape, generator=generator) < 0.1, -1, ids_RK)


def results(backend: str, dtype: torch.dtype, config: MoEConfig, dim: int, ids_RK: Tensor, room: bool) -> list[Tensor]:
    """Output and every gradient: of rows, routing weights and parameters, from the same bf16 numbers."""
    generator, num_rows = torch.Generator().manual_seed(0), ids_RK.shape[0]

    def draw(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=generator) * scale).bfloat16().to("cuda", dtype)

    layer = GroupedExperts(MoEConfig(**{**vars(config), "backend": backend}), dim).to("cuda", dtype)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(draw(*parameter.shape, scale=parameter.shape[-1] ** -0.5))
    rows, weights, upstream = draw(num_rows, dim), draw(*ids_RK.shape).abs(), draw(num_rows, dim)
    leaves = [rows.requires_grad_(), weights.requires_grad_(), *layer.parameters()]
    num_pairs, ids_RK = int((ids_RK >= 0).sum()), ids_RK.cuda()
    if room:
        behind = rows.new_full((SPARE_ROWS, dim), float("nan"))
        ids_RK = torch.cat([ids_RK, ids_RK.new_full((SPARE_ROWS, ids_RK.shape[1]), -1)])
        weights = torch.cat([weights, weights.new_zeros(SPARE_ROWS, weights.shape[1])])
        rows, upstream = torch.cat([rows, behind]), torch.cat([upstream, behind])
        num_pairs += SPARE_PAIRS
    out = layer(rows, ids_RK, weights, num_pairs, exact=not room)
    return [out[:num_rows].detach(), *torch.autograd.grad(out, leaves, upstream)]


@pytest.mark.parametrize("room", [False, True])
@pytest.mark.parametrize(
    ("num_rows", "dim", "hidden", "experts", "top_k", "routing"),
    [
        pytest.param(300, 128, 256, 8, 2, "uniform", id="whole_tiles"),
        pytest.param(301, 136, 72, 5, 3, "zipf", id="no_width_of_a_tile"),
        pytest.param(129, 2888, 1032, 3, 2, "uniform", id="one_more_than_tiles"),
        pytest.param(1, 8, 8, 1, 1, "uniform", id="smallest"),
        pytest.param(517, 264, 136, 256, 16, "zipf", id="many_experts"),
        pytest.param(130, 104, 56, 6, 2, "first", id="first_alone"),
        pytest.param(130, 104, 56, 6, 2, "last", id="last_alone"),
        pytest.param(257, 64, 264, 7, 4, "ends_idle", id="ends_idle"),
    ],
)
@pytest.mark.parametrize(
    "options", [{}, {"activation": "clamped_swiglu", "linear_bias": True}], ids=["plain", "biased"]
)
def test_equals_the_loop_over_experts(
    num_rows: int, dim: int, hidden: int, experts: int, top_k: int, routing: str, options: dict, room: bool
) -> None:
    config = MoEConfig(num_experts=experts, top_k=top_k, expert_dim=hidden, **options)
    ids_RK = choose(num_rows, config, routing)
    ours = results("fused", torch.bfloat16, config, dim, ids_RK, room)
    oracle = results("reference", torch.float64, config, dim, ids_RK, False)
    names = ["out", "rows", "weights", "w_gate_up", "w_down", "b_gate_up", "b_down"]
    idle = [expert for expert in range(experts) if not bool((ids_RK == expert).any())]
    for name, a, b in zip(names[: len(ours)], ours, oracle, strict=True):
        error = float((a.double() - b).norm() / b.norm())
        assert error <= BOUND, (name, error)
        assert name[:2] not in ("w_", "b_") or bool((a[idle] == 0).all()), name


def test_the_copy_engine_touches_nothing_beside_its_block() -> None:
    """Results of rows_kernel and of weight gradients, next to each other in memory, with guards around them."""
    from moe.fused_launches import launch_rows, launch_weight_grad

    P, inner, width, E = 333, 136, 264, 5
    ends_E = torch.tensor([100, 100, 229, 230, 300], dtype=torch.int32, device="cuda")
    a, w = torch.randn(P, inner, device="cuda").bfloat16(), torch.randn(E, width, inner, device="cuda").bfloat16()
    guard = 512
    for rows, launch in (
        (P, lambda out: launch_rows("down", a, w, ends_E, out, False)),
        (E * width, lambda out: launch_weight_grad(torch.ones(P, width, device="cuda").bfloat16(), a, ends_E, out)),
    ):
        columns = width if rows == P else inner
        memory = torch.full((guard + rows * columns + guard,), 7.0, device="cuda", dtype=torch.bfloat16)
        out = memory[guard : guard + rows * columns]
        launch(out.view(P, width) if rows == P else out.view(E, width, inner))
        written = 300 * width if rows == P else rows * columns
        assert bool((memory[:guard] == 7).all()) and bool((memory[guard + written :] == 7).all())


def test_what_runs_beside_products_gives_the_same_bits() -> None:
    """Fifty times in a row without a wait, at sizes for which both take a while, over memory that was just let go."""
    generator = torch.Generator("cuda").manual_seed(2)
    R, K, E, D, F = 4096, 4, 16, 1024, 512

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device="cuda").bfloat16()

    ids_RK = torch.rand(R, E, generator=generator, device="cuda").topk(K).indices
    pairs = sort_pairs(ids_RK, E, R * K)
    slots_RK, offsets_E, w_E2FD = pairs.slots_RK, pairs.offsets_E, draw(E, 2, F, D)
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(50):
        rows_RD, dh_PH = draw(R, D), draw(R * K, 2 * F)
        d_PD, rows_PD = up_grad(dh_PH, w_E2FD, offsets_E), expand_rows(rows_RD, slots_RK, R * K)
        together = weight_grad_and_sums(dh_PH, rows_PD, offsets_E, d_PD, slots_RK)
        alone = weight_grad(dh_PH, rows_PD, offsets_E), gather_sum(d_PD, slots_RK)
        del rows_RD, dh_PH, d_PD, rows_PD
        for beside, one in zip(together, alone, strict=True):
            wrong += (beside != one).sum()
    assert wrong.item() == 0


def test_experts_in_parts_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """As above, for rows copied and the activation's gradient formed beside products; some experts have no pairs."""
    generator = torch.Generator("cuda").manual_seed(3)
    R, K, E, D, F = 8192, 2, 16, 1024, 512
    ids_RK = torch.randint(4, 12, (R, K), generator=generator, device="cuda")
    ids_RK[::16, 0] = torch.arange(R // 16, device="cuda") % 3
    ids_RK[1::16, 1], ids_RK[2::16, 0] = 13, -1
    num_pairs = int((ids_RK >= 0).sum())
    pairs = sort_pairs(ids_RK, E, num_pairs)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device="cuda").bfloat16()

    w_EDF, weights_P = draw(E, D, F), torch.rand(num_pairs, generator=generator, device="cuda")
    # Few programs, which take several turns.
    monkeypatch.setattr(fused_launches, "BESIDE_PROGRAMS", 4)
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(50):
        dout_RD, rows_RD, h_PH = draw(R, D), draw(R, D), draw(num_pairs, 2 * F)
        given = dout_RD, rows_RD, pairs.slots_RK, weights_P, w_EDF, pairs.offsets_E, h_PH, "swiglu"
        monkeypatch.setattr(fused_launches, "LEAST_OF_PART", 0)
        in_parts = down_backward(*given)
        monkeypatch.setattr(fused_launches, "LEAST_OF_PART", 10**12)
        whole = down_backward(*given)
        copies = expand_rows(dout_RD, pairs.slots_RK, num_pairs), expand_rows(rows_RD, pairs.slots_RK, num_pairs)
        del dout_RD, rows_RD, h_PH, given
        for ours, expected in zip((*in_parts, *in_parts[3:]), (*whole, *copies), strict=True):
            wrong += (ours != expected).sum()
    assert wrong.item() == 0


# Cuts that the kernels know; those of one kernel differ in all that sums do not depend on.
CUTS = {
    "up": (
        Tile(128, 128, 64, 8, 3, group=8, parts=2),
        Tile(128, 128, 64, 8, 4, group=4, parts=2),
        Tile(128, 128, 64, 8, 3, parts=2, specialized=True),
    ),
    "down": (Tile(128, 256, 64, 8, 3, group=8), Tile(128, 128, 64, 4, 3), Tile(128, 256, 64, 8, 3, specialized=True)),
    "act_grad": (Tile(128, 256, 64, 8, 3, group=8), Tile(128, 128, 64, 4, 3)),
    "weight_grad": (Tile(128, 256, 64, 8, 3, group=8), Tile(128, 256, 32, 8, 5)),
}


@pytest.mark.parametrize("chunk", [None, 0, 1])
@pytest.mark.parametrize("kernel", CUTS)
def test_every_cut_gives_the_same_bits(kernel: str, chunk: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts end anywhere, the last columns are no whole block, and what is behind the pairs may be anything.

    Of two chunks of three experts each, one or, without a chunk, all six experts' pairs or both chunks' sums.
    """
    generator = torch.Generator("cuda").manual_seed(4)
    # Rows by index are known to specialised warps where 64 divides D.
    P, E, D, F = 3000, 3, 576 if kernel == "up" else 520, 392

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device="cuda").bfloat16()

    ends_S = torch.tensor([700, 700, 701, 1900, 1901, 2950], dtype=torch.int32, device="cuda")
    whole = chunk is None and kernel != "weight_grad"
    x_PD, a_PF, w_EDF, w_E2FD = draw(P, D), draw(P, F), draw(2 * E, D, F), draw(2 * E, 2, F, D)
    for rows in (x_PD, a_PF):
        rows[2950:] = float("nan")
    w_EDF, w_E2FD = (w if whole else w[:E] for w in (w_EDF, w_E2FD))
    b_E2F = draw(*w_E2FD.shape[:3])
    # Specialised warps are for SM90: on other cards the cuts of the other kernels are compared.
    sm90 = torch.cuda.get_device_capability()[0] == 9
    cuts = [tile for tile in CUTS[kernel] if sm90 or not tile.specialized]
    launched: list[str] = []
    for module, name in ((rows_sm90, "launch_rows"), (up_sm90, "launch_up")):
        launch = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *given, launch=launch: launched.append("") or launch(*given))
    found = []
    for tile in cuts:
        monkeypatch.setattr(tiles, "CANDIDATES", {kernel: (tile,)})
        shapes = (P, 2 * F), (P, D), (P, F), (E, D, F)
        h_PH, y_PD, a, dw = (torch.full(shape, 7.0, device="cuda").bfloat16() for shape in shapes)
        if kernel == "up":
            weights_P = torch.linspace(0, 1, P, device="cuda")
            rows_P = torch.arange(P, dtype=torch.int32, device="cuda").flip(0).clamp(max=2949)
            # What is behind the pairs may be any row.
            rows_P[2950:] = 2999
            given = x_PD, rows_P, weights_P, w_E2FD, b_E2F if chunk else None, ends_S
            launch_up(*given, h_PH, a, "clamped_swiglu" if chunk else "swiglu", chunk or 0)
        elif kernel == "down":
            launch_rows(kernel, a_PF, w_EDF, ends_S, y_PD, False, chunk=chunk or 0)
        elif kernel == "act_grad":
            launch_rows(kernel, x_PD, w_EDF, ends_S, a, True, chunk=chunk or 0)
        else:
            launch_weight_grad(x_PD, a_PF, ends_S, dw, chunk=chunk)
        found.append((h_PH, y_PD, a, dw))
    assert len(launched) == sum(tile.specialized for tile in cuts) and len(found) > 1
    assert all(made.isfinite().all() for made in found[0])
    assert any((made != 7).any() for made in found[0])
    assert all(torch.equal(x, y) for other in found[1:] for x, y in zip(found[0], other, strict=True))
