"""What GPU tests share."""

from collections.abc import Generator

import pytest
import torch


@pytest.fixture
def world_of_one(monkeypatch: pytest.MonkeyPatch) -> Generator[torch.device]:
    """A process group of this process and its GPU."""
    from parallel.process_group import process_group
    from trainer.worker_pool import free_port

    names = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    for name, value in {**names, "MASTER_PORT": str(free_port())}.items():
        monkeypatch.setenv(name, value)
    with process_group(timeout_seconds=60) as device:
        yield device
