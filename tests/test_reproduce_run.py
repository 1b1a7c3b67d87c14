"""Runs of a plan as processes: skipped, stopped at the budget, resumed with the same bits, failed with a reason."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from asfp.reproduce.definition import Definition, Row, Run
from asfp.reproduce.execute import Outcome, execute
from asfp.reproduce.plan import Places, Plan, make_plan
from asfp.reproduce.records import load_records
from asfp.reproduce.show import as_text, sheet_of
from asfp.train import load_config, train
from asfp.train.journal import read_metrics

DENSE = Run("cifar10/tiny", ("epochs=1",), "short")
TUNED = Run("cifar10/tiny-asfp", ("epochs=2",), "tuned", DENSE)
LONG = Run("cifar10/tiny-asfp")
TINY = Run("cifar10/tiny", ("epochs=2",), "two")
LOST = Run("cifar10/tiny", ("data.name=cifar10", "data.size=0", "data.root=nowhere"), "lost")

RECIPE = """
epochs = 12
[model]
name = "resnet8"
[data]
name = "digits"
size = 8
batch = 256
[optimizer]
lr = 0.05
milestones = []
[engine]
accelerator = "cpu"
[pruning]
method = "none"
"""


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def places_in(folder: Path) -> Places:
    recipes = folder / "recipes" / "cifar10"
    recipes.mkdir(parents=True, exist_ok=True)
    (recipes / "tiny.toml").write_text(RECIPE)
    (recipes / "tiny-asfp.toml").write_text('base = "tiny.toml"\n[pruning]\nmethod = "asfp"\n')
    return Places(folder / "recipes", folder / "results", folder / "runs")


def plan_of(places: Places, *runs: Run) -> Plan:
    rows = tuple(Row((run.label,), run, priority=i) for i, run in enumerate(runs))
    return make_plan(Definition("tiny", "Tiny runs", ("run",), rows), places, load_records(places.results))


class Clock:
    """Stands still until the run has so many epochs behind it."""

    def __init__(self, folder: Path, epochs: int) -> None:
        self.folder, self.epochs = folder, epochs

    def __call__(self) -> float:
        done = (self.folder / "metrics.jsonl").exists() and len(read_metrics(self.folder)) >= self.epochs
        return 1e9 if done else 0.0


def test_stopped_at_the_budget_resumed_and_skipped(tmp_path: Path) -> None:
    places = places_in(tmp_path)
    plan = plan_of(places, LONG, DENSE)
    told: list[str] = []
    folder = places.runs / "tiny-asfp-seed0"
    outcome = execute(plan.queue, places.results, budget=60.0, say=told.append, clock=Clock(folder, 2))
    assert outcome == Outcome(stopped=["tiny-asfp-seed0"], left=["tiny-short-seed0"], spent=True)
    assert told[0] == "tiny-asfp-seed0: started"
    assert told[-1].startswith("tiny-asfp-seed0: stopped after epoch ")
    assert not (places.runs / "tiny-short-seed0").exists()

    plan = plan_of(places, LONG)
    epochs = len(read_metrics(folder))
    assert 2 <= epochs < 12
    assert [(p.state, p.epoch) for p in plan.queue] == [("started", epochs)]
    assert f"in progress: epoch {epochs} of 12" in as_text(sheet_of(plan))
    outcome = execute(plan.queue, places.results, say=told.append)
    assert outcome == Outcome(finished=["tiny-asfp-seed0"])
    assert f"tiny-asfp-seed0: going on from epoch {epochs}" in told
    assert [path.name for path in (places.results / "cifar10").iterdir()] == ["tiny-asfp-seed0.json"]
    plan = plan_of(places, LONG)
    assert plan.queue == ()
    assert "1 of 1 runs recorded." in as_text(sheet_of(plan))

    recipe = places.recipes / "cifar10" / "tiny-asfp.toml"
    train(load_config(recipe, [f"output={tmp_path / 'whole'}", "engine.progress=none"]))
    whole, cut = (torch.load(f / "model.pt", weights_only=True) for f in (tmp_path / "whole", folder))
    assert [name for name in whole if not torch.equal(whole[name], cut[name])] == []


@pytest.mark.slow  # starts several processes
def test_runs_at_once_and_after_what_they_need(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, priorities, threads = subprocess.Popen, {}, set()
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)

    def started(command: list[str], **options: Any) -> Any:
        priorities[next(a for a in command if a.startswith("name="))] = options["env"]["CUDA_MPS_CLIENT_PRIORITY"]
        threads.add(options["env"]["OMP_NUM_THREADS"])
        return real(command, **options)

    monkeypatch.setattr(subprocess, "Popen", started)
    places = places_in(tmp_path)
    plan = plan_of(places, TUNED, TINY)
    assert [(p.name, p.state) for p in plan.queue] == [
        ("tiny-short-seed0", "ready"),
        ("tiny-asfp-tuned-seed0", "waiting"),
        ("tiny-two-seed0", "ready"),
    ]
    told: list[str] = []
    outcome = execute(plan.queue, places.results, jobs=2, say=told.append)
    assert sorted(outcome.finished) == ["tiny-asfp-tuned-seed0", "tiny-short-seed0", "tiny-two-seed0"]
    assert told[:2] == ["tiny-short-seed0: started", "tiny-two-seed0: started"]
    assert priorities == {'name="tiny-short"': "0", 'name="tiny-two"': "1", 'name="tiny-asfp-tuned"': "1"}
    assert threads == {f"{max(1, (os.cpu_count() or 1) // 2)}"}
    tuned = plan_of(places, TUNED).rows[0][1][0].record
    assert tuned is not None
    assert len(tuned["weights"]["model"]) == 64


@pytest.mark.slow
def test_a_run_that_fails_says_why_and_the_others_go_on(tmp_path: Path) -> None:
    places = places_in(tmp_path)
    plan = plan_of(places, LOST, DENSE)
    outcome = execute(plan.queue, places.results, say=lambda _: None)
    assert outcome.finished == ["tiny-short-seed0"]
    assert list(outcome.failed) == ["tiny-lost-seed0"]
    assert "nowhere" in outcome.failed["tiny-lost-seed0"]
    assert plan_of(places, LOST, DENSE).queue[0].state == "ready"


SCRIPT = """
import sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from test_reproduce_run import LONG, places_in, plan_of
from asfp.reproduce.execute import execute
places = places_in(Path({folder!r}))
outcome = execute(plan_of(places, LONG).queue, places.results, say=print)
print(outcome.interrupted, outcome.stopped, flush=True)
"""


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="signals are sent differently there")
def test_an_interrupt_stops_the_runs_cleanly(tmp_path: Path) -> None:
    script = SCRIPT.format(tests=str(Path(__file__).parent), folder=str(tmp_path))
    places = places_in(tmp_path)
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    clock, end = Clock(places.runs / "tiny-asfp-seed0", 1), time.monotonic() + 90
    try:
        while not clock() and time.monotonic() < end:
            assert process.poll() is None
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    assert output.strip().splitlines()[-1] == "True ['tiny-asfp-seed0']"
    assert (places.runs / "tiny-asfp-seed0" / "checkpoint.pt").exists()
    assert plan_of(places, LONG).queue[0].state == "started"
