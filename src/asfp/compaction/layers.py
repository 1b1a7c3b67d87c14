"""The few layers that a compact model needs beside torch's own: plain tensors in, plain tensors out."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class BorderBias(nn.Module):
    """Adds what constant input channels, now removed, contributed to a zero-padded convolution.

    Inside, that is one number an output channel; at the border some kernel taps lie on the padding and drop out.
    With P the kernel's integral image (P[i] sums taps < i) and [lo, hi) the taps that lie on the image at an output
    position, the contribution is P[hi] - P[lo] along each axis in turn: exact for every input size, and no
    multiplications. Without gradients the last one is kept, so that running on images of one size takes one addition.
    """

    traced_whole = True  # one operation to a tracer, with a rule of its own
    integral: Tensor

    def __init__(
        self, kernel: Tensor, stride: tuple[int, ...], padding: tuple[int, ...], dilation: tuple[int, ...]
    ) -> None:
        super().__init__()
        for axis in range(1, kernel.ndim):
            zero = torch.zeros_like(kernel.narrow(axis, 0, 1))
            kernel = torch.cat([zero, kernel.cumsum(axis)], axis)
        self.register_buffer("integral", kernel)
        self.stride, self.padding, self.dilation = stride, padding, dilation
        self._kept: tuple[Tensor | None, object, Tensor | None] = (None, None, None)

    def forward(self, output: Tensor, input: Tensor) -> Tensor:
        traced = torch.compiler.is_compiling() or torch._C._is_tracing()
        real = all(type(t) is Tensor for t in (output, input, self.integral))  # not a fake one, nor any other kind
        if torch.is_grad_enabled() or traced or not real or self.integral.is_inference():
            return output + self.contribution(output, input)
        dims = len(self.stride)
        key = output.shape[-dims:], input.shape[-dims:], self.integral._version
        integral, known, bias = self._kept
        if bias is None or integral is not self.integral or known != key:
            bias = self.contribution(output, input)
            self._kept = self.integral, key, bias
        return output + bias

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_kept": (None, None, None)}

    def contribution(self, output: Tensor, input: Tensor) -> Tensor:
        bias = self.integral
        dims = len(self.stride)
        for i in range(dims):
            axis, taps = i + 1, self.integral.shape[i + 1] - 1
            first = torch.arange(output.shape[i - dims], device=bias.device) * self.stride[i] - self.padding[i]
            low = ((self.dilation[i] - 1 - first) // self.dilation[i]).clamp(0, taps)
            high = ((self.dilation[i] - 1 + input.shape[i - dims] - first) // self.dilation[i]).clamp(0, taps)
            bias = bias.index_select(axis, torch.maximum(low, high)) - bias.index_select(axis, low)
        return bias

    def kernel(self) -> Tensor:
        """What one tap contributes to an output channel: the kernel of a convolution of ones."""
        kernel = self.integral
        for axis in range(1, kernel.ndim):
            kernel = kernel.diff(dim=axis)
        return kernel

    def extra_repr(self) -> str:
        taps = "x".join(str(n - 1) for n in self.integral.shape[1:])
        return f"{self.integral.shape[0]}, kernel={taps}, stride={self.stride}, padding={self.padding}"


class Widen(nn.Module):
    """Brings a tensor back to more channels: output channel j is input channel `index[j]`, or one of the constants.

    An index past the input's channels names the constants in `fill`, so this is one concatenation and one gather.
    `fill` has the input's dimensions, all of size 1 but the channels'. Where it is one zero, the input is padded.
    """

    index: Tensor | None
    fill: Tensor

    def __init__(self, index: Tensor | None, fill: Tensor, axis: int, *, zero: bool = False) -> None:
        super().__init__()
        self.register_buffer("index", index)
        self.register_buffer("fill", fill)
        self.axis, self.dims, self.zero = axis, fill.ndim, zero

    def forward(self, input: Tensor) -> Tensor:
        if self.zero:
            wide = F.pad(input, [0, 0] * (self.dims - 1 - self.axis) + [0, 1])
        else:
            shape = [-1 if i == self.axis else input.shape[i] for i in range(self.dims)]
            wide = torch.cat([input, self.fill.expand(shape)], self.axis)
        return wide if self.index is None else wide.index_select(self.axis, self.index)

    def extra_repr(self) -> str:
        width = "appended" if self.index is None else f"to {self.index.numel()} channels"
        filling = "zero" if self.zero else f"{self.fill.numel()} constants"
        return f"{filling}, {width}, axis={self.axis}"


class Pick(nn.Module):
    """Takes channels out of a tensor, in a given order: one gather."""

    index: Tensor

    def __init__(self, index: Tensor, axis: int) -> None:
        super().__init__()
        self.register_buffer("index", index)
        self.axis = axis

    def forward(self, input: Tensor) -> Tensor:
        return input.index_select(self.axis, self.index)

    def extra_repr(self) -> str:
        return f"{self.index.numel()} channels, axis={self.axis}"


class Surround(nn.Module):
    """Puts constant channels in front of and behind a tensor's own: one concatenation, no gather."""

    before: Tensor
    after: Tensor

    def __init__(self, before: Tensor, after: Tensor, axis: int) -> None:
        super().__init__()
        self.register_buffer("before", before)
        self.register_buffer("after", after)
        self.axis, self.dims = axis, before.ndim

    def forward(self, input: Tensor) -> Tensor:
        shape = [-1 if i == self.axis else input.shape[i] for i in range(self.dims)]
        parts = [self.before.expand(shape), input, self.after.expand(shape)]
        return torch.cat(parts, self.axis)

    def extra_repr(self) -> str:
        return f"{self.before.numel()} before, {self.after.numel()} after, axis={self.axis}"


class Constant(nn.Module):
    """One constant a channel, shaped to broadcast: what is left of a branch that became constant."""

    fill: Tensor

    def __init__(self, fill: Tensor) -> None:
        super().__init__()
        self.register_buffer("fill", fill)

    def forward(self) -> Tensor:
        return self.fill
