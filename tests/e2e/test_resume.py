"""Stopped and resumed = never stopped, bit for bit; and on another number of ranks with the same samples."""

import json

import pytest
import torch

from tests.e2e.runs import STEPS, Attempt, Bench, all_lines, columns, status, stored_tensors

HALF = STEPS // 2
EXACT = ("train/loss", "train/grad_norm", "train/lr", "train/aux_loss", "moe/tokens_per_expert", "tokens")


@pytest.fixture(scope="module")
def halves(bench: Bench) -> list[list[Attempt]]:
    """Run `halves`: as `straight`, stopped in step 10 by a signal to one rank, then started again."""
    first = bench.pooled("halves", stop_after=HALF)
    assert [attempt.code for attempt in first] == [0, 0], first[0].err
    ended = status(bench.path("halves"))
    assert (ended["state"], ended["step"], ended["exit_code"]) == ("preempted", HALF, 0)
    bench.copy("halves", "half")
    return [first, bench.pooled("halves")]


def test_loss_norm_rate_and_counts_go_on_to_the_last_bit(
    bench: Bench, straight: list[Attempt], halves: list[list[Attempt]]
) -> None:
    """CASES 43, 52: moments or rate that were lost show in the first steps after the resume."""
    assert columns(bench.path("halves"), *EXACT) == columns(bench.path("straight"), *EXACT)
    evaluations = ("eval/held/loss", "eval/held/bits_per_byte", "eval/short/loss")
    for step in (HALF, STEPS):
        assert columns(bench.path("halves"), *evaluations, first=step, last=step) == columns(
            bench.path("straight"), *evaluations, first=step, last=step
        )
    rates = [rate for (rate,) in columns(bench.path("halves"), "train/lr").values()]
    assert len(set(rates)) == STEPS, "a constant rate would prove nothing"


def test_parameters_moments_and_bias_are_bit_equal(
    bench: Bench, straight: list[Attempt], halves: list[list[Attempt]]
) -> None:
    """CASES 21, 42, 43: 257 rows on two ranks, both moments of every parameter, the balancing bias."""
    expected, resumed = (
        stored_tensors(bench.path(run) / "checkpoints" / f"step_{STEPS:08d}") for run in ("straight", "halves")
    )
    assert expected.keys() == resumed.keys()
    for name, tensor in expected.items():
        assert torch.equal(tensor, resumed[name]), name
    assert expected["model.tok_embeddings.weight"].shape[0] == 257
    parameters = [name.removeprefix("model.") for name in expected if name.startswith("model.") and "bias" not in name]
    for name in parameters:
        for moment in ("exp_avg", "exp_avg_sq"):
            assert expected[f"optim.{name}.{moment}"].any(), (name, moment)
        assert expected[f"optim.{name}.step"] == STEPS
    assert expected["model.layers.0.moe.expert_bias"].any()
    at_half = stored_tensors(bench.path("halves") / "checkpoints" / f"step_{HALF:08d}")
    assert not any(torch.equal(at_half[f"model.{name}"], expected[f"model.{name}"]) for name in parameters)


def test_both_ranks_see_the_samples_of_the_uninterrupted_run(
    straight: list[Attempt], halves: list[list[Attempt]]
) -> None:
    """CASES 50."""
    first, second = halves
    for rank in (0, 1):
        assert first[rank].samples + second[rank].samples == straight[rank].samples
        assert len(first[rank].samples) == HALF
    seen = sorted(index for attempt in straight for step in attempt.samples for index in step)
    assert seen == list(range(8 * STEPS))


