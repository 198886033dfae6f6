"""Weights that one rank has alone compute, and get gradients, as by FSDP; their copies go as they do there."""

from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from moe.experts import GroupedExperts
from parallel import fsdp, whole_weights
from parallel.config import ParallelConfig
from parallel.mesh import Mesh, build_mesh
from parallel.whole_weights import CastModule, CastWeights, Copies
from tests.distributed.harness import run_workers
from tests.distributed.tiny_models import MODELS
from trainer.build import build_model
from trainer.config import Config, PrecisionConfig, TrainConfig

SEQ_LEN = 8


def part(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def casts_of(model: nn.Module) -> list[CastWeights]:
    casts = [module.cast for module in model.modules() if isinstance(module, GroupedExperts)]
    assert casts and all(isinstance(cast, CastWeights) for cast in casts)
    return casts  # type: ignore[return-value]


def copies_of(model: nn.Module) -> list[Copies]:
    """Of experts and of modules, as far as there are any."""
    found: list[Copies] = []
    for module in model.modules():
        if isinstance(module, GroupedExperts) and module.cast is not None:
            assert isinstance(module.cast, CastWeights)
            found.append(module.cast)
        hooks = [getattr(hook, "__self__", None) for hook in module._forward_pre_hooks.values()]
        found += [hook for hook in hooks if isinstance(hook, CastModule)]
    return found


def held(casts: Sequence[Copies]) -> int:
    """Bytes of copies."""
    return sum(copy.untyped_storage().nbytes() for cast in casts for copy in cast._copies)


def built(name: str, layout: dict[str, Any], recipe: str = "bf16") -> tuple[nn.Module, Mesh]:
    mesh = build_mesh(ParallelConfig(**layout), torch.device("cpu"))
    train = TrainConfig(global_batch_size=mesh.batch_size, seq_len=SEQ_LEN)
    precision = PrecisionConfig(recipe=recipe)
    return build_model(Config(model=MODELS[name], parallel=mesh.config, train=train, precision=precision), mesh), mesh


def loss_of(model: nn.Module, mesh: Mesh, batch: int) -> Tensor:
    tokens_BS = (torch.arange(SEQ_LEN)[None] * (batch + 3) + mesh.batch_rank) % 11
    return model(tokens_BS, labels_BS=tokens_BS).loss_sum


def traced(name: str, layout: dict[str, Any]) -> dict[str, Tensor]:
    """Losses of two batches, an update between them, and what the gradients add up to."""
    model, mesh = built(name, layout)
    found = {}
    for batch in range(2):
        loss = loss_of(model, mesh, batch)
        loss.backward()
        found[f"loss {batch}"] = loss.detach()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    part(parameter).add_(part(parameter.grad), alpha=-0.1)
    for key, parameter in model.named_parameters():
        if parameter.grad is not None:
            assert parameter.grad.dtype == torch.float32
            found[key] = part(parameter.grad)
    return found


def compare_with_fsdp(name: str, layout: dict[str, Any]) -> list[str]:
    ours = traced(name, layout)
    with patch.object(fsdp, "has_whole_experts", lambda mesh: False):
        theirs = traced(name, layout)
    assert set(ours) == set(theirs) and any("experts" in key for key in ours)
    return [key for key, tensor in theirs.items() if not torch.equal(ours[key], tensor)]


@pytest.mark.parametrize("name", ["qwen3", "gpt_oss"])
@pytest.mark.parametrize(
    "layout",
    [
        {"ep": 2},
        {"ep": 2, "activation_checkpoint": "full"},
        {"ep": 2, "activation_checkpoint": "selective"},
        {"ep": 2, "reshard_after_forward": False},
        {"tp": 2, "etp": 2},
    ],
    ids=lambda layout: ",".join(f"{key}={value}" for key, value in layout.items()),
)
def test_losses_and_gradients_are_those_of_fsdp_bit_for_bit(name: str, layout: dict[str, Any]) -> None:
    assert run_workers(compare_with_fsdp, 2, name, layout) == [[], []]


WHOLE = [{"tp": 2, "ep": 2}, {"tp": 2, "etp": 2, "async_tp": "native"}, {"tp": 2, "ep": 2, "compile": True}]


@pytest.mark.parametrize(
    ("name", "layout"), [*((name, WHOLE[0]) for name in MODELS), *(("qwen3", layout) for layout in WHOLE[1:])], ids=str
)
def test_every_weight_of_one_rank_alone_as_well(name: str, layout: dict[str, Any]) -> None:
    assert run_workers(compare_with_fsdp, 2, name, layout) == [[], []]


@pytest.mark.parametrize("mode", ["none", "selective", "full"])
@pytest.mark.parametrize("reshards", [True, False])
def test_one_process_as_well(mode: str, reshards: bool) -> None:
    layout = {"activation_checkpoint": mode, "reshard_after_forward": reshards}
    for name in ("qwen3", "multi_token"):
        assert run_workers(compare_with_fsdp, 1, name, layout) == [[]]


def held_over_time(layout: dict[str, Any]) -> tuple[list[int], int]:
    """Bytes of copies before, between and after two passes; and of all copies."""
    model, mesh = built("qwen3", layout)
    casts, found = copies_of(model), []
    found.append(held(casts))
    for batch in range(2):
        loss = loss_of(model, mesh, batch)
        found.append(held(casts))
        loss.backward()
        found.append(held(casts))
    return found, sum(2 * copy.numel() for cast in casts for copy in cast._copies)


@pytest.mark.parametrize("mode", ["none", "full"])
def test_copies_are_given_up_between_forward_and_backward_as_told(mode: str) -> None:
    for found, every in run_workers(held_over_time, 2, {"ep": 2, "activation_checkpoint": mode}):
        assert found == [0] * 5 and every > 0
    kept = {"ep": 2, "activation_checkpoint": mode, "reshard_after_forward": False}
    for found, every in run_workers(held_over_time, 2, kept):
        assert found == [0, every, 0, every, 0]
    for reshards in (True, False):
        alone = {"activation_checkpoint": mode, "reshard_after_forward": reshards}
        for found, every in run_workers(held_over_time, 1, alone):
            between = 0 if reshards else every
            assert found == [0, between, 0, between, 0] and every > 0


def who_is_left(layout: dict[str, Any], recipe: str) -> tuple[bool, bool]:
    """Whether anything is cast, and whether FSDP has anything."""
    model, _ = built("qwen3", layout, recipe)
    return any(isinstance(found, CastModule) for found in copies_of(model)), any(
        isinstance(module, FSDPModule) for module in model.modules()
    )


def test_weights_of_one_rank_alone_are_left_by_fsdp() -> None:
    assert run_workers(who_is_left, 2, {"tp": 2, "ep": 2}, "bf16") == [(True, False)] * 2
    # Nothing to cast.
    assert run_workers(who_is_left, 2, {"tp": 2, "ep": 2}, "fp32") == [(False, False)] * 2
    # Experts have somebody to be gathered from, or all have.
    assert run_workers(who_is_left, 2, {"tp": 2}, "bf16") == [(False, True)] * 2
    assert run_workers(who_is_left, 2, {"cp": 2}, "bf16") == [(False, True)] * 2
    assert run_workers(who_is_left, 2, {"dp_replicate": 2}, "bf16") == [(False, True)] * 2
    assert run_workers(who_is_left, 1, {}, "bf16") == [(True, False)]


def who_is_whole(layout: dict[str, Any], recipe: str) -> tuple[bool, bool]:
    """Whether experts are cast, and whether FSDP has them."""
    experts = [module for module in built("qwen3", layout, recipe)[0].modules() if isinstance(module, GroupedExperts)]
    return all(layer.cast is not None for layer in experts), all(isinstance(layer, FSDPModule) for layer in experts)


def test_only_experts_of_one_rank_alone_are_left_by_fsdp() -> None:
    assert run_workers(who_is_whole, 4, {"ep": 4}, "bf16") == [(True, False)] * 4
    # Nothing to cast.
    assert run_workers(who_is_whole, 4, {"ep": 4}, "fp32") == [(False, False)] * 4
    assert run_workers(who_is_whole, 4, {"ep": 2}, "bf16") == [(False, True)] * 4
    assert run_workers(who_is_whole, 4, {"ep": 2, "dp_replicate": 2}, "bf16") == [(False, True)] * 4


def held_during_backward(layout: dict[str, Any]) -> list[int]:
    """Layers that have copies when the gradient of the first block's output is there: backward goes from the last."""
    model, mesh = built("qwen3", layout)
    casts, found = casts_of(model), []

    def look(_module: nn.Module, _given: Any, out: Any) -> None:
        out[0].register_hook(lambda _: found.append(sum(held([cast]) > 0 for cast in casts)))

    model.get_submodule("layers.0").register_forward_hook(look)
    loss_of(model, mesh, 0).backward()
    return found


@pytest.mark.parametrize("reshards", [True, False])
def test_copies_go_layer_by_layer(reshards: bool) -> None:
    """All layers but the first have had theirs."""
    layout = {"ep": 2, "reshard_after_forward": reshards}
    assert run_workers(held_during_backward, 2, layout) == [[0 if reshards else 1]] * 2


def casts_in_a_step(mode: str) -> float:
    """Casts of each weight in forward and backward."""
    model, mesh = built("qwen3", {"ep": 2, "activation_checkpoint": mode})
    with patch.object(whole_weights, "_cast", wraps=whole_weights._cast) as cast:
        loss_of(model, mesh, 0).backward()
    casts = sum(len(call.args[1]) for call in cast.call_args_list)
    return casts / sum(len(of_layer._copies) for of_layer in copies_of(model))


@pytest.mark.parametrize("mode", ["none", "selective", "full"])
def test_weights_are_cast_once_forward_and_once_backward(mode: str) -> None:
    assert run_workers(casts_in_a_step, 2, mode) == [2.0, 2.0]


def failing_in_backward(x: Tensor) -> Tensor:
    y = x.clone()

    def fail(_: Tensor) -> None:
        raise RuntimeError("of this test")

    if y.requires_grad:
        y.register_hook(fail)
    return y


class Weights(nn.Module):
    def __init__(self, give_up: bool = True) -> None:
        super().__init__()
        self.cast = CastWeights(torch.bfloat16, give_up)
        self.masters = [nn.Parameter(torch.randn(3, 4)), nn.Parameter(torch.randn(4, 5)), None, None]
        self.between = torch.nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.cast(lambda weights: self.between(x @ weights[0]) @ weights[1], self.masters)  # type: ignore

    def expected_grad(self) -> Tensor:
        """Of a sum over the results, with respect to two rows."""
        first, second, *_ = (None if master is None else master.detach().bfloat16() for master in self.masters)
        return (torch.ones(2, 5, dtype=torch.bfloat16) @ second.T) @ first.T

    def update(self) -> None:
        with torch.no_grad():
            for master in self.masters[:2]:
                master.mul_(-2)


class Stood(nn.Module):
    """The same by stand-ins; one weight stands in two places."""

    def __init__(self, give_up: bool = True) -> None:
        super().__init__()
        self.first, self.second, self.again = nn.Linear(4, 3, bias=False), nn.Linear(5, 4, bias=False), nn.Module()
        self.again.weight = self.first.weight
        self.masters = [self.first.weight, self.second.weight]
        self.between = torch.nn.Identity()
        self.cast = CastModule(self, self.masters, torch.bfloat16, give_up)

    def forward(self, x: Tensor) -> Tensor:
        return self.between(x @ self.again.weight) @ self.second.weight

    expected_grad, update = Weights.expected_grad, Weights.update


def two_rows() -> Tensor:
    return torch.randn(2, 3, dtype=torch.bfloat16, requires_grad=True)


@pytest.mark.parametrize("kind", [Weights, Stood])
@pytest.mark.parametrize("give_up", [True, False])
def test_a_backward_that_asks_for_no_weight_leaves_nothing_stale(kind: Any, give_up: bool) -> None:
    model, x = kind(give_up), two_rows()
    for _ in range(3):
        (grad,) = torch.autograd.grad(model(x).sum(), [x])
        torch.testing.assert_close(grad, model.expected_grad())
        assert held([model.cast]) == 0
        model.update()


@pytest.mark.parametrize("model", [Weights(), Stood()], ids=["experts", "module"])
def test_outside_there_are_masters(model: Any) -> None:
    x = two_rows()
    assert model(x).dtype == torch.bfloat16
    assert [weight.dtype for weight in model.masters[:2]] == [torch.float32] * 2
    if isinstance(model, Stood):
        assert model.first.weight is model.again.weight is model.masters[0]
        with pytest.raises(RuntimeError):
            model(torch.randn(2, 7, dtype=torch.bfloat16))
        assert model.first.weight is model.again.weight is model.masters[0] and held([model.cast]) == 0
        model(x).sum().backward()
        assert {name for name, _ in model.named_parameters()} == {"first.weight", "second.weight"}
        expected = torch.autograd.functional.jacobian(
            lambda first: (x.detach().float() @ first @ model.masters[1].detach()).sum(), model.masters[0].detach()
        )
        assert model.masters[0].grad.dtype == torch.float32
        torch.testing.assert_close(model.masters[0].grad, expected, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("kind", [Weights, Stood])
@pytest.mark.parametrize("give_up", [True, False])
def test_two_passes_may_be_open_and_one_may_be_used_twice(kind: Any, give_up: bool) -> None:
    model, first, second = kind(give_up), two_rows(), two_rows()
    sums = model(first).sum(), model(second).sum()
    for row, total in zip((first, second), sums, strict=True):
        total.backward(retain_graph=True)
        torch.testing.assert_close(row.grad, model.expected_grad())
    sums[0].backward()
    torch.testing.assert_close(first.grad, 2 * model.expected_grad())
    assert held([model.cast]) == 0


@pytest.mark.parametrize("kind", [Weights, Stood])
@pytest.mark.parametrize("give_up", [True, False])
def test_after_a_backward_that_failed_everything_is_as_after_any_other(kind: Any, give_up: bool) -> None:
    model, x = kind(give_up), two_rows()
    model.between.forward = failing_in_backward
    with pytest.raises(RuntimeError, match="of this test"):
        model(x).sum().backward()
    del model.between.forward
    model.update()
    with torch.no_grad():
        model(x)
    assert (held([model.cast]) == 0) is give_up
    for master in model.masters[:2]:
        master.grad = None
    model(x).sum().backward()
    torch.testing.assert_close(x.grad, model.expected_grad())
    assert held([model.cast]) == 0


def test_a_failed_pass_gives_copies_up() -> None:
    model = Weights()
    with pytest.raises(RuntimeError):
        model(torch.randn(2, 7, dtype=torch.bfloat16))
    assert model.cast._copies and held([model.cast]) == 0


def test_training_may_come_after_inference() -> None:
    model, x = Weights(), two_rows()
    with torch.inference_mode():
        model(x)
    model(x).sum().backward()
    torch.testing.assert_close(x.grad, model.expected_grad())
