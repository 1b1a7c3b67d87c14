"""The analysis applied: a new graph over smaller layers, constants folded, residual additions laid out."""

from __future__ import annotations

import copy
import operator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn

from asfp.compaction.analyse import Analysis
from asfp.compaction.channels import Channels, Labels
from asfp.compaction.effects import IN_PLACE
from asfp.compaction.layers import Pick, Widen
from asfp.compaction.rules.base import Op, shape_of, take


@dataclass(frozen=True, eq=False)
class Physical:
    """What there is of an original value: a node of the new graph that holds channels `keep`, in this order.

    `virtual`: the node has the shape from before the channels were split over two axes.
    """

    node: fx.Node
    keep: Labels
    virtual: bool = False


class Rewriter:
    """Builds the compact graph, value by value; the rules call it."""

    def __init__(self, state: Analysis) -> None:
        self.state = state
        self.graph = fx.Graph()
        self.attributes: dict[str, Any] = {}
        self.physicals: dict[fx.Node, Physical] = {}
        self.plain: dict[fx.Node, Any] = {}
        self.fetched: dict[tuple[fx.Node, bytes], fx.Node] = {}
        self.folded: list[tuple[str, int, str, int]] = []
        self.layouts: dict[str, str] = {}

    def run(self) -> tuple[dict[str, Any], fx.Graph]:
        """The modules and parameters of the compact model by name, and its graph."""
        for op in self.state.ops:
            if op.node in self.state.existing:
                self.state.rules[op.node].emit(op, self)
        for node in self.graph.nodes:
            if node.op in ("call_module", "get_attr") and str(node.target) not in self.attributes:
                self.attributes[str(node.target)] = _at(self.state.traced, str(node.target))
        return self.attributes, self.graph

    # values: what is there of them, and in which form

    def has(self, node: fx.Node) -> bool:
        return node in self.physicals

    def physical(self, node: fx.Node) -> Physical:
        return self.physicals[node]

    def ordered(self, node: fx.Node, labels: Labels) -> Labels:
        return self.state.streams.ordered(node, labels)

    def define(self, node: fx.Node, new: fx.Node, keep: Labels, *, virtual: bool = False) -> None:
        self.physicals[node] = Physical(new, np.asarray(keep, dtype=np.int64), virtual)

    def define_full(self, node: fx.Node, new: fx.Node) -> None:
        known = self.state.channels[node]
        if isinstance(known, Channels):
            self.define(node, new, np.arange(known.size))
        else:
            self.plain[node] = new

    def define_plain(self, node: fx.Node, value: Any) -> None:
        self.plain[node] = value

    def some(self, node: fx.Node) -> Any:
        """Any form of the value: good enough to ask for its device or its batch size."""
        return self.physicals[node].node if node in self.physicals else self.plain[node]

    def full(self, node: fx.Node) -> Any:
        """The value as it was, at full width."""
        if node in self.plain:
            return self.plain[node]
        return self.fetch(node, np.arange(self.state.channels_of(node).size))

    def along(self, node: fx.Node, axis: int) -> tuple[fx.Node, Labels]:
        """What is there of a value, channels along `axis`."""
        if self.state.channels_of(node).axes == (axis,):
            physical = self.physical(node)
            return physical.node, physical.keep
        return self.full(node), np.arange(shape_of(node)[axis])

    def fetch_along(self, node: fx.Node, axis: int, labels: Labels) -> fx.Node:
        if self.state.channels_of(node).axes == (axis,):
            return self.fetch(node, labels)
        assert len(labels) == shape_of(node)[axis]
        full: fx.Node = self.full(node)
        return full

    def fetch(self, node: fx.Node, labels: Labels) -> fx.Node:
        """The value with just these channels, in this order: constants are filled in where they are not there."""
        physical = self.physical(node)
        if np.array_equal(labels, physical.keep):
            return physical.node
        assert not physical.virtual
        key = (node, np.asarray(labels, dtype=np.int64).tobytes())
        if key not in self.fetched:
            self.fetched[key] = self._gather(node, physical, labels)
        return self.fetched[key]

    def _gather(self, node: fx.Node, physical: Physical, labels: Labels) -> fx.Node:
        channels = self.state.channels_of(node)
        axis, width = channels.axis, len(physical.keep)
        place = np.full(channels.size, -1)
        place[physical.keep] = np.arange(width)
        places = place[labels]
        missing = places < 0
        name = f"{_path(node)}_wide" if missing.any() else f"{_path(node)}_pick"
        if not missing.any():
            run = np.arange(places[0], places[0] + len(places)) if len(places) else places
            if len(places) and np.array_equal(places, run):
                cut = (slice(None),) * axis + (slice(int(places[0]), int(places[-1]) + 1),)
                return self.function(operator.getitem, (physical.node, cut))
            return self.insert(name, Pick(self._index(places, node), axis), (physical.node,))
        fill = np.where(channels.live, 0.0, channels.value)[labels[missing]]
        nonzero = self.state.facts(node.name, f"fill{len(self.fetched)}", lambda: fill != 0)
        if not nonzero.any():
            places = np.where(missing, width, places)
            index = None if np.array_equal(places, np.arange(width + 1)) else self._index(places, node)
            widen = Widen(index, self._column(np.zeros(1), node), axis, zero=True)
            return self.insert(name, widen, (physical.node,))
        places[missing] = width + np.arange(int(missing.sum()))
        index = None if np.array_equal(places, np.arange(len(places))) else self._index(places, node)
        return self.insert(name, Widen(index, self._column(fill, node), axis), (physical.node,))

    def size(self, node: fx.Node) -> tuple[Any, ...]:
        """The original's sizes: a number along the channels, what the new tensor has elsewhere."""
        some = self.some(node)
        known = self.state.channels[node]
        shape = self.function(getattr, (some, "shape"))
        cut = isinstance(known, Channels) and len(self.physical(node).keep) != known.size
        axis = known.axes[0] if cut else None
        count = len(shape_of(node))
        return tuple(
            shape_of(node)[i] if i == axis else self.function(operator.getitem, (shape, i)) for i in range(count)
        )

    # nodes and modules of the new graph

    def arguments(self, tree: Any) -> Any:
        return fx.node.map_arg(tree, lambda n: self.plain[n] if n in self.plain else self.full(n))

    def copy(self, node: fx.Node, instead: dict[fx.Node, Any]) -> fx.Node:
        args, kwargs = fx.node.map_arg(
            (node.args, node.kwargs), lambda n: instead[n] if n in instead else self.arguments(n)
        )
        new = self.graph.create_node(node.op, node.target, args, kwargs, node.name)
        if IN_PLACE in node.meta:
            new.meta[IN_PLACE] = node.meta[IN_PLACE]
        return new

    def call(self, node: fx.Node, target: str, *args: Any) -> fx.Node:
        return self.graph.create_node("call_module", target, args, {}, node.name)

    def function(self, function: Any, args: tuple[Any, ...]) -> fx.Node:
        return self.graph.call_function(function, args)

    def method(self, name: str, args: tuple[Any, ...]) -> fx.Node:
        return self.graph.call_method(name, args)

    def insert(self, name: str, module: nn.Module, args: tuple[Any, ...]) -> fx.Node:
        base, n = name, 1
        while name in self.attributes or _exists(self.state.traced, name):
            n += 1
            name = f"{base}{n}"
        self.attributes[name] = module
        return self.graph.call_module(name, args)

    def shrink(self, op: Op, module: nn.Module, changes: dict[str, Any]) -> str:
        """A copy of the layer with other parameters and sizes, under the same name."""
        small = copy.copy(module)
        small._parameters = dict(module._parameters)
        small._buffers = dict(module._buffers)
        for name, value in changes.items():
            if name in small._parameters:
                old = small._parameters[name]
                fresh = value if value is None or old is None else nn.Parameter(value, requires_grad=old.requires_grad)
                small._parameters[name] = fresh
            elif name in small._buffers:
                small._buffers[name] = value
            else:
                setattr(small, name, value)
        self.attributes[str(op.node.target)] = small
        return str(op.node.target)

    def module_at(self, node: fx.Node) -> Any:
        return self.attributes[str(node.target)]

    def parameter(self, node: fx.Node, labels: Labels, axis: int) -> fx.Node:
        """Some channels of a parameter used directly in forward, under its own name."""
        value = _at(self.state.traced, str(node.target))
        small = take(value, labels, value.ndim + axis)
        self.attributes[str(node.target)] = (
            nn.Parameter(small, requires_grad=value.requires_grad) if isinstance(value, nn.Parameter) else small
        )
        return self.graph.get_attr(str(node.target))

    def like(self, values: Tensor, node: fx.Node) -> Tensor:
        """Values in the precision and on the device of an original value."""
        return values.to(dtype=node.meta["val"].dtype, device=node.meta["val"].device)

    def _column(self, values: Any, node: fx.Node) -> Tensor:
        shape = [1] * len(shape_of(node))
        shape[self.state.channels_of(node).axis] = -1
        return self.like(torch.from_numpy(values).reshape(shape), node)

    def _index(self, places: Any, node: fx.Node) -> Tensor:
        return torch.as_tensor(places, dtype=torch.int64, device=node.meta["val"].device)

    # notes for the plan

    def note_folded(self, op: Op, channels: int, how: str, additions: int) -> None:
        self.folded.append((str(op.node.target), channels, how, additions))

    def note_layout(self, op: Op, how: str) -> None:
        self.layouts[op.name] = how


def _path(node: fx.Node) -> str:
    return str(node.target) if node.op == "call_module" else node.name


def _exists(root: nn.Module, name: str) -> bool:
    try:
        _at(root, name)
    except AttributeError:
        return False
    return True


def _at(root: nn.Module, target: str) -> Any:
    owner, _, name = target.rpartition(".")
    return getattr(root.get_submodule(owner), name)
