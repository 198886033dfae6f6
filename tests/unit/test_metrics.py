"""metrics.jsonl, events, W&B and console: names, attempts, torn lines, one W&B run across requeues."""

import io
import json
import math
import os
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from trainer.config import Config, SourceConfig, WandbConfig
from trainer.console import BarConsole, PlainConsole, describe, duration, open_console
from trainer.evaluate import EvalResult
from trainer.flops import active_matmul_weights, flops_per_token, peak_tflops
from trainer.metrics import RunMetrics, read_metrics
from trainer.metrics_file import ARRAYS, SCALARS, JsonLines, MetricsFile, scalar_names
from trainer.models.config import AttentionConfig, ModelConfig, MoEConfig
from trainer.run import RunFolder
from trainer.step import StepResult
from trainer.wandb_run import WandbRun, wandb_id

# Scripts and users rely on these: names may be added, never taken away.
RELEASED = """
step tokens time attempt train/loss train/aux_loss train/z_loss train/mtp_loss train/grad_norm train/lr
eval/held_out/loss eval/held_out/bits_per_byte perf/tokens_per_second perf/tokens_per_second_per_gpu perf/tflops_per_gpu
perf/mfu perf/step_seconds perf/data_seconds perf/peak_memory_gib moe/load_max_over_mean moe/load_entropy
moe/dropped_rows moe/tokens_per_expert perf/exposed_exchange_seconds
""".split()


def config() -> Config:
    made = Config()
    made.logging.console = "none"
    made.data.eval = {"held_out": SourceConfig()}
    return made


def run_folder(path: Path, attempt: int = 1) -> RunFolder:
    return RunFolder(path, "run-7", attempt, finished=False, notice="")


def mesh(rank: int = 0) -> Any:
    return types.SimpleNamespace(rank=rank, world_size=2, device=torch.device("cpu"))


def step_result(loss: float = 2.5, moe: bool = True) -> StepResult:
    counts = torch.tensor([[4, 4], [6, 2]]) if moe else None
    values = [torch.tensor(x, dtype=torch.float64) for x in (loss, 0.25, 0.125, 3.0)]
    dropped, tokens = torch.tensor(5.0), torch.tensor(8)
    return StepResult(*values, counts, dropped, tokens, True)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_every_line_has_every_name(tmp_path: Path) -> None:
    metrics = RunMetrics(config(), run_folder(tmp_path), mesh())
    metrics.log(1, step_result(), lr=0.1 + 0.2)
    metrics.log(2, step_result(moe=False))
    metrics.log_eval(3, {"held_out": EvalResult(1.5, None, 10)})
    metrics.close()
    full, dense, evaluated = lines(tmp_path / "metrics.jsonl")
    for line in (full, dense, evaluated):
        assert set(line) == set(RELEASED)
    assert full["train/loss"] == 2.5 and full["train/grad_norm"] == 3.0 and full["train/lr"] == 0.1 + 0.2
    # Worst layer: counts 6 and 2, mean 4.
    assert full["moe/load_max_over_mean"] == 1.5 and full["moe/dropped_rows"] == 5
    assert full["moe/tokens_per_expert"] == [[4, 4], [6, 2]]
    assert full["tokens"] == 8 * 1024 and dense["tokens"] == 2 * 8 * 1024
    assert full["perf/mfu"] is None, "there is no peak for a CPU"
    assert full["eval/held_out/loss"] is None and dense["moe/load_entropy"] is None and dense["train/lr"] is None
    assert evaluated["eval/held_out/loss"] == 1.5 and evaluated["train/loss"] is None


def test_evaluation_of_a_step_joins_its_line(tmp_path: Path) -> None:
    metrics = RunMetrics(config(), run_folder(tmp_path), mesh())
    metrics.log(4, step_result())
    metrics.log_eval(4, {"held_out": EvalResult(1.5, 2.0, 10)})
    metrics.close()
    (line,) = read_metrics(tmp_path)
    assert (line["train/loss"], line["eval/held_out/bits_per_byte"]) == (2.5, 2.0)


