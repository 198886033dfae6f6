"""What rows are on the wire: as they are (`model`), or e4m3 with a scale per 32 (`mxfp8`, comms/kernels/codec.py).

Rows are coded one by one and before they are moved: a row that goes to several ranks is coded once, and coding then
moving is the same, byte for byte, as moving then coding.

Shape suffixes: R rows, D row width, B bytes of one record.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from comms.kernels.codec import pack_rows, record_bytes, unpack_rows

# Values that share a scale.
BLOCK = 32


class Payload(NamedTuple):
    """How an exchange codes its rows, and how it codes their gradients on the way back: model or mxfp8."""

    rows: str = "model"
    grads: str = "model"


def encode(rows_RD: Tensor, payload: str) -> Tensor:
    """The rows themselves, or their records (R, B) in uint8."""
    return rows_RD if payload == "model" else pack_rows(rows_RD, BLOCK)


def decode(coded: Tensor, payload: str, width: int, dtype: torch.dtype) -> Tensor:
    """Rows (R, D) again."""
    return coded if payload == "model" else unpack_rows(coded, width, dtype, BLOCK)


def coded_like(rows_RD: Tensor, payload: str) -> Tensor:
    """No rows, in the form in which such rows are sent."""
    if payload == "model":
        return rows_RD[:0]
    return rows_RD.new_empty(0, record_bytes(rows_RD.shape[1], BLOCK), dtype=torch.uint8)
