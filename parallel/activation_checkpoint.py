"""Activation checkpointing that never dispatches rows to experts twice and never routes twice.

Recomputing a block's forward would send its rows over the network again, and a router that met a tie or another
rounding could choose other experts than those the gradient belongs to. So in every mode the results of these operators
are kept: the chosen expert ids, the exchanged counts and the received rows. The exchange back needs no keeping: nothing
that backward wants comes after it, so a recomputation ends before it. Where dispatch, experts and exchange back are one
operator (moe/exchanged_experts.py), all that it returns is kept but h, which its backward makes again. What the ranks
that share a sequence send each other for its attention is the same each time; `full` sends it again, in the same order
on every rank.

    none        everything is kept
    selective   also keeps attention and every second matrix product; recomputes the rest
    full        recomputes everything else from the block's input

torch's own selective checkpointing wants *every* operator of the recomputation to match the forward's. FSDP's hooks
around the experts, inside a block, do not repeat themselves exactly, so here two small dispatch modes remember the
kept operators alone: `_Keep` runs in the forward, `_Replay` in the recomputation.
"""

from collections import Counter
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

import comms.all_to_all
import comms.async_tp
import comms.record_exchange
import comms.symmetric_exchange  # noqa: F401
import moe.router  # noqa: F401
import parallel.ring_attention  # noqa: F401
from moe.experts import GroupedExperts

MODES = ("none", "selective", "full")


def apply_activation_checkpoint(block: nn.Module, mode: str, compiled: bool = False) -> nn.Module:
    """Wrap a block so that its forward is recomputed in backward, as `mode` says.

    Args:
        compiled: the block's parts are compiled.

    Raises:
        ValueError: for an unknown mode.
    """
    if mode not in MODES:
        raise ValueError(f"parallel.activation_checkpoint={mode!r} is unknown; use one of {', '.join(MODES)}.")
    if mode == "none":
        return block
    for module in block.modules():
        if isinstance(module, GroupedExperts):
            # They are kept whole, so what they are to compute again they leave out themselves.
            module.keeps_hidden = False
    return checkpoint_wrapper(block, context_fn=partial(_contexts, mode, compiled), preserve_rng_state=False)


def exchange_operators() -> set[Any]:
    """Operators whose results are kept in every mode: recomputing them would communicate, or choose again."""
    ops = torch.ops.sluicegate
    return {
        ops.dispatch_records.default,
        ops.exchange_counts.default,
        ops.exchange_routes.default,
        ops.symmetric_dispatch.default,
        ops.exchange_record_counts.default,
        ops.record_dispatch.default,
        ops.start_dispatch.default,
        ops.exchanged_experts_forward.default,
        ops.sum_over_ranks.default,
        ops.gather_over_ranks.default,
        ops.keep_choice.default,
    }


def operators_in_graphs() -> set[Any]:
    """Those of `exchange_operators` that run in compiled parts: routing, and what ranks that share a sequence sum."""
    ops = torch.ops.sluicegate
    return {ops.sum_over_ranks.default, ops.gather_over_ranks.default, ops.keep_choice.default}


def product_operators() -> set[Any]:
    """Matrix products, and those with a transfer in them."""
    ops = torch.ops
    return {ops.aten.mm.default, ops.sluicegate.gather_matmul.default, ops.sluicegate.matmul_scatter.default}


def attention_operators() -> set[Any]:
    """Fused attention forwards that are loaded in this process."""
    aten = torch.ops.aten
    names = ("flash_attention", "efficient_attention", "cudnn_attention", "flash_attention_for_cpu")
    found = {getattr(aten, f"_scaled_dot_product_{name}").default for name in names}
    found.add(torch.ops.sluicegate.ring_attention.default)
    # The model registers its own operator for packed documents; a model without it has nothing to keep.
    if hasattr(torch.ops.sluicegate, "flash_varlen"):
        found.add(torch.ops.sluicegate.flash_varlen.default)
    return found


def _contexts(mode: str, compiled: bool) -> tuple["_Keep", "_Replay"]:
    kept: dict[tuple[Any, int], Any] = {}
    return _Keep(kept, mode, compiled), _Replay(kept)


class _Keep(TorchDispatchMode):
    """Remember the results of the chosen operators, by operator and by how often it has run.

    Of what may run in compiled parts a copy: what the compiler makes of the rest of a graph works in results that the
    graph does not need any more.
    """

    def __init__(self, kept: dict[tuple[Any, int], Any], mode: str, compiled: bool) -> None:
        super().__init__()
        self.kept = kept
        self.always = exchange_operators() | (attention_operators() if mode == "selective" else set())
        self.every_second = product_operators() if mode == "selective" else set()
        in_graphs = operators_in_graphs() | (self.always | self.every_second) - exchange_operators()
        self.copied = in_graphs if compiled else set[Any]()
        self.runs: Counter[Any] = Counter()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        run = self.runs[func]
        self.runs[func] += 1
        if func in self.always or (func in self.every_second and run % 2 == 0):
            self.kept[func, run] = tree_map(_copied if func in self.copied else _detached, result)
        return result


class _Replay(TorchDispatchMode):
    """Hand out what `_Keep` remembered instead of running the operator again."""

    def __init__(self, kept: dict[tuple[Any, int], Any]) -> None:
        super().__init__()
        self.kept = kept
        self.runs: Counter[Any] = Counter()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        run = self.runs[func]
        self.runs[func] += 1
        if (func, run) in self.kept:
            return self.kept.pop((func, run))
        return func(*args, **(kwargs or {}))


def _detached(value: Any) -> Any:
    # The forward's own tensor gets a graph attached once it leaves the operator; what is kept must not.
    return value.detach() if isinstance(value, Tensor) else value


def _copied(value: Any) -> Any:
    return _detached(value).clone() if isinstance(value, Tensor) else value
