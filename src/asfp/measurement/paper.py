"""The paper's count: which share of each tensor's channels a convolution writes and reads, followed along the graph.

A pruned convolution writes N (1 - P) of its N channels, exactly or rounded up as in a real model. What stands behind it
(batch norm, activation, pooling) keeps that share, a concatenation averages it, and an addition has all channels: the
residual stream is not narrowed, because each block prunes channels of its own. Projections are not pruned.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn

from asfp.filters import count_pruned
from asfp.roles import CONVOLUTIONS, LEAVES, is_depthwise
from asfp.trace import Example, trace

Kept = Callable[[int, float], float]
"""(filters, rate) -> how many of them stay."""

_ADDITIONS = {
    *(operator.add, operator.iadd, operator.sub, operator.isub, torch.add, torch.sub),
    *("add", "add_", "sub", "sub_", "__add__", "__iadd__", "__radd__", "__sub__"),
}
_CONCATENATIONS = {torch.cat, torch.concat, torch.concatenate}

PRESETS: Mapping[str, tuple[str, Mapping[str, float]]] = {
    "pfec": ("vgg16", {f"features.conv{i}": 0.5 for i in (1, *range(8, 14))}),
}
"""Published choices of layers: name -> (model, layer -> rate). PFEC (Li et al., 2017) halves these of VGG-16."""


def exact_fraction(filters: int, rate: float) -> float:
    """N (1 - P), as the paper counts.

    >>> exact_fraction(16, 0.4)
    9.6
    """
    return filters * (1 - rate)


def whole_filters(filters: int, rate: float) -> float:
    """N - floor(N P), as a real model has it.

    >>> whole_filters(16, 0.4)
    10
    """
    return filters - count_pruned(filters, rate)


def convolution_macs(graph: fx.GraphModule, rates: Mapping[str, float], kept: Kept) -> float:
    """Multiply-adds of the convolutions for one sample: sum of macs * (share written) * (share read).

    `graph` is a traced model with shapes, `rates` gives each pruned convolution its rate; depthwise ones follow what
    they read.

    >>> net = nn.Sequential(nn.Conv2d(3, 10, 1), nn.ReLU(), nn.Conv2d(10, 20, 1))
    >>> convolution_macs(trace_whole(net, torch.zeros(1, 3, 1, 1)), {"0": 0.25, "2": 0.5}, exact_fraction)
    97.5
    """
    modules = dict(graph.named_modules())
    by_weight = {id(modules[name].weight): rate for name, rate in rates.items() if name in modules}
    shares: dict[fx.Node, float | None] = {}
    total = 0.0
    for node in graph.graph.nodes:
        module = modules[str(node.target)] if node.op == "call_module" else None
        read = [share for n in node.all_input_nodes if (share := shares[n]) is not None]
        if isinstance(module, CONVOLUTIONS):
            follows = is_depthwise(module)
            share = read[0] if follows else _written(module, by_weight.get(id(module.weight), 0.0), kept)
            total += _macs(node, module) * (share if follows else share * read[0])
            shares[node] = share
        else:
            shares[node] = _share(node, module, read, shares)
    return total


def trace_whole(model: nn.Module, example_inputs: Example) -> fx.GraphModule:
    """The model's graph with shapes; convolutions and batch norms stay whole.

    >>> len(trace_whole(nn.Sequential(nn.ReLU()), torch.zeros(1)).graph.nodes)
    3
    """
    return trace(model, example_inputs, LEAVES)


def _written(module: Any, rate: float, kept: Kept) -> float:
    return kept(module.out_channels, rate) / module.out_channels


def _share(
    node: fx.Node, module: nn.Module | None, read: list[float], shares: Mapping[fx.Node, float | None]
) -> float | None:
    """The share of the node's channels that are there; None for what has no channels, as sizes and parameters."""
    if node.op == "placeholder":
        return 1.0
    if not read:
        return None
    if isinstance(module, (nn.Linear, nn.MultiheadAttention, nn.Bilinear)):
        return 1.0
    if node.target in _ADDITIONS and len(read) > 1:
        return 1.0
    if node.target in _CONCATENATIONS:
        parts = [n for n in node.all_input_nodes if shares[n] is not None]
        sizes = [_channels(n) for n in parts]
        return sum(size * (shares[n] or 0.0) for n, size in zip(parts, sizes, strict=True)) / sum(sizes)
    return max(read)


def _channels(node: fx.Node) -> int:
    value = node.meta["val"]
    return int(value.shape[1]) if isinstance(value, Tensor) and value.ndim > 1 else 1


def _macs(node: fx.Node, module: Any) -> int:
    """Positions times weights, for one sample."""
    source = node.all_input_nodes[0] if module.transposed else node
    spatial = source.meta["val"].shape[-(module.weight.ndim - 2) :]
    return math.prod(spatial) * int(module.weight.numel())
