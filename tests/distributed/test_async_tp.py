"""Matmuls while rows travel equal a gather and then a matmul, or a matmul and then a reduce-scatter; CASE 56.

Bounds: 1e-12 in fp64 and 5e-6 in fp32, norm-wise per tensor: the order of sums differs. Sums of bf16
parts are compared bit by bit.
"""

import datetime
import random
import time
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from comms import shard_transport
from comms.async_tp import all_gather_matmul, matmul_reduce_scatter
from comms.collectives import gather_dim, reduce_scatter
from comms.products import AS_THEY_ARE, register_product
from comms.shard_transport import Messages
from moe.low_precision_linear import LowPrecisionProduct
from moe.recipes import resolve_recipe
from tests.distributed.harness import run_workers
from trainer.parity import relative_error
from trainer.worker_pool import WorkerError

BOUNDS = {torch.float64: 1e-12, torch.float32: 5e-6}
# No plain path, and only that.
ALWAYS, NEVER = 0, 2**62


def world() -> str:
    assert dist.group.WORLD is not None
    return dist.group.WORLD.group_name


def random_tensor(*shape: int, dtype: torch.dtype, seed: int = 0, grad: bool = True) -> Tensor:
    generator = torch.Generator().manual_seed(100 * seed + dist.get_rank())
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_(grad)


def plain_gather(x: Tensor, weights: list[Tensor], dim: int) -> tuple[Tensor, ...]:
    whole = gather_dim(x, dim, world())
    return tuple(F.linear(whole, weight) for weight in weights)


def results(outputs: tuple[Tensor, ...], inputs: list[Tensor]) -> list[Tensor]:
    """Outputs, and the gradients of a sum that weighs each of their numbers differently."""
    grads = [random_tensor(*y.shape, dtype=y.dtype, seed=7 + index, grad=False) for index, y in enumerate(outputs)]
    return [y.detach() for y in outputs] + list(torch.autograd.grad(outputs, inputs, grads))


def shape_of(dim: int, rows: int, width: int) -> tuple[int, ...]:
    return ((rows, 3, width), (3, rows, width), (2, 3, rows, width))[dim]


def errors_of_gather(dim: int, rows: int, dtype: torch.dtype, min_work: int, num_weights: int) -> list[float]:
    """Pieces of 2 rows and fewer: several per shard, of unequal size."""
    x = random_tensor(*shape_of(dim, rows, 5), dtype=dtype)
    weights = [random_tensor(3 + 4 * index, 5, dtype=dtype, seed=index + 1) for index in range(num_weights)]
    with patch.multiple(shard_transport, PIECE_ROWS=2, SUM_PIECE_ROWS=2):
        ours = results(all_gather_matmul(x, weights, dim, world(), min_work), [x, *weights])
    theirs = results(plain_gather(x, weights, dim), [x, *weights])
    return [relative_error(a, b) for a, b in zip(ours, theirs, strict=True)]


def errors_of_scatter(dim: int, rows: int, dtype: torch.dtype, min_work: int) -> list[float]:
    x = random_tensor(*shape_of(dim, rows * dist.get_world_size(), 5), dtype=dtype)
    weight = random_tensor(7, 5, dtype=dtype, seed=1)
    with patch.multiple(shard_transport, PIECE_ROWS=2, SUM_PIECE_ROWS=2):
        ours = results((matmul_reduce_scatter(x, weight, dim, world(), min_work),), [x, weight])
    theirs = results((reduce_scatter(F.linear(x, weight), dim, world()),), [x, weight])
    return [relative_error(a, b) for a, b in zip(ours, theirs, strict=True)]


def every_error(dtype: torch.dtype, min_work: int) -> dict[tuple[Any, ...], float]:
    found: dict[tuple[Any, ...], float] = {}
    for dim in (0, 1, 2):
        for rows in (1, 7):
            for num_weights in (1, 3):
                found["gather", dim, rows, num_weights] = max(errors_of_gather(dim, rows, dtype, min_work, num_weights))
            found["scatter", dim, rows] = max(errors_of_scatter(dim, rows, dtype, min_work))
    return found


@pytest.mark.parametrize("min_work", [ALWAYS, NEVER], ids=["overlapped", "plain_path"])
@pytest.mark.parametrize("dtype", list(BOUNDS), ids=str)
@pytest.mark.parametrize("num_processes", [2, 3, 4])
def test_case_56_fused_equals_unfused_at_every_dim(num_processes: int, dtype: torch.dtype, min_work: int) -> None:
    for found in run_workers(every_error, num_processes, dtype, min_work):
        assert len(found) == 18
        assert max(found.values()) <= BOUNDS[dtype], max(found.items(), key=lambda item: item[1])


