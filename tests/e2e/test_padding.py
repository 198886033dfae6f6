"""CASES 24: a batch with padding trains like the batch without it: loss, auxiliary loss, counts, norm, every weight."""

import numpy as np
import pytest
import torch

from moe.linear_maps import local
from parallel.mesh import build_mesh
from parallel.process_group import process_group
from tests.e2e.runs import Bench
from trainer.build import build_model
from trainer.compose import compose
from trainer.config import Config
from trainer.data import Batch, collate
from trainer.optim import build_optimizer
from trainer.packing import empty_row
from trainer.step import StepResult, train_step

SEQ_LEN = 24
# Another grouping of the rows of the expert GEMMs, in fp32.
BOUND = 5e-6


def batch(seq_len: int, num_rows: int) -> Batch:
    """Two documents of SEQ_LEN tokens in rows of `seq_len`, filled up with padding whose tokens are not even zero."""
    rng = np.random.default_rng(0)
    found = []
    for _ in range(2):
        row = empty_row(seq_len)
        row.tokens_S[:SEQ_LEN] = rng.integers(257, size=SEQ_LEN)
        row.labels_S[: SEQ_LEN - 1] = row.tokens_S[1:SEQ_LEN]
        row.positions_S[:SEQ_LEN] = np.arange(SEQ_LEN)
        row.document_ids_S[:SEQ_LEN] = 0
        found.append(row)
    empty = [empty_row(seq_len)] * (num_rows - 2)
    made = collate([found[0], *empty, found[1]], [0, *[-1] * len(empty), 1])
    made.tokens_BS[made.document_ids_BS < 0] = 5
    return made


def step(config: Config, batch: Batch) -> tuple[StepResult, dict[str, torch.Tensor]]:
    device = torch.device("cpu")
    with process_group(60):
        mesh = build_mesh(config.parallel, device)
        model = build_model(config, mesh)
        result = train_step(model, build_optimizer(model, config.optim), [batch], mesh, config)
        return result, {name: local(value).detach().clone() for name, value in model.named_parameters()}


@pytest.mark.parametrize("level", ["batch", "sequence"])
def test_padding_is_neither_counted_nor_routed_nor_learnt(bench: Bench, level: str) -> None:
    words = ("optim=sgd", "parallel.ep=1", f"model.moe.aux_loss_level={level}", "model.moe.z_loss=0.01", "optim.lr=1.0")
    config = compose(bench.overrides("padding", "optim.max_grad_norm=0", *words))
    assert config.model.moe.aux_loss > 0
    (plain, weights), (result, padded_weights) = step(config, batch(SEQ_LEN, 2)), step(config, batch(SEQ_LEN + 9, 4))
    assert plain.tokens_per_expert_LE is not None and result.tokens_per_expert_LE is not None
    assert torch.equal(result.tokens_per_expert_LE, plain.tokens_per_expert_LE)
    assert int(result.num_tokens) == int(plain.num_tokens) == 2 * SEQ_LEN
    for name in ("loss", "aux_loss", "z_loss", "grad_norm"):
        assert float(getattr(result, name)) == pytest.approx(float(getattr(plain, name)), rel=BOUND), name
    for name, weight in weights.items():
        assert torch.linalg.norm(padded_weights[name] - weight) <= BOUND * torch.linalg.norm(weight), name
