"""The grouped bf16 products of moe/kernels/fused_experts.py by warps that have one thing to do each: Gluon, for SM90.

    rows         out[p] = W[e] a[p], or W[e]^T a[p]
    weight_grad  dW[e] = sum over its pairs of left[p] right[p]^T

(up, whose rows are read by index, is up_sm90.py.) One warp brings blocks of both operands into a ring in shared memory,
two warpgroups multiply, 64 x 256 of a tile each. They wait for the ring alone: a step takes a third of the instructions
that one program of Triton's own takes, in which all warps bring blocks and wait for each other five times. The second
warpgroup begins LAG steps after the first and stays behind: so one multiplies while the other writes. The sums are
the same in the same order.

As in fused_experts.py, experts begin and end anywhere: ragged descriptors cut off what is behind an expert's last pair.

Shape suffixes: P pairs, E experts, I and O in- and out-features, M and N widths of left and right.
"""

# Kernels are written in Gluon, which has no types.
# pyright: basic, reportGeneralTypeIssues=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportAssignmentType=false, reportIndexIssue=false, reportOperatorIssue=false
# ruff: noqa: ANN001, ANN201, ANN202

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.tools.ragged_tma import to_ragged_indices

from moe.kernels.warps_sm90 import (
    DEPTH,
    LAG,
    OUT_COLUMNS,
    STAGES,
    last_turn,
    multiplied,
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
    wait_for_turn,
)


def launch_rows(
    a_PI: Tensor, w_E: Tensor, ends_S: Tensor, out_PO: Tensor, transposed: bool, group: int, programs: int,
    first_segment: int = 0,
) -> None:  # fmt: skip
    """w[e] a[p] with w (E, O, I); or, transposed, w[e]^T a[p] with w (E, I, O). There is a pair.

    Args:
        group: tiles of rows next to each other in time.
        first_segment: where the experts of w begin in ends_S.
    """
    (E, *_), inner, width = w_E.shape, a_PI.shape[1], out_PO.shape[1]
    a_desc = TensorDescriptor.from_tensor(a_PI, [64, DEPTH], swizzled(2))
    b_desc = TensorDescriptor.from_tensor(w_E, [1, DEPTH, 256] if transposed else [1, 256, DEPTH], swizzled(3))
    with torch.cuda.device(a_PI.device):
        rows_kernel[(programs,)](
            a_desc, b_desc, ends_S, ragged(out_PO, [64, OUT_COLUMNS]), inner, width, E, first_segment,
            PROGRAMS=programs, STAGES=STAGES, GROUP=group, LAG=LAG, TRANSPOSED=transposed, num_warps=4,
        )  # fmt: skip


def launch_weight_grad(
    left_PM: Tensor, right_PN: Tensor, ends_S: Tensor, out_EMN: Tensor, group: int, programs: int,
    first_segment: int = 0, num_chunks: int = 1,
) -> None:  # fmt: skip
    """The sum over each expert's pairs of left[p] right[p]^T; zero for an expert without pairs. There is a pair.

    Args:
        num_chunks: of ends_S, from first_segment on, whose pairs are added up.
    """
    E, M, N = out_EMN.shape
    out_desc = TensorDescriptor.from_tensor(out_EMN, [1, 64, OUT_COLUMNS], swizzled(3))
    with torch.cuda.device(left_PM.device):
        weight_grad_kernel[(programs,)](
            ragged(left_PM, [DEPTH, 64]), ragged(right_PN, [DEPTH, 256]), ends_S, out_desc, M, N, E, first_segment,
            PROGRAMS=programs, CHUNKS=num_chunks, STAGES=STAGES, GROUP=group, LAG=LAG, num_warps=4,
        )  # fmt: skip


@gluon.jit(do_not_specialize=["num_experts", "first_segment"])
def rows_kernel(
    a_desc, b_desc, offsets, out_desc, inner, width, num_experts, first_segment,
    PROGRAMS: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr, LAG: gl.constexpr, TRANSPOSED: gl.constexpr,
):  # fmt: skip
    """Tiles of 128 x 256, steps of 64 along `inner`."""
    a_blocks = gl.allocate_shared_memory(a_desc.dtype, [2 * STAGES, 64, 64], a_desc.layout)
    if TRANSPOSED:
        b_blocks = gl.allocate_shared_memory(b_desc.dtype, [STAGES, 1, 64, 256], b_desc.layout)
    else:
        b_blocks = gl.allocate_shared_memory(b_desc.dtype, [STAGES, 1, 256, 64], b_desc.layout)
    staging = staging_of(out_desc.dtype)
    ready, free, turn = signals(STAGES, 1)
    ring = (a_blocks, b_blocks, ready, free, turn)
    size = (inner, width, num_experts, first_segment)
    how: gl.constexpr = (PROGRAMS, STAGES, GROUP, LAG, TRANSPOSED)
    first: gl.constexpr = 0
    second: gl.constexpr = 1
    gl.warp_specialize(
        [
            (_multiply_rows, (first, ring, staging, out_desc, offsets, size, how)),
            (_multiply_rows, (second, ring, staging, out_desc, offsets, size, how)),
            (_bring_rows, (a_desc, b_desc, ring, offsets, size, how)),
        ],
        [4, 1],
        [240, 24],
    )


