"""`asfp reproduce`: show, run up to a budget, show again."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

from asfp.errors import AsfpError
from asfp.reproduce import DEFINITIONS, NAMES
from asfp.reproduce.execute import Outcome, execute, parse_budget
from asfp.reproduce.plan import Places, Plan, find_recipes, make_plan
from asfp.reproduce.records import collect, key_of, load_records
from asfp.reproduce.request import Request, check_request, check_results, check_write
from asfp.reproduce.sheets import COMMANDS, SHEETS
from asfp.reproduce.show import as_dict, as_markdown, as_text, blocked_lines, sheet_of

__all__ = ["Request", "reproduce", "stderr", "write"]


def reproduce(request: Request, say: Callable[[str], None]) -> str:
    """Run what is missing behind a table or figure, unless only the plan is wanted, and return what there is to show.

    >>> print(reproduce(Request("fig-rate"), print).splitlines()[0])
    Percent of the filters pruned after each epoch
    """
    if not request.name:
        raise AsfpError(f"what is to be reproduced? asfp reproduce NAME, with one of {', '.join((*NAMES, 'all'))}")
    check_request(request)
    if request.name not in DEFINITIONS:
        return _without_runs(request)
    places = Places(find_recipes(), request.results, request.runs, request.data)
    plan, outcome = _plan(request, places), Outcome()
    if not request.plan:
        _collect(plan, places)
    if not request.plan and plan.queue:
        problem = _hindrance(request, plan)
        if problem:
            say(_shown(request, plan))
            raise AsfpError(problem)
        budget = parse_budget(request.budget) if request.budget else None
        settings = [] if request.device == "auto" else [f"engine.accelerator={request.device}"]
        outcome = execute(plan.queue, places.results, budget=budget, jobs=request.jobs, settings=settings, say=say)
        plan = _plan(request, places)
    if outcome.spent:
        say(f"the budget of {request.budget} is used up: run the same command again to go on")
    text = _shown(request, plan)
    if outcome.interrupted:
        say(text)
        raise KeyboardInterrupt("Stopped; run the same command again to go on from there.")
    problem = _failures(outcome, places) or _undrawable(request, plan)
    if problem:
        say(text)
        raise AsfpError(problem)
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


def _hindrance(request: Request, plan: Plan) -> str:
    """Why nothing of the queue can be started: all of it is blocked, no GPU, or no data; "" where it can."""
    import torch

    from asfp.data.cifar import check_cifar10

    count = len(plan.startable)
    if not count:
        return f"nothing was run. {'; '.join(blocked_lines(plan))}"
    if request.device == "auto" and not torch.cuda.is_available():
        return (
            f"{count} run{' is' if count == 1 else 's are'} missing for {request.name}, and there is no GPU here: "
            f"use --plan for the table and the plan alone, or --device cpu to run {'it' if count == 1 else 'them'} all "
            "the same"
        )
    needing = (planned.config.data for planned in plan.startable)
    for root in dict.fromkeys(data.root for data in needing if data.name == "cifar10" and not data.download):
        problems = check_cifar10(root)
        if problems:
            first, what = next(iter(problems.items()))
            return (
                f"CIFAR-10 is not in {root} ({len(problems)} files are missing or damaged, e.g. {first}: {what}), and "
                f"nothing was started: asfp data cifar10 --root {shlex.quote(root)} --download"
            )
    return ""


def _failures(outcome: Outcome, places: Places) -> str:
    if not outcome.failed:
        return ""
    failed = [f"{run}: {why} (see {places.runs / run / 'train.log'})" for run, why in outcome.failed.items()]
    left = "" if outcome.spent or not outcome.left else f"; not begun for that: {', '.join(outcome.left)}"
    return f"{len(failed)} run{'s' * (len(failed) > 1)} failed: {'; '.join(failed)}{left}"


def _shown(request: Request, plan: Plan) -> str:
    """The table and, where there is something to draw, the picture."""
    drawn = [] if _undrawable(request, plan) else _drawn(request, plan)
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
    sheet, drawn = SHEETS[request.name](request.results), _drawn(request, None)
    if request.name in COMMANDS:
        sheet = replace(sheet, notes=(*sheet.notes, *COMMANDS[request.name](find_recipes(), request.data)))
    if request.as_json:
        return json.dumps(asdict(sheet) | {"name": request.name} | ({"pictures": drawn} if drawn else {}))
    text = as_markdown(sheet) if request.markdown else as_text(sheet)
    return "\n".join([text, *(f"picture: {path}" for path in drawn)])


def _undrawable(request: Request, plan: Plan) -> str:
    """Why there is no picture to be made where one is asked for, or ""."""
    from asfp.reproduce.pictures import missing

    return missing(request.picture, plan) if request.output is not None else ""


def _drawn(request: Request, plan: Plan | None) -> list[str]:
    if request.output is None:
        return []
    from asfp.reproduce.pictures import draw

    return [str(path) for path in draw(request.name, request.picture, plan, request.output)]


def write(request: Request) -> str:
    """Make the tables of README.md and docs/results.md anew."""
    check_write(request)
    check_results(request.results)
    from asfp.reproduce.write import write_documents

    changed = write_documents(Path(), Places(find_recipes(), request.results))
    return "\n".join(f"{path}: written" for path in changed) or "all tables agree with the records"


def stderr(text: str) -> None:
    """A line of progress, beside the result on stdout."""
    print(text, file=sys.stderr, flush=True)
