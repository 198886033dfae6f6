"""Grouped GEMMs over (row, expert) pairs with what surrounds them fused in: Triton kernels for Hopper.

Pairs are sorted by expert; `offsets[e]` is the end of expert e's pairs.

    up           h[p] = W_gate_up[e] x[rows[p]] + b,  a[p] = w[p] * act(h[p]): both maps in one pass over rows read by
                 index, so that received rows are not copied per pair
    rows         y[p] = W_down[e] a[p], da[p] = W_down[e]^T dout[p], dx[p] = W_gate_up[e]^T dh[p]
    act          w[p] * act(h[p]) in e4m3, where the product before it and after it are in low precision
    act_grad     from da = W_down[e]^T dout[p]:  dh[p] (in e4m3, too, if asked), w[p] * act(h[p]), and <da, act(h[p])>
    weight_grad  dW[e] = sum over its pairs of left[p] right[p]^T

Every product is persistent: as many programs as multiprocessors, each taking every n-th tile. Which expert and which
rows a tile has, a program works out from `offsets` in registers, so that nothing is asked of the host. Sums run in fp32
without atomics: results do not depend on scheduling.

Pairs of an expert begin and end anywhere. Some descriptors are ragged (triton.tools.ragged_tma): with them the copy
engine itself cuts a block off behind the expert's last pair, where it writes nothing and reads zeros. So a block goes
out while the next tile is multiplied, and no loop has a special last turn.

A launch works on the pairs of one chunk of rows. Chunks follow each other: `offsets` has all experts of the first, then
those of the second, and `first_segment` is where this chunk's experts begin in it. weight_grad alone goes over all
chunks, so that a sum is rounded once.

Worked example of the tiles: offsets = [3, 3, 8], tiles of 4 rows: expert 0 has rows 0-2 in one tile, expert 1 none,
expert 2 rows 3-6 in one tile and row 7 in another.

Shape suffixes: R rows, P pairs, D model dim, F hidden units of one expert, H = 2 F, E experts.
"""

# Kernels are written in Triton's language, which has no types.
# pyright: basic, reportGeneralTypeIssues=false
# ruff: noqa: ANN001, ANN201, ANN202

import triton
import triton.language as tl
from triton.tools.ragged_tma import load_ragged, to_ragged_indices

from comms.kernels.e4m3 import absolute, encode, scale_byte


@triton.jit
def _schedule(
    offsets, num_experts, width, EXPERTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, first_segment=0
):
    """Where each expert's tiles end, how many there are, and how many one row of them has."""
    index = tl.arange(0, EXPERTS)
    real = index < num_experts
    segment = first_segment + index
    ends = tl.load(offsets + segment, mask=real, other=0)
    starts = tl.load(offsets + segment - 1, mask=real & (segment > 0), other=0)
    tiles_n = tl.cdiv(width, BLOCK_N)
    tiles = tl.cdiv(ends - starts, BLOCK_M) * tiles_n
    return tl.cumsum(tiles, 0), tl.sum(tiles), tiles_n


@triton.jit
def _first_pair(offsets, first_segment):
    """Where a chunk's pairs begin."""
    return tl.load(offsets + first_segment - 1, mask=first_segment > 0, other=0)


@triton.jit
def _tile(
    offsets, tile, tile_ends, tiles_n, num_experts,
    EXPERTS: tl.constexpr, BLOCK_M: tl.constexpr, GROUP: tl.constexpr, first_segment=0,
):  # fmt: skip
    """Expert, its first pair, its number of pairs, the tile's place; groups of M tiles share their B blocks in L2.

    Behind the last tile there is an expert without pairs.
    """
    # Of the experts whose tiles end before, the last one's number + 1 and its end: one maximum, since programs of
    # several warps wait for each other in it.
    ended = ((tl.arange(0, EXPERTS) + 1).to(tl.int64) << 32) | tile_ends
    last = tl.max(tl.where(tile_ends <= tile, ended, 0))
    expert, place = (last >> 32).to(tl.int32), tile - (last & 0x7FFFFFFF).to(tl.int32)
    segment, real = first_segment + expert, expert < num_experts
    start = tl.load(offsets + segment - 1, mask=real & (segment > 0), other=0)
    count = tl.load(offsets + segment, mask=real, other=0) - start
    first_m = place // (GROUP * tiles_n) * GROUP
    group = tl.maximum(tl.minimum(tl.cdiv(count, BLOCK_M) - first_m, GROUP), 1)
    within = place % (GROUP * tiles_n)
    return expert, start, count, first_m + within % group, within // group


