"""Operations that treat each channel alone: activations, batch norm, pooling, resizing, reductions over space."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, fx, nn

from asfp.compaction.channels import Channels, Labels, Unsupported, Values
from asfp.compaction.rules.base import Barrier, Op, Rule, axis_of, shape_of, sizes, take

if TYPE_CHECKING:
    from asfp.compaction.analyse import Analysis
    from asfp.compaction.rewrite import Rewriter


class Identity(Rule):
    """y = x: dropout and its relatives in evaluation."""

    def __init__(self, training: int | None = None) -> None:
        self.training = training  # position of the functional form's `training` argument

    def forward(self, op: Op, state: Analysis) -> Channels:
        if self.training is not None and op.get("training", self.training, True):
            raise Unsupported("it is random: called with training=True")
        return state.channels_of(op.source)


class Pointwise(Rule):
    """y = f(x), element by element: a constant v becomes f(v), found by applying the operation itself."""

    @staticmethod
    def tensor(op: Op) -> fx.Node:
        """The only tensor among the arguments (`1 - x` has it second)."""
        if len(op.node.all_input_nodes) != 1:
            raise Unsupported("it depends on a second value")
        return op.node.all_input_nodes[0]

    def forward(self, op: Op, state: Analysis) -> Channels:
        source = state.channels_of(self.tensor(op))
        value = self.apply(op, source.value)
        if not state.facts(op.name, "finite", lambda: np.isfinite(value) | source.live).all():
            raise Unsupported("a constant becomes infinite")
        return source.like(source.live, value)

    def apply(self, op: Op, values: Values) -> Values:
        x = torch.from_numpy(values.copy())
        args, kwargs = fx.node.map_arg((op.node.args, op.node.kwargs), lambda _: x)
        with torch.no_grad():
            if op.module is not None:
                y = op.module(*args, **kwargs)
            elif op.node.op == "call_method":
                y = getattr(x, str(op.node.target))(*args[1:], **kwargs)
            else:
                y = op.node.target(*args, **kwargs)  # type: ignore[operator]
        if not isinstance(y, Tensor) or y.shape != x.shape or not y.is_floating_point():
            raise Unsupported("it does not map numbers to numbers one by one")
        return y.double().numpy()

    def backward(self, op: Op, state: Analysis) -> None:
        state.want(self.tensor(op), state.need[op.node])

    def emit(self, op: Op, out: Rewriter) -> None:
        source = out.physical(self.tensor(op))
        node = out.copy(op.node, {self.tensor(op): source.node})
        out.define(op.node, node, source.keep, virtual=source.virtual)


class PReLU(Rule):
    """y = max(0, x) + a * min(0, x), with one slope a channel or one for all."""

    def forward(self, op: Op, state: Analysis) -> Channels:
        source = state.along(op.source, 1)
        slope = op.module.weight.detach().double().cpu().numpy()  # type: ignore[union-attr, operator]
        value = np.maximum(source.value, 0) + slope * np.minimum(source.value, 0)
        return source.like(source.live, value)

    def backward(self, op: Op, state: Analysis) -> None:
        state.want_along(op.source, 1, state.need[op.node])

    def emit(self, op: Op, out: Rewriter) -> None:
        node, keep = out.along(op.source, 1)
        module: nn.PReLU = op.module  # type: ignore[assignment]
        changes: dict[str, Any] = {}
        if module.num_parameters > 1:
            changes = {"weight": take(module.weight, keep), "num_parameters": len(keep)}
        out.define(op.node, out.call(op.node, out.shrink(op, module, changes), node), keep)


class Normalise(Rule):
    """y = (x - mean) / sqrt(var + eps) * gamma + beta, each channel by itself.

    With running statistics (batch norm) a constant stays one, and gamma = 0 makes one. Statistics taken from the
    input (instance norm) turn a zero channel into beta; other constants are left to the operation.
    """

    def forward(self, op: Op, state: Analysis) -> Channels:
        module: Any = op.module
        source = state.along(op.source, 1)
        if len(shape_of(op.source)) != len(shape_of(op.node)) or source.size != module.num_features:
            raise Unsupported("it works on unbatched input")
        gamma, beta = _vector(module.weight, 1.0, source.size), _vector(module.bias, 0.0, source.size)
        dead = state.facts(op.name, "gamma", lambda: gamma == 0)
        if module.running_mean is not None:
            mean, var = _vector(module.running_mean, 0.0, source.size), _vector(module.running_var, 1.0, source.size)
            live = source.live & ~dead
            value = np.where(dead, beta, (source.value - mean) / np.sqrt(var + module.eps) * gamma + beta)
        else:
            live = (source.live | state.facts(op.name, "constants", lambda: source.nonzero)) & ~dead
            value = beta
        return source.like(live, value)

    def backward(self, op: Op, state: Analysis) -> None:
        state.want_along(op.source, 1, state.need[op.node])

    def emit(self, op: Op, out: Rewriter) -> None:
        module: Any = op.module
        needed = np.flatnonzero(out.state.need[op.node])
        node, keep = out.along(op.source, 1)
        if not np.isin(needed, keep).all():  # a constant that instance norm has to see
            keep = needed
            node = out.fetch_along(op.source, 1, keep)
        names = ("weight", "bias", "running_mean", "running_var")
        changes: dict[str, Any] = {
            n: None if getattr(module, n) is None else take(getattr(module, n), keep) for n in names
        }
        if op.node in out.state.steady and module.running_mean is not None and module.bias is not None:
            self.steady(op, out.state, keep, changes)
        target = out.shrink(op, module, {**changes, "num_features": len(keep)})
        out.define(op.node, out.call(op.node, target, node), keep)

    @staticmethod
    def steady(op: Op, state: Analysis, keep: Labels, changes: dict[str, Any]) -> None:
        """Write the constants that carry others without differences of large numbers, of which little may be left:

        mean = x, beta = y, so that y = (x - mean) / sqrt(var + eps) * gamma + beta in any precision
        """
        places = np.flatnonzero(np.isin(keep, sorted(state.steady[op.node])))
        source, result = state.along(op.source, 1), state.channels_of(op.node)
        for name, values in (("running_mean", source.value), ("bias", result.value)):
            index = torch.as_tensor(places, device=changes[name].device)
            changes[name][index] = torch.as_tensor(values[keep[places]]).to(changes[name])


def _vector(values: Tensor | None, default: float, size: int) -> Values:
    return np.full(size, default) if values is None else values.detach().double().cpu().numpy()


class Mixing(Rule):
    """Group and layer norm: every output depends on all channels of its group, so none may be missing."""

    def forward(self, op: Op, state: Analysis) -> Any:
        axis = state.channels_of(op.source).axis if op.source in state.channels else None
        raise_barrier = Barrier("it normalises over several channels, so all must be there", axis)
        state.rules[op.node] = raise_barrier
        return raise_barrier.forward(op, state)


class Spatial(Rule):
    """Pooling and resizing: windows over space, channel by channel; a constant stays what it is."""

    def __init__(self, dims: int | None = None) -> None:
        self.dims = dims

    def forward(self, op: Op, state: Analysis) -> Channels:
        if op.get("return_indices", 99, False):
            raise Unsupported("it returns indices too")
        source = state.channels_of(op.source)
        ndim = len(shape_of(op.source))
        if source.axis != (1 if self.dims is None else ndim - self.dims - 1):
            raise Unsupported("its input's channels are not where it expects them")
        changed = self.changed(op, state, source)
        return source.like(source.live | changed, source.value)

    def changed(self, op: Op, state: Analysis, source: Channels) -> Any:
        """Constants that do not stay the same everywhere."""
        return np.zeros(source.size, dtype=bool)


class AveragePool(Spatial):
    """The mean over windows: a non-zero constant survives unless padded zeros are counted in."""

    def changed(self, op: Op, state: Analysis, source: Channels) -> Any:
        padding = op.get("padding", 3, 0)
        include = op.get("count_include_pad", 5, True)
        ceil, divisor = op.get("ceil_mode", 4, False), op.get("divisor_override", 6, None)
        even = divisor is None and (not include or not (np.any(padding) or ceil))
        return np.zeros(source.size, dtype=bool) if even else state.facts(op.name, "constants", lambda: source.nonzero)


class Reduce(Rule):
    """mean, sum, amax, amin over axes other than the channels'."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def forward(self, op: Op, state: Analysis) -> Channels:
        source = state.channels_of(op.source)
        ndim = len(shape_of(op.source))
        dims = op.get("dim", 1, None)
        if dims is None or dims in ([], ()) or set(op.node.kwargs) - {"dim", "keepdim", "input"}:
            raise Unsupported("it reduces over everything, or with further options")
        dims = [axis_of(d, ndim) for d in (dims if isinstance(dims, Sequence) else [dims])]
        if source.axis in dims:
            raise Unsupported("it reduces over channels")
        axis = source.axis - (0 if op.get("keepdim", 2, False) else sum(d < source.axis for d in dims))
        changed = np.zeros(source.size, dtype=bool)
        if self.kind == "sum":
            changed = state.facts(op.name, "constants", lambda: source.nonzero)
        return source.like(source.live | changed, source.value, (axis,))


