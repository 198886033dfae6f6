"""Shards: what was written is read, and anything else is refused by name."""

import re
from pathlib import Path

import numpy as np
import pytest

from trainer.shards import HEADER, Corpus, DamagedShardError, ShardWriter, open_shard

DIGEST = bytes(range(16))
DOCUMENTS = [[1, 2, 3, 0], [4, 0], [5, 6, 7, 8, 9, 0], [10, 0], [11, 12, 0]]


def write(
    folder: Path, documents: list[list[int]] = DOCUMENTS, vocab_size: int = 300, shard_tokens: int = 100
) -> list[str]:
    folder.mkdir(exist_ok=True)
    writer = ShardWriter(folder, vocab_size, DIGEST, shard_tokens)
    for index, document in enumerate(documents):
        writer.add(document, label_start=index % 2)
    writer.close()
    assert writer.num_tokens == sum(map(len, documents)) and writer.num_documents == len(documents)
    return sorted(str(path) for path in folder.iterdir())


@pytest.mark.parametrize("shard_tokens", [1, 6, 100])
@pytest.mark.parametrize("vocab_size", [65536, 65537])
def test_round_trip_over_several_files(tmp_path: Path, shard_tokens: int, vocab_size: int) -> None:
    documents = [*DOCUMENTS, [vocab_size - 1, 0]]
    paths = write(tmp_path / "x", documents, vocab_size, shard_tokens)
    assert len(paths) == {1: 6, 6: 3, 100: 1}[shard_tokens]
    corpus = Corpus([open_shard(path) for path in paths])
    assert corpus.num_documents == 6 and corpus.num_tokens == sum(map(len, documents))
    assert corpus.lengths.tolist() == list(map(len, documents))
    assert corpus.label_starts.tolist() == [0, 1, 0, 1, 0, 1] and corpus.has_prompts
    for index, document in enumerate(documents):
        assert corpus.tokens(index, 0, 100).tolist() == document
        assert corpus.tokens(index, 1, 2).tolist() == document[1:2]
    assert open_shard(paths[0]).tokens.dtype == (np.uint16 if vocab_size == 65536 else np.uint32)


def test_digest_names_the_content(tmp_path: Path) -> None:
    def digest(name: str, documents: list[list[int]]) -> str:
        return Corpus([open_shard(path) for path in write(tmp_path / name, documents)]).digest

    assert digest("a", [[1, 2], [3]]) == digest("b", [[1, 2], [3]])
    assert len({digest("a", d) for d in ([[1, 2], [3]], [[1], [2, 3]], [[1, 2], [4]])}) == 3


@pytest.mark.parametrize("damage", ["shortened", "header", "longer", "magic", "version", "unfinished"])
def test_damaged_file_is_refused_by_name(tmp_path: Path, damage: str) -> None:
    (path,) = write(tmp_path / "x")
    content = bytearray(Path(path).read_bytes())
    if damage == "shortened":
        content = content[:-1]
    elif damage == "header":
        content = content[: HEADER.size - 1]
    elif damage == "longer":
        content += b"\0"
    elif damage == "magic":
        content[0] ^= 1
    elif damage == "version":
        content[8] += 1
    else:
        content[: HEADER.size] = bytes(HEADER.size)
    Path(path).write_bytes(content)
    expected = {"shortened": "cut short", "longer": "too long", "version": "version 2"}.get(damage, "no token shard")
    with pytest.raises(ValueError, match=expected) as error:
        open_shard(path)
    assert path in str(error.value)


def damaged(path: str, column: str, document: int, value: int) -> None:
    """Overwrite the end or the label start of a document, or (`tokens`) the token at a place of the file."""
    size = Path(path).stat().st_size
    start = {"tokens": HEADER.size, "ends": size - 16 * len(DOCUMENTS), "starts": size - 8 * len(DOCUMENTS)}[column]
    width = 2 if column == "tokens" else 8
    with open(path, "r+b") as file:
        file.seek(start + width * document)
        file.write(value.to_bytes(width, "little"))


@pytest.mark.parametrize(
    ("column", "document", "value", "words"),
    [
        ("ends", 1, 13, "document 2 goes from token 13 to 12"),
        ("ends", 1, 4, "document 1 goes from token 4 to 4"),
        ("ends", 1, 2**64 - 1, "document 2 goes from token 18446744073709551615 to 12"),
        ("ends", 4, 16, "its last document, 4, ends at token 16 of 17"),
        ("ends", 4, 2**63, "its last document, 4, ends at token 9223372036854775808 of 17"),
        ("starts", 2, 7, "the labels of document 2 begin at 7, after its end"),
    ],
)
def test_documents_out_of_order_are_named(tmp_path: Path, column: str, document: int, value: int, words: str) -> None:
    (path,) = write(tmp_path / "x")
    damaged(path, column, document, value)
    with pytest.raises(ValueError, match=re.escape(f"{path} is damaged: {words}")):
        open_shard(path)


def test_a_token_outside_the_vocabulary_is_named_when_it_is_read(tmp_path: Path) -> None:
    """Token 9 of the file is in its third document; of two files the second has document 2 as its first."""
    (path,) = write(tmp_path / "one")
    damaged(path, "tokens", 9, 300)
    corpus = Corpus([open_shard(path)])
    told = re.escape(f"{path} is damaged: document 2 has the token 300, and the voc")
    with pytest.raises(DamagedShardError, match=told):
        corpus.tokens(2, 0, 100)
    assert corpus.tokens(2, 0, 3).tolist() == [5, 6, 7] and corpus.tokens(1, 0, 100).tolist() == [4, 0]
    first, second = write(tmp_path / "two", shard_tokens=5)[:2]
    damaged(second, "tokens", 0, 301)
    corpus = Corpus([open_shard(first), open_shard(second)])
    with pytest.raises(ValueError, match=re.escape(f"{second} is damaged: document 0 has the token 301")):
        corpus.tokens(2, 0, 100)


def test_nothing_to_write(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no document"):
        ShardWriter(tmp_path, 300, DIGEST).close()
