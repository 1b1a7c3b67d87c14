"""Parts of tensors, sizes, and the ends of the graph: cuts, slices, shapes, inputs and outputs."""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import fx

from asfp.compaction.channels import Channels, Labels, Unsupported
from asfp.compaction.rules.base import Op, Rule, axis_of, fresh, shape_of

if TYPE_CHECKING:
    from asfp.compaction.analyse import Analysis
    from asfp.compaction.rewrite import Rewriter


@dataclass(frozen=True, eq=False)
class Parts:
    """A tensor cut along its channels: what chunk and split return."""

    source: fx.Node
    spans: tuple[tuple[int, int], ...]


class Cut(Rule):
    """chunk, split: each part is a range of channels; nothing is done until a part is taken."""

    def forward(self, op: Op, state: Analysis) -> Parts:
        source = state.channels_of(op.source)
        parts = op.node.meta["val"]
        default = 2 if op.spelling in ("chunk", "split") else 99
        if axis_of(op.get("dim", default, 0), len(shape_of(op.source))) != source.axis:
            raise Unsupported("it cuts along another axis than the channels'")
        taken = all(u.target is operator.getitem and isinstance(u.args[1], int) for u in op.node.users)
        if not isinstance(parts, (tuple, list)) or not taken:
            raise Unsupported("its parts are not taken one by one")
        ends = np.cumsum([int(p.shape[source.axis]) for p in parts])
        return Parts(
            op.source, tuple((int(e - p.shape[source.axis]), int(e)) for e, p in zip(ends, parts, strict=True))
        )

    def backward(self, op: Op, state: Analysis) -> None:
        """The parts that are taken speak for themselves."""

    def emit(self, op: Op, out: Rewriter) -> None:
        """Nothing: see Item."""


class Item(Rule):
    """x[...]: a part of a cut tensor, a slice of channels or of space, new axes of size one, a size."""

    def index(self, op: Op, state: Analysis) -> list[Any]:
        """One entry for each axis of the result's index: slices and None, an ellipsis written out."""
        given = state.plain(op.node.args[1])
        parts = list(given) if isinstance(given, tuple) else [given]
        if not all(p is None or p is Ellipsis or isinstance(p, slice) for p in parts):
            raise Unsupported("it indexes with something other than slices")
        missing = len(shape_of(op.source)) - sum(isinstance(p, slice) for p in parts)
        at = parts.index(Ellipsis) if Ellipsis in parts else len(parts)
        return [*parts[:at], *[slice(None)] * missing, *parts[at + 1 :]]

    def place(self, op: Op, state: Analysis) -> int:
        """Where in the index the channels' axis stands: also their axis in the result."""
        axis = state.channels_of(op.source).axis
        return [i for i, p in enumerate(self.index(op, state)) if p is not None][axis]

    def span(self, op: Op, state: Analysis) -> tuple[fx.Node, Labels]:
        """The tensor that channels are taken from, and which."""
        known = state.channels.get(op.source)
        if isinstance(known, Parts):
            low, high = known.spans[op.node.args[1]]  # type: ignore[index]
            return known.source, np.arange(low, high)
        here = self.index(op, state)[self.place(op, state)]
        if any(isinstance(v, fx.Node) for v in (here.start, here.stop, here.step)):
            raise Unsupported("it takes channels by something other than a plain slice")
        return op.source, np.arange(state.channels_of(op.source).size)[here]

    def takes_all(self, op: Op, state: Analysis) -> bool:
        """Whether every channel is taken, in order: a slice of space."""
        source, labels = self.span(op, state)
        return source is op.source and np.array_equal(labels, np.arange(state.channels_of(source).size))

    def forward(self, op: Op, state: Analysis) -> Channels | None:
        known = state.channels.get(op.source)
        if not isinstance(known, (Parts, Channels)):
            state.rules[op.node] = Opaque()
            return fresh(op.node)
        source, labels = self.span(op, state)
        taken = state.channels_of(source).take(labels)
        return taken if isinstance(known, Parts) else taken.moved(self.place(op, state))

    def backward(self, op: Op, state: Analysis) -> None:
        source, labels = self.span(op, state)
        need = np.zeros(state.channels_of(source).size, dtype=bool)
        need[labels] = state.need[op.node]
        state.want(source, need)

    def emit(self, op: Op, out: Rewriter) -> None:
        source, labels = self.span(op, out.state)
        physical = out.physical(source)
        place = {int(label): i for i, label in enumerate(labels)}
        inside = np.array([int(k) for k in physical.keep if int(k) in place], dtype=np.int64)
        node = out.fetch(source, inside)
        if source is op.source:  # slices of space and new axes stay
            rest = self.index(op, out.state)
            rest[self.place(op, out.state)] = slice(None)
            if any(p != slice(None) for p in rest):
                node = out.function(operator.getitem, (node, out.arguments(tuple(rest))))
        out.define(op.node, node, np.array([place[int(k)] for k in inside], dtype=np.int64))


