"""Multiply-adds and traffic as functions of how many channels are kept: what pruning would leave, before it is done."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from asfp.streams import Ids, Streams


class Costs:
    """sum over convolutions of macs * (share of its filters kept) * (share of its input's channels kept).

    Channels belong to units, sets of which `kept` says how many stay; those of no unit all stay. Depthwise
    convolutions have the filters of the channels they read.

    >>> from asfp.streams import Call
    >>> calls = (Call("a", 100, None), Call("b", 400, np.arange(4)))
    >>> ids = {"a": np.arange(4), "b": np.arange(4, 8)}
    >>> streams = Streams(ids, ids, {}, np.zeros(8, np.int8), np.arange(8), calls, np.zeros(8, bool))
    >>> costs = Costs(streams, np.array([0, 0, 0, 0, -1, -1, -1, -1]), {"a": [(0, 1)]}, sizes=[4])
    >>> costs.macs([4]), costs.macs([2])
    (500.0, 250.0)
    """

    def __init__(
        self, streams: Streams, unit_of: Ids, written: Mapping[str, Sequence[tuple[int, int]]], sizes: Sequence[int]
    ) -> None:
        """`unit_of`: the unit of what a call may read, or -1; `written`: the units of a layer's filters."""
        n = len(sizes)
        self.sizes = np.asarray(sizes, float)
        self.dense = np.array([call.macs for call in streams.calls], float)
        self.written = np.array([call.elements for call in streams.calls], float)
        self.read = np.zeros((len(streams.calls), n))
        self.wrote = np.zeros((len(streams.calls), n))
        for row, call in enumerate(streams.calls):
            if call.reads is not None and call.reads.size:
                units = np.where(call.reads >= 0, unit_of[call.reads], -1)
                self.read[row] = np.bincount(units[units >= 0], minlength=n) / call.reads.size
            if call.name not in streams.follows:
                filters = streams.writes[call.name].size if call.name in streams.writes else 1
                for unit, repeat in written.get(call.name, ()):
                    self.wrote[row, unit] += repeat * sizes[unit] / filters
        self.narrows = self.read.any(axis=0)

    def macs(self, kept: Sequence[float]) -> float:
        """Multiply-adds of all convolutions, for one sample, when so many channels of each unit are kept."""
        gone = 1 - np.asarray(kept, float) / self.sizes
        return float(self.dense @ ((1 - self.read @ gone) * (1 - self.wrote @ gone)))

    def elements(self, kept: Sequence[float]) -> float:
        """Elements that all convolutions write, for one sample; those added to a wider stream count as all kept."""
        gone = (1 - np.asarray(kept, float) / self.sizes) * self.narrows
        return float(self.written @ (1 - self.wrote @ gone))
