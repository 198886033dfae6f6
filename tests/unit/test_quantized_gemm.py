"""MXFP8 for block-scaled tensor cores, all but the multiplication itself, which here is done by its definition.

`TensorCores` stands in for `torch.nn.functional.scaled_grouped_mm`: it holds the caller to the documented contract,
undoes the swizzle of the scales by torchao's own table, multiplies in fp64, and leaves NaN wherever hardware leaves
what was there.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from moe.low_precision_linear import low_precision_grouped_linear
from moe.quantize import places_of_rows
from moe.quantized_gemm import native_columns, native_rows
from moe.recipes import Recipe, resolve_recipe
from tests.low_precision_cases import COUNTS, Problem, exact_problem, expected, random_problem

NAN = float("nan")


def unswizzled(blocked: Tensor, rows: int, num_scales: int) -> Tensor:
    """Factors (rows, num_scales) in fp64 from as many tiles as they need, at the front of `blocked` (flat bytes)."""
    from torchao.prototype.mx_formats.utils import to_blocked

    padded = (-(-rows // 128) * 128, -(-num_scales // 4) * 4)
    order = to_blocked(torch.arange(padded[0] * padded[1]).view(padded))
    plain = torch.empty(padded[0] * padded[1], dtype=torch.uint8)
    plain[order] = blocked[: plain.numel()]
    bits = plain.view(padded)[:rows, :num_scales].int()
    return torch.ldexp(torch.ones(bits.shape, dtype=torch.float64), bits - 127)


def decoded(values: Tensor, factors: Tensor) -> Tensor:
    return values.double() * factors.repeat_interleave(32, -1)


class TensorCores:
    """Keeps the arguments of each call."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def __call__(self, **given: Any) -> Tensor:
        self.calls.append(given)
        a, b, offs = given["mat_a"], given["mat_b"], given["offs"]
        assert a.dtype == b.dtype == torch.float8_e4m3fn and offs.dtype == torch.int32
        assert given["scale_a"].dtype == given["scale_b"].dtype == torch.float8_e8m0fnu
        assert given["scale_recipe_a"] == given["scale_recipe_b"] == F.ScalingType.BlockWise1x32
        assert given["swizzle_a"] == given["swizzle_b"] == F.SwizzleType.SWIZZLE_32_4_4
        assert given["output_dtype"] == torch.bfloat16
        assert a.stride(-1) == 1 and b.stride(-2) == 1, "a by rows, b by columns"
        assert a.stride(-2) % 16 == 0 and b.stride(-1) % 16 == 0, "whole 16 bytes"
        assert bool((offs % 32 == 0).all()), "whole blocks"
        scales_a, scales_b = (given[key].view(torch.uint8) for key in ("scale_a", "scale_b"))
        if b.dim() == 3:
            return self._rows(a, b.transpose(1, 2), scales_a, scales_b, offs.tolist())
        return self._columns(a, b.t(), scales_a, scales_b, offs.tolist())

    def _rows(self, a: Tensor, w: Tensor, scales_a: Tensor, scales_w: Tensor, offs: list[int]) -> Tensor:
        num_scales = a.shape[1] // 32
        padded_scales = -(-num_scales // 4) * 4
        assert scales_a.dim() == 2 and scales_a.shape[0] >= a.shape[0] and scales_a.shape[1] == padded_scales
        assert scales_w.shape == (w.shape[0], -(-w.shape[1] // 128) * 128 * padded_scales)
        out = torch.full((a.shape[0], w.shape[1]), NAN, dtype=torch.bfloat16)
        start = tile_row = 0
        for expert, end in enumerate(offs):
            own = scales_a.flatten()[tile_row * 128 * padded_scales :]
            rows = decoded(a[start:end], unswizzled(own, end - start, num_scales))
            weight = decoded(w[expert], unswizzled(scales_w[expert], w.shape[1], num_scales))
            out[start:end] = rows @ weight.t()
            tile_row += -(-(end - start) // 128)
            start = end
        return out

    def _columns(self, a: Tensor, b: Tensor, scales_a: Tensor, scales_b: Tensor, offs: list[int]) -> Tensor:
        out = torch.full((len(offs), a.shape[0], b.shape[0]), NAN, dtype=torch.bfloat16)
        start = column = 0
        for expert, end in enumerate(offs):
            sides: list[Tensor] = []
            num_scales = (end - start) // 32
            for values, scales in ((a, scales_a), (b, scales_b)):
                assert scales.dim() == 2 and scales.shape[0] == -(-values.shape[0] // 128) * 128
                own = scales.flatten()[column * scales.shape[0] :]
                sides.append(decoded(values[:, start:end], unswizzled(own, values.shape[0], num_scales)))
            if end > start:
                out[expert] = sides[0] @ sides[1].t()
            column += -(-num_scales // 4) * 4
            start = end
        return out


@pytest.fixture
def tensor_cores(monkeypatch: pytest.MonkeyPatch) -> Iterator[TensorCores]:
    """Fresh memory is NaN, too."""
    cores = TensorCores()
    monkeypatch.setattr(F, "scaled_grouped_mm", cores)
    torch.use_deterministic_algorithms(True)
    yield cores
    torch.use_deterministic_algorithms(False)


def native() -> Recipe:
    """What `resolve_recipe` gives on SM100."""
    recipe = resolve_recipe("mxfp8", torch.device("cpu"))
    return replace(recipe, mode="native", multiply_rows=native_rows, multiply_columns=native_columns)


def run(problem: Problem, recipe: Recipe) -> list[Tensor]:
    x_PI, weight_EOI = (tensor.detach().requires_grad_() for tensor in (problem.x_PI, problem.weight_EOI))
    y_PO = low_precision_grouped_linear(x_PI, weight_EOI, problem.offsets_E, recipe)
    return [y_PO.detach(), *torch.autograd.grad(y_PO, [x_PI, weight_EOI], problem.dy_PO)]


def check_native(counts: list[int], tail: int, out: int, width: int, cores: TensorCores) -> None:
    """Equal to exact products bit for bit, where fp32 sums are exact, with NaN in rows of no expert."""
    problem = exact_problem(counts, tail, out, width)
    oracle = expected(problem, "mxfp8", "recipe")
    problem.x_PI[sum(counts) :] = problem.dy_PO[sum(counts) :] = NAN
    for ours, expect in zip(run(problem, native()), oracle, strict=True):
        assert torch.equal(ours, expect)
    assert len(cores.calls) == 3, "forward, dgrad, wgrad"


@pytest.mark.parametrize(
    ("counts", "tail", "out", "width"),
    [
        (COUNTS, 0, 64, 96),
        # Case 13.
        (COUNTS, 20, 64, 96),
        # More than one tile of scales in every direction; the second expert's tiles begin after the first's padding.
        ([130, 5, 0, 257], 3, 160, 288),
        ([0, 7, 0, 0], 0, 64, 96),
    ],
)
def test_case_62_native_products_keep_experts_apart(
    counts: list[int], tail: int, out: int, width: int, tensor_cores: TensorCores
) -> None:
    check_native(counts, tail, out, width, tensor_cores)


@pytest.mark.parametrize("tail", [0, 20])
def test_case_58_native_products_of_one_group_with_padding_are_finite(tail: int, tensor_cores: TensorCores) -> None:
    check_native([65], tail, 64, 96, tensor_cores)


@pytest.mark.parametrize("tail", [0, 3])
def test_no_expert_has_a_row(tail: int, tensor_cores: TensorCores) -> None:
    for result in run(exact_problem([0, 0, 0], tail), native()):
        assert bool((result == 0).all())


def test_operands_are_those_of_torchao_byte_for_byte(tensor_cores: TensorCores) -> None:
    """Values and swizzled scales of all three products, from normal numbers; ours has less spare room at the end."""
    from torchao.prototype.moe_training.kernels.mxfp8 import quant
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.mx_tensor import to_mx

    def code(x: Tensor) -> tuple[Tensor, Tensor]:
        scales, values = to_mx(x.contiguous(), torch.float8_e4m3fn, 32, scaling_mode=ScaleCalculationMode.RCEIL)
        return values.view(torch.uint8), scales.view(torch.uint8)

    def same(ours: Tensor, theirs: Tensor) -> None:
        ours, theirs = ours.view(torch.uint8).flatten(), theirs.view(torch.uint8).flatten()
        size = min(ours.numel(), theirs.numel())
        assert torch.equal(ours[:size], theirs[:size])
        assert not ours[size:].any() and not theirs[size:].any()

    problem = random_problem([33, 0, 130, 5], out=128, width=256)
    run(problem, native())
    padded = [quant.torch_pad_token_groups(rows, problem.offsets_E, 32) for rows in (problem.x_PI, problem.dy_PO)]
    weights = (problem.weight_EOI, problem.weight_EOI.transpose(1, 2))
    for call, (rows, _, ends), weight in zip(tensor_cores.calls, padded, weights, strict=False):
        values, scales = code(rows)
        same(call["mat_a"], values)
        same(call["scale_a"], quant.torch_to_blocked_2d_M_groups(scales, ends)[0])
        values, scales = code(weight)
        same(call["mat_b"].transpose(1, 2), values)
        same(call["scale_b"], quant.torch_to_blocked_per_group_3d(scales))
        assert torch.equal(call["offs"], ends)
    wgrad, total = tensor_cores.calls[2], int(padded[0][2][-1])
    sides = (("mat_b", "scale_b", padded[0]), ("mat_a", "scale_a", padded[1]))
    for mat, scale, (rows, _, ends) in sides:
        values, scales = code(rows[:total].t())
        ours = wgrad[mat].t() if mat == "mat_b" else wgrad[mat]
        assert torch.equal(ours[:, :total].contiguous().view(torch.uint8), values)
        assert not ours[:, total:].contiguous().view(torch.uint8).any()
        same(wgrad[scale], quant.torch_to_blocked_2d_K_groups(scales, ends // 32)[0])
        assert torch.equal(wgrad["offs"], ends)


def test_the_worked_places_of_rows() -> None:
    """pad_groups puts rows 0 | 1, 2 at places 0, -, 1, 2 (align 2); row 3 belongs to nobody."""
    assert places_of_rows(4, torch.tensor([1, 3], dtype=torch.int32), 2).tolist() == [0, 2, 3, 4]
