"""One attempt of a run: its folder is entered, the trainer made and let loop, and how it ended is recorded.

What an attempt does is in trainer/trainer.py; this file gives its exit code and the words of its end.
"""

import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from comms.symmetric_memory import NoRoomError
from trainer.agreement import check_same_settings
from trainer.check_exchange import check_device
from trainer.compose import EXIT_PREEMPTED, MISTAKES, exit_with_mistake, tell_launcher
from trainer.config import Config
from trainer.peers import Peers
from trainer.run import write_status
from trainer.run_lock import RunLock
from trainer.settle import enter_folder, settle
from trainer.shards import DamagedShardError
from trainer.trainer import Trainer


def run(config: Config, overrides: Sequence[str], device: torch.device) -> int:
    """One attempt of a run inside its process group; returns the exit code. Collective."""
    lock = RunLock()
    try:
        return _attempt(config, overrides, device, lock)
    finally:
        lock.release()


def _attempt(config: Config, overrides: Sequence[str], device: torch.device, lock: RunLock) -> int:
    peers = Peers(config.parallel.timeout_seconds)
    try:
        config = settle(config, peers)
        check_device(config, device.type)
        check_same_settings(peers, config)
        folder = peers.from_rank0(lambda: enter_folder(config, overrides, peers.size, lock))
    except MISTAKES as error:
        exit_with_mistake(error)
    if folder.finished:
        if peers.rank == 0:
            print(folder.notice)
        return 0
    record = partial(write_status, folder.path, attempt=folder.attempt)
    # An evaluation leaves the status of the run it looks at alone; other ranks never write.
    if peers.rank != 0 or config.train.eval_only:
        record = _no_status
    trainer, state, code, message = None, "failed", 1, ""
    try:
        try:
            trainer = Trainer(config, folder, device, peers)
        except MISTAKES as error:
            # Only here: once the loop runs, the same kind of exception is a fault of ours and needs its traceback.
            code, message = 2, str(error)
            exit_with_mistake(error)
        try:
            state, code = trainer.evaluate_only() if config.train.eval_only else trainer.train(), 0
            if config.train.eval_only and state == "preempted":
                # The status is that of the training, which has not stopped.
                tell_launcher(EXIT_PREEMPTED, "the evaluation was stopped")
        except NoRoomError as error:
            code, message = 2, f"{error}. Weights are those before: no update was made with what found no room"
            exit_with_mistake(NoRoomError(message))
        except DamagedShardError as error:
            # In the middle of the run, and still no fault of ours.
            code, message = 2, str(error)
            exit_with_mistake(error)
    except (Exception, KeyboardInterrupt) as error:
        message = repr(error)
        # At once: torchrun may end this process before Python gets to its traceback.
        print(f"rank {peers.rank} failed: {message}", file=sys.stderr, flush=True)
        raise
    finally:
        # Whatever it was: an attempt that could not begin leaves the run its settings, and the end that it had.
        if trainer is not None or not (peers.rank == 0 and folder.take_back()):
            step = folder.step if trainer is None else trainer.step
            record(state=state, step=step, exit_code=code, message=message)
        if trainer is not None:
            trainer.close(code)
    return code


def _no_status(**_: Any) -> None:
    pass
