"""Where text comes from: files, Hugging Face data sets and prompt/response records.

A *document* is the unit of training text: one text file, one row of a data set, one JSONL record. Each has a stable
hash in [0, 1): of the file's path below the fixed part of its glob, or of the record's words. `SourceConfig.hash_range`
keeps the documents whose hash lies in a range, so two sources over the same files with ranges that do not overlap are a
training set and a held-out set that share nothing, on every machine.
"""

import glob
import hashlib
import json
import os
import re
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from trainer.config import DataConfig, SourceConfig

KINDS = ("text", "huggingface", "tokens", "sft")
# `stdlib:` at the start of a path stands for the folder of Python's own standard library, which differs per machine.
STDLIB = "stdlib:"
DATA_SUFFIXES = {".json": "json", ".jsonl": "json", ".parquet": "parquet"}


class SourceFile(NamedTuple):
    """One input file: its absolute path, and its path below the fixed part of the glob that found it."""

    path: str
    key: str


class Document(NamedTuple):
    """One document; `prompt` is empty unless the loss must be taken on `text` alone."""

    prompt: str
    text: str


def unit_hash(text: str) -> float:
    """A number in [0, 1) that depends on nothing but `text`."""
    digest = hashlib.blake2b(text.encode("utf-8", "surrogateescape"), digest_size=8).digest()
    return (int.from_bytes(digest, "big") >> 11) / 2.0**53


def check_source(source: SourceConfig, where: str) -> None:
    """Raises ValueError naming `where` (such as `data.train.web`), the field and its value."""
    if source.kind not in KINDS:
        raise ValueError(f"{where}.kind is {source.kind!r}: choose one of {', '.join(KINDS)}")
    if not source.paths:
        raise ValueError(f"{where}.paths is empty: give at least one path, such as '{where}.paths=[my_text/**/*.txt]'")
    if len(source.hash_range) != 2 or not 0.0 <= source.hash_range[0] < source.hash_range[1] <= 1.0:
        raise ValueError(f"{where}.hash_range is {source.hash_range}: give [from, to] with 0 <= from < to <= 1")


def in_range(key: str, source: SourceConfig) -> bool:
    """Whether the document called `key` belongs to the part of the data that `source` keeps."""
    low, high = source.hash_range
    return (low, high) == (0.0, 1.0) or low <= unit_hash(key) < high


def expand_path(path: str) -> str:
    """Absolute form of a path or glob; `stdlib:` and `~` are resolved."""
    if path.startswith(STDLIB):
        return os.path.join(glob.escape(sysconfig.get_paths()["stdlib"]), path[len(STDLIB) :])
    return os.path.abspath(os.path.expanduser(path))


def glob_pattern(pattern: str) -> re.Pattern[str]:
    """A regular expression for an absolute glob: `**/` is any folders or none, `*` and `?` stay within one name."""
    rules = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}

    def translate(token: str) -> str:
        if len(token) > 2 and token.startswith("[") and token.endswith("]"):
            inner = token[1:-1].replace("\\", r"\\").replace("[", r"\[")
            return f"[^{inner[1:]}]" if inner.startswith("!") else f"[{inner}]"
        return rules.get(token) or re.escape(token)

    tokens = re.split(r"(\*\*/|\*\*|\*|\?|\[!?[^\]]+\])", pattern)
    return re.compile("".join(map(translate, tokens)))


def fixed_folder(pattern: str) -> str:
    """The folder above the first wildcard of an absolute glob (of a plain path: its folder)."""
    folders = pattern.split("/")[:-1]
    fixed = next((i for i, name in enumerate(folders) if glob.has_magic(name.replace("[[]", ""))), len(folders))
    return "/".join(folders[:fixed]).replace("[[]", "[") or "/"


