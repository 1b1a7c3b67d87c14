"""How channels pass through the operations of a traced graph: the rules behind `asfp.streams`."""

from __future__ import annotations

import operator
from enum import IntEnum
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from asfp.roles import passes, weighs

if TYPE_CHECKING:
    from asfp.streams import Flow


class Width(IntEnum):
    """How far the channels of a stream can go."""

    FREE = 0
    """A channel that no filter writes can be left out."""
    FULL = 1
    """All channels have to be there: a model's output, a group norm, a linear layer that writes the stream too."""
    UNKNOWN = 2
    """An operation without a rule reads the channels, so what it makes of them is not known."""


class Unknown(Exception):  # noqa: N818  (a signal, not an error of anybody)
    """There is no rule for this."""


_SHAPE = {"size", "dim", "ndimension", "numel", "new_empty", "new_zeros", "new_ones", "new_full", "is_floating_point"}
_SHAPE_ATTRIBUTES = {"shape", "device", "dtype", "ndim", "is_cuda", "requires_grad"}
_SHAPE_FUNCTIONS = {len, torch.zeros_like, torch.ones_like, torch.empty_like, torch.rand_like, torch.randn_like}
_ADDING: set[Any] = {
    *(operator.add, operator.iadd, operator.sub, operator.isub, torch.add, torch.sub, torch.subtract),
    *(torch.maximum, torch.minimum),
    *("add", "add_", "sub", "sub_", "__add__", "__iadd__", "__radd__", "__sub__", "maximum", "minimum"),
}
_SCALING: set[Any] = {
    *(operator.mul, operator.imul, operator.truediv, operator.itruediv, torch.mul, torch.multiply, torch.div),
    *("mul", "mul_", "div", "div_", "multiply", "__mul__", "__imul__", "__rmul__"),
}
_JOINING = {torch.cat, torch.concat, torch.concatenate}
_REDUCING: set[Any] = {torch.mean, torch.sum, torch.amax, torch.amin, "mean", "sum", "amax", "amin"}
_MOVING: set[Any] = {
    *(operator.getitem, torch.chunk, torch.split, torch.flatten, torch.reshape, torch.permute, torch.transpose),
    *(torch.swapaxes, torch.movedim, torch.squeeze, torch.unsqueeze, torch.narrow, torch.index_select, torch.flip),
    *(torch.roll, torch.unbind, torch.stack, torch.tile, F.pixel_shuffle, F.pixel_unshuffle, F.channel_shuffle),
    *("chunk", "split", "flatten", "unflatten", "reshape", "view", "permute", "transpose", "swapaxes", "movedim"),
    *("squeeze", "unsqueeze", "narrow", "index_select", "flip", "roll", "unbind", "select", "repeat", "expand"),
    *("expand_as", "view_as", "reshape_as"),
}
_MOVING_MODULES = (nn.Flatten, nn.Unflatten, nn.PixelShuffle, nn.PixelUnshuffle, nn.ChannelShuffle)
_MIXING = {F.softmax, torch.softmax, F.log_softmax, F.group_norm, F.layer_norm, F.local_response_norm, F.normalize}
_MIXING_MODULES = (
    nn.GroupNorm,
    nn.LayerNorm,
    nn.LocalResponseNorm,
    nn.Softmax,
    nn.Softmax2d,
    nn.LogSoftmax,
    nn.Softmin,
    nn.GLU,
)
_ALONE: set[Any] = {
    operator.neg,
    "detach",
    *(
        getattr(torch, n)
        for n in ("neg", "exp", "log", "log1p", "sqrt", "rsqrt", "square", "sign", "erf", "sin", "cos")
    ),
    *("neg", "exp", "log", "log1p", "sqrt", "rsqrt", "square", "sign", "erf", "sin", "cos", "pow", "type"),
    *(operator.pow, torch.pow),
}
_NAMED = {"torchvision.ops.stochastic_depth.stochastic_depth"}


