"""In-place operations, rewritten: each gives a new value, and whoever reads the old one later reads that."""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from asfp.errors import TraceError
from asfp.trace import AUGMENTED, writes_in_place


def on_copy(x: Tensor, method: str, *args: Any, **kwargs: Any) -> Tensor:
    """An in-place method that has no other form, done to a copy."""
    x = x.clone()
    getattr(x, method)(*args, **kwargs)
    return x


def without_effects(traced: fx.GraphModule) -> None:
    """Rewrite in-place operations: they give a new value, and whoever reads the old one later reads that."""
    order = {node: i for i, node in enumerate(traced.graph.nodes)}
    for node in list(traced.graph.nodes):
        written = node.args[0] if node.args else node.kwargs.get("input")
        if not writes_in_place(node) or not isinstance(written, fx.Node):
            continue
        stored = _written_through(traced.graph, node, written, order)
        for alias in _aliases(written, order, order[node], stored):
            for user in list(alias.users):
                if order[user] > order[node]:
                    user.replace_input_with(alias, node)
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