def test_perf_leaves_out_pauses_and_counts_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("trainer.metrics.time.perf_counter", lambda: now[0])
    metrics = RunMetrics(config(), run_folder(tmp_path), mesh())
    now[0] += 50
    metrics.begin(10)
    for _ in range(4):
        with metrics.waiting_for_data():
            now[0] += 0.5
        now[0] += 1.5
    with metrics.pause():
        now[0] += 1000
    metrics.log(14, step_result())
    metrics.close()
    (line,) = read_metrics(tmp_path)
    assert line["perf/step_seconds"] == 2.0 and line["perf/data_seconds"] == 0.5
    assert line["perf/tokens_per_second"] == 8 * 1024 / 2.0
    assert line["perf/tokens_per_second_per_gpu"] == 8 * 1024 / 4.0
    flops = flops_per_token(ModelConfig(), 1024)
    assert math.isclose(line["perf/tflops_per_gpu"], flops * 2048 / 1e12)
    assert line["perf/peak_memory_gib"] > 0.05


def test_other_ranks_write_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    metrics = RunMetrics(config(), run_folder(tmp_path), mesh(rank=1))
    metrics.log(1, step_result())
    metrics.log_eval(1, {"held_out": EvalResult(1.5, 2.0, 10)})
    metrics.say("hello")
    metrics.event("save")
    assert metrics.state() == {"wandb_run_id": None}
    metrics.close()
    assert not list(tmp_path.iterdir()) and capsys.readouterr().out == ""


def test_what_is_not_a_number_is_null_and_told(tmp_path: Path) -> None:
    metrics = RunMetrics(config(), run_folder(tmp_path), mesh())
    metrics.log(1, step_result(loss=math.nan))
    metrics.close()
    text = (tmp_path / "metrics.jsonl").read_text()
    assert json.loads(text)["train/loss"] is None and "NaN" not in text
    told = [line for line in lines(tmp_path / "events.jsonl") if line["event"] == "nonfinite"]
    assert [(line["step"], line["name"], line["value"]) for line in told] == [(1, "train/loss", "nan")]


def test_unknown_names_and_steps_going_back_are_refused(tmp_path: Path) -> None:
    writer = MetricsFile(tmp_path / "metrics.jsonl", 1, ["a"])
    writer.write(5, 0, {"eval/a/loss": 1.0})
    with pytest.raises(ValueError, match="unknown metrics eval/b/loss, train/los;"):
        writer.write(6, 0, {"train/los": 1.0, "eval/b/loss": 1.0})
    with pytest.raises(ValueError, match="step 4 after those of step 5"):
        writer.write(4, 0, {})
    writer.close()
    assert len(set(scalar_names(["a", "b"]))) == len(SCALARS) + 4 and not set(SCALARS) & set(ARRAYS)


