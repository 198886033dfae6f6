"""What a run reads is looked for before anything else, and what it does not read is not."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.data_fixtures import write_texts
from trainer.check_inputs import check_inputs
from trainer.compose import CONFIG_DIR, compose


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["data.train.text.paths=[absent/*.txt]"], r"data\.train\.text\.paths: 'absent/\*\.txt' matches no file"),
        (["data.train.text.paths=[a.txt,absent.txt]"], r"data\.train\.text\.paths: no such file: 'absent\.txt'"),
        (
            ["data.train.text.paths=[a.txt]", "data.train.text.exclude=[a*]"],
            r"data\.train\.text\.paths: no such file: 'a\.txt'",
        ),
        (["data.eval.mine.paths=[absent/**/*.txt]"], r"data\.eval\.mine\.paths: 'absent/\*\*/\*\.txt'"),
        (["data.train.text.kind=tokens", "data.train.text.paths=[absent]"], r"data\.train\.text\.paths: .*'absent'"),
        (["data.train.text.kind=huggingface", "data.train.text.paths=[./absent]"], r"no such data set: '\./absent'"),
        (["data.tokenizer=absent"], r"data\.tokenizer: no such file: absent: give"),
    ],
)
def test_what_is_not_there_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], named: str
) -> None:
    monkeypatch.chdir(tmp_path)
    write_texts(tmp_path, {"a.txt": "a"})
    config = compose(["data=text", "data.train.text.paths=[a.txt]", *words])
    with pytest.raises(FileNotFoundError, match=named):
        check_inputs(config, [])


def test_what_is_there_or_not_read_is_no_mistake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_texts(tmp_path, {"a.txt": "a", "shards/b": "b", "set/c.jsonl": "{}", "tokenizer.json": "{}"})
    check_inputs(compose(["experiment=demo"]), [])
    sources = (
        "text.paths=['*.txt']",
        "t.kind=tokens",
        "t.paths=[shards]",
        "h.kind=huggingface",
        "h.paths=[set,org/hub]",
    )
    words = ["data=none", "data.tokenizer=.", *(f"data.train.{source}" for source in sources)]
    check_inputs(compose(words), words)
    # An evaluation needs its own text alone.
    evaluation = ["train.eval_only=true", "data.train.gone.paths=[absent]", "data.eval.e.paths=[a.txt]"]
    check_inputs(compose([*words, *evaluation]), words)


@pytest.fixture
def nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No key of W&B, and no terminal."""
    for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_CONFIG_DIR", "NETRC", "RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    monkeypatch.setattr("sys.stdin", None)
    return tmp_path


def test_wandb_without_a_key_is_told_before_the_run(nobody: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["experiment=demo", "logging.wandb.mode=online"]
    with pytest.raises(ValueError, match=r"set WANDB_API_KEY, or set logging\.wandb\.mode=offline or disabled"):
        check_inputs(compose(words), [])
    check_inputs(compose([*words, "logging.wandb.mode=offline"]), [])
    monkeypatch.setenv("RANK", "1")
    check_inputs(compose(words), [])
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WANDB_API_KEY", "k")
    check_inputs(compose(words), [])
    monkeypatch.delenv("WANDB_API_KEY")
    (nobody / ".netrc").touch()
    check_inputs(compose(words), [])


@pytest.mark.parametrize("mode", ["offline", "online"])
def test_wandb_that_is_not_installed_is_told_before_the_run(
    nobody: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    check_inputs(compose(["experiment=demo"]), [])
    with pytest.raises(ValueError, match=f"mode={mode} needs the package wandb: pip install wandb, or set"):
        check_inputs(compose(["experiment=demo", f"logging.wandb.mode={mode}"]), [])


def test_a_missing_path_is_told_without_torch_and_leaves_no_folder(tmp_path: Path) -> None:
    code = (
        "import sys; from trainer.train import main\n"
        "try: main(['experiment=demo', 'data=text', 'data.train.text.paths=[/no/such/*.txt]'])\n"
        "except SystemExit as ended: print(ended.code, 'torch' in sys.modules)"
    )
    environment = {**os.environ, "PYTHONPATH": str(CONFIG_DIR.parent)}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.stdout == "2 False\n", done.stderr
    assert "there is no folder /no/such" in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("stderr", "tells"), [("2>&1", "True"), ("2>&-", "False")])
def test_a_crash_tells_its_stack_where_there_is_a_stderr(stderr: str, tells: str) -> None:
    code = (
        "import faulthandler, runpy, sys; sys.argv[1:] = ['--help']\n"
        "try: runpy.run_module('trainer.train', run_name='__main__')\n"
        "except SystemExit as ended: print(ended.code, faulthandler.is_enabled())"
    )
    line = f'exec "{sys.executable}" -c "$CODE" {stderr}'
    environment = {**os.environ, "PYTHONPATH": str(CONFIG_DIR.parent), "CODE": code, "PYTHONFAULTHANDLER": ""}
    done = subprocess.run(["bash", "-c", line], env=environment, capture_output=True, text=True)
    assert done.stdout.endswith(f"0 {tells}\n"), done.stdout
