"""Settings that cannot be: each is one line that says what to do, before anything is trained."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

import asfp.train.assemble
import asfp.train.sources
from asfp import AsfpError
from asfp.cli import app
from asfp.data import ImageData
from asfp.train import config_from
from asfp.train.assemble import build_model, start_fabric, step_mode
from asfp.train.config import EngineConfig
from asfp.train.evaluate import accuracy, predict
from asfp.train.sources import build_data

DIGITS = {"name": "digits", "size": 8, "batch": 64}
CPU = {"accelerator": "cpu", "progress": "none"}
SIZES: Any = SimpleNamespace(classes=10, shape=(3, 16, 16))


def processes(world: int = 1, rank: int = 0, device: str = "cpu") -> Any:
    return SimpleNamespace(device=torch.device(device), global_rank=rank, local_rank=rank, world_size=world)


def test_a_wrong_model_is_an_error_on_the_command_line(tmp_path: Path) -> None:
    recipe = tmp_path / "mine.toml"
    recipe.write_text('epochs = 1\n[model]\nname = "resnet8"\n[data]\nname = "digits"\n[engine]\naccelerator = "cpu"')
    done = CliRunner().invoke(app, ["train", str(recipe), "model.options.num_classes=5", f"output={tmp_path / 'run'}"])
    assert done.exit_code == 2
    assert "resnet8 gives (5,) scores an image, the data has 10 classes: leave num_classes out" in done.stderr


class Two(nn.Module):
    """Another output in training, as torchvision's googlenet."""

    def forward(self, images: Tensor) -> Any:
        scores = images.mean((2, 3)).repeat(1, 4)[:, :10]
        return (scores, scores) if self.training else scores


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Two(), "mine gives a tuple in training, not one tensor of scores: .* model.options.aux_logits=false"),
        (nn.Conv2d(3, 10, 1), r"mine gives \(10, 16, 16\) scores an image, the data has 10 classes"),
        (nn.Conv2d(4, 10, 1), r"mine cannot take images of \(3, 16, 16\) \(.*channels.*\): set data.size"),
        (nn.Conv2d(3, 10, 20), r"mine cannot take images of \(3, 16, 16\)"),
    ],
)
def test_what_a_model_gives_is_looked_at(model: nn.Module, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asfp.train.assemble, "create_model", lambda name, **options: model)
    with pytest.raises(AsfpError, match=message):
        build_model(config_from({"model": {"name": "mine"}}), SIZES)


def test_the_look_leaves_the_model_and_the_random_numbers_as_they_were() -> None:
    state = torch.random.get_rng_state()
    model = build_model(config_from({"model": {"name": "resnet8"}}), SIZES)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(module.training for module in model.modules())
    statistics = {name: buffer for name, buffer in model.named_buffers() if "running_mean" in name or "num" in name}
    assert statistics
    assert not any(buffer.any() for buffer in statistics.values())


@pytest.mark.parametrize("engine", [{"accelerator": "tpu"}, {"accelerator": "cpu", "precision": "transformer-engine"}])
def test_engines_that_are_not_installed(engine: dict[str, str]) -> None:
    with pytest.raises(AsfpError, match=r"^engine.accelerator='.*not met"):
        start_fabric(config_from({"engine": engine}))


def test_several_machines_need_a_launcher() -> None:
    with pytest.raises(AsfpError, match=r"torchrun --nnodes=2 --nproc-per-node=1 .* -m asfp train"):
        start_fabric(config_from({"engine": CPU | {"nodes": 2}}))


def test_processes_of_fabric_run_are_not_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LT_CLI_USED", "1")
    assert start_fabric(config_from({"engine": CPU})).world_size == 1


