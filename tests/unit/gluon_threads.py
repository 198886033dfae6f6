"""Runs a warp-specialised Gluon kernel in Python: every partition of a program is a thread, tensors are torch's.

Gluon has no interpreter. This one knows what the kernels in moe/kernels/*_sm90.py use: schedule, ring and sums of a
kernel are what it checks, and that no partition waits for ever. Layouts and memory models it does not know.

    for number in range(2):
        run_program(fp8_kernel, number, (Descriptor(rows), scales, ...), {"PROGRAMS": 2, "STAGES": 3, ...})

It is stricter than a card where it can be: a block of shared memory is NaN from the moment that all have freed it, a
product reads its blocks and a copy its source when it is waited for, and what threads have written needs a fence. Of a
kernel's barriers those that tell what has come are allocated first, then those that free it, for as many stages as
there are of these.
"""

import itertools
import operator
import threading
from collections.abc import Callable
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

import torch
import triton.language as tl
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

# A partition that has waited so long will not be woken.
PATIENCE = 20.0

TORCH = {
    gl.int1: torch.bool, gl.int16: torch.int16, gl.int32: torch.int32, gl.int64: torch.int64, gl.uint8: torch.uint8,
    gl.bfloat16: torch.bfloat16, gl.float32: torch.float32, gl.float8e4nv: torch.float8_e4m3fn,
}  # fmt: skip
GLUON = {torch_dtype: dtype for dtype, torch_dtype in TORCH.items()}


class Value:
    """A tensor or a scalar of a kernel."""

    def __init__(self, data: Any) -> None:
        self.data: Tensor = data.data if isinstance(data, Value) else torch.as_tensor(data)

    @property
    def dtype(self) -> Any:
        return GLUON[self.data.dtype]

    @property
    def type(self) -> Any:
        return SimpleNamespace(layout=None)

    def to(self, dtype: Any, bitcast: bool = False) -> "Value":
        return Value(self.data.view(TORCH[dtype]) if bitcast else self.data.to(TORCH[dtype]))

    def __index__(self) -> int:
        return int(self.data)

    def __bool__(self) -> bool:
        return bool(self.data)

    def __getitem__(self, index: Any) -> "Value":
        return Value(self.data[index])


def _data(value: Any) -> Any:
    """A Python number stays one: it takes the dtype of what it meets."""
    return value.data if isinstance(value, Value) else value


def _binary(name: str) -> Callable[[Value, Any], Value]:
    return lambda x, y: Value(getattr(operator, name)(x.data, _data(y)))


def _reflected(name: str) -> Callable[[Value, Any], Value]:
    return lambda x, y: Value(getattr(operator, name)(_data(y), x.data))


for _name in ("add", "sub", "mul", "floordiv", "mod", "truediv", "lshift", "rshift", "and_", "or_", "xor"):
    setattr(Value, f"__{_name.strip('_')}__", _binary(_name))
    setattr(Value, f"__r{_name.strip('_')}__", _reflected(_name))
for _name in ("lt", "le", "gt", "ge", "eq", "ne"):
    setattr(Value, f"__{_name}__", _binary(_name))


class Pointer:
    """Places in a flat tensor."""

    def __init__(self, memory: Tensor, places: Tensor | int = 0) -> None:
        self.memory, self.places = memory, torch.as_tensor(places)

    def __add__(self, offset: Any) -> "Pointer":
        return Pointer(self.memory, self.places + Value(offset).data)

    def __sub__(self, offset: Any) -> "Pointer":
        return Pointer(self.memory, self.places - Value(offset).data)

    def load(self, mask: Any = None, other: Any = 0) -> Value:
        places = self._checked(mask)
        found = self.memory.flatten()[places]
        return Value(found if mask is None else torch.where(Value(mask).data, found, torch.tensor(other).to(found)))

    def store(self, value: Value, mask: Any = None) -> None:
        places, inside = torch.broadcast_tensors(self.places, Value(True if mask is None else mask).data)
        self._checked(mask)
        self.memory.view(-1)[places[inside].long()] = value.data.expand(places.shape)[inside].to(self.memory.dtype)

    def _checked(self, mask: Any) -> Tensor:
        wanted = Value(True if mask is None else mask).data
        outside = (self.places < 0) | (self.places >= self.memory.numel())
        assert not (outside & wanted).any(), "outside of the memory"
        return torch.where(outside, 0, self.places).long()