def test_readers_see_one_value_per_step_and_the_newest_attempt(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    first = MetricsFile(path, 1, [])
    for step in (10, 20, 30):
        first.write(step, 0, {"train/loss": float(step)})
    first.close()
    # Killed while it wrote a line; the next attempt starts again behind step 10.
    with open(path, "a") as stream:
        stream.write('{"step": 40, "attempt": 1, "train/lo')
    second = MetricsFile(path, 2, [])
    for step in (20, 30):
        second.write(step, 0, {"train/loss": -float(step)})
    second.close()
    with open(path, "a") as stream:
        stream.write('{"step": 50, "att')
    read = read_metrics(tmp_path)
    assert [(line["step"], line["attempt"], line["train/loss"]) for line in read] == [
        (10, 1, 10.0),
        (20, 2, -20.0),
        (30, 2, -30.0),
    ]
    assert all("attempt" in json.loads(line) for line in path.read_text().splitlines() if line.endswith("}"))
    assert read == read_metrics(path)


def test_readers_do_not_see_what_a_run_that_went_back_has_left(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for attempt, steps in ((1, (10, 20, 30, 40, 50)), (2, (20, 30)), (3, (40,))):
        writer = MetricsFile(path, attempt, [])
        for step in steps:
            writer.write(step, 0, {"train/loss": float(attempt)})
        writer.close()
    assert [(line["step"], line["attempt"]) for line in read_metrics(path)] == [(10, 1), (20, 2), (30, 2), (40, 3)]
    # An evaluation of an earlier checkpoint, after an attempt that was killed before its first line.
    writer = MetricsFile(path, 4, ["a"], add=True)
    writer.write(10, 0, {"eval/a/loss": 1.0})
    writer.write(25, 0, {"eval/a/loss": 1.0})
    writer.close()
    read = read_metrics(path)
    assert [(line["step"], line["attempt"]) for line in read] == [(10, 1), (20, 2), (25, 2), (30, 2), (40, 3)]
    assert (read[0]["train/loss"], read[0]["eval/a/loss"]) == (1.0, 1.0)


def test_one_line_is_one_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    file = JsonLines(tmp_path / "x.jsonl")
    writes: list[bytes] = []
    write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: writes.append(bytes(data)) or write(fd, data))
    file.write({"text": "a\nb" * 5000})
    file.close()
    assert len(writes) == 1 and writes[0].count(b"\n") == 1


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the words that the status keeps, too: repr of an OSError has no file name."""
    import os

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    file = JsonLines(tmp_path / "x.jsonl")
    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space left") as found:
        file.write({})
    assert found.value.errno == 28 and str(tmp_path / "x.jsonl") in repr(found.value)


class FakeWandb(types.ModuleType):
    """Stands for the wandb module: remembers what it was asked."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.inits: list[dict[str, Any]] = []
        self.logged: list[dict[str, Any]] = []
        self.axes: list[tuple[Any, ...]] = []
        self.exit_codes: list[int] = []

    def init(self, **arguments: Any) -> Any:
        self.inits.append(arguments)
        return types.SimpleNamespace(
            log=self.logged.append,
            define_metric=lambda *names, **kw: self.axes.append((*names, kw.get("step_metric"))),
            finish=lambda exit_code: self.exit_codes.append(exit_code),
        )

    def Settings(self, **_: Any) -> None:
        return None


def test_one_wandb_run_across_requeues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    settings = config()
    settings.logging.wandb = WandbConfig(mode="offline", project="p", tags=["t"])
    ids = []
    for attempt in (1, 2, 3):
        metrics = RunMetrics(settings, run_folder(tmp_path, attempt), mesh())
        metrics.log(attempt * 10, step_result())
        ids.append(metrics.state()["wandb_run_id"])
        metrics.close(exit_code=attempt)
        RunMetrics(settings, run_folder(tmp_path, attempt), mesh(rank=1)).close()
    assert len(set(ids)) == 1 and [init["id"] for init in wandb.inits] == ids, "rank 0 alone, one id"
    assert {init["resume"] for init in wandb.inits} == {"allow"}
    assert wandb.inits[0]["project"] == "p" and wandb.inits[0]["name"] == "run-7"
    assert wandb.inits[0]["config"]["train"]["seq_len"] == 1024
    assert wandb.axes[:2] == [("step", None), ("*", "step")]
    assert [(entry["step"], entry["attempt"]) for entry in wandb.logged] == [(10, 1), (20, 2), (30, 3)]
    assert "moe/tokens_per_expert" not in wandb.logged[0] and wandb.logged[0]["train/loss"] == 2.5
    assert wandb.logged[0]["perf/mfu"] is None, "the same names as in the file: null, never absent"
    assert wandb.exit_codes == [1, 2, 3]


def test_wandb_id_comes_from_the_checkpoint_when_its_file_is_lost(tmp_path: Path) -> None:
    from trainer.checkpoint import Checkpointer
    from trainer.config import CheckpointConfig

    first = wandb_id(tmp_path)
    assert wandb_id(tmp_path) == first
    saver = Checkpointer(tmp_path / "checkpoints", CheckpointConfig(asynchronous=False))
    saver.save(1, torch.nn.Linear(1, 1), None, {"wandb_run_id": first})
    (tmp_path / "wandb" / "run_id").unlink()
    assert wandb_id(tmp_path) == first


def test_disabled_wandb_is_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)  # an import would raise
    metrics = RunMetrics(config(), run_folder(tmp_path), mesh())
    metrics.log(1, step_result())
    metrics.close()
    assert not (tmp_path / "wandb").exists()
    # A mistake that is told without a traceback.
    with pytest.raises(ValueError, match=r"WANDB_API_KEY, or set logging\.wandb\.mode=offline or disabled"):
        WandbRun(tmp_path, WandbConfig(mode="online"), "run-7", {})
    with pytest.raises(ValueError, match=r"mode=offline: .*; set logging\.wandb\.mode=disabled"):
        WandbRun(tmp_path, WandbConfig(mode="offline"), "run-7", {})


