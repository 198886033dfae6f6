"""Mistakes of people: exit code 2, one message from rank 0, nothing left half done. And runs that need nothing more."""

import json
import time
from pathlib import Path
from unittest.mock import patch

import pytest

from scripts import tokenize_text
from tests.distributed.harness import run_workers
from tests.e2e.runs import STEPS, Attempt, Bench, attempt, columns, contents, status
from trainer.compose import load_config
from trainer.config import Config
from trainer.data import TrainLoader, build_train_loader
from trainer.optim import learning_rate
from trainer.shards import HEADER
from trainer.tokenizer import Tokenizer


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["optim.lrr=1"], ["optim.lrr is not a setting", "optim.lr"]),
        (["experiment=dmeo"], ["experiment=dmeo: no such option", "demo"]),
        (["optim.lr=fast"], ["optim.lr=fast", "must be a number such as 1e-3"]),
        # 2 and 4 divide the experts, but not this one process.
        (["parallel.ep=3"], ["parallel.ep=3 must divide", "= 1 ", "as it is: parallel.ep=1"]),
        (["parallel.ep=2"], ["parallel.ep=2", "1"]),
        (["parallel.dp_shard=2"], ["dp_shard=2", "one process"]),
        (["train.global_batch_size=3"], ["train.global_batch_size=3", "2 or 4"]),
        # Two processes would be no help: 257 entries of the vocabulary do not divide by 2.
        (["parallel.tp=2"], ["the one process of this run; legal, with all else as it is: parallel.tp=1"]),
        (["parallel.cp=2"], ["the one process of this run; start 2 with torchrun --nproc-per-node=2", "parallel.cp=1"]),
        (["data.train.text.paths=/no/such"], ["data.train.text.paths: must be a list such as '[a,b]'"]),
        (["model.vocab_size=200"], ["data.tokenizer_vocab_size=257", "model.vocab_size=200"]),
        (["checkpoint.resume=/no/such/place"], ["checkpoint.resume=/no/such/place"]),
        (["data.train.text.paths=[/no/such/place/*.txt]"], ["data.train.text.paths", "/no/such/place"]),
        (["data.eval.held.paths=[/no/such/place/*.txt]"], ["data.eval.held.paths", "/no/such/place"]),
        (["data.tokenizer=/no/such/place"], ["data.tokenizer", "/no/such/place"]),
    ],
)
def test_mistake_in_the_config_makes_no_folder(bench: Bench, overrides: list[str], words: list[str]) -> None:
    attempt = bench.alone("config-mistake", *overrides)
    assert attempt.code == 2
    assert attempt.out == ""
    (line,) = attempt.err.splitlines()
    assert line.startswith("error: ")
    assert all(word in line for word in words), line
    assert not bench.path("config-mistake").exists()


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("data.train.text.paths=[text/latin]", ["text/latin", "UTF-8", "data.invalid_utf8=skip"]),
        ("data.eval.held.paths=[text/latin]", ["data.eval.held", "text/latin", "UTF-8"]),
    ],
)
def test_mistake_in_the_data_can_be_mended_in_the_same_run(bench: Bench, override: str, words: list[str]) -> None:
    run_id = f"mended-{abs(hash(override))}"
    run = bench.path(run_id)
    attempt = bench.alone(run_id, "train.steps=1", override.replace("[text", f"[{bench.folder}/text"))
    assert attempt.code == 2
    (line,) = attempt.err.splitlines()
    assert line.startswith("error: ") and all(word in line for word in words), line
    ended = status(run)
    assert (ended["state"], ended["exit_code"], ended["step"]) == ("failed", 2, None)
    assert all(word in ended["message"] for word in words)
    assert not (run / "checkpoints").exists() and not (run / "tokenizer").exists()
    again = bench.alone(run_id, "train.steps=1", "train.eval_every=null", "checkpoint.every=null")
    assert again.code == 0, again.err
    assert (status(run)["state"], status(run)["attempt"]) == ("finished", 2)


