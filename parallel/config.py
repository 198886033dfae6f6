"""Settings of the parallel layout and of what is applied around it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass
class ParallelConfig:
    """Sizes of the mesh axes; their product must be the number of processes."""

    dp_replicate: int = 1
    # -1 means: all ranks that the other axes leave.
    dp_shard: int = -1
    cp: int = 1
    # The part of cp done by all-to-all over heads; the rest is a ring.
    ulysses: int = 1
    tp: int = 1
    # Experts are spread over ep ranks, borrowed from dp_shard x cp (x tp); -1 means as many as divide the experts.
    ep: int = 1
    etp: int = 1
    # none | native | inductor
    async_tp: str = "none"
    # none | selective | full
    activation_checkpoint: str = "none"
    compile: bool = False
    # Free a block's gathered weights between its forward and its backward (less memory, one more all-gather).
    reshard_after_forward: bool = True
    # A collective that takes longer than this brings the run down with the waiting rank's name.
    timeout_seconds: int = 600


class LayoutError(ValueError):
    """Sizes that do not fit each other.

    Args:
        reason: the settings, their values and what they break.
        hint: the nearest values as far as these settings alone decide.
        axes: settings of `parallel` that could be changed.
        multiples: other settings that could be changed, and what they must be a multiple of.
        processes: as many as these sizes multiply to, where the run has another number; 0: that is not what is wrong.
        more: a multiple of `processes` would do as well.
    """

    def __init__(
        self,
        reason: str,
        hint: str = "",
        axes: Sequence[str] = (),
        multiples: Mapping[str, int] | None = None,
        processes: int = 0,
        more: bool = False,
    ) -> None:
        super().__init__(f"{reason}; {hint}." if hint else reason)
        self.reason, self.hint = reason, hint
        self.axes, self.multiples = tuple(axes), dict(multiples or {})
        self.processes, self.more = processes, more


def divisors(total: int) -> list[int]:
    """Every divisor, in rising order."""
    return [d for d in range(1, total + 1) if total % d == 0]


def nearest_divisors(total: int, value: int) -> list[int]:
    """The divisors of `total` next to `value`: the largest not above it and the smallest not below it."""
    below = [d for d in divisors(total) if d <= value][-1:]
    above = [d for d in divisors(total) if d >= value][:1]
    return sorted({*below, *above})


def either(values: Sequence[int]) -> str:
    """`4`, or `4 or 8`."""
    return " or ".join(str(value) for value in values)
