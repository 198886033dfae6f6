"""Token shards: flat files of token ids that are memory-mapped, written once and never changed.

    header (96 bytes) | tokens (uint16 or uint32) | zeros up to a multiple of 8 | document ends | label starts

`document ends` and `label starts` are uint64, one per document. Document d is tokens[ends[d-1]:ends[d]] and its last
token is the end-of-text token. A token is a label only from position label_start of its document on (0: all of them;
the prompt's length for prompt/response data). The header is written last and states every size, so a file that was cut
short or is still being written is refused.
"""

import hashlib
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

MAGIC = b"SGTOKENS"
VERSION = 1
SUFFIX = ".tokens"
# magic, version, bytes per token, tokens, documents, vocabulary, tokenizer's digest, digest of the content.
HEADER = struct.Struct("<8sIIQQQ16s16s24x")
_MEND = "remove it, then copy or tokenise it again"


class DamagedShardError(ValueError):
    """A file holds what its writer cannot have written. Tokens are looked at as they are needed, maybe after hours."""


@dataclass(frozen=True)
class Shard:
    """One opened file; the arrays are memory maps."""

    path: str
    tokens: npt.NDArray[np.unsignedinteger]
    document_ends: npt.NDArray[np.uint64]
    label_starts: npt.NDArray[np.uint64]
    vocab_size: int
    tokenizer_digest: bytes
    content_digest: bytes


class ShardWriter:
    """Writes documents to `folder`/00000.tokens, 00001.tokens, ..., each of about `shard_tokens` tokens."""

    def __init__(self, folder: Path, vocab_size: int, tokenizer_digest: bytes, shard_tokens: int = 1 << 28) -> None:
        self._folder = folder
        self._vocab_size = vocab_size
        self._tokenizer_digest = tokenizer_digest
        self._shard_tokens = shard_tokens
        self._dtype = np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")
        self._file: BinaryIO | None = None
        self.num_shards = 0
        self.num_documents = 0
        self.num_tokens = 0

    def add(self, tokens: Sequence[int] | npt.NDArray[np.integer], label_start: int = 0) -> None:
        """Append one document, end-of-text token included; its labels begin at position `label_start`."""
        if self._file is None:
            self._open()
        assert self._file is not None
        payload = np.asarray(tokens, dtype=self._dtype).tobytes()
        self._file.write(payload)
        self._digest.update(payload)
        self._ends.append((self._ends[-1] if self._ends else 0) + len(tokens))
        self._starts.append(label_start)
        self.num_documents += 1
        self.num_tokens += len(tokens)
        if self._ends[-1] >= self._shard_tokens:
            self._finish()

    def close(self) -> None:
        """Finish the last file. Raises ValueError where no document was added."""
        if self._file is not None:
            self._finish()
        if not self.num_documents:
            raise ValueError("there is no document to write")

    def _open(self) -> None:
        self._file = open(self._folder / f"{self.num_shards:05d}{SUFFIX}", "wb")
        self._file.write(bytes(HEADER.size))
        self._digest = hashlib.blake2b(digest_size=16)
        self._ends: list[int] = []
        self._starts: list[int] = []

    def _finish(self) -> None:
        assert self._file is not None
        self._file.write(bytes(-self._ends[-1] * self._dtype.itemsize % 8))
        for column in (self._ends, self._starts):
            payload = np.asarray(column, dtype="<u8").tobytes()
            self._file.write(payload)
            self._digest.update(payload)
        self._file.seek(0)
        sizes = (self._dtype.itemsize, self._ends[-1], len(self._ends), self._vocab_size)
        self._file.write(HEADER.pack(MAGIC, VERSION, *sizes, self._tokenizer_digest, self._digest.digest()))
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._file = None
        self.num_shards += 1


