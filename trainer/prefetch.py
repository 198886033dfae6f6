"""Values prepared ahead of time in one background thread."""

import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

Value = TypeVar("Value")


class Prefetcher(Generic[Value]):
    """Calls produce(start), produce(start + 1), ... in a thread and hands the results out in that order.

    depth: finished values kept waiting; 0 means no thread, each value is produced when asked for. An error of `produce`
    is raised by `get` once the values before it are taken, and by every later `get`."""

    def __init__(self, produce: Callable[[int], Value], start: int, depth: int) -> None:
        self._produce = produce
        self._next = start
        self._depth = depth
        self._ready: deque[Value] = deque()
        self._error: BaseException | None = None
        self._closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="prefetch", daemon=True) if depth > 0 else None
        if self._thread is not None:
            self._thread.start()

    def get(self) -> Value:
        """The next value; waits for it if need be. Raises what `produce` raised, RuntimeError after close()."""
        if self._thread is None:
            return self._get_now()
        with self._changed:
            self._changed.wait_for(lambda: self._ready or self._error is not None or self._closed)
            if self._closed:
                raise RuntimeError("the prefetcher is closed")
            if self._ready:
                value = self._ready.popleft()
                self._changed.notify_all()
                return value
        assert self._error is not None
        raise self._error

    def close(self) -> None:
        """Stop and join the thread; may be called again."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    def _get_now(self) -> Value:
        if self._closed:
            raise RuntimeError("the prefetcher is closed")
        value = self._produce(self._next)
        self._next += 1
        return value

    def _run(self) -> None:
        try:
            while True:
                value = self._produce(self._next)
                self._next += 1
                with self._changed:
                    self._changed.wait_for(lambda: self._closed or len(self._ready) < self._depth)
                    if self._closed:
                        return
                    self._ready.append(value)
                    self._changed.notify_all()
        except BaseException as error:  # handed to the caller of get()
            with self._changed:
                self._error = error
                self._changed.notify_all()
