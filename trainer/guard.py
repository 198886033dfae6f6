"""What ends a run early, decided alike on every rank.

    StopSignal        SIGTERM or SIGUSR1 on any rank -> all ranks stop at the same step boundary and can save
    NonFinitePolicy   a loss or gradient that is no number -> stop, or leave the update out
    RoomCheck         rows or pairs that found no room     -> the update is left out; stop, one step later

A rank that hangs is brought down by the process group: a collective that takes longer than parallel.timeout_seconds
raises (gloo) or aborts the process (NCCL), with the operation and the rank in its message.
"""

import math
import signal
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from comms.symmetric_memory import exchanges, overflow_flag
from trainer.config import GuardConfig
from trainer.peers import Peers

T = TypeVar("T")

# In rising order of weight: when ranks got different signals, the last one counts.
SIGNALS = (signal.SIGUSR1, signal.SIGTERM)
# What `agree` answers when a rank says that something failed; it outweighs every signal.
FAILED = "FAILED"


class Stopped(Exception):
    """A stop signal came in the middle of what leaves nothing to go on with; the text is the signal's name."""


class StopSignal:
    """Remembers SIGTERM and SIGUSR1. Made on every rank, in the main thread; installs the handlers at once.

    The handlers only set a flag: what they interrupt (a collective, a file being written) goes on.
    """

    def __init__(self, device: torch.device) -> None:
        self.flag = 0
        self._device = device
        self._previous = {number: signal.signal(number, self._remember) for number in SIGNALS}

    def _remember(self, number: int, _: FrameType | None) -> None:
        self.flag = max(self.flag, 1 + SIGNALS.index(signal.Signals(number)))

    def agree(self, failed: bool = False) -> str | None:
        """The signal that any rank got, by name (SIGTERM, SIGUSR1), or None. The same answer on every rank.

        FAILED if any rank passes `failed`: what runs in the background of a rank can fail without the others.

        One all-reduce of one integer, on the CPU where the process group can do that, so that it does not wait for
        work queued on the GPU. A loop that reduces something anyway can take the maximum of `flag` with it, and
        `name_of` the result.
        """
        mine = len(SIGNALS) + 1 if failed else self.flag
        if not dist.is_initialized():
            return self.name_of(mine)
        on_host = "gloo" in dist.get_backend_config()
        flag = torch.tensor(mine, dtype=torch.int32, device="cpu" if on_host else self._device)
        dist.all_reduce(flag, dist.ReduceOp.MAX)
        return self.name_of(int(flag))

    def until_stopped(self, items: Iterable[T]) -> Iterator[T]:
        """The items, of which every rank has equally many. Collective: before each one all ranks `agree`.

        Raises:
            Stopped: any rank got a signal.
        """
        for item in items:
            if name := self.agree():
                raise Stopped(name)
            yield item

    @staticmethod
    def name_of(flag: int) -> str | None:
        """The name of a flag's signal; None for 0."""
        if flag > len(SIGNALS):
            return FAILED
        return SIGNALS[flag - 1].name if flag else None

    def restore(self) -> None:
        """Put the handlers back that were there before."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)


class NonFinitePolicy:
    """guard.nonfinite: whether the optimizer may update with this loss and gradient norm.

    Both are global values, equal on every rank, so that every rank decides the same.
    """

    def __init__(self, config: GuardConfig, notify: Callable[[str], None] = print) -> None:
        self._config = config
        self._notify = notify
        # Updates left out since the last one that was made.
        self.skipped = 0

    def __call__(self, loss: Tensor, grad_norm: Tensor) -> bool:
        """True: update. False: leave this update out (`skip`). Waits for the device.

        Raises:
            RuntimeError: with `stop`, or after more than guard.max_skipped updates left out in a row.
        """
        loss_value, norm = torch.stack([loss.detach().double(), grad_norm.detach().double()]).tolist()
        if math.isfinite(loss_value) and math.isfinite(norm):
            self.skipped = 0
            return True
        what = f"the loss is {loss_value}, the gradient norm is {norm}"
        self.skipped += 1
        if self._config.nonfinite == "stop":
            raise RuntimeError(
                f"{what}: stopped before the update, so the weights are those of the step before. Resume from the "
                "last checkpoint with a lower optim.lr ('run.allow_changes=[optim.lr]'), or with guard.nonfinite=skip"
            )
        if self.skipped > self._config.max_skipped:
            raise RuntimeError(f"{what}: stopped after guard.max_skipped={self._config.max_skipped} skips in a row")
        self._notify(f"{what}: update skipped ({self.skipped} in a row, stops above {self._config.max_skipped})")
        return False


class RoomCheck:
    """Stops a run in which a dispatch brought more than its bounds have room for (comms.capacity, pair_capacity).

    The device has left that step's update out, and will leave out those that follow, so the host may ask late: a step
    later its copy of the flag is there, and nobody waits. Whatever makes a step last (a checkpoint) asks before.
    """

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        self._flag: Tensor | None = None
        self._copied: torch.cuda.Event | None = None

    def note(self, no_room: Tensor | None) -> None:
        """Remember a flag that is the same on every rank: `StepResult.no_room`."""
        # Into pinned memory: the host goes on at once.
        self._flag = None if no_room is None else no_room.to("cpu", non_blocking=True)
        self._copied = None
        if no_room is not None and no_room.is_cuda:
            self._copied = torch.cuda.Event()
            self._copied.record()

    def check(self) -> None:
        """Look at what was noted last. Waits for it; collective.

        Raises:
            NoRoomError: on every rank, with the layer, the need and the setting.
        """
        if self._copied is not None:
            self._copied.synchronize()
        if self._flag is None or not self._flag.item():
            return
        with self._peers.together():
            for exchange in exchanges():
                exchange.check_overflow()
        raise AssertionError("an overflow that no rank knows of")

    def check_now(self) -> None:
        """Look at everything until now, such as an evaluation. Waits for the device; collective; raises as `check`."""
        flag = overflow_flag()
        if flag is not None and dist.is_initialized():
            dist.all_reduce(flag, dist.ReduceOp.MAX)
        self.note(flag)
        self.check()
