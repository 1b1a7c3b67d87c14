"""The demo as a user sees it: progress, a table, a picture, a record, and what to run next."""

from __future__ import annotations

import json
import platform
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from asfp.data import digits
from asfp.demo.compaction import report, shrink
from asfp.demo.latency import latency_lines, time_engines
from asfp.demo.training import IMAGE_SIZE, METHODS, MODEL, DemoResult, DemoSettings, EpochRecord, train_method
from asfp.errors import AsfpError
from asfp.version import __version__

LEGEND = (
    "before, after  test accuracy around the last pruning\n"
    "regrown        share of the zeroed filters that are not zero one epoch later: mean, last\n"
)


def run_demo(
    settings: DemoSettings, console: Console | None = None, engines: Sequence[str] | None = None
) -> DemoResult:
    """Train dense, SFP and ASFP on the digits; show a table; compact ASFP's network; write all into `settings.output`.

    The record is written after each method, so an interrupted run keeps those that were finished. At the end both
    networks are timed on `engines`, by default on all that are installed.

    >>> import io, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     settings = DemoSettings(epochs=1, output=Path(folder))
    ...     result = run_demo(settings, Console(file=io.StringIO()), engines=["torch"])
    ...     sorted(p.name for p in Path(folder).iterdir())
    ['compact.safetensors', 'demo.json', 'demo.png']
    >>> [m.method for m in result.methods]
    ['dense', 'SFP', 'ASFP']
    """
    console = console or Console()
    _prepare_folder(settings.output)
    result = DemoResult(settings, (), record=settings.output / "demo.json", picture=settings.output / "demo.png")
    console.print(
        f"[bold]asfp {__version__}[/bold]: {MODEL}, dense, with SFP and with ASFP; "
        f"{settings.epochs} epochs each, {settings.rate:.0%} pruned"
    )
    data = digits(IMAGE_SIZE, seed=settings.seed)
    console.print(f"{len(data.train_labels)} handwritten digits to train on, {len(data.test_labels)} others to test on")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # for so small a network a second thread gains little, and on a busy machine it costs much
    try:
        with _progress(console) as progress:
            bars = {method: _bar(progress, method, settings.epochs) for method in METHODS}
            for method, bar in bars.items():
                progress.start_task(bar)
                model, trained = train_method(method, settings, data, partial(_advance, progress, bar))
                progress.stop_task(bar)
                result = replace(result, methods=(*result.methods, trained))
                _write_record(result)
    except KeyboardInterrupt:
        if result.methods:
            done = ", ".join(m.method for m in result.methods)
            console.print(f"Finished and kept in {result.record}: {done}")
        raise
    finally:
        torch.set_num_threads(threads)
    from asfp.demo.figure import draw

    draw(result)
    console.print(results_table(result))
    console.print(LEGEND, highlight=False)
    compact, compacted, plan, found = shrink(result.methods[-1].method, model, data, settings.output)
    result = replace(result, compact=compacted)
    _write_record(result)
    console.print(report(compacted, plan, found), soft_wrap=True, highlight=False)
    console.print(latency_lines(time_engines(model, compact, data.test_images[:1], engines)), highlight=False)
    console.print(_next_steps(result), soft_wrap=True, highlight=False)
    return result


def results_table(result: DemoResult) -> Table:
    """One row a method: accuracy in front of and after the last pruning, regrown share, zeroed filters, seconds."""
    table = Table()
    table.add_column("method")
    for heading in ("before", "after", "regrown"):
        table.add_column(heading, justify="right")
    table.add_column("zeroed", justify="right")
    table.add_column("seconds", justify="right")
    for m in result.methods:
        pruned = m.zeroed > 0
        table.add_row(
            m.method,
            f"{m.before:.1%}",
            f"[bold]{m.after:.1%}[/bold]",
            f"{m.regrown:.0%}, {m.epochs[-1].regrown:.0%}" if pruned else "-",
            f"{m.zeroed} of {m.filters} filters" if pruned else "-",
            f"{m.seconds:.0f}",
        )
    return table


def _next_steps(result: DemoResult) -> str:
    rate, epochs = result.settings.rate, result.settings.epochs
    return (
        f"\npicture        {result.picture}\n"
        f"record         {result.record}\n\n"
        f"Next, try a harder goal:\n    {_command()} demo --rate {min(0.9, rate + 0.2):.1f}\n"
        "or prune your own network, in your own training loop:\n"
        f"    pruner = asfp.SoftPruner(model, rate={rate}, epochs={epochs})  # once\n"
        "    pruner.step(epoch)  # after each epoch, counted from 1"
    )


def _command() -> str:
    """What the user types to run asfp: its name when the shell finds it, otherwise this Python with -m."""
    if shutil.which("asfp"):
        return "asfp"
    python = Path(sys.executable)
    return f"{python.relative_to(Path.cwd()) if python.is_relative_to(Path.cwd()) else python} -m asfp"


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description:<5}"),
        BarColumn(bar_width=30),
        MofNCompleteColumn(),
        TextColumn("{task.fields[status]}"),
        TimeElapsedColumn(),
        console=console,
    )


def _bar(progress: Progress, method: str, epochs: int) -> TaskID:
    return progress.add_task(method, total=epochs, start=False, status="")


def _advance(progress: Progress, bar: TaskID, record: EpochRecord) -> None:
    pruned = f", {record.rate:4.0%} pruned: {record.after:6.1%}" if record.rate > 0 else ""
    progress.update(bar, advance=1, status=f"accuracy {record.before:6.1%}{pruned}")


def _prepare_folder(folder: Path) -> None:
    """Make the folder and prove that a file can be written into it, before any time is spent on training."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise AsfpError(
            f"output={str(folder)!r} cannot be written to ({error.strerror}): "
            "choose a folder of your own, e.g. --output /tmp/demo"
        ) from error


def _write_record(result: DemoResult) -> None:
    """The result as JSON, with what it was made with; replaced as a whole, so that a reader never sees half of it."""
    made_with = {
        "asfp": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "threads": torch.get_num_threads(),
    }
    content = asdict(result) | {"made_with": made_with, "model": MODEL}
    unfinished = result.record.with_suffix(".json.part")
    unfinished.write_text(json.dumps(content, indent=1, default=str) + "\n", encoding="utf-8")
    unfinished.replace(result.record)
