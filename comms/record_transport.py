"""What moves records between the ranks of a group with splits that stay on the device: the one call of nvshmem.

A transport has buffers that last. A call is: take the next input, write records there by destination rank, and move
them; what came lies in the output, by source rank, until the next call.

    records = transport.next_input(64)      (rows, 64) uint8, anything in it
    ...                                     records for rank 0, then for rank 1, ...
    received = transport.move(splits_N)     (rows, 64) uint8: those of rank 0, then of rank 1, ...

`NvshmemTransport` is torch.ops.symm_mem.all_to_all_vdev. What its kernels ask for:

- input, output and both tables of splits are symmetric: allocated alike by every rank of the *run*, in one order.
- Ranks write their splits and offsets into each other's tables, meet at a barrier, then each *reads* its rows out of
  the others' inputs. Nothing tells a rank that the others have read. So inputs and tables come in pairs, used in turn:
  who writes into one again has been at the barrier of the call between, which nobody reaches before having finished
  with the call before. For the same reason calls are on one stream, and no CUDA graph may capture an odd number of
  them: capturing is refused.
- The rows of a pair of ranks are cut into equal parts, one per thread block, and the kernel asserts that there is no
  rest. The number of blocks follows from the size of the input: at most 64 where all ranks map each other's memory,
  else 16, divided by the ranks. So inputs are large enough to get that number, and `record_alignment` is a multiple of
  it.

`CollectiveTransport` does the same on CPUs by torch.distributed, and reads splits on the host: for tests.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from comms.kernels.codec import RECORD_ALIGNMENT

# Thread blocks of the operator's kernel with a large input: on one host, and across hosts.
MOST_BLOCKS = (64, 16)
# From here on an input is large: 64 blocks of 64 KiB, and one record less is still enough.
LARGE_INPUT = 2**23
# Ranks whose splits the kernel can add up: threads of one block.
MAX_RANKS = 512


class Transport(Protocol):
    """Moves records by splits on the device; see the module."""

    def next_input(self, record_bytes: int) -> Tensor:
        """(rows, record_bytes) uint8: where the next call's records go."""
        ...

    def move(self, splits_N: Tensor) -> Tensor:
        """Send the input's records, so many (int64, on the device) to each rank; what came, until the next call."""
        ...

    def tensors(self) -> Sequence[Tensor]:
        """The buffers of records."""
        ...


