"""The figures as pictures: PNG and SVG, ours beside what the paper gives in numbers."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from asfp.reproduce.definition import Row
from asfp.reproduce.plan import Plan, Planned
from asfp.reproduce.rate import EPOCHS, GOAL, D, schedule
from asfp.reproduce.selection import latencies
from asfp.reproduce.show import accuracies, gap_of

COLOURS = {"dense": "#777777", "SFP": "#c8553d", "ASFP": "#2a6f97", "hard": "#8a6d3b"}
SELECTIONS = {"dense": "#777777", "independent": "#2a6f97", "nested": "#8a6d3b", "coupled": "#c8553d"}
EMPTY = "no run recorded yet"
BESIDE = 0.4
"""By how much SFP is drawn to the left and ASFP to the right of the multiply-adds that they share."""

Lines = Sequence[tuple[Row, Sequence[Planned]]]


def draw(name: str, kind: str, plan: Plan | None, folder: Path) -> list[Path]:
    """Write folder/NAME.png and folder/NAME.svg and return their paths.

    >>> import tempfile
    >>> [path.name for path in draw("fig-rate", "rate", None, Path(tempfile.mkdtemp()))]
    ['fig-rate.png', 'fig-rate.svg']
    """
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{name}.png", folder / f"{name}.svg"]
    with rc_context({"svg.hashsalt": "asfp", "svg.fonttype": "none"}):
        figure = Figure(facecolor="white", layout="constrained")
        FigureCanvasAgg(figure)
        PICTURES[kind](figure, plan)
        for path in paths:
            metadata: dict[str, Any] = {"Date": None} if path.suffix == ".svg" else {}
            figure.savefig(path, dpi=150, metadata=metadata)
    return paths


def missing(kind: str, plan: Plan) -> str:
    """Why a picture of the plan would be empty, and what to run; "" where there is something to draw.

    >>> from asfp.reproduce import DEFINITIONS
    >>> missing("gap", Plan(DEFINITIONS["fig-gap"], (), (), {}))
    'nothing is recorded yet for fig-gap, so there is no picture: run it first, asfp reproduce fig-gap'
    """
    name, recorded = plan.definition.name, [row.run.label for row, runs in plan.rows if accuracies(runs)]
    if not recorded:
        return f"nothing is recorded yet for {name}, so there is no picture: run it first, asfp reproduce {name}"
    timed = {label for device in ("cpu", "cuda") for label in latencies(plan.results, device)}
    if kind == "latency" and timed.isdisjoint(recorded):
        return f"no time is measured yet of the runs of {name}, so there is no picture: python benchmarks/latency.py"
    return ""


def _rate(figure: Any, plan: Plan | None) -> None:
    figure.set_size_inches(6, 3.8)
    axes, curve = _axes(figure.subplots()), schedule()
    epochs = [EPOCHS * i / 400 for i in range(401)]
    axes.plot(epochs, [100 * curve(epoch) for epoch in epochs], color=COLOURS["ASFP"], linewidth=2, label="ASFP, Eq. 7")
    axes.axhline(100 * GOAL, color=COLOURS["SFP"], linewidth=1.2, linestyle="--", label="SFP")
    points = ((0, 0.0), (D * EPOCHS, 75 * GOAL), (EPOCHS, 100 * GOAL))
    axes.plot(*zip(*points, strict=True), "o", color=COLOURS["ASFP"], markersize=7, label="the three points given")
    axes.set(xlabel="epoch", ylabel="filters pruned, %", ylim=(-1, 100 * GOAL * 1.12), title=f"goal {100 * GOAL:g} %")
    axes.legend(frameon=False, loc="lower right")


def _flops(figure: Any, plan: Plan | None) -> None:
    assert plan is not None
    lines = [line for line in plan.rows if line[0].cells[1] != "dense"]
    panels = [
        (key, list(group)) for key, group in groupby(lines, key=lambda line: (line[0].cells[0], line[0].cells[2]))
    ]
    for axes, ((network, start), group) in zip(_grid(figure, len(panels)), panels, strict=True):
        _axes(axes)
        for method in ("SFP", "ASFP"):
            own = [line for line in group if line[0].cells[1] == method]
            beside = {"SFP": -BESIDE, "ASFP": BESIDE}[method]
            _series(axes, method, [((row.cut or 0.0) + beside, accuracies(runs)) for row, runs in own])
            paper = [((row.cut or 0.0) + beside, row.paper.mean) for row, _ in own if row.paper is not None]
            axes.plot(
                [cut for cut, _ in paper], [mean for _, mean in paper],
                linestyle=":", marker="s", markerfacecolor="white", color=COLOURS[method], label=f"{method}, paper",
            )  # fmt: skip
        dense = accuracies(plan.dense[group[0][0].dense.label]) if group[0][0].dense is not None else []
        if dense:
            axes.axhline(statistics.fmean(dense), color=COLOURS["dense"], linestyle="--", label="dense, ours")
        empty = "" if any(accuracies(runs) for _, runs in group) else f": {EMPTY}"
        cuts = [row.cut or 0.0 for row, _ in group]
        axes.set(xlabel="MACs saved by the paper's count, %", ylabel="accuracy, %", title=f"{network}, {start}{empty}")
        axes.set_xlim(min(cuts) - 5, max(cuts) + 5)
        _a_point_high(axes)
        axes.legend(frameon=False, loc="best", fontsize=8)


def _gap(figure: Any, plan: Plan | None) -> None:
    """One panel for each row, of its first recorded seed, all with the same axes."""
    assert plan is not None
    lines = [
        (row, run, run.record) for row, runs in plan.rows for run in [r for r in runs if r.record][:1] if run.record
    ]
    gaps = [gap_of(record) for _, _, record in lines]
    bottom, last = min(-5.0, *(-max(gap) - 2 for gap in gaps)), max(map(len, gaps))
    for axes, (row, run, record), gap in zip(_grid(figure, len(lines)), lines, gaps, strict=True):
        epochs = range(1, len(gap) + 1)
        before, after = ([100 * a for a in record["epochs"][f"accuracy_{k}"]] for k in ("before", "after"))
        _axes(axes).plot(epochs, before, color=COLOURS["ASFP"], linewidth=1.2, label="before pruning")
        axes.plot(epochs, after, color=COLOURS["SFP"], linewidth=1.0, linestyle="--", label="after pruning")
        axes.plot(epochs, [-points for points in gap], color="black", linewidth=0.9, label="difference")
        title = ", ".join((*row.cells, f"seed {run.seed}"))
        axes.set(xlabel="epoch", ylabel="accuracy, %", ylim=(bottom, 100), xlim=(1, last + 1), title=title)
        axes.legend(frameon=False, loc="center right")


def _sweep(figure: Any, plan: Plan | None) -> None:
    """Accuracy over what the last cell says: an interval, or 1/d."""
    assert plan is not None
    figure.set_size_inches(6.4, 4.2)
    axes, head = _axes(figure.subplots()), plan.definition.heads[-1]
    parts = head == "d"  # drawn over 1/d
    places = sorted({_place(row) for row, _ in plan.rows})
    by_start = groupby(plan.rows, key=lambda line: line[0].cells[1])
    looks = ((COLOURS["ASFP"], -0.07), (COLOURS["hard"], 0.07)) if parts else ((COLOURS["ASFP"], 0.0),)
    for (start, group), (colour, beside) in zip(by_start, looks, strict=False):
        _series(axes, start, [(_place(row) + beside, accuracies(runs)) for row, runs in group], colour)
    axes.legend(frameon=False)
    axes.set_xticks(places, [f"1/{place}" if parts else f"{place}" for place in places])
    axes.set_xlim(places[0] - 0.5, places[-1] + 0.5)
    _a_point_high(axes)
    title = f"{plan.rows[0][0].cells[0]}, 40 % pruned"
    axes.set(xlabel=head if parts else f"{head}, epochs", ylabel="accuracy, %", title=title)


def _place(row: Row) -> int:
    """Where a row of a sweep stands: 8 for an interval of 8 epochs, and for a d of 1/8."""
    return int(row.cells[-1].removeprefix("1/"))


def _a_point_high(axes: Any) -> None:
    """A single accuracy would be shown to a hundredth of a point."""
    bottom, top = axes.get_ylim()
    if top - bottom < 1:
        axes.set_ylim((bottom + top - 1) / 2, (bottom + top + 1) / 2)


def _latency(figure: Any, plan: Plan | None) -> None:
    """Accuracy over the compact models' time, one panel for each device that was measured."""
    assert plan is not None
    recorded = {row.run.label for row, runs in plan.rows if accuracies(runs)}
    found = {device: latencies(plan.results, device) for device in ("cpu", "cuda")}
    devices = {device: times for device, times in found.items() if not recorded.isdisjoint(times)}
    for axes, (device, times) in zip(_grid(figure, len(devices)), devices.items(), strict=True):
        _axes(axes)
        for row, runs in plan.rows:
            time, values = times.get(row.run.label), accuracies(runs)
            if time is not None and values:
                spread = statistics.stdev(values) if len(values) > 1 else 0.0
                _, selection, n, rate, streams = row.cells
                align = "" if n in ("-", "1") else f", align {n}"
                narrow = "" if streams == rate else f", {streams} of streams"
                axes.errorbar(
                    [time.ms], [statistics.fmean(values)], [spread], marker="s" if align else "D" if narrow else "o",
                    capsize=3, linestyle="none", color=SELECTIONS[selection],
                    label=f"{selection}{align}{narrow} (n = {len(values)})",
                )  # fmt: skip
        batch = next(iter(times.values())).batch
        most = max(max(time.ms, time.dense_ms) for time in times.values())
        axes.set(xlabel=f"ms for a batch of {batch}", ylabel="accuracy, %", xlim=(0, 1.08 * most))
        axes.set_title(f"{plan.rows[0][0].cells[0]}, {'CPU' if device == 'cpu' else 'GPU'}")
        _a_point_high(axes)
        axes.legend(frameon=False, loc="upper left", fontsize=8)  # where a time near zero would be


