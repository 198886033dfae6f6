"""Does a parallel layout compute what one process computes? Run both on one tiny model and compare everything.

Compared are the initial weights, the loss, **every gradient by name**, the gradient norm, the balancing counts, and the
weights after a few SGD steps: SGD, because Adam divides the scale of a gradient away and would hide a doubled one. The
batch is synthetic but unkind: packed documents, padding, prompts without labels, uneven label counts per rank. And
ranks that hold copies of the same thing must hold the same bits.

The error of a tensor is ||a - b|| / ||b|| in fp64.
"""

import hashlib
import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from comms.config import CommsConfig
from parallel.config import ParallelConfig
from parallel.init import clean_name
from parallel.mesh import Mesh, build_mesh
from trainer.build import build_model
from trainer.config import Config, OptimConfig, PrecisionConfig, RunConfig, TrainConfig
from trainer.data import Batch
from trainer.models.config import ModelConfig
from trainer.optim import build_optimizer
from trainer.step import train_step


@dataclass
class Trace:
    """What one layout computed, as full tensors on the CPU. Equal on every rank."""

    initial: dict[str, Tensor] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    aux_losses: list[float] = field(default_factory=list)
    mtp_losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    # Of the first step.
    gradients: dict[str, Tensor] = field(default_factory=dict)
    counts: list[Tensor] = field(default_factory=list)
    # Pairs that capacity dropped, over all layers.
    dropped: list[int] = field(default_factory=list)
    # After the last step: parameters and balancing biases.
    final: dict[str, Tensor] = field(default_factory=dict)
    # Quantities (named as in `compare`) of which two ranks hold different copies.
    unequal_copies: list[str] = field(default_factory=list)


class Bounds(NamedTuple):
    """How much a layout may differ from one process. Initial weights, counts and copies never may."""

    # Relative error of gradients and of the final weights.
    tensors: float
    # Of losses and gradient norms.
    numbers: float


# precision.recipe -> what correct layouts stay within: twice what is seen, and far below what a mistake makes. fp64
# shows 1e-15 and fp32 1e-6, the order of sums. bf16, whose partial sums are rounded to 8 bits before they are added
# over ranks, shows 3e-2, if experts are chosen by position: of tokens near a tie some would go elsewhere.
BOUNDS = {"fp64": Bounds(1e-10, 1e-10), "fp32": Bounds(5e-6, 5e-6), "bf16": Bounds(5e-2, 1e-2)}
# Of the size of all tensors of a kind together, what each of them is taken to have at least.
NOISE = 1e-3


def trace_layout(
    model_config: ModelConfig,
    parallel: ParallelConfig,
    *,
    recipe: str = "fp64",
    device: torch.device | None = None,
    steps: int = 3,
    global_batch_size: int = 8,
    micro_steps: int = 1,
    seq_len: int = 16,
    max_grad_norm: float = 0.0,
    clip_later: bool = False,
    seed: int = 0,
    comms: CommsConfig | None = None,
) -> Trace:
    """Train `steps` SGD steps under a layout. Collective over the default process group.

    The batch-level auxiliary loss is defined per micro-step: layouts that are compared need equal `micro_steps`.

    Args:
        clip_later: after the first step clip to a quarter of its norm, so that the final weights tell about clipping
            while the gradients kept (of the first step) have their own size.
    """
    mesh = build_mesh(parallel, device or torch.device("cpu"))
    config = Config(
        train=TrainConfig(
            global_batch_size=global_batch_size,
            micro_batch_size=global_batch_size // (mesh.batch_size * micro_steps),
            seq_len=seq_len,
            steps=steps,
        ),
        run=RunConfig(seed=seed),
        model=model_config,
        parallel=mesh.config,
        comms=comms or CommsConfig(),
        precision=PrecisionConfig(recipe=recipe),
        optim=OptimConfig(name="sgd", lr=0.1, weight_decay=0.0, max_grad_norm=max_grad_norm),
    )
    model = build_model(config, mesh)
    optimizer = build_optimizer(model, config.optim)
    trace = Trace(initial=full_tensors(model))
    copies = {("initial", *key): digest for key, digest in digests(named_tensors(model)).items()}

    def keep_gradients(loss: Tensor, grad_norm: Tensor) -> bool:
        if not trace.gradients:
            gradients = [(name, p.grad) for name, p in named_parameters(model) if p.grad is not None]
            trace.gradients = {name: full(gradient) for name, gradient in gradients}
            copies.update({("gradient", *key): digest for key, digest in digests(gradients).items()})
        return True

    for step in range(steps):
        if clip_later and step == 1:
            config.optim = replace(config.optim, max_grad_norm=trace.grad_norms[0] / 4)
        batches = synthetic_batches(config, mesh, step)
        result = train_step(model, optimizer, batches, mesh, config, keep_gradients)
        trace.losses.append(float(result.loss))
        trace.aux_losses.append(float(result.aux_loss + result.z_loss))
        trace.mtp_losses.append(0.0 if result.mtp_loss is None else float(result.mtp_loss))
        trace.grad_norms.append(float(result.grad_norm))
        trace.dropped.append(int(result.dropped))
        if result.tokens_per_expert_LE is not None:
            trace.counts.append(result.tokens_per_expert_LE.cpu())
    trace.final = full_tensors(model)
    copies.update({("final", *key): digest for key, digest in digests(named_tensors(model)).items()})
    figures = (trace.losses, trace.aux_losses, trace.mtp_losses, trace.grad_norms, trace.dropped)
    copies[("figures", "", ())] = repr((figures, [counts.tolist() for counts in trace.counts]))
    trace.unequal_copies = unequal_copies(copies)
    return trace


