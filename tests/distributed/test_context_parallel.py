"""Context parallelism against the written-out formula of one process, in fp64: output and every gradient.

The bound is 1e-12 of each tensor's norm: sums in another order move fp64 by 1e-15 to 1e-14; a block left out, counted
twice or weighed wrongly moves it by far more than 1e-3.
"""

import functools
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from parallel import ring_attention
from parallel.activation_checkpoint import apply_activation_checkpoint
from parallel.context_parallel import ContextParallel, context_attention
from tests.distributed.harness import run_workers
from tests.token_table import token_table
from trainer.models.inner_attention import reference_attention

BOUND = 1e-12
RIGHT_MERGE = ring_attention.merge
LAYOUTS = [(2, 1), (1, 2), (4, 1), (2, 2), (1, 4), (4, 2), (2, 4), (8, 1)]
S = 64  # chunks of 4 tokens in a ring of 8, of 16 in one of 2
SCALE = 0.3


class Case(NamedTuple):
    """Heads H (queries) and G (keys, values), head dims D (queries, keys) and V (values)."""

    B: int = 1
    H: int = 4
    G: int = 4
    D: int = 4
    V: int = 4
    window: int = 0
    sinks: bool = False
    documents: bool = False


CASES = {
    "causal": Case(),
    "gqa_batch": Case(B=2, H=8, G=2),
    "mla_sinks": Case(V=6, sinks=True),
    "documents": Case(B=2, G=1, documents=True),
    "small_window": Case(window=3, documents=True, sinks=True, B=2),
    "chunk_window": Case(window=16, G=2),
    "large_window": Case(window=35, documents=True),
    "window_of_everything": Case(window=S),
}


def first_tokens() -> torch.Tensor:
    """(2, S): documents longer and shorter than chunks, one of a single token, padding as a run of its own."""
    starts = torch.zeros(2, S, dtype=torch.bool)
    starts[0, [0, 5, 6, 41, 57]] = True
    starts[1, [0, 32, 33]] = True
    return torch.where(starts, torch.arange(S), 0).cummax(dim=1).values


def visible(case: Case) -> torch.Tensor:
    """(B, 1, S, S): the definition."""
    q, k = torch.arange(S).view(-1, 1), torch.arange(S)
    sees = (k <= q).expand(case.B, S, S)
    if case.window:
        sees = sees & (q - k < case.window)
    if case.documents:
        sees = sees & (k >= first_tokens()[: case.B].unsqueeze(-1))
    return sees.unsqueeze(1)


def inputs(case: Case) -> list[torch.Tensor | None]:
    """q, k, v, sinks and the gradient of the output, the same in every process."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(case.B, S, n, d) for n, d in ((case.H, case.D), (case.G, case.D), (case.G, case.V), (case.H, case.V))]
    q, k, v, grad = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    sinks = torch.linspace(-1, 2, case.H, dtype=torch.float64) if case.sinks else None
    return [q, k, v, sinks, grad]


def gradients(function, q, k, v, sinks, grad) -> dict[str, torch.Tensor]:
    leaves = {"q": q, "k": k, "v": v, "sinks": sinks}
    leaves = {name: x.clone().requires_grad_() for name, x in leaves.items() if x is not None}
    out = function(leaves["q"], leaves["k"], leaves["v"], leaves.get("sinks"))
    out.backward(grad)
    return {"out": out.detach()} | {name: x.grad for name, x in leaves.items()}


def context_of(ring: int, ulysses: int) -> ContextParallel:
    """This worker's place when all share each sequence. Collective; the pool ends the groups after each task."""
    ranks = torch.arange(ring * ulysses).view(ring, ulysses)
    ring_group = ulysses_group = None
    for column in ranks.T.tolist() if ring > 1 else []:
        group = dist.new_group(column)
        ring_group = group if dist.get_rank() in column else ring_group
    for row in ranks.tolist() if ulysses > 1 else []:
        group = dist.new_group(row)
        ulysses_group = group if dist.get_rank() in row else ulysses_group
    return ContextParallel(ring, ulysses, *divmod(dist.get_rank(), ulysses), ring_group, ulysses_group)


