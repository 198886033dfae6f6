"""README, "Start from a Hugging Face checkpoint": its commands run as they are written, on tiny models."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from scripts.convert_hf import main as convert
from tests.e2e.runs import ROOT, Bench, attempt, contents
from tests.transformers_models import COMMON, build_reference, byte_tokenizer
from trainer.checkpoint import load_weights
from trainer.compose import load_config
from trainer.models.transformer import Transformer
from trainer.tokenizer import read_tokenizer

VOCAB = 288
TEXT = "def add(a, b):\n    return a + b\n"


def commands() -> list[str]:
    """The shell lines of the section, continued lines joined."""
    section = (ROOT / "README.md").read_text().split("## Start from a Hugging Face checkpoint\n")[1].split("\n## ")[0]
    blocks = re.findall(r"```sh\n(.*?)```", section, re.S)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    return [line for line in lines if line.strip() and not line.startswith("#")]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with the models and the text that the README speaks of, after its commands have run there."""
    place = tmp_path_factory.mktemp("readme")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tests.transformers_models.V", VOCAB)
        patch.setitem(COMMON, "vocab_size", VOCAB)
        for folder, name in (("my_model", "qwen3_moe"), ("my_dense_model", "llama")):
            reference, _ = build_reference(name, torch.float32)
            reference.save_pretrained(place / folder, max_shard_size="60KB")
            byte_tokenizer().save(place / folder, for_transformers=True)
    (place / "my_text").mkdir()
    for index in range(20):
        (place / "my_text" / f"{index}.txt").write_text(TEXT * 20)
    for name in ("scripts", "trainer", "parallel", "moe", "comms", "configs"):
        (place / name).symlink_to(ROOT / name)
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
    }
    for command in commands():
        done = subprocess.run(command, shell=True, cwd=place, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    yield place


def our_logits(run: Path, tokens: torch.Tensor) -> torch.Tensor:
    config = load_config(run / "config.yaml").model
    model = Transformer(config)
    load_weights(run, model)
    with torch.no_grad():
        return model(tokens).logits_BSV


@pytest.mark.slow
@pytest.mark.parametrize(("run", "folder"), [("runs/tuned", "runs/tuned/hf"), ("my_upcycled", "my_upcycled_hf")])
def test_transformers_opens_the_result(place, run, folder):
    """Tokenizer and model; fp32 logits, 1e-5."""
    import transformers

    text = TEXT.strip()
    tokens = transformers.AutoTokenizer.from_pretrained(place / folder)(text)["input_ids"]
    assert tokens == read_tokenizer(place / "my_model").encode(text)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        place / folder, attn_implementation="eager", experts_implementation="eager", dtype=torch.float32
    )
    ours = our_logits(place / run, torch.tensor([tokens]))
    with torch.no_grad():
        theirs = model(torch.tensor([tokens])).logits
    assert (ours - theirs).norm() / theirs.norm() < 1e-5


@pytest.mark.slow
def test_training_moved_the_weights_and_nothing_else(place):
    """Same files, names, shapes and config.json as the folder it started from; the first loss was not that of noise."""
    before, after = place / "my_model", place / "runs" / "tuned" / "hf"
    assert sorted(path.name for path in before.iterdir()) == sorted(path.name for path in after.iterdir())
    changed = [path.name for path in before.iterdir() if path.read_bytes() != (after / path.name).read_bytes()]
    assert changed and all(name.endswith(".safetensors") for name in changed)
    assert (place / "my_imported" / "checkpoints" / "latest").read_text().strip() == "step_00000000"


@pytest.mark.slow
def test_a_run_from_an_imported_one_ends_in_the_same_kind_of_folder(place, bench: Bench):
    """Import, train on that, export. At learning rate 0 the files are those of the start."""
    words = ["--config-dir", str(place / "my_configs"), "model=mine", "train.steps=1", "optim.lr=0", "train.seq_len=64"]
    words += [f"data.tokenizer={place}/my_model", f"checkpoint.init_from={place}/my_imported"]
    words += ["checkpoint.export_hf=true", "precision=fp32", "data=text", f"data.train.text.paths=[{place}/my_text/*]"]
    done = attempt([*words, f"run.root={bench.folder}/runs", "run.id=second", f"data.cache_dir={bench.folder}/cache"])
    assert done.code == 0, done.err
    assert contents(bench.path("second") / "hf") == contents(place / "my_model")


def test_a_dense_run_is_exported_and_upcycled(bench: Bench, tmp_path):
    """Without experts the trainer makes the model that upcycling begins with: the same logits, fp32, 1e-5."""
    words = ["model.num_dense_layers=2", "model.attention.qk_norm=head", "train.steps=1", "train.eval_every=null"]
    done = bench.alone("dense", *words, "checkpoint.export_hf=true")
    assert done.code == 0, done.err
    folder = bench.path("dense") / "hf"
    assert json.loads((folder / "config.json").read_text())["model_type"] == "qwen3"
    with patch("parallel.process_group._device", lambda: torch.device("cpu")):
        assert convert(["import", f"{folder}", f"{tmp_path}/dense"]) == 0
        assert convert(["upcycle", f"{folder}", f"{tmp_path}/sparse", "--experts", "4", "--top-k", "2"]) == 0
    dense, sparse = (our_logits(tmp_path / name, torch.arange(32)[None]) for name in ("dense", "sparse"))
    assert (sparse - dense).norm() / dense.norm() < 1e-5


def test_a_wrong_folder_is_a_mistake(bench: Bench, tmp_path):
    """Exit code 2, before anything is trained."""
    reference, _ = build_reference("mixtral", torch.float32)
    reference.save_pretrained(tmp_path)
    done = bench.alone("wrong-folder", f"checkpoint.init_from=hf:{tmp_path}")
    assert done.code == 2
    assert "is another model (mixtral) than this run's: model.attention.head_dim=16" in done.err
    assert json.loads((bench.path("wrong-folder") / "status.json").read_text())["state"] == "failed"


def test_export_of_what_no_format_has_is_refused_at_once(bench: Bench):
    done = bench.alone("no-format", "checkpoint.export_hf=true", "model.moe.score_function=sigmoid")
    assert done.code == 2 and "checkpoint.export_hf=true: no Hugging Face format" in done.err
    assert not bench.path("no-format").exists()
