"""The fp8 products for SM90 without a card: what they compute, by threads (gluon_threads.py); that Triton compiles
them, and that their registers suffice. tests/gpu/test_fp8_gemm.py runs them.

Bound 4e-3 for bf16 results (one rounding is up to 2^-9); a scale of another block or a lost block shows as 1e-1.
"""

import re

import pytest
import torch
from torch import Tensor

from moe.kernels.fp8_gemm_sm90 import STAGES, SWIZZLED, fp8_kernel
from moe.quantize import Quantized, fp8_rows, fp8_squares
from moe.reference import CLAMP_LIMIT, CLAMP_SLOPE, expert_activation
from tests.unit import gluon_threads
from tests.unit.gluon_compile import MOST_SHARED, compile_kernel
from tests.unit.gluon_threads import Descriptor, run_program

# Experts without rows first, last and between; one row; tiles that end with a warpgroup's rows and within them.
ENDS = [[0, 1, 1, 64, 193, 400, 400], [256], [0, 0]]


def problem(ends: list[int], inner: int, width: int) -> tuple[Quantized, Quantized]:
    """Rows, some of no expert, and weights, whose blocks are of very different sizes: a wrong scale cannot hide."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        blocks = torch.randint(-6, 7, (*shape[:-1], -(-shape[-1] // 128)), generator=generator)
        values = torch.randn(shape, generator=generator) * 2.0 ** blocks.repeat_interleave(128, -1)[..., : shape[-1]]
        return values.bfloat16()

    return fp8_rows(draw(ends[-1] + 10, inner)), fp8_squares(draw(len(ends), width, inner))


def run(x: Quantized, w: Quantized, ends: list[int], out: Tensor, gated: tuple[Tensor, ...] | None, **how: int) -> None:
    constants = {"PROGRAMS": 3, "STAGES": 3, "GROUP": 2, "CLAMPED": False, "LIMIT": 0.0, "SLOPE": 0.0, **how}
    operands = Descriptor(x.values), x.scales.t().contiguous(), Descriptor(w.values.flatten(0, 1)), w.scales
    given = *operands, torch.tensor(ends, dtype=torch.int32), out, *(gated or (None, None, None))
    sizes = len(x.values), x.values.shape[1], out.shape[1], len(ends), 1
    for number in range(constants["PROGRAMS"]):
        run_program(fp8_kernel, number, (*given, *sizes), {**constants, "GATED": gated is not None, "CARD": False})


def agrees(found: Tensor, x: Quantized, w: Quantized, ends: list[int]) -> bool:
    """Rows of experts are their products, others are as they were."""
    for expert, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
        exact = x.dequantize(torch.float32)[start:end].double() @ w.dequantize(torch.float32)[expert].double().t()
        if not (found[start:end].double() - exact).norm() <= 4e-3 * exact.norm():
            return False
    return bool(found[ends[-1] :].isnan().all())


@pytest.mark.parametrize("ends", ENDS)
@pytest.mark.parametrize(("inner", "width"), [(272, 400), (128, 256), (512, 144), (16, 16)])
def test_rows(ends: list[int], inner: int, width: int) -> None:
    x, w = problem(ends, inner, width)
    out = torch.full((len(x.values), width), float("nan")).bfloat16()
    run(x, w, ends, out, None)
    assert agrees(out, x, w, ends)


@pytest.mark.parametrize("how", [{"PROGRAMS": 1}, {"STAGES": 2}, {"STAGES": 4, "GROUP": 1}, {"PROGRAMS": 20}])
def test_rows_cut_otherwise(how: dict[str, int]) -> None:
    x, w = problem(ENDS[0], 640, 600)
    out = torch.full((len(x.values), 600), float("nan")).bfloat16()
    run(x, w, ENDS[0], out, None, **how)
    assert agrees(out, x, w, ENDS[0])


@pytest.mark.parametrize("ends", ENDS)
@pytest.mark.parametrize("clamped", [False, True])
def test_gated(ends: list[int], clamped: bool) -> None:
    hidden = 384
    x, w = problem(ends, 272, 2 * hidden)
    rows, known = len(x.values), ends[-1]
    h = torch.full((rows, 2 * hidden), float("nan")).bfloat16()
    values, scales = torch.full((rows, hidden), 0xAA, dtype=torch.uint8), torch.zeros(3, rows, dtype=torch.uint8)
    weights_P = torch.rand(rows, generator=torch.Generator().manual_seed(1))
    how = {"CLAMPED": clamped, "LIMIT": CLAMP_LIMIT, "SLOPE": CLAMP_SLOPE}
    run(x, w, ends, h, (weights_P, values, scales), **how)
    assert agrees(h, x, w, ends)
    gate, up = h[:known].float().chunk(2, -1)
    act = expert_activation(gate, up, "clamped_swiglu" if clamped else "swiglu")
    expected = fp8_rows((act * weights_P[:known, None]).bfloat16())
    assert torch.equal(scales[:, :known].t(), expected.scales)
    # Where fp32 is rounded another way, a number of bf16 may differ by a bit, and its code by one.
    differ = (values[:known].int() - expected.values.view(torch.uint8).int()).abs()
    assert not (differ > 1).any() and (differ > 0).sum() <= 1e-3 * differ.numel()
    assert bool((values[known:] == 0xAA).all())


def test_a_ring_that_is_freed_too_early_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the tests above would not say much of the ring."""
    monkeypatch.setattr(gluon_threads, "PATIENCE", 1.0)
    barriers = gluon_threads.HOPPER["mbarrier"]
    monkeypatch.setattr(barriers, "init", lambda barrier, count: setattr(barrier, "count", 1))
    x, w = problem([256], 640, 256)
    out = torch.full((len(x.values), 256), float("nan")).bfloat16()
    try:
        run(x, w, [256], out, None)
    except AssertionError:
        return
    assert not agrees(out, x, w, [256])


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("clamped", [False, True])
def test_compiles_without_spilling(gated: bool, clamped: bool) -> None:
    constants = {"PROGRAMS": 132, "STAGES": STAGES, "GROUP": 8, "GATED": gated, "CLAMPED": clamped}
    constants |= {"LIMIT": CLAMP_LIMIT, "SLOPE": CLAMP_SLOPE, "CARD": True}
    types = {
        "a_desc": f"tensordesc<fp8e4nv[64, 128],{SWIZZLED}>",
        "b_desc": f"tensordesc<fp8e4nv[128, 128],{SWIZZLED}>",
    }
    types |= {"a_scales": "*u8", "b_scales": "*u8", "offsets": "*i32", "out": "*bf16"}
    types |= {"weights": "*fp32", "act": "*u8", "act_scales": "*u8"}
    absent = {} if gated else dict.fromkeys(("weights", "act", "act_scales"))
    aligned = [name for name in ("out", "act", "inner", "width") if name not in absent]
    compiled = compile_kernel(fp8_kernel, types, constants | absent, aligned)
    assert compiled.shared <= MOST_SHARED and compiled.spilled == 0
    # Two warpgroups that multiply, and one for the warp that brings blocks.
    assert compiled.warps == 12 and compiled.walks == 3
    product = r"wgmma\.mma_async\.sync\.aligned\.m64n128k32\.f32\.e4m3\.e4m3"
    assert len(re.findall(product, compiled.ptx)) == 16
