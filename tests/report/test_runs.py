"""What is read from run folders and records: whole, partial, torn, foreign and hostile ones."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from asfp import AsfpError, AsymptoticSchedule
from asfp.cli import app
from asfp.report.chart import CODES, Dots, Line
from asfp.report.content import Content, gather
from asfp.report.groups import grouped
from asfp.report.history import filter_heat
from asfp.report.layers import layer_rows
from asfp.report.plot import page_data, safe_json
from asfp.report.runs import find_runs, read_run
from asfp.report.sections import body
from asfp.train.journal import read_metrics
from asfp.train.norms import read_filters

Copy = Callable[[str], Path]


def test_a_finished_run_is_read_whole(runs: Path) -> None:
    run = read_run(runs / "asfp-0")
    record = json.loads((runs / "asfp-0" / "record.json").read_text())
    assert run.notices == ()
    assert run.finished
    assert (run.accuracy, run.differ, run.macs) == (record["result"]["accuracy"], 0, record["compact"]["macs"])
    assert run.epochs == [1, 2, 3]
    assert run.columns["loss"] == pytest.approx([row["loss"] for row in read_metrics(run.path)], rel=1e-5)
    rows = {row.name: row for row in layer_rows(run)}
    assert sum(row.macs_after or 0 for row in rows.values()) == run.macs
    assert rows["layer3.0.conv1"].kept == 39
    assert set(run.sizes) == {"model.pt", "compact.safetensors"}


def test_runs_are_found_in_folders_and_in_order(runs: Path, tmp_path: Path) -> None:
    assert [path.name for path in find_runs([runs])] == ["asfp-0", "asfp-1", "dense", "late"]
    assert find_runs([runs / "late", runs / "late"]) == [runs / "late"]
    (tmp_path / "x.json").write_text("{}")
    assert find_runs([tmp_path]) == [tmp_path / "x.json"]


def test_a_path_that_is_not_there_is_an_error_with_the_nearest_name(runs: Path) -> None:
    with pytest.raises(AsfpError, match=r"asfp-2'\. Did you mean asfp-"):
        find_runs([runs / "asfp-2"])


def test_seeds_make_a_band_and_settings_make_groups(runs: Path) -> None:
    content = gather([runs])
    labels = {group.label: len(group.runs) for group in content.groups}
    assert labels == {"dense": 1, "asfp (interval 1)": 2, "asfp (interval 3)": 1}
    accuracy = next(chart for chart in content.charts if chart.key == "accuracy").panels[0]
    line = next(s for s in accuracy.series if s.name == "asfp (interval 1)")
    assert isinstance(line, Line)
    assert line.low is not None
    both = np.array([read_run(runs / f"asfp-{seed}").columns["accuracy_after"] for seed in (0, 1)], dtype=float)
    assert line.y == pytest.approx(100 * both.mean(axis=0))
    assert line.low == pytest.approx(100 * (both.mean(axis=0) - both.std(axis=0, ddof=1)))
    assert all(isinstance(s, Line) and s.low is None for s in accuracy.series if s.name == "dense")


def test_the_schedule_shows_its_three_points(runs: Path) -> None:
    chart = next(c for c in gather([runs / "asfp-0"]).charts if c.key == "schedule")
    line, dots = chart.panels[0].series
    assert isinstance(dots, Dots)
    assert list(zip(dots.x, dots.y, strict=True)) == [(0.0, 0.0), (0.375, 30.0), (3.0, 40.0)]
    schedule = AsymptoticSchedule(0.4, 3)
    assert line.y == pytest.approx([100 * schedule(epoch) for epoch in (1, 2, 3)], rel=1e-5)


def test_runs_that_differ_in_one_setting_make_an_ablation(runs: Path) -> None:
    chart = next(c for c in gather([runs]).charts if c.key == "ablations")
    assert [panel.x_title for panel in chart.panels] == ["pruning.interval"]
    dots = [s for s in chart.panels[0].series if isinstance(s, Dots)]
    assert [d.x for d in dots] == [[1.0], [3.0]]
    assert [d.error is None for d in dots] == [False, True]


def changed(file: Path, target: Path, **pruning: Any) -> None:
    """A record as if it had been made with these settings; None takes one away."""
    record = json.loads(file.read_text())
    table = record["config"]["pruning"] | pruning
    record["config"]["pruning"] = {key: value for key, value in table.items() if value is not None}
    target.write_text(json.dumps(record))


def test_records_from_before_an_option_stand_with_those_after(runs: Path, tmp_path: Path) -> None:
    changed(runs / "asfp-0" / "record.json", tmp_path / "a.json", streams=None, freeze_epochs=None)
    changed(runs / "asfp-1" / "record.json", tmp_path / "b.json")
    assert [(group.label, len(group.runs)) for group in gather([tmp_path]).groups] == [("asfp", 2)]


def test_streams_without_a_rate_of_their_own_are_drawn_at_that_of_all(runs: Path, tmp_path: Path) -> None:
    for name, streams in (("a", None), ("b", 0.0), ("c", 0.5)):
        changed(runs / "asfp-0" / "record.json", tmp_path / f"{name}.json", streams=streams)
    chart = next(c for c in gather([tmp_path]).charts if c.key == "ablations")
    (panel,) = chart.panels
    assert panel.x_title == "pruning.streams"
    assert sorted(s.x[0] for s in panel.series if isinstance(s, Dots)) == [0.0, 0.4, 0.5]


def test_the_papers_points_stand_beside_its_networks(copied: Copy) -> None:
    folder = copied("asfp-0")
    record = json.loads((folder / "record.json").read_text())
    assert all(not getattr(s, "hollow", False) for c in gather([folder]).charts for p in c.panels for s in p.series)
    record["config"]["model"]["name"], record["config"]["data"]["name"] = "resnet56", "cifar10"
    (folder / "record.json").write_text(json.dumps(record))
    (panel,) = next(c for c in gather([folder]).charts if c.key == "macs").panels
    ours, *paper = [s for s in panel.series if isinstance(s, Dots)]
    assert ours.x == [pytest.approx(100 * (1 - record["compact"]["macs"] / record["compact"]["macs_dense"]))]
    assert [s.hollow for s in paper] == [True, True]
    assert sorted(y for s in paper for y in s.y) == [92.26, 92.44, 93.12, 93.35, 93.59]


def test_heat_cells_tell_kept_zeroed_dead_and_back(runs: Path) -> None:
    run = read_run(runs / "asfp-0")
    heat = filter_heat(run, "run", 0, 10**6)
    assert heat is not None
    history = read_filters(runs / "asfp-0" / "filters.jsonl")
    for part in heat.parts:
        kept, norms = history.kept[part.name].T, history.norms[part.name].T
        assert ((part.cells >= CODES["back"]) == kept).all()
        assert ((part.cells == CODES["dead"]) == (~kept & (norms == 0))).all()
        back = np.zeros_like(kept)
        back[:, 1:] = kept[:, 1:] & ~kept[:, :-1]
        assert ((part.cells == CODES["back"]) == back).all()


def test_heat_maps_are_thinned_out_to_fit(runs: Path) -> None:
    run = read_run(runs / "asfp-0")
    heat = filter_heat(run, "run", 0, 1)
    assert heat is not None
    assert heat.x == [3]
    assert heat.note == "One epoch in 3 is drawn."


def test_streams_say_who_writes_what(runs: Path) -> None:
    (heat,) = gather([runs / "asfp-0"]).streams
    kept = read_filters(runs / "asfp-0" / "filters.jsonl").kept
    assert [part.labels for part in heat.parts] == [
        ("conv1", "layer1.0.conv2"),
        ("layer2.0.conv2", "shortcut (no weights)"),
        ("layer3.0.conv2", "shortcut (no weights)"),
    ]
    for part in heat.parts:
        for label, row in zip(part.labels, part.cells, strict=True):
            expected = kept[label][-1] if label in kept else np.arange(len(row)) < len(row) // 2
            assert (row == expected).all()


@pytest.mark.parametrize(
    ("file", "content", "notice"),
    [
        ("record.json", None, "not finished, there is no record.json"),
        ("record.json", '{"result": ', "is no JSON"),
        ("record.json", "[1, 2]", "is not a record of `asfp train`"),
        ("record.json", '{"result": 5}', "is not a record of `asfp train`"),
        ("filters.jsonl", None, "no filters.jsonl: which filters were zeroed is not shown"),
        ("filters.jsonl", "hello\nworld}", "is not a record of filters"),
        ("compact.safetensors", "not tensors", "holds no plan of a compact model"),
        (
            "metrics.jsonl",
            '{"epoch": 1, "loss": 1}\nrubbish\n{"epoch": 3, "loss": 1}\n',
            "1 of 3 lines are not metrics",
        ),
        ("bench.json", "{}", "is not from `asfp bench --json`"),
    ],
)
def test_what_is_missing_or_foreign_becomes_a_notice(copied: Copy, file: str, content: str | None, notice: str) -> None:
    folder = copied("asfp-0")
    if content is None:
        (folder / file).unlink()
    else:
        (folder / file).write_text(content)
    page = body(gather([folder]))
    text = " ".join(map(str, read_run(folder).notices))
    assert notice in text
    assert "What is missing" in page


@pytest.mark.parametrize(
    "config",
    [
        '[model]\nname = "resnet8"\noptions = {weights = "/etc/passwd"}',
        '[model]\nname = "nothing"',
        "model = 5",
        "[data]\nsize = 1000000",
    ],
)
def test_a_network_that_cannot_be_built_is_a_notice(copied: Copy, config: str) -> None:
    folder = copied("asfp-0")
    for name in ("record.json", "compact.safetensors"):
        (folder / name).unlink()
    (folder / "config.toml").write_text(config)
    content = gather([folder])
    assert content.filters
    assert not content.streams
    assert any("residual streams are not drawn" in str(notice) for notice in content.notices)


def test_torn_last_lines_are_left_out_quietly(copied: Copy) -> None:
    folder = copied("asfp-0")
    for name in ("metrics.jsonl", "filters.jsonl"):
        text = (folder / name).read_text()
        (folder / name).write_text(text[:-40])
    (folder / "record.json").unlink()
    run = read_run(folder)
    assert run.epochs == [1, 2]
    assert run.filters is not None
    assert run.filters.epochs == [1, 2]
    assert [notice.text[:12] for notice in run.notices] == ["not finished"]


def test_a_record_alone_makes_a_page(runs: Path) -> None:
    content = gather([runs / "asfp-0" / "record.json"])
    assert {chart.key for chart in content.charts} >= {"accuracy", "training", "schedule", "macs"}
    assert "a record alone" in str(content.notices[0])


def test_an_empty_folder_and_a_binary_file_make_a_page_with_a_notice(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "empty").mkdir()
    for path in (tmp_path / "x.json", tmp_path / "empty"):
        assert "no run that can be read" in body(gather([path]))


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=20)
    | st.just("<script>alert(1)</script>"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


def _changed(value: Any, path: list[int], new: Any) -> Any:
    if not path or not isinstance(value, dict | list) or not value:
        return new
    if isinstance(value, dict):
        key = sorted(value, key=str)[path[0] % len(value)]
        return {**value, key: _changed(value[key], path[1:], new)}
    index = path[0] % len(value)
    return [*value[:index], _changed(value[index], path[1:], new), *value[index + 1 :]]


@settings(max_examples=60)
@given(path=st.lists(st.integers(0, 50), max_size=4), new=JSON)
def test_a_record_of_any_content_makes_a_page(runs: Path, tmp_path_factory: Any, path: list[int], new: Any) -> None:
    record = json.loads((runs / "asfp-0" / "record.json").read_text())
    file = tmp_path_factory.mktemp("record") / "record.json"
    file.write_text(json.dumps(_changed(record, path, new)))
    content = gather([file])
    assert isinstance(content, Content)
    assert "<script>" not in body(content)
    assert "<" not in safe_json(page_data(content))


@settings(max_examples=40)
@given(
    rows=st.lists(st.dictionaries(st.sampled_from(["epoch", "loss", "lr", "rate", "accuracy_after"]), JSON), max_size=4)
)
def test_metrics_of_any_content_make_a_page(tmp_path_factory: Any, rows: list[dict[str, Any]]) -> None:
    folder = tmp_path_factory.mktemp("run")
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (folder / "config.toml").write_text(
        'name = "x"\nepochs = 3\n[pruning]\nmethod = "asfp"\nrate = 0.4\nschedule = "auto"\n'
    )
    content = gather([folder])
    assert "<script>" not in body(content)
    safe_json(page_data(content))


def test_colours_stay_with_methods(runs: Path) -> None:
    groups = grouped([read_run(runs / name) for name in ("late", "dense", "asfp-0")])
    colours = {group.label: group.colour for group in groups}
    assert colours == {"dense": 0, "asfp (interval 3)": 2, "asfp (interval 1)": 4}


def test_the_command_refuses_what_has_nothing_to_show(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "empty").mkdir()
    for path in (tmp_path / "x.json", tmp_path / "empty"):
        result = CliRunner().invoke(app, ["report", str(path), "--output", str(tmp_path / "page.html")])
        assert result.exit_code == 2
        assert "there is nothing to show" in " ".join(result.stderr.split())
        assert "Give run folders" in " ".join(result.stderr.split())
        assert not (tmp_path / "page.html").exists()


def test_the_command_says_that_a_run_has_only_begun(runs: Path, tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text((runs / "asfp-0" / "config.toml").read_text())
    (tmp_path / "metrics.jsonl").touch()
    result = CliRunner().invoke(app, ["report", str(tmp_path), "--output", str(tmp_path / "page.html"), "--bench"])
    said = " ".join(result.stderr.split())
    assert result.exit_code == 2
    assert "its first epoch has not ended yet" in said
    assert "follow it with --live" in said
