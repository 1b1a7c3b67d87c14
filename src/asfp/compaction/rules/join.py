"""Operations on several tensors: arithmetic (the residual additions of Eq. 8), concatenation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import fx

from asfp.compaction.channels import Channels, Labels, Mask, Unsupported, Values
from asfp.compaction.effects import IN_PLACE
from asfp.compaction.layers import Constant, Surround
from asfp.compaction.rules.base import Op, Rule, axis_of, column, is_tensor, shape_of
from asfp.compaction.rules.perchannel import Pointwise
from asfp.compaction.sizes import shapes_of

if TYPE_CHECKING:
    from asfp.compaction.analyse import Analysis
    from asfp.compaction.rewrite import Rewriter


@dataclass(frozen=True, eq=False)
class Operand:
    """One side of an arithmetic operation, seen along the result's channels."""

    node: Any
    kind: str  # "channels", "parameter" (known vector), "shared" (one map for all channels), "number"
    live: Mask
    value: Values
    axis: int = 0


class Arithmetic(Rule):
    """a op b with broadcasting. Constant where both are; for a product, zero where either is zero."""

    def __init__(self, kind: str, function: Any) -> None:
        self.kind = kind
        self.function = function

    def operands(self, op: Op, state: Analysis) -> tuple[list[Operand], int, int]:
        """Both sides along the result's channel axis, that axis, and the number of channels."""
        args: tuple[Any, ...] = (
            *op.node.args,
            *(op.node.kwargs[k] for k in ("other", "tensor2") if k in op.node.kwargs),
        )
        if len(args) != 2 or op.node.kwargs.get("alpha", 1) != 1 or set(op.node.kwargs) - {"other", "alpha"}:
            raise Unsupported("it has options beyond two operands")
        ndim = len(shape_of(op.node))
        axes = {state.channels_of(a).axis - len(shape_of(a)) for a in args if self.has_channels(a, state)}
        wide = {x for x in axes if shape_of(op.node)[x] > 1}
        if len(wide or axes) != 1:
            raise Unsupported("its operands' channels do not line up")
        axis = (wide or axes).pop()
        size = shape_of(op.node)[axis]
        return [self.operand(a, axis, size, state) for a in args], axis + ndim, size

    @staticmethod
    def has_channels(arg: Any, state: Analysis) -> bool:
        return isinstance(arg, fx.Node) and isinstance(state.channels.get(arg), Channels) and arg.op != "get_attr"

    def operand(self, arg: Any, axis: int, size: int, state: Analysis) -> Operand:
        ones, zeros = np.ones(size, dtype=bool), np.zeros(size)
        if isinstance(arg, (int, float)) and not isinstance(arg, bool):
            return Operand(arg, "number", ~ones, np.full(size, float(arg)))
        if not isinstance(arg, fx.Node) or not is_tensor(arg):
            raise Unsupported("an operand is not a tensor")
        shape = shape_of(arg)
        if arg.op == "get_attr":
            vector = state.attribute(arg)
            if vector.is_floating_point() and vector.numel() == 1:
                return Operand(arg, "number", ~ones, np.full(size, vector.detach().item()))
            if vector.numel() == size and len(shape) >= -axis and shape[axis] == size and vector.is_floating_point():
                return Operand(arg, "parameter", ~ones, vector.detach().double().reshape(-1).cpu().numpy())
            raise Unsupported("it adds or multiplies a tensor of parameters")
        if size > 1 and (len(shape) < -axis or shape[axis] == 1):
            return Operand(arg, "shared", ones, zeros)
        channels = state.channels.get(arg)
        if not isinstance(channels, Channels) or channels.axes != (len(shape) + axis,):
            raise Unsupported("its operands' channels do not line up")
        return Operand(arg, "channels", channels.live, channels.value, channels.axis)

    def forward(self, op: Op, state: Analysis) -> Channels:
        (a, b), axis, _ = self.operands(op, state)
        live = a.live | b.live
        with np.errstate(all="ignore"):
            value = self.function(torch.from_numpy(a.value.copy()), torch.from_numpy(b.value.copy())).numpy()
        if self.kind == "mul":
            zero = state.facts(op.name, "zero", lambda: ~a.live & (a.value == 0) | ~b.live & (b.value == 0))
            live = live & ~zero
        finite = state.facts(op.name, "finite", lambda: np.isfinite(value) | live)
        if not finite.all():
            raise Unsupported("a constant becomes infinite")
        return Channels((axis,), live, np.where(live, 0, value))

    def backward(self, op: Op, state: Analysis) -> None:
        (a, b), axis, _ = self.operands(op, state)
        need = state.need[op.node]
        brought = False  # does an operand of the result's full extent come as a tensor?
        # what comes later first: it may read the other, and then it is known how much of it stays
        for x, other in sorted(((a, b), (b, a)), key=lambda pair: -state.place(pair[0].node)):
            if x.kind == "channels":
                # where the other side alone would be too small, this one must come, constants and all
                mine = need & x.live if self.covers(op, other, axis) else need
                if self.kind in ("add", "mul") and other.kind == "channels" and (mine != need).any():
                    if state.leaves_zeros(op, x.node, need):
                        mine = need
                    elif self.kind == "add":
                        mine = state.in_blocks(op, x.node, mine, need & ~x.live)
                if mine.any():
                    state.want(x.node, mine)
                    brought |= self.covers(op, x, axis)
            elif x.kind == "shared":
                state.want_full(x.node)
                brought |= self.covers(op, x, axis)
            elif isinstance(x.node, fx.Node):
                state.exist(x.node)
        if not brought:
            carrier = next((x for x in (a, b) if x.kind == "channels" and self.covers(op, x, axis)), None)
            if carrier is not None:
                state.want(carrier.node, need)

    def covers(self, op: Op, x: Operand, axis: int) -> bool:
        """Whether the operand alone has the result's extent (channels aside)."""
        if x.kind not in ("channels", "shared"):
            return False
        for shape, result in zip(shapes_of(x.node), shapes_of(op.node), strict=True):
            wide = (1,) * (len(result) - len(shape)) + shape
            if any(m != n for i, (m, n) in enumerate(zip(wide, result, strict=True)) if i != axis):
                return False
        return True

    def emit(self, op: Op, out: Rewriter) -> None:
        (a, b), axis, _ = self.operands(op, out.state)
        keep = self.layout(op, a, b, axis, out)
        if self.kind == "add":
            padded = self.padded(op, a, b, keep, axis, out)
            if padded is not None:
                out.note_layout(op, "pad")
                self.written(op, padded, a, out)
                out.define(op.node, padded, keep)
                return
        carrier = self.carrier(op, a, b, keep, axis, out)
        left, right = (self.side(op, x, y, keep, axis, out, forced=x is carrier) for x, y in ((a, b), (b, a)))
        if self.kind == "add" and (left is None or right is None):
            only = right if left is None else left
            assert only is not None
            out.note_layout(op, "gone: one side is zero")
            out.define(op.node, only, keep)
            return
        if self.kind == "add" and a.kind == b.kind == "channels":
            gathered = any(out.has(x.node) and n is not out.physical(x.node).node for x, n in ((a, left), (b, right)))
            zeros = any(not x.live[keep].all() and out.has(x.node) for x in (a, b))
            out.note_layout(op, "gather" if gathered else "zeros" if zeros else "plain")
        result = out.function(self.function, (left, right))
        self.written(op, result, a, out)
        out.define(op.node, result, keep)

    @staticmethod
    def written(op: Op, result: fx.Node, a: Operand, out: Rewriter) -> None:
        """Remember that the original wrote the result into its first operand, where that comes first here as well."""
        own = out.physical(a.node).node if a.kind == "channels" and out.has(a.node) else None
        if IN_PLACE in op.node.meta and own is not None and result.args[0] is own:
            result.meta[IN_PLACE] = op.node.meta[IN_PLACE]

    def layout(self, op: Op, a: Operand, b: Operand, axis: int, out: Rewriter) -> Labels:
        """The channels of the result, in order: an operand's own where it has all that is needed (no gather there)."""
        needed = out.ordered(op.node, np.flatnonzero(out.state.need[op.node]))
        sides = [x for x in (a, b) if x.kind == "channels" and out.has(x.node)]
        sides.sort(key=lambda x: not self.covers(op, x, axis))  # better gather the small one
        fitting = [out.physical(x.node).keep for x in sides if np.isin(needed, out.physical(x.node).keep).all()]
        return min(fitting, key=len, default=needed)

    def carrier(self, op: Op, a: Operand, b: Operand, keep: Labels, axis: int, out: Rewriter) -> Operand | None:
        """The operand that must come as a tensor although its channels are constant, since none else has the extent."""
        covering = [x for x in (a, b) if self.covers(op, x, axis)]
        if any(x.kind == "shared" or self.present(x, keep, out) for x in covering):
            return None
        return next((x for x in covering if out.has(x.node)), None)

    @staticmethod
    def present(x: Operand, keep: Labels, out: Rewriter) -> bool:
        return x.kind == "channels" and out.has(x.node) and bool(np.isin(keep, out.physical(x.node).keep).any())

    def side(self, op: Op, x: Operand, other: Operand, keep: Labels, axis: int, out: Rewriter, *, forced: bool) -> Any:
        """What stands for an operand in the new graph; None where nothing has to: zeros added to the other side."""
        ndim = len(shape_of(op.node))
        if x.kind == "number":
            return out.arguments(x.node) if isinstance(x.node, fx.Node) else x.node
        if x.kind == "shared":
            return out.full(x.node)
        if x.kind == "parameter":
            return out.parameter(x.node, keep, axis - ndim)
        if forced or self.present(x, keep, out):
            return out.fetch(x.node, keep)
        fill = torch.from_numpy(np.where(x.live, 0, x.value)[keep])
        filled = self.kind != "add" or out.state.facts(op.name, f"fill{x.node.name}", lambda: (fill != 0).numpy()).any()
        if not filled and not self.spreads(op, other, out):
            return None
        return out.insert(f"{op.name}_constant", Constant(column(out.like(fill, x.node), axis, ndim)), ())

    @staticmethod
    def spreads(op: Op, other: Operand, out: Rewriter) -> bool:
        """Whether zeros must be added all the same, since they make a channel for each of the result out of one map."""
        return other.kind == "shared" and out.state.facts.recall(op.name, "spreads", lambda: True)

    def padded(self, op: Op, a: Operand, b: Operand, keep: Labels, axis: int, out: Rewriter) -> Any:
        """Eq. 8 without a gather: the channels of each operand lie side by side among those of the result."""
        if a.kind != "channels" or b.kind != "channels" or not (out.has(a.node) and out.has(b.node)):
            return None
        if not shapes_of(a.node) == shapes_of(b.node) == shapes_of(op.node):
            return None
        starts = [self.start_of(out.physical(x.node).keep, keep) for x in (a, b)]
        narrow = [len(out.physical(x.node).keep) < len(keep) for x in (a, b)]
        if None in starts or not any(narrow):
            return None
        if all(narrow) and not out.state.facts.recall(op.name, "both", lambda: True):
            return None  # an older plan gathers here
        sides = []
        for x, start in zip((a, b), starts, strict=True):
            assert start is not None
            physical = out.physical(x.node)
            end = start + len(physical.keep)
            whole = len(physical.keep) == len(keep)
            sides.append(physical.node if whole else self.surrounded(op, x, keep[:start], keep[end:], axis, out))
        return out.function(self.function, tuple(sides if narrow[1] else sides[::-1]))

    @staticmethod
    def start_of(part: Labels, keep: Labels) -> int | None:
        """Where `part` begins in `keep`, when it stands there in one piece."""
        if not 0 < len(part) <= len(keep) or part[0] not in keep:
            return None
        start = int(np.flatnonzero(keep == part[0])[0])
        return start if np.array_equal(part, keep[start : start + len(part)]) else None

    def surrounded(self, op: Op, x: Operand, before: Labels, after: Labels, axis: int, out: Rewriter) -> fx.Node:
        """An operand with its constant channels in front and behind: zeros by padding."""
        node, ndim = out.physical(x.node).node, len(shape_of(op.node))
        if not self.filled(op, x, np.concatenate([before, after]), out):
            pads = [0, 0] * (ndim - 1 - axis) + [len(before), len(after)]
            return out.function(F.pad, (node, tuple(pads)))
        columns = [
            out.like(torch.from_numpy(x.value[labels]), x.node).reshape([1] * axis + [-1] + [1] * (ndim - axis - 1))
            for labels in (before, after)
        ]
        return out.insert(f"{op.name}_surround", Surround(columns[0], columns[1], axis), (node,))

    @staticmethod
    def filled(op: Op, x: Operand, labels: Labels, out: Rewriter) -> bool:
        """Whether any of these channels of an operand is a constant other than zero."""
        return bool(out.state.facts(op.name, f"filled{x.node.name}", lambda: x.value[labels] != 0).any())


