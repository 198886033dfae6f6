"""Gate and up maps of rows read by index, and their activation, by warps that have one thing to do each: for SM90.

    h[p] = W_gate_up[e] x[rows[p]] + b,  a[p] = w[p] * act(h[p])

As in rows_sm90.py, but that a warpgroup brings the blocks: its threads copy rows, since the copy engine of this
card finds no rows by index. A block of weights has the same 128 columns of gate and of up, so a tile's two halves
are what the activation takes.

Shape suffixes: R rows, P pairs, D model dim, F hidden units of one expert, H = 2 F, E experts, S segments.
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
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.tools.ragged_tma import to_ragged_indices

from moe.kernels.fused_experts import _activation
from moe.kernels.warps_sm90 import (
    DEPTH,
    OUT_COLUMNS,
    STAGES,
    SWIZZLED,
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
            PROGRAMS=programs, STAGES=STAGES, GROUP=group, num_warps=4,
        )  # fmt: skip


@gluon.jit(do_not_specialize=["num_experts", "first_segment"])
def up_kernel(
    x, rows, weights, w_desc, bias, offsets, h_desc, a_desc, dim, hidden, num_experts, first_segment,
    HAS_BIAS: gl.constexpr, CLAMPED: gl.constexpr, LIMIT: gl.constexpr, SLOPE: gl.constexpr, CARD: gl.constexpr,
    PROGRAMS: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """Tiles of 128 rows x 128 columns of gate and the same of up, steps of 64 along `dim`."""
    a_blocks = gl.allocate_shared_memory(w_desc.dtype, [2 * STAGES, 64, 64], SWIZZLED)
    b_blocks = gl.allocate_shared_memory(w_desc.dtype, [STAGES, 2, 128, 64], w_desc.layout)
    staging = staging_of(a_desc.dtype)
    # Rows by copies of 128 threads, weights by the copy engine.
    ready, free = signals(STAGES, 128 + 1)
    ring = (a_blocks, b_blocks, ready, free)
    size = (dim, hidden, num_experts, first_segment)
    how: gl.constexpr = (PROGRAMS, STAGES, GROUP)
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
def _bring_indexed(x, rows, w_desc, ring, offsets, size, how: gl.constexpr):
    """A warpgroup's work: rows come by copies of its 128 threads, each of which arrives when its own have ended."""
    PROGRAMS: gl.constexpr = how[0]
    STAGES: gl.constexpr = how[1]
    GROUP: gl.constexpr = how[2]
    wide: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    a_blocks, b_blocks, ready, free = ring
    dim, hidden, num_experts, first_segment = size
    tiles_n = gl.cdiv(hidden, 128)
    column = gl.arange(0, 64, gl.SliceLayout(0, wide))
    step = 0
    first = gl.program_id(0)
    for expert in range(num_experts):
        start, count, tiles = tiles_of_expert(offsets, first_segment + expert, tiles_n, 128)
        for ahead in range(0, tiles - first, PROGRAMS):
            m, n = place_of_tile(first + ahead, gl.cdiv(count, 128), tiles_n, GROUP)
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
    HAS_BIAS: gl.constexpr = gated[0]
    dim, hidden, num_experts, first_segment = size
    steps, tiles_n = gl.cdiv(dim, 64), gl.cdiv(hidden, 128)
    of_h: gl.constexpr = (1, 1, 64, 1, 64)
    of_a: gl.constexpr = (1, 1, 64, 64)
    out = staging[half]
    step = 0
    first = gl.program_id(0)
    for expert in range(num_experts):
        start, count, tiles = tiles_of_expert(offsets, first_segment + expert, tiles_n, 128)
        for ahead in range(0, tiles - first, PROGRAMS):
            m, n = place_of_tile(first + ahead, gl.cdiv(count, 128), tiles_n, GROUP)
            total = rows_times_weights(half, ring, steps, step, STAGES, True)
            step += steps
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
            send(gate, out, h_desc, of_h, (beyond, end, row, 0), n * 128)
            send(up, out, h_desc, of_h, (beyond, end, row, 1), n * 128)
            act = _activation(gate.to(gl.float32), up.to(gl.float32), gated[1], gated[2], gated[3], gated[4])
            send(to_bf16(act * weight[:, None]), out, a_desc, of_a, (beyond, end, row), n * 128)
        first = next_expert(first, tiles, PROGRAMS)
    tma.store_wait(pendings=0)
