"""For deployment: a stream that branches add to in part is kept in pieces, so that nothing is padded.

    relu(x + pad(b)) = [relu(x_1 + b), relu(x_2)],    conv([x_1, x_2], w) = conv(x_1, w_1) + conv(x_2, w_2)

Engines add within the convolution that makes b, or that reads a piece; padding is a pass over memory of its own, and
the addition behind it another. Pieces that no branch writes stay as they are from block to block, or have only the
constants added that are left of the branch's zero filters.
"""

from __future__ import annotations

import copy
import operator
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import fx, nn

from asfp.compaction.effects import free_of_effects
from asfp.compaction.layers import BorderBias
from asfp.deployment.padding import (
    ADDITIONS,
    Branch,
    Span,
    alike,
    branch_of,
    conv_like,
    meta_of,
    module_of,
    sides_of,
    width_of,
)
from asfp.trace import tidy

RELUS = (torch.relu, F.relu, "relu")
POOLS = (nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d)
NARROWEST = 16
"""Channels of a piece, at least: what one instruction takes."""


def keep_in_pieces(model: nn.Module, *, pointwise: bool = False) -> nn.Module:
    """In place, of what `fold_batch_norms` gave: streams to which padded branches are added are kept in pieces.

    The result is the same up to the order of additions. A stream is left whole where its branches are not all added to
    the same channels, as nested selection adds them: every other piece is a convolution more for all that reads it. So
    it is where something makes it that is not known to treat each channel by itself. A network that writes in place is
    left alone, unless nothing else holds what is overwritten, as in compact ones. With `pointwise` only streams that
    1x1 convolutions read are cut, as those of bottlenecks: a piece of them costs what reads it the least.

    >>> import asfp
    >>> from asfp.deployment.folding import fold_batch_norms
    >>> net = asfp.create_model("torchvision:resnet18").eval()
    >>> x = torch.zeros(1, 3, 64, 64)
    >>> _ = asfp.SoftPruner(net, 0.3, 1, selection="nested", example_inputs=x).step(1)
    >>> small = fold_batch_norms(asfp.compact(net, x), x)
    >>> pads = lambda model: sum(node.target is F.pad for node in model.graph.nodes)
    >>> pads(small), pads(keep_in_pieces(small))
    (6, 0)
    """
    if not isinstance(model, fx.GraphModule) or not free_of_effects(model):
        return model
    seen: set[fx.Node] = set()
    while (stream := _next_stream(model, seen, pointwise)) is not None:
        _Rewrite(model, stream).run()
    tidy(model)
    return model


@dataclass(frozen=True)
class _Stream:
    """Values whose channels have the same numbers, in the graph's order; what is padded to be added to them."""

    members: tuple[fx.Node, ...]
    pads: Mapping[fx.Node, Branch]
    spans: tuple[Span, ...]
    """The pieces."""


def _next_stream(model: fx.GraphModule, seen: set[fx.Node], pointwise: bool) -> _Stream | None:
    """The first stream that can be had in pieces, with padded branches that were not looked at before."""
    parent: dict[fx.Node, fx.Node] = {}

    def root(node: fx.Node) -> fx.Node:
        while (above := parent.setdefault(node, node)) is not node:
            node = above
        return node

    pads: dict[fx.Node, Branch] = {}
    for node in model.graph.nodes:
        for source in _passed_on(model, node):
            if (branch := branch_of(source)) is not None:
                pads[source] = branch
            else:
                parent[root(source)] = root(node)
    streams: dict[fx.Node, list[fx.Node]] = {}
    for node in model.graph.nodes:
        if node in parent:
            streams.setdefault(root(node), []).append(node)
    calls = Counter(str(n.target) for n in model.graph.nodes if n.op == "call_module")
    for members in streams.values():
        here = {pad: branch for pad, branch in pads.items() if next(iter(pad.users)) in members}
        if not here.keys() - seen:
            continue
        seen.update(here)
        if pointwise and not _read_by_pointwise(model, members):
            continue
        own, width = {branch.own for branch in here.values()}, width_of(members[0])
        if len(own) == 1 and width is not None and all(_can_be_cut(model, node, calls) for node in members):
            ((low, high),) = own
            spans = [span for span in ((0, low), (low, high), (high, width)) if span[0] < span[1]]
            if min(last - first for first, last in spans) >= NARROWEST:
                return _Stream(tuple(members), here, tuple(spans))
    return None


