"""linear_cross_entropy on a GPU in bf16: compiled chunks, the fp32 weight gradient, and peak memory."""

import pytest
import torch
from torch.nn.functional import cross_entropy

from trainer.loss import IGNORE_INDEX, linear_cross_entropy

pytestmark = pytest.mark.gpu

T, D, V = 4096, 256, 32_000


def make_inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(0)
    h = torch.randn(T, D, device="cuda", generator=generator).bfloat16().requires_grad_()
    weight = (torch.randn(V, D, device="cuda", generator=generator) / D**0.5).bfloat16().requires_grad_()
    labels = torch.randint(V, (T,), device="cuda", generator=generator)
    return h, weight, labels.masked_fill(torch.rand(T, device="cuda", generator=generator) < 0.2, IGNORE_INDEX)


@pytest.mark.parametrize("compile_chunks", [False, True])
def test_equals_full_logits_in_fp32(compile_chunks: bool) -> None:
    h, weight, labels = make_inputs()
    expected = cross_entropy(h.float() @ weight.float().T, labels, reduction="sum", ignore_index=IGNORE_INDEX)
    exact = torch.autograd.grad(expected, (h, weight))
    # 1000 leaves a last chunk of another size.
    loss = linear_cross_entropy(h, weight, labels, chunk_tokens=1000, compile_chunks=compile_chunks)
    gradients = torch.autograd.grad(loss, (h, weight))
    # Logits rounded to bf16 (2^-9), errors of random sign over 3000 tokens.
    torch.testing.assert_close(loss, expected, rtol=1e-4, atol=0)
    for ours, theirs in zip(gradients, exact, strict=True):
        assert ours.dtype == torch.bfloat16
        # d logits and the result each rounded to bf16.
        assert (ours.float() - theirs.float()).norm() < 1e-2 * theirs.float().norm()


@pytest.mark.parametrize("compile_chunks", [False, True])
def test_peak_memory_stays_far_below_full_logits(compile_chunks: bool) -> None:
    h, weight, labels = make_inputs()
    for _ in range(2):  # The first call compiles.
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        linear_cross_entropy(h, weight, labels, chunk_tokens=256, compile_chunks=compile_chunks).backward()
        peak = torch.cuda.max_memory_allocated() - before
        h.grad = weight.grad = None
    chunk, weight_gradient = 256 * V * 4, V * D * (4 + 2)
    assert peak < 4 * chunk + weight_gradient + 2**24 < T * V * 4


def test_a_step_never_waits_for_the_device() -> None:
    h, weight, labels = make_inputs()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        linear_cross_entropy(h, weight, labels, chunk_tokens=1000).backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
