"""The language-modelling loss: a linear map to the vocabulary and its cross-entropy, without ever holding all logits.

    logits = h W^T        loss = sum over valid tokens of logsumexp(logits) - logits[label]

For 16k tokens and 150k words the fp32 logits alone take 9 GiB. So tokens go through in chunks, and since the gradient
of a chunk needs nothing but the chunk (d logits = softmax - onehot), it is formed in the forward pass while the
chunk's logits exist; backward only scales. dW is accumulated over the chunks in fp32 (fp64 for fp64 input). Fewer,
larger chunks are faster: each one reads and writes the fp32 dW once.

The result is a *sum*. Whoever divides it by the valid tokens of the whole global batch gets a loss, and gradients,
that do not depend on how the batch was split over ranks and accumulation steps. Means of means would.

Tensor parallelism splits the vocabulary: each rank has some columns of the logits. Three numbers per token then cross
the ranks (maximum, sum of exponentials, the label's logit), and every rank has the same loss, its own columns' dW, and
a partial dh, which the gradient of gathering h adds up.

Shapes: T tokens, D model dim, V vocabulary, C tokens of one chunk.
"""

import functools
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.distributed_c10d import _resolve_process_group  # pyright: ignore

# Labels of tokens that take no part in the loss: padding, prompts.
IGNORE_INDEX = -100
# fp32 logits of one chunk, in bytes. On CPU small enough to stay near the caches.
CHUNK_BYTES = {"cuda": 2**30, "cpu": 2**25}


class _ChunkedLoss(NamedTuple):
    loss_sum: Tensor
    # Gradients of loss_sum; None where not asked for.
    grad_h_TD: Tensor | None
    grad_weight_VD: Tensor | None


def count_valid(labels: Tensor) -> Tensor:
    """int64 scalar: labels that take part in the loss."""
    return (labels != IGNORE_INDEX).sum()


def default_chunk_tokens(vocab_size: int, device_type: str) -> int:
    """Tokens whose fp32 logits fill CHUNK_BYTES, in whole tiles of 128."""
    tokens = CHUNK_BYTES.get(device_type, CHUNK_BYTES["cuda"]) // (4 * vocab_size)
    return max(128, tokens // 128 * 128)


def linear_cross_entropy(
    h_TD: Tensor,
    weight_VD: Tensor,
    labels_T: Tensor,
    *,
    chunk_tokens: int | None = None,
    compile_chunks: bool = False,
    vocabulary_group: str | None = None,
) -> Tensor:
    """Sum over valid tokens of the cross-entropy of `h_TD @ weight_VD.T`: a scalar in fp32 (fp64 for fp64 input).

    Logits are computed in the inputs' dtype, the softmax in fp32. Gradients have the inputs' dtypes. Tokens with label
    IGNORE_INDEX add exactly 0 to the loss and to every gradient. `compile_chunks` fuses the element-wise work on a
    chunk's logits (for GPUs). Without gradients (evaluation) none is computed. `vocabulary_group` names the ranks that
    share the vocabulary: each has its equal part of the rows of W, in rank order, and the same h and labels.

    Raises:
        ValueError: shapes or dtypes do not fit together.
    """
    _check_inputs(h_TD, weight_VD, labels_T)
    chunk_tokens = chunk_tokens or default_chunk_tokens(weight_VD.shape[0], h_TD.device.type)
    if torch.is_grad_enabled() and (h_TD.requires_grad or weight_VD.requires_grad):
        return _LinearCrossEntropy.apply(  # type: ignore[no-any-return]
            h_TD, weight_VD, labels_T, chunk_tokens, compile_chunks, vocabulary_group
        )
    return _chunked_loss(
        h_TD, weight_VD, labels_T, chunk_tokens, compile_chunks, vocabulary_group, False, False
    ).loss_sum


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        h_TD: Tensor,
        weight_VD: Tensor,
        labels_T: Tensor,
        chunk_tokens: int,
        compile_chunks: bool,
        vocabulary_group: str | None,
    ) -> Tensor:
        needs_h, needs_weight = ctx.needs_input_grad[:2]
        result = _chunked_loss(
            h_TD, weight_VD, labels_T, chunk_tokens, compile_chunks, vocabulary_group, needs_h, needs_weight
        )
        ctx.save_for_backward(result.grad_h_TD, result.grad_weight_VD)
        ctx.weight_dtype = weight_VD.dtype
        return result.loss_sum

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None, None]:
        grad_h_TD, grad_weight_VD = ctx.saved_tensors
        if grad_h_TD is not None:
            grad_h_TD = _scaled(grad_h_TD, grad_loss, grad_h_TD.dtype)
        if grad_weight_VD is not None:
            grad_weight_VD = _scaled(grad_weight_VD, grad_loss, ctx.weight_dtype)
        return grad_h_TD, grad_weight_VD, None, None, None, None


