"""One lane between GPUs that map each other's memory: a buffer per rank, streams, and signals that say who may go on.

comms/peer_buffers.py says what travels in it, and how the signals are used.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from comms.shard_transport import MAX_PIECES, after

# A point of a stream, an event; None on CPUs, where everything is done at once.
Moment = Any
Made = TypeVar("Made")

# Shapes whose views are kept.
MOST_KEPT = 256
# Behind the channels of pieces.
_CREDIT = MAX_PIECES


class Handle(Protocol):
    """What is used of torch's symmetric memory."""

    def get_buffer(self, rank: int, sizes: Any, dtype: torch.dtype) -> Tensor:
        """A rank's buffer, as mapped here."""
        ...

    def put_signal(self, dst_rank: int, channel: int = 0, timeout_ms: int = 0) -> None:
        """0 -> 1, once it is 0."""
        ...

    def wait_signal(self, src_rank: int, channel: int = 0, timeout_ms: int = 0) -> None:
        """1 -> 0, once it is 1."""
        ...


class Streams(NamedTuple):
    """What runs beside the stream that computes; None (tests on CPUs): everything where it is issued."""

    copies: torch.cuda.Stream | None = None
    signals: torch.cuda.Stream | None = None


class Lane:
    """One buffer per rank, streams, and who waits for whom.

    Args:
        allocate: bytes -> the handle of a new symmetric buffer. Collective.
    """

    def __init__(
        self, rank: int, size: int, allocate: Callable[[int], Handle], streams: Streams, timeout_seconds: float
    ) -> None:
        self.rank, self.size, self.streams = rank, size, streams
        self.timeout_ms = max(int(timeout_seconds * 1000), 1)
        self._allocate = allocate
        self._handle: Handle | None = None
        self._num_bytes, self._used = 0, False
        # Of the last scatter: where in the buffer everyone's part was.
        self.layout: object = None
        self._kept: dict[object, Any] = {}

    def reserve(self, num_bytes: int) -> None:
        """Make room. Collective where it has to grow."""
        if num_bytes > self._num_bytes:
            # The old buffer goes once nobody uses it: allocating waits for that.
            self._kept.clear()
            self._handle, self._num_bytes, self._used = self._allocate(num_bytes), num_bytes, False

    @property
    def handle(self) -> Handle:
        """Of the present buffer."""
        assert self._handle is not None
        return self._handle

    def keep(self, key: object, make: Callable[[], Made]) -> Made:
        """What `make` gives, for as long as the buffer lasts: its views cost the host as much as launches."""
        if key not in self._kept:
            if len(self._kept) >= MOST_KEPT:
                self._kept.clear()
            self._kept[key] = make()
        return self._kept[key]

    def view(self, rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A rank's buffer as numbers of this shape."""

        def make() -> Tensor:
            # Whoever asks first may be in inference mode: training could not write to what is made there.
            with torch.inference_mode(False):
                return self.handle.get_buffer(rank, shape, dtype)

        return self.keep((rank, shape, dtype), make)

    def now(self) -> Moment:
        """What the current stream has been given so far."""
        stream = self._current()
        return None if stream is None else stream.record_event()

    def wait_for(self, moment: Moment) -> None:
        """What the current stream is given from here on runs after that."""
        stream = self._current()
        if stream is not None:
            stream.wait_event(moment)

    def on(self, stream: torch.cuda.Stream | None, then: Moment) -> AbstractContextManager[object]:
        """What is issued inside runs on one of `streams`, after `then`."""
        if stream is None:
            return nullcontext()
        stream.wait_event(then)
        return stream

    def _current(self) -> torch.cuda.Stream | None:
        # By number: to look the device up costs the host as much as a launch.
        copies = self.streams.copies
        return None if copies is None else torch.cuda.current_stream(copies.device_index)

    def take_credit(self, rank: int) -> None:
        """Wait, on the current stream, until a receiver has read what it was sent last time."""
        if self._used:
            self.handle.wait_signal(rank, _CREDIT, self.timeout_ms)

    def give_credits(self, then: Moment) -> None:
        """From that moment on everything that came has been read; the next use needs the others' word for the same.

        On the stream of signals: neither products nor copies wait for it.
        """
        with self.on(self.streams.signals, then):
            for rank in after(self.rank, self.size):
                self.handle.put_signal(rank, _CREDIT, self.timeout_ms)
            given = self.now()
        self._used = True
        # A graph ends where all of its streams meet.
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
            self.wait_for(given)

    def signal_piece(self, to: int, number: int) -> None:
        """Tell a peer that a piece for it is in its buffer, or in this one for it to pull."""
        self.handle.put_signal(to, number, self.timeout_ms)

    def wait_piece(self, source: int, number: int) -> None:
        """Wait, on the current stream, for a piece of a peer."""
        self.handle.wait_signal(source, number, self.timeout_ms)
