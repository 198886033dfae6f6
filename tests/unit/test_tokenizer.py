"""Byte-exact accounting, training once, and tokenizers that others made."""

import json
from pathlib import Path

import pytest
import tokenizers

import trainer.tokenizer
from tests.unit.data_fixtures import data_config, text_source, write_texts
from trainer.config import DataConfig
from trainer.tokenizer import END_OF_TEXT, Tokenizer, load_tokenizer

TEXTS = ["def f(x):\n    return x\n" * 20, "Grüße, 世界 🎉\r\n\t\x00", "  spaces   at the end  ", f"a{END_OF_TEXT}b"]


@pytest.fixture
def data(tmp_path: Path) -> DataConfig:
    folder = write_texts(tmp_path / "text", {f"{i}.txt": text for i, text in enumerate(TEXTS)})
    return data_config(tmp_path, train={"x": text_source(folder)}, tokenizer_vocab_size=300)


def test_bytes_per_token_is_exact(data: DataConfig) -> None:
    tokenizer = load_tokenizer(data)
    assert 257 < tokenizer.vocab_size <= 300 and tokenizer.bytes_per_token.shape == (tokenizer.vocab_size,)
    assert tokenizer.bytes_per_token[tokenizer.eos_id] == 0
    for text, ids in zip(TEXTS, tokenizer.encode_batch(TEXTS, special_tokens=False), strict=True):
        assert int(tokenizer.bytes_per_token[ids].sum()) == len(text.encode())
        assert tokenizer.decode(ids) == text


def test_documents_that_mention_the_end_of_text_token(data: DataConfig) -> None:
    tokenizer = load_tokenizer(data)
    text = f"a{END_OF_TEXT}b"
    assert tokenizer.eos_id not in tokenizer.encode_batch([text], special_tokens=False)[0]
    assert tokenizer.encode(text).count(tokenizer.eos_id) == 1
    assert tokenizer.decode(tokenizer.encode(text)) == "ab"


def test_training_happens_once(data: DataConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    first = load_tokenizer(data)
    monkeypatch.setattr(trainer.tokenizer, "_train", lambda _: pytest.fail("trained again"))
    assert load_tokenizer(data).digest == first.digest


def test_training_is_deterministic(data: DataConfig, tmp_path: Path) -> None:
    """Every node trains its own: they must agree."""
    first = load_tokenizer(data)
    data.cache_dir = str(tmp_path / "another_node")
    assert load_tokenizer(data).digest == first.digest


def test_other_text_or_size_gives_another_tokenizer(data: DataConfig, tmp_path: Path) -> None:
    first = load_tokenizer(data)
    data.tokenizer_vocab_size = 290
    assert load_tokenizer(data).vocab_size == 290 != first.vocab_size
    data.tokenizer_vocab_size = 300
    write_texts(tmp_path / "text", {"0.txt": "something else entirely, " * 50})
    assert load_tokenizer(data).digest != first.digest


def test_large_text_is_sampled(data: DataConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer.tokenizer, "TRAINING_BYTES", 2000)
    write_texts(tmp_path / "text", {f"many/{i}.txt": f"{i:04d} " * 20 for i in range(100)})
    used = list(trainer.tokenizer._training_texts(data))
    assert 1000 < sum(map(len, used)) <= 2100
    assert max(map(len, used)) >= 100 and used == list(trainer.tokenizer._training_texts(data))


def test_save_and_load_again(data: DataConfig, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(data)
    tokenizer.save(tmp_path / "saved")
    for path in (tmp_path / "saved", tmp_path / "saved" / "tokenizer.json"):
        again = load_tokenizer(DataConfig(tokenizer=str(path)))
        assert (again.digest, again.eos_id, again.vocab_size) == (
            tokenizer.digest,
            tokenizer.eos_id,
            tokenizer.vocab_size,
        )
        assert again.encode(TEXTS[0]) == tokenizer.encode(TEXTS[0])


def write_json(folder: Path, model: tokenizers.models.Model, config: dict | None = None) -> Path:
    folder.mkdir(exist_ok=True)
    tokenizers.Tokenizer(model).save(str(folder / "tokenizer.json"))
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def test_end_of_text_token(tmp_path: Path) -> None:
    """It is named by the config, as text or as an object, or known by name; a name the vocabulary lacks is added."""
    model = tokenizers.models.BPE({"a": 0, "</s>": 1, "b": 2, "<|stop|>": 3}, [])
    for config, eos_id, size in (
        (None, 1, 4),
        ({"eos_token": None}, 1, 4),
        ({"eos_token": "<|stop|>"}, 3, 4),
        ({"eos_token": {"content": "<|stop|>"}}, 3, 4),
        ({"eos_token": "<|new|>"}, 4, 5),
    ):
        tokenizer = load_tokenizer(DataConfig(tokenizer=str(write_json(tmp_path / "t", model, config))))
        assert (tokenizer.eos_id, tokenizer.vocab_size) == (eos_id, size), config
        assert tokenizer.encode("ab") == [0, 2] and tokenizer.bytes_per_token[eos_id] == 0
    nameless = write_json(tmp_path / "nameless", tokenizers.models.BPE({"a": 0}, []))
    with pytest.raises(ValueError, match=r"nameless.*no known end-of-text token"):
        load_tokenizer(DataConfig(tokenizer=str(nameless)))


def test_bytes_of_a_sentencepiece_vocabulary(tmp_path: Path) -> None:
    model = tokenizers.models.BPE({"▁the": 0, "<0x0A>": 1, "é": 2, "</s>": 3}, [], byte_fallback=True)
    tokenizer = load_tokenizer(DataConfig(tokenizer=str(write_json(tmp_path / "t", model))))
    assert tokenizer.bytes_per_token.tolist() == [4, 1, 2, 0]


def test_mistakes_are_named(data: DataConfig, tmp_path: Path) -> None:
    data.tokenizer_vocab_size = 256
    with pytest.raises(ValueError, match="tokenizer_vocab_size is 256"):
        load_tokenizer(data)
    with pytest.raises(FileNotFoundError, match="absent"):
        load_tokenizer(DataConfig(tokenizer=str(tmp_path / "absent")))
    write_texts(tmp_path, {"broken.json": "{}"})
    with pytest.raises(ValueError, match=r"broken\.json is no tokenizer"):
        load_tokenizer(DataConfig(tokenizer=str(tmp_path / "broken.json")))
    data = data_config(tmp_path, train={"x": text_source(tmp_path)})
    data.train["x"].kind = "tokens"
    with pytest.raises(ValueError, match="needs a training source of text"):
        load_tokenizer(data)


def test_damaged_cache_is_trained_again(data: DataConfig, caplog: pytest.LogCaptureFixture) -> None:
    first = load_tokenizer(data)
    (file,) = Path(data.cache_dir).glob("tokenizers/*/tokenizer.json")
    file.write_text(file.read_text()[:100])
    assert load_tokenizer(data).digest == first.digest
    assert "damaged" in caplog.text


def test_digest_covers_the_end_of_text_token() -> None:
    text = tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0, "b": 1}, [])).to_str()
    assert Tokenizer(text, "a", "x").digest != Tokenizer(text, "b", "x").digest
