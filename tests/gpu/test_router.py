"""route() on a GPU chooses what it chooses on the CPU, ties included, and never waits for the device."""

import pytest
import torch

from moe.config import MoEConfig
from moe.load_balance import batch_aux_loss, count_tokens, sequence_aux_loss, update_expert_bias, z_loss
from moe.router import Routing, route, router_scores, wide_linear

pytestmark = pytest.mark.gpu

T, S, E = 4096, 512, 64
CONFIGS = [
    MoEConfig(num_experts=E, top_k=8),
    MoEConfig(num_experts=E, top_k=8, capacity_factor=1.1),
    MoEConfig(num_experts=E, top_k=6, score_function="sigmoid", num_groups=8, top_groups=3, capacity_factor=1.0),
]


def route_on(device: str, config: MoEConfig) -> Routing:
    """Small integers as logits: half of all comparisons are ties, and every device agrees on their values."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randint(-2, 3, (T, E), generator=generator).float()
    bias = torch.randint(-1, 2, (E,), generator=generator).float() / 4 if config.num_groups > 1 else None
    mask = torch.rand(T, generator=generator) < 0.9
    moved = [None if x is None else x.to(device) for x in (logits, torch.eye(E), bias, mask)]
    return route(moved[0], moved[1], None, config, expert_bias_E=moved[2], token_mask_T=moved[3], seq_len=S)


@pytest.mark.parametrize("config", CONFIGS)
def test_equals_the_cpu(config: MoEConfig) -> None:
    ours, expected = route_on("cuda", config), route_on("cpu", config)
    assert torch.equal(ours.topk_ids_TK.cpu(), expected.topk_ids_TK)
    assert ours.dropped.item() == expected.dropped.item()
    # exp differs by an ulp or two between devices.
    torch.testing.assert_close(ours.topk_weights_TK.cpu(), expected.topk_weights_TK, rtol=1e-6, atol=1e-7)


def test_routing_and_balancing_never_wait_for_the_device() -> None:
    config = MoEConfig(num_experts=E, top_k=8, capacity_factor=1.1, expert_bias=True)
    x = torch.randn(T, 32, device="cuda").bfloat16()
    weight = torch.randn(E, 32, device="cuda", requires_grad=True)
    bias, mask = torch.zeros(E, device="cuda"), torch.ones(T, dtype=torch.bool, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        routing = route(x, weight, None, config, expert_bias_E=bias, token_mask_T=mask, seq_len=S)
        counts, valid = count_tokens(routing.chosen_ids_TK, E), mask.sum()
        scores = router_scores(routing.logits_TE, config)
        loss = batch_aux_loss(scores, mask, counts, valid, 8) + z_loss(routing.logits_TE, mask, valid)
        loss = loss + sequence_aux_loss(scores, routing.chosen_ids_TK, mask, S, T // S)
        (loss + routing.topk_weights_TK.square().sum()).backward()
        update_expert_bias(bias, counts, 0.001)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert weight.grad is not None and weight.grad.norm() > 0


def test_the_wide_product_loses_nothing_of_its_operands() -> None:
    """Logits, and the gradients' rounding to bf16, against fp64; a gradient rounded before the product shows 1e-3."""
    generator = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(T, 256, generator=generator, device="cuda").bfloat16().requires_grad_()
    weight = torch.randn(E, 256, generator=generator, device="cuda").bfloat16().requires_grad_()
    upstream = torch.randn(T, E, generator=generator, device="cuda")
    logits = wide_linear(x, weight)
    expected = x.double() @ weight.double().t()
    assert logits.dtype == torch.float32
    assert (logits.double() - expected).norm() <= 1e-6 * expected.norm()
    ours = torch.autograd.grad(logits, [x, weight], upstream)
    for a, b in zip(ours, torch.autograd.grad(expected, [x, weight], upstream.double()), strict=True):
        assert (a.double() - b.double().bfloat16().double()).norm() <= 5e-4 * b.double().norm()
