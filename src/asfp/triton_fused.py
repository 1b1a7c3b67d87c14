"""Convolutions with bias, residual and ReLU, and these three alone, as Triton kernels; all in channels-last memory.

A convolution of a large map waits for memory: what it adds and clips costs nothing while the result is at hand. cuDNN's
kernels are made for 128 filters and multiples of it; these come in narrower tiles too, for what pruning leaves.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
import triton
import triton.language as tl
from torch import Tensor

Tile = tuple[int, int, int, int, int]
"""Pixels, outputs and inputs of a tile, warps, and stages of loading ahead."""

TILES: tuple[Tile, ...] = (
    (128, 32, 32, 4, 3),
    (128, 32, 64, 4, 4),
    (128, 64, 32, 4, 3),
    (64, 64, 64, 4, 4),
    (128, 64, 64, 4, 4),
    (256, 64, 64, 8, 3),
    (64, 128, 32, 4, 3),
    (128, 128, 32, 8, 3),
    (64, 128, 64, 4, 4),
    (128, 128, 64, 8, 3),
    (128, 256, 64, 8, 3),
)

CACHED: tuple[Tile, ...] = (
    (128, 32, 32, 4, 1),
    (128, 32, 64, 4, 1),
    (64, 64, 64, 4, 1),
    (128, 64, 64, 4, 1),
    (128, 128, 64, 8, 1),
)
"""For windows: what is not loaded ahead comes through the first cache, where the taps find each other's pixels."""