def list_files(source: SourceConfig, where: str) -> list[SourceFile]:
    """The files of a source, sorted by path, each once, without those excluded or outside `hash_range`.

    Raises FileNotFoundError for a path or glob that matches no file, and for a source that has no file left."""
    found: dict[str, SourceFile] = {}
    for given in source.paths:
        folder = fixed_folder(expand_path(given))
        matched = {path: SourceFile(path, os.path.relpath(path, folder)) for path in _files(given, source)}
        if not matched:
            raise FileNotFoundError(_no_match(given, where))
        found = matched | found
    by_record = source.kind == "sft"  # its records are chosen, not its files
    kept = sorted(file for file in found.values() if by_record or in_range(file.key, source))
    if not kept:
        raise FileNotFoundError(f"{where}.hash_range {source.hash_range} keeps none of the {len(found)} files")
    return kept


def check_paths(source: SourceConfig, where: str) -> None:
    """Raises FileNotFoundError, as reading would, for a path or glob that matches no file.

    Costs little: the first match is enough. Names at the Hugging Face hub are not looked up."""
    for given in source.paths:
        if source.kind == "huggingface":
            if is_local_dataset(given):
                dataset_files(given, where)
        # A folder stands for its shards.
        elif source.kind == "tokens" and os.path.isdir(expand_path(given)):
            continue
        elif next(_files(given, source), None) is None:
            raise FileNotFoundError(_no_match(given, where))


def _files(given: str, source: SourceConfig) -> Iterator[str]:
    """The files of one path or glob of a source as they are found, without those excluded."""
    pattern, exclude = expand_path(given), [expand_path(pattern) for pattern in source.exclude]
    excluded = _any_of(exclude)
    pruned = _any_of([pattern.removesuffix("/**") for pattern in exclude if pattern.endswith("/**")])
    files = _walk(pattern, pruned) if "**" in pattern else filter(os.path.isfile, glob.iglob(pattern))
    return (path for path in files if not excluded(path))


def _any_of(patterns: list[str]) -> Callable[[str], object]:
    """A test whether a path matches one of the absolute globs."""
    joined = "|".join(glob_pattern(pattern).pattern for pattern in patterns)
    return re.compile(joined).fullmatch if patterns else lambda path: None


def _walk(pattern: str, pruned: Callable[[str], object]) -> Iterator[str]:
    """Files that match a recursive glob, hidden names left out as glob does; folders that are `pruned` are not entered
    (the standard library's site-packages can hold a hundred times its own files)."""
    matches = glob_pattern(pattern).fullmatch
    for folder, folders, names in os.walk(fixed_folder(pattern), followlinks=True):
        folders[:] = [name for name in folders if name[0] != "." and not pruned(os.path.join(folder, name))]
        paths = (os.path.join(folder, name) for name in names if name[0] != ".")
        yield from (path for path in paths if matches(path) and os.path.isfile(path))


def _no_match(given: str, where: str) -> str:
    pattern = expand_path(given)
    if os.path.isdir(pattern):
        return f"{where}.paths: {given!r} is a folder: give a glob of its files, such as '{given.rstrip('/')}/**/*.txt'"
    if glob.has_magic(given):
        folder = fixed_folder(pattern)
        place = f"looked in {folder}" if os.path.isdir(folder) else f"there is no folder {folder}"
        return f"{where}.paths: {given!r} matches no file, or exclude leaves none ({place})"
    return f"{where}.paths: no such file: {given!r} (looked for {pattern})"


def documents(source: SourceConfig, data: DataConfig, where: str, counts: Counter[str]) -> Iterator[Document]:
    """The documents of a source in a fixed order; what is skipped is counted in `counts`.

    counts: `invalid_utf8` and `empty_files`, both only where the config says `skip`.
    Raises ValueError with the file (and line) for an empty file, invalid UTF-8 or a malformed record, FileNotFoundError
    for a missing one, RuntimeError for a data set that cannot be fetched."""
    check_source(source, where)
    for name in ("invalid_utf8", "empty_files"):
        if getattr(data, name) not in ("error", "skip"):
            raise ValueError(f"data.{name} is {getattr(data, name)!r}: choose error or skip")
    readers = {"text": _text_documents, "sft": _sft_documents, "huggingface": _huggingface_documents}
    if source.kind not in readers:
        raise ValueError(f"{where}.kind is {source.kind!r}: shards hold tokens, there is no text to read in them")
    return readers[source.kind](source, data, where, counts)


