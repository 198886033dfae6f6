"""What reaches the model: the same samples whatever the layout, in an order that survives a restart."""

import json
import threading
import time
from pathlib import Path

import pytest
import torch

import trainer.data
from tests.unit.data_fixtures import data_config, numbered_texts, run_config, text_source, write_texts
from trainer.config import Config, SourceConfig
from trainer.data import Batch, TrainLoader, build_eval_sets, build_train_loader, load_tokenizer
from trainer.loss import IGNORE_INDEX


@pytest.fixture
def config(tmp_path: Path) -> Config:
    """Two sources and a held-out set of text."""
    for name in ("a", "b", "c"):
        write_texts(tmp_path / name, numbered_texts(30))
    train = {"a": text_source(tmp_path / "a", weight=3.0), "b": text_source(tmp_path / "b", weight=1.0)}
    return run_config(data_config(tmp_path, train=train, eval={"c": text_source(tmp_path / "c")}))


def loader(config: Config, rank: int = 0, size: int = 1) -> TrainLoader:
    return build_train_loader(config, load_tokenizer(config.data), rank, size)


def steps(config: Config, count: int, rank: int = 0, size: int = 1, state: dict | None = None) -> list[list[Batch]]:
    made = loader(config, rank, size)
    if state is not None:
        made.load_state_dict(state)
    read = [made.next_step() for _ in range(count)]
    made.close()
    return read


def by_sample(step: list[Batch]) -> dict[int, list[list[int]]]:
    """Every row of a step by its sample id."""
    rows = {}
    for batch in step:
        for i, sample in enumerate(batch.sample_ids_B.tolist()):
            rows[sample] = [tensor[i].tolist() for tensor in batch.tensors()[:4]]
    return rows


def test_shapes_and_types(config: Config) -> None:
    config.train.micro_batch_size = 2
    (step,) = steps(config, 1, rank=1, size=2)
    assert len(step) == 2
    for tensor in step[0].tensors()[:4]:
        assert tensor.shape == (2, 16) and tensor.dtype == torch.int64
    assert [batch.sample_ids_B.tolist() for batch in step] == [[2, 3], [6, 7]]
    assert int(step[0].labels_BS.max()) < 257 and int(step[0].document_ids_BS.min()) == 0
    moved = step[0].to("cpu")
    assert all(torch.equal(a, b) for a, b in zip(moved.tensors(), step[0].tensors(), strict=True))


