"""Values whose channels are put among constants, in whatever order: what compaction leaves where branches are added."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import fx

from asfp.compaction.graph import attribute
from asfp.deployment.padding import is_constant, padding_of, width_of

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