@gluon.jit(do_not_specialize=["num_experts", "first_segment"])
def weight_grad_kernel(
    left_desc, right_desc, offsets, out_desc, left_width, right_width, num_experts, first_segment,
    PROGRAMS: gl.constexpr, CHUNKS: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr, LAG: gl.constexpr,
):  # fmt: skip
    """Tiles of 128 x 256, steps of 64 pairs."""
    a_blocks = gl.allocate_shared_memory(left_desc.dtype, [2 * STAGES, 1, 1, 64, 64], left_desc.layout)
    b_blocks = gl.allocate_shared_memory(right_desc.dtype, [STAGES, 1, 1, 64, 256], right_desc.layout)
    staging = staging_of(out_desc.dtype)
    ready, free, turn = signals(STAGES, 1)
    ring = (a_blocks, b_blocks, ready, free, turn)
    size = (left_width, right_width, num_experts, first_segment)
    how: gl.constexpr = (PROGRAMS, STAGES, GROUP, LAG, CHUNKS)
    first: gl.constexpr = 0
    second: gl.constexpr = 1
    gl.warp_specialize(
        [
            (_multiply_columns, (first, ring, staging, out_desc, offsets, size, how)),
            (_multiply_columns, (second, ring, staging, out_desc, offsets, size, how)),
            (_bring_columns, (left_desc, right_desc, ring, offsets, size, how)),
        ],
        [4, 1],
        [240, 24],
    )


@gluon.jit
def _bring_rows(a_desc, b_desc, ring, offsets, size, how: gl.constexpr):
    PROGRAMS: gl.constexpr = how[0]
    STAGES: gl.constexpr = how[1]
    GROUP: gl.constexpr = how[2]
    TRANSPOSED: gl.constexpr = how[4]
    a_blocks, b_blocks, ready, free, _turn = ring
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
                if TRANSPOSED:
                    at_b = [expert, k * 64, n * 256]
                else:
                    at_b = [expert, n * 256, k * 64]
                tma.async_copy_global_to_shared(b_desc, at_b, bar, b_blocks.index(stage))
                # Rows of the next expert in the last tile are computed and not stored.
                tma.async_copy_global_to_shared(a_desc, [row, k * 64], bar, a_blocks.index(2 * stage))
                tma.async_copy_global_to_shared(a_desc, [row + 64, k * 64], bar, a_blocks.index(2 * stage + 1))
                step += 1
        first = next_expert(first, tiles, PROGRAMS)


@gluon.jit
def _multiply_rows(half: gl.constexpr, ring, staging, out_desc, offsets, size, how: gl.constexpr):
    PROGRAMS: gl.constexpr = how[0]
    STAGES: gl.constexpr = how[1]
    GROUP: gl.constexpr = how[2]
    LAG: gl.constexpr = how[3]
    TRANSPOSED: gl.constexpr = how[4]
    turn = ring[4]
    inner, width, num_experts, first_segment = size
    steps, tiles_n = gl.cdiv(inner, 64), gl.cdiv(width, 256)
    shape: gl.constexpr = (1, 1, 64, 64)
    out = staging[half]
    wait_for_turn(half, turn, STAGES, LAG)
    step = 0
    first = gl.program_id(0)
    for expert in range(num_experts):
        start, count, tiles = tiles_of_expert(offsets, first_segment + expert, tiles_n, 128)
        for ahead in range(0, tiles - first, PROGRAMS):
            m, n = place_of_tile(first + ahead, gl.cdiv(count, 128), tiles_n, GROUP)
            total = rows_times_weights(half, ring, steps, step, how, TRANSPOSED, False)
            step += steps
            beyond, end, row = to_ragged_indices(start, count, m * 128 + half * 64)
            columns = gl.split(gl.permute(gl.reshape(total, [64, 2, 128]), (0, 2, 1)))
            for part in gl.static_range(2):
                send(to_bf16(columns[part]), out, out_desc, shape, (beyond, end, row), n * 256 + part * 128)
        first = next_expert(first, tiles, PROGRAMS)
    last_turn(half, step, turn, LAG)
    tma.store_wait(pendings=0)


