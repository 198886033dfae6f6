"""A source's text as token shards: tokenised once per node, then memory-mapped by every process.

The cache is keyed by what it was made from: paths, sizes and times of the files (a data set at the hub: its name), the
tokenizer, the settings that choose documents. Data that changed is therefore tokenised again, and a shard that was cut
short is noticed when it is opened.
"""

import json
import logging
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from trainer.config import DataConfig, SourceConfig
from trainer.node_cache import build_once, cache_key
from trainer.shards import SUFFIX, VERSION, Corpus, Shard, ShardWriter, open_shard
from trainer.sources import Document, check_source, documents, expand_path, list_files, source_identity
from trainer.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

# Characters handed to the tokenizer at once: enough to occupy all cores, little memory.
BATCH_CHARACTERS = 4 << 20
REPORT = "source.json"


class TokenisedSource(NamedTuple):
    """A source ready to be sampled; counts: documents, tokens, and what was skipped while reading."""

    corpus: Corpus
    counts: dict[str, int]


def open_source(source: SourceConfig, data: DataConfig, tokenizer: Tokenizer, where: str) -> TokenisedSource:
    """The tokens of a source, tokenised now if no process of this node has done it yet.

    where: the name in messages, such as `data.train.web`. Errors: those of sources.documents and shards.open_shard, and
    ValueError for shards of another tokenizer."""
    check_source(source, where)
    if source.kind == "tokens":
        return _open_shards(_shard_files(source, where), tokenizer, where)
    settings = [data.invalid_utf8, data.empty_files, VERSION, tokenizer.digest.hex()]
    folder = Path(data.cache_dir).expanduser() / "tokens" / cache_key([settings, source_identity(source, where)])

    def build(building: Path) -> None:
        logger.info("Tokenising %s", where)
        tokenise_source(source, data, tokenizer, building, where)

    build_once(folder, build, lambda built: _check(built))
    shards = _open_shards(sorted(str(path) for path in folder.glob(f"*{SUFFIX}")), tokenizer, where)
    return TokenisedSource(shards.corpus, _read_report(folder))


def tokenise_source(
    source: SourceConfig,
    data: DataConfig,
    tokenizer: Tokenizer,
    folder: Path,
    where: str,
    shard_tokens: int = 1 << 28,
) -> dict[str, int]:
    """Write the shards of a source and a report to an existing empty `folder`; returns the counts in the report."""
    counts: Counter[str] = Counter(invalid_utf8=0, empty_files=0)
    writer = ShardWriter(folder, tokenizer.vocab_size, tokenizer.digest, shard_tokens)
    parse_special = source.kind == "sft"  # a chat template is made of special tokens
    for batch in _batches(documents(source, data, where, counts)):
        prompts = tokenizer.encode_batch([document.prompt for document in batch], special_tokens=parse_special)
        texts = tokenizer.encode_batch([document.text for document in batch], special_tokens=parse_special)
        for prompt, text in zip(prompts, texts, strict=True):
            writer.add([*prompt, *text, tokenizer.eos_id], label_start=len(prompt))
    if not writer.num_documents:
        raise ValueError(f"{where}: no document is left of {source.paths}: skipped {dict(counts)}")
    writer.close()
    report = {**counts, "documents": writer.num_documents, "tokens": writer.num_tokens, "shards": writer.num_shards}
    (folder / REPORT).write_text(json.dumps(report) + "\n", encoding="utf-8")
    return report


def _batches(stream: Iterable[Document]) -> Iterator[list[Document]]:
    batch: list[Document] = []
    size = 0
    for document in stream:
        batch.append(document)
        size += len(document.prompt) + len(document.text)
        if size >= BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _read_report(folder: Path) -> dict[str, int]:
    report = json.loads((folder / REPORT).read_text(encoding="utf-8"))
    if not isinstance(report, dict) or not isinstance(report.get("tokens"), int):
        raise ValueError(f"{folder / REPORT} does not tell how many tokens there are")
    return report


def _check(folder: Path) -> None:
    """Raises ValueError or OSError where a shard is missing or cut short."""
    shards = [open_shard(str(path)) for path in sorted(folder.glob(f"*{SUFFIX}"))]
    tokens = sum(len(shard.tokens) for shard in shards)
    expected = _read_report(folder)["tokens"]
    if tokens != expected:
        raise ValueError(f"it holds {tokens} tokens of {expected}")


def _shard_files(source: SourceConfig, where: str) -> list[str]:
    """A folder stands for all shards in it."""
    folders = [os.path.isdir(expand_path(path)) for path in source.paths]
    paths = [f"{path}/*{SUFFIX}" if folder else path for path, folder in zip(source.paths, folders, strict=True)]
    found = SourceConfig(kind="tokens", paths=paths, exclude=source.exclude, hash_range=source.hash_range)
    return [file.path for file in list_files(found, where)]


def _open_shards(paths: list[str], tokenizer: Tokenizer, where: str) -> TokenisedSource:
    shards = [_open_matching(path, tokenizer, where) for path in paths]
    corpus = Corpus(shards)
    return TokenisedSource(corpus, {"documents": corpus.num_documents, "tokens": corpus.num_tokens})


def _open_matching(path: str, tokenizer: Tokenizer, where: str) -> Shard:
    try:
        shard = open_shard(path)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    if (shard.tokenizer_digest, shard.vocab_size) != (tokenizer.digest, tokenizer.vocab_size):
        raise ValueError(
            f"{where}: {path} was written with another tokenizer ({shard.vocab_size} entries) than {tokenizer.name} "
            f"({tokenizer.vocab_size} entries): point data.tokenizer at the one saved beside the shards"
        )
    return shard