def test_one_folder_one_value_per_step_and_only_rank_0_speaks(bench: Bench, halves: list[list[Attempt]]) -> None:
    first, second = halves
    assert {record["attempt"] for record in all_lines(bench.path("halves"))} == {1, 2}
    attempts = [number for (number,) in columns(bench.path("halves"), "attempt").values()]
    assert attempts == [1] * HALF + [2] * HALF
    assert "SIGTERM: saved step 10 and stopped" in first[0].out
    assert f"continuing from {bench.path('halves')}/checkpoints/step_00000010 at step 10" in second[0].out
    assert f"finished at step {STEPS}" in second[0].out
    assert [attempt.out + attempt.err for attempt in (first[1], second[1])] == ["", ""]
    ended = status(bench.path("halves"))
    assert (ended["state"], ended["step"], ended["attempt"], ended["exit_code"]) == ("finished", STEPS, 2, 0)
    environment = json.loads((bench.path("halves") / "environment.json").read_text())
    assert [entry["attempt"] for entry in environment["attempts"]] == [1, 2]


def test_one_process_goes_on_where_two_stopped(
    bench: Bench, straight: list[Attempt], halves: list[list[Attempt]]
) -> None:
    resumed = bench.alone("half")
    assert resumed.code == 0, resumed.err
    assert "written by 2 ranks, now there are 1" in resumed.out
    both = [sorted(a + b) for a, b in zip(straight[0].samples, straight[1].samples, strict=True)]
    assert [sorted(step) for step in resumed.samples] == both[HALF:]
    alone = columns(bench.path("half"), "train/loss", "train/lr", first=HALF + 1)
    expected = columns(bench.path("straight"), "train/loss", "train/lr", first=HALF + 1)
    for step, (loss, rate) in alone.items():
        # fp32, where splitting a batch over ranks moves a gradient by 1e-6 and Adam magnifies it.
        assert loss == pytest.approx(expected[step][0], rel=1e-4), step
        assert rate == expected[step][1]


def test_a_run_that_began_at_a_path_goes_on_from_its_own_checkpoints(bench: Bench, straight: list[Attempt]) -> None:
    """The command of a requeued job is the same, `checkpoint.resume=PATH` included."""
    began = f"checkpoint.resume={bench.path('straight')}/checkpoints/step_{HALF:08d}"
    first = bench.pooled("branch", began, stop_after=2)
    second = bench.pooled("branch", began)
    assert [attempt.code for attempt in (*first, *second)] == [0] * 4, second[0].err
    assert f"goes on from its own step_{HALF + 2:08d}" in second[0].out
    for rank in (0, 1):
        assert first[rank].samples + second[rank].samples == straight[rank].samples[HALF:]


def test_a_run_that_went_back_goes_on_from_where_it_then_was(bench: Bench, straight: list[Attempt]) -> None:
    """The same for a PATH in its own folder, though the run was finished, and the branch that it left went further."""
    run = bench.copy("straight", "back")
    command = ("back", f"checkpoint.resume={run}/checkpoints/step_{HALF:08d}")
    first, second = bench.pooled(*command, stop_after=2), bench.pooled(*command)
    assert [attempt.code for attempt in (*first, *second)] == [0] * 4, second[0].err
    assert f"went back to step_{HALF:08d}: step_{STEPS:08d} were saved after it" in first[0].out
    assert f"goes on from its own step_{HALF + 2:08d}" in second[0].out
    for rank in (0, 1):
        assert first[rank].samples + second[rank].samples == straight[rank].samples[HALF:]
    assert "run back is finished" in bench.alone(*command).out


def test_a_run_that_never_resumes_is_one_run_for_a_job_that_is_requeued(bench: Bench, straight: list[Attempt]) -> None:
    """checkpoint=none saves when it is stopped, and says that the same command goes on."""
    command = ("never", "checkpoint=none")
    first = bench.pooled(*command, stop_after=2)
    assert "saved step 2 and stopped; the same command with run.id=never continues the run" in first[0].out
    other = bench.alone(*command, "train.log_every=3")
    assert other.code == 2 and "already holds step_00000002" in other.err
    second = bench.pooled(*command)
    assert [attempt.code for attempt in (*first, *second)] == [0] * 4, second[0].err
    for rank in (0, 1):
        assert first[rank].samples + second[rank].samples == straight[rank].samples
