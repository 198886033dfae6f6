"""What a run says of itself before its first step: what is trained, where, on what."""

from collections.abc import Mapping

from comms.backend import BackendChoice
from parallel.async_tp import AsyncChoice
from parallel.mesh import Mesh
from trainer.config import Config
from trainer.meta_model import meta_model
from trainer.models.transformer import Transformer, count_parameters
from trainer.planner import describe_memory
from trainer.precision import apply_precision
from trainer.run import RunFolder

# Counts of a source that a person should hear of, when they are not zero.
NOTABLE = {
    "invalid_utf8": "files of invalid UTF-8 skipped",
    "empty_files": "empty files skipped",
    "truncated": "documents cut",
}
NO_EXPERIMENT = "no experiment=NAME: the defaults of configs/config.yaml, and what was given"
AXES = ("dp_replicate", "dp_shard", "cp", "tp", "ep", "etp")


def describe_run(config: Config, folder: RunFolder, mesh: Mesh) -> str:
    """Run, model, layout, a low-precision recipe and length, a line each.

    Raises:
        ValueError: precision that this device or model cannot have (`apply_precision`): before data are read.
    """
    model = meta_model(config)
    total, active = count_parameters(model)
    conversion = apply_precision(model, config.precision, mesh.device)
    recipe = "" if conversion is None else f"  recipe  {conversion}\n"
    train = config.train
    length = f"{train.steps} steps of {train.global_batch_size} x {train.seq_len} tokens"
    sizes = ", ".join(f"{axis}={size}" for axis in AXES if (size := getattr(mesh.config, axis)) > 1)
    processes = "1 process" if mesh.world_size == 1 else f"{mesh.world_size} processes"
    # Nobody should wait for a thousand steps that a forgotten word started.
    advice = "; experiment=demo is what a CPU trains in minutes" if mesh.device.type == "cpu" else ""
    config_file = "" if config.experiment or train.eval_only else f"  config  {NO_EXPERIMENT}{advice}\n"
    return (
        f"run {folder.run_id} ({'evaluation' if train.eval_only else f'attempt {folder.attempt}'}) in {folder.path}\n"
        f"  model   {config.model.name}: {human(total)} parameters, {human(active)} active per token\n"
        f"  layout  {processes} on {mesh.device.type}{f': {sizes}' if sizes else ''}; {config.precision.recipe}\n"
        f"{recipe}{config_file}"
        f"  length  {'an evaluation, no steps' if train.eval_only else length}"
    )


def describe_layout(config: Config, mesh: Mesh, model: Transformer) -> list[str]:
    """What laying the model out has settled: who brings rows, what that takes, what overlaps."""
    found = (
        describe_exchange(model.exchange_choice),
        describe_memory(config, mesh.world_size, mesh.device, model.exchange_choice.backend),
        describe_async_tp(model.async_tp),
    )
    return [said for said in found if said]


def describe_exchange(choice: BackendChoice) -> str:
    """What brings rows to the experts of other ranks; where none leaves its rank, what was asked for in vain."""
    if choice.backend == "none":
        return f"  experts  {choice.reason}: {choice.unused} has no effect" if choice.unused else ""
    room = f"\n           {choice.room}" if choice.room else ""
    return f"  experts  rows travel by {choice.backend}: {choice.reason}{room}"


def describe_async_tp(choice: AsyncChoice) -> str:
    """What tensor parallelism overlaps; empty where nothing was asked for."""
    if choice.mode == "none":
        return ""
    if choice.mode == "inductor":
        return "  async   inductor: matmuls that it fuses are counted after the first step"
    return f"  async   native: {choice.num_fused} matmuls fused with their transfer"


Counts = Mapping[str, Mapping[str, int]]


def describe_sources(train: Counts, held_out: Counts) -> list[str]:
    """What was read; of training nothing where there is none."""
    found = [describe_data(kind, counts) for kind, counts in (("train", train), ("held out", held_out)) if counts]
    return found if held_out else [*found, "  no held-out set: data.eval is empty"]


def describe_data(kind: str, counts: Counts) -> str:
    """One line per source: `counts` as the loaders give them."""
    lines: list[str] = []
    for name, numbers in counts.items():
        notes = [f"{numbers[key]} {what}" for key, what in NOTABLE.items() if numbers.get(key)]
        text = f"{numbers['documents']:,} documents, {human(numbers['tokens'])} tokens"
        lines.append(f"  {kind:<9}{name}: {', '.join([text, *notes])}")
    return "\n".join(lines)


def human(number: int) -> str:
    """1234567 -> 1.23 M."""
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return str(number)
