"""Coupled selection: all that write a residual stream are pruned, to one rate."""

from __future__ import annotations

from collections.abc import Mapping

from asfp.errors import AsfpError
from asfp.flow import Width
from asfp.roles import Convolution
from asfp.streams import Streams, shared_streams


def whole_streams(
    goals: Mapping[str, float], streams: Streams, convolutions: Mapping[str, Convolution], rate: float | None
) -> dict[str, float]:
    """The goals by layer, alike for all that write a stream: with `rate` those missing join, without it is an error.

    >>> import numpy as np
    >>> from torch import nn
    >>> net = nn.ModuleDict({"conv": nn.Conv2d(4, 4, 3), "projection": nn.Conv2d(4, 4, 1)})
    >>> ids = {"conv": np.arange(4), "projection": np.arange(4)}
    >>> streams = Streams(ids, ids, {}, np.zeros(4, np.int8), np.arange(4), (), np.ones(4, bool))
    >>> whole_streams({"conv": 0.5}, streams, net, rate=0.5)
    {'conv': 0.5, 'projection': 0.5}
    """
    weights = {id(convolutions[name].weight): goal for name, goal in goals.items()}
    found = dict(goals)
    for names in shared_streams(streams, Width.FREE):
        rates = {name: weights.get(id(convolutions[name].weight), 0.0) for name in names}
        if not any(rates.values()):
            continue
        if rate is not None:
            found |= dict.fromkeys(names, rate)
        elif len(set(rates.values())) > 1:
            low, high = min(rates, key=lambda n: rates[n]), max(rates, key=lambda n: rates[n])
            raise AsfpError(
                f'selection="coupled" prunes all that write a stream alike, and layers gives {high!r} the rate '
                f"{rates[high]} and {low!r}, which writes the same stream, {rates[low] or 'none'}: choose both with "
                'the same rate, or use selection="nested"'
            )
    return {name: found[name] for name in convolutions if name in found}
