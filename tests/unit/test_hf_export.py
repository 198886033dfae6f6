"""Exports and imports as files on a disk: dtypes that are asked for, links, room, what is left when something fails."""

import json
import os
import warnings
from collections import namedtuple
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from scripts.convert_hf import main
from tests.transformers_models import COMMON, build_reference
from trainer.hf_convert import _in_file
from trainer.hf_plan import make_plan
from trainer.hf_source import FOLDER, keep_source, kept_source, open_source
from trainer.huggingface import Export, Transfer, export_model, load_source, named_tensors
from trainer.models.transformer import Transformer
from trainer.peers import Peers

PEERS = Peers()


def export(out: Path, name: str = "qwen3_moe", kept=None, *, replace: bool = False, **options) -> Transfer:
    _, config = build_reference(name, torch.float32)
    model = Transformer(config)
    if kept is not None:
        load_source(open_source(kept.folder.parent / "hf"), model, config, PEERS)
    shapes = {name: tuple(tensor.shape) for name, tensor in named_tensors(model).items()}
    return export_model(out, model, Export(config, shapes, kept, **options), PEERS, replace=replace)


def written(folder: Path, name: str, dtype: torch.dtype) -> torch.nn.Module:
    reference, _ = build_reference(name, dtype)
    reference.save_pretrained(folder, max_shard_size="60KB")
    return reference


@pytest.mark.parametrize("name", ["mixtral", "deepseek_v3"])
def test_a_dtype_that_is_asked_for_is_written(tmp_path, name):
    """Not the source's; the balancing bias stays fp32 in bf16, and config.json tells the dtype."""
    written(tmp_path / "hf", name, torch.float32)
    keep_source(open_source(tmp_path / "hf"), tmp_path / FOLDER)
    export(tmp_path / "out", name, kept_source(tmp_path), dtype=torch.bfloat16)
    before, after = (
        {key: t for path in (tmp_path / folder).glob("*.safetensors") for key, t in load_file(path).items()}
        for folder in ("hf", "out")
    )
    assert before.keys() == after.keys()
    for key, tensor in before.items():
        dtype = torch.float32 if key.endswith("e_score_correction_bias") else torch.bfloat16
        assert after[key].dtype == dtype and torch.equal(after[key], tensor.to(dtype)), key
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"


def test_through_a_link_the_folder_that_it_means_is_written(tmp_path):
    """A link to a larger disk, to nothing at first; the second time what is there is replaced, and the link stays."""
    (tmp_path / "large").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / "large" / "model")
    export(tmp_path / "out")
    with pytest.raises(FileExistsError, match="large/model exists"):
        export(tmp_path / "out")
    (tmp_path / "large" / "model" / "old").touch()
    export(tmp_path / "out", replace=True)
    assert (tmp_path / "out").is_symlink() and not (tmp_path / "out" / "old").exists()
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["config.json", "model.safetensors"]
    assert [path.name for path in (tmp_path / "large").iterdir()] == ["model"]


def test_a_file_in_the_way_is_not_replaced(tmp_path):
    (tmp_path / "out").write_text("a thesis")
    with pytest.raises(FileExistsError, match="out exists"):
        export(tmp_path / "out", replace=True)
    assert (tmp_path / "out").read_text() == "a thesis"


@pytest.fixture
def small_disk(monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage(1000, 0, 1000))


