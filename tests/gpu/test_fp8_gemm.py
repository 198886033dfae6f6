"""The fp8 products on tensor cores against decoded operands in fp64, and their kernel for SM90 against its twin.

Bound 4e-3 for bf16 results: one rounding is up to 2^-9; sums of 128 products by fp8 tensor cores add little to it.
"""

import pytest
import torch
from torch import Tensor

from moe.fused_experts import coded_act
from moe.kernels import fp8_gemm_portable, fp8_gemm_sm90
from moe.kernels.fp8_gemm import fp8_gated_gemm, fp8_rows_gemm
from moe.quantize import Quantized, fp8_rows, fp8_squares

pytestmark = pytest.mark.gpu


def draw(num_rows: int, inner: int, width: int, experts: int, seed: int = 0) -> tuple[Quantized, Quantized]:
    """Rows and weights whose blocks are of very different sizes: a scale applied to the wrong one cannot hide."""
    generator = torch.Generator("cuda").manual_seed(seed)

    def randn(*shape: int) -> Tensor:
        blocks = torch.randint(-6, 7, (*shape[:-1], -(-shape[-1] // 128)), generator=generator, device="cuda")
        size = 2.0 ** blocks.repeat_interleave(128, -1)[..., : shape[-1]]
        return (torch.randn(shape, generator=generator, device="cuda") * size).bfloat16()

    return fp8_rows(randn(num_rows, inner)), fp8_squares(randn(experts, width, inner))


# Experts without rows first, last and between; one row; tiles that end with a warpgroup's rows and within them; more
# tiles than programs.
ENDS = {
    "uneven": [0, 1, 1, 64, 129, 700, 700, 1001, 1024, 1024],
    "one expert": [1100],
    "none": [0, 0, 0],
    "many tiles": [9000, 9001, 20000, 20500],
}


@pytest.mark.parametrize("name", ENDS)
@pytest.mark.parametrize(("inner", "width"), [(512, 768), (2880, 2880), (16, 16), (128, 4096), (4096, 384)])
def test_equals_its_twin_bit_for_bit(name: str, inner: int, width: int) -> None:
    """The same sums in the same order; nothing behind the last row is written."""
    ends = torch.tensor(ENDS[name], dtype=torch.int32, device="cuda")
    num_rows = ENDS[name][-1] + 76
    x, w = draw(num_rows, inner, width, len(ENDS[name]))
    ours, twin = (torch.full((num_rows, width), float("nan"), device="cuda").bfloat16() for _ in range(2))
    given = x.values, x.scales.t().contiguous(), w.values, w.scales, ends
    fp8_gemm_sm90.launch_rows(*given, ours)
    fp8_gemm_portable.launch_rows(*given, twin)
    assert torch.equal(ours.view(torch.int16), twin.view(torch.int16))
    assert not ours[: ENDS[name][-1]].isnan().any()
    assert ours[ENDS[name][-1] :].isnan().all()


@pytest.mark.parametrize("activation", ["swiglu", "clamped_swiglu"])
@pytest.mark.parametrize("name", ENDS)
@pytest.mark.parametrize(("inner", "hidden"), [(512, 768), (2880, 128), (4096, 1408)])
def test_gated_equals_product_and_activation(name: str, inner: int, hidden: int, activation: str) -> None:
    ends = torch.tensor(ENDS[name], dtype=torch.int32, device="cuda")
    known, num_rows = ENDS[name][-1], ENDS[name][-1] + 76
    x, w = draw(num_rows, inner, 2 * hidden, len(ENDS[name]))
    weights_P = torch.rand(num_rows, device="cuda")
    h, values, scales = fp8_gated_gemm(*x[:2], *w[:2], ends, weights_P, activation)
    expected_h = fp8_rows_gemm(*x[:2], *w[:2], ends)
    expected_values, expected_scales = coded_act(expected_h, weights_P, ends, activation)
    assert torch.equal(h[:known], expected_h[:known])
    assert torch.equal(scales[:known], expected_scales[:known])
    assert torch.equal(values[:known].view(torch.uint8), expected_values[:known].view(torch.uint8))


@pytest.mark.parametrize(("inner", "width"), [(2048, 768), (2880, 2880), (768, 4096), (64, 16)])
def test_against_decoded_operands(inner: int, width: int) -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    ends = torch.tensor([700, 700, 1001, 1024], dtype=torch.int32, device="cuda")
    x = fp8_rows(torch.randn(1100, inner, generator=generator, device="cuda").bfloat16())
    w = fp8_squares(torch.randn(4, width, inner, generator=generator, device="cuda").bfloat16())
    ours = fp8_rows_gemm(x.values, x.scales, w.values, w.scales, ends)
    start = 0
    for expert, end in enumerate(ends.tolist()):
        exact = x.dequantize(torch.float32)[start:end].double() @ w.dequantize(torch.float32)[expert].double().t()
        assert (ours[start:end].double() - exact).norm() <= 4e-3 * exact.norm()
        start = end


def test_does_not_wait_for_the_device_and_repeats() -> None:
    x = fp8_rows(torch.randn(256, 256, device="cuda").bfloat16())
    w = fp8_squares(torch.randn(2, 128, 256, device="cuda").bfloat16())
    ends = torch.tensor([100, 256], dtype=torch.int32, device="cuda")
    first = fp8_rows_gemm(x.values, x.scales, w.values, w.scales, ends)
    torch.cuda.set_sync_debug_mode("error")
    try:
        second = fp8_rows_gemm(x.values, x.scales, w.values, w.scales, ends)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(first, second)
