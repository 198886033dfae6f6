"""The benchmark of whole steps: what it reads from both trainers, what it writes, and that it tells what went wrong."""

import importlib.metadata
import json
import sys
from pathlib import Path

import pytest

from scripts import bench_train
from scripts.bench_results import result_file, write_result
from scripts.train_speed import LogLine, Row, measure, read_ours, read_torchtitan, summarise, table
from trainer.metrics_file import MetricsFile, read_metrics

RED, GREEN, ORANGE, TURQUOISE = "\033[31m", "\033[32m", "\033[38;2;180;60;0m", "\033[38;2;54;234;195m"
BLUE, CYAN, MAGENTA, RESET = "\033[34m", "\033[36m", "\033[35m", "\033[39m"
PREFIX = "[titan] 2025-11-28 01:00:00,000 - root - INFO - "


def titan_line(step: int, loss: float, tps: int, reserved: float = 80.16, *, colored: bool = False) -> str:
    """As torchtitan 0.2.2 formats it (components/metrics.py)."""
    red, green, orange, turquoise, blue, cyan, magenta, reset = (
        (RED, GREEN, ORANGE, TURQUOISE, BLUE, CYAN, MAGENTA, RESET) if colored else [""] * 8
    )
    return (
        f"{PREFIX}{red}step: {step:2}  {green}loss: {loss:8.5f}  {orange}grad_norm: {1.5:7.4f}  "
        f"{turquoise}memory: {reserved:5.2f}GiB({57.36:.2f}%)  {blue}tps: {tps:,}  {cyan}tflops: {290.12:,.2f}  "
        f"{magenta}mfu: {29.33:.2f}%{reset}\n"
    )


TITAN_OUTPUT = (
    f"{PREFIX}Training starts at step 1\n"
    + titan_line(1, 12.1, 900)
    + titan_line(5, 9.25, 30_000)
    + titan_line(10, 8.5, 46_000, 80.5)
    + f"{PREFIX}validate step: 12  loss:  8.1000  memory: 90.00GiB(60.00%)  tps: 1\n"
    + titan_line(15, 7.75, 47_000)
    + titan_line(20, 7.5, 46_700)
)


def test_torchtitan_lines() -> None:
    lines = read_torchtitan(TITAN_OUTPUT)
    assert [line.step for line in lines] == [1, 5, 10, 15, 20]
    assert lines[2] == LogLine(10, 46_000, 8.5, 80.5)


def test_torchtitan_colors_and_ranks() -> None:
    """Without --local-ranks-filter every rank writes; colored lines are read alike."""
    text = titan_line(10, 8.5, 46_000, 70.0, colored=True) + titan_line(10, 8.5, 46_200, 71.0, colored=True)
    assert RED in text
    assert read_torchtitan(text) == [LogLine(10, 46_100, 8.5, 71.0)]


def test_torchtitan_peak_allocated_counts_before_reserved() -> None:
    text = TITAN_OUTPUT + "peak allocated: 66.25GiB\npeak allocated: 67.50GiB\n"
    assert {line.peak_memory_gib for line in read_torchtitan(text)} == {67.5}


def test_torchtitan_loss_that_is_not_finite() -> None:
    assert read_torchtitan(titan_line(10, float("nan"), 46_000))[0].loss is None


def test_the_sample_is_what_torchtitan_logs() -> None:
    """The format above against the source of the installed torchtitan, so that an update cannot pass unnoticed."""
    source = importlib.metadata.distribution("torchtitan").locate_file("torchtitan/components/metrics.py").read_text()
    for part in (
        'step: {step:2}  "',
        'loss: {global_avg_loss:8.5f}  "',
        'memory: {device_mem_stats.max_reserved_gib:5.2f}GiB"',
        '({device_mem_stats.max_reserved_pct:.2f}%)  "',
        'tps: {round(tps):,}  "',
    ):
        assert part in source, part


