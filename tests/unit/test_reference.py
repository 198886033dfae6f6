"""The reference experts against a loop over (row, slot) pairs, and whole layers against transformers.

Names: R rows, D model dim, F expert hidden dim, E experts, K slots per row, as in moe/reference.py.
"""

import pytest
import torch
from torch.nn.functional import silu

from moe.config import MoEConfig
from moe.load_balance import batch_aux_loss, count_tokens
from moe.reference import expert_activation, reference_experts, reference_moe
from moe.router import route

R, D, F, E, K = 10, 6, 4, 5, 3
# Dot products of a few fp64 terms, summed in another order.
FP64_TOLERANCE = {"rtol": 1e-12, "atol": 1e-13}
# The same in fp32, through transformers' own order of operations.
FP32_TOLERANCE = {"rtol": 1e-5, "atol": 1e-6}


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def make_weights(dtype: torch.dtype = torch.float64, bias: bool = True) -> list[torch.Tensor | None]:
    generator = torch.Generator().manual_seed(1)
    shapes = [(E, 2, F, D), (E, D, F), (E, 2, F), (E, D)]
    weights = [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]
    weights = [weight.requires_grad_() for weight in weights]
    return [*weights[:2], *(weights[2:] if bias else [None, None])]


def make_rows(dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows, ids with holes (-1) and a row without any expert, and routing weights. No row chooses expert 2."""
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(R, D, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    ids = torch.rand(R, E, generator=generator).index_fill(1, torch.tensor([2]), -1.0).topk(K, dim=1).indices
    ids = ids.masked_fill(torch.rand(R, K, generator=generator) < 0.3, -1)
    ids[4] = -1
    weights = torch.rand(R, K, generator=generator, dtype=torch.float64).requires_grad_()
    return x, ids, weights


def by_pairs(x, ids, weights, w_gate_up, w_down, b_gate_up, b_down, config) -> torch.Tensor:
    rows = []
    for r in range(R):
        total = torch.zeros(D, dtype=x.dtype)
        for k in range(K):
            e = int(ids[r, k])
            if e < 0:
                continue
            row = x[r] * weights[r, k] if config.scores_before_experts else x[r]
            gate, up = w_gate_up[e, 0] @ row, w_gate_up[e, 1] @ row
            if b_gate_up is not None:
                gate, up = gate + b_gate_up[e, 0], up + b_gate_up[e, 1]
            y = w_down[e] @ expert_activation(gate, up, config.activation)
            y = y if b_down is None else y + b_down[e]
            total = total + (y if config.scores_before_experts else y * weights[r, k])
        rows.append(total)
    return torch.stack(rows)


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("activation", ["swiglu", "clamped_swiglu"])
def test_equals_a_loop_over_pairs(activation: str, bias: bool, before: bool) -> None:
    config = MoEConfig(num_experts=E, top_k=K, activation=activation, scores_before_experts=before)
    x, ids, weights = make_rows()
    parameters = make_weights(bias=bias)
    inputs = [tensor for tensor in (x, weights, *parameters) if tensor is not None]
    outputs, gradients = [], []
    for function in (reference_experts, by_pairs):
        out = function(x, ids, weights, *parameters, config)
        outputs.append(out)
        gradients.append(torch.autograd.grad(out.square().sum(), inputs))
    torch.testing.assert_close(outputs[0], outputs[1], **FP64_TOLERANCE)
    for ours, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, expected, **FP64_TOLERANCE)


def test_an_expert_without_rows_has_a_gradient_of_exactly_zero() -> None:
    """Case 11: zero, not None."""
    x, ids, weights = make_rows()
    parameters = make_weights()
    reference_experts(x, ids, weights, *parameters, MoEConfig()).sum().backward()
    assert not (ids == 2).any()
    for parameter in parameters:
        assert parameter is not None and parameter.grad is not None
        assert (parameter.grad[2] == 0).all() and parameter.grad[0].norm() > 0


def test_no_rows_at_all() -> None:
    parameters = make_weights()
    ids, weights = torch.empty(0, K, dtype=torch.int64), torch.empty(0, K, dtype=torch.float64)
    out = reference_experts(torch.empty(0, D, dtype=torch.float64), ids, weights, *parameters, MoEConfig())
    assert out.shape == (0, D)
    out.sum().backward()
    assert all(p is not None and p.grad is not None and (p.grad == 0).all() for p in parameters)


def test_what_lies_behind_a_missing_expert_is_never_read() -> None:
    x, ids, weights = make_rows()
    parameters = make_weights()
    clean = reference_experts(x, ids, weights, *parameters, MoEConfig())
    x_nan = x.detach().clone().index_fill(0, torch.tensor([4]), torch.nan).requires_grad_()
    weights_nan = weights.detach().masked_fill(ids < 0, torch.nan).requires_grad_()
    out = reference_experts(x_nan, ids, weights_nan, *parameters, MoEConfig())
    assert torch.equal(out, clean)
    out.sum().backward()
    for tensor in (x_nan, weights_nan, *parameters):
        assert tensor is not None and tensor.grad is not None and tensor.grad.isfinite().all()
    assert weights_nan.grad is not None and (weights_nan.grad[ids < 0] == 0).all()


def test_half_precision_rows_are_summed_in_fp32_and_rounded_once() -> None:
    """Adding y/512 twice to y changes a bf16 sum only if the partial sums keep more than 8 bits."""
    x, _, _ = make_rows(torch.bfloat16)
    w_gate_up, w_down, *_ = make_weights(torch.bfloat16, bias=False)
    ids, weights = torch.zeros(R, K, dtype=torch.int64), torch.tensor([1.0, 2.0**-9, 2.0**-9]).expand(R, K)
    out = reference_experts(x, ids, weights, w_gate_up, w_down, None, None, MoEConfig())
    single = reference_experts(x, ids[:, :1], torch.ones(R, 1), w_gate_up, w_down, None, None, MoEConfig())
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, (single.float() * (1 + 2.0**-8)).bfloat16()) and not torch.equal(out, single)


def test_the_clamped_activation_is_that_of_gpt_oss() -> None:
    """Far beyond both clamps, where only the gate has no lower one. fp64: the same few operations."""
    from transformers.models.gpt_oss.configuration_gpt_oss import GptOssConfig
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

    theirs = GptOssExperts(GptOssConfig(num_local_experts=1, hidden_size=2, intermediate_size=2))
    values = torch.linspace(-20, 20, 41, dtype=torch.float64)
    gate, up = torch.cartesian_prod(values, values).T
    expected = theirs._apply_gate(torch.stack([gate, up], dim=-1).flatten())
    torch.testing.assert_close(expert_activation(gate, up, "clamped_swiglu"), expected, rtol=1e-14, atol=0)


def test_an_unknown_activation_is_refused() -> None:
    with pytest.raises(ValueError, match=r"model\.moe\.activation=gelu"):
        expert_activation(torch.ones(1), torch.ones(1), "gelu")


def layer_parameters(config: MoEConfig, dtype: torch.dtype = torch.float64) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    shapes = {
        "router.weight": (config.num_experts, D),
        "experts.w_gate_up": (config.num_experts, 2, F, D),
        "experts.w_down": (config.num_experts, D, F),
    }
    if config.shared_expert_dim:
        shapes |= {"shared.w_gate.weight": (F, D), "shared.w_up.weight": (F, D), "shared.w_down.weight": (D, F)}
    make = {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}
    return {name: tensor.to(dtype).requires_grad_() for name, tensor in make.items()}


@pytest.mark.parametrize("level", ["batch", "sequence"])
def test_a_padded_batch_is_the_unpadded_one(level: str) -> None:
    """Case 24 for the whole layer: counts, losses and every gradient."""
    config = MoEConfig(num_experts=E, top_k=2, aux_loss_level=level)
    x = torch.randn(2, 4, D, dtype=torch.float64)
    padded = torch.cat([x, torch.full((2, 3, D), 9.0, dtype=torch.float64)], dim=1)
    mask = torch.arange(7).lt(4).expand(2, 7)
    results = []
    for rows, token_mask in ((x, None), (padded, mask)):
        parameters = layer_parameters(config)
        out = reference_moe(rows, parameters, config, token_mask)
        (out.y_BSD[:, :4].square().sum() + out.aux_loss + out.z_loss).backward()
        results.append((out, parameters))
    (plain, plain_parameters), (masked, masked_parameters) = results
    assert torch.equal(plain.tokens_per_expert_E, masked.tokens_per_expert_E)
    assert (masked.y_BSD[:, 4:] == 0).all()
    for ours, expected in ((masked.aux_loss, plain.aux_loss), (masked.z_loss, plain.z_loss)):
        torch.testing.assert_close(ours, expected, **FP64_TOLERANCE)
    for name, parameter in plain_parameters.items():
        torch.testing.assert_close(masked_parameters[name].grad, parameter.grad, **FP64_TOLERANCE)


def test_the_auxiliary_loss_reaches_the_router() -> None:
    """Case 25: the router's gradient is d(main) + c * d(aux), with d(aux) taken by finite differences."""
    coefficient, step = 0.1, 1e-6
    config = MoEConfig(num_experts=E, top_k=2, aux_loss=coefficient)
    parameters = layer_parameters(config)
    x = torch.randn(2, 4, D, dtype=torch.float64)
    router = parameters["router.weight"]
    out = reference_moe(x, parameters, config)
    (main,) = torch.autograd.grad(out.y_BSD.square().sum(), router, retain_graph=True)
    (total,) = torch.autograd.grad(out.y_BSD.square().sum() + coefficient * out.aux_loss, router)

    def aux(weight: torch.Tensor) -> float:
        scores = torch.softmax(x.flatten(0, 1) @ weight.T, dim=-1)
        return float(batch_aux_loss(scores, None, out.tokens_per_expert_E, 8, 2))

    for entry in range(router.numel()):
        change = torch.zeros(router.numel(), dtype=torch.float64).index_fill(0, torch.tensor(entry), step)
        change = change.view_as(router)
        slope = (aux(router.detach() + change) - aux(router.detach() - change)) / (2 * step)
        # Central differences: error step^2 plus rounding 1e-16 / step.
        assert abs(float((total - main).flatten()[entry]) - coefficient * slope) < 1e-9
    assert (total - main).norm() > 1e-3


def test_counts_tell_the_choice_and_dropped_the_rest() -> None:
    config = MoEConfig(num_experts=E, top_k=2, capacity_factor=0.5)
    parameters = layer_parameters(config)
    x = torch.randn(3, 6, D, dtype=torch.float64)
    out = reference_moe(x, parameters, config)
    kept = route(x.flatten(0, 1), parameters["router.weight"], None, config, seq_len=6).topk_ids_TK
    assert out.tokens_per_expert_E.sum() == 3 * 6 * 2
    assert out.dropped == 3 * 6 * 2 - count_tokens(kept, E).sum() > 0


def test_equals_the_qwen3_moe_layer() -> None:
    from transformers.models.qwen3_moe.configuration_qwen3_moe import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    theirs = Qwen3MoeSparseMoeBlock(
        Qwen3MoeConfig(
            num_experts=E, num_experts_per_tok=2, hidden_size=D, moe_intermediate_size=F, norm_topk_prob=True
        )
    )
    config = MoEConfig(num_experts=E, top_k=2)
    parameters = layer_parameters(config, torch.float32)
    with torch.no_grad():
        theirs.gate.weight.copy_(parameters["router.weight"])
        theirs.experts.gate_up_proj.copy_(parameters["experts.w_gate_up"].flatten(1, 2))
        theirs.experts.down_proj.copy_(parameters["experts.w_down"])
    x = torch.randn(2, 5, D)
    torch.testing.assert_close(reference_moe(x, parameters, config).y_BSD, theirs(x), **FP32_TOLERANCE)


def test_equals_the_deepseek_v3_layer_with_its_shared_expert() -> None:
    from transformers.models.deepseek_v3.configuration_deepseek_v3 import DeepseekV3Config
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE

    theirs = DeepseekV3MoE(
        DeepseekV3Config(
            num_local_experts=8,
            num_experts_per_tok=2,
            hidden_size=D,
            moe_intermediate_size=F,
            n_shared_experts=1,
            n_group=4,
            topk_group=2,
            routed_scaling_factor=2.5,
        )
    )
    config = MoEConfig(
        num_experts=8,
        top_k=2,
        score_function="sigmoid",
        route_scale=2.5,
        num_groups=4,
        top_groups=2,
        shared_expert_dim=F,
    )
    parameters = layer_parameters(config, torch.float32) | {"expert_bias": torch.randn(8)}
    with torch.no_grad():
        theirs.gate.weight.copy_(parameters["router.weight"])
        theirs.gate.e_score_correction_bias.copy_(parameters["expert_bias"])
        theirs.experts.gate_up_proj.copy_(parameters["experts.w_gate_up"].flatten(1, 2))
        theirs.experts.down_proj.copy_(parameters["experts.w_down"])
        for name in ("gate", "up", "down"):
            getattr(theirs.shared_experts, f"{name}_proj").weight.copy_(parameters[f"shared.w_{name}.weight"])
    x = torch.randn(2, 5, D)
    torch.testing.assert_close(reference_moe(x, parameters, config).y_BSD, theirs(x), **FP32_TOLERANCE)


def test_equals_the_gpt_oss_layer() -> None:
    from transformers.models.gpt_oss.configuration_gpt_oss import GptOssConfig
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP

    theirs = GptOssMLP(GptOssConfig(num_local_experts=E, num_experts_per_tok=2, hidden_size=D, intermediate_size=F))
    config = MoEConfig(num_experts=E, top_k=2, router_bias=True, linear_bias=True, activation="clamped_swiglu")
    # Large enough that both clamps bite.
    w_gate_up, w_down, b_gate_up, b_down = (4 * w for w in make_weights(torch.float32) if w is not None)
    parameters = {
        "router.weight": torch.randn(E, D),
        "router.bias": torch.randn(E),
        "experts.w_gate_up": w_gate_up,
        "experts.w_down": w_down,
        "experts.b_gate_up": b_gate_up,
        "experts.b_down": b_down,
    }
    with torch.no_grad():
        theirs.router.weight.copy_(parameters["router.weight"])
        theirs.router.bias.copy_(parameters["router.bias"])
        # Theirs interleaves gate and up along the last dim, and multiplies from the right.
        theirs.experts.gate_up_proj.copy_(w_gate_up.permute(0, 3, 2, 1).flatten(2, 3))
        theirs.experts.gate_up_proj_bias.copy_(b_gate_up.transpose(1, 2).flatten(1, 2))
        theirs.experts.down_proj.copy_(w_down.transpose(1, 2))
        theirs.experts.down_proj_bias.copy_(b_down)
    x = torch.randn(2, 5, D)
    y, _ = theirs(x)
    # Values reach 1e3 here, hence relative to the largest.
    torch.testing.assert_close(
        reference_moe(x, parameters, config).y_BSD, y, rtol=1e-5, atol=1e-5 * float(y.detach().abs().max())
    )


def test_swiglu_is_silu_times_up() -> None:
    gate, up = torch.randn(2, 7)
    assert torch.equal(expert_activation(gate, up, "swiglu"), silu(gate) * up)