def _read(path: str, data: DataConfig, where: str, counts: Counter[str]) -> bytes:
    """The bytes of a file; an empty one is an error or counted."""
    content = Path(path).read_bytes()
    if not content:
        if data.empty_files == "error":
            raise ValueError(f"{where}: {path} is empty: leave it out ({where}.exclude) or set data.empty_files=skip")
        counts["empty_files"] += 1
    return content


def _decode(content: bytes, data: DataConfig, where: str, place: str, counts: Counter[str]) -> str | None:
    """Text, or None for invalid UTF-8 that is to be skipped."""
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        if data.invalid_utf8 == "error":
            hint = "convert or exclude it, or set data.invalid_utf8=skip"
            raise ValueError(f"{where}: {place} is not valid UTF-8 at byte {error.start}: {hint}") from None
        counts["invalid_utf8"] += 1
        return None


def _text_documents(source: SourceConfig, data: DataConfig, where: str, counts: Counter[str]) -> Iterator[Document]:
    for file in list_files(source, where):
        content = _read(file.path, data, where, counts)
        text = _decode(content, data, where, file.path, counts) if content else None
        if text:
            yield Document("", text)


def _sft_documents(source: SourceConfig, data: DataConfig, where: str, counts: Counter[str]) -> Iterator[Document]:
    for file in list_files(source, where):
        content = _read(file.path, data, where, counts)
        for number, line in enumerate(content.split(b"\n"), start=1):
            place = f"{file.path} line {number}"
            text = _decode(line, data, where, place, counts)
            if text is None or not text.strip():
                continue
            document = _sft_record(text, source, f"{where}: {place}")
            if in_range(json.dumps(document), source):
                yield document


