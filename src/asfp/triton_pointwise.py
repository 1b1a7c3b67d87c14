"""1x1 convolutions with bias, residual and ReLU, and these three alone, as Triton kernels; all in channels-last memory.

A 1x1 convolution of a large map waits for memory: what it adds and clips costs nothing while the result is at hand.
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
    (64, 64, 64, 4, 4),
    (128, 64, 64, 4, 4),
    (256, 64, 64, 8, 3),
    (128, 128, 64, 8, 3),
    (128, 256, 64, 8, 3),
)


@triton.jit
def _pointwise(
    x, w, b, z, y, pixels, inputs, outputs,
    residual: tl.constexpr, relu: tl.constexpr, whole: tl.constexpr,
    rows: tl.constexpr, columns: tl.constexpr, depth: tl.constexpr,
):  # fmt: skip
    """y[p, o] = relu(sum over i of x[p, i] w[o, i] + b[o] + z[p, o])."""
    wide = tl.cdiv(outputs, columns)
    p = tl.program_id(0) // wide * rows + tl.arange(0, rows)
    o = tl.program_id(0) % wide * columns + tl.arange(0, columns)
    i = tl.arange(0, depth)
    total = tl.zeros((rows, columns), tl.float32)
    here = (p < pixels)[:, None]
    there = (o < outputs)[None, :]
    for start in range(0, inputs, depth):
        k = start + i
        if whole:
            taken = tl.load(x + p[:, None] * inputs + k[None, :], mask=here, other=0.0)
            weight = tl.load(w + o[None, :] * inputs + k[:, None], mask=there, other=0.0)
        else:
            taken = tl.load(x + p[:, None] * inputs + k[None, :], mask=here & (k < inputs)[None, :], other=0.0)
            weight = tl.load(w + o[None, :] * inputs + k[:, None], mask=there & (k < inputs)[:, None], other=0.0)
        total = tl.dot(taken, weight, total)
    total += tl.load(b + o, mask=o < outputs, other=0.0).to(tl.float32)[None, :]
    at = p[:, None] * outputs + o[None, :]
    if residual:
        total += tl.load(z + at, mask=here & there, other=0.0).to(tl.float32)
    if relu:
        total = tl.where(total < 0.0, 0.0, total)  # NaN stays
    tl.store(y + at, total.to(y.dtype.element_ty), mask=here & there)


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


def pointwise(x: Tensor, w: Tensor, b: Tensor, z: Tensor | None, relu: bool, tile: Tile) -> Tensor:
    """relu(conv2d(x, w) + b + z) for a 1x1 kernel, of 16-bit numbers, summed in float32."""
    x = x.contiguous(memory_format=torch.channels_last)
    z = None if z is None else z.contiguous(memory_format=torch.channels_last)
    n, inputs, height, width = x.shape
    outputs, pixels = len(w), n * height * width
    assert max(x.numel(), pixels * outputs) < 2**31  # counted in 32 bits
    y = torch.empty((n, outputs, height, width), dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
    rows, columns, depth, warps, stages = tile
    w, b = w.reshape(outputs, inputs).contiguous(), b.contiguous()
    with on_device_of(x):
        _pointwise[(triton.cdiv(pixels, rows) * triton.cdiv(outputs, columns),)](
            *(x, w, b, x if z is None else z, y, pixels, inputs, outputs),
            residual=z is not None, relu=relu, whole=inputs % depth == 0,
            rows=rows, columns=columns, depth=depth, num_warps=warps, num_stages=stages,
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
