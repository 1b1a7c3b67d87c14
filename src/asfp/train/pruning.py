"""From a config to its pruner: the schedule, the layers, and what is done with pruned filters besides."""

from __future__ import annotations

import fnmatch
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from asfp.errors import AsfpError, nearest
from asfp.pruner import HardPruner, SoftPruner
from asfp.roles import CONVOLUTIONS, LEAVES, find_roles
from asfp.schedule import AsymptoticSchedule, ConstantSchedule, CubicSchedule, LinearSchedule
from asfp.trace import trace
from asfp.train.config import PruningConfig, TrainConfig
from asfp.train.regrowth import Regrowth


def build_pruner(config: TrainConfig, model: nn.Module, data: Any) -> SoftPruner | None:
    """The pruner of the method, or None.

    >>> net = nn.Sequential(nn.Conv2d(3, 10, 3), nn.Flatten(), nn.Linear(360, 2))
    >>> from types import SimpleNamespace
    >>> sizes = SimpleNamespace(shape=(3, 8, 8))
    >>> build_pruner(TrainConfig(pruning=PruningConfig(method="sfp")), net, sizes).schedule
    ConstantSchedule(goal=0.4)
    >>> build_pruner(TrainConfig(pruning=PruningConfig(method="none")), net, sizes) is None
    True
    """
    pruning = config.pruning
    if pruning.method == "none":
        return None
    kind = HardPruner if pruning.method == "hard" else SoftPruner
    device = next(model.parameters()).device
    with torch.no_grad():  # an autograd graph kept alive from here, on the default stream, would break a capture
        return kind(
        model, pruning.rate, config.epochs, schedule=_schedule(pruning, config.epochs), criterion=pruning.criterion,
        layers=_layers(pruning.layers, model), interval=pruning.interval, selection=pruning.selection,
        streams=None if pruning.streams < 0.0 else pruning.streams, align=pruning.align, zero_maps=pruning.zero_maps,
        example_inputs=torch.zeros(2, *data.shape, device=device),
    )  # fmt: skip


def build_regrowth(
    config: TrainConfig, model: nn.Module, data: Any, pruner: SoftPruner | None, optimizer: torch.optim.Optimizer
) -> Regrowth | None:
    """What is done with pruned filters beside zeroing them, or None without a pruner.

    >>> build_regrowth(TrainConfig(), nn.Linear(1, 1), None, None, None) is None
    True
    """
    if pruner is None:
        return None
    norms: dict[str, Any] = {}
    if config.pruning.norm == "reset":
        example = torch.zeros(2, *data.shape, device=next(model.parameters()).device)
        with torch.no_grad():
            norms = dict(find_roles(model, trace(model, example, LEAVES)).norms)
    return Regrowth(config.pruning, config.epochs, pruner, optimizer, norms)


def _layers(layers: dict[str, float], model: nn.Module) -> dict[str, float] | None:
    """The mapping with `*` in its names replaced by the convolutions that it stands for."""
    names = [name for name, module in model.named_modules() if isinstance(module, CONVOLUTIONS)]
    result: dict[str, float] = {}
    for key, rate in layers.items():
        found = fnmatch.filter(names, key) if "*" in key else [key]
        if not found:
            raise AsfpError(f"pruning.layers: no convolution is named like {key!r}.{nearest(key, names)}")
        result |= dict.fromkeys(found, rate)
    return result or None


@dataclass(frozen=True)
class Held:
    """A schedule that stays where it is at epoch `until`.

    >>> schedule = Held(AsymptoticSchedule(0.4, 10), 10)
    >>> schedule(10) == schedule(20) == 0.4
    True
    """

    schedule: Any
    until: int

    def __call__(self, epoch: int) -> float:
        return float(self.schedule(min(epoch, self.until)))


def _schedule(pruning: PruningConfig, epochs: int) -> Any:
    if pruning.freeze_epochs:
        return Held(_curve(pruning, epochs - pruning.freeze_epochs), epochs - pruning.freeze_epochs)
    return _curve(pruning, epochs)


