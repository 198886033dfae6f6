"""Python's garbage collector, held back to the boundaries of steps where all ranks collect at once.

Left to itself it starts on some rank in the middle of some step, and goes over all objects that torch, the model and
compiled code are made of: 0.1 s and more, in which every other rank waits in a collective for that one.
"""

import gc
from collections.abc import Generator
from contextlib import contextmanager

# More steps than a run has.
NEVER = 10**9


@contextmanager
def collected_together(every: int) -> Generator["Garbage"]:
    """Collect only where `Garbage.after_step` says so; as before afterwards. 0: leave it to Python."""
    was_enabled = gc.isenabled()
    if every:
        gc.disable()
    try:
        yield Garbage(every)
    finally:
        if every:
            gc.unfreeze()
        if was_enabled:
            gc.enable()


class Garbage:
    """Collects after the second step and then after every so many."""

    def __init__(self, every: int) -> None:
        self.every = every
        self.steps = 0

    def after_step(self) -> None:
        """Collect if it is time. Every rank calls it at the same steps."""
        if not self.every:
            return
        self.steps += 1
        if self.steps == 2:
            # All that lasts has been made: later collections need not look at it.
            gc.collect()
            gc.freeze()
        elif self.steps % self.every == 0:
            gc.collect()