def test_what_wandb_says_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setattr(wandb, "init", lambda **_: (_ for _ in ()).throw(Exception("No API key.\nUse it.")))
    with pytest.raises(ValueError, match=r"mode=online: No API key\. Use it; log in with `wandb login`, set"):
        WandbRun(tmp_path, WandbConfig(mode="online"), "run-7", {})


def test_real_wandb_offline_keeps_the_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    for attempt in (1, 2):
        run = WandbRun(tmp_path, WandbConfig(mode="offline"), "run-7", {"train": {"steps": 3}})
        run.log({"step": attempt, "train/loss": 1.0, "perf/mfu": None, "moe/tokens_per_expert": [[1]]})
        run.close(0)
    folders = list((tmp_path / "wandb").glob("offline-run-*"))
    # Two starts within one second share the folder's name.
    assert folders and all(folder.name.endswith(f"-{run.id}") for folder in folders)
    assert all(list(folder.glob(f"run-{run.id}.wandb")) for folder in folders)


def test_plain_console_and_log(tmp_path: Path) -> None:
    stream = io.StringIO()
    console = open_console("auto", 100, tmp_path / "log.txt", stream)
    assert type(console) is PlainConsole, "a StringIO is no terminal"
    console.say("hello")
    console.progress(10, {"train/loss": 2.5, "perf/step_seconds": 2.0, "perf/mfu": None, "eval/x/loss": 1.25})
    console.close()
    assert stream.getvalue() == "hello\nstep 10/100  loss 2.5000  left 3:00\n"
    assert [line[21:] for line in (tmp_path / "log.txt").read_text().splitlines()] == stream.getvalue().splitlines()
    silent = open_console("none", 100, tmp_path / "log.txt", stream := io.StringIO())
    silent.say("unheard")
    silent.close()
    assert stream.getvalue() == "" and "unheard" in (tmp_path / "log.txt").read_text()


