"""What the kernels for SM90 whose warps have one thing to do each share: who has which tile of a grouped product.

The registers of such a program, 168 of each of its 384 threads, are all that a multiprocessor has but 1,024: nothing
runs beside it, where a program of Triton's own leaves a third of them.

Tiles are dealt out over all experts, a program takes every n-th of them. Each partition of a program goes over the
experts by itself, in scalars: a table would have to be made by one and waited for by the others.
"""

# Kernels are written in Gluon, which has no types.
# pyright: basic, reportGeneralTypeIssues=false
# ruff: noqa: ANN001, ANN201

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def tiles_of_expert(offsets, segment, tiles_n, ROWS: gl.constexpr):
    """The segment's first pair, its number of pairs, its number of tiles of ROWS rows."""
    start = gl.load(offsets + segment - 1, mask=segment > 0, other=0)
    count = gl.load(offsets + segment) - start
    return start, count, gl.cdiv(count, ROWS) * tiles_n


@gluon.jit
def place_of_tile(tile, tiles_m, tiles_n, GROUP: gl.constexpr):
    """Where a tile is; groups of tiles of rows share the other operand's blocks in L2."""
    first_m = tile // (GROUP * tiles_n) * GROUP
    group = gl.minimum(tiles_m - first_m, GROUP)
    within = tile % (GROUP * tiles_n)
    return first_m + within % group, within // group


@gluon.jit
def next_expert(first, tiles, PROGRAMS: gl.constexpr):
    """The program's first tile of the next expert, counted from that expert's own first."""
    return first + gl.cdiv(gl.maximum(tiles - first, 0), PROGRAMS) * PROGRAMS - tiles


@gluon.jit
def to_bf16(x):
    """Two numbers by one instruction. Numbers that are used in bf16 and again in fp32 would be rounded one by one."""
    return gl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [x], dtype=gl.bfloat16, is_pure=True, pack=2
    )
