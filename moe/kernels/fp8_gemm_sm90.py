"""The grouped fp8 products of moe/kernels/fp8_gemm.py by warps that have one thing to do each: Gluon, for SM90.

    one warp         brings blocks of both operands into a ring in shared memory, by the copy engine
    two warpgroups   multiply, 64 rows of a tile's 128 each, and write what they have summed

A sum over 128 has to leave the tensor cores before it is scaled, and meanwhile they would wait. With two warpgroups
that wait for nothing but the ring, one scales while the other multiplies; in one program of Triton's own they walk in
step, and both scale at the same time.

A tile is 128 rows x two blocks of weights, the left and the right one, each with its own sum: 128 registers of a
thread, and 64 for the product that is to be scaled. Which two blocks they are is all that tells the products apart:

    rows    y[p] = W[e] x[p]                                 blocks 2n and 2n + 1 of y's columns
    gated   h[p] = W_gate_up[e] x[p], a[p] = w[p] act(h[p])  block n of gate, and of up; a goes out in e4m3

A multiplying warpgroup has 240 registers. Its two halves of a step stand in loops of one turn, `once`: the assembler
moves the left half's scaling behind the right half's product otherwise, needs registers for both products, and spills.

Shape suffixes: P rows sorted by expert, E experts, I and O in- and out-features, F hidden units, H = 2 F.
"""

# Kernels are written in Gluon, which has no types.
# pyright: basic, reportGeneralTypeIssues=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportAssignmentType=false, reportIndexIssue=false
# ruff: noqa: ANN001, ANN201, ANN202

from typing import Any

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from comms.kernels.e4m3 import absolute, encode, scale_byte
from moe.kernels.fp8_gemm_portable import BLOCK, GROUP, power
from moe.kernels.fused_experts import _activation
from moe.kernels.warps_sm90 import next_expert, place_of_tile, tiles_of_expert, to_bf16

# Rows of a warpgroup, and steps along K that are on their way.
ROWS, STAGES = 64, 4
# A line of a block is 128 bytes.
SWIZZLED = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)


def launch_rows(
    values_PI: Tensor, scales_KP: Tensor, weights_EOI: Tensor, weight_scales_EBK: Tensor, offsets_E: Tensor,
    out_PO: Tensor,
) -> None:  # fmt: skip
    """`fp8_rows_gemm` into memory that is there; operands are contiguous, and there is a row."""
    given = values_PI, scales_KP, weights_EOI, weight_scales_EBK, offsets_E
    none = {"CLAMPED": False, "LIMIT": 0.0, "SLOPE": 0.0, "CARD": True}
    _launch(*given, out_PO, None, None, None, GATED=False, **none)


def launch_gated(
    values_PI: Tensor, scales_KP: Tensor, weights_EHI: Tensor, weight_scales_EBK: Tensor, offsets_E: Tensor,
    weights_P: Tensor, h_PH: Tensor, act_PF: Tensor, act_scales_SP: Tensor, activation: dict[str, Any],
) -> None:  # fmt: skip
    """`fp8_gated_gemm` into memory that is there; operands are contiguous, there is a row, and 128 divides F.

    Args:
        act_PF: bytes.
        activation: what moe.fused_launches.activation_of says.
    """
    given = values_PI, scales_KP, weights_EHI, weight_scales_EBK, offsets_E
    _launch(*given, h_PH, weights_P, act_PF, act_scales_SP, GATED=True, **activation)


def _launch(
    values_PI: Tensor, scales_KP: Tensor, weights_EOI: Tensor, weight_scales_EBK: Tensor, offsets_E: Tensor,
    out_PO: Tensor, weights_P: Tensor | None, act: Tensor | None, act_scales: Tensor | None, **constants: Any,
) -> None:  # fmt: skip
    (P, inner), (E, width, _) = values_PI.shape, weights_EOI.shape
    a_desc = TensorDescriptor.from_tensor(values_PI, [ROWS, BLOCK], SWIZZLED)
    b_desc = TensorDescriptor.from_tensor(weights_EOI.view(E * width, inner), [BLOCK, BLOCK], SWIZZLED)
    programs = torch.cuda.get_device_properties(values_PI.device).multi_processor_count
    with torch.cuda.device(values_PI.device):
        fp8_kernel[(programs,)](
            a_desc, scales_KP, b_desc, weight_scales_EBK, offsets_E, out_PO, weights_P, act, act_scales,
            P, inner, width, E, 1, PROGRAMS=programs, STAGES=STAGES, GROUP=GROUP, **constants, num_warps=4,
        )  # fmt: skip


