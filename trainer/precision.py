"""Which maps of a model compute in a low-precision recipe, chosen by `precision.*` and told at start.

The routed experts always do. Dense linears do where `precision.linears` has a pattern for their name and
`precision.linears_exclude` has none:

    layers.*.attention.{wq,wk,wv,wo}    wq_a, wq_b, wkv_a, wkv_b of MLA
    layers.*.feed_forward.{w_gate,w_up,w_down}, layers.*.moe.shared.{w_gate,w_up,w_down}, mtp.*.projection

Router, embedding and head are no such linears, so no pattern reaches them. A pattern that finds nothing to convert is a
mistake and no no-op.
"""

import re
from collections import Counter
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple

import torch
from torch import nn

from moe.config import LOW_PRECISION
from moe.experts import GroupedExperts
from moe.linear_maps import local
from moe.low_precision_linear import LowPrecisionLinear, check_dims
from moe.recipes import Recipe, resolve_recipe
from parallel.init import clean_name
from trainer.config import PrecisionConfig
from trainer.schema import did_you_mean

DEFAULT_EXCLUDE = PrecisionConfig().linears_exclude


class Conversion(NamedTuple):
    """What computes in a recipe, by name: routed experts and dense linears."""

    recipe: Recipe
    experts: list[str]
    linears: list[str]

    def __str__(self) -> str:
        """`mxfp8: exact mode on the CPU; layers.*.moe.experts (2), layers.*.attention.wq (2)`."""
        counts = Counter(_family(name) for name in (*self.experts, *self.linears))
        return f"{self.recipe}; {', '.join(f'{name} ({count})' for name, count in counts.items())}"


def apply_precision(model: nn.Module, config: PrecisionConfig, device: torch.device) -> Conversion | None:
    """Make the experts and the chosen linears compute in `config.recipe`; None where that is no low-precision recipe.

    Parameters stay what they are (fp32 masters), and keep their names. Call it once weights are split over ranks, for
    these parts must fit the recipe's blocks, and before anything is compiled or wrapped. Launches nothing.

    Raises:
        ValueError: a device that cannot run the recipe, dims that do not fit its blocks, a pattern that finds nothing,
            or nothing to convert.
    """
    if config.recipe not in LOW_PRECISION:
        return None
    recipe = resolve_recipe(config.recipe, device, config.wgrad)
    experts, names = what_converts(model, config)
    for module in experts.values():
        module.use_recipe(recipe)
    for name in names:
        _convert(model, name, recipe)
    return Conversion(recipe, list(experts), names)


def what_converts(model: nn.Module, config: PrecisionConfig) -> tuple[dict[str, GroupedExperts], list[str]]:
    """The routed experts, and the names of the dense linears, that compute in `config.recipe`; of any device.

    Raises:
        ValueError: a pattern that finds nothing, or nothing to convert.
    """
    experts = {clean_name(name): module for name, module in model.named_modules() if isinstance(module, GroupedExperts)}
    names = choose_linears(linear_names(model), config.linears, config.linears_exclude)
    if not experts and not names:
        raise ValueError(
            f"precision.recipe={config.recipe} converts nothing: the model has no experts and precision.linears is "
            "empty; name dense linears, for example precision.linears=[*feed_forward*], or set precision.recipe=bf16"
        )
    return experts, names


def _convert(model: nn.Module, name: str, recipe: Recipe) -> None:
    linear = model.get_submodule(name)
    assert isinstance(linear, nn.Linear)
    check_dims(recipe, local(linear.weight).shape, f"{name} of precision.linears")
    parent, _, last = name.rpartition(".")
    setattr(model.get_submodule(parent), last, LowPrecisionLinear(linear, recipe))


def linear_names(model: nn.Module) -> list[str]:
    """Every dense linear map."""
    return [clean_name(name) for name, module in model.named_modules() if isinstance(module, nn.Linear)]


def choose_linears(names: Sequence[str], include: Sequence[str], exclude: Sequence[str]) -> list[str]:
    """The names that a pattern of `include` matches and none of `exclude`, in order.

    Raises:
        ValueError: a pattern that matches nothing, or that has all its matches excluded.
    """
    for key, patterns in (("precision.linears", include), ("precision.linears_exclude", exclude)):
        for pattern in patterns:
            # The defaults name linears of every kind of model.
            if not (key.endswith("exclude") and pattern in DEFAULT_EXCLUDE):
                _check_matches(key, pattern, names)
    kept = [name for name in names if not _matches(name, exclude)]
    for pattern in include:
        if not _matches_any(pattern, kept):
            raise ValueError(
                f"precision.linears: everything that {pattern!r} matches is left out by precision.linears_exclude="
                f"[{','.join(exclude)}]; drop one of the two"
            )
    return [name for name in kept if _matches(name, include)]


def _check_matches(key: str, pattern: str, names: Sequence[str]) -> None:
    if not _matches_any(pattern, names):
        families = list(dict.fromkeys(_family(name) for name in names))
        hint = did_you_mean(pattern, families) or f"; the dense linears are {', '.join(families)}"
        raise ValueError(f"{key}: {pattern!r} matches no dense linear of the model{hint}")


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _matches_any(pattern: str, names: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for name in names)


def _family(name: str) -> str:
    """layers.3.attention.wq -> layers.*.attention.wq."""
    return re.sub(r"\.\d+\.", ".*.", name)
