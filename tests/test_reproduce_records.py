"""Records: what is wrong with one is told with its file and field, and what is accepted can be planned and shown."""

from __future__ import annotations

import copy
import json
import math
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asfp import AsfpError
from asfp.reproduce.definition import Definition, Row, Run, dense, pruned
from asfp.reproduce.plan import Places, find_recipes, make_plan
from asfp.reproduce.records import load_records, read_record
from asfp.reproduce.show import VIEWS, as_dict, as_text, sheet_of
from reproduction import call, make_record, planned, put

RESULTS = Path(__file__).parent.parent / "results" / "cifar10"
KEPT = {path.stem: path for path in sorted(RESULTS.glob("*.json"))}
GONE = "(gone)"


def changed(record: dict[str, Any], name: str, value: Any) -> dict[str, Any]:
    """The record with the field of this name replaced, or deleted."""
    record = copy.deepcopy(record)
    *above, last = name.split(".")
    table = record
    for part in above:
        table = table[part]
    if value is GONE:
        del table[last]
    else:
        table[last] = value
    return record


def written(folder: Path, record: Any) -> Path:
    path = folder / "cifar10" / "odd.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(record))
    return path


def test_every_record_that_is_kept_is_accepted() -> None:
    assert len(KEPT) > 50
    assert len(load_records(RESULTS.parent)) == len(KEPT)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not a record of asfp train"),
        ("{}", "(format is missing)"),
        ('{"format": 1}', "(config is missing)"),
        ("[]", "(it is a list, not a table)"),
        ("[" * 100_000, "is not a record of asfp train"),
        ('{"format": 9}', "has the format 9, this version reads 1: update asfp"),
    ],
    ids=lambda text: str(text)[:12],
)
def test_files_that_are_no_records(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "cifar10").mkdir()
    (tmp_path / "cifar10" / "odd.json").write_text(content)
    shown = call("table1", "--plan", "--results", str(tmp_path))
    assert shown.exit_code == 2
    assert "odd.json" in shown.stderr
    assert message in shown.stderr
    assert len(shown.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("hardware", GONE, "hardware.device is missing"),
        ("hardware.device", None, "hardware.device is None, it must be a string"),
        ("seconds", GONE, "seconds.train is missing"),
        ("seconds.train", 0.0, "seconds.train is 0.0, it must be a number above 0"),
        ("seconds.prune", math.nan, "seconds.prune is nan, it must be a number, at least 0"),
        ("config.model", GONE, "config.model.name is missing"),
        ("config.model", "resnet56", "config: model='resnet56': model is a table"),
        ("config.pruning.rate", "much", "config: pruning.rate='much' is a str: it must be a number"),
        ("config.optimizer.lr", 10**400, "config: "),
        ("config.epochs", GONE, "config.epochs is missing"),
        ("config.new", 1, "config: new is no setting."),
        ("seed", 1, "seed is 1, it must be 0, as config.seed is"),
        ("compact.macs_dense", GONE, "compact.macs_dense is missing"),
        ("compact.macs_dense", 0, "compact.macs_dense is 0, it must be a whole number above 0"),
        ("compact.macs", None, "compact.macs is None, it must be a whole number"),
        ("compact.macs", "many", "compact.macs is 'many', it must be a whole number"),
        ("compact.macs", 10**400, "compact.macs is 1000"),
        ("result.accuracy_compact", math.nan, "result.accuracy_compact is nan, it must be a number from 0 to 1"),
        ("result.accuracy_compact", 92.5, "result.accuracy_compact is 92.5, it must be a number from 0 to 1"),
        ("result.accuracy_compact", True, "result.accuracy_compact is True"),
        ("result", [], "result.accuracy_compact is missing"),
        ("epochs", [], "epochs is [], it must be a table of lists"),
        ("epochs", {}, "epochs.accuracy_before is missing"),
        ("epochs.regrown", [], "epochs.regrown is [], it must be a list of numbers"),
        ("epochs.regrown", [0.5], "epochs.regrown is [0.5], it must be a list of 200 entries"),
        ("epochs.accuracy_after", [None] * 200, "epochs.accuracy_after is [None, None"),
        ("epochs.loss", [1.0], "epochs.loss is [1.0], it must be a list of 200 entries"),
        ("epochs.train_seconds", ["1"] * 200, "epochs.train_seconds is ['1', '1'"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_damaged_record_is_told_with_its_field(tmp_path: Path, name: str, value: Any, message: str) -> None:
    record = make_record(pruned("resnet56", "asfp"), 0, 0.92)
    assert read_record(written(tmp_path, record)) == record
    written(tmp_path, changed(record, name, value))
    for table in ("table1", "fig-gap"):
        shown = call(table, "--plan", "--results", str(tmp_path))
        assert shown.exit_code == 2, shown.output
        assert "odd.json is not a record of asfp train (" in shown.stderr
        assert message in shown.stderr
        assert len(shown.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize(
    "name",
    ["weights", "epochs.returned", "epochs.train_seconds", "seconds.prune", "config.distill", "config.pruning.align"],
)
def test_what_older_records_lack_is_optional(tmp_path: Path, name: str) -> None:
    record = json.loads(KEPT["resnet56-asfp-cosine-seed0"].read_text())
    written(tmp_path, changed(record, name, GONE))
    only = "=resnet56-asfp-cosine"
    assert planned(tmp_path, "options", only=only, seeds=1).rows[0][1][0].state == "done"


def names_of(table: dict[str, Any], above: str = "") -> Iterator[str]:
    for key, value in table.items():
        yield above + key
        if isinstance(value, dict) and "." not in "".join(value):  # names of layers have dots
            yield from names_of(value, f"{above}{key}.")


SAMPLES = {
    name: json.loads(KEPT[name].read_text()) for name in ("resnet56-asfp-seed1", "resnet56-asfp-pretrained-seed0")
}
FIELDS = [(sample, name) for sample, record in SAMPLES.items() for name in names_of(record)]
NUMBERS = [-1, 0, 1, 2.5, 10**30, 10**400, math.nan, math.inf]
ODD = [*NUMBERS, GONE, None, "", "text", True, [], [None], [1, "a"], {}, {"a": 1}]
ONE = Run("cifar10/resnet56-asfp")


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(FIELDS), st.sampled_from(ODD), st.booleans())
def test_any_field_deleted_or_replaced_is_an_error_or_is_planned(
    field: tuple[str, str], odd: Any, within: bool
) -> None:
    sample, name = field
    table: Any = SAMPLES[sample]
    for part in name.split("."):
        table = table[part]
    if within and isinstance(table, list) and table and odd is not GONE:
        odd = [*table[:-1], odd]
    with tempfile.TemporaryDirectory() as folder:
        written(Path(folder), changed(SAMPLES[sample], name, odd))
        try:
            records = load_records(Path(folder))
        except AsfpError as error:
            said = str(error)
        else:
            said = ""
        if said:
            assert re.match(rf"{folder}/cifar10/odd\.json [^\n]*$", said)
            return
        assert len(records) == 1
        rows = (Row(("a",), ONE, dense=dense("resnet56")), Row(("b",), pruned("resnet56", "asfp", start="pretrained")))
        for view in VIEWS:
            definition = Definition("table1", "Any", ("run",), rows, view=view)
            plan = make_plan(definition, Places(find_recipes(), Path(folder), Path(folder) / "runs"), records)
            assert as_text(sheet_of(plan)).startswith("Any\n")
            assert math.isfinite(json.loads(json.dumps(as_dict(plan)))["minutes"])


def test_two_records_of_one_run_are_an_error(tmp_path: Path) -> None:
    put(tmp_path, dense("resnet56"), 0, 0.94)
    put(tmp_path, dense("resnet56"), 0, 0.95, name="better")
    with pytest.raises(AsfpError) as caught:
        load_records(tmp_path)
    message = str(caught.value)
    assert "better.json" in message
    assert "resnet56-seed0.json are records of the same run: keep the one that was made first" in message
    assert "first of them" not in message


def test_a_folder_called_as_a_record(tmp_path: Path) -> None:
    (tmp_path / "cifar10" / "x.json").mkdir(parents=True)
    with pytest.raises(AsfpError, match=r"x\.json is a folder with the name of a record: rename it, or move it away"):
        load_records(tmp_path)


@pytest.mark.parametrize("option", ["--results", "--runs", "--output"])
@pytest.mark.parametrize("inner", ["", "cifar10"])
@pytest.mark.parametrize("name", ["fig-gap", "fig-rate"])
def test_files_where_folders_belong(tmp_path: Path, option: str, inner: str, name: str) -> None:
    file = tmp_path / "taken" / "cifar10" if inner and option == "--results" else tmp_path / "taken"
    file.parent.mkdir(exist_ok=True)
    file.write_text("")
    with pytest.raises(AsfpError, match="is a file, not a folder"):
        load_records(tmp_path / "taken")
    given = tmp_path / "taken" / (inner if option != "--results" else "")
    done = call(name, "--plan", option, str(given))
    assert done.exit_code == 2
    assert f"{option}: {file} is a file, not a folder: choose another folder" in done.stderr


def test_a_results_folder_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = call("table1", "--plan", "--results", str(tmp_path / "elsewhere"))
    assert done.exit_code == 2
    assert "elsewhere: there is no such folder: check the name, or make it" in done.stderr
    monkeypatch.chdir(tmp_path)  # a new user has no results yet
    assert "0 of 64 runs recorded." in call("table1", "--plan").stdout
