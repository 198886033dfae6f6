"""Hugging Face folders from and into weights on a GPU."""

import copy

import pytest
import torch

from parallel.config import ParallelConfig
from parallel.mesh import build_mesh
from parallel.process_group import process_group
from tests.distributed.tiny_models import MODELS
from trainer.build import build_model
from trainer.config import Config, RunConfig
from trainer.huggingface import Export, export_model, load_source, named_tensors, open_for_all
from trainer.parity import full_tensors
from trainer.peers import Peers


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["qwen3", "deepseek", "gpt_oss", "multi_token"])
def test_out_and_in_again(tmp_path, name):
    """fp32 masters of a bf16 run: equal to the bit after a folder of fp32."""
    model_config = copy.deepcopy(MODELS[name])
    if name in ("deepseek", "multi_token"):
        # The format counts shared experts of the routed ones' size.
        model_config.moe.shared_expert_dim = 2 * model_config.moe.expert_dim
    with process_group(60) as device:
        mesh = build_mesh(ParallelConfig(), device)
        models = [
            build_model(Config(run=RunConfig(seed=seed), model=model_config, parallel=mesh.config), mesh)
            for seed in (0, 1)
        ]
        peers = Peers(60)
        shapes = {key: tuple(tensor.shape) for key, tensor in named_tensors(models[0]).items()}
        export_model(tmp_path / "hf", models[0], Export(model_config, shapes, dtype=torch.float32), peers)
        load_source(open_for_all(tmp_path / "hf", peers), models[1], model_config, peers)
        expected, actual = (full_tensors(model) for model in models)
        peers.close()
    assert all(tensor.is_cuda for tensor in models[1].parameters())
    for key, tensor in expected.items():
        assert torch.equal(actual[key], tensor), key
