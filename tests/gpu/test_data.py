"""Batches in pinned memory, without a context on a card that is another rank's."""

from pathlib import Path

import pytest
import torch

from tests.unit.data_fixtures import data_config, numbered_texts, run_config, text_source, write_texts
from trainer.data import Batch, build_train_loader, load_tokenizer


def first_step(tmp_path: Path) -> list[Batch]:
    write_texts(tmp_path / "text", numbered_texts(10))
    config = run_config(data_config(tmp_path, train={"x": text_source(tmp_path / "text")}))
    loader = build_train_loader(config, load_tokenizer(config.data), 0, 1)
    step = loader.next_step()
    loader.close()
    return step


@pytest.mark.gpu
def test_batches_are_pinned_and_arrive_whole(tmp_path: Path) -> None:
    torch.cuda.init()
    for batch in first_step(tmp_path):
        assert all(tensor.is_pinned() for tensor in batch.tensors())
        there = batch.to("cuda")
        assert all(torch.equal(a, b.cpu()) for a, b in zip(batch.tensors(), there.tensors(), strict=True))


@pytest.mark.multi_gpu
def test_prefetching_leaves_other_cards_alone(tmp_path: Path) -> None:
    """A new thread begins on card 0; this process works on the last one."""
    last = torch.cuda.device_count() - 1
    torch.cuda.set_device(last)
    before = torch.cuda.mem_get_info(0)[0]
    assert all(tensor.is_pinned() for batch in first_step(tmp_path) for tensor in batch.tensors())
    # A context takes some hundred MiB.
    assert before - torch.cuda.mem_get_info(0)[0] < 64 << 20
