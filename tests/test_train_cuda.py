"""The captured step on a GPU: the same training as the plain step, pruning and learning rates included."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from asfp.train import config_from
from asfp.train.assemble import assemble, set_learning_rate, start_fabric

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


def losses(
    mode: str, method: str, precision: str = "32-true", steps: int = 40, model: str = "resnet20"
) -> tuple[list[float], Any]:
    config = config_from(
        {
            "epochs": 4,
            "model": {"name": model},
            "data": {"name": "digits", "size": 32, "batch": 128},
            "optimizer": {"lr": 0.02},
            "pruning": {"method": method},
            "engine": {"compile": mode, "precision": precision, "accelerator": "cuda"},
        }
    )
    parts = assemble(config, start_fabric(config))
    parts.model.train()
    found: list[torch.Tensor] = []
    epoch = 0
    while len(found) < steps:
        epoch += 1
        set_learning_rate(parts.optimizer, 0.02 / epoch)
        found += [parts.step(x, y, 1.0).clone() for x, y in parts.data.train_batches(epoch)]
        assert parts.pruner is not None
        parts.pruner.step(epoch)
    return torch.stack(found).tolist(), parts


@pytest.mark.parametrize("method", ["asfp", "hard"])
def test_captured_and_plain_steps_train_alike(method: str) -> None:
    torch.backends.cudnn.allow_tf32 = False
    plain, slow = losses("eager", method)
    fast, quick = losses("graph", method)
    print(method, [f"{a:.4f}/{b:.4f}" for a, b in zip(plain[::6], fast[::6], strict=True)])
    assert plain[:12] == pytest.approx(fast[:12], rel=2e-2)  # the first epoch: float order alone
    assert sum(plain[-12:]) == pytest.approx(sum(fast[-12:]), rel=0.25)  # later ones drift, as two plain runs do
    assert quick.step.graph is not None
    for layer in quick.pruner.layers:
        zero = ~quick.pruner.masks[layer.name]
        assert not layer.weight[zero].any()
    assert slow.optimizer.param_groups[0]["lr"] == pytest.approx(float(quick.optimizer.param_groups[0]["lr"]))


def test_hard_masks_hold_within_the_graph() -> None:
    _, parts = losses("graph", "hard")
    parts.model.train()
    for x, y in parts.data.train_batches(4):
        parts.step(x, y, 1.0)
        for layer in parts.pruner.layers:
            assert not layer.weight[~parts.pruner.masks[layer.name]].any()
