"""From a config to its pruner: the schedule, the layers, and what is done with pruned filters besides."""

from __future__ import annotations

import fnmatch
from dataclasses import dataclass
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


def taken_last(pruner: SoftPruner, pruning: PruningConfig) -> str:
    """What is to be said where the last pruning takes filters that no pruning before it took; empty where it does not.

    Eq. 7 reaches its goal at the last epoch. Where N * rate is a whole number, floor(N * rate(e)) is one less until
    then, and nothing is trained after the last filter is gone.

    >>> import asfp
    >>> half = asfp.SoftPruner(asfp.create_model("resnet8"), 0.5, epochs=200)
    >>> print(taken_last(half, PruningConfig(method="asfp", rate=0.5)))
    the last pruning takes more filters than the one before, from 7 of 7 layers (up to 11 % of what a layer has left), \
and nothing is trained after it: rate=0.5005, just above, or freeze_epochs=10 gets there earlier
    >>> taken_last(asfp.SoftPruner(asfp.create_model("resnet8"), 0.5005, epochs=200), PruningConfig())
    ''
    """
    before = (pruner.epochs - 1) // pruner.interval * pruner.interval
    if before == 0:
        return ""
    counts = zip(
        pruner.layers, pruner.counts_at(before).values(), pruner.counts_at(pruner.epochs).values(), strict=True
    )
    shares = [(last - count) / (layer.filters - count) for layer, count, last in counts]
    if max(shares, default=0.0) <= MUCH:
        return ""
    above = f"rate={1.001 * pruning.rate:.4g}, just above, or " if pruning.rate < 0.99 and not pruning.layers else ""
    return (
        "the last pruning takes more filters than the one before, "
        f"from {sum(share > 0 for share in shares)} of {len(shares)} layers (up to {100 * max(shares):.0f} % of what a "
        f"layer has left), and nothing is trained after it: {above}freeze_epochs={max(1, pruner.epochs // 20)} "
        "gets there earlier"
    )
