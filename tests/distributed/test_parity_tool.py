"""scripts/parity.py as a user meets it: a table, an exit code, a mistake explained, a worker that died named."""

import multiprocessing
import os
import re
import signal
import subprocess
import sys
import threading
import time
import weakref
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from scripts import parity
from tests.distributed.faults import FAULTS
from tests.distributed.harness import run_workers
from tests.distributed.traces import settled
from trainer import parity_check, parity_matrix
from trainer.compose import CONFIG_DIR, compose
from trainer.parity import Trace, compare, worst_error
from trainer.parity_layouts import Layout, parse_layouts
from trainer.worker_pool import WorkerError, WorkerPool


def test_the_layouts_of_an_experiment_are_right(capsys: pytest.CaptureFixture[str]) -> None:
    assert parity.main(["experiment=gpt_oss_20b", "layouts=[tp=2 ep=2,cp=2 ulysses=2]", "recipe=fp32"]) == 0
    out = capsys.readouterr().out
    assert "gpt_oss_20b, tiny, fp32 on cpu" in out
    lines = [line for line in out.splitlines() if " x " in line]
    assert [line.split("  ")[1].strip() for line in lines] == ["tp=2 ep=2", "cp=2 ulysses=2"]
    assert all(" right " in line and "layers." in line for line in lines)
    assert out.endswith("2 right, 0 wrong\n")


def test_with_little_time_the_layouts_with_most_pairs_of_axes_come_first(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["experiment=qwen3_30b_a3b", "layouts=all", "nproc=2", "recipe=fp32", "seconds=1", "parallel.compile=false"]
    began = iter([0.0, 0.1, 0.5, 2.0])
    with patch("scripts.parity.time", SimpleNamespace(monotonic=lambda: next(began))):
        assert parity.main(words) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[1].strip() for line in lines if " x " in line] == ["tp=2 ep=2", "tp=2 etp=2"]
    assert lines[-1] == "2 right, 0 wrong, 8 not tried (seconds=1)"


def test_bf16_stays_within_its_bound(capsys: pytest.CaptureFixture[str]) -> None:
    assert parity.main(["experiment=deepseek_v3_16b", "layouts=[tp=2 ep=2]", "recipe=bf16"]) == 0
    error = re.search(r"right  (\d\.\d+e-\d+)", capsys.readouterr().out)
    # Not computed in a wider format by mistake.
    assert 1e-3 < float(error[1]) < 5e-2


def trace_with_fault(*args):
    with FAULTS["shared_gradients_not_summed"]():
        return parity_check.train_tiny_model(*args)


def trace_on_one_process_alone(*args):
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return parity_check.train_tiny_model(*args)


def test_a_wrong_layout_is_reported_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    with patch.object(parity_check, "TRACE", trace_with_fault):
        assert parity.main(["experiment=deepseek_v3_671b", "layouts=[tp=2,dp_shard=2]"]) == 1
    out = capsys.readouterr().out
    assert "tp=2 " in out and "WRONG" in out
    # The worst of what went wrong first: a gradient of a weight that the tp ranks share.
    assert re.search(r"WRONG .*\n +gradient \S*(norm|router)\.weight: error \d\.\d+e[-+]\d+, bound 1e-10\n", out)
    assert out.endswith("1 right, 1 wrong\n")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["experiment=qwen4"], "no such option"),
        (["experiment=qwen3_30b_a3b", "recipe=fp9"], "recipe=fp9"),
        (["experiment=qwen3_30b_a3b", "layouts=[tq=2]"], "tq=2: no axis of that name"),
        (["experiment=qwen3_30b_a3b", "layouts=[tp=3]"], "legal: tp=2 or tp=4"),
    ],
)
def test_a_mistake_is_told_without_torch(words: list[str], expected: str) -> None:
    code = f"import sys; from scripts import parity; print(parity.main({words!r}), 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=CONFIG_DIR.parent, capture_output=True, text=True)
    assert done.stdout == "2 False\n" and expected in done.stderr, done


def trace_of_no_process_alone(*args):
    if dist.get_world_size() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return parity_check.train_tiny_model(*args)


