"""The grouped bf16 products of moe/kernels/fused_experts.py by warps that have one thing to do each: Gluon, for SM90.

    rows         out[p] = W[e] a[p], or W[e]^T a[p]
    up           h[p] = W_gate_up[e] x[rows[p]] + b,  a[p] = w[p] * act(h[p])
    weight_grad  dW[e] = sum over its pairs of left[p] right[p]^T

One warp brings blocks of both operands into a ring in shared memory (a warpgroup does, where rows are read by index),
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

from typing import Any

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.tools.ragged_tma import create_ragged_descriptor, to_ragged_indices

from moe.kernels.fused_experts import _activation
from moe.kernels.warps_sm90 import next_expert, place_of_tile, tiles_of_expert, to_bf16

# A step along K, and how many are on their way; steps that the second warpgroup is behind.
DEPTH, STAGES, LAG = 64, 4, 1
# Columns of a tile that go out at once: lines of 128 bytes.
OUT_COLUMNS = 64


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


def launch_up(
    x_RD: Tensor, rows_P: Tensor, weights_P: Tensor, w_E2FD: Tensor, b_E2F: Tensor | None, ends_S: Tensor,
    h_PH: Tensor, a_PF: Tensor, activation: dict[str, Any], group: int, programs: int, first_segment: int = 0,
) -> None:  # fmt: skip
    """h and w[p] * act(h[p]). There is a pair, and 64 divides D.

    Args:
        activation: what moe.fused_launches.activation_of says.
    """
    E, _, F, D = w_E2FD.shape
    assert D % DEPTH == 0, D
    w_desc = TensorDescriptor.from_tensor(w_E2FD.view(E * 2, F, D), [2, 128, DEPTH], swizzled(3))
    h_desc = ragged(h_PH.view(-1, 2, F), [64, 1, OUT_COLUMNS])
    with torch.cuda.device(x_RD.device):
        up_kernel[(programs,)](
            x_RD, rows_P, weights_P, w_desc, b_E2F, ends_S, h_desc, ragged(a_PF, [64, OUT_COLUMNS]),
            D, F, E, first_segment, HAS_BIAS=b_E2F is not None, **activation,
            PROGRAMS=programs, STAGES=STAGES, GROUP=group, LAG=LAG, num_warps=4,
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


def swizzled(rank: int) -> gl.NVMMASharedLayout:
    """Of blocks of 16-bit numbers whose lines are 128 bytes, or several times that."""
    return gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=rank)


SWIZZLED = gl.constexpr(swizzled(2))


def ragged(x_PX: Tensor, block: list[int]) -> TensorDescriptor:
    """As triton.tools.ragged_tma has it, for Gluon."""
    desc = create_ragged_descriptor(x_PX, block)
    return TensorDescriptor(desc.base, desc.shape, desc.strides, desc.block_shape, swizzled(2 + len(block)))


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
    staging = _staging(out_desc.dtype)
    ready, free, turn = _signals(STAGES, 1)
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
    staging = _staging(out_desc.dtype)
    ready, free, turn = _signals(STAGES, 1)
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


@gluon.jit(do_not_specialize=["num_experts", "first_segment"])
def up_kernel(
    x, rows, weights, w_desc, bias, offsets, h_desc, a_desc, dim, hidden, num_experts, first_segment,
    HAS_BIAS: gl.constexpr, CLAMPED: gl.constexpr, LIMIT: gl.constexpr, SLOPE: gl.constexpr, CARD: gl.constexpr,
    PROGRAMS: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr, LAG: gl.constexpr,
):  # fmt: skip
    """Tiles of 128 rows x 128 columns of gate and the same of up, steps of 64 along `dim`."""
    a_blocks = gl.allocate_shared_memory(w_desc.dtype, [2 * STAGES, 64, 64], SWIZZLED)
    b_blocks = gl.allocate_shared_memory(w_desc.dtype, [STAGES, 2, 128, 64], w_desc.layout)
    staging = _staging(a_desc.dtype)
    # Rows by copies of 128 threads, weights by the copy engine.
    ready, free, turn = _signals(STAGES, 128 + 1)
    ring = (a_blocks, b_blocks, ready, free, turn)
    size = (dim, hidden, num_experts, first_segment)
    how: gl.constexpr = (PROGRAMS, STAGES, GROUP, LAG)
    gated: gl.constexpr = (HAS_BIAS, CLAMPED, LIMIT, SLOPE, CARD)
    first: gl.constexpr = 0
    second: gl.constexpr = 1
    gl.warp_specialize(
        [
            (_multiply_gated, (first, ring, staging, bias, weights, h_desc, a_desc, offsets, size, how, gated)),
            (_multiply_gated, (second, ring, staging, bias, weights, h_desc, a_desc, offsets, size, how, gated)),
            (_bring_indexed, (x, rows, w_desc, ring, offsets, size, how)),
        ],
        [4, 4],
        [224, 56],
    )


@gluon.jit
def _staging(dtype: gl.constexpr):
    """Where each warpgroup puts what goes out."""
    return (
        gl.allocate_shared_memory(dtype, [2, 64, 64], SWIZZLED),
        gl.allocate_shared_memory(dtype, [2, 64, 64], SWIZZLED),
    )


@gluon.jit
def _signals(STAGES: gl.constexpr, COMING: gl.constexpr):
    """Of each stage: COMING have brought its blocks, both warpgroups are done with them. The second's first turn."""
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=COMING)
        mbarrier.init(free.index(stage), count=2)
    turn = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    mbarrier.init(turn.index(0), count=1)
    fence_async_shared()
    return ready, free, turn


