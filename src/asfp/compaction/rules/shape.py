"""Operations that move the channels' axis: view, flatten, permute, squeeze, expand, pixel shuffle."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import fx

from asfp.compaction.channels import Channels, Mask, Unsupported
from asfp.compaction.rules.base import Op, Rule, axis_of, shape_of
from asfp.compaction.sizes import is_static

if TYPE_CHECKING:
    from asfp.compaction.analyse import Analysis
    from asfp.compaction.rewrite import Rewriter


def groups_of(old: Sequence[int], new: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """Which axes of a reshape belong together: runs of equal product, from the left.

    >>> groups_of((2, 8, 3, 3), (2, 72))
    [([0], [0]), ([1, 2, 3], [1])]
    >>> groups_of((2, 8, 9), (2, 2, 4, 9))
    [([0], [0]), ([1], [1, 2]), ([2], [3])]
    """
    groups: list[tuple[list[int], list[int]]] = []
    i = j = 0
    while i < len(old) and j < len(new):
        left, right = [i], [j]
        a, b = old[i], new[j]
        while a != b:
            if a < b:
                i += 1
                left.append(i)
                a *= old[i]
            else:
                j += 1
                right.append(j)
                b *= new[j]
        groups.append((left, right))
        i, j = i + 1, j + 1
    if not groups:
        return groups
    groups[-1][0].extend(range(i, len(old)))
    groups[-1][1].extend(range(j, len(new)))
    return groups


class View(Rule):
    """view, reshape, flatten, unflatten: channels stay apart, become runs of features, or split over two axes."""

    def plan(self, op: Op, state: Analysis) -> tuple[str, tuple[int, ...], int]:
        """What happens to the channels ("stay", "run", "split", "merge"), their new axes, features a channel."""
        source = state.channels_of(op.source)
        old, new = shape_of(op.source), shape_of(op.node)
        for left, right in groups_of(old, new):
            here = [a for a in source.axes if a in left]
            if not here:
                continue
            if len(source.axes) == 2:
                if tuple(left) == source.axes and len(right) == 1:
                    return "merge", (right[0],), 1
                raise Unsupported("it reshapes channels that are split over two axes")
            if left[0] < source.axis:
                raise Unsupported("it merges channels with the batch")
            inner = math.prod(old[a] for a in left if a > source.axis)
            wide = [a for a in right if new[a] != 1]
            if len(wide) <= 1:
                axis = wide[0] if wide else right[0]
                return ("stay" if inner == 1 else "run"), (axis,), inner
            if inner == 1 and len(wide) == 2 and wide[1] == wide[0] + 1 and len(right) == 2:
                return "split", (wide[0], wide[1]), 1
            if new[wide[0]] == source.size:  # the rest of the run is split again: channels are untouched
                return "stay", (wide[0],), 1
            raise Unsupported("it splits channels in a way that has no rule")
        raise Unsupported("its reshape cannot be followed")

    def forward(self, op: Op, state: Analysis) -> Channels:
        source = state.channels_of(op.source)
        kind, axes, inner = self.plan(op, state)
        sizes = state.plain(self.sizes(op))
        if kind != "split" and sizes is not None:
            dynamic = isinstance(sizes[axes[0]], fx.Node)
            if dynamic and any(s == -1 for i, s in enumerate(sizes) if i != axes[0]):
                raise Unsupported("two of its sizes are open")
        live, value = source.live.reshape(-1), source.value.reshape(-1)
        if kind == "split":
            shape = tuple(shape_of(op.node)[a] for a in axes)
            return source.like(live.reshape(shape), value.reshape(shape), axes)
        if not is_static(op.node, axes[0]):
            raise Unsupported("the number of its features depends on the input's size")
        return source.like(np.repeat(live, inner), np.repeat(value, inner), axes)

    def sizes(self, op: Op) -> list[Any] | None:
        """The sizes of a view or reshape; None for flatten, which has none."""
        if op.spelling not in ("view", "reshape"):
            return None
        rest = op.node.args[1:]
        if len(rest) == 1 and isinstance(rest[0], (tuple, list)):
            rest = tuple(rest[0])
        if len(rest) != len(shape_of(op.node)):
            raise Unsupported("its sizes are not listed one by one")
        return list(rest)

    def backward(self, op: Op, state: Analysis) -> None:
        kind, _, inner = self.plan(op, state)
        if kind in ("split", "merge"):
            if kind == "split" and op.node in state.full:
                state.want_full(op.source)
            else:
                state.want(op.source, state.need[op.node].reshape(state.channels_of(op.source).live.shape))
            return
        need = state.need[op.node].reshape(-1, inner)
        need[:] = need.any(axis=1, keepdims=True)  # a channel's features come and go together
        state.want(op.source, need[:, 0].copy())

    def emit(self, op: Op, out: Rewriter) -> None:
        kind, axes, inner = self.plan(op, out.state)
        if kind == "split" and op.node in out.state.full:
            out.define_full(op.node, out.copy(op.node, {op.source: out.full(op.source)}))
            return
        source = out.physical(op.source)
        if kind == "split":
            out.define(op.node, source.node, source.keep, virtual=True)
            return
        if kind == "merge" and source.virtual:
            out.define(op.node, source.node, source.keep)
            return
        keep = (source.keep[:, None] * inner + np.arange(inner)).reshape(-1)
        sizes = self.sizes(op)
        if sizes is None:
            node = out.copy(op.node, {op.source: source.node})
        else:
            along = out.state.plain(sizes[axes[0]])
            open_size = isinstance(along, fx.Node) or along == -1
            sizes = [*sizes[: axes[0]], -1 if open_size else len(keep), *sizes[axes[0] + 1 :]]
            node = out.method("reshape", (source.node, *out.arguments(tuple(sizes))))
        out.define(op.node, node, keep)


class Flatten(View):
    """flatten(start, end) as a function, method or module; where it keeps channels whole it needs no sizes."""

    def plan(self, op: Op, state: Analysis) -> tuple[str, tuple[int, ...], int]:
        source, shape = state.channels_of(op.source), shape_of(op.source)
        start = axis_of(op.get("start_dim", 1, 1 if op.module is not None else 0), len(shape))
        end = axis_of(op.get("end_dim", 2, -1), len(shape))
        if not start <= source.axis <= end:
            return "stay", (source.axis - (end - start if source.axis > end else 0),), 1
        if source.axis != start:
            raise Unsupported("it merges channels with the batch")
        return "run", (start,), math.prod(shape[start + 1 : end + 1])


class Permute(Rule):
    """permute, transpose, movedim-like: the channels' axis moves; split channels are only relabelled."""

    def order(self, op: Op) -> list[int]:
        ndim = len(shape_of(op.source))
        if op.spelling in ("transpose", "swapaxes"):
            a, b = (axis_of(op.get(n, p), ndim) for n, p in (("dim0", 1), ("dim1", 2)))
            order = list(range(ndim))
            order[a], order[b] = b, a
            return order
        dims = op.get("dims", 1)
        dims = list(dims) if isinstance(dims, Sequence) else list(op.node.args[1:])
        return [axis_of(d, ndim) for d in dims]

    def forward(self, op: Op, state: Analysis) -> Channels:
        source, order = state.channels_of(op.source), self.order(op)
        places = [order.index(a) for a in source.axes]
        if len(places) == 1:
            return source.moved(places[0])
        others = [a for a in order if a not in source.axes]
        if others != sorted(others) or sorted(places) != list(source.axes):
            raise Unsupported("it moves other axes while channels are split over two")
        turn = list(np.argsort(places))
        return source.like(source.live.transpose(turn), source.value.transpose(turn), tuple(sorted(places)))

    def backward(self, op: Op, state: Analysis) -> None:
        source = state.channels_of(op.source)
        if len(source.axes) == 2 and op.node in state.full:
            state.want_full(op.source)
            return
        need = state.need[op.node]
        if len(source.axes) == 2:
            need = need.transpose(np.argsort(np.argsort([self.order(op).index(a) for a in source.axes])))
        state.want(op.source, need)

    def emit(self, op: Op, out: Rewriter) -> None:
        channels = out.state.channels_of(op.source)
        source = out.physical(op.source)
        if len(channels.axes) == 1:
            out.define(op.node, out.copy(op.node, {op.source: source.node}), source.keep)
        elif not source.virtual:
            out.define_full(op.node, out.copy(op.node, {op.source: source.node}))
        else:
            turn = list(np.argsort([self.order(op).index(a) for a in channels.axes]))
            old = np.arange(channels.size).reshape(channels.live.shape).transpose(turn).reshape(-1)
            place = np.empty_like(old)
            place[old] = np.arange(channels.size)
            out.define(op.node, source.node, place[source.keep], virtual=True)


