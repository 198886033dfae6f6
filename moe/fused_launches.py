"""Launches of the fused expert kernels (moe/kernels/fused_experts.py) into memory that the caller has made.

    ends_S    int32; end of each expert's pairs, chunk by chunk of the rows
    chunk     whose pairs a launch works on: one descriptor and one table serve all of them
    spare     multiprocessors to leave to an exchange that travels meanwhile
    kept      the base of rows, tables and h, if they are in an arena (comms/saved_arena.py)

With all rows in one chunk, a part of the experts is launched like a chunk: with that part of the weights.

The kernels are persistent and deal their tiles out beforehand: a program that finds no multiprocessor starts when the
others end. So beside an exchange there must be fewer of them.

Shape suffixes: R rows, P pairs sorted by chunk and expert, D model dim, F hidden units of one expert, H = 2 F,
E experts, C chunks, S = C * E, I and O in- and out-features.
"""

# Kernels are written in Triton's language, which has no types: nor have the arguments of a launch.
# pyright: basic, reportArgumentType=false, reportCallIssue=false

import functools
import os
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import triton
from torch import Tensor
from triton.tools.ragged_tma import create_ragged_descriptor
from triton.tools.tensor_descriptor import TensorDescriptor

from comms.kernels.e4m3 import can_cast
from comms.put_and_take import num_processors
from moe.kernels import rows_sm90, up_sm90
from moe.kernels.fused_experts import act_grad_kernel, rows_kernel, up_kernel, weight_grad_kernel
from moe.kernels.pair_rows import Part, launch_expand
from moe.reference import CLAMP_LIMIT, CLAMP_SLOPE
from moe.tiles import Tile, tile_for

# Pairs and columns of one program of the activation's gradient, and its warps.
ACT_ROWS, ACT_COLUMNS, ACT_WARPS = 8, 256, 4
# The same beside a product, which leaves it 19,700 registers of a multiprocessor: 9 programs, with 27 KB on their way,
# where one program of 8 pairs would fit. And such programs per multiprocessor: several after each other, since products
# that end leave room for more; but not one for every few pairs of all experts, of which a part has only some.
BESIDE_ROWS, BESIDE_WARPS, BESIDE_PROGRAMS = 2, 1, 64
# Parts of the experts that take turns with what runs beside products.
EXPERT_PARTS = 2
# Numbers that a part's product makes at least: 8 tiles per multiprocessor.
LEAST_OF_PART = 8 * 132 * 128 * 256


def launch_up(
    rows_RD: Tensor, rows_P: Tensor, weights_P: Tensor, w_E2FD: Tensor, b_E2F: Tensor | None, ends_S: Tensor,
    h_PH: Tensor, a_PF: Tensor, activation: str, chunk: int = 0, spare: int = 0, kept: Tensor | None = None,
    keeps_hidden: bool = False,
) -> None:  # fmt: skip
    """h[p] = W[e] x[rows[p]] + b[e], gate first, and a[p] = w[p] * act(h[p]).

    Args:
        keeps_hidden: if there is an arena, h is in it, too.
    """
    E, _, F, D = w_E2FD.shape
    tile = tile_for("up", (E, D, F))
    if rows_P.shape[0] == 0:
        return
    # Rows come 16 bytes at a time.
    in_units = D % up_sm90.DEPTH == 0 and F % 8 == 0 and rows_RD.data_ptr() % 16 == 0
    if tile.specialized and kept is None and in_units and _on_sm90(rows_RD):
        made, programs = (h_PH, a_PF, activation_of(activation, rows_RD)), num_programs(rows_RD, spare)[0]
        given = rows_RD, rows_P, weights_P, w_E2FD, b_E2F, ends_S
        up_sm90.launch_up(*given, *made, tile.group, programs, chunk * E)
        return
    w_desc = TensorDescriptor.from_tensor(w_E2FD.view(E * 2, F, D), [2, tile.n, tile.k])
    up_kernel[num_programs(rows_RD, spare)](
        rows_RD, rows_P, weights_P, w_desc, b_E2F, ends_S, h_PH, a_PF, kept, D, F, E, chunk * E,
        EXPERTS=triton.next_power_of_2(E), HAS_BIAS=b_E2F is not None, EVEN_K=D % tile.k == 0, PARTS=tile.parts,
        **activation_of(activation, rows_RD), **_launch(rows_RD, tile, spare),
        KEEPS=keeps_hidden and kept is not None,
    )  # fmt: skip


