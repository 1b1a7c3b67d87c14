"""From rows to runs: which are recorded, which were cut off, which are to be run, in which order."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from asfp.errors import AsfpError, nearest
from asfp.reproduce.definition import Definition, Row, Run
from asfp.reproduce.estimate import seconds_of
from asfp.reproduce.records import Record, kept_weights, key_of, read_record
from asfp.train.checkpoint import CURRENT, PREVIOUS
from asfp.train.config import TrainConfig, load_config
from asfp.train.journal import METRICS
from asfp.train.record import MODEL, RECORD

MOST_SEEDS = 100


@dataclass(frozen=True)
class Places:
    """Where recipes, records, run folders and data lie; `data` None leaves it to the recipe."""

    recipes: Path
    results: Path = Path("results")
    runs: Path = Path("runs")
    data: Path | None = None


@dataclass(frozen=True)
class Planned:
    """One run with one seed, and how far it is: done, started, ready, waiting (for `needs`) or blocked."""

    run: Run
    seed: int
    config: TrainConfig
    arguments: tuple[str, ...]
    """Of `asfp train`."""
    state: str
    epoch: int = 0
    """Epochs done, where it was started."""
    minutes: float = 0.0
    """What is left, on one GPU by itself."""
    record: Record | None = None
    problem: str = ""
    """Why it is blocked, and what to do."""

    @property
    def name(self) -> str:
        return self.run.name(self.seed)

    @property
    def needs(self) -> str:
        """The name of the run that must be finished before this one, or ""."""
        return "" if self.run.needs is None else self.run.needs.name(self.seed)


@dataclass(frozen=True)
class Plan:
    """The rows that are shown, each with its runs, and what is to be run for them in order of importance."""

    definition: Definition
    rows: tuple[tuple[Row, tuple[Planned, ...]], ...]
    queue: tuple[Planned, ...]
    dense: Mapping[str, tuple[Planned, ...]]
    """The unpruned runs that rows are compared with, by label."""
    results: Path = Path("results")

    @property
    def startable(self) -> tuple[Planned, ...]:
        """What of the queue can be run here, now or after others of it."""
        return tuple(planned for planned in self.queue if planned.state != "blocked")

    @property
    def blocked(self) -> Mapping[str, tuple[str, ...]]:
        """Why runs of the queue cannot be run here, with the names of those it holds for."""
        names: dict[str, tuple[str, ...]] = {}
        for planned in self.queue:
            if planned.state == "blocked":
                names[planned.problem] = (*names.get(planned.problem, ()), planned.name)
        return names

    @property
    def minutes(self) -> float:
        return sum(planned.minutes for planned in self.startable)


def find_recipes() -> Path:
    """The folder of recipes: here, or in the source tree that this file is part of.

    >>> (find_recipes() / "cifar10" / "resnet56.toml").exists()
    True
    """
    for folder in (Path("recipes"), Path(__file__).resolve().parents[3] / "recipes"):
        if (folder / "cifar10").is_dir():
            return folder
    raise AsfpError("there is no folder recipes/ here: run this in a clone of the repository")


def arguments_of(run: Run, seed: int, places: Places) -> tuple[str, ...]:
    """What `asfp train` is called with: the recipe, and what this run changes.

    >>> arguments_of(Run("cifar10/resnet20"), 1, Places(Path("recipes")))
    ('recipes/cifar10/resnet20.toml', 'name="resnet20"', 'seed=1', 'output="runs/resnet20-seed1"')
    """
    arguments = [(places.recipes / f"{run.recipe}.toml").as_posix(), *run.overrides, f"name={_quoted(run.label)}"]
    arguments += [f"seed={seed}", f"output={_quoted((places.runs / run.name(seed)).as_posix())}"]
    if run.needs is not None:
        weights = _quoted(weights_of(run, seed, places).as_posix())
        arguments += [f"{key}={weights}" for key in run.needs_for]
    if places.data is not None:
        arguments.append(f"data.root={_quoted(places.data.as_posix())}")
    return tuple(arguments)


def weights_of(run: Run, seed: int, places: Places) -> Path:
    """The weights that the run starts or learns from: in the folder of their run, or as they were kept."""
    assert run.needs is not None
    name = run.needs.name(seed)
    own, kept = places.runs / name / MODEL, kept_weights(places.results, name)
    return kept if kept.exists() and not own.exists() else own


def make_plan(
    definition: Definition, places: Places, records: Mapping[str, Record], *, only: str = "", seeds: int | None = None
) -> Plan:
    """The state of every run behind the rows that `only` names (all where it is empty), and the queue.

    `only` is text in a run's name or a row's cells, "=NAME" for one run alone, or several of these with commas.
    Each row has its own number of seeds, 0, 1, ...; `seeds` gives all the same. Seeds beyond a row's own come last.

    >>> from asfp.reproduce import DEFINITIONS
    >>> places = Places(find_recipes(), results=Path("nowhere"), runs=Path("nowhere"))
    >>> plan = make_plan(DEFINITIONS["fig-gap"], places, {})
    >>> [planned.name for planned in plan.queue][:3]
    ['resnet56-sfp-seed0', 'resnet56-asfp-seed0', 'resnet56-seed0']
    """
    if seeds is not None and not 1 <= seeds <= MOST_SEEDS:
        raise AsfpError(f"--seeds {seeds}: it must be from 1 to {MOST_SEEDS}, the runs of each row")
    terms = _terms(only)
    for term in terms:
        if not any(_matches(row, term) for row in definition.rows):
            raise _no_row(definition, term)
    chosen = [row for row in definition.rows if any(_matches(row, term) for term in terms)]
    rows = []
    queue: dict[str, tuple[tuple[bool, int, int], Planned]] = {}
    for row in chosen:
        own = _seeds(row.run, seeds or row.seeds, places, records)
        if row.optional and not _named(row, only) and not any(planned.record for planned in own):
            continue
        rows.append((row, tuple(own)))
        for planned in own:
            order = planned.seed >= row.seeds, row.priority, planned.seed
            for item in (*_before(planned, places, records), planned):
                if item.state != "done" and (item.name not in queue or order < queue[item.name][0]):
                    queue[item.name] = order, item
    if not rows:
        labels = ", ".join(f"={row.run.label}" for row in chosen)
        raise AsfpError(f"--only {only!r} names runs that are made one by one: choose of {labels}")
    ordered = [item for _, item in sorted(queue.values(), key=lambda entry: entry[0])]
    dense = {row.dense.label: row.dense for row, _ in rows if row.dense is not None}
    compared = {label: tuple(_seeds(run, 1, places, records)) for label, run in dense.items()}
    return Plan(definition, tuple(rows), tuple(_dependencies_first(ordered)), compared, places.results)


def _terms(only: str) -> list[str]:
    """The parts between commas; the empty text, which is in every row, where there are none."""
    return [term.strip().lower() for term in only.split(",") if term.strip()] or [""]


def _matches(row: Row, term: str) -> bool:
    """Whether one part of `only` is in the row's text, or, after "=", is the name of its run."""
    text = " ".join((row.run.label, *row.cells)).lower()
    return term[1:] == row.run.label if term.startswith("=") else term in text