def own_part(x: torch.Tensor, ring: int, ulysses: int) -> torch.Tensor:
    return x[:, token_table(S, ring, ulysses, 1)[dist.get_rank()]]


def attention(case: Case, context: ContextParallel, q, k, v, sinks):
    first = first_tokens()[: case.B] if case.documents else None

    def local(q, k, v, sinks):
        return reference_attention(q, k, v, sinks, visible(case), SCALE)

    return context_attention(q, k, v, sinks, context, scale=SCALE, window=case.window, first_BS=first, local=local)


def worker(case: Case, ring: int, ulysses: int) -> dict[str, torch.Tensor]:
    return worker_at(case, context_of(ring, ulysses))


def worker_at(case: Case, context: ContextParallel) -> dict[str, torch.Tensor]:
    ring, ulysses = context.ring, context.ulysses
    q, k, v, sinks, grad = inputs(case)
    q, k, v, grad = (own_part(x, ring, ulysses) for x in (q, k, v, grad))
    return gradients(functools.partial(attention, case, context), q, k, v, sinks, grad)


def workers_of_many(cases: list[Case], ring: int, ulysses: int) -> list[dict[str, torch.Tensor]]:
    context = context_of(ring, ulysses)
    return [worker_at(case, context) for case in cases]


def assembled(parts: list[dict[str, torch.Tensor]], ring: int, ulysses: int) -> dict[str, torch.Tensor]:
    """Every token to its place; the sinks' gradient is a sum over ranks, like any weight's."""
    order = token_table(S, ring, ulysses, 1).flatten().argsort()
    whole = {name: torch.cat([part[name] for part in parts], dim=1)[:, order] for name in parts[0] if name != "sinks"}
    if "sinks" in parts[0]:
        whole["sinks"] = torch.stack([part["sinks"] for part in parts]).sum(dim=0)
    return whole


@functools.cache
def expected(case: Case) -> dict[str, torch.Tensor]:
    q, k, v, sinks, grad = inputs(case)
    return gradients(lambda *x: reference_attention(*x, visible(case), SCALE), q, k, v, sinks, grad)


def worst_error(actual: dict[str, torch.Tensor], case: Case) -> float:
    assert actual.keys() == expected(case).keys()
    return max(float((actual[name] - x).norm() / x.norm()) for name, x in expected(case).items())


@pytest.mark.parametrize(("ring", "ulysses"), LAYOUTS)
def test_layouts_equal_one_process(ring: int, ulysses: int) -> None:
    results = run_workers(workers_of_many, ring * ulysses, list(CASES.values()), ring, ulysses)
    for index, (name, case) in enumerate(CASES.items()):
        error = worst_error(assembled([result[index] for result in results], ring, ulysses), case)
        assert error < BOUND, (name, error)


