"""A plan for people and programs: a table for the terminal, Markdown, JSON."""

from __future__ import annotations

import io
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from asfp.reproduce.definition import Row
from asfp.reproduce.plan import Plan, Planned
from asfp.reproduce.selection import latencies


@dataclass(frozen=True)
class Sheet:
    """A table: a title, the names of the columns, cells, and lines below."""

    title: str
    heads: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()


def mean_deviation(values: Sequence[float]) -> str:
    """Mean and sample deviation (n - 1) of percentages; one value has no deviation.

    >>> mean_deviation([92.5, 92.7, 92.3]), mean_deviation([92.5])
    ('92.50 ± 0.20', '92.50')
    """
    spread = f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.2f}{spread}"


def accuracies(runs: Sequence[Planned]) -> list[float]:
    """Percent of the test images that the compact model gets right, after the last epoch, by run."""
    return [100 * run.record["result"]["accuracy_compact"] for run in runs if run.record is not None]


def sheet_of(plan: Plan, *, recorded: bool = False) -> Sheet:
    """The plan as cells; with `recorded` only the rows that have a record, and nothing of what is left."""
    definition = plan.definition
    rows = [(row, runs) for row, runs in plan.rows if not recorded or accuracies(runs)]
    view = VIEWS[definition.view]
    cells = tuple((*row.cells, *view[1](plan, row, runs)) for row, runs in rows)
    notes = tuple(n for n in definition.notes if "†" not in n or any("†" in c for line in cells for c in line))
    return Sheet(definition.title, (*definition.heads, *view[0]), cells, notes + (() if recorded else _left(plan)))


def _accuracy(plan: Plan, row: Row, runs: Sequence[Planned]) -> tuple[str, ...]:
    found, base = accuracies(runs), _dense(plan, row)
    drop = f"{statistics.fmean(base) - statistics.fmean(found):.2f}" if found and base else "-"
    saved = [1 - r.record["compact"]["macs"] / r.record["compact"]["macs_dense"] for r in runs if r.record is not None]
    return (
        _result(runs),
        f"{len(found)}",
        drop,
        "-" if row.paper is None else str(row.paper),
        "-" if row.drop is None else f"{row.drop:.2f}",
        "-" if row.cut is None else f"{row.cut:.1f}",
        f"{100 * statistics.fmean(saved):.1f}" if saved else "-",
    )


def _short(plan: Plan, row: Row, runs: Sequence[Planned]) -> tuple[str, ...]:
    accuracy, n, _, paper, _, cut, saved = _accuracy(plan, row, runs)
    return accuracy, n, paper, cut, saved


def _latency(plan: Plan, row: Row, runs: Sequence[Planned]) -> tuple[str, ...]:
    accuracy, n, drop, _, _, _, saved = _accuracy(plan, row, runs)
    times = [latencies(plan.results, device).get(row.run.label) for device in ("cpu", "cuda")]
    shown = [("-", "-") if t is None else (f"{t.ms:.2f}", f"{t.saved:.1f}") for t in times]
    return accuracy, n, drop, saved, *shown[0], *shown[1]


