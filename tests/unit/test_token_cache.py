"""Tokenised once; noticed when anything changed or was damaged."""

import json
from pathlib import Path
from typing import Any

import pytest

import trainer.token_cache
from tests.unit.data_fixtures import byte_tokenizer, data_config, numbered_texts, text_source, write_texts
from trainer.config import SourceConfig
from trainer.token_cache import open_source, tokenise_source
from trainer.tokenizer import Tokenizer


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    return byte_tokenizer(tmp_path)


def test_documents_become_tokens_and_end_of_text(tmp_path: Path, tokenizer: Tokenizer) -> None:
    texts = {"a.txt": "Grüße", "b.txt": "x<|endoftext|>y", "c.txt": ""}
    source = text_source(write_texts(tmp_path / "text", texts))
    corpus, counts = open_source(source, data_config(tmp_path, empty_files="skip"), tokenizer, "data.train.x")
    assert counts["documents"] == 2 and counts["empty_files"] == 1 and counts["tokens"] == corpus.num_tokens
    for index, name in enumerate(["a.txt", "b.txt"]):
        tokens = corpus.tokens(index, 0, 100).tolist()
        assert tokens[-1] == tokenizer.eos_id and tokens.count(tokenizer.eos_id) == 1
        assert len(tokens) == len(texts[name].encode()) + 1 and tokenizer.decode(tokens) == texts[name]
    assert not corpus.has_prompts


def test_batches_do_not_show(tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    source = text_source(write_texts(tmp_path / "text", numbered_texts(20)))
    whole = open_source(source, data_config(tmp_path), tokenizer, "x").corpus
    monkeypatch.setattr(trainer.token_cache, "BATCH_CHARACTERS", 100)
    parts = open_source(source, data_config(tmp_path, cache_dir=str(tmp_path / "other")), tokenizer, "x").corpus
    assert parts.digest == whole.digest and parts.num_documents == 20


def test_labels_start_at_the_response(tmp_path: Path, tokenizer: Tokenizer) -> None:
    write_texts(tmp_path, {"x.jsonl": json.dumps({"prompt": "2+2=", "response": "4<|endoftext|>"})})
    source = SourceConfig(kind="sft", paths=[f"{tmp_path}/x.jsonl"])
    corpus, _ = open_source(source, data_config(tmp_path), tokenizer, "x")
    tokens = corpus.tokens(0, 0, 100).tolist()
    assert corpus.label_starts.tolist() == [4] and tokenizer.decode(tokens[4:]) == "4"
    # A chat template is made of special tokens: they are recognised here.
    assert tokens[-2:] == [tokenizer.eos_id] * 2


def test_tokenised_once_until_something_changes(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_texts(tmp_path / "text", numbered_texts(3))
    data, source = data_config(tmp_path), text_source(folder)
    runs: list[str] = []

    def counted(*args: Any, **kwargs: Any) -> dict[str, int]:
        runs.append("run")
        return tokenise_source(*args, **kwargs)

    monkeypatch.setattr(trainer.token_cache, "tokenise_source", counted)
    first = open_source(source, data, tokenizer, "x").corpus.digest
    assert open_source(source, data, tokenizer, "x").corpus.digest == first and len(runs) == 1
    write_texts(folder, {"000.txt": "changed"})
    assert open_source(source, data, tokenizer, "x").corpus.digest != first and len(runs) == 2
    source.exclude = [f"{folder}/001.txt"]
    assert open_source(source, data, tokenizer, "x").corpus.num_documents == 2 and len(runs) == 3
    other = Tokenizer(tokenizer._json_text, "<|other|>", "other")
    open_source(source, data, other, "x")
    assert len(runs) == 4


@pytest.mark.parametrize("damage", ["shortened", "missing shard", "missing report", "{}", "[]", "{"])
def test_damaged_cache_is_built_again(
    tmp_path: Path, tokenizer: Tokenizer, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    data = data_config(tmp_path)
    source = text_source(write_texts(tmp_path / "text", numbered_texts(5)))
    first = open_source(source, data, tokenizer, "x").corpus.digest
    (shard,) = Path(data.cache_dir).glob("tokens/*/*.tokens")
    if damage == "shortened":
        shard.write_bytes(shard.read_bytes()[:-8])
    elif damage == "missing shard":
        shard.unlink()
    elif damage != "missing report":
        (shard.parent / "source.json").write_text(damage)
    else:
        (shard.parent / "source.json").unlink()
    assert open_source(source, data, tokenizer, "x").corpus.digest == first
    assert "damaged" in caplog.text and str(shard.parent) in caplog.text


def test_shards_by_folder_or_glob(tmp_path: Path, tokenizer: Tokenizer) -> None:
    text = text_source(write_texts(tmp_path / "text", numbered_texts(8)))
    data = data_config(tmp_path)
    (tmp_path / "shards").mkdir()
    tokenise_source(text, data, tokenizer, tmp_path / "shards", "x", shard_tokens=100)
    expected = open_source(text, data, tokenizer, "x").corpus
    for path in (f"{tmp_path}/shards", f"{tmp_path}/shards/*.tokens"):
        corpus, counts = open_source(SourceConfig(kind="tokens", paths=[path]), data, tokenizer, "x")
        assert counts == {"documents": 8, "tokens": expected.num_tokens}
        assert [corpus.tokens(i, 0, 99).tolist() for i in range(8)] == [
            expected.tokens(i, 0, 99).tolist() for i in range(8)
        ]


def test_mistakes_are_named(tmp_path: Path, tokenizer: Tokenizer) -> None:
    data = data_config(tmp_path, empty_files="skip")
    text = text_source(write_texts(tmp_path / "text", numbered_texts(2)))
    (tmp_path / "shards").mkdir()
    tokenise_source(text, data, tokenizer, tmp_path / "shards", "x")
    tokens = SourceConfig(kind="tokens", paths=[f"{tmp_path}/shards"])
    other = Tokenizer(tokenizer._json_text, "<|other|>", "other/tokenizer.json")
    with pytest.raises(ValueError, match=r"data\.train\.x: .*00000\.tokens was written with another tokenizer.*other/"):
        open_source(tokens, data, other, "data.train.x")
    shard = tmp_path / "shards" / "00000.tokens"
    with open(shard, "r+b") as file:
        file.seek(32)  # the header's entries of the vocabulary
        file.write((1 << 40).to_bytes(8, "little"))
    with pytest.raises(ValueError, match=r"was written with another tokenizer \(1099511627776 entries\)"):
        open_source(tokens, data, tokenizer, "data.train.x")
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"data\.train\.x: .*00000\.tokens is cut short"):
        open_source(tokens, data, tokenizer, "data.train.x")
    shard.unlink()
    with pytest.raises(FileNotFoundError, match="shards"):
        open_source(tokens, data, tokenizer, "data.train.x")
    empty = text_source(write_texts(tmp_path / "empty", {"a.txt": ""}))
    with pytest.raises(ValueError, match=r"data\.train\.x: no document is left"):
        open_source(empty, data, tokenizer, "data.train.x")
