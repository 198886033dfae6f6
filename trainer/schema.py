"""Questions about the schema of trainer/config.py: which settings exist, of what type, and which is meant.

A key is a dotted path from the root (`optim.lr`). Below a field of type dict (`data.train`) the next part is a name
that the user chooses; in lists of keys it is written NAME.
"""

import dataclasses
import difflib
import re
import types
import typing
from collections.abc import Iterable, Iterator
from typing import Any

from trainer.config import Config

# Things other trainers have and this one does not: a nearest name would mislead.
ABSENT = {
    "parallel.pp": "there is no pipeline axis",
    "parallel.pipeline": "there is no pipeline axis",
    "parallel.pipeline_parallel_degree": "there is no pipeline axis",
    "train.gradient_accumulation_steps": "accumulation follows from train.global_batch_size and train.micro_batch_size",
}
# What somebody may want who gives a section a value.
INSTEAD = {"data.eval": ", train.eval_every=null evaluates none"}


def nearest(word: str, options: Iterable[str], count: int = 3) -> list[str]:
    """At most `count` options that look like `word`: those that it begins, then the most similar."""
    options = list(options)
    # `fp8` means fp8_blockwise, and not mxfp8 of the same length.
    begun = sorted((option for option in options if len(word) > 1 and option.startswith(word)), key=len)
    similar = difflib.get_close_matches(word, options, n=count, cutoff=0.55)
    return list(dict.fromkeys((*begun, *similar)))[:count]


def did_you_mean(word: str, options: Iterable[str]) -> str:
    """`; did you mean a or b?`, or nothing where no option is close."""
    close = nearest(word, options)
    return f"; did you mean {' or '.join(close)}?" if close else ""


def known_keys() -> list[str]:
    """Every key of the schema, sections included."""
    return list(_walk(Config, ""))


def leaf_type(key: str) -> Any:
    """The annotated type of the setting or section named `key`.

    Raises:
        ValueError: no such key; names the nearest ones.
    """
    node: Any = Config
    parts = key.split(".")
    for depth, part in enumerate(parts):
        if typing.get_origin(node) is dict:
            node = typing.get_args(node)[1]
            continue
        fields = typing.get_type_hints(node) if dataclasses.is_dataclass(node) else {}
        if part not in fields:
            raise ValueError(unknown_key(key, ".".join(parts[:depth]), fields))
        node = fields[part]
    return node


def is_dict_entry(key: str) -> bool:
    """Whether `key` names an entry of a dict field (`data.train.mine`): the only keys that can be deleted."""
    section, _, _ = key.rpartition(".")
    return bool(section) and typing.get_origin(leaf_type(section)) is dict


def is_section(key: str) -> bool:
    """Whether `key` names no setting but something that has settings or entries below it."""
    annotation = leaf_type(key)
    return typing.get_origin(annotation) is dict or dataclasses.is_dataclass(annotation)


def section_text(key: str) -> str:
    """What stands below the section `key`, and how an entry of a dict field goes away."""
    annotation = leaf_type(key)
    above, _, name = key.rpartition(".")
    if is_dict_entry(key) and name in typing.get_type_hints(annotation):
        return f"{name} is a setting of an entry; did you mean {above}.NAME.{name}?"
    if typing.get_origin(annotation) is dict:
        fields = typing.get_type_hints(typing.get_args(annotation)[1])
        below, removal = f"of entries {key}.NAME, each with {', '.join(fields)}", f"; ~{key}.NAME removes one"
    else:
        below = f"with {', '.join(typing.get_type_hints(annotation))}"
        removal = f"; ~{key} removes it" if is_dict_entry(key) else ""
    return f"{key} is a section {below}{removal}{INSTEAD.get(key, '')}"


# How types read; lists have to be quoted, for the shell.
TYPE_NAMES: dict[Any, str] = {
    float: "a number such as 1e-3",
    int: "a whole number",
    bool: "true or false",
    str: "text",
}
LIST_NAMES: dict[Any, str] = {float: "a list such as '[0.9,0.95]'", str: "a list such as '[a,b]'"}


def type_name(annotation: Any) -> str:
    """`a number such as 1e-3 or null`: how an annotation reads in a message."""
    if annotation in TYPE_NAMES:
        return TYPE_NAMES[annotation]
    if annotation is type(None):
        return "null"
    if typing.get_origin(annotation) in (types.UnionType, typing.Union):
        return " or ".join(type_name(part) for part in typing.get_args(annotation))
    if typing.get_origin(annotation) is list:
        (item,) = typing.get_args(annotation)
        return LIST_NAMES.get(item, f"a list of {type_name(item)}")
    return getattr(annotation, "__name__", str(annotation))


def unknown_key(key: str, section: str = "", fields: Iterable[str] = ()) -> str:
    """The message for a key that does not exist: the part that is wrong and the nearest keys that do exist."""
    if key in ABSENT:
        return f"{key}: {ABSENT[key]}"
    if section and not list(fields):
        return f"{key} is not a setting: {section} is a single value"
    return f"{key} is not a setting{_suggestion(key, section, fields)}"


def _suggestion(key: str, section: str, fields: Iterable[str]) -> str:
    rest = key.removeprefix(f"{section}.").partition(".")
    in_section = [".".join(filter(None, (section, name, rest[2]))) for name in nearest(rest[0], fields)]
    close = _of_the_same_words(key) or in_section or nearest(key, known_keys())
    if close:
        return f"; did you mean {' or '.join(close[:3])}?"
    where = f"settings of {section}" if section else "sections"
    return f"; {where}: {', '.join(fields)}"


def _of_the_same_words(key: str) -> list[str]:
    """Keys that the words of `key` name: `log_every` for logging.every. Of several, those of most words."""
    section, _, name = key.rpartition(".")
    words, above = set(name.split("_")), re.split(r"[._]", section)
    found: dict[int, list[str]] = {}
    for known in known_keys():
        own = known.rpartition(".")[2].split("_")
        is_named = all(word in words or any(len(word) > 1 and part.startswith(word) for part in above) for word in own)
        if is_named and words.issubset(re.split(r"[._]", known)):
            found.setdefault(len(own), []).append(known)
    return found[max(found)] if found else []


def _walk(node: Any, prefix: str) -> Iterator[str]:
    for name, annotation in typing.get_type_hints(node).items():
        key = f"{prefix}{name}"
        yield key
        if typing.get_origin(annotation) is dict:
            yield from _walk(typing.get_args(annotation)[1], f"{key}.NAME.")
        elif dataclasses.is_dataclass(annotation):
            yield from _walk(annotation, f"{key}.")
