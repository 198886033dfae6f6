"""Tensor parallelism with sequence parallelism (Megatron-LM, arXiv:2205.05198), from a plan that the model brings.

    between layers   each tp rank has its own tokens: norms, residual, router, routed experts (etp=1), shared expert
    into a layer     tokens are gathered; the map's output columns (attention heads, hidden units) are split
    out of a layer   each rank has a partial sum of all tokens; a reduce-scatter adds them and leaves the own tokens
    vocabulary       embedding rows, head and loss are split over it (arXiv:1909.08053, section 3)

Weights that are not split see only a part of the tokens or heads on each rank, so their gradients are partial sums:
`sum_shared_gradients` adds them up once per optimizer step.

Shapes: B sequences, L tokens of each on this rank, C = L * tp tokens inside layers, D model dim, V vocabulary.
"""

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn import functional as F

from comms.async_tp import all_gather_matmul, matmul_reduce_scatter
from comms.collectives import all_reduce, gather_dim, reduce_scatter
from comms.products import AS_THEY_ARE
from comms.row_collectives import gather_rows, scatter_rows
from moe.linear_maps import LinearMaps, apply_weight, local
from moe.low_precision_linear import LowPrecisionLinear
from parallel.mesh import Mesh

TOKENS = 1


class TensorPlan(NamedTuple):
    """How a model wants to be split, by names of its parameters and modules (`*` stands for anything)."""

    # Parameter -> the dim that is split.
    split: dict[str, int]
    # Modules whose `maps` then work on slices.
    modules: tuple[str, ...]
    # Norms over all heads together, whose mean needs every rank's heads.
    norms: tuple[str, ...] = ()
    # Maps of such a module that share one gather, or are alone with theirs or with their reduce-scatter.
    groups: tuple[tuple[str, ...], ...] = ()
    # Of key and value maps with fewer heads than ranks: how many rows each rank takes, and how many ranks take the
    # same. Their weights are not split.
    kv_rows: int = 0
    kv_sharers: int = 1


class Transfer(NamedTuple):
    """Rows on their way to maps, or sums from them."""

    scatters: bool
    maps: int
    # Multiplications of this rank.
    work: int


def apply_tensor_parallel(model: nn.Module, mesh: Mesh, plan: TensorPlan) -> None:
    """Split the weights on the meta device and hand every layer the maps that work on its slices.

    Raises:
        ValueError: a dim that the plan splits does not divide by tp.
    """
    if mesh.tp is None:
        return
    for name, module in list(model.named_modules()):
        if any(fnmatchcase(name, pattern) for pattern in plan.norms):
            parent, _, last = name.rpartition(".")
            setattr(model.get_submodule(parent), last, SplitRMSNorm(module, mesh.tp))
    for name, parameter in list(model.named_parameters()):
        dims = [dim for pattern, dim in plan.split.items() if fnmatchcase(name, pattern)]
        if dims:
            parent, _, last = name.rpartition(".")
            setattr(model.get_submodule(parent), last, split_parameter(name, parameter, mesh.tp, [Shard(dims[0])]))
    for name, module in model.named_modules():
        if any(fnmatchcase(name, pattern) for pattern in plan.modules):
            assert isinstance(module.maps, LinearMaps), name
            maps = AsyncTensorParallelMaps if mesh.config.async_tp == "native" else TensorParallelMaps
            module.maps = maps(mesh.tp, plan)  # type: ignore[assignment]


def split_parameter(
    name: str, parameter: nn.Parameter, mesh: DeviceMesh, placements: Sequence[Shard | Replicate]
) -> nn.Parameter:
    """A meta parameter as a DTensor, split evenly.

    Raises:
        ValueError: it does not divide.
    """
    assert parameter.is_meta, f"{name} must be split before it has memory"
    shape = list(parameter.shape)
    for axis, placement in enumerate(placements):
        if isinstance(placement, Replicate):
            continue
        size = mesh.size(axis)
        if shape[placement.dim] % size:
            axis_name = (mesh.mesh_dim_names or ("tp",))[axis]
            raise ValueError(
                f"{name} {tuple(shape)} cannot be split on dim {placement.dim} over parallel.{axis_name}={size}."
            )
        shape[placement.dim] //= size
    shard = torch.empty(shape, dtype=parameter.dtype, device="meta")
    return nn.Parameter(DTensor.from_local(shard, mesh, placements, run_check=False))


