"""Worker processes end with the last of these tests: what runs after it would share the cores with their threads."""

from collections.abc import Iterator

import pytest

from tests.distributed.harness import end_workers


@pytest.fixture(scope="package", autouse=True)
def _workers_end() -> Iterator[None]:
    yield
    end_workers()
