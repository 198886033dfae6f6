"""softmax(Q K^T) V and nothing else: which tokens see which, and the kernels that compute it.

`plan_sequences` runs once per forward pass and lays down what all layers share: positions, the token mask, and either
masks (SDPA) or cumulative sequence lengths (varlen). A document is a run of equal ids within a sequence; a token sees
itself and the earlier tokens of its own document. Padding (id -1) is a run like any other: padding sees padding, so no
row of the softmax is empty, and no other token sees it. A chunk (Llama 4) is a document cut further: every
`chunk_size` tokens of a document begin a new one, for the layers that ask for it.

Backends, chosen by device, dtype and need (`attention.backend: auto`):

  sdpa       torch's fused attention: without documents `is_causal` (cuDNN first: on H100 and H200 nearly twice
             torch's flash kernel), otherwise with an explicit mask. Attention sinks take the written-out formula.
  varlen     flash attention over packed documents (CUDA, half precision): no mask in memory, work only within
             documents, sliding windows, sinks. MLA's values are padded to the head dim of its keys.
  reference  the formula written out: the oracle.

Shapes: B batch, S sequence, T = B * S tokens, H query heads, G key/value heads, D head dim of q and k, V of v,
N documents. Queries are scaled by `scale` inside.
"""

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from comms.split_sequence import SplitSequence
from parallel.context_parallel import ContextParallel, context_attention
from trainer.models.config import AttentionConfig
from trainer.models.varlen_attention import varlen_attention

_SDPA_ORDER = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]


class SequencePlan(NamedTuple):
    """What the layers need to know about the sequences of one batch."""

    backend: str
    positions_BS: Tensor
    token_mask_BS: Tensor | None = None
    """False for padding; None when there is no padding to speak of."""
    mask_B1SS: Tensor | None = None
    """True where a query (row) sees a key; None means plainly causal."""
    window_mask_B1SS: Tensor | None = None
    """The same within the sliding window; None when the window covers the sequence."""
    chunk_mask_B1SS: Tensor | None = None
    """The same within the chunks of each document; None when a chunk covers the sequence."""
    cu_seqlens_N: Tensor | None = None
    """varlen: where each document starts among the T tokens, then T (repeated up to the static length); int32."""
    chunk_cu_seqlens_N: Tensor | None = None
    """varlen: the same for chunks."""
    first_BS: Tensor | None = None
    """Where keys and values go round a ring: the first token that each token of the *whole* sequence sees by its
    document; None means from the start."""
    chunk_first_BS: Tensor | None = None
    """The same for chunks."""
    max_documents: int | None = None
    chunk_max_documents: int | None = None
    """A ring: bounds on the documents, and chunks, of the batch; None where nobody knows any."""
    rotary: tuple[Tensor, Tensor] | None = None
    """cos and sin that all layers turn heads by (trainer/models/rope.py); None: each layer works them out."""


def choose_backend(config: AttentionConfig, device: torch.device, dtype: torch.dtype, *, documents: bool) -> str:
    """Resolves `attention.backend`; raises ValueError when what was asked for cannot run here."""
    if config.backend not in ("auto", "sdpa", "varlen", "reference"):
        raise ValueError(f"model.attention.backend={config.backend!r} is not known; choose auto, sdpa or varlen")
    can_varlen = device.type == "cuda" and dtype in (torch.float16, torch.bfloat16)
    if config.backend == "varlen" and not can_varlen:
        raise ValueError(
            f"model.attention.backend=varlen needs CUDA and bf16 or fp16, but this model runs on {device.type} in "
            f"{dtype}; choose auto or sdpa"
        )
    if config.backend != "auto":
        return config.backend
    return "varlen" if can_varlen and (documents or config.sinks or config.sliding_window > 0) else "sdpa"


def plan_sequences(
    x_BSD: Tensor,
    config: AttentionConfig,
    *,
    positions_BS: Tensor | None = None,
    document_ids_BS: Tensor | None = None,
    max_documents: int | None = None,
    sequence: SplitSequence | None = None,
) -> SequencePlan:
    """Plans the attention of a batch whose embedded tokens (this rank's part) are x.

    positions default to the place within the document. max_documents bounds the documents of the batch (runs of equal
    ids, padding included, over all its sequences); without it the varlen backend asks the device, which synchronises.
    positions and documents are those of whole sequences; `sequence` tells which part of them is this rank's.
    """
    if sequence is not None:
        return _plan_part(x_BSD, config, positions_BS, document_ids_BS, max_documents, sequence)
    B, S, _ = x_BSD.shape
    chunked = 0 < config.chunk_size < S
    documents = document_ids_BS is not None or chunked
    backend = choose_backend(config, x_BSD.device, x_BSD.dtype, documents=documents)
    starts_BS = None if document_ids_BS is None else document_starts(document_ids_BS)
    if positions_BS is None:
        positions_BS = _default_positions(S, starts_BS, x_BSD.device)
    plan = SequencePlan(backend, positions_BS, None if document_ids_BS is None else document_ids_BS >= 0)
    if chunked:
        plan = _plan_chunks(plan, config, B, S, starts_BS, max_documents)
    if backend == "varlen":
        return plan._replace(cu_seqlens_N=_cumulative_lengths(B, S, starts_BS, max_documents, x_BSD.device))
    windowed = 0 < config.sliding_window < S
    if starts_BS is None and not windowed:
        return plan
    mask_B1SS = _causal_mask(S, starts_BS, x_BSD.device)
    window_mask = mask_B1SS & _within_window(S, config.sliding_window, x_BSD.device) if windowed else None
    return plan._replace(mask_B1SS=None if starts_BS is None else mask_B1SS, window_mask_B1SS=window_mask)


