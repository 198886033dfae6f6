"""What a run says and refuses about the weights that it begins with."""

import pytest

from tests.e2e.runs import STEPS, Attempt, Bench, contents

OTHER = "model.rope.theta=77"
LINE = "  model.rope.theta: 10000.0 -> 77.0"


def test_a_checkpoint_of_another_architecture_is_refused(bench: Bench, straight: list[Attempt]) -> None:
    """Every shape is equal: without the comparison the run would go on with weights that mean something else."""
    path = f"checkpoint.resume={bench.path('straight')}"
    refused = bench.alone("other-architecture", path, OTHER)
    assert (refused.code, refused.samples) == (2, [])
    assert LINE in refused.err and "run.allow_changes=[model.rope.theta]" in refused.err
    evaluated = bench.alone("looks-elsewhere", path, OTHER, "train.eval_only=true")
    assert evaluated.code == 2 and LINE in evaluated.err
    steps = ["train.steps=21", "train.eval_every=null", "checkpoint.every=null"]
    accepted = bench.alone("other-architecture", path, OTHER, "run.allow_changes=[model.rope]", *steps)
    assert accepted.code == 0, accepted.err
    assert LINE in accepted.out and f"at step {STEPS}" in accepted.out and len(accepted.samples) == 1


def test_weights_to_start_from_may_be_of_another_architecture(bench: Bench, straight: list[Attempt]) -> None:
    once = ["train.steps=1", "train.eval_every=null", "checkpoint.every=0"]
    weights = f"checkpoint.init_from={bench.path('straight')}"
    first = bench.alone("began-elsewhere", weights, OTHER, *once)
    assert first.code == 0, first.err
    assert first.out.count("warning: ") == 1 and LINE in first.out and f"weights of step {STEPS} from" in first.out
    again = bench.alone("began-elsewhere", weights, OTHER, *once, "train.steps=2", "run.allow_changes=[train.steps]")
    assert again.code == 0, again.err
    assert again.out.count("checkpoint.init_from=") == 1 and "is not used" in again.out and LINE not in again.out
    assert "train.steps: 1 -> 2" in again.out


@pytest.mark.parametrize("init_from", [False, True])
def test_weights_that_belong_to_no_run_are_taken_and_that_is_told(
    bench: Bench, straight: list[Attempt], init_from: bool
) -> None:
    name = f"step_{STEPS:08d}"
    loose = bench.folder / f"loose-{init_from}" / name
    for file, content in contents(bench.path("straight") / "checkpoints" / name).items():
        (loose / file).parent.mkdir(parents=True, exist_ok=True)
        (loose / file).write_bytes(content)
    setting = f"checkpoint.{'init_from' if init_from else 'resume'}={loose}"
    attempt = bench.alone(
        f"from-loose-{init_from}", setting, f"train.steps={STEPS + 1}", "train.eval_every=null", "checkpoint.every=null"
    )
    assert attempt.code == 0, attempt.err
    assert attempt.out.count("cannot be checked") == 1
