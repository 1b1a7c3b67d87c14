"""Batch norm folded into the layer in front of it, for deployment: one layer less, the same function."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import torch
from torch import fx, nn
from torch.nn.utils.fusion import fuse_conv_bn_weights, fuse_linear_bn_weights

from asfp.compaction.layers import BorderBias
from asfp.errors import TraceError
from asfp.roles import LEAVES
from asfp.trace import Example, trace

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def fold_batch_norms(model: nn.Module, example_inputs: Example) -> nn.Module:
    """A copy in evaluation mode with w' = w g / sqrt(var + eps) and b' = (b - mean) g / sqrt(var + eps) + beta.

    Folds into a convolution or linear layer that nothing else reads, and into its border correction. A model that
    cannot be traced comes back as it is.

    >>> net = nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU())
    >>> [type(m).__name__ for m in fold_batch_norms(net, torch.zeros(1, 3, 8, 8)).children()]
    ['Conv2d', 'ReLU']
    """
    copied = copy.deepcopy(model).eval()
    try:
        traced = trace(copied, example_inputs, (*LEAVES, BorderBias))
    except TraceError:
        return copied
    modules = dict(traced.named_modules())
    calls = Counter(str(n.target) for n in traced.graph.nodes if n.op == "call_module")
    once = {n: modules[str(n.target)] for n in traced.graph.nodes if n.op == "call_module" and calls[n.target] == 1}
    with torch.no_grad():
        for node, norm in once.items():
            if type(norm) in _NORMS and norm.running_mean is not None:
                _fold(traced, node, norm, once)
    traced.graph.eliminate_dead_code()
    traced.delete_all_unused_submodules()
    traced.recompile()
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
