"""The bf16 products for SM90 without a card: what they compute, by threads (gluon_threads.py), and that they compile.

Bound 4e-3 for bf16 results (one rounding is up to 2^-9); a lost step or another expert's row shows as 1e-1.
"""

import re

import pytest
import torch
from torch import Tensor

from moe.kernels.rows_sm90 import rows_kernel
from moe.kernels.up_sm90 import up_kernel
from moe.kernels.warps_sm90 import STAGES, swizzled
from moe.reference import CLAMP_LIMIT, CLAMP_SLOPE, expert_activation
from tests.unit import gluon_threads
from tests.unit.gluon_compile import MOST_SHARED, Compiled, compile_kernel
from tests.unit.gluon_threads import Descriptor, run_program

BOUND = 4e-3
# Experts without pairs first, last and between; one pair; tiles that end with a warpgroup's rows and within them.
ENDS = [[0, 1, 1, 64, 193, 400, 400], [256], [0, 0]]
CUTS = [{"PROGRAMS": 1}, {"STAGES": 2}, {"STAGES": 4, "GROUP": 1}, {"PROGRAMS": 20}]


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).bfloat16()


def poisoned(*shape: int) -> Tensor:
    return torch.full(shape, float("nan")).bfloat16()


def run(kernel: object, given: tuple[object, ...], **how: int) -> None:
    constants = {"PROGRAMS": 3, "STAGES": 3, "GROUP": 2, **how}
    for number in range(constants["PROGRAMS"]):
        run_program(kernel, number, given, constants)


def rows(a_PI: Tensor, w_EOI: Tensor, ends: list[int], first: int = 0, **how: int) -> Tensor:
    """The product; `ends` may begin before w's experts, at `first`."""
    E, width, inner = w_EOI.shape
    out = poisoned(len(a_PI), width)
    operands = Descriptor(a_PI), Descriptor(w_EOI), torch.tensor(ends, dtype=torch.int32), Descriptor(out, ragged=True)
    run(rows_kernel, (*operands, inner, width, E, first), **how)
    return out


def check_rows(out: Tensor, a_PI: Tensor, w_EOI: Tensor, ends: list[int], first: int = 0) -> None:
    """Rows of experts are their products, others are as they were."""
    starts = [0, *ends]
    written = torch.zeros(len(out), dtype=torch.bool)
    for expert, weight in enumerate(w_EOI.double()):
        part = slice(starts[first + expert], ends[first + expert])
        exact = a_PI[part].double() @ weight.t()
        assert (out[part].double() - exact).norm() <= BOUND * exact.norm(), expert
        written[part] = True
    assert bool(out[~written].isnan().all())


@pytest.mark.parametrize("ends", ENDS)
@pytest.mark.parametrize(("inner", "width"), [(200, 328), (64, 256), (8, 16)])
def test_rows(ends: list[int], inner: int, width: int) -> None:
    a_PI = draw(ends[-1] + 10, inner)
    # What is behind an expert's pairs may be anything: it goes into no sum that is kept.
    a_PI[ends[-1] :] = float("nan")
    w_EOI = draw(len(ends), width, inner)
    check_rows(rows(a_PI, w_EOI, ends), a_PI, w_EOI, ends)


@pytest.mark.parametrize("how", CUTS)
def test_rows_cut_otherwise(how: dict[str, int]) -> None:
    a_PI, w_EOI = draw(410, 392), draw(7, 600, 392)
    check_rows(rows(a_PI, w_EOI, ENDS[0], **how), a_PI, w_EOI, ENDS[0])


@pytest.mark.parametrize("first", [0, 3])
def test_rows_of_some_experts(first: int) -> None:
    a_PI, w_EOI = draw(410, 72), draw(3, 264, 72)
    check_rows(rows(a_PI, w_EOI, ENDS[0], first), a_PI, w_EOI, ENDS[0], first)


@pytest.mark.parametrize("ends", ENDS)
@pytest.mark.parametrize(("dim", "hidden"), [(192, 200), (64, 128)])
@pytest.mark.parametrize("biased", [False, True])
def test_up(ends: list[int], dim: int, hidden: int, biased: bool) -> None:
    """Biased and clamped, or neither."""
    check_up(ends, dim, hidden, biased)


@pytest.mark.parametrize("how", CUTS)
def test_up_cut_otherwise(how: dict[str, int]) -> None:
    check_up(ENDS[0], 320, 300, False, **how)


def test_up_of_some_experts() -> None:
    check_up(ENDS[0], 128, 72, False, first=3)


