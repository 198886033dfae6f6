"""Where documents come from: globs, the held-out split, and every mistake named with its file."""

import json
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from tests.unit.data_fixtures import text_source, write_texts
from trainer.config import DataConfig, SourceConfig
from trainer.sources import Document, documents, glob_pattern, list_files, source_identity, unit_hash

CONFIGS = Path(__file__).parents[2] / "configs" / "data"


def read(source: SourceConfig, data: DataConfig | None = None, counts: Counter[str] | None = None) -> list[str]:
    found = documents(source, data or DataConfig(), "data.train.x", Counter() if counts is None else counts)
    return [document.text for document in found]


@pytest.mark.parametrize(
    ("pattern", "path", "matches"),
    [
        ("/a/**/*.py", "/a/b.py", True),
        ("/a/**/*.py", "/a/x/y/b.py", True),
        ("/a/*.py", "/a/x/b.py", False),
        ("/a/**/test/**", "/a/test/x/y.py", True),
        ("/a/**/test/**", "/a/latest/y.py", False),
        ("/a/[!b].txt", "/a/b.txt", False),
        ("/a/[!b].txt", "/a/c.txt", True),
        ("/a[[]1]/?.txt", "/a[1]/c.txt", True),
        ("/a.b/*", "/axb/c", False),
    ],
)
def test_glob_pattern(pattern: str, path: str, matches: bool) -> None:
    assert bool(glob_pattern(pattern).fullmatch(path)) == matches


def test_files_are_listed_once_in_order_without_the_excluded(tmp_path: Path) -> None:
    write_texts(
        tmp_path, {"b.txt": "b", "a.txt": "a", "sub/c.txt": "c", "sub/d.md": "d", "old/e.txt": "e", ".f.txt": "f"}
    )
    paths = [f"{tmp_path}/**/*.txt", f"{tmp_path}/sub/*"]
    source = SourceConfig(paths=paths, exclude=[f"{tmp_path}/**/b.txt", f"{tmp_path}/old/**"])
    assert read(source) == ["a", "c", "d"]
    assert [file.key for file in list_files(source, "x")] == ["a.txt", "sub/c.txt", "d.md"]


def test_hash_range_splits_by_path_below_the_glob(tmp_path: Path) -> None:
    """The same tree elsewhere is split in the same way, and the two parts share nothing."""
    texts = {f"{i}.txt": str(i) for i in range(200)}
    parts = []
    for name in ("here", "else/where"):
        folder = write_texts(tmp_path / name, texts)
        parts.append([read(text_source(folder, hash_range=r)) for r in ([0.0, 0.25], [0.25, 1.0])])
    assert parts[0] == parts[1]
    held_out, kept = map(set, parts[0])
    assert held_out | kept == set(texts.values()) and not held_out & kept
    assert 25 < len(held_out) < 80, "50 expected, standard deviation 6"
    assert unit_hash("") == unit_hash("") != unit_hash("a")


def test_standard_library_of_the_demo() -> None:
    raw = OmegaConf.create({"data": OmegaConf.load(CONFIGS / "python_stdlib.yaml")})
    schema = OmegaConf.structured(DataConfig(cache_dir="unused"))
    merged = OmegaConf.merge(OmegaConf.create({"data": schema}), raw)
    data: Any = OmegaConf.to_object(merged.data)
    train = list_files(data.train["stdlib"], "train")
    held_out = list_files(data.eval["stdlib"], "eval")
    assert not {file.path for file in train} & {file.path for file in held_out}
    assert not [
        f.key for f in train + held_out if {"test", "tests", "idle_test", "site-packages"} & set(f.key.split("/"))
    ]
    megabytes = [sum(os.path.getsize(file.path) for file in files) / 1e6 for files in (train, held_out)]
    assert 6 < megabytes[0] < 20 and 0.1 < megabytes[1] < 2, megabytes
    assert (data.invalid_utf8, data.empty_files) == ("skip", "skip")


