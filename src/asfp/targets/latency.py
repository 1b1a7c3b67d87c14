"""The rate that leaves a share of the time: predicted from layers, then measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache

import torch
from torch import Tensor, nn

from asfp.compaction import CompactModule
from asfp.errors import AsfpError
from asfp.targets.layers import LayerTimes, uses_of
from asfp.targets.target import LAST, Target, as_image, as_network, check_share, cutter, macs_share, rate_of, smallest
from asfp.targets.ways import WAYS, Progress, Race, Way, allowed, counted

ROUNDS = 3
"""How often a prediction is corrected at most."""
SLACK = 0.03
"""An outcome within this share below the target is close enough."""


def rate_for_latency(
    model: nn.Module,
    example: Tensor,
    target: float,
    *,
    engine: str = "onnxruntime",
    selection: str = "independent",
    streams: float | None = None,
    align: int = 1,
    layout: str = "least",
    repeats: int = 30,
) -> Target:
    """The smallest uniform rate whose compact network is predicted to take at most `target` of the dense one's time.

    Prediction: t(rate) / t(dense) = sum over layers of t(layer at that rate) / sum over layers of t(layer dense),
    single layers being timed on the engine. Then dense and compact are timed side by side; where the outcome is off,
    the prediction is corrected by it and the search repeated. What is returned was measured.

    >>> import asfp, torch
    >>> found = rate_for_latency(
    ...     asfp.create_model("resnet8"), torch.zeros(1, 3, 32, 32), 0.5, engine="torch", repeats=5
    ... )
    >>> found.kind, 0 < found.rate < 1, found.outcome > 0
    ('latency', True, True)
    """
    way = Way(selection, align)
    return ways_to_latency(
        model, example, target, engine=engine, ways=[way], streams=streams, layout=layout, repeats=repeats
    )[0]


def ways_to_latency(
    model: nn.Module,
    example: Tensor,
    target: float,
    *,
    engine: str = "onnxruntime",
    ways: Sequence[Way] = WAYS,
    streams: float | None = None,
    layout: str = "least",
    repeats: int = 30,
    progress: Progress = lambda message, done: None,
) -> list[Target]:
    """`rate_for_latency` for several ways to choose filters, the best first: of those that meet the target the one
    that keeps the most multiply-adds; behind them those that miss it, the fastest first.

    In each round all that are still searched for are timed side by side with the dense network. Ways that the network
    does not allow are left out, unless it allows none.

    >>> import asfp, torch
    >>> found = ways_to_latency(
    ...     asfp.create_model("resnet8"),
    ...     torch.zeros(1, 3, 32, 32),
    ...     0.7,
    ...     engine="torch",
    ...     ways=[Way("independent"), Way("coupled", 16)],
    ...     repeats=5,
    ... )
    >>> sorted((way.selection, way.align) for way in found)
    [('coupled', 16), ('independent', 1)]
    """
    check_share("target_latency", target)
    model, example = as_network(model), as_image(example)
    table = LayerTimes(engine, torch.get_num_threads())
    race = Race(model, example, engine, repeats)
    layers = table.total(uses_of(cutter(model, example, {}, layout)(0), example))
    if not layers:
        raise AsfpError("the network has no convolution or linear layer whose time could be predicted")

    def search_for(way: Way) -> _Search:
        progress(f"predicting {way}", 0.0)
        cut = cutter(model, example, way.options(streams), layout)
        predicted = cache(lambda step: table.total(uses_of(cut(step), example)) / layers)
        search = _Search(way, target, cut, predicted, streams)
        search.next()
        return search

    searches = allowed(ways, search_for)
    for round_ in range(1, ROUNDS + 1):
        racing = [search for search in searches if not search.settled]
        if not racing:
            break
        progress(f"timing {counted(racing)}, round {round_} of at most {ROUNDS}", (round_ - 1) / ROUNDS)
        times = race([search.cut(search.step) for search in racing])
        for search, saved in zip(racing, times, strict=True):
            search.note(saved, engine, round_)
    found = [search.best() for search in searches]
    return sorted(found, key=lambda t: (not t.met, -t.macs if t.met else t.outcome))


@dataclass
class _Search:
    """The smallest rate for one way, as far as it was found."""

    way: Way
    target: float
    cut: Callable[[int], CompactModule]
    predicted: Callable[[int], float]
    streams: float | None
    correction: float = 1.0
    step: int = -1
    settled: bool = False
    tried: dict[int, Target] = field(default_factory=dict)

    def next(self) -> None:
        """The rate that is predicted to meet the target; settled where that was tried."""
        step = smallest(lambda step: self.predicted(step) * self.correction <= self.target)
        self.step = LAST if step is None else step
        self.settled = self.step in self.tried

    def note(self, saved: tuple[float, float, float], engine: str, round_: int) -> None:
        """What was measured, and with it the next rate."""
        middle, low, high = saved
        small = self.cut(self.step)
        self.tried[self.step] = met = Target(
            "latency",
            self.target,
            rate_of(self.step),
            self.way.selection,
            self.way.align,
            small.plan.layout,
            self.predicted(self.step) * self.correction,
            1 - middle,
            macs_share(small),
            engine,
            (1 - high, 1 - low),
            round_,
            self.streams,
        )
        if self.target - SLACK <= met.outcome <= self.target:
            self.settled = True
        else:
            self.correction = met.outcome / self.predicted(self.step) * (1.0 if met.met else 1.01)
            self.next()

    def best(self) -> Target:
        met = [found for found in self.tried.values() if found.met]
        if met:
            return min(met, key=lambda found: found.rate)
        return min(self.tried.values(), key=lambda found: found.outcome)
