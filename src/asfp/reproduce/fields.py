"""What a record of `asfp train` must hold: every field that plans, tables and pictures read, checked once."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Mapping
from typing import Any

from asfp.errors import AsfpError
from asfp.train.config import config_from
from asfp.train.identity import with_defaults
from asfp.train.record import FORMAT


def check_fields(record: Any) -> None:
    """Raise an `AsfpError` that names the first field which is missing, or is not what it must be.

    What older versions did not write stays optional: later options of the config, `weights`, `returned`, the epochs'
    seconds.

    >>> check_fields({"format": 1, "config": {"epochs": "many"}})
    Traceback (most recent call last):
    ...
    asfp.errors.AsfpError: config: epochs='many' is a str: it must be a whole number
    """
    if not isinstance(record, dict):
        raise AsfpError(f"it is a {type(record).__name__}, not a table")
    _field(record, "format", lambda v: v == FORMAT, f"{FORMAT}")
    config = _field(record, "config", lambda v: isinstance(v, dict), "a table")
    try:
        own = config_from(with_defaults(config))
    except (AsfpError, OverflowError) as error:  # a whole number beyond all floats is the latter
        raise AsfpError(f"config: {error}") from error
    _field(record, "seed", lambda v: _is_whole(v) and v == own.seed, f"{own.seed}, as config.seed is")
    for name in ("seed", "epochs", "model.name"):  # where the defaults would say what this run did not
        _field(config, name, lambda _: True, "given", "config.")
    _field(record, "result.accuracy_compact", _is_share, "a number from 0 to 1")
    _field(record, "compact.macs_dense", lambda v: _is_whole(v) and v > 0, "a whole number above 0")
    _field(record, "compact.macs", _is_whole, "a whole number, at least 0")
    _field(record, "hardware.device", lambda v: isinstance(v, str), "a string")
    _field(record, "seconds.train", lambda v: _is_amount(v) and v > 0, "a number above 0")
    for phase in {"evaluate", "prune"} & record["seconds"].keys():
        _field(record, f"seconds.{phase}", _is_amount, "a number, at least 0")
    _check_epochs(record)


def _check_epochs(record: Mapping[str, Any]) -> None:
    columns = _field(record, "epochs", lambda v: isinstance(v, dict), "a table of lists")
    shares = ("accuracy_before", "accuracy_after", "regrown")
    for name in shares:
        _field(record, f"epochs.{name}", _is_list(_is_share), "a list of numbers from 0 to 1, one an epoch")
    if "train_seconds" in columns:
        _field(record, "epochs.train_seconds", _is_list(_is_amount), "a list of numbers, at least 0, one an epoch")
    length = len(columns[shares[0]])
    for name in columns:
        what = f"a list of {length} entries, as epochs.{shares[0]} is"
        _field(columns, name, lambda v: isinstance(v, list) and len(v) == length, what, "epochs.")


def _field(table: Mapping[str, Any], name: str, allowed: Callable[[Any], bool], what: str, prefix: str = "") -> Any:
    """The value at a name with dots, when it is allowed."""
    value: Any = table
    for part in name.split("."):
        if not isinstance(value, dict) or part not in value:
            raise AsfpError(f"{prefix}{name} is missing")
        value = value[part]
    if not allowed(value):
        raise AsfpError(f"{prefix}{name} is {reprlib.repr(value)}, it must be {what}")
    return value


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def _is_amount(value: Any) -> bool:
    """A number that can be added up: 0 or more, not NaN, not infinite, not a truth value."""
    known = isinstance(value, int | float) and not isinstance(value, bool)
    return known and 0 <= value < 2**63


def _is_share(value: Any) -> bool:
    return _is_amount(value) and value <= 1


def _is_list(allowed: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and bool(value) and all(map(allowed, value))