def errors_of_odd_shapes() -> dict[str, float]:
    """The last dim and others from behind, two dims, no rows, rows that lie apart; a dim that does not divide."""
    size, found = dist.get_world_size(), {}
    weight = random_tensor(4, 6, dtype=torch.float64, seed=1)
    cases = {
        "two dims": (random_tensor(2 * size, 6, dtype=torch.float64), 0),
        "from behind": (random_tensor(2, 3 * size, 6, dtype=torch.float64), -2),
        "last": (random_tensor(2, 3, 6, dtype=torch.float64), -1),
        "no rows": (random_tensor(2, 0, 6, dtype=torch.float64), 1),
        "apart": (random_tensor(2, 6, 3 * size, dtype=torch.float64, grad=False).transpose(1, 2).requires_grad_(), 1),
    }
    for name, (x, dim) in cases.items():
        scattered = results((matmul_reduce_scatter(x, weight, dim, world(), ALWAYS),), [x, weight])
        expected = results((reduce_scatter(F.linear(x, weight), dim % x.dim(), world()),), [x, weight])
        found[f"scatter, {name}"] = max(relative_error(a, b) for a, b in zip(scattered, expected, strict=True))
        wide = random_tensor(4, 6 * size, dtype=torch.float64, seed=1) if name == "last" else weight
        gathered = results(all_gather_matmul(x, [wide], dim, world(), ALWAYS), [x, wide])
        expected = results(plain_gather(x, [wide], dim % x.dim()), [x, wide])
        found[f"gather, {name}"] = max(relative_error(a, b) for a, b in zip(gathered, expected, strict=True))
    for x, weight, dim in ((torch.ones(3, 6), torch.ones(4, 6), 0), (torch.ones(4, 6), torch.ones(5, 6), -1)):
        with pytest.raises(ValueError, match=rf"dim {dim % 2} of \(\d, \d\) cannot be scattered over {size} ranks"):
            matmul_reduce_scatter(x, weight, dim, world(), ALWAYS)
    return found


def test_shapes_at_the_edge() -> None:
    for found in run_workers(errors_of_odd_shapes, 2):
        assert len(found) == 10 and max(found.values()) <= BOUNDS[torch.float64], found


def product(name: str) -> str:
    """Registered here, by name."""
    found = LowPrecisionProduct(resolve_recipe(name, torch.device("cpu")))
    return register_product(found.name, found)


def low_precision(recipe: str) -> tuple[dict[str, float], set[tuple[torch.dtype, int]]]:
    """Errors from the plain path, which codes after the gather; dtypes and widths of rows that were gathered."""
    x = random_tensor(2, 21, 64, dtype=torch.bfloat16)
    weights = [random_tensor(width, 64, dtype=torch.bfloat16, seed=width) for width in (96, 32)]
    down, whole = (
        random_tensor(32, 64, dtype=torch.bfloat16, seed=5),
        torch.cat([x.detach()] * dist.get_world_size(), 1),
    )
    y, found, sent = whole.requires_grad_(), {}, set()
    gather = Messages.gather

    def noting(self: Messages, shard: Tensor) -> shard_transport.Inbox:
        sent.add((shard.dtype, shard.shape[2]))
        return gather(self, shard)

    def every(min_work: int) -> dict[str, list[Tensor]]:
        all_coded, one_coded = [product(recipe)] * 2, [product(recipe), AS_THEY_ARE]
        return {
            "gather": results(all_gather_matmul(x, weights, 1, world(), min_work, all_coded), [x, *weights]),
            "gather, one coded": results(all_gather_matmul(x, weights, 1, world(), min_work, one_coded), [x, *weights]),
            "scatter": results((matmul_reduce_scatter(y, down, 1, world(), min_work, product(recipe)),), [y, down]),
        }

    with patch.multiple(shard_transport, PIECE_ROWS=8, SUM_PIECE_ROWS=8), patch.object(Messages, "gather", noting):
        ours = every(ALWAYS)
    assert sent
    for name, expected in every(NEVER).items():
        found[name] = max(relative_error(a, b) for a, b in zip(ours[name], expected, strict=True))
    exact = results(all_gather_matmul(x, weights, 1, world(), NEVER), [x, *weights])
    found["coding"] = relative_error(ours["gather"][0], exact[0])
    return found, sent


