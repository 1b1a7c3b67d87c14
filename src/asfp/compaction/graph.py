"""The traced model in a plainer form: nothing in place, layers with weights as modules, constants worked out."""

from __future__ import annotations

import operator
from collections import Counter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from asfp.compaction.effects import without_effects
from asfp.compaction.sizes import look_again
from asfp.errors import TraceError
from asfp.trace import Example, Leaf, copy_of, has_effect, trace

_CONVOLUTIONS: dict[Any, type[nn.Module]] = {
    F.conv1d: nn.Conv1d,
    F.conv2d: nn.Conv2d,
    F.conv3d: nn.Conv3d,
    torch.conv1d: nn.Conv1d,
    torch.conv2d: nn.Conv2d,
    torch.conv3d: nn.Conv3d,
}
_BATCH_NORMS = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}


def program(model: nn.Module, example_inputs: Example, leaf_modules: tuple[Leaf, ...]) -> fx.GraphModule:
    """Trace a copy of the model in evaluation mode, and bring it into the form that the rules expect.

    The copy has the model's own tensors: they are cut, never written to.
    """
    traced = trace(copy_of(model, share_tensors=True).eval(), example_inputs, leaf_modules)
    without_effects(traced)
    _sizes_one_by_one(traced)
    _work_out_parameters(traced)
    _as_modules(traced)
    traced.graph.eliminate_dead_code(has_effect)
    traced.recompile()
    look_again(traced)
    _check_numbers(traced)
    traced.graph.eliminate_dead_code()
    traced.recompile()
    return traced


def _check_numbers(traced: fx.GraphModule) -> None:
    """Refuse a forward that made a plain number of a size which other inputs change."""
    for node in traced.graph.nodes:
        asked = node.meta.pop("number", None)
        if asked and any(other != node.meta["val"] for other in node.meta["others"]):
            where = next(iter(asked.values()))
            raise TraceError(
                f"forward turns a size that depends on the input into a plain number at {where}, so a graph of it "
                "would hold for this one size only: use the size as it is (no int(), float() or range() around it), or "
                "keep the submodule that contains this line whole with leaf_modules=[ItsClass]"
            )


def shared_layers(traced: fx.GraphModule) -> dict[str, str]:
    """Layers that must not be cut on their own: target -> why."""
    calls = Counter(str(n.target) for n in traced.graph.nodes if n.op == "call_module")
    owners: dict[int, set[str]] = {}
    for target in calls:
        module = traced.get_submodule(target)
        for tensor in (*module.parameters(), *module.buffers()):
            owners.setdefault(id(tensor), set()).add(target)
    for node in traced.graph.nodes:
        if node.op == "get_attr":
            value = attribute(traced, str(node.target))
            owners.setdefault(id(value), set()).add(str(node.target))
            owner = str(node.target).rpartition(".")[0]
            if (
                owner in calls
            ):  # a tensor of a layer used directly as well: cut under one name, it would be cut for both
                owners.setdefault(id(value), set()).add(owner)
    shared = {target: f"it is called {n} times with the same weights" for target, n in calls.items() if n > 1}
    for names in owners.values():
        if len(names) > 1:
            for target in names:
                others = ", ".join(sorted(names - {target}))
                shared.setdefault(target, f"it shares weights with {others}")
    return shared


def attribute(root: nn.Module, target: str) -> Any:
    owner, _, name = target.rpartition(".")
    return getattr(root.get_submodule(owner), name)


def _sizes_one_by_one(traced: fx.GraphModule) -> None:
    """x.view(y.shape) as x.view(y.shape[0], y.shape[1], ...): then one of the sizes can change."""
    graph = traced.graph
    for node in list(graph.nodes):
        name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
        if name not in ("view", "reshape", "expand") or len(node.args) != 2 or not isinstance(node.args[1], fx.Node):
            continue
        whole = node.args[1]
        if not isinstance(whole.meta.get("val"), torch.Size):
            continue
        sizes = []
        with graph.inserting_before(node):
            for i, n in enumerate(whole.meta["val"]):
                sizes.append(graph.call_function(operator.getitem, (whole, i)))
                sizes[-1].meta["val"] = n
        node.args = (node.args[0], tuple(sizes))


def _work_out_parameters(traced: fx.GraphModule) -> None:
    """Compute once what depends on parameters alone: weight standardisation, `weight.shape`, numbers made of these.

    What they were made of is noted in `traced.meta["computed"]`: from then on they go their own way.
    """
    graph = traced.graph
    computed: dict[str, tuple[str, ...]] = traced.meta.setdefault("computed", {})
    within: dict[fx.Node, tuple[str, ...]] = {}
    for node in list(graph.nodes):
        if not _depends_on_parameters_alone(node):
            continue
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: attribute(traced, str(n.target)))
        with torch.enable_grad():  # what is detached, and so not trained, stays so
            if node.op == "call_method":
                result = getattr(args[0], node.target)(*args[1:], **kwargs)
            else:
                result = node.target(*args, **kwargs)
        made_of = dict.fromkeys(str(n.target) for n in node.all_input_nodes)
        sources = tuple(dict.fromkeys(s for n in made_of for s in computed.get(n, (n,)))) + within.get(node, ())
        if isinstance(result, Tensor):
            with graph.inserting_before(node):
                name = _hold(traced, node, result)
                known = graph.get_attr(name)
            computed[name] = sources
            known.meta = dict(node.meta)
            node.replace_all_uses_with(known)
        else:
            for user in node.users if _holds_tensors(result) else ():  # written into it, so no longer seen there
                within[user] = within.get(user, ()) + sources
            _put(node, result)
        graph.erase_node(node)


def _holds_tensors(value: Any) -> bool:
    return any(isinstance(part, Tensor) for part in pytree.tree_leaves(value))


