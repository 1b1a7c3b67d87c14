"""Figures as plain data: what is drawn, not how. `plot.py` makes them interactive, `still.py` draws PNG and SVG."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from asfp.report.values import Column

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


@dataclass(frozen=True)
class Line:
    """y over x, with a band from `low` to `high` where given. Colours count from 0; -1 is the colour of text."""

    name: str
    x: Sequence[float]
    y: Column
    colour: int
    style: str = "solid"
    """solid, dash or dot."""
    low: Column | None = None
    high: Column | None = None
    fill: bool = False
    """Fill down to zero."""


@dataclass(frozen=True)
class Dots:
    """Points with words; hollow ones are a reference, e.g. the paper's."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    words: Sequence[str]
    colour: int
    hollow: bool = False
    error: Sequence[float] | None = None
    shown: bool = False
    """Print the words beside the points, not only on hover."""


@dataclass(frozen=True)
class Panel:
    """One pair of axes."""

    title: str
    x_title: str
    y_title: str
    series: tuple[Line | Dots, ...]
    log_y: bool = False
    categories: tuple[str, ...] = ()
    """Names of x = 0, 1, ... where x is no number."""


@dataclass(frozen=True)
class Chart:
    """Panels that belong together. `alt` says in words what they show; `legend` names colours and styles."""

    key: str
    title: str
    alt: str
    panels: tuple[Panel, ...]
    note: str = ""


LIGHT = (
    *("#667085", "#c2410c", "#1d5fa8", "#7c3aed", "#15803d", "#be185d", "#8a5a00", "#0e7490", "#4d7c0f", "#9f1239"),
)
DARK = (
    *("#a3acba", "#fb923c", "#6cb2ff", "#c4a7fa", "#4ade80", "#f589bd", "#e8c34a", "#45d0e6", "#a3d94e", "#fda4af"),
)
"""Colours of groups on light and on dark ground: dense, SFP, ASFP, hard, then any."""


def colour_of(index: int, palette: Sequence[str] = LIGHT) -> str:
    """The colour of a group; those beyond the palette take the free colours again.

    >>> colour_of(2), colour_of(10) == colour_of(4)
    ('#1d5fa8', True)
    """
    return palette[index if index < len(palette) else 4 + (index - 4) % (len(palette) - 4)]


CODES = {"dead": 0, "zeroed": 1, "back": 100, "kept": 101}
"""A cell of a heat map: 0 zero already and zeroed again; 1-99 zeroed at a norm; 100 back; 101-199 kept at a norm."""


@dataclass(frozen=True)
class Rows:
    """Rows of cells under one name: the filters of a layer over the epochs, or the writers of a stream."""

    name: str
    cells: Bytes
    labels: tuple[str, ...] = ()
    """One a row; empty for "filter 0", "filter 1", ..."""


@dataclass(frozen=True)
class Heat:
    """Heat maps to choose from, all with the same x."""

    key: str
    title: str
    alt: str
    x_title: str
    x: Sequence[int]
    parts: tuple[Rows, ...]
    kind: str = "filters"
    """filters, or streams: there cells are 0 or 1 and every part has its own width."""
    note: str = ""
