"""How the linear maps of a layer are applied when each rank has all of their weights.

Layers call these instead of their maps, so that tensor parallelism can put its own version in place: one that holds
slices of the weights and moves activations between ranks (parallel/tensor_parallel.py has the same methods).

Shapes: B sequences, L tokens of each on this rank between maps, C tokens of each inside a layer (here both the same),
X and Y widths, V vocabulary, D model dim.
"""

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from moe.low_precision_linear import LowPrecisionLinear, low_precision_linear


class LinearMaps:
    """All weights are here: nothing moves."""

    # The ranks that share the vocabulary; None: it is all here.
    vocabulary_group: str | None = None

    def expand(self, x_BLX: Tensor, *maps: nn.Linear) -> tuple[Tensor, ...]:
        """The maps into a layer: (B, L, X) -> (B, C, Y) each."""
        return tuple(linear(x_BLX) for linear in maps)

    def contract(self, x_BCX: Tensor, linear: nn.Linear) -> Tensor:
        """The map out of a layer: (B, C, X) -> (B, L, Y)."""
        return linear(x_BCX)

    def gather(self, x_BLX: Tensor) -> Tensor:
        """What every rank of a layer needs whole: (B, L, X) -> (B, C, X)."""
        return x_BLX

    def embed(self, tokens_BC: Tensor, weight_VD: Tensor) -> Tensor:
        """Rows of the embedding: (B, C) -> (B, L, D)."""
        return F.embedding(tokens_BC, weight_VD)

    def join_vocabulary(self, logits_BCV: Tensor) -> Tensor:
        """The logits of the whole vocabulary."""
        return logits_BCV


def apply_weight(linear: nn.Linear, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x through `weight`, this rank's part of the map's weight, in the precision of the map: (..., X) -> (..., Y)."""
    if isinstance(linear, LowPrecisionLinear):
        return low_precision_linear(x, weight, bias, linear.recipe)
    return F.linear(x, weight, bias)


def local(weight: Tensor) -> Tensor:
    """This rank's part of a weight that is split over ranks; any other weight as it is."""
    return weight.to_local() if isinstance(weight, DTensor) else weight
