"""The column of scripts/bench_comms.py for NVSHMEM's all_to_all_vdev, as torch has it: rows by splits on the device."""

import argparse
import math
import os
from typing import Any

if __name__ == "__main__":
    raise SystemExit("scripts/bench_vdev.py is a part of scripts/bench_comms.py, which has a column for it: run that")

import torch
import torch.distributed as dist
from torch import Tensor

from comms.kernels.codec import RECORD_ALIGNMENT
from comms.record_transport import NvshmemTransport
from scripts.bench_ranks import Measure, measure_on_ranks
from scripts.bench_times import slowest


def vdev(record: Tensor, send_counts: list[int], num_tokens: int, rounds: int) -> float:
    """Seconds to move packed records, of up to `num_tokens` rows for each rank: no packing, no sum."""
    group = dist.group.WORLD
    assert group is not None
    (rows, width), device = record.shape, record.device
    # Its blocks, 64 with an input of so many bytes, share a rank's rows without a rest.
    unit = math.lcm(RECORD_ALIGNMENT, max(64 // group.size(), 1))
    size = -(-width // unit) * unit
    transport = NvshmemTransport(group, device, max(group.size() * num_tokens * size, 2**23))
    transport.buffers.in_splits.copy_(torch.tensor(send_counts))
    for _ in range(2):
        transport.next_input(size)[:rows, :width] = record

    def move() -> None:
        transport.next_input(size)
        transport.call_operator()

    return slowest(move, device, rounds)


def add_vdev(cases: list[dict[str, Any]], arguments: argparse.Namespace, measure: Measure) -> str:
    """Add NVSHMEM's figures to those of the cases: a process has one kind of symmetric memory, so others measure it.

    Returns:
        Why there are none, or nothing.
    """
    try:
        no_processes = "there are no processes for it" if arguments.dry_run or "RANK" in os.environ else ""
        found = no_processes or measure_on_ranks(measure, arguments)
    except Exception as error:
        # What has been measured before is not lost.
        found = f"{type(error).__name__}: {error}"
    for case, seconds in zip(cases, [None] * len(cases) if isinstance(found, str) else found, strict=True):
        case["vdev_us"] = None if seconds is None else seconds * 1e6
        case["vdev_gb_s"] = None if seconds is None else case["wire_megabytes"] / seconds / 1e3
        case["over_vdev"] = None if seconds is None else seconds * 1e6 / case["dispatch_us"]
    return found if isinstance(found, str) else ""