@gluon.jit(do_not_specialize=["num_rows", "num_experts", "once"])
def fp8_kernel(
    a_desc, a_scales, b_desc, b_scales, offsets, out, weights, act, act_scales,
    num_rows, inner, width, num_experts, once,
    PROGRAMS: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
    GATED: gl.constexpr, CLAMPED: gl.constexpr, LIMIT: gl.constexpr, SLOPE: gl.constexpr, CARD: gl.constexpr,
):  # fmt: skip
    """A step's blocks are ready in two parts: rows and left weights, then right weights. Both warpgroups free them."""
    a_blocks = gl.allocate_shared_memory(a_desc.dtype, [2 * STAGES, 64, 128], a_desc.layout)
    b_blocks = gl.allocate_shared_memory(b_desc.dtype, [2 * STAGES, 128, 128], b_desc.layout)
    ready = gl.allocate_shared_memory(gl.int64, [2 * STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(2 * stage), count=1)
        mbarrier.init(ready.index(2 * stage + 1), count=1)
        mbarrier.init(free.index(stage), count=2)
    fence_async_shared()
    first: gl.constexpr = 0
    second: gl.constexpr = 1
    ring = (a_blocks, b_blocks, ready, free)
    size = (num_rows, inner, width, num_experts)
    summed = (a_scales, b_scales, offsets, out, weights, act, act_scales)
    how: gl.constexpr = (PROGRAMS, STAGES, GROUP)
    gated: gl.constexpr = (GATED, CLAMPED, LIMIT, SLOPE, CARD)
    gl.warp_specialize(
        [
            (_multiply, (first, ring, summed, size, once, how, gated)),
            (_multiply, (second, ring, summed, size, once, how, gated)),
            (_bring, (a_desc, b_desc, ring, offsets, size, how, GATED)),
        ],
        [4, 1],
        [240, 24],
    )


@gluon.jit
def _blocks(n, width, GATED: gl.constexpr):
    """The left block of weights of a tile, and how many blocks further the right one is."""
    if GATED:
        return n, width // 256
    else:
        return 2 * n, 1


@gluon.jit
def _bring(a_desc, b_desc, ring, offsets, size, how: gl.constexpr, GATED: gl.constexpr):
    PROGRAMS: gl.constexpr = how[0]
    STAGES: gl.constexpr = how[1]
    GROUP: gl.constexpr = how[2]
    a_blocks, b_blocks, ready, free = ring
    _, inner, width, num_experts = size
    blocks_k, tiles_n = gl.cdiv(inner, 128), gl.cdiv(width, 256)
    step = 0
    first = gl.program_id(0)
    for expert in range(num_experts):
        start, count, tiles = tiles_of_expert(offsets, expert, tiles_n, 128)
        for ahead in range(0, tiles - first, PROGRAMS):
            m, n = place_of_tile(first + ahead, gl.cdiv(count, 128), tiles_n, GROUP)
            row = start + m * 128
            left_block, further = _blocks(n, width, GATED)
            left = expert * width + left_block * 128
            right = left + further * 128
            for k in range(blocks_k):
                stage = step % STAGES
                mbarrier.wait(free.index(stage), ((step // STAGES) & 1) ^ 1)
                bar = ready.index(2 * stage)
                mbarrier.expect(bar, 128 * 128 + 128 * 128)
                tma.async_copy_global_to_shared(a_desc, [row, k * 128], bar, a_blocks.index(2 * stage))
                tma.async_copy_global_to_shared(b_desc, [left, k * 128], bar, b_blocks.index(2 * stage))
                tma.async_copy_global_to_shared(a_desc, [row + 64, k * 128], bar, a_blocks.index(2 * stage + 1))
                bar = ready.index(2 * stage + 1)
                mbarrier.expect(bar, 128 * 128)
                tma.async_copy_global_to_shared(b_desc, [right, k * 128], bar, b_blocks.index(2 * stage + 1))
                step += 1
        first = next_expert(first, tiles, PROGRAMS)


@gluon.jit
def _multiply(half: gl.constexpr, ring, summed, size, once, how: gl.constexpr, gated: gl.constexpr):
    PROGRAMS: gl.constexpr = how[0]
    STAGES: gl.constexpr = how[1]
    GROUP: gl.constexpr = how[2]
    GATED: gl.constexpr = gated[0]
    mma: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 32])
    a_blocks, b_blocks, ready, free = ring
    a_scales, b_scales, offsets, out, weights, act, act_scales = summed
    num_rows, inner, width, num_experts = size
    blocks_k, blocks_n, tiles_n = gl.cdiv(inner, 128), gl.cdiv(width, 128), gl.cdiv(width, 256)
    step = 0
    first = gl.program_id(0)
    for expert in range(num_experts):
        start, count, tiles = tiles_of_expert(offsets, expert, tiles_n, 128)
        for ahead in range(0, tiles - first, PROGRAMS):
            m, n = place_of_tile(first + ahead, gl.cdiv(count, 128), tiles_n, GROUP)
            row = start + m * 128 + half * 64
            # Behind the last row of all: rows that are not stored may have any scale.
            at_a = a_scales + gl.minimum(row + gl.arange(0, 64, gl.SliceLayout(1, mma)), num_rows - 1)
            left_block, further = _blocks(n, width, GATED)
            at_left = b_scales + (expert * blocks_n + left_block).to(gl.int64) * blocks_k
            # There is no right block if the width is an odd number of blocks; what is computed for it is not stored.
            at_right = at_left + gl.where(left_block + further < blocks_n, further, 0) * blocks_k
            left_total = gl.zeros([64, 128], gl.float32, mma)
            right_total = gl.zeros([64, 128], gl.float32, mma)
            byte, left_byte, right_byte = gl.load(at_a), gl.load(at_left), gl.load(at_right)
            for k in range(blocks_k):
                stage, phase = step % STAGES, (step // STAGES) & 1
                zero = gl.zeros([64, 128], gl.float32, mma)
                scale, left_scale, right_scale = power(byte), power(left_byte), power(right_byte)
                a = a_blocks.index(2 * stage + half)
                # The next step's scales, the last one's again behind it.
                after = gl.minimum(k + 1, blocks_k - 1)
                byte = gl.load(at_a + after.to(gl.int64) * num_rows)
                left_byte, right_byte = gl.load(at_left + after), gl.load(at_right + after)
                mbarrier.wait(ready.index(2 * stage), phase)
                for _ in range(once):
                    b = b_blocks.index(2 * stage).permute((1, 0))
                    product = warpgroup_mma(a, b, zero, use_acc=False, is_async=True)
                    product = warpgroup_mma_wait(0, deps=[product])
                    left_total += product * (scale * left_scale)[:, None]
                mbarrier.wait(ready.index(2 * stage + 1), phase)
                for _ in range(once):
                    b = b_blocks.index(2 * stage + 1).permute((1, 0))
                    product = warpgroup_mma(a, b, zero, use_acc=False, is_async=True)
                    product = warpgroup_mma_wait(0, deps=[product])
                    right_total += product * (scale * right_scale)[:, None]
                mbarrier.arrive(free.index(stage), count=1)
                step += 1
            end = start + count
            left_total, right_total = to_bf16(left_total), to_bf16(right_total)
            left, right = left_block * 128, (left_block + further) * 128
            _store(out, left_total, row, end, left, width)
            _store(out, right_total, row, end, right, width)
            if GATED:
                _store_act(left_total, right_total, weights, act, act_scales, row, end, n, num_rows, width // 2, gated)
        first = next_expert(first, tiles, PROGRAMS)


@gluon.jit
def _store(out, block, row, end, first_column, width):
    """64 x 128 numbers, 16 bytes of a thread: those of rows before `end` and of columns that there are."""
    PER_THREAD: gl.constexpr = 128 // block.dtype.primitive_bitwidth
    THREADS: gl.constexpr = 128 // PER_THREAD
    wide: gl.constexpr = gl.BlockedLayout([1, PER_THREAD], [32 // THREADS, THREADS], [4, 1], [1, 0])
    pair = row + gl.arange(0, 64, gl.SliceLayout(1, wide))
    column = first_column + gl.arange(0, 128, gl.SliceLayout(0, wide))
    pointers = out + pair.to(gl.int64)[:, None] * width + column[None, :]
    gl.store(pointers, gl.convert_layout(block, wide), mask=(pair < end)[:, None] & (column < width)[None, :])


@gluon.jit
def _store_act(gate, up, weights, act, scales, row, end, n, num_rows, hidden, gated: gl.constexpr):
    """w act(gate, up) in e4m3, whose columns are one block. It sees gate and up as they are kept."""
    CLAMPED: gl.constexpr = gated[1]
    LIMIT: gl.constexpr = gated[2]
    SLOPE: gl.constexpr = gated[3]
    CARD: gl.constexpr = gated[4]
    pair = row + gl.arange(0, 64, gl.SliceLayout(1, gate.type.layout))
    weight = gl.load(weights + pair, mask=pair < end, other=0.0).to(gl.float32)
    found = _activation(gate.to(gl.float32), up.to(gl.float32), CLAMPED, LIMIT, SLOPE, CARD) * weight[:, None]
    word = to_bf16(found).to(gl.int16, bitcast=True)
    scale = scale_byte(gl.max(absolute(word), axis=1).to(gl.int32), word.dtype)
    gl.store(scales + n * num_rows.to(gl.int64) + pair, scale.to(gl.uint8), mask=pair < end)
    _store(act, encode(word, scale[:, None], True), row, end, n * 128, hidden)
