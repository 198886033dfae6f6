"""When garbage is collected (trainer/garbage.py)."""

import gc
import weakref

import pytest

from trainer.garbage import collected_together


class Node:
    """In a cycle with itself: only the collector frees it."""

    def __init__(self) -> None:
        self.itself = self


def test_only_after_the_second_step_and_every_so_many() -> None:
    with collected_together(3) as garbage:
        assert not gc.isenabled()
        freed = []
        for _ in range(7):
            node = weakref.ref(Node())
            garbage.after_step()
            freed.append(node() is None)
        lasting = gc.get_freeze_count()
    assert freed == [False, True, True, False, False, True, False]
    assert lasting > 0 and gc.get_freeze_count() == 0 and gc.isenabled()


def test_zero_leaves_it_to_python() -> None:
    with collected_together(0) as garbage:
        for _ in range(3):
            garbage.after_step()
        assert gc.isenabled() and gc.get_freeze_count() == 0


def test_as_before_after_a_failure() -> None:
    with pytest.raises(RuntimeError, match="step"), collected_together(2):
        raise RuntimeError("step")
    assert gc.isenabled()
