"""What moves records between the ranks of a group by a table that stays on the device: the one user of nvshmem.

A transport has buffers that last. A call is: take the next input, write records there, and move them; what came lies in
the output until the next call. `table` (3, N) says what this rank gets: from each rank how many records, the first
one's place there, and its place here.

    records = transport.next_input(64)      (rows, 64) uint8, anything in it
    ...                                     records, in an order that all ranks know of
    received = transport.move(table)        (rows, 64) uint8

`NvshmemTransport` lets the ranks meet, then reads (comms/kernels/get_records.py):

- They meet in torch.ops.symm_mem.all_to_all_vdev, which is asked to move nothing: on the stream, ranks of the group
  alone, over NVLink or the network. It is not asked to move the records: its blocks read where a rank's rows begin, and
  its first block writes over that where they went, without waiting for the others (torch 2.11; pull request 192300 of
  pytorch says so of its twin). With other processes on the cards, a thousand exchanges had wrong rows among them.
- Nothing tells a rank that the others have read. So inputs, and the tables of splits that the operator writes, come in
  pairs, used in turn: who writes into one again has met the others in the call between, which nobody reaches before
  having finished with the call before. For the same reason calls are on one stream, and no CUDA graph may capture an
  odd number of them: capturing is refused.
- Buffers are symmetric: allocated alike by every rank of the *run*, in one order.

`CollectiveTransport` does the same on CPUs by torch.distributed, and reads tables on the host: for tests.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from comms.kernels.codec import RECORD_ALIGNMENT
from comms.kernels.get_records import get_records, why_not

# Ranks whose splits the operator can add up: threads of one block.
MAX_RANKS = 512


class Transport(Protocol):
    """Moves records by a table on the device; see the module."""

    def next_input(self, record_bytes: int) -> Tensor:
        """(rows, record_bytes) uint8: where the next call's records go."""
        ...

    def move(self, table_3N: Tensor) -> Tensor:
        """Get the records of the ranks' inputs that the table (int32, on the device) names; until the next call."""
        ...

    def tensors(self) -> Sequence[Tensor]:
        """The buffers of records."""
        ...


def aligned_record(num_bytes: int) -> int:
    """Bytes of a record that holds so many."""
    return max(-(-num_bytes // RECORD_ALIGNMENT), 1) * RECORD_ALIGNMENT


def as_records(buffer: Tensor, record_bytes: int) -> Tensor:
    """All records of this length that a buffer has room for: (rows, record_bytes)."""
    rows = buffer.shape[0] // record_bytes
    return buffer[: rows * record_bytes].view(rows, record_bytes)


@dataclass
class _Buffers:
    """Symmetric memory of one group; see the module for what comes in pairs."""

    inputs: list[Tensor]
    output: Tensor
    # Of the operator: what this rank sends to each, which is nothing; what it would get.
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
    """By NVSHMEM. Making one is collective over all ranks of the run, and alike on all of them."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device, num_bytes: int) -> None:
        self.group, self.record_bytes = group, 1
        # NVSHMEM knows a rank by its number in the run.
        self.ranks_N = torch.tensor(dist.get_process_group_ranks(group), dtype=torch.int32, device=device)
        key = group.group_name, num_bytes
        # Another transport may have used them: as with one transport's calls, the turn goes on.
        if key not in _BUFFERS:
            _BUFFERS[key] = _allocate(group, device, num_bytes)
        self.buffers = _BUFFERS[key]

    def next_input(self, record_bytes: int) -> Tensor:
        """See Transport."""
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError("comms.backend=nvshmem cannot be captured in a CUDA graph; use comms.backend=symm_mem")
        buffers = self.buffers
        buffers.turn, self.record_bytes = 1 - buffers.turn, record_bytes
        return as_records(buffers.inputs[buffers.turn], record_bytes)

    def move(self, table_3N: Tensor) -> Tensor:
        """See Transport."""
        received = self.call_operator()
        records = as_records(self.buffers.inputs[self.buffers.turn], self.record_bytes)
        with torch.cuda.device(records.device):
            get_records(records, received, table_3N, self.ranks_N, self.group.rank())
        return received

    def call_operator(self) -> Tensor:
        """Meet the other ranks; torch's operator moves what `in_splits` says, which is nothing."""
        buffers = self.buffers
        records = as_records(buffers.inputs[buffers.turn], self.record_bytes)
        received = as_records(buffers.output, self.record_bytes)
        operator: Any = torch.ops.symm_mem.all_to_all_vdev
        splits, offsets = buffers.in_splits, buffers.out_splits_offsets[buffers.turn]
        operator(records, received, splits, offsets, self.group.group_name)
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

    def move(self, table_3N: Tensor) -> Tensor:
        """See Transport."""
        assert self.record_bytes % RECORD_ALIGNMENT == 0, self.record_bytes
        me, num_ranks = self.group.rank(), self.group.size()
        tables = [torch.empty_like(table_3N) for _ in range(num_ranks)]
        dist.all_gather(tables, table_3N.contiguous(), group=self.group)  # pyright: ignore
        mine: list[list[int]] = table_3N.tolist()  # pyright: ignore
        asked: list[list[int]] = [table[:, me].tolist() for table in tables]  # pyright: ignore
        records = as_records(self.inputs[self.turn], self.record_bytes)
        received = as_records(self.output.fill_(255), self.record_bytes)
        sent = torch.cat([records[place : place + count] for count, place, _ in asked])
        came = records.new_empty(sum(mine[0]), self.record_bytes)
        dist.all_to_all_single(came, sent, mine[0], [count for count, _, _ in asked], group=self.group)  # pyright: ignore
        first = 0
        for count, place in zip(mine[0], mine[2], strict=True):
            received[place : place + count] = came[first : first + count]
            first += count
        self.calls += 1
        return received

    def tensors(self) -> Sequence[Tensor]:
        """See Transport."""
        return [*self.inputs, self.output]


def nvshmem_unavailable(group: dist.ProcessGroup | None, device: torch.device) -> str | None:
    """Why the ranks of a group cannot use NVSHMEM by way of torch; None if they can. Collective over the group."""
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
    if lacking := why_not():
        return lacking
    if symmetric.get_backend(device) != "NVSHMEM":
        try:
            symmetric.set_backend("NVSHMEM")
        except RuntimeError as error:
            return f"this process has symmetric memory of another kind already ({str(error).splitlines()[0]})"
    return ""