def _series(axes: Any, label: str, points: Sequence[tuple[float, list[float]]], colour: str = "") -> None:
    found = sorted((x, values) for x, values in points if values)
    if found:
        means = [statistics.fmean(values) for _, values in found]
        spread = [statistics.stdev(values) if len(values) > 1 else 0.0 for _, values in found]
        n = sorted({len(values) for _, values in found})
        axes.errorbar(
            [x for x, _ in found], means, spread, marker="o", capsize=3, color=colour or COLOURS[label],
            label=f"{label}, ours (n = {' or '.join(map(str, n))})",
        )  # fmt: skip


def _grid(figure: Any, count: int) -> list[Any]:
    """Axes for so many panels, two a row."""
    columns = min(2, count)
    rows = -(-count // columns)
    figure.set_size_inches(5.6 * columns, 4.0 * rows)
    panels = list(figure.subplots(rows, columns, squeeze=False).flatten())
    for unused in panels[count:]:
        unused.remove()
    return panels[:count]


def _axes(axes: Any) -> Any:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#eeeeee")
    axes.set_axisbelow(True)
    return axes


PICTURES: dict[str, Callable[[Any, Plan | None], None]] = {
    "rate": _rate,
    "flops": _flops,
    "gap": _gap,
    "sweep": _sweep,
    "latency": _latency,
}