def open_shard(path: str) -> Shard:
    """Memory-map one shard.

    Raises ValueError with the file's name for a foreign, newer or shortened file, or one whose documents overlap. Token
    ids are checked when they are read: that may be terabytes.
    """
    size = os.path.getsize(path)
    with open(path, "rb") as file:
        header = file.read(HEADER.size)
    if header[: len(MAGIC)] != MAGIC or len(header) < HEADER.size:
        hint = "write shards with scripts/tokenize_text.py"
        raise ValueError(f"{path} is no token shard, or its writing was interrupted: {hint}")
    _, version, itemsize, num_tokens, num_documents, vocab_size, tokenizer, content = HEADER.unpack(header)
    if version != VERSION or itemsize not in (2, 4):
        raise ValueError(f"{path} has shard version {version}, this program reads version {VERSION}: tokenise again")
    columns = HEADER.size + num_tokens * itemsize + (-num_tokens * itemsize % 8)
    expected = columns + 16 * num_documents
    if size != expected:
        word = "cut short" if size < expected else "too long"
        raise ValueError(f"{path} is {word}: {size} bytes, its header promises {expected}: copy or tokenise it again")
    if not num_tokens or not num_documents:
        raise ValueError(f"{path} is damaged: it has {num_tokens} tokens in {num_documents} documents: {_MEND}")
    tokens = np.memmap(path, dtype=f"<u{itemsize}", mode="r", offset=HEADER.size, shape=(num_tokens,))
    ends, starts = np.memmap(path, dtype="<u8", mode="r", offset=columns, shape=(2, num_documents))
    _check_documents(path, num_tokens, ends, starts)
    return Shard(path, tokens, ends, starts, vocab_size, tokenizer, content)


def _check_documents(path: str, num_tokens: int, ends: npt.NDArray[np.uint64], starts: npt.NDArray[np.uint64]) -> None:
    """Every document has tokens, the last ends with the file's tokens, and labels begin within their document."""
    if int(ends[-1]) != num_tokens:
        where = f"its last document, {len(ends) - 1}, ends at token {ends[-1]} of {num_tokens}"
        raise ValueError(f"{path} is damaged: {where}: {_MEND}")
    begins = np.concatenate([np.zeros(1, ends.dtype), ends[:-1]])
    # Unsigned numbers: compared, never subtracted, until they are known to rise.
    if (wrong := np.flatnonzero(ends <= begins)).size:
        document = int(wrong[0])
        where = f"document {document} goes from token {begins[document]} to {ends[document]}"
        raise ValueError(f"{path} is damaged: {where}: {_MEND}")
    if (wrong := np.flatnonzero(starts > ends - begins)).size:
        document = int(wrong[0])
        where = f"the labels of document {document} begin at {starts[document]}, after its end"
        raise ValueError(f"{path} is damaged: {where}: {_MEND}")


class Corpus:
    """The documents of several shards, numbered from 0 across all of them."""

    def __init__(self, shards: Sequence[Shard]) -> None:
        self._shards = list(shards)
        self._first = np.cumsum([0] + [len(shard.document_ends) for shard in shards])
        ends = [np.asarray(shard.document_ends, dtype=np.int64) for shard in shards]
        self.lengths = np.concatenate([np.diff(e, prepend=0) for e in ends])
        self._begins = np.concatenate([np.concatenate(([0], e[:-1])) for e in ends]).astype(np.int64)
        self.label_starts = np.concatenate([np.asarray(s.label_starts, dtype=np.int64) for s in shards])
        self.num_documents = int(self._first[-1])
        self.num_tokens = int(self.lengths.sum())
        # Prompts must stay with their responses: such documents are packed whole.
        self.has_prompts = bool((self.label_starts > 0).any())

    @property
    def digest(self) -> str:
        """A name for the content: equal tokens in equal order have equal digests, wherever they lie."""
        return hashlib.blake2b(b"".join(s.content_digest for s in self._shards), digest_size=16).hexdigest()

    def tokens(self, document: int, start: int, stop: int) -> npt.NDArray[np.int64]:
        """Tokens [start, stop) of a document, cut at its end.

        Raises DamagedShardError for an id that the vocabulary does not have: a GPU would only say that an assertion
        failed."""
        number = int(np.searchsorted(self._first, document, side="right")) - 1
        shard = self._shards[number]
        begin = int(self._begins[document])
        stop = min(stop, int(self.lengths[document]))
        tokens = shard.tokens[begin + start : begin + stop].astype(np.int64)
        if tokens.size and (highest := int(tokens.max())) >= shard.vocab_size:
            raise DamagedShardError(
                f"{shard.path} is damaged: document {document - int(self._first[number])} has the token {highest}, and "
                f"the vocabulary {shard.vocab_size} entries: {_MEND}"
            )
        return tokens