# Operands are the same; sums of bf16 parts are rounded elsewhere. Coding itself is off by 3.8 %.
@pytest.mark.parametrize(("recipe", "record"), [("mxfp8", 64 + 16), ("fp8_blockwise", 64 + 16)])
def test_rows_in_low_precision_travel_coded_and_give_the_same(recipe: str, record: int) -> None:
    for found, sent in run_workers(low_precision, 2, recipe):
        assert found.pop("coding") > 1e-2
        assert max(found.values()) <= 8e-3, found
        # For backward, and with a map that wants them as they are, rows travel as they are.
        assert {(torch.uint8, record), (torch.bfloat16, 64)} <= sent


def sums_as_promised(dtype: torch.dtype) -> bool:
    """By messages; a collective's order is its own. A product with the identity is exact: sums alone are rounded."""
    size, rank = dist.get_world_size(), dist.get_rank()
    x, weight = random_tensor(2, 5 * size, 64, dtype=dtype, grad=False), torch.eye(64, dtype=dtype)
    total = torch.zeros(2, 5 * size, 64)
    for part in gather_dim(x.unsqueeze(0), 0, world()):
        total += part.float()
    expected = total[:, 5 * rank : 5 * rank + 5].to(dtype)
    return torch.equal(matmul_reduce_scatter(x, weight, 1, world(), ALWAYS), expected)


# Of fp32 the order shows, of bf16 how often it is rounded.
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_processes", [2, 3, 4])
def test_parts_are_added_in_ascending_order_and_rounded_once(num_processes: int, dtype: torch.dtype) -> None:
    assert run_workers(sums_as_promised, num_processes, dtype) == [True] * num_processes


def needs() -> list[float]:
    """Gradients of some inputs only, and of outputs of which one is not used."""
    found = []
    for x_needs, *weights_need in ((1, 0, 0), (0, 1, 1), (0, 0, 1), (1, 1, 0)):
        results_of = []
        for fused in (True, False):
            x = random_tensor(2, 3, 5, dtype=torch.float64, grad=bool(x_needs))
            weights = [
                random_tensor(4 + i, 5, dtype=torch.float64, seed=i + 1, grad=bool(need))
                for i, need in enumerate(weights_need)
            ]
            outputs = all_gather_matmul(x, weights, 1, world()) if fused else plain_gather(x, weights, 1)
            # The second output alone.
            outputs[1].square().sum().backward() if outputs[1].requires_grad else None
            results_of.append([p.grad for p in (x, *weights)])
        for ours, theirs, need in zip(*results_of, (x_needs, *weights_need), strict=True):
            assert need or ours is None
            if theirs is not None:
                assert ours is not None
                found.append(float((ours - theirs).norm()))
    for x_needs, weight_needs in ((True, False), (False, True)):
        x = random_tensor(2, 3 * dist.get_world_size(), 5, dtype=torch.float64, grad=x_needs)
        weight = random_tensor(4, 5, dtype=torch.float64, seed=1, grad=weight_needs)
        (leaf,) = [p for p in (x, weight) if p.requires_grad]
        ours = torch.autograd.grad(matmul_reduce_scatter(x, weight, 1, world()).square().sum(), leaf)[0]
        plain = torch.autograd.grad(reduce_scatter(F.linear(x, weight), 1, world()).square().sum(), leaf)[0]
        found.append(float((ours - plain).norm()))
    return found


def test_only_the_gradients_that_are_needed() -> None:
    for found in run_workers(needs, 3):
        assert len(found) == 6 and max(found) < 1e-11


def accumulated() -> float:
    """Two micro-batches through one weight, as two layers that share it would: gradients add up."""
    weight, totals = random_tensor(4, 5, dtype=torch.float64, seed=1), []
    for gather in (lambda x: all_gather_matmul(x, [weight], 1, world())[0], lambda x: plain_gather(x, [weight], 1)[0]):
        weight.grad = None
        for step in range(2):
            gather(random_tensor(2, 3, 5, dtype=torch.float64, seed=step)).square().sum().backward()
        totals.append(weight.grad)
    return relative_error(*totals)


def test_gradients_accumulate() -> None:
    assert max(run_workers(accumulated, 2)) <= BOUNDS[torch.float64]


def compiled() -> float:
    """The compiler sees operators; by itself it computes nothing here."""
    x, weight = random_tensor(2, 3, 5, dtype=torch.float64), random_tensor(4, 5, dtype=torch.float64, seed=1)
    down = random_tensor(5, 4, dtype=torch.float64, seed=2)

    def layer(x: Tensor) -> Tensor:
        (y,) = all_gather_matmul(x, [weight], 1, world())
        return matmul_reduce_scatter(y.relu(), down, 1, world())

    eager = results((layer(x),), [x, weight, down])
    traced = results((torch.compile(layer, backend="aot_eager", fullgraph=True)(x),), [x, weight, down])
    return max(relative_error(a, b) for a, b in zip(traced, eager, strict=True))


