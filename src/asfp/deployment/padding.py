"""Branches that are padded with zeros or constants to the width of the stream that they are added to."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.nn.utils import skip_init

from asfp.compaction.effects import free_of_effects
from asfp.compaction.graph import attribute
from asfp.compaction.layers import BorderBias
from asfp.trace import tidy

ADDITIONS = (operator.add, torch.add)

Span = tuple[int, int]
"""First channel and the one after the last."""


@dataclass(frozen=True)
class Branch:
    """What a padded value is made of: `value` on the channels `own`, and constants or zeros (None) around it."""

    value: fx.Node
    own: Span
    before: fx.Node | None = None
    after: fx.Node | None = None

    def on(self, span: Span) -> fx.Node | None:
        """What it is on a piece of the stream."""
        return self.value if span == self.own else self.before if span[1] <= self.own[0] else self.after


def branch_of(node: fx.Node) -> Branch | None:
    """What a value is made of that one reader has and that pads another, which nobody else reads."""
    if len(node.users) != 1 or width_of(node) is None:
        return None
    parts: dict[Any, Callable[[fx.Node], Branch | None]] = {F.pad: _padded, torch.cat: _surrounded}
    branch = parts[node.target](node) if node.target in parts else None
    if branch is None or len([user for user in branch.value.users if not asks_for_shape(user)]) != 1:
        return None
    return branch


def _padded(node: fx.Node) -> Branch | None:
    found = padding_of(node)
    if found is None:
        return None
    value, before, after = found
    return Branch(value, (before, (width_of(node) or 0) - after))


def padding_of(node: fx.Node) -> tuple[fx.Node, int, int] | None:
    """Of F.pad that pads channels, and nothing else, with zeros: the value, how many in front, and how many behind."""
    value, pads = (*node.args, None)[:2]
    if node.kwargs.get("mode", "constant") != "constant" or node.kwargs.get("value") or len(node.args) != 2:
        return None
    if not isinstance(value, fx.Node) or not isinstance(pads, (tuple, list)) or len(pads) != 6 or any(pads[:4]):
        return None
    before, after = pads[4:]
    if not isinstance(before, int) or not isinstance(after, int) or min(before, after) < 0:
        return None
    return value, before, after


def _surrounded(node: fx.Node) -> Branch | None:
    """A concatenation of constants, a value and constants, as `Surround` makes it."""
    parts, axis = (*node.args, None)[:2]
    if axis != 1 or node.kwargs or not isinstance(parts, (tuple, list)) or len(parts) != 3:
        return None
    before, value, after = parts
    widths = [width_of(part) for part in (before, value, after)]
    if any(width is None for width in widths) or not all(is_constant(part) for part in (before, after)):
        return None
    first, own, _ = (width or 0 for width in widths)
    return Branch(value, (first, first + own), before.args[0], after.args[0])  # type: ignore[union-attr, arg-type]


def is_constant(node: Any) -> bool:
    """Whether a value is one number a channel, for images of any size."""
    expanded = isinstance(node, fx.Node) and node.op == "call_method" and node.target == "expand"
    source = node.args[0] if expanded else None
    if not isinstance(source, fx.Node) or source.op != "get_attr":
        return False
    size = source.meta["val"].shape if width_of(source) is not None else ()
    return (*size[:1], *size[2:]) == (1, 1, 1)


def asks_for_shape(user: fx.Node) -> bool:
    return user.target is getattr and user.args[1:] == ("shape",)


def asks_for_size(user: fx.Node) -> bool:
    """Whether a node wants to know the size of a value, and not how many channels it has."""
    items = [item.args[1] for item in user.users if item.target is operator.getitem]
    return asks_for_shape(user) and len(items) == len(user.users) and not {1, -3} & set(items)


def width_of(node: Any) -> int | None:
    """The channels of an image's value, where they are known."""
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return int(value.shape[1]) if isinstance(value, torch.Tensor) and value.ndim == 4 else None


def module_of(model: fx.GraphModule, node: fx.Node) -> nn.Module | None:
    """The module that is called, unless it has hooks, which do more than it says."""
    if node.op != "call_module":
        return None
    module = model.get_submodule(str(node.target))
    return None if module._forward_hooks or module._forward_pre_hooks else module


def conv_like(like: nn.Conv2d, weight: Tensor, bias: Tensor | None) -> nn.Conv2d:
    """A plain or depthwise convolution with the settings of another, for other numbers of channels."""
    settings: Any = {n: getattr(like, n) for n in ("kernel_size", "stride", "padding", "dilation", "padding_mode")}
    groups = 1 if like.groups == 1 else len(weight)
    widths: Any = weight.shape[1] * groups, len(weight)
    settings |= {"groups": groups, "bias": bias is not None, "dtype": weight.dtype}
    conv: nn.Conv2d = skip_init(nn.Conv2d, *widths, **settings)
    with torch.no_grad():
        conv.weight.copy_(weight)
        if bias is not None and conv.bias is not None:
            conv.bias.copy_(bias)
    return conv.eval()