def test_missing_files_are_named(tmp_path: Path) -> None:
    write_texts(tmp_path, {"a.txt": "a"})
    for given in (f"{tmp_path}/*.md", f"{tmp_path}/no.txt", str(tmp_path), "stdlib:no/such/*.py"):
        with pytest.raises(FileNotFoundError) as error:
            read(SourceConfig(paths=[f"{tmp_path}/a.txt", given]))
        assert given in str(error.value) and "data.train.x" in str(error.value)
    with pytest.raises(FileNotFoundError, match="matches no file, or exclude leaves none"):
        read(SourceConfig(paths=[f"{tmp_path}/*.txt"], exclude=[f"{tmp_path}/a*"]))


def test_empty_file(tmp_path: Path) -> None:
    source = text_source(write_texts(tmp_path, {"a.txt": "a", "nothing.txt": ""}))
    with pytest.raises(ValueError, match=r"nothing\.txt is empty"):
        read(source)
    counts: Counter[str] = Counter()
    assert read(source, DataConfig(empty_files="skip"), counts) == ["a"]
    assert counts == {"empty_files": 1}


def test_invalid_utf8(tmp_path: Path) -> None:
    source = text_source(write_texts(tmp_path, {"a.txt": "ä", "latin1.txt": b"abc\xe4"}))
    with pytest.raises(ValueError, match=r"latin1\.txt is not valid UTF-8 at byte 3"):
        read(source)
    counts: Counter[str] = Counter()
    assert read(source, DataConfig(invalid_utf8="skip"), counts) == ["ä"]
    assert counts == {"invalid_utf8": 1}


def test_prompt_response_records(tmp_path: Path) -> None:
    lines = [json.dumps({"q": f"q{i}", "a": f"a{i}", "more": 1}) for i in range(60)]
    write_texts(tmp_path, {"x.jsonl": "\n".join(lines[:30]) + "\n\n", "y.jsonl": "\r\n".join(lines[30:])})
    fields = {"kind": "sft", "paths": [f"{tmp_path}/*.jsonl"], "prompt_field": "q", "response_field": "a"}
    every = list(documents(SourceConfig(**fields), DataConfig(), "x", Counter()))
    assert every == [Document(f"q{i}", f"a{i}") for i in range(60)]
    parts = [read(SourceConfig(**fields, hash_range=r)) for r in ([0.0, 0.5], [0.5, 1.0])]
    assert sorted(parts[0] + parts[1]) == sorted(d.text for d in every) and min(map(len, parts)) > 10


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": "a", "response": ', "malformed JSON"),
        ('["a", "b"]', "expected a JSON object, found list"),
        ('{"prompt": "a"}', "'response' must be a string"),
        ('{"prompt": 3, "response": "b"}', "'prompt' must be a string; found int"),
        ('{"prompt": "a", "response": ""}', "'response' is empty"),
        ('{"prompt": "a", "response": "b\\ud83d"}', r"'response' has half a surrogate pair \(\\ud83d\) at character 1"),
        ('{"prompt": "a\\udfff", "response": "b"}', "'prompt' has half a surrogate pair"),
        ('{"prompt": "a", "response": %s}' % ("9" * 5000), "malformed JSON"),
        ("[" * 100_000, "malformed JSON"),
    ],
)
def test_malformed_record_is_named_with_its_line(tmp_path: Path, line: str, message: str) -> None:
    write_texts(tmp_path, {"x.jsonl": '{"prompt": "a", "response": "b"}\n\n' + line})
    with pytest.raises(ValueError, match=message) as error:
        read(SourceConfig(kind="sft", paths=[f"{tmp_path}/x.jsonl"]))
    assert "x.jsonl line 3" in str(error.value)


