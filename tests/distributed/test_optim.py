"""The optimizer and the norm over parameters that live on two different meshes, as with expert parallelism."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from tests.distributed.harness import run_workers
from trainer.config import OptimConfig
from trainer.optim import build_optimizer, clip_grad_norm, ensure_gradients

SHAPES = {"weight": (4, 3), "norm": (4,), "w_down": (2, 3, 4), "b_down": (2, 3)}
STEPS = 3


class _Model(nn.Module):
    """Dense parameters on a mesh `fsdp`, stacked experts on a mesh `ep`; plain tensors when not sharded."""

    def __init__(self, sharded: bool) -> None:
        super().__init__()
        meshes = {}
        if sharded:
            meshes = {name: init_device_mesh("cpu", (2,), mesh_dim_names=(name,)) for name in ("fsdp", "ep")}
        generator = torch.Generator().manual_seed(0)
        for name, shape in SHAPES.items():
            value = torch.randn(shape, generator=generator, dtype=torch.float64)
            if sharded:
                value = distribute_tensor(value, meshes["ep" if name.endswith("_down") else "fsdp"], [Shard(0)])
            self.register_parameter(name, nn.Parameter(value))


def _full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _train(sharded: bool) -> tuple[list[float], dict[str, torch.Tensor], int, list[float]]:
    """Norms before clipping, final parameters, number of groups and step counts."""
    torch.manual_seed(0)
    model = _Model(sharded)
    optimizer = build_optimizer(model, OptimConfig(lr=0.1))
    norms = []
    for step in range(STEPS):
        optimizer.zero_grad()
        for name, parameter in model.named_parameters():
            # In the first step nothing reaches b_down.
            if step or name != "b_down":
                _full(parameter.square().sum()).backward()
        ensure_gradients(model)
        norms.append(clip_grad_norm(model, 1.0).item())
        optimizer.step()
    steps = [float(_full(state["step"])) for state in optimizer.state.values()]
    return norms, {n: _full(p).detach() for n, p in model.named_parameters()}, len(optimizer.param_groups), steps


def _train_sharded() -> tuple[list[float], dict[str, torch.Tensor], int, list[float]]:
    return _train(sharded=True)


def _norm_and_flag() -> tuple[float, float, float]:
    """Of gradients 3 and 4, the flag set on the last ranks."""
    model = nn.Linear(1, 1)
    model.weight.grad, model.bias.grad = torch.full((1, 1), 3.0), torch.full((1,), 4.0)
    flag = torch.tensor(float(dist.get_rank() > 0))
    return clip_grad_norm(model, 0.0, flag).item(), flag.item(), clip_grad_norm(model, 0.0).item()


def test_a_flag_travels_with_the_norm() -> None:
    """It is 1 on every rank however many had it, and the norm is as without."""
    assert run_workers(_norm_and_flag, 3) == [(5.0, 1.0, 5.0)] * 3


def test_two_meshes_train_like_one_process() -> None:
    expected_norms, expected, _, _ = _train(sharded=False)
    for norms, parameters, num_groups, steps in run_workers(_train_sharded, 2):
        # (decay, no decay) x (fsdp, ep): a fused step never mixes meshes.
        assert num_groups == 4
        assert steps == [STEPS] * len(SHAPES)
        # fp64: the squares of a few dozen entries are added in another order.
        torch.testing.assert_close(torch.tensor(norms), torch.tensor(expected_norms), rtol=1e-12, atol=0)
        for name, value in expected.items():
            torch.testing.assert_close(parameters[name], value, rtol=1e-12, atol=1e-14)
