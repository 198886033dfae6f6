"""Small texts and configs shared by the tests of the data path."""

from collections.abc import Mapping
from pathlib import Path

from trainer.config import Config, DataConfig, SourceConfig
from trainer.tokenizer import Tokenizer, load_tokenizer

# 256 bytes and the end-of-text token: one token per byte, so that every length in a test can be counted by eye.
BYTE_VOCAB = 257


def write_texts(folder: Path, texts: Mapping[str, str | bytes]) -> Path:
    """Files by name below `folder`."""
    for name, text in texts.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode() if isinstance(text, str) else text)
    return folder


def numbered_texts(count: int, length: int = 40) -> dict[str, str]:
    """Documents of different lengths whose words tell which one they are."""
    return {f"{i:03d}.txt": (f"d{i:03d} " * (length // 5 + i % 7)) for i in range(count)}


def text_source(folder: Path, **fields: object) -> SourceConfig:
    return SourceConfig(paths=[f"{folder}/**/*.txt"], **fields)  # type: ignore[arg-type]


def data_config(tmp_path: Path, **fields: object) -> DataConfig:
    """A byte vocabulary, cached below tmp_path."""
    defaults = {"cache_dir": str(tmp_path / "cache"), "tokenizer_vocab_size": BYTE_VOCAB}
    return DataConfig(**{**defaults, **fields})  # type: ignore[arg-type]


def run_config(data: DataConfig, *, seq_len: int = 16, global_batch_size: int = 8, micro_batch_size: int = 1) -> Config:
    config = Config(data=data)
    config.train.seq_len = seq_len
    config.train.global_batch_size = global_batch_size
    config.train.micro_batch_size = micro_batch_size
    return config


def byte_tokenizer(tmp_path: Path) -> Tokenizer:
    """Token of byte b: any bijection; use decode to read."""
    folder = write_texts(tmp_path / "tokenizer_text", {"a.txt": "a"})
    return load_tokenizer(data_config(tmp_path, train={"a": text_source(folder)}))