def launch_rows(
    kernel: str, a_PI: Tensor, w_E: Tensor, ends_S: Tensor, out_PO: Tensor, transposed: bool,
    bias_EO: Tensor | None = None, weights_P: Tensor | None = None, chunk: int = 0, spare: int = 0,
    num_experts: int | None = None,
) -> None:  # fmt: skip
    """w[e] a[p] with w (E, O, I); or, transposed, w[e]^T a[p] with w (E, I, O). `kernel` is its name among tiles.

    Args:
        num_experts: all of them, if w has a part: it takes the tile that was chosen for all.
    """
    (num_pairs, inner), width, E = a_PI.shape, out_PO.shape[1], w_E.shape[0]
    tile = tile_for(kernel, (num_experts or E, inner, width))
    if num_pairs == 0:
        return
    if tile.specialized and not transposed and bias_EO is None and _on_sm90(a_PI):
        rows_sm90.launch_rows(a_PI, w_E, ends_S, out_PO, tile.group, num_programs(a_PI, spare)[0], chunk * E)
        return
    a_desc = TensorDescriptor.from_tensor(a_PI, [tile.m, tile.k])
    block = [tile.k, tile.n] if transposed else [tile.n, tile.k]
    b_desc = TensorDescriptor.from_tensor(w_E.view(-1, w_E.shape[2]), block)
    out_desc = create_ragged_descriptor(out_PO, [tile.m, tile.n])
    rows_kernel[num_programs(a_PI, spare)](
        a_desc, b_desc, bias_EO, weights_P, ends_S, out_desc, inner, width, E, chunk * E,
        EXPERTS=triton.next_power_of_2(E), HAS_BIAS=bias_EO is not None, TRANSPOSED=transposed,
        EVEN_K=inner % tile.k == 0, **_launch(a_PI, tile, spare),
    )  # fmt: skip


def launch_act_grad(
    da_PF: Tensor, h_PH: Tensor, weights_P: Tensor, ends_S: Tensor, dh_PH: Tensor, dots_P: Tensor, activation: str,
    num_experts: int, coded: tuple[Tensor, Tensor] | None = None, chunk: int = 0, num_pairs: int | None = None,
    kept: Tensor | None = None, keeps_hidden: bool = False, beside: bool = False,
) -> None:  # fmt: skip
    """dh and <da, act(h)>; in the place of da stands w[p] * act(h[p]). Coded: dh in e4m3 and its scales, too.

    Args:
        num_pairs: the most pairs of the chunk; None: all.
        keeps_hidden: if there is an arena, h is in it, too.
        beside: in small programs, which find room beside a product's.
    """
    P, F = da_PF.shape
    values, scales = (None, None) if coded is None else coded
    block = ACT_COLUMNS if coded else min(ACT_COLUMNS, triton.next_power_of_2(F))
    num_pairs = P if num_pairs is None else num_pairs
    rows, warps = (BESIDE_ROWS, BESIDE_WARPS) if beside else (ACT_ROWS, ACT_WARPS)
    programs = triton.cdiv(num_pairs, rows)
    if beside:
        # How many pairs the experts of a part have, the device alone knows: programs for all would find none in part.
        programs = min(programs, BESIDE_PROGRAMS * num_programs(da_PF)[0])
    if num_pairs:
        act_grad_kernel[(programs,)](
            da_PF, weights_P, ends_S, h_PH, dh_PH, values, scales, dots_P, kept, F, num_experts, P, chunk * num_experts,
            ROWS=rows, BLOCK=block, CODED=coded is not None, CAST=can_cast(h_PH), **activation_of(activation, h_PH),
            KEEPS=keeps_hidden and kept is not None, num_warps=warps,
        )  # fmt: skip


