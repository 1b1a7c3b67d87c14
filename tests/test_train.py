"""A run from start to end: every method, what is written, and folders of images with bad ones among them."""

from __future__ import annotations

import json
import os
import urllib.error
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from asfp import AsfpError, VerificationError, load
from asfp.cli import app
from asfp.data import ResidentData, digits
from asfp.train import config_from, train
from asfp.train.files import only_run
from asfp.train.journal import read_metrics
from asfp.train.norms import FILTERS, read_filters

SETTINGS: dict[str, Any] = {
    "epochs": 2,
    "model": {"name": "resnet8"},
    "data": {"name": "digits", "size": 8, "batch": 64},
    "optimizer": {"lr": 0.05, "milestones": [1]},
    "engine": {"accelerator": "cpu", "progress": "none"},
}


@pytest.mark.parametrize("method", ["none", "sfp", "asfp", "hard"])
def test_every_method_ends_with_an_equal_compact_model(tmp_path: Path, method: str) -> None:
    record = train(config_from(SETTINGS | {"pruning": {"method": method}, "output": str(tmp_path)}))
    result, sizes = record["result"], record["compact"]
    assert result["accuracy"] == result["accuracy_compact"] == result["accuracy_after_last_pruning"]
    assert result["predictions_that_differ"] == 0
    assert result["test_images"] == 360
    assert (sizes["macs"] < 0.7 * sizes["macs_dense"]) == (method != "none")
    assert record == json.loads((tmp_path / "record.json").read_text())
    small = load(tmp_path / "compact.safetensors").eval()
    test = digits(size=8)
    with torch.no_grad():
        right = (small(test.test_images).argmax(1) == test.test_labels).float().mean().item()
    assert right == pytest.approx(result["accuracy"], abs=1e-6)
    rows = read_metrics(tmp_path)
    assert [row["epoch"] for row in rows] == [1, 2]
    assert [row["lr"] for row in rows] == [0.05, pytest.approx(0.01)]
    assert rows[-1]["zeroed"] == (0 if method == "none" else 92)
    assert rows[-1]["regrown"] == 0.0 if method in ("none", "hard") else rows[-1]["regrown"] > 0.0
    assert set(rows[0]["seconds"]) == {"train", "evaluate", "prune", "log"}
    assert any(b"filter norms/conv1" in file.read_bytes() for file in tmp_path.rglob("events.out*"))
    assert (tmp_path / FILTERS).exists() == (method != "none")
    if method != "none":
        filters = read_filters(tmp_path / FILTERS)
        assert filters.epochs == [1, 2]
        assert sum(int((~kept[-1]).sum()) for kept in filters.kept.values()) == rows[-1]["zeroed"]
        state = torch.load(tmp_path / "model.pt", weights_only=True)
        for name, norms in filters.norms.items():
            after = state[f"{name}.weight"].flatten(1).norm(dim=1).numpy()
            assert after == pytest.approx(norms[-1] * filters.kept[name][-1], rel=2e-3)
    assert list((tmp_path / "tensorboard").iterdir())
    assert "[pruning]" in (tmp_path / "config.toml").read_text()


def test_same_seed_same_run_and_switches_are_put_back(tmp_path: Path) -> None:
    engine = SETTINGS["engine"] | {"deterministic": True}
    runs = [
        train(config_from(SETTINGS | {"engine": engine, "seed": seed, "output": str(tmp_path / str(i))}))
        for i, seed in enumerate((1, 1, 2))
    ]
    losses = [run["epochs"]["loss"] for run in runs]
    assert losses[0] == losses[1] != losses[2]
    assert not torch.are_deterministic_algorithms_enabled()


def test_from_trained_weights(tmp_path: Path) -> None:
    first = train(config_from(SETTINGS | {"pruning": {"method": "none"}, "output": str(tmp_path / "a")}))
    model = {"name": "resnet8", "weights": str(tmp_path / "a" / "model.pt")}
    second = train(
        config_from(SETTINGS | {"pruning": {"method": "none"}, "model": model, "output": str(tmp_path / "b")})
    )
    assert second["epochs"]["loss"][0] < 0.8 * first["epochs"]["loss"][0]
    model["weights"] = str(tmp_path / "nothing.pt")
    with pytest.raises(AsfpError, match=r"there is no such file; train the dense recipe first"):
        train(config_from(SETTINGS | {"model": model, "output": str(tmp_path / "c")}))


def image_tree(root: Path, bad: bool) -> None:
    from PIL import Image

    generator = torch.Generator().manual_seed(0)
    for half, count in (("train", 12), ("val", 5)):
        for label in ("cat", "dog"):
            (root / half / label).mkdir(parents=True)
            for number in range(count):
                pixels = torch.randint(256, (40, 50, 3), generator=generator, dtype=torch.uint8).numpy()
                Image.fromarray(pixels).save(root / half / label / f"{number}.png")
    if bad:
        (root / "train" / "cat" / "3.png").write_bytes(b"not an image")
        (root / "val" / "dog" / "1.png").write_bytes(b"\x89PNG\r\n\x1a\n and then nothing")


def folder_settings(tmp_path: Path, **data: Any) -> dict[str, Any]:
    defaults = {"name": "imagefolder", "root": str(tmp_path / "images"), "batch": 8, "size": 32, "workers": 0}
    return SETTINGS | {"data": defaults | data, "output": str(tmp_path / "run")}


def test_a_folder_of_images(tmp_path: Path) -> None:
    image_tree(tmp_path / "images", bad=False)
    record = train(config_from(folder_settings(tmp_path)))
    assert record["result"]["test_images"] == 10
    assert record["result"]["predictions_that_differ"] == 0


