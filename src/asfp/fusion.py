"""For inference on a GPU: batch norms, residual additions and ReLUs within the convolutions."""

from __future__ import annotations

import operator
from collections import Counter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from asfp.compaction.layers import BorderBias
from asfp.deployment.folding import fold_batch_norms
from asfp.fused_conv import FEW, FusedConv, FusedPool, fits_pool
from asfp.trace import Example, as_arguments, writes_in_place

__all__ = ["FusedConv", "FusedPool", "fell_back", "fuse", "take_faster"]

_RELUS = (F.relu, torch.relu, torch.relu_, F.relu_, "relu", "relu_")
_ADDITIONS = (operator.add, operator.iadd, torch.add, "add", "add_")
_FRESH = (FusedConv, FusedPool, nn.Conv2d, nn.MaxPool2d)
"""Modules whose result shares no memory with anything."""


def fuse(model: nn.Module, example_inputs: Example) -> nn.Module:
    """A copy in evaluation mode in which conv, batch norm, the addition of a residual and ReLU are one `FusedConv`.

    It computes the same up to rounding, for every size. On a GPU each is one kernel; elsewhere it runs too, no faster.
    What something else reads, or no ReLU follows, stays as it is; so does a model that cannot be traced.

    >>> net = nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 1))
    >>> [type(m).__name__ for m in fuse(net, torch.zeros(1, 3, 8, 8)).children()]
    ['FusedConv', 'Conv2d']
    """
    folded = fold_batch_norms(model, example_inputs)
    if not isinstance(folded, fx.GraphModule):
        return folded
    editor = _Editor(folded)
    for node in list(folded.graph.nodes):
        if editor.is_relu(node):
            editor.fuse(node)
    for node in list(folded.graph.nodes):
        conv = editor.convolution(node)
        if conv is not None and conv.in_channels < FEW and conv.groups == 1:
            editor.replace(node, FusedConv(conv, relu=False), node.args)
        pool = editor.module(node)
        if type(pool) is nn.MaxPool2d and len(node.args) == 1 and not node.kwargs and fits_pool(pool):
            editor.replace(node, FusedPool(pool), node.args)
    folded.delete_all_unused_submodules()
    folded.graph.lint()
    folded.recompile()
    return folded.eval()


def take_faster(fused: nn.Module, example_inputs: Example) -> None:
    """On a GPU: each `FusedConv` and `FusedPool` is timed on what it reads in all its ways, and takes the fastest.

    Convolutions of the same shapes are timed once.

    >>> take_faster(fuse(nn.Conv2d(3, 8, 3), torch.zeros(1, 3, 8, 8)), torch.zeros(1, 3, 8, 8))  # nothing on a CPU
    """
    args, kwargs = as_arguments(example_inputs)
    timed: dict[object, FusedConv] = {}

    def first(module: nn.Module, given: Any) -> None:
        if isinstance(module, FusedConv) and (like := timed.get(module.form(*given))) is not None:
            module.take_from(like)
        elif isinstance(module, FusedConv):
            if module.take_faster(*given):
                timed[module.form(*given)] = module
        elif isinstance(module, FusedPool):
            module.take_faster(*given)

    hooks = [m.register_forward_pre_hook(first) for m in fused.modules() if isinstance(m, FusedConv | FusedPool)]
    try:
        with torch.inference_mode():
            fused(*args, **kwargs)
    finally:
        for hook in hooks:
            hook.remove()


def fell_back(fused: nn.Module) -> dict[str, str]:
    """The convolutions that are not computed by one kernel on the GPU, though they could, and why.

    >>> fell_back(fuse(nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()), torch.zeros(1, 3, 8, 8)))
    {}
    """
    modules = fused.named_modules()
    return {name: m.fell_back for name, m in modules if isinstance(m, FusedConv) and m.fell_back and not m.kernel}


