"""What is logged is what the weights give: losses computed anew from a checkpoint by plain torch, and evaluation-only
runs."""

import json
import math
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import trainer.evaluate
from tests.e2e.runs import STEPS, Attempt, Bench, columns, contents, status
from trainer.checkpoint import load_weights
from trainer.compose import load_config
from trainer.config import Config
from trainer.data import Batch, build_eval_sets, build_train_loader
from trainer.meta_model import meta_model
from trainer.metrics import read_metrics
from trainer.models.transformer import Transformer
from trainer.tokenizer import read_tokenizer

# fp32 sums in another order and over other batch sizes.
BOUND = 2e-6
EVAL = ("eval/held/loss", "eval/held/bits_per_byte", "eval/short/loss", "eval/short/bits_per_byte")


def model_of(run: Path, step: int) -> tuple[Config, Transformer]:
    """The config of a run, and its weights after a step in a model without any layout."""
    config = load_config(run / "config.yaml")
    model = meta_model(config).to_empty(device="cpu")
    load_weights(run / "checkpoints" / f"step_{step:08d}", model)
    return config, model.eval()


@torch.no_grad()
def summed_loss(model: Transformer, batch: Batch) -> tuple[float, int]:
    """Cross-entropy over the full logits, summed over valid labels, and their number."""
    logits = model(batch.tokens_BS, positions_BS=batch.positions_BS, document_ids_BS=batch.document_ids_BS).logits_BSV
    loss = F.cross_entropy(logits.double().flatten(0, 1), batch.labels_BS.flatten(), ignore_index=-100, reduction="sum")
    return float(loss), int((batch.labels_BS != -100).sum())


def test_logged_training_loss_is_the_one_of_the_weights(bench: Bench, straight: list[Attempt]) -> None:
    """CASES 35, 38: two ranks, two micro-steps, uneven numbers of labels; one mean over all of them."""
    run = bench.path("straight")
    config, model = model_of(run, 10)
    loader = build_train_loader(config, read_tokenizer(run / "tokenizer"), 0, 1)
    loader.load_state_dict({"next_sample": 80, "fingerprint": loader.fingerprint})
    sums = [summed_loss(model, batch) for batch in loader.next_step()]
    loader.close()
    counts = [count for _, count in sums]
    assert len(set(counts)) > 1, "means of means would go unnoticed"
    (logged,) = columns(run, "train/loss", first=11, last=11)[11]
    assert logged == pytest.approx(sum(loss for loss, _ in sums) / sum(counts), rel=BOUND)


def test_logged_evaluation_is_the_one_of_the_weights(bench: Bench, straight: list[Attempt]) -> None:
    """CASES 53, and 37 for the axes there are: sets that do not divide by ranks, one with nothing for the second."""
    run = bench.path("straight")
    config, model = model_of(run, STEPS)
    tokenizer = read_tokenizer(run / "tokenizer")
    sets = build_eval_sets(config, tokenizer, 0, 1)
    sizes = {name: eval_set.num_samples for name, eval_set in sets.items()}
    assert sizes["short"] == 2 == config.train.micro_batch_size and sizes["held"] % 4
    logged = columns(run, *EVAL, first=STEPS)[STEPS]
    expected = []
    for eval_set in sets.values():
        batches = list(eval_set)
        loss, count = (sum(part) for part in zip(*(summed_loss(model, batch) for batch in batches), strict=True))
        labels = torch.cat([batch.labels_BS.flatten() for batch in batches])
        # Byte by byte (257 entries), but for the end of a document.
        num_bytes = int(((labels != -100) & (labels != tokenizer.eos_id)).sum())
        expected += [loss / count, loss / math.log(2) / num_bytes]
    assert logged == pytest.approx(expected, rel=BOUND)


