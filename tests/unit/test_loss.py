"""linear_cross_entropy against torch's own cross-entropy of full logits, and what it keeps in memory.

Names: T tokens, D model dim, V vocabulary, as in trainer/loss.py.
"""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from trainer import loss as loss_module
from trainer.loss import IGNORE_INDEX, count_valid, default_chunk_tokens, linear_cross_entropy


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def make_inputs(
    num_tokens: int = 50, dim: int = 8, vocab: int = 33, dtype: torch.dtype = torch.float64
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    h = torch.randn(num_tokens, dim, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(vocab, dim, dtype=torch.float64).to(dtype).requires_grad_()
    labels = torch.randint(vocab, (num_tokens,)).masked_fill(torch.rand(num_tokens) < 0.3, IGNORE_INDEX)
    return h, weight, labels


def full_loss(h: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return cross_entropy(h @ weight.T, labels, reduction="sum", ignore_index=IGNORE_INDEX)


class Recorder(TorchDispatchMode):
    """Records, in forward and in backward, the most elements in any operation's result, and the matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0
        self.num_products = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.num_products += "mm" in func.__name__
        self.numel = max([self.numel, *(leaf.numel() for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor))])
        return out


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 60), st.integers(1, 70), st.integers(0, 2**31))
def test_equals_the_cross_entropy_of_full_logits(num_tokens: int, chunk_tokens: int, seed: int) -> None:
    """1e-12: fp64 sums of at most 60 tokens, split elsewhere."""
    torch.manual_seed(seed)
    h, weight, labels = make_inputs(num_tokens)
    loss, expected = linear_cross_entropy(h, weight, labels, chunk_tokens=chunk_tokens), full_loss(h, weight, labels)
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
    # A scale that is not 1: backward must use the gradient it is given.
    gradients = [torch.autograd.grad(value * 0.3, (h, weight)) for value in (loss, expected)]
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_gradcheck() -> None:
    h, weight, labels = make_inputs(num_tokens=7, dim=3, vocab=5)
    assert torch.autograd.gradcheck(lambda *x: linear_cross_entropy(*x, labels, chunk_tokens=3), (h, weight))


@pytest.mark.parametrize("train", [True, False])
def test_full_logits_never_exist(train: bool) -> None:
    h, weight, labels = make_inputs(num_tokens=512, dim=4, vocab=256, dtype=torch.float32)
    with Recorder() as full:
        full_loss(h, weight, labels).backward()
    with Recorder() as chunked, torch.set_grad_enabled(train):
        loss = linear_cross_entropy(h, weight, labels, chunk_tokens=16)
        if train:
            loss.backward()
    assert full.numel == 512 * 256, "the measure must see full logits where they exist"
    assert chunked.numel == max(16 * 256, h.numel())


def test_all_labels_ignored_gives_exact_zeros() -> None:
    h, weight, labels = make_inputs()
    loss = linear_cross_entropy(h, weight, torch.full_like(labels, IGNORE_INDEX), chunk_tokens=7)
    loss.backward()
    assert loss.item() == 0.0
    assert h.grad is not None and (h.grad == 0).all() and weight.grad is not None and (weight.grad == 0).all()


def test_no_tokens_give_exact_zeros() -> None:
    h, weight, labels = make_inputs(num_tokens=0)
    loss = linear_cross_entropy(h, weight, labels)
    loss.backward()
    assert loss.item() == 0.0 and weight.grad is not None and (weight.grad == 0).all()


def test_ignored_tokens_get_a_gradient_of_exactly_zero() -> None:
    h, weight, labels = make_inputs()
    linear_cross_entropy(h, weight, labels, chunk_tokens=9).backward()
    assert h.grad is not None
    ignored = labels == IGNORE_INDEX
    assert (h.grad[ignored] == 0).all() and (h.grad[~ignored].norm(dim=1) > 0).all()


def test_huge_logits_stay_finite() -> None:
    h, weight, labels = make_inputs(dtype=torch.float32)
    loss = linear_cross_entropy(h * 1e4, weight, labels, chunk_tokens=16)
    loss.backward()
    assert loss.isfinite() and h.grad is not None and h.grad.isfinite().all()


def test_uneven_label_counts_average_over_all_tokens() -> None:
    """Case 35: parts divided by the global count add up to the mean over all tokens; a mean of means does not."""
    h, weight, labels = make_inputs(40)
    labels[:20] = torch.where(torch.arange(20) < 18, IGNORE_INDEX, 1)
    labels[20:] = labels[20:].clamp_min(0)
    total = count_valid(labels)
    assert total == 22
    parts = [linear_cross_entropy(h[s], weight, labels[s]) for s in (slice(0, 20), slice(20, 40))]
    mean = cross_entropy(h @ weight.T, labels)
    ours, theirs = (torch.autograd.grad(x, (h, weight)) for x in (sum(parts) / total, mean))
    torch.testing.assert_close(sum(parts) / total, mean, rtol=1e-12, atol=0)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)
    mean_of_means = (parts[0] / 2 + parts[1] / 20) / 2
    assert (mean_of_means - mean).abs() > 1e-3


def test_half_precision_keeps_dtypes_and_adds_up_the_weight_gradient_in_fp32() -> None:
    """A bf16 dW rounded after every chunk would lose small chunks: the error must not grow with their number."""
    h, weight, labels = make_inputs(num_tokens=512, vocab=16, dtype=torch.bfloat16)
    exact = torch.autograd.grad(full_loss(h.double(), weight.double(), labels), (h, weight))
    for chunk_tokens in (512, 1):
        loss = linear_cross_entropy(h, weight, labels, chunk_tokens=chunk_tokens)
        grad_h, grad_weight = torch.autograd.grad(loss, (h, weight))
        assert loss.dtype == torch.float32 and grad_h.dtype == grad_weight.dtype == torch.bfloat16
        # bf16 logits carry 2^-9 of up to 10, and d logits again 2^-9: half a percent in norm. Summing 512 chunks in
        # bf16 gives several percent.
        assert (grad_weight - exact[1]).norm() < 5e-3 * exact[1].norm()
        assert (grad_h - exact[0]).norm() < 2e-2 * exact[0].norm()


@pytest.mark.parametrize(("h_grad", "weight_grad"), [(True, False), (False, True)])
def test_one_of_the_inputs_may_be_frozen(h_grad: bool, weight_grad: bool) -> None:
    h, weight, labels = make_inputs()
    h.requires_grad_(h_grad), weight.requires_grad_(weight_grad)
    linear_cross_entropy(h, weight, labels, chunk_tokens=7).backward()
    assert (h.grad is not None) == h_grad and (weight.grad is not None) == weight_grad


def test_evaluation_computes_no_gradient() -> None:
    h, weight, labels = make_inputs()
    with Recorder() as recorder, torch.no_grad():
        loss = linear_cross_entropy(h, weight, labels, chunk_tokens=10)
    assert not loss.requires_grad and recorder.num_products == 5, "one product for each chunk"
    torch.testing.assert_close(loss, full_loss(h, weight, labels).detach(), rtol=1e-12, atol=0)


def test_the_compiled_chunk_computes_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """One graph without breaks; the code generator itself is tested on the GPU."""
    compiled = torch.compile(loss_module._chunk_loss, backend="eager", fullgraph=True)
    monkeypatch.setattr(loss_module, "_compiled", lambda function: compiled)
    h, weight, labels = make_inputs()
    results = []
    for compile_chunks in (False, True):
        loss = linear_cross_entropy(h, weight, labels, chunk_tokens=16, compile_chunks=compile_chunks)
        results.append((loss, *torch.autograd.grad(loss, (h, weight))))
    for eager, ours in zip(*results, strict=True):
        torch.testing.assert_close(ours, eager, rtol=1e-13, atol=1e-13)


def test_backward_may_run_twice() -> None:
    h, weight, labels = make_inputs()
    loss = linear_cross_entropy(h, weight, labels, chunk_tokens=7) * 0.5
    first, second = (torch.autograd.grad(loss, (h, weight), retain_graph=True) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_default_chunks_are_bounded_in_bytes() -> None:
    for vocab in (257, 4096, 32_000, 151_936, 201_088):
        tokens = default_chunk_tokens(vocab, "cuda")
        assert tokens % 128 == 0 and 2**28 <= tokens * vocab * 4 <= 2**30
    assert default_chunk_tokens(10**7, "cuda") == 128


def test_shapes_and_dtypes_that_do_not_fit_are_refused() -> None:
    h, weight, labels = make_inputs()
    with pytest.raises(ValueError, match=r"\(T, D\) and \(V, D\)"):
        linear_cross_entropy(h, weight[:, :3], labels)
    with pytest.raises(ValueError, match="one for each row"):
        linear_cross_entropy(h, weight, labels[:-1])
    with pytest.raises(ValueError, match="cast one of them"):
        linear_cross_entropy(h.float(), weight, labels)
