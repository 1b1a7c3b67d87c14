"""What was asked for, what meets it, and the search for the smallest rate that does."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

from torch import Tensor, nn

from asfp.compaction import CompactModule, compact
from asfp.errors import AsfpError
from asfp.pruner import SoftPruner
from asfp.trace import copy_of

STEP = 0.005
"""Rates are looked for in multiples of this."""
LAST = 190
"""The highest of them: 0.95."""
COARSE = 10
"""In steps of so many, where the last rate does not meet a target."""


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
    time: float | None = None
    """Measured for MACs, too, where ways were compared; `interval` is its."""

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
        low, high = self.interval or (self.outcome, self.outcome)
        if self.kind == "macs":
            text = (
                f"{how}, layout {self.layout}: {100 * self.outcome:.2f} % of the MACs (asked {100 * self.target:g} %)"
            )
            if self.time is None:
                return text
            return f"{text}, {100 * self.time:.1f} % of the time on {self.engine} ({100 * low:.1f} to {100 * high:.1f})"
        return (
            f"{how}, layout {self.layout}: {100 * self.outcome:.1f} % of the time on {self.engine} "
            f"({100 * low:.1f} to {100 * high:.1f}; predicted {100 * self.predicted:.1f}, "
            f"asked {100 * self.target:g}), {100 * self.macs:.2f} % of the MACs"
            + ("" if self.met else "; the target is missed")
        )


def check_share(name: str, target: float) -> None:
    if not isinstance(target, (int, float)) or not 0.0 < target < 1.0:
        raise AsfpError(f"{name}={target!r} is not a share: it must lie between 0 and 1, e.g. {name}=0.5 for half")


def as_network(model: Any) -> nn.Module:
    if not isinstance(model, nn.Module):
        raise AsfpError(f"expected a torch.nn.Module, got {type(model).__name__}: pass the model itself")
    return model


def as_image(example: Any) -> Tensor:
    """The example as one tensor, which may come as a tuple of one."""
    if isinstance(example, (tuple, list)) and len(example) == 1:
        example = example[0]
    if not isinstance(example, Tensor):
        raise AsfpError(f"latencies are predicted for networks with one tensor as input, got {type(example).__name__}")
    if not example.ndim or not len(example):
        raise AsfpError(
            f"the example has no sample in it (shape {tuple(example.shape)}): give torch.zeros(1, 3, 32, 32)"
        )
    return example


def rate_of(step: int) -> float:
    return round(STEP * step, 6)


def cutter(
    model: nn.Module, example: Tensor, options: Mapping[str, Any], layout: str
) -> Callable[[int], CompactModule]:
    """The compact network at a multiple of STEP; only the last one is kept."""

    @lru_cache(maxsize=1)
    def cut(step: int) -> CompactModule:
        twin = copy_of(model).eval()
        if step:
            SoftPruner(twin, rate_of(step), epochs=1, example_inputs=example, **options).step(1)
        return compact(twin, example, layout=layout, check=False).eval()

    return cut


def macs_share(small: CompactModule) -> float:
    return small.plan.macs_after / small.plan.macs_before


def smallest(good: Callable[[int], bool], rising: bool = False) -> int | None:
    """The first of 0 ... LAST that is good, where all after the first good one are.

    With zero filters left in, more pruning may leave more. Then the first in steps of COARSE is looked for, and those
    in front of it; also where the last one is not good.

    >>> (
    ...     smallest(lambda step: 37 <= step < 180),
    ...     smallest(lambda step: step in range(37, 60) or step > 180, rising=True),
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
