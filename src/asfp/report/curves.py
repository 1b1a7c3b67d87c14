"""Curves over the epochs: loss, learning rate, accuracy around each pruning and its gap (Fig. 6), schedule (Fig. 4)."""

from __future__ import annotations

from collections.abc import Sequence

from asfp.errors import AsfpError
from asfp.report.chart import Chart, Dots, Line, Panel
from asfp.report.groups import Group
from asfp.report.values import Column, dig, integer, number
from asfp.schedule import AsymptoticSchedule

DETAILED = 8
"""Groups that get a panel of their own."""


def curve_charts(groups: Sequence[Group]) -> list[Chart]:
    """All curves that the runs' metrics allow.

    >>> curve_charts([])
    []
    """
    found = [_training(groups), _accuracy(groups), _around(groups), _schedule(groups), _regrowth(groups)]
    return [chart for chart in found if chart is not None and chart.panels]


def line(group: Group, column: str, factor: float = 1.0, style: str = "solid", name: str = "") -> Line | None:
    """A column of a group, times a factor, with a band of one standard deviation where there are several seeds."""
    curve = group.curve(column)
    if curve is None:
        return None
    y, deviation = ([None if v is None else factor * v for v in values] for values in curve)
    low = high = None
    if len(group.runs) > 1:
        low, high = _shift(y, deviation, -1), _shift(y, deviation, 1)
    return Line(name or group.label, group.epochs, y, group.colour, style, low, high)


def _shift(y: Column, deviation: Column, sign: int) -> Column:
    return [None if a is None or b is None else a + sign * b for a, b in zip(y, deviation, strict=True)]


def _panel(title: str, y_title: str, lines: Sequence[Line | None], log_y: bool = False) -> list[Panel]:
    drawn = tuple(x for x in lines if x is not None and any(v is not None for v in x.y))
    return [Panel(title, "epoch", y_title, drawn, log_y)] if drawn else []


def _training(groups: Sequence[Group]) -> Chart:
    panels = _panel("Training loss", "loss", [line(g, "loss") for g in groups])
    panels += _panel("Learning rate", "learning rate", [line(g, "lr") for g in groups], log_y=True)
    ends = [f"{g.label} {v:.3g}" for g in groups if (v := _last(g, "loss")) is not None]
    return Chart(
        "training",
        "Loss and learning rate",
        f"Training loss over the epochs; at the end: {'; '.join(ends)}.",
        tuple(panels),
    )


def _last(group: Group, column: str) -> float | None:
    curve = group.curve(column)
    return next((v for v in reversed(curve[0]) if v is not None), None) if curve else None


def _accuracy(groups: Sequence[Group]) -> Chart:
    lines = [line(g, "accuracy_after", 100) for g in groups]
    panels = _panel("After each pruning", "test accuracy, %", lines)
    late = [_late(x) for x in lines if x is not None and len(x.x) >= 12]
    panels += _panel("The same, last quarter", "test accuracy, %", late)
    panels += _panel(
        "Lost or won by each pruning", "after minus before, points", [_gap(g) for g in groups if not g.dense]
    )
    ends = [f"{g.label} {100 * v:.2f} %" for g in groups if (v := _last(g, "accuracy_after")) is not None]
    alt = f"Test accuracy after each pruning over the epochs; at the end: {'; '.join(ends)}."
    note = "Accuracy is that of the network with its zeros in, after the pruning of the epoch."
    return Chart("accuracy", "Accuracy", alt, tuple(panels), note)


def _late(x: Line) -> Line:
    start = 3 * len(x.x) // 4
    low, high = (None if c is None else c[start:] for c in (x.low, x.high))
    return Line(x.name, x.x[start:], x.y[start:], x.colour, x.style, low, high)


def _gap(group: Group) -> Line | None:
    before, after = group.curve("accuracy_before"), group.curve("accuracy_after")
    if before is None or after is None:
        return None
    y: Column = [None if a is None or b is None else 100 * (a - b) for b, a in zip(before[0], after[0], strict=True)]
    return Line(group.label, group.epochs, y, group.colour)


def _around(groups: Sequence[Group]) -> Chart:
    """Fig. 6: a panel a group, before, after and gap."""
    panels: list[Panel] = []
    for group in [g for g in groups if not g.dense][:DETAILED]:
        before = line(group, "accuracy_before", 100, name="before pruning")
        after = line(group, "accuracy_after", 100, "dash", name="after pruning")
        gap = _gap(group)
        if before is None or after is None or gap is None:
            continue
        filled = Line("gap, after minus before", gap.x, gap.y, -1, fill=True)
        panels += _panel(group.label, "test accuracy, %", [before, after, filled])
    alt = "For each pruned run: accuracy before each pruning, after it, and the gap between them, over the epochs."
    note = "Solid: before the pruning of an epoch. Dashed: after it. Filled: the gap (the paper's Fig. 6)."
    return Chart("around", "Around each pruning", alt, tuple(panels), note)


def _schedule(groups: Sequence[Group]) -> Chart:
    series: list[Line | Dots] = []
    points = []
    for group in groups:
        rates = line(group, "rate", 100)
        if group.dense or rates is None:
            continue
        planned = _asymptotic(group)
        series.append(Line(rates.name, rates.x, rates.y, rates.colour))
        if planned is not None:
            x = [0.0, planned.d * planned.epochs, float(planned.epochs)]
            y = [100 * planned.start, 75 * planned.goal, 100 * planned.goal]
            words = ["start", "3/4 of the goal at D x epochs", "goal"]
            series.append(Dots(f"{group.label}: three points", x, y, words, group.colour))
            points.append(
                f"{group.label} through ({x[0]:g}, {y[0]:g} %), ({x[1]:g}, {y[1]:g} %), ({x[2]:g}, {y[2]:g} %)"
            )
    panels = (
        (Panel("Share of the filters that is zeroed", "epoch", "pruning rate, %", tuple(series)),) if series else ()
    )
    alt = f"The pruning rate after each epoch. {'; '.join(points)}."
    note = "Line: the rate of each pruning. Dots: the three points that define the curve (the paper's Fig. 4)."
    return Chart("schedule", "Schedule", alt, panels, note if points else "")


def _asymptotic(group: Group) -> AsymptoticSchedule | None:
    pruning = dig(group.runs[0].config, "pruning")
    goal, epochs = number(dig(pruning, "rate")), integer(dig(group.runs[0].config, "epochs"))
    kind = dig(pruning, "schedule")
    if not (kind == "asymptotic" or (kind == "auto" and group.method == "asfp")) or goal is None or epochs is None:
        return None
    start, d = number(dig(pruning, "start")), number(dig(pruning, "d"))
    try:
        return AsymptoticSchedule(goal, epochs, 0.0 if start is None else start, 0.125 if d is None else d)
    except AsfpError:
        return None


def _regrowth(groups: Sequence[Group]) -> Chart:
    pruned = [g for g in groups if not g.dense]
    panels = _panel(
        "Non-zero again one epoch later", "share of the zeroed, %", [line(g, "regrown", 100) for g in pruned]
    )
    back = [line(g, "returned", 100) for g in pruned]
    panels += _panel("Kept by the next pruning", "share of the zeroed, %", back)
    ends = [f"{g.label} {100 * v:.1f} %" for g in pruned if (v := _last(g, "regrown")) is not None]
    alt = f"The share of zeroed filters that are not zero one epoch later; at the end: {'; '.join(ends)}."
    note = "Zeroed filters train on. One panel: how many moved away from zero. The other: how many came back to stay."
    return Chart("regrowth", "Do filters come back?", alt, tuple(panels), note if len(panels) > 1 else "")
