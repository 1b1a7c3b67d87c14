"""What a call of `asfp reproduce` asks for, and what is refused before anything is read or run."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path

from asfp.errors import AsfpError
from asfp.reproduce import DEFINITIONS, NAMES, check_name
from asfp.reproduce.execute import check_jobs, parse_budget
from asfp.reproduce.records import check_folder

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

    @property
    def picture(self) -> str:
        """How the figure is drawn, or "" for a table."""
        return DEFINITIONS[self.name].picture if self.name in DEFINITIONS else "rate" * (self.name == "fig-rate")


def check_request(request: Request) -> None:
    """Refuse what cannot be right, whatever there is.

    >>> check_request(Request("table3", jobs=2))
    Traceback (most recent call last):
    ...
    asfp.errors.AsfpError: --jobs 2: table3 stands on no runs of `asfp train`: leave it out
    """
    name = check_name(request.name)
    if request.budget:
        parse_budget(request.budget)
    check_jobs(request.jobs)
    if request.device not in DEVICES:
        raise AsfpError(f"--device {request.device!r}: use one of {', '.join(DEVICES)}")
    if name not in DEFINITIONS:
        for option in ("only", "seeds", "jobs"):
            if getattr(request, option) != getattr(Request, option):
                said = f"--{option} {getattr(request, option)}"
                raise AsfpError(f"{said}: {name} stands on no runs of `asfp train`: leave it out")
    if request.output is not None:
        if not request.picture:
            figures = ", ".join(n for n in NAMES if n.startswith("fig-"))
            raise AsfpError(f"{name} has no picture: --output is for {figures}")
        check_folder("--output", request.output)
    check_results(request.results)
    check_folder("--runs", request.runs)


def check_results(results: Path) -> None:
    """Refuse a file, and a folder that is not there, but for `results` itself: a collection begins so.

    >>> check_results(Path("nowhere"))
    Traceback (most recent call last):
    ...
    asfp.errors.AsfpError: --results nowhere: there is no such folder: check the name, or make it to begin a collection
    """
    check_folder("--results", results / "cifar10")
    if results != Request.results and not results.exists():
        raise AsfpError(
            f"--results {results}: there is no such folder: check the name, or make it to begin a collection"
        )


def check_write(request: Request) -> None:
    """`--write` takes no name, and of the options `--results` alone.

    >>> check_write(Request("", plan=True))
    Traceback (most recent call last):
    ...
    asfp.errors.AsfpError: --plan has no meaning with --write, which makes all tables of the documents from all \
records: leave it out
    """
    if request.name:
        raise AsfpError(f"--write makes all tables of the documents: leave out {request.name}")
    for option in fields(Request):
        if option.name not in ("name", "results") and getattr(request, option.name) != option.default:
            raise AsfpError(
                f"--{option.name.removeprefix('as_')} has no meaning with --write, which makes all tables of the "
                "documents from all records: leave it out"
            )
