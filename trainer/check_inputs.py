"""Is what a run reads there? Asked before torch is imported and before the run has a folder: a mistyped path is told at
once. What is in the files is found out when they are read.
"""

from collections.abc import Sequence
from pathlib import Path

from trainer.config import Config
from trainer.run import is_over
from trainer.sources import check_paths


def check_inputs(config: Config, overrides: Sequence[str]) -> None:
    """Look for the tokenizer and for a file of every path of the sources that this run reads.

    A run that is finished reads none: its start says that, and ends.

    Raises:
        FileNotFoundError: nothing is there; names the setting and the path.
    """
    if is_over(config, overrides):
        return
    if config.data.tokenizer != "train":
        tokenizer_file(Path(config.data.tokenizer).expanduser())
    # An evaluation does not read what the run was trained on.
    train = {} if config.train.eval_only else config.data.train
    for part, sources in (("train", train), ("eval", config.data.eval)):
        for name, source in sources.items():
            check_paths(source, f"data.{part}.{name}")


def tokenizer_file(path: Path) -> Path:
    """The file of a tokenizer: `path` itself, or tokenizer.json in it.

    Raises:
        FileNotFoundError: there is none.
    """
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        hint = "give a folder with a tokenizer.json, such a file, or `train`"
        raise FileNotFoundError(f"data.tokenizer: no such file: {file}: {hint}")
    return file