class Squeeze(Rule):
    """squeeze(dim), unsqueeze(dim) beside the channels."""

    def forward(self, op: Op, state: Analysis) -> Channels:
        source, ndim = state.channels_of(op.source), len(shape_of(op.source))
        adding = op.spelling == "unsqueeze"
        dim = op.get("dim", 1)
        dim = axis_of(dim, ndim + 1 if adding else ndim)
        if not adding and (dim == source.axis or shape_of(op.source)[dim] != 1):
            raise Unsupported("it may remove the channels' axis")
        shift = dim <= source.axis if adding else -(dim < source.axis)
        return source.moved(source.axis + int(shift))


class Expand(Rule):
    """expand and expand_as, where the channels' axis keeps its size."""

    def forward(self, op: Op, state: Analysis) -> Channels:
        source = state.channels_of(op.source)
        old, new = shape_of(op.source), shape_of(op.node)
        if len(old) != len(new) or old[source.axis] != new[source.axis] or op.node.kwargs:
            raise Unsupported("it expands channels, or by keyword")
        if op.spelling == "expand_as":
            state.channels_of(op.node.args[1])  # type: ignore[arg-type]
        return source

    def backward(self, op: Op, state: Analysis) -> None:
        super().backward(op, state)
        if op.spelling == "expand_as":
            state.exist(op.node.args[1])  # type: ignore[arg-type]

    def emit(self, op: Op, out: Rewriter) -> None:
        source, axis = out.physical(op.source), out.state.channels_of(op.source).axis
        if op.spelling == "expand_as":
            sizes = list(out.size(op.node.args[1]))  # type: ignore[arg-type]
        else:
            rest = op.node.args[1:]
            sizes = list(rest[0]) if len(rest) == 1 and isinstance(rest[0], (tuple, list)) else list(rest)
            sizes = list(out.arguments(tuple(sizes)))
        sizes[axis] = -1
        out.define(op.node, out.method("expand", (source.node, *sizes)), source.keep)


