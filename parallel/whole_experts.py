"""Experts that no other rank has a share of: they are cast where FSDP would gather and reduce.

With all ranks in ep and etp, or on one GPU, FSDP has one rank to gather from and to reduce over, and copies all the
same: the weights once more after the cast, and the gradients three times (on two H200, 3.4 of the 13.6 ms of a layer of
Qwen3-30B-A3B with 8192 tokens). Here the cast is all that is left:

    forward    masters (fp32) -> copies in the dtype of the computation, which are given up afterwards
    backward   masters -> copies again; gradients are added to the masters' in fp32, and the copies given up

Each weight has one copy for the whole run, whose memory comes and goes (as FSDP2 does it): what autograd keeps of the
forward refers to it, also where a block is recomputed between the two.
"""

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.autograd import grad_mode as autograd_internals
from torch.distributed.tensor import DTensor

from moe.experts import ExpertWeights
from moe.linear_maps import local


class CastWeights:
    """What GroupedExperts computes with instead of its parameters.

    Args:
        dtype: of the computation.
        give_up: whether copies are given up between forward and backward.
    """

    def __init__(self, dtype: torch.dtype, give_up: bool) -> None:
        self.dtype, self.give_up = dtype, give_up
        self._copies: list[Tensor] = []
        self._in_backward = False

    def __call__(self, compute: Callable[[ExpertWeights], Tensor], masters: Sequence[nn.Parameter | None]) -> Tensor:
        """`compute` with copies of the weights."""
        present = [master for master in masters if master is not None]
        self._fill(present)
        try:
            used = iter([cast(Tensor, _Cast.apply(*pair)) for pair in zip(present, self._copies, strict=True)])
            out = compute(tuple(None if master is None else next(used) for master in masters))  # pyright: ignore
        finally:
            # A recomputation comes in the middle of a backward that needs them.
            if self.give_up and not self._in_backward:
                self._give_up()
        if out.requires_grad:
            out.register_hook(lambda _: self._before_backward(present))
        return out

    def _fill(self, masters: Sequence[nn.Parameter]) -> None:
        parts = [local(master.detach()) for master in masters]
        if not self._copies:
            self._copies = [part.new_empty(part.shape, dtype=self.dtype) for part in parts]
        for part, copy in zip(parts, self._copies, strict=True):
            copy.untyped_storage().resize_(copy.numel() * copy.element_size())
            # The same numbers as before, as far as autograd is concerned.
            with torch.no_grad(), autograd_internals._unsafe_preserve_version_counter(copy):
                copy.copy_(part)

    def _before_backward(self, masters: Sequence[nn.Parameter]) -> None:
        if not self._in_backward:
            Variable._execution_engine.queue_callback(self._after_backward)
        self._in_backward = True
        if self.give_up:
            self._fill(masters)

    def _after_backward(self) -> None:
        self._in_backward = False
        # Those that it did not come by.
        self._give_up()

    def _give_up(self) -> None:
        for copy in self._copies:
            _free(copy)


def _free(copy: Tensor) -> None:
    copy.untyped_storage().resize_(0)


class _Cast(torch.autograd.Function):
    """The copy that has been made of a master; its gradient goes to the master's at once."""

    @staticmethod
    def forward(ctx: Any, master: nn.Parameter, copy: Tensor) -> Tensor:
        ctx.master, ctx.copy = master, copy
        return copy.view_as(copy)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        master, gradient = ctx.master, grads[0]
        # Nothing but what has left this gradient needed it.
        _free(ctx.copy)
        with torch.no_grad():
            if master.grad is None:
                # Without DTensor.from_local, which takes the host longer than the cast takes the device.
                wide = gradient.to(master.dtype)
                is_split = isinstance(master, DTensor)
                master.grad = DTensor(wide, master._spec, requires_grad=False) if is_split else wide
            else:
                local(master.grad).add_(gradient)
        return None, None
