"""Triton's interpreter without what it does over and over, and with waits that leave the processor to others.

Of the time of an exchange a third went into patching triton.language anew at every call of a device function, a fifth
into checks for overflow whose results are dropped, because the options of the interpreter have `debug` off, and two
thirds of the rest into types: which two operands have in common, their shapes, their names. Sorts reduced one element
after another. What kernels compute stays the same, bit for bit (Triton 3.7): every operator gives the same type and
data for every pair of types, shapes and numbers, or the same error.
"""

import functools
import time
from typing import Any

import numpy as np
import triton.language as tl
from triton.language import core
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpretedFunction, InterpreterBuilder, ReduceOps, TensorHandle

# Between two looks at a flag that another process has yet to write.
POLL_SECONDS = 0.0003


@functools.cache
def hasten() -> None:
    """For all kernels of this process; once."""
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)
    _look_types_up_once()
    ReduceOps.generic_reduce = _reduce
    _derive_types_once()
    _fit_once()
    _patch_once()
    _sleep_between_polls()


def _look_types_up_once() -> None:
    """What a type is, how wide and of which numbers in numpy; names of types say all of it."""
    of_scalar, pointer = functools.cache(interpreter._get_np_dtype), np.dtype(np.uint64)
    unwrap, equal = core._unwrap_if_constexpr, core.dtype.__eq__
    plain = {core.tensor, core.dtype, core.block_type, core.pointer_type, int, float, bool, str, type(None)}
    integers, floats = {*core.dtype.SINT_TYPES, *core.dtype.UINT_TYPES}, {*core.dtype.FP_TYPES}
    widths: dict[str, float] = {}

    def numpy_type(kind: Any) -> Any:
        kind = kind.scalar
        return pointer if kind.is_ptr() else of_scalar(kind)

    def fits(array: Any, kind: Any) -> bool:
        width = widths.get(kind.name)
        if width is None:
            width = widths[kind.name] = np.inf if kind.is_ptr() else max(kind.primitive_bitwidth, 8)
        return 8 * array.itemsize <= width

    def unwrap_quickly(value: Any) -> Any:
        return value if type(value) in plain else unwrap(value)

    interpreter._get_np_dtype, interpreter._validate_np_data_size = numpy_type, fits
    core._unwrap_if_constexpr = unwrap_quickly
    core.dtype.__eq__ = lambda self, other: self is other or equal(self, other)
    core.dtype.is_int = lambda self: self.name in integers
    core.dtype.is_floating = lambda self: self.name in floats


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


def _patch_once() -> None:
    """A launch and every device function patch the language, and the launch takes it back: here it stays patched."""
    semantic = interpreter.interpreter_semantic

    def patch(obj: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        # `builtin` wraps only to see that there is a semantic.
        function = getattr(member, "__wrapped__", member)

        def call(*args: Any, _semantic: Any = None, **kwargs: Any) -> Any:
            return function(*args, _semantic=semantic, **kwargs)

        scope.set_attr(obj, name, call)

    def call(self: InterpretedFunction[Any], *args: Any, **kwargs: Any) -> Any:
        try:
            return self.rewrite()(*args, **kwargs)
        except Exception as error:
            raise interpreter.InterpreterError(repr(error)) from error

    interpreter._patch_attr = patch
    interpreter._patch_lang(_sees_the_language)
    interpreter._patch_lang = lambda function: interpreter._LangPatchScope()
    InterpretedFunction.__call__ = call


def _sees_the_language() -> Any:
    return tl, core


def _derive_types_once() -> None:
    """Shapes and names of a type, and how a tensor fits a number or another tensor, follow from types alone."""
    derive, alone = core.block_type.__init__, (core.tuple([]), core.constexpr(1))
    of_block: dict[tuple[Any, ...], dict[str, Any]] = {}

    def make_block_type(self: Any, element_ty: Any, shape: Any) -> None:
        key = (element_ty.name, *shape)
        known = of_block.get(key)
        if known is None:
            derive(self, element_ty, shape)
            sizes = core.tuple([core.constexpr(size) for size in self.shape])
            known = of_block[key] = {**self.__dict__, "of_tensors": (sizes, core.constexpr(self.numel))}
        self.__dict__.update(known, element_ty=element_ty)

    def make_tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = type.of_tensors if type.is_block() else alone

    core.block_type.__init__, core.tensor.__init__ = make_block_type, make_tensor


def _fit_once() -> None:
    """Which type two operands are cast to follows from theirs, and a number becomes the same tensor beside a type."""
    fit, broadcast, cast = (
        TritonSemantic.binary_op_type_checking_impl,
        TritonSemantic.broadcast_impl_value,
        TritonSemantic.cast,
    )
    tensor, numbers = core.tensor, (int, float, bool)
    # None: they are not cast.
    common_types: dict[tuple[Any, ...], Any] = {}
    tensors: dict[tuple[Any, ...], Any] = {}

    def fit_tensors(self: Any, lhs: Any, rhs: Any, rules: tuple[Any, ...], more: dict[str, Any]) -> Any:
        key = (lhs.type.name, rhs.type.name, rules, *more.items())
        if key not in common_types:
            fitted = fit(self, lhs, rhs, *rules, **more)
            checked = more.get("arithmetic_check", rules[2] if len(rules) > 2 else True)
            casts = checked and not lhs.dtype.is_ptr() and not rhs.dtype.is_ptr()
            common_types[key] = fitted[0].dtype if casts else None
            return fitted
        common = common_types[key]
        if common is not None:
            lhs, rhs = self.cast(lhs, common), self.cast(rhs, common)
        return self.broadcast_impl_value(lhs, rhs)

    def another(made: Any) -> Any:
        # A shift to the right gives the handles of its operands other data.
        return tensor(TensorHandle(made.handle.data, made.handle.dtype), made.type)

    def fit_quickly(self: Any, lhs: Any, rhs: Any, *rules: Any, **more: Any) -> Any:
        left, right = type(lhs), type(rhs)
        if left is right is tensor:
            return fit_tensors(self, lhs, rhs, rules, more)
        if left is tensor and right in numbers:
            key = (lhs.type.name, right, rhs, rules, *more.items())
            if (made := tensors.get(key)) is not None:
                return lhs, another(made)
            fitted, made = fit(self, lhs, rhs, *rules, **more)
            if fitted is lhs:
                tensors[key] = another(made)
            return fitted, made
        if right is tensor and left in numbers:
            key = (left, lhs, rhs.type.name, rules, *more.items())
            if (made := tensors.get(key)) is not None:
                return another(made), rhs
            made, fitted = fit(self, lhs, rhs, *rules, **more)
            if fitted is rhs:
                tensors[key] = another(made)
            return made, fitted
        return fit(self, lhs, rhs, *rules, **more)

    def broadcast_quickly(self: Any, lhs: Any, rhs: Any) -> Any:
        one, other = lhs.type, rhs.type
        if one.is_block() and other.is_block() and one.shape.values == other.shape.values:
            return lhs, rhs
        return broadcast(self, lhs, rhs)

    def cast_quickly(self: Any, input: Any, dst_ty: Any, fp_downcast_rounding: Any = None) -> Any:
        return input if input.dtype is dst_ty else cast(self, input, dst_ty, fp_downcast_rounding)

    TritonSemantic.binary_op_type_checking_impl = fit_quickly
    TritonSemantic.broadcast_impl_value = broadcast_quickly
    TritonSemantic.cast = cast_quickly


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
