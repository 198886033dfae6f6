"""Reading and writing folders of safetensors files by ranges: no file, and no stack of experts, is ever held whole.

A safetensors file is 8 bytes of header length, a JSON header (name -> dtype, shape, byte range) and the tensors' bytes.
So every byte's place is known beforehand. A reader fetches the slices it needs; for writing, one rank lays out the
files at their final size, then every rank writes the ranges it owns.

    folder/model.safetensors                                      one file, or
    folder/model-00001-of-00003.safetensors ...                   several, and
    folder/model.safetensors.index.json                           {"metadata": ..., "weight_map": {name: file}}
"""

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
# Of a file that is written where no source says otherwise.
MAX_FILE_BYTES = 5_000_000_000
# What the safetensors library allows; more is damage.
_MAX_HEADER = 100_000_000
_MAX_WRITE = 1 << 30


class Entry(NamedTuple):
    """One tensor of a file: where it is and what it is. `start` and `end` count from the end of the header."""

    file: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


@dataclass
class Layout:
    """The tensors of a folder, in the order of their bytes, and what the files say about themselves."""

    entries: dict[str, Entry] = field(default_factory=dict)
    # File -> its `__metadata__`, null when it has none.
    files: dict[str, dict[str, str] | None] = field(default_factory=dict)
    # `metadata` of the index; null for a folder of one file.
    index: dict[str, Any] | None = None


# ---- reading


def read_layout(folder: Path) -> Layout:
    """Reads and checks every header of a folder; no tensor is read.

    Raises:
        FileNotFoundError: no weights, or a file that the index names is missing.
        ValueError: a truncated or damaged file, an unknown dtype, an index that does not fit; names file and tensor.
    """
    if (folder / INDEX).is_file() and (folder / SINGLE).is_file():
        raise ValueError(f"{folder} has both {INDEX} and {SINGLE}: move away the one that is out of date")
    if (folder / INDEX).is_file():
        index = _read_json(folder / INDEX)
        weight_map = index.get("weight_map")
        if not isinstance(weight_map, dict):
            raise ValueError(f"{folder / INDEX}: has no weight_map")
        layout = Layout(index=index.get("metadata") or {})
        _check_file_names(folder / INDEX, weight_map)
    elif (folder / SINGLE).is_file():
        weight_map, layout = {}, Layout()
    else:
        raise FileNotFoundError(f"{folder} has neither {INDEX} nor {SINGLE}")
    for file in sorted(set(weight_map.values())) or [SINGLE]:
        if not (folder / file).is_file():
            names = [name for name, where in weight_map.items() if where == file]
            raise FileNotFoundError(
                f"{folder / file} is missing; {INDEX} has {len(names)} tensors in it: {some(names)}"
            )
        entries, layout.files[file] = read_header(folder / file)
        for name in entries.keys() & layout.entries.keys():
            raise ValueError(f"{folder / file}: tensor {name} is in {layout.entries[name].file} too")
        layout.entries |= entries
    for name, file in weight_map.items():
        if name not in layout.entries or layout.entries[name].file != file:
            raise ValueError(f"{folder / file}: has no tensor {name}, though {INDEX} says so")
    return layout


def _check_file_names(index: Path, weight_map: Mapping[str, Any]) -> None:
    """Of names alone: a path could lead out of the folder, and export would write there."""
    for name, file in weight_map.items():
        if not isinstance(file, str) or not file.endswith(".safetensors") or Path(file).name != file:
            raise ValueError(f"{index}: tensor {name} is in {file!r}, which is no name of a safetensors file")


