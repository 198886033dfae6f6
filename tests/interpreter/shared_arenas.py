"""Ranks that are processes of their own under the interpreter; the arenas that they write into lie in files."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from comms.symmetric_exchange import describe_tag
from comms.symmetric_memory import ArenaLayout, Exchange, register
from tests.distributed.harness import run_workers
from tests.interpreter.quick import hasten

# Some minutes of looking at a flag: whoever hangs is told with who did not come, before the pool's time is over.
POLLS, SECONDS = 2 * 10**5, 400
# A few rows: most pairs of ranks have several pieces.
PIECE_BYTES = 512


def run_interpreted(check: Callable[..., None], num_ranks: int, *args: Any) -> None:
    """`check(*args)` on every rank; the first failure is raised here with its traceback."""
    run_workers(_interpreted, num_ranks, check, *args, timeout=SECONDS)


def _interpreted(check: Callable[..., None], *args: Any) -> None:
    hasten()
    # What a kernel forgets to write stays NaN, or 255 in bytes.
    torch.use_deterministic_algorithms(True)
    with small_tiles():
        check(*args)


@contextmanager
def small_tiles() -> Iterator[None]:
    """Sizes that suit an interpreter: rows take several turns, and chunks of few tokens end between blocks of them."""
    turns: Any = {"MOVE_UNITS": 64, "CODED_NUMBERS": 256, "SIDE_WORDS": 64, "SUM_NUMBERS": 128, "SUM_TOKENS": 4}
    sizes = patch.multiple("comms.put_and_take", PLAN_TOKENS=2, PLAN_STRIP=2, **turns)
    with sizes, patch("moe.kernels.sort_pairs.BLOCK", 16):
        yield


def shared_exchange(
    folder: Path,
    layout: ArenaLayout,
    max_tokens: int,
    items_per_token: int = 1,
    group: dist.ProcessGroup | None = None,
) -> Exchange:
    """Arenas in files, flags zero and rows poisoned. Collective over the group; None: all processes."""
    global_ranks = tuple(dist.get_process_group_ranks(group))
    rank = dist.get_rank(group)
    own = torch.full((layout.num_bytes,), 255, dtype=torch.uint8)
    own[: layout.rows_at] = 0
    own.numpy().tofile(folder / f"arena.{global_ranks[rank]}")
    dist.barrier(group)
    arenas = [
        torch.from_file(str(folder / f"arena.{other}"), shared=True, size=layout.num_bytes, dtype=torch.uint8)
        for other in global_ranks
    ]
    return register(
        Exchange(
            name="shared",
            layout=layout,
            rank=rank,
            global_ranks=global_ranks,
            max_tokens=max_tokens,
            items_per_token=items_per_token,
            arena=arenas[rank],
            pointers=torch.tensor([arena.data_ptr() for arena in arenas]),
            state=torch.zeros(1, dtype=torch.int64),
            errors=torch.zeros(8, dtype=torch.int64),
            overflow=torch.zeros(6, dtype=torch.int32),
            limit=POLLS,
            piece_bytes=PIECE_BYTES,
            describe_tag=describe_tag,
            handle=arenas,
        )
    )
