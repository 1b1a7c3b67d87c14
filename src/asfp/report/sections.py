"""The page's sections as HTML; every word that comes from a run is escaped here, by `_`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from asfp.report.chart import Chart, Heat
from asfp.report.content import Content
from asfp.report.layers import LayerRow
from asfp.report.notices import Notice
from asfp.report.result import result_section, section
from asfp.report.summary import NONE, short
from asfp.report.values import flat

_ = escape
READ = "Point at a cell to read it."


def body(content: Content) -> str:
    """The whole of <main> and what stands above it.

    >>> from pathlib import Path
    >>> import tempfile
    >>> from asfp.report.content import gather
    >>> "no run that can be read" in body(gather([Path(tempfile.mkdtemp())]))
    True
    """
    charts = {chart.key: chart for chart in content.charts}
    sections = [
        _notices(content.notices),
        result_section(content),
        _curves([charts[k] for k in ("accuracy", "around", "training") if k in charts]),
        _chart(charts.get("schedule")),
        _filters(content.filters, charts.get("regrowth")),
        _layers(content.layers),
        _streams(content.streams),
        *(_chart(charts.get(key)) for key in ("macs", "latency", "ablations")),
        _settings(content),
    ]
    return f"""{_top(content)}<main id="main">{"".join(sections)}</main>"""


def _top(content: Content) -> str:
    count = len(content.runs)
    chips = "".join(
        f'<button type="button" class="chip" aria-pressed="true" data-group="{g.colour}">'
        f'<span class="swatch" data-colour="{g.colour}"></span>{_(g.label)}</button>'
        for g in content.groups
    )
    bar = f'<div class="bar-top"><div role="group" aria-label="Runs: show or hide">{chips}</div></div>' if chips else ""
    return f"""<header><div><h1>{_(content.title)}</h1>
<p class="soft">{count} {"run" if count == 1 else "runs"}, from {"its" if count == 1 else "their"} records.
<span id="live" role="status"></span></p></div>
<button type="button" id="theme" aria-label="Switch between light and dark">Dark</button></header>{bar}"""


def _notices(notices: Sequence[Notice]) -> str:
    if not notices:
        return ""
    items = "".join(f"<li>{_notice(notice)}</li>" for notice in notices)
    return section("notices", "What is missing", f"<ul>{items}</ul>", style="notices")


def _notice(notice: Notice) -> str:
    where = ", ".join(f"<code>{_(place)}</code>" for place in notice.places)
    return f"{where}: {_(notice.text)}" if where else _(notice.text)


def _figures(chart: Chart) -> str:
    plots = "".join(
        f'<figure><h3 id="{chart.key}-{i}-title">{_(panel.title)}</h3>'
        f'<div class="plot" role="img" aria-label="{_(panel.title)}. {_(chart.alt)}" data-chart="{chart.key}" '
        f'data-panel="{i}"></div></figure>'
        for i, panel in enumerate(chart.panels)
    )
    note = f'<p class="note">{_(chart.note)}</p>' if chart.note else ""
    return f'<div class="grid">{plots}</div>{note}'


def _chart(chart: Chart | None) -> str:
    return "" if chart is None else section(chart.key, _(chart.title), _figures(chart))


def _curves(charts: Sequence[Chart]) -> str:
    return "".join(_chart(chart) for chart in charts)


def _filters(heats: Sequence[Heat], regrowth: Chart | None) -> str:
    inner = _figures(regrowth) if regrowth is not None else ""
    if heats:
        layers = dict.fromkeys(part.name for heat in heats for part in heat.parts)
        options = "".join(f'<option value="{_(name)}">{_(name)}</option>' for name in layers)
        figures = "".join(_heat(heat, "filters") for heat in heats)
        inner = f"""<div class="controls">
