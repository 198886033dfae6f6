"""The block kernels' calls fit torch's operators: their arguments and shapes, on the meta device.

What they compute is shown in test_tile_segments.py (on the CPU, the kernels replaced) and tests/gpu.
"""

import pytest
import torch

from parallel.block_attention import Rule, Tile, attend, attend_backward, choose_kernel

B, Q, H, G, D, V = 2, 16, 8, 2, 192, 128
DIAGONAL, EARLIER = Tile(0, 0, Q, Q, 0, 0), Tile(0, 0, Q, Q, Q, 0)


def tensors(device: str, dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    """Gradient of the output, q, k, v."""
    rows = (H, V), (H, D), (G, D), (G, V)
    return [torch.zeros(B, Q, *row, device=device, dtype=dtype) for row in rows]


@pytest.mark.parametrize("tile", [DIAGONAL, EARLIER], ids=["diagonal", "earlier"])
@pytest.mark.parametrize(
    ("kernel", "window", "documents"),
    [("cudnn", 0, False), ("flash", 0, False), ("flash", 0, True), ("flash", 20, True), ("masked", 20, True)],
)
def test_shapes(kernel: str, window: int, documents: bool, tile: Tile) -> None:
    grad, q, k, v = tensors("meta")
    first = torch.zeros(B, 2 * Q, dtype=torch.int64, device="meta") if documents else None
    rule = Rule(0.1, window, first, max_documents=4)
    out, lse = attend(kernel, tile, rule, q, k, v)
    assert (out.shape, out.dtype, lse.shape, lse.dtype) == (grad.shape, q.dtype, (B, H, Q), torch.float32)
    gradients = attend_backward(kernel, tile, rule, grad, q, k, v, out, lse)
    assert [x.shape for x in gradients] == [q.shape, k.shape, v.shape]


def test_masked_without_a_gpu_or_in_full_precision() -> None:
    for dtype in (torch.bfloat16, torch.float64):
        _, q, k, v = tensors("cpu", dtype)
        assert choose_kernel(q, k, v, Rule(0.1)) == "masked"
