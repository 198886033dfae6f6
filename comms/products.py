"""How matmuls multiply whose rows travel meanwhile (comms/async_tp.py), and what these rows are sent as.

A product is known by name, because operators take no objects. The empty name is the product in the dtype of the rows;
others are registered by whoever knows them, such as recipes of low precision (moe/low_precision_linear.py).

Shapes: O whatever comes before the split dim, R rows, X and Y widths, W words or bytes of a row that travels, P all
rows, one behind the other.
"""

from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

# The product in the dtype of the rows.
AS_THEY_ARE = ""


class Product(Protocol):
    """One way to multiply."""

    def linear(self, x: Tensor, weight_YX: Tensor) -> Tensor:
        """x @ w.T with its gradients, where nothing overlaps: (..., X) -> (..., Y)."""
        ...

    def sent_as(self, x_ORX: Tensor) -> Tensor:
        """(O, R, W): rows as they travel, each by itself."""
        ...

    def weight(self, weight_YX: Tensor) -> Any:
        """What rows are multiplied by for x @ w.T."""
        ...

    def weight_transposed(self, weight_YX: Tensor) -> Any:
        """What gradients are multiplied by for dy @ w."""
        ...

    def multiply(self, x_ORX: Tensor, weight: Any, out_ORY: Tensor, add: bool = False) -> None:
        """Write the product into `out`, or add it; rows of `x` and `out` may be those of a larger tensor."""
        ...

    def multiply_sent(self, rows_ORW: Tensor, weight: Any, out_ORY: Tensor) -> None:
        """The same of rows as they travelled."""
        ...

    def weight_gradient(self, dy_PY: Tensor, x_PX: Tensor) -> Tensor:
        """(Y, X): dy.T @ x, rounded once."""
        ...


class PlainProduct:
    """In the dtype of the rows, which is what travels."""

    def linear(self, x: Tensor, weight_YX: Tensor) -> Tensor:
        """See `Product`."""
        return F.linear(x, weight_YX)

    def sent_as(self, x_ORX: Tensor) -> Tensor:
        """See `Product`."""
        return x_ORX

    def weight(self, weight_YX: Tensor) -> Tensor:
        """See `Product`."""
        return weight_YX.t()

    def weight_transposed(self, weight_YX: Tensor) -> Tensor:
        """See `Product`."""
        return weight_YX

    def multiply(self, x_ORX: Tensor, weight: Tensor, out_ORY: Tensor, add: bool = False) -> None:
        """See `Product`."""
        if x_ORX.shape[0] == 1:
            if add:
                out_ORY[0].addmm_(x_ORX[0], weight)
            else:
                torch.mm(x_ORX[0], weight, out=out_ORY[0])
            return
        # One launch, without copies: the weight has a stride of zero.
        weights = weight.expand(x_ORX.shape[0], -1, -1)
        if add:
            out_ORY.baddbmm_(x_ORX, weights)
        else:
            torch.bmm(x_ORX, weights, out=out_ORY)

    def multiply_sent(self, rows_ORW: Tensor, weight: Tensor, out_ORY: Tensor) -> None:
        """See `Product`."""
        self.multiply(rows_ORW, weight, out_ORY)

    def weight_gradient(self, dy_PY: Tensor, x_PX: Tensor) -> Tensor:
        """See `Product`."""
        return dy_PY.t() @ x_PX


_PRODUCTS: dict[str, Product] = {AS_THEY_ARE: PlainProduct()}


def register_product(name: str, product: Product) -> str:
    """Make it known by its name, which is returned; another one of that name has to be the same."""
    assert name not in _PRODUCTS or _PRODUCTS[name] == product, name
    _PRODUCTS[name] = product
    return name


def find_product(name: str) -> Product:
    """Raises KeyError if nobody registered it here."""
    return _PRODUCTS[name]
