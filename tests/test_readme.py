"""The README's Python runs as printed."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import asfp

README = (Path(__file__).parent.parent / "README.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```", README, flags=re.MULTILINE | re.DOTALL)


def names_of_a_training_loop() -> dict[str, Any]:
    """What the README's reader already has: a model, a number of epochs, and a way to train for one of them."""
    model = asfp.create_model("resnet8")
    optimiser = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    images, labels = torch.randn(8, 3, 8, 8), torch.arange(8)

    def train_one_epoch(model: nn.Module) -> None:
        optimiser.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()
        optimiser.step()

    return {"model": model, "epochs": 3, "train_one_epoch": train_one_epoch, "example_inputs": images[:1]}


@pytest.mark.parametrize(
    ("page", "record"),
    [
        ("README.md", "speedup/cpu-batch1-fp32.md"),
        ("docs/choosing.md", "speed/cpu-batch1-fp32.md"),
        ("docs/choosing.md", "speed/cpu-batch1-fp32-constants.md"),
        ("docs/choosing.md", "speed/cuda-batch64-fp32.md"),
        ("docs/choosing.md", "speed/cuda-batch64-fp32-torch.md"),
        ("docs/choosing.md", "speed/cuda-batch64-bf16.md"),
    ],
)
def test_times_are_those_of_the_record(page: str, record: str) -> None:
    root = Path(__file__).parent.parent
    table = re.findall(r"^\|.*$", (root / "results" / record).read_text(), flags=re.MULTILINE)
    assert len(table) > 3
    assert "\n".join(table) in (root / page).read_text()


RUNS = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth", "eleventh", ".")


@pytest.mark.parametrize("row", ["independent", "nested", "coupled", "Torch-Pruning"])
def test_all_runs_of_the_speed_benchmark_are_told(row: str) -> None:
    """Not the best of them: the last column of every record, in the order in which they were made."""
    root = Path(__file__).parent.parent
    name = r"Torch-Pruning [\d.]+, round_to 32" if row == "Torch-Pruning" else f"{row}, align 32"
    cells = []
    for network in ("resnet18", "resnet34", "resnet50"):
        found = []
        for folder in RUNS:
            record = (root / "results" / "speed" / folder / "cpu-batch1-fp32.md").read_text()
            found += re.findall(rf"^\| {network} \| {name} \|.*\| ([\d.]+) \|$", record, flags=re.MULTILINE)
        assert len(found) == len(RUNS)
        cells.append(", ".join(found))
    assert f"| {row} | {' | '.join(cells)} |" in (root / "docs" / "choosing.md").read_text()


def test_the_times_of_small_networks_are_those_of_the_record() -> None:
    root = Path(__file__).parent.parent
    rows = json.loads((root / "results/speed/cpu-batch1-resnet56.json").read_text())["rows"]
    page = (root / "docs/choosing.md").read_text()
    pruned = [row for row in rows if "time_saved_percent" in row]
    assert len(pruned) == 24
    for row in pruned:
        (line,) = re.findall(rf"^\| {re.escape(row['model'])} \|.*$", page, flags=re.MULTILINE)
        low, high = row["time_saved_interval"]
        assert f"| {row['macs_saved_percent']:.1f} |" in line
        star = " *" if row["doubt"] else ""
        assert f"| {row['time_saved_percent']:.1f} ({low:.1f} to {high:.1f}){star} |" in line


def test_the_first_screen_shows_the_loop_and_the_commands() -> None:
    screen = "\n".join(README.splitlines()[:40])
    assert BLOCKS[0] in screen
    assert "make demo" in screen
    assert "make test" in screen


def test_the_loop_prunes_the_readers_model() -> None:
    names = names_of_a_training_loop()
    exec(BLOCKS[0], names)
    for module in names["model"].modules():
        if isinstance(module, nn.Conv2d):
            zero = int((module.weight.flatten(1).abs().sum(1) == 0).sum())
            assert zero == int(0.4 * module.out_channels)


def test_all_blocks_run_one_after_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = names_of_a_training_loop()
    reader = names["model"]
    for block in BLOCKS:
        exec(block, names)
        if "asfp.save(" in block:
            loaded = asfp.load(tmp_path / "small.safetensors", model=asfp.create_model("resnet8"))
            assert asfp.verify(reader, loaded, names["example_inputs"]).ok
            assert loaded.plan.macs_after < 0.6 * loaded.plan.macs_before
        if "asfp.verify(" in block:
            assert asfp.verify(reader, names["small"], names["example_inputs"]).ok
        if "create_model" in block:
            names["model"] = asfp.create_model("resnet8")
