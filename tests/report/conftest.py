"""Real runs to report on: a few epochs on the embedded digits."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from asfp.train import config_from, train

SETTINGS: dict[str, Any] = {
    "epochs": 3,
    "model": {"name": "resnet8"},
    "data": {"name": "digits", "size": 8, "batch": 64},
    "optimizer": {"lr": 0.05, "milestones": [2]},
    "engine": {"accelerator": "cpu", "progress": "none"},
}
RUNS: dict[str, dict[str, Any]] = {
    "dense": {"pruning": {"method": "none"}},
    "asfp-0": {"pruning": {"method": "asfp"}, "seed": 0},
    "asfp-1": {"pruning": {"method": "asfp"}, "seed": 1},
    "late": {"pruning": {"method": "asfp", "interval": 3}},
}


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of finished runs: dense, ASFP with two seeds, and ASFP pruned once."""
    root = tmp_path_factory.mktemp("runs")
    for name, changes in RUNS.items():
        own = {"name": name.partition("-")[0].replace("late", "asfp"), "output": str(root / name)}
        train(config_from(SETTINGS | changes | own))
    return root


@pytest.fixture
def copied(runs: Path, tmp_path: Path) -> Callable[[str], Path]:
    """A copy of one of the runs, to be damaged."""

    def copy(name: str) -> Path:
        return Path(shutil.copytree(runs / name, tmp_path / name))

    return copy
