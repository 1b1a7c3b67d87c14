"""How residual additions are laid out, and where zero filters had better stay: what each way costs.

A branch that has lost channels can be added to a wider stream in three ways: gather its channels into place; pad it,
where its channels lie side by side in the stream's order; or leave its zero filters in, so that the addition stays as
plain as it was. The first two cost memory traffic, the last one multiplications. Likewise, zero filters that a batch
norm made constant can be left out and made up for at the border of what reads them, or one of them left in for all.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import fx

from asfp.compaction.channels import Channels, Labels, Mask
from asfp.compaction.rules.base import Op, Rule, shape_of
from asfp.compaction.rules.join import Arithmetic, Concatenate
from asfp.compaction.rules.parts import Item, Opaque, Size
from asfp.compaction.rules.perchannel import Identity, Normalise, Pad, Pointwise, PReLU, Reduce, Spatial
from asfp.compaction.rules.shape import Permute, Squeeze, View
from asfp.compaction.rules.weighted import Border, Weighted
from asfp.errors import AsfpError, nearest

if TYPE_CHECKING:
    from asfp.compaction.analyse import Analysis


@dataclass(frozen=True)
class Prices:
    """What leaving filters out costs, in multiply-adds of a convolution: a price for each element of the tensor that
    is made wide again or corrected at its border, and `step` for each operation that this takes, in a whole batch.

    Engines are at their best with channels in blocks of `block`, so that many are counted, and widths are brought up
    to a multiple of it by zero filters left in.

    >>> Prices(130.0, 30.0, block=8).saved(64, 45)
    16
    """

    gather: float
    pad: float
    border: float = 0.0
    step: float = 0.0
    block: int = 1
    depthwise: int = 1
    """The same where they pass depthwise layers, which engines have no other kernels for that are fast."""
    carry: bool = True
    """Whether a constant channel may carry others; not where that is too inexact."""

    def __post_init__(self) -> None:
        if not (
            isinstance(self.block, int) and isinstance(self.depthwise, int) and min(self.block, self.depthwise) >= 1
        ):
            raise AsfpError(f"{self} is no layout: block and depthwise are numbers of channels, at least 1")

    def saved(self, width: int, kept: int) -> int:
        """The channels that are saved in time: in whole blocks."""
        return (-(-width // self.block) + kept // -self.block) * self.block

    def scaled(self, by: float) -> Prices:
        return replace(self, gather=self.gather * by, pad=self.pad * by, border=self.border * by, step=self.step * by)


LAYOUTS = {
    "least": Prices(0.0, 0.0),
    "auto": Prices(gather=260.0, pad=60.0, border=30.0, step=500_000.0, block=8, depthwise=16),
    "zeros": Prices(math.inf, math.inf, block=16),
}
"""least: fewest multiply-adds, never a zero left in; auto: by rough prices for ONNX Runtime and OpenVINO on a CPU, in
whose place `tune` measures; zeros: no gather and no padding where zero filters can stay instead, and widths in blocks
of 16, for GPUs: their kernels load 16 bytes at once, and Triton's only where a width is known to be such a multiple."""

ALONG: tuple[type[Rule], ...] = (Identity, Pointwise, PReLU, Normalise, Spatial, Border)
"""Rules that pass each channel on under its own number."""
THROUGH: tuple[type[Rule], ...] = (View, Squeeze, Permute, Reduce, Concatenate)
"""Rules that pass channels on in whatever order they come."""


def prices_of(layout: str | Prices) -> Prices:
    """The prices behind a layout's name.

    >>> prices_of("least").gather
    0.0
    """
    if isinstance(layout, Prices):
        return layout
    if not isinstance(layout, str) or layout not in LAYOUTS:
        hint = nearest(str(layout), LAYOUTS)
        raise AsfpError(f"layout={layout!r} is unknown: use one of {', '.join(LAYOUTS)}.{hint}")
    return LAYOUTS[layout]


