"""Grouped GEMM with autograd: rows sorted by expert, each multiplied with its own expert's matrix.

`torch.nn.functional.grouped_mm` does the work; this file adds what it leaves to the caller:

- rows past the last offset are undefined in its output and in its input gradient: here they are zero;
- the weight gradient of an expert without rows is undefined on some devices: here it is exactly zero;
- fp64 is refused by it: `reference` runs a plain loop over experts, which is also the oracle.

Shape suffixes: P pairs (rows sorted by expert), E experts of this rank, I and O in- and out-features.
"""

import os
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from moe.kernels.zero_fill import zero_empty_groups_

FUSED_DTYPES = (torch.bfloat16, torch.float16)


def resolve_backend(backend: str, dtype: torch.dtype, device: torch.device) -> str:
    """Turn `auto` into the backend that this dtype and device can run; refuse what they cannot.

    Raises:
        ValueError: for an unknown backend, or one that cannot run here.
    """
    if backend == "auto":
        if dtype == torch.float64:
            return "reference"
        # Hopper: where the fused kernels have been measured (benchmarks/moe_h200.json).
        hopper = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9
        return "fused" if hopper and dtype in FUSED_DTYPES else "grouped_mm"
    if backend not in ("fused", "grouped_mm", "reference"):
        raise ValueError(f"model.moe.backend={backend!r} is unknown; use auto, fused, grouped_mm or reference.")
    if backend == "grouped_mm" and dtype == torch.float64:
        raise ValueError("model.moe.backend=grouped_mm cannot compute in fp64; use model.moe.backend=reference.")
    if backend == "fused" and os.environ.get("TRITON_INTERPRET") != "1":
        if device.type != "cuda" or torch.cuda.get_device_capability(device) < (9, 0):
            raise ValueError(
                "model.moe.backend=fused needs a GPU of compute capability 9.0 (Hopper) or later; use auto or "
                "grouped_mm."
            )
        if dtype not in FUSED_DTYPES:
            raise ValueError(f"model.moe.backend=fused computes in bf16 or fp16, not {dtype}; use auto or grouped_mm.")
    return backend


def grouped_linear(
    x_PI: Tensor, weight_EOI: Tensor, offsets_E: Tensor, *, exact: bool = False, backend: str = "grouped_mm"
) -> Tensor:
    """y_PO[p] = weight[e] @ x[p] for the expert e that owns row p; zero for rows that no expert owns.

    Args:
        x_PI: rows sorted by expert; row strides must be multiples of 16 bytes.
        weight_EOI: one matrix per expert, in nn.Linear's orientation.
        offsets_E: int32, the end of each expert's rows (ascending).
        exact: the caller knows that offsets[-1] = P, so there is no tail to clear.
        backend: `grouped_mm` or `reference`.
    """
    if backend == "reference":
        return _loop_linear(x_PI, weight_EOI, offsets_E)
    return _GroupedLinear.apply(x_PI, weight_EOI, offsets_E, exact)  # type: ignore[no-any-return]


def _loop_linear(x_PI: Tensor, weight_EOI: Tensor, offsets_E: Tensor) -> Tensor:
    ends: list[int] = offsets_E.tolist()  # pyright: ignore
    blocks = [
        x_PI[start:end] @ weight.t() for start, end, weight in zip([0, *ends], ends, weight_EOI.unbind(0), strict=False)
    ]
    tail = x_PI.new_zeros(x_PI.shape[0] - ends[-1], weight_EOI.shape[1])
    return torch.cat([*blocks, tail])


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_PI: Tensor, weight_EOI: Tensor, offsets_E: Tensor, exact: bool) -> Tensor:
        ctx.save_for_backward(x_PI, weight_EOI, offsets_E)
        ctx.exact = exact
        y_PO = grouped_mm(x_PI, weight_EOI.transpose(-2, -1), offsets_E)
        return y_PO if exact else clear_tail_(y_PO, offsets_E)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x_PI, weight_EOI, offsets_E = ctx.saved_tensors
        dy_PO = grads[0].contiguous()
        dx_PI = dw_EOI = None
        if ctx.needs_input_grad[0]:
            dx_PI = grouped_mm(dy_PO, weight_EOI, offsets_E)
            dx_PI = dx_PI if ctx.exact else clear_tail_(dx_PI, offsets_E)
        if ctx.needs_input_grad[1]:
            dw_EOI = weight_gradient(dy_PO.t(), x_PI, offsets_E)
        return dx_PI, dw_EOI, None, None


def grouped_mm(a: Tensor, b: Tensor, offsets_E: Tensor) -> Tensor:
    """`torch.nn.functional.grouped_mm`, also where there is nothing to multiply.

    Args:
        a: (P, X) rows in groups with b (E, X, Y): (P, Y), undefined past the last offset. Or (X, P) with b (P, Y):
            (E, X, Y), undefined for empty groups (`weight_gradient` defines it).
    """
    if a.numel() == 0:
        # No rows anywhere on this rank: the kernels need not support it.
        shape = (a.shape[0], b.shape[-1]) if b.dim() == 3 else (offsets_E.shape[0], a.shape[0], b.shape[1])
        return a.new_zeros(shape)
    return F.grouped_mm(a, b, offs=offsets_E)


def weight_gradient(dy_OP: Tensor, x_PI: Tensor, offsets_E: Tensor) -> Tensor:
    """dw_EOI[e] = dy @ x over the rows of expert e; exactly zero for an expert without rows."""
    dw_EOI = grouped_mm(dy_OP, x_PI, offsets_E)
    zero_empty_groups_(dw_EOI, offsets_E)
    return dw_EOI


def clear_tail_(rows_PX: Tensor, offsets_E: Tensor) -> Tensor:
    """Zero, in place, the rows that no expert owns."""
    row = torch.arange(rows_PX.shape[0], device=rows_PX.device)
    return rows_PX.masked_fill_((row >= offsets_E[-1])[:, None], 0)
