"""Low-precision recipes: what each of the three products of a linear map is computed from, and by what.

    recipe         x (forward), dy (dgrad)     weights                            wgrad
    mxfp8          MXFP8 along the row         MXFP8 along the contracted dim,    MXFP8 along each expert's rows, padded
                                               so once for y and once for dx      to blocks of 32; or bf16
    fp8_blockwise  e4m3, 1 x 128 scales        e4m3, 128 x 128 scales,            bf16
                                               the same bytes for y and dx

A recipe is data. It is resolved once, at start, against the device (`resolve_recipe`), and what it was resolved to is
what runs: nothing looks at the hardware again, and nothing falls back.

    mxfp8          native   SM100           block-scaled tensor cores (torch.nn.functional.scaled_grouped_mm)
                   exact    SM90, CPU       the same products by the bf16 GEMM: same numerics, no speed
    fp8_blockwise  native   SM90            fp8 tensor cores; experts without biases by the fused kernels
                   portable CPU             decoded to bf16 and multiplied: the numerics that the kernels must have
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from moe import quantized_gemm
from moe.config import LOW_PRECISION
from moe.quantize import Quantized, fp8_rows, fp8_squares, fp8_squares_transposed, mxfp8_columns, mxfp8_rows
from moe.quantized_gemm import GatedGemm, QuantizedGemm, exact_columns, exact_rows, native_columns, native_rows


@dataclass(frozen=True)
class Recipe:
    """How the products of a linear map (E, O, I) are computed.

    Attributes:
        mode: `native`, `exact` or `portable`: what this hardware makes of the recipe.
        device: the device it was resolved for, as a person calls it.
        unit: dims of the map must be multiples of this.
        block: numbers of a row of x or dy that share a scale.
        rows: quantizes x (P, I), and dy (P, O), along the row.
        weight: quantizes w (E, O, I) along I, for y.
        weight_transposed: quantizes w as (E, I, O) along O, for dx.
        multiply_rows: y and dx from the above.
        multiply_columns: dw from operands quantized along each expert's rows; None: a bf16 product of x and dy.
        fused: experts run by moe/low_precision_experts.py, where they have no biases.
        multiply_gated: the fused experts' first map and their activation in one pass, where 128 divides the hidden
            units; None: one after the other.
    """

    name: str
    mode: str
    device: str
    unit: int
    block: int
    rows: Callable[[Tensor], Quantized]
    weight: Callable[[Tensor], Quantized]
    weight_transposed: Callable[[Tensor], Quantized]
    multiply_rows: QuantizedGemm
    multiply_columns: QuantizedGemm | None = None
    fused: bool = False
    multiply_gated: GatedGemm | None = None

    def __str__(self) -> str:
        gradient = "" if self.multiply_columns else ", weight gradients in bf16"
        return f"{self.name}: {self.mode} mode on {self.device}{gradient}"


def resolve_recipe(name: str, device: torch.device, wgrad: str = "recipe") -> Recipe:
    """The recipe `name` as this device runs it. Asks for the card's capability and launches nothing.

    Args:
        wgrad: `recipe`, or `bf16` for weight gradients of mxfp8 in bf16.

    Raises:
        ValueError: the device cannot run it; names the device and what can be done.
    """
    assert name in LOW_PRECISION and wgrad in ("recipe", "bf16"), (name, wgrad)
    capability, title = _describe(device)
    if name == "fp8_blockwise":
        if capability not in (None, 9):
            raise _refusal(name, title, "SM90 (H100, H200) and CPUs")
        native = capability == 9
        return Recipe(
            name,
            "native" if native else "portable",
            title,
            # What TMA asks of a row's bytes.
            16 if native else 1,
            128,
            rows=fp8_rows,
            weight=fp8_squares,
            weight_transposed=fp8_squares_transposed,
            multiply_rows=quantized_gemm.fp8_rows if native else exact_rows,
            fused=native,
            multiply_gated=quantized_gemm.fp8_gated if native else None,
        )
    if capability not in (None, 9, 10):
        raise _refusal(name, title, "SM100 (B200, GB200), SM90 (H100, H200) and CPUs")
    native = capability == 10
    columns = native_columns if native else exact_columns
    return Recipe(
        name,
        "native" if native else "exact",
        title,
        32,
        32,
        rows=mxfp8_rows,
        weight=mxfp8_rows,
        weight_transposed=mxfp8_columns,
        multiply_rows=native_rows if native else exact_rows,
        multiply_columns=columns if wgrad == "recipe" else None,
    )


def _describe(device: torch.device) -> tuple[int | None, str]:
    """Major compute capability (None: no GPU), and what a person calls the device."""
    if device.type != "cuda":
        return None, f"the {device.type.upper()}"
    major, minor = torch.cuda.get_device_capability(device)
    return major, f"SM{major}{minor} ({torch.cuda.get_device_name(device)})"


def _refusal(name: str, title: str, where: str) -> ValueError:
    return ValueError(f"precision.recipe={name} cannot run on {title}: it runs on {where}; set precision.recipe=bf16")
