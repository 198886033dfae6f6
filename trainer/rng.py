"""Random number generators of one rank as tensors, so that a checkpoint can hold them.

Covers Python's `random`, numpy's global generator, and torch on the CPU and on this rank's GPU.
"""

import hashlib
import json
import random
from collections.abc import Mapping

import numpy
import torch
from torch import Tensor


def capture_rng() -> dict[str, Tensor]:
    """State of every generator of this process: name -> uint8 tensor on the CPU, not shared with the generator."""
    kind, keys, position, has_gauss, cached = numpy.random.get_state()
    states = {
        "python": _to_bytes(random.getstate()),
        "numpy": _to_bytes([kind, [int(key) for key in keys], position, has_gauss, cached]),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def restore_rng(states: Mapping[str, Tensor]) -> None:
    """Set the generators named in `states`; others (a GPU's, when the states come from a CPU run) stay as they are."""
    if "python" in states:
        version, keys, cached = _from_bytes(states["python"])
        random.setstate((version, tuple(keys), cached))
    if "numpy" in states:
        kind, keys, position, has_gauss, cached = _from_bytes(states["numpy"])
        numpy.random.set_state((kind, numpy.array(keys, dtype=numpy.uint32), position, has_gauss, cached))
    if "torch" in states:
        torch.set_rng_state(states["torch"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])


def reseed_rng(seed: int, step: int, rank: int) -> None:
    """Seed every generator with a function of (seed, step, rank): for a rank that has no stored state."""
    digest = hashlib.sha256(f"{seed} {step} {rank}".encode()).digest()
    value = int.from_bytes(digest[:4], "little")
    random.seed(value)
    numpy.random.seed(value)
    # Seeds the GPUs as well.
    torch.manual_seed(value)


def _to_bytes(state: object) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(state).encode()), dtype=torch.uint8)


def _from_bytes(state: Tensor) -> list:
    return json.loads(bytes(state.tolist()))
