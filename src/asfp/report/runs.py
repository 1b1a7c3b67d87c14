"""Runs as the report reads them: whatever a run folder or a record holds, and a notice for what it lacks.

Nothing here raises for what is in a file: foreign, torn or missing content becomes a notice of what is not shown.
"""

from __future__ import annotations

import json
import tempfile
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from asfp.compaction import Plan
from asfp.errors import AsfpError, nearest
from asfp.report.notices import Notice
from asfp.report.timings import BENCH, Timing, read_timings
from asfp.report.values import Column, cell, dig, integer, number, plain
from asfp.train.journal import METRICS
from asfp.train.norms import FILTERS, FilterHistory, read_filters
from asfp.train.record import RECORD

CONFIG, COMPACT, DENSE = "config.toml", "compact.safetensors", "model.pt"
PARTS = (RECORD, METRICS, CONFIG, FILTERS)
"""A folder with any of these is a run."""
COLUMNS = ("loss", "lr", "rate", "accuracy_before", "accuracy_after", "zeroed", "regrown", "returned")
T = TypeVar("T")
DEPTH = 3
"""How many folders down runs are looked for."""


@dataclass(frozen=True)
class Run:
    """One run. Shares are between 0 and 1; what is not known is None or empty, and `notices` say why."""

    path: Path
    name: str
    seed: int | None = None
    config: dict[str, Any] = field(default_factory=dict)
    epochs: list[int] = field(default_factory=list)
    columns: dict[str, Column] = field(default_factory=dict)
    total: int | None = None
    finished: bool = False
    accuracy: float | None = None
    accuracy_compact: float | None = None
    test_images: int | None = None
    differ: int | None = None
    max_abs_diff: float | None = None
    macs_dense: float | None = None
    macs: float | None = None
    parameters_dense: float | None = None
    parameters: float | None = None
    sizes: dict[str, int] = field(default_factory=dict)
    """Bytes of the dense and the compact file, as far as they are there."""
    facts: dict[str, dict[str, str]] = field(default_factory=dict)
    """Tables of words: versions, hardware, seconds, commit."""
    filters: FilterHistory | None = None
    plan: Plan | None = None
    architecture: str = ""
    timings: tuple[Timing, ...] = ()
    notices: tuple[Notice, ...] = ()

    @property
    def method(self) -> str:
        """none, sfp, asfp, hard, or "" where it is not known."""
        return str(dig(self.config, "pruning", "method") or "")

    @property
    def label(self) -> str:
        """The name with the seed."""
        return self.name if self.seed is None else f"{self.name}, seed {self.seed}"

    @property
    def macs_saved(self) -> float | None:
        """The share of the multiply-adds that the compact model saves."""
        return 1 - self.macs / self.macs_dense if self.macs is not None and self.macs_dense else None

    @property
    def last_accuracy(self) -> float | None:
        """After the last pruning that there was."""
        if self.accuracy is not None:
            return self.accuracy
        return next((x for x in reversed(self.columns.get("accuracy_after", [])) if x is not None), None)


def find_runs(paths: Sequence[Path]) -> list[Path]:
    """The runs at the given paths: run folders, record files, and folders that hold such.

    >>> folder = Path(tempfile.mkdtemp())
    >>> _ = (folder / "a").mkdir(), (folder / "a" / RECORD).write_text("{}"), (folder / "b.json").write_text("{}")
    >>> [path.name for path in find_runs([folder])]
    ['b.json', 'a']
    """
    if not paths:
        raise AsfpError(
            "there is nothing to report on: give a run folder or a record, e.g. asfp report runs/NAME-seed0"
        )
    found: dict[Path, None] = {}
    for path in paths:
        if not path.exists():
            beside = path.parent.iterdir() if path.parent.is_dir() else ()
            close = nearest(path.name, (p.name for p in beside), n=1)
            raise AsfpError(f"there is no {str(path)!r}.{close} Give run folders of `asfp train`, or their record.json")
        found |= dict.fromkeys(_within(path, DEPTH) or [path])
    return list(found)


def _within(path: Path, depth: int) -> list[Path]:
    if path.is_file() or any((path / part).is_file() for part in PARTS):
        return [path]
    if not depth:
        return []
    inner = sorted(p for p in path.iterdir() if not p.name.startswith("."))
    records = [p for p in inner if p.is_file() and p.suffix == ".json" and p.name != BENCH]
    return records + [run for p in inner if p.is_dir() for run in _within(p, depth - 1)]