class Bell(threading.Condition):
    """Wakes the partitions of a program, for good when one of them has failed."""

    failed = False


class Barrier:
    """An mbarrier: a phase ends when all have arrived and all bytes have come."""

    def __init__(self, bell: Bell) -> None:
        self.bell, self.phase, self.count, self.arrived, self.bytes = bell, 0, 0, 0, 0
        # Blocks that came with it, and those that it frees.
        self.came: set[Block] = set()
        self.frees: list[Barrier] = []

    def change(self, arrived: int, num_bytes: int) -> None:
        with self.bell:
            self.arrived += arrived
            self.bytes += num_bytes
            assert self.arrived <= self.count, "more have arrived than were expected"
            if self.arrived == self.count and self.bytes == 0:
                self.phase, self.arrived = self.phase + 1, 0
                for block in (block for barrier in self.frees for block in barrier.came):
                    block.data.fill_(float("nan"))
                self.bell.notify_all()

    def wait(self, parity: Any) -> None:
        with self.bell:
            over = self.bell.wait_for(lambda: self.bell.failed or self.phase % 2 != int(Value(parity).data), PATIENCE)
            assert over and not self.bell.failed, "waits for ever"


class Ring:
    """Shared memory with blocks or barriers along its first dim."""

    def __init__(self, parts: list[Any]) -> None:
        self.parts = parts

    def index(self, place: Any) -> Any:
        return self.parts[int(Value(place).data)]


# Events that fences order: what threads write before a thread's fence, products and copies of its own see.
_time = itertools.count(1)
_seen = threading.local()


def _fence() -> None:
    _seen.until = next(_time)


class Block:
    """A block in shared memory."""

    def __init__(self, data: Tensor, whole: "Block | None" = None) -> None:
        self.data, self.whole, self.written = data, whole or self, 0

    def is_written(self) -> None:
        """By threads."""
        self.whole.written = next(_time)

    def seen(self) -> Tensor:
        """As a product, or the copy engine, reads it."""
        assert self.whole.written < getattr(_seen, "until", 0) or not self.whole.written, "there was no fence"
        return self.data

    @property
    def shape(self) -> torch.Size:
        return self.data.shape

    def permute(self, dims: tuple[int, ...]) -> "Block":
        return Block(self.data.permute(dims), self.whole)

    def reshape(self, shape: list[int]) -> "Block":
        return Block(self.data.view(shape), self.whole)

    def store(self, value: Value) -> None:
        assert value.data.shape == self.data.shape and value.data.dtype == self.data.dtype
        self.data.copy_(value.data)
        self.is_written()


class Product:
    """A product that is on its way, and what it is added to."""

    def __init__(self, a: Block, b: Block, total: Any) -> None:
        self.a, self.b, self.total = a, b, total

    def ended(self, outstanding: int) -> Any:
        """What it is when so many products are still on their way."""
        if isinstance(self.total, Product):
            self.total = self.total.ended(max(outstanding - 1, 0))
        return self if outstanding else Value(self.a.seen().float() @ self.b.seen().float() + _data(self.total))


class Descriptor:
    """Of a tensor; or, ragged, of its first dim's parts as triton.tools.ragged_tma has it."""

    layout = None

    def __init__(self, tensor: Tensor, ragged: bool = False) -> None:
        self.tensor, self.ragged, self.dtype = tensor, ragged, GLUON[tensor.dtype]

    def part(self, corner: list[Any], shape: torch.Size) -> tuple[Tensor, tuple[slice, ...]]:
        """What there is of a block at `corner`, and where it is in the block."""
        at = [int(Value(place).data) for place in corner]
        ends = list(self.tensor.shape)
        inside: list[slice] = []
        if self.ragged:
            beyond, end, row, *others = at
            assert shape[:2] == (1, 1) and beyond == 2**30
            at, shape, inside, ends[0] = [row + end - beyond, *others], shape[2:], [slice(0, 1)] * 2, end
        assert min(at) >= 0
        sizes = [max(min(size, end - place), 0) for place, size, end in zip(at, shape, ends, strict=True)]
        there = tuple(slice(place, place + size) for place, size in zip(at, sizes, strict=True))
        found = self.tensor[there]
        return found[None, None] if self.ragged else found, (*inside, *(slice(0, size) for size in sizes))


