"""Linear maps whose three products follow a low-precision recipe: grouped (experts) and dense (one group).

    forward   y  = x  @ w^T    both quantized along I
    dgrad     dx = dy @ w      both quantized along O
    wgrad     dw = dy^T @ x    both quantized along the expert's rows, or both bf16

Weights are quantized in each forward and again in each backward; nothing is cached. The two casts read the weights once
each, which the products of a full batch outweigh by far, and a cache would have to know of every way in which a weight
can change: the optimizer's step, a loaded checkpoint, FSDP's gather into the same memory (which does not move
`_version`). Without one, both passes see the weights as they are, and no fp8 copy of them outlives a product.

Of x, forward keeps what wgrad reads and no more: its quantized transpose (half the bytes), or x itself.

Shape suffixes: P rows sorted by expert, Q places (rows padded to 32 for each expert), E experts, O and I out- and
in-features.
"""

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from comms.kernels.codec import pack_rows, split_record
from comms.products import register_product
from moe.grouped_gemm import clear_tail_, weight_gradient
from moe.kernels.quantize import BLOCK, pad_groups
from moe.quantize import Quantized, mxfp8_columns
from moe.recipes import Recipe


def low_precision_grouped_linear(
    x_PI: Tensor, weight_EOI: Tensor, offsets_E: Tensor, recipe: Recipe, *, exact: bool = False
) -> Tensor:
    """`moe.grouped_gemm.grouped_linear` by a recipe: y_PO[p] = weight[e] @ x[p]; zero for rows that no expert owns.

    Args:
        x_PI: bf16 rows sorted by expert.
        weight_EOI: bf16, one matrix per expert, in nn.Linear's orientation.
        offsets_E: int32, the end of each expert's rows (ascending).
        exact: the caller knows that offsets[-1] = P, so there is no tail to clear.

    Raises:
        ValueError: another dtype, or dims that are not multiples of `recipe.unit`.
    """
    if x_PI.dtype != torch.bfloat16 or weight_EOI.dtype != torch.bfloat16:
        raise ValueError(f"{recipe.name} computes from bf16, not from {x_PI.dtype} and {weight_EOI.dtype}")
    check_dims(recipe, weight_EOI.shape[-2:], "a linear map")
    keep = torch.is_grad_enabled() and weight_EOI.requires_grad
    return cast(Tensor, _LowPrecisionLinear.apply(x_PI, weight_EOI, offsets_E, recipe, exact, keep))  # pyright: ignore


def low_precision_linear(x: Tensor, weight_OI: Tensor, bias_O: Tensor | None, recipe: Recipe) -> Tensor:
    """`torch.nn.functional.linear` by a recipe: (..., I) -> (..., O) in bf16, as one group of rows. The bias is bf16.

    Raises:
        ValueError: as `low_precision_grouped_linear`.
    """
    x_TI = x.flatten(0, -2)
    y_TO = low_precision_grouped_linear(x_TI, weight_OI[None], _end_of(x_TI), recipe, exact=True)
    y = y_TO.view(*x.shape[:-1], y_TO.shape[1])
    return y if bias_O is None else y + bias_O


def check_dims(recipe: Recipe, dims: tuple[int, ...] | torch.Size, what: str) -> None:
    """Raises ValueError where a dim of `what` cannot be cut into the recipe's blocks."""
    if any(dim % recipe.unit for dim in dims):
        sizes = " x ".join(str(dim) for dim in dims)
        raise ValueError(
            f"precision.recipe={recipe.name} needs dims that are multiples of {recipe.unit}, and {what} is {sizes} on "
            "each rank"
        )


