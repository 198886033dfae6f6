"""The MoE layers that scripts/bench_moe.py compares: ours, torch's grouped_mm, and whichever packages are installed.

All have one problem: tokens x, a router without bias, SwiGLU experts, a token's weights the softmax of its K logits.
Each side keeps the weights as it wants them and says how its gradients become ours.

Every side must see the same experts for the same tokens, balanced or not, in whatever precision it routes. So x carries
its logits: the router's weight is a multiple of the identity in front of zeros, and column e of x is the logit of
expert e but for that factor. Chosen experts have logits above 0.5, the others below -0.5: no rounding changes a choice.

Shape suffixes: T tokens, D model dim, F hidden units of one expert, E experts, K experts per token.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import grouped_mm, linear, silu

from moe.config import LOW_PRECISION, MoEConfig
from moe.fused_experts import tune
from moe.layer import MoE
from moe.recipes import resolve_recipe
from moe.reference import reference_moe
from parallel.compile import compile_layer


class Shape(NamedTuple):
    """T, D, F, E, K."""

    tokens: int
    dim: int
    hidden: int
    experts: int
    top_k: int


SHAPES = {
    "Qwen3-30B-A3B": Shape(32768, 2048, 768, 128, 8),
    "Moonlight-16B-A3B": Shape(32768, 2048, 1408, 64, 6),
    "Mixtral-8x7B": Shape(16384, 4096, 14336, 8, 2),
    "OLMoE-1B-7B": Shape(32768, 2048, 1024, 64, 8),
    "gpt-oss-20b": Shape(32768, 2880, 2880, 32, 4),
    "fine-grained": Shape(32768, 4096, 256, 256, 16),
    # One rank's experts of DeepSeek-V3, with every token sent to each.
    "DeepSeek-V3 slice": Shape(16384, 7168, 2048, 8, 8),
}
TINY = Shape(64, 32, 16, 8, 2)
ROUTINGS = ("balanced", "zipf")
# (rows, columns, whether two warpgroups take turns): what sonic-moe may choose from on Hopper.
SONICMOE_TILES = ((128, 256, False), (128, 192, True), (256, 128, False))
# Logits per unit of x: columns that carry logits are about as large as the others.
LOGIT_SCALE = 5.0


def saved_bound(shape: Shape) -> int:
    """Bytes of x, and of what the activation takes, in bf16."""
    return 2 * (shape.tokens * shape.dim + 2 * shape.tokens * shape.top_k * shape.hidden)


class Problem(NamedTuple):
    """What every side is given, in one dtype."""

    shape: Shape
    x_TD: Tensor
    router_ED: Tensor
    w_gate_up_E2FD: Tensor
    w_down_EDF: Tensor
    # Gradient of the output.
    grad_TD: Tensor


class Side(NamedTuple):
    """One layer: y_TD = forward(x_TD), its weights by our names, and how a gradient of each becomes one of ours."""

    forward: Callable[[Tensor], Tensor]
    weights: dict[str, Tensor]
    to_ours: dict[str, Callable[[Tensor], Tensor]]


NAMES: tuple[str, ...] = ("router", "w_gate_up", "w_down")


def draw_ids(shape: Shape, routing: str, device: torch.device, part: int = 0) -> Tensor:
    """(T, K) different experts, each drawn with equal probability or, for `zipf`, in proportion to 1 / place.

    Other parts are of other tokens, which choose with the same probabilities.
    """
    generator = torch.Generator(device).manual_seed(1)
    place_E = torch.randperm(shape.experts, generator=generator, device=device) + 1
    log_p_E = -place_E.float().log() if routing == "zipf" else torch.zeros_like(place_E, dtype=torch.float32)
    if part:
        generator.manual_seed(1000 + part)
    uniform_TE = torch.rand(shape.tokens, shape.experts, generator=generator, device=device)
    # Gumbel's trick: the K largest are a sample without replacement.
    return (log_p_E - (-uniform_TE.clamp(1e-20, 1 - 1e-7).log()).log()).topk(shape.top_k, dim=1).indices


def make_problem(
    shape: Shape, routing: str, device: torch.device, part: int = 0, num_parts: int = 1, num_slices: int = 1
) -> Problem:  # fmt: skip
    """Random tokens and weights, bf16 on a GPU and fp32 on a CPU: all experts, or one of so many parts of them.

    Each part has tokens of its own. With slices, so many parts share the same experts, of which each has a slice of the
    hidden units.
    """
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    generator = torch.Generator(device).manual_seed(part)
    T, D, F, E, _ = shape

    def randn(*size: int, scale: float) -> Tensor:
        return (torch.randn(size, generator=generator, device=device, dtype=torch.float32) * scale).to(dtype)

    x_TD, grad_TD = randn(T, D, scale=0.2), randn(T, D, scale=0.2)
    local, F = E * num_slices // num_parts, F // num_slices
    w_gate_up, w_down = randn(local, 2, F, D, scale=D**-0.5), randn(local, D, F, scale=F**-0.5)
    x_TD[:, :E] = draw_logits(draw_ids(shape, routing, device, part), E, generator).to(dtype) / LOGIT_SCALE
    router_ED = torch.eye(E, D, device=device, dtype=dtype) * LOGIT_SCALE
    return Problem(shape, x_TD, router_ED, w_gate_up, w_down, grad_TD)


def draw_logits(ids_TK: Tensor, num_experts: int, generator: torch.Generator) -> Tensor:
    """(T, E): from 0.5 to 1.5 for the chosen experts, from -1.5 to -0.5 for the others."""
    size = (ids_TK.shape[0], num_experts)
    logits_TE = torch.rand(size, generator=generator, device=ids_TK.device) - 1.5
    return logits_TE.scatter_add(1, ids_TK, torch.full(ids_TK.shape, 2.0, device=ids_TK.device))


def first_tokens(problem: Problem, num_tokens: int) -> Problem:
    """The same with fewer tokens."""
    shape = problem.shape._replace(tokens=min(num_tokens, problem.shape.tokens))
    return problem._replace(shape=shape, x_TD=problem.x_TD[: shape.tokens], grad_TD=problem.grad_TD[: shape.tokens])


def step(side: Side, x_TD: Tensor, grad_TD: Tensor) -> list[Tensor]:
    """Output, then gradients of x and of each weight; x requires a gradient."""
    out_TD = side.forward(x_TD)
    return [out_TD, *torch.autograd.grad(out_TD, [x_TD, *side.weights.values()], grad_TD)]


def results(side: Side, problem: Problem) -> dict[str, Tensor]:
    """Output and every gradient, in our layout."""
    out, d_x, *grads = step(side, problem.x_TD.detach().requires_grad_(), problem.grad_TD)
    ours = {name: side.to_ours[name](grad) for name, grad in zip(side.weights, grads, strict=True)}
    return {"out": out.detach(), "x": d_x, **ours}


def reference(problem: Problem) -> dict[str, Tensor]:
    """`results` in fp32, by a loop over experts."""
    wide = [tensor.float() for tensor in (problem.router_ED, problem.w_gate_up_E2FD, problem.w_down_EDF)]
    weights = dict(zip(NAMES, (weight.requires_grad_() for weight in wide), strict=True))
    config = config_of(problem.shape, "reference")

    def forward(x_TD: Tensor) -> Tensor:
        named = {"router.weight": weights["router"]}
        named |= {f"experts.{name}": weights[name] for name in NAMES[1:]}
        return reference_moe(x_TD[None], named, config).y_BSD[0]

    exact = problem._replace(x_TD=problem.x_TD.float(), grad_TD=problem.grad_TD.float())
    return results(Side(forward, weights, dict.fromkeys(NAMES, _same)), exact)


def relative_errors(actual: dict[str, Tensor], exact: dict[str, Tensor]) -> dict[str, float]:
    """||a - b|| / ||b|| of each tensor."""
    return {name: float((actual[name].float() - exact[name]).norm() / exact[name].norm()) for name in exact}


def config_of(shape: Shape, backend: str) -> MoEConfig:
    """Our layer of this shape."""
    return MoEConfig(num_experts=shape.experts, top_k=shape.top_k, expert_dim=shape.hidden, backend=backend)


# ---- the sides


def build(name: str, problem: Problem, *, compiled: bool) -> Side:
    """The layer with the problem's weights.

    Raises:
        ImportError, ValueError: it cannot run here; the message says why.
    """
    if name in ("fused", "grouped_mm", *LOW_PRECISION):
        return _ours(name, problem, compiled)
    return {"torch": _torch, "sonicmoe": _sonicmoe, "liger": _liger, "scattermoe": _scattermoe}[name](problem, compiled)


SIDES = ("fused", "grouped_mm", *LOW_PRECISION, "torch", "sonicmoe", "liger", "scattermoe")


def _ours(backend: str, problem: Problem, compiled: bool) -> Side:
    return side_of(make_layer(backend, problem, compiled))


def make_layer(backend: str, problem: Problem, compiled: bool) -> MoE:
    """Our layer with the problem's weights."""
    with torch.device("meta"):
        layer = MoE(config_of(problem.shape, "auto" if backend in LOW_PRECISION else backend), problem.shape.dim)
    weights = _leaves(problem.router_ED, problem.w_gate_up_E2FD, problem.w_down_EDF)
    layer.router.weight, layer.experts.w_gate_up, layer.experts.w_down = map(nn.Parameter, weights.values())
    if backend in LOW_PRECISION:
        layer.experts.use_recipe(resolve_recipe(backend, problem.x_TD.device))
    if compiled:
        # As the trainer compiles a block that has this layer in it.
        compile_layer(layer)
    if backend == "fused" and problem.x_TD.is_cuda:
        # As the trainer does, too.
        T, D, F, E, K = problem.shape
        tune(T * K, E, D, F, problem.x_TD.device)
    return layer


