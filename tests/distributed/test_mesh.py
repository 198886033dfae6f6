"""Who shares what with whom: the groups of a mesh, rank by rank."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _resolve_process_group

from parallel.config import ParallelConfig
from parallel.mesh import build_mesh
from tests.distributed.harness import run_workers


def describe(config: ParallelConfig) -> dict[str, Any]:
    """Ranks of every group that this rank is in, None for groups that are not there."""
    mesh = build_mesh(config, torch.device("cpu"))

    def of_group(group: Any) -> list[int] | None:
        return None if group is None else dist.get_process_group_ranks(group)

    def of_mesh(device_mesh: DeviceMesh | None) -> list[list[int] | None] | None:
        return (
            None if device_mesh is None else [of_group(device_mesh.get_group(dim)) for dim in range(device_mesh.ndim)]
        )

    split = mesh.sequence
    return {
        "dp_shard": mesh.config.dp_shard,
        "place": (mesh.rank, mesh.world_size),
        "batch": (mesh.batch_rank, mesh.batch_size),
        "dense": of_mesh(mesh.dense),
        "experts": of_mesh(mesh.experts),
        "tp": of_mesh(mesh.tp),
        "ep": of_group(mesh.ep_group),
        "etp": of_mesh(mesh.etp),
        "expert_split": of_mesh(mesh.expert_split),
        "sequence": None if split is None else (split.ring, split.ulysses, split.tp, split.rank),
        "sharers": None if split is None else of_group(_resolve_process_group(split.group_name)),
        "ring": of_group(mesh.ring_group),
        "ulysses": of_group(mesh.ulysses_group),
        "batch_group": of_group(mesh.batch_group),
        "data": of_group(mesh.data_group),
        "token": of_group(mesh.token_group),
    }


def test_pure_fsdp() -> None:
    everybody = [0, 1, 2, 3]
    absent = dict.fromkeys(("tp", "ep", "etp", "expert_split", "sequence", "sharers", "ring", "ulysses"))
    for rank, mesh in enumerate(run_workers(describe, 4, ParallelConfig())):
        assert mesh == {
            **absent,
            "dp_shard": 4,
            "place": (rank, 4),
            "batch": (rank, 4),
            "dense": [everybody],
            "experts": [everybody],
            "batch_group": everybody,
            "data": everybody,
            "token": everybody,
        }


def test_one_process_has_no_group_to_speak_to() -> None:
    (mesh,) = run_workers(describe, 1, ParallelConfig())
    groups = ("tp", "ep", "etp", "expert_split", "sequence", "ring", "ulysses", "batch_group", "data", "token")
    assert [mesh[name] for name in groups] == [None] * len(groups)
    # FSDP wraps that one too: it keeps fp32 masters beside bf16 compute.
    assert mesh["dense"] == mesh["experts"] == [[0]]


def test_tp_neighbours_share_samples_and_not_dense_shards() -> None:
    for rank, mesh in enumerate(run_workers(describe, 4, ParallelConfig(tp=2))):
        pair, twins = [rank // 2 * 2, rank // 2 * 2 + 1], [rank % 2, rank % 2 + 2]
        assert mesh["dp_shard"] == 2
        assert mesh["tp"] == [pair] and mesh["sharers"] == pair
        assert mesh["sequence"] == (1, 1, 2, rank % 2)
        assert mesh["batch"] == (rank // 2, 2)
        # Their loss is the same, so it is summed over those that have other samples; their tokens differ.
        assert mesh["batch_group"] == mesh["data"] == twins
        assert mesh["token"] == [0, 1, 2, 3]
        assert mesh["dense"] == [twins]
        # Whole experts are sharded over the tp ranks too.
        assert mesh["experts"] == [[0, 1, 2, 3]]
        assert (mesh["ep"], mesh["etp"], mesh["expert_split"], mesh["ring"]) == (None, None, None, None)


def test_ep_borrows_tp_ranks() -> None:
    for rank, mesh in enumerate(run_workers(describe, 4, ParallelConfig(tp=2, ep=4))):
        assert mesh["ep"] == [0, 1, 2, 3] and mesh["expert_split"] == [[0, 1, 2, 3]]
        assert mesh["experts"] == [[rank]]
        assert mesh["tp"] == [[rank // 2 * 2, rank // 2 * 2 + 1]]


def test_etp_cuts_experts_over_the_tp_ranks() -> None:
    for rank, mesh in enumerate(run_workers(describe, 4, ParallelConfig(tp=2, etp=2, ep=2))):
        pair, twins = [rank // 2 * 2, rank // 2 * 2 + 1], [rank % 2, rank % 2 + 2]
        assert mesh["tp"] == mesh["etp"] == [pair]
        assert mesh["ep"] == twins
        assert mesh["expert_split"] == [twins, pair]
        assert mesh["experts"] == [[rank]]


def test_cp_ranks_share_samples_and_dense_shards() -> None:
    for rank, mesh in enumerate(run_workers(describe, 4, ParallelConfig(cp=2))):
        pair = [rank // 2 * 2, rank // 2 * 2 + 1]
        assert mesh["dp_shard"] == 2
        assert mesh["sequence"] == (2, 1, 1, rank % 2) and mesh["sharers"] == pair
        assert mesh["ring"] == pair and mesh["ulysses"] is None and mesh["tp"] is None
        assert mesh["batch"] == (rank // 2, 2) and mesh["batch_group"] == [rank % 2, rank % 2 + 2]
        assert mesh["dense"] == mesh["experts"] == [[0, 1, 2, 3]]
        # Each has a part of the loss.
        assert mesh["data"] == mesh["token"] == [0, 1, 2, 3]


def test_ring_and_ulysses_divide_cp_between_them() -> None:
    for rank, mesh in enumerate(run_workers(describe, 4, ParallelConfig(cp=4, ulysses=2, ep=2))):
        assert mesh["sequence"] == (2, 2, 1, rank) and mesh["sharers"] == [0, 1, 2, 3]
        assert mesh["ulysses"] == [rank // 2 * 2, rank // 2 * 2 + 1]
        assert mesh["ring"] == [rank % 2, rank % 2 + 2]
        assert mesh["batch"] == (0, 1) and mesh["batch_group"] is None
        assert mesh["ep"] == [rank // 2 * 2, rank // 2 * 2 + 1]


def test_tp_counts_fastest() -> None:
    for rank, mesh in enumerate(run_workers(describe, 4, ParallelConfig(cp=2, tp=2))):
        assert mesh["tp"] == [[rank // 2 * 2, rank // 2 * 2 + 1]]
        assert mesh["ring"] == mesh["data"] == [rank % 2, rank % 2 + 2]
        assert mesh["sequence"] == (2, 1, 2, rank)
        assert mesh["batch_group"] is None and mesh["token"] == [0, 1, 2, 3]
        assert mesh["dense"] == [[rank % 2, rank % 2 + 2]]


def test_ep_borrows_its_ranks_from_dp_shard() -> None:
    for rank, mesh in enumerate(run_workers(describe, 4, ParallelConfig(ep=2))):
        assert mesh["dense"] == [[0, 1, 2, 3]]
        # Neighbours split the experts; ranks with the same experts share those out by FSDP.
        assert mesh["ep"] == [rank // 2 * 2, rank // 2 * 2 + 1]
        assert mesh["experts"] == [[rank % 2, rank % 2 + 2]]
        assert mesh["batch"] == (rank, 4)


def test_hsdp_with_ep() -> None:
    for rank, mesh in enumerate(run_workers(describe, 4, ParallelConfig(dp_replicate=2, dp_shard=2, ep=2))):
        island = [rank // 2 * 2, rank // 2 * 2 + 1]
        assert mesh["ep"] == island
        assert mesh["dense"] == [[rank % 2, rank % 2 + 2], island]
        assert mesh["experts"] == [[rank % 2, rank % 2 + 2], [rank]]
        assert mesh["batch"] == (rank, 4)
        assert mesh["data"] == [0, 1, 2, 3]


def test_sizes_that_do_not_fit_are_refused_on_every_rank_before_any_group_exists() -> None:
    for message in run_workers(refusal, 2, ParallelConfig(dp_shard=3)):
        assert "dp_shard=3" in message and "2 processes" in message and "dp_shard=2" in message


def refusal(config: ParallelConfig) -> str:
    with pytest.raises(ValueError) as caught:
        build_mesh(config, torch.device("cpu"))
    return str(caught.value)