def test_a_shard_whose_damage_shows_in_the_middle_of_the_run_is_named(
    bench: Bench, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shards = tmp_path / "shards"
    command = ["--output", str(shards), "--tokenizer", "train", "--vocab-size", "257", f"{bench.folder}/text/*.txt"]
    assert tokenize_text.main(command) == 0
    with open(shards / "00000.tokens", "r+b") as file:
        file.seek(HEADER.size)
        file.write(b"\xff" * 2000)
    words = ["data.train.text.kind=tokens", f"data.train.text.paths=[{shards}]", f"data.tokenizer={shards}"]
    attempt = bench.alone("damaged-ids", *words)
    assert attempt.code == 2
    last = attempt.err.splitlines()[-1]
    assert last.startswith(f"error: {shards}/00000.tokens is damaged: document ") and "tokenise it again" in last
    assert "Traceback" not in attempt.err


def test_two_ranks_with_the_same_mistake_speak_once(bench: Bench) -> None:
    launch = bench.launch("both", f"data.train.text.paths=[{bench.folder}/text/latin]")
    assert launch.end() == 2, launch.output
    said = [line for line in launch.output.splitlines() if "is not valid UTF-8" in line]
    assert len(said) == 2 and said[0].startswith("error: "), said
    # Once more below torchrun's traceback.
    assert said[1] == launch.output.splitlines()[-1], launch.output
    assert said[1].startswith("train.sh: run both stopped because of a mistake: "), said
    assert "rank 1: " not in launch.output
    assert launch.processes() == {}


def test_changed_model_data_or_optimizer_is_refused_and_the_run_stays(bench: Bench, straight: list[Attempt]) -> None:
    run = bench.copy("straight", "changed")
    before = contents(run)
    changes = ["model.dim=64", "optim.lr=1e-4", f"data.train.text.paths=[{bench.folder}/text/1*.txt]"]
    attempt = bench.alone("changed", *changes)
    assert attempt.code == 2 and attempt.samples == []
    for line in ("  model.dim: 32 -> 64", "  optim.lr: 0.003 -> 0.0001", "  data.train.text.paths: "):
        assert line in attempt.err
    assert contents(run) == before


def test_changed_files_under_the_same_name_are_noticed(bench: Bench, straight: list[Attempt]) -> None:
    """The settings of the data are the same; the text is not. The run keeps the config that it was trained with."""
    run = bench.copy("straight", "rewritten")
    (run / "status.json").write_text(json.dumps({**status(run), "state": "preempted", "step": 10}))
    (run / "checkpoints" / "latest").write_text("step_00000010\n")
    told = ("events.jsonl", "log.txt")
    before = {name: text for name, text in contents(run).items() if name not in told}
    text = bench.folder / "text" / "99.txt"
    text.write_text("a new file that the globs find, too " * 20)
    try:
        attempt = bench.alone("rewritten", "train.log_every=7")
    finally:
        text.unlink()
    assert attempt.code == 2 and attempt.samples == []
    assert "the training data are not those of the checkpoint" in attempt.err
    assert {name: text for name, text in contents(run).items() if name not in told} == before


def test_a_finished_run_is_one_after_an_attempt_that_could_not_begin(bench: Bench, straight: list[Attempt]) -> None:
    """Whatever kept it from that; the launcher does not take the old status for this attempt's."""
    run = bench.copy("straight", "still-finished")
    ended = (run / "status.json").read_bytes()
    more = ("train.steps=30", "run.allow_changes=[train.steps,data.eval]", "train.eval_every=null")
    with patch("trainer.trainer.build_model", side_effect=RuntimeError("no such device")):
        with pytest.raises(RuntimeError, match="no such device"):
            bench.alone("still-finished", *more)
    assert (run / "status.json").read_bytes() == ended
    launch = bench.launch("still-finished", *more, f"data.eval.held.paths=[{bench.folder}/text/latin]")
    assert launch.end() == 2, launch.output
    last = launch.output.splitlines()[-1]
    assert last.startswith("train.sh: run still-finished stopped because of a mistake: "), last
    assert (run / "status.json").read_bytes() == ended
    assert "run still-finished is finished (step 20" in bench.alone("still-finished").out


def test_max_tokens_ends_the_run_and_its_schedule(bench: Bench) -> None:
    """1000 tokens are four steps of 256, rounded up; the finished run then says so and stays as it is."""
    command = ("few", "train.max_tokens=1000", "train.eval_every=null")
    attempt = bench.alone(*command)
    assert attempt.code == 0, attempt.err
    assert len(attempt.samples) == 4 < STEPS
    assert status(bench.path("few"))["step"] == 4
    rates = columns(bench.path("few"), "train/lr", "tokens", last=4)
    assert rates[4] == [pytest.approx(3e-4), 1024], "the last rate is lr * min_lr_ratio"
    before = contents(bench.path("few"))
    again = bench.alone(*command)
    assert (again.code, again.samples) == (0, [])
    assert "run few is finished (step 4" in again.out
    assert contents(bench.path("few")) == before
    longer = ("train.max_tokens=1500", "run.allow_changes=[train.max_tokens]", "train.log_every=9")
    more = bench.alone("few", "train.eval_every=null", *longer)
    assert more.code == 0, more.err
    assert (len(more.samples), status(bench.path("few"))["step"]) == (2, 6)
    assert "figures come every 9 steps (train.log_every) and at the end, step 6\nstep 6/6  loss" in more.out


def test_a_finished_run_needs_no_data_to_say_so(bench: Bench, straight: list[Attempt]) -> None:
    run = bench.copy("straight", "moved-data")
    config = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(config.replace(f"{bench.folder}/text/*.txt", f"{bench.folder}/gone/*.txt"))
    before, gone = contents(run), f"data.train.text.paths=[{bench.folder}/gone/*.txt]"
    again = bench.alone("moved-data", gone)
    assert (again.code, again.err) == (0, "") and "run moved-data is finished (step 20" in again.out
    # What asks for more of it needs them, and so does an evaluation its own.
    more = ("train.steps=21", "run.allow_changes=[train.steps]")
    evaluation = ("train.eval_only=true", "data.eval.held.paths=[/no/such/place/*.txt]")
    for asked in (more, evaluation):
        refused = bench.alone("moved-data", gone, *asked)
        assert refused.code == 2 and "there is no folder" in refused.err, refused.err
    assert contents(run) == before


def test_a_run_that_is_made_longer_has_the_schedule_of_its_new_length(bench: Bench) -> None:
    quiet = ("train.eval_every=null", "run.allow_changes=[train.steps]")
    for steps in (4, 6):
        assert bench.alone("longer", f"train.steps={steps}", *quiet).code == 0
    rates = [rate for (rate,) in columns(bench.path("longer"), "train/lr", last=6).values()]
    optim = load_config(bench.path("longer") / "config.yaml").optim
    assert rates == [learning_rate(step, optim, 4 if step < 4 else 6) for step in range(6)]
    assert rates[3] < rates[4] > rates[5]


def attempt_with_a_slow_reader(overrides: list[str], seconds: float) -> Attempt:
    def slow(config: Config, tokenizer: Tokenizer, rank: int, size: int) -> TrainLoader:
        if rank == 1:
            time.sleep(seconds)
        return build_train_loader(config, tokenizer, rank, size)

    with patch("trainer.trainer.build_train_loader", slow):
        return attempt(overrides)


def test_nodes_may_be_ready_with_the_data_long_after_each_other(bench: Bench) -> None:
    """Each tokenises its own copy, where they share no cache: longer than a rank is waited for elsewhere."""
    words = bench.overrides("slow-data", "train.steps=1", "train.eval_every=0", "parallel.timeout_seconds=10")
    ended = run_workers(attempt_with_a_slow_reader, 2, words, 13.0)
    assert [one.code for one in ended] == [0, 0], ended[0].err
