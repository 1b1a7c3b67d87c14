"""WHEN: the share of filters to prune after each epoch, as a pure function of the epoch (no torch here)."""

from __future__ import annotations

import math
import numbers
from dataclasses import dataclass
from functools import cached_property

from asfp.errors import AsfpError

MOST_EPOCHS = 2**53
"""Up to here every epoch has a float of its own."""


def check_rate(name: str, value: object) -> float:
    """`value` as a float, when it is a number strictly between 0 and 1.

    >>> check_rate("rate", 0.4)
    0.4
    """
    number = _number(name, value)
    if not 0.0 < number < 1.0:
        raise AsfpError(
            f"{name}={_shown(value)} is not a pruning rate: it must lie strictly between 0 and 1, e.g. {name}=0.4"
        )
    return number


def check_epochs(value: object, name: str = "epochs") -> int:
    """`value` as an int, when it is a whole number of at least 1.

    >>> check_epochs(200)
    200
    """
    if isinstance(value, numbers.Integral) and int(value) > MOST_EPOCHS:
        raise AsfpError(f"{name}={_shown(value)} is more epochs than anyone trains: at most {MOST_EPOCHS}")
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or int(value) < 1:
        raise AsfpError(
            f"{name}={_shown(value)} is not a count of epochs: it must be an int of at least 1, e.g. {name}=200"
        )
    return int(value)


def _number(name: str, value: object) -> float:
    if not isinstance(value, bool) and isinstance(value, numbers.Real) and _is_finite(value):
        return float(value)
    raise AsfpError(f"{name}={_shown(value)} is not a finite number: pass an int or a float, e.g. {name}=0.4")


def _is_finite(value: numbers.Real) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an int too large for a float
        return False


def _shown(value: object) -> str:
    """A value in a message: a huge number by its size or type alone, since Python does not write those out."""
    if isinstance(value, int) and value.bit_length() > 200:
        return f"(an int of {value.bit_length()} bits)"
    try:
        return repr(value)
    except ValueError:  # a fraction of huge ints
        return f"(a {type(value).__name__} of too many digits)"


def _check_start(start: object, goal: float) -> None:
    if not 0.0 <= _number("start", start) <= goal:
        raise AsfpError(
            f"start={_shown(start)} is not allowed with goal={_shown(goal)}: it must lie in 0..goal, e.g. start=0.0"
        )


def _share(epoch: object, epochs: int) -> float:
    """epoch / epochs, when the epoch is a number in 0..epochs."""
    number = _number("epoch", epoch)
    if not 0.0 <= number <= epochs:
        raise AsfpError(
            f"epoch={epoch!r} is outside the schedule: it must lie in 0..{epochs}; "
            "0 is before training, 1 after the first epoch"
        )
    return number / epochs


def _exponential(x: float, t: float) -> float:
    """(1 - exp(-x t)) / (1 - exp(-x)), without overflow for any x; t itself where x = 0."""
    if x == 0.0:
        return t
    if x > 0.0:
        return math.expm1(-x * t) / math.expm1(-x)
    return math.exp(x * (1.0 - t)) * math.expm1(x * t) / math.expm1(x)


