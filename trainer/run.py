"""The folder of a run: `<run.root>/<run.id>/`, made and written by rank 0 alone.

    config.yaml       the composed config, with which a later attempt must agree
    overrides.yaml    the words of the command line that led to it
    environment.json  versions, commit, host and devices of every attempt
    status.json       running | finished | preempted | failed, exit code, step, attempt, message

The id decides whether a start is a new run or the next attempt of an old one, so it never depends on a rank's clock:
rank 0 draws a new one and the caller sends it to the others. Files are replaced in one step: a reader sees the old or
the new one, whenever the process is killed.

What an attempt may change against config.yaml: trainer/changes.py.
"""

import dataclasses
import datetime
import difflib
import json
import os
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from trainer.changes import Change, changed_settings, describe_changes, refuse_changes
from trainer.compose import config_to_yaml, load_config
from trainer.config import Config, RunConfig
from trainer.environment import describe_environment
from trainer.validate import check_run_id
from trainer.way_back import goes_back

STATUS = "status.json"
STATES = ("running", "finished", "preempted", "failed")
# Of the runs that there are, so many are named to somebody who asked for another.
NUM_NAMED = 5
# An id that nobody chose: as new_run_id and scripts/train.sh draw it.
DRAWN_ID = re.compile(r"\d{8}-\d{6}-\w+")
# How long a run goes on: one that is finished goes on if these change.
ENDS = ("train.steps", "train.max_tokens")


@dataclass(frozen=True)
class RunFolder:
    """What rank 0 found and made."""

    path: Path
    run_id: str
    # 1 for the first start, one more for each restart; an evaluation has that of the training before it, else 0.
    attempt: int
    # The run had ended and nothing asks for more: the caller stops with exit code 0.
    finished: bool
    # For the log: that the run is finished, or which permitted settings changed, or that a file of it was damaged;
    # empty when there is nothing to say.
    notice: str
    # What the files that this attempt replaced had in them, by name, where the run has been trained before.
    before: Mapping[str, str] = field(default_factory=dict)
    # The step that the run's status had.
    step: int | None = None
    # The words of the command line, by which a restart is known.
    overrides: tuple[str, ...] = ()

    def take_back(self) -> bool:
        """The run is again as the attempt before left it: this one could not begin. Rank 0 only.

        Returns whether its status is that of before, too, and nothing is to be said there of this attempt.
        """
        for name, text in self.before.items():
            replace_file(self.path / name, text)
        return STATUS in self.before


def resolve_run_id(config: Config, environ: Mapping[str, str] | None = None) -> str | None:
    """The run's id from the config, else SLUICEGATE_RUN_ID, SLURM_JOB_ID or TORCHELASTIC_RUN_ID (unless `none`).

    None when nothing names the run: rank 0 then draws `new_run_id()` and sends it to the other ranks.

    Raises:
        ValueError: an id that cannot name a folder.
    """
    environ = os.environ if environ is None else environ
    elastic = environ.get("TORCHELASTIC_RUN_ID", "")
    sources = (
        config.run.id,
        environ.get("SLUICEGATE_RUN_ID"),
        environ.get("SLURM_JOB_ID"),
        None if elastic == "none" else elastic,
    )
    named = next((source for source in sources if source), None)
    return None if named is None else check_run_id(named)


def new_run_id() -> str:
    """A fresh id: the date, so that folders sort, and enough random digits that two starts never meet."""
    return f"{datetime.datetime.now():%Y%m%d-%H%M%S}-{secrets.token_hex(3)}"


def run_path(config: Config) -> Path:
    """`<run.root>/<run.id>`; `run.id` must have been settled."""
    assert config.run.id is not None
    return Path(config.run.root) / config.run.id


def find_folder(given: Path) -> Path:
    """The folder that is meant by `given`: itself (a run's, or a checkpoint's), or that of the run with this id.

    Raises:
        FileNotFoundError: there is neither; names the newest runs.
    """
    root = Path(RunConfig().root)
    if given.is_dir():
        return given
    if len(given.parts) == 1 and (root / given).is_dir():
        return root / given
    runs = sorted(root.glob("*/checkpoints"), key=lambda path: path.stat().st_mtime, reverse=True)
    newest = ", ".join(path.parent.name for path in runs[:NUM_NAMED])
    known = f"; newest in {root}/: {newest}" if newest else ""
    meant = f"a run's folder, its id where it is in {root}/, or one of its checkpoints"
    raise FileNotFoundError(f"{given} is not a directory: give {meant}{known}")


