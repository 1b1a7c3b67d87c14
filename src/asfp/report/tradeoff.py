"""Accuracy against what it costs: multiply-adds (Fig. 5), measured latency; and ablations over one setting (Fig. 7)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from asfp.report.chart import Chart, Dots, Line, Panel
from asfp.report.groups import METHODS, Group, matching_dense
from asfp.report.paper import printed
from asfp.report.values import dig, mean_and_deviation, number

ABLATED = ("interval", "d", "start", "criterion", "schedule", "selection", "streams", "align", "zero_maps")
"""Settings of `pruning` whose effect is drawn where runs differ in one of them alone."""


def tradeoff_charts(groups: Sequence[Group]) -> list[Chart]:
    """Those that have points.

    >>> tradeoff_charts([])
    []
    """
    found = [_against_macs(groups), _against_latency(groups), _ablations(groups)]
    return [chart for chart in found if chart.panels]


def _networks(groups: Sequence[Group]) -> dict[str, list[Group]]:
    found: dict[str, list[Group]] = {}
    for group in groups:
        found.setdefault(group.network, []).append(group)
    return found


def _against_macs(groups: Sequence[Group]) -> Chart:
    panels, words = [], []
    for network, members in _networks(groups).items():
        series: list[Line | Dots] = []
        for group in members:
            accuracy, saved = group.values("accuracy"), group.mean("macs_saved")
            if not accuracy or saved is None:
                continue
            mean, deviation = mean_and_deviation([100 * a for a in accuracy])
            seeds = f"{len(accuracy)} seeds" if len(accuracy) > 1 else "1 seed"
            text = f"{group.label}: {mean:.2f} % at {100 * saved:.1f} % fewer MACs ({seeds})"
            words.append(text)
            error = [deviation] if len(accuracy) > 1 else None
            series.append(Dots(group.label, [100 * saved], [mean], [text], group.colour, error=error))
        if series:
            panels.append(Panel(network, "multiply-adds saved, %", "test accuracy, %", (*series, *_paper(members[0]))))
    hollow = any(isinstance(s, Dots) and s.hollow for p in panels for s in p.series)
    note = "Hollow: printed in the paper, by its own count of multiply-adds. " if hollow else ""
    note += "Bars: one standard deviation over the seeds." if any(len(g.runs) > 1 for g in groups) else ""
    alt = f"Test accuracy against the multiply-adds saved. {'; '.join(words)}."
    return Chart("macs", "Accuracy against multiply-adds", alt, tuple(panels), note)


def _paper(group: Group) -> list[Dots]:
    config = group.runs[0].config
    images = group.runs[0].test_images
    rows = printed(
        str(dig(config, "data", "name")), str(dig(config, "model", "name")), 1000 if images == 50_000 else None
    )
    found = []
    for pretrained in (False, True):
        mine = [row for row in rows if row.pretrained is pretrained]
        if mine:
            how = "from trained weights" if pretrained else "from scratch"
            words = [f"paper: {METHODS[r.method]}, {how}, {100 * r.rate:.0f} %: {r.accuracy:.2f} %" for r in mine]
            x, y, error = [r.cut for r in mine], [r.accuracy for r in mine], [r.deviation for r in mine]
            found.append(Dots(f"paper, {how}", x, y, words, -1, hollow=True, error=error))
    return found


def _against_latency(groups: Sequence[Group]) -> Chart:
    """A panel a network and setting: each pruned run, and the dense network as it was timed in turns with it."""
    found: dict[tuple[str, str], list[Dots]] = {}
    words = []
    for group in [g for g in groups if not g.dense]:
        dense = matching_dense(group, groups)
        for run in group.runs:
            for timing in run.timings:
                compact = timing.saved_percent is not None
                accuracy = run.accuracy if compact else dense.mean("accuracy") if dense is not None else None
                if accuracy is None:
                    continue
                who, colour = (run.label, group.colour) if compact else (f"dense beside {run.label}", 0)
                text = f"{who}: {100 * accuracy:.2f} % in {timing.latency_ms:.3g} ms"
                words.append(f"{text} ({timing.setting})")
                dots = Dots(group.label if compact else "dense", [timing.latency_ms], [100 * accuracy], [text], colour)
                found.setdefault((group.network, timing.setting), []).append(dots)
    panels = tuple(
        Panel(f"{network}: {setting}", "latency, ms", "test accuracy, %", tuple(dots))
        for (network, setting), dots in found.items()
    )
    alt = f"Test accuracy against measured latency. {'; '.join(words)}."
    note = "Dense and pruned were timed in turns. Points of different runs may come from different days and machines."
    return Chart("latency", "Accuracy against latency", alt, panels, note)


def _ablations(groups: Sequence[Group]) -> Chart:
    panels = []
    words = []
    for key in ABLATED:
        clusters: dict[str, list[Group]] = {}
        for group in groups:
            if f"pruning.{key}" in group.settings and not group.dense and group.values("accuracy"):
                rest = {k: v for k, v in group.settings.items() if k != f"pruning.{key}"}
                clusters.setdefault(json.dumps(rest, sort_keys=True), []).append(group)
        for members in clusters.values():
            if len(members) > 1:
                panels.append(_ablation(key, members))
                words += [f"{key} {_setting(g, key)}: {s.y[0]:.2f} %" for g, s in _points(key, members)]
    alt = f"Accuracy of runs that differ in one setting alone. {'; '.join(words)}."
    return Chart(
        "ablations", "Ablations", alt, tuple(panels), "Runs that differ in this setting alone (the paper's Fig. 7)."
    )


def _setting(group: Group, key: str) -> Any:
    """What was set; streams without a rate of their own have that of all layers."""
    value = group.settings[f"pruning.{key}"]
    return group.settings.get("pruning.rate", value) if key == "streams" and value == -1.0 else value


def _points(key: str, members: Sequence[Group]) -> list[tuple[Group, Dots]]:
    ordered = sorted(members, key=lambda g: (number(_setting(g, key)) or 0, str(_setting(g, key))))
    numeric = all(number(_setting(g, key)) is not None for g in ordered)
    points = []
    for i, group in enumerate(ordered):
        mean, deviation = mean_and_deviation([100 * a for a in group.values("accuracy")])
        at = float(_setting(group, key)) if numeric else float(i)
        text = f"{key} {_setting(group, key)}: {mean:.2f} %, {len(group.runs)} seeds"
        error = [deviation] if len(group.runs) > 1 else None
        points.append((group, Dots(group.label, [at], [mean], [text], group.colour, error=error)))
    return points


def _ablation(key: str, members: Sequence[Group]) -> Panel:
    points = _points(key, members)
    numeric = all(number(_setting(g, key)) is not None for g, _ in points)
    categories = () if numeric else tuple(str(_setting(g, key)) for g, _ in points)
    way = Line("", [d.x[0] for _, d in points], [d.y[0] for _, d in points], -1, "dot")
    dots = tuple(d for _, d in points)
    title = f"{members[0].network}: {key}"
    return Panel(title, f"pruning.{key}", "test accuracy, %", (way, *dots) if numeric else dots, categories=categories)