@triton.jit
def _sigmoid(x, CARD: tl.constexpr):
    """1 / (1 + exp(-x)).

    CARD: by the card's own powers and reciprocals. Each is right to 2^-22, and what is below 2^-126 becomes 0: far
    finer than bf16 can tell. The general way takes twice as many instructions, which an epilogue spends on each number.
    """
    if CARD:
        return tl.inline_asm_elementwise(
            """{
            .reg .f32 t;
            mul.ftz.f32 t, $1, 0fBFB8AA3B;
            ex2.approx.ftz.f32 t, t;
            add.ftz.f32 t, t, 0f3F800000;
            rcp.approx.ftz.f32 $0, t;
            }""",
            "=r,r", [x], dtype=tl.float32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        return tl.sigmoid(x)


@triton.jit
def _activation(gate, up, CLAMPED: tl.constexpr, LIMIT: tl.constexpr, SLOPE: tl.constexpr, CARD: tl.constexpr):
    if CLAMPED:
        gate = tl.minimum(gate, LIMIT)
        up = tl.minimum(tl.maximum(up, -LIMIT), LIMIT)
        return (up + 1.0) * gate * _sigmoid(SLOPE * gate, CARD)
    else:
        return gate * _sigmoid(gate, CARD) * up


@triton.jit
def _activation_grad(gate, up, CLAMPED: tl.constexpr, LIMIT: tl.constexpr, SLOPE: tl.constexpr, CARD: tl.constexpr):
    """act, d act / d gate, d act / d up."""
    if CLAMPED:
        inside_gate = gate <= LIMIT
        inside_up = (up >= -LIMIT) & (up <= LIMIT)
        gate = tl.minimum(gate, LIMIT)
        up = tl.minimum(tl.maximum(up, -LIMIT), LIMIT)
        s = _sigmoid(SLOPE * gate, CARD)
        glu = gate * s
        d_gate = tl.where(inside_gate, (up + 1.0) * (s + SLOPE * glu * (1.0 - s)), 0.0)
        return (up + 1.0) * glu, d_gate, tl.where(inside_up, glu, 0.0)
    else:
        s = _sigmoid(gate, CARD)
        silu = gate * s
        return silu * up, up * (s + silu * (1.0 - s)), silu


@triton.jit
def _split_columns(tile, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PARTS: tl.constexpr):
    """The tile's columns in 1 or 2 parts, as a tuple in order."""
    if PARTS == 1:
        parts = (tile,)
    else:
        parts = tl.split(tl.permute(tl.reshape(tile, [BLOCK_M, 2, BLOCK_N // 2]), [0, 2, 1]))
    return parts


@triton.jit(do_not_specialize=["first_segment"])
def up_kernel(
    x, rows, weights, w_desc, bias, offsets, h, a, kept,
    dim, hidden, num_experts, first_segment,
    PROGRAMS: tl.constexpr, EXPERTS: tl.constexpr, HAS_BIAS: tl.constexpr, CLAMPED: tl.constexpr,
    LIMIT: tl.constexpr, SLOPE: tl.constexpr, CARD: tl.constexpr,
    EVEN_K: tl.constexpr, PRECISION: tl.constexpr, PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
    KEEPS: tl.constexpr,
):  # fmt: skip
    """Gate and up are one product: a block of B has the same columns of both maps.

    kept: where x, and rows, weights and (KEEPS) h begin in their arena.
    """
    if kept is not None:
        x += tl.load(kept) * dim
        first_kept = tl.load(kept + 1)
        rows += first_kept
        weights += first_kept
        if KEEPS:
            h += first_kept * (2 * hidden)
        last_row = tl.load(kept + 2) - 1
    tile_ends, num_tiles, tiles_n = _schedule(
        offsets, num_experts, hidden, EXPERTS, BLOCK_M, BLOCK_N, first_segment
    )  # fmt: skip
    first_tile = tl.program_id(0)
    expert, start, count, m, n = _tile(
        offsets, first_tile, tile_ends, tiles_n, num_experts, EXPERTS, BLOCK_M, GROUP, first_segment
    )
    row = _rows_of_tile(rows, start, count, m, BLOCK_M)
    for tile in range(first_tile, num_tiles, PROGRAMS):
        pair = start + m * BLOCK_M + tl.arange(0, BLOCK_M)
        valid = pair < start + count
        if kept is not None:
            # An arena without room for all may have rows of another layer here.
            row = tl.minimum(row, last_row)
        a_pointers = x + row.to(tl.int64)[:, None] * dim + tl.arange(0, BLOCK_K)[None, :]
        both = tl.zeros([BLOCK_M, 2 * BLOCK_N], dtype=tl.float32)
        for k in range(0, dim, BLOCK_K):
            if EVEN_K:
                block = tl.load(a_pointers + k)
            else:
                block = tl.load(a_pointers + k, mask=(k + tl.arange(0, BLOCK_K) < dim)[None, :], other=0.0)
            b = w_desc.load([expert * 2, n * BLOCK_N, k]).reshape(2 * BLOCK_N, BLOCK_K)
            both = tl.dot(block, b.T, both, input_precision=PRECISION)
        # The next tile's rows are looked up while this one is written.
        next_expert, next_start, next_count, next_m, next_n = _tile(
            offsets, tile + PROGRAMS, tile_ends, tiles_n, num_experts, EXPERTS, BLOCK_M, GROUP, first_segment
        )
        row = _rows_of_tile(rows, next_start, next_count, next_m, BLOCK_M)
        gate, up = _split_columns(both, BLOCK_M, 2 * BLOCK_N, 2)
        weight = tl.load(weights + pair, mask=valid, other=0.0).to(tl.float32)[:, None]
        gates = _split_columns(gate, BLOCK_M, BLOCK_N, PARTS)
        ups = _split_columns(up, BLOCK_M, BLOCK_N, PARTS)
        for part in tl.static_range(PARTS):
            column = n * BLOCK_N + part * (BLOCK_N // PARTS) + tl.arange(0, BLOCK_N // PARTS)
            inside = valid[:, None] & (column < hidden)[None, :]
            gate_part, up_part = gates[part], ups[part]
            if HAS_BIAS:
                base = bias + expert * 2 * hidden + column
                gate_part += tl.load(base, mask=column < hidden, other=0.0).to(tl.float32)[None, :]
                up_part += tl.load(base + hidden, mask=column < hidden, other=0.0).to(tl.float32)[None, :]
            # The activation sees h as it is kept for backward.
            gate_kept, up_kept = gate_part.to(h.dtype.element_ty), up_part.to(h.dtype.element_ty)
            at_h = pair.to(tl.int64)[:, None] * (2 * hidden) + column[None, :]
            tl.store(h + at_h, gate_kept, mask=inside)
            tl.store(h + at_h + hidden, up_kept, mask=inside)
            act = _activation(gate_kept.to(tl.float32), up_kept.to(tl.float32), CLAMPED, LIMIT, SLOPE, CARD) * weight
            at_a = pair.to(tl.int64)[:, None] * hidden + column[None, :]
            tl.store(a + at_a, act.to(a.dtype.element_ty), mask=inside)
        expert, start, count, m, n = next_expert, next_start, next_count, next_m, next_n


@triton.jit
def _rows_of_tile(rows, start, count, m, BLOCK_M: tl.constexpr):
    """Which rows a tile's pairs have; row 0 behind its expert's last pair."""
    pair = start + m * BLOCK_M + tl.arange(0, BLOCK_M)
    return tl.load(rows + pair, mask=pair < start + count, other=0)


@triton.jit(do_not_specialize=["first_segment"])
def rows_kernel(
    a_desc, b_desc, bias, weights, offsets, out_desc,
    inner, width, num_experts, first_segment,
    PROGRAMS: tl.constexpr, EXPERTS: tl.constexpr, HAS_BIAS: tl.constexpr, TRANSPOSED: tl.constexpr,
    EVEN_K: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """out[p] = B[e] a[p] (+ w[p] * bias[e]); B is (width, inner) or, for gradients, (inner, width)."""
    tile_ends, num_tiles, tiles_n = _schedule(
        offsets, num_experts, width, EXPERTS, BLOCK_M, BLOCK_N, first_segment
    )  # fmt: skip
    # Flattened, so that a tile's first blocks are on their way while the one before is written.
    for tile in tl.range(tl.program_id(0), num_tiles, PROGRAMS, flatten=True):
        expert, start, count, m, n = _tile(
            offsets, tile, tile_ends, tiles_n, num_experts, EXPERTS, BLOCK_M, GROUP, first_segment
        )  # fmt: skip
        first = start + m * BLOCK_M
        total = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
        for k in range(0, inner, BLOCK_K):
            # Rows of the next expert in the last tile are computed and not stored.
            block = a_desc.load([first, k])
            if TRANSPOSED:
                b = b_desc.load([expert * inner + k, n * BLOCK_N])
                if not EVEN_K:
                    # a is zero behind its last column, but 0 * what stands there need not be.
                    b = tl.where((k + tl.arange(0, BLOCK_K) < inner)[:, None], b, 0.0)
            else:
                b = b_desc.load([expert * width + n * BLOCK_N, k]).T
            total = tl.dot(block, b, total, input_precision=PRECISION)
        if HAS_BIAS:
            pair = first + tl.arange(0, BLOCK_M)
            column = n * BLOCK_N + tl.arange(0, BLOCK_N)
            weight = tl.load(weights + pair, mask=pair < start + count, other=0.0).to(tl.float32)
            row_of_bias = tl.load(bias + expert * width + column, mask=column < width, other=0.0).to(tl.float32)
            total += weight[:, None] * row_of_bias[None, :]
        # What triton.tools.ragged_tma.store_ragged does, which Triton's interpreter refuses.
        beyond, end, row = to_ragged_indices(start, count, m * BLOCK_M)
        block_out = tl.reshape(total.to(out_desc.dtype), [1, 1, BLOCK_M, BLOCK_N])
        out_desc.store([beyond, end, row, n * BLOCK_N], block_out)


@triton.jit
def _store_coded(
    tile, values, scales, pair, valid, column, part, width, start, num_pairs,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, CAST: tl.constexpr,
):  # fmt: skip
    """Numbers of a tile, rounded to bf16, in e4m3 with a scale for each 1 x 128 (comms/kernels/codec.py).

    `column` counts from `start`, a multiple of 128, in rows of `width`; behind `part` columns there are none. Scales of
    a block of columns stand one behind the other.
    """
    BLOCKS: tl.constexpr = BLOCK // 128
    inside = valid[:, None] & (column < part)[None, :]
    word = tl.where(inside, tile.to(tl.bfloat16).to(tl.int16, bitcast=True), 0)
    word = tl.reshape(word, [ROWS, BLOCKS, 128])
    scale = scale_byte(tl.max(absolute(word), axis=2), word.dtype)
    code = tl.reshape(encode(word, scale[:, :, None], CAST), [ROWS, BLOCK])
    tl.store(values + pair[:, None] * width + start + column[None, :], code, mask=inside)
    block = tl.min(column) // 128 + tl.arange(0, BLOCKS)
    at = scales + (start // 128 + block[None, :]).to(tl.int64) * num_pairs + pair[:, None]
    tl.store(at, scale.to(tl.uint8), mask=valid[:, None] & (block * 128 < part)[None, :])


@triton.jit(do_not_specialize=["num_pairs"])
def act_kernel(
    h, weights, offsets, values, scales, hidden, num_experts, num_pairs,
    CLAMPED: tl.constexpr, LIMIT: tl.constexpr, SLOPE: tl.constexpr, CARD: tl.constexpr, CAST: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: a block of columns of some pairs."""
    blocks = tl.cdiv(hidden, BLOCK)
    pair = (tl.program_id(0) // blocks).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    valid = pair < tl.load(offsets + num_experts - 1)
    weight = tl.load(weights + pair, mask=valid, other=0.0).to(tl.float32)[:, None]
    column = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    inside = valid[:, None] & (column < hidden)[None, :]
    at_h = pair[:, None] * (2 * hidden) + column[None, :]
    gate = tl.load(h + at_h, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(h + at_h + hidden, mask=inside, other=0.0).to(tl.float32)
    act = _activation(gate, up, CLAMPED, LIMIT, SLOPE, CARD) * weight
    _store_coded(act, values, scales, pair, valid, column, hidden, hidden, 0, num_pairs, ROWS, BLOCK, CAST)


@triton.jit(do_not_specialize=["num_pairs", "first_segment"])
def act_grad_kernel(
    da, weights, offsets, h, dh, values, scales, dots, kept, hidden, num_experts, num_pairs, first_segment,
    CLAMPED: tl.constexpr, LIMIT: tl.constexpr, SLOPE: tl.constexpr, CARD: tl.constexpr,
    CODED: tl.constexpr, CAST: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, KEEPS: tl.constexpr,
):  # fmt: skip
    """One program: every n-th few pairs. dh, <da, act>, and in the place of da the weighted activation.

    CODED: dh in e4m3, too; 128 then divides hidden.
    kept: where weights and (KEEPS) h begin in their arena.
    """
    if kept is not None:
        first_kept = tl.load(kept + 1)
        weights += first_kept
        if KEEPS:
            h += first_kept * (2 * hidden)
    start = _first_pair(offsets, first_segment)
    end = tl.load(offsets + first_segment + num_experts - 1)
    for few in range(tl.program_id(0), tl.cdiv(end - start, ROWS), tl.num_programs(0)):
        pair = start.to(tl.int64) + few * ROWS + tl.arange(0, ROWS)
        valid = pair < end
        weight = tl.load(weights + pair, mask=valid, other=0.0).to(tl.float32)[:, None]
        dot = tl.zeros([ROWS, BLOCK], dtype=tl.float32)
        for first in range(0, hidden, BLOCK):
            column = first + tl.arange(0, BLOCK)
            inside = valid[:, None] & (column < hidden)[None, :]
            at_h = pair[:, None] * (2 * hidden) + column[None, :]
            at_a = pair[:, None] * hidden + column[None, :]
            gate = tl.load(h + at_h, mask=inside, other=0.0).to(tl.float32)
            up = tl.load(h + at_h + hidden, mask=inside, other=0.0).to(tl.float32)
            d = tl.load(da + at_a, mask=inside, other=0.0).to(tl.float32)
            act, d_gate, d_up = _activation_grad(gate, up, CLAMPED, LIMIT, SLOPE, CARD)
            dot += d * act
            d *= weight
            tl.store(dh + at_h, (d * d_gate).to(dh.dtype.element_ty), mask=inside)
            tl.store(dh + at_h + hidden, (d * d_up).to(dh.dtype.element_ty), mask=inside)
            if CODED:
                d_gate, d_up, width = d * d_gate, d * d_up, 2 * hidden
                _store_coded(
                    d_gate, values, scales, pair, valid, column, hidden, width, 0, num_pairs, ROWS, BLOCK, CAST
                )
                _store_coded(
                    d_up, values, scales, pair, valid, column, hidden, width, hidden, num_pairs, ROWS, BLOCK, CAST
                )
            tl.store(da + at_a, (act * weight).to(da.dtype.element_ty), mask=inside)
        tl.store(dots + pair, tl.sum(dot, 1), mask=valid)


@triton.jit(do_not_specialize=["first_segment"])
def weight_grad_kernel(
    left_desc, right_desc, offsets, out_desc,
    left_width, right_width, num_experts, first_segment,
    PROGRAMS: tl.constexpr, CHUNKS: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """out[e] (left_width, right_width) = sum over e's pairs of left[p] right[p]^T; zero for an expert without."""
    tiles_m = tl.cdiv(left_width, BLOCK_M)
    tiles_n = tl.cdiv(right_width, BLOCK_N)
    for tile in range(tl.program_id(0), num_experts * tiles_m * tiles_n, PROGRAMS):
        expert = tile // (tiles_m * tiles_n)
        place = tile % (tiles_m * tiles_n)
        first_m = place // (GROUP * tiles_n) * GROUP
        group = tl.minimum(tiles_m - first_m, GROUP)
        m = first_m + place % (GROUP * tiles_n) % group
        n = place % (GROUP * tiles_n) // group
        total = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
        for chunk in tl.static_range(CHUNKS):
            segment = first_segment + chunk * num_experts + expert
            start = tl.load(offsets + segment - 1, mask=segment > 0, other=0)
            count = tl.load(offsets + segment) - start
            for first in range(0, count, BLOCK_K):
                # Both are zero behind the expert's last pair: what stands there may be anything.
                left_block = load_ragged(left_desc, start, count, [first, m * BLOCK_M])
                right_block = load_ragged(right_desc, start, count, [first, n * BLOCK_N])
                total = tl.dot(left_block.T, right_block, total, input_precision=PRECISION)
        block_out = tl.reshape(total.to(out_desc.dtype), [1, BLOCK_M, BLOCK_N])
        out_desc.store([expert, m * BLOCK_M, n * BLOCK_N], block_out)