def record_alignment(num_ranks: int) -> int:
    """What the bytes of a record are a multiple of, so that the operator can cut any number of records evenly."""
    return math.lcm(RECORD_ALIGNMENT, *(max(blocks // num_ranks, 1) for blocks in MOST_BLOCKS))


def aligned_record(num_bytes: int, num_ranks: int) -> int:
    """Bytes of a record that holds so many."""
    alignment = record_alignment(num_ranks)
    return max(-(-num_bytes // alignment), 1) * alignment


def as_records(buffer: Tensor, record_bytes: int) -> Tensor:
    """All records of this length that a buffer has room for: (rows, record_bytes)."""
    rows = buffer.shape[0] // record_bytes
    return buffer[: rows * record_bytes].view(rows, record_bytes)


@dataclass
class _Buffers:
    """Symmetric memory of one group; see the module for what comes in pairs."""

    inputs: list[Tensor]
    output: Tensor
    in_splits: Tensor
    out_splits_offsets: list[Tensor]
    turn: int = 0


# By group and bytes. Never given back: freeing waits for every rank of the run, and one that has failed does not come.
_BUFFERS: dict[tuple[str, int], _Buffers] = {}


def _allocate(group: dist.ProcessGroup, device: torch.device, num_bytes: int) -> _Buffers:
    import torch.distributed._symmetric_memory as symmetric
    from torch._C._distributed_c10d import _SymmetricMemory  # pyright: ignore

    if symmetric.get_backend(device) != "NVSHMEM":
        symmetric.set_backend("NVSHMEM")

    def allocate(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        # Allocations of their own, not pieces of a pool: the operator finds them by where they begin.
        strides = tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
        tensor = _SymmetricMemory.empty_strided_p2p(shape, strides, dtype, device)
        symmetric.rendezvous(tensor, group.group_name)
        return tensor.zero_()

    ranks = group.size()
    buffers = _Buffers(
        inputs=[allocate((num_bytes,), torch.uint8) for _ in range(2)],
        output=allocate((num_bytes,), torch.uint8),
        in_splits=allocate((ranks,), torch.int64),
        out_splits_offsets=[allocate((2, ranks), torch.int64) for _ in range(2)],
    )
    torch.cuda.synchronize(device)
    dist.barrier(group)  # pyright: ignore
    return buffers


class NvshmemTransport:
    """By torch's NVSHMEM operator. Making one is collective over all ranks of the run, and alike on all of them."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device, num_bytes: int) -> None:
        self.group_name, self.record_bytes = group.group_name, 1
        key = group.group_name, max(num_bytes, LARGE_INPUT)
        # Another transport may have used them: as with one transport's calls, the turn goes on.
        if key not in _BUFFERS:
            _BUFFERS[key] = _allocate(group, device, key[1])
        self.buffers = _BUFFERS[key]

    def next_input(self, record_bytes: int) -> Tensor:
        """See Transport."""
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError("comms.backend=nvshmem cannot be captured in a CUDA graph; use comms.backend=symm_mem")
        buffers = self.buffers
        buffers.turn, self.record_bytes = 1 - buffers.turn, record_bytes
        return as_records(buffers.inputs[buffers.turn], record_bytes)

    def move(self, splits_N: Tensor) -> Tensor:
        """See Transport."""
        buffers = self.buffers
        records = as_records(buffers.inputs[buffers.turn], self.record_bytes)
        received = as_records(buffers.output, self.record_bytes)
        buffers.in_splits.copy_(splits_N)
        operator: Any = torch.ops.symm_mem.all_to_all_vdev
        operator(records, received, buffers.in_splits, buffers.out_splits_offsets[buffers.turn], self.group_name)
        return received

    def tensors(self) -> Sequence[Tensor]:
        """See Transport."""
        return [*self.buffers.inputs, self.buffers.output]


class CollectiveTransport:
    """The same records by torch.distributed, between processes on CPUs. What nobody wrote is poison (all bits set)."""

    def __init__(self, group: dist.ProcessGroup, num_bytes: int) -> None:
        self.group = group
        self.inputs = [torch.empty(num_bytes, dtype=torch.uint8) for _ in range(2)]
        self.output = torch.empty(num_bytes, dtype=torch.uint8)
        self.turn, self.record_bytes, self.calls = 0, 1, 0

    def next_input(self, record_bytes: int) -> Tensor:
        """See Transport."""
        self.turn, self.record_bytes = 1 - self.turn, record_bytes
        return as_records(self.inputs[self.turn].fill_(255), record_bytes)

    def move(self, splits_N: Tensor) -> Tensor:
        """See Transport."""
        # As the operator's kernel asserts.
        assert self.record_bytes % record_alignment(self.group.size()) == 0, self.record_bytes
        received_N = torch.empty_like(splits_N)
        dist.all_to_all_single(received_N, splits_N.contiguous(), group=self.group)  # pyright: ignore
        sent: list[int] = splits_N.tolist()  # pyright: ignore
        came: list[int] = received_N.tolist()  # pyright: ignore
        records = as_records(self.inputs[self.turn], self.record_bytes)
        received = as_records(self.output.fill_(255), self.record_bytes)
        dist.all_to_all_single(received[: sum(came)], records[: sum(sent)], came, sent, group=self.group)  # pyright: ignore
        self.calls += 1
        return received

    def tensors(self) -> Sequence[Tensor]:
        """See Transport."""
        return [*self.inputs, self.output]


def nvshmem_unavailable(group: dist.ProcessGroup | None, device: torch.device) -> str | None:
    """Why the ranks of a group cannot use torch's NVSHMEM operator; None if they can. Collective over the group."""
    if device.type != "cuda":
        return "it needs GPUs"
    if group is None or group.size() == 1:
        return "one rank exchanges nothing"
    if group.size() > MAX_RANKS:
        return f"its operator moves rows between up to {MAX_RANKS} ranks, and the group has {group.size()}"
    answers: list[str] = [""] * group.size()
    dist.all_gather_object(answers, _missing(device), group=group)  # pyright: ignore
    return next((answer for answer in answers if answer), None)


def _missing(device: torch.device) -> str:
    """What this process lacks, or nothing."""
    import torch.distributed._symmetric_memory as symmetric

    is_available: Any = getattr(symmetric, "is_nvshmem_available", None)
    if is_available is None or not is_available():
        return (
            f"torch {torch.__version__} finds no NVSHMEM (libnvshmem_host.so.3); it comes with CUDA builds of torch, "
            "or with pip install 'sluicegate[nvshmem]'"
        )
    if not hasattr(torch.ops.symm_mem, "all_to_all_vdev"):
        return f"torch {torch.__version__} has no operator symm_mem.all_to_all_vdev"
    if torch.cuda.get_device_capability(device)[0] < 7:
        return "its kernels need GPUs of compute capability 7.0"
    if symmetric.get_backend(device) != "NVSHMEM":
        try:
            symmetric.set_backend("NVSHMEM")
        except RuntimeError as error:
            return f"this process has symmetric memory of another kind already ({str(error).splitlines()[0]})"
    return ""