def synthetic_batches(config: Config, mesh: Mesh, step: int) -> list[Batch]:
    """This rank's micro-batches of one step; the global batch depends on (seed, step) alone."""
    samples = [
        synthetic_sample(config, step * config.train.global_batch_size + index)
        for index in range(config.train.global_batch_size)
    ]
    size = config.train.micro_batch_size
    stride = size * mesh.batch_size
    batches: list[Batch] = []
    for start in range(0, len(samples), stride):
        mine = samples[start + mesh.batch_rank * size : start + (mesh.batch_rank + 1) * size]
        columns = [torch.stack(column) for column in zip(*mine, strict=True)]
        batches.append(Batch(*columns))
    return batches


def synthetic_sample(config: Config, index: int) -> tuple[Tensor, ...]:
    """tokens, labels, positions, document ids and sample id of one sequence, in Batch's order."""
    generator = torch.Generator().manual_seed(config.run.seed * 1_000_003 + index)
    length, vocab = config.train.seq_len, config.model.vocab_size

    def random_below(bound: int) -> int:
        return int(torch.randint(bound, (), generator=generator))

    tokens = torch.randint(vocab, (length,), generator=generator)
    labels = torch.randint(vocab, (length,), generator=generator)
    # Every other sample ends in padding, and prompts of uneven length have no labels.
    end = length - random_below(length // 3) if index % 2 else length
    # Up to three documents: with two, a rank that only tells the first from the others would pass.
    starts = torch.tensor([0, *sorted(min(1 + random_below(length - 1), end) for _ in range(2))])
    place = torch.arange(length)
    documents = (place[:, None] >= starts).sum(1) - 1
    positions = place - starts[documents]
    labels[: random_below(int(starts[1]))] = -100
    labels[starts[1:] - 1] = -100
    documents[end:] = -1
    labels[end:] = -100
    return tokens, labels, positions, documents, torch.tensor(index)


def named_parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Parameters by the names they have without wrappers."""
    return [(clean_name(name), parameter) for name, parameter in model.named_parameters()]


def full(tensor: Tensor) -> Tensor:
    """The whole tensor, on the CPU; a copy."""
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return whole.detach().to("cpu", copy=True)


def named_tensors(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Every parameter and buffer."""
    return [*named_parameters(model), *((clean_name(name), buffer) for name, buffer in model.named_buffers())]


def full_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter and buffer by name, gathered. Tiny models only."""
    return {name: full(tensor) for name, tensor in named_tensors(model)}


# Of which part of a tensor a rank has a copy: its place on each mesh axis that splits the tensor.
Place = tuple[tuple[str, int], ...]


def digests(named: Iterable[tuple[str, Tensor]]) -> dict[tuple[str, Place], str]:
    """(name, place) -> digest of the bytes that this rank has of a tensor."""
    found: dict[tuple[str, Place], str] = {}
    for name, tensor in named:
        place: Place = ()
        part = tensor.detach()
        if isinstance(tensor, DTensor):
            mesh = tensor.device_mesh
            axes = zip(mesh.mesh_dim_names or (), mesh.get_coordinate() or (), tensor.placements, strict=True)
            place = tuple((axis, rank) for axis, rank, placement in axes if not placement.is_replicate())
            part = tensor.to_local().detach()
        data = part.cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
        found[name, place] = hashlib.sha256(data).hexdigest()
    return found


def unequal_copies(copies: dict[tuple[str, str, Place], str]) -> list[str]:
    """Which of (kind, name, place) -> digest differ between ranks, as `kind name`, sorted. Collective."""
    of_ranks: list[dict[tuple[str, str, Place], str]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(of_ranks, copies)
    seen: dict[tuple[str, str, Place], str] = {}
    unequal = {key for of_rank in of_ranks for key, digest in of_rank.items() if seen.setdefault(key, digest) != digest}
    return sorted({f"{kind} {name}".strip() for kind, name, _ in unequal})


@dataclass(frozen=True)
class Mismatch:
    """One quantity that differs more than its bound."""

    quantity: str
    error: float
    bound: float

    def __str__(self) -> str:
        return f"{self.quantity}: error {self.error:.2e}, bound {self.bound:.0e}"


def compare(trace: Trace, reference: Trace, bound: float | Bounds) -> list[Mismatch]:
    """Everything in which `trace` differs from `reference`: what went wrong first comes first, then the worst.

    Initial weights, copies, counts and the number of dropped pairs must be equal, the rest within `bound`.
    """
    bounds = bound if isinstance(bound, Bounds) else Bounds(bound, bound)
    found = [
        *(Mismatch(f"copies of {quantity}", float("inf"), 0.0) for quantity in trace.unequal_copies),
        *_compare_tensors("initial", trace.initial, reference.initial, 0.0),
        *_compare_tensors("gradient", trace.gradients, reference.gradients, bounds.tensors),
        *_compare_tensors("final", trace.final, reference.final, bounds.tensors),
        *_compare_numbers("loss", trace.losses, reference.losses, bounds.numbers),
        *_compare_numbers("aux_loss", trace.aux_losses, reference.aux_losses, bounds.numbers),
        *_compare_numbers("mtp_loss", trace.mtp_losses, reference.mtp_losses, bounds.numbers),
        *_compare_numbers("grad_norm", trace.grad_norms, reference.grad_norms, bounds.numbers),
    ]
    for step, (ours, theirs) in enumerate(zip(trace.counts, reference.counts, strict=True)):
        if not torch.equal(ours, theirs):
            found.append(Mismatch(f"counts of step {step}", float((ours - theirs).abs().max()), 0.0))
    for step, (dropped, expected) in enumerate(zip(trace.dropped, reference.dropped, strict=True)):
        if dropped != expected:
            found.append(Mismatch(f"dropped pairs of step {step}", float(abs(dropped - expected)), 0.0))
    return sorted(found, key=_order)


def _order(mismatch: Mismatch) -> tuple[int, bool, float]:
    """Initial weights, the first step's forward and then its backward, whatever follows; the worst of each, then copies
    that differ."""
    quantity = mismatch.quantity.removeprefix("copies of ")
    of_gradients = quantity.startswith(("gradient", "grad_norm of step 0"))
    stage = 0 if quantity.startswith("initial") else 2 if of_gradients else 1 if quantity.endswith("of step 0") else 3
    return stage, quantity != mismatch.quantity, -mismatch.error


def relative_error(ours: Tensor, theirs: Tensor, least: float = 0.0) -> float:
    """||a - b|| / max(||b||, least); infinite when one of them is not finite, or b is zero and a is not."""
    a, b = ours.double(), theirs.double()
    if not bool(torch.isfinite(a).all()) or not bool(torch.isfinite(b).all()):
        return float("inf")
    difference, size = float((a - b).norm()), max(float(b.norm()), least)
    if difference == 0.0:
        return 0.0
    return difference / size if size else float("inf")


def worst_error(trace: Trace, reference: Trace) -> tuple[str, float]:
    """The gradient with the largest error, by name; one that is missing has an infinite one."""
    least = _least_size(reference.gradients)
    errors = dict.fromkeys(reference.gradients.keys() - trace.gradients, float("inf")) | {
        name: relative_error(trace.gradients[name], theirs, least)
        for name, theirs in reference.gradients.items()
        if name in trace.gradients
    }
    name = max(errors, key=lambda key: errors[key])
    return name, errors[name]


def _least_size(tensors: dict[str, Tensor]) -> float:
    """What a tensor's error is compared with at least, of all of its kind.

    A gradient that is zero but for rounding, such as that of a bias of keys without positions (it moves all scores of a
    query alike), would be compared with rounding.
    """
    squares = [float(tensor.double().square().sum()) for tensor in tensors.values() if tensor.is_floating_point()]
    total = math.sqrt(sum(squares))
    return NOISE * total if math.isfinite(total) else 0.0


def _compare_tensors(kind: str, ours: dict[str, Tensor], theirs: dict[str, Tensor], bound: float) -> list[Mismatch]:
    found = [Mismatch(f"{kind} {name} exists on one side only", float("inf"), bound) for name in ours.keys() ^ theirs]
    least = _least_size(theirs)
    for name in ours.keys() & theirs.keys():
        error = relative_error(ours[name], theirs[name], least)
        if not error <= bound:
            found.append(Mismatch(f"{kind} {name}", error, bound))
    return found


def _compare_numbers(kind: str, ours: list[float], theirs: list[float], bound: float) -> list[Mismatch]:
    found: list[Mismatch] = []
    for step, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        error = relative_error(torch.tensor(a, dtype=torch.float64), torch.tensor(b, dtype=torch.float64))
        if not error <= bound:
            found.append(Mismatch(f"{kind} of step {step}", error, bound))
    return found