def rule(flow: Flow, node: fx.Node, module: nn.Module | None) -> Any:
    """The channels of a node's result, from those of its inputs; raises `Unknown` where there is no rule.

    >>> from asfp.streams import Flow
    >>> graph = fx.symbolic_trace(nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU()))
    >>> flow = Flow(graph, graph)
    >>> for node in list(graph.graph.nodes)[:2]:
    ...     flow.visit(node)
    >>> rule(flow, node.next, graph.get_submodule("1")).flatten()
    tensor([0, 1, 2, 3])
    """
    target: Any = module if module is not None else node.target
    first = node.args[0] if node.args else next(iter(node.kwargs.values()))
    ids = flow.known[first] if isinstance(first, fx.Node) else None
    if target in _SHAPE or target in _SHAPE_FUNCTIONS or (target is getattr and node.args[1] in _SHAPE_ATTRIBUTES):
        return None
    if target in _ADDING or target in _SCALING:
        return _elementwise(flow, node, adding=target in _ADDING)
    if target in _JOINING:
        return _concatenate(flow, node)
    if target in _REDUCING:
        return _reduce(flow, node, ids)
    if target is F.pad:
        return _pad(ids, *(_argument(node, i, n, d) for i, n, d in ((1, "pad", ()), (2, "mode", "constant"))))
    if target in _MOVING or isinstance(module, _MOVING_MODULES):
        return _move(flow, node, module)
    if target in _MIXING or isinstance(module, _MIXING_MODULES) or node.target == "softmax":
        flow.mark([ids], Width.FULL)
        return None
    if weighs(node, module):
        if isinstance(ids, Tensor) and ids.shape[-1] == 1 and ids.numel() > 1 and _linear(target):
            flow.mark([ids], Width.FULL)  # a linear map over another axis than the channels'
        if not _linear(target) and not _functional_convolution(target):
            raise Unknown
        return None
    name = f"{getattr(target, '__module__', '')}.{getattr(target, '__name__', '')}"
    if (passes(node, module) or target in _ALONE or name in _NAMED) and isinstance(ids, Tensor):
        if sum(flow.known[n] is not None for n in node.all_input_nodes) > 1:
            raise Unknown
        return ids
    raise Unknown


def _elementwise(flow: Flow, node: fx.Node, adding: bool) -> Any:
    operands = [*node.args[:2], *(node.kwargs[k] for k in ("input", "other") if k in node.kwargs)]
    nodes = [n for n in operands if isinstance(n, fx.Node)]
    followed = [ids for n in nodes if isinstance(ids := flow.known[n], Tensor)]
    if len(followed) + sum(flow.known[n] is None for n in nodes) != len(nodes) or node.kwargs.get("dim") is not None:
        raise Unknown
    if len(operands) < 2 or not all(isinstance(x, (fx.Node, int, float)) for x in operands):
        raise Unknown
    ndim = max(ids.ndim for ids in followed)
    followed = [ids.reshape((1,) * (ndim - ids.ndim) + tuple(ids.shape)) for ids in followed]
    wide = max(followed, key=Tensor.numel)
    same = [ids for ids in followed if ids.shape == wide.shape]
    for ids in followed:
        if ids.shape != wide.shape and ids.numel() > 1:
            raise Unknown
    if adding and len(same) < len(followed):  # one map for all channels: none of them stays constant
        flow.mark([wide], Width.FULL)
    if adding and any(flow.known[n] is None and not _is_vector(n, wide.numel()) for n in nodes):
        flow.mark([wide], Width.FULL)
    return flow.sum(same) if adding else flow.product(same)


def _concatenate(flow: Flow, node: fx.Node) -> Tensor:
    parts = _argument(node, 0, "tensors", ())
    axis = _argument(node, 1, "dim", node.kwargs.get("axis", 0))
    if isinstance(parts, fx.Node):  # what a cut gave, all of it
        known, values = list(flow.known[parts]), list(parts.meta.get("val") or [None] * len(flow.known[parts]))
    else:
        known, values = [flow.known[n] for n in parts], [n.meta.get("val") for n in parts]
    ndim = next(ids.ndim for ids in known if ids is not None)
    axis %= ndim
    widths = [_width(value, ids, axis) for value, ids in zip(values, known, strict=True)]
    if any(ids is not None and ids.shape[axis] != width for ids, width in zip(known, widths, strict=True)):
        followed = [ids for ids in known if isinstance(ids, Tensor)]
        if any(ids.shape != followed[0].shape for ids in followed):
            raise Unknown
        if len(followed) < len(known):
            flow.mark(followed, Width.FULL)
        return flow.sum(followed)  # pixels beside pixels: channel c of the result is channel c of each
    columns = []
    for ids, width in zip(known, widths, strict=True):
        if ids is None:
            ids = flow.new(width).view([-1 if a == axis else 1 for a in range(ndim)])
            flow.mark([ids], Width.FULL)
        columns.append(ids)
    return torch.cat(columns, axis)


