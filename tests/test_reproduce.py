"""Tables and figures: every name plans and prints; runs are known by content; figures are those of the records."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import asfp
from asfp import AsfpError
from asfp.measurement.paper import convolution_macs, exact_fraction, trace_whole
from asfp.reproduce import DEFINITIONS, NAMES
from asfp.reproduce.definition import Definition, Row, Run, Value, dense, pruned
from asfp.reproduce.execute import parse_budget
from asfp.reproduce.imagenet import MACS
from asfp.reproduce.plan import Places, arguments_of, find_recipes, weights_of
from asfp.reproduce.records import collect, key_of, read_record
from asfp.reproduce.show import as_dict, as_text, mean_deviation, sheet_of
from asfp.train import TrainConfig, load_config
from asfp.train.config import EngineConfig
from asfp.train.identity import settings
from reproduction import call, make_record, planned, put, put_times

RECIPES = find_recipes()
ROWS = [row for definition in DEFINITIONS.values() for row in definition.rows]
PLACES = Places(RECIPES, runs=Path("none"))


def config_of(run: Run, seed: int = 0, places: Places = PLACES) -> TrainConfig:
    arguments = arguments_of(run, seed, places)
    return load_config(arguments[0], arguments[1:])


@pytest.mark.parametrize("name", NAMES)
def test_every_name_plans_and_prints(tmp_path: Path, name: str) -> None:
    folders = ["--results", str(tmp_path), "--runs", str(tmp_path / "runs")]
    shown = call(name, "--plan", *folders)
    assert shown.exit_code == 0, shown.stderr
    if name in DEFINITIONS:
        assert "not yet run" in shown.stdout
        assert re.search(r"0 of \d+ runs recorded\.", shown.stdout)
        assert re.search(r"\d+ to run: about \d+ minutes \(an estimate\)", shown.stdout)
        for row, _ in planned(tmp_path, name).rows:
            assert row.paper is None or str(row.paper) in shown.stdout
    if name in ("layers", "table3"):
        as_json = call(name, "--plan", "--json", *folders)
        assert json.loads(as_json.stdout)["title"] == shown.stdout.splitlines()[0]
        assert call(name, "--plan", "--markdown", *folders).stdout.startswith("| ")
    assert not (tmp_path / "cifar10").exists()


def test_each_label_is_one_run_and_each_run_has_one_label() -> None:
    labels: dict[str, str] = {}
    for row in ROWS:
        key = key_of(config_of(row.run))
        assert labels.setdefault(row.run.label, key) == key, row.run.label
    assert len(set(labels.values())) == len(labels)


@pytest.mark.parametrize("definition", DEFINITIONS.values(), ids=lambda d: d.name)
def test_definitions_are_whole(definition: Definition) -> None:
    for row in definition.rows:
        assert len(row.cells) == len(definition.heads)
        assert row.drop is None or row.paper is not None
        config = config_of(row.run)
        assert config.data.name == "cifar10"
        assert (row.run.needs is not None) == bool(config.model.weights or config.distill.weights)
        share = [cell for head, cell in zip(definition.heads, row.cells, strict=True) if head == "filters pruned"]
        if share and config.pruning.method != "none":
            assert f"{100 * config.pruning.rate:g} %" == share[0]


@pytest.mark.parametrize("model", ["resnet20", "resnet56", "resnet110", "vgg16"])
def test_the_papers_counts_of_macs(model: str) -> None:
    import torch

    net = asfp.create_model(model)
    graph = trace_whole(net, torch.zeros(1, 3, 32, 32))
    convolutions = [name for name, module in net.named_modules() if isinstance(module, torch.nn.Conv2d)]
    full = convolution_macs(graph, {}, exact_fraction)
    found: dict[str, float] = {}
    for row in ROWS:
        config = config_of(row.run)
        if row.cut is None or config.model.name != model:
            continue
        rates = dict(config.pruning.layers) or dict.fromkeys(convolutions, config.pruning.rate)
        if config.pruning.streams >= 0.0:  # of a basic block only the first convolution is not on a stream
            rates |= {name: config.pruning.streams for name in convolutions if not name.endswith(".conv1")}
        key = json.dumps(rates)
        if key not in found:
            found[key] = 100 * (1 - convolution_macs(graph, rates, exact_fraction) / full)
        assert row.cut == pytest.approx(found[key], abs=0.05 if model == "vgg16" else 0.006)
    assert len(found) == {"vgg16": 1, "resnet20": 3, "resnet56": 6}.get(model, 4)


def test_imagenets_macs_are_those_of_the_models() -> None:
    import torch

    found = asfp.measure(asfp.create_model("torchvision:resnet18"), torch.zeros(1, 3, 224, 224))
    assert found.macs_conv == MACS["resnet18"]


@pytest.mark.parametrize(
    ("change", "same"),
    [
        ({"name": "other"}, True),
        ({"engine": {"compile": "eager", "precision": "32-true", "channels_last": False}}, True),
        ({"data": {"test_batch": 7}}, True),
        ({"pruning": {"schedule": "asymptotic"}}, True),
        ({"model": {"weights": "/elsewhere/resnet56-seed0.pt"}}, True),
        ({"model": {"weights": "/elsewhere/runs/resnet56-seed0/model.pt"}}, True),
        ({"model": {"weights": "runs/resnet56-seed1/model.pt"}}, False),
        ({"model": {"weights": ""}}, False),
        ({"seed": 1}, False),
        ({"epochs": 100}, False),
        ({"optimizer": {"lr": 0.02}}, False),
        ({"data": {"batch": 64}}, False),
        ({"pruning": {"rate": 0.3}}, False),
        ({"pruning": {"d": 0.1}}, False),
        ({"pruning": {"momentum": "zero"}}, False),
        ({"distill": {"weights": "runs/resnet56-seed0/model.pt"}}, False),
    ],
    ids=str,
)
def test_what_makes_a_run_the_same_run(change: dict[str, Any], same: bool) -> None:
    own = settings(config_of(pruned("resnet56", "asfp", start="pretrained")))
    other = {k: v | change.get(k, {}) if isinstance(v, dict) else change.get(k, v) for k, v in own.items()}
    assert (key_of(own) == key_of(other)) == same


def test_records_from_before_an_option_are_known(tmp_path: Path) -> None:
    run = pruned("resnet56", "asfp")
    old = make_record(run, 0, 0.92)
    del old["config"]["distill"]
    for key in ("momentum", "norm", "norm_shift", "soften", "soften_epochs", "freeze_epochs"):
        del old["config"]["pruning"][key]
    put(tmp_path, run, 0, 0.92, config=old["config"])
    assert planned(tmp_path, "table1", only="=resnet56-asfp").rows[0][1][0].state == "done"


def test_a_recipe_called_otherwise_is_the_same_run(tmp_path: Path) -> None:
    config = load_config(RECIPES / "cifar10" / "vgg16-asfp-pretrained-160.toml")
    put(tmp_path, Run("cifar10/vgg16-asfp-pretrained-160"), 0, 0.94, config=settings(config))
    rows = {row.run.label: runs for row, runs in planned(tmp_path, "table2").rows}
    assert [run.state for run in rows["vgg16-asfp-pretrained-epochs160"]] == ["done"]
    assert [run.state for run in rows["vgg16-asfp-pretrained"]] == ["waiting"]


def test_table_against_records_made_by_hand(tmp_path: Path) -> None:
    for seed, (plain, asymptotic) in enumerate([(0.941, 0.925), (0.939, 0.927), (0.940, 0.923)]):
        put(tmp_path, dense("resnet56"), seed, plain)
        put(tmp_path, pruned("resnet56", "asfp"), seed, asymptotic)
    put(tmp_path, pruned("resnet56", "sfp"), 0, 0.9142)
    started = tmp_path / "runs" / "resnet56-hard-seed0"
    started.mkdir(parents=True)
    (started / "checkpoint.pt").write_bytes(b"here")
    (started / "metrics.jsonl").write_text("{}\n" * 37)
    plan = planned(tmp_path, "table1")
    sheet = sheet_of(plan)
    rows = {cells[:4]: dict(zip(sheet.heads[4:], cells[4:], strict=True)) for cells in sheet.rows}
    found = rows["ResNet-56", "ASFP", "scratch", "40 %"]
    assert found == {
        "accuracy": "92.50 ± 0.20", "n": "3", "drop": "1.50", "paper": "92.44 ± 0.07", "paper: drop": "1.15",
        "MACs saved, paper's count": "52.6", "MACs saved, compact model": "50.0",
    }  # fmt: skip
    assert rows["ResNet-56", "dense", "scratch", "0 %"]["accuracy"] == "94.00 ± 0.10"
    sfp = rows["ResNet-56", "SFP", "scratch", "40 %"]
    assert (sfp["accuracy"], sfp["n"], sfp["drop"]) == ("91.42 (2 not yet run)", "1", "2.58")
    assert rows["ResNet-56", "hard", "scratch", "40 %"]["accuracy"] == "in progress: epoch 37 of 200"
    assert rows["ResNet-110", "dense", "scratch", "0 %"]["accuracy"] == "not yet run"
    text = as_text(sheet)
    assert "7 of 64 runs recorded." in text
    assert re.search(
        r"39 to run, 1 of them in progress: about \d+ minutes \(an estimate\) on one H200, one by one; 18 are blocked",
        text,
    )
    numbers = next(row for row in as_dict(plan)["rows"] if row["run"] == "resnet56-asfp")
    assert numbers["mean"] == pytest.approx(92.5)
    assert numbers["deviation"] == pytest.approx(0.2)
    assert numbers["accuracy"] == pytest.approx({"0": 92.5, "1": 92.7, "2": 92.3})
    assert sheet_of(plan, recorded=True).rows == tuple(c for c in sheet.rows if c[5] != "0")


def test_the_order_of_importance_and_dependencies(tmp_path: Path) -> None:
    queue = [run.name for run in planned(tmp_path, "table1").queue]
    assert len(queue) == len(set(queue)) == 64
    first = [f"resnet56{method}-seed{seed}" for seed in range(3) for method in ("", "-sfp", "-asfp", "-hard")]
    assert queue[:12] == first
    for run in planned(tmp_path, "table1").queue:
        assert not run.needs or queue.index(run.needs) < queue.index(run.name)
    more = [run.name for run in planned(tmp_path, "table1", seeds=4, only="=resnet56,=resnet110").queue]
    assert more[:2] == ["resnet56-seed0", "resnet56-seed1"]
    assert set(more[-4:]) == {"resnet56-seed3", "resnet110-seed1", "resnet110-seed2", "resnet110-seed3"}


def test_all_recorded_seeds_count_whatever_is_planned(tmp_path: Path) -> None:
    run = pruned("resnet56", "asfp", 0.3)
    for seed, accuracy in enumerate((0.93, 0.92, 0.91)):
        put(tmp_path, run, seed, accuracy)
    _, runs = planned(tmp_path, "fig-flops", only=f"={run.label}").rows[0]
    assert [r.seed for r in runs] == [0, 1, 2]


def test_trained_weights_that_are_not_here_are_named(tmp_path: Path) -> None:
    only = "=resnet56-asfp-pretrained"
    plan = planned(tmp_path, "table1", only=only, seeds=1)
    assert [(run.name, run.state) for run in plan.queue] == [
        ("resnet56-seed0", "ready"),
        ("resnet56-asfp-pretrained-seed0", "waiting"),
    ]
    put(tmp_path, dense("resnet56"), 0, 0.94)
    plan = planned(tmp_path, "table1", only=only, seeds=1)
    assert [run.state for run in plan.queue] == ["blocked"]
    text = as_text(sheet_of(plan))
    assert "resnet56-seed0 is recorded, but its weights are not here. Copy its model.pt there, or train it" in text
    assert "again: asfp train " in text
    weights = tmp_path / "runs" / "resnet56-seed0" / "model.pt"
    weights.parent.mkdir(parents=True)
    weights.write_bytes(b"")
    assert [run.state for run in planned(tmp_path, "table1", only=only, seeds=1).queue] == ["ready"]


def test_optional_rows_show_when_named_or_recorded(tmp_path: Path) -> None:
    label = "resnet56-asfp-maps"
    assert label not in [row.run.label for row, _ in planned(tmp_path, "options").rows]
    assert [run.name for run in planned(tmp_path, "options", only="=" + label, seeds=1).queue] == [f"{label}-seed0"]
    assert label not in [run.name for run in planned(tmp_path, "options", only="resnet56").queue]
    assert len(planned(tmp_path, "options", only="resnet20").rows) == 19
    for only, names in (
        ("resnet56-asfp-soften", ["resnet56-asfp-soften-seed0"]),
        ("=resnet56-asfp-cosine-distill", ["resnet56-seed0", "resnet56-asfp-cosine-distill-seed0"]),
    ):
        assert [run.name for run in planned(tmp_path, "options", only=only, seeds=1).queue] == names
    with pytest.raises(AsfpError, match="names runs that are made one by one: choose of =resnet20-asfp-pretrained-mom"):
        planned(tmp_path, "options", only="pre-trained")
    put(tmp_path, next(row.run for row in ROWS if row.run.label == label), 0, 0.92)
    assert label in [row.run.label for row, _ in planned(tmp_path, "options").rows]


def test_gaps_come_from_the_epochs(tmp_path: Path) -> None:
    epochs = {"accuracy_before": [0.5, 0.6, 0.9], "accuracy_after": [0.2, 0.6, 0.9], "regrown": [0, 0, 0.125]}
    put(tmp_path, pruned("resnet56", "sfp"), 0, 0.9, epochs=epochs)
    row = sheet_of(planned(tmp_path, "fig-gap")).rows[0]
    assert row[4:] == ("90.00", "1", "92.26 ± 0.31", "10.00", f"{math.sqrt(200):.2f}", "30.00", "0.00", "12.5")


def test_times_are_those_of_the_fastest_engine_for_each(tmp_path: Path) -> None:
    coupled = "resnet56-asfp-rate0.345-coupled"
    for row in DEFINITIONS["fig-selection"].rows:
        put(tmp_path, row.run, 0, 0.92)
    put_times(tmp_path, "cpu", a=[("resnet56", 4.0), (coupled, 3.5)], b=[("resnet56", 5.0), (coupled, 3.0)])
    rows = {(row[1], row[2], row[4]): row[5:] for row in sheet_of(planned(tmp_path, "fig-selection")).rows}
    assert rows["dense", "-", "0 %"][-4:] == ("4.00", "0.0", "-", "-")
    assert rows["coupled", "1", "34.5 %"] == ("92.00 (2 not yet run)", "1", "0.00", "50.0", "3.00", "25.0", "-", "-")
    assert rows["nested", "1", "34.5 %"][-4:] == ("-", "-", "-", "-")
    put_times(tmp_path, "cuda", fused=[(coupled, 1.0)])  # nothing to compare it with
    assert {row[-2:] for row in sheet_of(planned(tmp_path, "fig-selection")).rows} == {("-", "-")}
    put_times(tmp_path, "cuda", fused=[(coupled, 1.0), ("resnet56", 4.0)])
    assert ("1.00", "75.0") in {row[-2:] for row in sheet_of(planned(tmp_path, "fig-selection")).rows}


def test_a_torn_record_of_times_is_a_clear_error(tmp_path: Path) -> None:
    path = put_times(tmp_path, "cpu", a=[("resnet56", 4.0)])
    path.write_text(path.read_text()[:-9])
    done = call("fig-selection", "--plan", "--results", str(tmp_path), "--runs", str(tmp_path / "runs"))
    assert done.exit_code == 2
    assert "is not a record of benchmarks/latency.py" in done.stderr
    for ms in (0, -1, "fast", None, math.nan, 10**400):
        path.write_text(
            json.dumps({"rows": [{"model": "resnet56-seed0", "engine": "a", "batch": 1, "latency_ms": ms}]})
        )
        done = call("fig-selection", "--plan", "--results", str(tmp_path), "--runs", str(tmp_path / "runs"))
        assert done.exit_code == 2
        assert "is not a record of benchmarks/latency.py" in done.stderr
    path.with_name("cpu-batch64-fp32.json").write_text("{}")
    done = call("fig-selection", "--plan", "--results", str(tmp_path), "--runs", str(tmp_path / "runs"))
    assert done.exit_code == 2
    assert "several records for cpu (cpu-batch1-fp32.json, cpu-batch64-fp32.json): keep the one" in done.stderr


def test_estimates_use_the_fastest_record_of_the_network(tmp_path: Path) -> None:
    before = planned(tmp_path, "fig-gap").minutes
    assert before == pytest.approx((5 * 1.68 + 2 * 0.66) * 200 / 60)
    put(tmp_path, dense("resnet56"), 1, 0.94, seconds={"train": 180.0, "evaluate": 20.0, "prune": 0.0})
    assert planned(tmp_path, "fig-gap").minutes == pytest.approx((5 * 1.0 + 2 * 0.66) * 200 / 60)
    shared = {
        "train": 400.0,
        "evaluate": 40.0,
        "prune": 0.0,
    }  # 2 s an epoch beside others, some of them alone, one cut off
    epochs = make_record(dense("resnet56"), 2, 0.94)["epochs"] | {"train_seconds": [0.01] + [0.5] * 20 + [2.18] * 179}
    put(tmp_path, dense("resnet56"), 2, 0.94, seconds=shared, epochs=epochs)
    assert planned(tmp_path, "fig-gap").minutes == pytest.approx((5 * 0.55 + 2 * 0.66) * 200 / 60)


def test_records_are_collected_from_run_folders(tmp_path: Path) -> None:
    run = dense("resnet56")
    made = put(tmp_path / "away", run, 0, 0.94)
    folder = tmp_path / "runs" / run.name(0)
    folder.mkdir(parents=True)
    made.rename(folder / "record.json")
    assert planned(tmp_path, "table1", only="=resnet56", seeds=1).queue == ()
    target = collect(folder, tmp_path)
    assert target is not None
    assert read_record(target)["result"]["accuracy"] == 0.94
    put(tmp_path, dense("resnet110"), 0, 0.9, name=run.name(0))
    with pytest.raises(AsfpError, match="is the record of another run"):
        collect(folder, tmp_path)


@pytest.mark.parametrize(("method", "size", "kept"), [("none", 9, True), ("asfp", 9, False), ("none", 9 << 20, False)])
def test_small_weights_of_unpruned_runs_are_kept_and_found(tmp_path: Path, method: str, size: int, kept: bool) -> None:
    needing = pruned("resnet56", "asfp", start="pretrained")
    run = dense("resnet56") if method == "none" else pruned("resnet56", method)
    folder = tmp_path / "runs" / run.name(0)
    folder.mkdir(parents=True)
    put(tmp_path / "away", run, 0, 0.94).rename(folder / "record.json")
    (folder / "model.pt").write_bytes(b"w" * size)
    collect(folder, tmp_path)
    file = tmp_path / "weights" / f"{run.name(0)}.pt"
    assert file.exists() == kept
    if kept:
        places = Places(RECIPES, tmp_path, tmp_path / "runs")
        assert weights_of(needing, 0, places) == folder / "model.pt"
        (folder / "model.pt").write_bytes(b"others")
        collect(folder, tmp_path)
        (folder / "model.pt").unlink()
        assert weights_of(needing, 0, places) == file
        assert file.read_bytes() == b"others"
        assert key_of(config_of(needing, 0, places)) == key_of(config_of(needing))


@given(hours=st.integers(0, 30), minutes=st.integers(0, 90), seconds=st.integers(1, 90))
def test_budgets(hours: int, minutes: int, seconds: int) -> None:
    assert parse_budget(f"{hours}h{minutes}m{seconds}s") == 3600 * hours + 60 * minutes + seconds


@given(st.lists(st.floats(10, 99), min_size=2, max_size=6))
def test_deviations_do_not_depend_on_the_order(values: list[float]) -> None:
    assert mean_deviation(values) == mean_deviation(values[::-1])
    mean, _, spread = mean_deviation(values).partition(" ± ")
    assert min(values) - 0.01 <= float(mean) <= max(values) + 0.01
    assert float(spread) <= max(values) - min(values) + 0.01


def test_values_and_rows_print() -> None:
    assert str(Value(93.0)) == "93.00"
    assert Row(("a",), dense("resnet20")).run.name(3) == "resnet20-seed3"


def test_engine_settings_leave_a_record_valid() -> None:
    config = config_of(dense("resnet56"))
    assert key_of(config) == key_of(TrainConfig(**{**config.__dict__, "engine": EngineConfig(devices=4)}))


def test_all_is_every_run_once_with_the_most_seeds_that_any_table_asks_for() -> None:
    tables = [definition for name, definition in DEFINITIONS.items() if name != "all"]
    rows = {row.run.label: row for row in DEFINITIONS["all"].rows}
    assert len(rows) == len(DEFINITIONS["all"].rows)
    assert rows.keys() == {row.run.label for table in tables for row in table.rows}
    for row in (row for table in tables for row in table.rows):
        found = rows[row.run.label]
        assert found.run == row.run
        assert found.priority <= row.priority
        assert found.seeds >= row.seeds
        assert row.optional or not found.optional
    assert [row.priority for row in rows.values()] == sorted(row.priority for row in rows.values())