class Pad(Rule):
    """Constant padding adds constant channels and keeps a constant only where it equals the padding's value."""

    def amounts(self, op: Op) -> tuple[list[Any], str, Any]:
        if op.module is not None:
            pads = sizes(op.module.padding, 2 * (len(shape_of(op.source)) - 2))
            name = type(op.module).__name__
            mode = "constant" if name.startswith(("Constant", "Zero")) else "other"
            return list(pads), mode, getattr(op.module, "value", 0.0)
        pads = op.get("pad", 1)
        if not isinstance(pads, Sequence):
            raise Unsupported("its padding is not a plain list")
        mode = op.get("mode", 2, "constant")
        value = op.get("value", 3, None)
        return list(pads), mode, 0.0 if value is None else value

    def spans(self, op: Op, state: Analysis) -> tuple[int, int, bool]:
        """Channels added before and after, and whether anything is added elsewhere."""
        pads, _, _ = self.amounts(op)
        axis, ndim = state.channels_of(op.source).axis, len(shape_of(op.source))
        at = 2 * (ndim - 1 - axis)
        here = pads[at : at + 2] or [0, 0]
        rest = pads[:at] + pads[at + 2 :]
        if not all(isinstance(p, int) and p >= 0 for p in here):
            raise Unsupported("its padding of channels is not a plain number")
        return here[0], here[1], any(not isinstance(p, int) or p != 0 for p in rest)

    def forward(self, op: Op, state: Analysis) -> Channels:
        source = state.channels_of(op.source)
        _, mode, value = self.amounts(op)
        before, after, spatial = self.spans(op, state)
        if not isinstance(value, (int, float)) or (mode != "constant" and before + after):
            raise Unsupported("it pads channels with something that is not a constant")
        live = source.live
        if mode == "constant" and spatial:
            live = live | state.facts(op.name, "constants", lambda: ~source.live & (source.value != value))
        ends = (before, after)
        values = np.pad(source.value, ends, constant_values=float(value))
        return source.like(np.pad(live, ends), values)

    def backward(self, op: Op, state: Analysis) -> None:
        before, after, _ = self.spans(op, state)
        need = state.need[op.node]
        inner = need[before : need.size - after].copy()
        if need.any() and not inner.any():
            inner[0] = True  # only padded channels are wanted: something must still carry the shape
        state.want(op.source, inner)

    def emit(self, op: Op, out: Rewriter) -> None:
        before, _, spatial = self.spans(op, out.state)
        source = out.physical(op.source)
        pads, mode, value = self.amounts(op)
        node = source.node
        if spatial:
            at = 2 * (len(shape_of(op.source)) - 1 - out.state.channels_of(op.source).axis)
            pads[at : at + 2] = [0, 0] if len(pads) > at else []
            if op.module is not None:
                node = out.copy(op.node, {op.source: node})
            else:
                inner = out.arguments((tuple(pads), mode, value if mode == "constant" else None))
                node = out.function(torch.nn.functional.pad, (node, *inner))
        out.define(op.node, node, source.keep + before)
