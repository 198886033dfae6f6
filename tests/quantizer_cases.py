"""What the quantizers' kernels are tried with, interpreted and on a GPU."""

import torch
from torch import Tensor

DTYPES = [torch.bfloat16, torch.float32]
# Rows and columns that share a scale.
BLOCKS = [(1, 32), (1, 128), (128, 128)]


def awkward(dtype: torch.dtype, rows: int, width: int) -> Tensor:
    """Any bits in some columns (NaN and Inf among them), small numbers in others, a row of zeros, one of subnormals."""
    generator = torch.Generator().manual_seed(width)
    bits = torch.randint(-(2**31), 2**31, (rows, width), generator=generator).to(torch.int32)
    x = torch.randn(rows, width, generator=generator) * 2.0 ** torch.randint(-20, 1, (rows, width), generator=generator)
    x[:, : width // 4] = bits[:, : width // 4].view(torch.float32)
    x[1], x[2] = 0, x[3].nan_to_num(0, 1, 1) * 2.0**-126
    return x.to(dtype)


def assert_same(found: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    """Byte for byte, whatever the device."""
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a.cpu().view(torch.uint8), b.cpu().view(torch.uint8))
