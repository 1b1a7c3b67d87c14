"""Residual streams: which filters write the same channel, found by following channels through the traced graph.

Each filter begins a channel of its own. Where two tensors are added, multiplied or compared element by element, their
channels become one; concatenation, slicing, padding, splitting and shuffling move channels about; a depthwise
convolution, a norm, an activation or a pool leaves them where they are. No rule looks at a name.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, fx, nn

from asfp.flow import Unknown, Width, rule
from asfp.roles import CONVOLUTIONS, Convolution, is_depthwise

Ids = npt.NDArray[np.int64]
"""Channels by number; -1 for one that is constant because nothing writes it."""


@dataclass(frozen=True, eq=False)
class Call:
    """One call of a convolution: its multiply-adds for one sample, what it reads (None: not followed), and how many
    elements it writes for one sample.

    A number in `reads` stands for one filter's output, or for a sum on its way along a stream.
    """

    name: str
    macs: int
    reads: Ids | None
    elements: int = 0


@dataclass(frozen=True, eq=False)
class Streams:
    """The channels of a model, numbered; filters of the same number write the same channel.

    >>> class Block(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.stem, self.a, self.b = nn.Conv2d(3, 2, 1), nn.Conv2d(2, 4, 1), nn.Conv2d(4, 2, 1)
    ...
    ...     def forward(self, x):
    ...         x = self.stem(x)
    ...         return (x + self.b(self.a(x))).mean()
    >>> block = Block()
    >>> streams = find_streams(block, fx.symbolic_trace(block))
    >>> streams.writes["stem"].tolist() == streams.writes["b"].tolist(), streams.writes["a"].tolist()
    (True, [2, 3, 4, 5])
    """

    writes: Mapping[str, Ids]
    """Convolution -> the channel that each of its filters writes."""
    filters: Mapping[str, Ids]
    """Convolution -> its filters, by the number that `Call.reads` has where nothing was added to their channel yet."""
    follows: Mapping[str, Ids]
    """Depthwise convolution -> the channel that each of its filters reads, and goes on writing."""
    width: npt.NDArray[np.int8]
    """`Width` by channel."""
    channel: Ids
    """What `Call.reads` and `filters` have -> the channel."""
    calls: tuple[Call, ...]
    """In the order of the graph."""
    added: npt.NDArray[np.bool_]
    """By channel, whether something is added to it."""


def shared_streams(streams: Streams, widest: Width) -> list[list[str]]:
    """The convolutions that write a stream together, stream by stream; streams wider than `widest` are left out.

    >>> ids = {"a": np.arange(4), "b": np.arange(4), "c": np.arange(4, 8)}
    >>> shared_streams(Streams(ids, ids, {}, np.zeros(8, np.int8), np.arange(8), (), np.ones(8, bool)), Width.FREE)
    [['a', 'b']]
    """
    pairs = [(torch.from_numpy(ids), torch.from_numpy(ids[:1]).expand(len(ids))) for ids in streams.writes.values()]
    root = components(len(streams.width), pairs)
    found: defaultdict[int, list[str]] = defaultdict(list)
    for name, ids in streams.writes.items():
        found[int(root[ids[0]])].append(name)
    return [
        names
        for names in found.values()
        if len({id(streams.writes[n]) for n in names}) > 1
        and max(streams.width[streams.writes[n]].max() for n in names) <= widest
    ]


def residual_streams(streams: Streams) -> list[list[str]]:
    """Those of `shared_streams`, however wide, that are made by additions; a gate and what it gates alone are none.

    >>> ids = {"a": np.arange(4), "gate": np.arange(4)}
    >>> residual_streams(Streams(ids, ids, {}, np.zeros(4, np.int8), np.arange(4), (), np.zeros(4, bool)))
    []
    """
    return [
        names
        for names in shared_streams(streams, Width.UNKNOWN)
        if any(streams.added[streams.writes[n]].any() for n in names)
    ]


def find_streams(model: nn.Module, graph: fx.GraphModule) -> Streams:
    """The channels that the convolutions of `model` write, from the graph that was traced from it.

    With shapes in the graph (example inputs) reshapes are followed too; without them they end a stream.

    >>> graph = fx.symbolic_trace(nn.Sequential(nn.Conv2d(3, 4, 1), nn.Conv2d(4, 2, 1)))
    >>> {name: ids.tolist() for name, ids in find_streams(graph, graph).writes.items()}
    {'0': [0, 1, 2, 3], '1': [4, 5]}
    """
    flow = Flow(model, graph)
    for node in graph.graph.nodes:
        flow.visit(node)
    return flow.result()


class Flow:
    """What is known of each value: a tensor of channel numbers, of size 1 along every axis that they do not lie on.

    None stands for a value that is not followed, a tuple for the parts of a tensor that was cut.
    """

    def __init__(self, model: nn.Module, graph: fx.GraphModule) -> None:
        self.names = {id(module): name for name, module in model.named_modules()}
        self.modules = dict(graph.named_modules())
        self.known: dict[fx.Node, Any] = {}
        self.written: dict[int, tuple[list[str], Tensor]] = {}
        self.followed: dict[str, Tensor] = {}
        self.calls: list[Call] = []
        self.same: list[tuple[Tensor, Tensor]] = []
        self.marks: list[tuple[Tensor, Width]] = []
        self.sums: list[Tensor] = []
        self.size = 0

    def visit(self, node: fx.Node) -> None:
        """Find out what the node's value holds; its inputs were visited before."""
        module = self.modules.get(str(node.target)) if node.op == "call_module" else None
        read = [self.known[n] for n in node.all_input_nodes]
        if isinstance(module, CONVOLUTIONS):
            self.known[node] = self._convolution(node, module, read[0] if read else None)
        elif node.op == "output":
            self.mark(read, Width.FULL)
        elif all(ids is None for ids in read):
            self.known[node] = None
        else:
            try:
                self.known[node] = self._checked(node, rule(self, node, module))
            except (Unknown, AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError):
                self.mark(read, Width.UNKNOWN)
                self.known[node] = None

    def _checked(self, node: fx.Node, ids: Any) -> Any:
        """The same, where it fits the value's shape."""
        value = node.meta.get("val")
        if isinstance(ids, Tensor) and value is not None:
            if not isinstance(value, Tensor) or value.ndim != ids.ndim:
                raise Unknown
            if any(a not in (1, b) for a, b in zip(ids.shape, value.shape, strict=True)):
                raise Unknown
        return ids

    def new(self, n: int) -> Tensor:
        """Numbers that nothing has yet."""
        self.size += n
        return torch.arange(self.size - n, self.size, device="cpu")

    def mark(self, read: Sequence[Any], width: Width) -> None:
        """These channels are at least so wide."""
        for ids in read:
            if isinstance(ids, Tensor):
                self.marks.append((ids.flatten(), width))
            elif ids is not None:
                self.mark(ids, width)

    def join(self, a: Tensor, b: Tensor) -> None:
        """Channels that are one, in pairs."""
        self.same.append((a.flatten(), b.flatten()))

    def sum(self, parts: Sequence[Tensor]) -> Tensor:
        """Channels of their own that are one with those of each part."""
        if all(torch.equal(ids, parts[0]) for ids in parts):
            return parts[0]
        result = self.new(parts[0].numel()).view(parts[0].shape)
        for ids in parts:
            self.join(ids, result)
        self.sums.append(result.flatten())
        return result

    def product(self, parts: Sequence[Tensor]) -> Tensor:
        """The channels of the first part, one with those of the others: a product has what both factors have."""
        for ids in parts[1:]:
            self.join(ids, parts[0])
        return parts[0]

    def _convolution(self, node: fx.Node, module: Convolution, ids: Any) -> Tensor | None:
        name = self.names[id(module)]
        dims = module.weight.ndim
        if isinstance(ids, Tensor) and tuple(ids.shape) != (1, module.in_channels, *[1] * (dims - 2)):
            self.mark([ids], Width.FULL)
            ids = None
        elif not isinstance(ids, Tensor):
            self.mark([ids], Width.UNKNOWN)
            ids = None
        reads = None if ids is None else ids.flatten()
        known = None if reads is None else reads.numpy()
        self.calls.append(Call(name, _macs(node, module), known, _positions(node, module) * module.out_channels))
        shape = (1, -1, *[1] * (dims - 2))
        if module.transposed and module.groups > 1:
            return None
        if is_depthwise(module):
            if reads is None:
                return None
            reads = reads.repeat_interleave(module.out_channels // module.in_channels)
            self.join(self.followed.setdefault(name, reads), reads)
            return reads.view(shape)
        names, own = self.written.get(id(module.weight)) or ([], self.new(module.out_channels))
        self.written[id(module.weight)] = ([*names, name], own)
        return own.view(shape)

    def result(self) -> Streams:
        """All that was found, with one number for channels that are one."""
        root = components(self.size, self.same)
        rooted = [(names, root[ids.numpy()]) for names, ids in self.written.values()]
        numbered = {name: ids for names, ids in rooted for name in names}
        filters = {name: ids.numpy() for names, ids in self.written.values() for name in names}
        width = np.zeros(self.size, np.int8)
        for ids, level in self.marks:
            at = root[ids[ids >= 0].numpy()]
            width[at] = np.maximum(width[at], level)
        follows = {name: _rooted(root, ids.numpy()) for name, ids in self.followed.items()}
        added = np.zeros(self.size, bool)
        for ids in self.sums:
            added[root[ids.numpy()]] = True
        return Streams(numbered, filters, follows, width, root, tuple(self.calls), added)


def components(size: int, same: Sequence[tuple[Tensor, Tensor]]) -> Ids:
    """For each channel the lowest number among those that are one with it; numbers below 0 are no channels.

    >>> components(5, [(torch.tensor([1, -1]), torch.tensor([3, 0])), (torch.tensor([3]), torch.tensor([4]))])
    array([0, 1, 2, 1, 1])
    """
    root = np.arange(size)
    pairs = [np.concatenate([pair[side].numpy() for pair in same]) for side in (0, 1)] if same else [root, root]
    both = (pairs[0] >= 0) & (pairs[1] >= 0)
    a, b = pairs[0][both], pairs[1][both]
    while True:
        lowest = np.minimum(root[a], root[b])
        before = root.copy()
        for side in (root[a], root[b], a, b):
            np.minimum.at(root, side, lowest)
        root = root[root]
        if (root == before).all():
            return root


def _rooted(root: Ids, ids: Ids) -> Ids:
    return np.where(ids >= 0, root[ids], -1) if root.size else ids


def _macs(node: fx.Node, module: Convolution) -> int:
    """Positions times weights, for one sample; without shapes, the weights."""
    return _positions(node.all_input_nodes[0] if module.transposed else node, module) * int(module.weight.numel())


def _positions(node: fx.Node, module: Convolution) -> int:
    """Height times width of a value; 1 where shapes are not known."""
    value = node.meta.get("val")
    return math.prod(value.shape[-(module.weight.ndim - 2) :]) if isinstance(value, Tensor) else 1
