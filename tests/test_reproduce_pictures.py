"""Pictures: drawn where something is recorded, with axes that can be read and compared."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure
from PIL import Image

from asfp.reproduce import DEFINITIONS, NAMES
from asfp.reproduce.pictures import PICTURES
from reproduction import call, planned, put, put_times

FIGURES = [name for name in NAMES if name.startswith("fig-")]


def drawn(folder: Path, name: str, **options: Any) -> list[Any]:
    """The axes of a figure."""
    figure = Figure()
    PICTURES[DEFINITIONS[name].picture](figure, planned(folder, name, **options))
    return figure.axes


@pytest.mark.parametrize("name", FIGURES)
def test_pictures_are_drawn(tmp_path: Path, name: str) -> None:
    for i, row in enumerate(DEFINITIONS[name].rows[:9] if name in DEFINITIONS else ()):
        put(tmp_path, row.run, 0, 0.92 + i / 1000)
    rows = DEFINITIONS["fig-selection"].rows
    put_times(tmp_path, "cpu", openvino=[(row.run.label, 9.0 - i) for i, row in enumerate(rows)])
    done = call(name, "--plan", "--results", str(tmp_path), "--runs", str(tmp_path / "runs"), "--output", str(tmp_path))
    assert done.exit_code == 0, done.stderr
    picture = Image.open(tmp_path / f"{name}.png").convert("L")
    assert min(picture.size) > 300
    assert len(set(picture.resize((64, 64)).tobytes())) > 10  # not one colour
    drawing = (tmp_path / f"{name}.svg").read_text()
    assert drawing.count("<path") > 10
    assert f"picture: {tmp_path / name}.svg" in done.stdout


@pytest.mark.parametrize("name", [name for name in FIGURES if name in DEFINITIONS])
def test_nothing_recorded_is_no_picture(tmp_path: Path, name: str) -> None:
    output = tmp_path / "out"
    folders = ["--results", str(tmp_path), "--runs", str(tmp_path / "runs"), "--output", str(output)]
    done = call(name, "--plan", *folders)
    assert done.exit_code == 2
    assert (
        f"nothing is recorded yet for {name}, so there is no picture: run it first, asfp reproduce {name}"
        in done.stderr
    )
    assert "not yet run" in done.stderr  # the table is shown all the same
    assert not output.exists()


def test_records_without_times_are_no_picture_of_times(tmp_path: Path) -> None:
    put(tmp_path, DEFINITIONS["fig-selection"].rows[0].run, 0, 0.92)
    put_times(tmp_path, "cpu", a=[("resnet56-asfp", 4.0), ("resnet20", 3.0)])
    folders = ["--results", str(tmp_path), "--runs", str(tmp_path / "runs"), "--output", str(tmp_path / "out")]
    done = call("fig-selection", "--plan", *folders)
    assert done.exit_code == 2
    assert "no time is measured yet of the runs of fig-selection" in done.stderr
    put_times(tmp_path, "cpu", a=[("resnet56", 4.0)])
    assert call("fig-selection", "--plan", *folders).exit_code == 0


@pytest.mark.parametrize(
    ("name", "labels"),
    [
        ("fig-interval", [f"{n}" for n in range(1, 11)]),
        ("fig-d", [f"1/{n}" for n in range(7, 17)]),
    ],
)
def test_a_single_value_has_ticks_that_mean_something(tmp_path: Path, name: str, labels: list[str]) -> None:
    put(tmp_path, DEFINITIONS["fig-interval"].rows[0].run, 0, 0.92)
    for options, expected in (({}, labels), ({"only": "=resnet56-asfp"}, labels[name == "fig-d" :][:1])):
        (axes,) = drawn(tmp_path, name, **options)
        assert [tick.get_text() for tick in axes.get_xticklabels()] == expected
        bottom, top = axes.get_ylim()
        assert top - bottom >= 1
        assert bottom < 92 < top


def test_gaps_share_their_axes(tmp_path: Path) -> None:
    deep = {"accuracy_before": [0.5, 0.9], "accuracy_after": [0.1, 0.9], "regrown": [0.0, 0.0]}
    even = {"accuracy_before": [0.5] * 5, "accuracy_after": [0.5] * 5, "regrown": [0.0] * 5}
    for row, epochs in zip(DEFINITIONS["fig-gap"].rows, (deep, even), strict=False):
        put(tmp_path, row.run, 0, 0.9, epochs=epochs)
    panels = drawn(tmp_path, "fig-gap")
    assert len(panels) == 2
    assert {axes.get_ylim() for axes in panels} == {(-42, 100)}
    assert {axes.get_xlim() for axes in panels} == {(1, 6)}


def test_points_at_the_same_multiply_adds_stand_side_by_side(tmp_path: Path) -> None:
    for row in DEFINITIONS["fig-flops"].rows:
        put(tmp_path, row.run, 0, 0.92)
    panels = drawn(tmp_path, "fig-flops")
    assert len(panels) == 4
    for axes in panels:
        at = {c.get_label().split(" (")[0]: [float(x) for x in c[0].get_xdata()] for c in axes.containers}
        assert set(at) == {"SFP, ours", "ASFP, ours"}
        for left, right in zip(at["SFP, ours"], at["ASFP, ours"], strict=True):
            assert right - left == pytest.approx(0.8)
        assert re.match(r"ResNet-(56|110), (scratch|pre-trained)$", axes.get_title())
