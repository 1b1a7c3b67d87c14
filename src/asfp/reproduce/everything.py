"""All runs behind all tables and figures as one queue, the most important first."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from asfp.reproduce.definition import Definition, Row


def everything(definitions: Iterable[Definition]) -> Definition:
    """One row for each run of the definitions: with the highest priority and the most seeds that any gives it.

    >>> from asfp.reproduce.tables import TABLE1, TABLE5
    >>> rows = everything([TABLE1, TABLE5]).rows
    >>> len(rows) < len(TABLE1.rows) + len(TABLE5.rows), rows[0].cells, rows[0].seeds
    (True, ('resnet56',), 3)
    """
    rows: dict[str, Row] = {}
    for row in (row for definition in definitions for row in definition.rows):
        known = rows.get(row.run.label, row)
        rows[row.run.label] = replace(
            known if known.paper is not None else row,
            cells=(row.run.label,),
            priority=min(known.priority, row.priority),
            seeds=max(known.seeds, row.seeds),
            optional=known.optional and row.optional,
        )
    first = tuple(sorted(rows.values(), key=lambda row: row.priority))
    notes = ("What is run only when asked for is left out: name it, --only =resnet56-asfp-momentum-cosine.",)
    return Definition("all", "All runs, accuracy in percent", ("run",), first, notes, view="short")
