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

import torch
from torch import Tensor, fx, nn
from torch.nn.utils import skip_init

from asfp.compaction.effects import free_of_effects
from asfp.compaction.layers import BorderBias, Pick
from asfp.compaction.layout import Prices, is_run
from asfp.deployment.embeds import Places, add_module, embed_again, put
from asfp.deployment.joined import Stream
from asfp.deployment.padding import conv_like, meta_of, module_of
from asfp.deployment.widths import PRICES, Kernels, Reading
from asfp.trace import has_effect, tidy


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
    for _ in range(len(model.graph.nodes)):  # each stream once
        found = _next_stream(Reading(model, kernels, batch, prices), kept)
        if found is None:
            break
        kept.update((*_Rewrite(found).run(), *found.borders, found.members[0]))
        model.graph.eliminate_dead_code(has_effect)
    tidy(model)
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
        self.picked: list[fx.Node] = []
        self.instead: dict[fx.Node, fx.Node] = {}

    def run(self) -> list[fx.Node]:
        """Filters, kernels and corrections of all that makes, passes on or reads the stream; embeds are gone then.

        Returns what takes some channels of it, for what is no layer.
        """
        for node, readers in [(node, self.stream.readers(node)) for node in self.stream.members]:
            self._rewrite_readers(node, readers)
        for node in self.stream.members:
            if self.stream.makes(node) or self.reading.depthwise(node) is not None:
                self._make(node)
            module = module_of(self.reading.model, node)
            if isinstance(module, BorderBias) and self.stream.sources[node]:
                module.integral = put(module.integral, 0, self.stream.width, self.stream.places[node])
            node.meta = meta_of(node, self.stream.width)
        for node, embed in self.stream.joined.items():
            self._replace(node, self._now(embed.value))
        return self.picked

    def _replace(self, node: fx.Node, other: fx.Node) -> None:
        node.replace_all_uses_with(other)
        self.instead[node] = other

    def _now(self, node: fx.Node) -> fx.Node:
        """The node, or what has taken its place."""
        return self.instead.get(node, node)

    def _rewrite_readers(self, node: fx.Node, readers: list[fx.Node]) -> None:
        places = self.stream.places[node]
        pick: fx.Node | None = None
        for user in readers:
            conv = self.reading.plain(user)
            if conv is not None:
                weight = put(conv.weight.detach(), 1, self.stream.width, places)
                self._carry(user, node, weight)
                self._set(user, conv_like(conv, weight, conv.bias))
            elif linear := self.reading.linear(node, user):
                for layer in linear:
                    self._set(layer, _wider(module_of(self.reading.model, layer), self.stream.width, places))
            elif not self.stream.natural(node):
                pick = pick or self._pick(node)
                user.replace_input_with(self._now(node), pick)

    def _pick(self, node: fx.Node) -> fx.Node:
        """A value's own channels."""
        graph, places = self.reading.model.graph, self.stream.places[node]
        with graph.inserting_after(source := self._now(node)):
            if is_run(places):
                span = (slice(None), slice(int(places[0]), int(places[-1]) + 1))
                pick = graph.call_function(operator.getitem, (source, span))
            else:
                name = add_module(self.reading.model, "picked", Pick(torch.from_numpy(places), 1))
                pick = graph.call_module(name, (source,))
        pick.meta = dict(node.meta)
        self.picked.append(pick)
        return pick

    def _carry(self, reader: fx.Node, node: fx.Node, weight: Tensor) -> None:
        """The kernel of a constant channel in place of the correction of a border."""
        border = next(iter(reader.users), None)
        if border not in self.stream.carriers or self.stream.borders[border] is not node:
            return
        place = self.stream.carriers[border]
        correction: Any = module_of(self.reading.model, border)
        weight[:, place] = correction.kernel() / float(self.stream.constants[node][place])
        self._replace(border, reader)

    def _make(self, node: fx.Node) -> None:
        """Filters at their places, zero filters elsewhere, whose biases are the constants that are asked for there."""
        places, constants = self.stream.places[node], self.stream.constants[node]
        conv = self.reading.plain(node) or self.reading.depthwise(node)
        if conv is None:
            embed = self.reading.embeds[node]
            again = embed.gathers or embed.inner
            if not self.stream.natural(node) or (again and not self.stream.is_moved(node)):
                made = embed_again(self.reading.model, node, self._now(embed.value), *self.stream.index_of(node))
                self._replace(node, made)
            return
        bias: Tensor | None = torch.from_numpy(constants).to(conv.weight)
        if conv.bias is not None:
            bias[torch.from_numpy(places)] = conv.bias.detach()  # type: ignore[index]
        elif not constants.any():
            bias = None
        self._set(node, conv_like(conv, put(conv.weight.detach(), 0, self.stream.width, places), bias))

    def _set(self, node: fx.Node, module: nn.Module) -> None:
        self.reading.model.set_submodule(str(node.target), module)


def _wider(linear: Any, width: int, places: Places) -> nn.Linear:
    weight = put(linear.weight.detach(), 1, width, places)
    wider: nn.Linear = skip_init(nn.Linear, width, len(weight), linear.bias is not None, dtype=weight.dtype)
    with torch.no_grad():
        wider.weight.copy_(weight)
        if linear.bias is not None:
            wider.bias.copy_(linear.bias)
    return wider.eval()