def order_of(size: int, sets: Iterable[Mask]) -> Labels:
    """An order of `size` channels in which as many of the sets as possible lie side by side, the first ones first.

    Ordered blocks are refined set by set: a set fits where the blocks it touches follow each other and only the outer
    ones are touched in part; those are split so that its parts face each other. Sets that do not fit are passed over.

    >>> a, b = np.array([1, 0, 1, 0, 1], bool), np.array([0, 0, 1, 1, 1], bool)
    >>> order_of(5, [a, b])
    array([0, 2, 4, 3, 1])
    """
    blocks: list[Labels] = [np.arange(size)]
    for mask in sets:
        hits = [int(mask[block].sum()) for block in blocks]
        touched = [i for i, n in enumerate(hits) if n]
        if not touched:
            continue
        first, last = touched[0], touched[-1]
        inner = range(first + 1, last)
        if len(touched) != last - first + 1 or any(hits[i] != len(blocks[i]) for i in inner):
            continue
        parts: list[Labels] = []
        for i, block in enumerate(blocks):
            inside, outside = block[mask[block]], block[~mask[block]]
            split = [outside, inside] if i == first and first < last else [inside, outside]
            parts += [block] if hits[i] in (0, len(block)) else split
        blocks = parts
    return np.concatenate(blocks)


def is_run(places: Labels) -> bool:
    """Whether places follow each other without a gap."""
    return len(places) > 0 and int(places[-1] - places[0]) == len(places) - 1 and bool((np.diff(places) == 1).all())


class Streams:
    """The nodes whose channels carry the same numbers, joined by additions; and an order of channels for each stream.

    A stream keeps its natural order where something that reads it needs that order, or where no addition gains.
    """

    def __init__(self, state: Analysis) -> None:
        self.state = state
        self.parent: dict[fx.Node, fx.Node] = {}
        self.ranks: dict[fx.Node, Labels] = {}
        self.ops = {op.node: op for op in state.ops}
        self._grouped: set[fx.Node] | None = None
        if not state.facts.recall("streams", "reorder", lambda: True):  # an older plan's natural order
            return
        for op in state.ops:
            for node in self._joined(op):
                self.parent[self._root(node)] = self._root(op.node)
        streams: dict[fx.Node, list[Op]] = {}
        for op in state.ops:
            streams.setdefault(self._root(op.node), []).append(op)
        for root, members in streams.items():
            self._order(root, members)

    def ordered(self, node: fx.Node, labels: Labels) -> Labels:
        """The channels in the order of the stream that the node belongs to."""
        rank = self.ranks.get(self._root(node))
        return labels if rank is None else labels[np.argsort(rank[labels], kind="stable")]

    def is_read_in_groups(self, node: fx.Node) -> bool:
        """Whether a depthwise or grouped layer reads the stream, which would need its channels picked out of more."""
        if self._grouped is None:
            readers = [op for op in self.state.ops if isinstance(self.state.rules[op.node], Weighted)]
            self._grouped = {self._root(op.source) for op in readers if not self._plain(op.node)}
        return self._root(node) in self._grouped

    def _root(self, node: fx.Node) -> fx.Node:
        path = []
        while (above := self.parent.get(node, node)) is not node:
            path.append(node)
            node = above
        self.parent.update(dict.fromkeys(path, node))
        return node

    def _joined(self, op: Op) -> list[fx.Node]:
        """The inputs that share their channels' numbers with the result."""
        rule = self.state.rules[op.node]
        known = self.state.channels[op.node]
        if not isinstance(known, Channels) or len(known.axes) != 1:
            return []
        if isinstance(rule, Arithmetic):
            return [x.node for x in rule.operands(op, self.state)[0] if x.kind == "channels"]
        if isinstance(rule, ALONG):
            source = rule.tensor(op) if isinstance(rule, Pointwise) else op.node.args[0]
            same = isinstance(source, fx.Node) and self.state.channels.get(source)
            return [source] if isinstance(same, Channels) and same.axes == known.axes else []  # type: ignore[list-item]
        return []

    def _order(self, root: fx.Node, members: list[Op]) -> None:
        sets: list[tuple[float, Mask]] = []
        for op in members:
            rule = self.state.rules[op.node]
            if isinstance(rule, Arithmetic) and rule.kind == "add":
                operands = [x for x in rule.operands(op, self.state)[0] if x.kind == "channels"]
                elements = math.prod(shape_of(op.node)[1:])
                sets += [(elements, x.live) for x in operands if len(operands) == 2 and not x.live.all()]
        if not sets or not all(self._indifferent(op.node, set()) for op in members):
            return
        merged: dict[bytes, tuple[float, Mask]] = {}
        for weight, mask in sets:
            before = merged.get(mask.tobytes(), (0.0, mask))[0]
            merged[mask.tobytes()] = (before + weight, mask)
        ranked = sorted(merged.values(), key=lambda pair: -pair[0])
        size = len(ranked[0][1])
        order = order_of(size, [mask for _, mask in ranked])
        rank = np.argsort(order, kind="stable")
        gain = sum(weight * (is_run(np.sort(rank[m])) - is_run(np.flatnonzero(m))) for weight, m in ranked)
        if gain > 0:
            self.ranks[root] = rank

    def _indifferent(self, node: fx.Node, seen: set[fx.Node]) -> bool:
        """Whether all that comes of a node reads its channels in any order."""
        if node in seen:
            return True
        seen.add(node)
        if node.op in ("placeholder", "output") or not self._producible(node):
            return False
        return all(self._reads_any_order(user, node, seen) for user in node.users)

    def _producible(self, node: fx.Node) -> bool:
        """Whether the node's channels can be made in another order: by filters, or passed on from such."""
        rule = self.state.rules[node]
        if isinstance(rule, Weighted):
            return self._plain(node)
        return isinstance(rule, (Arithmetic, *ALONG))

    def _reads_any_order(self, user: fx.Node, node: fx.Node, seen: set[fx.Node]) -> bool:
        rule = self.state.rules[user]
        if isinstance(rule, Weighted):
            return self._plain(user)
        if isinstance(rule, (Size, Opaque)):
            return True
        if isinstance(rule, THROUGH):
            known = self.state.channels[user]
            single = isinstance(known, Channels) and len(known.axes) == 1
            return single and all(self._reads_any_order(after, user, seen) for after in user.users)
        return node in self._joined(self.ops[user]) or (isinstance(rule, Border) and node is user.args[1])

    def _plain(self, node: fx.Node) -> bool:
        module: Any = self.state.traced.get_submodule(str(node.target))
        return int(getattr(module, "groups", 1)) == 1


