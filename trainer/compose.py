"""From the words on the command line to one checked Config.

Hydra's compose API reads `configs/` in the order schema, config.yaml, groups, experiment; its `main` decorator is not
used, because every rank would then race to create an output folder and set up logging. Overrides of single settings
are parsed by Hydra and merged here, onto the typed schema: an unknown or badly typed one is refused with the nearest
valid name, and entries of dict fields (`data.train.mine.paths=[a.txt]`) need no `+`.
"""

import os
import re
import signal
import sys
import time
import typing
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import yaml
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig, OmegaConf, flag_override
from omegaconf.errors import OmegaConfBaseException

from trainer.config import Config
from trainer.schema import did_you_mean, is_dict_entry, is_section, leaf_type, section_text, type_name
from trainer.validate import validate

CONFIG_DIR = Path(__file__).resolve().parent.parent / "configs"
GROUPS = ("model", "parallel", "precision", "data", "optim", "checkpoint", "logging", "cluster", "experiment")
# Ranks other than 0 wait this long after a mistake: torchrun stops everybody as soon as one process ends, and rank 0
# must have printed the reason by then. One that is still there then has seen what rank 0 did not.
SILENT_RANK_SECONDS = 15.0
# What launchers end with after a stop.
EXIT_PREEMPTED = 75
# What a person can mend: told without a traceback, exit code 2.
MISTAKES = (ValueError, FileNotFoundError, PermissionError)
SWITCHES = {"--multirun": "multirun", "-m": "multirun", "--help": "help", "-h": "help", "--check": "check"}

USAGE = """\
Train a Mixture-of-Experts language model.

  torchrun --nproc-per-node N -m trainer.train [experiment=NAME] [GROUP=OPTION] [key=value ...]
  python -m trainer.train ...               one process
  python -m trainer.train --multirun optim.lr=1e-3,3e-4 ...
                                            one torchrun after another for each combination
flags:
  --cfg job            print the composed config and stop
  --check              look for mistakes in config and files, for $WORLD_SIZE processes (default: 1) on this machine,
                       or on the one that cluster=NAME means, and stop
  --config-dir DIR     look for more experiment/ model/ data/ ... files in DIR
  --multirun, -m       sweep; SLUICEGATE_NPROC sets the processes of each job (default: the GPUs, else 1)
  --help, -h           this text
"""


@dataclass(frozen=True)
class CommandLine:
    """What the user typed, sorted: flags and `key=value` words."""

    overrides: list[str] = field(default_factory=list)
    multirun: bool = False
    help: bool = False
    check: bool = False
    show_config: bool = False
    config_dir: str | None = None


def parse_command_line(argv: Sequence[str]) -> CommandLine:
    """Separate flags from overrides.

    Raises:
        ValueError: an unknown flag, or a word that is no override.
    """
    words: list[str] = list(argv)
    overrides: list[str] = []
    found: dict[str, Any] = {}
    while words:
        word = words.pop(0)
        name, _, value = word.partition("=")
        if word in SWITCHES:
            found[SWITCHES[word]] = True
        elif name in ("--cfg", "-c", "--config-dir", "-cd"):
            value = value or (words.pop(0) if words else "")
            found.update(_valued_flag(name, value))
        elif word.startswith("-"):
            raise ValueError(f"unknown flag {word}{did_you_mean(word, [*SWITCHES, '--cfg', '--config-dir'])}")
        else:
            overrides.append(word)
    return CommandLine(overrides=overrides, **found)


def compose(overrides: Sequence[str], config_dir: str | None = None) -> Config:
    """Compose `configs/` with `overrides` and check the result.

    Args:
        overrides: `group=option` and `key=value` words, in Hydra's grammar; the last of two equal keys counts.
        config_dir: a further folder with experiment/, model/, ... files, searched after `configs/`.
    Raises:
        ValueError: unknown key or option, wrong type, impossible value or combination; one message for all ranks.
    """
    with hydra_session():
        parsed = [_parse(word) for word in overrides]
        choices = [str(o.input_line) for o in parsed if _is_group(o)]
        values = [o for o in parsed if not _is_group(o)]
        if config_dir is not None:
            choices.append(f"hydra.searchpath=[{_existing_folder(config_dir)}]")
        with _readable_errors():
            composed = hydra_compose("config", choices, return_hydra_config=True)
        experiment = composed.hydra.runtime.choices.get("experiment")
        tree = _without_hydra(composed)
        for override in values:
            tree = _apply(tree, override)
    return _checked(tree, experiment)


