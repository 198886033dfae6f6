"""The fp8 product under Triton's interpreter against decoded operands in fp64.

Bound 4e-3 for bf16 results (one rounding is up to 2^-9); a scale of another block or a lost block shows as 1e-1.
"""

import pytest
import torch

from moe.kernels import fp8_gemm_portable
from moe.kernels.fp8_gemm import fp8_rows_gemm
from moe.quantize import fp8_rows, fp8_squares

BOUND = 4e-3


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp8_gemm_portable, "TILE_M", 16)


@pytest.mark.parametrize("offsets", [[5, 5, 40], [0, 0, 33], [40, 40, 40]])
@pytest.mark.parametrize(("inner", "width"), [(256, 128), (160, 208), (64, 16)])
def test_against_decoded_operands(inner: int, width: int, offsets: list[int]) -> None:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        # Blocks of very different sizes: a scale applied to the wrong one cannot hide.
        values = torch.randn(shape, generator=generator)
        blocks = torch.randint(-6, 7, (*shape[:-1], -(-shape[-1] // 128)), generator=generator)
        return (values * 2.0 ** blocks.repeat_interleave(128, -1)[..., : shape[-1]]).bfloat16()

    x, w = fp8_rows(draw(40, inner)), fp8_squares(draw(3, width, inner))
    ends = torch.tensor(offsets, dtype=torch.int32)
    ours = fp8_rows_gemm(x.values, x.scales, w.values, w.scales, ends)
    start = 0
    for expert, end in enumerate(offsets):
        exact = x.dequantize(torch.float32)[start:end].double() @ w.dequantize(torch.float32)[expert].double().t()
        error = (ours[start:end].double() - exact).norm() / exact.norm().clamp(min=1e-30)
        assert error <= BOUND, (expert, error)
        start = end
    # Rows of no expert are not written.
    assert bool(ours[offsets[-1] :].isnan().all())
