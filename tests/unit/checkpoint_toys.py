"""A model small enough to save and load in milliseconds, and comparisons of what came back."""

from pathlib import Path

import torch
from torch import Tensor, nn

from trainer.checkpoint import Checkpointer
from trainer.config import CheckpointConfig


class Toy(nn.Module):
    """Two linear maps, a buffer that training changes, and a parameter that never gets a gradient."""

    def __init__(self, hidden: int = 5) -> None:
        super().__init__()
        self.first = nn.Linear(3, hidden)
        self.second = nn.Linear(hidden, 2)
        self.unused = nn.Parameter(torch.randn(4))
        self.register_buffer("expert_bias", torch.zeros(7))
        self.register_buffer("cache", torch.zeros(2), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.relu(self.first(x)))


def trained(steps: int = 2, seed: int = 0) -> tuple[Toy, torch.optim.AdamW]:
    torch.manual_seed(seed)
    model = Toy()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(steps):
        train_step(model, optimizer)
    return model, optimizer


def train_step(model: Toy, optimizer: torch.optim.Optimizer) -> None:
    model(torch.randn(4, 3)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    model.expert_bias += 0.25


def checkpointer(folder: Path, said: list[str] | None = None, **config: object) -> Checkpointer:
    notify = (said if said is not None else []).append
    return Checkpointer(folder, CheckpointConfig(**{"asynchronous": False, **config}), notify=notify)  # type: ignore[arg-type]


def state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    tensors = {name: value.clone() for name, value in model.state_dict().items()}
    for name, param in model.named_parameters():
        tensors |= {f"{name}.{key}": value.clone() for key, value in optimizer.state.get(param, {}).items()}
    return tensors


def assert_same(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name
        assert a[name].dtype == b[name].dtype, name


def fresh(sentinel: float = 1e30) -> tuple[Toy, torch.optim.AdamW]:
    model = Toy()
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.fill_(sentinel)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)