def test_a_reference_that_dies_is_not_laid_to_the_layout(capsys: pytest.CaptureFixture[str]) -> None:
    with patch.object(parity_check, "TRACE", trace_of_no_process_alone):
        assert parity.main(["experiment=qwen3_30b_a3b", "layouts=[tp=2]"]) == 1
    assert "not this layout, but the one process that it is compared with" in capsys.readouterr().out


def test_a_worker_that_dies_is_named_and_the_next_layout_runs(capsys: pytest.CaptureFixture[str]) -> None:
    with patch.object(parity_check, "TRACE", trace_on_one_process_alone):
        assert parity.main(["experiment=qwen3_30b_a3b", "layouts=[dp_shard=2,tp=2]"]) == 1
    out = capsys.readouterr().out
    assert out.count("FAILED") == 2 and out.endswith("0 right, 0 wrong, 2 failed to run\n")
    assert "failed on rank 1:\n        the process died (exit code -9)" in out


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["layouts=all"], ["name an experiment"]),
        (["experiment=qwen4"], ["experiment=qwen4", "qwen3"]),
        (["experiment=qwen3_30b_a3b", "layouts=[tp=3]"], ["layout tp=3", "num_heads=32", "legal: tp=2 or tp=4"]),
        (["experiment=qwen3_30b_a3b", "layouts=[tp=2]", "nproc=3"], ["tp=2", "3 processes", "nproc=2"]),
        (["experiment=qwen3_30b_a3b", "layouts=[ep=3]"], ["layout ep=3", "num_experts=128", "legal: ep=2 or ep=4"]),
        (["experiment=qwen3_30b_a3b", "layouts=[tp=2 etp=4]"], ["parallel.etp=4", "legal: tp=2 etp=2"]),
        (["experiment=qwen3_30b_a3b", "layouts=[etp=2]"], ["layout etp=2", "legal: tp=2 etp=2"]),
        (["experiment=qwen3_30b_a3b", "layouts=[ep=16]"], ["does not fit the tiny model", "legal: ep=8"]),
        (["experiment=qwen3_30b_a3b", "layouts=[dp_shard=1000]"], ["1000 processes", "at most 64"]),
        (["experiment=qwen3_30b_a3b", "layouts=all", "nproc=65"], ["nproc=65", "at most 64"]),
        (["experiment=qwen3_30b_a3b", "layouts=[tp=2 tp=4]"], ["tp stands there twice", "comma"]),
        (["experiment=qwen3_30b_a3b", "layouts=[tp=2]", "layouts=[cp=2]"], ["layouts= stands there twice"]),
        (["experiment=qwen3_30b_a3b", "layout=[tp=2]"], ["layout=", "did you mean layouts"]),
        (["experimnt=qwen3_30b_a3b"], ["experimnt=", "did you mean experiment?"]),
        (["experiment=qwen3_30b_a3b", "--nproc=2"], ["--nproc=2", "did you mean nproc?"]),
        (["experiment=qwen3_30b_a3b", "tp=2"], ["tp=2", "layouts='[tp=2]'"]),
        # Without layouts= it would be cut to 2, and beside it do nothing.
        (["experiment=demo", "parallel.tp=4"], ["parallel.tp=4", "layouts='[tp=4]'"]),
        (["experiment=demo", "+parallel.tp=4", "parallel.ep=2"], ["layouts='[tp=4 ep=2]'"]),
        (["experiment=demo", "parallel.dp_shard=-1"], ["parallel.dp_shard=-1", "layouts='["]),
        (["experiment=demo", "layouts=[cp=2]", "parallel.tp=2"], ["parallel.tp=2", "layouts='[tp=2]'"]),
        (["matrx"], ["matrx", "did you mean matrix?"]),
        (["experiment=qwen3_30b_a3b", "out=x.md"], ["out=x.md", "leave it out"]),
        (["matrix", "layouts=[tp=2]"], ["layouts=[tp=2]", "leave it out"]),
        (["matrix", "nproc=1"], ["nproc=1", "from 2"]),
        (["matrix", "out=/dev/null/parity.md"], ["out=/dev/null/parity.md cannot be written"]),
        (["matrix", "results=/dev/null/x"], ["results=/dev/null/x cannot be written"]),
        (["experiment=qwen3_30b_a3b", "nproc=many"], ["nproc=many", "whole number"]),
        (["experiment=qwen3_30b_a3b", "recipe=fp16"], ["recipe=fp16", "fp64, fp32, bf16"]),
        (["experiment=qwen3_30b_a3b", "device=tpu"], ["device=tpu", "auto, cpu, cuda"]),
        (["experiment=qwen3_30b_a3b", "optim.lrr=1"], ["optim.lrr", "optim.lr"]),
        (["matrix", "experiment=demo"], ["matrix: experiment=demo"]),
    ],
)
def test_mistakes_are_told_before_any_process_starts(
    words: list[str], expected: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with patch.object(parity_check, "WorkerPool", side_effect=AssertionError):
        assert parity.main(words) == 2
    told = capsys.readouterr().err
    assert told.startswith("error: ")
    assert not [word for word in expected if word not in told], told


@pytest.mark.parametrize("experiment", ["demo", "qwen3_30b_a3b", "deepseek_v3_671b", "gpt_oss_20b"])
@pytest.mark.parametrize(
    "layout",
    [
        *("tp=3", "tp=4", "tp=5", "tp=6", "tp=256", "cp=3 ulysses=3", "cp=4 ulysses=3", "ulysses=2", "etp=2"),
        *("tp=2 etp=4", "ep=16", "ep=3", "dp_shard=3 ep=2", "dp_replicate=2 dp_shard=2 ep=4", "tp=8 cp=8 ep=64"),
        "dp_shard=100",
    ],
)
def test_whatever_layout_is_proposed_is_legal(experiment: str, layout: str) -> None:
    config = compose([f"experiment={experiment}"])
    (sizes,) = parse_layouts(layout)
    try:
        parity.settled(config, sizes, 0)
    except ValueError as error:
        proposed = str(error).partition("nearest legal: ")[2]
        # Demo's 8 experts do not go with ep=64, nor its 6 heads with tp=8: no change of one size helps.
        assert bool(proposed) == ((experiment, layout) != ("demo", "tp=8 cp=8 ep=64")), error
        for words in filter(None, proposed.split(" or ")):
            parity.settled(config, *parse_layouts(words), 0)


def test_a_stop_is_told_and_ends_the_workers(capsys: pytest.CaptureFixture[str]) -> None:
    # Those of other tests, which share theirs.
    others = {child.pid for child in multiprocessing.active_children()}
    with patch.object(parity_check.WorkerPool, "run", side_effect=KeyboardInterrupt):
        assert parity.main(["experiment=demo", "layouts=[dp_shard=2]"]) == 130
    assert capsys.readouterr().err == "stopped\n"
    assert not [child for child in multiprocessing.active_children() if child.is_alive() and child.pid not in others]


def test_without_words_the_usage_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert parity.main([]) == 2
    assert parity.main(["--help"]) == 0
    assert capsys.readouterr().out.count("layouts=") > 3


def test_more_gpus_than_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    with patch.object(torch.cuda, "device_count", return_value=1):
        assert parity.main(["experiment=demo", "layouts=[tp=2]", "device=cuda"]) == 2
    assert "needs 2 GPUs, 1 are visible" in capsys.readouterr().err


def a_few(config, num_processes: int) -> list[Layout]:
    return [settled(2, tp=2), settled(2, cp=2)] if num_processes == 2 else []


def test_a_matrix_goes_on_where_it_stopped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["matrix", "nproc=2", f"results={tmp_path}/results.jsonl", f"out={tmp_path}/parity.md"]
    with (
        patch.object(parity, "MATRIX", ("olmoe_1b_7b",)),
        patch("trainer.parity_layouts.legal_layouts", a_few),
        patch.object(parity_check, "TRACE", trace_with_fault),
    ):
        assert parity.main(words) == 1
    results = (tmp_path / "results.jsonl").read_text().splitlines()
    assert len(results) == 2
    table = (tmp_path / "parity.md").read_text()
    assert "| 2 | `tp=2` | **wrong**: gradient " in table and "1 wrong" in table
    assert "| 2 | `cp=2` | " in table
    # Cut off in the middle of a line: that layout alone is compared again, now without the fault.
    (tmp_path / "results.jsonl").write_text(results[1] + "\n" + results[0][:40])
    capsys.readouterr()
    with patch.object(parity, "MATRIX", ("olmoe_1b_7b",)), patch("trainer.parity_layouts.legal_layouts", a_few):
        assert parity.main(words) == 0
    assert "tp=2" in capsys.readouterr().out.splitlines()[0]
    assert "none wrong" in (tmp_path / "parity.md").read_text()


def test_a_gradient_that_is_missing_is_the_worst() -> None:
    gradients = {"a": torch.ones(2), "b": torch.ones(2)}
    trace = Trace(gradients={"b": torch.ones(2)})
    assert worst_error(trace, Trace(gradients=gradients)) == ("a", float("inf"))
    assert [m.quantity for m in compare(trace, Trace(gradients=gradients), 0.0)] == [
        "gradient a exists on one side only"
    ]


def test_gradients_of_rounding_alone_are_not_compared_with_each_other() -> None:
    """One that is small but there still is, with a factor of two as with one of zero."""
    large = {"weight": torch.ones(100)}
    small = torch.full((4,), 1e-5)
    for kind in ("gradients", "final"):
        ours, theirs = (Trace(**{kind: {**large, "bias": torch.full((4,), value)}}) for value in (1e-17, -3e-17))
        assert compare(ours, theirs, 1e-10) == []
        for factor in (0.0, 2.0):
            ours, theirs = (Trace(**{kind: {**large, "bias": found}}) for found in (factor * small, small))
            assert [mismatch.quantity.split()[1] for mismatch in compare(ours, theirs, 1e-4)] == ["bias"]


def test_what_went_wrong_in_the_first_forward_comes_before_gradients() -> None:
    """A gradient that is wrong because the loss is says little about where."""
    ours, theirs = (
        Trace(losses=[loss] * 2, gradients={"a": torch.tensor([loss])}, final={"a": torch.tensor([loss])})
        for loss in (1.0, 2.0)
    )
    found = [mismatch.quantity for mismatch in compare(ours, theirs, 0.0)]
    assert found[:2] == ["loss of step 0", "gradient a"] and sorted(found[2:]) == ["final a", "loss of step 1"]


def test_results_that_are_wrong_or_unreadable_count_as_missing(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    right = parity_matrix.Result("x", 2, "tp=2", "fp64", True, "w", 1e-16, 1.0, "code")
    wrong = replace(right, layout="cp=2", right=False)
    path.write_bytes(b'\xff\xfe\n[]\n{"experiment": "cut off')
    parity_matrix.append_result(path, right)
    parity_matrix.append_result(path, wrong)
    assert parity_matrix.read_results(path, "code") == {right.key: right}
    # And the first line after one that was cut off is a line of its own.
    assert path.read_bytes().count(b"\n") == 5


def test_results_of_other_code_do_not_count(tmp_path: Path) -> None:
    (tmp_path / "moe").mkdir()
    (tmp_path / "moe" / "a.py").write_text("1")
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "parity.py").write_text("1")
    before = parity_matrix.code_digest(tmp_path)
    result = parity_matrix.Result("x", 2, "tp=2", "fp64", True, "w", 1e-16, 1.0, before)
    parity_matrix.append_result(tmp_path / "results.jsonl", result)
    assert parity_matrix.read_results(tmp_path / "results.jsonl", before) == {result.key: result}
    (tmp_path / "moe" / "a.py").write_text("2")
    after = parity_matrix.code_digest(tmp_path)
    assert parity_matrix.read_results(tmp_path / "results.jsonl", after) == {}
    (tmp_path / "scripts" / "parity.py").write_text("2")
    assert parity_matrix.code_digest(tmp_path) not in (before, after)


def trace_side_by_side(meeting: Path, *args):
    """Each process goes on once the other trace has begun, too."""
    (meeting / f"{dist.get_world_size()}_{dist.get_rank()}").touch()
    while len(list(meeting.iterdir())) < 3:
        time.sleep(0.02)
    return parity_check.train_tiny_model(*args)


def test_the_reference_is_made_beside_the_first_layout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = partial(trace_side_by_side, tmp_path)
    with patch.object(parity_check, "TRACE", trace), patch.object(parity_check, "TIMEOUT_SECONDS", 60.0):
        assert parity.main(["experiment=qwen3_30b_a3b", "layouts=[tp=2,dp_shard=2]"]) == 0
    assert capsys.readouterr().out.endswith("2 right, 0 wrong\n")


def trace_that_never_ends(*args):
    dist.barrier()
    while dist.get_world_size() > 1:
        time.sleep(0.1)
    return parity_check.train_tiny_model(*args)


def test_a_layout_that_hangs_is_told_with_the_place_of_each_rank(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["experiment=qwen3_30b_a3b", "layouts=[tp=2,dp_shard=2]", "seconds=1"]
    with patch.object(parity_check, "TRACE", trace_that_never_ends), patch.dict(parity.PATIENCE, cpu=5.0):
        assert parity.main(words) == 1
    out = capsys.readouterr().out
    # seconds= and PATIENCE, less what has passed.
    assert re.search(r"trace_that_never_ends: rank 0, 1 of 2 still busy after 5\.\d+ s\n", out)
    places = re.findall(r"rank (\d) is at\n(?:.*\n)*? .*line \d+ in trace_that_never_ends\n", out)
    assert places == ["0", "1"]
    assert out.endswith("0 right, 0 wrong, 1 failed to run, 1 not tried (seconds=1)\n")


def fail_on_rank_1() -> int:
    if dist.get_rank() == 1:
        raise ValueError("no such thing")
    return 0


def die_in_the_middle_of_a_sum() -> None:
    if dist.get_rank() == 1:
        os._exit(7)
    dist.all_reduce(torch.zeros(1))


def crash_in_native_code() -> None:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGSEGV)
    signal.pause()


class Cycle:
    def __init__(self) -> None:
        self.itself = self


CYCLES: list[weakref.ref[Cycle]] = []


def leave_a_cycle() -> None:
    CYCLES.append(weakref.ref(Cycle()))
    assert CYCLES[-1]() is not None


def cycles_left() -> int:
    return sum(cycle() is not None for cycle in CYCLES)


def test_what_a_task_left_is_gone_before_the_next() -> None:
    """Meshes and their groups are such cycles."""
    for _ in range(2):
        run_workers(leave_a_cycle, 2)
    assert run_workers(cycles_left, 2) == [0, 0]


def wait_for_ever() -> None:
    threading.Thread(target=wait_beside, daemon=True).start()
    signal.pause()


def wait_beside() -> None:
    time.sleep(1000)


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (fail_on_rank_1, ["fail_on_rank_1 failed on rank 1", "ValueError: no such thing", "line"]),
        (die_in_the_middle_of_a_sum, ["failed on rank 1:\nthe process died (exit code 7)"]),
        (crash_in_native_code, ["died (exit code -11)", "Segmentation fault", "line", "in crash_in_native_code"]),
        (
            wait_for_ever,
            # Each thread of each rank.
            [
                "wait_for_ever: rank 0, 1 of 2 still busy after 5 s\nrank 0 is at\nThread",
                *("in wait_for_ever", "in wait_beside", "\nrank 1 is at\nThread"),
            ],
        ),
    ],
)
def test_workers_that_fail_are_named(function, expected: list[str]) -> None:
    pool = WorkerPool(2)
    with pytest.raises(WorkerError) as caught:
        pool.run(function, timeout=5)
    assert not [word for word in expected if word not in str(caught.value)], str(caught.value)
    assert pool.broken and not any(process.is_alive() for process in pool.processes)