<label>Layer <select id="layer"><option value="">all layers</option>{options}</select></label>
<label>Order <select id="order"><option value="norm">by the last norm</option>
<option value="index">as numbered</option></select></label></div>
<ul class="key" aria-label="Colours"><li><span class="swatch ramp" style="--a:var(--kept0);--b:var(--kept1)"></span>
kept, small to large norm</li><li><span class="swatch ramp" style="--a:var(--zero0);--b:var(--zero1)"></span>
zeroed, from a small to a large norm</li><li><span class="swatch" style="--c:var(--dead)"></span>zero, and zeroed
again</li><li><span class="swatch" style="--c:var(--back)"></span>back: zeroed before, kept now</li></ul>
<div class="grid">{figures}</div>{inner}"""
    if not inner:
        return ""
    lead = "Each row is a filter, each column an epoch: its norm before the pruning, and what the pruning did to it."
    return section("filters", "Filters that die and come back", inner, lead if heats else "")


def _heat(heat: Heat, kind: str) -> str:
    note = f'<p class="note">{_(heat.note)}</p>' if heat.note else ""
    return (
        f'<figure><h3>{_(heat.title)}</h3><div class="plot heat" role="img" aria-label="{_(heat.alt)}" '
        f'data-heat="{heat.key}"></div><p class="note readout">{READ}</p>{note}</figure>'
    )


def _streams(heats: Sequence[Heat]) -> str:
    if not heats:
        return ""
    runs = []
    for number, heat in enumerate(heats):
        figures = "".join(
            f'<figure><h3>{_(part.name)}</h3><div class="plot" role="img" aria-label="{_(part.name)}. {_(heat.alt)}" '
            f'data-heat="{heat.key}" data-part="{i}"></div><p class="note readout">{READ}</p></figure>'
            for i, part in enumerate(heat.parts)
        )
        opened = " open" if number == 0 else ""
        runs.append(
            f'<details id="{heat.key}"{opened}><summary>{_(heat.title)}</summary>'
            f'<div class="grid">{figures}</div></details>'
        )
    lead = (
        "A residual stream is a sum: each row is a layer that adds to it, each column a channel. A filled cell is a "
        "channel that the layer writes; the others were zeroed and add at most a constant."
    )
    return section("streams", "Who writes which channel", "".join(runs), lead)


def _layers(layers: Sequence[tuple[str, tuple[LayerRow, ...]]]) -> str:
    if not layers:
        return ""
    tables = []
    for number, (label, rows) in enumerate(layers):
        opened = " open" if len(layers) == 1 else ""
        tables.append(
            f'<details id="layers-{number}"{opened}><summary>{_(label)}</summary>'
            f'<div class="scroll" tabindex="0" role="region" aria-label="Layers of {_(label)}">{_rows(rows)}</div>'
            "</details>"
        )
    return section("layers", "Layers before and after", "".join(tables))


def _rows(rows: Sequence[LayerRow]) -> str:
    full = any(row.macs_before is not None for row in rows)
    lines = []
    for row in rows:
        share = 100 * row.out_after / row.out_before if row.out_before else 0
        cells = [_arrow(row.out_before, row.out_after)]
        if full:
            saved = 100 * (1 - (row.macs_after or 0) / row.macs_before) if row.macs_before else 0
            cells += [_arrow(row.in_before, row.in_after), short(row.macs_before or 0), short(row.macs_after or 0)]
            cells.append(f"{saved:.1f} %")
        bar = f'<td><span class="share" aria-hidden="true"><span style="width:{share:.1f}%"></span></span></td>'
        kept = NONE if row.kept is None else f"{row.kept} of {row.out_before}"
        numbers = "".join(f'<td class="n">{_(cell)}</td>' for cell in [kept, *cells])
        lines.append(f'<tr><th scope="row"><code>{_(row.name)}</code></th>{bar}{numbers}</tr>')
    heads = ["filters kept", "outputs"] + (["inputs", "MACs", "after", "saved"] if full else [])
    head = "".join(f'<th scope="col" class="n">{name}</th>' for name in heads)
    return (
        f'<table><thead><tr><th scope="col">layer</th><th scope="col">width left</th>{head}</tr>'
        f"</thead><tbody>{''.join(lines)}</tbody></table>"
    )


def _arrow(before: int | None, after: int | None) -> str:
    return str(before) if before == after else f"{before} → {after}"


def _settings(content: Content) -> str:
    """Configuration, versions, hardware, commit; settings that differ are marked and come first."""
    if not content.groups:
        return ""
    firsts = [group.runs[0] for group in content.groups]
    tables: dict[str, list[dict[str, Any]]] = {"Configuration": [flat(run.config) for run in firsts]}
    for name in ("hardware", "versions", "commit", "seconds"):
        tables[name.capitalize()] = [dict(run.facts.get(name, {})) for run in firsts]
    inner = []
    for title, columns in tables.items():
        keys = list(dict.fromkeys(key for column in columns for key in column))
        if not keys:
            continue
        differs = {key: len({str(column.get(key)) for column in columns}) > 1 for key in keys}
        keys = [k for k in keys if differs[k]] + [k for k in keys if not differs[k]]
        inner.append(
            f'<details id="facts-{title.lower()}"><summary>{title}</summary><div class="scroll" tabindex="0" '
            'role="region" '
            f'aria-label="{title}">{_matrix(keys, columns, [g.label for g in content.groups], differs)}</div></details>'
        )
    paths = "".join(f"<li><code>{_(str(run.path))}</code></li>" for run in content.runs)
    inner.append(f'<details id="facts-files"><summary>Files read</summary><ul>{paths}</ul></details>')
    return section("settings", "How it was made", "".join(inner))


def _matrix(
    keys: Iterable[str], columns: Sequence[dict[str, Any]], labels: Sequence[str], differs: dict[str, bool]
) -> str:
    head = "".join(f'<th scope="col">{_(label)}</th>' for label in labels)
    lines = "".join(
        f'<tr{" class=differs" if differs[key] else ""}><th scope="row"><code>{_(key)}</code></th>'
        + "".join(f"<td>{_(str(column.get(key, NONE)))}</td>" for column in columns)
        + "</tr>"
        for key in keys
    )
    return f'<table><thead><tr><th scope="col">setting</th>{head}</tr></thead><tbody>{lines}</tbody></table>'
