"""Weights that no other rank has a share of: they are cast where FSDP would gather and reduce.

With all ranks in ep and etp, or on one GPU, FSDP has one rank to gather experts from and to reduce over, and copies all
the same: the weights once more after the cast, the gradients three times (on two H200, 3.4 of the 13.6 ms of a layer of
Qwen3-30B-A3B with 8192 tokens). With all ranks in tp, or on one GPU, that is so of every weight, and a block of ten
weights costs the host 4 ms of a pass. Here the cast is all that is left:

    forward    masters (fp32) -> copies in the dtype of the computation, which are given up afterwards
    backward   masters -> copies again; gradients are added to the masters' in fp32, and the copies given up

Each weight has one copy for the whole run, whose memory comes and goes (as FSDP2 does it): what autograd keeps of the
forward refers to it, also where a block is recomputed in backward, which then finds it there. A copy goes as soon as
its gradient has left what needed it.
"""

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.autograd import grad_mode as autograd_internals
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from moe.experts import ExpertWeights
from moe.linear_maps import local

# Torch's number of the backward that is under way, where there is none.
NO_BACKWARD = -1


def _this_backward() -> int:
    return torch._C._current_graph_task_id()  # pyright: ignore


class Copies:
    """Copies of some weights in the dtype of the computation, whose memory comes and goes.

    Gradients reach the masters' `grad` in `backward` alone: torch.autograd.grad finds no way to them, nor do hooks.

    Args:
        dtype: of the computation.
        give_up: whether copies are given up between forward and backward.
    """

    def __init__(self, dtype: torch.dtype, give_up: bool) -> None:
        self.dtype, self.give_up = dtype, give_up
        self._copies: list[Tensor] = []
        # The last backward that has come here. One that failed leaves its number, and copies.
        self._backward = NO_BACKWARD

    def _fill(self, masters: Sequence[nn.Parameter], missing_only: bool = False) -> None:
        parts = [local(master.detach()) for master in masters]
        if not self._copies:
            # Tensors that were born without autograd could not be kept for it later.
            with torch.inference_mode(False):
                self._copies = [part.new_empty(part.shape, dtype=self.dtype) for part in parts]
            self._give_up()
        pairs = zip(parts, self._copies, strict=True)
        wanted = [pair for pair in pairs if not (missing_only and pair[1].untyped_storage().nbytes())]
        if wanted:
            _cast(*map(list, zip(*wanted, strict=True)))

    def _before_backward(self, masters: Sequence[nn.Parameter]) -> None:
        """Of this backward the first time: what is there may be of one that failed, before an update."""
        is_new, self._backward = self._backward != _this_backward(), _this_backward()
        if is_new:
            Variable._execution_engine.queue_callback(self._after_backward)
        self._fill(masters, missing_only=not (is_new and self.give_up))

    def _after_backward(self) -> None:
        self._backward = NO_BACKWARD
        # Those that it did not come by.
        self._give_up()

    def _give_up(self) -> None:
        for copy in self._copies:
            _free(copy)


class CastWeights(Copies):
    """What GroupedExperts computes with instead of its parameters."""

    def __call__(self, compute: Callable[[ExpertWeights], Tensor], masters: Sequence[nn.Parameter | None]) -> Tensor:
        """`compute` with copies of the weights."""
        present = [master for master in masters if master is not None]
        recomputes = _this_backward() != NO_BACKWARD
        try:
            if recomputes:
                self._before_backward(present)
            else:
                self._fill(present)
            used = iter([cast(Tensor, _Cast.apply(*pair)) for pair in zip(present, self._copies, strict=True)])
            out = compute(tuple(None if master is None else next(used) for master in masters))  # pyright: ignore
        finally:
            if self.give_up and not recomputes:
                self._give_up()
        if out.requires_grad:
            out.register_hook(lambda _: self._before_backward(present))
        return out