def perturbed_document(ring: int, ulysses: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Output before and after the tokens of document 6..40 of the first sequence change."""
    case, context = CASES["documents"], context_of(ring, ulysses)
    q, k, v, _, _ = inputs(case)
    outs = []
    for shift in (0.0, 1.0):
        changed = [x.clone() for x in (q, k, v)]
        for x in changed:
            x[0, 6:41] += shift
        outs.append(attention(case, context, *(own_part(x, ring, ulysses) for x in changed), None))
    return outs[0], outs[1]


def test_documents_do_not_see_each_other() -> None:
    parts = run_workers(perturbed_document, 4, 2, 2)
    order = token_table(S, 2, 2, 1).flatten().argsort()
    before, after = (torch.cat(outs, dim=1)[:, order] for outs in zip(*parts, strict=True))
    same = torch.ones(2, S, dtype=torch.bool)
    same[0, 6:41] = False
    assert torch.equal(before[same], after[same])
    assert not torch.equal(before[~same], after[~same])


def merge_without_weights(out, lse, tile, tile_out, tile_lse) -> None:
    """The planted mistake: all that was seen so far weighs as much as the new tile."""
    RIGHT_MERGE(out, lse, tile, tile_out, tile_lse if tile.causal else tile.queries(lse.mT).mT.clone())


def worker_with_wrong_merge(case: Case) -> dict[str, torch.Tensor]:
    ring_attention.merge = merge_without_weights
    try:
        return worker(case, 2, 1)
    finally:
        ring_attention.merge = RIGHT_MERGE


def test_a_wrong_merge_is_noticed() -> None:
    parts = run_workers(worker_with_wrong_merge, 2, CASES["causal"])
    assert worst_error(assembled(parts, 2, 1), CASES["causal"]) > 1e-3


class Block(torch.nn.Module):
    """Three linear maps and attention, as in a transformer's block."""

    def __init__(self, context: ContextParallel) -> None:
        super().__init__()
        self.context = context
        generator = torch.Generator().manual_seed(0)
        self.weights = torch.nn.Parameter(torch.randn(3, 4, 4, dtype=torch.float64, generator=generator))
        self.sinks = torch.nn.Parameter(torch.ones(4, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (x @ weight for weight in self.weights)
        return x + attention(CASES["documents"]._replace(G=4), self.context, q, k, v, self.sinks)


class CountOperators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func._opname)
        return func(*args, **(kwargs or {}))


def checkpointed(mode: str) -> tuple[list[torch.Tensor], int]:
    """Output and gradients, and how often backward repeats the ring."""
    block = apply_activation_checkpoint(Block(context_of(2, 2)), mode)
    x = own_part(inputs(CASES["documents"])[0], 2, 2).requires_grad_()
    out = block(x)
    counter = CountOperators()
    with counter:
        out.square().sum().backward()
    return [out.detach(), x.grad, *(p.grad for p in block.parameters())], counter.names.count("ring_attention")


def test_activation_checkpointing_changes_nothing() -> None:
    plain, selective, full = (run_workers(checkpointed, 4, mode) for mode in ("none", "selective", "full"))
    for one, other, third in zip(plain, selective, full, strict=True):
        for a, b, c in zip(one[0], other[0], third[0], strict=True):
            assert torch.equal(a, b)
            assert torch.equal(a, c)
    # "selective" keeps the result of attention, "full" goes around the ring again.
    assert [result[0][1] for result in (plain, selective, full)] == [0, 0, 1]


def compiled_and_eager(ring: int, ulysses: int) -> list[list[torch.Tensor]]:
    """Output and gradients of one block, eager and as one graph."""
    block = Block(context_of(ring, ulysses))
    results = []
    for forward in (block.forward, torch.compile(block.forward, fullgraph=True, backend="aot_eager")):
        block.zero_grad(set_to_none=True)
        x = own_part(inputs(CASES["documents"])[0], ring, ulysses).requires_grad_()
        out = forward(x)
        out.square().sum().backward()
        results.append([out.detach(), x.grad, *(p.grad for p in block.parameters())])
    return results


@pytest.mark.parametrize(("ring", "ulysses"), [(2, 1), (1, 2)])
def test_a_block_compiles_whole(ring: int, ulysses: int) -> None:
    for eager, compiled in run_workers(compiled_and_eager, 2, ring, ulysses):
        for one, other in zip(eager, compiled, strict=True):
            assert torch.equal(one, other)


def messages(ring: int) -> list[int]:
    """Elements of every message a rank sends in forward and backward."""
    sent = []

    class Recording(ring_attention._Transfer):
        def __init__(self, leaving: torch.Tensor, *rest) -> None:
            sent.append(leaving.numel())
            super().__init__(leaving, *rest)

    right = ring_attention._Transfer
    ring_attention._Transfer = Recording
    try:
        worker(CASES["causal"], ring, 1)
    finally:
        ring_attention._Transfer = right
    return sent


def test_a_ring_moves_parts_of_keys_and_values_only() -> None:
    """R - 1 blocks forward, R - 1 blocks and as many gradients backward, each of 1 / R of the keys and values."""
    ring, case = 4, CASES["causal"]
    whole = S * case.G * (case.D + case.V)
    for sent in run_workers(messages, ring, ring):
        assert sent == [whole // ring] * (3 * ring - 3)
