"""Conversions in which one rank fails: every rank learns of it, rank 0 speaks for all, nothing is left on the disk."""

import errno
import json
import os
import signal
import time
from collections.abc import Iterator

import torch

from parallel.config import ParallelConfig
from parallel.init import local_box
from parallel.mesh import build_mesh
from tests.distributed.harness import WorkerPool, run_workers
from tests.transformers_models import E, build_reference
from trainer import hf_convert
from trainer.build import build_model
from trainer.config import Config, PrecisionConfig
from trainer.hf_pieces import Part
from trainer.huggingface import Export, Transfer, export_parts, load_source, named_tensors, open_for_all, owns
from trainer.models.config import ModelConfig
from trainer.peers import Peers


def fail(folder: str, out: str) -> str:
    peers = Peers(60)
    try:
        hf_convert.import_folder(folder, out, peers)
    except ValueError as caught:
        return str(caught)
    finally:
        peers.close()
    return ""


def test_every_rank_learns_of_a_fault(tmp_path):
    """Nobody is left waiting, and nothing is left on the disk."""
    reference, _ = build_reference("mixtral", torch.bfloat16)
    reference.save_pretrained(tmp_path / "hf", max_shard_size="30KB")
    raw = json.loads((tmp_path / "hf" / "config.json").read_text())
    (tmp_path / "hf" / "config.json").write_text(json.dumps(raw | {"num_local_experts": E + 2}))
    for text in run_workers(fail, 2, str(tmp_path / "hf"), str(tmp_path / "run")):
        assert f"experts.{E}.w1.weight" in text
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def export_and_fail(folder: str, out: str, model_config: ModelConfig, how: str) -> tuple[str, float]:
    """Rank 1's part of an EP=2 export ends half-way: it raises, or is gone. The error, and when it came."""
    mesh = build_mesh(ParallelConfig(ep=2), torch.device("cpu"))
    model = build_model(Config(model=model_config, parallel=mesh.config, precision=PrecisionConfig("fp32")), mesh)
    peers = Peers(60)
    load_source(open_for_all(folder, peers), model, model_config, peers)
    tensors = named_tensors(model)

    def parts() -> Iterator[tuple[str, Part]]:
        for index, (name, tensor) in enumerate(tensors.items()):
            if peers.rank == 1 and index == len(tensors) // 2:
                if how == "killed":
                    os.kill(os.getpid(), signal.SIGKILL)
                raise OSError(errno.ENOSPC, "no room on rank 1")
            if owns(tensor, peers):
                yield name, Part(*local_box(tensor))

    export = Export(model_config, {name: tuple(tensor.shape) for name, tensor in tensors.items()})
    began = time.monotonic()
    try:
        export_parts(out, parts(), export, peers)
    except (OSError, RuntimeError) as caught:
        text = str(caught)
    seconds = time.monotonic() - began
    peers.close()
    return text, seconds


def test_an_export_that_fails_on_one_rank_leaves_nothing(tmp_path):
    reference, config = build_reference("qwen3_moe", torch.float32)
    reference.save_pretrained(tmp_path / "hf", max_shard_size="60KB")
    for text, _ in run_workers(export_and_fail, 2, str(tmp_path / "hf"), str(tmp_path / "out"), config, "raises"):
        assert "no room on rank 1" in text
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_an_export_whose_rank_is_killed_leaves_nothing(tmp_path):
    """In processes of its own, because `run_workers` would end the surviving one before it has cleaned up.

    That one learns of it from the connection, long before the 60 s that it would wait for an answer.
    """
    reference, config = build_reference("qwen3_moe", torch.float32)
    reference.save_pretrained(tmp_path / "hf", max_shard_size="60KB")
    pool = WorkerPool(2)
    try:
        for pipe in pool.pipes:
            pipe.send((export_and_fail, (str(tmp_path / "hf"), str(tmp_path / "out"), config, "killed")))
        # No limit of its own: whatever the worker does ends by the 60 s of its groups, and then the pipe does, too.
        finished, (text, seconds) = pool.pipes[0].recv()
    finally:
        pool.close()
    assert finished and text.startswith("rank 1 is gone") and seconds < 30
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def export_told(run: str, out: str) -> list[str]:
    peers = Peers(60)
    notes = hf_convert.export_folder(run, out, peers, max_file_bytes=50_000).notes
    peers.close()
    return notes


def test_rank_0_tells_what_any_rank_could_not_write(tmp_path):
    """Balancing biases in a format without a place for them, ten tensors apart: four ranks take turns."""
    reference, _ = build_reference("mixtral", torch.float32)
    reference.save_pretrained(tmp_path / "hf")
    run_workers(import_with_biases, 1, str(tmp_path / "hf"), str(tmp_path / "run"))
    notes, *_ = run_workers(export_told, 4, str(tmp_path / "run"), str(tmp_path / "out"))
    told = [note.split()[0] for note in notes if "is not zero, but mixtral has no place for it" in note]
    assert sorted(told) == [f"layers.{layer}.moe.expert_bias" for layer in range(3)]


def import_with_biases(folder: str, out: str) -> None:
    peers = Peers(60)
    source = open_for_all(folder, peers)
    source.config.moe.expert_bias = True

    def fill(model: torch.nn.Module) -> Transfer:
        moved = load_source(source, model, source.config, peers)
        for name, tensor in named_tensors(model).items():
            if name.endswith("expert_bias"):
                tensor.fill_(0.5)
        return moved

    hf_convert._write_run(out, source, source.config, None, peers, fill)
    peers.close()