class CastModule(Copies):
    """A module that computes with copies of its parameters, which stand in their places while it does.

    Elsewhere (optimizer, checkpoints, whoever asks for parameters) there are the masters. Its own forward alone finds
    the copies: a part that is called by somebody else computes with masters.

    Args:
        parameters: whose; the module's and those of modules in it.
    """

    def __init__(
        self, module: nn.Module, parameters: Sequence[nn.Parameter], dtype: torch.dtype, give_up: bool
    ) -> None:
        super().__init__(dtype, give_up)
        numbers = {parameter: number for number, parameter in enumerate(parameters)}
        # Where each stands; one that is shared stands in several places.
        self._places = [
            (owner, name, numbers[parameter])
            for owner in module.modules()
            for name, parameter in owner._parameters.items()
            if parameter is not None and parameter in numbers
        ]
        self._masters: list[nn.Parameter] = []
        self._stand_ins: list[nn.Parameter] = []
        module.register_forward_pre_hook(self._enter)
        # After a failure, too.
        module.register_forward_hook(self._leave, always_call=True)

    def _enter(self, _module: nn.Module, _args: Any) -> None:
        # Looked up each time: memory and values came after this object, and may be exchanged.
        found = {number: owner._parameters[name] for owner, name, number in self._places}
        self._masters = [cast(nn.Parameter, found[number]) for number in range(len(found))]
        if _this_backward() == NO_BACKWARD:
            self._fill(self._masters)
        else:
            self._before_backward(self._masters)
        if not self._stand_ins:
            self._stand_ins = [self._stand_in(number) for number in range(len(self._masters))]
        self._put(self._stand_ins)

    def _leave(self, _module: nn.Module, _args: Any, out: Any) -> None:
        self._put(self._masters)
        if _this_backward() != NO_BACKWARD:
            return
        if self.give_up:
            self._give_up()
        masters = self._masters
        for result in tree_leaves(out):
            if isinstance(result, Tensor) and result.requires_grad:
                result.register_hook(lambda _: self._before_backward(masters))

    def _put(self, parameters: Sequence[nn.Parameter]) -> None:
        for owner, name, number in self._places:
            owner._parameters[name] = parameters[number]

    def _stand_in(self, number: int) -> nn.Parameter:
        """As FSDP's: a parameter, so that the module and its compiled code see nothing new."""
        master, copy = self._masters[number], self._copies[number]
        with torch.inference_mode(False), torch.no_grad():
            whole = DTensor(copy, master._spec, requires_grad=False) if isinstance(master, DTensor) else copy
            found = nn.Parameter(whole, requires_grad=master.requires_grad)
        if master.requires_grad:
            found.register_post_accumulate_grad_hook(lambda stand_in: self._take(number, stand_in))
        return found

    def _take(self, number: int, stand_in: Tensor) -> None:
        gradient, stand_in.grad = stand_in.grad, None
        assert gradient is not None
        master = self._masters[number]
        if isinstance(gradient, DTensor):
            assert isinstance(master, DTensor)
            if gradient.placements != master.placements:
                gradient = gradient.redistribute(placements=master.placements)
            gradient = gradient._local_tensor
        _free(self._copies[number])
        _add_gradient(master, gradient)


def _cast(parts: list[Tensor], copies: list[Tensor]) -> None:
    for copy in copies:
        copy.untyped_storage().resize_(copy.numel() * copy.element_size())
    # The same numbers as before, as far as autograd is concerned.
    with torch.no_grad(), autograd_internals._unsafe_preserve_version_counter(tuple(copies)):
        torch._foreach_copy_(copies, parts)  # pyright: ignore[reportPrivateImportUsage]


def _free(copy: Tensor) -> None:
    copy.untyped_storage().resize_(0)


def _add_gradient(master: nn.Parameter, gradient: Tensor) -> None:
    with torch.no_grad():
        if master.grad is None:
            wide = gradient
            if gradient.dtype != master.dtype:
                # On GPUs a list is cast in two thirds of the time that `to` takes.
                wide = torch.empty_like(gradient, dtype=master.dtype)
                torch._foreach_copy_([wide], [gradient])  # pyright: ignore[reportPrivateImportUsage]
            # Without DTensor.from_local, which takes the host longer than the cast takes the device.
            is_split = isinstance(master, DTensor)
            master.grad = DTensor(wide, master._spec, requires_grad=False) if is_split else wide
        else:
            local(master.grad).add_(gradient)


class _Cast(torch.autograd.Function):
    """The copy that has been made of a master; its gradient goes to the master's at once."""

    @staticmethod
    def forward(ctx: Any, master: nn.Parameter, copy: Tensor) -> Tensor:
        ctx.master, ctx.copy = master, copy
        return copy.view_as(copy)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        # Nothing but what has left this gradient needed it.
        _free(ctx.copy)
        _add_gradient(ctx.master, grads[0])
        return None, None
