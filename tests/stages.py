"""Stages of residual blocks in plain torch, and the comparison of the kernels with them, on a CPU or a GPU."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from asfp.train.cuda.runtime import Launcher
from asfp.train.stage import Stage

LAST = torch.channels_last


class _Rounded(torch.autograd.Function):
    """To bfloat16 and back, where the kernels keep 16 bits; its gradient passes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.bfloat16().to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> Tensor:
        return slopes[0]


def rounded(x: Tensor) -> Tensor:
    result: Tensor = _Rounded.apply(x)
    return result


def reference(convs: nn.ModuleList, norms: nn.ModuleList, y: Tensor, shortcut: Tensor | None) -> Tensor:
    """What `Stage` computes, in plain torch."""

    def conv(i: int, x: Tensor) -> Tensor:
        return rounded(F.conv2d(x, rounded(convs[i].weight), padding=1))  # type: ignore[arg-type]

    first = len(convs) % 2
    if first:
        y = conv(0, rounded(F.relu(norms[0](y))))
    z = norms[first](y)
    z = rounded(F.relu(z if shortcut is None else z + shortcut))
    for i in range(first, len(convs), 2):
        z = rounded(F.relu(norms[i + 2](conv(i + 1, rounded(F.relu(norms[i + 1](conv(i, z)))))) + z))
    return z


def layers(channels: int, count: int) -> tuple[nn.ModuleList, nn.ModuleList]:
    convs = nn.ModuleList(nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(count))
    norms = nn.ModuleList(nn.BatchNorm2d(channels) for _ in range(count + 1))
    for norm in norms:
        nn.init.uniform_(norm.weight, 0.5, 1.5)  # type: ignore[arg-type]
        nn.init.normal_(norm.bias, 0.0, 0.3)  # type: ignore[arg-type]
    return convs.to(memory_format=LAST), norms


def maps(*shape: int) -> Tensor:
    return torch.randn(shape).bfloat16().contiguous(memory_format=LAST)


def error(found: Tensor | None, wanted: Tensor | None) -> float:
    assert found is not None
    assert wanted is not None
    return float((found.detach().double() - wanted.detach()).norm() / wanted.detach().norm())


STAGES = [  # channels, height, width, images, convolutions, with a shortcut
    (16, 32, 32, 2, 2, False),  # two tiles an image: rows of the other tile at the border
    (16, 8, 16, 5, 4, True),  # four images a tile, the last tile not full
    (32, 16, 16, 1, 3, True),
    (32, 8, 8, 5, 2, False),
    (64, 8, 8, 3, 1, True),  # nothing but the end of a block
    (64, 4, 4, 9, 3, True),
    pytest.param(64, 4, 4, 300, 2, False, marks=pytest.mark.slow),  # more tiles than blocks; sums in several rounds
]


def check_stage(
    channels: int,
    height: int,
    width: int,
    count: int,
    depth: int,
    shortcut: bool,
    kernels: Callable[[int, int, int], Launcher],
    device: str = "cpu",
) -> None:
    """Output, gradients and running statistics of a stage against `reference` in float64."""
    torch.manual_seed(channels + depth)
    convs, norms = (part.to(device) for part in layers(channels, depth))
    exact = copy.deepcopy(convs).double(), copy.deepcopy(norms).double()
    y, slope, more = (maps(count, channels, height, width).to(device) for _ in range(3))
    added = more.requires_grad_() if shortcut else None
    y.requires_grad_()
    z = Stage(list(convs), list(norms), kernels)(y, added)  # type: ignore[arg-type]
    z.backward(slope)
    y2 = y.detach().double().requires_grad_()
    added2 = None if added is None else added.detach().double().requires_grad_()
    z2 = reference(*exact, y2, added2)
    z2.backward(slope.double())
    # a number that lies between two of bfloat16 may be rounded the other way, and then moves what follows
    assert error(z, z2) < 2e-3
    assert error(y.grad, y2.grad) < 0.02
    if added is not None and added2 is not None:
        assert error(added.grad, added2.grad) < 0.02
    for conv, conv2 in zip(convs, exact[0], strict=True):
        assert error(conv.weight.grad, conv2.weight.grad) < 0.02  # type: ignore[arg-type]
        assert conv.weight.grad.is_contiguous(memory_format=LAST)  # type: ignore[union-attr,operator]
    for norm, norm2 in zip(norms, exact[1], strict=True):
        assert error(norm.weight.grad, norm2.weight.grad) < 0.02  # type: ignore[arg-type]
        assert error(norm.bias.grad, norm2.bias.grad) < 0.02  # type: ignore[arg-type]
        assert error(norm.running_mean, norm2.running_mean) < 1e-3  # type: ignore[arg-type]
        assert error(norm.running_var, norm2.running_var) < 1e-4  # type: ignore[arg-type]
        assert int(norm.num_batches_tracked) == 1  # type: ignore[arg-type]
