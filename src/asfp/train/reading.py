"""From TOML and `key=value` to typed tables, strictly: an unknown key or a wrong type is an error."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from asfp.errors import AsfpError, nearest


def read_tables(path: Path, above: tuple[Path, ...] = ()) -> dict[str, Any]:
    """The tables of a TOML file on top of those of its `base`; `above` are the files that led here.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> _ = (folder / "a.toml").write_text("epochs = 3" + chr(10) + "seed = 1")
    >>> _ = (folder / "b.toml").write_text('base = "a.toml"' + chr(10) + "seed = 2")
    >>> read_tables(folder / "b.toml")
    {'epochs': 3, 'seed': 2}
    """
    if path.resolve() in above:
        raise AsfpError(f"{path} is its own base: remove one of the `base` lines")
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        near = nearest(path.name, (p.name for p in path.parent.glob("*.toml"))) if path.parent.is_dir() else ""
        raise AsfpError(f"there is no recipe {path}.{near} Recipes are TOML files, e.g. under recipes/") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, IsADirectoryError) as error:
        raise AsfpError(f"{path} is not a TOML file: {error}") from error
    base = tables.pop("base", None)
    if base is None:
        return tables
    if not isinstance(base, str):
        raise AsfpError(f"base={base!r} in {path}: it must be the path of another recipe")
    return merge(read_tables(path.parent / base, (*above, path.resolve())), tables)


def merge(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """`above` laid over `below`, table by table.

    >>> merge({"a": {"x": 1, "y": 2}}, {"a": {"y": 3}})
    {'a': {'x': 1, 'y': 3}}
    """
    result = dict(below)
    for key, value in above.items():
        both = isinstance(value, Mapping) and isinstance(result.get(key), Mapping)
        result[key] = merge(result[key], value) if both else value
    return result


def parse_override(text: str) -> dict[str, Any]:
    """The tables that `key=value` stands for; the value is TOML, or a string without its quotes.

    >>> parse_override("pruning.rate=0.4"), parse_override("model.name=resnet20")
    ({'pruning': {'rate': 0.4}}, {'model': {'name': 'resnet20'}})
    """
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise AsfpError(f"{text!r} is not an override: write key=value, e.g. pruning.rate=0.4")
    try:
        parsed: Any = tomllib.loads(f"x = {value}")["x"]
    except tomllib.TOMLDecodeError:
        parsed = value  # a string without its quotes
    for part in reversed(key.strip().split(".")):
        parsed = {part: parsed}
    return dict(parsed)


def build(kind: Any, tables: Mapping[str, Any], prefix: str = "") -> Any:
    """The dataclass `kind` from tables, each value checked against its type; `prefix` is the name in errors.

    >>> from asfp.train.config import PruningConfig
    >>> build(PruningConfig, {"rate": 0.25}).rate
    0.25
    """
    known = {f.name: f for f in fields(kind)}
    types = _types(kind)
    for key in tables:
        if key not in known:
            close = nearest(key, known, n=1)
            raise AsfpError(f"{prefix}{key} is no setting.{close} Known: {', '.join(prefix + name for name in known)}")
    values = {key: _value(types[key], value, f"{prefix}{key}") for key, value in tables.items()}
    return kind(**values)


@cache
def _types(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


def _value(kind: Any, value: Any, key: str) -> Any:
    if is_dataclass(kind):
        if not isinstance(value, Mapping):
            raise AsfpError(
                f"{key}={value!r}: {key} is a table, set its entries, e.g. {key}.{fields(kind)[0].name}=..."
            )
        return build(kind, value, f"{key}.")
    if get_origin(kind) is tuple and isinstance(value, list | tuple):
        return tuple(_value(get_args(kind)[0], item, key) for item in value)
    if get_origin(kind) is dict and isinstance(value, Mapping):
        inner = get_args(kind)[1]
        return {str(k): v if inner is Any else _value(inner, v, f"{key}.{k}") for k, v in value.items()}
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if isinstance(kind, type) and isinstance(value, kind) and (kind is bool or not isinstance(value, bool)):
        return value
    name = getattr(kind, "__name__", str(kind))
    raise AsfpError(f"{key}={value!r} is a {type(value).__name__}: it must be {_article(name)}")


def _article(name: str) -> str:
    words = {"tuple": "a list", "dict": "a table", "str": "a string", "int": "a whole number", "float": "a number"}
    return words.get(name, f"a {name}")
