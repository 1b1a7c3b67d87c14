"""Multiply-adds and parameters, counted while the model runs on tensors that have shapes and no data."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from asfp.errors import AsfpError
from asfp.trace import Example, as_arguments, kept_tensors

CONVOLUTIONS = {torch.ops.aten.convolution, torch.ops.aten._convolution, torch.ops.aten.cudnn_convolution}
"""What counts as a convolution; every other product that torch counts (mm, addmm, bmm, attention) is linear."""


@dataclass(frozen=True)
class LayerMacs:
    """One layer: its multiply-adds for one sample, over all of its calls, and its own parameters."""

    name: str
    kind: str
    macs_conv: int
    macs_linear: int
    params: int


def count_layers(model: nn.Module, example_inputs: Example) -> tuple[LayerMacs, ...]:
    """Each layer that multiplies or has parameters, in the model's order; a layer called twice counts twice.

    A parameter that two layers share is the first one's, so the columns sum to the model's totals.

    >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(72, 2))
    >>> for layer in count_layers(net, torch.zeros(1, 3, 5, 5)):
    ...     print(layer.name, layer.macs_conv, layer.macs_linear, layer.params)
    0 1944 0 224
    3 0 144 146
    """
    products = _products(model, example_inputs)
    batch = _batch(example_inputs)
    seen: set[int] = set()
    layers = []
    for name, module in model.named_modules():
        own = [p for p in module.parameters(recurse=False) if id(p) not in seen]
        seen.update(map(id, own))
        conv, linear = products.pop(name, (0, 0))
        params = sum(p.numel() for p in own)
        if conv or linear or params:
            layers.append(LayerMacs(name, type(module).__name__, conv // batch, linear // batch, params))
    assert not products, f"multiply-adds of {sorted(products)} belong to no module"
    return tuple(layers)


class _Counter(TorchDispatchMode):
    """Counts by torch's own formulas, each product booked to the innermost module that is running."""

    def __init__(self, running: list[str]) -> None:
        super().__init__()
        self.running = running
        self.macs: dict[str, tuple[int, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        operation = func.overloadpacket
        if operation in flop_registry:
            macs = flop_registry[operation](*args, **(kwargs or {}), out_val=out) // 2
            conv, linear = self.macs.get(self.running[-1], (0, 0))
            self.macs[self.running[-1]] = (conv + macs, linear) if operation in CONVOLUTIONS else (conv, linear + macs)
        return out


def _products(model: nn.Module, example_inputs: Example) -> dict[str, tuple[int, int]]:
    """Module name -> multiply-adds of convolutions and of linear maps, for the whole batch."""
    args, kwargs = as_arguments(example_inputs)
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    twin = _without_data(model, fake)
    args, kwargs = pytree.tree_map(lambda x: fake.from_tensor(x) if isinstance(x, Tensor) else x, (args, kwargs))
    with fake, _quietly(), _innermost(twin) as running, torch.no_grad(), _Counter(running) as counter:
        try:
            twin(*args, **kwargs)
        except Exception as error:
            first = str(error).splitlines()[0] if str(error) else repr(error)
            shapes = [tuple(x.shape) for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
            raise AsfpError(
                f"{type(model).__name__} does not run on example_inputs of shape {shapes}: "
                f"{type(error).__name__}: {first}; pass an input as the model takes it, "
                f"e.g. torch.zeros(1, 3, 224, 224)"
            ) from error
    return counter.macs


def _without_data(model: nn.Module, fake: FakeTensorMode) -> nn.Module:
    """A copy in evaluation mode whose tensors have shapes and no data: any size fits in memory."""
    memo: dict[int, Any] = {}
    for tensor in [*model.parameters(), *model.buffers(), *kept_tensors(model)]:
        with torch.no_grad():
            twin = fake.from_tensor(tensor.detach())
        memo[id(tensor)] = nn.Parameter(twin, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else twin
    return copy.deepcopy(model, memo).eval()


@contextmanager
def _quietly() -> Iterator[None]:
    """Torch logs the traceback of a failure that is reported here in one line."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


@contextmanager
def _innermost(model: nn.Module) -> Iterator[list[str]]:
    """The names of the modules that are running, the innermost last."""
    running = [""]
    hooks = []
    for name, module in model.named_modules():
        hooks.append(module.register_forward_pre_hook(lambda _m, _x, name=name: running.append(name)))
        hooks.append(module.register_forward_hook(lambda _m, _x, _y: running.pop() and None))
    try:
        yield running
    finally:
        for hook in hooks:
            hook.remove()


def _batch(example_inputs: Example) -> int:
    args, kwargs = as_arguments(example_inputs)
    sizes = {x.shape[0] for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor) and x.ndim > 1}
    return int(sizes.pop()) if len(sizes) == 1 else 1