def _reduce(flow: Flow, node: fx.Node, ids: Any) -> Tensor | None:
    dims = _argument(node, 1, "dim", node.kwargs.get("axis"))
    dims = list(range(ids.ndim)) if dims is None else [dims] if isinstance(dims, int) else list(dims)
    if any(ids.shape[d] != 1 for d in dims):
        flow.mark([ids], Width.FULL)
        return None
    if _argument(node, 2, "keepdim", False):
        return ids
    return ids.squeeze(tuple(dims))


def _move(flow: Flow, node: fx.Node, module: nn.Module | None) -> Any:
    """What the operation does with channels, found by having it move their numbers."""
    source = node.args[0]
    if isinstance(source, fx.Node) and isinstance(flow.known[source], tuple):
        return flow.known[source][node.args[1]]

    def numbers(n: fx.Node) -> Any:
        ids, value = flow.known[n], n.meta.get("val")
        if not isinstance(ids, Tensor):
            if value is None or isinstance(value, Tensor):
                raise Unknown
            return value
        sizes = value.shape if value is not None else [2, *[4] * (ids.ndim - 1)]
        return ids.expand([max(a, b) for a, b in zip(ids.shape, sizes, strict=True)])

    moved: Any = fx.node.map_arg((node.args, node.kwargs), numbers)
    args, kwargs = moved
    if isinstance(node.target, str) and module is None:
        args = (args[0].contiguous(), *args[1:]) if node.target == "view" else args
        moved = getattr(args[0], node.target)(*args[1:], **kwargs)
    else:
        function: Any = module if module is not None else node.target
        moved = function(*args, **kwargs)
    return tuple(map(_squeezed, moved)) if isinstance(moved, (tuple, list)) else _squeezed(moved)


def _squeezed(ids: Tensor) -> Tensor:
    """Of size 1 along every axis on which the numbers are the same."""
    for axis in range(ids.ndim):
        if ids.shape[axis] != 1 and (ids.stride(axis) == 0 or bool((ids == ids.narrow(axis, 0, 1)).all())):
            ids = ids.narrow(axis, 0, 1)
    return ids


def _pad(ids: Any, pads: Any, mode: str) -> Tensor:
    if not isinstance(ids, Tensor):
        raise Unknown
    for axis in range(ids.ndim):
        at = 2 * (ids.ndim - 1 - axis)
        if ids.shape[axis] == 1 or at >= len(pads):
            continue
        before, after = pads[at : at + 2]
        if not isinstance(before, int) or not isinstance(after, int) or (mode != "constant" and (before or after)):
            raise Unknown
        ends = [0] * at + [before, after]
        ids = F.pad(ids, ends, value=-1)
    return ids


def _argument(node: fx.Node, position: int, name: str, default: Any) -> Any:
    if len(node.args) > position:
        return node.args[position]
    return node.kwargs.get(name, default)


def _is_vector(node: fx.Node, channels: int) -> bool:
    """A number, or a parameter with one number a channel: constants stay constant."""
    value = node.meta.get("val")
    if value is not None and not isinstance(value, Tensor):
        return True
    if node.op == "get_attr" and value is None:
        module = node.graph.owning_module
        assert module is not None
        owner, _, name = str(node.target).rpartition(".")
        value = getattr(module.get_submodule(owner), name)
    return node.op == "get_attr" and isinstance(value, Tensor) and value.numel() in (1, channels)


def _width(value: Any, ids: Tensor | None, axis: int) -> int:
    if isinstance(value, Tensor):
        return int(value.shape[axis])
    if ids is None:
        raise Unknown
    return int(ids.shape[axis]) if axis == 1 else 0


def _linear(target: Any) -> bool:
    return isinstance(target, nn.Linear) or target is F.linear


def _functional_convolution(target: Any) -> bool:
    return getattr(target, "__name__", "").startswith("conv")