@pytest.mark.slow  # starts worker processes
def test_batches_of_a_folder_do_not_depend_on_workers(tmp_path: Path) -> None:
    from asfp.data.folder import FolderData

    image_tree(tmp_path, bad=False)
    plain, busy = (FolderData(tmp_path, 8, 0, size=32, workers=n).train_batches(2) for n in (0, 2))
    for (x, y), (other_x, other_y) in zip(plain, busy, strict=True):
        assert torch.equal(y, other_y)
        assert torch.equal(x, other_x)


def test_unreadable_images_are_fatal_or_named_and_counted(tmp_path: Path) -> None:
    image_tree(tmp_path / "images", bad=True)
    with pytest.raises(AsfpError, match=r"3.png cannot be read as an image: .* or set data.corrupt=skip"):
        train(config_from(folder_settings(tmp_path)))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        record = train(config_from(folder_settings(tmp_path, corrupt="skip") | {"output": str(tmp_path / "skip")}))
    told = [str(w.message) for w in caught if "is left out" in str(w.message)]
    assert len(told) == 2
    assert any("3.png is left out" in text for text in told)
    assert record["result"]["test_images"] == 9
    assert record["result"]["skipped_images"] == 2


def test_a_root_that_holds_no_images(tmp_path: Path) -> None:
    with pytest.raises(AsfpError, match=r"data.root must hold train/CLASS/\* and val/CLASS/\*"):
        train(config_from(folder_settings(tmp_path)))


def empty_batches(monkeypatch: pytest.MonkeyPatch, empty: set[int]) -> list[float]:
    """Steps, counted from 0, in which no image can be read; the list gets the loss of each step that is taken."""
    import asfp.train.loop as loop

    real, take, losses = ResidentData.train_batches, loop.take_step, []

    def train_batches(self: ResidentData, epoch: int, start: int = 0) -> Iterator[Any]:
        for step, (images, labels) in enumerate(real(self, epoch, start), start):
            yield (images[:0], labels[:0]) if step in empty else (images, labels)

    def taken(*arguments: Any) -> Any:
        losses.append(take(*arguments))
        return losses[-1]

    monkeypatch.setattr(ResidentData, "train_batches", train_batches)
    monkeypatch.setattr(loop, "take_step", taken)
    return losses


def test_a_batch_without_a_readable_image_is_a_step_that_trains_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    last = len(digits(size=8).train_labels) // 64  # steps are counted from 0: the last one is short, and empty here
    losses = empty_batches(monkeypatch, {0, 2, last})
    config = config_from(SETTINGS | {"epochs": 1, "output": str(tmp_path)})
    record = train(config)
    assert len(losses) == last + 1 - 3
    assert record["epochs"]["loss"] == [pytest.approx(sum(map(float, losses)) / len(losses), abs=1e-4)]


def test_training_on_nothing_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    empty_batches(monkeypatch, set(range(100)))
    with pytest.raises(AsfpError, match=r"epoch 1 had no image to train on \(1,437 training images"):
        train(config_from(SETTINGS | {"output": str(tmp_path)}))
    assert not (tmp_path / "record.json").exists()


def test_the_weights_are_kept_when_compaction_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fail(*arguments: Any) -> None:
        raise VerificationError("on purpose")

    monkeypatch.setattr("asfp.train.record.compact", fail)
    with pytest.raises(VerificationError, match="on purpose"):
        train(config_from(SETTINGS | {"epochs": 1, "output": str(tmp_path)}))
    assert "linear.weight" in torch.load(tmp_path / "model.pt", weights_only=True)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('{"format": 1, ', "Expecting property name"),
        ("[1, 2]", "'list' object has no attribute 'keys'"),
        ('{"config": {}}', "it has no compact, result, seconds"),
        ('{"config": {"model": 3}, "result": {}, "compact": {}, "seconds": {}}', ""),
    ],
)
def test_a_torn_or_foreign_record(tmp_path: Path, text: str, why: str) -> None:
    (tmp_path / "record.json").write_text(text)
    with pytest.raises(AsfpError, match=rf"record.json is not the record of a run \(.*{why}.*\): delete it and run"):
        train(config_from(SETTINGS | {"output": str(tmp_path)}))


@pytest.mark.skipif(os.name == "nt", reason="there are no such locks there")
def test_one_run_at_a_time_in_a_folder(tmp_path: Path) -> None:
    config = config_from(SETTINGS | {"epochs": 1, "output": str(tmp_path / "run")})
    with (
        only_run(config.folder),
        pytest.raises(AsfpError, match=r"another process trains in .*run: wait for it to end"),
    ):
        train(config)
    assert train(config)["result"]["test_images"] == 360
    with only_run(config.folder):
        pass


def test_only_a_full_disk_is_told_to_free_space(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("mine")
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(config_from(SETTINGS | {"output": str(tmp_path / "taken")}).to_toml())
    done = CliRunner().invoke(app, ["train", str(recipe)])
    assert done.exit_code == 2
    assert "taken' cannot be made a folder (File exists): use another one with output=..." in done.stderr
    assert "free the space" not in done.stderr

    def offline(config: Any) -> None:
        raise urllib.error.URLError("no route")

    monkeypatch.setattr("asfp.train.show.run", offline)
    done = CliRunner().invoke(app, ["train", str(recipe)])
    assert done.exit_code == 2
    assert "a download failed (no route); check the network, or put the file into " in done.stderr
    assert "checkpoints by hand" in done.stderr

    def missing(config: Any) -> None:
        raise FileNotFoundError(2, "No such file or directory", "there")

    monkeypatch.setattr("asfp.train.show.run", missing)
    done = CliRunner().invoke(app, ["train", str(recipe)])
    assert done.stderr == "Error: there: No such file or directory\n"