def filter_macs(node: fx.Node, reader: fx.Node | None, state: Analysis, missing: Mask) -> float:
    """Multiply-adds of one more channel in a value that `reader` adds to: the filter that makes it, and what other
    layers spend on reading it; the mean over the missing ones. A channel that a shortcut pads with zeros has no filter
    there. Infinite where the way back to the filters leads through anything but operations that pass channels on.

    Without a reader, of all that read the value nothing is counted.
    """
    macs = 0.0
    while True:
        if reader is not None:
            macs += sum(reading_macs(user, state) for user in node.users if user is not reader)
        rule = state.rules[node]
        if isinstance(rule, Weighted):
            source = state.channels_of(node.args[0])  # type: ignore[arg-type]
            return macs + int(source.live.sum()) * _use(node, state)
        if isinstance(rule, Arithmetic) and rule.kind == "add" and macs < math.inf:
            sides = rule.operands(Op(node, None), state)[0]
            whole = all(x.kind == "channels" for x in sides)
            nodes = dict.fromkeys(x.node for x in sides)  # x + x is one filter more, not two
            return macs + sum(filter_macs(x, node, state, missing) for x in nodes) if whole else math.inf
        if isinstance(rule, Pad):
            before, after, spatial = rule.spans(state.op_of(node), state)
            inner = missing[before : missing.size - after]
            if spatial or not inner.any():
                return math.inf if spatial else macs
            share = float(inner.sum() / missing.sum())
            return macs + share * filter_macs(state.op_of(node).source, node, state, inner)
        source_node = _passed_on(node, state)
        if source_node is None:
            return math.inf
        node, reader = source_node, node


def _passed_on(node: fx.Node, state: Analysis) -> fx.Node | None:
    """The value whose channels a node passes on under their own numbers."""
    rule = state.rules[node]
    source: Any = node.args[0] if node.args else None
    if isinstance(rule, Pointwise):
        source = rule.tensor(Op(node, None))
    if not isinstance(source, fx.Node) or isinstance(rule, Border) or not isinstance(rule, (Item, *ALONG)):
        return None
    here, there = state.channels.get(node), state.channels.get(source)
    same = (
        isinstance(here, Channels)
        and isinstance(there, Channels)
        and (here.axes, here.size) == (there.axes, there.size)
    )
    return source if same and (not isinstance(rule, Item) or rule.takes_all(state.op_of(node), state)) else None


def norm_of(node: fx.Node, state: Analysis) -> fx.Node | None:
    """The batch norm that a value's channels come of, each under its own number, if there is one."""
    source: fx.Node | None = node
    while source is not None and not isinstance(state.rules[source], Normalise):
        source = _passed_on(source, state)
    return source