def side_of(layer: MoE) -> Side:
    """Our layer as a side."""
    parameters = layer.router.weight, layer.experts.w_gate_up, layer.experts.w_down
    named: dict[str, Tensor] = dict(zip(NAMES, parameters, strict=True))
    # Views, whose gradients are views: an index would cost its backward a copy.
    return Side(lambda x_TD: layer(x_TD[None])[0].squeeze(0), named, dict.fromkeys(NAMES, _same))


def _torch(problem: Problem, compiled: bool) -> Side:
    """Sort, gather, two grouped products and a sum by index, in plain torch."""
    # (E, D, 2F) and (E, F, D) in memory: the operands of the products as they stand.
    weights = _leaves(
        problem.router_ED, problem.w_gate_up_E2FD.flatten(1, 2).transpose(1, 2), problem.w_down_EDF.transpose(1, 2)
    )
    router, up, down = weights.values()
    layer = torch.compile(torch_moe) if compiled else torch_moe
    shape = problem.shape
    to_ours: dict[str, Callable[[Tensor], Tensor]] = {
        "router": _same,
        "w_gate_up": lambda grad: grad.transpose(1, 2).reshape(shape.experts, 2, shape.hidden, shape.dim),
        "w_down": lambda grad: grad.transpose(1, 2),
    }
    return Side(lambda x_TD: layer(x_TD, router, up, down, shape.top_k), weights, to_ours)


