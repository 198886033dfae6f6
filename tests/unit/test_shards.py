"""Shards: what was written is read, and anything else is refused by name."""

from pathlib import Path

import numpy as np
import pytest

from trainer.shards import HEADER, Corpus, ShardWriter, open_shard

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


def test_nothing_to_write(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no document"):
        ShardWriter(tmp_path, 300, DIGEST).close()
