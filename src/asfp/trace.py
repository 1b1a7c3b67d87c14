"""From a module to a torch.fx graph: the one tracer that pruning and compaction share.

Given example inputs the tracer knows the shape of every value, so it gets through what plain `torch.fx` stops
at: branches and loops over shapes, `len(x)`, unpacking. Sizes stay symbolic in the graph (another batch or image
size still works); only the branch that was taken is fixed.
"""

from __future__ import annotations

import builtins
import copy
import inspect
import logging
import operator
import traceback
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import ModuleType, TracebackType
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode, unset_fake_temporarily

from asfp.errors import TraceError

Leaf = type[nn.Module] | str
Example = Tensor | Sequence[Any] | dict[str, Any]

# Functions that would swallow a traced size (make a tensor of it, compare it): with one they are recorded, not run.
_RECORDED: dict[ModuleType, tuple[str, ...]] = {
    torch: ("arange", "empty", "eye", "full", "linspace", "ones", "rand", "randn", "zeros"),
    builtins: ("len", "max", "min"),
}
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
_MISSING = object()


def trace(model: nn.Module, example_inputs: Example | None = None, leaf_modules: Sequence[Leaf] = ()) -> fx.GraphModule:
    """The graph of `model.forward`; with `example_inputs`, each node's value (fake, shapes only) is in `meta["val"]`.

    `leaf_modules` are classes or names of submodules to leave whole. The model itself is not changed; its modules
    and parameters are shared with the result.

    >>> from torch import nn
    >>> graph = trace(nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()), torch.zeros(1, 3, 5, 5)).graph
    >>> [(node.op, tuple(node.meta["val"].shape)) for node in graph.nodes if node.op == "call_module"]
    [('call_module', (1, 8, 3, 3)), ('call_module', (1, 8, 3, 3))]
    """
    if not isinstance(model, nn.Module):
        raise TraceError(f"expected a torch.nn.Module, got {type(model).__name__}: pass the model itself")
    tracer = _ShapeTracer(leaf_modules)
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


def copy_of(model: nn.Module, *, share_tensors: bool = False) -> nn.Module:
    """A deep copy, also of a model that keeps computed tensors (as pruning by hooks and weight norm do).

    With `share_tensors` the copy has modules of its own, but the model's parameters and buffers.

    >>> from torch.nn.utils import prune
    >>> layer = prune.ln_structured(nn.Conv2d(3, 8, 3), "weight", amount=0.5, n=2, dim=0)
    >>> int((copy_of(layer).weight == 0).all((1, 2, 3)).sum())
    4
    """
    own = [v for module in model.modules() for k, v in vars(module).items() if k not in ("_parameters", "_modules")]
    kept = [x for x in _leaves(own) if isinstance(x, Tensor) and not x.is_leaf]
    known = {id(x): x.detach().clone() for x in kept}
    if share_tensors:
        known |= {id(x): x for x in (*model.parameters(), *model.buffers())}
    return copy.deepcopy(model, known)


