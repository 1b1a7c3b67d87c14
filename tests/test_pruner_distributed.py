"""Two processes that train one model together prune the same filters."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import asfp
from asfp import HardPruner, SoftPruner

WORLD = 2
CASES = [(SoftPruner, "independent"), (HardPruner, "independent"), (SoftPruner, "nested"), (HardPruner, "coupled")]


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.BatchNorm2d(16), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 4),
    )  # fmt: skip


def train(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=WORLD)
    results: list[dict[str, Any]] = []
    for kind, selection in CASES:
        model = DistributedDataParallel(build() if selection == "independent" else asfp.create_model("resnet8"))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)
        pruner = kind(model, 0.5, 3, selection=selection)
        generator = torch.Generator().manual_seed(100 + rank)  # each process has its own data
        for epoch in range(1, 4):
            for _ in range(2):
                x = torch.randn(4, 3, 8, 8, generator=generator)
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()
                if isinstance(pruner, HardPruner):
                    pruner.enforce_()
            step = pruner.step(epoch)
            masks = {name: layer.mask for name, layer in step.layers.items()}
            weights = {name: p.detach().clone() for name, p in model.module.named_parameters()}
            results.append({"masks": masks, "weights": weights, "regrown": step.regrown, "zeroed": step.zeroed})
    torch.save(results, Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.skipif(not dist.is_available(), reason="torch was built without distributed")
def test_all_processes_choose_alike(tmp_path: Path) -> None:
    mp.spawn(train, args=(str(tmp_path),), nprocs=WORLD)  # type: ignore[no-untyped-call]
    first, second = (torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(WORLD))
    assert len(first) == 3 * len(CASES)
    assert [len(a["masks"]) for a in first] == [2] * 6 + [7] * 6
    for a, b in zip(first, second, strict=True):
        assert (a["regrown"], a["zeroed"]) == (b["regrown"], b["zeroed"])
        assert set(a["masks"]) == set(b["masks"])
        for part in ("masks", "weights"):
            assert all(torch.equal(a[part][name], b[part][name]) for name in a[part])
    assert first[2]["zeroed"] == first[5]["zeroed"] == 16
