"""The paper's tables and figures: which runs stand behind them, which are done, and what came out."""

from __future__ import annotations

from asfp.errors import AsfpError, nearest
from asfp.reproduce.definition import Definition
from asfp.reproduce.everything import everything
from asfp.reproduce.figures import FIG_D, FIG_FLOPS, FIG_GAP, FIG_INTERVAL, LAYERS
from asfp.reproduce.options import OPTIONS, SUMMARY
from asfp.reproduce.selection import FIG_SELECTION
from asfp.reproduce.tables import TABLE1, TABLE2, TABLE5

DEFINITIONS: dict[str, Definition] = {
    d.name: d
    for d in (
        *(TABLE1, TABLE2, TABLE5, FIG_FLOPS, FIG_GAP, FIG_INTERVAL, FIG_D, LAYERS),
        *(FIG_SELECTION, OPTIONS, SUMMARY),
    )
}
"""What stands on runs of `asfp train`."""

DEFINITIONS["all"] = everything(DEFINITIONS.values())

NAMES = ("table1", "table2", "table3", "table4", "table5", "fig-rate", "fig-flops", "fig-gap", "fig-interval", "fig-d",
         "layers", "fig-selection", "options", "summary")  # fmt: skip
"""The tables and figures; `all` is beside them the runs of all as one queue."""


def check_name(name: str) -> str:
    """`name`, when it is a table or figure.

    >>> check_name("table1")
    'table1'
    >>> check_name("table6")
    Traceback (most recent call last):
    ...
    asfp.errors.AsfpError: there is no 'table6' to reproduce. Did you mean table5 or ...? Names: table1, ...
    """
    names = (*NAMES, "all")
    if name not in names:
        raise AsfpError(f"there is no {name!r} to reproduce.{nearest(name, names)} Names: {', '.join(names)}")
    return name
