"""The headline: one row of figures a group of runs, and the verdict in a sentence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from asfp.report.groups import Group, matching_dense
from asfp.report.runs import COMPACT, DENSE
from asfp.report.timings import Timing
from asfp.report.values import mean_and_deviation

NONE, MINUS = "\u2013", "\u2212"


@dataclass(frozen=True)
class Headline:
    """What a group comes to, as words; `NONE` for what is not known."""

    label: str
    colour: int
    state: str
    dense: str
    masked: str
    compact: str
    difference: str
    macs: str
    parameters: str
    size: str
    times: tuple[Timing, ...]
    """Of the compact network, by engine."""
    verified: str
    verdict: str

    def cells(self) -> dict[str, str]:
        """Column -> words, for tables."""
        return {
            "runs": self.state,
            "dense": self.dense,
            "with zeros in": self.masked,
            "compact": self.compact,
            "against dense": self.difference,
            "MACs": self.macs,
            "parameters": self.parameters,
            "file": self.size,
            "check": self.verified,
        }


def headlines(groups: Sequence[Group]) -> list[Headline]:
    """One for each group.

    >>> headlines([])
    []
    """
    return [_headline(group, matching_dense(group, groups)) for group in groups]


def _headline(group: Group, dense: Group | None) -> Headline:
    dense_accuracy = dense.mean("last_accuracy") if dense is not None else None
    mine = group.mean("last_accuracy")
    against = None if dense_accuracy is None or mine is None or group.dense else 100 * (mine - dense_accuracy)
    return Headline(
        label=group.label,
        colour=group.colour,
        state=_state(group),
        dense=_percent(dense.values("last_accuracy")) if dense is not None else NONE,
        masked=_percent(group.values("last_accuracy")),
        compact=_percent(group.values("accuracy_compact")),
        difference=NONE if against is None else f"{against:+.2f} points".replace("-", MINUS),
        macs=_smaller(group, "macs", "macs_dense"),
        parameters=_smaller(group, "parameters", "parameters_dense"),
        size=_size(group),
        times=_times(group),
        verified=_verified(group),
        verdict=_verdict(group, against),
    )


def _state(group: Group) -> str:
    seeds = f"{len(group.runs)} seeds" if len(group.runs) > 1 else "1 seed"
    going = [run for run in group.runs if not run.finished]
    if not going:
        return seeds
    run = going[0]
    of = f" of {run.total}" if run.total else ""
    at = f"epoch {run.epochs[-1]}{of}" if run.epochs else "no epoch yet"
    return f"{seeds}, {len(going)} not finished ({at})" if len(group.runs) > 1 else f"{seeds}, not finished ({at})"


def _percent(values: Sequence[float]) -> str:
    if not values:
        return NONE
    mean, deviation = mean_and_deviation([100 * v for v in values])
    return f"{mean:.2f} ± {deviation:.2f} %" if len(values) > 1 else f"{mean:.2f} %"


def _smaller(group: Group, after: str, before: str) -> str:
    a, b = group.mean(after), group.mean(before)
    if a is None or not b:
        return NONE
    return short(b) if group.dense or a == b else f"{short(b)} → {short(a)} ({MINUS}{100 * (1 - a / b):.1f} %)"


def short(value: float) -> str:
    """A count in few characters.

    >>> short(40551040), short(269722), short(512)
    ('40.6 M', '270 k', '512')
    """
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= size:
            digits = 0 if abs(value) >= 100 * size else 1 if abs(value) >= 10 * size else 2
            return f"{value / size:.{digits}f} {unit}"
    return f"{value:.0f}"


def _size(group: Group) -> str:
    sizes = group.runs[0].sizes
    if COMPACT not in sizes:
        return NONE
    after = f"{short(sizes[COMPACT])}B"
    return f"{short(sizes[DENSE])}B → {after}" if DENSE in sizes and not group.dense else after


def _times(group: Group) -> tuple[Timing, ...]:
    """Of the first pruned run that was timed."""
    timed = next((run for run in group.runs if run.timings and not group.dense), None)
    return tuple(t for t in timed.timings if t.saved_percent is not None) if timed is not None else ()


def time_cells(timing: Timing) -> dict[str, str]:
    """Column -> words, for a table of times.

    >>> time_cells(Timing("compact", "torch", "torch, cpu", 2.0, -5.0, (-7.0, -3.0)))["time saved"]
    '\u22125.0 %'
    """
    interval = NONE if timing.interval is None else f"{timing.interval[0]:.1f} to {timing.interval[1]:.1f} %"
    cells = {
        "engine": timing.setting,
        "compact": f"{timing.latency_ms:.3g} ms",
        "time saved": f"{timing.saved_percent:.1f} %",
        "95 % interval": interval,
        "note": timing.doubt or NONE,
    }
    return {
        key: cell.replace("-", MINUS) if key in ("time saved", "95 % interval") else cell for key, cell in cells.items()
    }


def _verified(group: Group) -> str:
    if not group.values("differ") or not group.values("test_images"):
        return NONE
    differ, images = sum(group.values("differ")), sum(group.values("test_images"))
    largest = max(group.values("max_abs_diff"), default=None)
    text = f"{differ:.0f} of {images:,.0f} answers differ"
    return text if largest is None else f"{text}, outputs by at most {largest:.1e}"


def _verdict(group: Group, against: float | None) -> str:
    accuracy = _percent(group.values("last_accuracy"))
    if accuracy == NONE:
        return "holds no accuracy yet."
    if not all(run.finished for run in group.runs):
        return f"is not finished; {accuracy} so far."
    if group.dense:
        return f"is not pruned and reaches {accuracy}."
    text = f"reaches {accuracy}"
    saved = group.mean("macs_saved")
    if saved is not None:
        text += f" with {100 * saved:.1f} % fewer multiply-adds"
    if against is not None:
        text += f", {abs(against):.2f} points {'below' if against < 0 else 'above'} the dense network"
    if group.values("differ") and group.values("test_images"):
        images = sum(group.values("test_images"))
        same = sum(group.values("differ")) == 0
        answer = "the same answer" if same else "another answer to some"
        text += (
            f"; the compact network gives {answer} on all {images:,.0f} test images"
            if same
            else f"; {answer} of {images:,.0f}"
        )
    return f"{text}."