def make_folder(config: Config) -> Path:
    """`run_path`, made where it is not there yet.

    Raises:
        ValueError: something else has its name, or the name of a folder above it.
    """
    path = run_path(config)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        hint = "choose another run.root or run.id"
        raise ValueError(f"the run's folder {path} cannot be made ({error}); {hint}") from None
    return path


def check_run_folder(config: Config, overrides: Sequence[str]) -> tuple[dict[str, Any] | None, list[Change]]:
    """The status and the permitted changes of the run that `config` continues, if any. Writes nothing.

    Args:
        overrides: the words of the command line that `config` comes from.

    Raises:
        ValueError: guarded settings differ from the stored ones (the message is a diff), or checkpoint.resume=never
            would mix a new run into an old one's folder; an evaluation names a run that is not there.
    """
    path = run_path(config)
    _refuse_to_evaluate_nothing(config, path)
    status, changes = read_status(path), _check_against_stored(config, path)
    if not _only_looks(config, path) and not (status and _is_over(config, overrides, status, changes)):
        _refuse_to_mix(config, overrides, path)
    return status, changes


def prepare_run_folder(config: Config, overrides: Sequence[str], world_size: int) -> RunFolder:
    """Create the run's folder or join it as the next attempt. Rank 0 only; `config.run.id` must be settled.

    Raises:
        ValueError: see `check_run_folder`.
    """
    path = run_path(config)
    status, changes = check_run_folder(config, overrides)
    # An evaluation is no attempt: the training after it would have the same number.
    attempt = (int(status["attempt"]) if status else 0) + (0 if config.train.eval_only else 1)
    if _only_looks(config, path):
        return RunFolder(path, path.name, attempt, finished=False, notice="")
    if status and _is_over(config, overrides, status, changes):
        return RunFolder(path, path.name, int(status["attempt"]), finished=True, notice=_finished_text(path, status))
    make_folder(config)
    before = _replaced_files(path, status)
    replace_file(path / "config.yaml", config_to_yaml(config))
    replace_file(path / "overrides.yaml", yaml.safe_dump(list(overrides)))
    notices = (describe_changes(changes), _record_environment(path, attempt, world_size))
    step = status["step"] if status else None
    if not config.train.eval_only:
        write_status(path, "running", attempt=attempt, step=step)
    notice = "\n".join(filter(None, notices))
    return RunFolder(path, path.name, attempt, False, notice, before=before, step=step, overrides=tuple(overrides))


def _replaced_files(path: Path, status: Mapping[str, Any] | None) -> dict[str, str]:
    """What an attempt that cannot begin puts back; nothing where no training is to be gone on with."""
    if not (path / "config.yaml").exists() or _never_began(path):
        return {}
    names = ["config.yaml", "overrides.yaml"]
    # A process that was killed could not say how it ended: that this attempt has failed is more than `running` says.
    if status and status["state"] != "running":
        names += ["environment.json", STATUS]
    return {name: (path / name).read_text(errors="replace") for name in names if (path / name).exists()}


def is_over(config: Config, overrides: Sequence[str]) -> bool:
    """Whether the run is finished and `config` asks for no more of it, so that a start will say just that."""
    run_id = resolve_run_id(config)
    if run_id is None or config.train.eval_only:
        return False
    config = dataclasses.replace(config, run=dataclasses.replace(config.run, id=run_id))
    path = run_path(config)
    status, stored = read_status(path), path / "config.yaml"
    if not status or status["state"] != "finished" or not stored.exists():
        return False
    return _is_over(config, overrides, status, changed_settings(load_config(stored), config))


def _only_looks(config: Config, path: Path) -> bool:
    """An evaluation of a run that is there writes nothing into its folder but figures."""
    return config.train.eval_only and (path / "config.yaml").exists()


def _is_over(config: Config, overrides: Sequence[str], status: Mapping[str, Any], changes: Sequence[Change]) -> bool:
    """A run that is finished goes on if its end is moved, or if it is to go back to an earlier checkpoint."""
    if status["state"] != "finished" or any(change.key in ENDS for change in changes):
        return False
    return not goes_back(config.checkpoint.resume, run_path(config) / "checkpoints", overrides)


