"""Runs that differ in the seed alone belong together: one line with a band, one row with a deviation."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from asfp.report.runs import Run
from asfp.report.values import Column, dig, flat, mean_and_deviation
from asfp.train.identity import with_defaults

IGNORED = ("name", "seed", "output", "data.root", "data.workers", "data.download")
"""Settings that do not make two runs different ones; neither does anything of `engine`."""
METHODS = {"none": "dense", "sfp": "SFP", "asfp": "ASFP", "hard": "hard"}
COLOURS = {"none": 0, "sfp": 1, "asfp": 2, "hard": 3}
"""The colour of the first group of a method; further ones count on from 4."""


@dataclass(frozen=True)
class Group:
    """Runs of the same settings; `colour` is a number of its own."""

    label: str
    runs: tuple[Run, ...]
    settings: dict[str, Any]
    colour: int

    @property
    def method(self) -> str:
        return self.runs[0].method

    @property
    def dense(self) -> bool:
        """Nothing was pruned."""
        return self.method == "none"

    @property
    def network(self) -> str:
        """The model and the data set, which accuracies can be compared within."""
        config = self.runs[0].config
        return f"{dig(config, 'model', 'name') or 'unknown'} on {dig(config, 'data', 'name') or 'unknown data'}"

    @property
    def epochs(self) -> list[int]:
        """Those that all runs have; of those with none, nothing is asked."""
        lists = [run.epochs for run in self.runs if run.epochs]
        return [e for e in lists[0] if all(e in other for other in lists[1:])] if lists else []

    def curve(self, name: str) -> tuple[Column, Column] | None:
        """Mean and deviation of a column over the runs, at each of `epochs`; None where no run has it."""
        runs = [run for run in self.runs if run.epochs and name in run.columns]
        if not runs:
            return None
        at = [dict(zip(run.epochs, run.columns[name], strict=True)) for run in runs]
        means: Column = []
        deviations: Column = []
        for epoch in self.epochs:
            values = [v for column in at if (v := column.get(epoch)) is not None]
            mean, deviation = mean_and_deviation(values) if values else (None, None)
            means.append(mean)
            deviations.append(deviation)
        return means, deviations

    def values(self, name: str) -> list[float]:
        """A figure of the runs, as far as they have it, e.g. "accuracy"."""
        return [float(v) for run in self.runs if (v := getattr(run, name)) is not None]

    def mean(self, name: str) -> float | None:
        values = self.values(name)
        return mean_and_deviation(values)[0] if values else None


def grouped(runs: Sequence[Run]) -> list[Group]:
    """Groups in order of appearance, the dense ones first.

    >>> from pathlib import Path
    >>> a, b = (Run(Path("x"), "asfp", seed=i, config={"seed": i, "epochs": 2}) for i in (0, 1))
    >>> [(group.label, len(group.runs)) for group in grouped([a, b])]
    [('asfp', 2)]
    """
    found: dict[str, list[Run]] = {}
    for run in runs:
        key = json.dumps(compared(run), sort_keys=True) if run.config else str(run.path)
        found.setdefault(key, []).append(run)
    lists = sorted(found.values(), key=lambda members: members[0].method != "none")
    settings = [compared(members[0]) for members in lists]
    labels = [_label(members[0], mine, lists, settings) for members, mine in zip(lists, settings, strict=True)]
    colours = _colours([members[0].method for members in lists])
    return [
        Group(_unique(labels, i), tuple(members), mine, colours[i])
        for i, (members, mine) in enumerate(zip(lists, settings, strict=True))
    ]


def _colours(methods: Sequence[str]) -> list[int]:
    free, taken = iter(range(len(COLOURS), len(COLOURS) + len(methods))), set[int]()
    result = []
    for method in methods:
        colour = COLOURS.get(method, -1)
        colour = next(free) if colour < 0 or colour in taken else colour
        taken.add(colour)
        result.append(colour)
    return result


def compared(run: Run) -> dict[str, Any]:
    """The settings that make a run another one, with dotted keys; options that came later at their defaults."""
    config = with_defaults(run.config) if run.config else {}
    return {k: v for k, v in flat(config).items() if k not in IGNORED and not k.startswith("engine.")}


def _label(run: Run, mine: dict[str, Any], lists: Sequence[Sequence[Run]], settings: Sequence[dict[str, Any]]) -> str:
    """The name, and what sets it apart from others of that name."""
    namesakes = [s for members, s in zip(lists, settings, strict=True) if members[0].name == run.name and s is not mine]
    keys = [k for k in mine if any(json.dumps(s.get(k)) != json.dumps(mine[k]) for s in namesakes)]
    details = ", ".join(f"{key.removeprefix('pruning.')} {_word(mine[key])}" for key in keys[:4])
    return f"{run.name} ({details})" if details else run.name


def _word(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)[:60]


def _unique(labels: Sequence[str], index: int) -> str:
    same = [i for i, label in enumerate(labels) if label == labels[index]]
    return labels[index] if len(same) == 1 else f"{labels[index]} #{same.index(index) + 1}"


def matching_dense(group: Group, groups: Sequence[Group]) -> Group | None:
    """The dense runs on the same network, data and epochs, if there are any."""
    keys = ("epochs", "model.name", "data.name", "data.size")
    for other in groups:
        if other.dense and all(other.settings.get(k) == group.settings.get(k) for k in keys):
            return other
    return None