def load_config(path: str | os.PathLike[str]) -> Config:
    """Read a config.yaml saved by `config_to_yaml`. Keys are checked against the schema; values are taken as saved.

    Raises:
        FileNotFoundError: no such file.
        ValueError: not a config of this version; names the file and the key.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(f"no config file at {path}")
    try:
        with _readable_errors():
            config = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Config), OmegaConf.load(Path(path))))
    except (ValueError, yaml.YAMLError) as error:
        raise ValueError(f"{path}: {error}") from error
    assert isinstance(config, Config)
    return config


def config_to_yaml(config: Config) -> str:
    """The whole config as YAML that `load_config` reads back."""
    return OmegaConf.to_yaml(OmegaConf.structured(config))


def config_from_command_line(argv: Sequence[str]) -> tuple[Config, CommandLine]:
    """The entry's first step: the config and what was typed, or the end of the process.

    Ends it with code 0 after --help and --cfg, with 2 after a mistake, and with the sweep's code after --multirun.
    Rank 0 alone prints.
    """
    try:
        line = parse_command_line(argv)
        if line.help:
            finish(help_text())
        if line.multirun and (line.check or line.show_config):
            flag, does = ("--check", "looks at") if line.check else ("--cfg job", "shows")
            raise ValueError(f"{flag} {does} one run: leave --multirun out, and give each setting one value")
        if line.multirun:
            from trainer.multirun import multirun  # late: it imports this module

            raise SystemExit(multirun(line))
        config = compose(line.overrides, line.config_dir)
    except (ValueError, FileNotFoundError) as error:
        exit_with_mistake(error)
    if line.show_config and not line.check:
        finish(config_to_yaml(config))
    return config, line


def exit_with_mistake(error: Exception) -> NoReturn:
    """End this process with code 2 because of a mistake in config or data; rank 0 says which.

    A mistake that rank 0 did not see (a file damaged where only this rank reads) is told after a while. Code and
    message also go to the launcher: torchrun flattens the one to 1 and buries the other.
    """
    if _rank() == 0:
        print(f"error: {error}", file=sys.stderr, flush=True)
        tell_launcher(2, str(error))
    else:
        # torchrun ends this process by SIGTERM as soon as rank 0 has gone: no handler of ours may hold that up.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(SILENT_RANK_SECONDS)
        print(f"error on rank {_rank()}: {error}", file=sys.stderr, flush=True)
    raise SystemExit(2)


def tell_launcher(code: int, message: str) -> None:
    """Leave the exit code, where it is not torchrun's, in the file that the launcher of a node has named for it."""
    exit_file = os.environ.get("SLUICEGATE_EXIT_FILE")
    if exit_file and os.environ.get("LOCAL_RANK", "0") == "0":
        # Whatever was given may stand in it, bytes of no character too.
        Path(exit_file).write_bytes(f"{code}\n{message}\n".encode(errors="backslashreplace"))


def finish(text: str) -> NoReturn:
    """End this process with code 0; rank 0 says the text."""
    if _rank() == 0:
        print(text, flush=True)
    raise SystemExit(0)


def help_text() -> str:
    """Usage, and the options of every group."""
    lines = [f"  {group}: {', '.join(group_options(group))}" for group in GROUPS]
    return USAGE + "groups:\n" + "\n".join(lines) + "\nEvery setting: python -m trainer.train --cfg job"


def group_options(group: str) -> list[str]:
    """The files of one group in `configs/`, without their ending."""
    return sorted(path.stem for path in (CONFIG_DIR / group).glob("*.yaml"))


@contextmanager
def hydra_session() -> Iterator[None]:
    """Hydra initialised on `configs/`, with the schema registered."""
    store = ConfigStore.instance()
    if "schema.yaml" not in store.repo:
        store.store(name="schema", node=Config)
    with initialize_config_dir(str(CONFIG_DIR), version_base="1.3"):
        yield


def _parse(word: str) -> Override:
    try:
        override = OverridesParser.create().parse_override(word)
    except HydraException as error:
        reason = str(error).splitlines()[0]
        hint = "quote a value that has special characters"
        raise ValueError(f"cannot read {word!r} as key=value ({reason}); {hint}") from error
    key = override.key_or_group
    if not key:
        raise ValueError(f"cannot read {word!r} as key=value: it has no key")
    if override.is_add() or override.is_force_add():
        leaf_type(key)
        raise ValueError(f"{word}: settings are never added; write {key}={override.get_value_element_as_str()}")
    if override.is_delete() and (key in GROUPS or not is_dict_entry(key)):
        hint = section_text(key) if is_section(key) else f"set {key} to a value instead"
        raise ValueError(f"{word}: only entries like data.train.NAME can be deleted; {hint}")
    if override.is_sweep_override():
        raise ValueError(f"{word} has several values: a list is written {key}=[a,b]; a sweep needs --multirun")
    if key.startswith("hydra"):
        raise ValueError(f"{word}: Hydra's own settings cannot be changed; --config-dir DIR adds a search path")
    if _is_group(override):
        _check_option(override)
    elif not override.is_delete():
        _check_kind(override)
    return override