def _gap(plan: Plan, row: Row, runs: Sequence[Planned]) -> tuple[str, ...]:
    gaps = [gap_of(run.record) for run in runs if run.record is not None]
    paper = "-" if row.paper is None else str(row.paper)
    if not gaps:
        return _result(runs), "0", paper, "-", "-", "-", "-", "-"
    late = [statistics.fmean(gap[-max(1, len(gap) // 5) :]) for gap in gaps]
    means, spreads = [statistics.fmean(gap) for gap in gaps], [statistics.pstdev(gap) for gap in gaps]
    return (
        _result(runs),
        f"{len(gaps)}",
        paper,
        f"{statistics.fmean(means):.2f}",
        f"{statistics.fmean(spreads):.2f}",
        f"{max(max(gap) for gap in gaps):.2f}",
        f"{round(statistics.fmean(late), 2) + 0.0:.2f}",  # never -0.00
        f"{100 * statistics.fmean(run.record['epochs']['regrown'][-1] for run in runs if run.record is not None):.1f}",
    )


def gap_of(record: dict[str, Any]) -> list[float]:
    """Points of accuracy lost at the pruning of each epoch.

    >>> gap_of({"epochs": {"accuracy_before": [0.5, 0.75], "accuracy_after": [0.25, 0.75]}})
    [25.0, 0.0]
    """
    epochs = record["epochs"]
    return [100 * (b - a) for b, a in zip(epochs["accuracy_before"], epochs["accuracy_after"], strict=True)]


VIEWS: dict[str, Any] = {
    "accuracy": (
        ("accuracy", "n", "drop", "paper", "paper: drop", "MACs saved, paper's count", "MACs saved, compact model"),
        _accuracy,
    ),
    "short": (("accuracy", "n", "paper", "MACs saved, paper's count", "MACs saved, compact model"), _short),
    "latency": (
        (
            *("accuracy", "n", "drop", "MACs saved, compact model"),
            *("CPU, ms", "CPU, time saved", "GPU, ms", "GPU, time saved"),
        ),
        _latency,
    ),
    "gap": (
        ("accuracy", "n", "paper", "gap, mean", "gap, deviation", "gap, largest", "gap, last fifth", "regrown, end"),
        _gap,
    ),
}
"""The columns behind a definition's own, and what fills them."""


def _dense(plan: Plan, row: Row) -> list[float]:
    return [] if row.dense is None else accuracies(plan.dense[row.dense.label])


def _result(runs: Sequence[Planned]) -> str:
    found = accuracies(runs)
    started = [run for run in runs if run.state == "started"]
    rest = [f"epoch {run.epoch} of {run.config.epochs}" for run in started]
    if found:
        left = len(runs) - len(found)
        return mean_deviation(found) + (f" ({', '.join(rest) or f'{left} not yet run'})" if left else "")
    if rest:
        return "in progress: " + ", ".join(rest)
    blocked = any(run.state == "blocked" for run in runs)
    return "blocked" if blocked else "not yet run"


def _left(plan: Plan) -> tuple[str, ...]:
    runs = [run for _, group in plan.rows for run in group]
    done = sum(run.state == "done" for run in runs)
    lines, start = [f"{done} of {len(runs)} runs recorded."], plan.startable
    blocked = sum(map(len, plan.blocked.values()))
    stuck = f"{blocked} {'is' if blocked == 1 else 'are'} blocked" if blocked else ""
    if start:
        started = sum(run.state == "started" for run in start)
        more = f", {started} of them in progress" if started else ""
        time = f"about {plan.minutes:.0f} minutes (an estimate) on one H200, one by one"
        lines.append(f"{len(start)} to run{more}: {time}{f'; {stuck}' if stuck else ''}.")
    elif stuck:
        lines.append(f"Of the others, {stuck}.")
    return (*lines, *blocked_lines(plan))


def blocked_lines(plan: Plan) -> tuple[str, ...]:
    """Which runs cannot be run here and why, a line for each reason."""
    return tuple(
        f"{names[0]}{f' and {len(names) - 1} more' if names[1:] else ''}: {problem}"
        for problem, names in plan.blocked.items()
    )


def as_text(sheet: Sheet, width: int = 200) -> str:
    """For the terminal.

    >>> print(as_text(Sheet("Two", ("a", "b"), (("x", "1"),), ("That is all.",))))
    Two
      a     b
      x     1
    That is all.
    """
    from rich.console import Console
    from rich.table import Table

    text = io.StringIO()
    console = Console(file=text, width=width, color_system=None, highlight=False, markup=False, emoji=False)
    console.print(sheet.title, soft_wrap=True)
    table = Table(box=None, pad_edge=True, padding=(0, 2))
    for i, head in enumerate(sheet.heads):
        numbers = all(_is_number(row[i]) for row in sheet.rows)
        table.add_column(head, justify="right" if numbers and i else "left", overflow="fold")
    for row in sheet.rows:
        table.add_row(*row)
    console.print(table)
    for note in sheet.notes:
        console.print(note, soft_wrap=True)
    return "\n".join(line.rstrip() for line in text.getvalue().rstrip().splitlines())


def as_markdown(sheet: Sheet) -> str:
    """For documents.

    >>> print(as_markdown(Sheet("Two", ("a", "b"), (("x", "1"),), ("That is all.",))))
    | a | b |
    |---|---|
    | x | 1 |
    <BLANKLINE>
    That is all.
    """
    lines = [f"| {' | '.join(sheet.heads)} |", "|---" * len(sheet.heads) + "|"]
    lines += [f"| {' | '.join(row)} |" for row in sheet.rows]
    return "\n".join([*lines, *([""] if sheet.notes else []), "\n".join(sheet.notes)]).rstrip()


def as_dict(plan: Plan) -> dict[str, Any]:
    """For programs: numbers, not cells."""
    return {
        "name": plan.definition.name,
        "title": plan.definition.title,
        "rows": [_row_dict(plan, row, runs) for row, runs in plan.rows],
        "queue": [
            {"run": p.name, "state": p.state, "epoch": p.epoch, "minutes": round(p.minutes, 2), "problem": p.problem,
             "command": ["asfp", "train", *p.arguments]}
            for p in plan.queue
        ],
        "minutes": round(plan.minutes, 1),
    }  # fmt: skip


def _row_dict(plan: Plan, row: Row, runs: Sequence[Planned]) -> dict[str, Any]:
    found = accuracies(runs)
    return {
        **dict(zip(plan.definition.heads, row.cells, strict=True)),
        "run": row.run.label,
        "accuracy": {str(r.seed): 100 * r.record["result"]["accuracy_compact"] for r in runs if r.record is not None},
        "mean": statistics.fmean(found) if found else None,
        "deviation": statistics.stdev(found) if len(found) > 1 else None,
        "n": len(found),
        "paper": None if row.paper is None else row.paper.mean,
        "paper_deviation": None if row.paper is None else row.paper.deviation,
        "states": [run.state for run in runs],
    }


def _is_number(text: str) -> bool:
    return text.lstrip("-").replace(".", "").isdigit() or text == "-"
