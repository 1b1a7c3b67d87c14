"""Records of finished runs: found by what was run, not by their names or where they were made."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from asfp.errors import AsfpError
from asfp.reproduce.fields import check_fields
from asfp.train.config import TrainConfig
from asfp.train.files import write_whole
from asfp.train.identity import identity, settings
from asfp.train.record import FORMAT, MODEL, RECORD, write_record

Record = dict[str, Any]

KEPT_BYTES = 8 << 20
"""Of unpruned runs, weights up to this size are kept beside the records, for the runs that start or learn from them."""


def key_of(config: TrainConfig | Mapping[str, Any]) -> str:
    """A string that two configs share exactly when they are the same run.

    >>> from asfp.train.config import EngineConfig
    >>> key_of(TrainConfig()) == key_of(TrainConfig(name="other", engine=EngineConfig(precision="32-true")))
    True
    >>> key_of(TrainConfig()) == key_of(TrainConfig(seed=1))
    False
    """
    tables = settings(config) if isinstance(config, TrainConfig) else config
    return json.dumps(identity(tables), sort_keys=True)


def read_record(path: Path) -> Record:
    """The record in a file, when it is a whole one: every field that the rest of this room reads is there and right.

    >>> read_record(Path("nowhere.json"))
    Traceback (most recent call last):
    ...
    asfp.errors.AsfpError: there is no record nowhere.json
    """
    try:
        record: Record = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise AsfpError(f"there is no record {path}") from error
    except IsADirectoryError as error:
        raise AsfpError(f"{path} is a folder with the name of a record: rename it, or move it away") from error
    except (ValueError, RecursionError) as error:
        raise _no_record(path, error) from error
    if isinstance(record, dict) and record.get("format", FORMAT) != FORMAT:
        raise AsfpError(f"{path} has the format {record['format']!r}, this version reads {FORMAT}: update asfp")
    try:
        check_fields(record)
    except AsfpError as error:
        raise _no_record(path, error) from error
    return record


def _no_record(path: Path, error: Exception) -> AsfpError:
    return AsfpError(f"{path} is not a record of asfp train ({error}): remove it, or copy it again")


def load_records(folder: Path) -> dict[str, Record]:
    """All records under `folder`/cifar10, by `key_of`; two of the same run are an error, so that nobody picks.

    >>> load_records(Path("nowhere"))
    {}
    """
    check_folder("--results", folder / "cifar10")
    found: dict[str, Record] = {}
    paths: dict[str, Path] = {}
    for path in sorted((folder / "cifar10").glob("*.json")):
        record = read_record(path)
        key = key_of(record["config"])
        if key in found:
            raise AsfpError(
                f"{paths[key]} and {path} are records of the same run: keep the one that was made first, whatever it "
                "says, and delete the other"
            )
        found[key], paths[key] = record, path
    return found


def check_folder(option: str, folder: Path) -> None:
    """Refuse a file where a folder is, or is to be made.

    >>> check_folder("--runs", Path(__file__) / "runs")
    Traceback (most recent call last):
    ...
    asfp.errors.AsfpError: --runs: .../records.py is a file, not a folder: choose another folder, or move the file away
    """
    there = next((place for place in (folder, *folder.parents) if place.exists()), None)
    if there is not None and not there.is_dir():
        raise AsfpError(f"{option}: {there} is a file, not a folder: choose another folder, or move the file away")


def kept_weights(results: Path, name: str) -> Path:
    """Where the weights of an unpruned run are kept, once its folder is gone.

    >>> kept_weights(Path("results"), "resnet56-seed0").as_posix()
    'results/weights/resnet56-seed0.pt'
    """
    return results / "weights" / f"{name}.pt"


def collect(run: Path, results: Path) -> Path | None:
    """Copy the record of a finished run folder to `results`/cifar10; None where the run is not finished.

    Small weights of unpruned runs are copied too, to `kept_weights`.

    >>> collect(Path("nowhere"), Path("results")) is None
    True
    """
    source = run / RECORD
    if not source.exists():
        return None
    record = read_record(source)
    target = results / "cifar10" / f"{run.name}.json"
    if target.exists() and key_of(read_record(target)["config"]) != key_of(record["config"]):
        raise AsfpError(f"{target} is the record of another run than {run}: rename one of them")
    target.parent.mkdir(parents=True, exist_ok=True)
    write_record(target, record)
    weights, kept = run / MODEL, kept_weights(results, run.name)
    unpruned = record["config"]["pruning"]["method"] == "none"
    if unpruned and weights.exists() and weights.stat().st_size <= KEPT_BYTES:
        kept.parent.mkdir(parents=True, exist_ok=True)
        write_whole(kept, weights.read_bytes())
    return target