@gluon.jit
def _wait_for_turn(half: gl.constexpr, turn, STAGES: gl.constexpr, LAG: gl.constexpr):
    # The second frees the first stage after it has begun.
    gl.static_assert(LAG < STAGES)
    if half == 1 and LAG > 0:
        mbarrier.wait(turn.index(0), 0)


@gluon.jit
def _multiplied(half: gl.constexpr, step, within, free, turn, STAGES: gl.constexpr, LAG: gl.constexpr):
    """While a step's product runs, the one before has ended: its blocks are free, if it was one of this tile."""
    mbarrier.arrive(free.index((step + STAGES - 1) % STAGES), count=1, pred=within)
    if half == 0 and LAG > 0:
        if step == LAG:
            mbarrier.arrive(turn.index(0), count=1)


@gluon.jit
def _last_turn(half: gl.constexpr, steps, turn, LAG: gl.constexpr):
    """The first warpgroup may have had fewer steps than the second waits for."""
    if half == 0 and LAG > 0:
        mbarrier.arrive(turn.index(0), count=1, pred=steps <= LAG)


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
        for tile in range(first, tiles, PROGRAMS):
            m, n = place_of_tile(tile, gl.cdiv(count, 128), tiles_n, GROUP)
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
    mma: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 256, 16])
    a_blocks, b_blocks, ready, free, turn = ring
    inner, width, num_experts, first_segment = size
    steps, tiles_n = gl.cdiv(inner, 64), gl.cdiv(width, 256)
    shape: gl.constexpr = (1, 1, 64, 64)
    out = staging[half]
    _wait_for_turn(half, turn, STAGES, LAG)
    step = 0
    first = gl.program_id(0)
    for expert in range(num_experts):
        start, count, tiles = tiles_of_expert(offsets, first_segment + expert, tiles_n, 128)
        for tile in range(first, tiles, PROGRAMS):
            m, n = place_of_tile(tile, gl.cdiv(count, 128), tiles_n, GROUP)
            total = gl.zeros([64, 256], gl.float32, mma)
            for k in range(steps):
                stage = step % STAGES
                mbarrier.wait(ready.index(stage), (step // STAGES) & 1)
                if TRANSPOSED:
                    b = b_blocks.index(stage).reshape([64, 256])
                else:
                    b = b_blocks.index(stage).reshape([256, 64]).permute((1, 0))
                total = warpgroup_mma(a_blocks.index(2 * stage + half), b, total, is_async=True)
                total = warpgroup_mma_wait(1, deps=[total])
                _multiplied(half, step, k > 0, free, turn, STAGES, LAG)
                step += 1
            total = warpgroup_mma_wait(0, deps=[total])
            mbarrier.arrive(free.index((step + STAGES - 1) % STAGES), count=1)
            beyond, end, row = to_ragged_indices(start, count, m * 128 + half * 64)
            columns = gl.split(gl.permute(gl.reshape(total, [64, 2, 128]), (0, 2, 1)))
            for part in gl.static_range(2):
                _send(to_bf16(columns[part]), out, out_desc, shape, (beyond, end, row), n * 256 + part * 128)
        first = next_expert(first, tiles, PROGRAMS)
    _last_turn(half, step, turn, LAG)
    tma.store_wait(pendings=0)


@gluon.jit
def _bring_indexed(x, rows, w_desc, ring, offsets, size, how: gl.constexpr):
    """A warpgroup's work: rows come by copies of its 128 threads, each of which arrives when its own have ended."""
    PROGRAMS: gl.constexpr = how[0]
    STAGES: gl.constexpr = how[1]
    GROUP: gl.constexpr = how[2]
    wide: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    a_blocks, b_blocks, ready, free, _turn = ring
    dim, hidden, num_experts, first_segment = size
    tiles_n = gl.cdiv(hidden, 128)
    column = gl.arange(0, 64, gl.SliceLayout(0, wide))
    step = 0
    first = gl.program_id(0)
    for expert in range(num_experts):
        start, count, tiles = tiles_of_expert(offsets, first_segment + expert, tiles_n, 128)
        for tile in range(first, tiles, PROGRAMS):
            m, n = place_of_tile(tile, gl.cdiv(count, 128), tiles_n, GROUP)
            upper = start + m * 128 + gl.arange(0, 64, gl.SliceLayout(1, wide))
            # Row 0 behind the expert's last pair.
            upper_row = gl.load(rows + upper, mask=upper < start + count, other=0).to(gl.int64)
            lower_row = gl.load(rows + upper + 64, mask=upper + 64 < start + count, other=0).to(gl.int64)
            upper_x = x + upper_row[:, None] * dim + column[None, :]
            lower_x = x + lower_row[:, None] * dim + column[None, :]
            for k in range(0, dim, 64):
                stage = step % STAGES
                mbarrier.wait(free.index(stage), ((step // STAGES) & 1) ^ 1)
                bar = ready.index(stage)
                mbarrier.expect(bar, 256 * 64 * 2)
                tma.async_copy_global_to_shared(w_desc, [expert * 2, n * 128, k], bar, b_blocks.index(stage))
                async_copy.async_copy_global_to_shared(a_blocks.index(2 * stage), upper_x + k)
                async_copy.async_copy_global_to_shared(a_blocks.index(2 * stage + 1), lower_x + k)
                async_copy.mbarrier_arrive(bar, increment_count=False)
                step += 1
        first = next_expert(first, tiles, PROGRAMS)


@gluon.jit
def _multiply_gated(
    half: gl.constexpr, ring, staging, bias, weights, h_desc, a_desc, offsets, size, how: gl.constexpr,
    gated: gl.constexpr,
):  # fmt: skip
    PROGRAMS: gl.constexpr = how[0]
    STAGES: gl.constexpr = how[1]
    GROUP: gl.constexpr = how[2]
    LAG: gl.constexpr = how[3]
    HAS_BIAS: gl.constexpr = gated[0]
    mma: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 256, 16])
    a_blocks, b_blocks, ready, free, turn = ring
    dim, hidden, num_experts, first_segment = size
    steps, tiles_n = gl.cdiv(dim, 64), gl.cdiv(hidden, 128)
    of_h: gl.constexpr = (1, 1, 64, 1, 64)
    of_a: gl.constexpr = (1, 1, 64, 64)
    out = staging[half]
    _wait_for_turn(half, turn, STAGES, LAG)
    step = 0
    first = gl.program_id(0)
    for expert in range(num_experts):
        start, count, tiles = tiles_of_expert(offsets, first_segment + expert, tiles_n, 128)
        for tile in range(first, tiles, PROGRAMS):
            m, n = place_of_tile(tile, gl.cdiv(count, 128), tiles_n, GROUP)
            total = gl.zeros([64, 256], gl.float32, mma)
            for k in range(steps):
                stage = step % STAGES
                mbarrier.wait(ready.index(stage), (step // STAGES) & 1)
                # Products see what threads have written after a fence.
                fence_async_shared()
                b = b_blocks.index(stage).reshape([256, 64]).permute((1, 0))
                total = warpgroup_mma(a_blocks.index(2 * stage + half), b, total, is_async=True)
                total = warpgroup_mma_wait(1, deps=[total])
                _multiplied(half, step, k > 0, free, turn, STAGES, LAG)
                step += 1
            total = warpgroup_mma_wait(0, deps=[total])
            mbarrier.arrive(free.index((step + STAGES - 1) % STAGES), count=1)
            gate, up = gl.split(gl.permute(gl.reshape(total, [64, 2, 128]), (0, 2, 1)))
            pair = start + m * 128 + half * 64 + gl.arange(0, 64, gl.SliceLayout(1, gate.type.layout))
            weight = gl.load(weights + pair, mask=pair < start + count, other=0.0).to(gl.float32)
            if HAS_BIAS:
                column = n * 128 + gl.arange(0, 128, gl.SliceLayout(0, gate.type.layout))
                base = bias + expert * 2 * hidden + column
                gate += gl.load(base, mask=column < hidden, other=0.0).to(gl.float32)[None, :]
                up += gl.load(base + hidden, mask=column < hidden, other=0.0).to(gl.float32)[None, :]
            # The activation sees h as it is kept for backward.
            gate, up = to_bf16(gate), to_bf16(up)
            beyond, end, row = to_ragged_indices(start, count, m * 128 + half * 64)
            _send(gate, out, h_desc, of_h, (beyond, end, row, 0), n * 128)
            _send(up, out, h_desc, of_h, (beyond, end, row, 1), n * 128)
            act = _activation(gate.to(gl.float32), up.to(gl.float32), gated[1], gated[2], gated[3], gated[4])
            _send(to_bf16(act * weight[:, None]), out, a_desc, of_a, (beyond, end, row), n * 128)
        first = next_expert(first, tiles, PROGRAMS)
    _last_turn(half, step, turn, LAG)
    tma.store_wait(pendings=0)


@gluon.jit
def _send(block, buffers, desc, shape: gl.constexpr, lead, column):
    """64 x 128 numbers, by way of shared memory in two pieces: while one is read from there, the other comes.

    Args:
        shape: of a piece, as `desc` knows it.
        lead: coordinates but the last one, which is `column`.
    """
    pieces = gl.split(gl.permute(gl.reshape(block, [64, 2, 64]), (0, 2, 1)))
    for piece in gl.static_range(2):
        # The piece before the last one has been read.
        tma.store_wait(pendings=1)
        buffer = buffers.index(piece).reshape(shape)
        buffer.store(gl.reshape(pieces[piece], shape))
        fence_async_shared()
        tma.async_copy_shared_to_global(desc, lead + (column + piece * 64,), buffer)  # noqa: RUF005


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
    _wait_for_turn(half, turn, STAGES, LAG)
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
                _multiplied(half, step, step > before, free, turn, STAGES, LAG)
                step += 1
        total = warpgroup_mma_wait(0, deps=[total])
        mbarrier.arrive(free.index((step + STAGES - 1) % STAGES), count=1, pred=step > before)
        columns = gl.split(gl.permute(gl.reshape(total, [64, 2, 128]), (0, 2, 1)))
        for part in gl.static_range(2):
            _send(to_bf16(columns[part]), out, out_desc, shape, (expert, m * 128 + half * 64), n * 256 + part * 128)
    _last_turn(half, step, turn, LAG)
    tma.store_wait(pendings=0)
