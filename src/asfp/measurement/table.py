"""A measurement for people to read."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from asfp.measurement import Measurement
    from asfp.targets import Target


def as_table(found: Measurement, *, layers: bool = False) -> str:
    """The totals, one line for each way of counting; with `layers`, the layers above them.

    >>> import torch
    >>> from asfp import measure
    >>> print(as_table(measure(torch.nn.Conv2d(3, 4, 1), torch.zeros(1, 3, 2, 2))))
    Conv2d, input 1x3x2x2
      MACs of   convolutions   saved   linear   parameters
      dense               48                0           16
    """
    text, console = _paper()
    title = f"{found.model}, input {'x'.join(map(str, found.input_shape))}"
    if found.pruned is not None and found.pruned.rate is not None:
        title += f", {100 * found.pruned.rate:g} % of the filters pruned"
    if found.pruned is not None:
        cut = found.pruned
        title += f", {100 * cut.streams:g} % of those on streams" if cut.streams is not None else ""
        title += f", {cut.selection}" if cut.selection != "independent" else ""
        title += f", multiples of {cut.align} kept" if cut.align > 1 else ""
    console.print(title)
    if layers:
        console.print(_layers(found))
    console.print(_totals(found))
    if found.latency_ms is not None:
        console.print(f"  {found.latency_ms:.2f} ms a run")
    return _printed(text)


def ways_table(model: str, found: Sequence[Target]) -> str:
    """What a search found, the best first, one line a way; shares are of the dense network.

    >>> from asfp.targets import Target
    >>> way = Target("latency", 0.7, 0.4, "coupled", 16, "auto", 0.68, 0.69, 0.6, "torch", (0.68, 0.7))
    >>> print(ways_table("resnet56", [way]))
    resnet56: 70 % of the time on torch, the best first
      selection   align   rate   MACs left   time left   95 % interval   predicted
      coupled        16    0.4      60.0 %      69.0 %     68.0 - 70.0      68.0 %
    """
    text, console = _paper()
    asked = found[0]
    what = "MACs (layout least), time" if asked.kind == "macs" else "time"
    best = "the fastest first" if asked.kind == "macs" else "the best first"
    console.print(f"{model}: {100 * asked.target:g} % of the {what} on {asked.engine}, {best}")
    names = ["selection", "align", "rate", "MACs left", "time left", "95 % interval", "predicted"]
    table = _columns(*names[: 6 + (asked.kind == "latency")])
    for way in found:
        low, high = way.interval or (math.nan, math.nan)
        time = way.outcome if way.time is None else way.time
        cells = [way.selection, f"{way.align}", f"{way.rate:g}", f"{100 * way.macs:.1f} %", f"{100 * time:.1f} %"]
        cells += [f"{100 * low:.1f} - {100 * high:.1f}", f"{100 * way.predicted:.1f} %"]
        table.add_row(*cells[: len(table.columns)])
    console.print(table)
    if missed := sum(not way.met for way in found):
        console.print(f"  {missed} of them miss{'es' * (missed == 1)} the target, the last {missed}")
    return _printed(text)


def _paper() -> tuple[io.StringIO, Console]:
    text = io.StringIO()
    return text, Console(file=text, width=120, color_system=None, highlight=False)


def _printed(text: io.StringIO) -> str:
    return "\n".join(line.rstrip() for line in text.getvalue().rstrip().splitlines())


def _totals(found: Measurement) -> Table:
    table = _columns("MACs of", "convolutions", "saved", "linear", "parameters")
    table.add_row("dense", f"{found.macs_conv:,}", "", f"{found.macs_linear:,}", f"{found.params:,}")
    if (cut := found.pruned) is not None:
        for name, macs in (("paper's convention", cut.macs_paper), ("whole filters", cut.macs_integer)):
            table.add_row(name, f"{round(macs):,}", f"{found.cut_percent(macs):.2f} %")
        saved = f"{found.cut_percent(cut.macs_compact):.2f} %"
        linear, params = f"{cut.macs_compact_linear:,}", f"{cut.params_compact:,}"
        table.add_row("compact model", f"{cut.macs_compact:,}", saved, linear, params)
    return table


def _layers(found: Measurement) -> Table:
    table = _columns("layer", "kind", "convolution", "linear", "parameters")
    table.columns[1].justify = "left"
    for layer in found.layers:
        counts = (layer.macs_conv, layer.macs_linear, layer.params)
        table.add_row(layer.name, layer.kind, *(f"{n:,}" if n else "" for n in counts))
    return table


def _columns(*names: str) -> Table:
    table = Table(box=None, pad_edge=True, padding=(0, 1, 0, 2))
    for i, name in enumerate(names):
        table.add_column(name, justify="right" if i else "left")
    return table