def launch_weight_grad(
    left_PM: Tensor, right_PN: Tensor, ends_S: Tensor, out_EMN: Tensor, spare: int = 0,
    chunk: int | None = None, num_experts: int | None = None,
) -> None:  # fmt: skip
    """The sum over each expert's pairs of left[p] right[p]^T; zero for an expert without pairs.

    Args:
        chunk: whose pairs; None: those of all chunks.
        num_experts: as launch_rows has it.
    """
    E, M, N = out_EMN.shape
    tile = tile_for("weight_grad", (num_experts or E, M, N))
    if left_PM.shape[0] == 0:
        out_EMN.zero_()
        return
    segment, chunks = (chunk or 0) * E, ends_S.shape[0] // E if chunk is None else 1
    left_desc = create_ragged_descriptor(left_PM, [tile.k, tile.m])
    right_desc = create_ragged_descriptor(right_PN, [tile.k, tile.n])
    out_desc = TensorDescriptor.from_tensor(out_EMN, [1, tile.m, tile.n])
    weight_grad_kernel[num_programs(left_PM, spare)](
        left_desc, right_desc, ends_S, out_desc, M, N, E, segment, CHUNKS=chunks, **_launch(left_PM, tile, spare)
    )


def launch_down_backward(
    dout_RD: Tensor, rows_RD: Tensor, slots_RK: Tensor, weights_P: Tensor, w_EDF: Tensor, ends_E: Tensor, h_PH: Tensor,
    activation: str, *,
    dout_PD: Tensor, rows_PD: Tensor, a_PF: Tensor, dh_PH: Tensor, dots_P: Tensor, dw_EDF: Tensor,
) -> None:  # fmt: skip
    """What backward has to do with the down map, and the copies of rows that it needs afterwards.

    dout[p] is that of p's row, da[p] = W[e]^T dout[p], dh and dots what launch_act_grad makes of it, and then dW. The
    activation's gradient moves six numbers for each of a's and multiplies none. So it is formed by parts of the
    experts, here two, each beside a product of another:

        products               da of 0    da of 1    dW of 0    dW of 1
        others     dout of 0      1       act of 0   act of 1   rows[p]
    """
    E = w_EDF.shape[0]
    num_parts = parts_of(E, a_PF)
    part = E // num_parts

    def expand(n: int) -> None:
        launch_expand(dout_RD, slots_RK, dout_PD, Part(ends_E, n * part, part))

    def product(n: int) -> None:
        launch_rows("act_grad", dout_PD, w_EDF[n * part :][:part], ends_E, a_PF, True, chunk=n, num_experts=E)

    def activation_grad(n: int) -> None:
        given = a_PF, h_PH, weights_P, ends_E, dh_PH, dots_P, activation, part
        launch_act_grad(*given, chunk=n, beside=num_parts > 1)

    def weight_grad(n: int) -> None:
        launch_weight_grad(dout_PD, a_PF, ends_E, dw_EDF[n * part :][:part], chunk=n, num_experts=E)

    expand(0)
    with Lanes(a_PF) as lanes:
        formed = [lanes.product(partial(product, 0))]
        for n in range(1, num_parts):
            copied = lanes.beside(partial(expand, n))
            formed.append(lanes.product(partial(product, n), copied))
        passed = [lanes.beside(partial(activation_grad, n), formed[n]) for n in range(num_parts)]
        for n in range(num_parts):
            lanes.product(partial(weight_grad, n), passed[n])
        lanes.beside(partial(launch_expand, rows_RD, slots_RK, rows_PD))


def parts_of(num_experts: int, made: Tensor) -> int:
    """In how many parts experts take turns: in one where the tiles of a part would be too few."""
    enough = num_experts % EXPERT_PARTS == 0 and made.numel() >= EXPERT_PARTS * LEAST_OF_PART
    return EXPERT_PARTS if enough else 1


