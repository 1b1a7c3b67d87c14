"""A target instead of a rate: the smallest rate at which a network has few enough MACs, or is fast enough."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from asfp.compaction import CompactModule, compact
from asfp.errors import AsfpError
from asfp.pruner import SoftPruner
from asfp.targets.layers import LayerTimes, uses_of
from asfp.trace import copy_of

__all__ = ["Target", "rate_for_latency", "rate_for_macs"]

STEP = 0.005
"""Rates are looked for in multiples of this."""
LAST = 190
"""The highest of them: 0.95."""
COARSE = 10
"""In steps of so many, where the last rate does not meet a target."""
ROUNDS = 3
"""How often a prediction is corrected at most."""
SLACK = 0.03
"""An outcome within this share below the target is close enough."""


@dataclass(frozen=True)
class Target:
    """What was asked for, the rate that meets it, and what came out; shares are of the dense network."""

    kind: str
    """macs or latency."""
    target: float
    rate: float
    selection: str
    align: int
    layout: str
    predicted: float
    outcome: float
    """Counted for MACs; measured, dense and compact side by side, for latency."""
    macs: float
    engine: str | None = None
    interval: tuple[float, float] | None = None
    """95 % interval of the measured outcome."""
    rounds: int = 1
    streams: float | None = None
    """The rate of layers that write a residual stream, where it is another."""

    @property
    def met(self) -> bool:
        """Whether the outcome is at most the target."""
        return self.outcome <= self.target

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "met": self.met}

    def __str__(self) -> str:
        how = f"rate {self.rate:g}" + (f", streams {self.streams:g}" if self.streams is not None else "")
        how += f", {self.selection}" + (f", align {self.align}" if self.align > 1 else "")
        if self.kind == "macs":
            return (
                f"{how}, layout {self.layout}: {100 * self.outcome:.2f} % of the MACs (asked {100 * self.target:g} %)"
            )
        low, high = self.interval or (self.outcome, self.outcome)
        return (
            f"{how}, layout {self.layout}: {100 * self.outcome:.1f} % of the time on {self.engine} "
            f"({100 * low:.1f} to {100 * high:.1f}; predicted {100 * self.predicted:.1f}, "
            f"asked {100 * self.target:g}), {100 * self.macs:.2f} % of the MACs"
            + ("" if self.met else "; the target is missed")
        )


def rate_for_macs(
    model: nn.Module,
    example: Tensor,
    target: float,
    *,
    selection: str = "independent",
    streams: float | None = None,
    align: int = 1,
    layout: str = "least",
) -> Target:
    """The smallest uniform rate whose compact network has at most `target` of the dense one's MACs.

    With `streams` it is that of the other layers. Counted on the real compact network, pruned by the weights as they
    are; the model is not changed.

    >>> import asfp
    >>> found = rate_for_macs(asfp.create_model("resnet8"), torch.zeros(1, 3, 32, 32), 0.5)
    >>> found.outcome <= 0.5, 0.3 < found.rate < 0.5
    (True, True)
    """
    _check("target_macs", target)
    cut = _cutter(_network(model), example, {"selection": selection, "streams": streams, "align": align}, layout)
    rate = _smallest(lambda step: _macs_share(cut(step)) <= target, rising=layout == "auto")
    if rate is None:
        least = min(_macs_share(cut(step)) for step in (*range(0, LAST, COARSE), LAST))
        raise AsfpError(
            f"target_macs={target:g} cannot be reached: up to a rate of {STEP * LAST:g} at least {least:.3f} of the "
            f"MACs are left; ask for more"
            + (f", or for a higher rate than streams={streams:g}" if streams is not None else "")
            + ("" if selection == "coupled" or streams == 0.0 else ", or try selection='coupled'")
        )
    share = _macs_share(cut(rate))
    return Target("macs", target, _rate(rate), selection, align, layout, share, share, share, streams=streams)


def rate_for_latency(
    model: nn.Module,
    example: Tensor,
    target: float,
    *,
    engine: str = "onnxruntime",
    selection: str = "independent",
    streams: float | None = None,
    align: int = 1,
    layout: str = "auto",
    repeats: int = 30,
) -> Target:
    """The smallest uniform rate whose compact network is predicted to take at most `target` of the dense one's time.

    Prediction: t(rate) / t(dense) = sum over layers of t(layer at that rate) / sum over layers of t(layer dense),
    single layers being timed on the engine. Then dense and compact are timed side by side; where the outcome is off,
    the prediction is corrected by it and the search repeated. What is returned was measured.

    >>> import asfp
    >>> found = rate_for_latency(
    ...     asfp.create_model("resnet8"), torch.zeros(1, 3, 32, 32), 0.5, engine="torch", repeats=5
    ... )
    >>> found.kind, 0 < found.rate < 1, found.outcome > 0
    ('latency', True, True)
    """
    from asfp.bench import Setting, bench_models

    _check("target_latency", target)
    model, example = _network(model), _image(example)
    threads = torch.get_num_threads()
    table = LayerTimes(engine, threads)
    setting = Setting(engine, batch=len(example), threads=threads)
    setting.check()
    cut = _cutter(model, example, {"selection": selection, "streams": streams, "align": align}, layout)
    dense = copy_of(model).eval()
    layers = table.total(uses_of(dense, example))

    @cache
    def predicted(step: int) -> float:
        return table.total(uses_of(cut(step), example)) / layers

    correction, tried = 1.0, dict[int, Target]()
    for round_ in range(1, ROUNDS + 1):
        step = _smallest(lambda step: predicted(step) * correction <= target)  # noqa: B023  (used at once)
        step = LAST if step is None else step
        if step in tried:
            break
        small = cut(step)
        rows = bench_models({"dense": dense, "compact": small}, example, [setting], repeats=repeats).rows
        assert rows[1].time_saved is not None
        saved, low, high = rows[1].time_saved
        tried[step] = Target(
            "latency",
            target,
            _rate(step),
            selection,
            align,
            small.plan.layout,
            predicted(step) * correction,
            1 - saved,
            _macs_share(small),
            engine,
            (1 - high, 1 - low),
            round_,
            streams,
        )
        if target - SLACK <= tried[step].outcome <= target:
            break
        correction = (1 - saved) / predicted(step) * (1.0 if tried[step].met else 1.01)
    met = [found for found in tried.values() if found.met]
    return min(met, key=lambda found: found.rate) if met else min(tried.values(), key=lambda found: found.outcome)


def _check(name: str, target: float) -> None:
    if not isinstance(target, (int, float)) or not 0.0 < target < 1.0:
        raise AsfpError(f"{name}={target!r} is not a share: it must lie between 0 and 1, e.g. {name}=0.5 for half")


def _network(model: Any) -> nn.Module:
    if not isinstance(model, nn.Module):
        raise AsfpError(f"expected a torch.nn.Module, got {type(model).__name__}: pass the model itself")
    return model


def _image(example: Any) -> Tensor:
    """The example as one tensor, which may come as a tuple of one."""
    if isinstance(example, (tuple, list)) and len(example) == 1:
        example = example[0]
    if not isinstance(example, Tensor):
        raise AsfpError(f"latencies are predicted for networks with one tensor as input, got {type(example).__name__}")
    return example


def _rate(step: int) -> float:
    return round(STEP * step, 6)


def _cutter(
    model: nn.Module, example: Tensor, options: Mapping[str, Any], layout: str
) -> Callable[[int], CompactModule]:
    """The compact network at a multiple of STEP."""

    @cache
    def cut(step: int) -> CompactModule:
        twin = copy_of(model).eval()
        if step:
            SoftPruner(twin, _rate(step), epochs=1, example_inputs=example, **options).step(1)
        return compact(twin, example, layout=layout, check=False).eval()

    return cut


def _macs_share(small: CompactModule) -> float:
    return small.plan.macs_after / small.plan.macs_before


def _smallest(good: Callable[[int], bool], rising: bool = False) -> int | None:
    """The first of 0 ... LAST that is good, where all after the first good one are.

    With zero filters left in, more pruning may leave more. Then the first in steps of COARSE is looked for, and those
    in front of it; also where the last one is not good.

    >>> (
    ...     _smallest(lambda step: 37 <= step < 180),
    ...     _smallest(lambda step: step in range(37, 60) or step > 180, rising=True),
    ... )
    (37, 37)
    """
    low, high = -1, LAST
    if rising or not good(LAST):
        found = next((step for step in (*range(0, LAST, COARSE), LAST) if good(step)), None)
        if found is None:
            return None
        low, high = max(-1, found - COARSE), found
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if good(middle) else (middle, high)
    return high
