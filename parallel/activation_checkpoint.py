"""Activation checkpointing that never repeats an exchange and never routes twice.

Recomputing a block's forward would send its rows over the network again, and a router that met a tie or a different
rounding could choose other experts than those the gradient belongs to. So in every mode the results of these operators
are kept: the chosen expert ids, the exchanged counts and the received rows.

    none        everything is kept
    selective   also keeps attention and every second matrix product; recomputes the rest
    full        recomputes everything else from the block's input
"""

from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

import comms.all_to_all  # noqa: F401  (registers the operators named below)
import moe.router  # noqa: F401

MODES = ("none", "selective", "full")


def apply_activation_checkpoint(block: nn.Module, mode: str) -> nn.Module:
    """Wrap a block so that its forward is recomputed in backward, as `mode` says.

    Raises:
        ValueError: for an unknown mode.
    """
    if mode not in MODES:
        raise ValueError(f"parallel.activation_checkpoint={mode!r} is unknown; use one of {', '.join(MODES)}.")
    if mode == "none":
        return block
    return checkpoint_wrapper(block, context_fn=partial(_contexts, mode), preserve_rng_state=False)


def _contexts(mode: str) -> Any:
    return create_selective_checkpoint_contexts(_policy(mode))


def _policy(mode: str) -> Callable[..., CheckpointPolicy]:
    always, attention = exchange_operators(), _attention_operators()
    matmuls: dict[bool, int] = defaultdict(int)

    def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if operator in always:
            return CheckpointPolicy.MUST_SAVE
        if mode == "selective" and operator in attention:
            return CheckpointPolicy.MUST_SAVE
        if mode == "selective" and operator is torch.ops.aten.mm.default:
            # Counted apart in forward and recomputation, so that both make the same choice.
            matmuls[context.is_recompute] += 1
            if matmuls[context.is_recompute] % 2:
                return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    return policy


def exchange_operators() -> set[Any]:
    """Operators whose results are kept in every mode."""
    ops = torch.ops.sluicegate
    return {
        ops.dispatch_records.default,
        ops.exchange_counts.default,
        ops.sum_over_ranks.default,
        ops.keep_choice.default,
    }


def _attention_operators() -> set[Any]:
    aten = torch.ops.aten
    names = (
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
    )
    found = {getattr(aten, name).default for name in names if hasattr(aten, name)}
    if hasattr(torch.ops, "torch_attn") and hasattr(torch.ops.torch_attn, "_varlen_attn"):
        found.add(torch.ops.torch_attn._varlen_attn.default)
    return found
