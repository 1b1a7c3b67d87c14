"""Narrow 3x3 convolutions by kernels of our own, as torch operations that differentiate and compile."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from asfp.train.triton_conv import convolve, largest_index, weight_gradient

WIDTHS = (16, 32, 64)
"""Channels that the kernels take: powers of two from the least that tensor cores multiply."""

OUTPUT = (16, 32)
"""Widths at which ours is faster than cuDNN's, for the output and for the gradient of the input."""

TYPES = (torch.bfloat16, torch.float16)

GEOMETRY = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)
"""Stride, padding and dilation of 1, not transposed, no output padding, one group."""


@torch.library.custom_op("asfp::narrow_conv", mutates_args=())
def narrow_conv(x: Tensor, w: Tensor) -> Tensor:
    """conv2d(x, w, padding=1) for a 3x3 kernel: x of 16 bits, w in float32."""
    return convolve(x, w)


@torch.library.custom_op("asfp::narrow_conv_input", mutates_args=())
def narrow_conv_input(dy: Tensor, w: Tensor) -> Tensor:
    """The gradient of `narrow_conv` for x."""
    return convolve(dy, w, flip=True)


@torch.library.custom_op("asfp::narrow_conv_weight", mutates_args=())
def narrow_conv_weight(x: Tensor, dy: Tensor) -> Tensor:
    """The gradient of `narrow_conv` for w, in float32."""
    return weight_gradient(x, dy)


@narrow_conv.register_fake
def _(x: Tensor, w: Tensor) -> Tensor:
    return _like(x, (x.shape[0], w.shape[0], *x.shape[2:]), x.dtype)


@narrow_conv_input.register_fake
def _(dy: Tensor, w: Tensor) -> Tensor:
    return _like(dy, (dy.shape[0], w.shape[1], *dy.shape[2:]), dy.dtype)


@narrow_conv_weight.register_fake
def _(x: Tensor, dy: Tensor) -> Tensor:
    return _like(x, (dy.shape[1], x.shape[1], 3, 3), torch.float32)


def _like(x: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=x.device, memory_format=torch.channels_last)


class _NarrowConv(torch.autograd.Function):
    """Each of output and gradients by whichever kernel is faster."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        if max(w.shape[:2]) in OUTPUT:
            return narrow_conv(x, w)
        return torch.ops.aten.convolution(x, w.to(x.dtype), None, *GEOMETRY)

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor | None, Tensor | None]:
        (dy,) = slopes
        x, w = ctx.saved_tensors
        of_input, of_weight = ctx.needs_input_grad
        return _of_input(x, w, dy) if of_input else None, narrow_conv_weight(x, dy) if of_weight else None


def _of_input(x: Tensor, w: Tensor, dy: Tensor) -> Tensor:
    if max(w.shape[:2]) in OUTPUT:
        return narrow_conv_input(dy, w)
    return torch.ops.aten.convolution_backward(dy, x, w.to(x.dtype), None, *GEOMETRY, [True, False, False])[0]


def fits(x: Tensor, w: Tensor, bias: Tensor | None, stride: Any, padding: Any, dilation: Any, groups: int) -> bool:
    """Whether the kernels are for this convolution: 3x3 in steps of 1, padded by 1, 16-bit input, float32 weights.

    >>> x, w = torch.zeros(1, 16, 8, 8, dtype=torch.bfloat16), torch.zeros(16, 16, 3, 3)
    >>> fits(x, w, None, (1, 1), (1, 1), (1, 1), 1), fits(x, w, None, (2, 2), (1, 1), (1, 1), 1)
    (True, False)
    """
    return (
        x.ndim == 4
        and x.dtype in TYPES
        and x.shape[1] == w.shape[1]
        and w.dtype == torch.float32
        and tuple(w.shape[2:]) == (3, 3)
        and w.shape[0] in WIDTHS
        and w.shape[1] in WIDTHS
        and bias is None
        and groups == 1
        and all(given in (1, (1, 1), [1, 1]) for given in (stride, padding, dilation))
        and largest_index(x.numel() // x.shape[1], *w.shape[:2]) < 2**31  # the kernels count in 32 bits
    )


class NarrowConvolutions(TorchFunctionMode):
    """While it is active, conv2d is computed by the kernels above where they fit.

    >>> conv = torch.nn.Conv2d(3, 16, 3)
    >>> with NarrowConvolutions():  # this one does not fit
    ...     conv(torch.zeros(1, 3, 8, 8)).shape
    torch.Size([1, 16, 6, 6])
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.conv2d and not kwargs:
            given: tuple[Any, ...] = (*args, *(None, 1, 0, 1, 1)[len(args) - 2 :])
            if fits(*given):
                return _NarrowConv.apply(*given[:2])
        return func(*args, **(kwargs or {}))
