"""For deployment: batch norms folded into the layers in front of them, border corrections as convolutions of ones."""

from __future__ import annotations

import operator
from collections import Counter
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.nn.utils.fusion import fuse_conv_bn_weights, fuse_linear_bn_weights

from asfp.compaction.layers import BorderBias
from asfp.errors import TraceError
from asfp.roles import LEAVES
from asfp.trace import Example, copy_of, tidy, trace

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_POINTWISE = (nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.SiLU, nn.GELU, nn.Hardswish, nn.Sigmoid, nn.Identity, nn.Dropout)

_ACTIVATIONS = (torch.relu, F.relu, F.relu6, F.silu, F.gelu, torch.sigmoid, "relu", "relu_", "sigmoid")
_ALIKE = (operator.add, operator.iadd, torch.add, torch.index_select, *_ACTIVATIONS, "index_select", "add")
"""Functions and methods that leave height and width as they are."""


def fold_batch_norms(model: nn.Module, example_inputs: Example) -> nn.Module:
    """A copy in evaluation mode with w' = w g / sqrt(var + eps) and b' = (b - mean) g / sqrt(var + eps) + beta.

    Folds into a convolution or linear layer that nothing else reads, and into its border correction. A model that
    cannot be traced comes back as it is.

    >>> net = nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU())
    >>> [type(m).__name__ for m in fold_batch_norms(net, torch.zeros(1, 3, 8, 8)).children()]
    ['Conv2d', 'ReLU']
    """
    copied = copy_of(model).eval()
    try:
        traced = trace(copied, example_inputs, (*LEAVES, BorderBias))
    except TraceError:
        return copied
    modules = dict(traced.named_modules())
    calls = Counter(str(n.target) for n in traced.graph.nodes if n.op == "call_module")
    once = {n: modules[str(n.target)] for n in traced.graph.nodes if n.op == "call_module" and calls[n.target] == 1}
    once = {n: module for n, module in once.items() if not (module._forward_hooks or module._forward_pre_hooks)}
    with torch.no_grad():
        for node, norm in once.items():
            if type(norm) in _NORMS and norm.running_mean is not None:
                _fold(traced, node, norm, once)
    tidy(traced)
    return traced.eval()


def _fold(traced: fx.GraphModule, node: fx.Node, norm: Any, once: dict[fx.Node, Any]) -> None:
    source = node.args[0]
    border: BorderBias | None = None
    if not isinstance(source, fx.Node) or len(source.users) != 1:
        return
    if isinstance(once.get(source), BorderBias):
        border, source = once[source], source.args[0]
    layer: Any = once.get(source) if isinstance(source, fx.Node) and len(source.users) == 1 else None
    given = (norm.running_mean, norm.running_var, norm.eps, norm.weight, norm.bias)
    if type(layer) in _CONVOLUTIONS or (type(layer) in _TRANSPOSED and layer.groups == 1):
        weight, bias = fuse_conv_bn_weights(layer.weight, layer.bias, *given, transpose=type(layer) in _TRANSPOSED)
    elif type(layer) is nn.Linear and node.meta["val"].ndim == 2:
        weight, bias = fuse_linear_bn_weights(layer.weight, layer.bias, *given)
    else:
        return
    layer.weight, layer.bias = weight, bias
    if border is not None:
        scale = torch.rsqrt(norm.running_var + norm.eps) * (1 if norm.weight is None else norm.weight)
        border.integral.mul_(scale.view(-1, *[1] * (border.integral.ndim - 1)))
    before = node.args[0]
    assert isinstance(before, fx.Node)
    node.replace_all_uses_with(before)
    traced.graph.erase_node(node)


def convolve_borders(model: nn.Module) -> nn.Module:
    """In place, of what `fold_batch_norms` gave: border corrections become conv(ones, kernel), the same for every size.

    Engines then add them within the convolution that they correct, and compute nothing from shapes. A map of ones, as
    large as what the convolution reads, is that with zero weights and the bias 1; maps of one size share it.

    >>> import asfp
    >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Sigmoid(), nn.Conv2d(8, 4, 3, padding=1))
    >>> _ = net[0].weight.data[:5].zero_()
    >>> x = torch.zeros(1, 3, 8, 8)
    >>> small = fold_batch_norms(asfp.compact(net, x), x)
    >>> [type(m).__name__ for m in convolve_borders(small).children()]
    ['Conv2d', 'Sigmoid', 'Conv2d', 'Conv2d', 'Conv2d']
    """
    if not isinstance(model, fx.GraphModule):
        return model
    ones: dict[fx.Node, fx.Node] = {}
    calls = Counter(node.target for node in model.graph.nodes if node.op == "call_module")
    for node in list(model.graph.nodes):
        border = model.get_submodule(str(node.target)) if calls[node.target] == 1 else None
        if isinstance(border, BorderBias) and _symmetric(border, node):
            _convolve(model, node, border, ones)
    tidy(model)
    return model