class Binary(Rule):
    """A tensor and a plain number: element-wise. Two tensors: arithmetic. Two sizes: no business of ours."""

    def __init__(self, kind: str, function: Any) -> None:
        self.arithmetic = Arithmetic(kind, function)

    def forward(self, op: Op, state: Analysis) -> Any:
        args = (*op.node.args, *op.node.kwargs.values())
        nodes = [a for a in args if isinstance(a, fx.Node)]
        state.rules[op.node] = self.arithmetic if len(nodes) > 1 else Pointwise()
        return state.rules[op.node].forward(op, state)


class Concatenate(Rule):
    """Channels one after the other; what is constant stays so and is simply not there."""

    def parts(self, op: Op, state: Analysis) -> list[tuple[fx.Node, int]]:
        """The operands, each with the place of its first channel."""
        tensors = op.get("tensors", 0)
        if not isinstance(tensors, (list, tuple)) or not all(is_tensor(t) for t in tensors):
            raise Unsupported("it joins something other than a list of tensors")
        ndim = len(shape_of(op.node))
        axis = axis_of(op.get("dim", 1, op.node.kwargs.get("axis", 0)), ndim)
        starts, at = [], 0
        for t in tensors:
            if state.along(t, axis).axis != axis or len(shape_of(t)) != ndim:
                raise Unsupported("it joins along another axis than the channels'")
            starts.append((t, at))
            at += shape_of(t)[axis]
        return starts

    def forward(self, op: Op, state: Analysis) -> Channels:
        parts = self.parts(op, state)
        axis = axis_of(op.get("dim", 1, op.node.kwargs.get("axis", 0)), len(shape_of(op.node)))
        known = [state.along(t, axis) for t, _ in parts]
        live, value = (np.concatenate([getattr(c, n) for c in known]) for n in ("live", "value"))
        return Channels((axis,), live, value)

    def backward(self, op: Op, state: Analysis) -> None:
        axis = state.channels_of(op.node).axis
        need = state.need[op.node]
        for t, at in self.parts(op, state):
            mine = need[at : at + shape_of(t)[axis]]
            if mine.any():
                state.want_along(t, axis, mine)

    def emit(self, op: Op, out: Rewriter) -> None:
        axis = out.state.channels_of(op.node).axis
        need = out.state.need[op.node]
        nodes: list[fx.Node] = []
        keeps: list[Labels] = []
        for t, at in self.parts(op, out.state):
            mine = need[at : at + shape_of(t)[axis]]
            if mine.any():
                node, keep = out.along(t, axis)
                nodes.append(node)
                keeps.append(keep + at)
        joined = nodes[0] if len(nodes) == 1 else out.function(torch.cat, (nodes, axis))
        out.define(op.node, joined, np.concatenate(keeps))
