"""The experts of one rank through grouped_mm, against the loop over experts in fp64.

fp32: 1e-5 of the largest value per tensor. bf16: 2e-2 (two products of 8-bit mantissas and a rounding between them).
"""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moe.config import MoEConfig
from moe.experts import GroupedExperts, sort_pairs, weighted_activation, within_bound
from moe.reference import expert_activation, reference_experts

CONFIG = MoEConfig(num_experts=4, top_k=3, expert_dim=16)
DIM = 8
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
VARIANTS = {
    "swiglu": {},
    "clamped": {"activation": "clamped_swiglu"},
    "bias": {"linear_bias": True},
    "clamped_bias": {"activation": "clamped_swiglu", "linear_bias": True},
    "scores_before": {"scores_before_experts": True},
    "scores_before_bias": {"scores_before_experts": True, "linear_bias": True},
}


def build(config: MoEConfig, dtype: torch.dtype = torch.float32) -> GroupedExperts:
    experts = GroupedExperts(config, DIM)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in experts.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.7)
    return experts.to(dtype)


def inputs(num_rows: int, dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Rows, ids (some -1, distinct in a row; expert 2 idle), weights."""
    generator = torch.Generator().manual_seed(seed)
    ids_RK = torch.rand(num_rows, CONFIG.num_experts, generator=generator).argsort(1)[:, : CONFIG.top_k]
    ids_RK = torch.where(ids_RK == 2, -1, ids_RK)
    rows_RD = (torch.randn(num_rows, DIM, generator=generator) * 2).to(dtype)
    weights_RK = torch.rand(num_rows, CONFIG.top_k, generator=generator).to(torch.promote_types(dtype, torch.float32))
    return rows_RD, ids_RK, weights_RK


def gradients(out_RD: Tensor, tensors: list[Tensor]) -> list[Tensor]:
    upstream = torch.randn(out_RD.shape, generator=torch.Generator().manual_seed(9)).to(out_RD.dtype)
    return list(torch.autograd.grad(out_RD, tensors, upstream))


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("num_rows", [1, 13])
def test_equals_the_loop_over_experts(variant: str, num_rows: int, dtype: torch.dtype) -> None:
    config = replace(CONFIG, **VARIANTS[variant])
    experts = build(config, dtype)
    rows_RD, ids_RK, weights_RK = inputs(num_rows, dtype)
    leaves = [rows_RD.requires_grad_(), weights_RK.requires_grad_(), *experts.parameters()]
    out_RD = experts(rows_RD, ids_RK, weights_RK, int((ids_RK >= 0).sum()))
    ours = [out_RD, *gradients(out_RD, leaves)]

    copies = [leaf.detach().double().requires_grad_() for leaf in leaves]
    rows, weights, w_gate_up, w_down, *biases = copies
    oracle_RD = reference_experts(rows, ids_RK, weights, w_gate_up, w_down, *(biases or [None, None]), config)
    oracle = [oracle_RD, *gradients(oracle_RD, copies)]
    names = ["out", "rows", "weights", *(name for name, _ in experts.named_parameters())]
    for name, a, b in zip(names, ours, oracle, strict=True):
        error = float((a.double() - b).detach().abs().max()) / max(1.0, float(b.detach().abs().max()))
        assert error <= TOLERANCES[dtype], (name, error)


@pytest.mark.parametrize("room", [0, 5, 100])
@pytest.mark.parametrize("variant", VARIANTS)
def test_room_for_more_rows_and_pairs_changes_nothing(variant: str, room: int) -> None:
    """As after a dispatch whose counts the host does not know: rows of NaN without ids, and room for more pairs.

    1e-6 of the largest value: elementwise kernels do the last few elements in another way than the rest.
    """
    experts = build(replace(CONFIG, **VARIANTS[variant]))
    rows_RD, ids_RK, weights_RK = inputs(13, torch.float32)
    num_pairs = int((ids_RK >= 0).sum())

    def run(rows_RD: Tensor, ids_RK: Tensor, weights_RK: Tensor, num_pairs: int, exact: bool) -> list[Tensor]:
        leaves = [rows_RD.clone().requires_grad_(), weights_RK.clone().requires_grad_(), *experts.parameters()]
        out_RD = experts(leaves[0], ids_RK, leaves[1], num_pairs, exact)
        upstream_RD = torch.full_like(out_RD, float("nan"))
        upstream_RD[:13] = torch.randn(13, DIM, generator=torch.Generator().manual_seed(9))
        found = [out_RD, *torch.autograd.grad(out_RD, leaves, upstream_RD)]
        return [found[0][:13], found[1][:13], found[2][:13], *found[3:]]

    expected = run(rows_RD, ids_RK, weights_RK, num_pairs, True)
    rows_RD = torch.cat([rows_RD, torch.full((4, DIM), float("nan"))])
    ids_RK = torch.cat([ids_RK, torch.full((4, CONFIG.top_k), -1)])
    weights_RK = torch.cat([weights_RK, torch.zeros(4, CONFIG.top_k)])
    ours = run(rows_RD, ids_RK, weights_RK, min(num_pairs + room, ids_RK.numel()), False)
    for a, b in zip(ours, expected, strict=True):
        assert float((a - b).detach().abs().max()) <= 1e-6 * max(1.0, float(b.detach().abs().max()))


def test_pairs_without_room_have_no_slot() -> None:
    """They are left out whole: of what has a slot, every index lies inside."""
    ids_RK = torch.tensor([[0, 1], [1, -1], [0, 1]])
    pairs = within_bound(sort_pairs(ids_RK, 3, 4), ids_RK)
    assert pairs.offsets_E.tolist() == [2, 4, 4] and pairs.rows_P.tolist() == [0, 2, 0, 1]
    assert pairs.slots_RK.tolist() == [[0, 2], [3, -1], [1, -1]]


@pytest.mark.parametrize("variant", VARIANTS)
def test_case_11_an_idle_expert_has_a_gradient_of_exactly_zero(variant: str) -> None:
    experts = build(replace(CONFIG, **VARIANTS[variant]))
    rows_RD, ids_RK, weights_RK = inputs(20, torch.float32)
    experts(rows_RD, ids_RK, weights_RK, int((ids_RK >= 0).sum())).sum().backward()
    for name, parameter in experts.named_parameters():
        assert parameter.grad is not None, name
        assert bool((parameter.grad[2] == 0).all()), name
        assert float(parameter.grad[1].norm()) > 0, name


@pytest.mark.parametrize("backend", ["grouped_mm", "reference"])
@pytest.mark.parametrize("num_rows", [0, 3])
def test_no_pair_at_all(num_rows: int, backend: str) -> None:
    """A rank that received nothing, or rows that ask for nothing: zeros, and gradients of zero for every weight."""
    experts = build(replace(CONFIG, linear_bias=True, backend=backend))
    rows_RD = torch.randn(num_rows, DIM, requires_grad=True)
    weights_RK = torch.rand(num_rows, CONFIG.top_k, requires_grad=True)
    out_RD = experts(rows_RD, torch.full((num_rows, CONFIG.top_k), -1), weights_RK, 0)
    assert torch.equal(out_RD, torch.zeros(num_rows, DIM))
    out_RD.sum().backward()
    for tensor in (rows_RD, weights_RK, *experts.parameters()):
        assert tensor.grad is not None and bool((tensor.grad == 0).all())


def test_what_lies_behind_a_missing_expert_is_never_used() -> None:
    """NaN in rows without experts and in weights of slots without expert."""
    experts = build(CONFIG)
    rows_RD, ids_RK, weights_RK = inputs(6, torch.float32)
    ids_RK[4] = -1
    num_pairs = int((ids_RK >= 0).sum())
    clean_RD = experts(rows_RD, torch.where(ids_RK >= 0, ids_RK, -1), weights_RK, num_pairs)
    rows_RD[4] = float("nan")
    weights_RK[ids_RK < 0] = float("nan")
    leaves = [rows_RD.requires_grad_(), weights_RK.requires_grad_()]
    out_RD = experts(rows_RD, ids_RK, weights_RK, num_pairs)
    assert torch.equal(out_RD, clean_RD)
    out_RD.sum().backward()
    assert all(bool(torch.isfinite(tensor.grad).all()) for tensor in (*leaves, *experts.parameters()))
    assert bool((rows_RD.grad[4] == 0).all()) and bool((weights_RK.grad[ids_RK < 0] == 0).all())


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 5), st.integers(0, 7), st.integers(1, 4), st.integers(0, 1000))
def test_pairs_are_sorted_by_expert_then_row(num_experts: int, num_rows: int, num_slots: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    ids_RK = torch.randint(-1, num_experts, (num_rows, num_slots), generator=generator)
    num_pairs = int((ids_RK >= 0).sum())
    pairs = sort_pairs(ids_RK, num_experts, num_pairs)
    expected = sorted(
        (expert, row, slot)
        for row, slots in enumerate(ids_RK.tolist())
        for slot, expert in enumerate(slots)
        if expert >= 0
    )
    assert pairs.rows_P.tolist() == [row for _, row, _ in expected]
    assert pairs.order_P.tolist() == [row * num_slots + slot for _, row, slot in expected]
    assert torch.equal(pairs.slots_RK >= 0, ids_RK >= 0)
    assert [int(pairs.slots_RK[row, slot]) for _, row, slot in expected] == list(range(num_pairs))
    assert pairs.offsets_E.dtype == torch.int32
    assert pairs.offsets_E.tolist() == [sum(e <= expert for e, *_ in expected) for expert in range(num_experts)]


@pytest.mark.parametrize("name", ["swiglu", "clamped_swiglu"])
def test_the_activation_is_the_oracles_times_the_weight(name: str) -> None:
    """Exactly, in fp64; values beyond the clamps included."""
    h_PH = torch.randn(9, 12, dtype=torch.float64) * 6
    weights_P = torch.rand(9, dtype=torch.float64)
    expected = expert_activation(*h_PH.chunk(2, dim=-1), name) * weights_P[:, None]
    torch.testing.assert_close(weighted_activation(h_PH, weights_P, name), expected, rtol=1e-14, atol=0)


def test_the_activation_of_bf16_is_computed_in_fp32() -> None:
    h_PH = (torch.randn(64, 32) * 3).bfloat16()
    weights_P = torch.rand(64)
    expected = weighted_activation(h_PH.float(), weights_P, "swiglu").bfloat16()
    assert torch.equal(weighted_activation(h_PH, weights_P, "swiglu"), expected)


def test_an_unknown_activation_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"model\.moe\.activation='relu'.*clamped_swiglu"):
        weighted_activation(torch.zeros(1, 2), torch.ones(1), "relu")


def test_experts_without_bias_have_no_bias_parameters() -> None:
    assert [name for name, _ in GroupedExperts(CONFIG, DIM).named_parameters()] == ["w_gate_up", "w_down"]
    shapes = {
        name: tuple(p.shape) for name, p in GroupedExperts(replace(CONFIG, linear_bias=True), DIM).named_parameters()
    }
    assert shapes == {"w_gate_up": (4, 2, 16, 8), "w_down": (4, 8, 16), "b_gate_up": (4, 2, 16), "b_down": (4, 8)}
