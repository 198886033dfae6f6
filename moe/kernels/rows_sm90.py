"""The grouped bf16 product of rows by warps that have one thing to do each: Gluon, for SM90.

    out[p] = W[e] a[p]

One warp brings blocks, two warpgroups multiply (warps_sm90.py). As in fused_experts.py, experts begin and end anywhere:
ragged descriptors cut off what is behind an expert's last pair. (up, whose rows are read by index, is up_sm90.py.)

Shape suffixes: P pairs, E experts, S segments, I and O in- and out-features.
"""

# Kernels are written in Gluon, which has no types.
# pyright: basic, reportGeneralTypeIssues=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportAssignmentType=false, reportIndexIssue=false, reportOperatorIssue=false
# ruff: noqa: ANN001, ANN201, ANN202

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.tools.ragged_tma import to_ragged_indices

from moe.kernels.warps_sm90 import (
    DEPTH,
    OUT_COLUMNS,
    STAGES,
    next_expert,
    place_of_tile,
    ragged,
    rows_times_weights,
    send,
    signals,
    staging_of,
    swizzled,
    tiles_of_expert,
    to_bf16,
)


def launch_rows(
    a_PI: Tensor, w_EOI: Tensor, ends_S: Tensor, out_PO: Tensor, group: int, programs: int, first_segment: int = 0
) -> None:
    """There is a pair.

    Args:
        group: tiles of rows next to each other in time.
        first_segment: where the experts of w begin in ends_S.
    """
    E, width, inner = w_EOI.shape
    a_desc = TensorDescriptor.from_tensor(a_PI, [64, DEPTH], swizzled(2))
    w_desc = TensorDescriptor.from_tensor(w_EOI, [1, 256, DEPTH], swizzled(3))
    with torch.cuda.device(a_PI.device):
        rows_kernel[(programs,)](
            a_desc, w_desc, ends_S, ragged(out_PO, [64, OUT_COLUMNS]), inner, width, E, first_segment,
            PROGRAMS=programs, STAGES=STAGES, GROUP=group, num_warps=4,
        )  # fmt: skip


@gluon.jit(do_not_specialize=["num_experts", "first_segment"])
def rows_kernel(
    a_desc, w_desc, offsets, out_desc, inner, width, num_experts, first_segment,
    PROGRAMS: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """Tiles of 128 x 256, steps of 64 along `inner`."""
    a_blocks = gl.allocate_shared_memory(a_desc.dtype, [2 * STAGES, 64, 64], a_desc.layout)
    b_blocks = gl.allocate_shared_memory(w_desc.dtype, [STAGES, 1, 256, 64], w_desc.layout)
    staging = staging_of(out_desc.dtype)
    ready, free = signals(STAGES, 1)
    ring = (a_blocks, b_blocks, ready, free)
    size = (inner, width, num_experts, first_segment)
    how: gl.constexpr = (PROGRAMS, STAGES, GROUP)
    first: gl.constexpr = 0
    second: gl.constexpr = 1
    gl.warp_specialize(
        [
            (_multiply, (first, ring, staging, out_desc, offsets, size, how)),
            (_multiply, (second, ring, staging, out_desc, offsets, size, how)),
            (_bring, (a_desc, w_desc, ring, offsets, size, how)),
        ],
        [4, 1],
        [240, 24],
    )


@gluon.jit
def _bring(a_desc, w_desc, ring, offsets, size, how: gl.constexpr):
    PROGRAMS: gl.constexpr = how[0]
    STAGES: gl.constexpr = how[1]
    GROUP: gl.constexpr = how[2]
    a_blocks, b_blocks, ready, free = ring
    inner, width, num_experts, first_segment = size
    steps, tiles_n = gl.cdiv(inner, 64), gl.cdiv(width, 256)
    step = 0
    first = gl.program_id(0)
    for expert in range(num_experts):
        start, count, tiles = tiles_of_expert(offsets, first_segment + expert, tiles_n, 128)
        for ahead in range(0, tiles - first, PROGRAMS):
            m, n = place_of_tile(first + ahead, gl.cdiv(count, 128), tiles_n, GROUP)
            row = start + m * 128
            for k in range(steps):
                stage = step % STAGES
                mbarrier.wait(free.index(stage), ((step // STAGES) & 1) ^ 1)
                bar = ready.index(stage)
                mbarrier.expect(bar, (128 + 256) * 64 * 2)
                tma.async_copy_global_to_shared(w_desc, [expert, n * 256, k * 64], bar, b_blocks.index(stage))
                # Rows of the next expert in the last tile are computed and not stored.
                tma.async_copy_global_to_shared(a_desc, [row, k * 64], bar, a_blocks.index(2 * stage))
                tma.async_copy_global_to_shared(a_desc, [row + 64, k * 64], bar, a_blocks.index(2 * stage + 1))
                step += 1
        first = next_expert(first, tiles, PROGRAMS)


@gluon.jit
def _multiply(half: gl.constexpr, ring, staging, out_desc, offsets, size, how: gl.constexpr):
    PROGRAMS: gl.constexpr = how[0]
    STAGES: gl.constexpr = how[1]
    GROUP: gl.constexpr = how[2]
    inner, width, num_experts, first_segment = size
    steps, tiles_n = gl.cdiv(inner, 64), gl.cdiv(width, 256)
    shape: gl.constexpr = (1, 1, 64, 64)
    out = staging[half]
    step = 0
    first = gl.program_id(0)
    for expert in range(num_experts):
        start, count, tiles = tiles_of_expert(offsets, first_segment + expert, tiles_n, 128)
        for ahead in range(0, tiles - first, PROGRAMS):
            m, n = place_of_tile(first + ahead, gl.cdiv(count, 128), tiles_n, GROUP)
            total = rows_times_weights(half, ring, steps, step, STAGES, False)
            step += steps
            beyond, end, row = to_ragged_indices(start, count, m * 128 + half * 64)
            columns = gl.split(gl.permute(gl.reshape(total, [64, 2, 128]), (0, 2, 1)))
            for part in gl.static_range(2):
                send(to_bf16(columns[part]), out, out_desc, shape, (beyond, end, row), n * 256 + part * 128)
        first = next_expert(first, tiles, PROGRAMS)
    tma.store_wait(pendings=0)
