"""Which ranks of a group share a node, and the two groups through which rows then travel: across nodes, inside one.

Between nodes the network is many times slower than the links inside one. So a row crosses once to each node that needs
it, to the rank there with the sender's local index, and that rank passes it on; sums come back the same way.

    group of 6, 3 ranks per node:   inside {0 1 2} {3 4 5},   across {0 3} {1 4} {2 5}
"""

import datetime
import os
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import torch.distributed as dist


class NodeSplit(NamedTuple):
    """How a group is divided into nodes, and why. One level where all its ranks are one node."""

    ranks_per_node: int
    reason: str


@dataclass(frozen=True)
class NodeGroups:
    """The two levels of a group, seen from one of its ranks."""

    # The ranks with this rank's local index, by node.
    across: dist.ProcessGroup
    # The ranks of this rank's node.
    inside: dist.ProcessGroup

    @property
    def num_nodes(self) -> int:
        """Nodes of the group."""
        return self.across.size()

    @property
    def ranks_per_node(self) -> int:
        """Ranks of a node."""
        return self.inside.size()


def split_into_nodes(ranks_per_node: int | None, hosts: list[str]) -> NodeSplit:
    """Divide a group into nodes of consecutive ranks.

    Args:
        ranks_per_node: what comms.ranks_per_node says; None: each host is a node.
        hosts: of each rank of the group.

    Raises:
        ValueError: a number that does not divide the group, or nodes that cut hosts in pieces.
    """
    size = len(hosts)
    if ranks_per_node is not None:
        _check_nodes(ranks_per_node, hosts)
        num_nodes = size // ranks_per_node
        if num_nodes == 1 or ranks_per_node == 1:
            return NodeSplit(size, "")
        return NodeSplit(ranks_per_node, f"{_levels(num_nodes, ranks_per_node)}, as comms.ranks_per_node says")
    runs = [len(list(run)) for _, run in groupby(hosts)]
    if len(set(hosts)) in (1, size):
        return NodeSplit(size, "")
    if len(runs) > len(set(hosts)) or len(set(runs)) > 1:
        shown = " ".join(f"{host} x {len(list(run))}" for host, run in groupby(hosts))
        return NodeSplit(size, f"one level: two need hosts with equally many consecutive ranks, and there are {shown}")
    return NodeSplit(runs[0], f"{_levels(len(runs), runs[0])}, as their hosts say")


def _levels(num_nodes: int, ranks_per_node: int) -> str:
    return f"two levels: {num_nodes} nodes x {ranks_per_node} ranks"


def _check_nodes(ranks_per_node: int, hosts: list[str]) -> None:
    size = len(hosts)
    if ranks_per_node < 1 or size % ranks_per_node:
        legal = [number for number in range(1, size + 1) if size % number == 0]
        raise ValueError(
            f"comms.ranks_per_node={ranks_per_node} does not divide the {size} ranks of parallel.ep; legal: "
            f"{', '.join(map(str, legal))}, or null for what the hosts say"
        )
    # A host may have several nodes (islands of links), and a node several hosts (a rack with links between them).
    nodes = [set(hosts[start : start + ranks_per_node]) for start in range(0, size, ranks_per_node)]
    for number, node in enumerate(nodes):
        for other, others in enumerate(nodes):
            shared = node & others
            if number != other and len(node) > 1 and shared:
                raise ValueError(
                    f"comms.ranks_per_node={ranks_per_node}: host {min(shared)} has ranks of node {number} and of node "
                    f"{other}, and the former spans {len(node)} hosts; the ranks of a node must follow each other in "
                    "parallel.ep: number ranks host by host, or set comms.ranks_per_node=null"
                )


def hosts_of(group: dist.ProcessGroup) -> list[str]:
    """The host of each rank of a group. Collective over it."""
    hosts = [""] * group.size()
    dist.all_gather_object(hosts, os.uname().nodename, group=group)  # pyright: ignore[reportUnknownMemberType]
    return hosts


def make_node_groups(group: dist.ProcessGroup, ranks_per_node: int | None, timeout_seconds: float) -> NodeGroups | None:
    """Make the groups of this rank's node and of its peers in other nodes. Collective over all processes.

    Args:
        group: one of several that together hold every process.
        ranks_per_node: None: this group has one level, and so has the result.
    """
    # Every process must take part in making every group, and they may differ.
    all_groups: list[tuple[list[int], int | None]] = [([], None)] * dist.get_world_size()
    dist.all_gather_object(all_groups, (dist.get_process_group_ranks(group), ranks_per_node))  # pyright: ignore
    inside: list[list[int]] = []
    across: list[list[int]] = []
    for rank, (ranks, size) in enumerate(all_groups):
        if size is not None and rank == ranks[0]:
            inside += [ranks[first : first + size] for first in range(0, len(ranks), size)]
            across += [ranks[local::size] for local in range(size)]
    mine = [_my_group(lists, timeout_seconds) for lists in (across, inside)] if across else []
    return None if ranks_per_node is None else NodeGroups(*mine)


def _my_group(lists: list[list[int]], timeout_seconds: float) -> dist.ProcessGroup:
    timeout = datetime.timedelta(seconds=timeout_seconds)
    mine, _ = dist.new_subgroups_by_enumeration(lists, timeout=timeout)  # pyright: ignore[reportUnknownMemberType]
    # A process outside all of them gets nothing, and asks for nothing.
    return mine  # pyright: ignore
