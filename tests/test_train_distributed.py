"""Two processes: the same masks on both, the result of one process with the same global batch, and stops together."""

from __future__ import annotations

import multiprocessing
import os
import runpy
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from asfp import AsfpError
from asfp.train import config_from, train
from asfp.train.checkpoint import read_newest
from asfp.train.journal import read_metrics

SCRIPT = """
import atexit, sys, torch
import torch.distributed as dist
def say(*words):  # in one piece: two processes write to one pipe
    sys.stdout.write(" ".join(map(str, words)) + "\\n")
    sys.stdout.flush()
atexit.register(lambda: say("LEFT", not dist.is_initialized()))  # called last
from asfp.train import load_config
import asfp.train.loop as loop
real = loop.finish
def finish(config, parts, *rest):
    rank = parts.fabric.global_rank
    torch.save({"masks": parts.pruner.masks, "weights": parts.model.state_dict(), "world": parts.fabric.world_size},
               config.folder / f"rank{rank}.pt")
    return real(config, parts, *rest)
loop.finish = finish
record = loop.train(load_config(sys.argv[1]))
say("ACCURACY", record["result"]["accuracy"], record["result"]["test_images"])
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
    assert done.stdout.count("LEFT True") == 2  # an open group aborts the process now and then, when all is done


def test_synchronised_batch_norm_needs_gpus(tmp_path: Path) -> None:
    tables = {"model": {"name": "resnet8"}, "data": {"name": "digits"}, "output": str(tmp_path)}
    with pytest.raises(AsfpError, match=r"engine.sync_bn=true needs GPUs"):
        train(config_from(tables | {"engine": {"sync_bn": True, "accelerator": "cpu"}}))


PAIR = """
import os, sys
os.environ.update(ENVIRONMENT)
import torch, warnings
warnings.simplefilter("ignore")
torch.set_num_threads(1)
import asfp.train.loop as loop
from asfp.cli import main
RANK = int(ENVIRONMENT["RANK"])
exec(CHANGES)
sys.stderr = open(f"{RECIPE}.{RANK}.err", "w", buffering=1)
sys.stdout = open(f"{RECIPE}.{RANK}.out", "w", buffering=1)
sys.argv = ["asfp", "train", RECIPE]
main()
"""
CUT_OFF = """
real, saves = loop._save, []
def save(*arguments):
    real(*arguments)
    saves.append(1)
    if len(saves) == 4:
        os._exit(9)
loop._save = save
"""
# batches whose images cannot be read: one that was the first process's, one that was the second's, one of both
EMPTY = """
from asfp.data.resident import ResidentData
real = ResidentData.train_batches
def train_batches(self, epoch, start=0):
    for step, (images, labels) in enumerate(real(self, epoch, start), start):
        empty = step in (1 + RANK, 3)
        yield (images[:0], labels[:0]) if empty else (images, labels)
ResidentData.train_batches = train_batches
"""
SMALL: dict[str, Any] = {
    "epochs": 2,
    "model": {"name": "resnet8"},
    "data": {"name": "digits", "size": 8, "batch": 300},  # five steps an epoch
    "optimizer": {"lr": 0.02, "milestones": []},
    "pruning": {"method": "asfp", "rate": 0.4},
    "engine": {"accelerator": "cpu", "progress": "plain", "checkpoint_steps": 2},
}


@pytest.fixture(scope="module")
def processes() -> Any:
    """Children that have everything imported already."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["asfp.train.loop", "lightning.fabric", "torch.utils.tensorboard", "sklearn.datasets"]
    )
    return context


class Pair:
    """Two processes of one run, as torchrun would start them."""

    def __init__(self, processes: Any, folder: Path, changes: str = "", **tables: Any) -> None:
        self.folder, self.recipe = folder, folder.with_suffix(".toml")
        self.recipe.write_text(config_from(SMALL | tables | {"output": str(folder)}).to_toml())
        script = folder.with_suffix(".py")
        script.write_text(PAIR)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        shared = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        shared |= {"TORCHELASTIC_RUN_ID": "none", "GROUP_RANK": "0", "OMP_NUM_THREADS": "1"}
        self.children = []
        for rank in ("0", "1"):
            environment = shared | {"RANK": rank, "LOCAL_RANK": rank}
            values = {"ENVIRONMENT": environment, "RECIPE": str(self.recipe), "CHANGES": changes}
            child = processes.Process(target=runpy.run_path, args=(str(script), values))
            child.start()
            self.children.append(child)

    def said(self, rank: int, stream: str) -> str:
        file = Path(f"{self.recipe}.{rank}.{stream}")
        return file.read_text() if file.exists() else ""

    def codes(self) -> list[int]:
        for child in self.children:
            child.join(240)
            child.kill()
        return [child.exitcode for child in self.children]


