"""Files of safetensors that are damaged or lie: each is refused with the file and the tensor, before any is read."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from trainer.safetensors_stream import INDEX, TensorWriter, create_files, plan_layout, read_header, read_layout

A = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
B = {"dtype": "F32", "shape": [2], "data_offsets": [8, 16]}


def write(path: Path, header: Any, data: int = 16, length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + bytes(data))
    return path


def test_a_sound_file_is_read(tmp_path):
    entries, metadata = read_header(write(tmp_path / "m.safetensors", {"b": B, "a": A, "__metadata__": {"k": "v"}}))
    assert list(entries) == ["a", "b"] and metadata == {"k": "v"}


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (
            {"a": A, "b": B | {"data_offsets": [4, 12]}},
            "damaged: tensor b begins at byte 4, the one before it ends at 8",
        ),
        ({"a": A, "b": A}, "damaged: tensor b begins at byte 0, the one before it ends at 8"),
        ({"b": B}, "damaged: tensor b begins at byte 8, the one before it ends at 0"),
        ({"a": A}, "damaged: 8 bytes after its tensors belong to none"),
        ({"a": A, "b": B | {"data_offsets": [8, 24], "shape": [4]}}, "truncated: tensor b ends 8 bytes beyond"),
        ({"a": A, "b": B | {"data_offsets": [-8, 0]}}, "entry of tensor b is damaged"),
        ({"a": A, "b": B | {"data_offsets": ["8", "16"]}}, "entry of tensor b is damaged"),
        ({"a": A, "b": B | {"data_offsets": [8]}}, "entry of tensor b is damaged"),
        ({"a": A, "b": B | {"shape": [-2, -1]}}, "entry of tensor b is damaged"),
        ({"a": A, "b": B | {"shape": 2}}, "entry of tensor b is damaged"),
        ({"a": A, "b": B | {"dtype": ["F32"]}}, "entry of tensor b is damaged"),
        ({"a": A, "b": 3}, "entry of tensor b is damaged"),
        ({"a": A, "b": B | {"shape": [3]}}, r"tensor b has 8 bytes, which is not shape \[3\] of F32"),
        ({"a": A, "b": B | {"dtype": "F4"}}, "tensor b has the unknown dtype F4"),
        ([A], "no safetensors file: its header is no JSON object"),
        (b"{", "no safetensors file: its header is not JSON"),
        (b"\xff\xfe", "no safetensors file: its header is not JSON"),
    ],
)
def test_a_header_that_is_wrong(tmp_path, header, message):
    with pytest.raises(ValueError, match=rf"m\.safetensors.*{message}"):
        read_header(write(tmp_path / "m.safetensors", header))


@pytest.mark.parametrize(
    ("length", "message"),
    [(2**63, "damaged: it says that its header has 9223372036854775808 bytes"), (10_000, "truncated: .* do not hold")],
)
def test_a_header_longer_than_it_can_be(tmp_path, length, message):
    """Nothing of that size is read, or made room for."""
    with pytest.raises(ValueError, match=message):
        read_header(write(tmp_path / "m.safetensors", {"a": A}, 8, length))


def two_files(folder: Path, weight_map: dict[str, Any]) -> Path:
    for name in "ab":
        save_file({name: torch.ones(2)}, folder / f"{name}.safetensors")
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


@pytest.mark.parametrize(
    "file", ["../a.safetensors", "/tmp/a.safetensors", "sub/a.safetensors", 3, None, "config.json"]
)
def test_an_index_that_leads_elsewhere(tmp_path, file):
    """Export writes the files that an index names."""
    with pytest.raises(ValueError, match=rf"{INDEX}: tensor b is in .* which is no name of a safetensors file"):
        read_layout(two_files(tmp_path, {"a": "a.safetensors", "b": file}))


def test_an_index_that_names_what_is_not_there(tmp_path):
    folder = two_files(tmp_path, {"a": "a.safetensors", "b": "b.safetensors", "c": "b.safetensors"})
    with pytest.raises(ValueError, match=r"b\.safetensors: has no tensor c, though"):
        read_layout(folder)


def test_an_index_beside_a_single_file(tmp_path):
    """Which of them is the model, readers do not agree upon."""
    folder = two_files(tmp_path, {"a": "a.safetensors", "b": "b.safetensors"})
    save_file({"a": torch.ones(2)}, folder / "model.safetensors")
    with pytest.raises(ValueError, match=rf"has both {INDEX} and model\.safetensors"):
        read_layout(folder)


def test_one_name_in_two_files(tmp_path):
    folder = two_files(tmp_path, {"a": "a.safetensors", "b": "b.safetensors"})
    save_file({"b": torch.ones(2), "a": torch.zeros(2)}, folder / "b.safetensors")
    with pytest.raises(ValueError, match=r"b\.safetensors: tensor a is in a\.safetensors too"):
        read_layout(folder)


def test_a_disk_that_fills_up_is_told_of_with_the_tensor(tmp_path):
    """A device that takes nothing more stands for the disk."""
    layout = plan_layout({"a": (torch.float32, (2,))})
    create_files(tmp_path, layout)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors").symlink_to("/dev/full")
    writer = TensorWriter(tmp_path, layout)
    with pytest.raises(OSError, match=r"model\.safetensors: tensor a cannot be written: No space left on device"):
        writer.write("a", (0,), torch.ones(2))
