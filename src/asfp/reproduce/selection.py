"""How filters of a residual stream are chosen: accuracy against measured latency, at the same multiply-adds."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from asfp.errors import AsfpError
from asfp.reproduce.definition import Definition, Row, Run, dense, pruned


@dataclass(frozen=True)
class Choice:
    """A selection with its align, its rate and, where it has one of its own, the rate of what writes a stream."""

    selection: str
    align: int
    rate: float
    streams: float | None = None

    @property
    def cells(self) -> tuple[str, ...]:
        """
        >>> Choice("coupled", 8, 0.345).cells
        ('ResNet-56', 'coupled', '8', '34.5 %', '34.5 %')
        """
        streams = self.rate if self.streams is None else self.streams
        return "ResNet-56", self.selection, f"{self.align}", f"{100 * self.rate:g} %", f"{100 * streams:g} %"

    @property
    def run(self) -> Run:
        """ASFP from scratch.

        >>> Choice("coupled", 8, 0.345).run.name(0), Choice("coupled", 1, 0.11, 0.501).run.name(0)
        ('resnet56-asfp-rate0.345-coupled-align8-seed0', 'resnet56-asfp-rate0.11-coupled-streams0.501-seed0')
        """
        changes = {}
        if self.selection != "independent":
            changes[self.selection] = f'pruning.selection="{self.selection}"'
        if self.streams is not None:
            changes[f"streams{self.streams:g}"] = f"pruning.streams={self.streams:g}"
        if self.align > 1:
            changes[f"align{self.align}"] = f"pruning.align={self.align}"
        return pruned("resnet56", "asfp", self.rate, tag="-".join(changes), changes=tuple(changes.values()))


CHOICES = (
    Choice("independent", 1, 0.4),
    Choice("nested", 1, 0.345),
    Choice("coupled", 1, 0.345),
    Choice("coupled", 8, 0.345),
    Choice("coupled", 1, 0.11, 0.501),
)
"""The rates that leave 45 % of ResNet-56's multiply-adds in the compact model (`asfp measure resnet56 --selection
coupled --target-macs 0.461`). Independent pruning keeps stream channels that others write, so it needs a higher rate;
45 % is what its recorded runs have left. 0.501 is half of each stream, by a curve that gets there before the end."""

FIG_SELECTION = Definition(
    "fig-selection",
    "ASFP by selection at the same multiply-adds, accuracy in percent, and measured time",
    ("network", "selection", "align", "filters pruned", "of streams"),
    (
        Row(("ResNet-56", "dense", "-", "0 %", "0 %"), dense("resnet56"), priority=1, seeds=3),
        *(Row(choice.cells, choice.run, dense=dense("resnet56"), priority=3, seeds=3) for choice in CHOICES),
    ),
    ("Time: the unpruned weights pruned in one step, on the fastest engine of each device (`benchmarks/latency.py`).",),
    view="latency",
    picture="latency",
)


@dataclass(frozen=True)
class Latency:
    """Measured time of a run's compact model, and of the unpruned network in the same run of the benchmark."""

    engine: str
    batch: int
    ms: float
    dense_ms: float

    @property
    def saved(self) -> float:
        """Percent of the unpruned network's time."""
        return 100 * (1 - self.ms / self.dense_ms)


def latencies(results: Path, device: str) -> dict[str, Latency]:
    """From a run's label to its time on the fastest engine, of the record for the device in `results`/latency.

    The unpruned network's time is that of the same record. Several seeds of a run count with the median.

    >>> latencies(Path("nowhere"), "cpu")
    {}
    """
    paths = sorted((results / "latency").glob(f"{device}-*.json"))
    if len(paths) > 1:
        names = ", ".join(path.name for path in paths)
        raise AsfpError(f"{results / 'latency'} has several records for {device} ({names}): keep the one to be shown")
    times: dict[str, dict[str, list[float]]] = {}
    batch = 1
    for path in paths:
        try:
            for row in json.loads(path.read_text(encoding="utf-8"))["rows"]:
                label, batch = str(row["model"]).rpartition("-seed")[0], int(row["batch"])
                if not 0 < row["latency_ms"] < math.inf:
                    raise ValueError(f"latency_ms is {row['latency_ms']}, it must be above 0")
                times.setdefault(label, {}).setdefault(str(row["engine"]), []).append(float(row["latency_ms"]))
        except (ValueError, KeyError, TypeError, OverflowError) as error:
            raise AsfpError(f"{path} is not a record of benchmarks/latency.py ({error!r}): make it again") from error
    fastest = {label: min((median(ms), engine) for engine, ms in cells.items()) for label, cells in times.items()}
    base = fastest.get(dense("resnet56").label)
    if base is None:
        return {}
    return {label: Latency(engine, batch, ms, base[0]) for label, (ms, engine) in fastest.items()}
