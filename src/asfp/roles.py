"""What each convolution is for, read from the traced graph: a projection, an output, fed by and normalised by what.

No rule here looks at a name: a projection is one because of where it stands between a fork and an addition.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import UninitializedParameter

Convolution = nn.Conv1d | nn.Conv2d | nn.Conv3d | nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
LEAVES: tuple[type[nn.Module], ...] = (*CONVOLUTIONS, _BatchNorm)
"""Modules to keep whole in the graph, subclasses included."""


@dataclass(frozen=True)
class Roles:
    """The roles of a model's convolutions, by name."""

    projections: frozenset[str] = frozenset()
    """The only convolution on its way from a fork to an addition, beside a way with several in a row."""
    outputs: frozenset[str] = frozenset()
    """Reaches the model's output with no further convolution or linear layer behind it."""
    norms: Mapping[str, _BatchNorm] = field(default_factory=dict)
    """The batch norm that reads this convolution, and nothing else."""
    feeders: Mapping[str, tuple[str, int]] = field(default_factory=dict)
    """For a depthwise convolution: the one whose filters make its channels, and its own filters for each of them."""


def is_depthwise(module: nn.Module | None) -> bool:
    """One filter, or a few, for each input channel: groups = in_channels > 1.

    >>> is_depthwise(nn.Conv2d(8, 16, 3, groups=8)), is_depthwise(nn.Conv2d(8, 16, 3, groups=4))
    (True, False)
    """
    return isinstance(module, CONVOLUTIONS) and not module.transposed and 1 < module.groups == module.in_channels


def find_roles(model: nn.Module, graph: fx.GraphModule) -> Roles:
    """The role of every convolution of `model`, from the graph that was traced from it.

    >>> class Block(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.a, self.b, self.short = nn.Conv2d(4, 8, 3), nn.Conv2d(8, 8, 3), nn.Conv2d(4, 8, 5)
    ...
    ...     def forward(self, x):
    ...         return self.b(self.a(x)) + self.short(x)
    >>> block = Block()
    >>> sorted(find_roles(block, fx.symbolic_trace(block)).projections)
    ['short']
    """
    names = {id(module): name for name, module in model.named_modules()}
    modules = dict(graph.named_modules())
    called = {n: modules[str(n.target)] for n in graph.graph.nodes if n.op == "call_module"}
    convolutions: dict[fx.Node, Convolution] = {n: m for n, m in called.items() if isinstance(m, CONVOLUTIONS)}
    calls: defaultdict[str, list[fx.Node]] = defaultdict(list)
    for node, module in convolutions.items():
        calls[names[id(module)]].append(node)
    norms = {name: _norm(nodes, called) for name, nodes in calls.items()}
    projections, outputs = _projections(graph.graph, set(convolutions)), _outputs(graph.graph, called)
    feeders = {
        name: {_feeder(node, called) for node in nodes}
        for name, nodes in calls.items()
        if is_depthwise(convolutions[nodes[0]])
    }
    unique = {name: found.pop() for name, found in feeders.items() if len(found) == 1}
    return Roles(
        projections=frozenset(name for name, nodes in calls.items() if projections.issuperset(nodes)),
        outputs=frozenset(name for name, nodes in calls.items() if not outputs.isdisjoint(nodes)),
        norms={name: norm for name, norm in norms.items() if norm is not None},
        feeders={name: (names[id(feed[0])], feed[1]) for name, feed in unique.items() if feed is not None},
    )


# -- projections

_ADDITIONS = {operator.add, operator.iadd, torch.add, "add", "add_", "__add__", "__iadd__", "__radd__"}


def _projections(graph: fx.Graph, convolutions: set[fx.Node]) -> set[fx.Node]:
    """Sets of nodes are ints, one bit a node, so that a walk back to the fork is an `&`."""
    nodes = list(graph.nodes)
    bit = {node: 1 << i for i, node in enumerate(nodes)}
    before: dict[fx.Node, int] = {}
    for node in nodes:
        before[node] = bit[node]
        for source in node.all_input_nodes:
            before[node] |= before[source]
    every = sum(bit[node] for node in convolutions)
    constant = sum(bit[node] for node in nodes if node.op == "get_attr")
    found = set()
    for node in nodes:
        if node.target not in _ADDITIONS or len(node.all_input_nodes) != 2:
            continue
        left, right = (before[operand] for operand in node.all_input_nodes)
        if not left & right & ~constant:  # no fork: the two come from different inputs
            continue
        for own, other in ((left & ~right, right & ~left), (right & ~left, left & ~right)):
            if (own & every).bit_count() == 1 and (other & every).bit_count() > 1:
                branch = [n for n in nodes if bit[n] & other]
                if _most_in_a_row(branch, convolutions) > 1:
                    found.add(nodes[(own & every).bit_length() - 1])
    return found


def _most_in_a_row(branch: list[fx.Node], convolutions: set[fx.Node]) -> int:
    longest: dict[fx.Node, int] = {}
    for node in branch:
        longest[node] = max((longest.get(n, 0) for n in node.all_input_nodes), default=0) + (node in convolutions)
    return max(longest.values(), default=0)


# -- output convolutions

