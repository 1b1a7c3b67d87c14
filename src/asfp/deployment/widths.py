"""What a graph for deployment is made of, channel by channel, and what computing more of them or moving them costs."""

from __future__ import annotations

import math
import operator
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import fx, nn

from asfp.compaction.layers import BorderBias
from asfp.compaction.layout import LAYOUTS, Prices
from asfp.deployment.embeds import Embed, Values, embed_of
from asfp.deployment.padding import ADDITIONS, alike, asks_for_size, module_of, sides_of, width_of

POINTWISE = (
    *(nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.SiLU, nn.GELU, nn.Hardswish, nn.Hardtanh, nn.Hardsigmoid),
    *(nn.Sigmoid, nn.Tanh, nn.Identity, nn.Dropout, nn.Dropout2d),
)
POOLS = (nn.MaxPool2d, nn.AdaptiveAvgPool2d)
"""Constants stay as they are there, at borders too."""
FUNCTIONS: dict[Any, Any] = {
    **{f: f for f in (torch.relu, F.relu, F.relu6, F.silu, F.hardswish, torch.sigmoid, torch.tanh)},
    "relu": torch.relu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
}
NOTHING = (nn.Dropout, nn.Identity)
"""What does nothing to a vector."""

PRICES = replace(LAYOUTS["auto"], block=16)
"""Multiply-adds are counted in blocks of as many filters as a CPU computes at once."""