def run_program(kernel: Any, number: int, arguments: tuple[Any, ...], constants: dict[str, Any]) -> None:
    """One program of a kernel, all of its partitions; raises what one of them raised."""
    bell = Bell()
    rings: list[Ring] = []

    def allocate(dtype: Any, shape: list[Any], layout: Any) -> Ring:
        size, *block = (int(Value(dim).data) for dim in shape)
        if dtype == gl.int64:
            ring = Ring([Barrier(bell) for _ in range(size)])
        else:
            ring = Ring([Block(torch.full(block, float("nan")).to(TORCH[dtype])) for _ in range(size)])
        rings.append(ring)
        return ring

    def specialize(partitions: list[Any], warps: list[int], registers: list[int]) -> None:
        ready, free = (ring.parts for ring in rings if isinstance(ring.parts[0], Barrier))
        for number, barrier in enumerate(ready):
            free[number * len(free) // len(ready)].frees.append(barrier)
        raised: list[BaseException] = []

        def work(function: Any, given: tuple[Any, ...]) -> None:
            try:
                # A thread's own mode, whatever that of its parent is.
                with torch.no_grad():
                    function(*given)
            except BaseException as error:
                raised.append(error)
                with bell:
                    bell.failed = True
                    bell.notify_all()

        threads = [threading.Thread(target=work, args=partition, daemon=True) for partition in partitions]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if raised:
            raise raised[0]

    gluon = _Replaced(gl, program_id=lambda axis: Value(number), allocate_shared_memory=allocate,
                      warp_specialize=specialize, **_FUNCTIONS)  # fmt: skip
    replaced = {"gl": gluon, "tl": _Replaced(tl, **_FUNCTIONS), **HOPPER}
    given = [Pointer(word) if isinstance(word, Tensor) else Value(word) if isinstance(word, int) else word
             for word in arguments]  # fmt: skip
    _plain(kernel, replaced, {})(*given, **constants)


class OnThreads:
    """Stands for a kernel where its host code launches it, `kernel[grid](...)`: all programs, one after the other."""

    def __init__(self, kernel: Any) -> None:
        self.kernel, self.launches = kernel, 0

    def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
        def launch(*arguments: Any, num_warps: int, **constants: Any) -> None:
            assert len(arguments) + len(constants) == len(self.kernel.arg_names) and num_warps == 4
            self.launches += 1
            for number in range(grid[0]):
                run_program(self.kernel, number, tuple(map(_known, arguments)), constants)

        return launch


def _known(argument: Any) -> Any:
    """Host descriptors as this module has them."""
    if not isinstance(argument, TensorDescriptor):
        return argument
    # How triton.tools.ragged_tma marks its own.
    ragged = argument.shape[0] == 0x7FFF0000
    assert ragged or list(argument.shape) == list(argument.base.shape)
    assert all(size <= 256 for size in argument.block_shape)
    return Descriptor(argument.base, ragged)


class _Replaced:
    """A module with some functions replaced."""

    def __init__(self, module: ModuleType, **functions: Any) -> None:
        self._module = module
        self.__dict__.update(functions)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _plain(function: Any, replaced: dict[str, Any], done: dict[int, Any]) -> Any:
    """The Python function of a kernel's, and of all that it calls, with other modules.

    Args:
        done: by identity: to hash one, Triton looks at all that it calls.
    """
    if id(function) not in done:
        code = function.fn
        names = dict(code.__globals__)
        done[id(function)] = FunctionType(code.__code__, names, code.__name__, code.__defaults__, code.__closure__)
        for name, value in list(names.items()):
            if isinstance(value, JITFunction | InterpretedFunction):
                names[name] = _plain(value, replaced, done)
            elif name in replaced:
                names[name] = replaced[name]
    return done[id(function)]


def _zeros(shape: list[int], dtype: Any, layout: Any = None) -> Value:
    return Value(torch.zeros(shape, dtype=TORCH[dtype]))


def _rounded(asm: str, constraints: str, args: list[Value], dtype: Any, **_: Any) -> Value:
    """The one instruction that is known: pairs to bf16."""
    assert asm.startswith("cvt.rn.bf16x2.f32") and dtype == gl.bfloat16
    return args[0].to(dtype)


def _where(condition: Any, x: Any, y: Any) -> Value:
    return Value(torch.where(Value(condition).data, _data(x), _data(y)))


_FUNCTIONS: dict[str, Any] = {
    "static_range": lambda *bounds: range(*(int(Value(bound).data) for bound in bounds)),
    "arange": lambda first, end, layout=None: Value(torch.arange(first, end)),
    "load": Pointer.load,
    "store": Pointer.store,
    "zeros": _zeros,
    "where": _where,
    "minimum": lambda x, y: Value(torch.minimum(Value(x).data, Value(y).data)),
    "maximum": lambda x, y: Value(torch.maximum(Value(x).data, Value(y).data)),
    "cdiv": lambda x, y: (Value(x) + (y - 1)) // y,
    "max": lambda x, axis: Value(x.data.amax(axis)),
    "reshape": lambda x, shape: Value(x.data.reshape(shape)),
    "permute": lambda x, dims: Value(x.data.permute(dims)),
    "split": lambda x: tuple(Value(half) for half in x.data.unbind(-1)),
    "inline_asm_elementwise": _rounded,
    "sigmoid": lambda x: Value(torch.sigmoid(x.data)),
    "convert_layout": lambda x, layout: x,
    "BlockedLayout": lambda *words: None,
    "NVMMADistributedLayout": lambda **words: None,
    "SliceLayout": lambda *words: None,
}


def _copy(desc: Descriptor, corner: list[Any], barrier: Barrier, block: Block) -> None:
    """Zeros come from outside of the tensor, and count."""
    found, inside = desc.part(corner, block.data.shape)
    block.data.copy_(torch.zeros_like(block.data))
    block.data[inside] = found
    barrier.came.add(block)
    barrier.change(0, -block.data.numel() * block.data.element_size())


_leaving = threading.local()


def _copy_out(desc: Descriptor, corner: list[Any], block: Block) -> None:
    """It happens when it is waited for: what is written over it before goes out."""
    block.seen()
    _leaving.__dict__.setdefault("copies", []).append((desc, corner, block))


def _store_wait(pendings: int) -> None:
    copies = _leaving.__dict__.setdefault("copies", [])
    while len(copies) > pendings:
        desc, corner, block = copies.pop(0)
        found, inside = desc.part(corner, block.data.shape)
        found.copy_(block.data[inside])


class _Copies:
    """Copies by the threads of a partition, here one thread: they happen when their barrier hears of them."""

    def __init__(self) -> None:
        self.pending = threading.local()

    def async_copy_global_to_shared(self, block: Block, pointer: Pointer) -> None:
        self.pending.__dict__.setdefault("copies", []).append((block, pointer))

    def mbarrier_arrive(self, barrier: Barrier, increment_count: bool) -> None:
        assert not increment_count
        for block, pointer in self.pending.__dict__.pop("copies"):
            block.data.copy_(pointer.load().data)
            block.is_written()
            barrier.came.add(block)
        barrier.change(128, 0)


def _product(a: Block, b: Block, total: Any, *, use_acc: bool = True, is_async: bool) -> Product:
    assert is_async
    return Product(a, b, total if use_acc else Value(0.0))


def _ended(product: Any, outstanding: int) -> Any:
    # An expert without pairs has a sum without products.
    return product.ended(outstanding) if isinstance(product, Product) else product


def _init(barrier: Barrier, count: int) -> None:
    barrier.count = count


HOPPER: dict[str, Any] = {
    "fence_async_shared": _fence,
    "mbarrier": SimpleNamespace(
        init=_init,
        expect=lambda barrier, num_bytes: barrier.change(1, num_bytes),
        arrive=lambda barrier, count, pred=True: barrier.change(count, 0) if Value(pred).data else None,
        wait=lambda barrier, parity: barrier.wait(parity),
        MBarrierLayout=lambda: None,
    ),
    "async_copy": _Copies(),
    "tma": SimpleNamespace(
        async_copy_global_to_shared=_copy, async_copy_shared_to_global=_copy_out, store_wait=_store_wait
    ),
    "warpgroup_mma": _product,
    "warpgroup_mma_wait": lambda outstanding, deps: _ended(deps[0], outstanding),
}