def torch_moe(x_TD: Tensor, router_ED: Tensor, up_EDH: Tensor, down_EFD: Tensor, top_k: int) -> Tensor:
    """The layer as a few lines of torch, without a question to the host; H = 2 F, gate first."""
    weights_TK, ids_TK = choose(x_TD, router_ED, top_k)
    sorted_ids, order = ids_TK.flatten().sort(stable=True)
    experts = torch.arange(up_EDH.shape[0], device=x_TD.device)
    ends = torch.searchsorted(sorted_ids, experts, right=True).to(torch.int32)
    row = order // top_k
    gate, up = grouped_mm(x_TD[row], up_EDH, offs=ends).chunk(2, -1)
    out = grouped_mm(silu(gate) * up, down_EFD, offs=ends)
    out = out * weights_TK.flatten()[order, None].to(out.dtype)
    return torch.zeros_like(x_TD).index_add(0, row, out)


def choose(x_TD: Tensor, router_ED: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """Weights in fp32, and ids."""
    best_TK, ids_TK = linear(x_TD, router_ED).float().topk(top_k)
    return best_TK.softmax(-1), ids_TK


def _sonicmoe(problem: Problem, compiled: bool) -> Side:
    """sonic-moe 0.1.2: gate and up rows take turns; it cannot be compiled and tunes its kernels itself."""
    _leave_few_tiles()
    from sonicmoe.enums import ActivationType  # pyright: ignore[reportMissingImports]
    from sonicmoe.functional import moe_TC_softmax_topk_layer  # pyright: ignore[reportMissingImports]

    E, F, D = problem.shape.experts, problem.shape.hidden, problem.shape.dim
    weights = _leaves(
        problem.router_ED, problem.w_gate_up_E2FD.transpose(1, 2).reshape(E, 2 * F, D), problem.w_down_EDF
    )
    router, up, down = weights.values()
    stream = torch.cuda.current_stream().cuda_stream

    def forward(x_TD: Tensor) -> Tensor:
        views = up.permute(1, 2, 0), None, down.permute(1, 2, 0), None
        return moe_TC_softmax_topk_layer(x_TD, router, *views, problem.shape.top_k, stream, ActivationType.SWIGLU)[0]

    to_ours = {"router": _same, "w_gate_up": lambda g: g.view(E, F, 2, D).transpose(1, 2), "w_down": _same}
    return Side(forward, weights, to_ours)


def _leave_few_tiles() -> None:
    """sonic-moe's tuner times some of its tiles only: all of them take minutes for each shape."""
    from quack import gemm_config  # pyright: ignore[reportMissingImports]

    every = gemm_config._get_sm90_configs
    gemm_config._get_sm90_configs = lambda *kinds: [
        config for config in every(*kinds) if (config.tile_m, config.tile_n, config.pingpong) in SONICMOE_TILES
    ]


def _liger(problem: Problem, compiled: bool) -> Side:
    """Liger's experts behind torch's router."""
    from liger_kernel.ops.fused_moe import LigerFusedMoEFunction  # pyright: ignore[reportMissingImports]

    weights = _leaves(problem.router_ED, problem.w_gate_up_E2FD.flatten(1, 2), problem.w_down_EDF)
    router, up, down = weights.values()
    route = torch.compile(choose) if compiled else choose

    def forward(x_TD: Tensor) -> Tensor:
        weights_TK, ids_TK = route(x_TD, router, problem.shape.top_k)
        return LigerFusedMoEFunction.apply(x_TD, up, down, ids_TK.int(), weights_TK)

    to_ours = {"router": _same, "w_gate_up": lambda g: g.view_as(problem.w_gate_up_E2FD), "w_down": _same}
    return Side(forward, weights, to_ours)


def _scattermoe(problem: Problem, compiled: bool) -> Side:
    """ScatterMoE's gated experts, up rows first, behind torch's router."""
    from scattermoe.mlp import GLUMLP  # pyright: ignore[reportMissingImports]

    shape = problem.shape
    layer: Any = GLUMLP(shape.dim, shape.hidden, shape.experts, shape.top_k).to(problem.x_TD)
    weights = _leaves(problem.router_ED, problem.w_gate_up_E2FD.flip(1).flatten(1, 2), problem.w_down_EDF)
    layer.experts.weight, layer.output_experts.weight = map(nn.Parameter, list(weights.values())[1:])
    weights |= {"w_gate_up": layer.experts.weight, "w_down": layer.output_experts.weight}
    route = torch.compile(choose) if compiled else choose

    def forward(x_TD: Tensor) -> Tensor:
        weights_TK, ids_TK = route(x_TD, weights["router"], shape.top_k)
        return layer(x_TD, weights_TK.to(x_TD.dtype), ids_TK)

    to_ours = {"router": _same, "w_gate_up": lambda g: g.view_as(problem.w_gate_up_E2FD).flip(1), "w_down": _same}
    return Side(forward, weights, to_ours)


def _leaves(*tensors: Tensor) -> dict[str, Tensor]:
    """A side's own copies, by name."""
    copies = (tensor.detach().clone(memory_format=torch.contiguous_format).requires_grad_() for tensor in tensors)
    return dict(zip(NAMES, copies, strict=True))


def _same(grad: Tensor) -> Tensor:
    return grad
