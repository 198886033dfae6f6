"""What comms.backend=auto comes to, with the facts of a machine that is not here: what it has against symm_mem."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import comms.backend
from comms.backend import BackendChoice, choose_backend
from comms.config import CommsConfig
from moe.config import MoEConfig
from moe.layer import MoE
from parallel import expert_parallel
from parallel.config import ParallelConfig
from parallel.expert_parallel import NOT_WHILE_THEY_COMPUTE, connect_experts

CUDA, CPU = torch.device("cuda"), torch.device("cpu")
NO_ROOM = "with symm_mem the run would take about 90.0 GiB, more than 95% of a GPU's 79.1"


class Machine:
    """Four ranks, the first of them asked; notes which collectives it was in."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.hosts, self.unavailable, self.of_others, self.calls = ["a"] * 4, None, [""] * 3, []
        monkeypatch.setattr(comms.backend, "hosts_of", lambda _: self.hosts)
        monkeypatch.setattr(comms.backend, "unavailable", self.can_map)
        monkeypatch.setattr(comms.backend, "dist", self)

    def size(self) -> int:
        return 4

    get_world_size = size

    def can_map(self, group: Any, device: torch.device) -> str | None:
        self.calls.append("unavailable")
        return self.unavailable

    def all_gather_object(self, every: list[str], own: str) -> None:
        self.calls.append("agree")
        every[:] = [own, *self.of_others]

    def choose(self, device: torch.device = CUDA, against: str = "", **settings: Any) -> BackendChoice:
        self.calls.clear()
        return choose_backend(CommsConfig(**settings), self, device, against)  # type: ignore[arg-type]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


def test_auto_is_symm_mem_where_nothing_is_against_it(machine: Machine) -> None:
    reason = "one host, work on rows while others travel, and room for all that can come"
    # One level, whatever it is called.
    for levels in (None, 1, 4):
        assert machine.choose(ranks_per_node=levels) == BackendChoice("symm_mem", reason)
        assert machine.calls == ["unavailable", "agree"]


def test_auto_is_collective_where_gpus_cannot_reach_each_other(machine: Machine) -> None:
    machine.unavailable = "some of the GPUs cannot reach each other's memory"
    choice = machine.choose(against=NO_ROOM)
    assert choice == BackendChoice("collective", f"symm_mem cannot run here: {machine.unavailable}")


def test_auto_is_collective_between_hosts_and_tells_of_nvshmem(machine: Machine) -> None:
    asked = "symm_mem reaches the GPUs of one host, and nvshmem, which knows one level, has to be asked for"
    machine.hosts = ["a", "a", "b", "b"]
    levels = "two levels: 2 nodes x 2 ranks, as their hosts say"
    assert machine.choose() == BackendChoice("collective", f"{levels}; {asked}", ranks_per_node=2)
    # Ranks that are on no host together have one level.
    machine.hosts = ["a", "b", "c", "d"]
    assert machine.choose() == BackendChoice("collective", asked)
    # Others wait for this answer, even if there was nothing to ask the GPUs.
    assert machine.calls == ["agree"]


def test_auto_is_collective_where_a_host_is_said_to_be_several_nodes(machine: Machine) -> None:
    choice = machine.choose(ranks_per_node=2)
    assert (choice.backend, choice.ranks_per_node) == ("collective", 2)
    assert choice.reason.endswith("2 ranks, as comms.ranks_per_node says; symm_mem and nvshmem know one level")


def test_auto_is_collective_for_what_the_caller_has_against_it(machine: Machine) -> None:
    assert machine.choose(against=NO_ROOM) == BackendChoice("collective", NO_ROOM)


def test_auto_is_collective_for_what_any_process_has_against_it(machine: Machine) -> None:
    """Of another group, too: its GPUs may have less memory, or reach each other worse."""
    machine.of_others = ["", "what rank 2 says", "what rank 3 says"]
    assert machine.choose() == BackendChoice("collective", "what rank 2 says")
    assert machine.choose(against=NO_ROOM).reason == NO_ROOM


def test_on_cpus_auto_asks_nobody(machine: Machine) -> None:
    assert machine.choose(CPU, NO_ROOM) == BackendChoice("collective", "symm_mem and nvshmem need GPUs")
    assert machine.calls == []


def test_what_was_asked_for_is_nothing_that_auto_decides(machine: Machine) -> None:
    machine.of_others = [NO_ROOM] * 3
    for backend in ("symm_mem", "collective"):
        assert machine.choose(against=NO_ROOM, backend=backend) == BackendChoice(backend, "as asked")
        assert "agree" not in machine.calls


@pytest.mark.parametrize(
    ("backend", "can_exchange", "no_room", "against"),
    [
        ("auto", [True, True], "", ""),
        ("auto", [True, True], NO_ROOM, NO_ROOM),
        # One layer is enough; and what no memory would help is said.
        ("auto", [True, False], NO_ROOM, NOT_WHILE_THEY_COMPUTE),
        ("symm_mem", [False, False], "", ""),
    ],
)
def test_experts_and_memory_are_what_a_model_has_against_it(
    monkeypatch: pytest.MonkeyPatch, backend: str, can_exchange: list[bool], no_room: str, against: str
) -> None:
    layers = [MoE(MoEConfig(num_experts=4, expert_dim=8), 8) for _ in can_exchange]
    for layer, can in zip(layers, can_exchange, strict=True):
        monkeypatch.setattr(layer.experts, "can_exchange", lambda dtype, device, can=can: can)
    asked: list[str] = []

    def choose(config: CommsConfig, group: Any, device: torch.device, against: str) -> BackendChoice:
        asked.append(against)
        return BackendChoice("collective", "")

    monkeypatch.setattr(expert_parallel, "choose_backend", choose)
    mesh: Any = SimpleNamespace(config=ParallelConfig(), device=CUDA, ep_group=None)
    connect_experts(nn.ModuleList(layers), mesh, CommsConfig(backend), 4, torch.bfloat16, no_room)
    assert asked == [against]
