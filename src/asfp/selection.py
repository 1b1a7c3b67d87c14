"""HOW TOGETHER: which layers are pruned, each to which rate, and what is zeroed along with their filters."""

from __future__ import annotations

import numbers
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import UninitializedParameter

from asfp.coupling import whole_streams
from asfp.errors import AsfpError, TraceError, nearest
from asfp.roles import CONVOLUTIONS, LEAVES, Convolution, Roles, find_roles, is_depthwise
from asfp.streams import Ids, Streams, find_streams, residual_streams
from asfp.trace import trace

Layers = Callable[[str, nn.Module], bool] | Mapping[str, float] | None
"""None for the default rule, a predicate (name, module) -> bool, or a mapping name -> rate."""


@dataclass(frozen=True, eq=False)
class Layer:
    """A convolution of the model, what is zeroed with its filters, and the rate it is pruned to in the end.

    >>> layer = Layer("up", nn.ConvTranspose2d(4, 6, 3), goal=0.5)
    >>> layer.filters, tuple(layer.weight.shape)
    (6, (6, 4, 3, 3))
    """

    name: str
    module: Convolution
    goal: float = 0.0
    norm: _BatchNorm | None = None
    repeat: int = 1
    """For a depthwise convolution that follows another: its filters for each filter of that one."""
    followers: tuple[Layer, ...] = field(default=(), repr=False)

    @property
    def filters(self) -> int:
        """How many there are."""
        return self.module.out_channels

    @property
    def weight(self) -> Tensor:
        """The convolution's weight, in place, with the filters along dimension 0."""
        return self.module.weight.transpose(0, 1) if self.module.transposed else self.module.weight

    def tensors(self, maps: bool) -> list[Tensor]:
        """What is zeroed with a filter, along dimension 0: the weight; with `maps`, also bias, BN shift and BN mean."""
        norm = self.norm if maps else None
        bias = self.module.bias if maps else None
        tensors = [self.weight, bias] if norm is None else [self.weight, bias, norm.bias, norm.running_mean]
        return [tensor for tensor in tensors if tensor is not None]


@dataclass(frozen=True, eq=False)
class Selected:
    """The layers to prune, in the model's order, and what is known of the streams that they write."""

    layers: list[Layer]
    streams: Streams | None = None
    """None where nothing asks for them."""
    readers: list[tuple[Layer, Ids]] = field(default_factory=list)
    """Depthwise convolutions that read a stream, and the channel that each filter reads; coupled, they follow it."""


def unwrap(model: nn.Module) -> nn.Module:
    """The user's own module, out of `torch.compile`, DistributedDataParallel and DataParallel.

    >>> net = nn.Conv2d(3, 8, 3)
    >>> unwrap(nn.DataParallel(net)) is net
    True
    """
    if not isinstance(model, nn.Module):
        raise AsfpError(
            f"model={model!r} is not a torch.nn.Module: pass the model itself, e.g. SoftPruner(model, 0.4, 200)"
        )
    while True:
        if isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            model = model.module
        elif isinstance(inner := getattr(model, "_orig_mod", None), nn.Module):
            model = inner
        else:
            return model


def select(
    model: nn.Module, layers: Layers, rate: float | None, *, needs_norm: bool = False, example_inputs: Any = None
) -> list[Layer]:
    """The layers to prune, in the model's order; each is pruned to `rate`, or to its own rate of the mapping.

    By default these are all convolutions but the projection shortcuts and those that make the model's output, which
    stand for the fully connected layer that the paper leaves alone too. A predicate or a mapping decides freely.
    Depthwise convolutions hold no choice of their own: they follow the layer that feeds them, or are left alone.

    >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=8), nn.Conv2d(8, 4, 1))
    >>> [(layer.name, [f.name for f in layer.followers]) for layer in select(net, None, 0.5)]
    [('0', ['2'])]
    >>> [layer.name for layer in select(net, lambda name, module: module.kernel_size == (1, 1), 0.5)]
    ['3']
    """
    return select_streams(model, layers, rate, needs_norm=needs_norm, example_inputs=example_inputs).layers