def read_header(path: Path) -> tuple[dict[str, Entry], dict[str, str] | None]:
    """The tensors of one file in the order of their bytes, and its metadata. Raises ValueError as `read_layout`."""
    size = path.stat().st_size
    with open(path, "rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size >= 8 and length > _MAX_HEADER:
            raise ValueError(f"{path} is damaged: it says that its header has {length} bytes")
        if size < 8 or length > size - 8:
            raise ValueError(f"{path} is truncated: {size} bytes do not hold its header")
        try:
            header = json.loads(stream.read(length))
        except ValueError as error:
            raise ValueError(f"{path} is no safetensors file: its header is not JSON ({error})") from None
    if not isinstance(header, dict):
        raise ValueError(f"{path} is no safetensors file: its header is no JSON object")
    metadata = header.pop("__metadata__", None)
    found = [(name, _entry(path, name, value)) for name, value in header.items()]
    found.sort(key=lambda item: (item[1].start, item[1].end))
    _check_places(path, found, size - 8 - length)
    return dict(found), metadata


def _check_places(path: Path, entries: Sequence[tuple[str, Entry]], size: int) -> None:
    """The tensors of a file follow each other, without gaps, up to its end."""
    position = 0
    for name, entry in entries:
        if entry.end > size:
            missing = entry.end - size
            raise ValueError(f"{path} is truncated: tensor {name} ends {missing} bytes beyond the end of the file")
        if entry.start != position:
            raise ValueError(
                f"{path} is damaged: tensor {name} begins at byte {entry.start}, the one before it ends at {position}"
            )
        position = entry.end
    if position != size:
        raise ValueError(f"{path} is damaged: {size - position} bytes after its tensors belong to none of them")


def _entry(path: Path, name: str, value: Any) -> Entry:
    try:
        dtype, shape, (start, end) = value["dtype"], tuple(value["shape"]), value["data_offsets"]
        if not isinstance(dtype, str) or any(type(n) is not int or n < 0 for n in (*shape, start, end)):
            raise ValueError
    except (TypeError, KeyError, ValueError):
        raise ValueError(f"{path}: the header's entry of tensor {name} is damaged: {value}") from None
    if dtype not in DTYPES:
        raise ValueError(f"{path}: tensor {name} has the unknown dtype {dtype}; known: {', '.join(DTYPES)}")
    if end - start != math.prod(shape) * DTYPES[dtype].itemsize:
        raise ValueError(f"{path}: tensor {name} has {end - start} bytes, which is not shape {list(shape)} of {dtype}")
    return Entry(path.name, dtype, shape, start, end)


class TensorReader:
    """Reads slices of a folder's tensors. `largest` is the most bytes that one read has held."""

    def __init__(self, folder: Path, layout: Layout) -> None:
        self.folder, self.layout, self.largest = folder, layout, 0
        self._open: dict[str, Any] = {}

    def read(self, name: str, window: Sequence[slice]) -> Tensor:
        """The part of a tensor on the CPU, in the file's dtype.

        Raises ValueError if the file can no longer be read."""
        file = self.layout.entries[name].file
        try:
            if file not in self._open:
                self._open[file] = safe_open(self.folder / file, framework="pt")
            whole = self._open[file].get_slice(name)
            part = whole[tuple(window)] if window else self._open[file].get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{self.folder / file}: tensor {name} cannot be read: {error}") from error
        self.largest = max(self.largest, part.nbytes)
        return part


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path} holds no JSON object")
    return found


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises FileNotFoundError; ValueError for what is none, naming the file."""
    if not path.is_file():
        raise FileNotFoundError(f"there is no {path}")
    return _read_json(path)


# ---- writing


def plan_layout(
    tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], max_file_bytes: int = MAX_FILE_BYTES
) -> Layout:
    """Divides tensors, in the given order, into files of at most `max_file_bytes` (or one tensor), named as usual."""
    groups: list[list[str]] = [[]]
    filled = 0
    for name, (dtype, shape) in tensors.items():
        nbytes = math.prod(shape) * dtype.itemsize
        if groups[-1] and filled + nbytes > max_file_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(name)
        filled += nbytes
    count = len(groups)
    layout = Layout(index=None if count == 1 else {})
    total = 0
    for number, names in enumerate(groups, start=1):
        file = SINGLE if count == 1 else f"model-{number:05}-of-{count:05}.safetensors"
        layout.files[file] = {"format": "pt"}
        start = 0
        # Wide dtypes first, so that every tensor is aligned.
        for name in sorted(names, key=lambda name: (-tensors[name][0].itemsize, name)):
            dtype, shape = tensors[name]
            end = start + math.prod(shape) * dtype.itemsize
            layout.entries[name] = Entry(file, DTYPE_NAMES[dtype], shape, start, end)
            start = end
        total += start
    if layout.index is not None:
        numel = sum(math.prod(shape) for _, shape in tensors.values())
        layout.index = {"total_parameters": numel, "total_size": total}
    return layout


def create_files(folder: Path, layout: Layout) -> None:
    """Writes headers and index, and gives every file its final size; the tensors' bytes are still zero."""
    for file in layout.files:
        header = header_bytes(layout, file)
        size = len(header) + max((e.end for e in layout.entries.values() if e.file == file), default=0)
        try:
            with open(folder / file, "xb") as stream:
                stream.write(header)
                stream.truncate(size)
        except OSError as error:
            raise OSError(error.errno, f"{folder / file} of {size:,} bytes: {error.strerror}") from error
    if layout.index is not None:
        weight_map = {name: layout.entries[name].file for name in sorted(layout.entries)}
        text = json.dumps({"metadata": layout.index, "weight_map": weight_map}, indent=2) + "\n"
        (folder / INDEX).write_text(text, encoding="utf-8")


