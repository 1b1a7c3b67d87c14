"""In-place operations, rewritten: each gives a new value, and whoever reads the old one later reads that.

In the end, where nothing else holds what they overwrote, they may write in place again.
"""

from __future__ import annotations

import copy
import operator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from asfp.compaction.layers import BorderBias, Pick, Surround, Widen
from asfp.errors import TraceError
from asfp.trace import AUGMENTED, writes_in_place

IN_PLACE = "in_place"
"""The key under which a node's meta says that it wrote in place, and by which target."""

_AGAIN = {plain: target for target, plain in AUGMENTED.items()}

_FRESH_LAYERS = (
    *(nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d, nn.Linear),
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, BorderBias, Pick, Surround, Widen),
)
_FRESH_FUNCTIONS = (operator.add, operator.iadd, torch.add, torch.cat)
"""What gives a tensor that shares no memory with any other, and needs it no more, for its gradient neither."""


def on_copy(x: Tensor, method: str, *args: Any, **kwargs: Any) -> Tensor:
    """An in-place method that has no other form, done to a copy."""
    x = x.clone()
    getattr(x, method)(*args, **kwargs)
    return x


def without_effects(traced: fx.GraphModule) -> None:
    """Rewrite in-place operations: they give a new value, and whoever reads the old one later reads that."""
    order = {node: i for i, node in enumerate(traced.graph.nodes)}
    writing = [node for node in traced.graph.nodes if writes_in_place(node)]  # a layer may do so at several places
    for node in writing:
        written = node.args[0] if node.args else node.kwargs.get("input")
        if not isinstance(written, fx.Node):
            continue
        stored = _written_through(traced.graph, node, written, order)
        for alias in _aliases(written, order, order[node], stored):
            for user in list(alias.users):
                if order[user] > order[node]:
                    user.replace_input_with(alias, node)
        node.meta[IN_PLACE] = node.target
        if node.op == "call_module":
            traced.get_submodule(node.target).inplace = False  # type: ignore[assignment]
        elif node.target in AUGMENTED:
            node.target = AUGMENTED[node.target]
        elif node.target is operator.setitem:
            node.target, node.args = on_copy, (written, "__setitem__", *node.args[1:])
            node.meta["val"] = written.meta.get("val")
        elif node.op == "call_method":
            if hasattr(Tensor, node.target[:-1]):
                node.target = node.target[:-1]
            else:
                node.op, node.args, node.target = "call_function", (written, node.target, *node.args[1:]), on_copy
        else:
            _function_out_of_place(node)


def _written_through(graph: fx.Graph, node: fx.Node, written: fx.Node, order: dict[fx.Node, int]) -> bool:
    """`x[i].relu_()` writes into x: whoever reads x later reads x with that part replaced. True where that was done."""
    whole: Any = written.args[0] if written.target is operator.getitem else None
    if not isinstance(whole, fx.Node) or not isinstance(whole.meta.get("val"), Tensor):
        return False
    if not _shares_memory(whole, written):
        return False
    index = written.args[1]
    later = [user for user in whole.users if order[user] > order[node]]
    if later and later[0].target is operator.setitem and later[0].args[1:] == (index, node):
        return True  # x[i] += 1, which stores the part itself
    with graph.inserting_after(node):
        replaced = graph.call_function(on_copy, (whole, "__setitem__", index, node))
    replaced.meta["val"] = whole.meta["val"]
    order[replaced] = order[node]
    for user in later:
        user.replace_input_with(whole, replaced)
    return True


def _shares_memory(a: fx.Node, b: fx.Node) -> bool:
    x, y = a.meta["val"], b.meta["val"]
    return bool(x.untyped_storage()._cdata == y.untyped_storage()._cdata)


def _aliases(written: fx.Node, order: dict[fx.Node, int], now: int, stored: bool) -> list[fx.Node]:
    """The nodes that hold the very tensor that is written to; parts of it that are read later cannot be followed."""
    value = written.meta.get("val")
    if not isinstance(value, Tensor):
        return [written]
    same = [written]
    for node in list(order):
        other = node.meta.get("val")
        if node is written or order[node] >= now or not isinstance(other, Tensor) or not _shares_memory(node, written):
            continue
        if (other.shape, other.stride(), other.storage_offset()) == (
            value.shape,
            value.stride(),
            value.storage_offset(),
        ):
            same.append(node)
        elif not stored and any(order[user] > now for user in node.users):
            raise TraceError(
                f"forward writes in place into {written.name}, a part of {node.name}, which is read again afterwards: "
                "write y = f(x) instead of f_(x), or keep the submodule whole with leaf_modules=[ItsClass]"
            )
    return same


def _function_out_of_place(node: fx.Node) -> None:
    name = getattr(node.target, "__name__", "")
    for owner in (torch, F):
        if name.endswith("_") and hasattr(owner, name[:-1]):
            node.target = getattr(owner, name[:-1])
            return
    normal = node.normalized_arguments(nn.Module(), normalize_to_only_use_kwargs=False)
    if normal is not None and "inplace" in normal.kwargs:
        node.kwargs = {**normal.kwargs, "inplace": False}
        node.args = normal.args
        return
    node.kwargs = {**node.kwargs, "inplace": False}
    node.args = tuple(a for a in node.args if a is not True)


def free_of_effects(model: fx.GraphModule) -> bool:
    """The same where all of them overwrite what nothing else holds, as in compact models; elsewhere nothing is done."""
    free = all(may_overwrite(model, node) for node in model.graph.nodes if writes_in_place(node))
    if free:
        without_effects(model)
    return free


def with_effects(model: fx.GraphModule) -> None:
    """Let what wrote in place in the original do so again: it takes no memory of its own then, which is time, too.

    Where what it overwrites comes fresh from a layer that is done with it, and nothing else reads it. A layer that is
    called several times does so at all of these places, or at none.
    """
    calls: dict[str, list[bool]] = {}
    for node in model.graph.nodes:
        again = node.meta.pop(IN_PLACE, None)
        fits = again is not None and may_overwrite(model, node)
        if node.op == "call_module":
            calls.setdefault(str(node.target), []).append(fits)
        elif fits and node.target in _AGAIN:
            node.target = _AGAIN[node.target]
        elif fits and again != node.target and type(again) is type(node.target):
            node.target = again
        elif fits and "inplace" in node.kwargs:
            node.kwargs = {**node.kwargs, "inplace": True}
    for target, fitting in calls.items():
        if all(fitting):
            layer: Any = copy.copy(model.get_submodule(target))  # which other compact models may share
            layer.inplace = True
            model.set_submodule(target, layer)


def may_overwrite(model: fx.GraphModule, node: fx.Node) -> bool:
    """Whether a node can write into its first argument unseen: it is fresh, and read by nothing else."""
    source = node.args[0] if node.args else None
    if not isinstance(source, fx.Node) or list(source.users) != [node]:
        return False
    if source.op == "call_module":
        return type(model.get_submodule(str(source.target))) in _FRESH_LAYERS
    return source.op == "call_function" and source.target in _FRESH_FUNCTIONS
