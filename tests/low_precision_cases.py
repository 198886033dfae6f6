"""Operands whose low-precision products are sums that fp32 holds exactly, and what those products then must be.

Values are whole numbers up to 31, of which e4m3 keeps 4 binary digits, so rounding is real; scales differ by powers of
two, those of one expert and the next by 2^20: in a block of both, the smaller one's numbers would be lost. Every
partial sum of an expert is then a whole number below 2^24 of one unit, and no order of adding can change it: fp64 sums
rounded once to bf16 are the answer, bit for bit.
"""

from typing import NamedTuple

import torch
from torch import Tensor

# Uneven groups, the second empty; 0 to 20 rows may follow that belong to no expert.
COUNTS = [33, 0, 64, 5]
OUT, IN = 64, 96


class Problem(NamedTuple):
    x_PI: Tensor
    weight_EOI: Tensor
    dy_PO: Tensor
    offsets_E: Tensor


def whole_numbers(*shape: int, seed: int) -> Tensor:
    """In bf16: up to 31 in size, each block of 32 along the row times 1 or 2, each along the column times 1 or 2."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(-31, 32, shape, generator=generator).float()
    for dim in (-1, -2):
        blocks = list(shape)
        blocks[dim] = -(-shape[dim] // 32)
        factor = 2.0 ** torch.randint(0, 2, blocks, generator=generator)
        x = x * factor.repeat_interleave(32, dim).narrow(dim, 0, shape[dim])
    return x.bfloat16()


def exact_problem(counts: list[int] = COUNTS, tail: int = 0, out: int = OUT, width: int = IN) -> Problem:
    """Rows in groups of `counts`, then `tail` rows of no expert."""
    rows = sum(counts) + tail
    x, dy = whole_numbers(rows, width, seed=1), whole_numbers(rows, out, seed=2)
    weight = whole_numbers(len(counts), out, width, seed=3)
    expert_P = torch.repeat_interleave(torch.tensor([*counts, tail]))
    factor_P1 = (2.0 ** (20 * (expert_P % 3)))[:, None].bfloat16()
    return Problem(x * factor_P1, weight, dy * factor_P1, torch.tensor(counts).cumsum(0).int())


def random_problem(counts: list[int], tail: int = 0, out: int = OUT, width: int = IN) -> Problem:
    """The same with normal numbers."""
    generator = torch.Generator().manual_seed(sum(counts) + tail)
    rows = sum(counts) + tail
    shapes = [(rows, width), (len(counts), out, width), (rows, out)]
    x, weight, dy = (torch.randn(shape, generator=generator).bfloat16() for shape in shapes)
    return Problem(x, weight, dy, torch.tensor(counts).cumsum(0).int())


def torchao_values(x: Tensor) -> Tensor:
    """x after MXFP8 (RCEIL, along the row) as torchao codes it, in fp64. Rows are padded to blocks of 32."""
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.mx_tensor import to_mx

    width = x.shape[-1]
    padded = torch.nn.functional.pad(x, (0, -width % 32)).contiguous()
    if padded.numel() == 0:
        return x.double()
    scales, values = to_mx(padded, torch.float8_e4m3fn, 32, scaling_mode=ScaleCalculationMode.RCEIL)
    factor = torch.ldexp(torch.ones(scales.shape, dtype=torch.float64), scales.view(torch.uint8).int() - 127)
    return (values.double() * factor.repeat_interleave(32, -1))[..., :width]


def block_values(x: Tensor, row_block: int, block: int) -> Tensor:
    """x after e4m3 with one power-of-two scale per row_block x block, by definition, in fp64."""
    rows, width = x.shape[-2:]
    padded = torch.nn.functional.pad(x.double(), (0, -width % block, 0, -rows % row_block))
    tiles = padded.unflatten(-1, (-1, block)).unflatten(-3, (-1, row_block))
    amax = tiles.abs().amax(dim=(-3, -1), keepdim=True)
    mantissa, exponent = torch.frexp(amax / 448)
    scale = 2.0 ** torch.where(mantissa == 0.5, exponent - 1, exponent)
    coded = (tiles / scale).to(torch.float8_e4m3fn).double() * scale
    return torch.where(amax == 0, 0.0, coded).flatten(-4, -3).flatten(-2)[..., :rows, :width]


def expected(problem: Problem, recipe: str, wgrad: str) -> list[Tensor]:
    """y, dx and dw in bf16: a loop over experts in fp64 over the operands of the recipe."""
    x_PI, weight_EOI, dy_PO, offsets_E = problem
    y_PO, dx_PI = torch.zeros_like(dy_PO), torch.zeros_like(x_PI)
    dw_EOI = torch.zeros_like(weight_EOI)
    start = 0
    for expert, end in enumerate(offsets_E.tolist()):
        x, dy, w = x_PI[start:end], dy_PO[start:end], weight_EOI[expert]
        if recipe == "mxfp8":
            y = torchao_values(x) @ torchao_values(w).t()
            dx = torchao_values(dy) @ torchao_values(w.t()).t()
        else:
            y = block_values(x, 1, 128) @ block_values(w, 128, 128).t()
            dx = block_values(dy, 1, 128) @ block_values(w, 128, 128)
        rounded = recipe == "mxfp8" and wgrad == "recipe"
        columns = [torchao_values(a.t()) if rounded else a.t().double() for a in (dy, x)]
        for out, part in ((y_PO[start:end], y), (dx_PI[start:end], dx), (dw_EOI[expert], columns[0] @ columns[1].t())):
            out.copy_(part)
        start = end
    return [y_PO, dx_PI, dw_EOI]


def relative_error(a: Tensor, b: Tensor) -> float:
    """||a - b|| / ||b|| in fp64."""
    a, b = a.detach().double(), b.detach().double()
    return float((a - b).norm() / b.norm())