def _convolve(model: fx.GraphModule, node: fx.Node, border: BorderBias, ones: dict[fx.Node, fx.Node]) -> None:
    output, source = node.args
    assert isinstance(source, fx.Node)
    dims = len(border.stride)
    like = border.integral
    root = _past_activations(model, _of_the_same_size(model, source, dims))
    with torch.no_grad():
        if root not in ones:
            flat = _CONVOLUTIONS[dims - 1](root.meta["val"].shape[-dims - 1], 1, 1).to(like).eval()
            flat.weight.zero_()
            nn.init.ones_(flat.bias)  # type: ignore[arg-type]
            name = f"ones{len(ones)}"
            while hasattr(model, name):
                name += "_"
            model.add_submodule(name, flat)
            with model.graph.inserting_after(root):
                ones[root] = model.graph.call_module(name, (root,))
            shape = list(root.meta["val"].shape)
            shape[-dims - 1] = 1
            ones[root].meta = {"val": torch.empty(shape, dtype=like.dtype, device="meta")}
        kernel = border.kernel()
        kind: Any = _CONVOLUTIONS[dims - 1]
        conv = kind(1, len(like), kernel.shape[1:], border.stride, border.padding, border.dilation, bias=False)
        conv.to(like).eval().weight.copy_(kernel.unsqueeze(1))
    model.set_submodule(str(node.target), conv)
    with model.graph.inserting_after(node):
        total = model.graph.call_function(operator.add, (output, node))
    total.meta = dict(node.meta)
    node.replace_all_uses_with(total, lambda user: user is not total)
    node.args = (ones[root],)


def _symmetric(border: BorderBias, node: fx.Node) -> bool:
    """Whether a convolution with as much padding on both sides gives the size that is there."""
    dims = len(border.stride)
    source: Any = node.args[1]
    taps = [n - 1 for n in border.integral.shape[1:]]
    sizes = zip(source.meta["val"].shape[-dims:], taps, border.stride, border.padding, border.dilation, strict=True)
    found = [(n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d in sizes]
    return found == list(node.meta["val"].shape[-dims:])


def _of_the_same_size(model: fx.GraphModule, node: fx.Node, dims: int) -> fx.Node:
    """The earliest value that this one was made from by operations that leave height and width as they are."""
    while True:
        module: Any = model.get_submodule(str(node.target)) if node.op == "call_module" else None
        before: Any = node.args[0] if node.args else None
        if node.target is torch.cat:
            joined = [part for part in before or () if part.target != "expand"]
            before = joined[0] if joined and node.meta["val"].ndim - dims == 2 else None
        elif node.target is F.pad:
            pads: Any = node.args[1] if len(node.args) > 1 else (None,)
            before = before if all(n == 0 for n in pads[: 2 * dims]) else None
        elif type(module) in _CONVOLUTIONS:
            before = before if _keeps_size(module) else None
        elif not isinstance(module, (BorderBias, *_NORMS, *_POINTWISE)) and node.target not in _ALIKE:
            before = None
        sizes = [n.meta["val"].shape[-dims:] for n in (node, before) if isinstance(n, fx.Node)]
        if len(sizes) < 2 or sizes[0] != sizes[1] or min(sizes[0]) < 2:
            return node
        node = before


def _past_activations(model: fx.GraphModule, node: fx.Node) -> fx.Node:
    """What activations make of a value that nothing else reads: an engine computes these within the layer in front of
    them only where no map of ones is made of what comes in between; and they may write in place.
    """
    while len(node.users) == 1:
        (user,) = node.users
        module = model.get_submodule(str(user.target)) if user.op == "call_module" else None
        if not isinstance(module, _POINTWISE) and user.target not in _ACTIVATIONS:
            break
        node = user
    return node


def _keeps_size(conv: Any) -> bool:
    if isinstance(conv.padding, str):
        return bool(conv.padding == "same")
    taps = zip(conv.kernel_size, conv.dilation, conv.padding, strict=True)
    return set(conv.stride) == {1} and all(2 * p == d * (k - 1) for k, d, p in taps)