def is_stream(node: fx.Node, state: Analysis) -> bool:
    """Whether a value's channels come of an addition, and something reads them that does not pass them on."""
    if all(_passed_on(user, state) is node for user in node.users):
        return False
    source: fx.Node | None = node
    while source is not None:
        rule = state.rules[source]
        if isinstance(rule, Arithmetic):
            return rule.kind == "add"
        source = _passed_on(source, state)
    return False


def filters_behind(node: fx.Node, state: Analysis) -> list[fx.Node]:
    """The layers whose filters make a value's channels, a plain one and any depthwise ones in front of it.

    None where something else reads the channels on the way, but for a gate, which may be computed of what it
    multiplies, as long as that is by no layer without a squeeze in between.
    """
    layers: list[fx.Node] = []
    gate: fx.Node | None = None
    while not _read_beside(node, gate, state):
        rule, gate = state.rules[node], None
        source: Any = node.args[0] if node.args else None
        if isinstance(rule, Weighted):
            layers.append(node)
            if not is_depthwise(node, state):
                return layers if _use(node, state) < math.inf else []
        elif isinstance(rule, Arithmetic):
            source, gate = _gated(node, state), node
        elif isinstance(rule, THROUGH):
            source = source if _is_same_width(node, source, state) else None
        elif isinstance(rule, Pointwise):
            source = rule.tensor(Op(node, None))
        elif not isinstance(rule, ALONG) or isinstance(rule, Border):
            return []
        if not isinstance(source, fx.Node):
            return []
        node = source
    return []


def _read_beside(node: fx.Node, gate: fx.Node | None, state: Analysis) -> bool:
    """Whether the channels have readers beside the one asked for, and the squeeze of what that multiplies them by."""
    readers = [user for user in node.users if not isinstance(state.rules[user], (Size, Opaque))]
    squeezes = [user for user in readers if user is not gate and not isinstance(state.rules[user], Weighted)]
    return len(readers) > 1 and (gate is None or len(readers) > 2 or len(squeezes) != 1)


def _is_same_width(node: fx.Node, source: Any, state: Analysis) -> bool:
    """Whether a value has the channels of another, one for one, as pooling and flattening in front of a classifier."""
    known = [state.channels.get(x) if isinstance(x, fx.Node) else None for x in (node, source)]
    widths = [x.live.shape for x in known if isinstance(x, Channels) and x.live.ndim == 1]
    return len(widths) == 2 and widths[0] == widths[1]


def _gated(node: fx.Node, state: Analysis) -> fx.Node | None:
    """Of a product with one number for each channel, the other side, as squeeze and excitation has it."""
    rule = state.rules[node]
    if not isinstance(rule, Arithmetic) or rule.kind != "mul":
        return None
    sides = [x.node for x in rule.operands(Op(node, None), state)[0] if x.kind == "channels"]
    whole = [side for side in sides if shape_of(side) == shape_of(node)]
    return whole[0] if len(sides) == 2 and len(whole) == 1 else None


def is_depthwise(node: fx.Node, state: Analysis) -> bool:
    """Whether a layer has one filter for each channel that it reads."""
    module: Any = state.traced.get_submodule(str(node.target))
    groups = int(getattr(module, "groups", 1))
    return 1 < groups == getattr(module, "in_channels", 0) == getattr(module, "out_channels", 0)


def reading_macs(user: fx.Node, state: Analysis) -> float:
    """What one more input channel costs a layer."""
    if not isinstance(state.rules[user], Weighted):
        return 0.0 if isinstance(state.rules[user], Size) else math.inf
    return _made(user, state) * _use(user, state)


def _made(node: fx.Node, state: Analysis) -> int:
    """How many channels a layer will have as far as that is settled: zero filters that stay are among them."""
    made = state.channels_of(node).live | state.need[node]
    while len(node.users) == 1 and isinstance(state.rules[user := next(iter(node.users))], ALONG):
        if user not in state.need or state.need[user].shape != made.shape:
            break
        node, made = user, made | state.need[user]
    return int(made.sum())


def _use(node: fx.Node, state: Analysis) -> float:
    """Multiply-adds of one pair of input and output channels."""
    module: Any = state.traced.get_submodule(str(node.target))
    if int(getattr(module, "groups", 1)) > 1:
        return math.inf
    return float(math.prod(module.weight.shape[2:]) * math.prod(shape_of(node)[2:]))
