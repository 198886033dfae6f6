"""Which dim of a stack of experts FSDP splits; what it computes is tested in tests/distributed/test_parity.py."""

import pytest

from parallel.sizes import expert_shard_dim


@pytest.mark.parametrize(
    ("shape", "shard_size", "dim"),
    [
        ((8, 2, 768, 2048), 4, 0),  # whole experts
        ((2, 2, 768, 2048), 2, 0),
        ((1, 2, 768, 2048), 2, 1),  # gate to one rank, up to the other
        ((2, 2, 768, 2048), 4, 2),  # a dim of two is too short for four ranks
        ((2, 2048, 768), 4, 1),
        ((3, 2, 770, 2048), 4, 3),
    ],
)
def test_the_first_dim_that_divides(shape: tuple[int, ...], shard_size: int, dim: int) -> None:
    assert expert_shard_dim(shape, shard_size) == dim


def test_no_dim_divides() -> None:
    with pytest.raises(ValueError, match=r"128 ranks.*raise parallel\.ep or parallel\.dp_replicate"):
        expert_shard_dim((4, 2880, 2880), 128)
