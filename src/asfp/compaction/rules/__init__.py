"""The table: operation -> how channels pass through it. What is not here is a barrier."""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from asfp.compaction.layers import BorderBias
from asfp.compaction.rules.base import Barrier, Op, Rule
from asfp.compaction.rules.join import Binary, Concatenate
from asfp.compaction.rules.parts import Cut, Item, Opaque, Output, Size, Source, Take
from asfp.compaction.rules.perchannel import (
    AveragePool,
    Identity,
    Mixing,
    Normalise,
    Pad,
    Pointwise,
    PReLU,
    Reduce,
    Spatial,
)
from asfp.compaction.rules.shape import Expand, Flatten, Permute, PixelShuffle, PixelUnshuffle, Squeeze, View
from asfp.compaction.rules.weighted import Border, Weighted

WEIGHTED, NORMALISE, POINTWISE, IDENTITY, MIXING = Weighted(), Normalise(), Pointwise(), Identity(), Mixing()
PAD, OPAQUE = Pad(), Opaque()
SPATIAL = {n: Spatial(n) for n in (1, 2, 3)}
AVERAGE = {n: AveragePool(n) for n in (1, 2, 3)}
RESIZE = Spatial()

MODULES: dict[type[nn.Module], Rule] = {
    **dict.fromkeys((nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear), WEIGHTED),
    **dict.fromkeys((nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d), WEIGHTED),
    **dict.fromkeys((nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm), NORMALISE),
    **dict.fromkeys((nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d), NORMALISE),
    **dict.fromkeys((nn.GroupNorm, nn.LayerNorm, nn.LocalResponseNorm), MIXING),
    **dict.fromkeys((nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.CELU, nn.SELU, nn.GELU, nn.SiLU, nn.Mish), POINTWISE),
    **dict.fromkeys((nn.Sigmoid, nn.Tanh, nn.Hardswish, nn.Hardsigmoid, nn.Hardtanh, nn.LogSigmoid), POINTWISE),
    **dict.fromkeys((nn.Softplus, nn.Softsign, nn.Softshrink, nn.Hardshrink, nn.Tanhshrink, nn.Threshold), POINTWISE),
    **dict.fromkeys((nn.Identity, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout), IDENTITY),
    **dict.fromkeys((nn.FeatureAlphaDropout,), IDENTITY),
    **dict.fromkeys((nn.MaxPool1d, nn.AdaptiveAvgPool1d, nn.AdaptiveMaxPool1d), SPATIAL[1]),
    **dict.fromkeys((nn.MaxPool2d, nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d), SPATIAL[2]),
    **dict.fromkeys((nn.MaxPool3d, nn.AdaptiveAvgPool3d, nn.AdaptiveMaxPool3d), SPATIAL[3]),
    nn.AvgPool1d: AVERAGE[1],
    nn.AvgPool2d: AVERAGE[2],
    nn.AvgPool3d: AVERAGE[3],
    **dict.fromkeys((nn.Upsample, nn.UpsamplingNearest2d, nn.UpsamplingBilinear2d), RESIZE),
    **dict.fromkeys((nn.ZeroPad1d, nn.ZeroPad2d, nn.ZeroPad3d), PAD),
    **dict.fromkeys((nn.ConstantPad1d, nn.ConstantPad2d, nn.ConstantPad3d), PAD),
    **dict.fromkeys((nn.ReflectionPad1d, nn.ReflectionPad2d, nn.ReflectionPad3d), PAD),
    **dict.fromkeys((nn.ReplicationPad1d, nn.ReplicationPad2d, nn.ReplicationPad3d), PAD),
    **dict.fromkeys((nn.CircularPad1d, nn.CircularPad2d, nn.CircularPad3d), PAD),
    nn.PReLU: PReLU(),
    BorderBias: Border(),
    nn.Flatten: Flatten(),
    nn.PixelShuffle: PixelShuffle(),
    nn.PixelUnshuffle: PixelUnshuffle(),
}

# fmt: off
_POINTWISE_NAMES = [
    "abs", "ceil", "celu", "clamp", "clip", "cos", "elu", "erf", "exp", "expm1", "floor", "gelu", "hardshrink",
    "hardsigmoid", "hardswish", "hardtanh", "leaky_relu", "log", "log1p", "logsigmoid", "mish", "neg", "pow",
    "reciprocal", "relu", "relu6", "round", "rsqrt", "selu", "sigmoid", "sign", "silu", "sin", "softplus",
    "softshrink", "softsign", "sqrt", "square", "tanh", "tanhshrink", "threshold",
]
# fmt: on
_ADD, _SUB, _MUL = Binary("add", operator.add), Binary("sub", operator.sub), Binary("mul", operator.mul)
_DIV, _MAX, _MIN = Binary("div", operator.truediv), Binary("max", torch.maximum), Binary("min", torch.minimum)
_REDUCE = {"mean": Reduce("mean"), "sum": Reduce("sum"), "amax": Reduce("max"), "amin": Reduce("min")}
_VIEW, _FLATTEN, _PERMUTE, _SQUEEZE = View(), Flatten(), Permute(), Squeeze()
_EXPAND, _CUT, _SIZE = Expand(), Cut(), Size()

