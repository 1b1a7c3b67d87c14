"""Two processes by torchrun: the same masks on both, and the result of one process with the same global batch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from asfp import AsfpError
from asfp.train import config_from, train

SCRIPT = """
import os, sys, torch, warnings
import torch.distributed as dist
from asfp.train import load_config
import asfp.train.loop as loop
real = loop.finish
def finish(config, parts, history):
    rank = parts.fabric.global_rank
    torch.save({"masks": parts.pruner.masks, "weights": parts.model.state_dict(), "world": parts.fabric.world_size},
               config.folder / f"rank{rank}.pt")
    return real(config, parts, history)
loop.finish = finish
record = loop.train(load_config(sys.argv[1]))
print("ACCURACY", record["result"]["accuracy"], record["result"]["test_images"], flush=True)
"""


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without distributed")
def test_two_processes_are_one(tmp_path: Path) -> None:
    pytest.importorskip("timm")
    tables = {
        "epochs": 2,
        # group norm: the result does not depend on how a batch is dealt out
        "model": {"name": "timm:test_resnet", "options": {"norm_layer": "groupnorm1"}},
        "data": {"name": "digits", "size": 8, "batch": 256, "test_batch": 100},
        "optimizer": {"lr": 0.02, "milestones": []},
        "pruning": {"method": "asfp", "rate": 0.4, "momentum": "zero", "soften": 0.5, "soften_epochs": 2},
        "engine": {"accelerator": "cpu", "progress": "none", "precision": "64-true"},  # float order tells nothing here
    }
    one = config_from(tables | {"output": str(tmp_path / "one")})
    record = train(one)
    two = config_from(tables | {"output": str(tmp_path / "two")})
    (tmp_path / "recipe.toml").write_text(two.to_toml())
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        "script.py",
        "recipe.toml",
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=300, env=environment
    )
    assert done.returncode == 0, done.stderr[-2000:]
    ranks = [torch.load(tmp_path / "two" / f"rank{rank}.pt", weights_only=True) for rank in (0, 1)]
    assert [r["world"] for r in ranks] == [2, 2]
    for part in ("masks", "weights"):
        assert all(torch.equal(ranks[0][part][name], ranks[1][part][name]) for name in ranks[0][part])
    single = torch.load(tmp_path / "one" / "model.pt", weights_only=True)
    for name, weight in ranks[0]["weights"].items():
        assert torch.allclose(weight, single[name].double(), atol=1e-6), name
    lines = [line.split() for line in done.stdout.splitlines() if line.startswith("ACCURACY")]
    assert len(lines) == 2
    assert lines[0] == lines[1]
    assert int(lines[0][2]) == 360  # each test image once
    assert float(lines[0][1]) == record["result"]["accuracy"]


def test_synchronised_batch_norm_needs_gpus(tmp_path: Path) -> None:
    tables = {"model": {"name": "resnet8"}, "data": {"name": "digits"}, "output": str(tmp_path)}
    with pytest.raises(AsfpError, match=r"engine.sync_bn=true needs GPUs"):
        train(config_from(tables | {"engine": {"sync_bn": True, "accelerator": "cpu"}}))