def _chunked_loss(
    h_TD: Tensor,
    weight_VD: Tensor,
    labels_T: Tensor,
    chunk_tokens: int,
    compile_chunks: bool,
    vocabulary_group: str | None,
    needs_h: bool,
    needs_weight: bool,
) -> _ChunkedLoss:
    """Loss and the gradients asked for, chunk by chunk. No gradient is recorded here."""
    dtype = torch.float64 if h_TD.dtype == torch.float64 else torch.float32
    chunk_loss = _compiled(_chunk_loss) if compile_chunks else _chunk_loss
    if vocabulary_group is not None:
        chunk_loss = partial(_split_chunk_loss, vocabulary_group, compile_chunks)
    loss_sum = torch.zeros((), dtype=dtype, device=h_TD.device)
    grad_h_TD = torch.empty_like(h_TD) if needs_h else None
    grad_weight_VD = torch.zeros_like(weight_VD, dtype=dtype) if needs_weight else None
    for start, end in _chunk_bounds(h_TD.shape[0], chunk_tokens):
        h_CD = h_TD[start:end]
        loss, grad_logits_CV = chunk_loss(h_CD @ weight_VD.T, labels_T[start:end], dtype, needs_h or needs_weight)
        loss_sum += loss
        if grad_h_TD is not None:
            torch.mm(grad_logits_CV, weight_VD, out=grad_h_TD[start:end])
        if grad_weight_VD is not None:
            _accumulate_mm(grad_weight_VD, grad_logits_CV.T, h_CD)
    return _ChunkedLoss(loss_sum, grad_h_TD, grad_weight_VD)


def _chunk_loss(logits_CV: Tensor, labels_C: Tensor, dtype: torch.dtype, needs_grad: bool) -> tuple[Tensor, Tensor]:
    """The chunk's loss, and the gradient of its logits in their dtype (an empty tensor if not needed)."""
    valid_C = labels_C != IGNORE_INDEX
    # Any legal label does for ignored tokens: their loss and gradient are replaced by zeros.
    labels_C1 = torch.where(valid_C, labels_C, 0)[:, None]
    log_probs_CV = torch.log_softmax(logits_CV, dim=-1, dtype=dtype)
    loss = -torch.where(valid_C, log_probs_CV.gather(1, labels_C1)[:, 0], 0.0).sum()
    if not needs_grad:
        return loss, logits_CV.new_empty(0)
    grad_CV = log_probs_CV.exp_()
    if torch.compiler.is_compiling():
        # Fuses with its surroundings, which a scatter does not.
        columns_V = torch.arange(grad_CV.shape[1], device=grad_CV.device)
        grad_CV = torch.where(columns_V == labels_C1, grad_CV - 1, grad_CV)
    else:
        grad_CV.scatter_add_(1, labels_C1, torch.full_like(labels_C1, -1, dtype=dtype))
    return loss, grad_CV.masked_fill_(~valid_C[:, None], 0.0).to(logits_CV.dtype)


