"""Is what a run reads there, and what it logs to? Asked before torch is imported and before the run has a folder: a
mistyped path is told at once. What is in the files is found out when they are read.
"""

import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from trainer.config import Config
from trainer.run import is_over
from trainer.sources import check_paths


def check_inputs(config: Config, overrides: Sequence[str]) -> None:
    """Look for the tokenizer and for a file of every path of the sources that this run reads, and for W&B's key.

    A run that is finished reads none: its start says that, and ends.

    Raises:
        FileNotFoundError: nothing is there; names the setting and the path.
        ValueError: W&B cannot be started.
    """
    if is_over(config, overrides):
        return
    check_wandb(config.logging.wandb.mode)
    if config.data.tokenizer != "train":
        tokenizer_file(Path(config.data.tokenizer).expanduser())
    # An evaluation does not read what the run was trained on.
    train = {} if config.train.eval_only else config.data.train
    for part, sources in (("train", train), ("eval", config.data.eval)):
        for name, source in sources.items():
            check_paths(source, f"data.{part}.{name}")


def check_wandb(mode: str) -> None:
    """Raises ValueError where W&B is sure not to start. Importing it takes as long as torch, so that is left out."""
    # Another rank, maybe on another host, needs nothing of it.
    if mode == "disabled" or os.environ.get("RANK", "0") != "0":
        return
    if importlib.util.find_spec("wandb") is None:
        raise ValueError(
            f"logging.wandb.mode={mode} needs the package wandb: pip install wandb, or set logging.wandb.mode=disabled"
        )
    if mode == "online" and not _may_log_in():
        raise ValueError(
            "logging.wandb.mode=online: there is no API key of W&B, and nobody to ask for one; run `wandb login`, set "
            "WANDB_API_KEY, or set logging.wandb.mode=offline or disabled"
        )


def _may_log_in() -> bool:
    """Whether W&B might find a key or ask for one: what is in the files is its own affair."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    folder = os.environ.get("WANDB_CONFIG_DIR") or "~/.config/wandb"
    places = (os.environ.get("NETRC") or "~/.netrc", "~/_netrc", f"{folder}/settings", "wandb/settings")
    asks = sys.stdin is not None and sys.stdin.isatty()
    return asks or any(Path(place).expanduser().exists() for place in places)


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
