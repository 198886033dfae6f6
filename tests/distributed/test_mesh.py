"""Who shares what with whom: the groups of a mesh, rank by rank."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from parallel.config import ParallelConfig
from parallel.mesh import build_mesh
from tests.distributed.harness import run_workers


def describe(config: ParallelConfig) -> dict[str, Any]:
    mesh = build_mesh(config, torch.device("cpu"))

    def ranks(device_mesh: Any, dim: int) -> list[int]:
        return dist.get_process_group_ranks(device_mesh.get_group(dim))

    return {
        "dp_shard": mesh.config.dp_shard,
        "batch": (mesh.batch_rank, mesh.batch_size),
        "dense": [ranks(mesh.dense, dim) for dim in range(mesh.dense.ndim)],
        "experts": [ranks(mesh.experts, dim) for dim in range(mesh.experts.ndim)],
        "ep": None if mesh.ep_group is None else dist.get_process_group_ranks(mesh.ep_group),
        "data": dist.get_process_group_ranks(mesh.data_group),
        "place": (mesh.rank, mesh.world_size),
    }


def test_pure_fsdp() -> None:
    for rank, mesh in enumerate(run_workers(describe, 4, ParallelConfig())):
        assert mesh == {
            "dp_shard": 4,
            "batch": (rank, 4),
            "dense": [[0, 1, 2, 3]],
            "experts": [[0, 1, 2, 3]],
            "ep": None,
            "data": [0, 1, 2, 3],
            "place": (rank, 4),
        }


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
