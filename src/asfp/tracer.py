"""The tracer behind `asfp.trace`: proxies that know their shapes, and torch.fx's tracer with them."""

from __future__ import annotations

import builtins
import inspect
import operator
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from asfp.errors import TraceError
from asfp.fake import fakes, quiet, run_fake

Leaf = type[nn.Module] | str

# Functions that would swallow a traced size (make a tensor of it, compare it): with one they are recorded, not run.
_RECORDED: dict[ModuleType, tuple[str, ...]] = {
    torch: ("arange", "empty", "eye", "full", "linspace", "ones", "rand", "randn", "zeros"),
    builtins: ("len", "max", "min"),
}
_LEN = len  # while tracing, builtins.len is another
_MISSING = object()
_PROXIES = str(inspect.getsourcefile(fx.Proxy))
_OWN = {str(Path(__file__).with_name(name)) for name in ("trace.py", "tracer.py", "fake.py")}


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
        line = line_of(traceback.extract_stack()) or "an unknown line"
        self.node.meta.setdefault("number", {})[_instruction()] = line

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


class ShapeTracer(fx.Tracer):
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
                stack.enter_context(quiet())
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
            if self.evaluating:
                return function(*args, **kwargs)
            if function is _LEN and isinstance(args[0], _ShapedProxy) and isinstance(args[0].val, (tuple, list, dict)):
                return _LEN(args[0].val)
            inner = () if function is _LEN else args  # the length of a list of values is known
            if any(isinstance(a, fx.Proxy) for a in args) or any(_holds_proxy(a) for a in inner):
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
        _forget_parsing(proxy.node)
        if self.fake is not None and kind != "output":
            proxy.node.meta["val"] = self._evaluate(proxy.node)
        return proxy

    def create_node(self, kind: str, target: Any, args: Any, kwargs: Any, *rest: Any, **options: Any) -> fx.Node:
        node = super().create_node(kind, target, args, kwargs, *rest, **options)
        if self.fake is not None and kind == "get_attr":  # tensors made in forward come here without a proxy
            node.meta["val"] = self._evaluate(node)
        return node

    def call_module(self, m: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        if self.evaluating:
            return forward(*args, **kwargs)
        return super().call_module(m, forward, *_by_position(m, args, kwargs))

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
        return fakes(self.fake, value)


def _instruction() -> tuple[Any, int]:
    """Where the traced program is: the code and the place in it of the call that led here."""
    frame = sys._getframe(1)
    while frame.f_back is not None and (frame.f_code.co_filename in _OWN or frame.f_code.co_filename == _PROXIES):
        frame = frame.f_back
    return frame.f_code, frame.f_lasti


def _forget_parsing(node: fx.Node) -> None:
    """torch's functions ask a size for its number before they see that it is traced, and is to be an argument.

    So what was asked by the very call that has become this node made no number of it.
    """
    asked = [source for source in node.all_input_nodes if "number" in source.meta]
    for source in asked:
        source.meta["number"].pop(_instruction(), None)
        if not source.meta["number"]:
            del source.meta["number"]


def _by_position(module: nn.Module, args: Any, kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a module's call in order where they were given by name: `conv(input=x)` as `conv(x)`."""
    try:
        bound = inspect.signature(module.forward).bind(*args, **kwargs)
    except (TypeError, ValueError):  # they do not fit, which the call itself says best
        return tuple(args), kwargs
    return bound.args, bound.kwargs


def _holds_proxy(value: Any) -> bool:
    return isinstance(value, (tuple, list)) and any(isinstance(x, fx.Proxy) for x in value)


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


def line_of(frames: Sequence[traceback.FrameSummary]) -> str:
    """The deepest line of the user's code among these frames; empty where there is none."""
    theirs = [f for f in frames if "/torch/" not in f.filename and f.filename not in _OWN]
    if not theirs:
        return ""
    frame = theirs[-1]
    return f'{frame.filename}:{frame.lineno}, in {frame.name}: "{(frame.line or "").strip()}"'
