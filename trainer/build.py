"""From a config and a mesh to a model that can train: built without memory, laid out, then filled."""

import torch

from moe.experts import GroupedExperts
from moe.fused_experts import tune
from moe.grouped_gemm import resolve_backend
from parallel.async_tp import connect_async_tp
from parallel.mesh import Mesh
from parallel.parallelize import parallelize
from trainer.config import Config
from trainer.layout import check_layout
from trainer.memory_plan import GIB, no_room, on_device
from trainer.meta_model import DTYPES, meta_model
from trainer.models.transformer import Transformer, init_rule, tensor_plan
from trainer.precision import apply_precision


def build_model(config: Config, mesh: Mesh) -> Transformer:
    """The model of a run on its device, laid out by the mesh, with its initial weights.

    Raises:
        ValueError: for a recipe that this device cannot run, or sizes that do not fit the mesh.
    """
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
        num_in_order=config.model.num_layers,
        rule_of=lambda name: init_rule(name, config.model),
        seed=config.run.seed,
        apply_precision=lambda model: apply_precision(model, config.precision, mesh.device),
        no_room=_no_room(config, mesh),
    )
    num_rows = config.train.micro_batch_size * -(-config.train.seq_len // mesh.config.cp)
    model.async_tp = connect_async_tp(model, mesh, num_rows)
    return model


def _no_room(config: Config, mesh: Mesh) -> str:
    """What this GPU's memory says against comms.backend=auto taking symm_mem; empty: nothing."""
    if config.comms.backend != "auto" or mesh.config.ep == 1 or mesh.device.type != "cuda":
        return ""
    # What is really there: cluster.memory_gib is for estimates.
    memory_gib = torch.cuda.get_device_properties(mesh.device).total_memory / GIB
    return no_room(on_device(config, mesh.device), mesh.world_size, memory_gib)


def choose_expert_tiles(model: Transformer, config: Config, mesh: Mesh) -> None:
    """Have the fused expert kernels measure how to cut their work (moe/tiles.py): now, not in the middle of a step.

    Other backends have nothing to choose.
    """
    layers = [module for module in model.modules() if isinstance(module, GroupedExperts)]
    compute = DTYPES[config.precision.recipe][1]
    if not layers or resolve_backend(layers[0].config.backend, compute, mesh.device) != "fused":
        return
    moe, sizes = config.model.moe, mesh.config
    # A balanced load: each rank's tokens go to top_k experts each, of whichever ranks.
    tokens = config.train.micro_batch_size * config.train.seq_len * sizes.etp // (sizes.cp * sizes.tp)
    experts, hidden = moe.num_experts // sizes.ep, moe.expert_dim // sizes.etp
    tune(tokens * moe.top_k, experts, config.model.dim, hidden, mesh.device)


def _check_alignment(config: Config, mesh: Mesh) -> None:
    """Grouped GEMMs on GPUs read rows of whole 16 bytes: 8 numbers in bf16."""
    if mesh.device.type != "cuda" or DTYPES[config.precision.recipe][1] != torch.bfloat16:
        return
    # Ranks of etp share out the hidden units of each expert.
    etp = mesh.config.etp
    for key, value, unit in (
        ("model.dim", config.model.dim, 8),
        ("model.moe.expert_dim", config.model.moe.expert_dim, 8 * etp),
    ):
        if value % unit:
            below = value // unit * unit
            each = "" if unit == 8 else f" of each of parallel.etp={etp} ranks"
            nearest = f"{below} or {below + unit}" if below else str(unit)
            raise ValueError(
                f"{key}={value} must be a multiple of {unit} for bf16 experts{each} on GPUs; nearest: {nearest}."
            )
