"""The tensors of a Hugging Face folder as a model means them: quantized ones are dequantised while they are read.

    mxfp4 (gpt-oss)   X_blocks (E, N, M/32, 16) uint8, two e2m1 values per byte, low half first; X_scales (E, N, M/32)
                      uint8, powers of two with bias 127. X is the transposed (E, M, N): every value is exact in bf16.
    fp8 (DeepSeek)    X (N, M) e4m3 and X_scale_inv (N/128, M/128) fp32: one factor per block. The products are taken
                      in fp32, and fp32 they stay until they are cast to the parameter's dtype.

Slices are read: of a quantized tensor, the whole blocks that a slice touches.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trainer.safetensors_stream import DTYPES, Layout, TensorReader

Range = tuple[int, int]
MXFP4_BLOCK = 32
# e2m1: sign, two bits of exponent, one of mantissa.
_E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
_BLOCKS, _SCALES, _SCALE_INV = "_blocks", "_scales", "_scale_inv"
_FP8_BLOCK = (128, 128)


class Stored(NamedTuple):
    """A tensor as the model means it."""

    shape: tuple[int, ...]
    # plain | mxfp4 | fp8
    kind: str


class SourceTensors:
    """Names, shapes and slices of a folder's tensors; `reader.largest` counts what was held."""

    def __init__(self, folder: Path, layout: Layout, raw: dict[str, Any]) -> None:
        """Raises ValueError for a quantization that is not known, or tensors without their scales."""
        self.folder, self.layout = folder, layout
        self.reader = TensorReader(folder, layout)
        self._block = _check_method(folder, raw)
        self.stored = self._find()

    @property
    def quantized(self) -> bool:
        """Whether any tensor is."""
        return any(stored.kind != "plain" for stored in self.stored.values())

    def read(self, name: str, ranges: Sequence[Range]) -> Tensor:
        """The part of a tensor within `ranges` (one per dim), on the CPU, dequantised."""
        kind = self.stored[name].kind
        if kind == "mxfp4":
            return self._read_mxfp4(name, ranges)
        if kind == "fp8":
            return self._read_fp8(name, ranges)
        return self.reader.read(name, [slice(*limits) for limits in ranges])

    def _find(self) -> dict[str, Stored]:
        entries = self.layout.entries
        found: dict[str, Stored] = {}
        for name, entry in entries.items():
            where = f"{self.folder / entry.file}: tensor {name}"
            if name.endswith(_BLOCKS) and entry.dtype == "U8":
                base = name.removesuffix(_BLOCKS)
                if len(entry.shape) != 4:
                    raise ValueError(f"{where}: shape {list(entry.shape)} is not (experts, rows, blocks, bytes)")
                if entries.get(base + _SCALES, entry).shape != entry.shape[:-1]:
                    raise ValueError(f"{where}: there is no {base + _SCALES} of shape {list(entry.shape[:-1])}")
                E, N, blocks, half = entry.shape
                found[base] = Stored((E, blocks * half * 2, N), "mxfp4")
            elif entry.dtype == "F8_E4M3":
                if len(entry.shape) != 2:
                    raise ValueError(f"{where}: an fp8 tensor of shape {list(entry.shape)}; only matrices have scales")
                scales = entries.get(name + _SCALE_INV)
                blocks = tuple(-(-size // block) for size, block in zip(entry.shape, self._block, strict=True))
                if scales is None or scales.shape != blocks:
                    raise ValueError(f"{where}: there is no {name + _SCALE_INV} of shape {list(blocks)}")
                found[name] = Stored(entry.shape, "fp8")
            elif not self._is_scale(name):
                if not DTYPES[entry.dtype].is_floating_point:
                    raise ValueError(f"{where}: a weight of dtype {entry.dtype}, which is not known as a weight's")
                found[name] = Stored(entry.shape, "plain")
        return found

    def _is_scale(self, name: str) -> bool:
        entries = self.layout.entries
        scale_of = {_SCALES: _BLOCKS, _SCALE_INV: ""}
        return any(name.endswith(end) and name.removesuffix(end) + data in entries for end, data in scale_of.items())

    def _read_mxfp4(self, name: str, ranges: Sequence[Range]) -> Tensor:
        (e0, e1), (m0, m1), (n0, n1) = ranges
        first, last = m0 // MXFP4_BLOCK, -(-m1 // MXFP4_BLOCK)
        window = [slice(e0, e1), slice(n0, n1), slice(first, last)]
        blocks = self.reader.read(name + _BLOCKS, [*window, slice(None)])
        scales = self.reader.read(name + _SCALES, window)
        values = dequantize_mxfp4(blocks, scales)
        skip = m0 - first * MXFP4_BLOCK
        return values[..., skip : skip + m1 - m0].transpose(1, 2)

    def _read_fp8(self, name: str, ranges: Sequence[Range]) -> Tensor:
        values = self.reader.read(name, [slice(*limits) for limits in ranges]).float()
        spans = [(lo // block, -(-hi // block)) for (lo, hi), block in zip(ranges, self._block, strict=True)]
        scales = self.reader.read(name + _SCALE_INV, [slice(*span) for span in spans]).float()
        for dim, ((lo, hi), block, (first, _)) in enumerate(zip(ranges, self._block, spans, strict=True)):
            scales = scales.repeat_interleave(block, dim).narrow(dim, lo - first * block, hi - lo)
        return values * scales


def dequantize_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """(..., G, 16) bytes and (..., G) scales -> (..., 32 G) fp32."""
    table = torch.tensor([*_E2M1, *(-value for value in _E2M1)])
    codes = torch.stack((blocks & 0xF, blocks >> 4), dim=-1).flatten(-2)
    values = table[codes.int()]
    return torch.ldexp(values, scales.int().unsqueeze(-1) - 127).flatten(-2)


def _check_method(folder: Path, raw: dict[str, Any]) -> tuple[int, int]:
    """The block of fp8 scales. Raises ValueError for a method that is not known."""
    settings, where = raw.get("quantization_config") or {}, folder / "config.json"
    if not isinstance(settings, dict):
        raise ValueError(f"{where}: quantization_config={settings!r} is no JSON object")
    method = settings.get("quant_method", "fp8")
    if method not in ("fp8", "mxfp4"):
        raise ValueError(f"{where}: weights quantized by {method!r} cannot be read; only fp8 and mxfp4")
    block = settings.get("weight_block_size") or _FP8_BLOCK
    if len(block) != 2 or any(type(size) is not int or size < 1 for size in block):
        raise ValueError(f"{where}: weight_block_size={block!r} is not two whole numbers")
    return block[0], block[1]
