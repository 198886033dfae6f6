"""Rows that nothing is multiplied with arrive as a collective brings them, with its gradients.

Rows are moved, not computed with: gathers are equal bit by bit, sums of fp64 to 1e-12, norm-wise.
"""

from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from comms import row_collectives, shard_transport
from comms.collectives import gather_dim, reduce_scatter
from comms.row_collectives import gather_rows, scatter_rows
from comms.shard_transport import Messages
from tests.distributed.harness import run_workers
from trainer.parity import relative_error

# And the dim that is split.
SHAPES = [
    ((3, 4), 0),
    ((2, 3, 4), 1),
    ((4, 5, 4), 1),
    ((5, 1, 4), 1),
    ((2, 3, 5, 4), 2),
    ((3, 2, 4), 0),
]
EMPTY = [((2, 0, 4), 1), ((0, 3, 4), 1), ((2, 3, 0), 1), ((2, 0, 3, 4), 2)]  # fmt: skip


def world() -> str:
    assert dist.group.WORLD is not None
    return dist.group.WORLD.group_name


def random_tensor(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(100 * seed + dist.get_rank())
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def with_gradient(function: object, x: Tensor, dim: int) -> list[Tensor]:
    x = x.clone().requires_grad_()
    y = function(x, dim, world())  # type: ignore[operator]
    return [y.detach(), *torch.autograd.grad(y, x, random_tensor(*y.shape, seed=7).to(y.dtype))]


def errors() -> dict[str, float]:
    """Pieces of two rows, which end within sequences and at their ends."""
    size, found, opened = dist.get_world_size(), {}, 0
    gather, scatter = Messages.gather, Messages.scatter

    def counted(method: object) -> object:
        def call(*args: object) -> object:
            nonlocal opened
            opened += 1
            return method(*args)  # type: ignore[operator]

        return call

    with (
        patch.multiple(shard_transport, PIECE_ROWS=2, SUM_PIECE_ROWS=2),
        patch.multiple(Messages, gather=counted(gather), scatter=counted(scatter)),
    ):
        for shape, dim in SHAPES:
            x = random_tensor(*shape)
            wide = random_tensor(*shape[:dim], shape[dim] * size, *shape[dim + 1 :], seed=1)
            # Rows that lie apart, too.
            apart = x.transpose(0, -1).contiguous().transpose(0, -1)
            for name, ours, theirs, given in (
                ("gather", gather_rows, gather_dim, x),
                ("gather apart", gather_rows, gather_dim, apart),
                ("scatter", scatter_rows, reduce_scatter, wide),
            ):
                pairs = zip(with_gradient(ours, given, dim), with_gradient(theirs, given, dim), strict=True)
                found[f"{name} {shape}"] = max(relative_error(a, b) for a, b in pairs)
            assert torch.equal(gather_rows(x, dim - x.dim(), world()), gather_dim(x, dim, world()))
    found["opened"] = opened
    for shape, dim in EMPTY:
        x, wide = torch.empty(shape), torch.empty(*shape[:dim], shape[dim] * size, *shape[dim + 1 :])
        assert gather_rows(x, dim, world()).shape == wide.shape and scatter_rows(wide, dim, world()).shape == x.shape
    whole = torch.tensor([[2**30 + 1], [0]] * size)
    assert torch.equal(scatter_rows(whole, 0, world()), reduce_scatter(whole, 0, world())), "exact"
    return found


@pytest.mark.parametrize("num_processes", [2, 3, 4])
def test_rows_come_as_by_collectives(num_processes: int) -> None:
    for found in run_workers(errors, num_processes):
        # Forward and backward of three cases and one more forward.
        assert found.pop("opened") == 7 * len(SHAPES)
        assert len(found) == 3 * len(SHAPES) and max(found.values()) <= 1e-12, found


def sums_as_promised(dtype: torch.dtype) -> bool:
    size, rank = dist.get_world_size(), dist.get_rank()
    x = random_tensor(2, 5 * size, 64, dtype=dtype)
    total = torch.zeros(2, 5 * size, 64)
    for part in gather_dim(x.unsqueeze(0), 0, world()):
        total += part.float()
    return torch.equal(scatter_rows(x, 1, world()), total[:, 5 * rank : 5 * rank + 5].to(dtype))


# Of fp32 the order shows, of bf16 how often it is rounded.
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parts_are_added_in_ascending_order_and_rounded_once(dtype: torch.dtype) -> None:
    assert run_workers(sums_as_promised, 3, dtype) == [True] * 3


def which_way() -> list[bool]:
    """Whether the last dim, fewer bytes than asked and as many went by messages; a dim that does not divide."""
    x, found = random_tensor(2, 4, 6), []
    # Of a shard; the scatter's is half of x.
    for dim, least in ((2, 0), (1, 2 * 4 * 6 * 8 + 1), (1, 2 * 4 * 6 * 8)):
        with patch.object(Messages, "gather", side_effect=Messages(dist.group.WORLD).gather) as gather:  # type: ignore
            assert torch.equal(gather_rows(x, dim, world(), least), gather_dim(x, dim, world()))
        with patch.object(Messages, "scatter", side_effect=Messages(dist.group.WORLD).scatter) as scatter:  # type: ignore
            found_sum = scatter_rows(x, dim, world(), -(-least // 2))
            assert torch.equal(found_sum, reduce_scatter(x, dim, world()))
        found += [gather.called, scatter.called]
    with pytest.raises(ValueError, match=r"dim 0 of \(3, 6\) cannot be scattered over 2 ranks: it does not divide"):
        scatter_rows(torch.ones(3, 6), 0, world())
    return found


def test_the_last_dim_and_few_bytes_take_the_collective() -> None:
    assert run_workers(which_way, 2) == [[False, False, False, False, True, True]] * 2


class OnGpu:
    """What is asked of a tensor, of one on a GPU."""

    is_cuda = True

    def __init__(self, *shape: int) -> None:
        self.like = torch.empty(shape, dtype=torch.bfloat16, device="meta")

    def __getattr__(self, name: str) -> object:
        return getattr(self.like, name)


@pytest.mark.parametrize(
    ("shape", "num_ranks", "travels"),
    [
        ((4, 512, 4096), 2, True), ((4, 511, 4096), 2, False), ((1, 2048, 4096), 2, True), ((4, 512, 4096), 3, False),
        ((64, 128, 4096), 2, True), ((64, 127, 4096), 2, False),
    ],
)  # fmt: skip
def test_two_gpus_use_copy_engines_for_many_bytes_in_long_runs(
    shape: tuple[int, ...], num_ranks: int, travels: bool
) -> None:
    x = OnGpu(*shape)
    with patch.object(row_collectives, "group_size", lambda _: num_ranks):
        assert row_collectives._travels(x, x.numel(), 1, "tp", None) == travels  # type: ignore


def compiled() -> float:
    x = random_tensor(2, 4, 6)

    def both(x: Tensor, dim: int, _group: str) -> Tensor:
        return scatter_rows(gather_rows(x, dim, world()).relu(), dim, world())

    traced = torch.compile(both, backend="aot_eager", fullgraph=True)
    pairs = zip(with_gradient(traced, x, 1), with_gradient(both, x, 1), strict=True)
    return max(relative_error(a, b) for a, b in pairs)


def test_the_compiler_sees_operators() -> None:
    assert max(run_workers(compiled, 2)) <= 1e-12