def _plan_part(
    x_BLD: Tensor,
    config: AttentionConfig,
    positions_BS: Tensor | None,
    document_ids_BS: Tensor | None,
    max_documents: int | None,
    sequence: SplitSequence,
) -> SequencePlan:
    """The plan of a rank that has parts of sequences. Without a ring its heads still see them whole."""
    B, S, D = x_BLD.size(0), x_BLD.size(1) * sequence.num_parts, x_BLD.size(2)
    if sequence.ring == 1:
        whole = x_BLD.new_empty(()).expand(B, S, D)
        plan = plan_sequences(
            whole, config, positions_BS=positions_BS, document_ids_BS=document_ids_BS, max_documents=max_documents
        )
    else:
        starts_BS = None if document_ids_BS is None else document_starts(document_ids_BS)
        places_BS = _default_positions(S, starts_BS, x_BLD.device)
        index_S = torch.arange(S, device=x_BLD.device)
        plan = SequencePlan(
            "ring",
            places_BS if positions_BS is None else positions_BS,
            None if document_ids_BS is None else document_ids_BS >= 0,
            first_BS=None if starts_BS is None else index_S - places_BS,
            chunk_first_BS=index_S - places_BS % config.chunk_size if 0 < config.chunk_size < S else None,
            max_documents=B if starts_BS is None else max_documents,
            chunk_max_documents=_bound_chunks(config, B, S, starts_BS is not None, max_documents),
        )
    mask_BS = plan.token_mask_BS
    return plan._replace(
        positions_BS=sequence.attention_part(plan.positions_BS),
        token_mask_BS=None if mask_BS is None else sequence.part(mask_BS),
    )


def _plan_chunks(
    plan: SequencePlan,
    config: AttentionConfig,
    B: int,
    S: int,
    starts_BS: Tensor | None,
    max_documents: int | None,
) -> SequencePlan:
    """Adds what layers with chunks need."""
    device, chunk_size = plan.positions_BS.device, config.chunk_size
    chunk_starts_BS = (_default_positions(S, starts_BS, device) % chunk_size == 0).expand(B, S)
    if plan.backend != "varlen":
        return plan._replace(chunk_mask_B1SS=_causal_mask(S, chunk_starts_BS, device))
    bound = _bound_chunks(config, B, S, starts_BS is not None, max_documents)
    return plan._replace(chunk_cu_seqlens_N=_cumulative_lengths(B, S, chunk_starts_BS, bound, device))


def _bound_chunks(config: AttentionConfig, B: int, S: int, documents: bool, max_documents: int | None) -> int | None:
    """At most so many chunks are in the batch."""
    if config.chunk_size == 0 or (documents and max_documents is None):
        return None
    # A document of n tokens has (n - 1) // chunk_size starts besides its own.
    return (max_documents or 0 if documents else B) + B * S // config.chunk_size


def document_starts(document_ids_BS: Tensor) -> Tensor:
    """True where a run of equal ids begins: (B, S) bool."""
    changes = document_ids_BS[:, 1:] != document_ids_BS[:, :-1]
    return F.pad(changes, (1, 0), value=True)


def _default_positions(S: int, starts_BS: Tensor | None, device: torch.device) -> Tensor:
    index_S = torch.arange(S, device=device)
    if starts_BS is None:
        return index_S.unsqueeze(0)
    return index_S - torch.where(starts_BS, index_S, 0).cummax(dim=1).values


def _causal_mask(S: int, starts_BS: Tensor | None, device: torch.device) -> Tensor:
    causal = torch.ones(S, S, dtype=torch.bool, device=device).tril()[None, None]
    if starts_BS is None:
        return causal
    runs_BS = starts_BS.cumsum(dim=1)
    return causal & (runs_BS[:, None, :, None] == runs_BS[:, None, None, :])


def _within_window(S: int, window: int, device: torch.device) -> Tensor:
    index_S = torch.arange(S, device=device)
    return index_S[:, None] - index_S[None, :] < window


def _cumulative_lengths(
    B: int, S: int, starts_BS: Tensor | None, max_documents: int | None, device: torch.device
) -> Tensor:
    if starts_BS is None:
        return torch.arange(0, B * S + 1, S, dtype=torch.int32, device=device)
    starts_T = starts_BS.flatten()
    if max_documents is None:
        max_documents = int(starts_T.sum())
    torch._assert_async(  # pyright: ignore[reportPrivateImportUsage]
        starts_T.sum() <= max_documents, "more documents in the batch than max_documents"
    )
    # One more slot takes what is not a start and is then cut off; unused slots are documents of no tokens.
    slots_T = torch.where(starts_T, starts_T.cumsum(0) - 1, max_documents + 1)
    index_T = torch.arange(B * S, dtype=torch.int32, device=device)
    cu_seqlens = torch.full((max_documents + 2,), B * S, dtype=torch.int32, device=device)
    return cu_seqlens.scatter_(0, slots_T, index_T)[:-1]


