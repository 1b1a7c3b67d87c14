"""What a rule is: how one operation maps constants forward, demand backward, and how it is written again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx, nn

from asfp.compaction.channels import Channels, Labels, Unsupported, all_live
from asfp.compaction.sizes import is_static

if TYPE_CHECKING:
    from asfp.compaction.analyse import Analysis
    from asfp.compaction.rewrite import Rewriter


@dataclass(frozen=True, eq=False)
class Op:
    """One traced operation, whatever its spelling: module, function or method."""

    node: fx.Node
    module: nn.Module | None

    @property
    def name(self) -> str:
        return self.node.name

    @property
    def spelling(self) -> str:
        """What a person would call it."""
        if self.module is not None:
            return f"{self.node.target} ({type(self.module).__name__})"
        target = self.node.target
        return target if isinstance(target, str) else getattr(target, "__name__", str(target))

    @property
    def source(self) -> fx.Node:
        """Its first argument: the tensor it works on."""
        first = self.node.args[0] if self.node.args else next(iter(self.node.kwargs.values()), None)
        if not isinstance(first, fx.Node):
            raise Unsupported("its first argument is not a single tensor")
        return first

    def get(self, name: str, position: int, default: Any = None) -> Any:
        """An option: the module's attribute, the keyword, or the argument at `position` (the tensor is 0)."""
        if self.module is not None:
            return getattr(self.module, name, default)
        if name in self.node.kwargs:
            return self.node.kwargs[name]
        return self.node.args[position] if len(self.node.args) > position else default


def shape_of(node: fx.Node) -> tuple[int, ...]:
    val = node.meta.get("val")
    if not isinstance(val, Tensor):
        raise Unsupported(f"{node.name} is not a tensor")
    return tuple(int(n) for n in val.shape)


def is_tensor(node: Any) -> bool:
    return isinstance(node, fx.Node) and isinstance(node.meta.get("val"), Tensor)


def fresh(node: fx.Node, axis: int | None = None) -> Channels | None:
    """All channels live: what is known of a tensor that nothing is known of (None where it has no channels)."""
    val = node.meta.get("val")
    axis = 1 if axis is None else axis
    if not isinstance(val, Tensor) or not val.is_floating_point() or val.ndim < 2 or not is_static(node, axis):
        return None
    return all_live(axis, int(val.shape[axis]))


def axis_of(dim: Any, ndim: int) -> int:
    if not isinstance(dim, int):
        raise Unsupported("its dimension is not a plain number")
    return dim % ndim


def sizes(value: Any, n: int) -> tuple[int, ...]:
    """An int or a sequence of n ints, as n ints."""
    if isinstance(value, int):
        return (value,) * n
    if isinstance(value, Sequence) and all(isinstance(v, int) for v in value) and len(value) in (1, n):
        return tuple(value) * (n if len(value) == 1 else 1)
    raise Unsupported("its size arguments are not plain numbers")


def column(values: Tensor, axis: int, ndim: int) -> Tensor:
    """A vector shaped to broadcast along `axis` of an `ndim`-dimensional tensor."""
    shape = [1] * (ndim - axis)
    shape[0] = -1
    return values.reshape(shape)


def take(parameter: Tensor, labels: Labels, axis: int = 0) -> Tensor:
    index = torch.as_tensor(labels, device=parameter.device)
    return parameter.detach().index_select(axis, index)


class Rule:
    """Forward: constants in to constants out. Backward: which input channels must be there. Emit: the smaller op.

    The default is the identity on channels, for operations that treat each channel alike and alone.
    """

    def forward(self, op: Op, state: Analysis) -> Any:
        raise NotImplementedError

    def backward(self, op: Op, state: Analysis) -> None:
        state.want(op.source, state.need[op.node])

    def emit(self, op: Op, out: Rewriter) -> None:
        source = out.physical(op.source)
        out.define(op.node, out.copy(op.node, {op.source: source.node}), source.keep, virtual=source.virtual)


class Barrier(Rule):
    """No rule, or none that is sound here: inputs come at full width, outputs are all live."""

    def __init__(self, reason: str, axis: int | None = None) -> None:
        self.reason = reason
        self.axis = axis

    def forward(self, op: Op, state: Analysis) -> Any:
        return fresh(op.node, self.axis)

    def backward(self, op: Op, state: Analysis) -> None:
        for node in op.node.all_input_nodes:
            state.want_full(node)

    def emit(self, op: Op, out: Rewriter) -> None:
        out.define_full(op.node, out.copy(op.node, {n: out.full(n) for n in op.node.all_input_nodes}))