class TensorParallelMaps(LinearMaps):
    """Maps whose weights are split over the tp ranks; see `moe.linear_maps.LinearMaps` for what each method does."""

    def __init__(self, mesh: DeviceMesh, plan: TensorPlan) -> None:
        self.rank, self.size = mesh.get_local_rank(), mesh.size()
        self.vocabulary_group = self.group = mesh.get_group().group_name
        first = self.rank // plan.kv_sharers * plan.kv_rows
        self.kv_rows = slice(first, first + plan.kv_rows)

    def expand(self, x_BLX: Tensor, *maps: nn.Linear) -> tuple[Tensor, ...]:
        """Gather the tokens once for all maps, then this rank's columns of each."""
        x_BCX = self.gather(x_BLX)
        return tuple(self._columns(x_BCX, linear) for linear in maps)

    def contract(self, x_BCX: Tensor, linear: nn.Linear) -> Tensor:
        """This rank's part of the sum, added up over the ranks, of which it keeps its own tokens."""
        y_BLY = self.scatter(apply_weight(linear, x_BCX, local(linear.weight)))
        return y_BLY if linear.bias is None else y_BLY + linear.bias

    def gather(self, x_BLX: Tensor) -> Tensor:
        """Every rank's tokens."""
        return gather_dim(x_BLX, TOKENS, self.group)

    def scatter(self, x_BCX: Tensor) -> Tensor:
        """Of the sum over the ranks, this rank's tokens."""
        return reduce_scatter(x_BCX, TOKENS, self.group)

    def embed(self, tokens_BC: Tensor, weight_VD: Tensor) -> Tensor:
        """The rows that are here, from every rank, for its own tokens."""
        rows_VD = local(weight_VD)
        row_BC = tokens_BC - self.rank * rows_VD.shape[0]
        is_here_BC = (row_BC >= 0) & (row_BC < rows_VD.shape[0])
        found_BCD = F.embedding(torch.where(is_here_BC, row_BC, 0), rows_VD)
        return self.scatter(torch.where(is_here_BC.unsqueeze(-1), found_BCD, 0.0))

    def join_vocabulary(self, logits_BCV: Tensor) -> Tensor:
        """Every rank's columns."""
        return gather_dim(logits_BCV, -1, self.group)

    def _columns(self, x_BCX: Tensor, linear: nn.Linear) -> Tensor:
        bias = None if linear.bias is None else self._rows(linear.bias)
        return apply_weight(linear, x_BCX, self._rows(linear.weight), bias)

    def _rows(self, weight: Tensor) -> Tensor:
        """A split weight's slice; of key and value maps that are not split, the rows of this rank's head."""
        return weight.to_local() if isinstance(weight, DTensor) else weight[self.kv_rows]


