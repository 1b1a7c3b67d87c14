"""What is said before training of a last pruning that nothing is trained after, and whether the advice helps."""

from __future__ import annotations

import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

import asfp
from asfp.train.config import PruningConfig, TrainConfig
from asfp.train.pruning import build_pruner, taken_last

SIZES = SimpleNamespace(shape=(3, 32, 32))
ADVICE = re.compile(r"pruning\.(\w+)=([\d.]+)")


def told(config: TrainConfig) -> str:
    net = asfp.create_model("resnet8")
    pruner = build_pruner(config, net, SIZES)
    assert pruner is not None
    return taken_last(pruner, config, net, SIZES)


@pytest.mark.parametrize(
    ("epochs", "pruning", "named"),
    [
        (200, {"rate": 0.5}, ("rate", "freeze_epochs")),
        (200, {"rate": 0.5, "schedule": "linear"}, ("rate", "freeze_epochs")),
        (200, {"rate": 0.5, "interval": 50}, ("rate", "freeze_epochs")),
        (200, {"rate": 0.4, "streams": 0.5}, ("streams", "freeze_epochs")),
        (200, {"method": "hard", "rate": 0.5, "schedule": "asymptotic"}, ("rate",)),
        (200, {"layers": {"conv1": 0.5}}, ("freeze_epochs",)),
    ],
    ids=str,
)
def test_every_setting_that_is_named_helps(epochs: int, pruning: dict[str, Any], named: tuple[str, ...]) -> None:
    config = TrainConfig(epochs=epochs, pruning=PruningConfig(**pruning))
    said = told(config)
    assert "nothing is trained after it" in said
    ways = [dict(ADVICE.findall(way)) for way in said.partition(": ")[2].split(" or ")]
    assert ways
    for way in ways:
        assert way.keys() & set(named)
        values = {name: int(value) if name == "freeze_epochs" else float(value) for name, value in way.items()}
        assert told(replace(config, pruning=replace(config.pruning, **values))) == ""  # type: ignore[arg-type]


@pytest.mark.parametrize("pruning", [{"rate": 0.4}, {"rate": 0.5, "method": "sfp"}, {"rate": 0.5, "freeze_epochs": 10}])
def test_nothing_is_said_where_nothing_is_taken(pruning: dict[str, Any]) -> None:
    assert told(TrainConfig(epochs=200, pruning=PruningConfig(**pruning))) == ""