@dataclass(frozen=True)
class LowPrecisionProduct:
    """A recipe where rows travel while others are multiplied; see `comms.products.Product` for what each method does.

    Rows are quantized one by one, so it does not matter whether they are before or after they travel.
    """

    recipe: Recipe

    @property
    def name(self) -> str:
        """Recipes that compute alike have the same."""
        return f"{self.recipe.name}, {self.recipe.mode}, {'recipe' if self.recipe.multiply_columns else 'bf16'} wgrad"

    def linear(self, x: Tensor, weight_YX: Tensor) -> Tensor:
        """See `Product`."""
        return low_precision_linear(x, weight_YX, None, self.recipe)

    def sent_as(self, x_ORX: Tensor) -> Tensor:
        """Records of e4m3 values and their scales, uint8."""
        return pack_rows(x_ORX.flatten(0, 1), self.recipe.block).view(*x_ORX.shape[:2], -1)

    def weight(self, weight_YX: Tensor) -> tuple[Quantized, int]:
        """See `Product`; and X."""
        check_dims(self.recipe, weight_YX.shape, "a linear map")
        return self.recipe.weight(weight_YX[None]), weight_YX.shape[1]

    def weight_transposed(self, weight_YX: Tensor) -> tuple[Quantized, int]:
        """See `Product`; and Y."""
        check_dims(self.recipe, weight_YX.shape, "a linear map")
        return self.recipe.weight_transposed(weight_YX[None]), weight_YX.shape[0]

    def multiply(self, x_ORX: Tensor, weight: tuple[Quantized, int], out_ORY: Tensor, add: bool = False) -> None:
        """See `Product`."""
        self._multiply(self.recipe.rows(x_ORX.flatten(0, 1).contiguous()), weight[0], out_ORY, add)

    def multiply_sent(self, rows_ORW: Tensor, weight: tuple[Quantized, int], out_ORY: Tensor) -> None:
        """See `Product`."""
        values, scales = split_record(rows_ORW.flatten(0, 1), weight[1], self.recipe.block)
        rows = Quantized(values.contiguous(), scales.contiguous(), 1, self.recipe.block)
        self._multiply(rows, weight[0], out_ORY, add=False)

    def weight_gradient(self, dy_PY: Tensor, x_PX: Tensor) -> Tensor:
        """See `Product`."""
        ends_1 = _end_of(dy_PY)
        return _weight_gradient(dy_PY, list(_keep_for_wgrad(x_PX, ends_1, self.recipe)), ends_1, self.recipe)[0]

    def _multiply(self, rows: Quantized, weight: Quantized, out_ORY: Tensor, add: bool) -> None:
        y_ORY = self.recipe.multiply_rows(rows, weight, _end_of(rows.values)).view(out_ORY.shape)
        if add:
            out_ORY.add_(y_ORY)
        else:
            out_ORY.copy_(y_ORY)


def _end_of(rows: Tensor) -> Tensor:
    """Of the one group that all rows are."""
    return torch.full((1,), rows.shape[0], dtype=torch.int32, device=rows.device)


class LowPrecisionLinear(nn.Linear):
    """An `nn.Linear` that computes by a recipe. It takes over the parameters of the linear it replaces."""

    def __init__(self, linear: nn.Linear, recipe: Recipe) -> None:
        super().__init__(linear.in_features, linear.out_features, bias=False, device="meta")  # pyright: ignore
        self.weight, self.bias = linear.weight, linear.bias
        self.recipe = recipe
        product = LowPrecisionProduct(recipe)
        self.product = register_product(product.name, product)

    def forward(self, input: Tensor) -> Tensor:
        """(..., I) -> (..., O)."""
        return low_precision_linear(input, self.weight, self.bias, self.recipe)


class _LowPrecisionLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_PI: Tensor, weight_EOI: Tensor, offsets_E: Tensor, recipe: Recipe, exact: bool, keep: bool
    ) -> Tensor:
        y_PO = recipe.multiply_rows(recipe.rows(x_PI), recipe.weight(weight_EOI), offsets_E)
        kept = _keep_for_wgrad(x_PI, offsets_E, recipe) if keep else ()
        ctx.save_for_backward(weight_EOI, offsets_E, *kept)
        ctx.recipe, ctx.exact = recipe, exact
        return y_PO if exact else clear_tail_(y_PO, offsets_E)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        weight_EOI, offsets_E, *kept = ctx.saved_tensors
        recipe, dy_PO = ctx.recipe, grads[0].contiguous()
        dx_PI = dw_EOI = None
        if ctx.needs_input_grad[0]:
            dx_PI = recipe.multiply_rows(recipe.rows(dy_PO), recipe.weight_transposed(weight_EOI), offsets_E)
            dx_PI = dx_PI if ctx.exact else clear_tail_(dx_PI, offsets_E)
        if ctx.needs_input_grad[1]:
            dw_EOI = _weight_gradient(dy_PO, kept, offsets_E, recipe)
        return dx_PI, dw_EOI, None, None, None, None


def _keep_for_wgrad(x_PI: Tensor, offsets_E: Tensor, recipe: Recipe) -> tuple[Tensor, ...]:
    if recipe.multiply_columns is None:
        return (x_PI,)
    row_P = torch.arange(x_PI.shape[0], dtype=torch.int32, device=x_PI.device)
    places_Q, padded_E = pad_groups(row_P, offsets_E, BLOCK)
    x_IQ = mxfp8_columns(x_PI, places_Q)
    return x_IQ.values, x_IQ.scales, places_Q, padded_E


def _weight_gradient(dy_PO: Tensor, kept: list[Tensor], offsets_E: Tensor, recipe: Recipe) -> Tensor:
    if recipe.multiply_columns is None:
        return weight_gradient(dy_PO.t(), kept[0], offsets_E)
    values, scales, places_Q, padded_E = kept
    dy_OQ = mxfp8_columns(dy_PO, places_Q)
    return recipe.multiply_columns(dy_OQ, Quantized(values, scales, 1, BLOCK), padded_E)
