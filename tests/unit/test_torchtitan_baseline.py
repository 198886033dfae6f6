"""The baseline of scripts/bench_train.py: its model is ours, it reads our tokens, and what it may do without."""

import argparse
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from scripts.bench_train import EXPERIMENTS
from scripts.torchtitan_baseline import FLAVORS, TokenLoader, add_flavor, build_config
from trainer.compose import compose
from trainer.meta_model import meta_model
from trainer.models.transformer import count_parameters

SCRIPT = Path(__file__).parents[2] / "scripts" / "torchtitan_baseline.py"


def test_tokens(tmp_path: Path) -> None:
    """Ranks take turns in sequences, labels are the next tokens, and the end leads back to the start."""
    np.save(tmp_path / "tokens.npy", np.arange(17, dtype=np.int32))
    batches = iter(TokenLoader(str(tmp_path / "tokens.npy"), 4, 2, 1, 2))
    first, labels = next(batches)
    assert first["input"].tolist() == [[4, 5, 6, 7], [12, 13, 14, 15]]
    assert labels.tolist() == [[5, 6, 7, 8], [13, 14, 15, 16]]
    again, _ = next(batches)
    assert again["input"].tolist() == first["input"].tolist()
    with pytest.raises(ValueError, match="less than one sequence for each of 2 ranks"):
        TokenLoader(str(tmp_path / "tokens.npy"), 16, 1, 0, 2)


# Packages that a machine with torchtitan may lack: hidden from the import system, as if they were not installed.
WITHOUT = """
import importlib.util, sys
missing = {"datasets", "torchdata", "tensorboard"}
class Hide:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in missing:
            raise ModuleNotFoundError(f"no module {name}", name=name)
sys.meta_path.insert(0, Hide())
real = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name in missing else real(name, *rest)
from scripts.torchtitan_baseline import replace_missing_packages
print(replace_missing_packages())
from datasets import Dataset, load_dataset
from datasets.distributed import split_dataset_by_node
from torchdata.stateful_dataloader import StatefulDataLoader
from torch.utils.tensorboard import SummaryWriter
"""


def test_unused_packages_may_be_missing() -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT], cwd=SCRIPT.parents[1], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "['datasets', 'torchdata', 'tensorboard']"


@pytest.mark.slow  # torchtitan takes 10 seconds to import
@pytest.mark.parametrize("model", FLAVORS)
def test_the_model_is_the_one_of_our_experiment(model: str) -> None:
    """As many parameters in each of 3 layers, embedding and head included."""
    arguments = argparse.Namespace(model=model, layers=3, seq_len=4096, local_batch=4, steps=20, log_every=5)
    arguments.activation_checkpoint = "full"
    job = build_config(arguments, 2)
    assert (job.model.flavor, job.parallelism.expert_parallel_degree, job.compile.enable) == ("bench", 2, True)
    assert job.activation_checkpoint.mode == "full"
    spec = add_flavor(model, 3).get_train_spec()
    flavor = spec.model_args["bench"]
    flavor.update_from_config(job)
    with torch.device("meta"):
        theirs = sum(parameter.numel() for parameter in spec.model_cls(flavor).parameters())
    config = compose([f"experiment={EXPERIMENTS[model]}", "model.num_layers=3"])
    assert theirs == count_parameters(meta_model(config)).total
    assert (
        flavor.moe_args.top_k == config.model.moe.top_k and flavor.moe_args.num_experts == config.model.moe.num_experts
    )
    assert flavor.n_heads == config.model.attention.num_heads and flavor.attn_mask_type in ("causal", "block_causal")
