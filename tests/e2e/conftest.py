"""One corpus and one uninterrupted run, to which the tests of this folder compare theirs."""

from collections.abc import Iterator

import pytest

from tests.e2e.runs import Attempt, Bench


@pytest.fixture(scope="session")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    made = Bench(tmp_path_factory.mktemp("e2e"))
    yield made
    for launch in made.launched:
        launch.clear()


@pytest.fixture(scope="session")
def straight(bench: Bench) -> list[Attempt]:
    """Run `straight`: two ranks (EP=2), all steps in one go, checkpoints at 10 and 20."""
    attempts = bench.pooled("straight")
    assert [attempt.code for attempt in attempts] == [0, 0], attempts[0].err
    return attempts
