"""A benchmark for people to read."""

from __future__ import annotations

import io
from itertools import groupby
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from asfp.bench import Bench, Row


def as_table(done: Bench) -> str:
    """One table for each setting: latency, throughput, memory, and the time saved beside the MACs saved.

    >>> from asfp.bench import bench
    >>> print(as_table(bench(["resnet8"], repeats=3)).splitlines()[1].split()[:3])
    ['model', 'median', 'quartiles']
    """
    text = io.StringIO()
    console = Console(file=text, width=1000, color_system=None, highlight=False)
    for setting, group in groupby(done.rows, key=lambda row: row.setting):
        rows = list(group)
        parts = [setting.engine, setting.device, f"batch {setting.batch}", setting.precision]
        parts += ["channels last"] if setting.channels_last else []
        parts += [f"{setting.threads} threads"] if setting.threads else []
        console.print(", ".join(parts))
        console.print(_table(rows))
        for row in rows:
            if row.doubt:
                console.print(f"  Warning: {row.model}: {row.doubt}")
        console.print()
    console.print(", ".join(f"{name} {value}" for name, value in done.environment.items()))
    return "\n".join(line.rstrip() for line in text.getvalue().rstrip().splitlines())


def _table(rows: list[Row]) -> Table:
    table = Table(box=None, pad_edge=True, padding=(0, 1, 0, 2))
    names = ["model", "median", "quartiles", "samples/s", "memory", "MACs", "MACs saved", "time saved", "95 % interval"]
    for i, name in enumerate(names if len(rows) > 1 else names[:6]):
        table.add_column(name, justify="right" if i else "left")
    for row in rows:
        low, high = row.times.quartiles
        memory = "-" if row.peak_bytes is None else f"{row.peak_bytes / 2**20:.1f} MiB"
        macs = "-" if row.macs is None else f"{row.macs:,}"
        spread = f"{low:.2f} - {high:.2f}"
        cells = [row.model, f"{row.times.median:.2f} ms", spread, f"{row.throughput:.1f}", memory, macs]
        if row.time_saved is not None:
            cells.append("-" if row.macs_saved is None else f"{100 * row.macs_saved:.1f} %")
            saved, least, most = (100 * x for x in row.time_saved)
            cells += [f"{saved:.1f} %", f"{least:.1f} - {most:.1f}"]
        table.add_row(*cells)
    return table
