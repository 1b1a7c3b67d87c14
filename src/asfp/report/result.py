"""The first section of the page, the result; every word that comes from a run is escaped here, by `_`."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from asfp.report.content import Content
from asfp.report.summary import MINUS, NONE, Headline, time_cells
from asfp.report.timings import Timing

_ = escape


def section(key: str, title: str, inner: str, lead: str = "", style: str = "") -> str:
    """A section with a heading; title, lead and inner are HTML already.

    >>> section("a", "A", "<p>b</p>")
    '<section aria-labelledby="h-a"><h2 id="h-a">A</h2><p>b</p></section>'
    """
    lead = f'<p class="soft">{lead}</p>' if lead else ""
    kind = f' class="{style}"' if style else ""
    return f'<section{kind} aria-labelledby="h-{key}"><h2 id="h-{key}">{title}</h2>{lead}{inner}</section>'


def result_section(content: Content) -> str:
    """Verdicts, cards where one group is pruned, and the tables of figures and of times."""
    if not content.headlines:
        return ""
    verdicts = "".join(
        f'<li><span class="swatch" data-colour="{h.colour}"></span><span><strong>{_(h.label)}</strong> {_(h.verdict)}'
        "</span></li>"
        for h in content.headlines
    )
    pruned = [h for h, g in zip(content.headlines, content.groups, strict=True) if not g.dense]
    cards = _cards(pruned[0]) if len(pruned) == 1 else ""
    return section(
        "result",
        "Result",
        f'<ul class="verdicts">{verdicts}</ul>{cards}{_table(content.headlines)}{_times(content.headlines)}',
    )


def _cards(headline: Headline) -> str:
    named = [
        ("Accuracy with the zeros in", headline.masked),
        ("Accuracy, compact", headline.compact),
        ("Against dense", headline.difference),
        ("Multiply-adds", headline.macs),
        ("Parameters", headline.parameters),
        ("File", headline.size),
        *((f"Time saved, {t.engine}", _time(t)) for t in headline.times),
    ]
    cards = "".join(_card(name, text) for name, text in named if text != NONE)
    return f'<dl class="cards">{cards}</dl>' if cards else ""


def _time(timing: Timing) -> str:
    cells = time_cells(timing)
    return f"{cells['time saved']} ({'too noisy to conclude' if timing.doubt else cells['95 % interval']})"


def _card(name: str, text: str) -> str:
    main, bracket, rest = text.partition(" (")
    if bracket and rest.startswith(MINUS):
        inside, _close, after = rest.partition(")")
        big, small = inside, f"{main}{after}"
    else:
        big, small = main, f"({rest}" if bracket else ""
        before, arrow, after = main.partition(" → ")
        big, small = (after, f"from {before}") if arrow and not bracket else (big, small)
    detail = f"<small>{_(small)}</small>" if small else ""
    return f'<div class="card"><dt>{_(name)}</dt><dd>{_(big)}{detail}</dd></div>'


def _table(headlines: Sequence[Headline]) -> str:
    rows = {h.label: h.cells() for h in headlines}
    names = [n for n in next(iter(rows.values())) if any(cells[n] != NONE for cells in rows.values())]
    if all(cells["runs"] == "1 seed" for cells in rows.values()):
        names.remove("runs")
    head = "".join(f'<th scope="col">{_(name)}</th>' for name in names)
    lines = "".join(
        f'<tr><th scope="row"><span class="swatch" data-colour="{h.colour}"></span> {_(h.label)}</th>'
        + "".join(f'<td data-name="{_(name)}">{_lines(rows[h.label][name])}</td>' for name in names)
        + "</tr>"
        for h in headlines
    )
    caption = "on the test images after the last pruning, never of the best epoch; ± is one standard deviation."
    return (
        '<div class="scroll" tabindex="0" role="region" aria-label="Results"><table class="results">'
        f"<caption>Accuracies are measured {caption}</caption>"
        f'<thead><tr><th scope="col">run</th>{head}</tr></thead><tbody>{lines}</tbody></table></div>'
    )


def _times(headlines: Sequence[Headline]) -> str:
    rows = [(h, time_cells(timing)) for h in headlines for timing in h.times]
    if not rows:
        return ""
    head = "".join(f'<th scope="col">{_(name)}</th>' for name in rows[0][1])
    lines = "".join(
        f'<tr><th scope="row"><span class="swatch" data-colour="{h.colour}"></span> {_(h.label)}</th>'
        + "".join(f'<td data-name="{_(name)}">{_lines(cell)}</td>' for name, cell in cells.items())
        + "</tr>"
        for h, cells in rows
    )
    return (
        '<div class="scroll" tabindex="0" role="region" aria-label="Time"><table class="results">'
        "<caption>Time of the compact network, in turns with the dense one; median of the pairs.</caption>"
        f'<thead><tr><th scope="col">run</th>{head}</tr></thead><tbody>{lines}</tbody></table></div>'
    )


def _lines(text: str) -> str:
    return _(text).replace(" %", "&nbsp;%").replace("\n", "<br>")
