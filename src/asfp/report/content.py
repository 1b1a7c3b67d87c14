"""All that a report shows, as plain data: read once, then drawn as a page, as pictures or in the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from asfp.report.chart import Chart, Heat
from asfp.report.curves import curve_charts
from asfp.report.groups import Group, grouped
from asfp.report.history import filter_heat
from asfp.report.layers import LayerRow, layer_rows, stream_heat
from asfp.report.notices import Notice, merged
from asfp.report.runs import Run, find_runs, read_run
from asfp.report.summary import Headline, headlines
from asfp.report.tradeoff import tradeoff_charts

HEAT_BYTES = 2_000_000
"""Of all heat maps on a page; more runs or epochs are thinned out to fit."""
HEAT_RUNS = 12
"""Runs whose filters are drawn."""


@dataclass(frozen=True)
class Content:
    """Runs, and everything made of them."""

    runs: tuple[Run, ...]
    groups: tuple[Group, ...]
    headlines: tuple[Headline, ...]
    charts: tuple[Chart, ...]
    filters: tuple[Heat, ...]
    streams: tuple[Heat, ...]
    layers: tuple[tuple[str, tuple[LayerRow, ...]], ...]
    """Of the first run of each pruned group, under its label."""
    notices: tuple[Notice, ...]

    @property
    def title(self) -> str:
        networks = list(dict.fromkeys(g.network for g in self.groups if not g.network.startswith("unknown")))
        return f"Soft filter pruning: {', '.join(networks)}" if networks else "Soft filter pruning"


def gather(paths: Sequence[Path]) -> Content:
    """Read the runs at the given paths and make all figures.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> content = gather([folder])
    >>> content.charts, len(content.notices)
    ((), 1)
    """
    runs = [read_run(path) for path in find_runs(paths)]
    notices = [notice for run in runs for notice in run.notices]
    shown = [run for run in runs if run.epochs or run.accuracy is not None]
    groups = grouped(shown)
    first = [(_first(group), group.runs[0]) for group in groups]
    drawn = [(label, run) for label, run in first if run.filters is not None][:HEAT_RUNS]
    heats = [filter_heat(run, label, i, HEAT_BYTES // max(1, len(drawn))) for i, (label, run) in enumerate(drawn)]
    flows = []
    for i, (label, run) in enumerate(drawn):
        flow, notice = stream_heat(run, label, i)
        flows.append(flow)
        notices += [Notice(notice, (str(run.path),))] if notice else []
    layers = [(label, tuple(layer_rows(run))) for label, run in first if run.method != "none"]
    return Content(
        runs=tuple(runs),
        groups=tuple(groups),
        headlines=tuple(headlines(groups)),
        charts=tuple(curve_charts(groups) + tradeoff_charts(groups)),
        filters=tuple(heat for heat in heats if heat is not None),
        streams=tuple(flow for flow in flows if flow is not None),
        layers=tuple((label, rows) for label, rows in layers if rows),
        notices=merged(notices),
    )


def _first(group: Group) -> str:
    """The label of a group's first run."""
    seed = group.runs[0].seed
    return group.label if seed is None or len(group.runs) == 1 else f"{group.label}, seed {seed}"
