"""Nodes with other settings or other files than the rest are found before anything is computed, by name."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from tests.distributed.harness import run_workers
from tests.unit.data_fixtures import data_config, numbered_texts, run_config, text_source, write_texts
from trainer.agreement import check_same_data, check_same_settings
from trainer.config import Config
from trainer.data import build_eval_sets, build_train_loader, load_tokenizer
from trainer.peers import Peers


def config_of(folder: Path) -> Config:
    train = {"a": text_source(folder / "a"), "b": text_source(folder / "b")}
    return run_config(data_config(folder, train=train, eval={"held": text_source(folder / "held")}))


def told(folders: list[str], odd: str) -> str:
    """What is said where each rank reads its own folder, as nodes do, and the last one is odd."""
    peers = Peers(30)
    config = config_of(Path(folders[peers.rank]))
    last = peers.rank == peers.size - 1
    if last and odd == "document_mask":
        config.data.document_mask = not config.data.document_mask
    if last and odd == "weight":
        config.data.train["a"].weight = 2.0
    if last and odd == "eval_samples":
        config.data.eval_samples = 3
    # Where each node has it.
    config.checkpoint.init_from = None if last and odd == "init_from" else folders[peers.rank]
    if last and odd == "every":
        config.checkpoint.every = 7
    if last and odd == "lr":
        config = replace(config, optim=replace(config.optim, lr=0.5))
    try:
        check_same_settings(peers, config)
        tokenizer = load_tokenizer(config.data)
        # As ranks of tp: one batch for all.
        loader = None if odd == "no training" else build_train_loader(config, tokenizer, 0, 1)
        check_same_data(peers, tokenizer, loader, build_eval_sets(config, tokenizer, 0, 1).values())
    except ValueError as error:
        return str(error)
    finally:
        peers.close()
    return ""


@pytest.mark.parametrize(
    ("odd", "text"),
    [
        ("nothing", ""),
        ("no training", ""),
        ("a", r"data.train.a is not the same on every rank \(rank 0, 1: 30 documents, [\d,]+ tokens, digest \w{8}; "),
        ("words", r"data.train.b is not the same .* rank 2: 30 documents, .*: give every node the same"),
        ("held", r"data.eval.held is not the same on every rank \(rank 0, 1: 30 documents, .*; rank 2: 29 documents,"),
        ("document_mask", r"data.document_mask is not the same on every rank \(rank 0, 1: True; rank 2: False\)"),
        ("every", r"checkpoint.every is not the same on every rank \(rank 0, 1: 500; rank 2: 7\): start every node"),
        ("init_from", r"checkpoint.init_from is not the same on every rank \(rank 0, 1: a path; rank 2: None\)"),
        ("weight", r"the order of data.train \(weights\) is not the same on every rank"),
        ("eval_samples", r"data.eval_samples is not the same on every rank"),
        ("lr", r"optim.lr is not the same on every rank \(rank 0, 1: [\d.e-]+; rank 2: 0.5\): start every"),
    ],
)
def test_a_node_that_is_not_like_the_others_is_named(tmp_path: Path, odd: str, text: str) -> None:
    folders = [tmp_path / str(rank) for rank in range(3)]
    for folder in folders:
        for name in ("a", "b", "held"):
            write_texts(folder / name, numbered_texts(30))
    if odd in ("a", "held"):
        (folders[2] / odd / "007.txt").unlink()
    if odd == "words":
        # As many tokens as elsewhere.
        path = folders[2] / "b" / "007.txt"
        path.write_text(path.read_text()[::-1])
    for said in run_workers(told, 3, [str(folder) for folder in folders], odd):
        assert re.match(text, said) and bool(said) == bool(text), said