def test_order_does_not_depend_on_the_layout(config: Config) -> None:
    """Also each global micro-step holds the same samples, whether ranks or rows make it up."""
    expected = [by_sample(step) for step in steps(config, 4)]
    assert [sorted(step) for step in expected] == [list(range(8 * s, 8 * s + 8)) for s in range(4)]
    for size, micro in ((1, 4), (2, 1), (2, 4), (4, 2), (8, 1)):
        config.train.micro_batch_size = micro
        ranks = [steps(config, 4, rank, size) for rank in range(size)]
        for s in range(4):
            merged = {}
            for rank in ranks:
                merged |= by_sample(rank[s])
            assert merged == expected[s], (size, micro)
            for m in range(8 // (size * micro)):
                together = sorted(i for rank in ranks for i in rank[s][m].sample_ids_B.tolist())
                assert together == list(range(8 * s + m * size * micro, 8 * s + (m + 1) * size * micro))


def test_seed_and_nothing_else_changes_the_order(config: Config) -> None:
    first = by_sample(steps(config, 1)[0])
    assert by_sample(steps(config, 1)[0]) == first
    config.run.seed = 1
    assert by_sample(steps(config, 1)[0]) != first


@pytest.mark.parametrize("prefetch", [0, 3])
def test_resume_on_other_ranks_goes_on_exactly(config: Config, prefetch: int) -> None:
    """Past the end of several epochs; steps that were prepared but not handed out are not skipped."""
    config.data.prefetch = prefetch
    straight = [by_sample(step) for step in steps(config, 40)]
    part = loader(config)
    read = [by_sample(part.next_step()) for _ in range(17)]
    state = json.loads(json.dumps(part.state_dict()))
    part.close()
    assert read == straight[:17] and state["next_sample"] == 17 * 8
    halves = [steps(config, 23, rank, 2, state) for rank in range(2)]
    assert [by_sample(a) | by_sample(b) for a, b in zip(*halves, strict=True)] == straight[17:]


def test_position_is_restored_also_after_steps_were_read(config: Config) -> None:
    made = loader(config)
    state = made.state_dict()
    first = [by_sample(made.next_step()) for _ in range(3)]
    made.load_state_dict(state)
    assert [by_sample(made.next_step()) for _ in range(3)] == first
    made.close()
    assert by_sample(made.next_step())[24], "after close() it goes on where it stood"
    made.close()


def test_state_of_other_data_is_refused(config: Config, tmp_path: Path) -> None:
    state = loader(config).state_dict()
    config.train.micro_batch_size, config.data.prefetch = 2, 0
    loader(config, 1, 2).load_state_dict(state)

    def refused() -> None:
        with pytest.raises(ValueError, match=r"not those of the checkpoint .*init_from=PATH.*allow_changes does not"):
            loader(config).load_state_dict(state)

    config.run.seed = 1
    refused()
    config.run.seed, config.train.seq_len = 0, 8
    refused()
    config.train.seq_len = 16
    loader(config).load_state_dict(state)
    write_texts(tmp_path / "b", {"001.txt": "changed"})
    refused()


def test_mixture_draws_by_weight(config: Config, tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_texts(tmp_path / name, {f"{i:03d}.txt": name * 50 for i in range(30)})
    tokenizer = load_tokenizer(config.data)
    words = [tokenizer.decode(batch.tokens_BS[0].tolist()) for step in steps(config, 16) for batch in step]
    assert sum("a" in text for text in words) == 96 and not any("a" in text and "b" in text for text in words)
    config.data.train["a"].weight = 0.0
    words = [tokenizer.decode(batch.tokens_BS[0].tolist()) for step in steps(config, 4) for batch in step]
    assert not any("a" in text for text in words)


def test_slow_reader_is_hidden_behind_the_step(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading takes 80 ms a step, computing 200 ms: waiting must be far below the reading (30 ms for noise)."""
    read = trainer.data.PackedSource.row
    monkeypatch.setattr(trainer.data.PackedSource, "row", lambda self, i: time.sleep(0.01) or read(self, i))

    def waits() -> list[float]:
        made = loader(config)
        times = []
        for _ in range(6):
            start = time.perf_counter()
            made.next_step()
            times.append(time.perf_counter() - start)
            time.sleep(0.2)
        made.close()
        return sorted(times[1:])

    assert waits()[2] < 0.03
    config.data.prefetch = 0
    assert waits()[2] > 0.08, "without prefetching the reading is seen: the test can fail"


def test_error_of_the_reading_thread_arrives(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: object, index: int) -> None:
        raise OSError("disk gone")

    made = loader(config)
    made.next_step()
    monkeypatch.setattr(trainer.data.PackedSource, "row", broken)
    with pytest.raises(OSError, match="disk gone"):
        for _ in range(10):
            made.next_step()
    with pytest.raises(OSError, match="disk gone"):
        made.next_step()
    made.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "prefetch"]


def test_eval_batches_are_equally_many_on_each_rank(config: Config) -> None:
    """CASES 53: a set that divides by nothing; what is padding counts for nothing."""
    tokenizer = load_tokenizer(config.data)
    config.data.eval_samples = 103
    one = build_eval_sets(config, tokenizer, 0, 1)["c"]
    expected = by_sample(list(one))
    assert len(expected) == one.num_samples == len(one) == 103
    for size, micro in ((2, 1), (4, 2), (3, 5)):
        config.train.micro_batch_size = micro
        ranks = [build_eval_sets(config, tokenizer, rank, size)["c"] for rank in range(size)]
        batches = [list(rank) for rank in ranks]
        assert {len(b) for b in batches} == {len(rank) for rank in ranks} == {-(-one.num_samples // (size * micro))}
        assert all(batch.tokens_BS.shape == (micro, 16) for b in batches for batch in b)
        merged = {}
        for rank in batches:
            merged |= by_sample(rank)
        padding = merged.pop(-1)
        assert merged == expected
        assert padding == [[0] * 16, [IGNORE_INDEX] * 16, [0] * 16, [-1] * 16]


def test_eval_set_is_the_whole_text_or_a_fixed_part(config: Config, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(config.data)
    whole = build_eval_sets(config, tokenizer, 0, 1)["c"]
    labels = torch.cat([batch.labels_BS.flatten() for batch in whole])
    labels = labels[labels != IGNORE_INDEX]
    files = list((tmp_path / "c").glob("*.txt"))
    # Every byte is predicted but the first of each document.
    assert int(tokenizer.bytes_per_token[labels].sum()) == sum(f.stat().st_size - 1 for f in files)
    assert int((labels == tokenizer.eos_id).sum()) == len(files) == whole.counts["documents"]
    config.data.eval_samples, config.run.seed = 5, 7
    part = build_eval_sets(config, tokenizer, 0, 1)["c"]
    every, total = by_sample(list(whole)), whole.num_samples
    assert total > 10
    spread = {i: every[i * total // 5] for i in range(5)}
    assert by_sample(list(part)) == spread, "evenly over the set, and the run's seed plays no part"
    assert [sorted(by_sample(list(part)))] * 2 == [list(range(5))] * 2, "can be read again"


def test_uneven_label_counts_are_the_same_in_every_layout(config: Config, tmp_path: Path) -> None:
    """CASES 35, the data side: only responses are learnt, and a step's labels do not depend on who reads them."""
    records = [{"prompt": "p" * (3 + i % 9), "response": "r" * (1 + i * i % 11)} for i in range(40)]
    write_texts(tmp_path, {"x.jsonl": "\n".join(map(json.dumps, records))})
    config.data.train["x"] = SourceConfig(kind="sft", paths=[f"{tmp_path}/x.jsonl"], weight=1.0)
    config.data.train["a"].weight = config.data.train["b"].weight = 0.0
    tokenizer = load_tokenizer(config.data)
    config.train.seq_len = 24

    def label_counts(size: int) -> list[list[int]]:
        ranks = [steps(config, 3, rank, size) for rank in range(size)]
        return [[sum(int((b.labels_BS >= 0).sum()) for b in rank[s]) for rank in ranks] for s in range(3)]

    single, quarters = label_counts(1), label_counts(4)
    assert [sum(step) for step in quarters] == [step[0] for step in single]
    assert len(set(quarters[0])) > 1, "uneven, or the case is not met"
    made = loader(config)
    assert made.counts["x"]["documents"] == 40 and made.counts["x"]["truncated"] == 0
    epoch = -(-made.counts["x"]["samples_per_epoch"] // 8)
    rows = {}
    for _ in range(epoch):
        rows |= by_sample(made.next_step())
    made.close()
    rows = {i: row for i, row in rows.items() if i < made.counts["x"]["samples_per_epoch"]}
    learnt = [label for row in rows.values() for label in row[1] if label != IGNORE_INDEX]
    text = tokenizer.decode(learnt)
    assert set(text) == {"r"} and len(text) == sum(len(record["response"]) for record in records)
    assert learnt.count(tokenizer.eos_id) == 40


def test_mistakes_are_named(config: Config, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(config.data)

    def refused(message: str, size: int = 1) -> None:
        with pytest.raises(ValueError, match=message):
            build_train_loader(config, tokenizer, 0, size)

    refused(r"global_batch_size=8 is not a multiple.*3 data-parallel ranks; nearest legal: 6 or 9", size=3)
    config.model.vocab_size = 256
    refused(r"tokenizer\.json has 257 entries, more than model\.vocab_size=256: set model\.vocab_size=320")
    with pytest.raises(ValueError, match=r"model\.vocab_size=256"):
        build_eval_sets(config, tokenizer, 0, 1)
    config.model.vocab_size, config.train.seq_len = 257, 100_000
    refused(r"data\.train\.a holds \d+ tokens, less than one sequence of train\.seq_len=100000")
    config.train.seq_len = 16
    config.data.train["b"].weight = -1.0
    refused(r"data\.train\.b\.weight is -1\.0")
    config.data.train["b"].weight = config.data.train["a"].weight = 0.0
    refused("no source of positive weight")
    record = {"prompt": "p" * 16, "response": "r"}
    write_texts(tmp_path, {"x.jsonl": json.dumps(record)})
    config.data.train["x"] = SourceConfig(kind="sft", paths=[f"{tmp_path}/x.jsonl"])
    build_train_loader(config, tokenizer, 0, 1)
    write_texts(tmp_path, {"x.jsonl": json.dumps(record | {"prompt": "p" * 17})})
    refused(r"data\.train\.x: every prompt fills")


def test_skipped_files_are_counted(config: Config, tmp_path: Path) -> None:
    write_texts(tmp_path / "a", {"bad.txt": b"\xff", "none.txt": ""})
    config.data.invalid_utf8 = config.data.empty_files = "skip"
    for _ in range(2):  # tokenised, then from the cache
        counts = loader(config).counts
        assert (counts["a"]["invalid_utf8"], counts["a"]["empty_files"], counts["a"]["documents"]) == (1, 1, 30)
        assert counts["b"]["invalid_utf8"] == 0
