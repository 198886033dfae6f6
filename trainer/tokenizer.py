"""Text to token ids and back, and how many bytes of text each id stands for.

Two kinds: a `tokenizer.json` in the Hugging Face `tokenizers` format, and a byte-level BPE that is trained here on the
run's own training text, once, and cached. The bytes per token turn a loss in nats per token into bits per byte, which
does not depend on the vocabulary: exact for byte-level vocabularies (every character of an entry is one byte of text).
"""

import hashlib
import json
import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import tokenizers
import torch

from trainer.check_inputs import tokenizer_file
from trainer.config import DataConfig
from trainer.node_cache import build_once, cache_key
from trainer.sources import check_source, documents, source_identity, source_size, unit_hash

logger = logging.getLogger(__name__)

END_OF_TEXT = "<|endoftext|>"
# Names of the end-of-text token where tokenizer_config.json does not say.
KNOWN_END_TOKENS = (END_OF_TEXT, "<|end_of_text|>", "<|return|>", "<｜end▁of▁sentence｜>", "</s>", "<eos>")
# More text than this does not change a vocabulary of some thousand entries noticeably.
TRAINING_BYTES = 64 << 20
MIN_VOCAB_SIZE = 257  # the 256 bytes and the end-of-text token


class Tokenizer:
    """Immutable. `digest` (16 bytes) names it: shards and caches record with which tokenizer they were written.

    json_text: content of a `tokenizer.json`. An `eos_token` the vocabulary lacks is added to it. name: for messages."""

    def __init__(self, json_text: str, eos_token: str, name: str) -> None:
        self._json_text = json_text
        self._tokenizer = tokenizers.Tokenizer.from_str(json_text)
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self._tokenizer.add_special_tokens([eos_token])  # an entry that is there already only becomes special
        eos_id = self._tokenizer.token_to_id(eos_token)
        assert eos_id is not None
        self.name = name
        self.eos_token = eos_token
        self.eos_id = eos_id
        self.digest = hashlib.blake2b(f"{eos_token}\0{json_text}".encode(), digest_size=16).digest()
        self.bytes_per_token = _bytes_per_token(self._tokenizer, json.loads(json_text))
        self.vocab_size = len(self.bytes_per_token)

    def encode(self, text: str) -> list[int]:
        """Token ids; special tokens spelled out in the text are recognised, none is added."""
        return self.encode_batch([text], special_tokens=True)[0]

    def encode_batch(self, texts: Sequence[str], *, special_tokens: bool) -> list[list[int]]:
        """Token ids of each text, on all cores.

        special_tokens: whether `<|endoftext|>` and the like in a text are those tokens, or (in documents that merely
        mention them) ordinary characters."""
        self._tokenizer.encode_special_tokens = not special_tokens
        encoded = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in encoded]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of the ids, special tokens left out."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=True)

    def is_of(self, file: Path) -> bool:
        """Whether this tokenizer came from a `tokenizer.json` with the same content as `file`."""
        return file.read_text(encoding="utf-8") == self._json_text

    def save(self, folder: str | Path, *, for_transformers: bool = False) -> None:
        """Write `tokenizer.json` and `tokenizer_config.json`; load_tokenizer of the folder gives this one again.

        for_transformers: name the class that `AutoTokenizer` is to use, too."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "tokenizer.json").write_text(self._json_text, encoding="utf-8")
        settings = {"eos_token": self.eos_token}
        if for_transformers:
            settings["tokenizer_class"] = "PreTrainedTokenizerFast"
        config = json.dumps(settings, ensure_ascii=False)
        (folder / "tokenizer_config.json").write_text(config + "\n", encoding="utf-8")


def load_tokenizer(data: DataConfig) -> Tokenizer:
    """The tokenizer that `data.tokenizer` names: a folder, a file, or `train`.

    Raises FileNotFoundError for a missing path; ValueError for a file that is no tokenizer, that names no end-of-text
    token, or for a vocabulary too small to train."""
    if data.tokenizer != "train":
        return _read_tokenizer(Path(data.tokenizer).expanduser())
    if data.tokenizer_vocab_size < MIN_VOCAB_SIZE:
        size = data.tokenizer_vocab_size
        raise ValueError(f"data.tokenizer_vocab_size is {size}: a byte-level vocabulary has at least {MIN_VOCAB_SIZE}")
    folder = _training_folder(data)
    build_once(folder, lambda building: _train(data).save(building), lambda built: _check(built))
    return _read_tokenizer(folder)


def read_tokenizer(path: str | Path) -> Tokenizer:
    """The tokenizer in a folder (such as `<run>/tokenizer`, as `Tokenizer.save` writes it) or `tokenizer.json` file.

    Raises FileNotFoundError, ValueError as load_tokenizer."""
    return _read_tokenizer(Path(path))


def _check(folder: Path) -> None:
    _read_tokenizer(folder)


def _read_tokenizer(path: Path) -> Tokenizer:
    file = tokenizer_file(path)
    try:
        text = file.read_text(encoding="utf-8")
        known = tokenizers.Tokenizer.from_str(text)
    except Exception as error:  # the package raises bare Exception
        raise ValueError(f"data.tokenizer: {file} is no tokenizer of Hugging Face `tokenizers`: {error}") from None
    settings = file.with_name("tokenizer_config.json")
    found = (token for token in KNOWN_END_TOKENS if known.token_to_id(token) is not None)
    eos = _configured_end_token(settings) or next(found, None)
    if eos is None:
        hint = f'write {{"eos_token": ...}} to {settings}'
        raise ValueError(f"data.tokenizer: {file} has no known end-of-text token: {hint}")
    return Tokenizer(text, eos, str(file))


def _configured_end_token(settings: Path) -> str | None:
    if not settings.is_file():
        return None
    try:
        eos = json.loads(settings.read_text(encoding="utf-8")).get("eos_token")
    except (ValueError, AttributeError) as error:
        raise ValueError(f"data.tokenizer: {settings} is malformed: {error}") from None
    return eos.get("content") if isinstance(eos, dict) else eos


def _text_sources(data: DataConfig) -> list[str]:
    names = [name for name, source in data.train.items() if source.kind != "tokens" and source.weight > 0]
    if not names:
        hint = "token shards need the tokenizer they were written with: give its folder as data.tokenizer"
        raise ValueError(f"data.tokenizer=train needs a training source of text in data.train; {hint}")
    return names


def _training_folder(data: DataConfig) -> Path:
    identities = []
    for name in _text_sources(data):
        check_source(data.train[name], f"data.train.{name}")
        identities.append(source_identity(data.train[name], f"data.train.{name}"))
    settings = [data.tokenizer_vocab_size, TRAINING_BYTES, data.invalid_utf8, data.empty_files]
    return Path(data.cache_dir).expanduser() / "tokenizers" / cache_key([settings, identities])


def _training_texts(data: DataConfig) -> Iterator[str]:
    """Documents of every text source; past TRAINING_BYTES in all, an even share of each, drawn by a hash."""
    names = _text_sources(data)
    share = TRAINING_BYTES / len(names)
    for name in names:
        source, where = data.train[name], f"data.train.{name}"
        kept_part = min(1.0, share / max(1, source_size(source, where)))
        used = 0
        for index, document in enumerate(documents(source, data, where, Counter())):
            if used >= share:
                break
            if kept_part == 1.0 or unit_hash(str(index)) < kept_part:
                text = document.prompt + document.text
                used += len(text)
                yield text


def _train(data: DataConfig) -> Tokenizer:
    logger.info("Training a byte-level BPE of %d entries", data.tokenizer_vocab_size)
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    bpe.decoder = tokenizers.decoders.ByteLevel()  # type: ignore[assignment]
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=data.tokenizer_vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(_training_texts(data), trainer)
    return Tokenizer(bpe.to_str(), END_OF_TEXT, "train")


def _is_byte_level(settings: dict[str, Any]) -> bool:
    parts = [settings.get("decoder"), settings.get("pre_tokenizer")]
    return any('"ByteLevel"' in json.dumps(part) for part in parts)


def _bytes_per_token(tokenizer: tokenizers.Tokenizer, settings: dict[str, Any]) -> torch.Tensor:
    """(V,) int64: bytes of text each id stands for; 0 for special tokens and for ids without an entry."""
    byte_level = _is_byte_level(settings)
    vocab = tokenizer.get_vocab(with_added_tokens=True)
    sizes = torch.zeros(max(vocab.values()) + 1, dtype=torch.int64)
    for token, index in vocab.items():
        sizes[index] = len(token) if byte_level else _sentencepiece_bytes(token)
    for index, added in tokenizer.get_added_tokens_decoder().items():
        sizes[index] = 0 if added.special else len(added.content.encode())
    return sizes


def _sentencepiece_bytes(token: str) -> int:
    is_byte = len(token) == 6 and token.startswith("<0x") and token.endswith(">")
    return 1 if is_byte else len(token.replace("▁", " ").encode())