def select_streams(
    model: nn.Module,
    layers: Layers,
    rate: float | None,
    *,
    selection: str = "independent",
    stream_rate: float | None = None,
    needs_streams: bool = False,
    needs_norm: bool = False,
    example_inputs: Any = None,
) -> Selected:
    """The layers to prune and their streams. Coupled, all that write a stream are chosen, projections too.

    Of the chosen layers, those that write a stream with others are pruned to `stream_rate`, where there is one.

    >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 1), nn.Flatten(), nn.Linear(4, 2))
    >>> select_streams(net, None, 0.5, needs_streams=True).streams.writes["2"]
    array([ 8,  9, 10, 11])
    """
    needs_streams = needs_streams or selection != "independent" or stream_rate is not None
    with _uncompiled(model):
        convolutions = {n: m for n, m in model.named_modules() if isinstance(m, CONVOLUTIONS)}
        if not convolutions:
            raise AsfpError(f"{type(model).__name__} has no convolution, so there are no filters to prune: pass a CNN")
        depthwise = any(map(is_depthwise, convolutions.values()))
        roles, streams = _roles(model, layers, needs_norm, needs_streams, depthwise, example_inputs)
    goals = _goals(convolutions, layers, rate, roles)
    if stream_rate is not None:
        assert streams is not None
        goals = _with_stream_rate(goals, streams, convolutions, stream_rate)
    if selection == "coupled":
        assert streams is not None
        joining = None if layers is not None else rate if stream_rate is None else stream_rate
        goals = whole_streams(goals, streams, convolutions, joining)
    chosen: dict[int, Layer] = {}
    for name, goal in goals.items():
        module = convolutions[name]
        _check_weight(name, module)
        first = chosen.setdefault(id(module.weight), Layer(name, module, goal, roles.norms.get(name)))
        if first.goal != goal:
            raise AsfpError(
                f"layers gives {first.name!r} the rate {first.goal} and {name!r} the rate {goal}, but they share one "
                "weight: give both the same rate, or name one of them"
            )
    found = [_with_followers(layer, convolutions, roles) for layer in chosen.values()]
    readers = []
    if streams is not None and selection == "coupled":
        for name, ids in streams.follows.items():
            if name not in roles.feeders:
                _check_weight(name, convolutions[name])
                readers.append((Layer(name, convolutions[name], norm=roles.norms.get(name)), ids))
    return Selected(found, streams, readers)


@contextmanager
def _uncompiled(model: nn.Module) -> Iterator[None]:
    """The model as it was before parts of it were compiled: its names are the user's, and it can be traced."""
    wrapped = [
        (module, name, child)
        for module in list(model.modules())
        for name, child in module._modules.items()
        if child is not None and name != "_orig_mod" and "_orig_mod" in child._modules
    ]
    called = [(module, module._compiled_call_impl) for module in model.modules()]
    try:
        for module, name, child in wrapped:
            module._modules[name] = unwrap(child)
        for module, _ in called:
            module._compiled_call_impl = None
        yield
    finally:
        for module, name, child in wrapped:
            module._modules[name] = child
        for module, call in called:
            module._compiled_call_impl = call


def _with_followers(layer: Layer, convolutions: Mapping[str, Convolution], roles: Roles) -> Layer:
    followers = []
    for name, (feeder, repeat) in roles.feeders.items():
        if convolutions[feeder].weight is layer.module.weight:
            _check_weight(name, convolutions[name])
            followers.append(Layer(name, convolutions[name], norm=roles.norms.get(name), repeat=repeat))
    return Layer(layer.name, layer.module, layer.goal, layer.norm, followers=tuple(followers))


def _goals(
    convolutions: Mapping[str, Convolution], layers: Layers, rate: float | None, roles: Roles
) -> dict[str, float]:
    free = {n: m for n, m in convolutions.items() if not is_depthwise(m) and not (m.transposed and m.groups > 1)}
    if isinstance(layers, Mapping):
        return {name: goal for name, goal in _mapped(convolutions, free, layers).items() if goal > 0.0}
    if layers is not None and not callable(layers):
        raise AsfpError(
            f"layers={layers!r} does not name layers: it must be None, a predicate (name, module) -> bool, or a "
            'mapping name -> rate, e.g. layers={"layer1.0.conv1": 0.4}'
        )
    assert rate is not None
    if layers is not None:
        goals = {name: rate for name, module in free.items() if layers(name, module)}
        reason = "the predicate chose none of the convolutions"
    else:
        goals = {name: rate for name in free if name not in roles.projections and name not in roles.outputs}
        reason = "each convolution is depthwise, a projection shortcut, or makes the model's output"
    if not goals:
        some = ", ".join(list(convolutions)[:5]) + ", ..." * (len(convolutions) > 5)
        raise AsfpError(
            f"no layer is left to prune: {reason} ({some}); "
            "choose with layers=lambda name, module: ... (depthwise convolutions follow the layer that feeds them)"
        )
    return goals


