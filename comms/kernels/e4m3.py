"""Parts of kernels that code and decode e4m3: words of bf16 or fp32 in, bytes out, and back.

A word is an element's bits as an integer of its size. What the bytes are, codec.py says. They come about in two ways:

    CAST        the card's own conversion: after one multiplication each, an instruction for two values
    otherwise   integers, which double a kernel's instructions: for cards that cannot cast, and for Triton's
                interpreter, whose cast is wrong

Why the cast gives the same bytes: its argument x * 2^(127 - scale) is exact wherever it matters, so the cast is the
only rounding. The product of an fp32 number and a power of two is inexact only below 2^-126, and what is below 2^-10
becomes a zero of x's sign anyway. RCEIL keeps finite products at 448 or less, so nothing saturates but Inf, which is to
become 448; all of a block with a NaN are multiplied by NaN, and the cast's only NaN is 0x7F.

In integers, values are rounded to nearest even on their bits. e4m3 is fp32 shifted by 20 bits once y is multiplied by
2^-120: subnormals of one are subnormals of the other. fp32 inputs first fold their low 12 bits into one sticky bit;
else the product's rounding to an fp32 subnormal would come before, and on top of, the rounding to e4m3.
"""

# Kernels are written in Triton's language, which has no types.
# pyright: basic
# ruff: noqa: ANN001, ANN201, ANN202

import os

import torch
import triton
import triton.language as tl
from torch import Tensor


def can_cast(x: Tensor) -> bool:
    """CAST for kernels on x's device: e4m3 came with compute capability 8.9."""
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    return x.is_cuda and not interpreted and torch.cuda.get_device_capability(x.device) >= (8, 9)


@triton.jit
def absolute(word):
    """Words ordered as the absolute values are, NaN above Inf; their maximum is taken in pairs if they are bf16."""
    if word.dtype == tl.int16:
        return word & 0x7FFF
    else:
        return word & 0x7FFFFFFF


@triton.jit
def fp32_bits(word):
    """The same number's fp32 bits."""
    if word.dtype == tl.int16:
        return word.to(tl.int32) << 16
    else:
        return word


@triton.jit
def scale_byte(amax, WORD: tl.constexpr):
    """The scale of a block whose largest absolute value is this word, both as int32, which `tl.max` makes of words."""
    if WORD == tl.int16:
        amax = amax << 16
    scale = tl.maximum(((amax + 0x1FFFFF) >> 23) - 8, 0)
    return tl.where(amax >= 0x7F800000, 254 + (amax > 0x7F800000).to(tl.int32), scale)


@triton.jit
def encode(word, scale, CAST: tl.constexpr):
    """e4m3 codes of words over 2^(scale - 127); scale broadcasts."""
    factor = (254 - scale) << 23
    # One bit makes 2^-127 of the 0 for Inf (254), and NaN of the -Inf for NaN (255).
    factor = tl.where(scale >= 254, factor | 0x00400000, tl.where(scale == 0, 0, factor))
    factor = factor.to(tl.float32, bitcast=True)
    if CAST:
        if word.dtype == tl.int16:
            x = word.to(tl.bfloat16, bitcast=True).to(tl.float32)
        else:
            x = word.to(tl.float32, bitcast=True)
        return (x * factor).to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        return _encode_in_integers(word, factor, scale)


@triton.jit
def _encode_in_integers(word, factor, scale):
    limit = tl.where(scale == 255, 0x07F00000, 0x07E00000)
    sign = tl.where(scale == 255, 0, -0x80000000)
    bits = fp32_bits(word)
    if word.dtype == tl.int16:
        x = bits.to(tl.float32, bitcast=True)
    else:
        x = ((bits | ((bits & 0xFFF) + 0xFFF)) & -4096).to(tl.float32, bitcast=True)
    # 2^-120, in two steps: the product of both factors is no fp32 number.
    y = (x * factor) * 7.52316384526264e-37
    magnitude = tl.minimum(y.to(tl.int32, bitcast=True) & 0x7FFFFFFF, limit)
    # The code in the topmost byte: taking that byte is part of packing bytes, where a shift would cost an instruction.
    top = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) << 4) | (bits & sign)
    return (top.to(tl.uint32, bitcast=True) >> 24).to(tl.uint8)


@triton.jit
def decode(code, scale, WORD: tl.constexpr, CAST: tl.constexpr):
    """Words (int16: bf16, rounded to nearest even; int32: fp32) of e4m3 codes times 2^(scale - 127); NaN is 0x7FC0."""
    scale = scale.to(tl.int32)
    factor = tl.where(scale == 0, 0x00400000, scale << 23)
    if CAST:
        factor = tl.where(scale == 255, 0x7FC00000, factor).to(tl.float32, bitcast=True)
        x = code.to(tl.float8e4nv, bitcast=True).to(tl.float32) * factor
        # The card's NaN is the largest of positive words; as integers, minimums of bf16 are taken in pairs.
        if WORD == tl.int16:
            return tl.minimum(x.to(tl.bfloat16).to(tl.int16, bitcast=True), 0x7FC0)
        else:
            return tl.minimum(x.to(tl.int32, bitcast=True), 0x7FC00000)
    else:
        bits = _decode_in_integers(code.to(tl.int32), factor.to(tl.float32, bitcast=True), scale)
        if WORD == tl.int16:
            return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).to(tl.int16)
        else:
            return bits


@triton.jit
def _decode_in_integers(code, factor, scale):
    value = (((code & 0x7F) << 20) | ((code & 0x80) << 24)).to(tl.float32, bitcast=True) * 1.329227995784916e36
    bits = (value * factor).to(tl.int32, bitcast=True)
    return tl.where(((code & 0x7F) == 0x7F) | (scale == 255), 0x7FC00000, bits)


@triton.jit
def decode_fp32(code, scale, WORD: tl.constexpr, CAST: tl.constexpr):
    """fp32 numbers of what `decode` gives, to be added up: a zero's sign and a NaN's bits make no difference there.

    With CAST the power of two comes in two factors, and fp16 takes the first, two codes at a time. It rounds as words
    do: between multiples of 2^-24 and from 2^16 on it has no numbers, and the second factor makes these 2^-133, bf16's
    last bit, and 2^128. What is left is exact, so that the sum may be fused with it. NaN is known by its code alone.
    """
    if CAST:
        LEAST: tl.constexpr = 18 if WORD == tl.int16 else 1  # pyright: ignore
        scale = scale.to(tl.int32)
        second = tl.minimum(tl.maximum(scale, LEAST), 239)
        first = ((scale - second + 127) << 23).to(tl.float32, bitcast=True).to(tl.float16)
        x = code.to(tl.float8e4nv, bitcast=True).to(tl.float16) * first
        return x.to(tl.float32) * (second << 23).to(tl.float32, bitcast=True)
    else:
        return fp32_bits(decode(code, scale, WORD, CAST)).to(tl.float32, bitcast=True)
