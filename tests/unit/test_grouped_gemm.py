"""grouped_linear against a loop over experts, and its guarantees about what grouped_mm leaves undefined.

fp32 against the fp64 loop: 1e-5 of the largest value (sums of up to 32 products). bf16: 1e-2 (8 bits of mantissa).
"""

from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moe.grouped_gemm import grouped_linear, resolve_backend

NUM_EXPERTS, OUT, IN = 4, 16, 32
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


@pytest.fixture
def dirty_memory():
    """Fresh tensors are filled with NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def problem(counts: list[int], tail: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(sum(counts))
    x_PI = torch.randn(sum(counts) + tail, IN, generator=generator).to(dtype)
    weight_EOI = torch.randn(len(counts), OUT, IN, generator=generator).to(dtype)
    return x_PI, weight_EOI, torch.tensor(counts).cumsum(0).to(torch.int32)


def run(x_PI: Tensor, weight_EOI: Tensor, offsets_E: Tensor, dy_PO: Tensor, **options) -> tuple[Tensor, Tensor, Tensor]:
    x_PI, weight_EOI = x_PI.detach().requires_grad_(), weight_EOI.detach().requires_grad_()
    y_PO = grouped_linear(x_PI, weight_EOI, offsets_E, **options)
    dx_PI, dw_EOI = torch.autograd.grad(y_PO, [x_PI, weight_EOI], dy_PO)
    return y_PO.detach(), dx_PI, dw_EOI


def assert_close(ours: Tensor, oracle: Tensor, dtype: torch.dtype) -> None:
    scale = float(oracle.abs().max()) if oracle.numel() else 1.0
    error = float((ours.double() - oracle).abs().max()) if oracle.numel() else 0.0
    assert error <= TOLERANCES[dtype] * max(scale, 1.0), error


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("counts", [[3, 5, 2, 6], [0, 7, 0, 0], [0, 0, 0, 9], [1, 0, 1, 0]])
def test_equals_the_loop(counts: list[int], dtype: torch.dtype, dirty_memory) -> None:
    x_PI, weight_EOI, offsets_E = problem(counts, 0, dtype)
    dy_PO = torch.randn(x_PI.shape[0], OUT).to(dtype)
    oracle = run(x_PI.double(), weight_EOI.double(), offsets_E, dy_PO.double(), backend="reference")
    for exact in (True, False):
        for ours, expected in zip(run(x_PI, weight_EOI, offsets_E, dy_PO, exact=exact), oracle, strict=True):
            assert ours.dtype == dtype
            assert_close(ours, expected, dtype)


def test_the_loop_is_a_linear_layer_per_expert() -> None:
    x_PI, weight_EOI, offsets_E = problem([2, 0, 1, 3], 2, torch.float64)
    y_PO = grouped_linear(x_PI, weight_EOI, offsets_E, backend="reference")
    for row, expert in enumerate([0, 0, 2, 3, 3, 3]):
        torch.testing.assert_close(y_PO[row], torch.nn.functional.linear(x_PI[row], weight_EOI[expert]))
    assert torch.equal(y_PO[6:], torch.zeros(2, OUT, dtype=torch.float64))


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_case_13_the_tail_is_zero_whatever_it_holds(dtype: torch.dtype, dirty_memory) -> None:
    """NaN in the tail of x and of dy reaches neither y, dX nor dW."""
    x_PI, weight_EOI, offsets_E = problem([3, 0, 4, 1], 5, dtype)
    dy_PO = torch.randn(x_PI.shape[0], OUT).to(dtype)
    x_PI[8:] = float("nan")
    dy_PO[8:] = float("nan")
    y_PO, dx_PI, dw_EOI = run(x_PI, weight_EOI, offsets_E, dy_PO)
    assert torch.equal(y_PO[8:], torch.zeros(5, OUT, dtype=dtype))
    assert torch.equal(dx_PI[8:], torch.zeros(5, IN, dtype=dtype))
    oracle = run(x_PI[:8].double(), weight_EOI.double(), offsets_E, dy_PO[:8].double(), backend="reference")
    for ours, expected in zip((y_PO[:8], dx_PI[:8], dw_EOI), oracle, strict=True):
        assert_close(ours, expected, dtype)


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_case_14_the_weight_gradient_of_an_idle_expert_is_exactly_zero(dtype: torch.dtype, dirty_memory) -> None:
    x_PI, weight_EOI, offsets_E = problem([0, 5, 0, 3], 0, dtype)
    dw_EOI = run(x_PI, weight_EOI, offsets_E, torch.randn(8, OUT).to(dtype), exact=True)[2]
    assert bool((dw_EOI[[0, 2]] == 0).all())
    assert bool((dw_EOI[[1, 3]].flatten(1).norm(dim=1) > 0).all())


def test_case_14_on_a_device_that_leaves_it_alone() -> None:
    """CPUs happen to write those zeros themselves; here they do not."""
    original = torch.nn.functional.grouped_mm

    def grouped_mm(a: Tensor, b: Tensor, *, offs: Tensor) -> Tensor:
        out = original(a, b, offs=offs)
        if out.dim() == 3:
            out[offs.diff(prepend=offs.new_zeros(1)) == 0] = float("nan")
        return out

    x_PI, weight_EOI, offsets_E = problem([0, 5, 0, 3], 0, torch.float32)
    with patch("torch.nn.functional.grouped_mm", grouped_mm):
        dw_EOI = run(x_PI, weight_EOI, offsets_E, torch.randn(8, OUT), exact=True)[2]
    assert bool((dw_EOI[[0, 2]] == 0).all()) and bool(torch.isfinite(dw_EOI).all())


@pytest.mark.parametrize("tail", [0, 3])
def test_no_expert_has_a_row(tail: int, dirty_memory) -> None:
    x_PI, weight_EOI, offsets_E = problem([0, 0, 0, 0], tail, torch.float32)
    y_PO, dx_PI, dw_EOI = run(x_PI, weight_EOI, offsets_E, torch.randn(tail, OUT), exact=False)
    assert y_PO.shape == (tail, OUT) and dx_PI.shape == (tail, IN) and dw_EOI.shape == (NUM_EXPERTS, OUT, IN)
    for tensor in (y_PO, dx_PI, dw_EOI):
        assert bool((tensor == 0).all())


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(0, 4), min_size=1, max_size=6), st.integers(0, 3))
def test_random_groups(counts: list[int], tail: int) -> None:
    x_PI, weight_EOI, offsets_E = problem(counts, tail, torch.float32)
    dy_PO = torch.randn(x_PI.shape[0], OUT)
    oracle = run(x_PI.double(), weight_EOI.double(), offsets_E, dy_PO.double(), backend="reference")
    for ours, expected in zip(run(x_PI, weight_EOI, offsets_E, dy_PO), oracle, strict=True):
        assert_close(ours, expected, torch.float32)


def test_only_the_gradients_asked_for_are_computed() -> None:
    x_PI, weight_EOI, offsets_E = problem([2, 1, 0, 1], 0, torch.float32)
    frozen = grouped_linear(x_PI.requires_grad_(), weight_EOI, offsets_E)
    frozen.sum().backward()
    assert x_PI.grad is not None and weight_EOI.grad is None
    no_input = grouped_linear(x_PI.detach(), weight_EOI.requires_grad_(), offsets_E)
    no_input.sum().backward()
    assert weight_EOI.grad is not None


@pytest.mark.parametrize(
    ("backend", "dtype", "expected"),
    [
        ("auto", torch.float64, "reference"),
        ("auto", torch.float32, "grouped_mm"),
        ("auto", torch.bfloat16, "grouped_mm"),
        ("reference", torch.bfloat16, "reference"),
        ("grouped_mm", torch.float32, "grouped_mm"),
    ],
)
def test_backends(backend: str, dtype: torch.dtype, expected: str) -> None:
    assert resolve_backend(backend, dtype, torch.device("cpu")) == expected


@pytest.mark.parametrize(
    ("capability", "dtype", "expected"),
    [
        ((9, 0), torch.bfloat16, "fused"),
        ((9, 0), torch.float16, "fused"),
        ((9, 0), torch.float32, "grouped_mm"),
        ((8, 0), torch.bfloat16, "grouped_mm"),
        ((10, 0), torch.bfloat16, "grouped_mm"),
    ],
)
def test_auto_is_fused_where_that_is_measured(capability, dtype, expected: str, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert resolve_backend("auto", dtype, torch.device("cuda")) == expected


@pytest.mark.parametrize(
    ("backend", "dtype", "words"),
    [
        ("fused", torch.bfloat16, ["model.moe.backend=fused", "grouped_mm"]),
        ("triton", torch.bfloat16, ["model.moe.backend='triton'", "reference"]),
        ("grouped_mm", torch.float64, ["fp64", "model.moe.backend=reference"]),
    ],
)
def test_backends_that_cannot_run_are_refused_with_what_to_do(backend: str, dtype: torch.dtype, words) -> None:
    with pytest.raises(ValueError) as caught:
        resolve_backend(backend, dtype, torch.device("cpu"))
    assert all(word in str(caught.value) for word in words), caught.value