def check_encodable(text: str, place: str) -> None:
    """Raises ValueError for half a surrogate pair, as JSON's `\\ud83d` makes them: no bytes stand for it."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = text[error.start].encode("unicode_escape").decode()
        where = f"({half}) at character {error.start}"
        raise ValueError(f"{place} has half a surrogate pair {where}: mend or drop it") from None


def _sft_record(line: str, source: SourceConfig, place: str) -> Document:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{place}: malformed JSON: {error.msg} (column {error.colno})") from None
    except (ValueError, RecursionError) as error:  # a number of too many digits, brackets too deep
        raise ValueError(f"{place}: malformed JSON: {error}") from None
    if not isinstance(record, dict):
        raise ValueError(f"{place}: expected a JSON object, found {type(record).__name__}")
    fields = (source.prompt_field, source.response_field)
    for field in fields:
        if not isinstance(record.get(field), str):
            found = sorted(record) if field not in record else type(record[field]).__name__
            raise ValueError(f"{place}: the field {field!r} must be a string; found {found}")
        check_encodable(record[field], f"{place}: the field {field!r}")
    if not record[source.response_field]:
        raise ValueError(f"{place}: the field {source.response_field!r} is empty: there is nothing to learn")
    return Document(record[fields[0]], record[fields[1]])


def _huggingface_documents(
    source: SourceConfig, data: DataConfig, where: str, counts: Counter[str]
) -> Iterator[Document]:
    for path in source.paths:
        for row in _rows(path, source, where):
            text = row.get(source.column)
            if not isinstance(text, str):
                found = type(text).__name__ if source.column in row else f"the columns {sorted(row)}"
                raise ValueError(f"{where}.column: {path}: {source.column!r} must hold text, found {found}")
            check_encodable(text, f"{where}.column: {path}: {source.column!r}")
            if text and in_range(text, source):
                yield Document("", text)


def _rows(path: str, source: SourceConfig, where: str) -> Iterator[dict[str, Any]]:
    rows = _open_dataset(path, source, where)
    try:
        yield from rows
    except Exception as error:  # whatever the reader of that format raises for a damaged file
        raise ValueError(f"{where}: the data set {path!r} cannot be read: {error}") from error


def is_local_dataset(path: str) -> bool:
    """Whether a Hugging Face path means files here; anything else is a name at the hub."""
    given = path.startswith((STDLIB, "/", ".", "~")) or glob.has_magic(path) or Path(path).suffix in DATA_SUFFIXES
    return given or os.path.exists(path)


def dataset_files(path: str, where: str) -> list[str]:
    """The files below a local Hugging Face folder, or those of a glob."""
    pattern = expand_path(path)
    if os.path.isdir(pattern):
        pattern = os.path.join(glob.escape(pattern), "**", "*")
    files = sorted(name for name in glob.glob(pattern, recursive=True) if os.path.isfile(name))
    if not files:
        raise FileNotFoundError(f"{where}.paths: no such data set: {path!r} (looked for {pattern})")
    return files


def _open_dataset(path: str, source: SourceConfig, where: str) -> Iterable[dict[str, Any]]:
    """Rows of one data set: a folder of `save_to_disk`, JSON or Parquet files, or a name at the hub."""
    try:
        import datasets
    except ImportError:
        raise ValueError(f"{where}: kind huggingface needs the package `datasets`: pip install datasets") from None
    if not is_local_dataset(path):
        return _fetch_dataset(path, source, where)
    files = dataset_files(path, where)
    folder = expand_path(path)
    try:
        if any(os.path.exists(os.path.join(folder, name)) for name in ("dataset_dict.json", "state.json")):
            loaded = datasets.load_from_disk(folder)
            return _choose_split(loaded, source) if isinstance(loaded, dict) else loaded  # type: ignore[return-value]
        if os.path.isdir(folder):
            return datasets.load_dataset(folder, split=source.split, streaming=True)  # type: ignore[return-value]
        return _load_files(files)
    except (OSError, RuntimeError, ValueError) as error:
        raise ValueError(f"{where}: the data set {path!r} cannot be read: {error}") from error


def _load_files(files: list[str]) -> Iterable[dict[str, Any]]:
    import datasets

    builders = {DATA_SUFFIXES.get(Path(name).suffix) for name in files}
    builder = builders.pop()
    if builders or builder is None:
        raise ValueError(f"its files must be of one kind out of {', '.join(DATA_SUFFIXES)}")
    return datasets.load_dataset(builder, data_files=files, split="train", streaming=True)  # type: ignore[return-value]


def _choose_split(loaded: dict[str, Any], source: SourceConfig) -> Iterable[dict[str, Any]]:
    if source.split not in loaded:
        raise ValueError(f"it has no split {source.split!r}, only {', '.join(sorted(loaded))}")
    return loaded[source.split]


def _fetch_dataset(name: str, source: SourceConfig, where: str) -> Iterable[dict[str, Any]]:
    import datasets

    try:
        return datasets.load_dataset(name, split=source.split)  # type: ignore[return-value]
    except Exception as error:
        raise RuntimeError(
            f"{where}.paths: {name!r} is no folder here and could not be fetched from the Hugging Face hub "
            f"({type(error).__name__}: {error}). Check the name and the network, or save the data set where there is "
            "one (`load_dataset(NAME).save_to_disk(FOLDER)`) and give that folder"
        ) from error


def source_paths(source: SourceConfig, where: str) -> list[str]:
    """The local files a source is made of, sorted (none for a data set at the hub)."""
    if source.kind != "huggingface":
        return [file.path for file in list_files(source, where)]
    return list(chain.from_iterable(dataset_files(path, where) for path in source.paths if is_local_dataset(path)))


def source_identity(source: SourceConfig, where: str) -> object:
    """JSON-able value that changes when the documents of the source may have changed."""
    stats = [(path, os.stat(path)) for path in source_paths(source, where)]
    files = [[path, stat.st_size, stat.st_mtime_ns] for path, stat in stats]
    fields = [source.kind, source.paths, source.split, source.column, source.prompt_field, source.response_field]
    return [*fields, source.exclude, source.hash_range, files]


def source_size(source: SourceConfig, where: str) -> int:
    """Bytes of the local files of a source."""
    return sum(os.path.getsize(path) for path in source_paths(source, where))
