"""From a module to a torch.fx graph: the one tracer that pruning and compaction share.

Given example inputs the tracer knows the shape of every value, so it gets through what plain `torch.fx` stops
at: branches and loops over shapes, `len(x)`, unpacking. Sizes stay symbolic in the graph (another batch or image
size still works); only the branch that was taken is fixed.
"""

from __future__ import annotations

import copy
import inspect
import operator
import traceback
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from asfp.errors import AsfpError, TraceError
from asfp.tracer import Leaf, ShapeTracer, line_of

__all__ = [
    "AUGMENTED",
    "Example",
    "Leaf",
    "as_arguments",
    "copy_of",
    "has_effect",
    "keyword",
    "trace",
    "writes_in_place",
]

Example = Tensor | Sequence[Any] | dict[str, Any]

AUGMENTED = {
    operator.iadd: operator.add,
    operator.isub: operator.sub,
    operator.imul: operator.mul,
    operator.itruediv: operator.truediv,
    operator.ipow: operator.pow,
    operator.ifloordiv: operator.floordiv,
    operator.imod: operator.mod,
}
"""`x += y` and its like, each with what it computes."""


def trace(model: nn.Module, example_inputs: Example | None = None, leaf_modules: Sequence[Leaf] = ()) -> fx.GraphModule:
    """The graph of `model.forward`; with `example_inputs`, each node's value (fake, shapes only) is in `meta["val"]`.

    `leaf_modules` are classes or names of submodules to leave whole. The model itself is not changed; its modules
    and parameters are shared with the result.

    >>> import torch
    >>> graph = trace(nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()), torch.zeros(1, 3, 5, 5)).graph
    >>> [(node.op, tuple(node.meta["val"].shape)) for node in graph.nodes if node.op == "call_module"]
    [('call_module', (1, 8, 3, 3)), ('call_module', (1, 8, 3, 3))]
    """
    if not isinstance(model, nn.Module):
        raise TraceError(f"expected a torch.nn.Module, got {type(model).__name__}: pass the model itself")
    tracer = ShapeTracer(leaf_modules)
    args, kwargs = as_arguments(example_inputs) if example_inputs is not None else ((), {})
    supplied = _bind(model, args, kwargs) if example_inputs is not None else None
    before = set(vars(model))
    try:
        graph = tracer.run(model, supplied)
        traced = fx.GraphModule(model, graph, class_name=type(model).__name__)
    except TraceError:
        raise
    except Exception as error:
        raise TraceError(_explain(model, error, tracer)) from error
    finally:
        for name in set(vars(model)) - before:  # tensors made in forward, which torch.fx stores in the model
            delattr(model, name)
    traced.graph.eliminate_dead_code(has_effect)
    traced.recompile()
    return traced


def writes_in_place(node: fx.Node) -> bool:
    """Whether the node overwrites its first argument: `x.relu_()`, `x += y`, `F.relu(x, inplace=True)`, `x[i] = y`."""
    if node.op == "call_module":
        assert node.graph.owning_module is not None
        module = node.graph.owning_module.get_submodule(str(node.target))
        return type(module).__module__.startswith("torch.nn") and bool(getattr(module, "inplace", False))
    if node.op not in ("call_function", "call_method"):
        return False
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    if name == "setitem" or (name.endswith("_") and not name.endswith("__")) or node.target in AUGMENTED:
        return True
    return bool(keyword(node, "inplace"))


def keyword(node: fx.Node, name: str) -> Any:
    """The argument `name` of a traced Python function, given by position or by keyword; None when absent."""
    if name in node.kwargs or node.op != "call_function":
        return node.kwargs.get(name)
    try:
        return inspect.signature(node.target).bind(*node.args, **node.kwargs).arguments.get(name)  # type: ignore[arg-type]
    except (TypeError, ValueError):  # built in: no signature, and no such argument
        return None


def has_effect(node: fx.Node) -> bool:
    """Whether the node matters though nothing reads its value."""
    return node.op in ("placeholder", "output") or "number" in node.meta or writes_in_place(node)