def header_bytes(layout: Layout, file: str) -> bytes:
    """The 8 bytes of length and the header of one file, as the safetensors library writes them."""
    header: dict[str, Any] = {}
    if layout.files[file] is not None:
        header["__metadata__"] = layout.files[file]
    for name, entry in layout.entries.items():
        if entry.file == file:
            header[name] = {"dtype": entry.dtype, "shape": entry.shape, "data_offsets": [entry.start, entry.end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


class TensorWriter:
    """Writes parts of tensors into files that `create_files` has laid out. Any number of ranks may write at once.

    `written` counts the bytes: over all ranks they must add up to the size of the tensors, or a part was never written.
    """

    def __init__(self, folder: Path, layout: Layout) -> None:
        self.folder, self.layout, self.written, self.largest = folder, layout, 0, 0
        self._files: dict[str, int] = {}
        self._data_start = {file: len(header_bytes(layout, file)) for file in layout.files}

    def write(self, name: str, starts: Sequence[int], part: Tensor) -> None:
        """Write a box of a tensor, cast to the file's dtype, at `starts`."""
        entry = self.layout.entries[name]
        dtype = DTYPES[entry.dtype]
        data = part.detach().to("cpu", dtype).contiguous()
        self.largest = max(self.largest, data.nbytes)
        memory = data.reshape(-1).view(torch.uint8).numpy().data
        base = self._data_start[entry.file] + entry.start
        position = 0
        for offset, length in _runs(entry.shape, starts, part.shape):
            run = memory[position * dtype.itemsize : (position + length) * dtype.itemsize]
            try:
                self._write_at(self._handle(entry.file), run, base + offset * dtype.itemsize)
            except OSError as error:
                text = f"{self.folder / entry.file}: tensor {name} cannot be written: {error.strerror}"
                raise OSError(error.errno, text) from error
            position += length
        self.written += data.nbytes

    def _handle(self, file: str) -> int:
        if file not in self._files:
            self._files[file] = os.open(self.folder / file, os.O_WRONLY)
        return self._files[file]

    def _write_at(self, handle: int, data: memoryview, offset: int) -> None:
        while len(data):
            count = os.pwrite(handle, data[:_MAX_WRITE], offset)
            data, offset = data[count:], offset + count

    def close(self) -> None:
        """Make what was written durable and close the files."""
        for handle in self._files.values():
            os.fsync(handle)
            os.close(handle)
        self._files.clear()


def _runs(shape: Sequence[int], starts: Sequence[int], box: Sequence[int]) -> Iterator[tuple[int, int]]:
    """(offset, length) in elements of the contiguous runs of a box inside a tensor, in the box's own order."""
    if math.prod(box) == 0:
        return
    split = len(shape)
    while split > 0 and box[split - 1] == shape[split - 1]:
        split -= 1
    # Dims from `split` on are taken whole; the one before is a range of them.
    inner = math.prod(shape[split:])
    if split == 0:
        yield 0, inner
        return
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    for index in product(*(range(start, start + size) for start, size in zip(starts, box[: split - 1], strict=False))):
        offset = sum(i * stride for i, stride in zip(index, strides, strict=False)) + starts[split - 1] * inner
        yield offset, box[split - 1] * inner


def some(names: Sequence[str], shown: int = 10) -> str:
    """The first names of a long list, and how many more there are."""
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return ", ".join(names[:shown]) + more