class Take(Item):
    """index_select and narrow along the channels, by an index or a range that is known."""

    def span(self, op: Op, state: Analysis) -> tuple[fx.Node, Labels]:
        channels = state.channels_of(op.source)
        if axis_of(op.get("dim", 1), len(shape_of(op.source))) != channels.axis:
            raise Unsupported("it takes from another axis than the channels'")
        if op.spelling == "narrow":
            start, length = state.plain((op.get("start", 2), op.get("length", 3)))
            if not isinstance(start, int) or not isinstance(length, int) or start < 0:
                raise Unsupported("its range is not known")
            return op.source, np.arange(start, start + length)
        index = op.get("index", 2)
        if not isinstance(index, fx.Node) or index.op != "get_attr":
            raise Unsupported("its index is not known")
        return op.source, state.attribute(index).cpu().numpy().astype(np.int64)

    def forward(self, op: Op, state: Analysis) -> Channels:
        source, labels = self.span(op, state)
        return state.channels_of(source).take(labels)

    def backward(self, op: Op, state: Analysis) -> None:
        source, labels = self.span(op, state)
        need = np.zeros(state.channels_of(source).size, dtype=bool)
        need[labels[state.need[op.node]]] = True
        state.want(source, need)

    def emit(self, op: Op, out: Rewriter) -> None:
        source, labels = self.span(op, out.state)
        keep = np.flatnonzero(out.state.need[op.node])
        out.define(op.node, out.fetch(source, labels[keep]), keep)


class Size(Rule):
    """shape, size(): the original's, for the channels' axis; what the tensor has, for all others."""

    def forward(self, op: Op, state: Analysis) -> None:
        if isinstance(state.channels.get(op.source), Channels) and len(state.channels_of(op.source).axes) == 2:
            raise Unsupported("it asks for the size of channels that are split over two axes")

    def backward(self, op: Op, state: Analysis) -> None:
        state.exist(op.source)

    def emit(self, op: Op, out: Rewriter) -> None:
        dim = op.get("dim", 1)
        if op.spelling in ("dim", "ndimension"):
            out.define_plain(op.node, len(shape_of(op.source)))
            return
        if op.spelling == "getattr" and op.node.args[1] != "shape":
            out.define_plain(op.node, out.copy(op.node, {op.source: out.some(op.source)}))
            return
        sizes = out.size(op.source)
        if op.spelling == "len":
            out.define_plain(op.node, sizes[0])
        elif op.spelling == "size" and dim is not None:
            out.define_plain(op.node, sizes[axis_of(dim, len(sizes))])
        elif any(user.op == "call_method" and user.args[0] is op.node for user in op.node.users):
            out.define_plain(op.node, out.function(torch.Size, (list(sizes),)))
        else:
            out.define_plain(op.node, sizes)


class Opaque(Rule):
    """Arithmetic on sizes, parts of results that were never followed: copied as they are."""

    def forward(self, op: Op, state: Analysis) -> Any:
        return fresh(op.node)

    def backward(self, op: Op, state: Analysis) -> None:
        for node in op.node.all_input_nodes:
            state.want_full(node)

    def emit(self, op: Op, out: Rewriter) -> None:
        args, kwargs = out.arguments((op.node.args, op.node.kwargs))
        if op.node.op == "call_function" and not _has_nodes((args, kwargs)):
            out.define_plain(op.node, op.node.target(*args, **kwargs))  # type: ignore[operator]
        elif op.node.target is operator.getitem and isinstance(args[0], tuple) and isinstance(args[1], (int, slice)):
            out.define_plain(op.node, args[0][args[1]])
        else:
            out.define_full(op.node, out.copy(op.node, {n: out.full(n) for n in op.node.all_input_nodes}))


def _has_nodes(tree: Any) -> bool:
    found: list[fx.Node] = []
    fx.node.map_arg(tree, lambda n: found.append(n) or n)  # type: ignore[func-returns-value]
    return bool(found)


class Output(Rule):
    """What the model returns: all of it, at full width."""

    def forward(self, op: Op, state: Analysis) -> None:
        return None

    def backward(self, op: Op, state: Analysis) -> None:
        for node in op.node.all_input_nodes:
            state.want_full(node)

    def emit(self, op: Op, out: Rewriter) -> None:
        out.graph.output(fx.node.map_arg(op.node.args[0], out.full))


class Source(Rule):
    """Inputs and parameters: there as they are. A parameter with one number a channel is a known constant."""

    def forward(self, op: Op, state: Analysis) -> Channels | None:
        known = fresh(op.node)
        if op.node.op == "get_attr" and known is not None and known.size == math.prod(shape_of(op.node)):
            vector = state.value_of(op.node).detach().double().reshape(-1).cpu().numpy()
            return Channels(known.axes, np.zeros(known.size, dtype=bool), vector)
        return known

    def backward(self, op: Op, state: Analysis) -> None:
        """Nothing stands before it."""

    def emit(self, op: Op, out: Rewriter) -> None:
        out.define_full(op.node, out.graph.node_copy(op.node))
