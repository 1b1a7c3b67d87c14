"""The report in the terminal: headline, layers and notices, and a schedule's curve."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.console import Group as Lines
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from asfp.report.content import Content
from asfp.report.layers import LayerRow
from asfp.report.summary import NONE, Headline, short, time_cells
from asfp.schedule import AsymptoticSchedule

EIGHTHS = " ▁▂▃▄▅▆▇█"


def as_text(content: Content, width: int = 100) -> RenderableType:
    """What `asfp report --text` prints; words from records are never read as markup.

    >>> from pathlib import Path
    >>> import tempfile
    >>> from rich.console import Console
    >>> from asfp.report.content import gather
    >>> console = Console(width=60)
    >>> console.print(as_text(gather([Path(tempfile.mkdtemp())])))  # doctest: +ELLIPSIS
    Soft filter pruning
    ! ...
    """
    parts: list[RenderableType] = [Text(content.title, style="bold")]
    parts += [Text(f"{h.label} {h.verdict}") for h in content.headlines]
    if content.headlines:
        table = _headlines(content.headlines)
        parts += [Text(), table]
    if any(h.times for h in content.headlines):
        parts += [Text(), _times(content.headlines)]
    for label, rows in content.layers:
        parts += [Text(), _layers(label, rows)]
    parts += [Text(f"! {notice}", style="yellow") for notice in content.notices]
    return Lines(*parts)


def _headlines(headlines: Sequence[Headline]) -> Table:
    """A column a group, so that many figures fit a narrow terminal; names of figures down the side."""
    table = Table(title="Accuracies after the last pruning", title_justify="left", title_style="dim")
    table.add_column("")
    for headline in headlines:
        table.add_column(Text(headline.label), justify="right")
    rows = [h.cells() for h in headlines]
    for name in rows[0]:
        if any(row[name] != NONE for row in rows):
            table.add_row(name, *(Text(row[name]) for row in rows))
    return table


def _times(headlines: Sequence[Headline]) -> Table:
    table = Table(title="Time, in turns with the dense network", title_justify="left", title_style="dim")
    rows = [(h.label, time_cells(timing)) for h in headlines for timing in h.times]
    for name in ("run", *rows[0][1]):
        table.add_column(name)
    for label, cells in rows:
        table.add_row(Text(label), *(Text(cell) for cell in cells.values()))
    return table


def _layers(label: str, rows: Sequence[LayerRow]) -> Table:
    full = any(row.macs_before is not None for row in rows)
    table = Table(title=Text(f"Layers of {label}"), title_justify="left")
    table.add_column("layer")
    for name in ["filters kept", "outputs", *(["inputs", "MACs", "after", "saved"] if full else [])]:
        table.add_column(name, justify="right")
    for row in rows:
        cells = [NONE if row.kept is None else f"{row.kept} of {row.out_before}", _arrow(row.out_before, row.out_after)]
        if full:
            saved = 100 * (1 - (row.macs_after or 0) / row.macs_before) if row.macs_before else 0.0
            cells += [_arrow(row.in_before, row.in_after), short(row.macs_before or 0), short(row.macs_after or 0)]
            cells.append(f"{saved:.1f} %")
        table.add_row(Text(row.name), *cells)
    return table


def _arrow(before: int | None, after: int | None) -> str:
    return str(before) if before == after else f"{before} → {after}"


def plot_text(curve: Callable[[float], float], epochs: int, top: float, width: int = 60, height: int = 10) -> str:
    """A curve from 0 to `epochs` in block characters, `top` at the upper edge.

    >>> print(plot_text(lambda epoch: epoch / 4, 4, 1.0, width=5, height=2))
    100.0 % │   ▄█
     50.0 % │ ▄███
            └─────
             0   4
    """
    values = [curve(epochs * i / (width - 1)) / top * height for i in range(width)]
    lines = []
    for level in range(height, 0, -1):
        cells = "".join(EIGHTHS[max(0, min(8, round(8 * (value - level + 1))))] for value in values)
        lines.append(f"{100 * top * level / height:5.1f} % │{cells}".rstrip())
    gap = " " * max(1, width - 1 - len(str(epochs)))
    return "\n".join([*lines, f"{'':8}└{'─' * width}", f"{'':9}0{gap}{epochs}"])


def schedule_text(goal: float, epochs: int, start: float = 0.0, d: float = 1 / 8, width: int = 60) -> str:
    """What `asfp schedule` prints: the curve, the three points that define it, and the solved a, k and b.

    >>> print(schedule_text(0.4, 200, width=20).splitlines()[0])
    rate(epoch) = a exp(-k epoch) + b, a = -0.400006, k = 0.0554499, b = 0.400006
    """
    schedule = AsymptoticSchedule(goal, epochs, start, d)
    head = f"rate(epoch) = a exp(-k epoch) + b, a = {schedule.a:.6g}, k = {schedule.k:.6g}, b = {schedule.b:.6g}"
    if schedule.start == schedule.goal:
        head = f"rate(epoch) = {goal:g}: constant, which is SFP"
    elif schedule.k == 0.0:
        head = f"rate(epoch) = {schedule.a:.6g} epoch + {schedule.b:.6g}: a straight line"
    picture = plot_text(schedule, epochs, goal, width)
    marks = [(0.0, "before training"), (d * epochs, "3/4 of the goal at d x epochs"), (float(epochs), "the goal")]
    if schedule.start == schedule.goal:
        marks = [(0.0, "before training"), (float(epochs), "the goal")]
    points = "\n".join(f"  epoch {at:8.4g}   {100 * schedule(at):6.2f} %   {what}" for at, what in marks)
    shown = sorted({1, 2, 5, 10, epochs // 4, epochs // 2, epochs} & set(range(1, epochs + 1)))
    rates = "\n".join(f"  after epoch {e:4d}   {100 * schedule(e):6.2f} %" for e in shown)
    return f"{head}\n\n{picture}\n\n{points}\n\n{rates}"
