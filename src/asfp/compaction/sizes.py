"""Which sizes are the same for every input that the network takes: found by evaluating its graph for other shapes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from asfp.fake import fake_mode, run_fake

Axis = tuple[int, int]
"""The number of an input tensor, and one of its axes."""


class _Shapes(fx.Interpreter):
    """Runs the graph on fake tensors, and remembers each value."""

    def __init__(self, traced: fx.GraphModule, mode: FakeTensorMode) -> None:
        super().__init__(traced)
        self.mode = mode
        self.values: dict[fx.Node, Any] = {}

    def run_node(self, n: fx.Node) -> Any:
        self.values[n] = value = super().run_node(n)
        return value

    def call_module(self, target: Any, args: Any, kwargs: Any) -> Any:
        return run_fake(self.mode, self.fetch_attr(target), args, kwargs)


def look_again(traced: fx.GraphModule) -> None:
    """Give each node `meta["others"]`: its values for other batch and image sizes, as many as the network takes.

    First all batches and images grow at once. What that does not change, or all where the network refuses, is tried
    axis by axis and size by size: an axis counts as fixed only if the network refuses every change of it.
    """
    placeholders = [n for n in traced.graph.nodes if n.op == "placeholder"]
    for node in traced.graph.nodes:
        node.meta["others"] = []
    tensors = [x for x in pytree.tree_leaves([n.meta["val"] for n in placeholders]) if isinstance(x, Tensor)]
    axes = [(i, a) for i, x in enumerate(tensors) for a in range(x.ndim)]
    batch = {(i, 0) for i, x in enumerate(tensors) if x.ndim}
    images = {(i, a) for i, a in axes if a >= 2 and tensors[i].is_floating_point()}
    seen: set[Axis] = set()
    for changed in _changes(tensors, axes, batch, images, seen):
        if changed and _look(traced, placeholders, changed):
            seen.update(changed)
    if not seen and not _look(traced, placeholders, set()):
        for node in traced.graph.nodes:
            node.meta["others"] = [None]  # cannot be evaluated at all: nothing is known to stay


def _changes(
    tensors: list[Tensor], axes: list[Axis], batch: set[Axis], images: set[Axis], seen: set[Axis]
) -> Iterator[set[Axis]]:
    yield batch | images
    if not batch | images <= seen:
        yield batch
        yield images
        for size in sorted({tensors[i].shape[a] for i, a in axes if a}):
            yield {(i, a) for i, a in axes if a and tensors[i].shape[a] == size}
        for axis in range(max((x.ndim for x in tensors), default=0)):
            yield {(i, a) for i, a in axes if a == axis}
    for one in axes:
        if one not in seen:
            yield {one}


def _look(traced: fx.GraphModule, placeholders: list[fx.Node], changed: set[Axis]) -> bool:
    """Evaluate with these axes twice as long; whether the network takes that."""
    with fake_mode() as mode:
        numbers = iter(range(10**6))

        def resized(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            i = next(numbers)
            shape = [n * (2 if (i, a) in changed else 1) for a, n in enumerate(value.shape)]
            return torch.zeros(shape, dtype=value.dtype, device=value.device)

        examples: list[Any] = []
        for node in placeholders:
            value = pytree.tree_map(resized, node.meta["val"])
            examples.extend(value if str(node.target).startswith("*") and isinstance(value, tuple) else [value])
        shapes = _Shapes(traced, mode)
        try:
            shapes.run(*examples)
        except Exception:  # whatever a network says to a shape that it does not take
            return False
    for node, value in shapes.values.items():
        node.meta["others"].append(value)
    return True


def is_static(node: fx.Node, axis: int) -> bool:
    """Whether the tensor has the same size along `axis` for every input of the network."""
    size = node.meta["val"].shape[axis]
    return all(isinstance(x, Tensor) and x.ndim > axis and x.shape[axis] == size for x in node.meta["others"])


def is_static_number(node: fx.Node) -> bool:
    """Whether the node is a whole number, the same for every input of the network."""
    value = node.meta.get("val")
    return isinstance(value, int) and not isinstance(value, bool) and all(x == value for x in node.meta["others"])


def shapes_of(node: fx.Node) -> list[tuple[int, ...]]:
    """The tensor's shape, for the example and for every other input that was tried."""
    values = [node.meta["val"], *node.meta["others"]]
    return [tuple(x.shape) for x in values if isinstance(x, Tensor)]