def read_run(path: Path) -> Run:
    """The run of a folder or of a record file, with notices for all that is missing or cannot be read.

    >>> folder = Path(tempfile.mkdtemp())
    >>> _ = (folder / METRICS).write_text('{"epoch": 1, "loss": 2.5, "accuracy_after": 0.1}')
    >>> run = read_run(folder)
    >>> run.columns["loss"], run.last_accuracy, run.finished
    ([2.5], 0.1, False)
    """
    notices: list[Notice] = []
    folder = path if path.is_dir() else None
    record = _attempt(lambda: _record(folder / RECORD if folder else path), notices)
    config = plain(record.get("config")) if record else {}
    rows = _rows(record)
    filters = plan = None
    architecture = ""
    timings: tuple[Timing, ...] = ()
    if folder is not None:
        config = config or _attempt(lambda: _config(folder / CONFIG), notices) or {}
        rows = _attempt(lambda: _metrics(folder / METRICS, notices), notices) or rows
        filters = _attempt(lambda: _filters(folder / FILTERS), notices)
        plan, architecture = _attempt(lambda: _plan(folder / COMPACT), notices) or (None, "")
        timings = _attempt(lambda: read_timings(folder / BENCH), notices) or timings
    epochs = [integer(row.get("epoch")) or i + 1 for i, row in enumerate(rows)] or (filters.epochs if filters else [])
    total = integer(config.get("epochs")) if isinstance(config, dict) else None
    sizes = (
        {} if folder is None else {f.name: f.stat().st_size for f in (folder / DENSE, folder / COMPACT) if f.is_file()}
    )
    finished = bool(record) and (dig(record, "result", "accuracy") is not None)
    run = Run(
        path=path,
        name=str(config.get("name") or (record or {}).get("name") or path.stem)[:200],
        seed=integer(config.get("seed")),
        config=config,
        epochs=epochs,
        columns={name: [cell(row.get(name)) for row in rows] for name in COLUMNS if any(name in row for row in rows)},
        total=total,
        finished=finished,
        accuracy=number(dig(record, "result", "accuracy")),
        accuracy_compact=number(dig(record, "result", "accuracy_compact")),
        test_images=integer(dig(record, "result", "test_images")),
        differ=integer(dig(record, "result", "predictions_that_differ")),
        max_abs_diff=number(dig(record, "compact", "max_abs_diff")),
        macs_dense=number(dig(record, "compact", "macs_dense")),
        macs=number(dig(record, "compact", "macs")),
        parameters_dense=number(dig(record, "compact", "parameters_dense")),
        parameters=number(dig(record, "compact", "parameters")),
        sizes=sizes,
        facts=_facts(record),
        filters=filters,
        plan=plan,
        architecture=architecture,
        timings=timings,
    )
    return replace(run, notices=(*notices, *_complaints(run, folder, record is not None)))


def _attempt(read: Callable[[], T], notices: list[Notice]) -> T | None:
    try:
        return read()
    except AsfpError as error:
        notices.append(Notice(str(error)))
    except OSError as error:
        notices.append(Notice(error.strerror or str(error), (str(error.filename or ""),)))
    return None


def _record(path: Path) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise AsfpError(f"{path} is not a record: it is no JSON ({error}); its figures are not shown") from error
    if not isinstance(record, dict) or not isinstance(record.get("result"), dict):
        raise AsfpError(f"{path} is not a record of `asfp train`: it has no result; its figures are not shown")
    return record


def _config(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        return plain(tomllib.loads(path.read_text(encoding="utf-8")))
    except ValueError as error:
        raise AsfpError(f"{path} is not TOML ({error}); the configuration is not shown") from error


def _rows(record: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    """The epochs of a record, row by row."""
    columns = dig(record, "epochs")
    if not isinstance(columns, dict):
        return []
    lists = {str(name): values for name, values in columns.items() if isinstance(values, list)}
    length = max(map(len, lists.values()), default=0)
    return [{name: v[i] for name, v in lists.items() if i < len(v)} for i in range(length)]


def _metrics(path: Path, notices: list[Notice]) -> list[dict[str, Any]]:
    if not path.is_file():
        return []
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    rows, bad = [], 0
    for i, line in enumerate(lines):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        if isinstance(row, dict):
            rows.append(row)
        elif i < len(lines) - 1:  # the last line of a run that is being written, or was killed, may be torn
            bad += 1
    if bad:
        notices.append(Notice(f"{bad} of {len(lines)} lines are not metrics and are left out", (str(path),)))
    return rows


def _filters(path: Path) -> FilterHistory | None:
    if not path.is_file():
        return None
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    if len(lines) < 2:
        return None
    if lines[-1].endswith("}"):
        return read_filters(path)
    with tempfile.TemporaryDirectory() as folder:  # a torn last line
        whole = Path(folder) / path.name
        whole.write_text("\n".join(lines[:-1]), encoding="utf-8")
        return read_filters(whole) if len(lines) > 2 else None


def _plan(path: Path) -> tuple[Plan, str] | None:
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        return None
    try:
        with safe_open(path, framework="np") as file:
            metadata = file.metadata() or {}
        return Plan.from_json(metadata["plan"]), metadata.get("architecture", "")
    except (SafetensorError, KeyError, ValueError, RecursionError) as error:
        raise AsfpError(f"{path} holds no plan of a compact model ({error}); layers are not shown") from error


def _facts(record: Mapping[str, Any] | None) -> dict[str, dict[str, str]]:
    facts = {}
    for name in ("hardware", "versions", "seconds"):
        table = dig(record, name)
        if isinstance(table, dict):
            facts[name] = {str(key): str(value) for key, value in table.items() if str(value)}
    commit = dig(record, "commit")
    return facts | ({"commit": {"commit": commit}} if isinstance(commit, str) and commit else {})


def _complaints(run: Run, folder: Path | None, recorded: bool) -> list[Notice]:
    """What a reader misses on the page, and how to get it."""
    if not run.epochs and not recorded:
        why = "its first epoch has not ended yet" if run.config else "there is no run that can be read"
        return [Notice(f"{why}; nothing of it is shown", (str(run.path),))]
    found = []
    if not recorded and folder is not None and not (folder / RECORD).exists():
        found.append(
            f"not finished, there is no {RECORD}: accuracies are those of training, and there is no compact model yet. "
            "The same `asfp train` command goes on with it"
        )
    if not run.columns:
        found.append("no metrics of the epochs: there are no curves")
    if folder is None:
        found.append("a record alone: filters, layers and latency need the folder of the run (asfp report RUN_FOLDER)")
    elif run.method not in ("none", "") and run.filters is None and not (folder / FILTERS).exists():
        found.append(f"no {FILTERS}: which filters were zeroed is not shown")
    return [Notice(text, (str(run.path),)) for text in found]
