"""Figures as JSON for the page's script, which draws them with plotly in the colours of the reader's theme."""

from __future__ import annotations

import base64
import json
from dataclasses import asdict
from typing import Any

from asfp.report.chart import DARK, LIGHT, Chart, Heat, Line
from asfp.report.content import Content


def page_data(content: Content) -> dict[str, Any]:
    """All that the script needs, as plain values."""
    return {
        "palettes": {"light": LIGHT, "dark": DARK},
        "charts": {chart.key: _chart(chart) for chart in content.charts},
        "heats": {heat.key: _heat(heat) for heat in (*content.filters, *content.streams)},
    }


def safe_json(value: object) -> str:
    """JSON that may stand inside a <script>: no `<`, `>`, `&` and no line separators of JavaScript; NaN is an error.

    >>> safe_json("</script>&")
    '"\\\\u003c/script\\\\u003e\\\\u0026"'
    """
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))  # ASCII only, so U+2028 is escaped too
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _chart(chart: Chart) -> dict[str, Any]:
    panels = []
    for panel in chart.panels:
        series = [asdict(s) | {"kind": "line" if isinstance(s, Line) else "dots"} for s in panel.series]
        panels.append(asdict(panel) | {"series": series})
    return {"title": chart.title, "panels": panels}


def _heat(heat: Heat) -> dict[str, Any]:
    parts = [
        {
            "name": part.name,
            "rows": part.cells.shape[0],
            "columns": part.cells.shape[1],
            "labels": part.labels,
            "cells": base64.b64encode(part.cells.tobytes()).decode(),
        }
        for part in heat.parts
    ]
    return {"kind": heat.kind, "title": heat.title, "x_title": heat.x_title, "x": list(heat.x), "parts": parts}
