"""What a later attempt of a run may change against the config that the run was started with.

Everything but the model, the data, the optimizer and what fixes the schedule and the order of samples (GUARDED).
`train.steps` belongs to these, because the learning rate is a function of it. A change that is meant is named in
`run.allow_changes`; so is a longer `train.steps` that continues a finished run.
"""

import dataclasses
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from trainer.compose import load_config
from trainer.config import Config

GUARDED = (
    "model",
    "data",
    "optim",
    "run.seed",
    "train.steps",
    "train.max_tokens",
    "train.global_batch_size",
    "train.seq_len",
)
# Inside the guarded sections: how something is computed or where it is kept, not what.
FREE = (
    "model.name",
    "model.attention.backend",
    "model.moe.backend",
    "model.moe.pair_capacity",
    "data.cache_dir",
    "data.prefetch",
)
# What fixes the samples and their order. A checkpoint's place in the data means nothing in others, so that the loader
# (trainer/data.py) refuses to go on there whatever is allowed. Files that were only moved are the same data.
SAMPLES = ("data", "run.seed", "train.seq_len")
NO_SAMPLES = ("data.eval", "data.eval_samples")
NEVER_THE_SAME = ("run.seed", "train.seq_len", "data.document_mask")
# An evaluation of finished weights needs the same model, whatever it was trained on.
GUARDED_EVAL_ONLY = ("model",)


class Change(NamedTuple):
    """One setting that differs: its key, the stored value and the one asked for now."""

    key: str
    old: Any
    new: Any


def changed_settings(old: Config, new: Config) -> list[Change]:
    """Every setting whose value differs, in the order of the schema; a missing dict entry counts as null."""
    before, after = dict(leaves(dataclasses.asdict(old))), dict(leaves(dataclasses.asdict(new)))
    keys = dict.fromkeys((*before, *after))
    return [Change(key, before.get(key), after.get(key)) for key in keys if before.get(key) != after.get(key)]


def refuse_changes(old: Config, new: Config, origin: Path) -> list[Change]:
    """Compare a stored config with the one asked for now, and return the changes that are permitted.

    Raises:
        ValueError: a guarded setting differs and `run.allow_changes` does not name it; the message is a diff.
    """
    changes = changed_settings(old, new)
    guarded = GUARDED_EVAL_ONLY if new.train.eval_only else GUARDED
    refused = _refused(changes, guarded, new)
    if refused:
        raise ValueError(
            f"run {new.run.id} was started with other settings ({origin}):\n{_diff(refused)}\n"
            f"{_advice(refused, origin.parent)}"
        )
    return changes


def _advice(refused: Sequence[Change], run: Path) -> str:
    """What helps: to allow a change of the samples does not, once there is a checkpoint to go on from."""
    saved = any((run / "checkpoints").glob("step_*"))
    samples = [change.key for change in refused if saved and within(change.key, SAMPLES)]
    samples = [key for key in samples if not within(key, NO_SAMPLES)]
    allow = f"'run.allow_changes=[{','.join(change.key for change in refused)}]'"
    if not samples:
        return f"Use the stored values, start a new run with another run.id, or accept the changes with {allow}."
    other = any(key in NEVER_THE_SAME or key.endswith(".weight") for key in samples)
    return (
        "Use the stored values, or start a new run with another run.id from the weights of this one, "
        f"checkpoint.init_from={run}: with other samples ({', '.join(samples)}) no checkpoint can be gone on from."
    ) + ("" if other else f" If the data are the same, and files were only moved: {allow}.")


def check_architecture(config: Config, step_folder: Path, *, refuse: bool) -> str:
    """Compare `model` with the config of the run whose checkpoint this is: equal shapes may still compute otherwise.

    Returns:
        What to tell the user: the differences, where they are not refused, or that nothing could be compared.
    Raises:
        ValueError: with `refuse`, a setting differs and `run.allow_changes` does not name it. Or its config cannot be
            read.
    """
    checkpoints = step_folder.resolve().parent
    stored = checkpoints.parent / "config.yaml"
    if checkpoints.name != "checkpoints" or not stored.exists():
        return f"{step_folder} is in no run's folder: whether its architecture is that of model.* cannot be checked"
    changes = changed_settings(load_config(stored), config)
    refused = _refused(changes, ("model",), config)
    if refused and refuse:
        keys = ",".join(change.key for change in refused)
        raise ValueError(
            f"{step_folder} belongs to a run with another architecture ({stored}):\n{_diff(refused)}\n"
            f"Use the stored values, or accept the changes with 'run.allow_changes=[{keys}]'."
        )
    different = [c for c in changes if within(c.key, ("model",)) and not within(c.key, FREE)]
    if not different:
        return ""
    return f"warning: {step_folder} belongs to a run with another architecture ({stored}):\n{_diff(different)}"


def describe_changes(changes: Sequence[Change]) -> str:
    """Permitted changes, for the log; empty if there are none."""
    visible = [change for change in changes if not change.key.startswith("run.allow_changes")]
    return f"settings that differ from the last attempt:\n{_diff(visible)}" if visible else ""


def _refused(changes: Sequence[Change], guarded: Sequence[str], config: Config) -> list[Change]:
    allowed = (*FREE, *config.run.allow_changes)
    return [change for change in changes if within(change.key, guarded) and not within(change.key, allowed)]


def leaves(node: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every setting of a config as a dict, by its dotted key."""
    for name, value in node.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, f"{prefix}{name}.")
        elif not isinstance(value, dict):
            yield f"{prefix}{name}", value


def within(key: str, sections: Sequence[str]) -> bool:
    """Whether it is one of them, or in one of them."""
    return any(key == section or key.startswith(f"{section}.") for section in sections)


def _diff(changes: Sequence[Change]) -> str:
    return "\n".join(f"  {c.key}: {_value(c.old)} -> {_value(c.new)}" for c in changes)


def _value(value: Any) -> str:
    return json.dumps(value)
