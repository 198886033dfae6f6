"""Order, errors and the end of the background thread."""

import threading
import time

import pytest

from trainer.prefetch import Prefetcher


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "prefetch"]


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_values_come_in_order(depth: int) -> None:
    prefetcher = Prefetcher(lambda i: i * i, start=3, depth=depth)
    assert [prefetcher.get() for _ in range(20)] == [i * i for i in range(3, 23)]
    prefetcher.close()
    assert not threads()


@pytest.mark.parametrize("depth", [1, 3])
def test_no_more_is_prepared_than_asked_for(depth: int) -> None:
    produced: list[int] = []
    prefetcher = Prefetcher(produced.append, start=0, depth=depth)
    time.sleep(0.1)
    # One more waits in the thread's hand.
    assert len(produced) == depth + 1
    prefetcher.close()


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_error_is_raised_after_the_values_before_it_and_again(depth: int) -> None:
    def produce(index: int) -> int:
        if index == 2:
            raise ValueError("file gone")
        return index

    prefetcher = Prefetcher(produce, start=0, depth=depth)
    assert [prefetcher.get(), prefetcher.get()] == [0, 1]
    for _ in range(2):
        with pytest.raises(ValueError, match="file gone"):
            prefetcher.get()
    prefetcher.close()
    assert not threads()


@pytest.mark.parametrize("depth", [0, 2])
def test_closing(depth: int) -> None:
    prefetcher = Prefetcher(lambda i: i, start=0, depth=depth)
    prefetcher.close()
    prefetcher.close()
    assert not threads()
    with pytest.raises(RuntimeError, match="closed"):
        prefetcher.get()