# Where a launch on a lane has ended; None without a GPU, where launches are done when they return.
Event = torch.cuda.Event | None


class Lanes:
    """Two streams for the time of a `with`: what copies rows takes memory's time while products take the tensor cores'.

    A product's one program per multiprocessor leaves a third of the registers, and what copies needs no shared memory:
    both find room. (Programs of specialised warps leave none: moe/kernels/warps_sm90.py.) Launches must not allocate:
    memory of another stream would come back too early. They are given in an order that is right without streams, too.
    """

    def __init__(self, like: Tensor) -> None:
        self.streams: tuple[torch.cuda.Stream, torch.cuda.Stream] | None = None
        if like.is_cuda:
            self.streams = torch.cuda.current_stream(like.device), _product_stream(like.device)

    def __enter__(self) -> "Lanes":
        if self.streams:
            current, products = self.streams
            products.wait_stream(current)
        return self

    def __exit__(self, *error: object) -> None:
        if self.streams:
            current, products = self.streams
            current.wait_stream(products)

    def beside(self, launch: Callable[[], None], after: Event = None) -> Event:
        """On the stream that was current, after what is there and `after`."""
        return self._launch(0, launch, after)

    def product(self, launch: Callable[[], None], after: Event = None) -> Event:
        """On the stream of products, after those before and `after`."""
        return self._launch(1, launch, after)

    def _launch(self, lane: int, launch: Callable[[], None], after: Event) -> Event:
        if not self.streams:
            launch()
            return None
        stream, ended = self.streams[lane], torch.cuda.Event()
        if after is not None:
            stream.wait_event(after)
        with torch.cuda.stream(stream):
            launch()
        ended.record(stream)
        return ended


@functools.cache
def _product_stream(device: torch.device) -> torch.cuda.Stream:
    """Before others: a product's programs, one per multiprocessor, must not wait until many small ones are through."""
    return torch.cuda.Stream(device, priority=-1)


def num_programs(tensor: Tensor, spare: int = 0) -> tuple[int]:
    """One program per multiprocessor that is not spared; a few under the interpreter."""
    return (max(num_processors(tensor.device) - spare, 1) if tensor.is_cuda else 3,)


def _on_sm90(tensor: Tensor) -> bool:
    """Whether kernels for SM90 can take it."""
    return _on_card(tensor) and torch.cuda.get_device_capability(tensor.device)[0] == 9


def _on_card(tensor: Tensor) -> bool:
    """Whether kernels may use a card's own instructions, which are for bf16: Triton's interpreter knows none."""
    return tensor.is_cuda and tensor.dtype == torch.bfloat16 and os.environ.get("TRITON_INTERPRET") != "1"


def activation_of(name: str, like: Tensor) -> dict[str, Any]:
    """What the kernels know of the activation."""
    clamped = name == "clamped_swiglu"
    return {"CLAMPED": clamped, "LIMIT": CLAMP_LIMIT, "SLOPE": CLAMP_SLOPE, "CARD": _on_card(like)}


def empty_coded(like_PX: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Room for rows of e4m3 (P, width) and their scales for 1 x 128 (P, ceil(width / 128)), a view: those of a block
    of columns one behind the other, as a step of a product along K reads them."""
    P = like_PX.shape[0]
    values = like_PX.new_empty(P, width, dtype=torch.float8_e4m3fn)
    return values, like_PX.new_empty(-(-width // 128), P, dtype=torch.uint8).t()


def _launch(tensor: Tensor, tile: Tile, spare: int) -> dict[str, Any]:
    return {
        "BLOCK_M": tile.m,
        "BLOCK_N": tile.n,
        "BLOCK_K": tile.k,
        "GROUP": tile.group,
        # Of products of fp32; others are exact anyway.
        "PRECISION": "ieee",
        "PROGRAMS": num_programs(tensor, spare)[0],
        "num_warps": tile.warps,
        "num_stages": tile.stages,
    }