def _refuse_to_evaluate_nothing(config: Config, path: Path) -> None:
    """A mistyped run.id of an evaluation must not leave a folder behind."""
    elsewhere = config.checkpoint.resume not in ("auto", "never") or config.checkpoint.init_from is not None
    if not config.train.eval_only or elsewhere or path.exists():
        return
    runs = sorted(folder.name for folder in path.parent.iterdir() if folder.is_dir()) if path.parent.is_dir() else []
    near = [] if DRAWN_ID.fullmatch(path.name) else difflib.get_close_matches(path.name, runs, n=1)
    hint = f"did you mean run.id={near[0]}?" if near else "name a run that has a checkpoint (run.id)."
    raise ValueError(
        f"train.eval_only=true needs weights, and there is no run {path}: {hint} "
        "Weights elsewhere: checkpoint.resume=PATH or checkpoint.init_from=PATH"
    )


def write_status(
    path: Path,
    state: str,
    *,
    attempt: int,
    step: int | None = None,
    exit_code: int | None = None,
    message: str = "",
) -> None:
    """Replace `path`/status.json. Rank 0 only; launchers read it, because torchrun flattens exit codes."""
    assert state in STATES, state
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    status = {"state": state, "exit_code": exit_code, "step": step, "attempt": attempt, "message": message, "time": now}
    replace_file(path / STATUS, json.dumps(status, indent=2) + "\n")


def read_status(path: Path) -> dict[str, Any] | None:
    """The run's status.json, or None if there is none.

    Raises:
        ValueError: the file is there but not one of ours.
    """
    file = path / STATUS
    if not file.exists():
        return None
    try:
        status = json.loads(file.read_text())
        known = status["state"] in STATES and isinstance(status["attempt"], int) and "step" in status
    except (ValueError, KeyError, TypeError):
        known = False
    if not known:
        raise ValueError(f"{file} is not a status file of this program; remove it, or choose another run.id")
    return status


def replace_file(path: Path, text: str) -> None:
    """Write `text` to `path` so that a crash leaves the old file or the new one, whole."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(temporary, "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:
        # A full disk.
        temporary.unlink(missing_ok=True)
        raise


def _check_against_stored(config: Config, path: Path) -> list[Change]:
    stored = path / "config.yaml"
    if not stored.exists() or _never_began(path):
        return []
    return refuse_changes(load_config(stored), config, stored)


def _never_began(path: Path) -> bool:
    """A mistake in config or data ended the run before its first step, or nothing but an evaluation was in this folder.

    Nothing holds it to these settings then.
    """
    status = read_status(path)
    if status is not None and (status["state"] != "failed" or status.get("exit_code") != 2 or status["step"]):
        return False
    return not any((path / "checkpoints").glob("step_*"))


def _refuse_to_mix(config: Config, overrides: Sequence[str], path: Path) -> None:
    """Who starts anew finds no checkpoints but those of the same command: a requeued job goes on from its own.

    The stop that saved them has said that the same command continues the run, and so does scripts/train.sh by its exit
    code, whatever checkpoint.resume is; with checkpoint=none (which is `never`), too.
    """
    saved = sorted((path / "checkpoints").glob("step_*"))
    if config.checkpoint.resume == "never" and saved and _last_words(path) != list(overrides):
        raise ValueError(
            f"checkpoint.resume=never starts anew, but {path} already holds {saved[-1].name}, and the last command "
            "there was another one (overrides.yaml); choose another run.id, or checkpoint.resume=auto to go on"
        )


def _last_words(path: Path) -> list[str] | None:
    """The command line of the last attempt; None where that is not known."""
    try:
        return yaml.safe_load((path / "overrides.yaml").read_text())
    except (FileNotFoundError, ValueError, yaml.YAMLError):
        return None


def _record_environment(path: Path, attempt: int, world_size: int) -> str:
    """Add this attempt to environment.json. Nothing depends on that file: a damaged one is set aside, and that told."""
    file = path / "environment.json"
    entry = {"attempt": attempt, **describe_environment(world_size)}
    notice = ""
    try:
        attempts = json.loads(file.read_text())["attempts"] if file.exists() else []
        attempts.append(entry)
    except (ValueError, KeyError, TypeError, AttributeError):
        aside = file.with_name("environment.damaged.json")
        os.replace(file, aside)
        notice = f"{file} was damaged: what it said of earlier attempts is in {aside.name}, a new list begins"
        attempts = [entry]
    replace_file(file, json.dumps({"attempts": attempts}, indent=2) + "\n")
    return notice


def _finished_text(path: Path, status: Mapping[str, Any]) -> str:
    return (
        f"run {path.name} is finished (step {status['step']}, {path}): nothing to do. To train it further give a "
        "larger train.steps and 'run.allow_changes=[train.steps]'; to go back, checkpoint.resume=PATH of an earlier "
        "checkpoint; for a new run another run.id."
    )
