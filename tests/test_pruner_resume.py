"""A run that is interrupted between any two epochs continues as if it had not been."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from asfp import AsfpError, ConstantSchedule, HardPruner, PruneStep, SoftPruner
from asfp.criteria import random

EPOCHS = 5


class Run:
    """Real training with momentum and weight decay on fixed random data."""

    def __init__(self, kind: type[SoftPruner], options: dict[str, Any]) -> None:
        torch.manual_seed(7)
        self.model = nn.Sequential(
            nn.Conv2d(2, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(),
            nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.BatchNorm2d(8), nn.ReLU(),
            nn.Conv2d(8, 12, 1), nn.BatchNorm2d(12), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(12, 3),
        )  # fmt: skip
        self.x, self.y = torch.randn(24, 2, 6, 6), torch.arange(24) % 3
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)
        self.pruner = kind(self.model, 0.5, EPOCHS, **options)

    def epoch(self, epoch: int) -> PruneStep:
        for x, y in zip(self.x.split(8), self.y.split(8), strict=True):
            self.optimizer.zero_grad()
            nn.functional.cross_entropy(self.model(x), y).backward()
            self.optimizer.step()
            if isinstance(self.pruner, HardPruner):
                self.pruner.enforce_()
        return self.pruner.step(epoch)

    def save(self) -> bytes:
        buffer = io.BytesIO()
        parts = {"model": self.model, "optimizer": self.optimizer, "pruner": self.pruner}
        torch.save({name: part.state_dict() for name, part in parts.items()}, buffer)
        return buffer.getvalue()

    def load(self, data: bytes) -> None:
        state = torch.load(io.BytesIO(data), weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.pruner.load_state_dict(state["pruner"])


@pytest.mark.parametrize("kind", [SoftPruner, HardPruner])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"criterion": random(3), "interval": 2},
        {"criterion": "geometric_median", "zero_maps": True},
        {"criterion": "bn_scale", "interval": 2, "schedule": ConstantSchedule(0.5)},
    ],
    ids=["l2", "random, every 2nd", "geometric median, zero maps", "bn scale, constant"],
)
def test_continues_identically(kind: type[SoftPruner], options: dict[str, Any]) -> None:
    whole = Run(kind, options)
    steps, saved = [], [whole.save()]
    for epoch in range(1, EPOCHS + 1):
        steps.append(whole.epoch(epoch))
        saved.append(whole.save())
    assert any(step.regrown > 0 for step in steps) == (kind is SoftPruner)
    for stop in range(EPOCHS):
        resumed = Run(kind, options)
        resumed.load(saved[stop])
        assert [resumed.epoch(epoch) for epoch in range(stop + 1, EPOCHS + 1)] == steps[stop:]
        for (name, a), b in zip(whole.model.state_dict().items(), resumed.model.state_dict().values(), strict=True):
            assert torch.equal(a, b), name
        assert whole.pruner.masks.keys() == resumed.pruner.masks.keys()
        assert all(torch.equal(mask, resumed.pruner.masks[name]) for name, mask in whole.pruner.masks.items())


def test_state_is_a_copy(tmp_path: Path) -> None:
    run = Run(SoftPruner, {})
    run.epoch(1)
    state = run.pruner.state_dict()
    before = {name: mask.clone() for name, mask in state["masks"].items()}
    other = Run(SoftPruner, {})
    other.pruner.load_state_dict(state)
    run.epoch(5)
    other.epoch(5)
    assert all(torch.equal(mask, before[name]) for name, mask in state["masks"].items())
    assert all(mask.data_ptr() != other.pruner.masks[name].data_ptr() for name, mask in state["masks"].items())


def changed(state: dict[str, Any], key: str, value: object) -> dict[str, Any]:
    return {**state, "settings": {**state["settings"], key: value}}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("pruner", "HardPruner"), ("epochs", 6), ("interval", 2), ("criterion", "l1"), ("zero_maps", True),
        ("rates", [0.1] * 8), ("layers", {"0": 0.5}), ("selection", "nested"),
    ],
)  # fmt: skip
def test_state_of_other_settings(key: str, value: object) -> None:
    pruner = Run(SoftPruner, {}).pruner
    with pytest.raises(AsfpError, match=rf"saved with {key}=.*this pruner has {key}=.*same arguments"):
        pruner.load_state_dict(changed(pruner.state_dict(), key, value))


def test_state_of_another_model() -> None:
    run = Run(SoftPruner, {})
    run.epoch(5)
    state = run.pruner.state_dict()
    for mask in (torch.ones(9, dtype=torch.bool), torch.ones(8)):
        with pytest.raises(AsfpError, match=r"mask of '0'.*does not fit the model"):
            run.pruner.load_state_dict({**state, "masks": {**state["masks"], "0": mask}})
    masks: dict[str, Tensor] = {name: mask for name, mask in state["masks"].items() if name != "6"}
    with pytest.raises(AsfpError, match=r"no mask for \['6'\]"):
        run.pruner.load_state_dict({**state, "masks": masks})


@pytest.mark.parametrize("state", [None, {}, {"masks": {}}, [1], {"settings": 1, "masks": {}}])
def test_what_is_no_state(state: Any) -> None:
    with pytest.raises(AsfpError, match=r"not the state of a pruner.*state_dict\(\)"):
        Run(SoftPruner, {}).pruner.load_state_dict(state)