def check_up(ends: list[int], dim: int, hidden: int, biased: bool, first: int = 0, **how: int) -> None:
    """h and the activation of the experts from `first` on; rows are found by index."""
    pairs, experts, starts = ends[-1] + 10, len(ends) - first, [0, *ends]
    x_RD, w_E2FD = draw(57, dim), draw(experts, 2, hidden, dim)
    b_E2F = draw(experts, 2, hidden) if biased else None
    generator = torch.Generator().manual_seed(2)
    rows_P = torch.randint(57, (pairs,), generator=generator, dtype=torch.int32)
    weights_P = torch.rand(pairs, generator=generator)
    # What is behind the last pair may be anything.
    rows_P[ends[-1] :], weights_P[ends[-1] :] = 10**9, float("nan")
    h_PH, a_PF = poisoned(pairs, 2 * hidden), poisoned(pairs, hidden)
    descriptors = Descriptor(h_PH.view(pairs, 2, hidden), ragged=True), Descriptor(a_PF, ragged=True)
    weights = Descriptor(w_E2FD.flatten(0, 1)), b_E2F, torch.tensor(ends, dtype=torch.int32)
    sizes = dim, hidden, experts, first
    constants = {"HAS_BIAS": biased, "CLAMPED": biased, "LIMIT": CLAMP_LIMIT, "SLOPE": CLAMP_SLOPE, "CARD": False}
    run(up_kernel, (x_RD, rows_P, weights_P, *weights, *descriptors, *sizes), **constants, **how)
    written = torch.zeros(pairs, dtype=torch.bool)
    for expert in range(experts):
        part = slice(starts[first + expert], ends[first + expert])
        exact = x_RD[rows_P[part].long()].double() @ w_E2FD[expert].flatten(0, 1).double().t()
        exact += 0 if b_E2F is None else b_E2F[expert].flatten().double()
        assert (h_PH[part].double() - exact).norm() <= BOUND * exact.norm(), expert
        gate, up = h_PH[part].float().chunk(2, -1)
        act = expert_activation(gate, up, "clamped_swiglu" if biased else "swiglu") * weights_P[part, None]
        assert (a_PF[part].float() - act).norm() <= BOUND * act.norm(), expert
        written[part] = True
    assert bool(h_PH[~written].isnan().all()) and bool(a_PF[~written].isnan().all())


@pytest.mark.parametrize("fence", ["fence_async_shared", "store_wait"])
def test_a_missing_fence_or_wait_is_found(fence: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if fence == "store_wait":
        monkeypatch.setattr(gluon_threads.HOPPER["tma"], fence, lambda pendings: None)
    else:
        monkeypatch.setitem(gluon_threads.HOPPER, fence, lambda: None)
    a_PI, w_EOI = draw(256, 64), draw(1, 256, 64)
    with pytest.raises(AssertionError):
        check_rows(rows(a_PI, w_EOI, [256]), a_PI, w_EOI, [256])


def test_a_ring_that_is_freed_too_early_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the tests above would not say much of the ring."""
    monkeypatch.setattr(gluon_threads, "PATIENCE", 1.0)
    wait = gluon_threads.HOPPER["warpgroup_mma_wait"]
    # Two products on their way where the kernel frees the second last one's blocks.
    monkeypatch.setitem(
        gluon_threads.HOPPER, "warpgroup_mma_wait", lambda outstanding, deps: wait(2 * outstanding, deps)
    )
    a_PI, w_EOI = draw(256, 640), draw(1, 256, 640)
    with pytest.raises(AssertionError):
        check_rows(rows(a_PI, w_EOI, [256]), a_PI, w_EOI, [256])


def of_bf16(*block: int) -> str:
    return f"tensordesc<bf16{list(block)},{swizzled(len(block))}>"


def test_rows_compile_without_spilling() -> None:
    types = {"a_desc": of_bf16(64, 64), "w_desc": of_bf16(1, 256, 64), "out_desc": of_bf16(1, 1, 64, 64)}
    constants = {"PROGRAMS": 132, "STAGES": STAGES, "GROUP": 8}
    compiled = compile_kernel(rows_kernel, {**types, "offsets": "*i32"}, constants, ["inner", "width"])
    check_compiled(compiled)


@pytest.mark.parametrize("biased", [False, True])
def test_up_compiles(biased: bool) -> None:
    types = {"x": "*bf16", "rows": "*i32", "weights": "*fp32", "bias": "*bf16", "offsets": "*i32"}
    types |= {"w_desc": of_bf16(2, 128, 64), "h_desc": of_bf16(1, 1, 64, 1, 64), "a_desc": of_bf16(1, 1, 64, 64)}
    constants = {"PROGRAMS": 132, "STAGES": STAGES, "GROUP": 8, "HAS_BIAS": biased, "CLAMPED": biased}
    constants |= {"LIMIT": CLAMP_LIMIT, "SLOPE": CLAMP_SLOPE, "CARD": True}
    constants |= {} if biased else {"bias": None}
    compiled = compile_kernel(up_kernel, types, constants, ["x", "dim", "hidden"])
    # Some numbers of the epilogue, once in a tile.
    check_compiled(compiled, spilled=32)
    # Rows come 16 bytes at a time.
    assert len(re.findall(r"cp\.async\.cg\.shared\.global .*0x10", compiled.ptx)) == 8


def check_compiled(compiled: Compiled, spilled: int = 0) -> None:
    assert compiled.shared <= MOST_SHARED and compiled.spilled <= spilled and compiled.warps == 12
    assert compiled.walks == 3
    product = r"wgmma\.mma_async\.sync\.aligned\.m64n256k16\.f32\.bf16\.bf16"
    # Four of a step, in each of two warpgroups.
    assert len(re.findall(product, compiled.ptx)) == 8