def meta_of(node: fx.Node, width: int) -> dict[str, Any]:
    """As the node's, for another number of channels."""
    shape = list(node.meta["val"].shape)
    shape[1] = width
    return {"val": torch.empty(shape, dtype=node.meta["val"].dtype, device="meta")}


def sides_of(node: fx.Node) -> list[fx.Node]:
    """The two values that an addition adds; none where they are one, or where it does more than to add."""
    sides = [side for side in node.args if isinstance(side, fx.Node)]
    return sides if len(sides) == 2 and sides[0] is not sides[1] and not node.kwargs else []


def alike(one: fx.Node, other: fx.Node) -> bool:
    """Whether two images have one shape and type, so that neither is stretched when they are added, at any size."""
    first, second = one.meta.get("val"), other.meta.get("val")
    if not isinstance(first, torch.Tensor) or not isinstance(second, torch.Tensor):
        return False
    return (first.shape, first.dtype) == (second.shape, second.dtype) and 1 not in first.shape[2:]


def pad_with_zeros(model: nn.Module, *, always: bool) -> nn.Module:
    """In place, of what `fold_batch_norms` gave: branches that constants surround are padded with zeros instead.

    What the constants c add goes into the bias of a convolution on the other side. Where there is none it is an
    addition of its own, x + [b, c] = x + pad(b) + [0, c], if `always`: for engines that compute it with the others in
    one pass. A concatenation is a pass of its own, and OpenVINO's one that changes the order in memory twice.

    >>> import asfp
    >>> from asfp.deployment.folding import fold_batch_norms
    >>> net = asfp.create_model("torchvision:resnet18").eval()
    >>> for module in net.modules():
    ...     if isinstance(module, nn.BatchNorm2d):
    ...         _ = nn.init.ones_(module.bias)
    >>> x = torch.zeros(1, 3, 64, 64)
    >>> _ = asfp.SoftPruner(net, 0.3, 1, example_inputs=x).step(1)
    >>> small = fold_batch_norms(asfp.compact(net, x, layout="auto"), x)
    >>> joined = lambda model: sum(node.target is torch.cat for node in model.graph.nodes)
    >>> joined(small), joined(pad_with_zeros(small, always=True))
    (8, 0)
    """
    if not isinstance(model, fx.GraphModule) or not free_of_effects(model):
        return model
    calls = Counter(str(node.target) for node in model.graph.nodes if node.op == "call_module")
    for node in list(model.graph.nodes):
        if node.target in ADDITIONS:
            _pad_sides(model, node, calls, always)
    tidy(model)
    return model


def _pad_sides(model: fx.GraphModule, total: fx.Node, calls: Counter[str], always: bool) -> None:
    sides = sides_of(total)
    joined = [side for side in sides if side.target is torch.cat and len(side.users) == 1 and alike(side, total)]
    branches = {side: branch for side in joined if (branch := _surrounded(side)) is not None}
    if not branches or not all(alike(side, total) for side in sides):
        return
    layers = [_last_layer(model, side, calls) for side in sides if side not in branches]
    layer = next((layer for layer in layers if layer is not None), None)
    if layer is None and not always:
        return
    fill = torch.stack([_fill(model, branch) for branch in branches.values()]).sum(0)
    for side, branch in branches.items():
        around = (branch.own[0], len(fill) - branch.own[1])
        with model.graph.inserting_before(total):
            padded = model.graph.call_function(F.pad, (branch.value, (0, 0, 0, 0, *around)))
        padded.meta = dict(side.meta)
        total.replace_input_with(side, padded)
    if layer is not None:
        layer.bias = nn.Parameter(fill if layer.bias is None else layer.bias.detach() + fill)
        return
    name = "fill"
    while hasattr(model, name):
        name += "_"
    model.register_buffer(name, fill.view(1, -1, 1, 1))
    with model.graph.inserting_after(total):
        column = model.graph.get_attr(name)
    with model.graph.inserting_after(column):
        shifted = model.graph.call_function(operator.add, (total, column))
    shifted.meta = dict(total.meta)
    total.replace_all_uses_with(shifted, lambda user: user is not shifted)


def _fill(model: fx.GraphModule, branch: Branch) -> Tensor:
    """The constants around a branch, and zeros where it is."""
    assert branch.before is not None
    assert branch.after is not None
    before, after = (attribute(model, str(side.target)).detach().flatten() for side in (branch.before, branch.after))
    return torch.cat([before, before.new_zeros(branch.own[1] - branch.own[0]), after])


def _last_layer(model: fx.GraphModule, node: fx.Node, calls: Counter[str]) -> nn.Conv2d | None:
    """The convolution whose bias is added to a value, to each channel its own, and to nothing else."""
    if len(node.users) != 1:
        return None
    module = module_of(model, node)
    if type(module) is nn.Conv2d:
        return module if calls[str(node.target)] == 1 else None
    if isinstance(module, BorderBias):
        return _last_layer(model, node.all_input_nodes[0], calls)
    if node.target in ADDITIONS:
        found = (_last_layer(model, side, calls) for side in sides_of(node) if alike(side, node))
        return next((layer for layer in found if layer is not None), None)
    return None
