"""Values whose channels are put among constants, in whatever order: what compaction leaves where branches are added."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, fx, nn

from asfp.compaction.graph import attribute
from asfp.compaction.layers import Pick, Widen
from asfp.compaction.layout import is_run
from asfp.deployment.padding import is_constant, meta_of, padding_of, width_of

Places = NDArray[np.int64]
Values = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Embed:
    """A value's channels in another order, among constants: channel i is `value`'s `places[i]`, or `fill[i]` at -1."""

    node: fx.Node
    value: fx.Node
    places: Places
    fill: Values
    gathers: bool
    """Whether channels change their order, or leave."""
    inner: tuple[fx.Node, ...] = ()
    """What it is computed by, between the value and the node."""


def embed_of(model: fx.GraphModule, node: fx.Node) -> Embed | None:
    """What a value is, where it is padding, a concatenation with constants, a selection or a slice of channels.

    One of these behind another is one embed.
    """
    width = width_of(node)
    found = None if width is None else _padded(node) or _joined(model, node) or _selected(model, node) or _cut(node)
    if found is None:
        return None
    inner = embed_of(model, found.value)
    if inner is None or len(found.value.users) != 1:
        return found
    own = found.places >= 0
    places = np.where(own, inner.places[found.places], -1)
    fill = np.where(own, inner.fill[found.places], found.fill)
    return Embed(node, inner.value, places, fill, found.gathers or inner.gathers, (inner.node, *inner.inner))


def _padded(node: fx.Node) -> Embed | None:
    if node.target is not F.pad or (found := padding_of(node)) is None:
        return None
    value, before, after = found
    width = (width_of(value) or 0) + before + after
    return _between(node, value, np.zeros(width), before)


def _joined(model: fx.GraphModule, node: fx.Node) -> Embed | None:
    parts, axis = (*node.args, None, None)[:2]
    if node.target is not torch.cat or axis != 1 or node.kwargs or not isinstance(parts, (tuple, list)):
        return None
    constant = [is_constant(part) for part in parts]
    if constant.count(False) != 1 or len(parts) < 2 or any(width_of(part) is None for part in parts):
        return None
    columns = [
        attribute(model, str(part.args[0].target)).detach().double().flatten().cpu().numpy()
        if is_one
        else np.zeros(width_of(part) or 0)
        for part, is_one in zip(parts, constant, strict=True)
    ]
    at = constant.index(False)
    before = sum(len(column) for column in columns[:at])
    return _between(node, parts[at], np.concatenate(columns), before)


def _between(node: fx.Node, value: fx.Node, fill: Values, before: int) -> Embed:
    places = np.full(len(fill), -1)
    width = width_of(value) or 0
    places[before : before + width] = np.arange(width)
    return Embed(node, value, places, fill, False)


def _selected(model: fx.GraphModule, node: fx.Node) -> Embed | None:
    if node.target not in ("index_select", torch.index_select) or node.kwargs or len(node.args) != 3:
        return None
    value, axis, index = node.args
    if axis != 1 or not isinstance(value, fx.Node) or not isinstance(index, fx.Node) or index.op != "get_attr":
        return None
    places = attribute(model, str(index.target)).cpu().numpy().astype(np.int64)
    return None if width_of(value) is None else Embed(node, value, places, np.zeros(len(places)), True)


def _cut(node: fx.Node) -> Embed | None:
    """x[:, first:last], as compaction writes it."""
    value, cut = (*node.args, None, None)[:2]
    if node.target is not operator.getitem or not isinstance(cut, tuple) or len(cut) != 2 or cut[0] != slice(None):
        return None
    span: Any = cut[1]
    if not isinstance(value, fx.Node) or not isinstance(span, slice) or span.step is not None:
        return None
    if not all(n is None or isinstance(n, int) for n in (span.start, span.stop)) or (width := width_of(value)) is None:
        return None
    places = np.arange(width)[span]
    return Embed(node, value, places, np.zeros(len(places)), True)


def is_moved(index: Places, width: int) -> bool:
    """Whether an embed of so many channels is more than constants around them.

    >>> is_moved(np.array([-1, 0, 1]), 2), is_moved(np.array([-1, 1, 0]), 2), is_moved(np.array([0, 1]), 3)
    (False, True, True)
    """
    own = np.flatnonzero(index >= 0)
    return not is_run(own) or not np.array_equal(index[own], np.arange(width))


def embed_again(model: fx.GraphModule, node: fx.Node, value: fx.Node, index: Places, fill: Values) -> fx.Node:
    """Another embed in front of a node, to take its place: channels of the value, constants at -1."""
    graph, new = model.graph, index < 0
    column = torch.from_numpy(fill).to(node.meta["val"].dtype).view(1, -1, 1, 1)
    with graph.inserting_before(node):
        if not new.any():
            made = graph.call_module(add_module(model, "picked", Pick(torch.from_numpy(index), 1)), (value,))
        elif is_moved(index, width := width_of(value) or 0):
            behind = np.where(new, width + np.cumsum(new) - 1, index)
            widen = Widen(torch.from_numpy(behind), column[:, torch.from_numpy(new)], 1)
            made = graph.call_module(add_module(model, "embedded", widen), (value,))
        else:
            first, last = np.flatnonzero(~new)[[0, -1]]
            before, after = column[:, :first], column[:, last + 1 :]
            if fill[new].any():
                parts = [_constant(model, before, value), value, _constant(model, after, value)]
                made = graph.call_function(torch.cat, (parts, 1))
            else:
                made = graph.call_function(F.pad, (value, (0, 0, 0, 0, before.shape[1], after.shape[1])))
    made.meta = meta_of(node, len(index))
    return made


def _constant(model: fx.GraphModule, column: Tensor, like: fx.Node) -> fx.Node:
    """Constants, a map each, as large as those of a value."""
    graph, name = model.graph, "around"
    while hasattr(model, name):
        name += "_"
    model.register_buffer(name, column)
    constant = graph.get_attr(name)
    constant.meta = {"val": column}
    shape = graph.call_function(getattr, (like, "shape"))
    sizes = [graph.call_function(operator.getitem, (shape, axis)) for axis in (0, 2, 3)]
    made = graph.call_method("expand", (constant, [sizes[0], -1, *sizes[1:]]))
    made.meta = meta_of(like, column.shape[1])
    return made


def add_module(model: nn.Module, name: str, module: nn.Module) -> str:
    """Give a model one more module; returns under which name."""
    base, count = name, 0
    while hasattr(model, name):
        count += 1
        name = f"{base}{count}"
    model.add_module(name, module)
    return name


def put(values: Tensor, axis: int, width: int, places: Places) -> Tensor:
    """The values at their places along an axis, and zeros between them.

    >>> put(torch.tensor([5.0, 6.0]), 0, 4, np.array([3, 1]))
    tensor([0., 6., 0., 5.])
    """
    shape = list(values.shape)
    shape[axis] = width
    return values.new_zeros(shape).index_copy_(axis, torch.from_numpy(places), values)
