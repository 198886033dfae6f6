"""Groups that are there for a time: in which order they end."""

from unittest.mock import patch

import torch
import torch.distributed as dist

from parallel.process_group import process_group, temporary_groups


def test_groups_end_in_the_order_of_their_making() -> None:
    """NCCL's ranks end a group together, so all must end theirs in one order; addresses are another on each rank."""
    ended: list[object] = []
    end = dist.destroy_process_group

    def note(group: "dist.ProcessGroup | None" = None) -> None:
        ended.append(group)
        end(group)

    with patch.dict("os.environ"), process_group(60):
        kept = dist.new_group([0])
        with patch("torch.distributed.destroy_process_group", note), temporary_groups():
            made = [dist.new_group([0]) for _ in range(12)]
        assert ended == made
        # What was there before still works.
        dist.all_reduce(torch.ones(1), group=kept)
    assert not dist.is_initialized()