class _Editor:
    """The graph of a model, and what is done to it."""

    def __init__(self, model: fx.GraphModule) -> None:
        self.model = model
        self.calls = Counter(str(n.target) for n in model.graph.nodes if n.op == "call_module")

    def module(self, node: fx.Node) -> nn.Module | None:
        """The module that is called, unless it has hooks, which do more than it says."""
        if node.op != "call_module":
            return None
        module = self.model.get_submodule(str(node.target))
        return None if module._forward_hooks or module._forward_pre_hooks else module

    def is_relu(self, node: fx.Node) -> bool:
        called = type(self.module(node)) is nn.ReLU or _calls(node, _RELUS)
        return called and len(node.args) >= 1 and isinstance(node.args[0], fx.Node)

    def convolution(self, node: Any) -> nn.Conv2d | None:
        """A convolution that cuDNN can do as it is, called with one argument."""
        module = self.module(node) if isinstance(node, fx.Node) else None
        if type(module) is not nn.Conv2d or len(node.args) != 1 or node.kwargs:
            return None
        return module if module.padding_mode == "zeros" and not isinstance(module.padding, str) else None

    def corrected(self, node: Any) -> tuple[nn.Conv2d, BorderBias | None, list[fx.Node]] | None:
        """A convolution that one node reads, maybe by way of its border correction, and these nodes in order."""
        if not isinstance(node, fx.Node) or len(node.users) != 1:
            return None
        border = self.module(node)
        if isinstance(border, BorderBias):
            source = self.corrected(node.args[0])
            own = source is not None and source[1] is None and source[2][0].args[0] is node.args[1]
            return (source[0], border, [*source[2], node]) if source is not None and own else None
        conv = self.convolution(node)
        return None if conv is None else (conv, None, [node])

    def fuse(self, relu: fx.Node) -> None:
        """conv -> relu, or conv -> add -> relu, with no other reader between them."""
        source: Any = relu.args[0]
        found = self.corrected(source)
        if found is not None:
            conv, border, nodes = found
            if _undisturbed(nodes[0], relu, nodes):
                self.replace(relu, FusedConv(conv, border=border), nodes[0].args, *nodes)
        elif _calls(source, _ADDITIONS) and len(source.args) == 2 and not source.kwargs and len(source.users) == 1:
            order = {n: i for i, n in enumerate(self.model.graph.nodes)}
            operands = [n for n in source.args if isinstance(n, fx.Node)]
            for node in sorted(operands, key=lambda n: -order[n]):  # the later one, where both are convolutions
                others = [n for n in operands if n is not node]
                if len(others) == 1 and self._fuse_sum(node, others[0], source, relu):
                    return

    def _fuse_sum(self, node: fx.Node, other: fx.Node, addition: fx.Node, relu: fx.Node) -> bool:
        found = self.corrected(node)
        if found is None or not _alike(node, other):
            return False
        conv, border, nodes = found
        if not _undisturbed(nodes[0], relu, [*nodes, addition]):
            return False
        if writes_in_place(addition) and addition.args[0] is other and not self._last_reader(other, addition):
            return False
        bias, partner = conv.bias, self.module(other)
        once = self.calls[str(other.target)] == 1 and len(other.users) == 1
        if type(partner) is nn.Conv2d and partner.bias is not None and once:
            bias = partner.bias if bias is None else nn.Parameter(bias.detach() + partner.bias.detach())
            partner.bias = None
        self.replace(relu, FusedConv(conv, bias=bias, border=border), (nodes[0].args[0], other), *nodes, addition)
        return True

    def _last_reader(self, value: fx.Node, reader: fx.Node) -> bool:
        """Whether nothing sees that the reader overwrites the value: no later reader, and no view of it."""
        order = {n: i for i, n in enumerate(self.model.graph.nodes)}
        others = [n for n in value.users if n is not reader]
        seen = all(order[n] < order[reader] and isinstance(self.module(n), _FRESH) for n in others)
        return isinstance(self.module(value), _FRESH) and seen

    def replace(self, node: fx.Node, module: FusedConv | FusedPool, args: Any, *before: fx.Node) -> None:
        """Call the module instead of the node and of those before it, by the name of the first."""
        conv = str((*before, node)[0].target)
        name = conv
        if self.calls[conv] > 1:  # others still call it
            name = next(n for i in range(2, len(self.calls) + 3) if not _has(self.model, n := f"{conv}_fused{i}"))
            self.model.add_submodule(name, module)
            self.calls[conv] -= 1
        else:
            self.model.set_submodule(name, module)
        self.calls[name] = 1
        with self.model.graph.inserting_before(node):
            new = self.model.graph.call_module(name, args)
        new.meta = dict(node.meta)
        node.replace_all_uses_with(new)
        for old in (node, *reversed(before)):
            self.model.graph.erase_node(old)


def _calls(node: fx.Node, functions: tuple[Any, ...]) -> bool:
    """Whether it calls one of these functions or methods; a module may have the name of a method."""
    return node.op in ("call_function", "call_method") and node.target in functions


def _has(model: nn.Module, name: str) -> bool:
    owner, _, last = name.rpartition(".")
    return hasattr(model.get_submodule(owner), last)


def _undisturbed(first: fx.Node, last: fx.Node, own: list[fx.Node]) -> bool:
    """Whether nothing is overwritten between two nodes, so that the first may be computed where the last is."""
    node = first
    while node is not last:
        if node not in own and writes_in_place(node):
            return False
        node = node.next
    return True


def _alike(a: fx.Node, b: fx.Node) -> bool:
    """Whether two values have the same shape, type and device."""
    x, y = a.meta.get("val"), b.meta.get("val")
    if not isinstance(x, Tensor) or not isinstance(y, Tensor):
        return False
    return (x.shape, x.dtype, x.device) == (y.shape, y.dtype, y.device)