def assert_done(pair: Pair) -> None:
    assert pair.codes() == [0, 0], pair.said(0, "err") + pair.said(1, "err")


def result(folder: Path) -> tuple[list[dict[str, Any]], dict[str, torch.Tensor]]:
    rows = [{key: value for key, value in row.items() if key != "seconds"} for row in read_metrics(folder)]
    return rows, torch.load(folder / "model.pt", weights_only=True)


def test_a_signal_to_one_process_stops_both_with_a_checkpoint(processes: Any, tmp_path: Path) -> None:
    pair = Pair(processes, tmp_path / "run", epochs=500, data=SMALL["data"] | {"batch": 64})
    end = time.monotonic() + 180
    while "epoch   1/500" not in pair.said(0, "out"):
        assert time.monotonic() < end, pair.said(0, "err")
        time.sleep(0.05)
    os.kill(pair.children[1].pid, signal.SIGTERM)
    assert pair.codes() == [143, 143], pair.said(0, "err") + pair.said(1, "err")
    assert pair.said(0, "err").splitlines()[-1].startswith("Stopped after epoch ")
    state = read_newest(pair.folder)
    assert state is not None
    progress = state["progress"]
    assert progress["step"] % 8 == 0
    steps = f" and {progress['step']} steps" if progress["step"] else ""
    assert f"Stopped after epoch {progress['epoch']}{steps};" in pair.said(0, "err")
    assert "[optimizer]" in pair.said(0, "out")
    assert pair.said(1, "out") == pair.said(1, "err") == ""  # one process speaks


@pytest.mark.slow
def test_two_processes_that_were_cut_off_end_with_the_same_bits(processes: Any, tmp_path: Path) -> None:
    pytest.importorskip("timm")
    model = {"name": "timm:test_resnet", "options": {"drop_rate": 0.5}}
    whole = Pair(processes, tmp_path / "whole", model=model)
    assert_done(whole)
    cut = Pair(processes, tmp_path / "cut", CUT_OFF, model=model)
    assert cut.codes() == [9, 9], cut.said(0, "err") + cut.said(1, "err")
    state = read_newest(cut.folder)
    assert state is not None
    assert (state["progress"]["epoch"], state["progress"]["step"]) == (1, 2)
    assert_done(Pair(processes, tmp_path / "cut", model=model))
    (rows, weights), (other_rows, other_weights) = result(whole.folder), result(cut.folder)
    assert rows == other_rows
    assert [name for name in weights if not torch.equal(weights[name], other_weights[name])] == []


def test_batches_that_are_empty_on_some_processes(
    processes: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("timm")
    from asfp.data.resident import ResidentData

    tables = {
        "model": {"name": "timm:test_resnet", "options": {"norm_layer": "groupnorm1"}},
        "data": SMALL["data"] | {"corrupt": "skip"},
        "engine": SMALL["engine"] | {"precision": "64-true", "progress": "none"},
    }
    pair = Pair(processes, tmp_path / "two", EMPTY, **tables)
    real = ResidentData.train_batches

    def train_batches(self: ResidentData, epoch: int, start: int = 0) -> Iterator[Any]:
        for step, (images, labels) in enumerate(real(self, epoch, start), start):
            half = len(labels) // 2
            part = {1: slice(half, None), 2: slice(half), 3: slice(0)}.get(step, slice(None))
            yield images[part], labels[part]

    monkeypatch.setattr(ResidentData, "train_batches", train_batches)
    train(config_from(SMALL | tables | {"output": str(tmp_path / "one")}))
    assert_done(pair)
    (rows, weights), (other_rows, other_weights) = result(tmp_path / "one"), result(pair.folder)
    for row, other in zip(rows, other_rows, strict=True):
        assert row["loss"] == pytest.approx(other["loss"], rel=1e-5)
    for name, weight in weights.items():
        assert torch.allclose(weight, other_weights[name], atol=1e-6), name