def _no_row(definition: Definition, term: str) -> AsfpError:
    """The error for a part of `only` that names nothing: the nearest names, and where all of them are to be seen."""
    said = f"--only {term!r} names no row of {definition.name}."
    name, fix = re.sub(r"-seed\d+$", "", term), ""
    if name != term:
        fix = f" Rows stand for all their seeds: leave out {term[len(name) :]}, and use --seeds for how many."
    if name == term or not any(_matches(row, name) for row in definition.rows):
        fix += nearest(name.removeprefix("="), dict.fromkeys(row.run.label for row in definition.rows))
    return AsfpError(f"{said}{fix} All rows: asfp reproduce {definition.name} --plan")


def _named(row: Row, only: str) -> bool:
    """Whether `only` asks for this run itself: by its name, or by what its overrides are called."""
    tag = row.run.tag.lower()
    return any(term[:1] == "=" or (term and tag and (term in tag or tag in term)) for term in _terms(only))


def _seeds(run: Run, count: int, places: Places, records: Mapping[str, Record]) -> list[Planned]:
    """The run with the seeds 0 ... count - 1, and with every other that is recorded: no record is left out."""
    others = {int(record["seed"]) for record in records.values()} - set(range(count))
    planned = [_planned(run, seed, places, records) for seed in (*range(count), *sorted(others))]
    return [p for p in planned if p.seed < count or p.state == "done"]


def _planned(run: Run, seed: int, places: Places, records: Mapping[str, Record]) -> Planned:
    arguments = arguments_of(run, seed, places)
    config = load_config(arguments[0], arguments[1:])
    folder, key = config.folder, key_of(config)
    record = records.get(key)
    if record is None and (folder / RECORD).exists():
        found = read_record(folder / RECORD)
        record = found if key_of(found["config"]) == key else None
        if record is None:
            problem = f"{folder} holds another run under this name: move it away"
            return Planned(run, seed, config, arguments, "blocked", problem=problem)
    if record is not None:
        return Planned(run, seed, config, arguments, "done", config.epochs, record=record)
    epoch, state, problem = 0, "ready", ""
    if any((folder / name).exists() for name in (CURRENT, PREVIOUS)):  # perhaps from within the first epoch
        lines = (folder / METRICS).read_text(encoding="utf-8").splitlines() if (folder / METRICS).exists() else []
        epoch, state = min(len(lines), config.epochs), "started"
    minutes = (config.epochs - epoch) * seconds_of(config, records.values()) / 60
    if run.needs is not None and not (weights := weights_of(run, seed, places)).exists():
        dense = _planned(run.needs, seed, places, records)
        state = "blocked" if dense.state in ("done", "blocked") else "waiting"
        if dense.state == "done":
            problem = (
                f"needs {weights}: {dense.name} is recorded, but its weights are not here. Copy its model.pt there, or "
                f"train it again: asfp train {' '.join(map(shlex.quote, dense.arguments))}"
            )
        elif dense.state == "blocked":
            problem = f"needs {dense.name}, but {dense.problem}"
    return Planned(run, seed, config, arguments, state, epoch, minutes, problem=problem)


def _before(planned: Planned, places: Places, records: Mapping[str, Record]) -> list[Planned]:
    """The run that this one needs, where it is still to be run for it."""
    if planned.state != "waiting" or planned.run.needs is None:
        return []
    return [_planned(planned.run.needs, planned.seed, places, records)]


def _dependencies_first(queue: Iterable[Planned]) -> list[Planned]:
    rest, done = list(queue), list[Planned]()
    names = {planned.name for planned in rest}
    while rest:
        placed = {planned.name for planned in done}
        i = next(i for i, item in enumerate(rest) if item.needs not in names or item.needs in placed)
        done.append(rest.pop(i))
    return done


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
