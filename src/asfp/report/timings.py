"""Latencies of a run: what `asfp bench --json` or `asfp report --bench` wrote into its folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asfp.errors import AsfpError
from asfp.report.values import number

BENCH = "bench.json"


@dataclass(frozen=True)
class Timing:
    """One model on one engine, of `asfp bench`; what it saves is against the first model under the same setting."""

    model: str
    engine: str
    setting: str
    latency_ms: float
    saved_percent: float | None = None
    interval: tuple[float, float] | None = None
    doubt: str = ""


def read_timings(path: Path) -> tuple[Timing, ...]:
    """The rows of `asfp bench --json` in a file.

    >>> import tempfile
    >>> file = Path(tempfile.mkdtemp()) / BENCH
    >>> row = {"model": "a", "engine": "torch", "batch": 1, "device": "cpu", "precision": "fp32", "latency_ms": 2.0}
    >>> _ = file.write_text(json.dumps({"rows": [row]}))
    >>> read_timings(file)[0].setting
    'torch, cpu, batch 1, fp32'
    """
    if not path.is_file():
        return ()
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
        return tuple(timing for row in rows if (timing := _timing(row)) is not None)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise AsfpError(f"{path} is not from `asfp bench --json` ({error}); latencies are not shown") from error


def _timing(row: Mapping[str, Any]) -> Timing | None:
    latency = number(row["latency_ms"])
    if latency is None:
        return None
    low_high = [number(x) for x in row.get("time_saved_interval") or ()]
    interval = (low_high[0], low_high[1]) if len(low_high) == 2 and None not in low_high else None
    setting = f"{row['engine']}, {row.get('device')}, batch {row.get('batch')}, {row.get('precision')}"
    if row.get("threads"):
        setting += f", {row['threads']} threads"
    saved = number(row.get("time_saved_percent"))
    doubt = str(row.get("doubt") or "")
    return Timing(str(row["model"]), str(row["engine"]), setting, latency, saved, interval, doubt)  # type: ignore[arg-type]
