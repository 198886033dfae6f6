"""Triton's interpreter without what it does over and over, and with waits that leave the processor to others.

Of the time of an exchange a third went into patching triton.language anew at every call of a device function, and a
fifth into checks for overflow whose results are dropped, because the options of the interpreter have `debug` off. Sorts
reduced one element after another. What kernels compute stays the same, bit for bit (Triton 3.7).
"""

import functools
import time
from typing import Any

import numpy as np
from triton.runtime import interpreter
from triton.runtime.interpreter import GridExecutor, InterpretedFunction, InterpreterBuilder, ReduceOps

# Between two looks at a flag that another process has yet to write.
POLL_SECONDS = 0.0003


@functools.cache
def hasten() -> None:
    """For all kernels of this process; once."""
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)
    _look_types_up_once()
    ReduceOps.generic_reduce = _reduce
    _patch_once_per_launch()
    _sleep_between_polls()


def _look_types_up_once() -> None:
    of_scalar, pointer = functools.cache(interpreter._get_np_dtype), np.dtype(np.uint64)

    def numpy_type(kind: Any) -> Any:
        kind = kind.scalar
        return pointer if kind.is_ptr() else of_scalar(kind)

    interpreter._get_np_dtype = numpy_type


def _reduce(self: ReduceOps, given: Any) -> list[Any]:
    """Along the axis one after another, as it is there, but all other elements together."""
    given, axis = self.unravel(given, self.axis)
    parts = [np.moveaxis(one.handle.data, axis, 0) for one in given]

    def tensors(values: Any) -> list[Any]:
        return [self.to_tensor(value, one.dtype) for value, one in zip(values, given, strict=True)]

    found = [part[0] for part in parts]
    for step in range(1, len(parts[0])):
        combined = self.combine_fn.fn(*tensors(found), *tensors([part[step] for part in parts]))
        combined = combined if isinstance(combined, tuple) else (combined,)
        found = [one.handle.data.reshape(parts[0].shape[1:]) for one in combined]
    if self.keep_dims:
        axes = axis if self.axis is not None else tuple(range(parts[0].ndim))
        found = [np.expand_dims(value, axes) for value in found]
    return tensors(found)


def _patch_once_per_launch() -> None:
    """A launch patches the modules that its kernel sees, a device function those that it sees in addition."""
    launch, patch_lang = GridExecutor.__call__, interpreter._patch_lang
    done: set[frozenset[int]] = set()

    def run(self: GridExecutor, *args: Any, **kwargs: Any) -> None:
        done.clear()
        launch(self, *args, **kwargs)

    def call(self: InterpretedFunction[Any], *args: Any, **kwargs: Any) -> Any:
        seen = _languages(self)
        if seen not in done:
            patch_lang(self.fn)
            done.add(seen)
        try:
            return self.rewrite()(*args, **kwargs)
        except Exception as error:
            raise interpreter.InterpreterError(repr(error)) from error

    GridExecutor.__call__, InterpretedFunction.__call__ = run, call


@functools.cache
def _languages(function: "InterpretedFunction[Any]") -> frozenset[int]:
    """Modules of the language that a function sees."""
    modules = (interpreter.tl, interpreter.tl.core)
    values = list(function.fn.__globals__.values())
    return frozenset(id(module) for module in modules if any(value is module for value in values))


def _sleep_between_polls() -> None:
    """Whoever finds a flag as it was sleeps, or it would take the processor from the one that is to write it."""
    change = InterpreterBuilder.create_atomic_rmw
    last: list[tuple[int, int]] = [(0, 0)]

    def change_and_sleep(self: Any, operation: Any, pointer: Any, value: Any, mask: Any, sem: Any, scope: Any) -> Any:
        found = change(self, operation, pointer, value, mask, sem, scope)
        if sem == interpreter._ir.MEM_SEMANTIC.ACQUIRE and found.data.size == 1:
            seen = int(pointer.data.item()), int(found.data.item())
            if seen == last[0]:
                time.sleep(POLL_SECONDS)
            last[0] = seen
        return found

    InterpreterBuilder.create_atomic_rmw = change_and_sleep