@dataclass(frozen=True)
class Kernels:
    """Widths that an engine is at its best with: whole multiples, as long as little of what is then computed is waste.

    >>> Kernels(multiple=8).width(45), Kernels(multiple=8).width(20), Kernels().width(45)
    (48, 20, 45)
    """

    multiple: int = 1
    depthwise: int = 1
    """The same where the channels pass a depthwise layer."""
    moved: int = 1
    """The same of what is put among constants."""
    block: int = 16
    """What is computed at once."""
    most: float = 1.2
    """Computed channels by wanted ones."""
    most_beside_depthwise: float = 1.5
    """The same in a network with depthwise layers."""

    def width(self, width: int, *, depthwise: bool = False, moved: bool = False, beside_depthwise: bool = False) -> int:
        """The width that a value had better have."""
        n = self.depthwise if depthwise else self.moved if moved else self.multiple
        most = self.most_beside_depthwise if depthwise or beside_depthwise else self.most
        whole = -(-width // self.block) * self.block <= most * width
        return -(-width // n) * n if whole else width


ONNXRUNTIME = Kernels(multiple=8, depthwise=16, moved=8)
"""It has blocked kernels for some multiples only, and changes the order in memory around all other layers."""
OPENVINO = Kernels(multiple=8, depthwise=16, moved=16)


class Reading:
    """What there is in a graph: embeds, what passes channels on, plain convolutions; and what each costs."""

    def __init__(self, model: fx.GraphModule, kernels: Kernels, batch: int = 1, prices: Prices = PRICES) -> None:
        self.model, self.kernels, self.prices, self.batch = model, kernels, prices, batch
        self.calls = Counter(str(node.target) for node in model.graph.nodes if node.op == "call_module")
        embeds = {node: found for node in model.graph.nodes if (found := embed_of(model, node)) is not None}
        self.has_depthwise = any(self.depthwise(node) is not None for node in model.graph.nodes)
        within = {part for found in embeds.values() for part in found.inner}
        self.embeds = {node: found for node, found in embeds.items() if node not in within}
        self.followed = {node: found for node, found in self.embeds.items() if self._follows(found.value)}
        """Those of values that are known to be made, or passed on, channel by channel."""

    def _follows(self, node: fx.Node) -> bool:
        if _thins(node):
            return False  # a stream ends there, and another, of other width, begins
        return self.plain(node) is not None or bool(self.sources(node)) or node in self.embeds

    def sources(self, node: fx.Node) -> list[fx.Node]:
        """The values whose channels a node passes on under their own numbers, and constants as constants."""
        if width_of(node) is None:
            return []
        if node.target in ADDITIONS:
            sides = sides_of(node)
            return sides if all(alike(side, node) for side in sides) else []
        source = node.args[0] if node.args else None
        if not isinstance(source, fx.Node) or width_of(source) != width_of(node):
            return []
        module = module_of(self.model, node)
        if isinstance(module, BorderBias):
            return [source] if self.calls[str(node.target)] == 1 else []
        pools = isinstance(module, POOLS) and not getattr(module, "return_indices", False)
        pools = pools or (node.target is F.adaptive_avg_pool2d and len(node.args) == 2)
        passes = pools or type(module) in POINTWISE or self.depthwise(node) is not None
        return [source] if passes or self._is_function(node) or _thins(node) else []

    def _is_function(self, node: fx.Node) -> bool:
        called = node.op in ("call_function", "call_method") and node.target in FUNCTIONS
        return called and len(node.args) == 1 and not any(node.kwargs.values())

    def after(self, node: fx.Node, constants: Values) -> Values:
        """What a node makes of constants."""
        module: Any = module_of(self.model, node)
        function = module if type(module) in POINTWISE else FUNCTIONS.get(node.target) if module is None else None
        if function is None:
            return constants
        with torch.no_grad():
            made: Values = function(torch.from_numpy(constants.copy()).view(1, -1, 1, 1)).flatten().numpy()
        return made

    def plain(self, node: fx.Node) -> nn.Conv2d | None:
        """The convolution that is called here and nowhere else, and whose filters can be had at other places."""
        conv = self._convolution(node)
        return conv if conv is not None and conv.groups == 1 else None

    def depthwise(self, node: fx.Node) -> nn.Conv2d | None:
        """The same with one filter for each channel."""
        conv = self._convolution(node)
        return conv if conv is not None and 1 < conv.groups == conv.in_channels == conv.out_channels else None

    def _convolution(self, node: fx.Node) -> nn.Conv2d | None:
        module = module_of(self.model, node)
        if type(module) is not nn.Conv2d or self.calls[str(node.target)] > 1 or len(node.args) != 1 or node.kwargs:
            return None
        return module

    def linear(self, node: fx.Node, user: fx.Node) -> list[fx.Node]:
        """The linear layers that read one number a channel, where these are all that reads what the user makes."""
        if not _is_mean(user) and not (self._is_one_pixel(node) and _is_flattened(user, self.model)):
            return []
        found, ahead = [], [user]
        while ahead:
            made = ahead.pop()
            for reader in made.users:
                module = module_of(self.model, reader)
                if type(module) in NOTHING:
                    ahead.append(reader)
                elif type(module) is nn.Linear and self.calls[str(reader.target)] == 1 and reader.args == (made,):
                    found.append(reader)
                else:
                    return []
        return found

    def _is_one_pixel(self, node: fx.Node) -> bool:
        """Whether a value has one pixel for images of any size."""
        module = module_of(self.model, node)
        size: Any = module.output_size if isinstance(module, nn.AdaptiveAvgPool2d) else None
        size = node.args[1] if node.target is F.adaptive_avg_pool2d and len(node.args) == 2 else size
        return bool(size in (1, (1, 1), [1, 1]))

    def branch(self, embed: Embed) -> fx.Node | None:
        """The convolution that makes what is embedded, and nothing else."""
        node = embed.value
        while len([user for user in node.users if not asks_for_size(user)]) == 1:
            if self.plain(node) is not None:
                return node
            sources = self.sources(node)
            if len(sources) != 1:
                return None
            node = sources[0]
        return None

    def corrects(self, border: fx.Node, source: fx.Node) -> bool:
        """Whether a node corrects the border of a convolution that reads the source, and could do so within it."""
        module, output = module_of(self.model, border), border.args[0] if border.args else None
        if not isinstance(module, BorderBias) or self.calls[str(border.target)] > 1 or border.args != (output, source):
            return False
        if not isinstance(output, fx.Node) or output.args != (source,) or len(output.users) > 1:
            return False
        conv = self.plain(output)
        same = ("stride", "padding", "dilation")
        return conv is not None and all(tuple(getattr(conv, n)) == tuple(getattr(module, n)) for n in same)

    # in multiply-adds of a convolution

    def border_price(self, border: fx.Node) -> float:
        """What it costs to correct a border."""
        elements = (width_of(border) or 0) * math.prod(size_of(border))
        return self.prices.border * elements + self.prices.step / self.batch

    def use(self, node: fx.Node) -> float:
        """One pair of input and output channels of a convolution; one input of a linear layer."""
        conv: Any = self.model.get_submodule(str(node.target))
        if isinstance(conv, nn.Linear):
            return float(conv.out_features)
        return float(math.prod(conv.kernel_size) * math.prod(size_of(node)))

    def price(self, node: fx.Node, width: int, gathers: bool) -> float:
        """What it costs to move the channels of a value of this width."""
        one = self.prices.gather if gathers else self.prices.pad
        return one * width * math.prod(size_of(node)) + self.prices.step / self.batch

    def pays(self, embed: Embed) -> bool:
        """Whether a branch had better be computed at the width of what it is embedded in."""
        made, width = self.branch(embed), len(embed.places)
        if made is None:
            return True  # to be seen from the whole stream
        wider = self.prices.saved(width, width_of(made) or 0)
        conv: Any = self.plain(made)
        return wider * conv.in_channels * self.use(made) < self.price(embed.node, width, embed.gathers)


def _is_mean(node: fx.Node) -> bool:
    """x.mean((2, 3)): one number a channel."""
    if node.target not in (torch.mean, "mean"):
        return False
    named: dict[str, Any] = {**dict(zip(("input", "dim", "keepdim"), node.args, strict=False)), **node.kwargs}
    axes, keeps = named.pop("dim", None), named.pop("keepdim", False)
    whole = isinstance(axes, (tuple, list)) and {axis % 4 for axis in axes if isinstance(axis, int)} == {2, 3}
    return whole and keeps is False and named.keys() == {"input"}


def _is_flattened(node: fx.Node, model: fx.GraphModule) -> bool:
    """torch.flatten(x, 1)"""
    module = module_of(model, node)
    if type(module) is nn.Flatten:
        return (module.start_dim, module.end_dim) == (1, -1)
    named = {**dict(zip(("input", "start_dim"), node.args, strict=False)), **node.kwargs}
    called = node.target in (torch.flatten, "flatten") and len(node.args) < 3
    return called and named.keys() == {"input", "start_dim"} and bool(named["start_dim"] == 1)


def _thins(node: fx.Node) -> bool:
    """Whether a node takes some of the pixels: x[:, :, ::2, ::2]."""
    cuts = node.args[1] if node.target is operator.getitem else None
    return isinstance(cuts, tuple) and cuts[:2] == (slice(None),) * 2 and all(isinstance(cut, slice) for cut in cuts)


def size_of(node: fx.Node) -> tuple[int, ...]:
    """Height and width of an image's value."""
    return tuple(node.meta["val"].shape[2:])


TOLERANCE = 1e-6
"""Of constants, by the largest of them: as they are rounded in 32 bits."""


def close(found: Values, asked: Values, scale: float, dtype: torch.dtype) -> bool:
    """Whether constants are the same, up to the order in which they were added; none is where one is not known.

    By the largest constant around, in the precision of the type, but in no less than that of 32 bits.

    >>> one, asked = np.array([1.0, 0.0]), np.array([1.0 + 1e-9, 0.0])
    >>> close(one, asked, 1.0, torch.float32), close(one, asked, 1.0, torch.float64)
    (True, False)
    >>> close(np.array([np.nan]), np.array([0.0]), 1.0, torch.float32)
    False
    """
    tolerance = min(TOLERANCE, 16 * torch.finfo(dtype).eps) * scale
    return bool(np.all(np.abs(found - asked) <= tolerance))