def test_our_metrics(tmp_path: Path) -> None:
    """Written by the trainer's own writer, a null speed (a resumed step) left out."""
    file = MetricsFile(tmp_path / "metrics.jsonl", 1, [])
    speeds = {5: None, 10: 100.0, 15: 102.0}
    for step, speed in speeds.items():
        values = {"perf/tokens_per_second_per_gpu": speed, "train/loss": 7.0, "perf/peak_memory_gib": 1.5}
        file.write(step, step * 8, values)
    file.close()
    assert read_ours(read_metrics(tmp_path)) == [LogLine(10, 100.0, 7.0, 1.5), LogLine(15, 102.0, 7.0, 1.5)]


def test_measure_leaves_out_the_first_window() -> None:
    row = measure("torchtitan", 1, 60.0, read_torchtitan(TITAN_OUTPUT), log_every=5)
    assert (row.tokens_per_second_per_gpu, row.peak_memory_gib, row.loss) == (46_700, 80.5, 7.5)


def test_measure_needs_a_later_line() -> None:
    with pytest.raises(ValueError, match=r"no speed after step 5 \(steps reported: 1, 5\)"):
        measure("ours", 1, 1.0, [LogLine(1, 1.0, 1.0, None), LogLine(5, 1.0, 1.0, None)], log_every=5)


def rows(*speeds: tuple[str, float | None]) -> list[Row]:
    return [
        Row(
            side, 1, 9.0, None if speed else "ended with code 1", speed, 70.0 if speed else None, 7.0 if speed else None
        )
        for side, speed in speeds
    ]


def result(*speeds: tuple[str, float | None], **changes: object) -> dict:
    arguments = bench_train.parse_arguments(["--dry-run", "--commit", "abc"])
    machine = {"card": "NVIDIA H100 80GB HBM3", "torch": "2.11.0", "cuda": "13.0"}
    shown = {**bench_train.describe(arguments, machine), "baseline": {"torchtitan": "0.2.2"}}
    return {**shown, **summarise(rows(*speeds)), **changes}


def test_summary_and_table() -> None:
    shown = result(("ours", 60.0), ("torchtitan", 40.0), ("ours", 64.0), ("torchtitan", 50.0))
    assert shown["tokens_per_second_per_gpu"] == {"ours": 62.0, "torchtitan": 45.0}
    assert shown["ratio"] == pytest.approx(62 / 45)
    assert shown["pair_ratios"] == [1.5, 1.28]
    last = table(shown).splitlines()[-1]
    assert last == "ours / torchtitan 0.2.2: 1.378 (pairs: 1.500, 1.280)"


def test_table_without_a_baseline_and_with_a_failed_run() -> None:
    text = table(result(("ours", None), baseline={"skipped": "torchtitan cannot be imported: no tyro"}))
    assert "failed" in text and text.endswith("no baseline: torchtitan cannot be imported: no tyro")


def test_results_of_two_models_share_a_file(tmp_path: Path) -> None:
    file = tmp_path / "new" / "train_h100.json"
    write_result(file, "qwen3", result(("ours", 1.0)), "runs")
    write_result(file, "deepseek_v3", result(("ours", 2.0)), "runs")
    write_result(file, "qwen3", result(("ours", 3.0)), "runs")
    kept = json.loads(file.read_text())
    assert {model: kept[model]["runs"][0]["tokens_per_second_per_gpu"] for model in kept} == {
        "qwen3": 3.0,
        "deepseek_v3": 2.0,
    }
    file.write_text('{"else": 1}')
    with pytest.raises(ValueError, match="holds no results of this benchmark"):
        write_result(file, "qwen3", result(), "runs")


def test_result_file_is_named_after_the_card() -> None:
    arguments = bench_train.parse_arguments([])
    out = result_file(arguments, "train", "NVIDIA H100 80GB HBM3", "runs")
    assert out == bench_train.ROOT / "benchmarks" / "train_h100_80gb_hbm3.json"