def _split_chunk_loss(
    group_name: str, compiled: bool, logits_CV: Tensor, labels_C: Tensor, dtype: torch.dtype, needs_grad: bool
) -> tuple[Tensor, Tensor]:
    """`_chunk_loss` where this rank has some columns of the logits."""
    group = _resolve_process_group(group_name)  # type: ignore[no-untyped-call]
    sums, gradient = (
        (_compiled(_column_sums), _compiled(_column_gradient)) if compiled else (_column_sums, _column_gradient)
    )
    valid_C = labels_C != IGNORE_INDEX
    column_C = labels_C - group.rank() * logits_CV.shape[1]
    max_C = logits_CV.amax(dim=-1).to(dtype)
    dist.all_reduce(max_C, dist.ReduceOp.MAX, group=group)
    sums_2C = sums(logits_CV, column_C, max_C)
    dist.all_reduce(sums_2C, group=group)
    log_sum_C = max_C + sums_2C[0].log()
    loss = torch.where(valid_C, log_sum_C - sums_2C[1], 0.0).sum()
    if not needs_grad:
        return loss, logits_CV.new_empty(0)
    return loss, gradient(logits_CV, column_C, log_sum_C, valid_C)


def _column_sums(logits_CV: Tensor, column_C: Tensor, max_C: Tensor) -> Tensor:
    """(2, C): this rank's part of the sum of exponentials, and the label's logit if its column is here."""
    wide_CV = logits_CV.to(max_C.dtype)
    is_label_CV = torch.arange(logits_CV.shape[1], device=logits_CV.device) == column_C[:, None]
    return torch.stack(
        [(wide_CV - max_C[:, None]).exp().sum(dim=-1), torch.where(is_label_CV, wide_CV, 0.0).sum(dim=-1)]
    )


def _column_gradient(logits_CV: Tensor, column_C: Tensor, log_sum_C: Tensor, valid_C: Tensor) -> Tensor:
    is_label_CV = torch.arange(logits_CV.shape[1], device=logits_CV.device) == column_C[:, None]
    grad_CV = (logits_CV.to(log_sum_C.dtype) - log_sum_C[:, None]).exp() - is_label_CV.to(log_sum_C.dtype)
    return torch.where(valid_C[:, None], grad_CV, 0.0).to(logits_CV.dtype)


@functools.cache
def _compiled(function: Any) -> Any:
    return torch.compile(function)


def _chunk_bounds(num_tokens: int, chunk_tokens: int) -> list[tuple[int, int]]:
    """Chunks of at most `chunk_tokens`, of (nearly) equal size so that compiled code sees at most two shapes."""
    num_chunks = -(-num_tokens // chunk_tokens)
    size = -(-num_tokens // num_chunks) if num_chunks else 0
    return [(start, min(start + size, num_tokens)) for start in range(0, num_tokens, size or 1)]


def _accumulate_mm(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b, with the products added in total's dtype and never rounded to a's."""
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    elif total.is_cuda:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total.addmm_(a.to(total.dtype), b.to(total.dtype))


def _scaled(x: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """x * factor in one pass, rounded once to `dtype`. `x` stays as it was: backward may run twice."""
    return torch.mul(x, factor, out=torch.empty_like(x, dtype=dtype))


def _check_inputs(h_TD: Tensor, weight_VD: Tensor, labels_T: Tensor) -> None:
    if h_TD.ndim != 2 or weight_VD.ndim != 2 or h_TD.shape[1] != weight_VD.shape[1]:
        raise ValueError(f"h {tuple(h_TD.shape)} and weight {tuple(weight_VD.shape)} must be (T, D) and (V, D)")
    if labels_T.shape != h_TD.shape[:1]:
        raise ValueError(f"labels {tuple(labels_T.shape)} must be ({h_TD.shape[0]},), one for each row of h")
    if h_TD.dtype != weight_VD.dtype:
        raise ValueError(f"h is {h_TD.dtype} but weight is {weight_VD.dtype}; cast one of them")