def _curve(pruning: PruningConfig, epochs: int) -> Any:
    name = pruning.schedule
    if name == "auto":
        name = "asymptotic" if pruning.method == "asfp" else "constant"
    if name == "constant":
        return ConstantSchedule(pruning.rate)
    if name == "asymptotic":
        return AsymptoticSchedule(pruning.rate, epochs, start=pruning.start, d=pruning.d)
    return {"linear": LinearSchedule, "cubic": CubicSchedule}[name](pruning.rate, epochs, start=pruning.start)


MUCH = 0.02
"""A last pruning that takes a larger share of what a layer has left is told before training."""


def taken_last(pruner: SoftPruner, config: TrainConfig, model: nn.Module, data: Any) -> str:
    """What is to be said where the last pruning takes filters that no pruning before it took; empty where it does not.

    Eq. 7 reaches its goal at the last epoch. Where N * rate is a whole number, floor(N * rate(e)) is one less until
    then, and nothing is trained after the last filter is gone. Settings that are named were tried: they help.

    >>> import asfp
    >>> from types import SimpleNamespace
    >>> net, sizes = asfp.create_model("resnet8"), SimpleNamespace(shape=(3, 32, 32))
    >>> def told(rate):
    ...     config = TrainConfig(pruning=PruningConfig(method="asfp", rate=rate))
    ...     return taken_last(build_pruner(config, net, sizes), config, net, sizes)
    >>> print(told(0.5))
    the last pruning takes more filters than the one before, from 7 of 7 layers (up to 11 % of what a layer has left), \
and nothing is trained after it: pruning.rate=0.5005 or pruning.freeze_epochs=10 gets there earlier
    >>> told(0.5005)
    ''
    """
    shares = _last_shares(pruner)
    if max(shares, default=0.0) <= MUCH:
        return ""
    ways = [way for settings in _earlier(pruner, config.pruning) if (way := _first_good(settings, config, model, data))]
    return (
        "the last pruning takes more filters than the one before, "
        f"from {sum(share > 0 for share in shares)} of {len(shares)} layers (up to {100 * max(shares):.0f} % of what a "
        "layer has left), and nothing is trained after it"
        + (f": {' or '.join(ways)} gets there earlier" if ways else "")
    )


def _last_shares(pruner: SoftPruner) -> list[float]:
    """For each layer, the share of what it has left that the last pruning takes."""
    before = (pruner.epochs - 1) // pruner.interval * pruner.interval
    if before == 0:
        return []
    counts = zip(
        pruner.layers, pruner.counts_at(before).values(), pruner.counts_at(pruner.epochs).values(), strict=True
    )
    return [(last - count) / (layer.filters - count) for layer, count, last in counts]


def _earlier(pruner: SoftPruner, pruning: PruningConfig) -> list[list[dict[str, float]]]:
    """Settings that may reach the goal before the last epoch: of each kind, those that change the least first."""
    above = (1.001, 1.003, 1.01)
    kinds: list[list[dict[str, float]]] = []
    if not pruning.layers:
        kinds.append([{"rate": float(f"{pruning.rate * by:.4g}")} for by in above])
    if pruning.streams > 0.0:
        kinds.append([{"streams": float(f"{pruning.streams * by:.4g}")} for by in above])
        kinds.append([kinds[0][i] | way for i, way in enumerate(kinds[1])])
    last = (pruner.epochs - max(1, pruner.epochs // 20)) // pruner.interval * pruner.interval
    kinds.append([{"freeze_epochs": pruner.epochs - last}])
    return kinds


def _first_good(ways: list[dict[str, float]], config: TrainConfig, model: nn.Module, data: Any) -> str:
    """The first of the settings with which the last pruning takes little, in words; empty where none is."""
    for changed in ways:
        try:
            pruning = replace(config.pruning, **changed)  # type: ignore[arg-type]
            pruner = build_pruner(replace(config, pruning=pruning), model, data)
        except AsfpError:  # not with these other settings
            continue
        if pruner is not None and max(_last_shares(pruner), default=0.0) <= MUCH:
            return " with ".join(f"pruning.{name}={value:g}" for name, value in changed.items())
    return ""