@pytest.mark.parametrize(("memory_gib", "layers"), [(79.1, 6), (139.8, 8)])
def test_layers_follow_the_memory(memory_gib: float, layers: int) -> None:
    arguments = bench_train.parse_arguments([])
    bench_train.settle(arguments, {"gpus": 2, "memory_gib": memory_gib})
    assert (arguments.nproc, arguments.layers) == (2, layers)
    with pytest.raises(ValueError, match="--nproc=4: there are 2 GPUs"):
        bench_train.settle(bench_train.parse_arguments(["--nproc=4"]), {"gpus": 2, "memory_gib": memory_gib})


def test_commands_agree_on_sizes(tmp_path: Path) -> None:
    """Both sides get the same sizes, and ours composes."""
    from trainer.compose import compose

    arguments = bench_train.parse_arguments(["--nproc=2", "--layers=6", "optim.lr=1e-3"])
    ours = bench_train.ours_command(arguments, tmp_path)
    config = compose(ours[ours.index("trainer.train") + 1 :])
    assert (config.model.num_layers, config.model.vocab_size, config.train.global_batch_size) == (6, 151936, 8)
    assert (config.parallel.ep, config.parallel.compile, config.model.moe.force_balance) == (2, True, True)
    assert (config.data.document_mask, config.optim.lr, config.checkpoint.every) == (False, 1e-3, None)
    theirs = bench_train.theirs_command(arguments, tmp_path / "t.npy", 0)
    assert {"--layers=6", "--seq-len=4096", "--local-batch=4", "--steps=20", "--log-every=5"} <= set(theirs)


@pytest.mark.parametrize("words", [["--steps=12"], ["--steps=5"], ["--repeats=0"], ["--model=other"]])
def test_wrong_arguments_are_refused(words: list[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        bench_train.parse_arguments(words)
    assert stopped.value.code == 2


def test_a_failing_process_shows_its_last_lines(tmp_path: Path) -> None:
    arguments = bench_train.parse_arguments(["--dry-run"])
    code = "print('\\n'.join(f'line {i}' for i in range(100))); raise SystemExit(3)"
    row = bench_train.run_once(arguments, tmp_path, "torchtitan", 1, [sys.executable, "-c", code])
    assert row.error is not None and row.error.startswith("ended with code 3")
    assert "line 70\n" in row.error and "line 69\n" not in row.error and "line 99" in row.error


def test_torchruns_report_does_not_hide_the_cause() -> None:
    report = "E1128 02:03 torch/distributed/elastic/multiprocessing/api.py:1002] failed (exitcode: 1) local_rank: 0\n"
    assert (
        bench_train.last_lines("[rank0]: NameError: x\n" + report + "Traceback\n" * 40) == "    [rank0]: NameError: x"
    )


def test_a_process_that_hangs_is_stopped(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import time; print('here', flush=True); time.sleep(60)"]
    failure = bench_train.run_process(command, tmp_path / "log", timeout=2)
    assert failure == "was stopped after 2 seconds (--timeout)"
    assert (tmp_path / "log").read_text() == "here\n"


def test_a_side_that_failed_is_not_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run_once(arguments: object, work: Path, side: str, repeat: int, command: list[str]) -> Row:
        return Row(side, repeat, 1.0, error="broke" if side == "torchtitan" else None)

    monkeypatch.setattr(bench_train, "run_once", run_once)
    monkeypatch.setattr(bench_train, "prepare_tokens", lambda arguments, file: 0)
    arguments = bench_train.parse_arguments(["--nproc=2", "--layers=6", "--repeats=3"])
    done = bench_train.run_all(arguments, tmp_path, with_baseline=True)
    assert [(row.side, row.repeat) for row in done] == [("ours", 1), ("torchtitan", 1), ("ours", 2), ("ours", 3)]
