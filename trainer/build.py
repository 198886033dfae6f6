"""From a config and a mesh to a model that can train: built without memory, laid out, then filled."""

import torch

from parallel.mesh import Mesh
from parallel.parallelize import parallelize
from trainer.config import Config
from trainer.layout import check_layout
from trainer.models.transformer import Transformer, init_rule, tensor_plan

# precision.recipe -> dtype of the parameters (the masters that the optimizer updates), dtype of forward and backward.
DTYPES = {
    "bf16": (torch.float32, torch.bfloat16),
    "fp32": (torch.float32, torch.float32),
    "fp64": (torch.float64, torch.float64),
}


def build_model(config: Config, mesh: Mesh) -> Transformer:
    """The model of a run on its device, laid out by the mesh, with its initial weights.

    Raises:
        ValueError: for a recipe that this version cannot run, or sizes that do not fit the mesh.
    """
    if config.precision.recipe not in DTYPES:
        raise ValueError(
            f"precision.recipe={config.precision.recipe} is not available in this version; use one of "
            f"{', '.join(DTYPES)}."
        )
    master, compute = DTYPES[config.precision.recipe]
    _check_alignment(config, mesh)
    check_layout(config, mesh.config)
    model = meta_model(config, master)
    model.head.compile_chunks = config.parallel.compile
    model.sequence = mesh.sequence
    model.exchange_choice = parallelize(
        model,
        model.layers,
        mesh,
        config.comms,
        tensor_plan=tensor_plan(config.model, mesh.config.tp),
        compute_dtype=compute,
        max_tokens=config.train.micro_batch_size * -(-config.train.seq_len // (mesh.config.cp * mesh.config.tp)),
        rule_of=lambda name: init_rule(name, config.model),
        seed=config.run.seed,
    )
    return model


def _check_alignment(config: Config, mesh: Mesh) -> None:
    """Grouped GEMMs on GPUs read rows of whole 16 bytes: 8 numbers in bf16."""
    if mesh.device.type != "cuda" or config.precision.recipe != "bf16":
        return
    for key, value in (("model.dim", config.model.dim), ("model.moe.expert_dim", config.model.moe.expert_dim)):
        if value % 8:
            below = value // 8 * 8
            raise ValueError(
                f"{key}={value} must be a multiple of 8 for bf16 experts on GPUs; nearest: {below} or {below + 8}."
            )


def meta_model(config: Config, dtype: torch.dtype = torch.float32) -> Transformer:
    """The model without memory: for counting, planning, and as the start of every layout."""
    previous = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device("meta"):
            return Transformer(config.model)
    finally:
        torch.set_default_dtype(previous)