def test_evaluation_alone_repeats_the_last_evaluation_and_changes_nothing_else(
    bench: Bench, straight: list[Attempt]
) -> None:
    run = bench.copy("straight", "looked-at")
    before, lines = contents(run), read_metrics(run)
    attempts = bench.pooled("looked-at", "train.eval_only=true")
    assert [attempt.code for attempt in attempts] == [0, 0], attempts[0].err
    assert attempts[0].samples == []
    expected = columns(run, *EVAL, first=STEPS)
    assert expected == columns(bench.path("straight"), *EVAL, first=STEPS)
    after = contents(run)
    changed = {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
    assert changed == {"metrics.jsonl", "events.jsonl", "log.txt"}
    event = json.loads((run / "events.jsonl").read_text().splitlines()[-1])
    assert (event["event"], event["attempt"]) == ("evaluation", 1), "the next training is attempt 2"
    (*unchanged, last), (*unchanged_now, last_now) = lines, read_metrics(run)
    assert unchanged == unchanged_now
    volatile = ("time", "attempt")
    assert {k: v for k, v in last.items() if k not in volatile} == {
        k: v for k, v in last_now.items() if k not in volatile
    }


def test_evaluation_of_other_sets_in_another_run_and_layout(bench: Bench, straight: list[Attempt]) -> None:
    checkpoint = bench.path("straight")
    attempt = bench.alone(
        "elsewhere",
        "train.eval_only=true",
        f"checkpoint.init_from={checkpoint}",
        f"data.eval.third.paths=[{bench.folder}/text/1*.txt]",
        "~data.train.text",
        f"data.tokenizer={checkpoint}/tokenizer",
    )
    assert attempt.code == 0, attempt.err
    (record,) = read_metrics(bench.path("elsewhere"))
    assert record["step"] == STEPS and record["train/loss"] is None and record["eval/third/loss"] > 0
    expected = columns(checkpoint, *EVAL, first=STEPS)[STEPS]
    assert [record[name] for name in EVAL] == pytest.approx(expected, rel=BOUND)


def test_weights_are_not_evaluated_with_another_tokenizer(bench: Bench, straight: list[Attempt]) -> None:
    other = bench.folder / "other" / "tokenizer"
    shutil.copytree(bench.path("straight") / "tokenizer", other)
    settings = (other / "tokenizer.json").read_text()
    (other / "tokenizer.json").write_text(
        settings.replace('"a":', '"?":').replace('"b":', '"a":').replace('"?":', '"b":')
    )
    attempt = bench.alone("straight", "train.eval_only=true", f"data.tokenizer={other}")
    assert attempt.code == 2
    assert "trained with another tokenizer" in attempt.err


def test_evaluation_without_weights_is_refused(bench: Bench) -> None:
    attempt = bench.alone("nothing-yet", "train.eval_only=true")
    assert attempt.code == 2
    assert "train.eval_only=true needs weights" in attempt.err


def test_an_evaluation_stops_at_the_next_batch(
    bench: Bench, straight: list[Attempt], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run stays as it is, and launchers learn of the stop though there is no status to tell it."""
    run = bench.copy("straight", "half-looked-at")
    before, lines, batches = status(run), read_metrics(run), []

    def stopped(*args: Any) -> Any:
        batches.append(args[1])
        signal.raise_signal(signal.SIGTERM)
        return forward(*args)

    forward = trainer.evaluate.forward
    monkeypatch.setattr(trainer.evaluate, "forward", stopped)
    monkeypatch.setenv("SLUICEGATE_EXIT_FILE", str(tmp_path / "exit"))
    attempt = bench.alone("half-looked-at", "train.eval_only=true")
    assert (attempt.code, len(batches)) == (0, 1), attempt.err
    assert "SIGTERM: stopped within the evaluation" in attempt.out and "held-out set" not in attempt.out
    assert (status(run), read_metrics(run)) == (before, lines)
    assert (tmp_path / "exit").read_text().startswith("75\n")
    monkeypatch.undo()
    assert bench.alone("half-looked-at", "train.eval_only=true").code == 0
