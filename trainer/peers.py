"""Agreement between ranks about things that happen on the host: did everybody's disk write succeed?

Work that may fail on one rank only (a full disk, a missing file) must not leave the others waiting in a collective.
So errors are caught where they happen, told to rank 0, and raised on every rank together.
"""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from datetime import timedelta
from typing import TypeVar, cast

import torch.distributed as dist

T = TypeVar("T")
_SHOWN = 8


class Peers:
    """All ranks of the run, on a gloo group of their own: usable from a thread while training uses the others.

    Without torch.distributed there is one rank, and every method is a plain call. All methods are collective.
    """

    def __init__(self, timeout_seconds: float = 1800) -> None:
        self.group: dist.ProcessGroup | None = None
        self.rank, self.size = 0, 1
        if dist.is_available() and dist.is_initialized():
            self.rank, self.size = dist.get_rank(), dist.get_world_size()
            group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_seconds))
            self.group = cast(dist.ProcessGroup, group)

    def gather(self, value: T) -> list[T]:
        """Every rank's value in rank order, on rank 0; an empty list elsewhere."""
        if self.group is None:
            return [value]
        values: list[T] | None = cast(list[T], [None] * self.size) if self.rank == 0 else None
        dist.gather_object(value, values, dst=0, group=self.group)
        return values or []

    def from_rank0(self, make: Callable[[], T]) -> T:
        """Run `make` on rank 0 and give its result to every rank, or its error."""
        box: list[T | None] = [None]
        with self.together(doers=1):
            if self.rank == 0:
                box[0] = make()
        if self.group is not None:
            dist.broadcast_object_list(box, src=0, group=self.group)
        return cast(T, box[0])

    @contextmanager
    def together(self, doers: int | None = None) -> Generator[None, None, None]:
        """Run a block without collectives on every rank; if it raises on any, raise on all.

        Every rank raises the first failed rank's kind of exception; the message tells of all that failed.

        Args:
            doers: ranks that do anything in the block, when these are not all.
        """
        error: Exception | None = None
        try:
            yield
        except Exception as caught:
            error = caught
        if self.group is None:
            if error is not None:
                raise error
            return
        kind, text = self._failure(error, doers or self.size)
        if kind is not None:
            raise _rebuilt(kind, text) from error

    def _failure(self, error: Exception | None, doers: int) -> tuple[type[Exception] | None, str]:
        mine = None if error is None else (type(error), str(error))
        told = {rank: failure for rank, failure in enumerate(self.gather(mine)) if failure is not None}
        kind = next(iter(told.values()))[0] if told else None
        box = [(kind, _summary({rank: text for rank, (_, text) in told.items()}, doers))]
        dist.broadcast_object_list(box, src=0, group=self.group)
        return box[0]

    def close(self) -> None:
        """Give the group up; later calls see one rank."""
        if self.group is not None and dist.is_initialized():
            dist.destroy_process_group(self.group)
        self.group = None


def _summary(texts: dict[int, str], doers: int) -> str:
    """Each different text once, after the ranks that it came from; alone if everybody failed of the same."""
    ranks: dict[str, list[int]] = {}
    for rank, text in texts.items():
        ranks.setdefault(text, []).append(rank)
    if len(ranks) == 1 and len(texts) == doers:
        return next(iter(ranks))
    parts = [f"rank {_some([str(rank) for rank in found])}: {text}" for text, found in ranks.items()]
    return _some(parts, "; ")


def _some(words: list[str], separator: str = ", ") -> str:
    more = [f"and {len(words) - _SHOWN} more"] if len(words) > _SHOWN else []
    return separator.join(words[:_SHOWN] + more)


def _rebuilt(kind: type[Exception], text: str) -> Exception:
    try:
        return kind(text)
    except TypeError:
        return RuntimeError(text)