class _Rewrite:
    """One stream, piece by piece: what makes it, what it is made of, and what reads it."""

    def __init__(self, model: fx.GraphModule, stream: _Stream) -> None:
        self.model, self.graph, self.stream = model, model.graph, stream
        self.spans = stream.spans
        self.pieces: dict[fx.Node, list[fx.Node]] = {}

    def run(self) -> None:
        readers = [
            (user, node) for node in self.stream.members for user in node.users if user not in self.stream.members
        ]
        for node in self.stream.members:
            self.pieces[node] = self._cut(node)
        for user, node in readers:
            self._read(user, node)
        for node in reversed(self.stream.members):
            if not node.users:
                self.graph.erase_node(node)

    def _cut(self, node: fx.Node) -> list[fx.Node]:
        """A member as its pieces, made right behind it."""
        module = module_of(self.model, node)
        with self.graph.inserting_before(node.next):
            if isinstance(module, nn.Conv2d):
                made = [self._convolve(node, module, span) for span in self.spans]
            elif isinstance(module, BorderBias):
                made = [self._correct(node, module, i) for i in range(len(self.spans))]
            elif node.target in ADDITIONS:
                made = self._add(node)
            else:
                made = [self._again(node, source) for source in self.pieces[node.args[0]]]  # type: ignore[index]
        for piece, (low, high) in zip(made, self.spans, strict=True):
            piece.meta = meta_of(node, high - low)
        return made

    def _convolve(self, node: fx.Node, conv: nn.Conv2d, filters: Span) -> fx.Node:
        """Some filters of a convolution: where it reads the stream, as a sum over the pieces."""
        (source,) = node.args
        parts = [(source, (0, conv.in_channels))]
        if source in self.pieces:
            parts = list(zip(self.pieces[source], self.spans, strict=True))  # type: ignore[index]
        total: fx.Node | None = None
        for part, (low, high) in parts:
            weight = conv.weight[slice(*filters), low:high]
            if total is not None and not weight.any():
                continue
            bias = conv.bias[slice(*filters)] if conv.bias is not None and total is None else None
            made = self.graph.call_module(self._add_module(node, conv_like(conv, weight, bias)), (part,))
            made.meta = meta_of(node, len(weight))
            total = made if total is None else self.graph.call_function(operator.add, (total, made))
            total.meta = meta_of(node, len(weight))
        assert total is not None
        return total

    def _correct(self, node: fx.Node, border: BorderBias, i: int) -> fx.Node:
        """A border correction of one piece; of the value that was convolved it only wants to know the size."""
        output, source = node.args
        piece = copy.deepcopy(border)
        piece.integral = border.integral[slice(*self.spans[i])].clone()
        sizes = self.pieces.get(source, [source])  # type: ignore[arg-type, list-item]
        args = self.pieces[output][i], sizes[0]  # type: ignore[index]
        return self.graph.call_module(self._add_module(node, piece), args)

    def _add(self, node: fx.Node) -> list[fx.Node]:
        """Both sides piece by piece; of a branch what it is there, and nothing where it is zero."""
        sides = sorted(node.all_input_nodes, key=lambda side: side in self.stream.pads)
        first, second = sides  # the first is in pieces, or the addition would not be
        branch = self.stream.pads.get(second)
        others = self.pieces[second] if branch is None else [branch.on(span) for span in self.spans]
        return [
            piece if other is None else self.graph.call_function(operator.add, (piece, other))
            for piece, other in zip(self.pieces[first], others, strict=True)
        ]

    def _again(self, node: fx.Node, source: fx.Node) -> fx.Node:
        """The same operation on a piece."""
        if _is_relu(self.model, node):
            return source if _is_relu(self.model, source) else self.graph.call_function(F.relu, (source,))
        return self.graph.call_module(str(node.target), (source,))

    def _read(self, user: fx.Node, node: fx.Node) -> None:
        """What reads the whole stream: a convolution as the sum of one a piece, anything else their concatenation."""
        module = module_of(self.model, user)
        with self.graph.inserting_before(user):
            if type(module) is nn.Conv2d and module.groups == 1 and user.args == (node,) and not user.kwargs:
                user.replace_all_uses_with(self._convolve(user, module, (0, module.out_channels)))
                self.graph.erase_node(user)
            elif isinstance(module, BorderBias):
                user.args = (user.args[0], self.pieces[node][0])
            else:
                whole = self.graph.call_function(torch.cat, (self.pieces[node], 1))
                whole.meta = dict(node.meta)
                user.replace_input_with(node, whole)

    def _add_module(self, node: fx.Node, module: nn.Module) -> str:
        name = base = f"{str(node.target).replace('.', '_')}_piece"
        count = 0
        while hasattr(self.model, name):
            count += 1
            name = f"{base}{count}"
        self.model.add_submodule(name, module)
        return name


def _passed_on(model: fx.GraphModule, node: fx.Node) -> list[fx.Node]:
    """The values of a node whose channels it passes on under their own numbers, one by one."""
    if width_of(node) is None:
        return []
    if node.target in ADDITIONS and (sides := sides_of(node)):
        return sides if all(alike(side, node) for side in sides) else []
    source = node.args[0] if node.args else None
    if not isinstance(source, fx.Node) or width_of(source) != width_of(node):
        return []
    module = module_of(model, node)
    pools = isinstance(module, POOLS) and not getattr(module, "return_indices", False)
    return [source] if _is_relu(model, node) or pools or isinstance(module, BorderBias) else []


def _read_by_pointwise(model: fx.GraphModule, members: list[fx.Node]) -> bool:
    """Whether of the convolutions that read a stream all have kernels of 1x1."""
    readers = (module_of(model, user) for node in members for user in node.users)
    kernels = {conv.kernel_size for conv in readers if isinstance(conv, nn.Conv2d)}
    return kernels == {(1, 1)}


def _of_inputs(node: fx.Node) -> bool:
    """Whether a value comes of what the network is given, and so has its batch size."""
    found, new = set[fx.Node](), [node]
    while new:
        found.update(new)
        new = [source for node in new for source in node.all_input_nodes if source not in found]
    return any(node.op == "placeholder" for node in found)


def _can_be_cut(model: fx.GraphModule, node: fx.Node, calls: Counter[str]) -> bool:
    """Whether a value can be made in pieces."""
    module = module_of(model, node)
    if type(module) is nn.Conv2d:
        return module.groups == 1 and calls[str(node.target)] == 1 and not node.kwargs and _of_inputs(node)
    return any(branch_of(source) is None for source in _passed_on(model, node))


def _is_relu(model: fx.GraphModule, node: fx.Node) -> bool:
    if node.op == "call_module":
        return type(module_of(model, node)) is nn.ReLU
    return node.op in ("call_function", "call_method") and node.target in RELUS
