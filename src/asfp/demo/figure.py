"""One picture of the demo: the two schedules, and what each pruning costs in accuracy."""

from __future__ import annotations

from typing import Any

from asfp.demo.training import METHODS, MODEL, DemoResult, MethodResult

COLOURS = {"dense": "#777777", "SFP": "#c8553d", "ASFP": "#2a6f97"}


def draw(result: DemoResult) -> None:
    """Write `result.picture`: rates on the left; for SFP and ASFP the accuracy before and after each pruning."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine
    from matplotlib.ticker import MaxNLocator

    runs = {run.method: run for run in result.methods}
    figure = Figure(figsize=(12, 4.4), layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.1), facecolor="white")
    FigureCanvasAgg(figure)
    schedules, *accuracies = figure.subplots(1, 3)
    _draw_schedules(schedules, result)
    for axes, method in zip(accuracies, ("SFP", "ASFP"), strict=True):
        _draw_accuracy(axes, runs[method], dense=runs["dense"])
    accuracies[1].sharey(accuracies[0])
    for axes in (schedules, *accuracies):
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_xlabel("epoch")
        axes.set_xlim(0, result.settings.epochs * 1.02)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
        axes.grid(axis="y", color="#eeeeee")
        axes.set_axisbelow(True)
    figure.suptitle(
        f"Soft filter pruning: {MODEL} on handwritten digits, {result.settings.rate:.0%} of the filters pruned",
        x=0.012,
        ha="left",
        weight="bold",
        fontsize=13,
    )
    figure.savefig(result.picture, dpi=150)


def _draw_schedules(axes: Any, result: DemoResult) -> None:
    """The curve of each schedule from before training to the end, with a dot at each pruning."""
    settings = result.settings
    for run in result.methods:
        make = METHODS[run.method]
        if make is None:
            continue
        schedule = make(settings.rate, settings.epochs)
        colour = COLOURS[run.method]
        times = [settings.epochs * i / 200 for i in range(201)]
        axes.plot(times, [schedule(t) for t in times], color=colour, linewidth=1.5)
        axes.plot([e.epoch for e in run.epochs], [e.rate for e in run.epochs], ".", color=colour, markersize=5)
    axes.set_title("filters pruned after each epoch", loc="left", fontsize=11)
    axes.set_ylim(0, settings.rate * 1.15)
    end = settings.epochs
    axes.annotate(
        "SFP: all at once", (0, settings.rate), (0.02 * end, settings.rate * 1.04), color=COLOURS["SFP"], va="bottom"
    )
    asymptotic = [e.rate for e in next(r for r in result.methods if r.method == "ASFP").epochs]
    anchor = len(asymptotic) // 6
    axes.annotate(
        "ASFP: fast, then flat",
        (anchor + 1, asymptotic[anchor]),
        (anchor + 1 + 0.06 * end, asymptotic[anchor] * 0.88),
        color=COLOURS["ASFP"],
        va="top",
    )


def _draw_accuracy(axes: Any, run: MethodResult, dense: MethodResult) -> None:
    epochs = [e.epoch for e in run.epochs]
    before, after = [e.before for e in run.epochs], [e.after for e in run.epochs]
    colour = COLOURS[run.method]
    axes.axhline(
        dense.before,
        color=COLOURS["dense"],
        linewidth=1,
        linestyle=(0, (4, 3)),
        label=f"dense, {dense.after:.1%} in the end",
    )
    axes.fill_between(epochs, before, after, color=colour, alpha=0.15, linewidth=0, label="lost by pruning")
    axes.plot(epochs, before, color=colour, linewidth=1.2, alpha=0.6, label="before pruning")
    axes.plot(epochs, after, color=colour, linewidth=2.2, label="after pruning")
    axes.set_ylim(0, 1.03)
    axes.set_title(f"{run.method}: test accuracy, {run.after:.1%} in the end", loc="left", fontsize=11, color=colour)
    axes.legend(loc="lower right", frameon=False)
