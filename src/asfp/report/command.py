"""`asfp report`: which of page, pictures, text and server was asked for, and what to say about it."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from asfp.errors import AsfpError
from asfp.report.content import gather
from asfp.report.page import check_page, write_page
from asfp.report.runs import COMPACT, Run, find_runs, read_run
from asfp.report.timings import BENCH


def report(
    paths: Sequence[Path],
    output: Path | None = None,
    *,
    text: bool = False,
    figures: Path | None = None,
    bench: bool = False,
) -> None:
    """Write the page, unless only text or figures are wanted; say what was written and what is missing."""
    page = output or (None if text or figures is not None else Path("report.html"))
    if page is not None:
        check_page(page)
    if figures is not None and figures.exists() and not figures.is_dir():
        raise AsfpError(f"--figures {figures} is a file: give a folder for the pictures")
    content = gather(paths)
    if not content.groups:
        fix = "Give run folders of `asfp train`, or their record.json"
        if any(run.config for run in content.runs):
            fix = "Wait for it, or follow it with --live"
        raise AsfpError(f"there is nothing to show: {'; '.join(map(str, content.notices))}. {fix}")
    if bench:
        for path in find_runs(paths):
            time_run(read_run(path))
        content = gather(paths)
    if text:
        from rich.console import Console

        from asfp.report.text import as_text

        width = None if sys.stdout.isatty() else max(100, shutil.get_terminal_size((140, 24)).columns)
        Console(width=width).print(as_text(content))
    if figures is not None:
        from asfp.report.still import write_figures

        print(f"{len(write_figures(content, figures))} files in {figures}")
    if page is not None:
        size = write_page(content, page)
        print(f"{page} ({size / 2**20:.1f} MB, opens offline)")
    if not text:
        for notice in content.notices:
            print(f"Note: {notice}", file=sys.stderr)


def time_run(run: Run, repeats: int = 30) -> None:
    """Time a run's compact model beside its dense one on every engine present, and keep it in the run's folder."""
    from asfp.artifact import load
    from asfp.bench import Setting, bench_models, engines_present
    from asfp.report.layers import dense_model

    if run.method == "none":
        return  # it is what the others are timed beside
    if not run.path.is_dir() or COMPACT not in run.sizes:
        print(f"Note: {run.path}: there is no {COMPACT} to time", file=sys.stderr)
        return
    import torch

    dense, shape = dense_model(run)
    models = {"dense": dense.eval(), "compact": load(run.path / COMPACT)}
    settings = [Setting(engine, 1) for engine in engines_present() if engine != "compile"]
    result = bench_models(models, torch.zeros(shape), settings, repeats=repeats)
    (run.path / BENCH).write_text(json.dumps(result.to_dict(), indent=1), encoding="utf-8")
    print(f"{run.path / BENCH}: timed on {', '.join(setting.engine for setting in settings)}", file=sys.stderr)


def live(paths: Sequence[Path], host: str, port: int) -> None:
    """Serve the page until it is interrupted."""
    from asfp.report.live import Server, is_loopback

    with Server(paths, host, port) as server:
        print(f"{server.url} shows {', '.join(map(str, paths))} and updates by itself; Ctrl-C stops it", flush=True)
        if not is_loopback(host):
            print(f"Note: everyone who can reach {host} can see it", file=sys.stderr, flush=True)
        server.serve_forever()