_WEIGHING = {
    F.linear, F.conv1d, F.conv2d, F.conv3d, F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d, F.bilinear,
    F.scaled_dot_product_attention, F.multi_head_attention_forward, operator.matmul, torch.matmul, torch.mm, torch.bmm,
    torch.addmm, torch.baddbmm, torch.einsum, torch.tensordot, "matmul", "mm", "bmm", "__matmul__",
}  # fmt: skip


def _outputs(graph: fx.Graph, called: Mapping[fx.Node, nn.Module]) -> set[fx.Node]:
    weighed: dict[fx.Node, bool] = {}  # is there a convolution or linear layer behind the node?
    reaches: dict[fx.Node, bool] = {}  # does the node reach the output?
    for node in reversed(graph.nodes):
        reaches[node] = node.op == "output" or any(reaches[user] for user in node.users)
        weighed[node] = any(weighed[user] or weighs(user, called.get(user)) for user in node.users)
    return {n for n, m in called.items() if isinstance(m, CONVOLUTIONS) and reaches[n] and not weighed[n]}


def weighs(node: fx.Node, module: nn.Module | None) -> bool:
    """Whether the node, which calls `module` or none, weighs and sums its input as a linear layer does.

    >>> graph = fx.symbolic_trace(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    >>> [weighs(node, graph.get_submodule(node.target)) for node in graph.graph.nodes if node.op == "call_module"]
    [True, False]
    """
    if module is None:
        return node.op in ("call_function", "call_method") and node.target in _WEIGHING
    if is_depthwise(module) or isinstance(module, nn.LayerNorm):
        return False
    return any(isinstance(p, UninitializedParameter) or p.ndim > 1 for p in module.parameters())


# -- what stands behind a convolution, and before a depthwise one

_PRESERVING_MODULES = {
    f"torch.nn.modules.{kind}"
    for kind in ("activation", "batchnorm", "dropout", "instancenorm", "padding", "pooling", "upsampling")
}
_PRESERVING_NAMES = [
    "relu", "relu6", "hardtanh", "hardswish", "hardsigmoid", "silu", "gelu", "elu", "selu", "celu", "leaky_relu",
    "rrelu", "mish", "sigmoid", "logsigmoid", "tanh", "tanhshrink", "softplus", "softsign", "softshrink",
    "hardshrink", "threshold", "dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout",
    "feature_alpha_dropout", "max_pool1d", "max_pool2d", "max_pool3d", "avg_pool1d", "avg_pool2d", "avg_pool3d",
    "adaptive_max_pool1d", "adaptive_max_pool2d", "adaptive_max_pool3d", "adaptive_avg_pool1d", "adaptive_avg_pool2d",
    "adaptive_avg_pool3d", "lp_pool2d", "interpolate", "batch_norm", "instance_norm", "contiguous", "clone", "to",
    "float", "half", "bfloat16", "double", "clamp", "clip", "abs",
]  # fmt: skip
_PRESERVING: set[Any] = {
    *(getattr(F, name, None) for name in _PRESERVING_NAMES),
    *(getattr(torch, name, None) for name in _PRESERVING_NAMES),
    *(getattr(torch, f"{name}_", None) for name in _PRESERVING_NAMES),
    *_PRESERVING_NAMES,
    *(f"{name}_" for name in _PRESERVING_NAMES),
} - {None}


_MIXING = (nn.GLU, nn.MultiheadAttention, nn.Softmax, nn.Softmax2d, nn.LogSoftmax, nn.Softmin)


def passes(node: fx.Node, module: nn.Module | None) -> bool:
    """Whether channel c of the node, which calls `module` or none, comes from channel c of its first input alone.

    >>> graph = fx.symbolic_trace(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    >>> [passes(node, graph.get_submodule(node.target)) for node in graph.graph.nodes if node.op == "call_module"]
    [False, True]
    """
    if module is None:
        return node.op in ("call_function", "call_method") and node.target in _PRESERVING
    if isinstance(module, _MIXING):
        return False
    return isinstance(module, nn.Identity) or any(c.__module__ in _PRESERVING_MODULES for c in type(module).__mro__)


def _feeder(node: fx.Node, called: Mapping[fx.Node, nn.Module]) -> tuple[Convolution, int] | None:
    """The convolution whose filter c makes channel c of a depthwise one, and the latter's filters for each c."""
    own = called[node]
    node = node.all_input_nodes[0]
    while is_depthwise(called.get(node)) or passes(node, called.get(node)):
        node = node.all_input_nodes[0]
    feeder = called.get(node)
    assert isinstance(own, CONVOLUTIONS)
    if not isinstance(feeder, CONVOLUTIONS) or own.out_channels % feeder.out_channels:
        return None
    return feeder, own.out_channels // feeder.out_channels


def _norm(nodes: list[fx.Node], called: Mapping[fx.Node, nn.Module]) -> _BatchNorm | None:
    """The one batch norm behind all calls of a convolution, when it normalises nothing else."""
    found: set[_BatchNorm] = set()
    for node in nodes:
        for user in node.users:
            while isinstance(called.get(user), nn.Identity) and len(user.users) == 1:
                user = next(iter(user.users))
            module = called.get(user)
            if isinstance(module, _BatchNorm):
                found.add(module)
    if len(found) != 1:
        return None
    norm = found.pop()
    readers = [n for n, m in called.items() if m is norm]
    return norm if len(readers) == len(nodes) else None
