"""What Hugging Face's files call our tensors, and how theirs lie in ours. Families are data; the walk is one.

A tensor of ours is filled by *pieces*: each is one matrix or vector of a file's tensor, walked in our order of dims.
Most tensors are one piece. A stack of experts is one piece per expert (and per gate and up), however the file has it:

    layout       gate and up                                   down                   who
    per expert   E x 2 tensors (F, D)                          E tensors (D, F)       everyone on the hub but gpt-oss
    fused        (E, 2F, D), gate first                        (E, D, F)              `transformers` 5 in memory
    transposed   (E, D, 2F), gate first                        (E, F, D)              Llama 4
    alternating  (E, D, 2F), gate and up by turns              (E, F, D)              gpt-oss

so no more than one expert's matrix is ever held on the way. A new family adds a NameMap, and if need be an expert
layout.

Shapes: E experts, F expert hidden dim, D model dim; ours are w_gate_up (E, 2, F, D) and w_down (E, D, F).
"""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

Shape = tuple[int, ...]


class Dim(NamedTuple):
    """How one dim of their tensor is walked: theirs = start + step * ours, or the constant `start`."""

    # Place among the dims of ours that the piece leaves free; None: constant.
    ours: int | None
    start: int = 0
    step: int = 1


class Piece(NamedTuple):
    """Part of one of our tensors, and the part of one of theirs that it equals."""

    theirs: str
    # Shape that the file's tensor must have.
    shape: Shape
    # Leading indices of ours: () for the whole tensor, (e,) or (e, 0) and (e, 1) in a stack of experts.
    index: tuple[int, ...]
    dims: tuple[Dim, ...]


ExpertLayout = Callable[[str, Shape], list[Piece]]
"""(template of their name, shape of our stack) -> pieces. `{e}` in the template is the expert, `{j}` gate or up."""


def plain(theirs: str, shape: Shape) -> list[Piece]:
    """The same tensor under another name."""
    return [Piece(theirs, shape, (), tuple(Dim(dim) for dim in range(len(shape))))]


def per_expert(gate: str, up: str = "") -> ExpertLayout:
    """One tensor per expert; `gate` and `up` fill `{j}`, a down map has none."""

    def pieces(theirs: str, shape: Shape) -> list[Piece]:
        lead = 2 if up else 1
        dims = tuple(Dim(dim) for dim in range(len(shape) - lead))
        return [
            Piece(theirs.format(e=index[0], j=(gate, up)[index[-1]] if up else gate), shape[lead:], index, dims)
            for index in _indices(shape, lead)
        ]

    return pieces


def fused_gate_up(theirs: str, shape: Shape) -> list[Piece]:
    """(E, 2F, ...), all gates before all ups."""
    E, _, F, *rest = shape
    tail = tuple(Dim(dim + 1) for dim in range(len(rest)))
    return [
        Piece(theirs, (E, 2 * F, *rest), (e, j), (Dim(None, e), Dim(0, j * F), *tail)) for e, j in _indices(shape, 2)
    ]


def fused_down(theirs: str, shape: Shape) -> list[Piece]:
    """(E, ...), as ours."""
    tail = tuple(Dim(dim) for dim in range(len(shape) - 1))
    return [Piece(theirs, shape, (e,), (Dim(None, e), *tail)) for (e,) in _indices(shape, 1)]


def transposed_gate_up(theirs: str, shape: Shape) -> list[Piece]:
    """(E, D, 2F), all gates before all ups."""
    E, _, F, D = shape
    whole = (E, D, 2 * F)
    return [Piece(theirs, whole, (e, j), (Dim(None, e), Dim(1), Dim(0, j * F))) for e, j in _indices(shape, 2)]


def alternating_gate_up(theirs: str, shape: Shape) -> list[Piece]:
    """(E, D, 2F) or, of a bias, (E, 2F); gate and up by turns."""
    E, _, F, *rest = shape
    head = tuple(Dim(dim + 1) for dim in range(len(rest)))
    return [
        Piece(theirs, (E, *rest, 2 * F), (e, j), (Dim(None, e), *head, Dim(0, j, 2))) for e, j in _indices(shape, 2)
    ]


def transposed_down(theirs: str, shape: Shape) -> list[Piece]:
    """(E, F, D)."""
    E, D, F = shape
    return [Piece(theirs, (E, F, D), (e,), (Dim(None, e), Dim(1), Dim(0))) for (e,) in _indices(shape, 1)]


