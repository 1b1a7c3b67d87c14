"""For deployment: channels that would be moved, or put among constants, are computed where they belong.

Where a residual stream was pruned layer by layer, branches are gathered into place before they are added. That has the
fewest multiply-adds, and each gather is a pass over memory that costs more than the zero filters it spares, most of all
in small networks. With zero filters in their places a branch is added as it is:

    x + gather(conv(y, w), places, fill) = x + conv(y, w'),    w'[i] = w[places[i]], or 0 with the bias fill[i]

The stream itself is brought to one width from its first layer on; what reads it has zero weights for what is new. Where
constants were cut out of what a padded convolution reads, one of them, or a channel of ones, takes the place of the
correction of its border. And widths are filled up to those that an engine has fast kernels for.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from asfp.compaction.effects import free_of_effects
from asfp.compaction.layers import BorderBias, Pick, Widen
from asfp.compaction.layout import Prices
from asfp.deployment.embeds import Places
from asfp.deployment.joined import Stream
from asfp.deployment.padding import conv_like, meta_of, module_of, width_of
from asfp.deployment.widths import PRICES, Kernels, Reading
from asfp.trace import has_effect


def widen_streams(model: nn.Module, kernels: Kernels, *, batch: int = 1, prices: Prices = PRICES) -> nn.Module:
    """In place, of what `fold_batch_norms` gave: zero filters instead of gathers and padding, where they cost less.

    By prices as of `layout="auto"`, for batches of so many; the result is the same for every size. A stream stays as it
    is where something makes it that is no convolution, or where its constants cannot be had otherwise.

    >>> import asfp
    >>> from asfp.deployment.folding import fold_batch_norms
    >>> net = asfp.create_model("resnet20").eval()
    >>> x = torch.zeros(1, 3, 32, 32)
    >>> _ = asfp.SoftPruner(net, 0.4, 1, example_inputs=x).step(1)
    >>> small = fold_batch_norms(asfp.compact(net, x), x)
    >>> gathers = lambda model: sum(node.target == "index_select" for node in model.graph.nodes)
    >>> gathers(small) > 0, gathers(widen_streams(small, Kernels()))
    (True, 0)
    """
    if not isinstance(model, fx.GraphModule) or not free_of_effects(model):
        return model
    kept: set[fx.Node] = set()
    while (found := _next_stream(Reading(model, kernels, batch, prices), kept)) is not None:
        _Rewrite(found).run()
        kept.update((*found.borders, found.members[0]))
        model.graph.eliminate_dead_code(has_effect)
    model.delete_all_unused_submodules()
    model.recompile()
    return model


def _next_stream(reading: Reading, kept: set[fx.Node]) -> Stream | None:
    """The first stream with embeds that had better be gone; those that had not are added to `kept`."""
    while True:
        kept.update(node for node, embed in reading.followed.items() if not reading.pays(embed))
        found = next((stream for stream in _streams(reading, kept) if stream.is_worth_a_look(kept)), None)
        if found is None or found.pays():
            return found
        whole = {node for node, embed in found.joined.items() if reading.branch(embed) is None}
        kept.update(whole or found.joined or found.borders or found.members[:1])


def _streams(reading: Reading, kept: set[fx.Node]) -> Iterable[Stream]:
    parent: dict[fx.Node, fx.Node] = {}

    def root(node: fx.Node) -> fx.Node:
        while (above := parent.setdefault(node, node)) is not node:
            node = above
        return node

    joined = {node: embed for node, embed in reading.followed.items() if node not in kept}
    sources: dict[fx.Node, list[fx.Node]] = {}
    for node in reading.model.graph.nodes:
        sources[node] = [joined[node].value] if node in joined else reading.sources(node)
        for source in sources[node]:
            parent[root(source)] = root(node)
        if reading.plain(node) is not None:
            root(node)
    members: dict[fx.Node, list[fx.Node]] = {}
    for node in reading.model.graph.nodes:
        if node in parent:
            members.setdefault(root(node), []).append(node)
    for found in members.values():
        here = {node: joined[node] for node in found if node in joined}
        yield Stream(reading, found, {node: sources[node] for node in found}, here, kept)


class _Rewrite:
    """A stream, brought to its one width in the graph."""

    def __init__(self, stream: Stream) -> None:
        self.stream, self.reading = stream, stream.reading

    def run(self) -> None:
        """Filters, kernels and corrections of all that makes, passes on or reads the stream; embeds are gone then."""
        for node in self.stream.members:
            self._rewrite_readers(node)
        for node in self.stream.members:
            if self.stream.makes(node) or self.reading.depthwise(node) is not None:
                self._make(node)
            module = module_of(self.reading.model, node)
            if isinstance(module, BorderBias) and self.stream.sources[node]:
                module.integral = _put(module.integral, 0, self.stream.width, self.stream.places[node])
            node.meta = meta_of(node, self.stream.width)
        instead: dict[fx.Node, fx.Node] = {}
        for node, embed in self.stream.joined.items():
            instead[node] = instead.get(embed.value, embed.value)
            node.replace_all_uses_with(instead[node])

    def _rewrite_readers(self, node: fx.Node) -> None:
        graph, places = self.reading.model.graph, self.stream.places[node]
        pick: fx.Node | None = None
        for user in self.stream.readers(node):
            conv = self.reading.plain(user)
            if conv is not None:
                weight = _put(conv.weight.detach(), 1, self.stream.width, places)
                self._carry(user, node, weight)
                self._set(user, conv_like(conv, weight, conv.bias))
            elif not self.stream.natural(node):
                if pick is None:
                    with graph.inserting_after(node):
                        pick = graph.call_module(self._add("picked", Pick(torch.from_numpy(places), 1)), (node,))
                    pick.meta = dict(node.meta)
                user.replace_input_with(node, pick)

    def _carry(self, reader: fx.Node, node: fx.Node, weight: Tensor) -> None:
        """The kernel of a constant channel in place of the correction of a border."""
        border = next(iter(reader.users), None)
        if border not in self.stream.carriers or self.stream.borders[border] is not node:
            return
        place = self.stream.carriers[border]
        correction: Any = module_of(self.reading.model, border)
        weight[:, place] = correction.kernel() / float(self.stream.constants[node][place])
        border.replace_all_uses_with(reader)

    def _make(self, node: fx.Node) -> None:
        """Filters at their places, zero filters elsewhere, whose biases are the constants that are asked for there."""
        places, constants = self.stream.places[node], self.stream.constants[node]
        conv = self.reading.plain(node) or self.reading.depthwise(node)
        if conv is None:
            if not self.stream.natural(node) or not self.stream.is_moved(node):
                self._embed(node)
            return
        bias: Tensor | None = torch.from_numpy(constants).to(conv.weight)
        if conv.bias is not None:
            bias[torch.from_numpy(places)] = conv.bias.detach()  # type: ignore[index]
        elif not constants.any():
            bias = None
        self._set(node, conv_like(conv, _put(conv.weight.detach(), 0, self.stream.width, places), bias))

    def _embed(self, node: fx.Node) -> None:
        """What comes from elsewhere, among the constants of the whole stream."""
        graph, value = self.reading.model.graph, self.reading.embeds[node].value
        index, fill = self.stream.index_of(node)
        new = index < 0
        column = torch.from_numpy(fill).to(node.meta["val"].dtype).view(1, -1, 1, 1)
        with graph.inserting_before(node):
            if not new.any():
                made = graph.call_module(self._add("picked", Pick(torch.from_numpy(index), 1)), (value,))
            elif self.stream.is_moved(node):
                index[new] = (width_of(value) or 0) + np.arange(int(new.sum()))
                widen = Widen(torch.from_numpy(index), column[:, torch.from_numpy(new)], 1)
                made = graph.call_module(self._add("embedded", widen), (value,))
            else:
                first, last = np.flatnonzero(~new)[[0, -1]]
                before, after = column[:, :first], column[:, last + 1 :]
                if fill[new].any():
                    parts = [self._constant(before, value), value, self._constant(after, value)]
                    made = graph.call_function(torch.cat, (parts, 1))
                else:
                    pads = (0, 0, 0, 0, before.shape[1], after.shape[1])
                    made = graph.call_function(F.pad, (value, pads))
        made.meta = meta_of(node, self.stream.width)
        node.replace_all_uses_with(made)

    def _constant(self, column: Tensor, like: fx.Node) -> fx.Node:
        """Constants, a map each, as large as those of a value."""
        graph, name = self.reading.model.graph, "around"
        while hasattr(self.reading.model, name):
            name += "_"
        self.reading.model.register_buffer(name, column)
        constant = graph.get_attr(name)
        constant.meta = {"val": column}
        shape = graph.call_function(getattr, (like, "shape"))
        sizes = [graph.call_function(operator.getitem, (shape, axis)) for axis in (0, 2, 3)]
        made = graph.call_method("expand", (constant, [sizes[0], -1, *sizes[1:]]))
        made.meta = meta_of(like, column.shape[1])
        return made

    def _set(self, node: fx.Node, module: nn.Module) -> None:
        self.reading.model.set_submodule(str(node.target), module)

    def _add(self, name: str, module: nn.Module) -> str:
        base, count = name, 0
        while hasattr(self.reading.model, name):
            count += 1
            name = f"{base}{count}"
        self.reading.model.add_submodule(name, module)
        return name


def _put(values: Tensor, axis: int, width: int, places: Places) -> Tensor:
    """The values at their places along an axis, and zeros between them."""
    shape = list(values.shape)
    shape[axis] = width
    return values.new_zeros(shape).index_copy_(axis, torch.from_numpy(places), values)
