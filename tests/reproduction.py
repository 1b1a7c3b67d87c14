"""Records made by hand for the tests of `asfp reproduce`: right in form, with accuracies of our choice."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from typer.testing import CliRunner, Result

from asfp.cli import app
from asfp.reproduce import DEFINITIONS
from asfp.reproduce.definition import Run
from asfp.reproduce.plan import Places, Plan, arguments_of, find_recipes, make_plan
from asfp.reproduce.records import load_records
from asfp.train.config import load_config
from asfp.train.identity import settings
from asfp.train.record import write_record


def make_record(run: Run, seed: int, accuracy: float, **changes: Any) -> dict[str, Any]:
    """As if the run had ended with that share of the 10,000 test images right."""
    arguments = arguments_of(run, seed, Places(find_recipes()))
    config = load_config(arguments[0], arguments[1:])
    rising = [accuracy * (1 - 0.5 / (epoch + 1)) for epoch in range(1, config.epochs)] + [accuracy]
    pruned = config.pruning.method != "none"
    return {
        "format": 1,
        "name": config.name,
        "config": settings(config),
        "seed": seed,
        "result": {"accuracy": accuracy, "accuracy_compact": accuracy, "test_images": 10000},
        "compact": {"macs_dense": 1000, "macs": 500 if pruned else 1000},
        "seconds": {"train": 300.0, "evaluate": 30.0, "prune": 1.0},
        "hardware": {"device": "NVIDIA H200", "step": "graph"},
        "epochs": {
            "accuracy_before": rising,
            "accuracy_after": [a - 0.1 / (i + 1) for i, a in enumerate(rising)],
            "regrown": [0.25 for _ in rising],
        },
    } | changes


def put(folder: Path, run: Run, seed: int, accuracy: float, name: str = "", **changes: Any) -> Path:
    """Write such a record under folder/cifar10."""
    path = folder / "cifar10" / f"{name or run.name(seed)}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_record(path, make_record(run, seed, accuracy, **changes))
    return path


def put_times(folder: Path, device: str, **times: list[tuple[str, float]]) -> Path:
    """As if benchmarks/latency.py had measured these milliseconds, by engine, of seed 0 of each run."""
    rows = [
        {"model": f"{label}-seed0", "engine": engine, "batch": 1, "latency_ms": ms}
        for engine, cells in times.items()
        for label, ms in cells
    ]
    path = folder / "latency" / f"{device}-batch1-fp32.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"rows": rows}))
    return path


def call(*arguments: str) -> Result:
    """`asfp reproduce` with these arguments."""
    return CliRunner().invoke(app, ["reproduce", *arguments], env={"COLUMNS": "200", "TERM": "dumb"})


def planned(folder: Path, name: str, **options: Any) -> Plan:
    """The plan of a table or figure with the records under `folder` and the runs under `folder`/runs."""
    places = Places(find_recipes(), folder, folder / "runs")
    return make_plan(DEFINITIONS[name], places, load_records(folder), **options)
