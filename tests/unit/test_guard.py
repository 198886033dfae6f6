"""Stop signals and the policy for losses that are no numbers, in one process."""

import math
import os
import signal
import threading

import pytest
import torch

from comms.symmetric_memory import ArenaLayout, NoRoomError, forget_exchanges
from tests.simulated_exchanges import simulated_exchanges
from trainer.config import GuardConfig
from trainer.guard import FAILED, NonFinitePolicy, RoomCheck, StopSignal
from trainer.peers import Peers


def test_a_signal_sets_a_flag_and_nothing_else() -> None:
    stop = StopSignal(torch.device("cpu"))
    try:
        assert stop.agree() is None
        os.kill(os.getpid(), signal.SIGUSR1)
        assert stop.agree() == "SIGUSR1"
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.agree() == "SIGTERM"
        os.kill(os.getpid(), signal.SIGUSR1)
        assert stop.agree() == "SIGTERM", "the weightier signal stays"
        assert stop.agree(failed=True) == FAILED, "a failure outweighs it"
        assert stop.agree() == "SIGTERM"
    finally:
        stop.restore()


def test_restore_puts_the_old_handlers_back() -> None:
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGUSR1)
    stop = StopSignal(torch.device("cpu"))
    assert signal.getsignal(signal.SIGTERM) not in before
    stop.restore()
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGUSR1)) == before


def test_a_signal_does_not_interrupt_a_wait() -> None:
    stop = StopSignal(torch.device("cpu"))
    try:
        timer = threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGTERM))
        timer.start()
        assert not threading.Event().wait(0.2)
        assert stop.flag and stop.agree() == "SIGTERM"
    finally:
        stop.restore()


def numbers(loss: float, norm: float) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.tensor(loss, dtype=torch.float64), torch.tensor(norm, dtype=torch.float32)


@pytest.mark.parametrize(("loss", "norm"), [(math.nan, 1.0), (1.0, math.inf), (-math.inf, math.nan)])
def test_stop_says_what_and_what_to_do(loss: float, norm: float) -> None:
    policy = NonFinitePolicy(GuardConfig(nonfinite="stop"))
    assert policy(*numbers(1.0, 2.0))
    with pytest.raises(RuntimeError, match=r"loss is (nan|1\.0|-inf), the gradient norm is .*guard.nonfinite=skip"):
        policy(*numbers(loss, norm))


def test_skip_leaves_updates_out_up_to_a_number_in_a_row() -> None:
    said: list[str] = []
    policy = NonFinitePolicy(GuardConfig(nonfinite="skip", max_skipped=2), said.append)
    assert [policy(*numbers(math.nan, 1.0)) for _ in range(2)] == [False, False]
    assert policy(*numbers(1.0, 1.0)), "one good update starts the count again"
    assert [policy(*numbers(1.0, math.inf)) for _ in range(2)] == [False, False]
    with pytest.raises(RuntimeError, match=r"guard\.max_skipped=2"):
        policy(*numbers(math.nan, 1.0))
    assert len(said) == 4 and "update skipped (2 in a row" in said[1]


def test_room_is_checked_when_asked_and_not_before() -> None:
    room = RoomCheck(Peers())
    room.note(None)
    room.check()
    room.check_now()
    exchange = simulated_exchanges(ArenaLayout(1, 20, 20, 16, 8), 10)[0]
    room.note(torch.tensor(0.0))
    room.check()
    exchange.overflow[:3] = torch.tensor([25, 20, 3])
    room.check()
    room.note(torch.tensor(1.0))
    with pytest.raises(NoRoomError, match=r"25 rows came to rank 0, which has room for 20: raise comms\.capacity"):
        room.check()
    room.note(None)
    with pytest.raises(NoRoomError):
        room.check_now()
    forget_exchanges()
