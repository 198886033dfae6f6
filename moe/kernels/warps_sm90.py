"""What the kernels for SM90 whose warps have one thing to do each share.

    host          layouts and descriptors of 16-bit blocks
    tiles         who has which tile of a grouped product
    the ring      barriers: a stage's blocks have come, both warpgroups are done with them
    products      the steps of a tile, and the way of its results

One warp or warpgroup brings blocks of both operands into a ring in shared memory, two warpgroups multiply, 64 x 256 of
a tile each. They wait for the ring alone: a step takes a third of the instructions that a program of Triton's own
takes, in which all warps bring blocks and wait for each other five times. The sums are the same in the same order.

A kernel's `how` is a tuple of what is known when it is compiled: programs, stages of the ring, tiles of rows next to
each other in time.

The registers of such a program, 168 of each of its 384 threads, are all that a multiprocessor has but 1,024: nothing
runs beside it, where a program of Triton's own leaves a third of them.

Tiles are dealt out over all experts, a program takes every n-th of them. Each partition of a program goes over the
experts by itself, in scalars: a table would have to be made by one and waited for by the others.
"""

# Kernels are written in Gluon, which has no types.
# pyright: basic, reportGeneralTypeIssues=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportAssignmentType=false, reportIndexIssue=false, reportOperatorIssue=false
# ruff: noqa: ANN001, ANN201

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
from triton.tools.ragged_tma import create_ragged_descriptor

# A step along K, and how many are on their way.
DEPTH, STAGES = 64, 4
# Columns of a tile that go out at once: lines of 128 bytes.
OUT_COLUMNS = 64


# ---- host


def swizzled(rank: int) -> gl.NVMMASharedLayout:
    """Of blocks of 16-bit numbers whose lines are 128 bytes, or several times that."""
    return gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=rank)


SWIZZLED = gl.constexpr(swizzled(2))


def ragged(x_PX: Tensor, block: list[int]) -> TensorDescriptor:
    """As triton.tools.ragged_tma has it, for Gluon."""
    desc = create_ragged_descriptor(x_PX, block)
    return TensorDescriptor(desc.base, desc.shape, desc.strides, desc.block_shape, swizzled(2 + len(block)))


# ---- tiles


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
    """The program's first tile of the next expert, counted from that expert's own first.

    It is the lower bound of no loop: what a loop hands on and only bounds of loops within it use, Triton (3.6, 3.7)
    takes for unused, and each turn begins with the first one's (ForOpDeadArgElimination).
    """
    return first + gl.cdiv(gl.maximum(tiles - first, 0), PROGRAMS) * PROGRAMS - tiles


# ---- the ring


@gluon.jit
def signals(STAGES: gl.constexpr, COMING: gl.constexpr):
    """Of each stage: COMING have brought its blocks, both warpgroups are done with them."""
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=COMING)
        mbarrier.init(free.index(stage), count=2)
    fence_async_shared()
    return ready, free


# ---- products


@gluon.jit
def rows_times_weights(half: gl.constexpr, ring, steps, step, STAGES: gl.constexpr, FENCED: gl.constexpr):
    """A warpgroup's 64 x 256 sums over `steps` steps, the first of them the program's `step`-th.

    Args:
        FENCED: rows were written by threads.
    """
    mma: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 256, 16])
    a_blocks, b_blocks, ready, free = ring
    total = gl.zeros([64, 256], gl.float32, mma)
    for k in range(steps):
        stage = step % STAGES
        mbarrier.wait(ready.index(stage), (step // STAGES) & 1)
        if FENCED:
            # Products see what threads have written after a fence.
            fence_async_shared()
        b = b_blocks.index(stage).reshape([256, 64]).permute((1, 0))
        total = warpgroup_mma(a_blocks.index(2 * stage + half), b, total, is_async=True)
        total = warpgroup_mma_wait(1, deps=[total])
        # While a step's product runs, the one before has ended: its blocks are free, if it was one of this tile.
        mbarrier.arrive(free.index((step + STAGES - 1) % STAGES), count=1, pred=k > 0)
        step += 1
    total = warpgroup_mma_wait(0, deps=[total])
    mbarrier.arrive(free.index((step + STAGES - 1) % STAGES), count=1)
    return total


@gluon.jit
def staging_of(dtype: gl.constexpr):
    """Where each warpgroup puts what goes out."""
    return (
        gl.allocate_shared_memory(dtype, [2, 64, 64], SWIZZLED),
        gl.allocate_shared_memory(dtype, [2, 64, 64], SWIZZLED),
    )


@gluon.jit
def send(block, buffers, desc, shape: gl.constexpr, lead, column):
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
def to_bf16(x):
    """Two numbers by one instruction. Numbers that are used in bf16 and again in fp32 would be rounded one by one."""
    return gl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [x], dtype=gl.bfloat16, is_pure=True, pack=2
    )
