"""What is decided once the number of processes is known: sizes, the run's id and folder, the number of steps."""

import dataclasses
import math
from collections.abc import Sequence

from trainer.config import Config
from trainer.layout import fit_layout
from trainer.peers import Peers
from trainer.run import RunFolder, make_folder, new_run_id, prepare_run_folder, resolve_run_id
from trainer.run_lock import WAIT_SECONDS, RunLock


def settle(config: Config, peers: Peers) -> Config:
    """Fill in what depends on the number of processes, and check that it fits. The same on every rank.

    Raises:
        ValueError: sizes that do not multiply to the world size, or do not divide what they must.
    """
    parallel = fit_layout(config, peers.size)
    run_id = resolve_run_id(config) or peers.from_rank0(new_run_id)
    return dataclasses.replace(config, parallel=parallel, run=dataclasses.replace(config.run, id=run_id))


def enter_folder(config: Config, overrides: Sequence[str], world_size: int, lock: RunLock) -> RunFolder:
    """The run's folder, which from now on no other process trains in. Rank 0 only."""
    # An evaluation may look at a run that is being trained.
    if not config.train.eval_only:
        # The other ranks wait meanwhile, and not for ever.
        lock.acquire(make_folder(config), min(WAIT_SECONDS, config.parallel.timeout_seconds / 2))
    return prepare_run_folder(config, overrides, world_size)


def total_steps(config: Config, done_steps: int = 0, done_tokens: int = 0) -> int:
    """train.steps, or fewer where train.max_tokens ends the run first (rounded up to a whole step).

    Args:
        done_steps, done_tokens: what the checkpoint has that the run goes on from, with whatever batch size it had.
    """
    steps = config.train.steps
    if config.train.max_tokens is None:
        return steps
    left = max(config.train.max_tokens - done_tokens, 0)
    return min(steps, done_steps + math.ceil(left / tokens_per_step(config)))


def tokens_per_step(config: Config) -> int:
    """Tokens of one global batch, padding included."""
    return config.train.global_batch_size * config.train.seq_len