def _put(node: fx.Node, value: Any) -> None:
    """Write a plain value wherever the node was used."""
    for user in list(node.users):
        user.args, user.kwargs = fx.node.map_arg((user.args, user.kwargs), lambda n: value if n is node else n)


def _depends_on_parameters_alone(node: fx.Node) -> bool:
    if node.op not in ("call_function", "call_method"):
        return False
    if not node.all_input_nodes:
        return getattr(node.target, "__module__", "") in ("_operator", "builtins", "math")
    return all(n.op == "get_attr" for n in node.all_input_nodes)


def _hold(traced: fx.GraphModule, node: fx.Node, value: Tensor) -> str:
    """Keep a computed tensor where its first ingredient is kept; the name it has there."""
    owner = str(node.all_input_nodes[0].target).rpartition(".")[0] if node.all_input_nodes else ""
    holder = traced.get_submodule(owner)
    name = _free_name(holder, node.name)
    if value.is_floating_point():
        holder.register_parameter(name, nn.Parameter(value.detach().clone(), requires_grad=value.requires_grad))
    else:
        holder.register_buffer(name, value.clone())
    return f"{owner}.{name}" if owner else name


def _free_name(holder: nn.Module, name: str) -> str:
    while hasattr(holder, name):
        name += "_"
    return name


def _as_modules(traced: fx.GraphModule) -> None:
    """F.conv2d(x, self.weight, ...) as nn.Conv2d, F.linear as nn.Linear, F.batch_norm as nn.BatchNorm."""
    for node in list(traced.graph.nodes):
        if node.op != "call_function":
            continue
        build = _convolution if node.target in _CONVOLUTIONS else _LAYERS.get(node.target)
        module = None if build is None else build(traced, node)
        if module is None:
            continue
        source = node.kwargs["input"] if "input" in node.kwargs else node.args[0]
        held = next(n for n in node.all_input_nodes if n.op == "get_attr" and n is not source)
        owner = str(held.target).rpartition(".")[0]
        free = _free_name(traced.get_submodule(owner), node.name)
        name = f"{owner}.{free}" if owner else free
        traced.add_submodule(name, module.eval())
        computed = traced.meta["computed"]
        for source_of in (n for n in node.all_input_nodes if str(n.target) in computed):
            value = attribute(traced, str(source_of.target))
            places = [f"{name}.{k}" for k, v in (*module.named_parameters(), *module.named_buffers()) if v is value]
            computed |= dict.fromkeys(places, computed[str(source_of.target)])
        node.op, node.target, node.args, node.kwargs = "call_module", name, (source,), {}


def _values(traced: fx.GraphModule, node: fx.Node, names: tuple[str, ...]) -> dict[str, Any] | None:
    """The call's arguments by name, tensors as the parameters they are; None where one is computed from the input."""
    given = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    if not isinstance(given.get("input"), fx.Node):
        return None
    result = dict(given)
    for name, value in given.items():
        if name != "input" and isinstance(value, fx.Node):
            if value.op != "get_attr" or len(value.users) > 1:
                return None
            result[name] = attribute(traced, str(value.target))
    return result


def _convolution(traced: fx.GraphModule, node: fx.Node) -> nn.Module | None:
    names = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
    given = _values(traced, node, names)
    if given is None or not isinstance(given["weight"], Tensor) or not _plain(given, names[3:]):
        return None
    weight, groups = given["weight"], given.get("groups", 1)
    build: Any = _CONVOLUTIONS[node.target]
    options = {n: given.get(n, 0 if n == "padding" else 1) for n in ("stride", "padding", "dilation")}
    module = build(
        weight.shape[1] * groups, weight.shape[0], tuple(weight.shape[2:]), groups=groups, bias=False, device="meta",
        **{n: tuple(v) if isinstance(v, list) else v for n, v in options.items()},
    )  # fmt: skip
    return _holding(module, weight=weight, bias=given.get("bias"))


def _linear(traced: fx.GraphModule, node: fx.Node) -> nn.Module | None:
    given = _values(traced, node, ("input", "weight", "bias"))
    if given is None or not isinstance(given["weight"], Tensor) or given["weight"].ndim != 2:
        return None
    weight = given["weight"]
    return _holding(
        nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta"), weight=weight, bias=given.get("bias")
    )


def _batch_norm(traced: fx.GraphModule, node: fx.Node) -> nn.Module | None:
    names = ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps")
    given = _values(traced, node, names)
    if given is None or given.get("training") or not isinstance(given.get("running_mean"), Tensor):
        return None
    mean, var = given["running_mean"], given["running_var"]
    build = _BATCH_NORMS.get(node.meta["val"].ndim)
    if build is None:
        return None
    momentum = given.get("momentum", 0.1)
    module = build(mean.shape[0], eps=given.get("eps", 1e-5), momentum=momentum, affine=False)
    module.affine = given.get("weight") is not None
    module.running_mean, module.running_var = mean.detach(), var.detach()
    return _holding(module, weight=given.get("weight"), bias=given.get("bias"))


_LAYERS: dict[Any, Any] = {F.linear: _linear, F.batch_norm: _batch_norm, torch.batch_norm: None}


def _plain(given: dict[str, Any], names: tuple[str, ...]) -> bool:
    def plain(v: Any) -> bool:
        return isinstance(v, (int, str)) or (isinstance(v, (tuple, list)) and all(isinstance(x, int) for x in v))

    return all(plain(given[n]) for n in names if n in given)


def _holding(module: nn.Module, **parameters: Tensor | None) -> nn.Module:
    for name, value in parameters.items():
        if value is not None and not isinstance(value, nn.Parameter):
            value = nn.Parameter(value.detach().clone(), requires_grad=False)
        module.register_parameter(name, value)
    return module