def test_a_reader_that_leaves_does_not_end_the_run(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    with open(writer, "w") as stream:
        console = PlainConsole(2, tmp_path / "log.txt", stream)
        console.say("one")
        os.close(reader)
        for text in ("two", "three"):
            console.say(text)
        console.close()
    said = [line.split()[-1] for line in (tmp_path / "log.txt").read_text().splitlines()]
    assert said == ["one", "two", "three"]


def test_bar_on_a_terminal(tmp_path: Path) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    stream = Terminal()
    console = open_console("auto", 100, tmp_path / "log.txt", stream)
    assert type(console) is BarConsole
    console.say("a [message] with brackets")
    console.progress(50, {"train/loss": 2.5})
    console.close()
    assert "a [message] with brackets" in stream.getvalue() and "50/100" in stream.getvalue()
    assert "loss 2.5000" in (tmp_path / "log.txt").read_text()
    assert type(open_console("plain", 1, tmp_path / "log.txt", Terminal())) is PlainConsole


def test_descriptions() -> None:
    assert describe({"perf/mfu": 0.4125, "perf/tokens_per_second": 12345.6}) == "tok/s 12,346  mfu 41.2%"
    assert [duration(s) for s in (5, 65, 3725.9)] == ["0:05", "1:05", "1:02:05"]


def test_flops_of_a_dense_model_by_hand() -> None:
    model = ModelConfig(vocab_size=100, dim=8, num_layers=2, num_dense_layers=2, ffn_dim=16)
    model.attention = AttentionConfig(num_heads=4, num_kv_heads=2, head_dim=3)
    # q and o: 8 x 12 each, k and v: 8 x 6 each, FFN 3 x 8 x 16, head 8 x 100.
    weights = 2 * (96 + 96 + 48 + 48 + 384) + 800
    assert active_matmul_weights(model) == weights
    # Scores and values: 2 products x 2 operations x 4 heads x 3 dims x 10 keys, three times, two layers.
    assert flops_per_token(model, 10) == 6 * weights + 3 * 2 * (2 * 2 * 4 * 3 * 10)
    # Causal: 1 to 10 keys, 5.5 on average.
    assert flops_per_token(model, 10, causal=True) == 6 * weights + 3 * 2 * (2 * 2 * 4 * 3 * 5.5)
    model.attention.sliding_window, model.attention.sliding_window_layers = 4, "even"
    assert flops_per_token(model, 10) == 6 * weights + 3 * (2 * 2 * 4 * 3) * (4 + 10)


def test_flops_of_chunked_layers_by_hand() -> None:
    """Every third layer sees all 10 tokens; the others chunks of 4, 4 and 2."""
    attention = AttentionConfig(num_heads=2, num_kv_heads=1, head_dim=4, nope_every=3, chunk_size=4)
    model = ModelConfig(vocab_size=11, dim=8, num_layers=3, num_dense_layers=3, ffn_dim=5, attention=attention)
    keys = {False: 4 + 4 + 10, True: 2 * (10 + 10 + 3) / 10 + 5.5}
    for causal, mean_keys in keys.items():
        flops = flops_per_token(model, 10, causal=causal) - 6 * active_matmul_weights(model)
        assert math.isclose(flops, 6 * 2 * (4 + 4) * mean_keys)


def test_flops_of_experts_and_mla() -> None:
    model = ModelConfig(vocab_size=100, dim=8, num_layers=3, num_dense_layers=1, ffn_dim=16)
    model.moe = MoEConfig(num_experts=10, top_k=2, expert_dim=5, shared_expert_dim=7)
    model.attention = AttentionConfig(
        kind="mla", num_heads=2, kv_lora_rank=4, qk_nope_head_dim=3, qk_rope_head_dim=2, v_head_dim=6
    )
    attention = 8 * 10 + 8 * 6 + 4 * 2 * 9 + 12 * 8
    experts = 3 * 8 * (2 * 5 + 7) + 8 * 10
    assert active_matmul_weights(model) == 3 * attention + 3 * 8 * 16 + 2 * experts + 800
    assert flops_per_token(model, 10) - 6 * active_matmul_weights(model) == 6 * 3 * 2 * 11 * 10
    model.attention.q_lora_rank = 9
    assert active_matmul_weights(model) == 3 * (attention - 80 + 9 * 18) + 3 * 8 * 16 + 2 * experts + 800


def test_peaks() -> None:
    assert peak_tflops("NVIDIA H100 80GB HBM3") == peak_tflops("NVIDIA H200") == 989.0
    assert peak_tflops("NVIDIA A100-SXM4-80GB") == 312.0 and peak_tflops("NVIDIA B200") == 2250.0
    assert peak_tflops("NVIDIA H100 PCIe") == 756.0
    assert peak_tflops("") is None and peak_tflops("NVIDIA GeForce RTX 4090") is None
