"""What a pruning step did, as plain data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class LayerStep:
    """One layer in one pruning step.

    >>> import torch
    >>> layer = LayerStep("conv1", filters=4, zeroed=1, regrown=0.0, mask=torch.tensor([True, True, False, True]))
    >>> layer.keep
    [0, 1, 3]
    """

    name: str
    filters: int
    """How many filters the layer has."""
    zeroed: int
    """How many of them were zeroed."""
    regrown: float
    """The share of the filters zeroed last time that were not zero when this step began."""
    mask: Tensor = field(repr=False, compare=False)
    """One bool a filter, True = kept, on the layer's device."""

    @property
    def keep(self) -> list[int]:
        """The indices of the kept filters, sorted (waits for the device)."""
        indices: list[int] = self.mask.nonzero().flatten().tolist()
        return indices


@dataclass(frozen=True)
class PruneStep:
    """What `pruner.step(epoch)` did: the rate, the filters zeroed, and the share of the last ones that had regrown.

    >>> from torch import nn
    >>> from asfp import ConstantSchedule, SoftPruner
    >>> net = nn.Sequential(nn.Conv2d(3, 10, 3), nn.ReLU(), nn.Flatten(), nn.LazyLinear(2))
    >>> step = SoftPruner(net, 0.4, epochs=5, schedule=ConstantSchedule(0.4)).step(1)
    >>> print(step)
    epoch 1: rate 0.4000, 4 of 10 filters zeroed, 0.0 % of the last regrown
    >>> step.layers["0"]
    LayerStep(name='0', filters=10, zeroed=4, regrown=0.0)
    >>> step.to_dict()["zeroed"]
    4
    """

    epoch: int
    rate: float
    """The scheduled rate; each layer's own is in proportion to its goal."""
    zeroed: int = 0
    """Filters zeroed in this step, depthwise ones that follow included; 0 where nothing was due."""
    regrown: float = 0.0
    """The share of the filters zeroed last time that were not zero when this step began."""
    layers: dict[str, LayerStep] = field(default_factory=dict)
    """By name; empty where nothing was due."""

    @property
    def filters(self) -> int:
        """Filters of all layers that are pruned."""
        return sum(layer.filters for layer in self.layers.values())

    def __str__(self) -> str:
        if not self.layers:
            return f"epoch {self.epoch}: rate {self.rate:.4f}, no pruning due"
        return (
            f"epoch {self.epoch}: rate {self.rate:.4f}, {self.zeroed} of {self.filters} filters zeroed, "
            f"{100 * self.regrown:.1f} % of the last regrown"
        )

    def to_dict(self) -> dict[str, Any]:
        """Numbers, strings and dicts only, for JSON; the masks are left out."""
        layers = {
            layer.name: {"filters": layer.filters, "zeroed": layer.zeroed, "regrown": layer.regrown}
            for layer in self.layers.values()
        }
        return {
            "epoch": self.epoch,
            "rate": self.rate,
            "zeroed": self.zeroed,
            "filters": self.filters,
            "regrown": self.regrown,
            "layers": layers,
        }
