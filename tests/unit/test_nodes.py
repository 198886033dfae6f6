"""Which ranks share a node: what comms.ranks_per_node or the hosts say, and what is refused."""

import pytest

from comms.nodes import split_into_nodes

A, B, C = "gpu-a", "gpu-b", "gpu-c"


@pytest.mark.parametrize(
    ("hosts", "ranks_per_node", "reason"),
    [
        ([A] * 4 + [B] * 4, 4, "two levels: 2 nodes x 4 ranks, as their hosts say"),
        ([A, A, B, B, C, C], 2, "two levels: 3 nodes x 2 ranks, as their hosts say"),
        # One node, and one rank per node: nothing is won by a second level.
        ([A] * 8, 8, ""),
        ([A, B, C], 3, ""),
        # Two levels would need equal nodes of consecutive ranks.
        ([A, A, A, B], 4, "one level: two need hosts with equally many consecutive ranks, and there are gpu-a x 3"),
        ([A, A, B, B, A, A], 6, "one level: two need hosts with equally many consecutive ranks, and there are"),
        ([A, B, A, B], 4, "one level"),
    ],
)
def test_hosts_are_nodes(hosts: list[str], ranks_per_node: int, reason: str) -> None:
    split = split_into_nodes(None, hosts)
    assert split.ranks_per_node == ranks_per_node
    assert split.reason.startswith(reason) and bool(split.reason) == bool(reason)


@pytest.mark.parametrize(
    ("ranks_per_node", "hosts", "levels"),
    [
        (2, [A] * 4, "2 nodes x 2 ranks"),
        # Islands of links in a host, and a rack of hosts with links between them.
        (2, [A] * 4 + [B] * 4, "4 nodes x 2 ranks"),
        (4, [A, A, B, B, C, C, "gpu-d", "gpu-d"], "2 nodes x 4 ranks"),
        (8, [A] * 8, None),
        (1, [A, B, A, B], None),
    ],
)
def test_a_number_is_taken_at_its_word(ranks_per_node: int, hosts: list[str], levels: str | None) -> None:
    split = split_into_nodes(ranks_per_node, hosts)
    if levels is None:
        assert split == (len(hosts), "")
    else:
        assert split == (ranks_per_node, f"two levels: {levels}, as comms.ranks_per_node says")


@pytest.mark.parametrize("ranks_per_node", [0, 3, 16])
def test_a_number_that_does_not_divide_is_refused(ranks_per_node: int) -> None:
    with pytest.raises(ValueError, match=r"does not divide the 8 ranks of parallel.ep; legal: 1, 2, 4, 8, or null"):
        split_into_nodes(ranks_per_node, [A] * 8)


def test_nodes_of_ranks_that_do_not_follow_each_other_are_refused() -> None:
    with pytest.raises(ValueError, match=r"host gpu-a has ranks of node 0 and of node 1, and the former spans 2 hosts"):
        split_into_nodes(2, [A, B, A, B])
    with pytest.raises(ValueError, match=r"comms.ranks_per_node=2: host gpu-a .* number ranks host by host"):
        split_into_nodes(2, [A, A, A, B, B, B])
