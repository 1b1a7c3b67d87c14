"""`asfp bench`: settings from options, a progress bar, a table or a JSON object."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from asfp.bench import Setting, bench, engines_present


def bench_sources(
    models: Sequence[str],
    engines: Sequence[str],
    batches: Sequence[int],
    *,
    device: str = "cpu",
    precision: str = "fp32",
    channels_last: bool = False,
    threads: int | None = None,
    repeats: int = 30,
    warmup: int = 5,
    size: str | None = None,
    as_json: bool = False,
) -> str:
    """What `asfp bench` prints; its progress bar is on the error stream.

    >>> json.loads(bench_sources(["resnet8"], ["torch"], [1], repeats=3, as_json=True))["rows"][0]["model"]
    'resnet8'
    """
    chosen = [engine for given in engines for engine in (engines_present(device) if given == "all" else [given])]
    settings = [
        Setting(engine, batch, device, precision, channels_last, threads)
        for engine in dict.fromkeys(chosen)
        for batch in dict.fromkeys(batches)
    ]
    columns = TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()
    console = Console(file=sys.stderr)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=1.0)
        done = bench(
            models,
            settings,
            repeats=repeats,
            warmup=warmup,
            size=size,
            progress=lambda message, share: bar.update(task, description=message, completed=share),
        )
    return json.dumps(done.to_dict()) if as_json else str(done)
