"""The shards of the script are what a run over the text itself would read."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.tokenize_text import main
from tests.unit.data_fixtures import data_config, numbered_texts, run_config, text_source, write_texts
from trainer.config import SourceConfig
from trainer.data import build_train_loader, load_tokenizer

SCRIPT = Path(__file__).parents[2] / "scripts" / "tokenize_text.py"


def test_shards_give_the_samples_of_the_text(tmp_path: Path) -> None:
    """Run as a program, from another folder: nothing is installed."""
    write_texts(tmp_path / "text", numbered_texts(20))
    command = [sys.executable, str(SCRIPT), "--output", "out/shards", "--tokenizer", "train", "--vocab-size", "257"]
    command += ["--shard-tokens", "300", "text/*.txt"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "20 documents" in done.stdout
    folder = tmp_path / "out" / "shards"
    names = sorted(path.name for path in folder.iterdir())
    assert names[:2] == ["00000.tokens", "00001.tokens"] and "cache" not in names

    def rows(source: SourceConfig, **fields: str) -> list:
        config = run_config(data_config(tmp_path, train={"x": source}, **fields))
        loader = build_train_loader(config, load_tokenizer(config.data), 0, 1)
        read = [batch.tokens_BS.tolist() for _ in range(5) for batch in loader.next_step()]
        loader.close()
        return read

    expected = rows(text_source(tmp_path / "text"))
    assert rows(SourceConfig(kind="tokens", paths=[str(folder)]), tokenizer=str(folder)) == expected


def test_prompts_and_given_tokenizer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_texts(tmp_path, {"a.txt": "some text", "x.jsonl": json.dumps({"q": "question", "a": "answer"})})
    assert main(["--output", f"{tmp_path}/t", "--tokenizer", "train", "--vocab-size", "257", f"{tmp_path}/a.txt"]) == 0
    arguments = ["--kind", "sft", "--prompt-field", "q", "--response-field", "a", f"{tmp_path}/x.jsonl"]
    assert main(["--output", f"{tmp_path}/s", "--tokenizer", f"{tmp_path}/t", *arguments]) == 0
    config = run_config(data_config(tmp_path, train={"x": SourceConfig(kind="tokens", paths=[f"{tmp_path}/s"])}))
    config.data.tokenizer = f"{tmp_path}/s"
    tokenizer = load_tokenizer(config.data)
    loader = build_train_loader(config, tokenizer, 0, 1)
    labels = loader.next_step()[0].labels_BS
    loader.close()
    assert tokenizer.decode(labels[labels >= 0].tolist()) == "answer"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--vocab-size", "10", "a.txt"], "--vocab-size is 10: a byte-level vocabulary has at least"),
        (["--tokenizer", "nowhere", "a.txt"], "--tokenizer: no such file: nowhere: give"),
        (["b.txt"], "paths: no such file: 'b.txt'"),
        (["--exclude", "a.txt", "a.txt"], "paths: no such file: 'a.txt'"),
        (["--hash-range", "1", "0", "a.txt"], "--hash-range is [1.0, 0.0]: give [from, to]"),
        (["empty.txt"], "empty.txt is empty: leave it out (--exclude) or set --empty-files skip"),
        (["bad.txt"], "or set --invalid-utf8 skip"),
        (["--kind", "huggingface", "--column", "words", "rows.jsonl"], "--column: rows.jsonl"),
        # In the name of a file it is no setting.
        (["data.train.text.paths"], "paths: no such file: 'data.train.text.paths' (looked for"),
    ],
)
def test_mistakes_are_told_in_flags(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    told: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    write_texts(tmp_path, {"a.txt": "text", "empty.txt": "", "bad.txt": b"\xff", "rows.jsonl": '{"text": "a"}\n'})
    assert main(["--output", "out", "--tokenizer", "train", "--vocab-size", "257", *arguments]) == 2
    err = capsys.readouterr().err
    assert told in err and err.count("\n") == 1
    assert "data." not in err.replace("data.train.text.paths'", "").replace("/data.train.text.paths", "")


def test_mistakes_exit_with_2_and_leave_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_texts(tmp_path, {"a.txt": "text", "bad.txt": b"\xff"})
    output = ["--output", f"{tmp_path}/out", "--tokenizer", "train", "--vocab-size", "257"]
    assert main([*output, f"{tmp_path}/*.txt"]) == 2
    assert "bad.txt" in capsys.readouterr().err
    assert main([*output, "--shard-tokens", "0", f"{tmp_path}/a.txt"]) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.txt", "bad.txt"]
    assert main([*output, "--invalid-utf8", "skip", f"{tmp_path}/*.txt"]) == 0
    assert "1 invalid_utf8" in capsys.readouterr().out
    assert main([*output, f"{tmp_path}/a.txt"]) == 2
    assert "exists already" in capsys.readouterr().err
    with pytest.raises(SystemExit) as stopped:
        main(["--kind", "csv", "x"])
    assert stopped.value.code == 2