def as_arguments(example_inputs: Example) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments for the model: a tensor is one, a sequence several, a mapping keywords.

    >>> as_arguments({"x": 1})
    ((), {'x': 1})
    """
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


class _ShapedProxy(fx.Proxy):
    """A traced value whose fake value is known: it can be iterated, measured, and decide a branch."""

    @property
    def val(self) -> Any:
        return self.node.meta.get("val", _MISSING)

    def __getattr__(self, name: str) -> Any:
        if name == "type" and isinstance(self.val, torch.device):
            return self.val.type  # asked for by torch.autocast, which takes nothing but a string
        return _ShapedAttribute(self, name)

    def __bool__(self) -> bool:
        val = self.val
        if val is _MISSING or isinstance(val, Tensor):
            return super().__bool__()
        return bool(val)

    def __iter__(self) -> Iterator[fx.Proxy]:
        val = self.val
        if isinstance(val, dict):
            return iter(val)
        if val is _MISSING or not hasattr(val, "__len__"):
            return super().__iter__()
        return (self[i] for i in range(len(val)))

    def __len__(self) -> int:
        val = self.val
        return super().__len__() if val is _MISSING else len(val)

    def __getitem__(self, key: Any) -> Any:
        val = self.val
        if isinstance(key, slice) and isinstance(val, (tuple, list)):
            return tuple(self[i] for i in range(*key.indices(len(val))))
        return self.tracer.create_proxy("call_function", operator.getitem, (self, key), {})

    def __setitem__(self, key: Any, value: Any) -> None:
        self.tracer.create_proxy("call_function", operator.setitem, (self, key, value), {})

    def __index__(self) -> int:
        val = self.val
        if not isinstance(val, int):
            raise TypeError("a value computed from the input cannot be used as a whole number")
        self._taken_for_a_number()
        return val

    def __int__(self) -> int:
        val = self.val
        if isinstance(val, float):
            self._taken_for_a_number()
            return int(val)
        return self.__index__()

    def __float__(self) -> float:
        val = self.val
        if not isinstance(val, (int, float)):
            raise TypeError("a value computed from the input cannot become a number")
        self._taken_for_a_number()
        return float(val)

    def _taken_for_a_number(self) -> None:
        """Remember where forward made a plain number of a size: the graph holds for this size only."""
        frames = [f for f in traceback.extract_stack() if "/torch/" not in f.filename and f.filename != __file__]
        self.node.meta["number"] = _line_of(frames)

    def _augmented(self, function: Any, other: Any) -> Any:
        """`x += y` writes into a tensor, which others may hold; a number it replaces."""
        if isinstance(self.val, Tensor):
            return self.tracer.create_proxy("call_function", function, (self, other), {})
        return NotImplemented

    def __iadd__(self, other: Any) -> Any:
        return self._augmented(operator.iadd, other)

    def __isub__(self, other: Any) -> Any:
        return self._augmented(operator.isub, other)

    def __imul__(self, other: Any) -> Any:
        return self._augmented(operator.imul, other)

    def __itruediv__(self, other: Any) -> Any:
        return self._augmented(operator.itruediv, other)

    def __ipow__(self, other: Any) -> Any:
        return self._augmented(operator.ipow, other)

    def __ifloordiv__(self, other: Any) -> Any:
        return self._augmented(operator.ifloordiv, other)

    def __imod__(self, other: Any) -> Any:
        return self._augmented(operator.imod, other)


class _ShapedAttribute(_ShapedProxy):
    """`proxy.name`: a method call when it is called, else an attribute read, recorded when first used."""

    def __init__(self, root: fx.Proxy, attr: str) -> None:
        self.root = root
        self.attr = attr
        self.tracer = root.tracer
        self._node: fx.Node | None = None

    @property
    def node(self) -> fx.Node:  # type: ignore[override]
        if self._node is None:
            self._node = self.tracer.create_proxy("call_function", getattr, (self.root, self.attr), {}).node
        return self._node

    def __call__(self, *args: Any, **kwargs: Any) -> fx.Proxy:
        return self.tracer.create_proxy("call_method", self.attr, (self.root, *args), kwargs)


class _ShapeTracer(fx.Tracer):
    proxy_buffer_attributes = True

    def __init__(self, leaf_modules: Sequence[Leaf]) -> None:
        super().__init__()
        self.leaf_types = tuple(leaf for leaf in leaf_modules if isinstance(leaf, type))
        self.leaf_names = {leaf for leaf in leaf_modules if isinstance(leaf, str)}
        self.fake: FakeTensorMode | None = None
        self.supplied: dict[str, Any] = {}
        self.defaults: dict[str, Any] = {}
        self.evaluating = False

    def run(self, model: nn.Module, supplied: dict[str, Any] | None) -> fx.Graph:
        names = {name for name, _ in model.named_modules()}
        if unknown := self.leaf_names - names:
            raise TraceError(f"leaf_modules names {sorted(unknown)}, which the model does not have")
        concrete = None
        with ExitStack() as stack:
            if supplied is not None:
                stack.enter_context(_quiet())
                self.fake = FakeTensorMode(allow_non_fake_inputs=True)
                self.supplied = supplied
                defaults = inspect.signature(model.forward).parameters.values()
                concrete = {p.name: p.default for p in defaults if p.name not in supplied and p.default is not p.empty}
                self.defaults = concrete
                for owner, functions in _RECORDED.items():
                    for name in functions:
                        recorded = self._recorded(getattr(owner, name))
                        stack.enter_context(mock.patch.object(owner, name, recorded))
            graph = self.trace(model, concrete)
        _drop_defaults(graph, set(concrete or ()), set(supplied or ()))
        return graph

    def _recorded(self, function: Any) -> Any:
        def record(*args: Any, **kwargs: Any) -> Any:
            given = args if function is len else _leaves((args, kwargs))  # the length of a list of values is known
            if any(isinstance(a, fx.Proxy) for a in given):
                return self.create_proxy("call_function", function, args, kwargs)
            return function(*args, **kwargs)

        return record

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        if module_qualified_name in self.leaf_names or isinstance(m, self.leaf_types) or hasattr(m, "traced_whole"):
            return True
        return super().is_leaf_module(m, module_qualified_name)

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _ShapedProxy(node, self)

    def create_proxy(self, kind: str, target: Any, args: Any, kwargs: Any, *rest: Any, **options: Any) -> fx.Proxy:
        proxy = super().create_proxy(kind, target, args, kwargs, *rest, **options)
        if self.fake is not None and kind != "output":
            proxy.node.meta["val"] = self._evaluate(proxy.node)
        return proxy

    def create_node(self, kind: str, target: Any, args: Any, kwargs: Any, *rest: Any, **options: Any) -> fx.Node:
        node = super().create_node(kind, target, args, kwargs, *rest, **options)
        if self.fake is not None and kind == "get_attr":  # tensors made in forward come here without a proxy
            node.meta["val"] = self._evaluate(node)
        return node

    def call_module(self, m: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        return forward(*args, **kwargs) if self.evaluating else super().call_module(m, forward, args, kwargs)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        return attr_val if self.evaluating else super().getattr(attr, attr_val, parameter_proxy_cache)

    def _evaluate(self, node: fx.Node) -> Any:
        """The node's fake value, from those of its inputs; the model's own modules run inside."""
        assert self.fake is not None
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
        previous, self.evaluating = self.evaluating, True
        try:
            with self.fake, torch.no_grad():
                return self._value(node, args, kwargs)
        finally:
            self.evaluating = previous

    def _value(self, node: fx.Node, args: Any, kwargs: Any) -> Any:
        if node.op == "placeholder":
            return self._fake(self._argument(str(node.target).lstrip("*")))
        if node.op == "get_attr":
            return self._fake(_attribute(self.root, str(node.target)))
        if node.op == "call_module":
            return self._run(self.root.get_submodule(str(node.target)), args, kwargs)
        if node.op == "call_method":
            return getattr(args[0], str(node.target))(*args[1:], **kwargs)
        assert callable(node.target)
        return node.target(*args, **kwargs)

    def _argument(self, name: str) -> Any:
        """What an input of the graph stands for: the example, or a default (fx numbers those: `scale_1`)."""
        return self.supplied[name] if name in self.supplied else self.defaults.get(name.rpartition("_")[0])

    def _run(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """A leaf on fake values, in evaluation mode: in training, batch norm would count this as a batch."""
        assert self.fake is not None
        modes = [(m, m.training) for m in module.modules()]
        for m, _ in modes:
            m.training = False
        try:
            return run_fake(self.fake, module, args, kwargs)
        finally:
            for m, training in modes:
                m.training = training

    def _fake(self, value: Any) -> Any:
        assert self.fake is not None
        return _fakes(self.fake, value)


def run_fake(mode: FakeTensorMode, module: nn.Module, args: Any, kwargs: Any) -> Any:
    """A module's forward on fake values; one that looks at values is run on zeros, for the shape of its result.

    Forward, and not the module: some hooks would store fake tensors in it.
    """
    try:
        return module.forward(*args, **kwargs)
    except DataDependentOutputException:
        with unset_fake_temporarily(), torch.no_grad():
            real = torch.utils._pytree.tree_map(_zeros, (args, kwargs))
            result = module.forward(*real[0], **real[1])
        return _fakes(mode, result)


def _zeros(value: Any) -> Any:
    return torch.zeros(value.shape, dtype=value.dtype, device=value.device) if isinstance(value, Tensor) else value


def _fakes(mode: FakeTensorMode, value: Any) -> Any:
    return torch.utils._pytree.tree_map(lambda x: mode.from_tensor(x) if isinstance(x, Tensor) else x, value)


@contextmanager
def fake_mode() -> Iterator[FakeTensorMode]:
    """Operations compute shapes alone; what fails raises, and does not write to the log as well.

    >>> with fake_mode():
    ...     (torch.zeros(2, 3) @ torch.zeros(3, 1_000_000_000_000)).shape
    torch.Size([2, 1000000000000])
    """
    with _quiet(), FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.no_grad():
        yield mode


@contextmanager
def _quiet() -> Iterator[None]:
    log = logging.getLogger("torch._subclasses.fake_tensor")
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(level)


def _leaves(tree: Any) -> list[Any]:
    return torch.utils._pytree.tree_leaves(tree)


def _attribute(root: nn.Module, target: str) -> Any:
    owner, _, name = target.rpartition(".")
    return getattr(root.get_submodule(owner), name)


def _drop_defaults(graph: fx.Graph, names: set[str], supplied: set[str]) -> None:
    """Remove the placeholders of arguments that were not given, and the checks that fx puts on them."""
    for node in list(graph.nodes):
        target = str(node.target)
        if node.op == "placeholder" and target not in supplied and {target, target.rpartition("_")[0]} & names:
            for user in list(node.users):
                if not user.users and user.op == "call_function" and "assert" in getattr(user.target, "__name__", ""):
                    graph.erase_node(user)
                elif user.users and all("assert" in getattr(u.target, "__name__", "") for u in user.users):
                    for check in list(user.users):
                        graph.erase_node(check)
                    graph.erase_node(user)
            if not node.users:
                graph.erase_node(node)


def _explain(model: nn.Module, error: Exception, tracer: _ShapeTracer) -> str:
    where = _user_line(error.__traceback__)
    hint = "" if tracer.fake else "pass example_inputs=, so that shapes are known while tracing; or "
    reason = (str(error).splitlines() or [""])[0]
    return (
        f"{type(model).__name__} cannot be traced into a graph: {type(error).__name__}: {reason}"
        f"{where}. Ways out: {hint}"
        f"keep the submodule that contains this line whole, leaf_modules=[ItsClass] or leaf_modules=['its.name'] "
        f"(nothing inside it will be pruned away); or take the branch out of forward"
    )


def _user_line(trail: TracebackType | None) -> str:
    """The deepest line of the user's code in a traceback."""
    frames = [f for f in traceback.extract_tb(trail) if "/torch/" not in f.filename and f.filename != __file__]
    return f" (at {_line_of(frames)})" if frames else ""


def _line_of(frames: Sequence[traceback.FrameSummary]) -> str:
    if not frames:
        return "an unknown line"
    frame = frames[-1]
    return f'{frame.filename}:{frame.lineno}, in {frame.name}: "{(frame.line or "").strip()}"'
