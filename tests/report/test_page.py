"""The page: self-contained, small, escaped; the same in the terminal and as pictures; and the command line."""

from __future__ import annotations

import importlib
import importlib.util
import io
import json
import re
import sys
import xml.etree.ElementTree as ET
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

from asfp import AsfpError
from asfp.cli import app
from asfp.report import gather
from asfp.report.page import LARGEST, page
from asfp.report.sections import body
from asfp.report.still import write_figures
from asfp.report.text import as_text, schedule_text

Copy = Callable[[str], Path]
needs_plotly = pytest.mark.skipif(
    importlib.util.find_spec("plotly") is None, reason="needs plotly: pip install 'asfp[report]'"
)
HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\"'&[bold]$x$"


def call(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(a) for a in arguments], env={"COLUMNS": "200", "TERM": "dumb"})


class Tags(HTMLParser):
    """Counts elements, and collects ids, headings and what could fetch or run something."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.suspicious: list[str] = []
        self.ids: list[str] = []
        self.unnamed: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        for name, value in attrs:
            if name.startswith("on") or (name in ("src", "href") and not (value or "").startswith(("#", "data:"))):
                self.suspicious.append(f"{tag} {name}={value}")
            if name == "id":
                self.ids.append(value or "")
        if ("role", "img") in attrs and not dict(attrs).get("aria-label"):
            self.unnamed.append(str(attrs))


@needs_plotly
def test_the_page_stands_alone(runs: Path) -> None:
    text = page(gather([runs]))
    assert len(text.encode()) < LARGEST
    found = Tags(text)
    assert found.suspicious == []
    assert found.tags.count("script") == 3
    assert found.unnamed == []
    assert len(found.ids) == len(set(found.ids))
    assert found.tags.count("h1") == 1
    assert text.count("plotly.js v") == 1
    assert "connect-src 'none'" in text
    data = json.loads(re.findall(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)[0])
    drawn = set(re.findall(r'data-chart="(\w+)"', text))
    assert drawn == set(data["charts"])
    assert set(re.findall(r'data-heat="([\w-]+)"', text)) == set(data["heats"])


@needs_plotly
def test_words_of_records_are_escaped_everywhere(copied: Copy, tmp_path: Path) -> None:
    folder = copied("asfp-0")
    record = json.loads((folder / "record.json").read_text())
    record["name"] = record["config"]["name"] = record["commit"] = HOSTILE
    record["config"]["model"]["name"] = record["config"]["pruning"]["criterion"] = HOSTILE
    record["config"][HOSTILE] = {HOSTILE: HOSTILE}
    record["versions"][HOSTILE] = record["hardware"]["device"] = HOSTILE
    (folder / "record.json").write_text(json.dumps(record))
    row = {"model": HOSTILE, "engine": HOSTILE, "latency_ms": 1.0, "time_saved_percent": 5.0, "doubt": HOSTILE}
    (folder / "bench.json").write_text(json.dumps({"rows": [row]}))
    lines = (folder / "filters.jsonl").read_text().splitlines()
    head = json.loads(lines[0])
    head["layers"] = {(HOSTILE if name == "conv1" else name): n for name, n in head["layers"].items()}
    (folder / "filters.jsonl").write_text("\n".join([json.dumps(head), *lines[1:]]))
    content = gather([folder])
    text = page(content)
    found = Tags(text)
    assert found.suspicious == []
    assert found.tags.count("script") == 3
    assert found.tags.count("img") == 0
    assert "alert(1)" in text
    console = Console(width=300, record=True, file=io.StringIO())
    console.print(as_text(content))
    assert HOSTILE in console.export_text()
    for file in write_figures(content, tmp_path / "figures"):
        if file.suffix == ".svg":
            ET.parse(file)


@needs_plotly
def test_the_command_writes_a_page_and_says_what_is_missing(copied: Copy, tmp_path: Path) -> None:
    folder = copied("asfp-0")
    (folder / "record.json").unlink()
    done = call("report", folder, "-o", tmp_path / "r.html")
    assert done.exit_code == 0
    assert "r.html (4." in done.stdout
    assert "Note: " in done.stderr
    assert "not finished" in done.stderr
    assert (tmp_path / "r.html").read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
    assert [p.name for p in tmp_path.glob(".r*")] == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "there is no 'nowhere'"),
        ([".", "-o", "no/such/folder/r.html"], "there is no folder 'no/such/folder'"),
        ([".", "-o", "."], "is a folder: give a file"),
        ([".", "--figures", "file"], "--figures file is a file"),
    ],
)
def test_mistakes_end_in_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    done = call("report", *arguments)
    assert done.exit_code == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_without_plotly_the_error_names_the_command(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = importlib.import_module("asfp.report.page")
    module.plotly_script.cache_clear()
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    try:
        with pytest.raises(AsfpError, match=r"pip install 'asfp\[report\]'"):
            page(gather([runs / "dense"]))
        assert call("report", runs / "dense", "--text").exit_code == 0
    finally:
        module.plotly_script.cache_clear()


def test_the_terminal_has_the_same_figures(runs: Path) -> None:
    output = call("report", runs / "asfp-0", runs / "dense", "--text").stdout
    record = json.loads((runs / "asfp-0" / "record.json").read_text())
    accuracy = f"{100 * record['result']['accuracy']:.2f} %"
    assert accuracy in output
    assert "0 of 360 answers differ" in output
    assert "layer3.0.conv2" in output
    assert "64 → 39" in output
    page_text = body(gather([runs / "asfp-0", runs / "dense"]))
    assert accuracy in page_text
    assert "64 → 39" in page_text


def test_figures_come_as_png_and_svg_and_are_the_same_again(runs: Path, tmp_path: Path) -> None:
    done = call("report", runs, "--figures", tmp_path / "a")
    assert done.exit_code == 0
    content = gather([runs])
    keys = [x.key for x in (*content.charts, *content.filters, *content.streams)]
    assert len(keys) == len(set(keys)) >= 9
    names = {p.name for p in (tmp_path / "a").iterdir()}
    assert names == {f"{key}.{suffix}" for key in keys for suffix in ("png", "svg")}
    for file in (tmp_path / "a").glob("*.png"):
        assert file.read_bytes().startswith(b"\x89PNG")
    again = write_figures(replace(content, charts=content.charts[:2], streams=()), tmp_path / "b")
    for file in again:
        if file.suffix == ".svg":
            assert file.read_bytes() == (tmp_path / "a" / file.name).read_bytes()


@pytest.mark.slow  # times all engines
def test_latencies_are_measured_and_shown(copied: Copy) -> None:
    folder = copied("asfp-0")
    done = call("report", folder, "--bench", "--text")
    assert done.exit_code == 0, done.output
    rows = json.loads((folder / "bench.json").read_text())["rows"]
    assert {"dense", "compact"} == {row["model"] for row in rows}
    assert "time saved" in done.stdout
    content = gather([folder])
    assert any(chart.key == "latency" for chart in content.charts)
    assert "torch, cpu, batch 1, fp32" in body(content)


@pytest.mark.parametrize(
    ("options", "head"),
    [
        (["--goal", "0.4", "--epochs", "200"], "a = -0.400006, k = 0.0554499, b = 0.400006"),
        (["--goal", "0.4", "--epochs", "9", "--d", "0.75"], "a straight line"),
        (["--goal", "0.3", "--start", "0.3"], "rate(epoch) = 0.3: constant, which is SFP"),
    ],
)
def test_the_schedule_in_the_terminal(options: list[str], head: str) -> None:
    done = call("schedule", *options)
    assert done.exit_code == 0
    assert head in done.stdout.splitlines()[0]
    assert "█" in done.stdout


def test_the_curve_has_its_shape() -> None:
    lines = schedule_text(0.4, 200, width=60).splitlines()[2:12]
    filled = [line.partition("│")[2].count("█") for line in lines]
    assert filled == sorted(filled)
    assert filled[0] < filled[-1] == 59


def test_wrong_schedules_end_in_a_line() -> None:
    done = call("schedule", "--goal", "1.4")
    assert done.exit_code == 2
    assert "goal=1.4 is not a pruning rate" in done.stderr
