"""Every figure as PNG and SVG, drawn by matplotlib: for papers and slides, with no browser."""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import Any

import numpy as np

from asfp.report.chart import CODES, Chart, Dots, Heat, Line, Panel, colour_of
from asfp.report.content import Content

LONGEST = 60
"""Characters of a label."""
SOFT, GRID = "#525b6b", "#e8ebf0"
DASHES: dict[str, Any] = {"solid": "-", "dash": (0, (5, 2)), "dot": ":"}


def write_figures(content: Content, folder: Path) -> list[Path]:
    """FOLDER/KEY.png and .svg for every chart and heat map of the page; the files written. The same again is the same.

    >>> import tempfile
    >>> write_figures(Content((), (), (), (), (), (), (), ()), Path(tempfile.mkdtemp()))
    []
    """
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    items: list[Chart | Heat] = [*content.charts, *content.filters, *content.streams]
    for item in items:
        figure = _draw_chart(item) if isinstance(item, Chart) else _draw_heat(item)
        for suffix in ("png", "svg"):
            path = folder / f"{item.key}.{suffix}"
            _save(figure, path, item.title)
            written.append(path)
    return written


def _save(figure: Any, path: Path, title: str) -> None:
    import matplotlib as mpl

    metadata = {"Title": title, "Date": None} if path.suffix == ".svg" else {"Title": title}
    with mpl.rc_context({"svg.hashsalt": "asfp", "svg.fonttype": "none"}), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # characters that the font lacks, labels that are too wide
        figure.savefig(path, dpi=150, metadata=metadata)


def _figure(columns: int, rows: int, width: float, height: float) -> tuple[Any, list[Any]]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    axes = np.atleast_1d(figure.subplots(rows, columns)).ravel().tolist()
    return figure, axes


def _draw_chart(chart: Chart) -> Any:
    columns = min(3, len(chart.panels))
    rows = math.ceil(len(chart.panels) / columns)
    figure, axes = _figure(columns, rows, max(6.5, 4.3 * columns), 3.4 * rows + 0.5)
    for axis, panel in zip(axes, chart.panels, strict=False):
        _draw_panel(axis, panel)
    for axis in axes[len(chart.panels) :]:
        axis.axis("off")
    figure.suptitle(_plain(chart.title), x=0.01, ha="left", weight="bold", fontsize=13)
    return figure


def _draw_panel(axis: Any, panel: Panel) -> None:
    for series in panel.series:
        if isinstance(series, Line):
            _draw_line(axis, series)
        else:
            _draw_dots(axis, series)
    if panel.log_y:
        axis.set_yscale("log")
    if panel.categories:
        axis.set_xticks(range(len(panel.categories)), [_plain(c) for c in panel.categories])
    axis.set_title(_plain(panel.title), loc="left", fontsize=10.5)
    axis.set_xlabel(_plain(panel.x_title), color=SOFT)
    axis.set_ylabel(_plain(panel.y_title), color=SOFT)
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(color=GRID)
    axis.set_axisbelow(True)
    if sum(bool(s.name) for s in panel.series) > 1:
        axis.legend(frameon=False, fontsize=8)


def _colour(index: int) -> str:
    return SOFT if index < 0 else colour_of(index)


def _draw_line(axis: Any, line: Line) -> None:
    y = [math.nan if v is None else v for v in line.y]
    label = _plain(line.name) if line.name else "_"
    axis.plot(line.x, y, color=_colour(line.colour), linestyle=DASHES[line.style], linewidth=1.4, label=label)
    if line.low is not None and line.high is not None:
        low, high = ([math.nan if v is None else v for v in edge] for edge in (line.low, line.high))
        axis.fill_between(line.x, low, high, color=_colour(line.colour), alpha=0.18, linewidth=0)
    if line.fill:
        axis.fill_between(line.x, 0, y, color=SOFT, alpha=0.2, linewidth=0)


def _draw_dots(axis: Any, dots: Dots) -> None:
    colour = _colour(dots.colour)
    face = "none" if dots.hollow else colour
    marker = "D" if dots.hollow and "trained" in dots.name else "o"
    axis.errorbar(
        dots.x,
        dots.y,
        yerr=dots.error,
        fmt=marker,
        color=colour,
        markerfacecolor=face,
        markersize=7,
        capsize=3,
        label=_plain(dots.name),
    )


def _colours() -> Any:
    """The page's colours for the bytes of a heat map."""
    from matplotlib.colors import LinearSegmentedColormap, ListedColormap

    kept = LinearSegmentedColormap.from_list("kept", ["#d3e5f7", "#0d3f7a"])(np.linspace(0, 1, 99))
    zeroed = LinearSegmentedColormap.from_list("zeroed", ["#fde3c8", "#c2410c"])(np.linspace(0, 1, 99))
    dead, back = (0.925, 0.933, 0.949, 1.0), (0.082, 0.639, 0.29, 1.0)
    return ListedColormap([dead, *zeroed, back, *kept])


def _draw_heat(heat: Heat) -> Any:
    if heat.kind == "streams":
        heights = [part.cells.shape[0] for part in heat.parts]
        figure, axes = _figure(1, len(heat.parts), 9, sum(0.24 * h + 0.9 for h in heights))
        for axis, part in zip(axes, heat.parts, strict=True):
            axis.imshow(part.cells, cmap="Blues", vmin=0, vmax=1.4, aspect="auto", interpolation="nearest")
            axis.set_yticks(range(len(part.labels)), [_plain(label) for label in part.labels], fontsize=7)
            axis.set_title(_plain(part.name), loc="left", fontsize=10)
            axis.set_xlabel(heat.x_title, color=SOFT, fontsize=8)
    else:
        figure, (axis,) = _figure(1, 1, 9, 6.5)
        cells = np.vstack(
            [part.cells[np.argsort(-part.cells[:, -1].astype(int), kind="stable")] for part in heat.parts]
        )
        ends = [heat.x[0] - 0.5, heat.x[-1] + 0.5]
        axis.imshow(
            cells,
            cmap=_colours(),
            vmin=0,
            vmax=CODES["kept"] + 98,
            aspect="auto",
            interpolation="nearest",
            extent=(*ends, len(cells), 0),
        )
        starts = np.cumsum([0] + [part.cells.shape[0] for part in heat.parts])[:-1]
        step = math.ceil(len(starts) / 20)
        axis.set_yticks(starts[::step], [_plain(part.name) for part in heat.parts[::step]], fontsize=7)
        axis.set_xlabel(heat.x_title, color=SOFT)
        axis.set_title(
            "blue: kept, by norm; orange: zeroed, by norm; grey: zero, zeroed again; green: back",
            loc="left",
            fontsize=9,
        )
    figure.suptitle(_plain(heat.title), x=0.01, ha="left", weight="bold", fontsize=12)
    return figure


def _plain(text: str) -> str:
    """Of a length that can be drawn; dollar signs would start a formula, control characters have no glyph."""
    text = "".join(c for c in text if c.isprintable())
    return (text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…").replace("$", r"\$")