class Pixels(Rule):
    """What pixel shuffle and its inverse share: r^2 channels here are r x r pixels of one channel there."""

    option = ""

    def factor(self, op: Op) -> int:
        r = op.get(self.option, 1)
        if not isinstance(r, int):
            raise Unsupported("its factor is not a plain number")
        return r * r

    def source(self, op: Op, state: Analysis) -> Channels:
        known = state.channels_of(op.source)
        if known.axis != len(shape_of(op.source)) - 3:
            raise Unsupported("its input's channels are not where it expects them")
        return known


class PixelShuffle(Pixels):
    """Channels c * r^2 ... of the input become the r x r pixels of channel c: all come together, or none."""

    option = "upscale_factor"

    def forward(self, op: Op, state: Analysis) -> Channels:
        source, f = self.source(op, state), self.factor(op)
        live, value = source.live.reshape(-1, f), source.value.reshape(-1, f)
        mixed = live.any(axis=1) | state.facts(op.name, "mixed", lambda: (value != value[:, :1]).any(axis=1))
        return source.like(mixed, value[:, 0])

    def backward(self, op: Op, state: Analysis) -> None:
        wanted: Mask = np.repeat(state.need[op.node], self.factor(op))
        wanted &= state.channels_of(op.source).live
        state.want(op.source, wanted)

    def emit(self, op: Op, out: Rewriter) -> None:
        keep, f = np.flatnonzero(out.state.need[op.node]), self.factor(op)
        labels = (keep[:, None] * f + np.arange(f)).reshape(-1)
        out.define(op.node, out.copy(op.node, {op.source: out.fetch(op.source, labels)}), keep)


class PixelUnshuffle(Pixels):
    """Each channel becomes r^2 channels of every r-th pixel."""

    option = "downscale_factor"

    def forward(self, op: Op, state: Analysis) -> Channels:
        source, f = self.source(op, state), self.factor(op)
        return source.like(np.repeat(source.live, f), np.repeat(source.value, f))

    def backward(self, op: Op, state: Analysis) -> None:
        state.want(op.source, np.asarray(state.need[op.node].reshape(-1, self.factor(op)).any(axis=1)))

    def emit(self, op: Op, out: Rewriter) -> None:
        source, f = out.physical(op.source), self.factor(op)
        keep = (source.keep[:, None] * f + np.arange(f)).reshape(-1)
        out.define(op.node, out.copy(op.node, {op.source: source.node}), keep)