class AsyncTensorParallelMaps(TensorParallelMaps):
    """The same while tokens travel (comms/async_tp.py), in the precision of each map."""

    def __init__(self, mesh: DeviceMesh, plan: TensorPlan) -> None:
        super().__init__(mesh, plan)
        self.groups = plan.groups

    def expand(self, x_BLX: Tensor, *maps: nn.Linear) -> tuple[Tensor, ...]:
        """One gather for all maps: this rank's columns of each."""
        weights, products = [self._rows(linear.weight) for linear in maps], [product_of(linear) for linear in maps]
        found = all_gather_matmul(x_BLX, weights, TOKENS, self.group, products=products)
        return tuple(
            y_BCY if linear.bias is None else y_BCY + self._rows(linear.bias)
            for y_BCY, linear in zip(found, maps, strict=True)
        )

    def contract(self, x_BCX: Tensor, linear: nn.Linear) -> Tensor:
        """This rank's tokens of the sum over the ranks."""
        y_BLY = matmul_reduce_scatter(x_BCX, local(linear.weight), TOKENS, self.group, product=product_of(linear))
        return y_BLY if linear.bias is None else y_BLY + linear.bias

    def gather(self, x_BLX: Tensor) -> Tensor:
        """Every rank's tokens, for what is no map of this class."""
        return gather_rows(x_BLX, TOKENS, self.group)

    def scatter(self, x_BCX: Tensor) -> Tensor:
        """Of the sum over the ranks, this rank's tokens."""
        return scatter_rows(x_BCX, TOKENS, self.group)

    def transfers(self, module: nn.Module, num_rows: int) -> list[Transfer]:
        """Those of a module's maps, with so many tokens of all ranks."""
        found: list[Transfer] = []
        for group in self.groups:
            weights: list[Tensor] = [getattr(module, name).weight for name in group if hasattr(module, name)]
            if weights:
                numbers = sum(self._numbers(weight) for weight in weights)
                found.append(Transfer(_tp_dim(weights[0]) == 1, len(weights), num_rows * numbers))
        return found

    def _numbers(self, weight: Tensor) -> int:
        """Of a weight, those that this rank multiplies; FSDP may hold a part of them."""
        if _tp_dim(weight) is not None:
            return weight.numel() // self.size
        return (self.kv_rows.stop - self.kv_rows.start) * weight.shape[1]


def _tp_dim(weight: Tensor) -> int | None:
    """The dim that tp ranks split; None: none."""
    if isinstance(weight, DTensor):
        for name, placement in zip(weight.device_mesh.mesh_dim_names or (), weight.placements, strict=True):
            if name == "tp" and not placement.is_replicate():
                return placement.dim  # pyright: ignore
    return None


def product_of(linear: nn.Linear) -> str:
    """How it multiplies, by name (comms/products.py)."""
    return linear.product if isinstance(linear, LowPrecisionLinear) else AS_THEY_ARE


class SplitRMSNorm(nn.Module):
    """RMSNorm over a last dim that is split over the tp ranks: (..., X / tp) -> the same."""

    def __init__(self, norm: nn.Module, mesh: DeviceMesh) -> None:
        super().__init__()
        assert isinstance(norm, nn.RMSNorm) and norm.eps is not None
        name, (size,) = "norm.weight", norm.normalized_shape
        self.weight = split_parameter(name, norm.weight, mesh, [Shard(0)])
        self.total, self.eps, self.group = size, norm.eps, mesh.get_group().group_name

    def forward(self, x: Tensor) -> Tensor:
        """Normalise by the mean over every rank's part."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        mean_square = all_reduce(wide.square().sum(dim=-1, keepdim=True), self.group) / self.total
        return (wide * torch.rsqrt(mean_square + self.eps)).to(x.dtype) * local(self.weight)


def shared_parameters(model: nn.Module, mesh: Mesh) -> list[tuple[str, nn.Parameter]]:
    """Parameters that every tp rank holds alike, while each sees only its part of their gradient.

    Routed experts with etp=1 are not among them: FSDP shards and sums those over the tp ranks too.
    """
    if mesh.tp is None:
        return []

    def is_shared(name: str, parameter: nn.Parameter) -> bool:
        if ".experts." in name and mesh.etp is None:
            return False
        if not isinstance(parameter, DTensor):
            return True
        names = parameter.device_mesh.mesh_dim_names or ()
        return not any(
            not placement.is_replicate() and name in ("tp", "etp")
            for name, placement in zip(names, parameter.placements, strict=True)
        )

    return [(name, parameter) for name, parameter in model.named_parameters() if is_shared(name, parameter)]


def sum_shared_gradients(model: nn.Module, mesh: Mesh) -> None:
    """Add up what each tp rank contributed to the gradients of shared parameters, in one collective per dtype."""
    if mesh.tp is None:
        return
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for _, parameter in shared_parameters(model, mesh):
        if parameter.grad is not None:
            gradient = local(parameter.grad)
            by_dtype.setdefault(gradient.dtype, []).append(gradient)
    for gradients in by_dtype.values():
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        dist.all_reduce(flat, group=mesh.tp.get_group())
        parts = flat.split([gradient.numel() for gradient in gradients])
        for gradient, part in zip(gradients, parts, strict=True):
            gradient.copy_(part.view_as(gradient))
