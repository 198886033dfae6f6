"""Ring and Ulysses attention with the CUDA kernels against the written-out formula in fp64 on the same bf16 inputs.

A ring's ranks in one process need one GPU and no transfers; the real thing needs two. Norm-wise tolerances as in
test_attention.py: outputs and gradients in bf16 carry a few roundings of 2e-3 to 4e-3, a block left out or weighed
wrongly moves them by 1e-1 or more.
"""

from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from parallel.block_attention import Rule, Tile, attend, choose_kernel
from parallel.context_parallel import ContextParallel, context_attention
from parallel.process_group import process_group
from parallel.ring_attention import backward_of, forward_over
from tests.gpu.two_ranks import set_environment
from tests.ring_in_one_process import ring_in_one_process, visible
from tests.token_table import token_table
from trainer.models.config import AttentionConfig
from trainer.models.inner_attention import plan_sequences, reference_attention
from trainer.worker_pool import free_port

pytestmark = pytest.mark.gpu

B, S, SCALE = 2, 768, 0.11
TOLERANCE = 1e-2
# name: query heads, key/value heads, head dim of q and k, of v
SHAPES = {"gqa": (8, 2, 128, 128), "gpt_oss": (8, 2, 64, 64), "mla": (4, 4, 192, 128)}


class Case(NamedTuple):
    shape: str = "gqa"
    window: int = 0
    documents: bool = False
    sinks: bool = False


CASES = {
    "causal": Case(),
    "causal_mla": Case("mla"),
    "documents": Case(documents=True),
    "documents_mla": Case("mla", documents=True),
    # Shorter than a chunk of the rings below, longer than one, and nearly everything.
    "window": Case("gpt_oss", window=50),
    "window_documents": Case("gpt_oss", window=300, documents=True, sinks=True),
    "wide_window": Case(window=700),
}


def document_ids() -> Tensor:
    ids = torch.zeros(B, S, dtype=torch.int64)
    ids[0, 100:] = 1
    ids[0, 101:] = 2
    ids[0, 630:] = -1
    ids[1, 384:] = 1
    return ids


def rule_of(case: Case, device: str = "cuda") -> Rule:
    if not case.documents:
        return Rule(SCALE, case.window)
    positions = plan_sequences(torch.zeros(B, S, 1), AttentionConfig(), document_ids_BS=document_ids()).positions_BS
    return Rule(SCALE, case.window, (torch.arange(S) - positions).to(device), max_documents=8)


def random_inputs(case: Case) -> list[Tensor]:
    """q, k, v and the gradient of the output, in bf16 on the CPU."""
    H, G, D, V = SHAPES[case.shape]
    generator = torch.Generator().manual_seed(0)
    shapes = [(B, S, n, d) for n, d in ((H, D), (G, D), (G, V), (H, V))]
    return [torch.randn(shape, generator=generator).bfloat16() for shape in shapes]


def sinks_of(case: Case) -> Tensor | None:
    return torch.linspace(-1, 6, SHAPES[case.shape][0]).bfloat16() if case.sinks else None


def expected(case: Case) -> list[Tensor]:
    """Output and the gradients of q, k, v (and sinks) in fp64."""
    *tensors, grad = (x.double().cuda() for x in random_inputs(case))
    leaves = [x.requires_grad_() for x in (*tensors, *([sinks_of(case).double().cuda()] if case.sinks else []))]
    sinks = leaves[3] if case.sinks else None
    out = reference_attention(*leaves[:3], sinks, visible(B, S, rule_of(case)).cuda(), SCALE)
    out.backward(grad)
    return [out.detach(), *(x.grad for x in leaves)]


def error(actual: Tensor, exact: Tensor) -> float:
    return ((actual.double() - exact.double()).norm() / exact.double().norm()).item()


@pytest.mark.parametrize("ring", [2, 3])
@pytest.mark.parametrize("name", CASES)
def test_ring_in_one_process_equals_the_formula(name: str, ring: int) -> None:
    case = CASES[name]._replace(sinks=False)
    actual = ring_in_one_process(*(x.cuda() for x in random_inputs(case)), ring, rule_of(case))
    for tensor, a, e in zip(("out", "dq", "dk", "dv"), actual, expected(case), strict=True):
        assert error(a, e) < TOLERANCE, tensor


@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability()[0] < 9, reason="cuDNN comes first from SM90 on"
)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_fastest_kernel_that_can_is_chosen(shape: str) -> None:
    q, k, v, _ = (x.cuda() for x in random_inputs(Case(shape)))
    assert choose_kernel(q, k, v, Rule(SCALE)) == "cudnn"
    assert choose_kernel(q, k, v, Rule(SCALE, window=5)) == "flash"
    assert choose_kernel(q, k, v, rule_of(Case(shape, documents=True))) == "flash"
    assert choose_kernel(q.float(), k.float(), v.float(), Rule(SCALE)) == "masked"