def _indices(shape: Shape, lead: int) -> list[tuple[int, ...]]:
    return [(e,) for e in range(shape[0])] if lead == 1 else [(e, j) for e in range(shape[0]) for j in range(2)]


@dataclass(frozen=True)
class NameMap:
    """Names of one family. Keys are ours, within a layer where the name begins with `layers.`."""

    plain: Mapping[str, str]
    # Our stack -> the ways in which files may have it; the first is written where there is no other reason.
    experts: Mapping[str, Sequence[tuple[str, ExpertLayout]]]
    # Further copies of tensors that two parts of the model share: ours -> theirs.
    copies: Mapping[str, Sequence[str]] = field(default_factory=dict)
    # Tensors of theirs without a place in our model: pattern -> why that is no loss, or what is lost.
    left_out: Mapping[str, str] = field(default_factory=dict)
    # What every name of theirs begins with, where the text model is a part of another.
    prefix: str = ""

    def pieces(self, name: str, shape: Shape, stored: Collection[str] | None = None) -> list[Piece]:
        """The pieces of our tensor `name`. Empty: the format has no place for it.

        Args:
            stored: names in the file, to choose among the layouts of experts; None takes the first.
        """
        layer, rest = _split_layer(name)
        if rest in self.experts:
            options = [layout(self._in_layer(theirs, layer), shape) for theirs, layout in self.experts[rest]]
            found = [pieces for pieces in options if stored is not None and pieces[0].theirs in stored]
            return (found or options)[0]
        if rest not in self.plain:
            return []
        # The copies first: what a tensor is read from last is what counts.
        copies = [theirs for theirs in self.copies.get(name, ()) if stored is None or theirs in stored]
        names = [*copies, self._in_layer(self.plain[rest], layer)]
        return [piece for theirs in names for piece in plain(theirs, shape)]

    def _in_layer(self, theirs: str, layer: str | None) -> str:
        return self.prefix + (theirs if layer is None else f"model.layers.{layer}.{theirs}")

    def reason_left_out(self, theirs: str) -> str | None:
        """Why a file's tensor is not read; None: there is no reason, it is unexpected."""
        return next((why for pattern, why in self.left_out.items() if re.fullmatch(pattern, theirs)), None)


def with_multi_token(names: NameMap, num_layers: int, depth: int) -> NameMap:
    """DeepSeek-V3's names of multi-token prediction: in its blocks, which come after the last, and copies of the
    embedding and the head that those share with the model."""
    extra: dict[str, str] = {}
    copies: dict[str, list[str]] = {"tok_embeddings.weight": [], "head.weight": []}
    for k in range(depth):
        layer = f"model.layers.{num_layers + k}"
        extra |= {f"mtp.{k}.{ours}.weight": f"{layer}.{theirs}.weight" for ours, theirs in _MULTI_TOKEN.items()}
        copies["tok_embeddings.weight"].append(f"{layer}.embed_tokens.weight")
        copies["head.weight"].append(f"{layer}.shared_head.head.weight")
    return replace(names, plain={**names.plain, **extra}, copies=copies)


_MULTI_TOKEN = {
    "embedding_norm": "enorm",
    "hidden_norm": "hnorm",
    "projection": "eh_proj",
    "norm": "shared_head.norm",
}


def _split_layer(name: str) -> tuple[str | None, str]:
    found = re.fullmatch(r"layers\.(\d+)\.(.+)", name)
    return (found[1], found[2]) if found else (None, name)


