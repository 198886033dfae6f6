"""When a run ends."""

import pytest

from trainer.config import Config
from trainer.settle import total_steps


@pytest.mark.parametrize(
    ("max_tokens", "done_steps", "done_tokens", "expected"),
    [
        (None, 0, 0, 100),
        (1000, 0, 0, 4),
        (1024, 0, 0, 4),
        (1024, 3, 768, 4),  # the same batch size all along: as if it had never stopped
        (2048, 4, 2048, 4),
        (2049, 4, 2048, 5),
        (2048, 4, 512, 10),  # four steps of half the size
        (1000, 4, 2048, 4),  # it has more than it was to have
        (10**9, 4, 2048, 100),
    ],
)
def test_max_tokens_counts_what_was_trained_on(
    max_tokens: int | None, done_steps: int, done_tokens: int, expected: int
) -> None:
    """Steps of 256 tokens."""
    config = Config()
    config.train.steps, config.train.global_batch_size, config.train.seq_len = 100, 8, 32
    config.train.max_tokens = max_tokens
    assert total_steps(config, done_steps, done_tokens) == expected
