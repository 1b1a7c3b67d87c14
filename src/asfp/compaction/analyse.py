"""Which channels are constant (forward), and which must be there (backward)."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from torch import Tensor, fx

from asfp.compaction.channels import Channels, Facts, Mask, Unsupported, all_live
from asfp.compaction.graph import attribute, shared_layers
from asfp.compaction.layout import (
    LAYOUTS,
    Prices,
    Streams,
    filter_macs,
    filters_behind,
    is_run,
    is_stream,
    norm_of,
    reading_macs,
)
from asfp.compaction.rules import rule_for
from asfp.compaction.rules.base import Barrier, Op, Rule, shape_of
from asfp.compaction.sizes import is_static, is_static_number


class Analysis:
    """One pass forward finds the constants, one backward the demand; on a graph without loops that is the fixpoint.

    `need[node]` are the channels that will be there: live ones that something reads, and a constant one where only
    its shape is wanted or where a reader cannot do without it. `full` are nodes wanted at their original width.
    """

    def __init__(self, traced: fx.GraphModule, facts: Facts, prices: Prices = LAYOUTS["least"], batch: int = 1) -> None:
        self.traced = traced
        self.prices = prices
        self.batch = batch
        self.facts = facts
        self.channels: dict[fx.Node, Any] = {}
        self.rules: dict[fx.Node, Rule] = {}
        self.notes: dict[fx.Node, Any] = {}
        self.need: dict[fx.Node, Mask] = {}
        self.full: set[fx.Node] = set()
        self.existing: set[fx.Node] = set()
        self.carriers: dict[fx.Node, int] = {}
        """Layers that read one constant channel for all that they would: its number."""
        self.steady: dict[fx.Node, set[int]] = {}
        """Batch norms that make such constants: the channels."""
        self.ops = [self.op_of(node) for node in traced.graph.nodes]
        self.places = {op.node: place for place, op in enumerate(self.ops)}
        shared = shared_layers(traced)
        for op in self.ops:
            self.rules[op.node] = rule_for(op, shared.get(str(op.node.target)))
            self._forward(op)
        self.streams = Streams(self)
        for op in reversed(self.ops):
            self._backward(op)

    def op_of(self, node: fx.Node) -> Op:
        return Op(node, self.traced.get_submodule(str(node.target)) if node.op == "call_module" else None)

    def _forward(self, op: Op) -> None:
        try:
            known = self.rules[op.node].forward(op, self)
        except Unsupported as reason:
            self.rules[op.node] = Barrier(str(reason))
            known = self.rules[op.node].forward(op, self)
        except (AttributeError, IndexError, KeyError, TypeError, ValueError):  # a spelling that the rule does not know
            self.rules[op.node] = Barrier("it is called in a way that its rule does not know")
            known = self.rules[op.node].forward(op, self)
        self.channels[op.node] = known
        if isinstance(known, Channels):
            self.need[op.node] = np.zeros(known.live.shape, dtype=bool)

    def _backward(self, op: Op) -> None:
        node = op.node
        if node.op in ("output", "placeholder"):
            self.existing.add(node)
        if node not in self.existing:
            return
        if isinstance(self.channels[node], Channels) and not self.need[node].any():
            self.need[node].flat[0] = True  # something must carry the shape
        if isinstance(self.channels[node], Channels) and self.channels[node].live.ndim == 1:
            self._fill_stream(op)
        self.rules[node].backward(op, self)
        for extra in node.all_input_nodes:
            if self.channels[extra] is None:
                self.existing.add(extra)

    # what rules ask

    def plain(self, tree: Any) -> Any:
        """Arguments with the numbers filled in that are the same for every input."""
        return fx.node.map_arg(tree, lambda n: n.meta["val"] if is_static_number(n) else n)

    def channels_of(self, node: fx.Node) -> Channels:
        known = self.channels.get(node)
        if not isinstance(known, Channels):
            raise Unsupported("its input has no channels to follow")
        return known

    def along(self, node: fx.Node, axis: int) -> Channels:
        """The channels along a given axis: the known ones, or, of a tensor that is all live, any axis will do."""
        known = self.channels_of(node)
        if known.axes == (axis,):
            return known
        ndim = len(shape_of(node))
        if not known.all_live or len(known.axes) != 1 or not 0 <= axis < ndim or not is_static(node, axis):
            raise Unsupported("its input's channels are not where it expects them")
        return all_live(axis, shape_of(node)[axis])

    def place(self, node: Any) -> int:
        """Where a node stands in the graph; -1 for what is none."""
        return self.places.get(node, -1) if isinstance(node, fx.Node) else -1

    def value_of(self, node: fx.Node) -> Tensor:
        """The tensor that a `get_attr` node stands for."""
        value: Tensor = attribute(self.traced, str(node.target))
        return value

    def attribute(self, node: fx.Node) -> Tensor:
        """The same, where nothing else uses it, so that it may be cut."""
        if len(node.users) > 1:
            raise Unsupported("a parameter is used in several places")
        return self.value_of(node)

    def leaves_zeros(self, op: Op, node: fx.Node, needed: Mask) -> bool:
        """Whether a side of a sum or product had better keep the zero filters of the channels that it lacks."""
        channels = self.channels_of(node)
        missing = needed & ~channels.live

        def pays() -> bool:
            prices, kept = self.prices, int(needed.sum())
            if missing.sum() == kept:  # nothing of it would be there, and that is better still
                return False
            macs = prices.saved(kept, kept - int(missing.sum())) * filter_macs(node, op.node, self, missing)
            order = self.streams.ordered(op.node, np.flatnonzero(needed))
            padded = getattr(self.rules[op.node], "kind", "") == "add" and is_run(np.flatnonzero(channels.live[order]))
            elements = math.prod(shape_of(node)[1:]) / channels.size * kept
            return macs < (prices.pad if padded else prices.gather) * elements + prices.step / self.batch

        return bool(missing.any()) and self.facts.recall(op.name, f"zeros{node.name}", pays)

    def carrier(self, op: Op, live: Mask, constants: Mask, foldable: bool) -> Mask | None:
        """The one of the constant channels that a layer at whose border they differ had better read for all of them.

        None where it is better to leave all out and correct the border, as can be done where they are `foldable`.
        """
        node = op.source

        def best() -> Mask:
            prices, there = self.prices, live | self.need[node]
            size = np.abs(self.channels_of(node).value)
            ready = constants & there & (2 * size >= size[constants].max())
            chosen = np.zeros_like(constants)
            chosen[np.argmax(np.where(ready if ready.any() else constants, size, -1.0))] = True
            macs = 0.0
            if not ready.any():  # infinite where nobody knows what else would have to be there for it
                macs = filter_macs(node, op.node, self, chosen) + reading_macs(op.node, self)
                saved = prices.saved(int((there | chosen).sum()), int(there.sum()))
                macs = saved * macs if macs < math.inf else macs
            rows = int(self.need[op.node].sum()) / self.need[op.node].size
            border = prices.border * rows * math.prod(shape_of(op.node)[1:]) + prices.step / self.batch
            pays = not foldable or (prices.carry and macs < math.inf and macs <= border)
            return chosen if pays else np.zeros_like(constants)

        found = self.facts.extra(op.name, "carrier", best) if constants.any() else None
        if found is not None:
            self.carriers[op.node] = int(np.flatnonzero(found)[0])
            if (norm := norm_of(node, self)) is not None:
                self.steady.setdefault(norm, set()).add(self.carriers[op.node])
        return found

    def in_blocks(self, op: Op, node: fx.Node, wanted: Mask, room: Mask) -> Mask:
        """The channels that are wanted of a value, and constant ones out of `room` up to a whole number of blocks.

        Where the wanted ones lie side by side, in the order of what reads them, all of them still do.
        """

        def more() -> Mask:
            layers = filters_behind(node, self) if wanted.any() else []
            block = max(self.prices.block, self.prices.depthwise) if len(layers) > 1 else self.prices.block
            return self._more(node, wanted, room, block) if layers else np.zeros_like(wanted)

        extra = self.facts.extra(op.name, f"block{node.name}", more)
        return wanted if extra is None else wanted | extra.reshape(wanted.shape)

    def _fill_stream(self, op: Op) -> None:
        """Bring the width of a residual stream up to a whole number of blocks, where constant channels can stay."""
        node, need = op.node, self.need[op.node]

        def more() -> Mask:
            room = ~need & ~self.channels_of(node).live
            gains = int(need.sum()) % self.prices.block and room.any() and is_stream(node, self)
            if not gains or self.streams.is_read_in_groups(node) or filter_macs(node, None, self, room) == math.inf:
                return np.zeros_like(need)
            return self._more(node, need, room, self.prices.block)

        extra = self.facts.extra(op.name, "stream", more)
        if extra is not None:
            self.need[node] = need | extra

    def _more(self, node: fx.Node, wanted: Mask, room: Mask, block: int) -> Mask:
        """Channels out of `room` up to a whole number of blocks; wanted ones that lie side by side still do.

        Where there is too little room for that, all of them if that gives the original width back, or none.
        """
        chosen = np.zeros_like(wanted)
        missing = -int(wanted.sum()) % block
        if missing > room.sum() and not (wanted | room).all():
            return chosen
        order = self.streams.ordered(node, np.flatnonzero(wanted | room))
        places = np.flatnonzero(wanted[order])
        gaps = np.setdiff1d(np.arange(places[0], places[-1] + 1), places)
        behind, before = np.arange(places[-1] + 1, len(order)), np.arange(places[0] - 1, -1, -1)
        chosen[order[np.concatenate([gaps, behind, before])[:missing]]] = True
        return chosen

    # what rules say

    def exist(self, node: fx.Node) -> None:
        self.existing.add(node)

    def want(self, node: fx.Node, mask: Mask) -> None:
        self.exist(node)
        self.need[node] |= mask.reshape(self.need[node].shape)

    def want_along(self, node: fx.Node, axis: int, mask: Mask) -> None:
        if self.channels_of(node).axes == (axis,):
            self.want(node, mask)
        else:
            self.want_full(node)

    def want_full(self, node: fx.Node) -> None:
        self.exist(node)
        known = self.channels[node]
        if isinstance(known, Channels):
            self.full.add(node)
            self.need[node] |= known.live
        elif hasattr(known, "source"):  # a cut tensor asked for whole
            self.want_full(known.source)

    @property
    def barriers(self) -> list[tuple[Op, str]]:
        pairs = [(op, self.rules[op.node]) for op in self.ops]
        return [(op, rule.reason) for op, rule in pairs if isinstance(rule, Barrier)]