def _check_option(override: Override) -> None:
    group, option = override.key_or_group, override.value()
    if isinstance(option, str) or (group == "experiment" and option is None):
        return
    word = override.input_line
    raise ValueError(f"{word}: {group} takes the name of one file ({', '.join(group_options(group))})")


def _check_kind(override: Override) -> None:
    """A section takes entries, and anything else does not."""
    word, key, value = override.input_line, override.key_or_group, override.value()
    if isinstance(value, str) and "${" in value:
        # It stands for something else, which is looked at when all is put together.
        return
    if is_section(key) and not isinstance(value, dict):
        raise ValueError(f"{word}: {section_text(key)}")
    if is_section(key) and not value:
        raise ValueError(f"{word} changes nothing, entries are merged; {section_text(key)}")
    if isinstance(value, dict) and not is_section(key):
        raise ValueError(f"{word}: must be {type_name(leaf_type(key))}")


def _is_group(override: Override) -> bool:
    return override.key_or_group in GROUPS and not override.is_delete()


def _existing_folder(folder: str) -> str:
    if not Path(folder).is_dir():
        raise ValueError(f"--config-dir: no folder {folder}")
    return f"file://{Path(folder).resolve()}"


def _without_hydra(composed: DictConfig) -> DictConfig:
    with flag_override(composed, ["readonly", "struct"], False):
        del composed["hydra"]
    # The sections know their dataclasses, and unknown keys below them stay errors.
    OmegaConf.set_struct(composed, None)
    return composed


def _apply(tree: DictConfig, override: Override) -> DictConfig:
    key = override.key_or_group
    if override.is_delete():
        return _delete(tree, key)
    nested: Any = override.value()
    for part in reversed(key.split(".")):
        nested = {part: nested}
    # In place: OmegaConf.merge would copy the whole tree for each word, which takes longer than all else here.
    with _readable_errors():
        tree.merge_with(nested)
    return tree


def _delete(tree: DictConfig, key: str) -> DictConfig:
    section, _, name = key.rpartition(".")
    entries = OmegaConf.select(tree, section)
    if name not in entries:
        raise ValueError(f"~{key}: there is no such entry; {section} has {', '.join(entries) or 'none'}")
    del entries[name]
    return tree


def _checked(tree: DictConfig, experiment: str | None) -> Config:
    with _readable_errors():
        config = OmegaConf.to_object(tree)
    assert isinstance(config, Config)
    config.experiment = experiment
    validate(config)
    return config


@contextmanager
def _readable_errors() -> Iterator[None]:
    """Turn what Hydra and OmegaConf raise into one ValueError that names field, value and file."""
    try:
        yield
    except MissingConfigException as error:
        raise ValueError(_missing_option(error)) from error
    except (HydraException, OmegaConfBaseException) as error:
        raise ValueError(_explain(str(error))) from error
    except yaml.YAMLError as error:
        raise ValueError(f"not valid YAML: {error}") from error


def _missing_option(error: MissingConfigException) -> str:
    group, _, option = str(error.missing_cfg_file).strip("/").rpartition("/")
    options = sorted(error.options or ())
    listed = f" (options: {', '.join(options)})" if options else ""
    return f"{group}={option}: no such option{did_you_mean(option, options)}{listed}"


def _explain(text: str) -> str:
    """A message of Hydra or OmegaConf, which names the key on a line of its own, as one sentence."""
    file = re.search(r"In '([^']+)'", text)
    place = f"in configs/{file[1]}.yaml: " if file else ""
    key = re.search(r"full_key: (\S+)", text)
    if key is None:
        return place + text.strip()
    try:
        annotation = leaf_type(key[1].partition("[")[0])
    except ValueError as unknown:
        return f"{place}{unknown}"
    if is_section(key[1].partition("[")[0]):
        return f"{place}{section_text(key[1])}"
    if "[" in key[1] and typing.get_origin(annotation) is list:
        annotation = typing.get_args(annotation)[0]
    expected = f"must be {type_name(annotation)}"
    value = re.search(r"Value '(.*)' (?:of type|is not a valid)", text, re.DOTALL)
    if value is not None:
        return f"{place}{key[1]}={value[1]}: {expected}"
    if "not Optional" in text or "Incompatible value 'None'" in text:
        return f"{place}{key[1]}=null: {expected}"
    # What names OmegaConf's own nodes is no help.
    why = text.strip().splitlines()[0]
    return f"{place}{key[1]}: {expected}" + ("" if "Node" in why else f" ({why})")


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))


def _valued_flag(name: str, value: str) -> dict[str, Any]:
    if name in ("--config-dir", "-cd"):
        if not value:
            raise ValueError(f"{name} needs a folder")
        return {"config_dir": value}
    if value != "job":
        raise ValueError(f"{name} {value}: the only choice is --cfg job")
    return {"show_config": True}
