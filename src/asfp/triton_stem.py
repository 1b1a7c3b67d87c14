"""What a network begins with, as Triton kernels: a convolution of few channels, and max pooling; channels last.

A row of such a convolution's window lies in one piece in memory, 7 pixels of 3 channels in 21 numbers: read as it is,
it needs no channels of zeros to fill up a tensor core. Pooling for inference needs no places of the maxima, which torch
writes too, four times the size of the result.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from asfp.triton_fused import on_device_of, sizes

StemTile = tuple[int, int, int, int]
"""Pixels and outputs of a tile, warps, and stages of loading ahead."""

STEM_TILES: tuple[StemTile, ...] = (
    (64, 32, 4, 3),
    (128, 32, 4, 2),
    (64, 64, 4, 1),
    (64, 64, 4, 3),
    (128, 64, 4, 3),
    (128, 64, 8, 2),
)


@triton.jit
def _stem(
    x, w, b, y, pixels, height, width, tall, wide, outputs,
    channels: tl.constexpr, taps: tl.constexpr, across: tl.constexpr, span: tl.constexpr,
    stride_y: tl.constexpr, stride_x: tl.constexpr, pad_y: tl.constexpr, pad_x: tl.constexpr,
    relu: tl.constexpr, rows: tl.constexpr, columns: tl.constexpr,
):  # fmt: skip
    """y[p, o] = relu(sum over rows r of the window, and j along it, of x[p, r, j] w[r, j, o] + b[o])."""
    blocks = tl.cdiv(outputs, columns)
    p = tl.program_id(0) // blocks * rows + tl.arange(0, rows)
    o = tl.program_id(0) % blocks * columns + tl.arange(0, columns)
    j = tl.arange(0, span)
    image = p // (tall * wide)
    row = p // wide % tall * stride_y - pad_y
    at = (p % wide * stride_x - pad_x)[:, None] * channels + j[None, :]
    inside = (at >= 0) & (at < width * channels) & (j < across)[None, :] & (p < pixels)[:, None]
    first = (image * height + row) * (width * channels)
    total = tl.zeros((rows, columns), tl.float32)
    for r in range(taps):
        here = inside & ((row + r >= 0) & (row + r < height))[:, None]
        taken = tl.load(x + (first + r * (width * channels))[:, None] + at, mask=here, other=0.0)
        weight = tl.load(w + (r * span + j)[:, None] * outputs + o[None, :], mask=(o < outputs)[None, :], other=0.0)
        total = tl.dot(taken, weight, total)
    total += tl.load(b + o, mask=o < outputs, other=0.0).to(tl.float32)[None, :]
    if relu:
        total = tl.where(total < 0.0, 0.0, total)  # NaN stays
    there = (p < pixels)[:, None] & (o < outputs)[None, :]
    tl.store(y + p[:, None] * outputs + o[None, :], total.to(y.dtype.element_ty), mask=there)


@triton.jit
def _pool(
    x, y, size, channels, height, width, tall, wide,
    taps_y: tl.constexpr, taps_x: tl.constexpr, stride_y: tl.constexpr, stride_x: tl.constexpr,
    pad_y: tl.constexpr, pad_x: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """y[n, i, j, c] = max over the window of x[n, i s - p + k, j s - p + l, c]."""
    at = tl.program_id(0) * block + tl.arange(0, block)
    channel = at % channels
    pixel = at // channels
    column = pixel % wide * stride_x - pad_x
    row = pixel // wide % tall * stride_y - pad_y
    image = pixel // (tall * wide)
    best = tl.full((block,), float("-inf"), x.dtype.element_ty)
    for k in tl.static_range(taps_y):
        for m in tl.static_range(taps_x):
            inside = (row + k >= 0) & (row + k < height) & (column + m >= 0) & (column + m < width) & (at < size)
            place = ((image * height + row + k) * width + column + m) * channels + channel
            found = tl.load(x + place, mask=inside, other=float("-inf"))
            best = tl.maximum(best, found, propagate_nan=tl.PropagateNan.ALL)
    tl.store(y + at, best, mask=at < size)


def lead_of(w: Tensor, stride: int, padding: int) -> int:
    """Pixels to read before the window, times zero, so that its rows begin at even places and are read in pairs.

    >>> lead_of(torch.zeros(64, 3, 7, 7), stride=2, padding=3), lead_of(torch.zeros(64, 3, 3, 3), stride=1, padding=1)
    (1, 0)
    """
    _, channels, _, along = w.shape
    odd = stride * channels % 2 == 0 and padding * channels % 2 == 1
    return int(odd and _span((along + 1) * channels) == _span(along * channels))


def arranged(w: Tensor, lead: int = 0) -> Tensor:
    """A weight as the kernel reads it: row of the window, place along it (filled up with zeros), output."""
    outputs, channels, taps, along = w.shape
    flat = w.detach().permute(2, 3, 1, 0).reshape(taps, along * channels, outputs)
    before = lead * channels
    after = _span((along + lead) * channels) - before - along * channels
    return torch.nn.functional.pad(flat, (0, 0, before, after)).contiguous()


def stem(
    x: Tensor,
    w: Tensor,
    ready: Tensor,
    b: Tensor,
    stride: tuple[int, int],
    padding: tuple[int, int],
    relu: bool,
    tile: StemTile,
) -> Tensor:
    """relu(conv2d(x, w, b)), of 16-bit numbers, summed in float32; `ready` is `arranged(w, lead_of(w, ...))`.

    With a lead, what is not finite in x spreads one pixel further than torch lets it.
    """
    x = x.contiguous(memory_format=torch.channels_last)
    n, channels, height, width = x.shape
    outputs, _, taps, along = w.shape
    tall, wide = sizes((height, width), (taps, along), stride, padding)
    pixels = n * tall * wide
    assert max(x.numel(), pixels * outputs + tile[0]) < 2**31  # counted in 32 bits
    shape = (n, outputs, tall, wide)
    y = torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
    rows, columns, warps, stages = tile
    lead = lead_of(w, stride[1], padding[1])
    with on_device_of(x):
        _stem[(triton.cdiv(pixels, rows) * triton.cdiv(outputs, columns),)](
            *(x, ready, b.contiguous(), y, pixels, height, width, tall, wide, outputs),
            channels=channels, taps=taps, across=(along + lead) * channels, span=ready.shape[1],
            stride_y=stride[0], stride_x=stride[1], pad_y=padding[0], pad_x=padding[1] + lead,
            relu=relu, rows=rows, columns=columns, num_warps=warps, num_stages=stages,
        )  # fmt: skip
    return y


def max_pool(x: Tensor, window: tuple[int, int], stride: tuple[int, int], padding: tuple[int, int]) -> Tensor:
    """max_pool2d(x, window, stride, padding) for x in channels-last memory."""
    x = x.contiguous(memory_format=torch.channels_last)
    n, channels, height, width = x.shape
    tall, wide = sizes((height, width), window, stride, padding)
    y = torch.empty((n, channels, tall, wide), dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
    block = 1024
    assert max(x.numel(), y.numel() + block) < 2**31  # counted in 32 bits
    with on_device_of(x):
        _pool[(triton.cdiv(y.numel(), block),)](
            *(x, y, y.numel(), channels, height, width, tall, wide),
            taps_y=window[0], taps_x=window[1], stride_y=stride[0], stride_x=stride[1],
            pad_y=padding[0], pad_x=padding[1], block=block, num_warps=4,
        )  # fmt: skip
    return y


def _span(across: int) -> int:
    return max(16, triton.next_power_of_2(across))
