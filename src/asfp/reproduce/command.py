"""`asfp reproduce`: show, run up to a budget, show again."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from asfp.errors import AsfpError
from asfp.reproduce import DEFINITIONS, NAMES, check_name
from asfp.reproduce.execute import Outcome, check_jobs, execute, parse_budget
from asfp.reproduce.plan import Places, Plan, find_recipes, make_plan
from asfp.reproduce.records import collect, key_of, load_records
from asfp.reproduce.sheets import SHEETS
from asfp.reproduce.show import as_dict, as_markdown, as_text, sheet_of

DEVICES = ("auto", "cpu")


@dataclass(frozen=True)
class Request:
    """What the user asked for; see `asfp reproduce --help`."""

    name: str
    only: str = ""
    seeds: int | None = None
    budget: str = ""
    plan: bool = False
    as_json: bool = False
    markdown: bool = False
    results: Path = Path("results")
    runs: Path = Path("runs")
    data: Path | None = None
    jobs: int = 1
    device: str = "auto"
    output: Path | None = None


def reproduce(request: Request, say: Callable[[str], None]) -> str:
    """Run what is missing behind a table or figure, unless only the plan is wanted, and return what there is to show.

    >>> print(reproduce(Request("fig-rate"), print).splitlines()[0])
    Percent of the filters pruned after each epoch
    """
    name = check_name(request.name)
    budget = parse_budget(request.budget) if request.budget else None
    check_jobs(request.jobs)
    if request.device not in DEVICES:
        raise AsfpError(f"--device {request.device!r}: use one of {', '.join(DEVICES)}")
    if name not in DEFINITIONS:
        return _without_runs(request)
    places = Places(find_recipes(), request.results, request.runs, request.data)
    plan, outcome = _plan(request, places), Outcome()
    if not request.plan:
        _collect(plan, places)
    if not request.plan and plan.queue:
        _check_device(request, plan, say)
        settings = [] if request.device == "auto" else [f"engine.accelerator={request.device}"]
        outcome = execute(plan.queue, places.results, budget=budget, jobs=request.jobs, settings=settings, say=say)
        plan = _plan(request, places)
    text = _rendered(request, plan)
    if outcome.interrupted:
        say(text)
        raise KeyboardInterrupt("Stopped; run the same command again to go on from there.")
    if outcome.failed:
        say(text)
        raise AsfpError(
            f"{len(outcome.failed)} runs failed: "
            + "; ".join(f"{run}: {why} (see {places.runs / run / 'train.log'})" for run, why in outcome.failed.items())
        )
    return text


def _plan(request: Request, places: Places) -> Plan:
    records = load_records(places.results)
    return make_plan(DEFINITIONS[request.name], places, records, only=request.only, seeds=request.seeds)


def _collect(plan: Plan, places: Places) -> None:
    """Copy records that lie in run folders only."""
    records = load_records(places.results)
    for planned in (run for _, runs in plan.rows for run in runs if run.state == "done"):
        if key_of(planned.config) not in records:
            collect(planned.config.folder, places.results)


def _check_device(request: Request, plan: Plan, say: Callable[[str], None]) -> None:
    import torch

    if request.device == "auto" and not torch.cuda.is_available():
        say(_rendered(request, plan))
        raise AsfpError(
            f"{len(plan.queue)} runs are missing for {request.name}, and there is no GPU here: "
            "use --plan for the table and the plan alone, or --device cpu to run them all the same"
        )


def _rendered(request: Request, plan: Plan) -> str:
    drawn = _drawn(request, plan.definition.picture, plan)
    if request.as_json:
        return json.dumps(as_dict(plan) | ({"pictures": drawn} if drawn else {}))
    sheet = sheet_of(plan)
    parts = [as_markdown(sheet) if request.markdown else as_text(sheet)]
    if request.plan and plan.queue:
        parts.append(
            "\n".join(["", "In this order:", *(_line(p.name, p.state, p.epoch, p.minutes) for p in plan.queue)])
        )
    return "\n".join([*parts, *(f"picture: {path}" for path in drawn)])


def _line(name: str, state: str, epoch: int, minutes: float) -> str:
    what = f"from epoch {epoch}" if state == "started" else {"waiting": "after the run it needs"}.get(state, state)
    return f"  {name:52} {minutes:5.1f} min  {what}"


def _without_runs(request: Request) -> str:
    sheet, drawn = (
        SHEETS[request.name](request.results),
        _drawn(request, "rate" if request.name == "fig-rate" else "", None),
    )
    if request.as_json:
        return json.dumps(asdict(sheet) | {"name": request.name} | ({"pictures": drawn} if drawn else {}))
    text = as_markdown(sheet) if request.markdown else as_text(sheet)
    return "\n".join([text, *(f"picture: {path}" for path in drawn)])


def _drawn(request: Request, kind: str, plan: Plan | None) -> list[str]:
    if request.output is None:
        return []
    if not kind:
        figures = ", ".join(n for n in NAMES if n.startswith("fig-"))
        raise AsfpError(f"{request.name} has no picture: --output is for {figures}")
    from asfp.reproduce.pictures import draw

    return [str(path) for path in draw(request.name, kind, plan, request.output)]


def write_or_list(name: str | None, write: bool, results: Path) -> str:
    """With `write`, make the tables of README.md and docs/results.md anew; without a name, say which there are."""
    if not write:
        raise AsfpError(f"what is to be reproduced? asfp reproduce NAME, with one of {', '.join(NAMES)}")
    if name is not None:
        raise AsfpError(f"--write makes all tables of the documents: leave out {name}")
    from asfp.reproduce.write import write_documents

    changed = write_documents(Path(), Places(find_recipes(), results))
    return "\n".join(f"{path}: written" for path in changed) or "all tables agree with the records"


def stderr(text: str) -> None:
    """A line of progress, beside the result on stdout."""
    print(text, file=sys.stderr, flush=True)
