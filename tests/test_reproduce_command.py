"""`asfp reproduce` as it is called: mistakes, what hinders a start, what is blocked, and how a call ends."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from asfp.cli import app
from asfp.reproduce import DEFINITIONS, NAMES, command
from asfp.reproduce.definition import LAST, Definition, Row, Run, dense, pruned
from asfp.reproduce.execute import Outcome, execute
from asfp.reproduce.plan import Places, make_plan
from asfp.reproduce.show import as_dict, as_text, sheet_of
from asfp.train import load_config
from reproduction import call, planned, put
from test_reproduce_run import DENSE, LONG, TINY, TUNED, places_in, plan_of

ROOT = Path(__file__).parent.parent


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def folders(folder: Path) -> list[str]:
    return ["--results", str(folder), "--runs", str(folder / "runs")]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["table6", "--plan"], "there is no 'table6' to reproduce. Did you mean table5"),
        (["table1", "--budget", "25"], "--budget '25' is not a time: write hours, minutes or seconds, e.g. 25m"),
        (["table1", "--budget", "0m"], "is no time at all"),
        (["table1", "--jobs", "0", "--plan"], "Error: --jobs 0: it must be at least 1"),
        (["table1", "--seeds", "0", "--plan"], "Error: --seeds 0: it must be from 1 to 100"),
        (["table1", "--seeds", "-3", "--plan"], "Error: --seeds -3: it must be from 1 to 100"),
        (["table1", "--seeds", "101", "--plan"], "Error: --seeds 101: it must be from 1 to 100"),
        (["table1", "--only", "resnet57", "--plan"], "--only 'resnet57' names no row of table1. Did you mean resnet56"),
        (
            ["table1", "--only", "resnet56,=resnet111", "--plan"],
            "'=resnet111' names no row of table1. Did you mean resnet110",
        ),
        (["all", "--only", "=resnet110-seed0", "--plan"], "all their seeds: leave out -seed0, and use --seeds"),
        (["table1", "--device", "tpu"], "--device 'tpu': use one of auto, cpu"),
        (["table1", "--plan", "--output", "x"], "table1 has no picture: --output is for fig-rate"),
        (["table3", "--plan", "--output", "x"], "table3 has no picture: --output is for fig-rate"),
        (["table1", "--write"], "--write makes all tables of the documents: leave out table1"),
        ([], "what is to be reproduced? asfp reproduce NAME, with one of table1"),
        *(
            ([name, "--plan", option, value], f"{option} {value}: {name} stands on no runs of `asfp train`")
            for name in ("table3", "table4", "fig-rate")
            for option, value in (("--only", "resnet18"), ("--seeds", "2"), ("--jobs", "2"))
        ),
        *(
            (["--write", *option], f"{option[0]} has no meaning with --write")
            for option in (
                ["--only", "x"],
                ["--seeds", "3"],
                ["--jobs", "2"],
                ["--plan"],
                ["--json"],
                ["--runs", "others"],
            )
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_mistakes_are_one_line(arguments: list[str], message: str) -> None:
    done = call(*arguments)
    assert done.exit_code == 2
    assert message in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert not done.stdout


@pytest.mark.parametrize("name", ["table3", "table4", "fig-rate"])
def test_defaults_pass_where_there_are_no_runs(name: str) -> None:
    assert call(name, "--jobs", "1", "--only", "").exit_code == 0


def test_help_and_the_error_without_a_name_list_every_name() -> None:
    said = call().stderr
    assert said.strip().endswith(f"with one of {', '.join((*NAMES, 'all'))}")
    assert {"summary", "all"} <= set(re.findall(r"[\w-]+", said))
    from typer.main import get_command

    parameters = get_command(app).commands["reproduce"].params  # type: ignore[attr-defined]
    help_text = next(p.help for p in parameters if p.name == "name")
    assert help_text.endswith("layers, options, summary, all.")


def test_without_a_gpu_nothing_is_started_unawares(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    done = call("fig-gap", *folders(tmp_path))
    assert done.exit_code == 2
    assert "7 runs are missing for fig-gap, and there is no GPU here: use --plan" in done.stderr
    assert "--device cpu to run them all the same" in done.stderr
    assert not (tmp_path / "runs").exists()
    done = call("fig-gap", "--only", "=resnet56-asfp", "--seeds", "1", *folders(tmp_path))
    assert "1 run is missing for fig-gap, and there is no GPU here" in done.stderr


def test_without_data_nothing_is_started(tmp_path: Path) -> None:
    data = tmp_path / "my data"
    done = call("fig-gap", "--device", "cpu", "--data", str(data), *folders(tmp_path))
    assert done.exit_code == 2
    assert done.stderr.count("Error: ") == 1
    assert f"CIFAR-10 is not in {data} (" in done.stderr
    assert f"asfp data cifar10 --root '{data}' --download" in done.stderr
    assert not (tmp_path / "runs").exists()
    assert call("fig-gap", "--plan", "--data", str(data), *folders(tmp_path)).exit_code == 0


def block(folder: Path) -> None:
    """Records of two unpruned runs whose weights are nowhere."""
    put(folder, dense("resnet56"), 0, 0.94)
    put(folder, dense("resnet56"), 1, 0.94)


def test_blocked_runs_are_counted_apart(tmp_path: Path) -> None:
    block(tmp_path)
    plan = planned(tmp_path, "fig-gap", only="resnet56", seeds=2)
    assert [len(names) for names in plan.blocked.values()] == [2, 2]
    assert plan.minutes == pytest.approx(sum(run.minutes for run in plan.startable))
    assert 0 < plan.minutes < sum(run.minutes for run in plan.queue)
    text = as_text(sheet_of(plan))
    assert f"4 to run: about {plan.minutes:.0f} minutes (an estimate) on one H200, one by one; 4 are blocked." in text
    for seed in (0, 1):
        weights = tmp_path / "runs" / f"resnet56-seed{seed}" / "model.pt"
        told = f"resnet56-sfp-pretrained-seed{seed} and 1 more: needs {weights}: resnet56-seed{seed} is recorded, but"
        assert text.count(told) == 1
    assert as_dict(plan)["minutes"] == round(plan.minutes, 1)


def test_nothing_but_blocked_runs_is_an_error(tmp_path: Path) -> None:
    block(tmp_path)
    asked = ["fig-gap", "--only", "=resnet56-asfp-pretrained", *folders(tmp_path)]
    done = call(*asked, "--device", "cpu", "--data", str(tmp_path))
    assert done.exit_code == 2
    assert "Of the others, 1 is blocked." in done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("Error: nothing was run. resnet56-asfp-pretrained-seed0: needs ")
    assert "train it again: asfp train " in last
    shown = call(*asked, "--plan")
    assert shown.exit_code == 0
    assert "to run" not in shown.stdout


def test_a_run_after_one_whose_folder_is_taken_is_blocked_for_that(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "resnet56-seed0"
    folder.mkdir(parents=True)
    put(tmp_path / "away", dense("resnet20"), 0, 0.9).rename(folder / "record.json")
    plan = planned(tmp_path, "fig-gap", only="=resnet56-asfp-pretrained")
    (problem,) = plan.blocked
    assert problem == f"needs resnet56-seed0, but {folder} holds another run under this name: move it away"


@pytest.mark.parametrize("file", ["checkpoint.pt", "checkpoint.previous.pt"])
def test_a_run_cut_off_in_its_first_epoch_is_in_progress(tmp_path: Path, file: str) -> None:
    folder = tmp_path / "runs" / "resnet56-seed0"
    folder.mkdir(parents=True)
    plan = planned(tmp_path, "table1", only="=resnet56", seeds=1)
    assert [run.state for run in plan.queue] == ["ready"]
    (folder / file).write_bytes(b"here")
    plan = planned(tmp_path, "table1", only="=resnet56", seeds=1)
    assert [(run.state, run.epoch) for run in plan.queue] == [("started", 0)]
    text = as_text(sheet_of(plan))
    assert "in progress: epoch 0 of 200" in text
    assert "1 to run, 1 of them in progress" in text


def test_a_run_in_progress_needs_its_weights_too(tmp_path: Path) -> None:
    put(tmp_path, dense("resnet56"), 0, 0.94)
    folder = tmp_path / "runs" / "resnet56-asfp-pretrained-seed0"
    folder.mkdir(parents=True)
    (folder / "checkpoint.pt").write_bytes(b"here")
    (folder / "metrics.jsonl").write_text("{}\n" * 3)
    (run,) = planned(tmp_path, "table1", only="=resnet56-asfp-pretrained", seeds=1).queue
    assert (run.state, run.epoch) == ("blocked", 3)
    weights = tmp_path / "runs" / "resnet56-seed0" / "model.pt"
    weights.parent.mkdir()
    weights.write_bytes(b"")
    (run,) = planned(tmp_path, "table1", only="=resnet56-asfp-pretrained", seeds=1).queue
    assert (run.state, run.epoch) == ("started", 3)


def test_rows_of_the_paper_and_controls_that_come_last() -> None:
    rows = {row.run.label: row for row in DEFINITIONS["all"].rows}
    hard = [f"{m}-hard{s}-rate0.{r}" for m in ("resnet56", "resnet110") for s in ("", "-pretrained") for r in (1, 2, 3)]
    assert {row.run.label for row in DEFINITIONS["table1"].rows} >= set(hard)
    sweeps = {name: [row.cells[-1] for row in DEFINITIONS[name].rows] for name in ("fig-interval", "fig-d")}
    assert sweeps == {"fig-interval": [f"{n}" for n in range(1, 11)], "fig-d": [f"1/{n}" for n in range(7, 17)] * 2}
    assert not any(row.optional for name in sweeps for row in DEFINITIONS[name].rows)
    others = ["resnet56-asfp-interval3", "resnet56-asfp-d1_9", "resnet56-asfp-pretrained-d1_16"]
    assert {rows[label].priority for label in (*hard, *others)} == {LAST}
    assert {rows[label].seeds for label in (*hard, *others)} == {1}
    first = [row for row in rows.values() if row.priority < LAST]
    assert max(row.priority for row in first) < LAST
    assert {"resnet56-asfp-interval5", "resnet56-asfp-d1_16", "resnet56-hard"} <= {row.run.label for row in first}
    assert "run when asked for" not in "".join(n for name in sweeps for n in DEFINITIONS[name].notes)


@pytest.mark.parametrize("data", [None, "image net"])
def test_each_row_of_table3_has_its_command(tmp_path: Path, data: str | None) -> None:
    done = call("table3", "--plan", *(["--data", str(tmp_path / data)] if data else []))
    commands = [shlex.split(line) for line in done.stdout.splitlines() if line.startswith("asfp train /")]
    assert len(commands) == len({words[2] for words in commands}) == 12
    for _, _, recipe, setting in commands:
        assert Path(recipe).is_absolute()
        assert load_config(recipe, [setting]).data.root == (str(tmp_path / data) if data else "FOLDER")
    found = json.loads(call("table3", "--plan", "--json").stdout)
    hours = sum(float(row[found["heads"].index("hours")]) for row in found["rows"])
    told = re.search(r"Together (\d+) hours", done.stdout)
    assert told is not None
    assert int(told[1]) == pytest.approx(hours, abs=6)  # rows are rounded to an hour


def test_table4_has_the_papers_count() -> None:
    shown = json.loads(call("table4", "--json", "--results", str(ROOT / "results")).stdout)
    rows = [dict(zip(shown["heads"], row, strict=True)) for row in shown["rows"]]
    counts = {row["network"]: row["MACs saved, paper's count"] for row in rows}
    assert counts == {"ResNet-18": "41.7", "ResNet-34": "41.1", "ResNet-50": "41.5"}


def use(monkeypatch: pytest.MonkeyPatch, places: Places, *runs: Run) -> None:
    """Let `layers` stand on these runs."""
    rows = tuple(Row((run.label,), run, priority=i) for i, run in enumerate(runs))
    monkeypatch.setitem(DEFINITIONS, "layers", Definition("layers", "Tiny runs", ("run",), rows))
    monkeypatch.setattr(command, "find_recipes", lambda: places.recipes)


def test_the_end_of_the_budget_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    places = places_in(tmp_path)
    places.results.mkdir()
    use(monkeypatch, places, LONG, TINY)
    done = call(
        "layers", "--device", "cpu", "--budget", "0.3s", "--results", str(places.results), "--runs", str(tmp_path)
    )
    assert done.exit_code == 0, done.output
    assert "the budget of 0.3s is used up: run the same command again to go on" in done.stderr.splitlines()
    assert "tiny-asfp-seed0: stopped after epoch 0 of 12" in done.stderr


def in_place_of_training(monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    real = subprocess.Popen

    def started(_: list[str], **options: Any) -> Any:
        return real([sys.executable, "-c", script], **options)

    monkeypatch.setattr(subprocess, "Popen", started)


KILL = "import os, signal; print('epoch 1', flush=True); os.kill(os.getpid(), signal.{})"


@pytest.mark.skipif(sys.platform == "win32", reason="signals are other ones there")
@pytest.mark.parametrize(
    ("script", "reason"),
    [
        (KILL.format("SIGKILL"), "killed, perhaps for want of memory"),
        (KILL.format("SIGABRT"), "ended by SIGABRT"),
        ("import sys; print('Error: no room'); print('left: 1 object'); sys.exit(2)", "no room"),
        ("import sys; print('Error: one'); print('Error: two'); sys.exit(2)", "two"),
        ("raise RuntimeError('CUDA went away')", "RuntimeError: CUDA went away"),
        ("import sys; print('the end'); sys.exit(4)", "the end"),
        ("import sys; sys.exit(4)", "exit code 4"),
        ("print('Error: none')", "it ended without a record"),
    ],
    ids=["SIGKILL", "SIGABRT", "a line after the error", "two errors", "traceback", "no error", "silent", "no record"],
)
def test_why_a_run_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, reason: str) -> None:
    places = places_in(tmp_path)
    log = places.runs / "tiny-asfp-seed0" / "train.log"
    log.parent.mkdir(parents=True)
    log.write_text("Error: of an earlier attempt\n")
    in_place_of_training(monkeypatch, script)
    told: list[str] = []
    outcome = execute(plan_of(places, LONG).queue, places.results, say=told.append)
    assert outcome.failed == {"tiny-asfp-seed0": reason}
    assert told[-1] == f"tiny-asfp-seed0: failed: {reason}"
    assert log.read_text().startswith("Error: of an earlier attempt\n")


def test_a_run_that_does_not_stop_is_killed_and_did_not_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    places = places_in(tmp_path)
    deaf = tmp_path / "deaf"
    script = f"import pathlib, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); pathlib.Path({str(deaf)!r})"
    in_place_of_training(monkeypatch, f"{script}.touch(); time.sleep(60)")
    monkeypatch.setattr("asfp.reproduce.execute.GRACE_S", 0.1)
    told: list[str] = []
    queue, late = plan_of(places, LONG).queue, lambda: 1e9 * deaf.exists()
    outcome = execute(queue, places.results, budget=60.0, say=told.append, clock=late)
    assert outcome == Outcome(stopped=["tiny-asfp-seed0"], spent=True)
    assert "and was killed; its last checkpoint stays" in told[-2]


def test_failures_are_counted_and_what_needs_them_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    places = places_in(tmp_path)
    places.results.mkdir()
    in_place_of_training(monkeypatch, "import sys; sys.exit('Error: no luck')")
    options = ["--device", "cpu", "--results", str(places.results), "--runs", str(places.runs)]
    use(monkeypatch, places, TUNED)
    done = call("layers", *options)
    assert done.exit_code == 2
    last = done.stderr.strip().splitlines()[-1]
    log = places.runs / "tiny-short-seed0" / "train.log"
    assert last == (
        f"Error: 1 run failed: tiny-short-seed0: no luck (see {log}); not begun for that: tiny-asfp-tuned-seed0"
    )
    use(monkeypatch, places, DENSE, TINY)
    assert "Error: 2 runs failed: tiny-short-seed0: no luck" in call("layers", *options).stderr


def test_the_queue_of_blocked_and_failed_runs_is_left_alone(tmp_path: Path) -> None:
    block(tmp_path)
    definition = Definition("one", "One", ("run",), (Row(("a",), pruned("resnet56", "sfp", start="pretrained")),))
    plan = make_plan(definition, Places(ROOT / "recipes", tmp_path, tmp_path / "runs"), {})
    assert [run.state for run in plan.queue] == ["ready", "waiting"]
    assert plan.blocked == {}
    assert plan.startable == plan.queue