def test_no_room_is_told_before_anything_is_written(tmp_path, small_disk, capsys):
    with pytest.raises(OSError, match=r"out takes [\d,]+ bytes, and its disk has 1,000 left"):
        export(tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
    written(tmp_path / "hf", "qwen3_moe", torch.float32)
    assert main(["import", str(tmp_path / "hf"), str(tmp_path / "run")]) == 2
    assert "run takes" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_a_disk_that_fills_up_during_import_is_told_of(tmp_path, monkeypatch, capsys):
    """The room was there when it was looked for; the checkpoint's file then goes to a device that is always full."""
    written(tmp_path / "hf", "mixtral", torch.bfloat16)

    def opened(path, *arguments, **options):
        full = str(path).endswith(".distcp") and "w" in arguments[0]
        return open("/dev/full" if full else path, *arguments, **options)

    monkeypatch.setattr("trainer.checkpoint_files.open", opened, raising=False)
    assert main(["import", str(tmp_path / "hf"), str(tmp_path / "run")]) == 1
    told = capsys.readouterr().err
    assert "run was not written, and nothing is left of it" in told and "make room" in told
    assert "No space left on device" in told and "__0_0.distcp" in told
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_memory_in_a_file_has_its_room_on_the_disk(tmp_path):
    """Without it, the first write that finds none would kill the process."""
    _in_file(tmp_path / "x", (1000, 1000), torch.float32)
    assert os.stat(tmp_path / "x").st_blocks * 512 >= 4_000_000


def test_a_source_is_left_as_it_was_and_a_missing_tokenizer_is_told_of(tmp_path, capsys):
    written(tmp_path / "hf", "mixtral", torch.bfloat16)
    before = {path: path.stat().st_mtime_ns for path in [tmp_path / "hf", *(tmp_path / "hf").iterdir()]}
    assert main(["import", str(tmp_path / "hf"), str(tmp_path / "run")]) == 0
    assert "hf has no tokenizer.json: no tokenizer comes with the model" in capsys.readouterr().out
    assert before == {path: path.stat().st_mtime_ns for path in [tmp_path / "hf", *(tmp_path / "hf").iterdir()]}
    assert main(["import", str(tmp_path / "hf"), str(tmp_path / "run")]) == 2
    assert "run exists; choose another folder" in capsys.readouterr().err


def test_one_process_exports_without_a_warning_that_it_is_alone(tmp_path):
    written(tmp_path / "hf", "mixtral", torch.bfloat16)
    assert main(["import", str(tmp_path / "hf"), str(tmp_path / "run")]) == 0
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        assert main(["export", str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    assert [warning for warning in told if "torch.distributed is disabled" in str(warning.message)] == []


def test_a_run_that_is_not_there_is_told_of_with_those_that_are(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "straight" / "checkpoints").mkdir(parents=True)
    assert main(["export", "strait", "out"]) == 2
    assert "newest in runs/: straight" in capsys.readouterr().err
    # Found by its id; it has no checkpoint yet.
    assert main(["export", "straight", "out"]) == 2
    assert "straight" in (said := capsys.readouterr().err) and "no complete checkpoint" in said


def test_a_tied_mixture_of_experts_there_and_back(tmp_path, monkeypatch):
    """One tensor for embedding and head, in the file as in the model; `transformers` opens it and gives our logits."""
    import transformers

    monkeypatch.setitem(COMMON, "tie_word_embeddings", True)
    reference, config = build_reference("qwen3_moe", torch.float32)
    config.tie_embeddings = True
    reference.save_pretrained(tmp_path / "hf")
    source = open_source(tmp_path / "hf")
    assert source.config.tie_embeddings and "lm_head.weight" not in source.layout.entries
    model = Transformer(config)
    load_source(source, model, config, PEERS)
    shapes = {name: tuple(tensor.shape) for name, tensor in named_tensors(model).items()}
    export_model(tmp_path / "out", model, Export(config, shapes, dtype=torch.float32), PEERS)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", attn_implementation="eager", experts_implementation="eager"
    )
    tokens = torch.arange(40)[None]
    with torch.no_grad():
        expected = reference(tokens).logits
        assert torch.equal(theirs(tokens).logits, expected)
        assert (model(tokens).logits_BSV - expected).norm() / expected.norm() < 1e-5


def test_weights_that_are_rounded_unasked_are_told_of(tmp_path):
    told = [note for note in export(tmp_path / "out").notes if "rounded" in note]
    assert len(told) == 1
    assert told[0].startswith("weights are float32 in the run and rounded to bfloat16 in the export; ")
    assert "--dtype float32" in told[0]
    for dtype in (torch.float32, torch.bfloat16):
        assert export(tmp_path / str(dtype), dtype=dtype).notes == []
    # A source in fp32 is written back as it was.
    written(tmp_path / "hf", "qwen3_moe", torch.float32)
    keep_source(open_source(tmp_path / "hf"), tmp_path / FOLDER)
    assert export(tmp_path / "back", kept=kept_source(tmp_path)).notes == []


def test_settings_of_experts_without_a_place_are_told_of(tmp_path):
    _, config = build_reference("qwen3_moe", torch.float32)
    config.moe.capacity_factor, config.moe.force_balance = 1.25, True
    shapes = {name: tuple(tensor.shape) for name, tensor in named_tensors(Transformer(config)).items()}
    assert make_plan(Export(config, shapes)).notes == [
        "model.moe.capacity_factor=1.25 has no place in config.json: the exported model drops no pair of token and "
        "expert",
        "model.moe.force_balance=true has no place in config.json: the exported model routes by its scores",
    ]