@dataclass(frozen=True)
class AsymptoticSchedule:
    """H(epoch) = a exp(-k epoch) + b through (0, start), (d epochs, 3/4 goal) and (epochs, goal): Eq. 7 of the paper.

    With the usual small d the rate rises fast and then flattens out; with d = 3/4 (at start 0) it is a straight line,
    with a larger d it is convex. start = goal is the constant rate of SFP. There is no such curve for
    3/4 goal <= start < goal. H(e) is the rate of the pruning after epoch e, counted from 1; fractions are allowed.

    >>> schedule = AsymptoticSchedule(goal=0.4, epochs=200)
    >>> schedule
    AsymptoticSchedule(goal=0.4, epochs=200, start=0.0, d=0.125)
    >>> [round(schedule(epoch), 4) for epoch in (0, 1, 25, 100, 200)]
    [0.0, 0.0216, 0.3, 0.3984, 0.4]
    >>> round(schedule.a, 6), round(schedule.k, 7), round(schedule.b, 6)
    (-0.400006, 0.0554499, 0.400006)
    """

    goal: float
    epochs: int
    start: float = 0.0
    d: float = 1 / 8

    def __post_init__(self) -> None:
        check_rate("goal", self.goal)
        check_epochs(self.epochs)
        _check_start(self.start, self.goal)
        if not 0.0 < _number("d", self.d) < 1.0:
            raise AsfpError(
                f"d={self.d!r} is not a share of the epochs: it must lie strictly between 0 and 1, e.g. d=1/8"
            )
        if 0.75 * self.goal * (1.0 - 1e-12) <= self.start < self.goal:
            raise AsfpError(
                f"start={self.start!r} leaves no exponential to goal={self.goal!r}: it must be below 3/4 of the goal "
                f"({0.75 * self.goal:.6g}), or equal to the goal for a constant rate; or use LinearSchedule"
            )

    @cached_property
    def _x(self) -> float:
        """k * epochs: the x with (1 - exp(-d x)) / (1 - exp(-x)) = c, which grows with x; found by bisection."""
        if self.start == self.goal:
            return 0.0
        c = (0.75 * self.goal - self.start) / (self.goal - self.start)
        if abs(c - self.d) < 1e-12:
            return 0.0
        near, far = 0.0, math.copysign(1.0, c - self.d)
        while abs(_exponential(far, self.d) - self.d) < abs(c - self.d):
            near, far = far, 2.0 * far
        while (middle := 0.5 * (near + far)) not in (near, far):
            if abs(_exponential(middle, self.d) - self.d) < abs(c - self.d):
                near = middle
            else:
                far = middle
        return far

    @property
    def k(self) -> float:
        """The k of Eq. 7, per epoch: above 0 for a concave curve, below 0 for a convex one, 0 for a straight line."""
        return self._x / self.epochs

    @property
    def a(self) -> float:
        """The a of Eq. 7. Where k = 0 the limit is the line a epoch + b, and a is its slope (0 when start = goal)."""
        rise = self.goal - self.start
        if self._x == 0.0:
            return rise / self.epochs
        return rise / math.expm1(-self._x) if self._x > 0.0 else rise * math.exp(self._x) / -math.expm1(self._x)

    @property
    def b(self) -> float:
        """The b of Eq. 7: what a concave curve tends to. Where k = 0, the line a epoch + b starts here."""
        return self.start if self._x == 0.0 else self.start - self.a

    def __call__(self, epoch: float) -> float:
        """The rate at an epoch in 0..epochs: start at 0 and goal at epochs, both exactly."""
        t = _share(epoch, self.epochs)
        if t == 1.0:
            return self.goal
        return min(self.goal, self.start + (self.goal - self.start) * _exponential(self._x, t))


@dataclass(frozen=True)
class ConstantSchedule:
    """H(epoch) = goal at every epoch: SFP. In the terms of Eq. 7, a = 0, k = 0 and b = goal.

    >>> schedule = ConstantSchedule(0.3)
    >>> schedule(1), schedule(200), schedule.b
    (0.3, 0.3, 0.3)
    """

    goal: float

    def __post_init__(self) -> None:
        check_rate("goal", self.goal)

    @property
    def a(self) -> float:
        """0: nothing decays."""
        return 0.0

    @property
    def k(self) -> float:
        """0: nothing decays."""
        return 0.0

    @property
    def b(self) -> float:
        """The goal."""
        return self.goal

    def __call__(self, epoch: float) -> float:
        """The goal, at any epoch of 0 or later."""
        if _number("epoch", epoch) < 0.0:
            raise AsfpError(f"epoch={epoch!r} is outside the schedule: it must be at least 0, which is before training")
        return self.goal


@dataclass(frozen=True)
class LinearSchedule:
    """H(epoch) = start + (goal - start) epoch / epochs.

    >>> schedule = LinearSchedule(goal=0.4, epochs=200)
    >>> schedule(0), schedule(100), schedule(200)
    (0.0, 0.2, 0.4)
    """

    goal: float
    epochs: int
    start: float = 0.0

    def __post_init__(self) -> None:
        check_rate("goal", self.goal)
        check_epochs(self.epochs)
        _check_start(self.start, self.goal)

    def __call__(self, epoch: float) -> float:
        """The rate at an epoch in 0..epochs."""
        t = _share(epoch, self.epochs)
        return self.goal if t == 1.0 else min(self.goal, self.start + (self.goal - self.start) * t)


@dataclass(frozen=True)
class CubicSchedule:
    """H(epoch) = goal + (start - goal) (1 - epoch / epochs)^3: Zhu and Gupta, "To prune, or not to prune" (2017).

    >>> schedule = CubicSchedule(goal=0.4, epochs=200)
    >>> [round(schedule(epoch), 4) for epoch in (0, 50, 100, 200)]
    [0.0, 0.2313, 0.35, 0.4]
    """

    goal: float
    epochs: int
    start: float = 0.0

    def __post_init__(self) -> None:
        check_rate("goal", self.goal)
        check_epochs(self.epochs)
        _check_start(self.start, self.goal)

    def __call__(self, epoch: float) -> float:
        """The rate at an epoch in 0..epochs."""
        t = _share(epoch, self.epochs)
        return self.start if t == 0.0 else max(self.start, self.goal + (self.start - self.goal) * (1.0 - t) ** 3)