_OUTSIDE = {
    "tok_embeddings.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
}
_NORMS = {"attention_norm.weight": "input_layernorm.weight", "ffn_norm.weight": "post_attention_layernorm.weight"}
_GQA = {
    f"attention.w{ours}.{kind}": f"self_attn.{ours}_proj.{kind}" for ours in "qkvo" for kind in ("weight", "bias")
} | {f"attention.{ours}_norm.weight": f"self_attn.{ours}_norm.weight" for ours in "qk"}
_MLA = {
    "attention.wq.weight": "self_attn.q_proj.weight",
    "attention.wq_a.weight": "self_attn.q_a_proj.weight",
    "attention.wq_a.bias": "self_attn.q_a_proj.bias",
    "attention.q_norm.weight": "self_attn.q_a_layernorm.weight",
    "attention.wq_b.weight": "self_attn.q_b_proj.weight",
    "attention.wkv_a.weight": "self_attn.kv_a_proj_with_mqa.weight",
    "attention.wkv_a.bias": "self_attn.kv_a_proj_with_mqa.bias",
    "attention.kv_norm.weight": "self_attn.kv_a_layernorm.weight",
    "attention.wkv_b.weight": "self_attn.kv_b_proj.weight",
    "attention.wo.weight": "self_attn.o_proj.weight",
    "attention.wo.bias": "self_attn.o_proj.bias",
}
_DENSE = {f"feed_forward.w_{name}.weight": f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")}
_SHARED = {f"moe.shared.w_{name}.weight": f"mlp.shared_experts.{name}_proj.weight" for name in ("gate", "up", "down")}
_LEFT_OUT = {r".*\.rotary_emb\.inv_freq": "computed from the config"}
# Qwen's, OLMoE's and DeepSeek's experts, on the hub and as `transformers` 5 holds them.
_EXPERTS: dict[str, list[tuple[str, ExpertLayout]]] = {
    "moe.experts.w_gate_up": [
        ("mlp.experts.{e}.{j}.weight", per_expert("gate_proj", "up_proj")),
        ("mlp.experts.gate_up_proj", fused_gate_up),
    ],
    "moe.experts.w_down": [
        ("mlp.experts.{e}.{j}.weight", per_expert("down_proj")),
        ("mlp.experts.down_proj", fused_down),
    ],
}
_ROUTER = {"moe.router.weight": "mlp.gate.weight"}

DENSE = NameMap(_OUTSIDE | _NORMS | _GQA | _DENSE, {}, left_out=_LEFT_OUT)
QWEN3_MOE = NameMap(_OUTSIDE | _NORMS | _GQA | _DENSE | _ROUTER, _EXPERTS, left_out=_LEFT_OUT)
OLMOE = QWEN3_MOE
MIXTRAL = NameMap(
    _OUTSIDE | _NORMS | _GQA | {"moe.router.weight": "block_sparse_moe.gate.weight"},
    {
        "moe.experts.w_gate_up": [
            ("block_sparse_moe.experts.{e}.{j}.weight", per_expert("w1", "w3")),
            ("mlp.experts.gate_up_proj", fused_gate_up),
        ],
        "moe.experts.w_down": [
            ("block_sparse_moe.experts.{e}.{j}.weight", per_expert("w2")),
            ("mlp.experts.down_proj", fused_down),
        ],
    },
    left_out=_LEFT_OUT,
)
DEEPSEEK_V2 = NameMap(_OUTSIDE | _NORMS | _MLA | _DENSE | _SHARED | _ROUTER, _EXPERTS, left_out=_LEFT_OUT)
DEEPSEEK_V3 = NameMap(
    {**DEEPSEEK_V2.plain, "moe.expert_bias": "mlp.gate.e_score_correction_bias"}, _EXPERTS, left_out=_LEFT_OUT
)
GPT_OSS = NameMap(
    {
        **_OUTSIDE,
        **_NORMS,
        **_GQA,
        "attention.sinks": "self_attn.sinks",
        "moe.router.weight": "mlp.router.weight",
        "moe.router.bias": "mlp.router.bias",
    },
    {
        "moe.experts.w_gate_up": [("mlp.experts.gate_up_proj", alternating_gate_up)],
        "moe.experts.b_gate_up": [("mlp.experts.gate_up_proj_bias", alternating_gate_up)],
        "moe.experts.w_down": [("mlp.experts.down_proj", transposed_down)],
        "moe.experts.b_down": [("mlp.experts.down_proj_bias", fused_down)],
    },
    left_out=_LEFT_OUT,
)
LLAMA4 = NameMap(
    {
        **_OUTSIDE,
        **_NORMS,
        **_GQA,
        "moe.router.weight": "feed_forward.router.weight",
        **{
            f"moe.shared.w_{name}.weight": f"feed_forward.shared_expert.{name}_proj.weight"
            for name in ("gate", "up", "down")
        },
    },
    {
        "moe.experts.w_gate_up": [("feed_forward.experts.gate_up_proj", transposed_gate_up)],
        "moe.experts.w_down": [("feed_forward.experts.down_proj", transposed_down)],
    },
    left_out=_LEFT_OUT,
)
# As the hub has Llama 4: the text model is the part of it that sees no pictures.
LLAMA4_WITH_VISION = replace(
    LLAMA4,
    prefix="language_model.",
    left_out=_LEFT_OUT | {r"(vision_model|multi_modal_projector)\..*": "vision; text alone is trained, and exported"},
)