@gluon.jit
def _tile_of_weights(tile, size, GROUP: gl.constexpr):
    """Its expert and its place in the expert's gradient."""
    left_width, right_width, _, _ = size
    tiles_m, tiles_n = gl.cdiv(left_width, 128), gl.cdiv(right_width, 256)
    m, n = place_of_tile(tile % (tiles_m * tiles_n), tiles_m, tiles_n, GROUP)
    return tile // (tiles_m * tiles_n), m, n


@gluon.jit
def _bring_columns(left_desc, right_desc, ring, offsets, size, how: gl.constexpr):
    PROGRAMS: gl.constexpr = how[0]
    STAGES: gl.constexpr = how[1]
    GROUP: gl.constexpr = how[2]
    CHUNKS: gl.constexpr = how[4]
    a_blocks, b_blocks, ready, free, _turn = ring
    left_width, right_width, num_experts, first_segment = size
    num_tiles = num_experts * gl.cdiv(left_width, 128) * gl.cdiv(right_width, 256)
    step = 0
    for tile in range(gl.program_id(0), num_tiles, PROGRAMS):
        expert, m, n = _tile_of_weights(tile, size, GROUP)
        for chunk in gl.static_range(CHUNKS):
            start, count, _ = tiles_of_expert(offsets, first_segment + chunk * num_experts + expert, 1, 128)
            for first in range(0, count, 64):
                stage = step % STAGES
                mbarrier.wait(free.index(stage), ((step // STAGES) & 1) ^ 1)
                bar = ready.index(stage)
                mbarrier.expect(bar, (128 + 256) * 64 * 2)
                # Both are zero behind the expert's last pair: what stands there may be anything.
                beyond, end, row = to_ragged_indices(start, count, first)
                right, left = b_blocks.index(stage), a_blocks.index(2 * stage)
                tma.async_copy_global_to_shared(right_desc, [beyond, end, row, n * 256], bar, right)
                tma.async_copy_global_to_shared(left_desc, [beyond, end, row, m * 128], bar, left)
                left = a_blocks.index(2 * stage + 1)
                tma.async_copy_global_to_shared(left_desc, [beyond, end, row, m * 128 + 64], bar, left)
                step += 1


@gluon.jit
def _multiply_columns(half: gl.constexpr, ring, staging, out_desc, offsets, size, how: gl.constexpr):
    PROGRAMS: gl.constexpr = how[0]
    STAGES: gl.constexpr = how[1]
    GROUP: gl.constexpr = how[2]
    LAG: gl.constexpr = how[3]
    CHUNKS: gl.constexpr = how[4]
    mma: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 256, 16])
    a_blocks, b_blocks, ready, free, turn = ring
    left_width, right_width, num_experts, first_segment = size
    num_tiles = num_experts * gl.cdiv(left_width, 128) * gl.cdiv(right_width, 256)
    shape: gl.constexpr = (1, 64, 64)
    out = staging[half]
    wait_for_turn(half, turn, STAGES, LAG)
    step = 0
    for tile in range(gl.program_id(0), num_tiles, PROGRAMS):
        expert, m, n = _tile_of_weights(tile, size, GROUP)
        total = gl.zeros([64, 256], gl.float32, mma)
        before = step
        for chunk in gl.static_range(CHUNKS):
            _, count, _ = tiles_of_expert(offsets, first_segment + chunk * num_experts + expert, 1, 128)
            for _ in range(0, count, 64):
                stage = step % STAGES
                mbarrier.wait(ready.index(stage), (step // STAGES) & 1)
                a = a_blocks.index(2 * stage + half).reshape([64, 64]).permute((1, 0))
                total = warpgroup_mma(a, b_blocks.index(stage).reshape([64, 256]), total, is_async=True)
                total = warpgroup_mma_wait(1, deps=[total])
                multiplied(half, step, step > before, free, turn, STAGES, LAG)
                step += 1
        total = warpgroup_mma_wait(0, deps=[total])
        mbarrier.arrive(free.index((step + STAGES - 1) % STAGES), count=1, pred=step > before)
        columns = gl.split(gl.permute(gl.reshape(total, [64, 2, 128]), (0, 2, 1)))
        for part in gl.static_range(2):
            send(to_bf16(columns[part]), out, out_desc, shape, (expert, m * 128 + half * 64), n * 256 + part * 128)
    last_turn(half, step, turn, LAG)
    tma.store_wait(pendings=0)