def test_a_compiled_layer_equals_an_eager_one() -> None:
    assert max(run_workers(compiled, 2)) <= BOUNDS[torch.float64]


def largest_saved(min_work: int) -> tuple[int, int]:
    """Bytes of the largest memory that forward keeps for backward, and of this rank's rows."""
    x = random_tensor(2, 64, 5, dtype=torch.float64)
    weights = [random_tensor(4 + index, 5, dtype=torch.float64, seed=index + 1) for index in range(3)]
    sizes: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        # What a view is a part of stays alive, too.
        sizes.append(tensor.untyped_storage().nbytes())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        all_gather_matmul(x, weights, 1, world(), min_work)
    return max(sizes), x.untyped_storage().nbytes()


def test_gathered_rows_are_not_kept_for_backward() -> None:
    for saved, own in run_workers(largest_saved, 3, ALWAYS):
        assert saved == own
    # The plain path keeps them: the hook sees what there is.
    for saved, own in run_workers(largest_saved, 3, NEVER):
        assert saved == 3 * own


def many_rounds_with_delays(rounds: int) -> int:
    """Ranks wait for random times before and between; how many results were wrong."""
    chooser, wrong = random.Random(dist.get_rank()), 0
    weight, down = random_tensor(6, 4, dtype=torch.float64, seed=1), random_tensor(4, 6, dtype=torch.float64, seed=2)
    for step in range(rounds):
        x = random_tensor(1 + step % 3, 1 + step % 5, 4, dtype=torch.float64, seed=step)
        time.sleep(chooser.random() * 0.004)
        (y,) = all_gather_matmul(x, [weight], 1, world())
        time.sleep(chooser.random() * 0.004)
        z = matmul_reduce_scatter(y, down, 1, world())
        time.sleep(chooser.random() * 0.004)
        grads = torch.autograd.grad(z.square().sum(), [x, weight, down])
        if step % 4 == 0:
            out = reduce_scatter(F.linear(plain_gather(x, [weight], 1)[0], down), 1, world())
            expected = torch.autograd.grad(out.square().sum(), [x, weight, down])
            wrong += sum(relative_error(a, b) > 1e-11 for a, b in zip(grads, expected, strict=True))
    return wrong


def test_60_rounds_with_random_delays() -> None:
    assert run_workers(many_rounds_with_delays, 3, 60) == [0, 0, 0]


def one_rank_fails(seconds: float) -> None:
    group = dist.new_group(timeout=datetime.timedelta(seconds=seconds))
    weight, x = torch.ones(3, 3), torch.ones(1, 2, 3)
    all_gather_matmul(x, [weight], 1, group.group_name)
    if dist.get_rank() == 1:
        time.sleep(3 * seconds)
        raise ArithmeticError("rank 1 has had enough")
    start = time.monotonic()
    try:
        all_gather_matmul(x, [weight], 1, group.group_name)
    except RuntimeError as error:
        raise RuntimeError(f"gave up after {time.monotonic() - start:.1f} s: {error}") from error


def test_a_rank_that_fails_is_not_waited_for_beyond_the_timeout() -> None:
    start = time.monotonic()
    with pytest.raises(WorkerError, match=r"gave up after [2-4]\.\d s"):
        run_workers(one_rank_fails, 2, 3.0)
    assert time.monotonic() - start < 60


def boxes_by_bound() -> list[list[tuple[int, int]]]:
    """Of a gather with two weights and of a scatter: how many of each begin with the bound at their work, and above."""
    size, found = dist.get_world_size(), []
    x, weights = torch.randn(2, 3, 5), [torch.randn(width, 5) for width in (7, 4)]
    # Rows of all ranks x width x widths of both weights; rows of all ranks x width x width.
    works = size * 2 * 3 * 5 * (7 + 4), 2 * (3 * size) * 5 * 7
    for shift in (0, 1):
        counts = []
        with (
            patch.object(Messages, "gather", autospec=True, side_effect=Messages.gather) as gathers,
            patch.object(Messages, "scatter", autospec=True, side_effect=Messages.scatter) as scatters,
        ):
            all_gather_matmul(x, weights, 1, world(), works[0] + shift)
            matmul_reduce_scatter(torch.randn(2, 3 * size, 5), weights[0], 1, world(), works[1] + shift)
            counts.append((gathers.call_count, scatters.call_count))
        found.append(counts)
    return found


def test_products_overlap_from_the_bound_on() -> None:
    assert run_workers(boxes_by_bound, 3) == [[[(1, 1)], [(0, 0)]]] * 3