@triton.jit
def _conv(
    x, w, b, z, y, pixels, inputs, outputs, height, width, tall, wide,
    taps_y: tl.constexpr, taps_x: tl.constexpr, stride_y: tl.constexpr, stride_x: tl.constexpr,
    pad_y: tl.constexpr, pad_x: tl.constexpr, residual: tl.constexpr, relu: tl.constexpr, whole: tl.constexpr,
    rows: tl.constexpr, columns: tl.constexpr, depth: tl.constexpr, early: tl.constexpr,
):  # fmt: skip
    """y[p, o] = relu(sum over taps t and inputs i of x[p + t, i] w[o, t, i] + b[o] + z[p, o]).

    early: the residual is asked for before the products are computed, and arrives meanwhile.
    """
    pointwise: tl.constexpr = taps_y * taps_x * stride_y * stride_x == 1 and pad_y + pad_x == 0
    blocks = tl.cdiv(outputs, columns)
    p = tl.program_id(0) // blocks * rows + tl.arange(0, rows)
    o = tl.program_id(0) % blocks * columns + tl.arange(0, columns)
    i = tl.arange(0, depth)
    here = (p < pixels)[:, None]
    there = (o < outputs)[None, :]
    to = p[:, None] * outputs + o[None, :]
    if residual and early:
        added = tl.load(z + to, mask=here & there, other=0.0)
    if pointwise:
        first = p * inputs
    else:
        column = p % wide * stride_x - pad_x
        row = p // wide % tall * stride_y - pad_y
        first = ((p // (tall * wide) * height + row) * width + column) * inputs
    total = tl.zeros((rows, columns), tl.float32)
    steps = tl.cdiv(inputs, depth)
    for step in range(taps_y * taps_x * steps):
        tap = step // steps
        k = (step - tap * steps) * depth + i
        if pointwise:
            at, inside = first, here
        else:
            down = tap // taps_x
            right = tap - down * taps_x
            at = first + (down * width + right) * inputs
            in_rows = (row + down >= 0) & (row + down < height)
            inside = here & (in_rows & (column + right >= 0) & (column + right < width))[:, None]
        of = o[None, :] * (taps_y * taps_x * inputs) + (tap * inputs + k)[:, None]
        if whole:
            taken = tl.load(x + at[:, None] + k[None, :], mask=inside, other=0.0)
            weight = tl.load(w + of, mask=there, other=0.0)
        else:
            taken = tl.load(x + at[:, None] + k[None, :], mask=inside & (k < inputs)[None, :], other=0.0)
            weight = tl.load(w + of, mask=there & (k < inputs)[:, None], other=0.0)
        total = tl.dot(taken, weight, total)
    total += tl.load(b + o, mask=o < outputs, other=0.0).to(tl.float32)[None, :]
    if residual:
        if not early:
            added = tl.load(z + to, mask=here & there, other=0.0)
        total += added.to(tl.float32)
    if relu:
        total = tl.where(total < 0.0, 0.0, total)  # NaN stays
    tl.store(y + to, total.to(y.dtype.element_ty), mask=here & there)


@triton.jit
def _finish(
    y, b, z, size, channels, biased: tl.constexpr, residual: tl.constexpr, relu: tl.constexpr, block: tl.constexpr
):
    """y = relu(y + b + z), in place; the channel of an element is its place modulo their number."""
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    here = at < size
    total = tl.load(y + at, mask=here).to(tl.float32)
    if biased:
        total += tl.load(b + at % channels, mask=here).to(tl.float32)
    if residual:
        total += tl.load(z + at, mask=here).to(tl.float32)
    if relu:
        total = tl.where(total < 0.0, 0.0, total)
    tl.store(y + at, total.to(y.dtype.element_ty), mask=here)


def tiles_for(inputs: int, outputs: int, taps: int = 1) -> list[Tile]:
    """The tiles worth trying: not half empty, and the narrowest only where the next one would be.

    >>> tiles_for(256, 32), len(tiles_for(64, 64)), len(tiles_for(64, 64, taps=9)), len(tiles_for(32, 64))
    ([(128, 32, 64, 4, 4)], 3, 5, 1)
    """
    depth = 32 if inputs <= 32 else 64
    least = 32 if 0 < outputs % 64 <= 32 else 64
    given = TILES if taps == 1 else TILES + CACHED
    return [tile for tile in given if least <= tile[1] < 2 * outputs and tile[2] == depth]


def conv(
    x: Tensor,
    w: Tensor,
    b: Tensor,
    z: Tensor | None,
    stride: tuple[int, int],
    padding: tuple[int, int],
    relu: bool,
    tile: Tile,
) -> Tensor:
    """relu(conv2d(x, w, b, stride, padding) + z), of 16-bit numbers, summed in float32."""
    x, w = (t.contiguous(memory_format=torch.channels_last) for t in (x, w))
    z = None if z is None else z.contiguous(memory_format=torch.channels_last)
    n, inputs, height, width = x.shape
    outputs, _, taps_y, taps_x = w.shape
    tall, wide = sizes((height, width), (taps_y, taps_x), stride, padding)
    pixels = n * tall * wide
    assert max(x.numel(), pixels * outputs + tile[0], w.numel()) < 2**31  # counted in 32 bits
    y = torch.empty((n, outputs, tall, wide), dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
    rows, columns, depth, warps, stages = tile
    steps = taps_y * taps_x * triton.cdiv(inputs, depth)  # no more stages than these: they take room from other tiles
    with on_device_of(x):
        _conv[(triton.cdiv(pixels, rows) * triton.cdiv(outputs, columns),)](
            *(x, w, b.contiguous(), x if z is None else z, y, pixels, inputs, outputs, height, width, tall, wide),
            taps_y=taps_y, taps_x=taps_x, stride_y=stride[0], stride_x=stride[1], pad_y=padding[0], pad_x=padding[1],
            residual=z is not None, relu=relu, whole=inputs % depth == 0,
            rows=rows, columns=columns, depth=depth, early=rows * columns <= 64 * 32 * warps,
            num_warps=warps, num_stages=min(stages, steps),
        )  # fmt: skip
    return y


def finish_(y: Tensor, b: Tensor | None, z: Tensor | None, relu: bool) -> Tensor:
    """y = relu(y + b + z), in place and in one pass, for y and z in channels-last memory."""
    assert y.is_contiguous(memory_format=torch.channels_last)
    z = None if z is None else z.contiguous(memory_format=torch.channels_last)
    block = 1024
    with on_device_of(y):
        _finish[(triton.cdiv(y.numel(), block),)](
            *(y, y if b is None else b.contiguous(), y if z is None else z, y.numel(), y.shape[1]),
            biased=b is not None, residual=z is not None, relu=relu, block=block, num_warps=4,
        )  # fmt: skip
    return y


def on_device_of(x: Tensor) -> AbstractContextManager[object]:
    """Kernels are launched on the current device, which need not be the tensor's."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()


def sizes(
    given: tuple[int, int], window: tuple[int, int], stride: tuple[int, int], padding: tuple[int, int]
) -> tuple[int, int]:
    """Height and width of what a window makes of these, without dilation.

    >>> sizes((224, 224), (7, 7), (2, 2), (3, 3))
    (112, 112)
    """
    tall, wide = ((n + 2 * p - k) // s + 1 for n, k, s, p in zip(given, window, stride, padding, strict=True))
    return tall, wide