class InnerAttention(nn.Module):
    """The part of attention that mixes tokens. It has no parameters, so that context parallelism can replace it."""

    def __init__(self, scale: float, window: int, chunk: int = 0) -> None:
        """`window`: each token sees itself and the window - 1 tokens before it; `chunk`: only those of its own chunk of
        so many tokens; 0 means all. A layer has one of them at most."""
        super().__init__()
        self.scale = scale
        self.window = window
        self.chunk = chunk
        # Set by parallel: how the ranks that share a sequence work together.
        self.context: ContextParallel | None = None

    def forward(
        self, q_BSHD: Tensor, k_BSGD: Tensor, v_BSGV: Tensor, sinks_H: Tensor | None, plan: SequencePlan
    ) -> Tensor:
        """-> (B, S, H, V)."""
        if self.context is None:
            return self.whole_sequences(q_BSHD, k_BSGD, v_BSGV, sinks_H, plan)
        chunked = self.chunk > 0 and plan.chunk_first_BS is not None
        return context_attention(
            q_BSHD,
            k_BSGD,
            v_BSGV,
            sinks_H,
            self.context,
            scale=self.scale,
            window=self.window,
            first_BS=plan.chunk_first_BS if chunked else plan.first_BS,
            max_documents=plan.chunk_max_documents if chunked else plan.max_documents,
            local=partial(self.whole_sequences, plan=plan),
        )

    def whole_sequences(
        self, q_BSHD: Tensor, k_BSGD: Tensor, v_BSGV: Tensor, sinks_H: Tensor | None, plan: SequencePlan
    ) -> Tensor:
        """The attention of a rank that has whole sequences, if perhaps not every head -> (B, S, H, V)."""
        S = q_BSHD.size(1)
        windowed, chunked = 0 < self.window < S, 0 < self.chunk < S
        if plan.backend == "varlen":
            cu_seqlens_N = plan.chunk_cu_seqlens_N if chunked else plan.cu_seqlens_N
            assert cu_seqlens_N is not None
            max_len, window = (self.chunk if chunked else S), (self.window if windowed else 0)
            return varlen_attention(
                q_BSHD, k_BSGD, v_BSGV, sinks_H, cu_seqlens_N, max_len=max_len, scale=self.scale, window=window
            )
        mask_B1SS = plan.window_mask_B1SS if windowed else plan.mask_B1SS
        mask_B1SS = plan.chunk_mask_B1SS if chunked else mask_B1SS
        if plan.backend == "reference" or sinks_H is not None:
            return reference_attention(q_BSHD, k_BSGD, v_BSGV, sinks_H, mask_B1SS, self.scale)
        return sdpa_attention(q_BSHD, k_BSGD, v_BSGV, mask_B1SS, self.scale)


def sdpa_attention(q_BSHD: Tensor, k_BSGD: Tensor, v_BSGV: Tensor, mask_B1SS: Tensor | None, scale: float) -> Tensor:
    """torch's scaled_dot_product_attention -> (B, S, H, V); mask None means plainly causal."""
    q, k, v = (tensor.transpose(1, 2) for tensor in (q_BSHD, k_BSGD, v_BSGV))
    causal, gqa = mask_B1SS is None, q.size(1) != k.size(1)
    with sdpa_kernel(_SDPA_ORDER, set_priority=True):
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask_B1SS, is_causal=causal, scale=scale, enable_gqa=gqa
        )
    return out.transpose(1, 2)


def reference_attention(
    q_BSHD: Tensor, k_BSGD: Tensor, v_BSGV: Tensor, sinks_H: Tensor | None, mask_B1SS: Tensor | None, scale: float
) -> Tensor:
    """The formula, with the softmax in fp32 at least -> (B, S, H, V); mask None means plainly causal.

    A sink is one more logit per head in the softmax's denominator, without a value.
    """
    B, S, H, _ = q_BSHD.shape
    sees_B1SS = _causal_mask(S, None, q_BSHD.device) if mask_B1SS is None else mask_B1SS
    group = H // k_BSGD.size(2)
    k_BSHD, v_BSHV = (tensor.repeat_interleave(group, dim=2) for tensor in (k_BSGD, v_BSGV))
    logits = torch.einsum("bshd,bthd->bhst", q_BSHD, k_BSHD) * scale
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)).masked_fill(~sees_B1SS, float("-inf"))
    if sinks_H is not None:
        column = sinks_H.to(logits.dtype).view(1, H, 1, 1).expand(B, H, S, 1)
        logits = torch.cat((logits, column), dim=-1)
    weights = logits.softmax(dim=-1)[..., :S].to(v_BSHV.dtype)
    return torch.einsum("bhst,bthv->bshv", weights, v_BSHV)
