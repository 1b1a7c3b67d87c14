"""Values out of files that anyone may have written: numbers that are numbers, or None."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

Column = list[float | None]


def number(value: object) -> float | None:
    """A finite number as a float, else None.

    >>> number(3), number("3"), number(float("nan")), number(True)
    (3.0, None, None, None)
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:
        return None


def integer(value: object) -> int | None:
    """A whole number as an int, else None.

    >>> integer(3.0), integer(2.5), integer(None)
    (3, None, None)
    """
    found = number(value)
    return int(found) if found is not None and found == int(found) else None


def cell(value: object) -> float | None:
    """A number of a column, with the six digits that are worth drawing.

    >>> cell(0.123456789), cell("x")
    (0.123457, None)
    """
    found = number(value)
    return None if found is None else float(f"{found:.6g}")


def dig(value: object, *keys: str) -> Any:
    """The entry under nested keys, or None where the way there is blocked.

    >>> dig({"a": {"b": 1}}, "a", "b"), dig({"a": 1}, "a", "b"), dig(None, "a")
    (1, None, None)
    """
    for key in keys:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def plain(value: object) -> dict[str, Any]:
    """A table of numbers, words, lists and tables of such; {} for anything else, words in place of the rest.

    >>> plain({"a": {"b": (1, None)}}), plain([1])
    ({'a': {'b': [1, 'None']}}, {})
    """
    return _plain(value) if isinstance(value, Mapping) else {}


def _plain(value: object, depth: int = 6) -> Any:
    if isinstance(value, Mapping) and depth:
        return {str(key): _plain(item, depth - 1) for key, item in value.items()}
    if isinstance(value, list | tuple) and depth:
        return [_plain(item, depth - 1) for item in value]
    return value if isinstance(value, bool | int | float | str) else str(value)


def mean_and_deviation(values: Sequence[float]) -> tuple[float, float]:
    """The mean, and the sample standard deviation (0 for one value).

    >>> mean_and_deviation([1.0, 2.0, 3.0])
    (2.0, 1.0)
    """
    mean = sum(values) / len(values)
    if len(values) == 1:
        return mean, 0.0
    return mean, math.sqrt(sum((x - mean) ** 2 for x in values) / (len(values) - 1))


def flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested tables as one, with dotted keys.

    >>> flat({"a": 1, "b": {"c": 2, "d": {}}})
    {'a': 1, 'b.c': 2, 'b.d': {}}
    """
    result: dict[str, Any] = {}
    for key, value in table.items():
        if isinstance(value, Mapping) and value:
            result |= flat(value, f"{prefix}{key}.")
        else:
            result[f"{prefix}{key}"] = value
    return result
