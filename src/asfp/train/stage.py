"""A stage of residual blocks by kernels of our own, forward and backward: what the modules compute, with batch norm,
ReLU and addition within the convolutions.

Activations are rounded to bfloat16 as under autocast, where a fused chain rounds once instead of after each part.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from asfp.train.cuda.geometry import Geometry, launcher
from asfp.train.cuda.runtime import Launcher

ELEMENTWISE_BLOCKS = 264
"""Of the kernels that only read and write: two for each multiprocessor of a large GPU."""


class Stage:
    """Layers of one width, from the output y of a convolution on: norm(y), then what `convs` and `norms` say.

    norms[0] is behind y. With an odd number of convolutions the first of them reads relu(norms[0](y)); its output,
    else y itself, is normalised and added to the shortcut, and ReLU of that enters the blocks of two convolutions.
    norms[i + 1] is behind convs[i].
    """

    def __init__(
        self,
        convs: Sequence[nn.Conv2d],
        norms: Sequence[nn.BatchNorm2d],
        kernels: Callable[[int, int, int], Launcher] = launcher,
    ) -> None:
        self.convs, self.norms, self.kernels = list(convs), list(norms), kernels
        self._found: list[int] = []
        self._table = self._ticket = torch.empty(0)

    def __call__(self, y: Tensor, shortcut: Tensor | None) -> Tensor:
        """In training mode by the batch's statistics, which the running ones follow; else by those, no gradient."""
        assert y.dtype is torch.bfloat16, "stages compute in bfloat16: call them under autocast"
        y = y.contiguous(memory_format=torch.channels_last)
        if shortcut is not None:
            shortcut = shortcut.contiguous(memory_format=torch.channels_last)
        (learns,) = {norm.training for norm in self.norms}
        if not learns:
            assert not torch.is_grad_enabled(), "a stage in evaluation mode has no gradients"
            return _Run(self, y, learns).forward(shortcut)
        torch._foreach_add_([n.num_batches_tracked for n in self.norms if n.num_batches_tracked is not None], 1)
        weights = [conv.weight for conv in self.convs]
        scales = [p for norm in self.norms for p in (norm.weight, norm.bias)]
        result: Tensor = _StageFunction.apply(self, y, shortcut, *weights, *scales)
        return result

    def addresses(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Where the weights lie, and the counter of blocks that have ended; made once, so that graphs may keep them."""
        found = [conv.weight.data_ptr() for conv in self.convs]
        if not self._found:
            self._found = found
            self._table = torch.tensor(found, dtype=torch.int64).to(device)
            self._ticket = torch.zeros(2, dtype=torch.int32, device=device)
        assert found == self._found, "the weights were moved after the first step"
        return self._table, self._ticket


class _Run:
    """One pass through a stage: its tensors, and the launches by name.

    `raw` are then the outputs of the convolutions, `out` what enters the blocks; both only where it learns.
    """

    def __init__(self, stage: Stage, y: Tensor, learns: bool) -> None:
        self.stage, self.learns, (self.images, c, height, width) = stage, learns, y.shape
        self.geometry = Geometry(c, height, width)
        self.launch = stage.kernels(c, height, width)
        table, self.ticket = stage.addresses(y.device)
        self.first, self.raw, self.out = y, [y], list[Tensor]()
        layers = len(stage.convs)
        blocks = max(self.geometry.tiles(self.images), ELEMENTWISE_BLOCKS)
        self.sums = torch.empty(blocks * 2 * c, device=y.device) if learns else None
        self.stat = torch.empty(layers + 1, 7, c, device=y.device)
        self.slopes = torch.empty(layers + 1, 2, c, device=y.device)
        packed = torch.empty(2, layers, self.geometry.weights // 2, dtype=torch.int32, device=y.device)
        self.forward_weights, self.backward_weights = packed
        grid = (-(-self.geometry.weights // 512), layers)
        self.launch("prepare", grid, 256, 0, table, self.forward_weights, self.backward_weights)

    def forward(self, shortcut: Tensor | None) -> Tensor:
        """The stage's output."""
        layers = len(self.stage.convs)
        if self.learns:
            self._take_batch()
        else:
            self._take_running()
        y, before = self.first, shortcut
        for i in range(layers):
            if (i - layers) % 2:  # the second of a block
                y = self.convolve("forward_second", i, y, None, self.normalise(i), None, i + 1)
            else:
                side = torch.empty_like(y)
                y = self.convolve("forward_first", i, y, before, self.normalise(i), side, i + 1)
                before = side
                self.out += [side] * self.learns
            self.raw += [y] * self.learns
        result = torch.empty_like(y)
        self.elementwise("end_of_block", y, before, self.normalise(layers), result, self.pixels)
        return result

    def backward(self, dz: Tensor, result: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients of the first y, of the shortcut and of all weights; those of the norms are in `slopes`."""
        g, layers, raw, out = self.geometry, len(self.stage.convs), self.raw, list(self.out)
        chunks = min(g.chunks, g.tiles(self.images))
        parts = torch.empty(layers, chunks, g.weights, device=dz.device)
        slope = torch.empty_like(dz)
        self.elementwise(
            "begin_backward", dz, result, raw[-1], slope, self.pixels, self.sums, self.ticket, self.stat[layers],
            self.slopes[layers],
        )  # fmt: skip
        entering = slope
        for i in reversed(range(layers)):
            dy = torch.empty_like(dz)
            if (i - layers) % 2:
                behind: tuple[Tensor | None, ...] = (raw[i], self.normalise(i), None, None)
                slope = self.convolve("backward_second", i, slope, raw[i + 1], self.slope(i + 1), dy, i, behind)
                self.weigh("weight_second", parts[i], raw[i], self.normalise(i), dy)
            else:
                z = out.pop()
                behind = (raw[i], None, entering, z)
                slope = self.convolve("backward_first", i, slope, raw[i + 1], self.slope(i + 1), dy, i, behind)
                self.weigh("weight_first", parts[i], z, None, dy)
                entering = slope
        dy = torch.empty_like(dz)
        self.elementwise("norm_gradient", slope, raw[0], self.slope(0), dy, self.pixels)
        weights = torch.empty(layers, g.channels, 3, 3, g.channels, device=dz.device)
        self.launch("sum_parts", (-(-g.weights // 1024), layers), 256, 0, parts, weights, chunks)
        return dy, entering, weights

    def _take_batch(self) -> None:
        """The first norm's factors by the statistics of y; the others' come with the convolutions before them."""
        n = self.stage.norms[0]
        self.elementwise(
            "statistics", self.first, self.pixels, self.sums, self.ticket, n.weight, n.bias, n.running_mean,
            n.running_var, self.stat[0], float(n.momentum or 0.0), n.eps,
        )  # fmt: skip

    def _take_running(self) -> None:
        """Scale and shift of all norms by their running statistics."""
        norms = self.stage.norms
        mean, var, scale, shift = (
            torch.stack([getattr(norm, name).detach() for norm in norms])
            for name in ("running_mean", "running_var", "weight", "bias")
        )
        scale = scale * torch.rsqrt(var + norms[0].eps)
        self.stat[:, 2] = scale
        self.stat[:, 3] = shift - mean * scale

    def normalise(self, layer: int) -> Tensor:
        return self.stat[layer, 2:]

    def slope(self, layer: int) -> Tensor:
        return self.stat[layer, 4:]

    def convolve(
        self, name: str, conv: int, first: Tensor, second: Tensor | None, factors: Tensor, side: Tensor | None,
        norm: int, extra: Sequence[Tensor | None] = (None, None, None, None),
    ) -> Tensor:  # fmt: skip
        g, n = self.geometry, self.stage.norms[norm]
        weights = self.backward_weights if name.startswith("backward") else self.forward_weights
        out = torch.empty_like(first)
        self.launch(
            name, (g.tiles(self.images), g.parts), g.threads, g.tile_bytes,
            first, second, factors, side, weights[conv], out, *extra, self.sums, self.ticket, n.weight, n.bias,
            n.running_mean, n.running_var, self.stat[norm], self.slopes[norm], self.images, float(n.momentum or 0.0),
            n.eps,
        )  # fmt: skip
        return out

    def weigh(self, name: str, parts: Tensor, first: Tensor, factors: Tensor | None, dy: Tensor) -> None:
        g = self.geometry
        grid = (len(parts), g.squares)
        self.launch(name, grid, 256, g.weight_bytes, first, factors, dy, parts, self.images, g.tiles(self.images))

    def elementwise(self, name: str, *args: Any) -> None:
        room = max(8 * 2 * self.geometry.channels * 4, 256 * 8)  # sums of each warp, then a double of each thread
        self.launch(name, (ELEMENTWISE_BLOCKS, 1), 256, room, *args)

    @property
    def pixels(self) -> int:
        return self.images * self.geometry.height * self.geometry.width


class _StageFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, stage: Stage, y: Tensor, shortcut: Tensor | None, *parameters: Tensor) -> Tensor:
        ctx.run, ctx.shortcut = _Run(stage, y, True), shortcut is not None
        result: Tensor = ctx.run.forward(shortcut)
        ctx.save_for_backward(result)  # an output kept otherwise would never be freed
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor | None, ...]:
        dz = slopes[0].contiguous(memory_format=torch.channels_last)
        dy, entering, weights = ctx.run.backward(dz, ctx.saved_tensors[0])
        return (
            *(None, dy, entering if ctx.shortcut else None),
            *(weight.permute(0, 3, 1, 2) for weight in weights),
            *(slope for norm in ctx.run.slopes for slope in norm),
        )
