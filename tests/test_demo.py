"""The demo at a fraction of its size: the real data, network, pruner and files."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch import nn

from asfp import AsfpError, AsymptoticSchedule
from asfp.artifact import load
from asfp.data import ImageData, digits
from asfp.demo import METHODS, DemoSettings, EpochRecord, run_demo, train_method


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """As the demo itself: networks this small only wait for a second thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def small() -> ImageData:
    return digits(size=8)


def test_run_writes_table_record_and_picture(tmp_path: Path) -> None:
    shown = io.StringIO()
    settings = DemoSettings(epochs=2, rate=0.4, output=tmp_path / "new" / "folder")
    result = run_demo(settings, Console(file=shown, width=120), engines=["torch"])

    assert [m.method for m in result.methods] == ["dense", "SFP", "ASFP"]
    dense, sfp, asfp = result.methods
    assert dense.zeroed == 0
    assert sfp.zeroed == asfp.zeroed == 264  # floor(0.4 * 16) * 7 + floor(0.4 * 32) * 6 + floor(0.4 * 64) * 6
    assert dense.before > 0.8  # it learns
    assert [e.rate for e in sfp.epochs] == [0.4, 0.4]
    assert [e.rate for e in asfp.epochs] == pytest.approx([AsymptoticSchedule(0.4, 2)(1), 0.4])

    text = shown.getvalue()
    assert f"{dense.before:.1%}" in text
    assert f"{asfp.after:.1%}" in text
    assert "264 of 688" in text
    assert "time for 64 images, torch: " in text
    assert "demo --rate 0.6" in text
    assert str(result.picture) in text

    record = json.loads(result.record.read_text())
    assert record["settings"]["rate"] == 0.4
    assert record["made_with"]["torch"] == torch.__version__
    assert record["methods"][2]["epochs"][1]["after"] == asfp.after
    assert result.picture.read_bytes().startswith(b"\x89PNG\r\n")
    written = sorted(p.name for p in result.picture.parent.iterdir())
    assert written == ["compact.safetensors", "demo.json", "demo.png"]

    assert result.compact is not None
    assert result.compact.compact_accuracy == result.compact.masked_accuracy == asfp.after
    assert result.compact.compact_macs < 0.5 * result.compact.masked_macs
    assert record["compact"]["compact_macs"] == result.compact.compact_macs
    assert "equal: largest difference" in text
    assert load(result.compact.file).plan.macs_after == result.compact.compact_macs


def test_pruned_filters_are_zero_in_the_returned_model(small: ImageData) -> None:
    model, result = train_method("SFP", DemoSettings(epochs=1, rate=0.25), small)
    zero = sum(int((m.weight.flatten(1).abs().sum(1) == 0).sum()) for m in model.modules() if isinstance(m, nn.Conv2d))
    assert zero == result.zeroed == 172  # a quarter of 688


def test_methods_start_and_shuffle_alike_and_runs_repeat(small: ImageData) -> None:
    settings = DemoSettings(epochs=1, seed=5)
    before = {method: train_method(method, settings, small)[1].epochs[0].before for method in METHODS}
    assert before["dense"] == before["SFP"] == before["ASFP"]
    assert train_method("ASFP", settings, small)[1].epochs == train_method("ASFP", settings, small)[1].epochs


def test_training_leaves_the_callers_random_numbers_alone(small: ImageData) -> None:
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    train_method("dense", DemoSettings(epochs=1), small)
    assert torch.equal(torch.rand(3), expected)


def test_an_interrupted_run_keeps_what_was_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import asfp.demo.run as run

    def stop_in_sfp(method: str, *args: object) -> object:
        if method == "SFP":
            raise KeyboardInterrupt
        return train_method(method, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(run, "train_method", stop_in_sfp)
    shown = io.StringIO()
    with pytest.raises(KeyboardInterrupt):
        run_demo(DemoSettings(epochs=1, output=tmp_path), Console(file=shown, width=200))
    assert f"Finished and kept in {tmp_path / 'demo.json'}: dense" in shown.getvalue()
    assert [m["method"] for m in json.loads((tmp_path / "demo.json").read_text())["methods"]] == ["dense"]


def test_every_epoch_is_reported_as_it_ends(small: ImageData) -> None:
    seen: list[EpochRecord] = []
    _, result = train_method("ASFP", DemoSettings(epochs=2), small, seen.append)
    assert tuple(seen) == result.epochs
    assert [e.epoch for e in seen] == [1, 2]


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"rate": 1.5}, "rate=1.5 is not a pruning rate"),
        ({"rate": 0.0}, "rate=0.0 is not a pruning rate"),
        ({"rate": float("nan")}, "rate=nan"),
        ({"epochs": 0}, "epochs=0 is not a count of epochs"),
        ({"seed": -1}, "seed=-1 is not a seed"),
    ],
)
def test_wrong_settings(kwargs: dict[str, float], message: str) -> None:
    with pytest.raises(AsfpError, match=message):
        DemoSettings(**kwargs)


def test_unknown_method(small: ImageData) -> None:
    with pytest.raises(AsfpError, match="method='FPGM' is unknown: use one of dense, SFP, ASFP"):
        train_method("FPGM", DemoSettings(epochs=1), small)
