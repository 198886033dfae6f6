"""Tokens are counted, not computed from the step: a run may go on with another batch size."""

from tests.e2e.runs import Bench, columns, status


def test_tokens_and_max_tokens_follow_a_changed_batch_size(bench: Bench) -> None:
    """4 steps of 256 tokens, then steps of 512 up to 2048 tokens, then steps of 256 up to 2500 (rounded up)."""
    run = bench.path("grown")
    quiet = ["train.eval_every=null", "checkpoint.every=0"]
    allow = "run.allow_changes=[train.steps,train.max_tokens,train.global_batch_size]"
    first = bench.alone("grown", *quiet, "train.steps=4", "profile.steps=2", "profile.start=3")
    assert first.code == 0, first.err
    # On the way: an attempt that traces its steps. The next ones do not.
    assert [file.name for file in (run / "profile").iterdir()] == ["steps_3_to_4.json.gz"]
    second = bench.alone("grown", *quiet, allow, "train.global_batch_size=16", "train.max_tokens=2048")
    assert second.code == 0, second.err
    assert (len(second.samples), status(run)["step"]) == (2, 6)
    third = bench.alone("grown", *quiet, allow, "train.max_tokens=2500")
    assert third.code == 0, third.err
    assert (len(third.samples), status(run)["step"]) == (2, 8)
    tokens = [count for (count,) in columns(run, "tokens", last=8).values()]
    assert tokens == [256, 512, 768, 1024, 1536, 2048, 2304, 2560]
    # The schedule ends with the tokens: the last rate is lr * min_lr_ratio.
    assert columns(run, "train/lr", first=8, last=8)[8][0] == min(
        r for (r,) in columns(run, "train/lr", last=8).values()
    )
    evaluated = bench.alone("grown", "train.eval_only=true")
    assert evaluated.code == 0, evaluated.err
    assert columns(run, "tokens", first=8, last=8)[8] == [2560]
