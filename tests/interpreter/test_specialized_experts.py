"""Experts whose products are those of specialised warps: their host code and kernels by threads, the rest interpreted.

Bound 3e-2 against the loop over experts in fp64: bf16 rounding of h, a and y, and the interpreter cuts where bf16 is
rounded; a lost row or tile shows as 1e-1.
"""

from contextlib import nullcontext

import pytest
import torch

from moe import fused_launches, tiles
from moe.config import MoEConfig
from moe.kernels import rows_sm90, up_sm90
from tests.interpreter.test_fused_experts import SMALL, choose, results
from tests.unit.gluon_threads import OnThreads

BOUND = 3e-2


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> dict[str, OnThreads]:
    """By name; every launch that can be one of them is."""
    cut = {**SMALL, "up": SMALL["up"]._replace(specialized=True), "down": SMALL["down"]._replace(specialized=True)}
    monkeypatch.setattr(tiles, "CANDIDATES", {kernel: (tile,) for kernel, tile in cut.items()})
    monkeypatch.setattr(fused_launches, "_on_sm90", lambda tensor: tensor.dtype == torch.bfloat16)
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    # Parts of the experts take turns, as large ones do on a GPU.
    monkeypatch.setattr(fused_launches, "LEAST_OF_PART", 0)
    found: dict[str, OnThreads] = {}
    for module, name in ((rows_sm90, "rows_kernel"), (up_sm90, "up_kernel")):
        found[name] = OnThreads(getattr(module, name))
        monkeypatch.setattr(module, name, found[name])
    return found


@pytest.mark.parametrize(
    ("num_rows", "routing", "options"),
    [
        pytest.param(50, "uniform", {"num_experts": 4}, id="even"),
        pytest.param(200, "zipf", {"expert_dim": 136}, id="zipf"),
        pytest.param(9, "one", {}, id="one_expert"),
        pytest.param(70, "uniform", {"activation": "clamped_swiglu"}, id="clamped"),
        pytest.param(1, "uniform", {"num_experts": 1, "top_k": 1}, id="single"),
    ],
)
def test_equals_the_loop_over_experts(
    num_rows: int, routing: str, options: dict, kernels: dict[str, OnThreads]
) -> None:
    config = MoEConfig(**{"num_experts": 5, "top_k": 3, "expert_dim": 72, **options})
    ids_RK = choose(num_rows, config, routing)
    ours = results("fused", torch.bfloat16, config, 64, ids_RK)
    assert {name: kernel.launches for name, kernel in kernels.items()} == {"up_kernel": 1, "rows_kernel": 1}
    expected = results("reference", torch.float64, config, 64, ids_RK)["out"]
    # Gradients are the other kernels', of which the interpreter makes nothing in bf16.
    assert (ours["out"].double() - expected).norm() < BOUND * expected.norm()


def test_biases_and_odd_dims_take_the_other_kernels(kernels: dict[str, OnThreads]) -> None:
    """Rows by index want D in whole steps, and the down map's bias is added by the other kernel."""
    config = MoEConfig(num_experts=3, top_k=2, expert_dim=24, linear_bias=True)
    results("fused", torch.bfloat16, config, 40, choose(20, config, "uniform"))
    # (What the interpreter makes of bf16 products is not worth a look.)
    assert not any(kernel.launches for kernel in kernels.values())