def test_invalid_utf8_record(tmp_path: Path) -> None:
    write_texts(tmp_path, {"x.jsonl": b'{"prompt": "a", "response": "b"}\n{"prompt": "\xff", "response": "c"}\n'})
    source = SourceConfig(kind="sft", paths=[f"{tmp_path}/x.jsonl"])
    with pytest.raises(ValueError, match=r"x\.jsonl line 2 is not valid UTF-8"):
        read(source)
    counts: Counter[str] = Counter()
    assert read(source, DataConfig(invalid_utf8="skip"), counts) == ["b"] and counts["invalid_utf8"] == 1


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kind": "csv"}, "kind is 'csv'"),
        ({"paths": []}, "paths is empty"),
        ({"hash_range": [0.5, 0.5]}, "hash_range"),
        ({"hash_range": [0.5]}, "hash_range"),
        ({"kind": "tokens"}, "no text"),
    ],
)
def test_wrong_settings(fields: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        read(SourceConfig(**{"paths": ["stdlib:abc.py"], **fields}))
    assert "data.train.x" in str(error.value)
    with pytest.raises(ValueError, match=r"data\.invalid_utf8"):
        read(SourceConfig(paths=["stdlib:abc.py"]), DataConfig(invalid_utf8="ignore"))


def test_identity_follows_the_files(tmp_path: Path) -> None:
    source = text_source(write_texts(tmp_path, {"a.txt": "a"}))
    before = source_identity(source, "x")
    assert source_identity(source, "x") == before
    os.utime(tmp_path / "a.txt", ns=(1, 1))
    assert source_identity(source, "x") != before


@pytest.fixture(scope="module")
def datasets_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import datasets

    folder = tmp_path_factory.mktemp("datasets")
    rows = datasets.Dataset.from_dict({"text": ["one", "", "two"], "number": [1, 2, 3]})
    rows.save_to_disk(str(folder / "saved"))
    datasets.DatasetDict({"train": rows, "test": rows.select([0])}).save_to_disk(str(folder / "splits"))
    rows.to_parquet(str(folder / "rows.parquet"))
    rows.to_json(str(folder / "rows.jsonl"))
    write_texts(folder, {"damaged.parquet": "PAR1 and then nonsense", "broken.jsonl": '{"text": "a"}\n{"text": '})
    return folder


@pytest.mark.parametrize("name", ["saved", "splits", "rows.parquet", "*.jsonl"])
def test_local_datasets(datasets_folder: Path, name: str) -> None:
    name = "rows.jsonl" if name == "*.jsonl" else name
    assert read(SourceConfig(kind="huggingface", paths=[str(datasets_folder / name)])) == ["one", "two"]


def test_dataset_split(datasets_folder: Path) -> None:
    source = SourceConfig(kind="huggingface", paths=[str(datasets_folder / "splits")], split="test")
    assert read(source) == ["one"]
    source.split = "validation"
    with pytest.raises(ValueError, match="no split 'validation', only test, train"):
        read(source)


@pytest.mark.parametrize("column", ["body", "number"])
def test_dataset_column(datasets_folder: Path, column: str) -> None:
    source = SourceConfig(kind="huggingface", paths=[str(datasets_folder / "saved")], column=column)
    with pytest.raises(ValueError, match=rf"column.*'{column}' must hold text"):
        read(source)


@pytest.mark.parametrize("name", ["damaged.parquet", "broken.jsonl"])
def test_damaged_dataset_is_named(datasets_folder: Path, name: str) -> None:
    with pytest.raises(ValueError, match=name):
        read(SourceConfig(kind="huggingface", paths=[str(datasets_folder / name)]))


def test_a_missing_package_is_told_as_a_mistake(datasets_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match="pip install datasets"):
        read(SourceConfig(kind="huggingface", paths=[str(datasets_folder / "saved")]))


def test_dataset_that_is_nowhere(datasets_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    with pytest.raises(FileNotFoundError, match="absent"):
        read(SourceConfig(kind="huggingface", paths=[str(datasets_folder / "absent")]))

    def offline(name: str, **_: object) -> None:
        raise ConnectionError("no network")

    monkeypatch.setattr(datasets, "load_dataset", offline)
    with pytest.raises(RuntimeError, match=r"someone/corpus.*could not be fetched.*save_to_disk"):
        read(SourceConfig(kind="huggingface", paths=["someone/corpus"]))
    monkeypatch.setattr(datasets, "load_dataset", lambda name, split: [{"text": f"{name} {split}"}])
    assert read(SourceConfig(kind="huggingface", paths=["someone/corpus"])) == ["someone/corpus train"]