@pytest.mark.parametrize("kernel", ["masked", "flash"])
def test_queries_that_see_nothing(kernel: str) -> None:
    """Queries 384.. of sequence 1 begin a document: nothing of an earlier chunk reaches them."""
    case = CASES["documents"]
    q, k, v, _ = (x.cuda() for x in random_inputs(case))
    tile = Tile(384, 192, 192, 192, 384, 192)
    out, lse = attend(kernel, tile, rule_of(case), tile.queries(q), tile.keys(k), tile.keys(v))
    assert bool((lse[1] == float("-inf")).all()) and bool((out[1] == 0).all())
    assert bool(lse[0].isfinite().all()) and bool(out[0].any())


@pytest.mark.parametrize("name", CASES)
def test_nothing_waits_for_the_device(name: str) -> None:
    case = CASES[name]
    rows, rule = token_table(S, 2, 1, 1), rule_of(case)
    q, k, v, grad = (x[:, rows[0]].cuda() for x in random_inputs(case))
    blocks = [(0, k, v), *((1, x[:, rows[1]].cuda(), y[:, rows[1]].cuda()) for x, y in [random_inputs(case)[1:3]])]

    def forward_and_backward() -> None:
        out, lse = forward_over(q, blocks, 2, 0, rule)
        dq = torch.zeros_like(q, dtype=torch.float32)
        for block in blocks:
            backward_of(block, grad, q, out.bfloat16(), lse, dq, 2, 0, rule)

    # The first time kernels are loaded, which may wait.
    forward_and_backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        forward_and_backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


# ---- two GPUs


def two_ranks(rank: int, port: int, folder: str) -> None:
    """A process of its own: every case by ring and by Ulysses; saves what it computed of each."""
    set_environment(rank, port)
    with process_group(timeout_seconds=120) as device:
        world = dist.group.WORLD
        contexts = {
            "ring": ContextParallel(2, 1, rank, 0, world, None),
            "ulysses": ContextParallel(1, 2, 0, rank, None, world),
        }
        results = {
            (name, mode): part_of_rank(case, context, rank, device)
            for mode, context in contexts.items()
            for name, case in CASES.items()
        }
        torch.save(results, Path(folder) / f"{rank}.pt")


def part_of_rank(case: Case, context: ContextParallel, rank: int, device: torch.device) -> list[Tensor]:
    rule = rule_of(case)
    rows = token_table(S, context.ring, context.ulysses, 1)[rank]
    *tensors, grad = (x[:, rows].to(device) for x in random_inputs(case))
    leaves = [x.requires_grad_() for x in (*tensors, *([sinks_of(case).to(device)] if case.sinks else []))]

    def local(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
        return reference_attention(q, k, v, sinks, visible(B, S, rule).to(device), SCALE)

    out = context_attention(
        *leaves[:3],
        leaves[3] if case.sinks else None,
        context,
        scale=SCALE,
        window=case.window,
        first_BS=rule.first_BS,
        max_documents=rule.max_documents,
        local=local,
    )
    out.backward(grad)
    return [x.cpu() for x in (out.detach(), *(leaf.grad for leaf in leaves))]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[tuple[str, str], list[Tensor]]]:
    folder = tmp_path_factory.mktemp("two_ranks")
    mp.spawn(two_ranks, (free_port(), str(folder)), nprocs=2)
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


@pytest.mark.multi_gpu(2, may_share=True)
@pytest.mark.parametrize("mode", ["ring", "ulysses"])
@pytest.mark.parametrize("name", CASES)
def test_two_gpus_equal_the_formula(two: list[dict[tuple[str, str], list[Tensor]]], name: str, mode: str) -> None:
    case = CASES[name]
    order = token_table(S, *((2, 1) if mode == "ring" else (1, 2)), 1).flatten().argsort()
    parts = [results[name, mode] for results in two]
    for tensor, a, b, e in zip(("out", "dq", "dk", "dv", "dsinks"), *parts, expected(case), strict=False):
        whole = a.double() + b.double() if tensor == "dsinks" else torch.cat([a, b], dim=1)[:, order]
        # A sink's gradient is one sum over all rows of both signs: it cancels, so roundings weigh more.
        assert error(whole, e.cpu()) < (3e-2 if tensor == "dsinks" else TOLERANCE), tensor
