"""Every rank's end of an exchange in one process, on the CPU: the kernels write into each other's arenas as on GPUs."""

from collections.abc import Callable

import torch

from comms.symmetric_memory import ArenaLayout, Exchange, register


def simulated_exchanges(
    layout: ArenaLayout,
    max_tokens: int,
    limit: int = 10,
    describe_tag: Callable[[int], str] = str,
    piece_bytes: int | None = None,
) -> list[Exchange]:
    """One exchange per rank; arenas are poisoned with NaN."""
    arenas = [torch.full((layout.num_bytes,), 255, dtype=torch.uint8) for _ in range(layout.num_ranks)]
    for arena in arenas:
        arena[: layout.rows_at].zero_()
    pointers = torch.tensor([arena.data_ptr() for arena in arenas], dtype=torch.int64)
    ranks = tuple(range(layout.num_ranks))
    return [
        register(
            Exchange(
                name=f"simulated_{rank}",
                layout=layout,
                rank=rank,
                global_ranks=ranks,
                max_tokens=max_tokens,
                arena=arena,
                pointers=pointers,
                state=torch.zeros(1, dtype=torch.int64),
                errors=torch.zeros(8, dtype=torch.int64),
                overflow=torch.zeros(6, dtype=torch.int32),
                limit=limit,
                piece_bytes=piece_bytes,
                describe_tag=describe_tag,
                handle=arenas,
            )
        )
        for rank, arena in enumerate(arenas)
    ]