def tidy(model: fx.GraphModule) -> None:
    """Drop what nobody reads, and modules that nobody calls, and make the code anew.

    >>> from torch import fx
    >>> model = fx.symbolic_trace(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    >>> output = next(iter(reversed(model.graph.nodes)))
    >>> output.args = (next(iter(model.graph.nodes)),)
    >>> tidy(model)
    >>> model
    Sequential()
    """
    model.graph.eliminate_dead_code(has_effect)
    model.delete_all_unused_submodules()
    model.recompile()


def copy_of(model: nn.Module, *, share_tensors: bool = False) -> nn.Module:
    """A deep copy, also of a model that keeps computed tensors (as pruning by hooks and weight norm do).

    With `share_tensors` the copy has modules of its own, but the model's parameters and buffers.

    >>> from torch.nn.utils import prune
    >>> layer = prune.ln_structured(nn.Conv2d(3, 8, 3), "weight", amount=0.5, n=2, dim=0)
    >>> int((copy_of(layer).weight == 0).all((1, 2, 3)).sum())
    4
    """
    known = {id(x): x.detach().clone() for x in kept_tensors(model)}
    if share_tensors:
        known |= {id(x): x for x in (*model.parameters(), *model.buffers())}
    return copy.deepcopy(model, known)


def kept_tensors(model: nn.Module) -> list[Tensor]:
    """Tensors that a model computed and keeps beside its parameters; copy.deepcopy refuses them.

    >>> from torch.nn.utils import prune
    >>> len(kept_tensors(prune.ln_structured(nn.Conv2d(3, 8, 3), "weight", amount=0.5, n=2, dim=0)))
    1
    """
    own = [v for module in model.modules() for k, v in vars(module).items() if k not in ("_parameters", "_modules")]
    return [x for x in pytree.tree_leaves(own) if isinstance(x, Tensor) and not x.is_leaf]


def is_channels_last(model: nn.Module) -> bool:
    """Whether the weights of a model's convolutions lie in memory channel by channel.

    >>> [is_channels_last(nn.Conv2d(3, 8, 3).to(memory_format=m)) for m in (torch.channels_last, torch.preserve_format)]
    [True, False]
    """
    weights = [p for p in model.parameters() if p.ndim == 4 and not p.is_contiguous()]
    return bool(weights) and all(p.is_contiguous(memory_format=torch.channels_last) for p in weights)


def as_arguments(example_inputs: Example) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments for the model: a tensor is one, a sequence several, a mapping keywords.

    >>> as_arguments({"x": 1})
    ((), {'x': 1})
    """
    tensors = [x for x in pytree.tree_leaves(example_inputs) if isinstance(x, Tensor)]
    if any(x.ndim > 1 and x.shape[0] == 0 for x in tensors):
        raise AsfpError("the example has no sample in it: give at least one, e.g. torch.zeros(1, 3, 224, 224)")
    if isinstance(example_inputs, dict):
        return (), example_inputs
    if isinstance(example_inputs, Tensor):
        return (example_inputs,), {}
    if isinstance(example_inputs, (tuple, list)):
        return tuple(example_inputs), {}
    raise TraceError(
        f"example_inputs must be a tensor, a tuple of arguments or a dict of keyword arguments, "
        f"got {type(example_inputs).__name__}, e.g. torch.zeros(1, 3, 224, 224)"
    )


def _bind(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    signature = inspect.signature(model.forward)
    try:
        return dict(signature.bind(*args, **kwargs).arguments)
    except TypeError as error:
        raise TraceError(
            f"example_inputs do not fit {type(model).__name__}.forward{signature}: {error}; "
            f"pass a tuple of its positional arguments or a dict of its keywords"
        ) from error


def _explain(model: nn.Module, error: Exception, tracer: ShapeTracer) -> str:
    line = line_of(traceback.extract_tb(error.__traceback__))
    where = f" (at {line})" if line else ""
    hint = "" if tracer.fake else "pass example_inputs=, so that shapes are known while tracing; or "
    reason = (str(error).splitlines() or [""])[0]
    return (
        f"{type(model).__name__} cannot be traced into a graph: {type(error).__name__}: {reason}"
        f"{where}. Ways out: {hint}"
        f"keep the submodule that contains this line whole, leaf_modules=[ItsClass] or leaf_modules=['its.name'] "
        f"(nothing inside it will be pruned away); or take the branch out of forward"
    )
