"""3x3 convolutions with stride and padding 1 as Triton kernels, for tensors of few channels in channels-last memory.

cuDNN's kernels are made for 64 channels and more: at the 16 to 64 of CIFAR ResNets most of a tile is padding. These
read each pixel nine times, from the cache, multiply in the type of the input and add in float32. The order of all sums
is fixed: the same inputs give the same bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

CONV = {16: (256, 4), 32: (64, 4), 64: (64, 4)}
"""Channels (the wider of input and output) -> pixels of a tile, and warps that compute it."""

WEIGHT = {16: (64, 4, 512), 32: (64, 8, 256), 64: (64, 4, 256)}
"""The same for a weight's gradient, and the pixels whose share of it one program adds up."""

WHOLE = (16, 32)
"""Channels for which one program computes all nine taps of a weight's gradient; else one row of them each."""


@triton.jit
def _conv(
    x, w, y, pixels, height: tl.constexpr, width: tl.constexpr,
    inputs: tl.constexpr, outputs: tl.constexpr, flip: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """y[p, :] = sum over taps t of x[p + t, :] w[t]; flip: with w's inputs and outputs, and both its axes, swapped."""
    p = tl.program_id(0) * block + tl.arange(0, block)
    ci = tl.arange(0, inputs)
    co = tl.arange(0, outputs)
    column = p % width
    row = (p // width) % height
    total = tl.zeros((block, outputs), tl.float32)
    for tap in tl.static_range(9):
        i = tap // 3 - 1
        j = tap % 3 - 1
        inside = (p < pixels) & (row + i >= 0) & (row + i < height) & (column + j >= 0) & (column + j < width)
        at = (p + i * width + j)[:, None] * inputs + ci[None, :]
        taken = tl.load(x + at, mask=inside[:, None], other=0.0)
        if flip:
            of = ci[:, None] * (9 * outputs) + (8 - tap) * outputs + co[None, :]
        else:
            of = co[None, :] * (9 * inputs) + tap * inputs + ci[:, None]
        total = tl.dot(taken, tl.load(w + of).to(x.dtype.element_ty), total)
    tl.store(y + p[:, None] * outputs + co[None, :], total.to(y.dtype.element_ty), mask=(p < pixels)[:, None])


@triton.jit
def _weight_whole(
    x, dy, parts, pixels, height: tl.constexpr, width: tl.constexpr,
    inputs: tl.constexpr, outputs: tl.constexpr, block: tl.constexpr, span: tl.constexpr,
):  # fmt: skip
    """As _weight, all rows of taps; the three pixels of a row, which lie side by side in memory, in one product."""
    chunk = tl.program_id(0)
    j = tl.arange(0, 4 * inputs)  # a power of two: the last quarter is left empty
    tap = j // inputs
    co = tl.arange(0, outputs)
    above = tl.zeros((4 * inputs, outputs), tl.float32)
    same = tl.zeros((4 * inputs, outputs), tl.float32)
    below = tl.zeros((4 * inputs, outputs), tl.float32)
    for start in range(0, span, block):
        p = chunk * span + start + tl.arange(0, block)
        column = (p % width)[:, None] + tap[None, :] - 1
        row = (p // width) % height
        here = (p < pixels)[:, None] & (column >= 0) & (column < width) & (tap < 3)[None, :]
        slope = tl.load(dy + p[:, None] * outputs + co[None, :], mask=(p < pixels)[:, None], other=0.0)
        at = x + (p - 1)[:, None] * inputs + j[None, :]
        taken = tl.load(at - width * inputs, mask=here & (row > 0)[:, None], other=0.0)
        above = tl.dot(tl.trans(taken), slope, above)
        same = tl.dot(tl.trans(tl.load(at, mask=here, other=0.0)), slope, same)
        taken = tl.load(at + width * inputs, mask=here & (row < height - 1)[:, None], other=0.0)
        below = tl.dot(tl.trans(taken), slope, below)
    to = parts + chunk * (9 * outputs * inputs) + co[None, :] * (9 * inputs) + j[:, None]
    filled = (tap < 3)[:, None] & (co >= 0)[None, :]
    tl.store(to, above, mask=filled)
    tl.store(to + 3 * inputs, same, mask=filled)
    tl.store(to + 6 * inputs, below, mask=filled)


@triton.jit
def _weight(
    x, dy, parts, pixels, height: tl.constexpr, width: tl.constexpr,
    inputs: tl.constexpr, outputs: tl.constexpr, block: tl.constexpr, span: tl.constexpr,
):  # fmt: skip
    """parts[chunk, co, t, ci] = sum over the pixels p of a chunk of dy[p, co] x[p + t, ci], for one row of taps t."""
    chunk = tl.program_id(0)
    i = tl.program_id(1) - 1
    ci = tl.arange(0, inputs)
    co = tl.arange(0, outputs)
    left = tl.zeros((outputs, inputs), tl.float32)
    middle = tl.zeros((outputs, inputs), tl.float32)
    right = tl.zeros((outputs, inputs), tl.float32)
    for start in range(0, span, block):
        p = chunk * span + start + tl.arange(0, block)
        column = p % width
        row = (p // width) % height
        there = (p < pixels) & (row + i >= 0) & (row + i < height)
        slope = tl.trans(tl.load(dy + p[:, None] * outputs + co[None, :], mask=there[:, None], other=0.0))
        at = (p + i * width)[:, None] * inputs + ci[None, :]
        left = tl.dot(slope, tl.load(x + at - inputs, mask=(there & (column > 0))[:, None], other=0.0), left)
        middle = tl.dot(slope, tl.load(x + at, mask=there[:, None], other=0.0), middle)
        right = tl.dot(slope, tl.load(x + at + inputs, mask=(there & (column < width - 1))[:, None], other=0.0), right)
    to = parts + chunk * (9 * outputs * inputs) + co[:, None] * (9 * inputs) + (i + 1) * (3 * inputs) + ci[None, :]
    tl.store(to, left)
    tl.store(to + inputs, middle)
    tl.store(to + 2 * inputs, right)


@triton.jit
def _sum(parts, out, count, size, block: tl.constexpr, rows: tl.constexpr):
    """out[i] = sum over parts of parts[part, i]."""
    at = tl.program_id(0) * block + tl.arange(0, block)
    total = tl.zeros((rows, block), tl.float32)
    for start in range(0, count, rows):
        part = start + tl.arange(0, rows)
        here = (part < count)[:, None] & (at < size)[None, :]
        total += tl.load(parts + part[:, None] * size + at[None, :], mask=here, other=0.0)
    tl.store(out + at, tl.sum(total, 0), mask=at < size)


def largest_index(pixels: int, outputs: int, inputs: int) -> int:
    """How far the kernels count, for so many pixels: in the tensors, and in the parts of a weight's gradient.

    >>> largest_index(128 * 32 * 32, 16, 16)
    2097152
    """
    widest = max(outputs, inputs)
    parts = -(-pixels // WEIGHT[widest][2]) if widest in WEIGHT else 0
    return max(pixels * widest, parts * 9 * outputs * inputs)


def convolve(x: Tensor, w: Tensor, *, flip: bool = False) -> Tensor:
    """conv2d(x, w, padding=1), or with `flip` its gradient: conv_transpose2d(x, w, padding=1)."""
    x, w = _channels_last(x), _channels_last(w)
    n, inputs, height, width = x.shape
    outputs = w.shape[1] if flip else w.shape[0]
    y = torch.empty((n, outputs, height, width), dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
    pixels = n * height * width
    block, warps = CONV[max(inputs, outputs)]
    sizes = {"inputs": inputs, "outputs": outputs, "block": block, "num_warps": warps}
    _conv[(triton.cdiv(pixels, block),)](x, w, y, pixels, height, width, flip=flip, **sizes)
    return y


def weight_gradient(x: Tensor, dy: Tensor) -> Tensor:
    """dw[o, i, t] = sum over pixels p of dy[p, o] x[p + t, i], in float32."""
    x, dy = _channels_last(x), _channels_last(dy)
    n, inputs, height, width = x.shape
    outputs = dy.shape[1]
    pixels = n * height * width
    block, warps, span = WEIGHT[max(inputs, outputs)]
    chunks = triton.cdiv(pixels, span)
    dw = torch.empty((outputs, inputs, 3, 3), device=x.device, memory_format=torch.channels_last)
    parts = torch.empty((chunks, dw.numel()), device=x.device)
    sizes = {"inputs": inputs, "outputs": outputs, "block": block, "span": span, "num_warps": warps}
    if max(inputs, outputs) in WHOLE:
        _weight_whole[(chunks,)](x, dy, parts, pixels, height, width, **sizes)
    else:
        _weight[(chunks, 3)](x, dy, parts, pixels, height, width, **sizes)
    _sum[(triton.cdiv(dw.numel(), 32),)](parts, dw, chunks, dw.numel(), block=32, rows=32, num_warps=4)
    return dw


def _channels_last(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last)
