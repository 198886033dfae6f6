"""Ranks that fail, die or hang while others wait for them: everyone ends in time and knows who it was."""

import os
import signal
import time
from pathlib import Path

import pytest

from tests.distributed.harness import WorkerPool, run_workers
from trainer.peers import LostRankError, Peers


def fail_on(ranks: list[int]) -> str:
    peers = Peers(30)
    try:
        with peers.together():
            if peers.rank in ranks:
                raise ValueError(f"bad luck {min(peers.rank, 2)}")
    except ValueError as caught:
        return str(caught)
    finally:
        peers.close()
    return ""


@pytest.mark.parametrize(("ranks", "text"), [([], ""), ([1], "rank 1: bad luck 1"), ([2, 3], "rank 2, 3: bad luck 2")])
def test_everyone_learns_who_failed(ranks, text):
    assert run_workers(fail_on, 4, ranks) == [text] * 4


def gather_and_tell() -> tuple[list[int], str]:
    peers = Peers(30)
    found = peers.gather(peers.rank**2), peers.from_rank0(lambda: f"from rank {peers.rank}")
    peers.close()
    return found


def test_values_to_rank_0_and_from_it():
    assert run_workers(gather_and_tell, 2) == [([0, 1], "from rank 0"), ([], "from rank 0")]


def lose(how: str, timeout: float, go_on: str) -> tuple[str, float]:
    """Rank 1 of 3 hangs, or is killed, in the block in which the others wait for it."""
    peers = Peers(timeout)
    peers.gather(None)
    began = time.monotonic()
    try:
        with peers.together():
            if peers.rank == 1 and how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            while peers.rank == 1 and not Path(go_on).exists():
                time.sleep(0.05)
    except LostRankError as caught:
        return str(caught), time.monotonic() - began
    finally:
        peers.close()
    return "", 0.0


def answers(pool: WorkerPool, *ranks: int) -> list[tuple[str, float]]:
    found = [pool.pipes[rank].recv() for rank in ranks]
    assert all(finished for finished, _ in found), found
    return [answer for _, answer in found]


def test_a_rank_that_hangs_or_is_killed_is_named_in_time(tmp_path):
    """In a pool of its own: `run_workers` would end the others with the one that is killed."""
    pool = WorkerPool(3)
    try:
        # After its timeout gloo hangs up on everybody: rank 0 knows of whom, the others may know rank 0 alone.
        for pipe in pool.pipes:
            pipe.send((lose, ("hangs", 3.0, str(tmp_path / "go on"))))
        (first, seconds), (other, waited) = answers(pool, 0, 2)
        assert first.startswith("rank 1 is gone, or gave no answer for 3 s") and "rank 2" not in first
        assert other.startswith(("rank 1 is gone", "rank 0 is gone"))
        assert 2.5 < seconds < 30 and waited < 30
        (tmp_path / "go on").touch()
        (late, _), *_ = answers(pool, 1)
        assert late.startswith("rank 0 is gone")
        # Not the timeout, but the connection tells of a process that has ended: at once.
        for pipe in pool.pipes:
            pipe.send((lose, ("killed", 60.0, "")))
        for text, seconds in answers(pool, 0, 2):
            assert text.startswith("rank 1 is gone") and "rank 2" not in text
            assert seconds < 30
    finally:
        pool.close()
