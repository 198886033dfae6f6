"""Whole runs under tensor and context parallelism: the same figures, files and samples as one process; any layout may
go on where another stopped."""

import sys

import pytest

from scripts import generate
from tests.distributed.harness import run_workers
from tests.e2e.runs import Attempt, Bench, attempt, columns, status

STEPS, HALF = 6, 3
# Two ranks divide 258, which is one id more than the tokenizer has. The layouts accumulate differently, and only the
# sequence-level loss does not depend on that.
SHORT = (
    f"train.steps={STEPS}",
    f"train.eval_every={HALF}",
    "model.vocab_size=258",
    "model.moe.aux_loss_level=sequence",
    "optim.warmup_steps=2",
)
FIGURES = ("train/loss", "train/grad_norm", "train/aux_loss", "train/lr", "tokens")
EVAL = ("eval/held/loss", "eval/held/bits_per_byte", "eval/short/loss")
# fp32, where splitting moves a gradient by 1e-6 and Adam magnifies it.
BOUND = 1e-4


def on_four(bench: Bench, run_id: str, *more: str, stop_after: int | None = None) -> list[Attempt]:
    return run_workers(attempt, 4, bench.overrides(run_id, *SHORT, *more), stop_after)


@pytest.fixture(scope="module")
def whole(bench: Bench) -> Attempt:
    """Run `whole`: one process."""
    done = bench.alone("whole", *SHORT)
    assert done.code == 0, done.err
    return done


@pytest.fixture(scope="module")
def moved(bench: Bench) -> list[list[Attempt]]:
    """Run `moved`: half of it with tp=2 beside FSDP, half with tp=2 in cp=2."""
    first = on_four(bench, "moved", "parallel.tp=2", "parallel.ep=4", stop_after=HALF)
    assert [attempt.code for attempt in first] == [0] * 4, first[0].err
    second = on_four(bench, "moved", "parallel.tp=2", "parallel.cp=2", "parallel.ep=2", "train.sample_prompt='abc '")
    assert [attempt.code for attempt in second] == [0] * 4, second[0].err
    return [first, second]


def assert_close(found: dict[int, list], expected: dict[int, list]) -> None:
    for step, values in expected.items():
        assert found[step] == pytest.approx(values, rel=BOUND), step


def test_a_run_goes_through_two_layouts_with_the_figures_of_one_process(
    bench: Bench, whole: Attempt, moved: list[list[Attempt]]
) -> None:
    ours, reference = bench.path("moved"), bench.path("whole")
    assert_close(columns(ours, *FIGURES, last=STEPS), columns(reference, *FIGURES, last=STEPS))
    for step in (HALF, STEPS):
        assert_close(columns(ours, *EVAL, first=step, last=step), columns(reference, *EVAL, first=step, last=step))
    assert status(ours)["state"] == "finished" and status(ours)["attempt"] == 2
    assert f"continuing from {ours}/checkpoints/step_{HALF:08d} at step {HALF}" in moved[1][0].out
    assert "layout  4 processes on cpu: dp_shard=2, tp=2, ep=4; fp32" in moved[0][0].out
    assert "layout  4 processes on cpu: cp=2, tp=2, ep=2; fp32" in moved[1][0].out
    assert [attempt.out + attempt.err for half in moved for attempt in half[1:]] == [""] * 6


def test_ranks_that_share_sequences_get_the_same_samples(whole: Attempt, moved: list[list[Attempt]]) -> None:
    first, second = ([attempt.samples for attempt in half] for half in moved)
    assert first[0] == first[1] != first[2] == first[3]
    both = [sorted(a + b) for a, b in zip(first[0], first[2], strict=True)]
    assert both == [sorted(step) for step in whole.samples[:HALF]]
    assert second == [whole.samples[HALF:]] * 4


def test_tokens_count_once_whoever_shares_them(bench: Bench, moved: list[list[Attempt]]) -> None:
    """8 sequences of 32 tokens a step."""
    names = ("perf/tokens_per_second", "perf/step_seconds", "perf/tokens_per_second_per_gpu")
    for rate, seconds, per_device in columns(bench.path("moved"), *names, last=STEPS).values():
        assert rate * seconds == pytest.approx(256)
        assert rate == pytest.approx(4 * per_device)


def test_the_result_is_evaluated_and_sampled_anywhere(
    bench: Bench, moved: list[list[Attempt]], capsys: pytest.CaptureFixture[str]
) -> None:
    run = bench.path("moved")
    assert "sample of 128 tokens after 'abc ':\nabc " in moved[1][0].out
    logged = columns(run, *EVAL, first=STEPS, last=STEPS)
    again = on_four(bench, "moved", "parallel.cp=2", "parallel.ulysses=2", "parallel.ep=2", "train.eval_only=true")
    assert [attempt.code for attempt in again] == [0] * 4, again[0].err
    assert_close(columns(run, *EVAL, first=STEPS, last=STEPS), logged)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["generate.py", str(run), "--prompt", "abc ", "--tokens", "4"])
        assert generate.main() == 0
    assert capsys.readouterr().out.startswith("abc ")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["parallel.tp=4"],
            "model.attention.num_heads=2 is not divisible by parallel.tp=4; legal, with all else as it is: "
            "parallel.tp=2",
        ),
        (
            ["parallel.tp=2", "model.vocab_size=257"],
            "model.vocab_size=257 is not divisible by parallel.tp=2; legal, with all else as it is: parallel.tp=1 or "
            "model.vocab_size=258",
        ),
        (
            ["parallel.cp=2", "train.seq_len=30"],
            "train.seq_len=30 cannot be cut into equal parts for parallel.cp=2, parallel.ulysses=1 and parallel.tp=1; "
            "legal, with all else as it is: parallel.cp=1 or train.seq_len=28 or train.seq_len=32",
        ),
        (["parallel.tp=2", "train.global_batch_size=6"], "2 x 2 data-parallel ranks; nearest legal: 4 or 8"),
        (["parallel.async_tp=native"], "parallel.async_tp=native finds no matmul to fuse with parallel.tp=1"),
    ],
)
def test_a_layout_that_does_not_fit_is_told_and_leaves_nothing(bench: Bench, words: list[str], message: str) -> None:
    attempts = on_four(bench, "misfit", *words)
    assert [attempt.code for attempt in attempts] == [2] * 4
    assert attempts[0].err.startswith("error: ") and message in attempts[0].err
    assert len(attempts[0].err.splitlines()) == 1
    assert not bench.path("misfit").exists()