METHODS: dict[str, Rule] = {
    **dict.fromkeys((n for n in _POINTWISE_NAMES if hasattr(torch.Tensor, n)), POINTWISE),
    **dict.fromkeys(("clone", "contiguous", "detach"), IDENTITY),
    **dict.fromkeys(("float", "double", "half", "bfloat16", "to"), POINTWISE),
    **_REDUCE,
    **dict.fromkeys(("add", "__add__", "__radd__"), _ADD),
    **dict.fromkeys(("mul", "__mul__", "__rmul__", "multiply"), _MUL),
    "sub": _SUB,
    "div": _DIV,
    "maximum": _MAX,
    "minimum": _MIN,
    "view": _VIEW,
    "reshape": _VIEW,
    "flatten": _FLATTEN,
    **dict.fromkeys(("permute", "transpose", "swapaxes"), _PERMUTE),
    **dict.fromkeys(("squeeze", "unsqueeze"), _SQUEEZE),
    **dict.fromkeys(("expand", "expand_as"), _EXPAND),
    **dict.fromkeys(("chunk", "split"), _CUT),
    **dict.fromkeys(("narrow", "index_select"), Take()),
    **dict.fromkeys(("size", "dim", "ndimension"), _SIZE),
}

FUNCTIONS: dict[Any, Rule] = {
    **{getattr(owner, n): POINTWISE for owner in (torch, F) for n in _POINTWISE_NAMES if hasattr(owner, n)},
    operator.neg: POINTWISE,
    operator.pow: POINTWISE,
    operator.abs: POINTWISE,
    **dict.fromkeys((torch.clone, torch.detach), IDENTITY),
    **{getattr(torch, n): rule for n, rule in _REDUCE.items()},
    **dict.fromkeys((operator.add, torch.add), _ADD),
    **dict.fromkeys((operator.sub, torch.sub, torch.subtract), _SUB),
    **dict.fromkeys((operator.mul, torch.mul, torch.multiply), _MUL),
    **dict.fromkeys((operator.truediv, torch.div, torch.divide), _DIV),
    torch.maximum: _MAX,
    torch.minimum: _MIN,
    **dict.fromkeys((torch.cat, torch.concat, torch.concatenate), Concatenate()),
    **dict.fromkeys((torch.chunk, torch.split), _CUT),
    operator.getitem: Item(),
    **dict.fromkeys((torch.narrow, torch.index_select), Take()),
    getattr: _SIZE,
    len: _SIZE,
    torch.flatten: _FLATTEN,
    torch.reshape: _VIEW,
    **dict.fromkeys((torch.permute, torch.transpose, torch.swapaxes), _PERMUTE),
    **dict.fromkeys((torch.squeeze, torch.unsqueeze), _SQUEEZE),
    **dict.fromkeys((F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout), Identity(training=2)),
    **dict.fromkeys((F.max_pool1d, F.adaptive_avg_pool1d, F.adaptive_max_pool1d), SPATIAL[1]),
    **dict.fromkeys((F.max_pool2d, F.adaptive_avg_pool2d, F.adaptive_max_pool2d), SPATIAL[2]),
    **dict.fromkeys((F.max_pool3d, F.adaptive_avg_pool3d, F.adaptive_max_pool3d), SPATIAL[3]),
    **dict.fromkeys((torch.max_pool1d, torch.adaptive_avg_pool1d), SPATIAL[1]),
    torch.max_pool2d: SPATIAL[2],
    torch.max_pool3d: SPATIAL[3],
    F.avg_pool1d: AVERAGE[1],
    F.avg_pool2d: AVERAGE[2],
    F.avg_pool3d: AVERAGE[3],
    **dict.fromkeys((F.interpolate, F.upsample, F.upsample_nearest, F.upsample_bilinear), RESIZE),
    F.pad: PAD,
    F.pixel_shuffle: PixelShuffle(),
    F.pixel_unshuffle: PixelUnshuffle(),
    **dict.fromkeys((F.layer_norm, F.group_norm, F.local_response_norm), MIXING),
}

# Found by name, so that the library they come from need not be installed.
NAMED: dict[str, Rule] = {
    "torchvision.ops.stochastic_depth.stochastic_depth": Identity(training=3),
}

_SHAPE_ATTRIBUTES = ("shape", "device", "dtype", "ndim", "is_cuda", "requires_grad")


def rule_for(op: Op, shared: str | None) -> Rule:
    """The operation's rule; `shared` says why a layer with weights must stay as it is."""
    node = op.node
    if node.op == "placeholder" or node.op == "get_attr":
        return Source()
    if node.op == "output":
        return Output()
    if node.all_input_nodes and not any(_has_tensor(n) for n in node.all_input_nodes):
        return OPAQUE  # arithmetic on sizes
    rule: Rule | None
    if node.op == "call_module":
        assert op.module is not None
        rule = MODULES.get(type(op.module))
        if rule is not None and shared and len((*op.module.parameters(), *op.module.buffers())):
            return Barrier(shared)
        if rule is not None and (op.module._forward_hooks or op.module._forward_pre_hooks):
            return Barrier("it has forward hooks, which may do anything")
    elif node.op == "call_method":
        rule = METHODS.get(str(node.target))
    else:
        target = node.target
        rule = FUNCTIONS.get(target) or NAMED.get(
            f"{getattr(target, '__module__', '')}.{getattr(target, '__name__', '')}"
        )
        if target is getattr and node.args[1] not in _SHAPE_ATTRIBUTES:
            rule = None
    return rule or Barrier("no rule for this operation")


def _has_tensor(node: fx.Node) -> bool:
    return any(isinstance(v, torch.Tensor) for v in torch.utils._pytree.tree_leaves(node.meta.get("val")))


__all__ = ["FUNCTIONS", "METHODS", "MODULES", "NAMED", "rule_for"]