def _with_stream_rate(
    goals: Mapping[str, float], streams: Streams, convolutions: Mapping[str, Convolution], rate: float
) -> dict[str, float]:
    """Of the chosen layers, those that write a stream with others get `rate`; with 0 they are left out."""
    shared = {id(convolutions[name].weight) for names in residual_streams(streams) for name in names}
    if not any(id(convolutions[name].weight) in shared for name in goals):
        raise AsfpError(
            f"streams={rate:g} changes nothing: none of the layers to prune writes a residual stream together with "
            "another; leave it out"
        )
    changed = {name: rate if id(convolutions[name].weight) in shared else goal for name, goal in goals.items()}
    if not any(changed.values()):
        raise AsfpError(
            "streams=0 leaves no layer to prune: each of them writes a residual stream; give a rate above 0"
        )
    return {name: goal for name, goal in changed.items() if goal > 0.0}


def _mapped(
    convolutions: Mapping[str, Convolution], free: Mapping[str, Convolution], layers: Mapping[str, float]
) -> dict[str, float]:
    goals: dict[str, float] = {}
    for name, goal in layers.items():
        if name not in convolutions:
            raise AsfpError(
                f"layers names {name!r}, which is not a convolution of the model.{nearest(str(name), convolutions, 3)}"
                " The names are those of model.named_modules()"
            )
        if name not in free:
            raise AsfpError(
                f"layers names {name!r}, a depthwise or grouped transposed convolution, which holds no choice of its "
                "own: leave it out; it follows the layer that feeds it"
            )
        goals[name] = _layer_rate(name, goal)
    if not any(goals.values()):
        raise AsfpError(f"layers={dict(layers)!r} prunes nothing: give at least one layer a rate above 0")
    return {name: goals[name] for name in convolutions if name in goals}


def _layer_rate(name: str, goal: object) -> float:
    if isinstance(goal, bool) or not isinstance(goal, numbers.Real) or not 0.0 <= float(goal) < 1.0:
        raise AsfpError(f"layers[{name!r}]={goal!r} is not a rate: it must be at least 0 and below 1, e.g. 0.4")
    return float(goal)


def _check_weight(name: str, module: nn.Module) -> None:
    weight = module._parameters.get("weight")
    if weight is None:
        raise AsfpError(
            f"the weight of {name!r} is computed from other parameters, so zeroing it would not last: remove its "
            "parametrisation (weight or spectral norm, torch.nn.utils.prune) or leave the layer out with layers="
        )
    if isinstance(weight, UninitializedParameter):
        raise AsfpError(f"the weight of {name!r} is not initialised yet: run the model once on an example input first")


def _roles(
    model: nn.Module, layers: Layers, needs_norm: bool, needs_streams: bool, depthwise: bool, example_inputs: Any
) -> tuple[Roles, Streams | None]:
    if layers is not None and not needs_norm and not needs_streams and not depthwise:
        return Roles(), None
    try:
        graph = trace(model, example_inputs, LEAVES)
        return find_roles(model, graph), find_streams(model, graph) if needs_streams else None
    except TraceError as error:
        cause = str(error).split(" Ways out:")[0].rstrip(".") + "."
        inputs = "" if example_inputs is not None else "pass example_inputs=, which often lets it be traced; or "
        if needs_streams:
            raise TraceError(
                f"{cause} It is traced to find what writes each residual stream. Ways out: {inputs}"
                'use selection="independent", align=1 and streams=None, which need no streams'
            ) from error
        if layers is None:
            raise TraceError(
                f"{cause} It is traced to find the projection shortcuts. Ways out: {inputs}say yourself which "
                'convolutions to prune, e.g. layers=lambda name, module: "downsample" not in name'
            ) from error
        if needs_norm:
            raise TraceError(
                f"{cause} It is traced to find the batch norm behind each convolution. Ways out: {inputs}"
                'use a criterion such as "l2", and zero_maps=False, which need no batch norm'
            ) from error
        warnings.warn(
            f"{cause} Depthwise convolutions are left alone, as what feeds them is not known. {inputs.capitalize()}"
            "ignore this: the pruned filters are zero all the same",
            stacklevel=4,
        )
        return Roles(), None
