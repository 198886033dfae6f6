"""Agreement between ranks about things that happen on the host: did everybody's disk write succeed?

Work that may fail on one rank only (a full disk, a missing file) must not leave the others waiting in a collective.
So errors are caught where they happen, told to rank 0, and raised on every rank together.

A rank may also be gone (killed, out of memory) or hang. Each rank talks to rank 0 alone, which therefore knows whose
word it misses, and tells the others; nobody waits longer than the timeout.
"""

import pickle
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

T = TypeVar("T")
# What went wrong, if anything did: the kind of exception, and its text.
Verdict = tuple[type[Exception] | None, str]
_SHOWN = 8


class LostRankError(RuntimeError):
    """A rank is gone, or has not answered in time; the message says which."""


class Peers:
    """All ranks of the run, on a gloo group of their own: usable from a thread while training uses the others.

    Without torch.distributed there is one rank, and every method is a plain call. All methods are collective, and
    raise LostRankError when a rank no longer answers; the group is of no use then.
    """

    def __init__(self, timeout_seconds: float = 1800) -> None:
        self.timeout_seconds = timeout_seconds
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
        values = self._collect(value)
        kind, text = self._tell((None, ""))
        if kind is not None:
            raise _rebuilt(kind, text)
        return values

    def from_rank0(self, make: Callable[[], T]) -> T:
        """Run `make` on rank 0 and give its result to every rank, or its error."""
        box: list[T | None] = [None]
        with self.together(doers=1):
            if self.rank == 0:
                box[0] = make()
        if self.group is not None:
            try:
                # Not one by one as errors are: a folder's list of tensors may be long.
                dist.broadcast_object_list(box, src=0, group=self.group)
            except RuntimeError as error:
                raise LostRankError(f"rank 0's answer did not reach every rank: {error}") from error
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

    def _failure(self, error: Exception | None, doers: int) -> Verdict:
        mine = None if error is None else (type(error), str(error))
        told = {rank: failure for rank, failure in enumerate(self._collect(mine)) if failure is not None}
        kind = next(iter(told.values()))[0] if told else None
        return self._tell((kind, _summary({rank: text for rank, (_, text) in told.items()}, doers)))

    def _collect(self, value: T) -> list[T]:
        """`gather`, after which every rank must `_tell`."""
        if self.rank != 0:
            self._send(value, 0)
            return []
        values, lost, end = [value], {}, time.monotonic() + self.timeout_seconds
        for rank in range(1, self.size):
            try:
                values.append(self._receive(rank))
            except LostRankError as error:
                lost[rank] = str(error)
                if time.monotonic() >= end:
                    break  # gloo hangs up on everybody after a timeout
        if lost:
            text = _some(list(lost.values()), "; ")
            for rank in [rank for rank in range(1, self.size) if rank not in lost]:
                with suppress(LostRankError):
                    self._send((LostRankError, text), rank)
            raise LostRankError(text)
        return values

    def _tell(self, verdict: Verdict) -> Verdict:
        """Rank 0's verdict, on every rank."""
        if self.rank != 0:
            return self._receive(0)
        for rank in range(1, self.size):
            self._send(verdict, rank)
        return verdict

    def _send(self, value: Any, rank: int) -> None:
        data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        with self._talking_to(rank):
            dist.send(torch.tensor([data.numel()], device="cpu"), rank, group=self.group)
            dist.send(data, rank, group=self.group)

    def _receive(self, rank: int) -> Any:
        size = torch.empty(1, dtype=torch.int64, device="cpu")
        with self._talking_to(rank):
            dist.recv(size, rank, group=self.group)
            data = torch.empty(int(size), dtype=torch.uint8, device="cpu")
            dist.recv(data, rank, group=self.group)
        return pickle.loads(data.numpy().tobytes())

    @contextmanager
    def _talking_to(self, rank: int) -> Generator[None, None, None]:
        try:
            yield
        except RuntimeError as error:
            text = (
                f"rank {rank} is gone, or gave no answer for {self.timeout_seconds:g} s; see its own output ({error})"
            )
            raise LostRankError(text) from error

    def close(self) -> None:
        """Give the group up; later calls see one rank."""
        if self.group is not None and dist.is_initialized():
            dist.destroy_process_group(self.group)
        self.group = None


def _summary(texts: dict[int, str], doers: int) -> str:
    """Each different text once, after the ranks that it came from; alone if everybody failed of the same."""
    if len(set(texts.values())) == 1 and len(texts) == doers:
        return next(iter(texts.values()))
    return by_rank(texts)


def by_rank(texts: Mapping[int, str]) -> str:
    """Each different text once, after the ranks that it came from."""
    ranks: dict[str, list[int]] = {}
    for rank, text in texts.items():
        ranks.setdefault(text, []).append(rank)
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