@pytest.mark.slow  # two processes
def test_fabric_run(tmp_path: Path) -> None:
    text = 'epochs = 1\n[model]\nname = "resnet8"\n[data]\nname = "digits"\nsize = 8\n[engine]\nprogress = "none"\n'
    (tmp_path / "mine.toml").write_text(text + 'accelerator = "cpu"\n')
    (tmp_path / "script.py").write_text("from asfp.cli import main\nmain()\n")
    start = "from lightning.fabric.cli import _main; _main()"
    command = [sys.executable, "-c", start, "run", "--accelerator=cpu", "--devices=2", "--strategy=ddp", "script.py"]
    done = subprocess.run(
        [*command, "train", "mine.toml", "output=run"], cwd=tmp_path, capture_output=True, text=True, timeout=300,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert (tmp_path / "run" / "record.json").exists()


def test_a_step_is_only_captured_in_precisions_that_it_is_right_in() -> None:
    gpu = processes(device="cuda")
    for precision in ("auto", "32-true", "bf16-mixed"):
        assert step_mode(EngineConfig(precision=precision), gpu) == "graph"
        assert step_mode(EngineConfig(precision=precision, compile="graph"), gpu) == "graph"
    for precision in ("16-mixed", "bf16-true", "16-true", "64-true", "16", "64"):
        assert step_mode(EngineConfig(precision=precision), gpu) == "eager"
        assert step_mode(EngineConfig(precision=precision, compile="compile"), gpu) == "compile"
        with pytest.raises(AsfpError, match=rf"graph is not for engine.precision={precision}: use bf16-mixed or 32-"):
            EngineConfig(precision=precision, compile="graph")
    with pytest.raises(AsfpError, match="'graph' is for one GPU"):
        step_mode(EngineConfig(compile="graph"), processes(world=2, device="cuda"))


def test_every_process_needs_two_images_of_a_batch() -> None:
    config = config_from({"data": DIGITS | {"batch": 4}})
    assert build_data(config, processes(world=2)).steps == 1437 // 4
    with pytest.raises(AsfpError, match=r"data.batch=4 is too small for 3 processes: .* set data.batch=6 or more"):
        build_data(config, processes(world=3))


class Order:
    """A fabric that notes who is let in when."""

    def __init__(self, rank: int, told: list[str]) -> None:
        self.device, self.global_rank, self.local_rank, self.world_size = torch.device("cpu"), 2 + rank, rank, 4
        self.told = told

    @contextmanager
    def rank_zero_first(self, local: bool = False) -> Iterator[None]:
        self.told.append(f"enter local={local}")
        yield
        self.told.append("leave")


@pytest.mark.parametrize(("rank", "loads"), [(0, True), (1, False)])
@pytest.mark.parametrize("fails", [False, True])
def test_the_first_process_of_a_machine_downloads(
    monkeypatch: pytest.MonkeyPatch, rank: int, loads: bool, fails: bool
) -> None:
    told: list[str] = []

    def cifar10(root: str, download: bool) -> ImageData:
        told.append(f"download={download}")
        if fails:
            raise AsfpError("no network")
        return ImageData(torch.zeros(40, 3, 32, 32), torch.zeros(40).long(), torch.zeros(0), torch.zeros(0), 10)

    monkeypatch.setattr(asfp.train.sources, "cifar10", cifar10)
    config = config_from({"data": {"download": True, "batch": 10}})
    if fails:
        with pytest.raises(AsfpError, match="no network"):
            build_data(config, Order(rank, told))
    else:
        assert build_data(config, Order(rank, told)).steps == 4
    assert told == ["enter local=True", f"download={loads}", "leave"]


class Few:
    """A data set with so many test images, in one batch if any."""

    def __init__(self, count: int) -> None:
        self.count = count

    def test_batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        if self.count:
            yield torch.eye(3)[: self.count], torch.arange(self.count)


class Sums:
    """A fabric that adds what the other process has counted."""

    def __init__(self, others: list[int]) -> None:
        self.others = iter(others)

    def autocast(self) -> Any:
        return torch.no_grad()

    def all_reduce(self, count: Tensor, reduce_op: str) -> Tensor:
        assert reduce_op == "sum"
        return count + next(self.others)


def test_a_process_may_have_no_test_images_but_not_all() -> None:
    model, nothing, some = nn.Linear(3, 3), Few(0), Few(2)
    with torch.no_grad():
        model.weight.copy_(torch.eye(3))
        model.bias.zero_()
    found, labels = predict(model, nothing, nn.Identity())  # type: ignore[arg-type]
    assert found.shape == labels.shape == (0,)
    assert accuracy(Sums([3, 4]), model, nothing, nn.Identity()) == 0.75  # type: ignore[arg-type]
    assert accuracy(Sums([0, 2]), model, some, nn.Identity()) == 0.5  # type: ignore[arg-type]
    with pytest.raises(AsfpError, match=r"there is no test image that can be read: repair those under data.root"):
        accuracy(Sums([0, 0]), model, nothing, nn.Identity())  # type: ignore[arg-type]
